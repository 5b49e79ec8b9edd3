"""What an exchange of islands moves, in buckets in the order of use, as a picture in time.

It is what a meeting could be: buckets cross one after the other, and the next forward pass begins
with what is there. Islands of one process meet in one program, at once; what both take is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardlib.axes import ISLAND
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.parts import BUCKET_BYTES
from shardlib.graph.graph import Graph
from shardlib.planning.plan import Plan
from shardlib.planning.transfers.buckets import Bucket, in_buckets, in_order
from shardlib.planning.transfers.first_use import FirstUse, Place, first_uses, work_before
from shardlib.planning.transfers.replay import (
    BACKWARD,
    CROSSING,
    FORWARD,
    Load,
    Replay,
    at_once,
    replay,
)
from shardlib.planning.units.quantity import percent_text, seconds_text
from shardlib.untrusted.json_types import JsonObject

#: Buckets of a picture, at most: those of large models are larger.
MOST_BUCKETS = 64
#: Columns of time in text, and buckets whose content is named.
_COLUMNS, _NAMED = 100, 6
#: A backward pass takes twice as long as the forward pass: two matmuls for each of it.
_FORWARD = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What an exchange moves, bucket by bucket.

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
    """What the exchange of a plan moves; None where steps do not wait for it as a whole: there is
    none, it is in fragments, or beside steps.
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
