"""Graphs rewritten for pricing with experts whose tokens are routed between devices, with a
capacity or without.

As written, an expert with a capacity has a slot for each token that it takes from the whole batch
(`shardlib.functions.experts`): arrays [E, C, ...] without a dim of tokens, between a gather of rows
and a gather of results. Distributed, the rows of a token stay on its device until they are
dispatched, and devices multiply the rows that they receive. The rewritten operations mean that:
slots and the queue of assignments are sharded as the batch is, and products with the weights of
experts are grouped matmuls over the rows that fit the capacity.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardlib.graph import Dims, Graph, Op, StepGraph
from shardlib.layout import LogicalAxes

#: Name scope of the operations of experts with a capacity.
CAPACITY_SCOPE = "shardlib_capacity"
#: (value, dim).
_ValueDim = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CapacityLayer:
    """A layer of experts with a capacity.

    Attributes:
        assignments: tokens times experts per token, in the whole graph.
        experts: number of experts.
        slots: slots per expert.
    """

    assignments: int
    experts: int
    slots: int

    @property
    def factor(self) -> float:
        """Capacity of an expert over the mean load."""
        return self.slots * self.experts / self.assignments

    @property
    def max_fill(self) -> float:
        """The largest share of the slots that can be full."""
        return min(1.0, 1 / self.factor)


def has_capacity(op: Op) -> bool:
    """True if an op belongs to experts with a capacity."""
    return CAPACITY_SCOPE in op.scope


def _moved_rows(graph: Graph, op: Op) -> tuple[int, int] | None:
    """(stationary rows, moving rows) of a capped gather or scatter of whole feature rows; None for
    other ops.
    """
    if not has_capacity(op) or op.category not in ("gather", "scatter"):
        return None
    moved = op.results[0] if op.category == "gather" else op.operands[-1]
    stationary, moving = graph.values[op.operands[0]], graph.values[moved]
    rows = (
        len(stationary.shape) == 2
        and len(moving.shape) in (2, 3)
        and stationary.shape[1] == moving.shape[-1]
        and "float" in moving.dtype
    )
    return (op.operands[0], moved) if rows else None


def capacity_layers(graph: Graph) -> dict[int, CapacityLayer]:
    """The layers of experts with a capacity in a graph, by region."""
    sizes: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for op in graph.ops:
        move = _moved_rows(graph, op)
        if move is not None:
            shape = graph.values[move[1]].shape
            sizes[op.region][len(shape)] = shape
    return {
        region: CapacityLayer(assignments=shapes[2][0], experts=shapes[3][0], slots=shapes[3][1])
        for region, shapes in sizes.items()
        if len(shapes) == 2
    }


def with_dispatch(
    graph: Graph, colours: tuple[LogicalAxes, ...], batch: str | None, grouped: str
) -> tuple[Graph, tuple[LogicalAxes, ...]]:
    """A graph in which tokens are dispatched to experts with a capacity, and the colours of its
    values.
    """
    capped = capacity_layers(graph)
    if not capped or batch is None:
        return graph, colours
    value_dims = _token_dims(graph)
    colours = tuple(
        tuple(batch if (value, dim) in value_dims else colour for dim, colour in enumerate(axes))
        for value, axes in enumerate(colours)
    )
    ops = tuple(
        replace(op, kind=grouped, flops=op.flops * capped[op.region].max_fill)
        if has_capacity(op) and op.category == "matmul" and op.region in capped
        else op
        for op in graph.ops
    )
    return replace(graph, ops=ops), colours


def _token_dims(graph: Graph) -> set[_ValueDim]:
    """Dims of slots and of the queue: those of moved rows, and all that share a factor with
    them.
    """
    pending = [
        value_dim
        for op in graph.ops
        if (move := _moved_rows(graph, op)) is not None
        for value_dim in _row_dims(graph, *move)
    ]
    shared: dict[_ValueDim, list[_ValueDim]] = defaultdict(list)
    for op in graph.ops:
        if has_capacity(op) or op.category == "boundary":
            for value_dims in _by_factor(graph, op).values():
                for value_dim in value_dims:
                    shared[value_dim] += value_dims
    tied: set[_ValueDim] = set()
    while pending:
        value_dim = pending.pop()
        if value_dim not in tied:
            tied.add(value_dim)
            pending += shared[value_dim]
    return tied


def _row_dims(graph: Graph, stationary: int, moving: int) -> Iterator[_ValueDim]:
    """The slots and assignments of rows moved to or from slots; rows of tokens already have their
    colour.
    """
    slots = len(graph.values[moving].shape) == 3
    yield moving, 1 if slots else 0
    if not slots:
        yield stationary, 0


def _by_factor(graph: Graph, op: Op) -> dict[int, list[_ValueDim]]:
    """The dims of an op by their factor, without those that merge several factors."""
    value_dims: dict[int, list[_ValueDim]] = defaultdict(list)

    def add(values: Sequence[int], all_dims: tuple[Dims, ...]) -> None:
        for value, dims in zip(values, all_dims, strict=True):
            for dim, factors in enumerate(dims):
                if len([factor for factor in factors if op.rule.sizes[factor] > 1]) == 1:
                    value_dims[
                        next(factor for factor in factors if op.rule.sizes[factor] > 1)
                    ].append((value, dim))

    add(op.operands, op.rule.operands)
    add(op.results, op.rule.results)
    return value_dims


def row_count(graph: Graph, value: int) -> int:
    """Rows of an array [slots..., features]."""
    return math.prod(graph.values[value].shape[:-1])


# --------------------------------------------------------------------------------------------------
# A mixture of experts with tokens routed between devices, in place of a global sort.
#
# As written, tokens are sorted by expert across the whole batch, for which an automatic partitioner
# gathers all tokens. Expert parallelism (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961;
# MegaBlocks, arXiv:2211.15841) sorts the tokens of each device locally, dispatches them to the
# devices of their experts, and combines the results: two all-to-alls per layer forward and two
# backward. The rules of the ops involved are rewritten to mean that: sorts and grouped matmuls are
# sharded along the tokens.

#: Matmuls whose rows are grouped by expert.
GROUPED: frozenset[str] = frozenset({"ragged_dot_general", "ragged_dot"})


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """The dispatch of tokens to their experts (`FrameworkProfile`).

    Attributes:
        padding: bytes of a message over those of an even routing (`exchange_room`).
        sent: rows that tensor ranks send (`exchange`).
    """

    padding: float = 1.0
    sent: str = "whole"


#: Messages of the size of an even routing.
EVEN_ROUTING = TokenExchange()


def expert_colour(graph: Graph, colours: Sequence[LogicalAxes]) -> str | None:
    """The colour of experts: that of the groups of weights in grouped matmuls, or in products of
    slots with weights; None if there are none.
    """
    candidates = (
        colours[value][0]
        for op in graph.ops
        if op.kind in GROUPED or (op.category == "matmul" and has_capacity(op))
        for value in op.operands[:2]
        if len(graph.values[value].shape) == 3
    )
    return next((name for name in candidates if name), None)


def with_local_routing(
    step: StepGraph, colours: tuple[LogicalAxes, ...], batch: str | None
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with sorts and grouped matmuls over each device's own tokens, and the colours of its
    values.
    """
    graph, colours = with_dispatch(step.graph, colours, batch, "ragged_dot_general")
    regions = {op.region for op in graph.ops if op.kind in GROUPED}
    ops = tuple(_local(op, colours, batch) if op.region in regions else op for op in graph.ops)
    return replace(step, graph=replace(graph, ops=ops)), colours


