"""Chips: what one JAX device does by itself: compute, memory, fixed overheads.

All figures are per *JAX device*, the thing that `jax.devices()` lists. A TPU v4 or v5p chip has two
TensorCores that act as one device ("megacore"); a TPU7x chip has two that are two devices, so its
device has half a chip's figures.

>>> chip = Chip(
...     name="toy", vendor="cpu", flops_per_s=(("bfloat16", 2e9), ("float32", 1e9)),
...     hbm_bytes=8, hbm_bytes_per_s=1e9, reserved_bytes=2,
... )
>>> chip.peak("bfloat16"), chip.peak("float16"), chip.peak("float32"), chip.usable_bytes
(2000000000.0, 2000000000.0, 1000000000.0, 6)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.errors import TopologyError, raise_all
from shardlib.untrusted.json_types import JsonObject

#: No figure of a machine is larger: the fastest chips have about 1e16 FLOP/s.
LARGEST = 1e24
VENDORS: tuple[str, ...] = ("google", "nvidia", "cpu")

#: Where to look, in order, when a chip has no figure of its own for a dtype: the format that its
#: matrix unit computes in instead.
FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "float16": ("bfloat16", "float32"),
    "float32": ("bfloat16",),
    "bfloat16": ("float16", "float32"),
    "int8": ("bfloat16", "float32"),
    "uint8": ("int8", "bfloat16", "float32"),
    "int4": ("int8", "bfloat16", "float32"),
    "uint4": ("int8", "bfloat16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float32"),
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The part of a machine behind one JAX device.

    Attributes:
        name: word of the topology spelling, "h100".
        vendor: one of `VENDORS`.
        flops_per_s: (dtype name, peak dense FLOP/s) pairs; a multiply and an add are two FLOPs. Any
            mapping is accepted.
        hbm_bytes: memory of the device.
        hbm_bytes_per_s: peak rate of that memory.
        reserved_bytes: memory that compiler and runtime keep for themselves.
        launch_s: fixed time of one op or kernel that is not hidden by the next one.
        host_bytes_per_s: rate that large copies between the host's memory and the device reach in
            one direction; 0 where it is not known.
        disk_bytes_per_s: rate at which the disks of a host are read, and written, for each device
            of the host; 0 where it is not known.
        devices_per_chip: JAX devices that share one chip.
        attention_width: the widest head that the vendor's kernel of attention takes, elements.
        sources: where the figures come from.

    Raises:
        TopologyError: a figure is missing, not positive or contradicts another.
    """

    name: str
    vendor: str
    flops_per_s: tuple[tuple[str, float], ...]
    hbm_bytes: int
    hbm_bytes_per_s: float
    reserved_bytes: int = 0
    launch_s: float = 0.0
    host_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    devices_per_chip: int = 1
    attention_width: int = 128
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pairs = dict(self.flops_per_s)  # a mapping or pairs
        object.__setattr__(
            self, "flops_per_s", tuple((dtype, float(rate)) for dtype, rate in pairs.items())
        )
        object.__setattr__(self, "sources", tuple(self.sources))
        failures = (
            [f"vendor is {self.vendor!r}; vendors are {', '.join(VENDORS)}"]
            if self.vendor not in VENDORS
            else []
        )
        if not self.flops_per_s:
            failures.append("flops_per_s is empty; give at least one dtype, e.g. bfloat16 = 1e14")
        failures += [
            f"flops_per_s of {dtype} is {rate}; it must be positive"
            for dtype, rate in self.flops_per_s
            if not rate > 0
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it must be positive"
            for name in ("hbm_bytes", "hbm_bytes_per_s", "devices_per_chip", "attention_width")
            if not getattr(self, name) > 0
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it must not be negative"
            for name in ("reserved_bytes", "launch_s", "host_bytes_per_s", "disk_bytes_per_s")
            if getattr(self, name) < 0
        ]
        if self.reserved_bytes >= self.hbm_bytes > 0:
            failures.append(
                f"reserved_bytes is {self.reserved_bytes}, which leaves nothing of {self.hbm_bytes}"
                " hbm_bytes"
            )
        if failures:
            raise_all(TopologyError, f"chip {self.name!r} is not usable", failures)

    def peak(self, dtype: str) -> float:
        """Peak dense FLOP/s in a dtype.

        A dtype without a figure of its own runs in the next format that the matrix unit has:
        float16 as bfloat16, int4 as int8, every 8-bit float as float8_e4m3fn, 8-bit formats as
        bfloat16 where there is no faster path, and the rest (float64, wide integers, booleans) as
        float32.
        """
        rates = dict(self.flops_per_s)
        name = "float8_e4m3fn" if dtype.startswith("float8") else dtype
        for candidate in (dtype, name, *FALLBACKS.get(name, ()), "float32", "bfloat16"):
            if candidate in rates:
                return rates[candidate]
        return min(rates.values())

    @property
    def usable_bytes(self) -> int:
        """Memory that a program can have."""
        return self.hbm_bytes - self.reserved_bytes

    def to_json(self) -> JsonObject:
        """The chip as plain data."""
        return {
            "name": self.name,
            "vendor": self.vendor,
            "flops_per_s": dict(self.flops_per_s),
            "hbm_bytes": self.hbm_bytes,
            "hbm_bytes_per_s": self.hbm_bytes_per_s,
            "reserved_bytes": self.reserved_bytes,
            "launch_s": self.launch_s,
            "host_bytes_per_s": self.host_bytes_per_s,
            "disk_bytes_per_s": self.disk_bytes_per_s,
            "devices_per_chip": self.devices_per_chip,
            "attention_width": self.attention_width,
            "sources": list(self.sources),
        }
