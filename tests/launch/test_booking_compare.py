"""The smallest and the cheapest size, beside every size planned one by one."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import optax
import pytest

import shardlib
from shardlib.decisions.pins import Pins
from shardlib.errors import ArgumentError, PinError, TopologyError
from shardlib.frontend.model import problem
from shardlib.launch import booking
from shardlib.launch.booking import Step, least_device_seconds, machines, offers
from shardlib.machines.topology import topology
from shardlib.planner.search import prepared_workload, search
from tests.cli.perceptron import make
from tests.planner.fixture_plan import PLAN

MODEL: dict[str, Any] = {**make(), "optimizer": optax.sgd(0.1), "name": "perceptron"}
TOKENS = 4096e9


def test_the_choice_is_that_of_every_size_planned_alone():
    sizes = machines("h100:4", 16)
    days: dict[str, float] = {}
    for machine in sizes:
        plan = shardlib.plan(**MODEL, topology=machine)
        days[machine.name] = plan.run_cost(TOKENS).wall_seconds / booking.DAY
    deadline = 1.05 * sorted(days.values())[len(days) // 2]
    target = booking.Target(
        tokens=TOKENS, deadline=deadline * booking.DAY, prices={"h100": 2.0, "v5e": 1.0}
    )
    found = booking.compare(**MODEL, topologies=["h100:4", "v5e"], target=target, largest=16)
    one = found.families[0]
    in_time = [machine for machine in sizes if days[machine.name] <= deadline]
    assert one.smallest is not None and one.smallest.topology == in_time[0].name
    hours = {m.name: m.devices * days[m.name] * 24 for m in in_time}
    assert one.cheapest is not None and one.cheapest.cost is not None and one.gap is not None
    assert one.cheapest.cost.device_hours == pytest.approx(hours[one.cheapest.topology])
    assert min(hours.values()) >= one.cheapest.cost.device_hours * (1 - one.gap) * (1 - 1e-9)
    assert all(days[name] > deadline for name in one.excluded)
    assert one.cheapest.cost.money == pytest.approx(2.0 * one.cheapest.cost.device_hours)
    text, data = str(found), json.loads(json.dumps(found.to_json()))
    assert one.smallest.topology in text and "the smallest, proven" in text
    assert data["families"][0]["smallest"]["digest"] == one.smallest.plan.digest  # type: ignore
    assert all(len(line) <= 100 for line in text.splitlines())
    drawn = ET.fromstring(found.svg())
    circles = [node for node in drawn.iter() if node.tag.endswith("circle")]
    assert len(circles) == sum(len(family.tried) for family in found.families)
    assert "<svg" in found.html() and one.certificate.split(".")[0] in found.html()


def test_no_plan_is_faster_than_the_least_work():
    traced = problem(**MODEL)
    load = None
    for spelling in ("h100:1", "h100:4", "2*h100:8", "v5e:2x2", "v5p:2x2x2", "cpu:4"):
        machine = topology(spelling)
        load = prepared_workload(traced, machine, load, None, Pins())
        least = least_device_seconds(load, machine, Pins())
        plan = search(traced, machine, workload=load)
        assert 0.5 * plan.mesh.devices * plan.estimate.seconds.compute < least  # it says something
        assert least <= plan.mesh.devices * plan.estimate.step_seconds


def _step(seconds: dict[str, float], share: float) -> Step:
    """A step that takes so long on each machine, and of which a bound knows a share."""

    def planned(machine: Any) -> Any:
        if math.isinf(seconds[machine.name]):
            raise PinError("no mesh")
        estimate = PLAN.estimate
        scaled = seconds[machine.name] / estimate.step_seconds
        parts = {name: scaled * value for name, value in estimate.seconds.__dict__.items() if value}
        return replace(PLAN, estimate=replace(estimate, seconds=replace(estimate.seconds, **parts)))

    every = {m.name: m.devices for m in machines("h100:8", 256)}
    least = share * min(every[name] * value for name, value in seconds.items())
    return Step(tokens=PLAN.estimate.tokens, planned=planned, least=lambda _: least)


@pytest.mark.parametrize("seed", range(20))
def test_larger_machines_need_not_be_faster(seed: int):
    draw = random.Random(seed)
    sizes = machines("h100:8", 256)
    seconds = {
        m.name: math.inf if draw.random() < 0.2 else draw.uniform(1, 3) / m.devices for m in sizes
    }
    step = _step(seconds, draw.uniform(0.5, 1))
    deadline = 10 ** draw.uniform(-1.5, 0.5) * 1000
    target = booking.Target(tokens=1000.0 * PLAN.estimate.tokens, deadline=deadline)
    found = offers("h100:8", sizes, step, target)
    in_time = [m for m in sizes if 1000 * seconds[m.name] <= deadline]
    assert (found.smallest is None) == (not in_time)
    if found.smallest is not None and found.cheapest is not None and found.gap is not None:
        assert found.smallest.devices == in_time[0].devices
        best = min(1000 * seconds[m.name] * m.devices / 3600 for m in in_time)
        assert found.cheapest.cost is not None
        assert best >= found.cheapest.cost.device_hours * (1 - found.gap) * (1 - 1e-9)
    names = [*(o.topology for o in found.tried), *found.excluded, *found.unseen]
    assert sorted(names) == sorted(m.name for m in sizes)


def test_larger_machines_fail_oftener():
    sizes = machines("h100:8", 64)
    step = _step({m.name: 1 / m.devices for m in sizes}, 1.0)
    failing = booking.Failures(every=3600.0 * 64, devices=1)
    target = booking.Target(tokens=1e6 * PLAN.estimate.tokens, deadline=1e5, failures=failing)
    found = offers("h100:8", sizes, step, target)
    costs = {o.devices: o.cost for o in found.tried if o.cost is not None}
    assert costs[16].mtbf_seconds == pytest.approx(4 * 3600.0)
    assert costs[16].goodput > costs[32].goodput


def test_sizes_are_such_as_are_had():
    sizes = [m.devices for m in machines("gb200", 300)]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 72, 144, 216, 288]
    assert machines("v5e", 700)[-1].name == "2*v5e:16x16"
    assert all("*" not in m.name for m in machines("v5p", 4096))
    assert machines("tpu7x", 200)[-1].name == "tpu7x:4x4x4"


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"topologies": []}, ArgumentError, "names kinds of machines, each once"),
        ({"topologies": ["v5p", "v5p:4x4x4"]}, ArgumentError, "each once"),
        ({"topologies": ["v9"]}, TopologyError, "v9"),
        ({"topologies": ["2@10gbit-50ms*h100:8"]}, ArgumentError, "names the link"),
        ({"topologies": ["h100:8"], "largest": 0}, ArgumentError, "at most 0 devices"),
        (
            {"topologies": ["h100:8"], "pin": {"exchange": shardlib.DiLoCo(islands=2, every=9)}},
            PinError,
            "islands",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(given: dict[str, Any], kind: type, message: str):
    target = booking.Target(tokens=1e9, deadline=1e6)
    with pytest.raises(kind, match=message):
        booking.compare(**MODEL, target=target, **given)


def test_a_target_lists_all_that_is_wrong():
    with pytest.raises(ArgumentError) as told:
        booking.Target(tokens=-1, deadline=math.inf, prices={"h100": 0, "x1": 2.0})
    assert [part in str(told.value) for part in ("tokens", "deadline", "h100", "x1")] == [True] * 4
    with pytest.raises(ArgumentError, match="every is 0"):
        booking.Failures(every=0, devices=8)
