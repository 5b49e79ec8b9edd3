"""Placement: every factorisation of many machines is laid out as a bijection, and fast axes get
whole rings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from shardlib.layout import MESH_AXES, MeshShape
from shardlib.machines.topology import Span, Topology, device_order, place, topology

MACHINES = [
    "cpu:8",
    "cpu:7",
    "cpu:1",
    "2*cpu:4",
    "3*h100:8",
    "13*h100:8",
    "6*h100:6",
    "v5e:4x4",
    "v5e:1x1",
    "v5e:16x16",
    "v5p:4x4x4",
    "v5p:2x3x4",
    "2*v5e:4x8",
    "tpu7x:2x2x4",
    "2*tpu7x:4x4x4",
    "gb200:72",
    "5*v5p:4x4x8",
]
AXES = ("stage", "data", "fsdp", "tensor")


def meshes(devices: int) -> Iterator[MeshShape]:
    """Every ordered factorisation of `devices` over four axes."""
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    for sizes in itertools.product(divisors, repeat=len(AXES)):
        if math.prod(sizes) == devices:
            yield MeshShape(dict(zip(AXES, sizes, strict=True)))


def check_bijection(mesh: MeshShape, machine: Topology) -> None:
    spans, order = place(mesh, machine), device_order(mesh, machine)
    assert spans is not None and order is not None
    assert set(spans) == set(mesh)
    for axis, parts in spans.items():
        assert math.prod(span.ways for span in parts) == mesh[axis]
        assert all(span.ways > 1 for span in parts)
    assert order.shape == tuple(mesh[axis] for axis in MESH_AXES)
    assert np.unique(order).size == mesh.devices
    assert order.min() == 0
    assert order.max() < machine.devices
    # Independent of how `device_order` counts: along an axis, only the coordinates of its own spans
    # change.
    dims = [(t, d) for t, tier in enumerate(machine.tiers) for d in range(len(tier.shape))]
    places = np.stack(np.unravel_index(order, [machine.tiers[t].shape[d] for t, d in dims]))
    for i, axis in enumerate(MESH_AXES):
        moved = {dims[k] for k in range(len(dims)) if (np.diff(places[k], axis=i) != 0).any()}
        assert moved == {(span.tier, span.dim) for span in spans.get(axis, ())}


@pytest.mark.parametrize("spelling", MACHINES)
def test_every_factorisation_covers_the_machine_once(spelling: str):
    machine = topology(spelling)
    for mesh in meshes(machine.devices):
        check_bijection(mesh, machine)


@pytest.mark.parametrize("spelling", ["cpu:8", "2*h100:8", "v5e:4x4", "2*tpu7x:2x2x1", "v5p:4x4x4"])
def test_smaller_meshes_are_laid_out_wherever_a_block_exists(spelling: str):
    machine = topology(spelling)
    sizes = [size for tier in machine.tiers for size in tier.shape]
    blocks = {math.prod(block) for block in itertools.product(*(range(1, n + 1) for n in sizes))}
    for devices in range(1, machine.devices):
        for mesh in meshes(devices):
            if devices in blocks:
                check_bijection(mesh, machine)
            else:
                assert place(mesh, machine) is None and device_order(mesh, machine) is None


def test_a_mesh_larger_than_the_machine_has_no_place():
    assert place(MeshShape(data=9), topology("cpu:8")) is None


@pytest.mark.parametrize(
    ("spelling", "mesh", "spans"),
    [
        (
            "2*h100:8",
            MeshShape(data=2, tensor=8),
            {"data": (Span(0, 0, 2),), "tensor": (Span(1, 0, 8),)},
        ),
        (
            "16*h100:8",
            MeshShape(data=8, tensor=16),
            {"data": (Span(0, 0, 8, 2),), "tensor": (Span(0, 0, 2), Span(1, 0, 8))},
        ),  # straddles
        (
            "3*h100:8",
            MeshShape(data=4, tensor=6),
            {"data": (Span(1, 0, 4, 2),), "tensor": (Span(0, 0, 3), Span(1, 0, 2))},
        ),  # common divisor
        (
            "v5e:16x16",
            MeshShape(fsdp=16, tensor=16),
            {"fsdp": (Span(0, 0, 16),), "tensor": (Span(0, 1, 16),)},
        ),  # a ring each
        ("v5e:16x16", MeshShape(fsdp=256), {"fsdp": (Span(0, 0, 16), Span(0, 1, 16))}),
        (
            "v5e:16x16",
            MeshShape(fsdp=64, tensor=4),
            {"fsdp": (Span(0, 0, 16), Span(0, 1, 4, 4)), "tensor": (Span(0, 1, 4),)},
        ),  # splits one ring
        (
            "v5p:4x4x8",
            MeshShape(data=8, tensor=16),
            {"data": (Span(0, 2, 8),), "tensor": (Span(0, 0, 4), Span(0, 1, 4))},
        ),  # whole rings
        (
            "tpu7x:4x4x4",
            MeshShape(fsdp=64, tensor=2),
            {"fsdp": (Span(0, 0, 4), Span(0, 1, 4), Span(0, 2, 4)), "tensor": (Span(1, 0, 2),)},
        ),
    ],
)
def test_where_axes_fall(spelling: str, mesh: MeshShape, spans: dict[str, tuple[Span, ...]]):
    assert place(mesh, topology(spelling)) == spans


def test_the_shared_result_cannot_be_changed():
    spans = place(MeshShape(data=8), topology("cpu:8"))
    with pytest.raises(TypeError):
        spans["data"] = ()  # type: ignore[index]
