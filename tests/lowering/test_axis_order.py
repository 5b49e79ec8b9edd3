"""Axes in another order on the links: the devices of the mesh lie where the plan says, and no number
changes.
"""

import functools

import numpy as np
import optax
import pytest

from shardlib.layout import INNER_AXES, MeshShape
from shardlib.lowering.mesh import device_mesh, mesh_coordinates
from shardlib.machines.topology import place, topology
from shardlib.verification.isolation import target
from tests.lowering import small

SGD = functools.partial(optax.sgd, 0.5, momentum=0.9)
ORDERS = [
    ({"data": 2, "fsdp": 2, "tensor": 2}, ["tensor", "fsdp", "data"]),
    ({"data": 2, "tensor": 4}, ["tensor", "data"]),
    ({"fsdp": 4, "tensor": 2}, ["tensor", "fsdp"]),
]


def _three_steps(program):
    state, losses = program.init(0), []
    for _ in range(3):
        state, metrics = program.step(state, small.batch())
        losses.append(float(metrics["loss"]))
    return losses, state.params


@pytest.fixture(scope="module")
def alone():
    return _three_steps(small.program(SGD(), {"mesh": {"data": 1}}))


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "order"), ORDERS, ids=str)
def test_programs_compute_what_one_device_does(mesh, order, alone):
    zero = 3 if "fsdp" in mesh else 0
    program = small.program(SGD(), {"mesh": mesh, "axis_order": order, "zero": zero})
    assert program.plan.axis_order == tuple(order)
    usual = small.program(SGD(), {"mesh": mesh, "zero": zero})
    ids, others = ([d.id for d in one.mesh.devices.flat] for one in (program, usual))
    assert sorted(ids) == sorted(others) == list(range(8)) and ids != others
    losses, params = _three_steps(program)
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert small.farthest(params, alone[1]) < 1e-4


def _numbers(mesh, order, where):
    """Where each axis of a mesh moves: the devices along it from the first one."""
    found, _ = device_mesh(mesh, topology=where, axis_order=order)
    grid = np.vectorize(lambda device: device.id)(found.devices)
    moved = [np.moveaxis(grid, i, 0) for i in range(grid.ndim)]
    return {
        axis: list(one.reshape(one.shape[0], -1)[:, 0])
        for axis, one in zip(INNER_AXES, moved, strict=True)
        if one.shape[0] > 1
    }


def test_devices_lie_where_the_order_says():
    for other in ("h100:8", "no such thing"):
        assert mesh_coordinates(MeshShape(data=8), other) == []
    mesh = MeshShape(data=2, tensor=4)
    assert _numbers(mesh, (), "cpu:8") == {"data": [0, 4], "tensor": [0, 1, 2, 3]}
    assert _numbers(mesh, ("tensor", "data"), "cpu:8") == {"data": [0, 1], "tensor": [0, 2, 4, 6]}
    assert _numbers(mesh, ("tensor", "data"), "nowhere") == {
        "data": [0, 4],
        "tensor": [0, 1, 2, 3],
    }  # a topology that is not known here has no links
    assert _numbers(MeshShape(data=2, tensor=2), (), "4*h100:2") == {
        "data": [0, 2],
        "tensor": [0, 1],
    }


@pytest.mark.parametrize(
    ("mesh", "order"),
    [
        ({"data": 4, "tensor": 4}, ()),
        ({"data": 4, "tensor": 4}, ("tensor", "data")),
        ({"data": 2, "fsdp": 4, "tensor": 2}, ("tensor", "data", "fsdp")),
        ({"data": 2, "fsdp": 2, "tensor": 4}, ("fsdp", "tensor", "data")),
    ],
    ids=str,
)
def test_the_compiler_of_a_tpu_is_given_devices_along_the_links_of_the_plan(mesh, order):
    """Each axis steps along the dims of the torus that its spans name, and along no other."""
    shape, where = MeshShape(mesh), topology("2*v5e:2x4")
    spans = place(shape, where, order)
    assert spans is not None
    given = target(where, shape, order).order
    assert list(given) == mesh_coordinates(shape, "2*v5e:2x4", order)
    grid = np.array(given).reshape(*(shape[axis] for axis in INNER_AXES), 5)
    for i, axis in enumerate(INNER_AXES):
        if axis not in spans:
            continue
        steps = np.ptp(np.moveaxis(grid, i, 0), axis=0).reshape(-1, 5).max(0)
        along = {
            span.dim + 1 if where.tiers[span.tier].kind == "torus" else 0 for span in spans[axis]
        }
        assert set(np.flatnonzero(steps)) == along, axis
