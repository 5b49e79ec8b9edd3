"""Who waits, and for whom."""

from __future__ import annotations

from shardlib.exchanges import Asynchronous
from shardlib.islands.servers.server import Gate


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
