"""Which device sits where in the mesh?

The mesh always has all six axes, sizes 1 included, so that an annotation of the user's own that names a mesh axis means
the same under every plan. All axes are Auto: the compiler propagates layouts from the constraints that the plan places.

The device order follows the hardware. On TPU, devices carry coordinates, and JAX lays the axes out over the torus; over
several slices the outermost axes (stage, data, fsdp, ...) go across slices. Elsewhere devices are taken in JAX's order,
in which neighbours share the fastest link, and the innermost axis gets the neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.errors import TopologyError
from shardlib.report import Finding


def device_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> tuple[Mesh, tuple[Finding, ...]]:
    """Builds the JAX mesh of a plan.

    Args:
        shape: sizes of the mesh axes.
        devices: exactly the devices to use; by default the first ones that JAX sees.

    Returns:
        The mesh, and a finding if devices that JAX sees stay idle.

    Raises:
        TopologyError: too few devices, or a number given explicitly that is not the mesh's.
    """
    found = list(jax.devices() if devices is None else devices)
    if devices is not None and len(found) != shape.devices:
        raise TopologyError(f"the mesh {shape} has {shape.devices} devices, argument `devices` gives {len(found)}\n"
                            "Try: pass exactly the devices that the mesh uses")
    if len(found) < shape.devices:
        raise TopologyError(
            f"the mesh {shape} needs {shape.devices} devices, JAX sees {len(found)} ({found[0].platform})\n"
            f"Try: simulate them on the CPU: JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={shape.devices} in the environment, or "
            f'jax.config.update("jax_num_cpu_devices", {shape.devices}) before JAX is first used')
    idle = len(found) - shape.devices
    findings = (Finding(code="idle-devices", severity="warning", where=str(shape),
                        message=f"the plan uses {shape.devices} of the {len(found)} devices that JAX sees; {idle} stay idle.",
                        hint="plan for a topology of all devices"),) if idle else ()
    grid = _grid(tuple(shape[axis] for axis in MESH_AXES), found[: shape.devices])
    assert grid.size == shape.devices, (grid.shape, shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)), findings


def _grid(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    if len(devices) == 1 or getattr(devices[0], "coords", None) is None:
        return np.array(devices, dtype=object).reshape(sizes)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    across = _across_slices(sizes, slices)
    within = tuple(size // outer for size, outer in zip(sizes, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


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
        raise TopologyError(f"mesh sizes {dict(zip(MESH_AXES, sizes, strict=True))} do not spread over {slices} slices\n"
                            "Try: give the data or stage axis a multiple of the number of slices")
    return tuple(across)
