"""How a loss depends on the rows of its batch, by tracing it again for another number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from shardlib.annotation.model import Model
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ArgumentError
from shardlib.graph.rows import Dependence, Rows
from shardlib.tracing.batch import Described
from shardlib.tracing.parameters import named
from shardlib.tracing.rows.proof import Inputs, Names, prove, prove_parts


def proven_rows(
    model: Model,
    loss: Callable[..., Tree],
    shapes: tuple[Tree, Tree, Tree],
    closed: jex.ClosedJaxpr,
    out_shape: Tree,
    described: Sequence[Described],
    rows: str,
) -> Callable[[int], Rows]:
    """How the loss depends on the rows of the batch: for a number of microbatches, by the trace of
    one of them, and for 1, by that of another batch.
    """
    if rows not in ("prove", "mean"):
        raise ArgumentError(
            f"rows is {rows!r} and neither 'prove' nor 'mean'\nTry: 'prove', or 'mean' for a loss"
            " that is the mean over the rows of a batch, which then is not checked"
        )
    dims, sizes = rows_of(described)
    if rows == "mean" or len(sizes) == 0:
        return lambda _: Rows(loss=Dependence(kind="mean"), asserted=True)
    if len(sizes) > 1:
        return lambda _: Rows(
            loss=Dependence(
                kind="coupled",
                why=(
                    "arrays of the batch have different numbers of rows,"
                    f" {', '.join(map(str, sizes))}"
                ),
            )
        )
    (size,), (params, state, batch) = sizes, shapes
    inputs, names = (
        Inputs(
            parameters=len(jax.tree.leaves(params)), states=len(jax.tree.leaves(state)), dims=dims
        ),
        result_names(out_shape),
    )

    def at(number: int) -> Any:
        return jax.make_jaxpr(model.bind(loss))(params, state, with_rows(batch, dims, number))

    return lambda parts: (
        prove(closed, at, inputs, names, size).rows
        if parts == 1
        else prove_parts(closed, at, inputs, names, size, parts)
    )


def rows_of(described: Sequence[Described]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """For each array of a described batch its dim of rows, None where it has none; and the numbers
    of rows that there are.
    """
    dims = tuple(axes.index("batch") if "batch" in axes else None for _, _, _, axes in described)
    return dims, tuple(
        sorted(
            {
                shape[dim]
                for dim, (_, shape, _, _) in zip(dims, described, strict=True)
                if dim is not None
            }
        )
    )


def result_names(out_shape: Tree) -> Names:
    """What the results of a loss are called, for (loss, (metrics, state))."""
    _, (metrics, state) = out_shape
    return Names(
        metrics=tuple(path for path, _ in named(metrics, "")),
        states=tuple(path for path, _ in named(state, "")),
    )


def with_rows(batch: Tree, dims: Sequence[int | None], number: int) -> Tree:
    """A batch with another number of rows.

    Args:
        dims: dim of the rows in each leaf; None where it has none.
    """
    leaves, structure = jax.tree.flatten(batch)

    def sized(leaf: Any, dim: int | None) -> Any:
        return (
            leaf
            if dim is None
            else jax.ShapeDtypeStruct(
                (*leaf.shape[:dim], number, *leaf.shape[dim + 1 :]), leaf.dtype
            )
        )

    return structure.unflatten([sized(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)])
