"""What does a plain pytree of parameters look like as a `Model`?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from shardlib.annotation.exact import op_by_op
from shardlib.annotation.model import Model, PureLoss, Tree, path_text
from shardlib.annotation.names import fitted
from shardlib.annotation.result import loss_and_metrics
from shardlib.errors import AnnotationError, raise_all


@dataclass(frozen=True, kw_only=True)
class TreeInit:
    """An initialiser and the names of what it makes; made by `tree`."""

    initialise: Callable[[jax.Array], Tree]
    axes: Tree = None


def tree(initialise: Callable[[jax.Array], Tree], axes: Tree = None) -> TreeInit:
    """Describes a model that is a plain pytree.

    Args:
        initialise: PRNG key -> params.
        axes: pytree like the params with a tuple of logical axes, or None, for each array; None alone names nothing.

    Raises:
        AnnotationError: `initialise` is not callable.
    """
    if not callable(initialise):
        raise AnnotationError(f"shardlib.tree needs a function key -> params, found {type(initialise).__name__}")
    return TreeInit(initialise=initialise, axes=axes)


def from_tree(described: TreeInit) -> Model:
    """Reads a plain pytree model.

    Raises:
        AnnotationError: the initialiser fails, makes no arrays or integer ones, or the names do not fit.
    """
    name = getattr(described.initialise, "__name__", "tree")

    def init(seed: Any) -> tuple[Tree, Tree]:
        return described.initialise(jax.random.key(seed)), {}

    try:
        params = jax.eval_shape(lambda: described.initialise(jax.random.key(0)))
    except Exception as error:
        raise AnnotationError(f"initialiser {name!r} failed when called with jax.random.key(0): {type(error).__name__}: {error}") from error
    _check_trainable(params, name)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    written = dict(zip((path for path, _ in leaves), _written(params, described.axes), strict=True))
    axes, findings = fitted(written, {path: leaf.shape for path, leaf in leaves}, stacks=False)
    return Model(name=name, init=op_by_op(init), params=params, state={}, axes=axes, bind=_bind, rebuild=lambda params, state: params, findings=findings)


def _check_trainable(params: Tree, name: str) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise AnnotationError(f"initialiser {name!r} made no arrays")
    fixed = [f"{path_text(path)} has dtype {leaf.dtype}" for path, leaf in leaves if not jax.dtypes.issubdtype(leaf.dtype, jax.numpy.inexact)]
    if fixed:
        raise_all(AnnotationError, f"initialiser {name!r} made arrays that cannot be trained", fixed, hint="keep constants out of the params")


def _written(params: Tree, axes: Tree) -> list[Any]:
    structure = jax.tree.structure(params)
    if axes is None:
        return [None] * structure.num_leaves
    try:
        return structure.flatten_up_to(axes)
    except (ValueError, TypeError) as error:
        raise AnnotationError(f"axes do not have the tree structure of the params: {error}\n"
                              "Try: one tuple of names, or None, in the place of each array") from error


def _bind(loss: Callable[..., Any]) -> PureLoss:
    def pure(params: Tree, state: Tree, batch: Tree) -> Any:
        value, metrics = loss_and_metrics(loss(params, batch))
        return value, (metrics, state)

    return pure
