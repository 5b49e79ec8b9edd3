"""Chips, tiers of links, and products of both: compute, memory and fixed overheads per JAX device,
and the links that a chip is sold with.

All figures are per *JAX device*, as listed by `jax.devices()`. A TPU v4 or v5p chip has two
TensorCores that act as one device ("megacore"); a TPU7x chip has two that are two devices, so its
device has half a chip's figures.

>>> chip = Chip(
...     name="toy", vendor="cpu", flops_per_s=(("bfloat16", 2e9), ("float32", 1e9)),
...     hbm_bytes=8, hbm_bytes_per_s=1e9, reserved_bytes=2,
... )
>>> chip.peak("bfloat16"), chip.peak("float16"), chip.peak("float32"), chip.usable_bytes
(2000000000.0, 2000000000.0, 1000000000.0, 6)

A link has the rate of its hardware and an `efficiency`: the share of that rate that large
collectives reach in measurements. With data-sheet rates alone, every plan would look better than it
is. Short names of sources are those of `shardlib.machines.catalog`.

>>> ici(45e9, "book").kind, gpu_memory(100, 1e9, 1e8).usable_bytes
('torus', 90)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime

from shardlib.compact import plain_fields
from shardlib.errors import TopologyError, raise_all
from shardlib.formats import FORMATS
from shardlib.layout import KINDS as COLLECTIVES
from shardlib.untrusted.data import JsonObject

#: Upper limit of any figure of a machine: the fastest chips have about 1e16 FLOP/s.
LARGEST = 1e24
VENDORS: tuple[str, ...] = ("google", "nvidia", "cpu")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Compute and memory of one JAX device.

    Attributes:
        name: chip name in the spelling of topologies, "h100".
        vendor: one of `VENDORS`.
        flops_per_s: (dtype name, peak dense FLOP/s) pairs; a multiply and an add are two FLOPs. Any
            mapping is accepted.
        hbm_bytes: memory of the device.
        hbm_bytes_per_s: peak rate of that memory.
        reserved_bytes: memory reserved by compiler and runtime.
        launch_s: fixed seconds of one op or kernel that the next one does not hide.
        host_bytes_per_s: rate of large copies between host memory and the device in one direction;
            0 if unknown.
        disk_bytes_per_s: rate of reading, and of writing, the disks of a host, per device of the
            host; 0 if unknown.
        devices_per_chip: JAX devices that share one chip.
        attention_width: the widest head that the vendor's attention kernel supports, elements.
        sources: sources of the figures.

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

        A dtype without a figure of its own runs in the next of `Format.units` that has, others
        (float64, wide integers, booleans) as float32.
        """
        rates = dict(self.flops_per_s)
        units = FORMATS[dtype].units if dtype in FORMATS else ()
        for candidate in (dtype, *units, "float32", "bfloat16"):
            if candidate in rates:
                return rates[candidate]
        return min(rates.values())

    @property
    def usable_bytes(self) -> int:
        """Memory available to a program."""
        return self.hbm_bytes - self.reserved_bytes

    def to_json(self) -> JsonObject:
        """The chip as plain data."""
        return {**plain_fields(self), "flops_per_s": dict(self.flops_per_s)}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """When and on what the figures of a machine were measured.

    Attributes:
        made: date and time, in ISO 8601 and UTC.
        place: the processors or devices, and versions, as text.
        load: share of the processors that other programs used meanwhile; None if unknown.
        intervals: (figure, low, high) of measured figures.

    Raises:
        TopologyError: the date is not one.
    """

    made: str
    place: str
    load: float | None = None
    intervals: tuple[tuple[str, float, float], ...] = ()

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.made)
        except ValueError:
            raise TopologyError(
                f"made is {self.made!r}; it is a date in ISO 8601, such as"
                " '2026-11-28T18:00:00+00:00'"
            ) from None

    def to_json(self) -> JsonObject:
        """The record as plain data."""
        return plain_fields(self)

    def __str__(self) -> str:
        date = datetime.fromisoformat(self.made).strftime("%d %B %Y, %H:%M").lstrip("0")
        return f"measured on {date} UTC ({self.place})"


