"""Far more devices than rows: all numbers of devices are searched together."""

from __future__ import annotations

import pytest

from shardlib.machines.topology import topology
from shardlib.planner import priced
from shardlib.planner import search as planner
from tests.planner import worlds


@pytest.mark.parametrize(
    ("name", "where"),
    [("mlp", "cpu:4"), ("mlp", "h100:8"), ("stack", "2*h100:2"), ("experts", "2*a100:2")],
)
def test_numbers_of_devices_searched_together_have_the_plan_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    place, load = topology(where), worlds.prepared(getattr(worlds, name))
    alone = planner.search(load.problem, place, workload=load)  # brute force has it: `test_search`
    monkeypatch.setattr(priced, "MANY_DEVICES_PER_ROW", 0)
    plan = planner.search(load.problem, place, workload=load)
    assert plan.estimate.step_seconds == pytest.approx(alone.estimate.step_seconds, rel=1e-9)
    assert plan.decisions == alone.decisions
    assert plan.search.gap == 0
    first = next(iter(planner.ranked(load.problem, place, workload=load, slack=1.5)))
    assert first.build().decisions == plan.decisions


@pytest.mark.parametrize(
    ("where", "most"),
    [pytest.param("131072*h100:8", 12_000, marks=pytest.mark.long), ("1000003*h100:1", 250)],
)
def test_a_million_devices_are_searched_by_pricing_few_plans(where: str, most: int) -> None:
    size = {"embed": 512, "hidden": 2048, "heads": 8, "vocab": 1024, "depth": 8}
    load = worlds.prepared(worlds.layers, batch=256, seq=512, **size)
    plan = planner.search(load.problem, where, workload=load)
    assert plan.search.gap == 0
    assert plan.search.evaluations < most
