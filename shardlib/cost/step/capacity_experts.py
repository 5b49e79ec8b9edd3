"""What experts with a capacity compute when tokens are routed between devices.

As a model is written, an expert has a slot for every token that it takes of the whole batch
(`shardlib.functions.experts`): arrays [E, C, ...] without a dim of tokens, between a gather of rows
and a gather of results. Between devices the rows of a token stay those of its device until they are
sent, and devices multiply what they were sent. Here the operations are rewritten to that meaning,
for pricing: slots and the queue of assignments are sharded as the batch is, and products with the
matrices of experts are grouped matmuls of those rows that are kept at most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardlib.axes import LogicalAxes
from shardlib.graph import Graph, Op
from shardlib.graph.factors import Dims

#: Scope of the operations of experts with a capacity, in their names.
CAPPED = "shardlib_capacity"
#: (value, dim).
_Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Capped:
    """A layer of experts with a capacity.

    Attributes:
        assignments: tokens times experts per token, in the whole graph.
        experts: their number.
        slots: of an expert.
    """

    assignments: int
    experts: int
    slots: int

    @property
    def factor(self) -> float:
        """Load that an expert takes at most, over the mean load."""
        return self.slots * self.experts / self.assignments

    @property
    def kept(self) -> float:
        """Part of the slots that is full at most."""
        return min(1.0, 1 / self.factor)


def is_capped(op: Op) -> bool:
    """Whether an op belongs to experts with a capacity."""
    return CAPPED in op.scope


def _moves(graph: Graph, op: Op) -> tuple[int, int] | None:
    """(rows that stay, rows that go) of a capped gather or scatter of whole rows of features; None
    for others.
    """
    if not is_capped(op) or op.category not in ("gather", "scatter"):
        return None
    moved = op.results[0] if op.category == "gather" else op.operands[-1]
    stays, goes = graph.values[op.operands[0]], graph.values[moved]
    rows = (
        len(stays.shape) == 2
        and len(goes.shape) in (2, 3)
        and stays.shape[1] == goes.shape[-1]
        and "float" in goes.dtype
    )
    return (op.operands[0], moved) if rows else None


def layers(graph: Graph) -> dict[int, Capped]:
    """The layers of experts with a capacity in a graph, by region."""
    sizes: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for op in graph.ops:
        move = _moves(graph, op)
        if move is not None:
            shape = graph.values[move[1]].shape
            sizes[op.region][len(shape)] = shape
    return {
        region: Capped(assignments=shapes[2][0], experts=shapes[3][0], slots=shapes[3][1])
        for region, shapes in sizes.items()
        if len(shapes) == 2
    }


def sent(
    graph: Graph, names: tuple[LogicalAxes, ...], batch: str | None, grouped: str
) -> tuple[Graph, tuple[LogicalAxes, ...]]:
    """A graph whose experts with a capacity are sent their tokens, and the colours of its values."""
    capped = layers(graph)
    if not capped or batch is None:
        return graph, names
    places = _along_tokens(graph)
    names = tuple(
        tuple(batch if (value, dim) in places else colour for dim, colour in enumerate(axes))
        for value, axes in enumerate(names)
    )
    ops = tuple(
        (
            replace(op, kind=grouped, flops=op.flops * capped[op.region].kept)
            if is_capped(op) and op.category == "matmul" and op.region in capped
            else op
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops), names


def _along_tokens(graph: Graph) -> set[_Place]:
    """Dims of slots and of the queue: those of rows that are moved, and all that share a factor
    with them.
    """
    pending = [
        place
        for op in graph.ops
        if (move := _moves(graph, op)) is not None
        for place in _rows(graph, *move)
    ]
    shared: dict[_Place, list[_Place]] = defaultdict(list)
    for op in graph.ops:
        if is_capped(op) or op.category == "boundary":
            for places in _by_factor(graph, op).values():
                for place in places:
                    shared[place] += places
    tied: set[_Place] = set()
    while pending:
        place = pending.pop()
        if place not in tied:
            tied.add(place)
            pending += shared[place]
    return tied


def _rows(graph: Graph, stays: int, goes: int) -> Iterator[_Place]:
    """Where rows that go to slots, or come from them, have their slots and assignments; rows of
    tokens have their colour already.
    """
    slots = len(graph.values[goes].shape) == 3
    yield goes, 1 if slots else 0
    if not slots:
        yield stays, 0


def _by_factor(graph: Graph, op: Op) -> dict[int, list[_Place]]:
    """The dims of an op by their factor; those that merge several factors are left out."""
    places: dict[int, list[_Place]] = defaultdict(list)

    def note(values: Sequence[int], all_dims: tuple[Dims, ...]) -> None:
        for value, dims in zip(values, all_dims, strict=True):
            for dim, factors in enumerate(dims):
                if len([factor for factor in factors if op.rule.sizes[factor] > 1]) == 1:
                    places[next(factor for factor in factors if op.rule.sizes[factor] > 1)].append(
                        (value, dim)
                    )

    note(op.operands, op.rule.operands)
    note(op.results, op.rule.results)
    return places


def slots_of(graph: Graph, value: int) -> int:
    """Rows of an array [slots..., features]."""
    return math.prod(graph.values[value].shape[:-1])
