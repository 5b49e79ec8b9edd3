"""Which chips and links does shardlib know, and who says so?

Every figure carries its source on its line. Short names of the sources:

- book: jax-ml/scaling-book (`tpus.md`, `sharding.md`, `gpus.md`), "How to Scale Your Model".
- google: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, key specifications.
- libtpu: "exceeds available HBM (...)" of an ahead-of-time compilation with libtpu 0.0.51; the rest
  of the HBM is reserved.
- xla: openxla/xla xla/backends/gpu/target_config/specs/*.txtpb, device_memory_size and
  memory_bandwidth.
- nvidia: data sheets of A100, H100, H200, HGX B200, GB200 NVL72; figures "with sparsity" halved.
- stas: stas00/ml-engineering, compute/accelerator and network chapters.
- nccl: NVIDIA/nccl src/graph/tuning.cc, hwLat (microseconds a step, ring, LL128 protocol).

A link has the rate of its hardware and an `efficiency`: the part of that rate which large
collectives reach in measurements. Data sheets alone would make every plan look better than it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.hardware.chip import Chip

GIB = 2**30

#: Part of a GPU's memory that a training program gets. JAX takes 0.75 unless
#: XLA_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev, "GPU memory allocation"); 0.9 is what
#: training scripts commonly set, and what plans for GPUs assume.
GPU_MEMORY_FRACTION = 0.9

#: What large copies from or to pinned host memory reach in one direction, bytes/s. PCIe 4.0 and 5.0
#: with 16 lanes carry 31.5 and 63 GB/s (16 and 32 GT/s a lane, 128b/130b; PCI-SIG base
#: specifications); NVIDIA/nvbandwidth host_to_device_memcpy_ce shows about 26 and 55 of them.
PCIE_4 = 26e9
PCIE_5 = 55e9


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


def _tpu(
    name: str,
    bf16: float,
    eight_bit: float,
    hbm_bytes: int,
    available_gib: float,
    hbm_bytes_per_s: float,
    *,
    host: float,
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
        hbm_bytes=hbm_bytes,
        reserved_bytes=hbm_bytes - int(available_gib * GIB),
        hbm_bytes_per_s=hbm_bytes_per_s,
        devices_per_chip=devices_per_chip,
        host_bytes_per_s=host,
        # assumed: half the 1 us of an ICI hop (book, sharding.md); no published figure for one
        # fusion
        launch_s=5e-7,
        sources=sources,
    )


def _gpu(
    name: str,
    bf16: float,
    fp8: float | None,
    int8: float,
    tf32: float,
    hbm_bytes: int,
    hbm_bytes_per_s: float,
    host: float,
    sources: tuple[str, ...],
) -> Chip:
    """An NVIDIA GPU. Float32 products run in TensorFloat-32 at JAX's default precision."""
    flops = [("bfloat16", bf16), ("float16", bf16), ("float32", tf32), ("int8", int8)]
    if fp8 is not None:
        flops.append(("float8_e4m3fn", fp8))
    return Chip(
        name=name,
        vendor="nvidia",
        flops_per_s=tuple(flops),
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=hbm_bytes_per_s,
        host_bytes_per_s=host,
        reserved_bytes=hbm_bytes - int(hbm_bytes * GPU_MEMORY_FRACTION),
        # book, gpus.md quiz 1 question 7: an addition of 0.23 us of memory traffic takes 1.5 us in
        # JAX
        launch_s=1.3e-6,
        sources=sources,
    )


def _ici(bytes_per_s: float, source: str) -> Link:
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


def _dcn(bytes_per_s: float, source: str) -> Link:
    return Link(
        name="DCN",
        kind="network",
        bytes_per_s=bytes_per_s,
        latency_s=25e-6,  # assumed: a data-centre round trip through the host; no published figure
        sources=(source, "latency assumed"),
    )


def _nvlink(bytes_per_s: float, efficiency: float, source: str) -> Link:
    return Link(
        name="NVLink",
        kind="switch",
        bytes_per_s=bytes_per_s,
        latency_s=1.9e-6,  # nccl: NVLINK, ring, LL128
        efficiency=efficiency,
        sources=(source, "nccl tuning.cc hwLat NVLINK ring LL128: 1.9 us"),
    )


def _infiniband(bytes_per_s: float, source: str) -> Link:
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


V4 = Product(
    chip=_tpu(
        "v4",
        275e12,
        275e12,
        32 * GIB,
        30.75,
        1200e9,  # google v4: 275 TFLOP/s bf16 or int8, 32 GiB, 1200 GB/s
        host=16e9,  # book tpus.md: 16 GB/s each way
        sources=("google v4", "EasyDeL issue 166: 'Used 63.80G of 30.75G hbm' (megacore)"),
    ),
    fast=_ici(45e9, "book tpus.md: 4.5e10 B/s a link, one way"),
    slow=_dcn(6.25e9, "book tpus.md: 2.5e10 B/s a host; 4 chips a host"),
    dims=3,
    most=4096,
)  # google v4: pod of 4096 chips

