"""Outer parameters as they become those after a round, bucket after bucket, while the mean comes.

Nothing of an island changes before all of it is there: where a round is closed without the island
on the way, what had come is let go of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from shardlib.errors import LaunchError
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.parts import Part
from shardlib.planning.transfers.buckets import in_buckets
from shardlib.servers.islands.met import Met
from shardlib.servers.ordering import Order, elements
from shardlib.servers.ownership import Flat
from shardlib.servers.rounds.outer import Outer
from shardlib.servers.rounds.packing import unpack
from shardlib.servers.wire.frames import FrameError
from shardlib.servers.wire.messages import Answer
from shardlib.servers.worker.landing import Landing

#: Dtypes that cross element by element, and their bytes; the others have scales beside them.
ELEMENTWISE = {"float32": 4, "bfloat16": 2}
#: What a mean is called as it crosses.
NUMBERS = "numbers"


def mean_order(
    uses: Iterable[Part],
    fragment: Sequence[Part],
    wire: str,
    bucket_bytes: int,
) -> Order:
    """The order in which the elements of a mean cross; empty where they cross as a whole.

    Args:
        wire: dtype that crosses.
        bucket_bytes: of a bucket.
    """
    if wire not in ELEMENTWISE:
        return ()
    start, begins = 0, dict[str, tuple[int, Part]]()
    for part in fragment:
        begins[part.path] = (start, part)
        start += part.stop - part.start
    parts = list[Part]()
    for use in uses:
        if use.path not in begins:
            continue
        offset, part = begins[use.path]
        first, last = max(use.start, part.start), min(use.stop, part.stop)
        if first < last:
            shift = offset - part.start
            parts.append(Part(path=NUMBERS, start=first + shift, stop=last + shift))
    return in_buckets(parts, elements=max(1, bucket_bytes // ELEMENTWISE[wire]))


class Coming:
    """A mean on its way, and what it makes of the outer parameters; it is what takes the answer.

    Attributes:
        order: in which elements come.
        mean: elements that have come, as they crossed.
        taken: buckets that have come.
    """

    def __init__(
        self, outer: Outer, start: int, fragment: Sequence[Part], exchange: DiLoCo, order: Order
    ) -> None:
        """Begins with nothing."""
        self.order, self.taken = order, 0
        self._outer, self._start, self._exchange = outer, start, exchange
        self._parts = list(fragment)
        sizes = {part.path: part.stop - part.start for part in fragment}
        total = sum(sizes.values())
        self.mean = np.empty(total, np.float32 if exchange.wire == "float32" else np.uint16)
        self._momentum = np.empty(total, np.float32)
        self.landing = Landing(sizes, dict.fromkeys(sizes, 1))
        self._ends = np.cumsum([0, *sizes.values()]).tolist()

    @property
    def complete(self) -> bool:
        """Whether all elements have come."""
        return self.taken == len(self.order)

    def begin(self, answer: Answer) -> None:
        """See `Arrivals`."""

    def take(self, name: str, array: np.ndarray) -> None:
        """See `Arrivals`; what comes once more, since a connection has broken, is the same."""
        number, offset = int(name) if name.isdecimal() else len(self.order), 0
        if number >= len(self.order) or number > self.taken:
            raise FrameError("it has a bucket that nobody asked for")
        if array.shape != (elements(self.order[number]),) or array.dtype != self.mean.dtype:
            raise FrameError(f"its bucket {number} is {array.dtype}{list(array.shape)}")
        if number < self.taken:
            return
        for part in self.order[number]:
            size = part.stop - part.start
            self._put(part.start, array[offset : offset + size])
            offset += size
        self.taken += 1

    def _put(self, first: int, numbers: np.ndarray) -> None:
        """Elements of the mean, from one of the fragment on, which belong to one parameter."""
        last = first + numbers.size
        self.mean[first:last] = numbers
        mean = unpack({NUMBERS: numbers}, [numbers.size], self._exchange.wire)
        span = self._start + first, self._start + last
        theta, self._momentum[first:last] = self._outer.after(*span, mean, self._exchange)
        number = int(np.searchsorted(self._ends, first, side="right")) - 1
        while self._ends[number + 1] == first:  # parameters without elements
            number += 1
        begin = self._ends[number]
        path = self._parts[number].path
        self.landing.put(Part(path=path, start=first - begin, stop=last - begin), theta)

    def done(self) -> Flat:
        """Changes the outer parameters; the mean as it crossed."""
        stop = self._start + self.mean.size
        runs = [self.landing.run(part.path) for part in self._parts]
        self._outer.theta[self._start : stop] = np.concatenate([np.zeros(0, np.float32), *runs])
        self._outer.momentum[self._start : stop] = self._momentum
        return {NUMBERS: self.mean}


@dataclass(frozen=True, kw_only=True)
class InBuckets:
    """A meeting whose outer parameters can be used before it is done.

    Attributes:
        met: the meeting.
        coming: the mean.
    """

    met: Future[Met | None]
    coming: Coming

    def result(self) -> Met | None:
        """See `Crossed`."""
        return self.met.result()

    def run(self, part: Part) -> np.ndarray | None:
        """See `Crossed`."""
        try:
            return self.coming.landing.run(part.path)
        except LaunchError:
            return None


def in_use_order(uses: Iterable[Part], parts: Mapping[str, Part]) -> list[Part]:
    """Parts of parameters, those that are used first in front."""
    paths = dict.fromkeys(use.path for use in uses)
    return [
        parts[path] for path in (*paths, *(p for p in parts if p not in paths)) if path in parts
    ]
