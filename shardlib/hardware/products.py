"""Products: chips with the links that they are sold with, and how data sheets are read.

A link has the rate of its hardware and an `efficiency`: the part of that rate which large
collectives reach in measurements. Data sheets alone would make every plan look better than it is.
Short names of sources are those of `shardlib.hardware.catalog`.

>>> ici(45e9, "book").kind, gpu_memory(100, 1e9, 1e8).usable_bytes
('torus', 90)
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.hardware.chip import Chip

GIB = 2**30
#: Part of a GPU's memory that a training program gets. JAX takes 0.75 unless
#: XLA_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev, "GPU memory allocation"); 0.9 is what
#: training scripts commonly set, and what plans for GPUs assume.
GPU_MEMORY_FRACTION = 0.9


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of connection between devices.

    Attributes:
        name: what people call it.
        kind: "torus", "mesh", "switch", "network" or "memory", as in `Tier`.
        bytes_per_s: peak rate of one device in one direction (for a torus: of the link in one dim).
        latency_s: time of one hop or step that carries no data.
        efficiency: part of the rate that large collectives reach.
        sources: where the figures come from.
    """

    name: str
    kind: str
    bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Product:
    """A chip with the links it is sold with.

    Attributes:
        chip: the chip.
        fast: links inside a fast domain (ICI slice, NVLink domain, one host).
        slow: links between fast domains.
        dims: number of sizes in the spelling: 1 for a count of GPUs, 2 or 3 for a torus.
        most: largest fast domain, in chips.
        on_chip: link between devices that share a chip; None where there is one device a chip.
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
        hbm_bytes: what the data sheet says.
        usable_bytes: what a program gets of it.
        hbm_bytes_per_s: peak rate.
        host_bytes_per_s: rate of large copies to and from the host, in one direction.
    """

    hbm_bytes: int
    usable_bytes: int
    hbm_bytes_per_s: float
    host_bytes_per_s: float


def gpu_memory(hbm_bytes: int, hbm_bytes_per_s: float, host_bytes_per_s: float) -> Memory:
    """The memories of a GPU, of which a program gets `GPU_MEMORY_FRACTION`.

    Args:
        hbm_bytes: size of the memory.
        hbm_bytes_per_s: its rate.
        host_bytes_per_s: rate of the link to the host, one direction.
    """
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
    attention_width: int = 128,
    sources: tuple[str, ...],
) -> Chip:
    """An NVIDIA GPU. Float32 products run in TensorFloat-32 at JAX's default precision.

    Args:
        bf16, tf32, int8, fp8: peak dense FLOP/s; None where there is no such format.
    """
    flops = [("bfloat16", bf16), ("float16", bf16), ("float32", tf32), ("int8", int8)]
    if fp8 is not None:
        flops.append(("float8_e4m3fn", fp8))
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
    """Links between chips of a TPU slice.

    Args:
        bytes_per_s: of one link, one direction.
    """
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
    """The data-centre network between TPU slices.

    Args:
        bytes_per_s: of one device, one direction.
    """
    return Link(
        name="DCN",
        kind="network",
        bytes_per_s=bytes_per_s,
        latency_s=25e-6,  # assumed: a data-centre round trip through the host; no published figure
        sources=(source, "latency assumed"),
    )


def nvlink(bytes_per_s: float, efficiency: float, source: str) -> Link:
    """NVLink through switches.

    Args:
        bytes_per_s: of one device, one direction.
    """
    return Link(
        name="NVLink",
        kind="switch",
        bytes_per_s=bytes_per_s,
        latency_s=1.9e-6,  # nccl: NVLINK, ring, LL128
        efficiency=efficiency,
        sources=(source, "nccl tuning.cc hwLat NVLINK ring LL128: 1.9 us"),
    )


def infiniband(bytes_per_s: float, source: str) -> Link:
    """The network between nodes of GPUs.

    Args:
        bytes_per_s: of one device, one direction.
    """
    return Link(
        name="InfiniBand",
        kind="network",
        bytes_per_s=bytes_per_s,
        latency_s=4e-6,  # nccl: NET, ring, LL128
        # calculon-ai/calculon systems/a100_80g.json: fitted part of the rate on A100 with HDR
        # InfiniBand
        efficiency=0.9,
        sources=(
            source,
            "nccl tuning.cc hwLat NET ring LL128: 4.0 us",
            "calculon a100_80g.json: 0.9 of the rate",
        ),
    )
