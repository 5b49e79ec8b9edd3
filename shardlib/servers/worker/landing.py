"""Parameters of the servers as they come in, bucket after bucket.

landing = Landing({"w": 4}, {"w": 2})
receiver = landing.receiver(order)      # takes what comes of one server, in a thread
landing.run("w", 0)                     # the first half of "w", as soon as it is there
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardlib.errors import LaunchError
from shardlib.exchanges.parts import Part
from shardlib.servers.ordering import Order, elements
from shardlib.servers.wire.frames import FrameError
from shardlib.servers.wire.messages import Answer

#: A part of a parameter that is waited for: its path, and which of its equal runs.
Run = tuple[str, int]


class Landing:
    """Elements of all parameters, some of which are there."""

    def __init__(self, sizes: Mapping[str, int], runs: Mapping[str, int]) -> None:
        """Begins with none."""
        self._values = {path: np.empty(size, np.float32) for path, size in sizes.items()}
        self._each = {path: max(1, sizes[path] // runs[path]) for path in sizes}
        self._missing: dict[Run, int] = {
            (path, number): sizes[path] // runs[path]
            for path in sizes
            for number in range(runs[path])
        }
        self._changed = threading.Condition()
        self._failed: BaseException | None = None

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray], runs: Mapping[str, int]) -> Landing:
        """One in which everything is there."""
        landing = Landing({path: array.size for path, array in arrays.items()}, runs)
        for path, array in arrays.items():
            landing.put(Part(path=path, start=0, stop=array.size), array.reshape(-1))
        return landing

    def put(self, part: Part, values: np.ndarray) -> None:
        """Elements have come, for the first time."""
        if part.start == part.stop:
            return
        self._values[part.path][part.start : part.stop] = values
        each, start = self._each[part.path], part.start
        with self._changed:
            while start < part.stop:
                number = start // each
                stop = min(part.stop, (number + 1) * each)
                self._missing[part.path, number] -= stop - start
                start = stop
            self._changed.notify_all()

    def there(self, runs: Iterable[Run]) -> bool:
        """Whether all of these are there, or never will be."""
        with self._changed:
            return self._failed is not None or not any(self._missing[run] for run in runs)

    def run(self, path: str, number: int = 0) -> np.ndarray:
        """Elements of a run, once all of them are there; nobody writes to them again."""
        with self._changed:
            while self._missing[path, number]:
                if self._failed is not None:
                    raise LaunchError(f"parameters have not come: {self._failed}") from self._failed
                self._changed.wait()
        each = self._each[path]
        return self._values[path][number * each : (number + 1) * each]

    def whole(self, path: str) -> np.ndarray:
        """All elements of a parameter, once they are there."""
        count = self._values[path].size // self._each[path]
        runs = [self.run(path, number) for number in range(count)]
        return np.concatenate([np.zeros(0, np.float32), *runs])

    def fail(self, error: BaseException) -> None:
        """Nothing more will come."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def receiver(self, order: Order) -> Receiver:
        """What takes the elements of one server."""
        return Receiver(landing=self, order=order)


@dataclass(kw_only=True)
class Receiver:
    """Arrivals of one server. Where its connection breaks on the way and the answer begins again,
    what had come stays, and counts as old as it is.

    Attributes:
        landing: of all servers.
        order: in which elements come.
        begun: whether an answer has begun to come.
        answer: the newest.
        clock: updates of the server that all elements have at least.
        taken: buckets that have come.
    """

    landing: Landing
    order: Order
    begun: threading.Event = field(default_factory=threading.Event)
    answer: Answer = field(default_factory=Answer)
    clock: int | None = None
    taken: int = 0

    def begin(self, answer: Answer) -> None:
        """See `Arrivals`."""
        self.answer = answer
        self.clock = answer.clock if self.clock is None else min(self.clock, answer.clock)
        self.begun.set()

    def take(self, name: str, array: np.ndarray) -> None:
        """See `Arrivals`."""
        if not name.isdecimal() or int(name) >= len(self.order):
            raise FrameError("it has a bucket that nobody asked for")
        number, offset = int(name), 0
        bucket = self.order[number]
        if array.dtype != np.float32 or array.shape != (elements(bucket),) or number > self.taken:
            raise FrameError(f"its bucket {number} is {array.dtype}{list(array.shape)}")
        if number < self.taken:
            return
        for part in bucket:
            self.landing.put(part, array[offset : offset + part.stop - part.start])
            offset += part.stop - part.start
        self.taken += 1
