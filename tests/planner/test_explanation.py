"""Alternatives, constraints and sensitivity, held to what a search and brute force say."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import pytest

from shardlib.cost.roofline import margin
from shardlib.machines.topology import Topology, topology
from shardlib.planner import questions
from shardlib.planner import search as planner
from shardlib.planner.answers import alternatives_text
from shardlib.planner.plan import Ranked
from shardlib.planner.questions import SHOCK, constraints, staircase
from shardlib.planner.workload import Workload
from shardlib.report.elements import WIDTH
from tests.planner import worlds
from tests.planner.worlds import planned, with_memory, workload

GB = 10**9


def perceptron() -> Workload:
    """A model whose plans are found in a fifth of the time, for questions of many searches."""
    return worlds.prepared(worlds.mlp, batch=4096, embed=1024, hidden=4096)


@functools.cache
def ranked(where: str) -> list[Ranked]:
    return list(planner.ranked(workload().problem, where, workload=workload()))


def tight(where: str, share: float, load: Workload | None = None) -> Topology:
    """A topology whose devices hold a share of what the fastest plan there needs."""
    roomy = topology(where)
    return with_memory(roomy, int(planned(roomy, None, load).estimate.device_bytes.peak * share))


def seconds(
    where: Topology, pin: dict[str, object] | None = None, load: Workload | None = None
) -> float:
    return planned(where, pin, load).estimate.step_seconds


# --- a plan priced again ---


@pytest.mark.long
def test_a_plan_that_does_not_fit_elsewhere_has_no_price_there():
    plan = planned("h100:8")
    needed = math.ceil(plan.estimate.device_bytes.peak * margin(plan.source.topology))
    assert questions.priced_on(plan, with_memory(plan.source.topology, needed)) is not None
    assert questions.priced_on(plan, with_memory(plan.source.topology, needed - 2)) is None


# --- alternatives ---


@pytest.mark.long
def test_alternatives_are_the_next_times_of_the_ranking():
    plan = planned("h100:8")
    times = [entry.seconds for entry in ranked("h100:8")]
    distinct = [times[0]]
    for time in times:
        if time > distinct[-1] * (1 + 1e-9):
            distinct.append(time)
    found = plan.alternatives(10)
    assert [one.step_seconds for one in found] == pytest.approx(distinct[1:11])
    assert [one.place for one in found] == list(range(1, 11))
    assert sum(1 + one.ties for one in found) == sum(
        distinct[0] * (1 + 1e-9) < time <= distinct[10] * (1 + 1e-9) for time in times
    )
    for one in found:
        assert one.differs
        assert one.ratio == pytest.approx(one.step_seconds / plan.estimate.step_seconds)
        assert one.ratio > 1


@pytest.mark.long
def test_alternatives_of_a_slower_plan_start_with_the_best():
    best = planned("h100:8")
    slower = planned("h100:8", {"mesh": {"tensor": 4, "data": 2}})
    free = replace(slower, source=replace(slower.source, pins=best.source.pins))
    assert free.alternatives(1)[0].step_seconds == pytest.approx(best.estimate.step_seconds)


@pytest.mark.long
def test_alternatives_under_pins_keep_them_and_there_may_be_none():
    assert all(
        one.mesh["tensor"] == 2 for one in planned("h100:8", {"mesh.tensor": 2}).alternatives()
    )
    only = planned("h100:8", questions.pinned(planned("h100:8")))
    assert only.alternatives() == ()
    assert alternatives_text(()) == "Alternatives\n  - none: no other plan is legal and fits.\n"


# --- constraints ---


@pytest.mark.long
@pytest.mark.parametrize("share", (0.6, 0.4))
def test_a_search_with_the_memory_of_a_step_is_as_fast(share: float):
    where = tight("h100:2", share)
    plan = planned(where)
    steps = staircase(plan)
    assert steps
    for step in steps:
        needed = step.peak_bytes * margin(where)
        assert step.short_bytes > 0
        assert step.short_bytes == pytest.approx(needed - where.chip.usable_bytes, abs=2)
        assert (
            seconds(with_memory(where, int(needed) + 2))
            <= step.step_seconds * (1 + 1e-9)
            < seconds(where)
        )
    assert [s.short_bytes for s in steps] == sorted(s.short_bytes for s in steps)
    assert seconds(with_memory(where, 1 << 40)) == pytest.approx(steps[-1].step_seconds)


def test_memory_does_not_bind_where_everything_fits():
    found = planned("h100:2").constraints()
    assert not found.staircase and not [one for one in found.binding if one.kind == "memory"]


@pytest.mark.long
def test_memory_binds_where_a_faster_plan_does_not_fit():
    found = planned(tight("h100:2", 0.6)).constraints()
    (memory,) = [one for one in found.binding if one.kind == "memory"]
    assert memory.what == "h100" and "more on every device would allow" in memory.message
    assert memory.step_seconds == found.staircase[-1].step_seconds < found.step_seconds
    assert "Faster plans that do not fit" in str(found)


@pytest.mark.long
def test_a_pin_binds_where_the_planner_would_do_better():
    free = planned("h100:8")
    (pin,) = [
        one
        for one in planned("h100:8", {"mesh.tensor": 4}).constraints().binding
        if one.kind == "pin"
    ]
    assert (pin.what, pin.step_seconds) == (
        "mesh.tensor",
        pytest.approx(free.estimate.step_seconds),
    )
    assert not [
        one
        for one in planned("h100:8", {"remat": free.remat}).constraints().binding
        if one.kind == "pin"
    ]


@pytest.mark.long
def test_sizes_bind_where_they_are_used_up():
    by_batch = planned("h100:8", {"mesh": {"data": 8}}).constraints()
    assert "batch" not in {one.what for one in by_batch.binding}  # 16 examples
    full = planned("2*h100:8", {"mesh": {"data": 16}}).constraints()
    assert (
        "Every one of the 16 examples of the batch has a device of its own: the batch can be"
        " sharded no further." in [one.message for one in full.binding]
    )
    heads = planned(
        "h100:8",
        {
            "mesh": {"data": 2, "tensor": 4},
            "rules": [("batch", ["data", "fsdp"]), ("heads", "tensor")],
        },
    ).constraints()
    assert "A tensor axis of 8 does not divide heads (4), which 4 parts divide now." in [
        one.message for one in heads.binding
    ]
    mlp = planned(
        "h100:8",
        {
            "mesh": {"data": 2, "tensor": 4},
            "rules": [("batch", ["data", "fsdp"]), ("mlp", "tensor")],
        },
    ).constraints()
    assert "tensor" not in {one.what for one in mlp.binding}


def test_idle_devices_are_explained_as_by_the_finding():
    machine = topology("cpu:8")
    slow = replace(machine, tiers=(replace(machine.tiers[0], latency_s=10.0),))
    alone = planned(slow)
    assert alone.mesh.devices == 1
    (finding,) = [one for one in alone.findings if one.code == "idle-devices"]
    (idle,) = [one for one in alone.constraints().binding if one.what == "devices"]
    assert "a step would take" in finding.message and "times as long" in finding.message
    assert idle.message.lower() == f"{finding.message.lower()}."


def test_nothing_binds():
    text = str(constraints(planned("h100:1")))
    assert "nothing: no memory, pin or size stands in the way of a faster plan." in text


# --- sensitivity ---


@pytest.mark.long
def test_shadow_prices_are_differences_of_two_searches():
    load = perceptron()
    where = tight("2*h100:4", 0.6, load)
    found = planned(where, None, load).sensitivity()
    memory, *links = found.prices
    assert memory.saved_seconds == pytest.approx(
        seconds(where, None, load)
        - seconds(with_memory(where, where.chip.usable_bytes + GB), None, load)
    )
    assert memory.saved_seconds > 0
    assert [link.resource for link in links] == ["InfiniBand", "NVLink"]
    for index, link in enumerate(links):
        faster = replace(
            where,
            tiers=tuple(
                replace(t, bytes_per_s=t.bytes_per_s + GB) if i == index else t
                for i, t in enumerate(where.tiers)
            ),
        )
        assert link.saved_seconds == pytest.approx(
            seconds(where, None, load) - seconds(faster, None, load), abs=1e-12
        )


@pytest.mark.long
def test_the_break_point_of_memory_is_where_the_plan_changes():
    where = tight("h100:2", 0.6)
    plan = planned(where)
    memory = plan.sensitivity().prices[0]
    assert seconds(with_memory(where, int(memory.limit))) == pytest.approx(
        plan.estimate.step_seconds
    )
    assert (
        0
        < memory.break_amount - memory.limit
        <= max(
            0.01 * where.chip.usable_bytes, (memory.break_amount - where.chip.usable_bytes) / 2**5
        )
    )
    other = planned(with_memory(where, int(memory.break_amount)))
    assert other.decisions != plan.decisions and other.mesh == memory.break_mesh
    assert other.estimate.step_seconds == pytest.approx(memory.break_seconds)
    assert memory.break_seconds < plan.estimate.step_seconds


def slowed(where: str, speed: float) -> Topology:
    """A topology with slower links."""
    place = topology(where)
    for index, tier in enumerate(place.tiers):
        place = questions.with_link(place, index, tier.bytes_per_s * speed)
    return place


def breaks(place: Topology) -> list[str]:
    """Links of a topology with a break point, after a look at plans below and above it."""
    load = perceptron()
    plan = planned(place, None, load)
    found = []
    for index, link in enumerate(link for link in plan.sensitivity().prices if link.kind != "hbm"):

        def mine_and_best(rate: float, index: int = index) -> tuple[float, float]:
            where = questions.with_link(place, index, rate)
            mine = questions.priced_on(plan, where)
            assert mine is not None
            return mine.estimate.step_seconds, seconds(where, None, load)

        upper = link.break_amount or link.limit
        for share in (0.5, 0.98):
            mine, best = mine_and_best(link.amount + share * (upper - link.amount))
            assert mine <= best * (1 + 1e-6)
        if link.break_amount:
            found.append(link.resource)
            mine, best = mine_and_best(link.break_amount * 1.001)
            assert best < mine
    return found


@pytest.mark.long
def test_the_break_point_of_a_link_is_where_the_plan_changes():
    assert breaks(slowed("v5e:2x2", 0.1)) == ["ICI"]
    everything_hides = replace(slowed("2*h100:4", 0.1), efficiency={"hidden": 1.0})
    assert breaks(everything_hides) == ["InfiniBand", "NVLink"]


@pytest.mark.long
def test_regret_is_the_loss_against_the_best_plan_then():
    best = planned("2*h100:4")
    slow = planned("2*h100:4", {"mesh": {"tensor": 4, "data": 2}})
    plan = replace(slow, source=replace(slow.source, pins=best.source.pins))
    found = plan.sensitivity()
    assert found.best_seconds < found.step_seconds
    by_name = {shock.what: shock for shock in found.shocks}
    assert set(by_name) == {
        "InfiniBand bandwidth",
        "NVLink bandwidth",
        "compute",
        "memory bandwidth",
    }
    machine = topology("2*h100:4")
    peaks = tuple((dtype, rate * SHOCK) for dtype, rate in machine.chip.flops_per_s)
    for what, changed in (
        ("NVLink bandwidth", questions.with_link(machine, 1, 450e9 * SHOCK)),
        ("compute", questions.with_chip(machine, flops_per_s=peaks)),
    ):
        mine = questions.priced_on(plan, changed)
        assert mine is not None
        assert by_name[what].regret_seconds == pytest.approx(
            mine.estimate.step_seconds - planned(changed).estimate.step_seconds
        )
        assert by_name[what].regret_seconds > 0
    assert "This plan takes" in str(found)


@pytest.mark.long
def test_everything_is_plain_data_and_fits_the_width():
    load = perceptron()
    plan = planned(tight("2*h100:4", 0.6, load), None, load)
    others, limits, shifts = plan.alternatives(), plan.constraints(), plan.sensitivity()
    json.dumps([one.to_json() for one in others])
    assert json.loads(json.dumps(limits.to_json()))["binding"]
    assert json.loads(json.dumps(shifts.to_json()))["shocks"][0]["regret_seconds"] >= 0
    for text in (alternatives_text(others), str(limits), str(shifts)):
        assert max(map(len, text.splitlines())) <= WIDTH
