"""Scaling curves: every point is the best plan, and the figures follow from the plans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardlib.cost.roofline import margin
from shardlib.errors import InfeasibleError, PinError
from shardlib.machines.topology import Topology, of_size, topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.scaling import ScalingCurve, curve
from shardlib.planner.workload import Workload
from tests.planner import worlds
from tests.planner.fixture_plan import PLAN
from tests.planner.worlds import with_memory

BOTH = ["optimizer", "activations"]


def workload() -> Workload:
    return worlds.prepared(worlds.layers, batch=64)


def planned(where: Topology) -> Plan:
    return planner.search(workload().problem, where, workload=workload())


def timed(devices: int, step_seconds: float, tokens: int = 1000) -> Plan:
    """A plan with a given time and batch, everything else made up."""
    seconds = replace(
        PLAN.estimate.seconds, compute=step_seconds, exposed=0.0, optimizer=0.0, overhead=0.0
    )
    return replace(
        PLAN,
        topology=f"h100:{devices}",
        estimate=replace(PLAN.estimate, seconds=seconds, tokens=tokens),
    )


def made_up(times: dict[int, float | Exception]) -> ScalingCurve:
    """A curve with given step times by number of devices."""

    def plan(machine: Topology) -> Plan:
        found = times[machine.devices]
        if isinstance(found, Exception):
            raise found
        return timed(machine.devices, found)

    return curve("toy", "strong", [of_size("cpu:1", n) for n in times], plan)


@pytest.mark.long
def test_points_are_the_best_plans_and_their_figures():
    machines = [of_size("h100:8", n) for n in (4, 1, 16, 2)]
    found = curve("world", "strong", machines, planned)
    assert [point.devices for point in found.points] == [1, 2, 4, 16]
    first = found.points[0].plan
    for point in found.points:
        best = planned(of_size("h100:8", point.devices))
        assert point.plan is not None
        assert point.plan.decisions == best.decisions
        assert point.topology == best.topology
        assert point.efficiency == pytest.approx(
            first.estimate.step_seconds / (best.estimate.step_seconds * point.devices)
        )
    assert next(p.speed_up for p in found.points) == 0
    jump = found.points[3]
    assert jump.speed_up == pytest.approx(
        (found.points[2].plan.estimate.step_seconds / jump.plan.estimate.step_seconds) ** 0.5
    )  # two doublings


@pytest.mark.parametrize("used", [1, 2, 8])
def test_devices_that_share_cores_have_no_more_than_their_peak(used: int):
    """A device whose neighbours idle is faster, and so is the peak that it is held against."""
    machine = replace(
        topology("cpu:8"), alone=6.0, efficiency={"matmul": 1.0, "memory": 1.0, "step_s": 1e-9}
    )
    pin = {"mesh": {"data": used}}

    def on(where: Topology) -> Plan:
        return planner.search(worlds.mlp(4096, 256, 1024), where, pin)

    plan, static = on(machine), on(topology("cpu:8"))
    faster = min(6.0, 8 / used)
    assert plan.estimate.peak_flops_per_s == pytest.approx(
        faster * static.estimate.peak_flops_per_s
    )
    assert 0 < plan.estimate.mfu <= plan.estimate.hfu <= 1
    (point,) = curve("world", "strong", [machine], on).points
    assert point.mfu == pytest.approx(plan.estimate.mfu * min(6.0 * used / 8, 1.0))


@pytest.mark.parametrize(
    ("times", "enough", "reason"),
    [
        ({1: 8.0, 2: 4.0, 4: 2.0}, 4, ""),
        (
            {1: 8.0, 2: 4.0, 4: 3.7},
            2,
            "doubling to 4 devices would give 1.08x the tokens per second",
        ),
        ({1: 8.0, 2: 5.0, 4: 4.2, 8: 3.0}, 2, "4 devices would work at an efficiency of 47.6%"),
        ({1: 8.0, 2: 9.0, 4: 1.0}, 1, "2 devices would work at an efficiency of 44.4%"),
        ({1: InfeasibleError("too large", short_bytes=5), 2: 4.0, 4: 2.0}, 4, ""),
        ({1: 8.0, 4: 2.0}, 4, ""),
    ],
)
def test_where_more_devices_do_not_pay(
    times: dict[int, float | Exception], enough: int, reason: str
):
    found = made_up(times)
    assert (found.enough.devices if found.enough else None, found.reason) == (enough, reason)
    assert ("do not pay" in str(found)) == bool(reason)


def test_machines_that_hold_no_plan_are_points_too():
    found = made_up(
        {
            1: InfeasibleError("m does not fit\nTry: more", short_bytes=3 * 2**30),
            2: PinError("no mesh"),
            4: 2.0,
            8: 1.0,
        }
    )
    assert [(p.plan is None, p.short_bytes, p.message) for p in found.points[:2]] == [
        (True, 3 * 2**30, "m does not fit"),
        (True, 0, "no mesh"),
    ]
    assert found.points[2].efficiency == 1 and found.points[3].efficiency == pytest.approx(1)
    text = str(found)
    assert "lacks 3.00 GiB per device" in text and "no plan: no mesh" in text
    assert [point.to_json()["fits"] for point in found.points] == [False, None, True, True]


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({1: InfeasibleError("m", short_bytes=1)}, "no machine holds the model"),
        ({1: PinError("p")}, "has a plan, not for lack of memory"),
        (
            {1: InfeasibleError("m", short_bytes=1), 3: PinError("p")},
            "has a plan, only 1 for lack of memory",
        ),
    ],
)
def test_no_plan_at_all_is_blamed_on_memory_only_where_that_is_why(
    times: dict[int, float | Exception], reason: str
):
    nothing = made_up(times)
    assert nothing.enough is None and nothing.reason.endswith(reason)
    text = " ".join(str(nothing).split())
    assert f"{nothing.reason[0].upper()}{nothing.reason[1:]}." in text


@pytest.mark.long
def test_a_world_that_does_not_fit_says_how_much_is_lacking():
    leanest = min(  # what is short of memory may put something into that of the host
        entry.peak_bytes
        for pin in ({}, *({"offload": parts} for parts in (["optimizer"], ["activations"], BOTH)))
        for entry in planner.ranked(workload().problem, "h100:1", pin, workload=workload())
    )
    machine = with_memory(topology("h100:1"), leanest / 2)
    (point,) = curve("world", "strong", [machine], planned).points
    assert point.short_bytes == pytest.approx(
        leanest * margin(machine) - machine.chip.usable_bytes, abs=1
    )
    assert point.plan is None


def test_idle_devices_count_for_efficiency_and_mfu():
    plan = replace(timed(16, 1.0), mesh=PLAN.mesh)
    (point,) = curve("m", "strong", [of_size("cpu:1", 32)], lambda _: plan).points
    assert point.mfu == pytest.approx(plan.estimate.mfu / 2) and "(16 idle)" in str(
        ScalingCurve(model="m", kind="strong", points=(point,))
    )


def test_json_says_the_same():
    found = made_up({1: InfeasibleError("m", short_bytes=7), 2: 4.0, 4: 3.9})
    data = json.loads(json.dumps(found.to_json()))
    assert data["enough_devices"] == 2 and data["points"][0] == {
        "devices": 1,
        "topology": "cpu:1",
        "fits": False,
        "short_bytes": 7,
        "message": "m",
    }
    assert data["points"][2]["pays"] is False and data["points"][1][
        "tokens_per_second"
    ] == pytest.approx(250)
