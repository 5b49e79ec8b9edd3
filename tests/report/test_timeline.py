"""Timelines of plans: they add up to the estimate, survive JSON, and draw what the schedule
says.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from shardlib.cost.framework import XLA, FrameworkProfile
from shardlib.errors import PlanError
from shardlib.graph import Problem, check, forward_pass
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.workload import Workload, prepare
from shardlib.report.timelines import IDLE, Slice, Timeline, free, lockstep
from shardlib.schedules import Durations, Timetable
from tests.planner import worlds


def world() -> Problem:
    return worlds.made(worlds.layers, depth=8, vocab=512)


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b", "remat": "full"},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "odd": {
        "schedule": "interleaved",
        "virtual_stages": 2,
        "mesh": {"stage": 3},
        "microbatches": 16,
    },
    "zero-bubble": {"schedule": "zero-bubble", "remat": "none"},
    "groups": {"schedule": "1f1b", "remat": "full", "accumulation": 2},
    "chunks in groups": {"schedule": "interleaved", "virtual_stages": 2, "accumulation": 2},
    "few": {"schedule": "zero-bubble", "remat": "none", "microbatches": 2},
    "some": {"schedule": "1f1b", "remat": "full", "remat_layers": 1},
}


@functools.cache
def _load(software: FrameworkProfile) -> Workload:
    return prepare(world(), "nvidia", software)


def _plan(name: str, **facts: Any) -> Plan:
    software = replace(XLA, name="test", **facts) if facts else XLA
    return planner.search(
        world(),
        topology("4*h100:1"),
        {"mesh": {"stage": 4}, "microbatches": 8, **SCHEDULES[name]},
        workload=_load(software),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"pipeline": "asynchronous"},
        {"pipeline": "asynchronous", "embedding_and_head": "owners"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_ticks_and_what_is_beside_them_are_a_step(name: str, facts: dict[str, Any]) -> None:
    plan = _plan(name, **facts)
    stage, line, seconds = plan.estimate.stage, plan.timeline(), plan.estimate.seconds
    assert stage is not None and stage.lockstep == ("pipeline" not in facts)
    assert line.step_seconds == pytest.approx(plan.estimate.step_seconds, rel=1e-9)
    assert line.seconds == pytest.approx(
        plan.microbatches * stage.total / (1 - line.bubble), rel=1e-9
    )
    assert 0 < line.seconds <= seconds.compute + seconds.exposed + seconds.bubble + seconds.overhead
    assert [seconds for what, seconds in line.beside if what == "optimizer update"] == [
        seconds.optimizer
    ]
    assert len(line.slices) == line.stages * plan.microbatches * plan.virtual_stages * (
        3 if plan.schedule == "zero-bubble" else 2
    )
    assert Plan.from_json(plan.to_json()).timeline() == line


@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_forward_pass_has_the_work_of_the_loss(policy: str) -> None:
    graph = world().steps[policy].graph
    for saves in (False, True):
        part = forward_pass(graph, saves=saves)
        check(part)
        assert part.flops == pytest.approx(world().forward.flops, rel=0.02)
        assert part.flops < graph.flops / 2
    assert forward_pass(graph, saves=False).outputs == graph.outputs[:1]
    assert set(forward_pass(graph, saves=True).outputs) > set(graph.outputs[:1])


@pytest.mark.long
def test_recomputing_makes_the_backward_pass_longer_and_nothing_else() -> None:
    lean, some, full = (_plan(name).estimate.stage for name in ("gpipe", "some", "1f1b"))
    assert lean is not None and some is not None and full is not None
    assert lean.backward < some.backward < full.backward and lean.weights == pytest.approx(
        full.weights
    )
    assert (
        full.forward <= lean.forward * 1.001 < 0.6 * lean.total
    )  # what the backward pass needs is written by the forward pass


def test_text_shows_who_does_what_when() -> None:
    slices, seconds = lockstep(
        Timetable(schedule="1f1b", stages=2, microbatches=2), Durations(forward=10, backward=10)
    )
    text = str(
        Timeline(
            name="predicted",
            title="a model",
            stages=2,
            slices=slices,
            seconds=seconds,
            beside=(("optimizer update", 0.5), ("nothing", 0.0)),
        )
    )
    first, second = text.splitlines()[1:3]
    assert (
        first
        == "stage 0  0" + ">" * 16 + "1" + ">" * 15 + " " * 34 + "0" + "<" * 15 + "1" + "<" * 16
    )
    assert (
        second
        == "stage 1  "
        + " " * 17
        + "0"
        + ">" * 15
        + "0"
        + "<" * 16
        + "1"
        + ">" * 16
        + "1"
        + "<" * 15
    )
    assert (
        "ticks 60.0 s, of which stages wait 33.3% + optimizer update 500 ms = a step of 60.5 s"
        in text
    )
    assert "nothing" not in text


def test_time_in_which_nothing_is_asked_for_is_no_work() -> None:
    def work(kind: str) -> Timeline:
        return Timeline(
            name="measured",
            title="",
            stages=1,
            slices=(Slice(stage=0, kind=kind, label="0", start=0, seconds=3),),
            seconds=4,
        )

    assert (work("both").bubble, work(IDLE).bubble) == (0.25, 1.0)


def test_a_group_that_is_not_full_takes_as_long_as_a_full_one() -> None:
    odd, full = (
        free(
            Timetable(schedule="interleaved", stages=4, microbatches=micro, virtual=2),
            Durations(forward=1, backward=2),
        )
        for micro in (6, 8)
    )
    assert odd[1] == full[1]
    assert len(odd[0]) == len(full[0]) * 6 / 8
    assert max(one.end for one in odd[0]) <= odd[1]


def test_plans_without_stages_or_without_their_seconds_have_no_timeline() -> None:
    plan = planner.search(world(), topology("h100:4"), {"mesh": {"fsdp": 4}}, workload=_load(XLA))
    assert plan.estimate.stage is None
    with pytest.raises(PlanError, match="no pipeline stages to draw"):
        plan.timeline()
    old = _plan("1f1b")
    with pytest.raises(PlanError, match="how long a stage takes\nTry: make it again"):
        replace(old, estimate=replace(old.estimate, stage=None)).timeline()
