"""A plain pytree of parameters as a `Model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib import _jax_compat
from shardlib.annotation.flax import LinenInit, Pair, bound, from_linen, from_nnx
from shardlib.annotation.names import (
    Free,
    Model,
    PureLoss,
    as_it_is,
    fitted,
    key_of,
    loss_and_metrics,
    names_of_leaves,
    written,
)
from shardlib.annotation.trees import (
    Filter,
    SplitTree,
    Tree,
    frozen_leaves,
    is_array,
    op_by_op,
    path_text,
)
from shardlib.errors import AnnotationError, raise_all
from shardlib.findings import Finding
from shardlib.jax_types import Index
from shardlib.layout import INNER_AXES, LogicalAxes


@dataclass(frozen=True, kw_only=True)
class TreeInit:
    """An initialiser and the names of its arrays; made by `tree`."""

    initialise: Callable[[jax.Array], Tree]
    axes: Tree = None
    stateful: bool = False


def tree(
    initialise: Callable[[jax.Array], Tree], axes: Tree = None, *, stateful: bool = False
) -> TreeInit:
    """Describes a model that is a plain pytree, or a module that is a pytree, like those of
    Equinox.

        shardlib.tree(
            lambda key: eqx.nn.MLP(64, 8, 256, 2, key=key), {"layers.0.weight": ("mlp", "embed")}
        )

    Leaves that are not arrays (activation functions, flags) stay as the initialiser makes them, and
    the loss takes the whole module; in a tree with such leaves, only floating-point arrays are
    trained (`shardlib.annotation.trees`).

    A model with state, as made by `hk.transform_with_state` and `eqx.nn.make_with_state`:

        model = hk.transform_with_state(forward)

        def loss(pair, batch):
            params, state = pair
            logits, state = model.apply(params, state, None, batch["x"])
            return cross_entropy(logits, batch["y"]), state

        shardlib.tree(lambda key: model.init(key, batch["x"]), stateful=True)

    Args:
        initialise: PRNG key -> params, or a module; with `stateful`, a pair (params, state).
        axes: tuples of logical axes, or `PartitionSpec`s, for some of the arrays: a pytree like the
            params, or a mapping from dotted paths. Names in boxes and variables of Flax are read,
            too. With `stateful`, only for the params.
        stateful: whether the initialiser makes a pair (params, state). The loss takes this pair,
            and returns `(loss, state)` or `(loss, metrics, state)` with the state of the next step.

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
        wrt: predicate over paths that selects the trained arrays; None for all.
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
    shapes = tree = initialised
    if described.stateful:
        pair = Pair.of(initialised, name)
        tree, parts, binding, more = initialised[0], pair, bound(pair), pair.model.findings
    elif not is_plain(jax.tree.leaves(initialised)):
        parts = SplitTree.of(initialised)
        binding, more = _binding(parts.whole), parts.findings
        if not parts.trained:
            raise AnnotationError(
                f"initialiser {name!r} made no floating-point arrays, of {len(parts.paths)} leaves"
            )
    else:
        shapes = tree = (
            jax.eval_shape(lambda: initialised)
            if not jax.tree.leaves(initialised)
            else jax.tree.map(_abstract, initialised)
        )
        _check_trainable(tree, name, all_trained=wrt is None)
        parts, binding, more = _Whole(), _binding(_Whole().whole), ()
    params, state = parts.split(shapes)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return parts.split(described.initialise(key_of(seed)))

    axes, findings = _named(params, tree, described.axes)
    return Model(
        name=name,
        init=op_by_op(init),
        params=params,
        state=state,
        axes=axes,
        bind=binding,
        rebuild=parts.whole,
        findings=(*findings, *more),
        frozen=frozen_leaves(wrt, params, "pytree"),
    )


class _Whole:
    """A tree of arrays, all of which are parameters."""

    def split(self, tree: Tree) -> tuple[Tree, Tree]:
        """The parameters, and an empty state."""
        return tree, {}

    def whole(self, params: Tree, state: Tree) -> Tree:
        """The tree, which has no other leaves."""
        return params


