"""Where a forward pass first uses each parameter, read from its graph.

A parameter is used where an operation reads it, or what was made from parameters alone (a cast, a
transpose, tied weights), together with something else: rows, activations. What was only cast at the
top of a loss is used where it meets them. A stack of layers that a loop takes slice by slice is
used row by row, so that row 3 of every stack comes before row 4 of any:

    embedding, [0] of all stacks, [1] of all stacks, ..., head

Names play no part. A loop is taken to begin with row 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.graph.graph import Graph, Op

#: Number of a place behind all operations.
_NEVER = 1 << 60


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """A place in a forward pass.

    Attributes:
        op: number of the operation, or of the first of the outermost loop around it.
        row: iteration of that loop; 0 outside of loops.
        within: number of the operation.
    """

    op: int
    row: int
    within: int


@dataclass(frozen=True, kw_only=True)
class FirstUse:
    """Where a parameter is first used.

    Attributes:
        path: of the parameter.
        place: of its first row, where it has rows.
        rows: of its first dim, which a loop takes one by one; 0 for a parameter used as a whole.
    """

    path: str
    place: Place
    rows: int = 0

    @staticmethod
    def unknown(path: str, number: int) -> FirstUse:
        """That of a parameter of a loss that nobody has traced."""
        return FirstUse(path=path, place=Place(op=number, row=0, within=number))

    def of_row(self, row: int) -> Place:
        """Where one row is first used."""
        return Place(op=self.place.op, row=row, within=self.place.within)


#: Parameters that a value was made from, by number; whether it is a slice that a loop has taken.
_Made = dict[int, bool]


def first_uses(graph: Graph) -> tuple[FirstUse, ...]:
    """The first use of each parameter, in the order of use."""
    parameters = [*graph.inputs_of("parameter"), *graph.inputs_of("frozen")]
    reads = _reads(graph, parameters)
    begins = _begins(graph)
    uses = [_use(graph, number, reads.get(number), begins) for number in parameters]
    return tuple(sorted(uses, key=lambda use: use.place))


def work_before(graph: Graph, places: Iterable[Place]) -> list[float]:
    """Floating-point operations of a forward pass before each place."""
    begins = _begins(graph)
    return [
        sum(_before(graph, op, n, place, begins) for n, op in enumerate(graph.ops))
        for place in places
    ]


def _before(graph: Graph, op: Op, number: int, place: Place, begins: dict[int, int]) -> float:
    """Operations of one op before a place."""
    outer, total = _outermost(graph, op.region), op.flops * graph.trips(op.region)
    begin = number if outer is None else begins[outer]
    if begin != place.op or outer is None:
        return total if begin < place.op else 0.0
    rows = graph.regions[outer].trips
    return total / rows * min(rows, place.row + (number < place.within))


def _reads(graph: Graph, parameters: list[int]) -> dict[int, tuple[int, bool]]:
    """For each parameter that is used, the number of the op, and whether it reads a slice."""
    produced = {value for op in graph.ops for value in op.results}
    others = set(graph.inputs) - set(parameters)
    sources: dict[int, _Made] = {number: {number: False} for number in parameters}
    reads = dict[int, tuple[int, bool]]()
    for position, op in enumerate(graph.ops):
        operand_sources = [
            sources.get(value, None if value in produced or value in others else _Made())
            for value in op.operands
        ]
        alone = [source for source in operand_sources if source is not None]
        if len(alone) == len(operand_sources):
            merged = {n: source[n] or op.kind == "enter" for source in alone for n in source}
            sources.update((value, merged) for value in op.results)
            continue
        for source in alone:
            for number, sliced in source.items():
                reads.setdefault(number, (position, sliced))
    return reads


def _use(
    graph: Graph, number: int, read: tuple[int, bool] | None, begins: dict[int, int]
) -> FirstUse:
    value = graph.values[number]
    if read is None:
        return FirstUse(path=value.path, place=Place(op=_NEVER, row=0, within=_NEVER))
    position, sliced = read
    outer = _outermost(graph, graph.ops[position].region)
    begin = position if outer is None else begins[outer]
    rows = 0 if outer is None or not sliced else graph.regions[outer].trips
    stacked = bool(value.shape) and value.shape[0] == rows
    place = Place(op=begin, row=0, within=position)
    return FirstUse(path=value.path, place=place, rows=rows if stacked else 0)


def _outermost(graph: Graph, region: int) -> int | None:
    """The outermost loop around a region; None outside of loops."""
    outermost = None
    while region > 0:
        outermost = region if graph.regions[region].kind in ("scan", "while") else outermost
        region = graph.regions[region].parent
    return outermost


def _begins(graph: Graph) -> dict[int, int]:
    """For each outermost loop the number of its first op."""
    begins = dict[int, int]()
    for number, op in enumerate(graph.ops):
        outer = _outermost(graph, op.region)
        if outer is not None:
            begins.setdefault(outer, number)
    return begins
