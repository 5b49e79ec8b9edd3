"""Rounds of the outer server: who is waited for, what is counted, what a restart loses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shardlib
from shardlib.islands.servers.island import Exchanging, MeetingRecord, PendingMeeting
from shardlib.islands.servers.rounds import Attendance, Outline, Rounds, RoundService, checksum
from shardlib.islands.servers.wire import Ask, Flat
from tests.islands.servers.helpers import Direct, together

SHAPES = {"b": (3, 2), "a": (5,)}
OUTLINE = Outline.of(SHAPES)
EXCHANGE = shardlib.DiLoCo(islands=2, every=2, rate=0.5, momentum=0.8)


def island(
    service: RoundService, number: int, exchange: shardlib.DiLoCo = EXCHANGE, weight: float = 1.0
) -> Exchanging:
    return Exchanging(
        link=Direct(service), number=number, exchange=exchange, outline=OUTLINE, weight=weight
    )


def first() -> Flat:
    return {path: np.ones(shape, np.float32) for path, shape in SHAPES.items()}


def entered(*islands: Exchanging) -> None:
    entered_all(first, *islands)


def entered_all(first: Callable[[], Flat], *islands: Exchanging) -> None:
    """All enter at once."""
    together(*(partial(one.enter, first) for one in islands))


def sent(one: Exchanging, value: float) -> PendingMeeting:
    """An island whose parameters are all `value` meets."""
    start, stop = one.span()
    return one.send(lambda: [np.full(stop - start, value, np.float32)])


def taken(future: PendingMeeting) -> MeetingRecord:
    """What came of a meeting that was in time."""
    found = future.result()
    assert found is not None
    return found


def met(one: Exchanging, value: float) -> MeetingRecord | None:
    return sent(one, value).result()


def test_the_mean_is_weighted_and_all_have_the_same() -> None:
    exchange = shardlib.DiLoCo(islands=2, every=2, rate=0.5, momentum=0.8, fragments=2)
    service = RoundService(islands=2)
    one, two = island(service, 0, exchange, weight=3.0), island(service, 1, exchange)
    entered(one, two)
    theta, v = np.ones(11, np.float64), np.zeros(11)
    for number in range(1, 5):
        span = slice(*one.span())
        future = sent(one, 0.5 * number)
        assert met(two, -1.0) and future.result()
        d = theta[span] - (3 * 0.5 * number - 1.0) / 4
        v[span] = d + 0.8 * v[span]
        theta[span] -= 0.5 * (d + 0.8 * v[span])
        assert service.state is not None
        for outer in (one.outer, two.outer, service.state.outer):
            np.testing.assert_allclose(outer.theta, theta, rtol=1e-6, atol=1e-6)
        assert np.array_equal(one.outer.theta, service.state.outer.theta)
    assert one.round == two.round == 5


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
def test_narrow_dtypes_leave_all_alike(wire: str) -> None:
    exchange = shardlib.DiLoCo(islands=2, every=2, wire=wire, rate=1.0, momentum=0.0)
    service = RoundService(islands=2)
    one, two = island(service, 0, exchange), island(service, 1, exchange)
    entered(one, two)
    mine = np.random.default_rng(0).normal(size=(2, 11)).astype(np.float32)
    future = one.send(lambda: [mine[0]])
    assert two.send(lambda: [mine[1]]).result() and future.result()
    assert service.state is not None
    assert np.array_equal(one.outer.theta, service.state.outer.theta)
    step = {"bfloat16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}[wire]
    largest = np.abs(1 - mine).max()
    assert np.abs(one.outer.theta - mine.mean(0)).max() <= step * largest


def test_an_island_that_sends_nothing_is_left_out_and_enters_again() -> None:
    service = RoundService(islands=2, rounds=Rounds(timeout_s=0.05))
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    found = met(one, 0.0)
    assert found is not None and found.islands == (0,)
    assert service.events == [
        "island 1 has sent nothing 0.05 s after the first; the others go on without it"
    ]
    assert met(two, 5.0) is None, "its round is over"
    future = sent(one, 0.0)
    two.enter(first)  # waits for the open round
    assert future.result() and two.round == one.round == 3
    assert np.array_equal(one.outer.theta, two.outer.theta)


def test_an_island_that_was_left_out_is_not_waited_for_again() -> None:
    service = RoundService(islands=2, rounds=Rounds(timeout_s=0.05))
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    assert taken(sent(one, 0.0)).islands == (0,)
    assert service.table.active == {0}
    assert taken(sent(one, 0.0)).islands == (0,)
    assert len(service.events) == 1, "it is late once"


def test_an_island_whose_connection_closes_is_waited_for_a_while() -> None:
    service = RoundService(islands=2, rounds=Rounds(away_s=0.3))
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    future = sent(one, 0.0)
    service.gone(1)
    found = met(two, 0.0)
    assert found is not None and found.islands == (0, 1), "it has come back"
    assert taken(future)
    future = sent(one, 0.0)
    service.gone(1)
    assert taken(future).islands == (0,)
    assert service.events == ["island 1 is gone in round 2; the others go on"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_in_no_mean(value: float) -> None:
    service = RoundService(islands=2)
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    future = sent(one, value)
    found = met(two, 0.0)
    assert found is not None and found.islands == (1,)
    assert not taken(future).finite
    assert service.events == ["the outer gradient of island 0, round 1, is not finite"]
    assert np.array_equal(one.outer.theta, two.outer.theta) and np.isfinite(one.outer.theta).all()
    base = checksum(one.outer.theta, 0, 11)
    stranger = Ask(kind="send", worker=0, start=one.entry, round=2, weight=1.0, base=base)
    future = sent(two, 0.0)
    service.answer(stranger, {"numbers": np.full(11, value, np.float32)}, 0)
    assert taken(future).islands == (1,)
    assert service.events[-1] == "refused the outer gradient of island 0, round 2: it is not finite"


def test_without_any_finite_outer_gradient_nothing_changes() -> None:
    service = RoundService(islands=2)
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    future = sent(one, np.nan)
    found = met(two, 1e38)
    assert found is not None and future.result()
    assert found.islands == (1,)
    future = sent(one, np.nan)
    found = met(two, np.nan)
    assert found is not None and found.islands == ()
    assert service.events[-1] == "round 2 changes nothing: no outer gradient was finite"


@pytest.mark.parametrize("behind", [False, True])
def test_a_server_that_is_started_again_has_lost_nothing(tmp_path: Path, behind: bool) -> None:
    path, kept = tmp_path / "outer.safetensors", tmp_path / "kept"
    service = RoundService(islands=2, checkpoint=path)
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    service.save()
    kept.write_bytes(path.read_bytes())
    future, before = sent(one, 0.5), replace(two.outer, theta=two.outer.theta.copy())
    before.momentum = two.outer.momentum.copy()
    assert met(two, 0.0) and taken(future)
    service.save()
    # Island 1 has not heard of the first round; where the server was killed before it had written
    # that, nor has the server.
    again = RoundService(islands=2, checkpoint=kept if behind else path)
    one.link = two.link = Direct(again)
    assert again.events == [f"it goes on at its checkpoint, before round {1 if behind else 2}"]
    two._outer, two.round = before, 1
    late = sent(two, 0.0)
    future = sent(one, 0.25)
    assert taken(late).round == 1
    assert np.array_equal(one.outer.theta, two.outer.theta)
    assert met(two, 0.25) and taken(future).islands == (0, 1)
    assert again.state is not None and np.array_equal(one.outer.theta, again.state.outer.theta)
    assert np.array_equal(one.outer.momentum, again.state.outer.momentum)
    if behind:
        assert again.events[1:] == ["it has heard of round 1 from island 0"]


def test_rounds_that_a_server_has_lost_are_begun_anew(tmp_path: Path) -> None:
    path, rounds = tmp_path / "outer.safetensors", Rounds(save_every=2)
    service = RoundService(islands=2, checkpoint=path, rounds=rounds)
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    for _ in range(3):
        future = sent(one, 0.5)
        assert met(two, 0.0) and future.result()
    assert service._file is not None
    service._file.wait()
    again = RoundService(islands=2, checkpoint=path, rounds=rounds)
    for each in (one, two):
        each.link = Direct(again)
    assert again.table.number == 3
    assert met(one, 0.0) is None and met(two, 0.0) is None, "theirs is round 4"
    entered(one, two)
    assert one.round == two.round == 3


def test_a_round_that_is_short_waits_for_who_comes() -> None:
    service = RoundService(islands=2, rounds=Rounds(quorum=2, timeout_s=0.05, away_s=0))
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    future = sent(one, 0.0)
    service.gone(1)
    late = island(service, 1)
    late.enter(first)
    assert late.round == service.table.number == 1
    assert met(late, 0.0) and taken(future).islands == (0, 1)


def test_a_round_that_is_short_fails_where_that_is_asked_for() -> None:
    service = RoundService(islands=2, rounds=Rounds(quorum=2, timeout_s=0.05, short="fail"))
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    says = r"the outer server ends island 0: round 1 has 1 of at least 2 islands 0.05 s after"
    with pytest.raises(shardlib.LaunchError, match=says):
        met(one, 0.0)


def test_the_first_round_waits_for_all_and_then_for_nobody() -> None:
    now = [0.0]
    table = Attendance(islands=3, rounds=Rounds(gather_s=9, quorum=2), now=lambda: now[0])
    table.come(0)
    table.come(2)
    assert not table.active
    now[0] = 9.0
    table.admit()
    assert table.active == {0, 2}
    table.come(1)
    table.send(0)
    assert not table.closes() and 1 in table.waiting, "who comes late waits for the next round"
    table.send(2)
    assert table.closes() and table.close() == [] and table.active == {0, 1, 2}
    table.gone(2)
    table.come(2)
    assert table.active == {0, 1}, "it waits while others are in the round"
    now[0] = 18.0
    table.admit()
    assert table.active == {0, 1, 2}, "but not for ever: they may never send"


def test_islands_of_another_run_are_refused() -> None:
    service = RoundService(islands=2)
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    other = island(service, 1, shardlib.DiLoCo(islands=2, every=4))
    with pytest.raises(shardlib.LaunchError, match=r"its exchange is diloco:2:4, and that of"):
        other.enter(first)
    other = island(service, 1)
    other.outline = Outline.of({"a": (5,)})
    with pytest.raises(shardlib.LaunchError, match=r"it trains other parameters than this run"):
        other.enter(first)
    more = RoundService(islands=3)
    with pytest.raises(shardlib.LaunchError, match=r"its exchange is of 2 islands.*of 3"):
        island(more, 0).enter(first)


def test_the_newest_process_of_an_island_counts(tmp_path: Path) -> None:
    path = tmp_path / "outer.safetensors"
    service = RoundService(islands=2, checkpoint=path)
    one, two, again = island(service, 0), island(service, 1), island(service, 1)
    entered(one, two)
    future = sent(one, 0.0)
    thread = threading.Thread(target=again.enter, args=(first,))
    thread.start()  # and `two` still runs, somewhere
    assert taken(future).islands == (0,)
    thread.join(60)
    with pytest.raises(shardlib.LaunchError, match="another process has entered as this island"):
        met(two, 0.0)
    future = sent(one, 0.0)
    assert met(again, 0.0) and taken(future).islands == (0, 1)


def test_an_island_with_other_outer_parameters_enters_again() -> None:
    service = RoundService(islands=2)
    one, two = island(service, 0), island(service, 1)
    entered(one, two)
    two.outer.theta[3] += 1e-6
    assert met(two, 0.0) is None
    assert service.events == ["island 1 has other outer parameters; it enters again"]
    threading.Thread(target=two.enter, args=(first,)).start()
    assert taken(sent(one, 0.0)).islands == (0,)


def test_settings_out_of_range() -> None:
    with pytest.raises(shardlib.ArgumentError, match=r"(?s)timeout_s is 0.*quorum is 0.*short is"):
        Rounds(timeout_s=0, quorum=0, short="x")  # pyright: ignore[reportArgumentType]