# --------------------------------------------------------------------------------------------------
# A tier: one level of the links of a machine, such as the ICI torus of a slice or the network
# between hosts.

KINDS: tuple[str, ...] = ("torus", "mesh", "switch", "network", "memory")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A measured collective, with all devices in use.

    Attributes:
        kind: one of `shardlib.layout.KINDS`.
        ways: number of participants.
        latency_s: seconds of the smallest message.
        seconds_per_byte: additional seconds per byte of the full array: the gathered array, the
            operand of a reduce-scatter, the buffer, the message.

    Raises:
        TopologyError: the fields do not fit each other.
    """

    kind: str
    ways: int
    latency_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        failures = (
            [f"kind is {self.kind!r}; kinds are {', '.join(COLLECTIVES)}"]
            if self.kind not in COLLECTIVES
            else []
        )
        if type(self.ways) is not int or self.ways < 2:
            failures.append(f"ways is {self.ways}; it needs an integer of at least 2")
        failures += [
            f"{name} is {getattr(self, name)}; it must not be negative"
            for name in ("latency_s", "seconds_per_byte")
            if not getattr(self, name) >= 0
        ]
        if failures:
            raise_all(TopologyError, f"exchange {self.kind!r} is not usable", failures)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Links of one kind.

    Attributes:
        name: name in output.
        kind: "torus" (links between neighbours, one per dim and direction), "mesh" (a link between
            every pair; a group uses those between its members), "switch" or "network" (each device
            reaches every other through one port), or "memory" (simulated devices of one process;
            the latency is that of a whole collective).
        shape: devices or domains along each dim; one dim unless it is a torus.
        wrap: per dim, True if the last position is a neighbour of the first; False unless it is a
            torus.
        bytes_per_s: peak rate in one direction: of the link in each dim of a torus, of all links of
            a device in a mesh, otherwise of a device's port.
        latency_s: seconds of one hop or step without data.
        efficiency: share of the rate that large collectives reach.
        ring: True if gathers and scatters go around a ring, with the latency in each step.
        ring_sums: True if all-reduces do, too; otherwise trees take a logarithm of steps.
        exchanges: measured collectives among the devices of a "memory", which replace its rate and
            latency.
        sources: sources of the figures.

    Raises:
        TopologyError: the fields do not fit each other.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes_per_s: float
    latency_s: float = 0.0
    wrap: tuple[bool, ...] = ()
    efficiency: float = 1.0
    ring: bool = False
    ring_sums: bool = False
    exchanges: tuple[Exchange, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "exchanges", tuple(self.exchanges))
        object.__setattr__(self, "wrap", tuple(self.wrap) or (False,) * len(self.shape))
        object.__setattr__(self, "sources", tuple(self.sources))
        failures = (
            [f"kind is {self.kind!r}; kinds are {', '.join(KINDS)}"]
            if self.kind not in KINDS
            else []
        )
        if not self.shape or any(type(n) is not int or n < 1 for n in self.shape):
            failures.append(f"shape is {list(self.shape)}; it needs integers of at least 1")
        if self.kind in KINDS[1:] and len(self.shape) != 1:
            failures.append(f"shape is {list(self.shape)}; a {self.kind} has one dim")
        if len(self.wrap) != len(self.shape):
            failures.append(f"wrap has {len(self.wrap)} entries for {len(self.shape)} dims")
        if any(self.wrap) and self.kind != "torus":
            failures.append(f"wrap is set, which only a torus has; the kind is {self.kind!r}")
        if not self.bytes_per_s > 0:
            failures.append(f"bytes_per_s is {self.bytes_per_s}; it must be positive")
        if self.latency_s < 0:
            failures.append(f"latency_s is {self.latency_s}; it must not be negative")
        if not 0 < self.efficiency <= 1:
            failures.append(f"efficiency is {self.efficiency}; it must be above 0 and at most 1")
        if self.exchanges and self.kind != "memory":
            failures.append(
                f"exchanges are set, which only a memory has; the kind is {self.kind!r}"
            )
        if failures:
            raise_all(TopologyError, f"tier {self.name!r} is not usable", failures)

    @property
    def devices(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)

    @property
    def reached_bytes_per_s(self) -> float:
        """The rate that large collectives reach."""
        return self.bytes_per_s * self.efficiency

    def to_json(self) -> JsonObject:
        """The tier as plain data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "wrap": list(self.wrap),
            "bytes_per_s": self.bytes_per_s,
            "latency_s": self.latency_s,
            "efficiency": self.efficiency,
            **(
                {"exchanges": [dict(exchange.__dict__) for exchange in self.exchanges]}
                if self.exchanges
                else {}
            ),
            "sources": list(self.sources),
        }