V5E = Product(
    chip=_tpu(
        "v5e",
        197e12,
        394e12,
        16 * GIB,
        15.75,
        819e9,  # google v5e: 197 TFLOP/s bf16, 394 TOP/s int8, 16 GiB, 819 GB/s
        host=15e9,  # book tpus.md: typically 1.5e10 B/s a chip
        sources=("google v5e", "libtpu: 15.75 GiB available"),
    ),
    fast=_ici(45e9, "book sharding.md: 9e10 B/s both ways for each of the two axes"),
    slow=_dcn(3.125e9, "book tpus.md: 2.5e10 B/s a host; 8 chips a host"),
    dims=2,
    most=256,
    full_ring=16,
)  # book tpus.md: pod 16x16; smaller slices without wraps on dims < 16

V5P = Product(
    chip=_tpu(
        "v5p",
        459e12,
        918e12,
        96 * GIB,
        95.73,
        2765e9,  # google v5p: 459 TFLOP/s bf16, 918 TOP/s int8, 2765 GB/s
        host=15e9,  # book tpus.md: typically 1.5e10 B/s a chip
        sources=("google v5p", "libtpu: 95.73 GiB available", "book tpus.md: 96 GB"),
    ),
    fast=_ici(90e9, "book gpus.md: about 90 GB/s egress a link (v5p)"),
    slow=_dcn(6.25e9, "book tpus.md: 2.5e10 B/s a host; 4 chips a host"),
    dims=3,
    most=8960,
)  # book tpus.md: pod 16x20x28

V6E = Product(
    chip=_tpu(
        "v6e",
        918e12,
        1836e12,
        32 * GIB,
        31.24,
        1640e9,  # google v6e: 918 TFLOP/s bf16, 1836 TOP/s int8, 32 GiB, 1640 GB/s
        host=32e9,  # book tpus.md: Trillium has 32 GB/s
        sources=("google v6e", "libtpu: 31.24 GiB available"),
    ),
    fast=_ici(90e9, "book tpus.md: 1.8e11 B/s both ways a link (v6e)"),
    slow=_dcn(12.5e9, "google v6e: 4 x 200 Gbit/s for 8 chips"),
    dims=2,
    most=256,
    full_ring=16,
)  # book tpus.md: pod 16x16

TPU7X = Product(
    # google tpu7x, a chip: 2307 TFLOP/s bf16, 4614 TFLOP/s fp8, 192 GiB, 7380 GB/s; JAX sees its
    # two TensorCores as two devices.
    chip=_tpu(
        "tpu7x",
        2307e12 / 2,
        4614e12 / 2,
        96 * GIB,
        94.74,
        7380e9 / 2,
        fp8=True,
        devices_per_chip=2,
        host=16e9,  # assumed: the 32 GB/s of a v6e chip, shared by two devices; no published figure
        sources=(
            "google tpu7x, halved",
            "libtpu: 94.74 GiB available per device, two devices a chip",
        ),
    ),
    fast=_ici(
        45e9,
        "scaling-book pull request 115: 9.0e10 B/s a link one way, as v5p; shared by the chip's two"
        " devices",
    ),
    slow=_dcn(
        6.25e9, "scaling-book pull request 115: 12.5e9 B/s a chip; shared by its two devices"
    ),
    dims=3,
    most=9216,  # google tpu7x: pod of 9,216 chips
    on_chip=Link(
        name="die-to-die",
        kind="switch",
        bytes_per_s=540e9,  # google tpu7x: six times as fast as one ICI link (90 GB/s)
        latency_s=1e-6,  # assumed: not above an ICI hop
        sources=(
            "google tpu7x: die-to-die link six times as fast as one ICI link",
            "latency assumed",
        ),
    ),
)

A100 = Product(
    chip=_gpu(
        "a100",
        312e12,
        None,
        624e12,
        156e12,
        85100068864,
        2039e9,
        PCIE_4,  # xla a100_sxm_80; nvidia A100: 312 bf16, 624 int8, 156 TF32
        ("xla a100_sxm_80.txtpb", "nvidia A100 80GB SXM"),
    ),
    fast=_nvlink(
        300e9,
        0.8,
        "book gpus.md: NVLink 3, 300 GB/s; all-reduce busbw of 8 GPUs 230 to 250 GB/s (alayanew)",
    ),
    slow=_infiniband(25e9, "nvidia DGX A100: one 200 Gbit/s HDR port a GPU"),
    dims=1,
    most=8,
)

