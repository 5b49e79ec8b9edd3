"""Which device sits where in the mesh?

The mesh has all six axes, sizes 1 included, all of them Auto: the compiler propagates layouts from
the constraints that the plan places. An axis that runs along several dims of a torus is kept as its
physical parts, "fsdp_0" and "fsdp_1", since a reduce-scatter on a torus goes along one dim at a
time (`lowering/weights/gradients.py`); everything that names a mesh axis goes through `parts_of`.

The device order follows the hardware, by `shardlib.hardware.placement.device_order`, in planning,
verification and here: TPU devices are found by their coordinates, others by their numbers
in JAX's order, in which neighbours share the fastest link. A plan may lay its axes on the links in
another order than they have in the mesh (`axis_order`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.axes import INNER_AXES, MeshShape
from shardlib.errors import ShardlibError, TopologyError
from shardlib.hardware.placement import device_order
from shardlib.hardware.topology import topology as parse_topology
from shardlib.lowering.mesh.device_findings import idle_devices, other_machine
from shardlib.planning.plan import Plan
from shardlib.processes.devices import let_collectives_wait
from shardlib.processes.values import idle_processes
from shardlib.report import Finding

T = TypeVar("T")

#: Mesh axis -> sizes of its physical parts, the major one first.
Parts = Mapping[str, tuple[int, ...]]


def physical_parts(plan: Plan) -> Parts:
    """The axes of a plan that run along several dims of which some belong to a torus."""
    return {
        axis: tuple(link.ways for link in links)
        for axis, links in plan.placement
        if len(links) > 1 and any(link.kind == "torus" for link in links)
    }


def axis_names(shape: MeshShape, parts: Parts) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the axes of a program's mesh.

    >>> axis_names(MeshShape(fsdp=256), {"fsdp": (16, 16)})
    (('stage', 'data', 'fsdp_0', 'fsdp_1', 'expert', 'context', 'tensor'), (1, 1, 16, 16, 1, 1, 1))

    Args:
        shape: sizes of the mesh axes.
        parts: sizes of the physical parts of an axis, by its name.
    """
    pairs = [
        (f"{axis}_{i}", size) for axis in INNER_AXES for i, size in enumerate(parts.get(axis, ()))
    ]
    undivided = {axis: ((axis, shape[axis]),) for axis in INNER_AXES if axis not in parts}
    ordered = [
        pair
        for axis in INNER_AXES
        for pair in undivided.get(axis, tuple(p for p in pairs if p[0].rpartition("_")[0] == axis))
    ]
    return tuple(name for name, _ in ordered), tuple(size for _, size in ordered)


def parts_of(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> tuple[str, ...]:
    """The names that mesh axes have in a program's mesh: themselves, or those of their parts, the
    major one first.
    """
    return tuple(
        name
        for axis in axes
        for name in mesh.axis_names
        if name == axis or name.rpartition("_")[0] == axis
    )


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """The mesh of a plan without devices."""
    names, sizes = axis_names(plan.mesh, physical_parts(plan))
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def device_mesh(
    shape: MeshShape,
    devices: Sequence[jax.Device] | None = None,
    *,
    topology: str | None = None,
    order: tuple[str, ...] = (),
    parts: Parts | None = None,
) -> tuple[Mesh, tuple[Finding, ...]]:
    """Builds the JAX mesh of a plan.

    Args:
        devices: exactly the devices to use; by default the first ones that JAX sees.
    """
    let_collectives_wait()
    available = list(jax.devices() if devices is None else devices)
    if devices is not None and len(available) != shape.devices:
        raise TopologyError(
            f"the mesh {shape} has {shape.devices} devices, argument `devices` gives"
            f" {len(available)}\nTry: pass exactly the devices that the mesh uses"
        )
    if len(available) < shape.devices:
        raise TopologyError(
            f"the mesh {shape} needs {shape.devices} devices, JAX sees {len(available)}"
            f" ({available[0].platform})\n"
            f"Try: simulate them on the CPU: JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={shape.devices}"
            " in the environment, or "
            f'jax.config.update("jax_num_cpu_devices", {shape.devices}) before JAX is first used'
        )
    names, sizes = axis_names(shape, parts or {})
    ordered = _ordered(shape, available, topology, order)
    findings = (
        *idle_devices(shape, len(available), idle_processes(ordered.flat)),
        *other_machine(topology, available[0].platform),
    )
    return Mesh(ordered.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names)), findings


