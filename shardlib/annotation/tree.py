"""What does a plain pytree of parameters look like as a `Model`?"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from shardlib.annotation.keys import key_of
from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.names import fitted
from shardlib.annotation.result import loss_and_metrics
from shardlib.annotation.stateful import Pair, bound
from shardlib.annotation.trees.exact import op_by_op
from shardlib.annotation.trees.parts import Parts, is_array, is_plain, made_abstractly
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.annotation.trees.wrt import Filter, frozen_leaves
from shardlib.axes import LogicalAxes
from shardlib.errors import AnnotationError, raise_all
from shardlib.jax_types import Index
from shardlib.report import Finding

#: Arrays that an error names.
NAMED = 12


@dataclass(frozen=True, kw_only=True)
class TreeInit:
    """An initialiser and the names of what it makes; made by `tree`."""

    initialise: Callable[[jax.Array], Tree]
    axes: Tree = None
    stateful: bool = False


def tree(
    initialise: Callable[[jax.Array], Tree], axes: Tree = None, *, stateful: bool = False
) -> TreeInit:
    """Describes a model that is a plain pytree, or a module that is one, as those of Equinox are.

        shardlib.tree(
            lambda key: eqx.nn.MLP(64, 8, 256, 2, key=key), {"layers.0.weight": ("mlp", "embed")}
        )

    Leaves that are no arrays (activation functions, flags) stay as the initialiser makes them, and
    the loss gets the whole module; of a tree that has such leaves, floating-point arrays alone are
    trained (`shardlib.annotation.trees.parts`).

    A model with state, as `hk.transform_with_state` and `eqx.nn.make_with_state` make it:

        model = hk.transform_with_state(forward)

        def loss(pair, batch):
            params, state = pair
            logits, state = model.apply(params, state, None, batch["x"])
            return cross_entropy(logits, batch["y"]), state

        shardlib.tree(lambda key: model.init(key, batch["x"]), stateful=True)

    Args:
        initialise: PRNG key -> params, or a module; with `stateful`, a pair (params, state).
        axes: pytree like the params with a tuple of logical axes, or None, for each array; or these
            by dotted path, for as many arrays as have names; None alone names nothing. With
            `stateful`, of the params.
        stateful: whether the initialiser makes a pair (params, state). The loss gets this pair, and
            returns `(loss, state)` or `(loss, metrics, state)` with the state of the next step.

    Returns:
        The description, for `init` of `shardlib.plan`, `compile` and the like; nothing is
        initialised yet.

    Raises:
        AnnotationError: `initialise` is not callable.
    """
    if not callable(initialise):
        raise AnnotationError(
            f"shardlib.tree needs a function key -> params, found {type(initialise).__name__}"
        )
    return TreeInit(initialise=initialise, axes=axes, stateful=stateful)


def from_tree(described: TreeInit, wrt: Filter = None) -> Model:
    """Reads a plain pytree model.

    Args:
        described: the initialiser and its names.
        wrt: predicate over paths that says which arrays are trained; None for all.

    Raises:
        AnnotationError: the initialiser fails, makes no arrays or integer ones that would be
            trained, the names do not fit, or the predicate does not.
    """
    name = getattr(described.initialise, "__name__", "tree")

    try:
        made = made_abstractly(described.initialise)
    except Exception as error:
        raise AnnotationError(
            f"initialiser {name!r} failed when called with jax.random.key(0):"
            f" {type(error).__name__}: {error}"
        ) from error
    if described.stateful:
        return _stateful(described, made, name, wrt)
    if not is_plain(jax.tree.leaves(made)):
        return _module(described, made, name, wrt)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return described.initialise(key_of(seed)), {}

    params = (
        jax.eval_shape(lambda: made) if not jax.tree.leaves(made) else jax.tree.map(_abstract, made)
    )
    _check_trainable(params, name, every=wrt is None)
    axes, findings = _named(params, _written(params, described.axes))
    return Model(
        name=name,
        init=op_by_op(init),
        params=params,
        state={},
        axes=axes,
        bind=_binding(lambda params, state: params),
        rebuild=lambda params, state: params,
        findings=findings,
        frozen=frozen_leaves(wrt, params, "pytree"),
    )


def _module(described: TreeInit, made: Tree, name: str, wrt: Filter) -> Model:
    """The model of a tree with leaves that are no arrays."""
    parts = Parts.of(made)
    params, state = parts.split(made)
    if not parts.trained:
        raise AnnotationError(
            f"initialiser {name!r} made no floating-point arrays, of {len(parts.paths)} leaves"
        )

    def init(seed: Index) -> tuple[Tree, Tree]:
        return parts.split(described.initialise(key_of(seed)))

    axes, findings = _named(params, _of_module(parts, params, described.axes))
    return Model(
        name=name,
        init=op_by_op(init),
        params=params,
        state=state,
        axes=axes,
        bind=_binding(parts.whole),
        rebuild=parts.whole,
        findings=(*findings, *parts.findings),
        frozen=frozen_leaves(wrt, params, "pytree"),
    )


def _stateful(described: TreeInit, made: Tree, name: str, wrt: Filter) -> Model:
    """The model of a pair (params, state)."""
    pair = Pair.of(made, name)
    params, state = pair.split(made)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return pair.split(described.initialise(key_of(seed)))

    axes, findings = _named(params, _of_module(pair.model, params, described.axes))
    return Model(
        name=name,
        init=op_by_op(init),
        params=params,
        state=state,
        axes=axes,
        bind=bound(pair),
        rebuild=pair.whole,
        findings=(*findings, *pair.model.findings),
        frozen=frozen_leaves(wrt, params, "pytree"),
    )


def _of_module(parts: Parts, params: Tree, axes: Tree) -> list[Any]:
    """What is written for every trained array: by path, in a tree like the whole module, or in one
    like its arrays.
    """
    paths = [parts.paths[at] for at in parts.trained]
    if isinstance(axes, Mapping) and axes.keys() <= set(paths):
        return [axes.get(path) for path in paths]
    if axes is None:
        return _written(params, axes)
    try:
        every = parts.structure.flatten_up_to(axes)
    except (ValueError, TypeError):
        return _written(params, axes)
    return [every[at] for at in parts.trained]


def _named(params: Tree, given: list[Any]) -> tuple[Mapping[str, LogicalAxes], tuple[Finding, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return fitted(
        dict(zip((path for path, _ in leaves), given, strict=True)),
        {path: leaf.shape for path, leaf in leaves},
        stacks=False,
    )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if is_array(leaf)
        else jax.eval_shape(lambda: jnp.asarray(leaf))
    )


def _check_trainable(params: Tree, name: str, *, every: bool) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise AnnotationError(f"initialiser {name!r} made no arrays")
    fixed = [
        f"{path_text(path)} has dtype {leaf.dtype}"
        for path, leaf in leaves
        if not jax.dtypes.issubdtype(leaf.dtype, jax.numpy.inexact)
    ]
    if fixed and every:
        raise_all(
            AnnotationError,
            f"initialiser {name!r} made arrays that cannot be trained",
            fixed,
            hint="keep constants out of the params (functions may close over them), or say what is"
            " trained with wrt",
        )


def _written(params: Tree, axes: Tree) -> list[Any]:
    structure, paths = (
        jax.tree.structure(params),
        [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)],
    )
    if axes is None:
        return [None] * structure.num_leaves
    if isinstance(axes, Mapping) and axes.keys() <= set(paths):
        return [axes.get(path) for path in paths]
    try:
        return structure.flatten_up_to(axes)
    except (ValueError, TypeError) as error:
        if isinstance(axes, Mapping) and all(map(_are_names, axes.values())):
            _unknown(axes, paths)
        raise AnnotationError(
            f"axes do not have the tree structure of the params: {error}\nTry: one tuple of names,"
            " or None, in the place of each array; or names by dotted path, of as many arrays as"
            " you like"
        ) from error


def _are_names(value: Any) -> bool:
    return value is None or (
        isinstance(value, tuple) and all(name is None or isinstance(name, str) for name in value)
    )


def _unknown(axes: Mapping[Any, Any], paths: list[str]) -> NoReturn:
    """Refuses names by path of arrays that are not there."""
    near = {key: difflib.get_close_matches(str(key), paths, 1) for key in axes if key not in paths}
    raise_all(
        AnnotationError,
        "axes name arrays that the params do not have",
        [
            f"{key!r}{f'; did you mean {found[0]!r}?' if found else ''}"
            for key, found in near.items()
        ],
        hint=(
            "names by dotted path: arrays are"
            f" {', '.join(paths[:NAMED])}"
            f"{f' and {len(paths) - NAMED} more' if len(paths) > NAMED else ''}"
        ),
    )


def _binding(rebuild: Callable[[Tree, Tree], Tree]) -> Callable[[Callable[..., Tree]], PureLoss]:
    def bind(loss: Callable[..., Tree]) -> PureLoss:
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            value, metrics = loss_and_metrics(loss(rebuild(params, state), batch))
            return value, (metrics, state)

        return pure

    return bind