GIB = 2**30
#: Share of a GPU's memory that a training program gets. JAX takes 0.75 unless
#: XLA_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev, "GPU memory allocation"); 0.9 is what
#: training scripts commonly set, and the assumption of plans for GPUs.
GPU_MEMORY_FRACTION = 0.9


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of connection between devices.

    Attributes:
        name: name in output.
        kind: "torus", "mesh", "switch", "network" or "memory", as in `Tier`.
        bytes_per_s: peak rate per device in one direction (for a torus: of the link in one dim).
        latency_s: seconds of one hop or step without data.
        efficiency: share of the rate that large collectives reach.
        sources: sources of the figures.
    """

    name: str
    kind: str
    bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Product:
    """A chip with the links that it is sold with, from data sheets.

    Attributes:
        chip: the chip.
        fast: links inside a fast domain (ICI slice, NVLink domain, one host).
        slow: links between fast domains.
        dims: number of sizes in the spelling: 1 for a count of GPUs, 2 or 3 for a torus.
        most: largest fast domain, in chips.
        on_chip: link between devices that share a chip; None with one device per chip.
        full_ring: the torus size that wraps around (2D pods); 0 for pods of 4x4x4 cubes, where full
            cubes wrap.
    """

    chip: Chip
    fast: Link
    slow: Link
    dims: int
    most: int
    on_chip: Link | None = None
    full_ring: int = 0

    @property
    def example(self) -> str:
        """A spelling that parses."""
        return f"{self.chip.name}:{ {1: min(8, self.most), 2: '16x16', 3: '4x4x4'}[self.dims] }"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memories of one device.

    Attributes:
        hbm_bytes: size according to the data sheet.
        usable_bytes: the part available to a program.
        hbm_bytes_per_s: peak rate.
        host_bytes_per_s: rate of large copies to and from the host, in one direction.
    """

    hbm_bytes: int
    usable_bytes: int
    hbm_bytes_per_s: float
    host_bytes_per_s: float


def gpu_memory(hbm_bytes: int, hbm_bytes_per_s: float, host_bytes_per_s: float) -> Memory:
    """The memories of a GPU, of which a program gets `GPU_MEMORY_FRACTION`."""
    return Memory(
        hbm_bytes=hbm_bytes,
        usable_bytes=int(hbm_bytes * GPU_MEMORY_FRACTION),
        hbm_bytes_per_s=hbm_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
    )


def tpu(
    name: str,
    memory: Memory,
    *,
    bf16: float,
    eight_bit: float,
    fp8: bool = False,
    devices_per_chip: int = 1,
    sources: tuple[str, ...],
) -> Chip:
    """A TPU device. Float32 products run as one bfloat16 pass at JAX's default precision
    (`jax.lax.Precision.DEFAULT`).
    """
    flops = (("bfloat16", bf16), ("float32", bf16), ("float8_e4m3fn" if fp8 else "int8", eight_bit))
    return Chip(
        name=name,
        vendor="google",
        flops_per_s=flops,
        hbm_bytes=memory.hbm_bytes,
        reserved_bytes=memory.hbm_bytes - memory.usable_bytes,
        hbm_bytes_per_s=memory.hbm_bytes_per_s,
        devices_per_chip=devices_per_chip,
        host_bytes_per_s=memory.host_bytes_per_s,
        # assumed: half the 1 us of an ICI hop (book, sharding.md); no published figure for one
        # fusion
        launch_s=5e-7,
        sources=sources,
    )


