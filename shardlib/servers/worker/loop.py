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
from shardlib.exchanges.parts import BUCKET_BYTES
from shardlib.servers.ordering import WHOLE, Order, in_order
from shardlib.servers.ownership import Flat, divided
from shardlib.servers.wire.bodies import Later, Outgoing
from shardlib.servers.wire.messages import Answer, Ask, Link
from shardlib.servers.worker.computing import Computing
from shardlib.servers.worker.gradients import Gradients
from shardlib.servers.worker.landing import Landing
from shardlib.servers.worker.orders import Orders


@dataclass(kw_only=True)
class Worker:
    """A worker between its program and its servers.

    Attributes:
        number: of the worker.
        exchange: periods and the number of servers.
        computing: its program.
        links: to the servers, in their order.
        bucket_bytes: of elements that cross together.
        start: a word of this start of the worker.
        serial: pushes so far.
        seen: clocks of the servers at the oldest fetch since the last push.
        clocks: the same at the newest fetch.
        stale: staleness of the last push, at the first server.
        orders: in which parameters and gradients cross.
    """

    number: int
    exchange: Asynchronous
    computing: Computing
    links: Sequence[Link]
    bucket_bytes: int = BUCKET_BYTES
    start: str = field(default_factory=lambda: secrets.token_hex(8))
    serial: int = 0
    seen: list[int] | None = None
    clocks: list[int] = field(default_factory=list[int])
    stale: int = 0

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(self.links))
        self._sizes = {path: leaf.size for path, leaf in self.computing.trained.items()}
        self.orders = Orders.of(
            self.computing.parts, self._sizes, len(self.links), self.bucket_bytes
        )

    def run(self, steps: int, rows: Callable[[int, int], Tree], log: Path | None) -> None:
        """Trains."""
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
        """Offers the parameters that all workers begin with."""
        offers = divided(self.computing.first(), len(self.links))
        for answer, _ in self._all("offer", 0, offers):
            if answer.kind == "refused":
                raise LaunchError(f"a server refuses the parameters: {answer.why}")

    def step(self, step: int, batch: Tree, *, last: bool = False) -> float:
        """Fetches where it is time to, computes, and pushes where it is time to."""
        wait = self._fetch(step) if step % self.exchange.fetch == 0 else lambda: None
        loss = self.computing.step(batch)
        wait()
        if self.seen is None:
            self.seen = list(self.clocks)
        if last or (step + 1) % self.exchange.push == 0:
            self._push(step, self.computing.taken())
            self.seen = None
        return loss()

    def _enter(self, step: int) -> float:
        """Waits until the first server lets it begin; seconds."""
        began = time.monotonic()
        ask = Ask(kind="enter", worker=self.number, start=self.start, step=step)
        while self.links[0].ask(ask)[0].kind == "wait":
            pass
        return time.monotonic() - began

    def _fetch(self, step: int) -> Callable[[], None]:
        """Begins to fetch; what is given waits until all has come."""
        landing, waits = self._fetching(step)
        if landing is None:  # a server was started again before it had parameters
            waits()
            self._all("offer", step, divided(self.computing.first(), len(self.links)))
            landing, waits = self._fetching(step)
        assert landing is not None, "servers have parameters"
        self.computing.fetched(landing)
        return waits

    def _fetching(self, step: int) -> tuple[Landing | None, Callable[[], None]]:
        """Where parameters come in, and what waits until all have; None where a server has none."""
        landing = Landing(self._sizes, self.computing.runs)
        receivers = [landing.receiver(crossing.order) for crossing in self.orders.fetches]

        def fetch(server: int) -> None:
            ask = self._asked("fetch", step, server, order=self.orders.fetches[server].text)
            try:
                self.links[server].ask(ask, None, receivers[server])
            except BaseException as error:
                landing.fail(error)
                receivers[server].begun.set()
                raise

        calls = [self._threads.submit(fetch, server) for server in range(len(self.links))]

        def wait() -> None:
            for call in calls:
                call.result()
            self.clocks = [receiver.clock or 0 for receiver in receivers]

        for receiver in receivers:
            receiver.begun.wait()
        refused = any(receiver.answer.kind == "refused" for receiver in receivers)
        return None if refused else landing, wait

    def _push(self, step: int, gradients: Gradients) -> None:
        if gradients.at_once and not gradients.finite():
            self._all("skip", step)
            return
        self.serial += 1
        assert self.seen is not None, "fetched"

        def push(server: int) -> Answer:
            crossing = self.orders.pushes[server]
            ask = self._asked("push", step, server, order=crossing.text)
            return self.links[server].ask(ask, self._sent(crossing.order, gradients))[0]

        answers = list(self._threads.map(push, range(len(self.links))))
        self.stale = answers[0].staleness

    def _sent(self, order: Order, gradients: Gradients) -> Outgoing:
        """Buckets as they are sent; what is sent before all of it is known says so at its end."""
        buckets = in_order(order, gradients.run)
        if gradients.at_once:
            return buckets
        finite = Later(
            size=1, make=lambda: np.array([gradients.finite()], np.uint8), dtype=np.dtype(np.uint8)
        )
        return {**buckets, WHOLE: finite}

    def _asked(self, kind: str, step: int, server: int, *, order: str = "") -> Ask:
        return Ask(
            kind=kind,
            worker=self.number,
            start=self.start,
            serial=self.serial,
            seen=0 if self.seen is None else self.seen[server],
            step=step,
            about=order,
        )

    def _all(
        self, kind: str, step: int, arrays: Sequence[Flat] | None = None
    ) -> list[tuple[Answer, Flat]]:
        """Asks all servers at once."""

        def ask(server: int) -> tuple[Answer, Flat]:
            sent = None if arrays is None else arrays[server]
            return self.links[server].ask(self._asked(kind, step, server), sent)

        return list(self._threads.map(ask, range(len(self.links))))
