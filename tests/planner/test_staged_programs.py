"""Stages of one program on simulated devices: what they would take as programs of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlib.machines.topology import Topology, topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.report.elements import seconds_text
from tests.planner import worlds

PINS = {
    "mesh": {"stage": 4, "fsdp": 2},
    "microbatches": 8,
    "schedule": "1f1b",
    "remat": "none",
    "zero": 3,
}


#: Eight simulated devices on two cores, with constants as they are measured on one such machine.
MEASURED = replace(
    topology("cpu:8"),
    alone=5.4,
    efficiency={
        "matmul": 1.0,
        "memory": 1.0,
        "step_s": 9e-5,
        "depth": 9.4,
        "fresh": 20.3,
        "unfused": 2.15,
        "transcendental": 26.0,
        "vector": 0.93,
    },
)


def planned(where: str | Topology, **pins: Any) -> Plan:
    """Eight layers in four stages, all else pinned."""
    return planner.search(
        worlds.made(worlds.stack, depth=8, seq=64, embed=64, hidden=256, batch=1024),
        topology=where,
        pin={**PINS, **pins},
    )


def told(plan: Plan) -> list[str]:
    """What findings say of programs of their own."""
    return [one.message for one in plan.findings if one.code == "faster-as-programs"]


def test_the_seconds_that_are_told_are_those_of_the_plan_of_programs():
    apart = planned(MEASURED, pipeline="programs")
    together = planned(MEASURED)
    assert apart.estimate.step_seconds < 0.95 * together.estimate.step_seconds
    [message] = told(together)
    assert f"take {seconds_text(apart.estimate.step_seconds)} instead" in message


@pytest.mark.parametrize(
    ("where", "pins"),
    [
        (MEASURED, {"pipeline": "programs"}),
        (MEASURED, {"mesh": {"fsdp": 8}, "schedule": "none"}),
        ("h100:8", {}),
        ("v5e:2x4", {}),
    ],
)
def test_nothing_is_told_elsewhere(where: str | Topology, pins: dict[str, Any]):
    assert not told(planned(where, **pins))


@pytest.mark.parametrize("where", [MEASURED, "h100:8", "v5e:2x4"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_form_that_is_left_open_is_the_faster_of_both(where: str | Topology, stages: int):
    given = {"mesh": {"stage": stages}, "schedule": None, "microbatches": None, "zero": None}

    def best(**pins: Any) -> Plan:
        return planner.search(
            worlds.made(worlds.stack, depth=8, seq=64, embed=64, hidden=256, batch=1024),
            topology=where,
            pin={key: value for key, value in {**given, **pins}.items() if value is not None},
        )

    forms = [best(pipeline="lockstep")]
    if stages > 1:
        forms.append(best(pipeline="programs"))
    chosen = min(forms, key=lambda plan: plan.estimate.step_seconds)
    found = best(pipeline="any")
    assert found.decisions == chosen.decisions and found.estimate == chosen.estimate
    assert found.search.gap == 0 and found.search.lower_bound == pytest.approx(
        min(plan.search.lower_bound for plan in forms)
    )
    assert found.search.evaluations == sum(plan.search.evaluations for plan in forms)


@pytest.mark.long
def test_what_comes_next_is_of_both_forms():
    found = planned(MEASURED, pipeline="any", microbatches=8)
    assert found.pipeline == "programs" and not told(found)
    others = [planned(MEASURED, pipeline=form) for form in ("lockstep", "programs")]
    seconds = [one.step_seconds for one in found.alternatives(4)]
    assert seconds == sorted(seconds)
    together = max(others, key=lambda plan: plan.estimate.step_seconds)
    assert found.why_not(pipeline="lockstep") == found.diff(together)
    assert together.why_not(pipeline="any") == together.diff(found)


def test_a_form_that_has_no_plan_leaves_the_other():
    found = planned(MEASURED, pipeline="any", gather="once", schedule="gpipe", virtual_stages=2)
    assert found.pipeline == "lockstep" and found.gather == "once"
