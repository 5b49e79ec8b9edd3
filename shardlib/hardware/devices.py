"""The topology that JAX devices are, by their own attributes; JAX itself is not imported.

The axes of a mesh say nothing here: its devices are the machine, and `pin={"mesh": mesh.shape}`
fixes a mesh.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np

from shardlib.errors import TopologyError
from shardlib.hardware.catalog import CATALOG
from shardlib.untrusted import shown


class JaxDevice(Protocol):
    """What is read of a `jax.Device`."""

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """What its maker calls it."""
        ...

    @property
    def process_index(self) -> int:
        """The process that it belongs to."""
        ...


class DeviceMesh(Protocol):
    """What is read of a `jax.sharding.Mesh`."""

    @property
    def devices(self) -> np.ndarray:
        """Its devices, in any shape."""
        ...


#: Of the catalogue -> what `device_kind` says, as JAX 0.10 to 0.12 report it.
_KINDS = {
    "v4": r"TPU v4",
    "v5e": r"TPU v5( lite|e)",
    "v5p": r"TPU v5p?",
    "v6e": r"TPU v6( lite|e)",
    "tpu7x": r"TPU ?v?7x?",
    "a100-40gb": r"NVIDIA A100.*40GB.*",
    "a100": r"NVIDIA A100.*80GB.*",
    "h100": r"NVIDIA H100.*HBM3.*",
    "h200": r"NVIDIA H200\b.*",
    "gb200": r"NVIDIA GB200\b.*",
    "b200": r"NVIDIA B200\b.*",
}


def devices_of(value: object) -> list[Any] | None:
    """The devices of a mesh, or of a list or array of devices, in their order; None where the value
    is neither.
    """
    if _is_device(value):
        return [value]
    if hasattr(value, "axis_names"):
        try:
            devices: object = getattr(value, "devices")  # noqa: B009
        except ValueError:  # an abstract mesh says so
            devices = None
        if not isinstance(devices, np.ndarray):
            raise TopologyError(
                f"topology is of type {type(value).__name__}, which has no devices\nTry: a"
                ' jax.sharding.Mesh, or a spelling such as topology="v5e:16x16"'
            )
        listed = list(cast("Sequence[Any]", devices.reshape(-1)))
    elif isinstance(value, (list, tuple, np.ndarray)):
        listed = list(cast("Sequence[Any]", np.asarray(value, dtype=object).reshape(-1)))
    else:
        return None
    if not listed or not all(map(_is_device, listed)):
        return None
    if len(set(map(id, listed))) < len(listed):
        raise TopologyError("topology names a device twice\nTry: every device once")
    return listed


def _is_device(value: object) -> bool:
    return hasattr(value, "device_kind") and hasattr(value, "platform")


def spelling_of(devices: Sequence[JaxDevice]) -> str:
    """The spelling of the topology that devices are: "cpu:8", "2*h100:8", "v5e:4x4"."""
    kinds = Counter((device.platform, device.device_kind) for device in devices)
    if len(kinds) > 1:
        description = ", ".join(f"{count} of {kind}" for (_, kind), count in sorted(kinds.items()))
        raise TopologyError(f"topology is {description}\nTry: devices of one kind")
    platform, kind = next(iter(kinds))
    if platform == "cpu":
        return f"cpu:{len(devices)}"
    name = next((name for name, form in _KINDS.items() if re.fullmatch(form, kind, re.I)), None)
    if name is None:
        raise TopologyError(
            f"topology is {len(devices)} of {shown(kind)}, which the catalogue does not have\nTry:"
            f" name it, one of {', '.join(CATALOG)}, or a .toml file"
        )
    parts: dict[int, list[JaxDevice]] = {}
    for device in devices:  # a fast domain is a slice, where JAX says which, or else a process
        parts.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    shapes = {_shape(name, part) for part in parts.values()}
    if len(shapes) > 1:
        raise TopologyError(
            f"topology is {len(devices)} of {shown(kind)} in {len(parts)} unlike parts:"
            f" {', '.join(sorted(shapes))}\nTry: as many devices of every one"
        )
    front = f"{len(parts)}*" if len(parts) > 1 else ""
    return f"{front}{name}:{shapes.pop()}"


def _shape(name: str, devices: Sequence[JaxDevice]) -> str:
    """The sizes of a fast domain: a count of GPUs, the sides of a box of TPU chips."""
    product = CATALOG[name]
    if product.dims == 1:
        return str(len(devices))
    coords = {tuple(cast("Sequence[int]", getattr(device, "coords", ()))) for device in devices}
    sides = [max(places) - min(places) + 1 for places in zip(*coords, strict=True)]
    shape, outer, chips = sides[: product.dims], sides[product.dims :], len(coords)
    if math.prod(shape) != chips or any(side > 1 for side in outer):
        raise TopologyError(
            f"topology is {chips} chips of {name} that are no whole box: their coordinates span"
            f" {'x'.join(map(str, sides))}\nTry: all chips of a box"
        )
    return "x".join(map(str, shape))
