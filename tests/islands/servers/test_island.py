"""Islands with programs of their own and an outer server of this process, against the program of
all islands, and against loops over replicas with optax.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import shardlib
from shardlib.islands.meeting import packed, unpacked
from shardlib.islands.servers.island import Island
from shardlib.islands.servers.joining import MeetingPlace, join
from shardlib.islands.servers.rounds import Rounds, RoundService, pack, unpack
from tests.islands.replicas import close, diloco
from tests.islands.servers.helpers import Direct, together
from tests.islands.servers.jobs import AXES, loss, rows, weights

Tree = Any
STEPS = 8
OPTIMIZER = optax.adamw(1e-2, eps=1e-3)


def batch(step: int) -> Tree:
    """Of both islands."""
    return jax.tree.map(lambda *a: np.concatenate(a), rows(0, step), rows(1, step))


@functools.cache
def program(number: int) -> Any:
    """Of an island on two devices of its own; each island has its own plan."""
    pins = [{"mesh": {"fsdp": 2}, "zero": 3}, {"mesh": {"data": 2}, "zero": 0}]
    return shardlib.compile(
        shardlib.tree(weights, AXES),
        loss,
        OPTIMIZER,
        rows(0, 0),
        topology="cpu:2",
        pin=pins[number],
        devices=jax.devices()[2 * number : 2 * number + 2],
    )


def joined(service: RoundService, number: int, exchange: Any, **more: Any) -> Island:
    place = MeetingPlace(host="127.0.0.1", port=1, island=number, token="a secret word")
    found = join(program(number), exchange=exchange, place=place, **more)
    found.exchanging.link = Direct(service)
    found.say = lambda text: None
    return found


def trained(exchange: Any, steps: int = STEPS) -> tuple[list[Island], list[Any], list[list[float]]]:
    """The islands, their states and their losses."""
    service = RoundService(islands=2)
    islands = [joined(service, number, exchange) for number in range(2)]

    def run(island: Island) -> tuple[Any, list[float]]:
        state, losses = island.start(0), []
        for step in range(steps):
            state, metrics = island.step(state, rows(island.number, step))
            losses.append(float(metrics["loss"]))
        if island._crossing is not None:
            state, _ = island._taken(state, again=False)
        return state, losses

    done = together(*(functools.partial(run, island) for island in islands))
    return islands, [state for state, _ in done], [losses for _, losses in done]


@pytest.mark.long
@pytest.mark.parametrize("delay", [0, 1])
def test_two_islands_are_the_program_of_both(delay: int) -> None:
    exchange = shardlib.DiLoCo(islands=2, every=2, rate=0.5, momentum=0.8, delay=delay)
    islands, states, losses = trained(exchange, STEPS + delay)
    both: Any = shardlib.compile(
        shardlib.tree(weights, AXES),
        loss,
        OPTIMIZER,
        batch(0),
        topology="cpu:4",
        pin={"exchange": exchange, "mesh": {"fsdp": 2}, "zero": 3},
    )
    state = both.init(0)
    for step in range(STEPS + delay):
        state, metrics = both.step(state, batch(step))
        each = [float(one["loss"]) for one in metrics.islands]
        np.testing.assert_allclose([one[step] for one in losses], each, rtol=2e-6)
    for island, mine, theirs in zip(islands, states, state.islands, strict=True):
        close(island.module(mine), both.module(state))
        close(mine.params, theirs.params)
    assert [met.islands for met in islands[0].meetings] == [(0, 1)] * 4


def replicas(every: int, fragments: int, delay: int, mixing: float) -> list[Tree]:
    """The same as a loop over replicas: outer parameters, then the replicas. Fragments are equal
    runs of all elements, by path.
    """
    flat, back = ravel_pytree(first())
    ends = np.asarray([len(flat) * k // fragments for k in range(1, fragments + 1)])
    each = np.searchsorted(ends, np.arange(len(flat)), side="right")
    _, outer, own = diloco(
        loss,
        first(),
        OPTIMIZER,
        [[rows(0, step), rows(1, step)] for step in range(STEPS)],
        every=every,
        rate=0.5,
        momentum=0.8,
        fragments=[back(each == fragment) for fragment in range(fragments)],
        delay=delay,
        mixing=mixing if delay else 0.0,
        all_arrive=True,
    )
    return [outer, *own]


@functools.cache
def first() -> Tree:
    found = program(0)
    return jax.tree.map(np.asarray, found.module(found.init(0)))


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "mixing"),
    [(2, 1, 1, 0.5), (2, 1, 2, 0.3), (4, 2, 1, 0.0), (6, 3, 0, 0.5)],
)
def test_islands_with_a_delay_are_a_loop_over_replicas(
    every: int, fragments: int, delay: int, mixing: float
) -> None:
    exchange = shardlib.DiLoCo(
        islands=2,
        every=every,
        rate=0.5,
        momentum=0.8,
        fragments=fragments,
        delay=delay,
        mixing=mixing,
    )
    islands, states, _ = trained(exchange)
    outer, *own = replicas(every, fragments, delay, mixing)
    for island, state, mine in zip(islands, states, own, strict=True):
        close(state.params, mine, 5e-6)
        close(island.module(state), outer, 5e-6)


def test_narrow_dtypes_are_those_of_meetings_in_one_process() -> None:
    vector = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    vector[:3] = [0.0, 2.5, -2.5]
    padded = np.pad(vector, (0, 24))
    for wire in ("bfloat16", "int8", "int4"):
        there = unpack(pack(vector, [1000], wire), [1000], wire)
        here = unpacked(packed(jnp.asarray(padded)[None], wire), wire)[0, :1000]
        np.testing.assert_allclose(there, here, rtol=3e-7)  # XLA multiplies by 1/7


def test_int8_is_within_its_rounding() -> None:
    exchange = shardlib.DiLoCo(islands=2, every=4, rate=0.5, momentum=0.8)
    exact, _, _ = trained(exchange, 4)
    narrow, _, _ = trained(replace(exchange, wire="int8"), 4)
    theta, other = (one[0].exchanging.outer.theta for one in (exact, narrow))
    moved = np.abs(theta - exact[0].exchanging.outline.vector(first())).max() / 0.9
    assert 0 < np.abs(theta - other).max() <= 0.9 * moved / 127, "two halves of a step"
    assert np.array_equal(narrow[0].exchanging.outer.theta, narrow[1].exchanging.outer.theta)


def test_an_island_that_comes_back_takes_the_outer_parameters() -> None:
    exchange = shardlib.DiLoCo(islands=2, every=2, rate=0.5, momentum=0.8)
    service = RoundService(islands=2, rounds=Rounds(timeout_s=0.05))
    one, two = joined(service, 0, exchange), joined(service, 1, exchange)
    mine, theirs = together(lambda: one.start(0), lambda: two.start(0))
    for step in range(4):
        mine, _ = one.step(mine, rows(0, step))
    assert [met.islands for met in one.meetings] == [(0,), (0,)]
    theirs, _ = two.step(theirs, rows(1, 0))

    def back() -> Any:
        return two.step(theirs, rows(1, 1))[0]

    def on(mine: Any = mine) -> Any:
        while two.round < 4:  # meets until the other has come back
            mine, _ = one.step(mine, rows(0, 9))
        return mine

    theirs, mine = together(back, on)
    assert two.steps == 2 * (two.round - 1) and two.events[0].startswith("round 1 was closed")
    close(theirs.params, two.module(theirs), 0.0)


def test_rows_weigh_and_programs_are_refused() -> None:
    exchange = shardlib.DiLoCo(islands=2, every=2)
    service = RoundService(islands=2)
    assert joined(service, 0, exchange).exchanging.weight == 16
    assert joined(service, 0, exchange, weight=2).exchanging.weight == 2
    said = joined(service, 0, exchange, link="1mbit-20ms").findings[0].message
    assert "over a server" in said and "Over its link that takes" in said
    with pytest.raises(shardlib.PinError, match="exchange is gossip:4:ring; islands that are"):
        joined(service, 0, "gossip:4:ring")
    with pytest.raises(shardlib.PinError, match="there are 1000 fragments of 145 elements"):
        joined(service, 0, "diloco:2:1000:fragments=1000")
    with pytest.raises(
        shardlib.ArgumentError,
        match=r"weight is 0.*\n.*patience_s is -1; it is a number of at least 20",
    ):
        joined(service, 0, exchange, weight=0, patience_s=-1)
    with pytest.raises(shardlib.ArgumentError, match="link is 'fast'"):
        joined(service, 0, exchange, link="fast")
    place = MeetingPlace(host="127.0.0.1", port=1, island=2, token="a secret word")
    with pytest.raises(shardlib.ArgumentError, match="island 2 is not one of 2"):
        join(program(0), exchange=exchange, place=place)
    with pytest.raises(shardlib.LaunchError, match=r"(?s)SHARDLIB_MEETING is.*shardlib launch"):
        join(program(0), exchange=exchange)
    with pytest.raises(shardlib.StateError, match="has not started"):
        joined(service, 0, exchange).step(None, rows(0, 0))  # pyright: ignore
