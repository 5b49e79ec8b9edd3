"""Transfers of parameters over a link, in the order in which the next forward pass needs them:
buckets, their schedule in time, and the picture of it.

`in_buckets` puts elements of parameters in the order in which a forward pass needs them, in
buckets.

A bucket is a run of `elements` elements in that order, wherever it begins and ends; a large
parameter is in several buckets, small ones are together in one.

>>> parts = [Part(path="w", start=0, stop=6), Part(path="b", start=0, stop=3)]
>>> for bucket in in_buckets(parts, elements=4):
...     print([str(part) for part in bucket])
['w[0:4]']
['w[4:6]', 'b[0:2]']
['b[2:3]']

`replay` is a step in time over one link: the backward pass makes gradients, buckets cross, and each
part of the next forward pass begins when its bucket is there.

    backward    one part after the other, the last first; then the bucket of a part may cross
    the link    carries one bucket at a time, of those that may cross the first in the given order;
                with `preempt`, one that comes first holds up one that is on its way

It is scheduling on one machine with release times r and delivery times q (1 | r, q, pmtn | Cmax),
for which taking the bucket of the largest q first, at any time, is optimal (Jackson's preemptive
rule; Carlier, "The one-machine sequencing problem", 1982). What is left to do after a bucket is the
forward pass from its part on, so that the largest q is the earliest use. That is TicTac's order for
a forward pass that is a chain (Hashemi et al., MLSys 2019), by timing (TAC) and without it (TIC).

>>> loads = [Load(forward=1.0, backward=2.0, wire=3.0)] * 2
>>> replay(loads).seconds, replay(loads, order=[1, 0]).seconds
(9.0, 10.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from shardlib.graph import Graph, Op
from shardlib.islands.exchanges import BUCKET_BYTES, Compressed, DiLoCo, Part
from shardlib.layout import ISLAND
from shardlib.planner.plan import Plan
from shardlib.report.elements import percent_text, seconds_text
from shardlib.untrusted.data import JsonObject

# --------------------------------------------------------------------------------------------------
# First uses of parameters in a forward pass, read from its graph.
#
# A parameter is used where an operation reads it, or what was made from parameters alone (a cast,
# a transpose, tied weights), together with something else: rows, activations. What was only cast
# at the top of a loss is used where it meets them. A stack of layers that a loop takes slice by
# slice is used row by row, so that row 3 of every stack comes before row 4 of any:
#
#     embedding, [0] of all stacks, [1] of all stacks, ..., head
#
# Names play no part. A loop is taken to begin with row 0.

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
    """The first use of a parameter in a forward pass.

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
        """The transfer of a parameter of a loss that is not traced."""
        return FirstUse(path=path, place=Place(op=number, row=0, within=number))

    def of_row(self, row: int) -> Place:
        """Returns the place of the first use of one row."""
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


#: Elements that cross together.
Bucket = tuple[Part, ...]


