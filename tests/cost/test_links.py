"""No place of a mesh makes a collective cheaper than the bound that the search excludes candidates
with.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.cost.collectives import SLOTS, Slot, best_links, links, slot_cost, stored
from shardlib.layout import MESH_AXES, MeshShape
from shardlib.machines.topology import placements, topology


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        "2048*h100:8",
        "8*gb200:72",
        "v5p:4x4x8",
        "v5p:16x16x32",
        "v5e:16x16",
        "v5e:4x8",
        "2*v5e:16x16",
        "tpu7x:8x8x8",
        "13*h100:8",
    ],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_best_links_are_a_bound(where: str, data: st.DataObject) -> None:
    machine = topology(where)
    left, sizes = machine.devices, dict.fromkeys(MESH_AXES, 1)
    for axis in data.draw(st.permutations(MESH_AXES)):
        sizes[axis] = data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        left //= sizes[axis]
    placed = placements(MeshShape(sizes), machine)
    real = links([placement for _, placement in placed], machine)
    best = best_links({axis: np.array([size]) for axis, size in sizes.items()}, machine)
    assert placed and real.latency.shape == (len(SLOTS), len(placed))
    assert (best.latency <= real.latency * (1 + 1e-9)).all()
    assert (best.per_byte <= real.per_byte * (1 + 1e-9)).all()


@pytest.mark.parametrize("where", ["v5e:16x16", "2*v5e:8x16", "v5p:4x4x8", "16*h100:8"])
def test_groups_that_are_priced_together_cost_the_same(where: str) -> None:
    machine, draw = topology(where), random.Random(where)
    meshes = []
    for _ in range(12):
        sizes = dict.fromkeys(MESH_AXES, 1)
        for _ in range(machine.devices.bit_length() - 1):
            sizes[draw.choice(MESH_AXES)] *= 2
        meshes.append(MeshShape(sizes))
    places = [placed for mesh in meshes for _, placed in placements(mesh, machine)]
    real = links(places, machine)
    for at, placed in enumerate(places):
        costs = [slot_cost(slot, placed, machine) for slot in SLOTS]
        assert real.latency[:, at].tolist() == [cost.latency_s for cost in costs]
        assert real.per_byte[:, at].tolist() == [cost.seconds_per_byte for cost in costs]


def test_the_bound_is_reached_where_an_axis_is_alone() -> None:
    machine = topology("16*h100:8")
    mesh = MeshShape(tensor=8)
    real = links([placements(mesh, machine)[0][1]], machine)
    best = best_links({axis: np.array([mesh[axis]]) for axis in MESH_AXES}, machine)
    assert (
        best.per_byte[0, 0] == real.per_byte[0, 0] > 0
        and best.latency[0, 0] == real.latency[0, 0] > 0
    )


@pytest.mark.parametrize(
    ("inside", "both"), [("v6e:16x16", "2*v6e:16x16"), ("v5p:4x4x8", "2*v5p:4x4x8")]
)
def test_the_network_between_slices_carries_pieces(inside: str, both: str) -> None:
    def cost(where: str, kind: str) -> float:
        machine = topology(where)
        placed = placements(MeshShape(fsdp=machine.devices), machine)[0][1]
        slot = Slot("gather" if kind == "all-gather" else "scatter", stored(), kind)
        return slot_cost(slot, placed, machine).seconds_per_byte / (
            machine.devices if kind == "reduce-scatter" else 1
        )

    def network(where: str) -> float:
        machine = topology(where)
        return (
            0.5 / machine.tiers[0].reached_bytes_per_s / machine.tiers[1].devices
        )  # half of what a slice holds, spread over its devices

    for kind in ("all-gather", "reduce-scatter"):
        assert cost(both, kind) == pytest.approx(cost(inside, kind) + network(both), rel=0.01)
