"""Priced again from their own prediction, plans cost what they cost; from a compiler's figures,
what the formula says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlib.cost.pricing import Seconds, collective_seconds, reprice
from shardlib.layout import Collective, MeshShape
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from tests.planner.worlds import workload


@pytest.mark.long
@pytest.mark.parametrize("where", ["v5e:2x4", "2*h100:4", "cpu:8"])
@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"data": 8}},
        {"mesh": {"fsdp": 8}, "zero": 1},
        {"mesh": {"tensor": 4, "data": 2}},
        {"mesh": {"tensor": 2, "fsdp": 4}, "zero": 1},
    ],
)
def test_predicted_collectives_cost_what_was_predicted(where: str, pin: dict[str, Any]) -> None:
    plan = planner.search(workload().problem, where, pin, workload=workload())
    place = topology(where)
    assert plan.estimate.collectives
    for c in plan.estimate.collectives:
        seconds = c.count * collective_seconds(
            c.kind,
            c.axes,
            plan.mesh.ways(c.axes),
            float(c.bytes),
            plan.mesh,
            place,
            plan.axis_order,
        )
        assert seconds == pytest.approx(c.seconds, rel=1e-3)


@pytest.mark.parametrize("where", ["v5e:2x2", "h100:4", "cpu:4"])
def test_a_plan_without_small_sums_is_priced_as_predicted(where: str) -> None:
    """Along tensor alone nothing hides where no gradient is reduced, and the model knows no sums
    along data and fsdp.
    """
    place = topology(where)
    plan = planner.search(
        workload().problem,
        place,
        {"mesh": {"tensor": 4}, "sequence_parallel": False},
        workload=workload(),
    )
    again = reprice(
        plan.estimate.seconds, plan.estimate.collectives, 0.0, place.chip.vendor, zero=plan.zero
    )
    assert again.total == pytest.approx(plan.estimate.step_seconds, rel=1e-4)


def test_a_group_that_is_a_part_of_an_axis_costs_what_an_axis_of_that_size_costs() -> None:
    pod = topology("v5e:16x16")
    whole, ring = MeshShape(fsdp=256), MeshShape(data=16, fsdp=16)
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        part = collective_seconds(kind, ("fsdp",), 16, 1e8, whole, pod)
        assert part == pytest.approx(
            collective_seconds(kind, ("fsdp",), 16, 1e8, ring, pod)
        ) and part != collective_seconds(kind, ("fsdp",), 256, 1e8, whole, pod)
    cluster = topology("4*h100:8")
    inside = collective_seconds("all-gather", ("fsdp",), 8, 1e8, MeshShape(fsdp=32), cluster)
    assert inside == collective_seconds(
        "all-gather", ("fsdp",), 8, 1e8, MeshShape(data=4, fsdp=8), cluster
    )
    assert collective_seconds(
        "all-gather", ("tensor",), 4, 1e8, MeshShape(tensor=8), topology("h100:8")
    ) == collective_seconds(
        "all-gather", ("tensor",), 4, 1e8, MeshShape(tensor=4), topology("h100:8")
    )


def test_what_hides_and_what_does_not() -> None:
    mesh, place = MeshShape(fsdp=4, tensor=2), topology("v5e:2x4")
    predicted = Seconds(compute=5.0, exposed=3.0, optimizer=0.5, overhead=0.25)
    hidden = Collective(kind="all-gather", axes=("fsdp",), bytes=10**9, count=10)
    blocking = Collective(kind="all-reduce", axes=("tensor",), bytes=10**8, count=4)
    nowhere = replace(blocking, axes=())
    seconds = {
        c: (
            c.count
            * collective_seconds(
                c.kind, c.axes, mesh.ways(c.axes) if c.axes else 8, float(c.bytes), mesh, place
            )
        )
        for c in (hidden, blocking, nowhere)
    }
    assert min(seconds.values()) > 0
    priced = [replace(c, seconds=time) for c, time in seconds.items()]
    waiting = seconds[blocking] + seconds[nowhere]
    roomy = reprice(predicted, priced, 100.0, "google", zero=3)
    assert (roomy.compute, roomy.optimizer, roomy.overhead) == (
        100.0,
        0.0,
        0.25,
    ) and roomy.exposed == pytest.approx(waiting)
    tight = reprice(predicted, priced, 0.01, "google", zero=3)
    assert tight.exposed == pytest.approx(waiting + seconds[hidden] - 0.9 * 0.01)
    silent = reprice(predicted, priced, 0.0, "google", zero=3)
    assert (silent.compute, silent.optimizer) == (5.0, 0.5)
    for zero, kind in ((1, "all-gather"), (3, "reduce-scatter"), (3, "all-reduce")):
        one = replace(hidden, kind=kind, seconds=seconds[hidden])
        tpu = reprice(predicted, [one], 100.0, "google", zero=zero)
        gpu = reprice(predicted, [one], 100.0, "nvidia", zero=zero)
        assert tpu.exposed == seconds[hidden] and gpu.exposed == 0