def in_order(uses: Iterable[FirstUse], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Part, ...]:
    """All elements of parameters, those that are used first in front; what a loop takes row by row
    stands row by row.
    """
    placed: list[tuple[Place, Part]] = []
    for use in uses:
        if use.path not in shapes:
            continue
        size, rows = math.prod(shapes[use.path]), use.rows or 1
        placed += [
            (
                use.of_row(row) if use.rows else use.place,
                Part(path=use.path, start=size // rows * row, stop=size // rows * (row + 1)),
            )
            for row in range(rows)
        ]
    return tuple(part for _, part in sorted(placed, key=lambda pair: pair[0]))


def in_buckets(parts: Iterable[Part], *, elements: int) -> tuple[Bucket, ...]:
    """Parts as buckets, in their order; the last may have less."""
    assert elements > 0, elements
    full, filling, left = list[Bucket](), list[Part](), elements
    for part in parts:
        start = part.start
        while start < part.stop:
            stop = min(part.stop, start + left)
            filling.append(Part(path=part.path, start=start, stop=stop))
            left, start = left - (stop - start), stop
            if not left:
                full.append(tuple(filling))
                filling, left = [], elements
    return tuple([*full, tuple(filling)] if filling else full)


BACKWARD, CROSSING, FORWARD = "backward", "crossing", "forward"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The seconds that belong to one bucket.

    Attributes:
        forward: of the forward pass from the first use of this bucket to that of the next.
        backward: of the backward pass of the same part.
        wire: of the bucket on the link.
    """

    forward: float
    backward: float
    wire: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """One activity of one bucket in time.

    Attributes:
        kind: `BACKWARD`, `CROSSING` or `FORWARD`.
        bucket: its number, in the order of use.
        start, stop: seconds.
    """

    kind: str
    bucket: int
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A step, from the beginning of one backward pass to the end of the next forward pass.

    Attributes:
        loads: of the buckets, in the order of use.
        spans: what happened, in order of time for each kind.
    """

    loads: tuple[Load, ...]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max((span.stop for span in self.spans), default=0.0)

    @property
    def compute(self) -> float:
        """Seconds of both passes."""
        return sum(load.forward + load.backward for load in self.loads)

    @property
    def wire(self) -> float:
        """Seconds of all transfers."""
        return sum(load.wire for load in self.loads)

    @property
    def efficiency(self) -> float:
        """TicTac's: 1 where the longer of compute and wire hides the other, 0 where nothing
        overlaps.
        """
        unhidden = self.compute + self.wire
        hideable = unhidden - max(self.compute, self.wire)
        return (unhidden - self.seconds) / hideable if hideable else 1.0


def replay(
    loads: Sequence[Load], order: Sequence[int] | None = None, *, preempt: bool = True
) -> Replay:
    """Replays a step.

    Args:
        order: numbers of the buckets, those that cross first in front; by default that of use.
    """
    numbers = range(len(loads)) if order is None else order
    assert sorted(numbers) == list(range(len(loads))), "each bucket once"
    backward, now = list[Span](), 0.0
    for bucket in reversed(range(len(loads))):
        stop = now + loads[bucket].backward
        backward.append(Span(kind=BACKWARD, bucket=bucket, start=now, stop=stop))
        now = stop
    released = {span.bucket: span.stop for span in backward}
    crossing = _crossing(loads, list(numbers), released, preempt)
    there = {span.bucket: span.stop for span in crossing}  # the last span of each counts
    forward = list[Span]()
    for bucket, load in enumerate(loads):
        start = max(now, there.get(bucket, 0.0))
        now = start + load.forward
        forward.append(Span(kind=FORWARD, bucket=bucket, start=start, stop=now))
    return Replay(loads=tuple(loads), spans=(*backward, *crossing, *forward))


def at_once(loads: Sequence[Load]) -> Replay:
    """The same step with one transfer of everything between the two passes."""
    backward = sum(load.backward for load in loads)
    arrived = backward + sum(load.wire for load in loads)
    spans = [
        Span(kind=BACKWARD, bucket=0, start=0.0, stop=backward),
        Span(kind=CROSSING, bucket=0, start=backward, stop=arrived),
        Span(
            kind=FORWARD,
            bucket=0,
            start=arrived,
            stop=arrived + sum(load.forward for load in loads),
        ),
    ]
    return Replay(loads=tuple(loads), spans=tuple(spans))


def _crossing(
    loads: Sequence[Load], order: list[int], released: dict[int, float], preempt: bool
) -> list[Span]:
    """Schedules the link: whenever it is free, or whenever a bucket may cross, the first one in the
    order of those that may.
    """
    left = {bucket: loads[bucket].wire for bucket in order}
    spans, now = list[Span](), 0.0
    while left:
        ready = [bucket for bucket in order if bucket in left and released[bucket] <= now]
        if not ready:
            now = min(released[bucket] for bucket in left)
            continue
        bucket, stop = ready[0], now + left[ready[0]]
        before = order[: order.index(bucket)]
        sooner = [
            released[earlier] for earlier in before if earlier in left and released[earlier] < stop
        ]
        if preempt and sooner:
            stop = min(sooner)
            left[bucket] -= stop - now
        else:
            del left[bucket]
        spans.append(Span(kind=CROSSING, bucket=bucket, start=now, stop=stop))
        now = stop
    return spans


# --------------------------------------------------------------------------------------------------
# Transfers of an exchange of islands, in buckets in the order of use, as a picture in time.
#
# It shows what a meeting could be: buckets cross one after the other, and the next forward pass
# begins with what is there. Islands of one process meet in one program, at once; what both take is
# said.

#: Buckets of a picture, at most: those of large models are larger.
MOST_BUCKETS = 64
#: Columns of time in text, and buckets whose content is named.
_COLUMNS, _NAMED = 100, 6
#: A backward pass takes twice as long as the forward pass: two matmuls for each of it.
_FORWARD = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """The transfers of an exchange, bucket by bucket.

    Attributes:
        title: what crosses.
        buckets: elements of parameters, in the order of use.
        replay: a backward pass, the transfers, and the next forward pass.
        at_once: seconds of the same with one transfer.
    """

    title: str
    buckets: tuple[Bucket, ...]
    replay: Replay
    at_once: float

    def to_json(self) -> JsonObject:
        """The transfers as plain data."""
        return {
            "title": self.title,
            "buckets": [[str(part) for part in bucket] for bucket in self.buckets],
            "seconds": self.replay.seconds,
            "at_once": self.at_once,
            "efficiency": self.replay.efficiency,
            "spans": [asdict(span) for span in self.replay.spans],
        }

    def __str__(self) -> str:
        rows = (("backward", BACKWARD), ("link", CROSSING), ("forward", FORWARD))
        named = [
            f"{number}: {_content(bucket)}" for number, bucket in enumerate(self.buckets[:_NAMED])
        ]
        more = len(self.buckets) - len(named)
        done = self.replay
        return "\n".join(
            [
                self.title,
                *(f"{name:<9}{self._row(kind)}".rstrip() for name, kind in rows),
                "",
                f"numbers are buckets, a column is {seconds_text(done.seconds / _COLUMNS)}",
                *named,
                *([f"and {more} more"] if more else []),
                (
                    f"in the order of use {seconds_text(done.seconds)}, at once, as in one program,"
                    f" {seconds_text(self.at_once)}; no order takes less than"
                    f" {seconds_text(max(done.compute, done.wire))}, of what can overlap"
                    f" {percent_text(done.efficiency)} does"
                ),
                "",
            ]
        )

    def _row(self, kind: str) -> str:
        cells, scale = [" "] * _COLUMNS, _COLUMNS / (self.replay.seconds or 1.0)
        fill = {BACKWARD: "<", CROSSING: "=", FORWARD: ">"}[kind]
        for span in self.replay.spans:
            first, last = round(span.start * scale), round(span.stop * scale)
            if span.kind == kind and last > first:
                label = str(span.bucket) if len(str(span.bucket)) < last - first else ""
                cells[first:last] = f"{label:{fill}<{last - first}}"
        return "".join(cells)


def _content(bucket: Bucket) -> str:
    """The elements of a bucket in a few words."""
    parts = [str(part) for part in bucket]
    return ", ".join(parts if len(parts) < 4 else [parts[0], f"{len(parts) - 2} others", parts[-1]])


def transfers(plan: Plan, forward: Graph) -> Transfers | None:
    """Returns the transfers of the exchange of a plan; None where steps do not wait for it as a
    whole: there is none, it is in fragments, or beside steps.
    """
    exchange = plan.exchange
    undivided = isinstance(exchange, DiLoCo) and exchange.fragments == 1 and not exchange.delay
    if not (undivided or isinstance(exchange, Compressed)):
        return None
    uses = first_uses(forward)
    shapes = {parameter.path: parameter.shape for parameter in plan.parameters if parameter.trained}
    total = sum(math.prod(shape) for shape in shapes.values())
    elements = max(BUCKET_BYTES // 4, -(-total // MOST_BUCKETS))
    buckets = in_buckets(in_order(uses, shapes), elements=elements)
    wire = sum(
        collective.seconds
        for collective in plan.estimate.collectives
        if ISLAND.name in collective.axes
    )
    loads = _loads(forward, uses, shapes, buckets, plan.estimate.seconds.compute, wire)
    if undivided:  # parameters are there after the optimizer, all at the same time
        back = sum(load.backward for load in loads)
        last = len(loads) - 1
        loads = [
            Load(forward=load.forward, backward=back if n == last else 0.0, wire=load.wire)
            for n, load in enumerate(loads)
        ]
    title = f"{plan.model} on {plan.topology}: {exchange}, {len(buckets)} buckets in order of use"
    return Transfers(
        title=title, buckets=buckets, replay=replay(loads), at_once=at_once(loads).seconds
    )


def _loads(
    forward: Graph,
    uses: tuple[FirstUse, ...],
    shapes: Mapping[str, tuple[int, ...]],
    buckets: tuple[Bucket, ...],
    compute: float,
    wire: float,
) -> list[Load]:
    """Seconds of each bucket: of the work from its first use to that of the next one."""
    by_path = {use.path: use for use in uses}

    def place(bucket: Bucket) -> Place:
        use, part = by_path[bucket[0].path], bucket[0]
        each = math.prod(shapes[part.path]) // (use.rows or 1)
        return use.of_row(part.start // each) if use.rows else use.place

    before = work_before(forward, map(place, buckets)) if buckets else []
    ends = [*before[1:], forward.flops]
    shares = [
        (end - start) / (forward.flops or 1.0) for start, end in zip(before, ends, strict=True)
    ]
    if shares:
        shares[0] += before[0] / (forward.flops or 1.0)
    sizes = [sum(part.stop - part.start for part in bucket) for bucket in buckets]
    return [
        Load(
            forward=compute * _FORWARD * share,
            backward=compute * (1 - _FORWARD) * share,
            wire=wire * size / sum(sizes),
        )
        for share, size in zip(shares, sizes, strict=True)
    ]
