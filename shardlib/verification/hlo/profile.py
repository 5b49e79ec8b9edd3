"""Executions of instructions on devices, as the profiler of JAX recorded them (XSpace)."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from shardlib import _jax_compat
from shardlib.errors import VerificationError
from shardlib.lowering.mesh.device_mesh import parts_of


@dataclass(frozen=True, kw_only=True)
class Event:
    """One execution of an instruction on a device, seconds."""

    name: str
    start: float
    end: float


def stage_devices(mesh: Mesh) -> list[int]:
    """Number of the first device of every stage."""
    parts = parts_of(mesh, ("stage",))
    order = [mesh.axis_names.index(part) for part in parts] + [
        k for k, name in enumerate(mesh.axis_names) if name not in parts
    ]
    stages = int(np.prod([mesh.shape[part] for part in parts]))
    first = np.transpose(mesh.devices, order).reshape(stages, -1)[:, 0]
    if any(device.process_index != jax.process_index() for device in first):
        raise VerificationError(
            "the stages are on devices of several processes, and a profile shows those of one\nTry:"
            " a mesh with stages inside of a process"
        )
    return [
        int(device.local_hardware_id if device.platform != "cpu" else device.id) for device in first
    ]


def read_profile(profile: bytes, module: str) -> dict[int, list[Event]]:
    """Executions of the instructions of a module, by number of the device, in order of time."""
    events_by_device: dict[int, list[Event]] = defaultdict(list)
    for plane, line, event, begin, duration, stats in _jax_compat.profile_events(profile):
        match = re.fullmatch(r"/device:[A-Z]+:(\d+)", plane)
        name = str(stats.get("hlo_op") or (event if match and line == "XLA Ops" else ""))
        device = int(match[1]) if match else stats.get("device_ordinal")
        if name and device is not None and str(stats.get("hlo_module", module)) == module:
            events_by_device[int(device)].append(
                Event(
                    name=re.split(r"[ =]", name.lstrip("%"))[0],
                    start=begin * 1e-9,
                    end=(begin + duration) * 1e-9,
                )
            )
    return {
        device: sorted(events, key=lambda event: (event.start, event.end))
        for device, events in events_by_device.items()
    }
