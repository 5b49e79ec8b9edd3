"""The loss of a microbatch as its share of the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardlib.annotation.trees.paths import Tree
from shardlib.graph.rows import RowDim, Rows
from shardlib.layout import Layout
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.random_keys import BatchDims
from shardlib.tracing.rows.proof import Inputs, Names


@dataclass(frozen=True, kw_only=True, eq=False)
class Contribution:
    """The loss of a microbatch as its contribution to that of the whole batch.

    Attributes:
        traced: the loss of a microbatch, over the leaves of (params, state, batch with what is
            handed in).
        prologue: (model state, batch) -> batch with what is handed in.
        dims: for each array of that batch, by path, its dim of rows.
        shardings: of each array of that batch.
        finish: ((loss, (metrics, state)), gradients), averaged over the microbatches -> the same
            for the whole batch.
        handed: layouts of what is handed in.
        repeated: positions of the arrays of model state with which every microbatch begins as they
            are before the step; the others go on from microbatch to microbatch.
        by_row: for each metric where it has its rows; None for one that is averaged.
    """

    traced: LossJaxpr
    prologue: Callable[[Tree, Tree], Tree]
    dims: BatchDims
    shardings: Tree
    finish: Callable[[Tree, Tree], tuple[Tree, Tree]]
    handed: tuple[Layout, ...] = ()
    repeated: frozenset[int] = frozenset()
    by_row: tuple[RowDim | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole batch's program, and what its inputs are.

    Attributes:
        traced: the loss of the whole batch.
        rows: how it depends on the rows, where that has been proven.
        inputs, names: see `shardlib.tracing.rows.proof`.
        size: number of rows.
    """

    traced: LossJaxpr
    rows: Rows
    inputs: Inputs
    names: Names
    size: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """The loss of a microbatch as it was traced.

    Attributes:
        traced: it.
        dims: for each array of the batch, by path, its dim of rows.
        shardings: of each array of the batch.
    """

    traced: LossJaxpr
    dims: BatchDims
    shardings: Tree


def as_it_is(traced: LossJaxpr, dims: BatchDims, shardings: Tree) -> Contribution:
    """A loss whose mean over microbatches is that of the whole batch."""
    return Contribution(
        traced=traced,
        prologue=lambda state, batch: batch,
        dims=dims,
        shardings=shardings,
        finish=lambda results, gradients: (results, gradients),
    )