def _ordered(
    shape: MeshShape, devices: list[jax.Device], topology: str | None, order: tuple[str, ...]
) -> np.ndarray:
    """The devices in mesh order: those at the places of a plan, found by the coordinates that TPU
    devices carry, others by their numbers.
    """
    first = np.array(devices[: shape.devices], dtype=object)
    if len(first) == 1:
        return first
    if getattr(devices[0], "coords", None) is None:
        numbers = _numbers(shape, topology, order)
        if numbers is None:
            return first
        all_devices = np.array(devices, dtype=object)
        return (
            all_devices[numbers]
            if numbers.max() < len(devices)
            else first[np.argsort(np.argsort(numbers))]  # the devices of these places were given
        )
    by_place = {tpu_place(device): device for device in devices}
    places = [] if topology is None else tpu_places(shape, topology, order)
    if places and all(place in by_place for place in places):
        return np.array([by_place[place] for place in places], dtype=object)
    return _grid(tuple(shape[axis] for axis in INNER_AXES), list(first)).reshape(-1)


def _numbers(shape: MeshShape, topology: str | None, order: tuple[str, ...]) -> np.ndarray | None:
    """Numbers of the devices of a mesh, in mesh order; None where the topology is not known
    here.
    """
    try:
        parsed = None if topology is None else parse_topology(topology)
    except ShardlibError:
        return None
    numbers = None if parsed is None else device_order(shape, parsed, order)
    return None if numbers is None else numbers.reshape(-1)


def tpu_place(device: jax.Device) -> tuple[int, ...]:
    """(slice, coordinates, core on chip) of a TPU device."""
    return (getattr(device, "slice_index", 0), *device.coords, device.core_on_chip)


def tpu_places(
    shape: MeshShape, topology: str, order: tuple[str, ...] = ()
) -> list[tuple[int, ...]]:
    """Places of the devices of a mesh, in mesh order; empty where the topology is not known here or
    is no TPU's.
    """
    try:
        parsed = parse_topology(topology)
    except ShardlibError:
        return []
    numbers = device_order(shape, parsed, order)
    torus = [i for i, tier in enumerate(parsed.tiers) if tier.kind == "torus"]
    if numbers is None or len(torus) != 1:
        return []
    dims = parsed.tiers[torus[0]].shape
    slices = math.prod(tier.devices for tier in parsed.tiers[: torus[0]])
    cores = math.prod(tier.devices for tier in parsed.tiers[torus[0] + 1 :])
    coordinates = np.unravel_index(
        numbers.reshape(-1), (slices, *dims, *(1,) * (3 - len(dims)), cores)
    )
    return [tuple(int(i) for i in place) for place in zip(*coordinates, strict=True)]


def _grid(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """The order that JAX gives TPU devices of a topology that is not known here."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    across = _across_slices(sizes, slices)
    within = tuple(size // outer for size, outer in zip(sizes, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def _across_slices(sizes: tuple[int, ...], slices: int) -> tuple[int, ...]:
    """How many slices each mesh axis spans: the outermost axes take them.

    >>> _across_slices((1, 2, 8, 1, 1, 4), 4)
    (1, 2, 2, 1, 1, 1)
    """
    across: list[int] = []
    left = slices
    for size in sizes:
        across.append(math.gcd(size, left))
        left //= across[-1]
    if left > 1:
        raise TopologyError(
            f"mesh sizes {dict(zip(INNER_AXES, sizes, strict=True))} do not spread over {slices}"
            " slices\nTry: give the data or stage axis a multiple of the number of slices"
        )
    return tuple(across)
