"""The landscape of plans: what a search hands over of what it priced."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from shardlib.cost.roofline import fitting_bytes
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.assembly import price
from shardlib.planner.incumbents import GRAIN, Landscape, pareto_front
from shardlib.planner.plan import Plan
from shardlib.planner.search import MAX_POINTS
from shardlib.planner.workload import prepare
from tests.planner import worlds
from tests.planner.brute_force import every_candidate

WHERE = topology("2*h100:2")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner.search(worlds.mlp(), WHERE)


@pytest.mark.long
def test_every_point_is_a_plan_that_brute_force_prices_the_same(plan):
    load = prepare(worlds.mlp(), WHERE.chip.vendor)
    prices = {
        (one.mesh, float(f"{float(found.step_seconds[0]):.6g}"), math.ceil(found.peak_bytes[0]))
        for one in every_candidate(load, WHERE)
        for found in [price(load, WHERE, one)]
    }
    points = plan.search.landscape
    assert len(points) > 5
    for point in points:
        near = [
            (mesh, seconds, size)
            for mesh, seconds, size in prices
            if mesh == point.mesh
            and math.isclose(seconds, point.step_seconds, rel_tol=1e-5)
            and math.isclose(size, point.peak_bytes, rel_tol=1e-5)
        ]
        assert near, point
        assert point.fits == (point.peak_bytes <= fitting_bytes(WHERE) + 1)


def test_the_chosen_plan_is_the_first_and_json_brings_it_back(plan):
    first = next(point for point in plan.search.landscape if point.fits)
    assert first.mesh == plan.mesh
    assert first.step_seconds == pytest.approx(plan.estimate.step_seconds, rel=1e-5)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(plan.search.landscape) <= MAX_POINTS


def test_of_many_plans_the_front_stays_and_no_plan_is_far_from_a_point():
    seen, plans = Landscape[int](), []
    for i in range(6_000):
        seconds = 1 + (i * 7919 % 6_000) / 600
        size = 1e9 * (1 + (i * 104_729 % 5_987) / 600)
        plans.append((seconds, size))
        seen.add(i, seconds, size, fits=size < 6e9)
    points = seen.points(MAX_POINTS)
    assert len(points) <= MAX_POINTS
    ours = pareto_front(points)
    for seconds, size in plans:  # nothing is better than the front by more than a cell
        if size < 6e9:
            assert any(
                p.seconds <= seconds * math.exp(2 / GRAIN)
                and p.peak_bytes <= size * math.exp(2 / GRAIN)
                for p in ours
            )
    assert all(a.peak_bytes > b.peak_bytes for a, b in pairwise(ours))
