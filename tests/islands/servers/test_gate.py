"""Who waits, and for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import shardlib
from shardlib.islands.exchanges import Asynchronous, Part, read_exchange
from shardlib.islands.servers.crew import _first_and_last
from shardlib.islands.servers.server import Gate, Service
from shardlib.islands.servers.wire import Answer, Arrivals, Ask, Flat
from shardlib.islands.servers.worker import Landing, OnHost, Worker
from shardlib.processes.wire import Outgoing
from tests.islands.servers.helpers import Direct, together


def test_without_a_bound_nobody_waits() -> None:
    gate = Gate(exchange=Asynchronous(workers=2))
    assert gate.enter(0, 0, 0) == gate.enter(1, 0, 0) == ""
    assert not any(gate.enter(0, step, step) for step in range(1000))


def test_who_is_ahead_by_more_than_the_bound_waits_for_the_slowest_alone() -> None:
    gate = Gate(exchange=Asynchronous(workers=3, bound=2))
    for worker in range(3):
        gate.enter(worker, 0, 0)
    assert [bool(gate.enter(0, step, 0)) for step in (1, 2, 3)] == [False, False, True]
    assert gate.enter(0, 3, 0) == "it is 3 steps ahead of worker 1, the bound is 2"
    assert not gate.enter(1, 1, 0) and gate.enter(0, 3, 0), "worker 2 is still there"
    assert not gate.enter(2, 1, 0) and not gate.enter(0, 3, 0)
    gate.leave(1)
    gate.leave(2)
    assert not gate.enter(0, 99, 0), "who is gone is not waited for"


def test_who_comes_late_begins_where_the_slowest_is() -> None:
    gate = Gate(exchange=Asynchronous(workers=3, bound=1))
    for step in range(50):
        assert not gate.enter(0, step, 0)
    assert not gate.enter(1, 0, 0) and not gate.enter(0, 50, 0)
    assert gate.enter(0, 51, 0), "its first step is one like the 49th of the other"


def test_who_is_silent_is_not_waited_for_and_may_come_back() -> None:
    now = [0.0]
    lost: list[int] = []
    gate = Gate(
        exchange=Asynchronous(workers=2, bound=0),
        silent_s=10,
        now=lambda: now[0],
        lost=lost.append,
    )
    assert not gate.enter(0, 0, 0) and not gate.enter(1, 0, 0)
    assert gate.enter(0, 1, 0)
    now[0] = 9.0
    assert gate.enter(0, 1, 0)
    now[0] = 11.0
    assert not gate.enter(0, 1, 0) and not gate.enter(0, 7, 0)
    assert lost == [1] and not gate.enter(1, 1, 0)
    assert gate.place(1) == gate.place(0) == 7


def test_one_trains_alone_until_the_warm_start_is_over() -> None:
    gate = Gate(exchange=Asynchronous(workers=3, warm=5))
    assert not gate.enter(2, 0, 0), "the first that asks"
    assert gate.enter(0, 0, 4) == "worker 2 trains alone, 4 of 5 pushes"
    assert not gate.enter(2, 4, 4)
    gate.leave(2)
    assert not gate.enter(1, 0, 4), "another, where it is gone"
    assert gate.enter(0, 0, 4) and not gate.enter(0, 0, 5)


def test_all_that_is_wrong_is_listed() -> None:
    with pytest.raises(shardlib.PinError) as caught:
        shardlib.Asynchronous(
            workers=0,
            servers=True,
            fetch=0,
            push=1.5,  # pyright: ignore[reportArgumentType]
            bound=-1,
            rule="adam",  # pyright: ignore[reportArgumentType]
            rate=float("nan"),
            by_staleness=1,  # pyright: ignore[reportArgumentType]
            warm=-1,
            local_rate=-0.1,
            accumulator=float("inf"),
        )
    assert len(caught.value.failures) == 11
    assert "rule is 'adam'; it is 'adagrad' or 'sgd'" in str(caught.value)


def test_local_steps_need_steps_between_fetches() -> None:
    with pytest.raises(shardlib.PinError, match="fetched before every step\nTry: fetch=2"):
        shardlib.Asynchronous(local_rate=0.1)


@pytest.mark.parametrize(
    "pinned", [shardlib.Asynchronous(), "asynchronous:8", {"kind": "asynchronous", "workers": 3}]
)
def test_no_plan_has_it(pinned: Any) -> None:
    with pytest.raises(shardlib.PinError, match=r"Try: shardlib\.servers\.train\("):
        read_exchange("exchange", pinned)


def test_it_is_written_and_printed() -> None:
    made = shardlib.Asynchronous(workers=3, rate=1)
    assert made.to_json()["workers"] == 3 and made.to_json()["kind"] == "asynchronous"
    assert str(made) == "asynchronous:workers=3:rate=1.0"


def test_losses_that_are_not_finite_are_told_apart() -> None:
    losses = (4.0, *(1.0,) * 7, float("nan"))
    found = _first_and_last(losses)
    assert found == "4.0000 at first, 1.0000 at last (1 of the last 8 not finite)"


# The loop of workers in threads, with gradients that cost nothing: warm start, bound, periods.


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
class Seen(Direct):
    """A link that writes down who asked for what, in the order of answers."""

    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def ask(
        self, ask: Ask, arrays: Outgoing | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        found = super().ask(ask, arrays, arrivals)
        if found[0].kind == "ok":
            self.asked.append((ask.kind, ask.worker, ask.step))
        return found


def run(
    exchange: Asynchronous, steps: int, seconds: tuple[float, ...], *, at_once: bool = False
) -> list[Seen]:
    """Runs a worker in a thread for each of `seconds`, which its steps take; what servers saw.
    `at_once`: nobody ends the first step before all have begun it.
    """
    barrier = threading.Barrier(len(seconds)) if at_once else None
    links = [Seen(Service(exchange=exchange, server=k)) for k in range(exchange.servers)]
    calls = []
    for number, each in enumerate(seconds):
        computing: Any = Computing(barrier)
        worker = Worker(number=number, exchange=exchange, computing=computing, links=links)
        calls.append(partial(worker.run, steps, lambda worker, step, each=each: each, None))
    together(*calls)
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
    links = run(Asynchronous(workers=3, servers=1, bound=2), 30, (0.0, 0.001, 0.01), at_once=True)
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
