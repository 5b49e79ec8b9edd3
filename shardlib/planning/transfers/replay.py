"""A step in time over one link: the backward pass makes gradients, buckets cross, and each part of
the next forward pass begins when its bucket is there.

    backward    one part after the other, the last first; then the bucket of a part may cross
    the link    carries one bucket at a time, of those that may cross the first in the given order;
                with `preempt`, one that comes first holds up one that is on its way
    forward     one part after the other, the first first, each after its bucket

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

from collections.abc import Sequence
from dataclasses import dataclass

BACKWARD, CROSSING, FORWARD = "backward", "crossing", "forward"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What belongs to one bucket, in seconds.

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
    """What happens to one bucket for a while.

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
    """What the link does: whenever it is free, or whenever a bucket may cross, the first one in the
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