def gpu(
    name: str,
    memory: Memory,
    *,
    bf16: float,
    tf32: float,
    int8: float,
    fp8: float | None = None,
    fp4: float | None = None,
    attention_width: int = 128,
    sources: tuple[str, ...],
) -> Chip:
    """An NVIDIA GPU. Float32 products run in TensorFloat-32 at JAX's default precision.

    Args:
        bf16, tf32, int8, fp8, fp4: peak dense FLOP/s; None for a format that it lacks.
    """
    flops = [("bfloat16", bf16), ("float16", bf16), ("float32", tf32), ("int8", int8)]
    narrow = (("float8_e4m3fn", fp8), ("float4_e2m1fn", fp4))
    flops += [(dtype, rate) for dtype, rate in narrow if rate is not None]
    return Chip(
        name=name,
        vendor="nvidia",
        attention_width=attention_width,
        flops_per_s=tuple(flops),
        hbm_bytes=memory.hbm_bytes,
        hbm_bytes_per_s=memory.hbm_bytes_per_s,
        host_bytes_per_s=memory.host_bytes_per_s,
        reserved_bytes=memory.hbm_bytes - memory.usable_bytes,
        # book, gpus.md quiz 1 question 7: an addition of 0.23 us of memory traffic takes 1.5 us in
        # JAX
        launch_s=1.3e-6,
        sources=sources,
    )


def ici(bytes_per_s: float, source: str) -> Link:
    """Links between chips of a TPU slice; `bytes_per_s` is per link and direction."""
    return Link(
        name="ICI",
        kind="torus",
        bytes_per_s=bytes_per_s,
        latency_s=1e-6,  # book, sharding.md "A note on ICI latency": a hop is typically around 1 us
        # book, sharding.md pop quiz 2: 560 us by bandwidth, 680 us in the profile (v5e, all-gather
        # of 34 MB)
        efficiency=0.82,
        sources=(
            source,
            "book sharding.md: about 1 us a hop; 560 us predicted against 680 us profiled",
        ),
    )


def dcn(bytes_per_s: float, source: str) -> Link:
    """The data-centre network between TPU slices; `bytes_per_s` is per device and direction."""
    return Link(
        name="DCN",
        kind="network",
        bytes_per_s=bytes_per_s,
        latency_s=25e-6,  # assumed: a data-centre round trip through the host; no published figure
        sources=(source, "latency assumed"),
    )


def nvlink(bytes_per_s: float, efficiency: float, source: str) -> Link:
    """NVLink through switches; `bytes_per_s` is per device and direction."""
    return Link(
        name="NVLink",
        kind="switch",
        bytes_per_s=bytes_per_s,
        latency_s=1.9e-6,  # nccl: NVLINK, ring, LL128
        efficiency=efficiency,
        sources=(source, "nccl tuning.cc hwLat NVLINK ring LL128: 1.9 us"),
    )


def infiniband(bytes_per_s: float, source: str) -> Link:
    """The network between nodes of GPUs; `bytes_per_s` is per device and direction."""
    return Link(
        name="InfiniBand",
        kind="network",
        bytes_per_s=bytes_per_s,
        latency_s=4e-6,  # nccl: NET, ring, LL128
        # calculon-ai/calculon systems/a100_80g.json: fitted share of the rate on A100 with HDR
        # InfiniBand
        efficiency=0.9,
        sources=(
            source,
            "nccl tuning.cc hwLat NET ring LL128: 4.0 us",
            "calculon a100_80g.json: 0.9 of the rate",
        ),
    )