def _named(
    params: Tree, tree: Tree, axes: Tree
) -> tuple[Mapping[str, LogicalAxes], tuple[Finding, ...]]:
    """The names of the trained arrays: from `axes`, or from boxes and variables of the whole
    tree.
    """
    pairs = zip(names_of_leaves(tree, axes, "params"), written(tree), strict=True)
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


# --------------------------------------------------------------------------------------------------
# Dispatch to the front end of each kind of model.

#: A callable `nnx.Rngs -> nnx.Module`, a description by `shardlib.linen` or `shardlib.tree`, or a
#: `Model`.
Init = Callable[..., Any] | LinenInit | TreeInit | Model


def _built(init: Any) -> str | None:
    """The class name of a module passed in place of its initialiser; None for an initialiser."""
    built = (
        not isinstance(init, type)
        and not jax.tree_util.all_leaves([init])
        and any(map(is_array, jax.tree.leaves(init)))
    )
    return type(init).__name__ if built and callable(init) else None


def read(init: Init, wrt: Filter = None, *, free: Free = as_it_is) -> Model:
    """Reads a model in any form of `init` that `shardlib.compile` accepts.

    Args:
        wrt: selection of trained arrays, see `shardlib.annotation.trees`; None for all parameters.
    """
    if isinstance(init, Model):
        if wrt is not None:
            raise AnnotationError(
                "init is a model that has been read already, and what it trains with it\nTry: wrt"
                " where the model is read"
            )
        return init
    if isinstance(init, LinenInit):
        return from_linen(init, wrt, free)
    if isinstance(init, TreeInit):
        return from_tree(init, wrt, free)
    if isinstance(init, nn.Module):
        raise AnnotationError(
            f"init is the Linen module {type(init).__name__}, which needs sample inputs\nTry:"
            " shardlib.linen(module, *sample_inputs)"
        )
    if isinstance(init, nnx.Module):
        kind = type(init).__name__
        raise AnnotationError(
            f"init is a {kind} that is built already; shardlib builds it sharded from the"
            f" start\nTry: lambda rngs: {kind}(..., rngs=rngs)"
        )
    if (kind := _built(init)) is not None:
        raise AnnotationError(
            f"init is a {kind} that is built already; shardlib builds it sharded from the"
            f" start\nTry: shardlib.tree(lambda key: {kind}(..., key=key)); its functions and flags"
            " stay as they are (eqx.partition is not needed), and the loss gets the whole module"
        )
    if callable(init):
        return from_nnx(init, wrt, free)  # pyright: ignore[reportArgumentType]
    raise AnnotationError(
        f"init is a {type(init).__name__}; expected a callable nnx.Rngs -> nnx.Module, "
        "shardlib.linen(module, *sample_inputs) or shardlib.tree(key_to_params, axes)"
    )


# --------------------------------------------------------------------------------------------------
# Flax's logical constraints on activations are ignored silently if no rules are set, which is
# reported as a finding. Other layouts: `shardlib.tracing.layouts`.


def no_mesh() -> AbstractContextManager[object]:
    """Unsets any mesh that the caller has set: a plan has its own, and an outer one would leak into
    the trace.
    """
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def planning_mesh() -> AbstractContextManager[object]:
    """A mesh of one device with all six mesh axes."""
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(
            (1,) * len(INNER_AXES), INNER_AXES, axis_types=(AxisType.Auto,) * len(INNER_AXES)
        )
    )


def is_plain(leaves: Sequence[Tree]) -> bool:
    """True if all leaves are arrays or floats; then all of them are trained."""
    return all(is_array(leaf) or isinstance(leaf, float) for leaf in leaves)


def made_abstractly(initialise: Callable[[jax.Array], Tree]) -> Tree:
    """The result of an initialiser with `jax.ShapeDtypeStruct` for arrays, all other leaves
    unchanged.
    """
    seen: list[tuple[Any, list[Any]]] = []

    def arrays() -> list[Any]:
        leaves, structure = jax.tree.flatten(initialise(jax.random.key(0)))
        seen.append((structure, [None if is_array(leaf) else leaf for leaf in leaves]))
        return [leaf for leaf in leaves if is_array(leaf)]

    abstract = iter(jax.eval_shape(arrays))
    structure, leaves = seen[-1]
    return jax.tree.unflatten(
        structure, [next(abstract) if leaf is None else leaf for leaf in leaves]
    )
