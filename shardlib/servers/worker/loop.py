"""The loop of a worker: enter, fetch, compute, push.

With `push=n` gradients of n steps are added up; the sum is as old as the oldest parameters that it
was computed with. A gradient that is not finite is pushed to no server, and the worker goes on.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import LaunchError
from shardlib.exchanges.asynchronous import Asynchronous
from shardlib.servers.ownership import Flat, divided, joined
from shardlib.servers.wire.messages import Answer, Ask, Link
from shardlib.servers.worker.computing import Computing


@dataclass(kw_only=True)
class Worker:
    """A worker between its program and its servers.

    Attributes:
        number: of the worker.
        exchange: periods and the number of servers.
        computing: its program.
        links: to the servers, in their order.
        start: a word of this start of the worker.
        serial: pushes so far.
        seen: clocks of the servers at the oldest fetch since the last push.
        clocks: the same at the newest fetch.
        stale: staleness of the last push, at the first server.
    """

    number: int
    exchange: Asynchronous
    computing: Computing
    links: Sequence[Link]
    start: str = field(default_factory=lambda: secrets.token_hex(8))
    serial: int = 0
    seen: list[int] | None = None
    clocks: list[int] = field(default_factory=list[int])
    stale: int = 0

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(self.links))
        self._shapes = {path: leaf.shape for path, leaf in self.computing.trained.items()}

    def run(self, steps: int, rows: Callable[[int, int], Tree], log: Path | None) -> None:
        """Trains.

        Args:
            steps: of this worker.
            rows: see `Job`.
            log: file that gets a line of JSON for each step.

        Raises:
            LaunchError: a server is gone, or refuses the parameters.
        """
        self.begin()
        with open(log or "/dev/null", "a", buffering=1) as lines:
            for step in range(steps):
                waited = self._enter(step)
                loss = self.step(step, rows(self.number, step), last=step == steps - 1)
                line = {
                    "step": step,
                    "loss": loss if np.isfinite(loss) else None,
                    "at_s": time.time(),
                    "waited_s": waited,
                    "staleness": self.stale,
                }
                lines.write(json.dumps(line) + "\n")
        self._all("leave", steps)
        for link in self.links:
            link.close()

    def begin(self) -> None:
        """Offers the parameters that all workers begin with.

        Raises:
            LaunchError: a server refuses them.
        """
        offers = divided(self.computing.first(), len(self.links))
        for answer, _ in self._all("offer", 0, offers):
            if answer.kind == "refused":
                raise LaunchError(f"a server refuses the parameters: {answer.why}")

    def step(self, step: int, batch: Tree, *, last: bool = False) -> float:
        """Fetches where it is time to, computes, and pushes where it is time to.

        Args:
            step: number, from 0 on.
            batch: rows of the worker.
            last: whether nothing follows, so that whatever has been added up is pushed.

        Returns:
            The loss.
        """
        if step % self.exchange.fetch == 0:
            self._fetch(step)
        if self.seen is None:
            self.seen = list(self.clocks)
        loss = self.computing.step(batch)
        if last or (step + 1) % self.exchange.push == 0:
            self._push(step, self.computing.taken())
            self.seen = None
        return loss

    def _enter(self, step: int) -> float:
        """Waits until the first server lets it begin; seconds."""
        began = time.monotonic()
        ask = Ask(kind="enter", worker=self.number, start=self.start, step=step)
        while self.links[0].ask(ask)[0].kind == "wait":
            pass
        return time.monotonic() - began

    def _fetch(self, step: int) -> None:
        found = self._all("fetch", step)
        refused = [answer.why for answer, _ in found if answer.kind == "refused"]
        if refused:  # a server was started again before it had parameters
            self._all("offer", step, divided(self.computing.first(), len(self.links)))
            found = self._all("fetch", step)
        self.clocks = [answer.clock for answer, _ in found]
        self.computing.fetched(joined([arrays for _, arrays in found], self._shapes))

    def _push(self, step: int, gradients: dict[str, np.ndarray]) -> None:
        if not all(np.isfinite(array).all() for array in gradients.values()):
            self._all("skip", step)
            return
        self.serial += 1
        found = self._all("push", step, divided(gradients, len(self.links)), self.seen)
        self.stale = found[0][0].staleness

    def _all(
        self,
        kind: str,
        step: int,
        arrays: Sequence[Flat] | None = None,
        seen: Sequence[int] | None = None,
    ) -> list[tuple[Answer, Flat]]:
        """Asks all servers at once."""

        def ask(server: int) -> tuple[Answer, Flat]:
            return self.links[server].ask(
                Ask(
                    kind=kind,
                    worker=self.number,
                    start=self.start,
                    serial=self.serial,
                    seen=0 if seen is None else seen[server],
                    step=step,
                ),
                None if arrays is None else arrays[server],
            )

        return list(self._threads.map(ask, range(len(self.links))))
