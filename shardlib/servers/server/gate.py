"""Who may begin a step? The first server is asked, and knows how far every worker is.

A worker waits in two cases alone: while another trains alone (warm start), and while it is more
than `bound` steps ahead of the slowest worker that is there. Who comes late, or comes back, begins
where the slowest is, so that nobody waits until it has caught up. Who is silent for too long, or
whose connection has closed, is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shardlib.exchanges.asynchronous import Asynchronous


@dataclass(kw_only=True)
class Gate:
    """How far workers are; used by one thread at a time.

    Attributes:
        exchange: warm start and bound.
        silent_s: seconds after which a worker that says nothing is not waited for.
        offsets: of each worker that is there, what its own count of steps began at.
        steps: of each, the number of the step that it does, by its own count.
        heard: of each, when it last asked.
        alone: who trains alone, during a warm start.
        now: seconds of a clock.
        lost: is told who has been silent for too long.
    """

    exchange: Asynchronous
    silent_s: float = 60.0
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    steps: dict[int, int] = field(default_factory=dict[int, int])
    heard: dict[int, float] = field(default_factory=dict[int, float])
    alone: int | None = None
    now: Callable[[], float] = time.monotonic
    lost: Callable[[int], None] = lambda worker: None

    def place(self, worker: int) -> int:
        """How far a worker is, on the clock that is common to all."""
        return self.offsets[worker] + self.steps[worker]

    def enter(self, worker: int, step: int, pushes: int) -> str:
        """Asks for a worker whether it may begin a step."""
        self._forget_silent()
        if worker not in self.offsets:
            others = [self.place(present) for present in self.offsets]
            self.offsets[worker] = min(others, default=step) - step
        self.steps[worker], self.heard[worker] = step, self.now()
        if pushes < self.exchange.warm:
            if self.alone is None:
                self.alone = worker
            if self.alone != worker:
                return f"worker {self.alone} trains alone, {pushes} of {self.exchange.warm} pushes"
        return self._ahead(worker)

    def _ahead(self, worker: int) -> str:
        if self.exchange.bound is None:
            return ""
        slowest = min(self.offsets, key=self.place)
        ahead = self.place(worker) - self.place(slowest)
        if ahead <= self.exchange.bound:
            return ""
        return f"it is {ahead} steps ahead of worker {slowest}, the bound is {self.exchange.bound}"

    def leave(self, worker: int) -> None:
        """A worker is done, or gone."""
        for table in (self.offsets, self.steps, self.heard):
            table.pop(worker, None)
        if self.alone == worker:
            self.alone = None

    def _forget_silent(self) -> None:
        late = self.now() - self.silent_s
        for worker in [name for name, heard in self.heard.items() if heard < late]:
            self.leave(worker)
            self.lost(worker)
