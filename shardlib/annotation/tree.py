"""What does a plain pytree of parameters look like as a `Model`?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardlib import _jax_compat
from shardlib.annotation.keys import key_of
from shardlib.annotation.model import Free, Model, PureLoss, as_it_is
from shardlib.annotation.names import beside, fitted, written
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
        axes: tuples of logical axes, or `PartitionSpec`s, in the places of arrays in a pytree like
            the params, or by dotted path, for as many arrays as have names; what boxes and
            variables of Flax say in the params is read, too. With `stateful`, of the params.
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


def from_tree(described: TreeInit, wrt: Filter = None, free: Free = as_it_is) -> Model:
    """Reads a plain pytree model.

    Args:
        wrt: predicate over paths that says which arrays are trained; None for all.
    """
    name = getattr(described.initialise, "__name__", "tree")
    described = replace(
        described, initialise=_jax_compat.unsharded_variables()(free(described.initialise))
    )

    try:
        initialised = made_abstractly(described.initialise)
    except Exception as error:
        raise AnnotationError(
            f"initialiser {name!r} failed when called with jax.random.key(0):"
            f" {type(error).__name__}: {error}"
        ) from error
    if described.stateful:
        return _stateful(described, initialised, name, wrt)
    if not is_plain(jax.tree.leaves(initialised)):
        return _module(described, initialised, name, wrt)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return described.initialise(key_of(seed)), {}

    params = (
        jax.eval_shape(lambda: initialised)
        if not jax.tree.leaves(initialised)
        else jax.tree.map(_abstract, initialised)
    )
    _check_trainable(params, name, all_trained=wrt is None)
    axes, findings = _named(params, params, described.axes)
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


def _module(described: TreeInit, initialised: Tree, name: str, wrt: Filter) -> Model:
    """The model of a tree with leaves that are no arrays."""
    parts = Parts.of(initialised)
    params, state = parts.split(initialised)
    if not parts.trained:
        raise AnnotationError(
            f"initialiser {name!r} made no floating-point arrays, of {len(parts.paths)} leaves"
        )

    def init(seed: Index) -> tuple[Tree, Tree]:
        return parts.split(described.initialise(key_of(seed)))

    axes, findings = _named(params, initialised, described.axes)
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


def _stateful(described: TreeInit, initialised: Tree, name: str, wrt: Filter) -> Model:
    """The model of a pair (params, state)."""
    pair = Pair.of(initialised, name)
    params, state = pair.split(initialised)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return pair.split(described.initialise(key_of(seed)))

    axes, findings = _named(params, initialised[0], described.axes)
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


def _named(
    params: Tree, tree: Tree, axes: Tree
) -> tuple[Mapping[str, LogicalAxes], tuple[Finding, ...]]:
    """The names of the trained arrays: in `axes`, or in boxes and variables of the whole tree."""
    pairs = zip(beside(tree, axes, "params"), written(tree), strict=True)
    names = dict(
        zip(
            (path for path, _ in jax.tree_util.tree_leaves_with_path(tree)),
            (
                written_name if beside_name is None else beside_name
                for beside_name, written_name in pairs
            ),
            strict=True,
        )
    )
    return fitted(params, [names[path] for path, _ in jax.tree_util.tree_leaves_with_path(params)])


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if is_array(leaf)
        else jax.eval_shape(lambda: jnp.asarray(leaf))
    )


def _check_trainable(params: Tree, name: str, *, all_trained: bool) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise AnnotationError(f"initialiser {name!r} made no arrays")
    fixed = [
        f"{path_text(path)} has dtype {leaf.dtype}"
        for path, leaf in leaves
        if not jax.dtypes.issubdtype(leaf.dtype, jax.numpy.inexact)
    ]
    if fixed and all_trained:
        raise_all(
            AnnotationError,
            f"initialiser {name!r} made arrays that cannot be trained",
            fixed,
            hint="keep constants out of the params (functions may close over them), or say what is"
            " trained with wrt",
        )


def _binding(rebuild: Callable[[Tree, Tree], Tree]) -> Callable[[Callable[..., Tree]], PureLoss]:
    def bind(loss: Callable[..., Tree]) -> PureLoss:
        @_jax_compat.unsharded_variables()
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            value, metrics = loss_and_metrics(loss(rebuild(params, state), batch))
            return value, (metrics, state)

        return pure

    return bind
