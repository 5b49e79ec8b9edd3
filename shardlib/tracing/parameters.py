"""The parameters of a traced model: their axes, and the optimizer state that belongs to each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation.model import Model
from shardlib.annotation.trees.handed_on import origins
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import LogicalAxes
from shardlib.errors import AnnotationError, raise_all
from shardlib.graph.problem import STATE, Parameter
from shardlib.jax_types import Function, Jaxpr, Leaf
from shardlib.tracing.trip_counts import dtype_name


def described_parameters(
    model: Model, optimizer: optax.GradientTransformation | None
) -> tuple[Parameter, ...]:
    """The parameters of a model for the planner, in tree order, and then the model state that a
    step updates.

    Args:
        optimizer: optax transformation, whose state is counted for each parameter; None for none.

    Returns:
        Each with path, shape, dtype, logical axes, role and bytes of optimizer state.
    """
    leaves = [(path or "params", leaf) for path, leaf in named(abstract(model.params), "")]
    roles = ["trained" if trained else "frozen" for trained in model.partition.flags]
    extra, arrays = _state_bytes(
        model,
        optimizer,
        [leaf for leaf, role in zip(leaves, roles, strict=True) if role == "trained"],
    )
    updated = [
        (path, leaf) for path, leaf in named(abstract(model.state), STATE) if trainable(leaf)
    ]
    named_axes = {
        **model.axes,
        **{f"{STATE}.{path}": axes for path, axes in model.state_axes.items()},
    }
    failures: list[str] = []
    parameters: list[Parameter] = []
    for (path, leaf), role in zip(
        [*leaves, *updated], [*roles, *["updated"] * len(updated)], strict=True
    ):
        axes: LogicalAxes = tuple(named_axes.get(path, (None,) * len(leaf.shape)))
        if len(axes) != len(leaf.shape):
            failures.append(f"{path}: {len(axes)} names {axes} for shape {tuple(leaf.shape)}")
            continue
        parameters.append(
            Parameter(
                path=path,
                shape=tuple(leaf.shape),
                dtype=dtype_name(leaf),
                axes=axes,
                state_bytes_per_element=extra.get(path, 0) / max(1, math.prod(leaf.shape)),
                state_arrays=arrays[path],
                role=role,
            )
        )
    if failures:
        raise_all(
            AnnotationError,
            "logical axes do not fit the parameters",
            failures,
            hint="give one name, or None, per dim",
        )
    return tuple(parameters)


def _state_bytes(
    model: Model,
    optimizer: optax.GradientTransformation | None,
    leaves: Sequence[tuple[str, jax.ShapeDtypeStruct]],
) -> tuple[Counter[str], Counter[str]]:
    """Bytes and number of arrays of optimizer state of a parameter's shape, per parameter: state
    leaves whose path ends with the parameter's.
    """
    total: Counter[str] = Counter()
    arrays: Counter[str] = Counter()
    if optimizer is None:
        return total, arrays
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves}
    for path, leaf in named(
        jax.eval_shape(optimizer.init, model.partition.trained(abstract(model.params))), ""
    ):
        parts = path.split(".")
        owner = next(
            (
                tail
                for i in range(len(parts))
                if shapes.get(tail := ".".join(parts[i:])) == tuple(leaf.shape)
            ),
            None,
        )
        if owner is not None:
            total[owner] += math.prod(leaf.shape) * leaf.dtype.itemsize
            arrays[owner] += 1
    return total, arrays


def trainable(leaf: Leaf) -> bool:
    """Whether a leaf could have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def named(tree: Tree, prefix: str) -> list[tuple[str, Tree]]:
    """(dotted path, leaf) in tree order; `prefix` goes before every path."""
    return [
        (".".join(filter(None, (prefix, path_text(path)))), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def named_inputs(model: Model, shapes: tuple[Tree, Tree, Tree]) -> list[tuple[str, str]]:
    """(path, role) of every input: parameters go by their own path, state and batch behind these
    words. State that is floating-point is used as frozen parameters are.
    """
    params, state, batch = shapes
    inputs = [
        (path or "params", "parameter" if trained else "frozen")
        for (path, _), trained in zip(named(params, ""), model.partition.flags, strict=True)
    ]
    inputs += [
        (path, "frozen" if trainable(leaf) else "state") for path, leaf in named(state, STATE)
    ]
    return inputs + [(path, "batch") for path, _ in named(batch, "batch")]


def abstract(tree: Tree) -> Tree:
    """Shapes and dtypes of a tree of arrays as JAX takes them, without shardings: 64-bit numbers of
    NumPy are 32 bits wide there.
    """

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        x = x if hasattr(x, "dtype") else jnp.asarray(x)
        typed_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        dtype = x.dtype if typed_key else jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(leaf, tree)


def constant_state(jaxpr: Jaxpr, shapes: tuple[Tree, Tree, Tree]) -> frozenset[str]:
    """Paths of floating-point arrays of the model state that the loss hands on as they came."""
    leaves, first = named(shapes[1], ""), len(jax.tree.leaves(shapes[0]))
    results = origins(jaxpr)
    state = enumerate(results[len(results) - len(leaves) :], first)
    return frozenset(
        path
        for (path, leaf), (number, origin) in zip(leaves, state, strict=True)
        if origin == number and trainable(leaf)
    )


def function_name(function: Function) -> str:
    return repr(getattr(function, "__qualname__", type(function).__name__))
