"""A schedule is added in one file and one line of the table: an object that says what it does is
planned, priced, explained, drawn and followed by per-stage programs.
"""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlib import schedules
from shardlib.cost.framework import XLA
from shardlib.decisions.pins import Pins
from shardlib.errors import PinError
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.space import attention_strategies, build_space
from shardlib.planner.workload import prepare
from shardlib.schedules import (
    Array,
    Durations,
    GPipe,
    OneForwardOneBackward,
    Order,
    Pipelines,
    makespan,
    simulate,
)
from tests.planner import worlds

WORLD = worlds.layers(depth=8, vocab=512)
ROOMS = Path(schedules.__file__).parent


class Eager(OneForwardOneBackward):
    """1F1B whose stages go forward once more before they go back (arXiv:2205.05198 calls such
    orders eager): the same bubble, one microbatch more in flight.
    """

    name = "eager"

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        later = super().order(stages=stages + 1, microbatches=microbatches, chunks=chunks)
        return later[:stages]

    def in_flight(self, pipelines: Pipelines) -> Array:
        held = np.minimum(pipelines.stages + 1, pipelines.microbatches)
        return np.where(pipelines.stages > 1, held, 1.0)


class Instant(OneForwardOneBackward):
    """A schedule that never waits, which none can be: planning must prefer it to all others."""

    name = "instant"

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        return np.zeros_like(tick)

    def bubble(self, pipelines: Pipelines) -> Array:
        return np.zeros(len(pipelines.stages))


class Unlowered(OneForwardOneBackward):
    """A schedule that no program is made of."""

    name = "unlowered"
    lowered = False


class Late(GPipe):
    """A schedule that works breadth first as GPipe does, under a name of its own."""

    name = "late"


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    for schedule in (Eager(), Instant(), Unlowered(), Late()):
        monkeypatch.setitem(schedules.SCHEDULES, schedule.name, schedule)  # pyright: ignore[reportArgumentType]


def plan(**pins: Any) -> Plan:
    software = dataclasses.replace(XLA, name="test", pipeline="asynchronous")
    given = {"mesh": {"stage": 4}, "microbatches": 8, "remat": "none", **pins}
    load = prepare(WORLD, "nvidia", software)
    return planner.search(WORLD, topology("4*h100:1"), given, workload=load)


@pytest.mark.usefixtures("added")
def test_a_new_schedule_is_pinned_priced_and_explained() -> None:
    eager, plain = plan(schedule="eager"), plan(schedule="1f1b")
    assert eager.schedule == "eager" and "4 stages, eager" in eager.explain()
    assert eager.estimate.step_seconds == plain.estimate.step_seconds
    held, usual = (one.estimate.device_bytes.activations for one in (eager, plain))
    assert usual < held < 2 * usual  # 5 microbatches in place of 4, at the peak of the layers
    assert eager.timeline().seconds == pytest.approx(plain.timeline().seconds)
    assert Plan.from_json(eager.to_json()).schedule == "eager"


@pytest.mark.usefixtures("added")
def test_planning_tries_a_new_schedule_by_itself() -> None:
    found = plan()
    assert (
        found.schedule == "instant"
        and found.estimate.seconds.bubble < plan(schedule="zero-bubble").estimate.seconds.bubble
    )


@pytest.mark.usefixtures("added")
def test_a_pinned_schedule_is_no_other_that_works_breadth_first_too() -> None:
    load = prepare(WORLD, "nvidia", XLA)
    pins = Pins.parse({"mesh": {"stage": 2, "fsdp": 8}, "schedule": "late"})
    usual, *_ = attention_strategies(load.problem, pins, XLA, topology("h100:8").chip)
    room = build_space(load, pins, None, usual)
    tried = room.zeros_and_schedules("full", pipelined=True)
    assert {one.schedule for one in tried} == {"late"}
    assert {one.virtual_stages for one in tried} > {1}


@pytest.mark.usefixtures("added")
def test_what_a_new_schedule_does_not_allow_is_refused() -> None:
    with pytest.raises(PinError, match=r"needs the schedule 'interleaved' or 'gpipe'.*'eager'"):
        Pins.parse({"schedule": "eager", "virtual_stages": 2})
    with pytest.raises(PinError, match="'zero-bubble', 'eager', 'instant', 'unlowered', 'late'"):
        Pins.parse({"schedule": "dualpipe"})
    assert plan(schedule="unlowered").schedule == "unlowered"  # of other software
    pins = {"mesh": {"stage": 4}, "schedule": "unlowered"}
    with pytest.raises(PinError, match="has no lowering: a pipeline schedule that no program is"):
        planner.search(WORLD, "4*h100:1", pins)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("micro", [1, 4, 9])
def test_the_order_of_a_new_schedule_keeps_its_formulas(micro: int) -> None:
    spans = simulate(
        schedules.orders("eager", stages=4, microbatches=micro), Durations(forward=1, backward=2)
    )
    shape = Pipelines.one(stages=4, microbatches=micro)
    wait = schedules.named("eager").waiting(shape, np.array([3.0]), None)[0]
    assert makespan(spans) == pytest.approx(micro * 3 + wait)


@pytest.mark.usefixtures("added")
def test_the_examples_of_the_table_hold_with_a_new_schedule() -> None:
    assert doctest.testmod(schedules).failed == 0 < doctest.testmod(schedules).attempted


def test_no_schedule_is_known_by_its_name_outside_of_its_file() -> None:
    names = "|".join(map(re.escape, schedules.SCHEDULES))
    compared = re.compile(
        rf"""[=!]=\s*["']({names})["']|\bin\s*\([^)]*["']({names})["']|case\s+["']({names})["']"""
    )
    about = re.compile(r"schedule")
    found = [
        f"{path.relative_to(ROOMS)}: {line.strip()}"
        for path in sorted(ROOMS.rglob("*.py"))
        for line in path.read_text().splitlines()
        if compared.search(line) and about.search(line)
    ]
    assert not found
