"""The activations of a plan: their layouts add up, and their moves are the collectives that were
priced.
"""

from __future__ import annotations

import math

import pytest

from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.parts import joined_names
from shardlib.planner.plan import Plan
from tests.planner import worlds

PINS = (
    {"mesh": {"data": 8}},
    {"mesh": {"data": 2, "tensor": 4}, "sequence_parallel": False},
    {"mesh": {"data": 2, "tensor": 4}, "sequence_parallel": True},
    {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3, "sequence_parallel": True},
    {"mesh": {"stage": 2, "data": 2, "tensor": 2}, "microbatches": 4},
    {"mesh": {"expert": 4, "tensor": 2}},
)
#: Axes along which activations alone are moved.
OWN = ({"tensor"}, {"context"})


def test_names_that_begin_alike_are_one():
    assert joined_names(["a.b.query", "a.b.key"]) == "a.b.query/key"
    assert joined_names(["head", "a.b.key"]) == "head, a.b.key"


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: "-".join(pin["mesh"]))
def test_layouts_divide_and_moves_are_the_collectives_of_the_plan(pin):
    world = worlds.experts() if "expert" in pin["mesh"] else worlds.layers()
    plan = planner.search(world, topology("h100:8"), pin)
    moves = {(move.kind, move.axes) for one in plan.activations for move in one.moves}
    priced = {
        (one.kind, one.axes): one.bytes
        for one in sorted(plan.estimate.collectives, key=lambda one: one.bytes)
    }
    assert plan.activations
    assert moves <= priced.keys()
    # What is left are sums over the vocabulary, a number for each token, and gradients of the
    # table and the head, which are partial sums over tensor where it shards the sequence.
    rows = math.prod(plan.activations[0].shape[:-1]) * 4
    left = {
        (kind, axes)
        for (kind, axes), size in priced.items()
        if set(axes) in OWN
        and size > rows
        and not (kind == "all-reduce" and plan.sequence_parallel)
    }
    assert left <= moves
    for one in plan.activations:
        for layout in (one.held, *(move.layout for move in one.moves)):
            local = layout.local_shape(one.shape, plan.mesh)
            assert math.prod(local) * layout.ways(plan.mesh) == math.prod(one.shape)
        for move in one.moves:
            if move.kind in ("all-gather", "reduce-scatter"):  # the held one is the smaller
                assert move.layout.ways(plan.mesh) * plan.mesh.ways(move.axes) == one.held.ways(
                    plan.mesh
                )
    assert Plan.from_json(plan.to_json()).activations == plan.activations
