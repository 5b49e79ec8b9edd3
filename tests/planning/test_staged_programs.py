"""Stages of one program on simulated devices: what they would take as programs of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlib.hardware.topology import Topology, topology
from shardlib.planning import planner
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import seconds_text
from tests.planning import worlds

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
