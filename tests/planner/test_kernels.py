"""The kernels of a plan: they are what its estimate is made of, under the roofline."""

from __future__ import annotations

import pytest

from shardlib.planner import search as planner
from tests.planner import worlds

CASES = [
    ("2*h100:4", {}),
    ("h100:8", {"mesh": {"tensor": 8}}),
    ("v5e:2x2", {"remat": "full"}),
    ("2*h100:2", {"mesh": {"stage": 2, "tensor": 2}, "microbatches": 2}),
]


@pytest.mark.parametrize(("where", "pin"), CASES)
def test_seconds_and_flops_add_up_to_the_estimate(where, pin):
    plan = planner.search(worlds.layers(), where, pin)
    found = plan.kernels()
    assert found.seconds == pytest.approx(plan.estimate.seconds.compute, rel=1e-9)
    flops = sum(one.flops for one in found.kernels) * plan.mesh.devices
    assert flops == pytest.approx(plan.estimate.hardware_flops, rel=1e-9)
    assert all(found.bound(one) <= one.seconds * (1 + 1e-9) for one in found.kernels)


def test_matmuls_of_one_device_need_the_flops_of_their_dims():
    plan = planner.search(worlds.mlp(batch=4096, embed=1024, hidden=4096), "h100:1")
    matmuls = [one for one in plan.kernels().kernels if "matmul" in one.name]
    for one in matmuls:
        rows, depth, columns = (
            int(word.replace(",", "")) for word in one.name.split("matmul ")[1].split(" x ")
        )
        assert one.flops == pytest.approx(2 * rows * depth * columns * one.count)
    assert {one.phase for one in matmuls} == {"forward", "backward"}
    assert "Kernels: " in str(plan.kernels()) and "roofline" in str(plan.kernels())
