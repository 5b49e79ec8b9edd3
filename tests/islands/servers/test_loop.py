"""The loop of workers in threads, with gradients that cost nothing: warm start, bound, periods."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from shardlib.exchanges import Asynchronous, Part
from shardlib.islands.servers.server import Service
from shardlib.islands.servers.wire import Answer, Arrivals, Ask, Flat, handed
from shardlib.islands.servers.worker import Landing, OnHost, Worker
from shardlib.processes.wire import Outgoing, made


class Computing:
    """A gradient of ones at each step."""

    trained = {"w": jax.ShapeDtypeStruct((4,), np.float32)}
    parts = (Part(path="w", start=0, stop=4),)
    runs = {"w": 1}

    def __init__(self, together: threading.Barrier | None) -> None:
        self.sum, self.together = np.zeros(4, np.float32), together

    def first(self) -> Flat:
        return {"w": np.zeros(4, np.float32)}

    def fetched(self, landing: Landing) -> None: ...

    def step(self, batch: float) -> Callable[[], float]:
        if self.together is not None:
            self.together.wait()
            self.together = None
        time.sleep(batch)
        self.sum = self.sum + 1
        return lambda: 0.0

    def taken(self) -> OnHost:
        found, self.sum = self.sum, np.zeros(4, np.float32)
        return OnHost(arrays={"w": found})


@dataclass
class Seen:
    """A link that writes down who asked for what, in the order of answers."""

    service: Service
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def ask(
        self, ask: Ask, arrays: Outgoing | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        found = handed(*self.service.answer(ask, made(arrays or {}), ask.worker), arrivals)
        if found[0].kind == "ok":
            self.asked.append((ask.kind, ask.worker, ask.step))
        return found

    def close(self) -> None: ...


def run(
    exchange: Asynchronous, steps: int, seconds: tuple[float, ...], *, together: bool = False
) -> list[Seen]:
    """Runs a worker in a thread for each of `seconds`, which its steps take; what servers saw.
    `together`: nobody ends the first step before all have begun it.
    """
    barrier = threading.Barrier(len(seconds)) if together else None
    links = [Seen(Service(exchange=exchange, server=k)) for k in range(exchange.servers)]
    threads = []
    for number, each in enumerate(seconds):
        computing: Any = Computing(barrier)
        worker = Worker(number=number, exchange=exchange, computing=computing, links=links)
        rows = lambda worker, step, each=each: each  # noqa: E731
        threads.append(threading.Thread(target=worker.run, args=(steps, rows, None)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return links


def test_one_worker_trains_alone_until_the_warm_start_is_over() -> None:
    exchange = Asynchronous(workers=3, servers=2, rule="sgd", warm=10, rate=0.5)
    links = run(exchange, 20, (0.002, 0.002, 0.002))
    for link in links:
        pushed = [worker for kind, worker, _ in link.asked if kind == "push"]
        assert len(pushed) == 60 and len(set(pushed[:10])) == 1 and len(set(pushed)) == 3
    alone = links[0].service.shard.staleness
    assert alone[0] >= 10


def test_nobody_is_ahead_of_the_slowest_by_more_than_the_bound() -> None:
    links = run(Asynchronous(workers=3, servers=1, bound=2), 30, (0.0, 0.001, 0.01), together=True)
    begun: dict[int, int] = {}
    offsets = links[0].service.gate.offsets
    assert not offsets, "all have left"
    for kind, worker, step in links[0].asked:
        if kind == "leave":
            begun.pop(worker)
        elif kind == "enter":
            begun[worker] = step
            # An answer may be written down one step late.
            assert max(begun.values()) - min(begun.values()) <= 2 + 1
    assert links[0].service.shard.clock == 90


def test_fetches_and_pushes_have_their_periods_and_nothing_is_left() -> None:
    exchange = Asynchronous(
        workers=1, servers=2, fetch=3, push=4, rule="sgd", rate=1.0, by_staleness=False
    )
    links = run(exchange, 10, (0.0,))
    for link in links:
        of = {kind: [s for k, _, s in link.asked if k == kind] for kind in ("fetch", "push")}
        assert of == {"fetch": [0, 3, 6, 9], "push": [3, 7, 9]}
        assert (link.service.shard.values or {})["w"].tolist() == [-10, -10]
