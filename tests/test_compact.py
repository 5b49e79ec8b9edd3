"""Whatever a user may look at in a session is shown in at most ten lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardlib
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan, source_of
from tests.planner import worlds

pytestmark = pytest.mark.long
#: Characters of ten lines of a terminal.
TEN_LINES = 10 * 80


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner.search(worlds.layers(), topology("h100:8"), {})


def values(plan: Plan) -> Iterator[object]:
    """What questions to a plan give, and what it is made of."""
    source = source_of(plan)
    yield from (plan, plan.estimate, plan.search, plan.mesh, plan.rules, plan.findings[:1])
    yield from (plan.parameters[0], plan.activations[0], plan.search.landscape[0])
    yield from (plan.estimate.seconds, plan.estimate.device_bytes, plan.estimate.collectives[:1])
    yield from (plan.kernels(), plan.sensitivity(), plan.constraints(), plan.alternatives()[0])
    yield from (plan.run_cost(1e12, price=2.4, mtbf=10800), plan.replan("h100:4"))
    yield from (source, source.workload, source.topology, source.workload.problem)
    yield from (source.workload.problem.forward, source.workload.problem.steps["none"])
    yield from (shardlib.DiLoCo(islands=2, every=100), shardlib.Settings(), shardlib.Guards())
    staged = {"mesh": {"stage": 4}, "microbatches": 8}
    yield planner.search(worlds.layers(), topology("h100:4"), staged).timeline()


def test_ten_lines_are_enough(plan: Plan):
    long = {
        type(one).__name__: len(repr(one))
        for one in values(plan)
        if len(repr(one)) > TEN_LINES or repr(one).count("\n") >= 10
    }
    assert long == {}


def test_what_is_counted_is_what_is_there(plan: Plan):
    told = repr(plan.kernels())
    assert f"<{len(plan.kernels().kernels)} of KernelTime>" in told
    assert repr(plan.search).startswith(f"Search(evaluations={plan.search.evaluations}")