A100_40GB = Product(
    chip=_gpu(
        "a100-40gb",
        312e12,
        None,
        624e12,
        156e12,
        42331013120,
        1555e9,
        PCIE_4,  # xla a100_sxm_40; nvidia A100 40GB SXM
        ("xla a100_sxm_40.txtpb", "nvidia A100 40GB SXM"),
    ),
    fast=A100.fast,
    slow=A100.slow,
    dims=1,
    most=8,
)

H100 = Product(
    chip=_gpu(
        "h100",
        989e12,
        1979e12,
        1979e12,
        494.5e12,
        84942979072,
        3352e9,
        PCIE_5,  # xla h100_sxm; nvidia H100 SXM: 989 bf16, 1979 fp8
        ("xla h100_sxm.txtpb", "nvidia H100 SXM"),
    ),
    fast=_nvlink(
        450e9, 0.82, "book gpus.md: NVLink 4, 450 GB/s, 'difficult in practice to exceed 370 GB/s'"
    ),
    slow=_infiniband(50e9, "nvidia DGX H100 SuperPOD: one 400 Gbit/s NDR port a GPU"),
    dims=1,
    most=8,
)

H200 = Product(
    chip=_gpu(
        "h200",
        989e12,
        1979e12,
        1979e12,
        494.5e12,
        151397597184,
        4800e9,
        PCIE_5,  # xla h200; nvidia H200 SXM: the compute of an H100
        ("xla h200.txtpb", "nvidia H200 SXM"),
    ),
    fast=H100.fast,
    slow=H100.slow,
    dims=1,
    most=8,
)

B200 = Product(
    chip=_gpu(
        "b200",
        2250e12,
        4500e12,
        4500e12,
        1100e12,
        191514411008,
        7672e9,
        PCIE_5,  # xla b200; nvidia HGX B200: 2250 bf16, 4500 fp8
        ("xla b200.txtpb", "nvidia HGX B200"),
    ),
    fast=_nvlink(
        900e9,
        0.7,
        "book gpus.md: NVLink 5, 900 GB/s; SimuMax b200_bf16_ceperm.json: 0.742 all-reduce, 0.673"
        " gather and scatter",
    ),
    slow=_infiniband(50e9, "nvidia DGX B200 SuperPOD: one 400 Gbit/s port a GPU"),
    dims=1,
    most=8,
)

GB200 = Product(
    chip=_gpu(
        "gb200",
        2500e12,
        5000e12,
        5000e12,
        1250e12,
        197897748480,
        7928e9,  # xla gb200; nvidia GB200 NVL72: 2500 bf16, 5000 fp8
        225e9,  # nvidia GB200: NVLink-C2C 900 GB/s both ways between one Grace and its two GPUs
        ("xla gb200.txtpb", "nvidia GB200 NVL72"),
    ),
    fast=B200.fast,
    slow=_infiniband(50e9, "book gpus.md: 3.6 TB/s egress of 72 GPUs, 400 Gbit/s each"),
    dims=1,
    most=72,
)  # nvidia GB200 NVL72: one NVLink domain of 72 GPUs

CPU = Product(
    # One of eight simulated devices on two server cores. A static figure so that plans for "cpu:8"
    # do not depend on the machine; `shardlib.calibration.measured_cpu` measures the real one.
    chip=Chip(
        name="cpu",
        vendor="cpu",
        flops_per_s=(
            ("float32", 20e9),
            ("bfloat16", 10e9),
        ),  # order of one eighth of two AVX-512 cores
        hbm_bytes=2 * GIB,  # 16 GiB laptop shared by eight devices
        hbm_bytes_per_s=2.5e9,  # 20 GB/s of DDR4 shared by eight devices
        launch_s=2e-6,  # order of one XLA:CPU thunk
        sources=("rough static figure for one of eight simulated devices; not measured",),
    ),
    fast=Link(
        name="memory",
        kind="memory",
        bytes_per_s=1e9,
        latency_s=1e-4,  # order of one meeting of eight threads on two cores
        sources=("rough static figure; not measured",),
    ),
    slow=Link(
        name="loopback",
        kind="network",
        bytes_per_s=3e8,
        latency_s=1e-4,  # gloo between processes on one machine
        sources=("rough static figure; not measured",),
    ),
    dims=1,
    most=1 << 20,
)

#: Products by the first word of a topology's spelling.
CATALOG: Mapping[str, Product] = {
    product.chip.name: product
    for product in (V4, V5E, V5P, V6E, TPU7X, A100, A100_40GB, H100, H200, B200, GB200, CPU)
}