def _local(op: Op, colours: Sequence[LogicalAxes], batch: str | None) -> Op:
    """An op over each device's own tokens.

    Factors along the batch that must be whole may be sharded; if that contracts the batch, sharding
    leaves partial results. Rows that are picked from tokens, or added to tokens, are on the same
    device, so nothing is partial.
    """
    tokens = {
        factor
        for values, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results))
        for value, dims in zip(values, all_dims, strict=True)
        for dim, factors in enumerate(dims)
        if colours[value][dim] == batch
        and batch is not None
        and (factor := op.rule.major(factors)) is not None
    }
    in_results = _factors_in(op.rule.results)
    local, summed = tokens & op.rule.whole, op.rule.summed | ((tokens & op.rule.whole) - in_results)
    if op.category in ("gather", "scatter") and tokens & in_results:
        summed -= tokens
    return replace(op, rule=replace(op.rule, whole=op.rule.whole - local, summed=summed))


def _factors_in(values: tuple[Dims, ...]) -> set[int]:
    return {factor for dims in values for dim in dims for factor in dim}


def routed_values(
    graph: Graph, colours: Sequence[LogicalAxes], batch: str | None
) -> list[tuple[int, int]]:
    """(op, value) of every array of tokens that changes devices: rows that a gather dispatches or
    combines, or that a scatter adds up. These are gathers and scatters of feature rows in the
    regions that have grouped matmuls.
    """
    regions = {op.region for op in graph.ops if op.kind in GROUPED}
    moved_values: list[tuple[int, int]] = []
    for index, op in enumerate(graph.ops):
        if op.region not in regions or op.category not in ("gather", "scatter"):
            continue
        moved = op.results[0] if op.category == "gather" else op.operands[-1]
        value = graph.values[moved]
        rows = (
            colours[moved][1 if len(value.shape) == 3 and has_capacity(op) else 0]
            if len(value.shape) == 2 or has_capacity(op)
            else None
        )
        if (
            value.shape[-1] > 1
            and "float" in value.dtype
            and batch in (rows or "").split("+")
            and _moves_rows(op, graph)
        ):
            moved_values.append((index, moved))
    return moved_values


def _moves_rows(op: Op, graph: Graph) -> bool:
    """True if whole rows move, which distinguishes tokens from single scores."""
    source = graph.values[op.operands[0]].shape
    moved = graph.values[op.results[0] if op.category == "gather" else op.operands[-1]].shape
    return len(source) == 2 and source[1] == moved[-1]
