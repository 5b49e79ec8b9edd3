"""The catalogue of chips and links, each figure with its source.

Short names of the sources:

- book: jax-ml/scaling-book (`tpus.md`, `sharding.md`, `gpus.md`), "How to Scale Your Model".
- google: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, key specifications.
- libtpu: "exceeds available HBM (...)" of an ahead-of-time compilation with libtpu 0.0.51; the rest
  of the HBM is reserved.
- xla: openxla/xla xla/backends/gpu/target_config/specs/*.txtpb, device_memory_size and
  memory_bandwidth.
- nvidia: data sheets of A100, H100, H200, HGX B200, GB200 NVL72; figures "with sparsity" halved.
- stas: stas00/ml-engineering, compute/accelerator and network chapters.
- nccl: NVIDIA/nccl src/graph/tuning.cc, hwLat (microseconds per step, ring, LL128 protocol).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.machines.chips import (
    GIB,
    Chip,
    Link,
    Memory,
    Product,
    dcn,
    gpu,
    gpu_memory,
    ici,
    infiniband,
    nvlink,
    tpu,
)

# --------------------------------------------------------------------------------------------------
# Simulated devices, with rough figures; `shardlib.calibration` measures the real ones.

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
        latency_s=1e-4,  # order of one rendezvous of eight threads on two cores
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


# --------------------------------------------------------------------------------------------------
# GPUs; for the short names of the sources see the docstring of this module.

#: Rate of large copies from or to pinned host memory in one direction, bytes/s. PCIe 4.0 and 5.0
#: with 16 lanes carry 31.5 and 63 GB/s (16 and 32 GT/s per lane, 128b/130b; PCI-SIG base
#: specifications); NVIDIA/nvbandwidth host_to_device_memcpy_ce shows about 26 and 55 of them.
PCIE_4 = 26e9
PCIE_5 = 55e9
#: The widest head of cuDNN's attention from Hopper on; 128 before (NVIDIA cuDNN, "Scaled Dot
#: Product Attention"; jax.nn.dot_product_attention rejects wider ones).
HOPPER_HEAD = 256
A100 = Product(
    chip=gpu(
        "a100",
        gpu_memory(85100068864, 2039e9, PCIE_4),
        bf16=312e12,  # xla a100_sxm_80; nvidia A100: 312 bf16, 624 int8, 156 TF32
        tf32=156e12,
        int8=624e12,
        sources=("xla a100_sxm_80.txtpb", "nvidia A100 80GB SXM"),
    ),
    fast=nvlink(
        300e9,
        0.8,
        "book gpus.md: NVLink 3, 300 GB/s; all-reduce busbw of 8 GPUs 230 to 250 GB/s (alayanew)",
    ),
    slow=infiniband(25e9, "nvidia DGX A100: one 200 Gbit/s HDR port a GPU"),
    dims=1,
    most=8,
)
A100_40GB = Product(
    chip=gpu(
        "a100-40gb",
        gpu_memory(42331013120, 1555e9, PCIE_4),
        bf16=312e12,  # xla a100_sxm_40; nvidia A100 40GB SXM
        tf32=156e12,
        int8=624e12,
        sources=("xla a100_sxm_40.txtpb", "nvidia A100 40GB SXM"),
    ),
    fast=A100.fast,
    slow=A100.slow,
    dims=1,
    most=8,
)
H100 = Product(
    chip=gpu(
        "h100",
        gpu_memory(84942979072, 3352e9, PCIE_5),
        bf16=989e12,  # xla h100_sxm; nvidia H100 SXM: 989 bf16, 1979 fp8
        tf32=494.5e12,
        int8=1979e12,
        fp8=1979e12,
        attention_width=HOPPER_HEAD,
        sources=("xla h100_sxm.txtpb", "nvidia H100 SXM"),
    ),
    fast=nvlink(
        450e9, 0.82, "book gpus.md: NVLink 4, 450 GB/s, 'difficult in practice to exceed 370 GB/s'"
    ),
    slow=infiniband(50e9, "nvidia DGX H100 SuperPOD: one 400 Gbit/s NDR port a GPU"),
    dims=1,
    most=8,
)
H200 = Product(
    chip=gpu(
        "h200",
        gpu_memory(151397597184, 4800e9, PCIE_5),
        bf16=989e12,  # xla h200; nvidia H200 SXM: the compute of an H100
        tf32=494.5e12,
        int8=1979e12,
        fp8=1979e12,
        attention_width=HOPPER_HEAD,
        sources=("xla h200.txtpb", "nvidia H200 SXM"),
    ),
    fast=H100.fast,
    slow=H100.slow,
    dims=1,
    most=8,
)
B200 = Product(
    chip=gpu(
        "b200",
        gpu_memory(191514411008, 7672e9, PCIE_5),
        bf16=2250e12,  # xla b200; nvidia HGX B200: 2250 bf16, 4500 fp8, 9000 fp4
        tf32=1100e12,
        int8=4500e12,
        fp8=4500e12,
        fp4=9000e12,
        attention_width=HOPPER_HEAD,
        sources=("xla b200.txtpb", "nvidia HGX B200"),
    ),
    fast=nvlink(
        900e9,
        0.7,
        "book gpus.md: NVLink 5, 900 GB/s; SimuMax b200_bf16_ceperm.json: 0.742 all-reduce, 0.673"
        " gather and scatter",
    ),
    slow=infiniband(50e9, "nvidia DGX B200 SuperPOD: one 400 Gbit/s port a GPU"),
    dims=1,
    most=8,
)
GB200 = Product(
    chip=gpu(
        "gb200",
        gpu_memory(
            197897748480, 7928e9, 225e9
        ),  # nvidia GB200: NVLink-C2C 900 GB/s both ways between one Grace and its two GPUs
        bf16=2500e12,  # xla gb200; nvidia GB200 NVL72: 2500 bf16, 5000 fp8, 10000 fp4
        tf32=1250e12,
        int8=5000e12,
        fp8=5000e12,
        fp4=10000e12,
        attention_width=HOPPER_HEAD,
        sources=("xla gb200.txtpb", "nvidia GB200 NVL72"),
    ),
    fast=B200.fast,
    slow=infiniband(50e9, "book gpus.md: 3.6 TB/s egress of 72 GPUs, 400 Gbit/s each"),
    dims=1,
    most=72,
)  # nvidia GB200 NVL72: one NVLink domain of 72 GPUs
#: All GPUs, in listing order.
GPUS: tuple[Product, ...] = (A100, A100_40GB, H100, H200, B200, GB200)


# --------------------------------------------------------------------------------------------------
# Board power of chips, watts per JAX device, as published by their vendors.
#
# The maximum of a board including its memory, without hosts, networks and cooling. TPU v5e, v5p,
# v6e and TPU7x have no published figure.

#: Chip -> (watts, source).
BOARD_POWER: Mapping[str, tuple[float, str]] = {
    "a100": (400.0, "NVIDIA A100 80GB SXM data sheet: max thermal design power 400 W"),
    "a100-40gb": (400.0, "NVIDIA A100 40GB SXM data sheet: 400 W"),
    "h100": (700.0, "NVIDIA H100 SXM data sheet: up to 700 W"),
    "h200": (700.0, "NVIDIA H200 SXM data sheet: up to 700 W"),
    "b200": (1000.0, "NVIDIA HGX B200: up to 1,000 W a GPU"),
    "gb200": (1200.0, "NVIDIA GB200 NVL72: up to 1,200 W a GPU"),
    "v4": (192.0, "arXiv:2304.01433, table 4: max measured power 192 W a chip"),
}


# --------------------------------------------------------------------------------------------------
# TPUs; for the short names of the sources see the docstring of this module.

V4 = Product(
    chip=tpu(
        "v4",
        Memory(
            hbm_bytes=32 * GIB,
            usable_bytes=int(30.75 * GIB),
            hbm_bytes_per_s=1200e9,
            host_bytes_per_s=16e9,  # book tpus.md: 16 GB/s each way
        ),
        bf16=275e12,  # google v4: 275 TFLOP/s bf16 or int8, 32 GiB, 1200 GB/s
        eight_bit=275e12,
        sources=("google v4", "EasyDeL issue 166: 'Used 63.80G of 30.75G hbm' (megacore)"),
    ),
    fast=ici(45e9, "book tpus.md: 4.5e10 B/s a link, one way"),
    slow=dcn(6.25e9, "book tpus.md: 2.5e10 B/s a host; 4 chips a host"),
    dims=3,
    most=4096,
)  # google v4: pod of 4096 chips
V5E = Product(
    chip=tpu(
        "v5e",
        Memory(
            hbm_bytes=16 * GIB,
            usable_bytes=int(15.75 * GIB),
            hbm_bytes_per_s=819e9,
            host_bytes_per_s=15e9,  # book tpus.md: typically 1.5e10 B/s a chip
        ),
        bf16=197e12,  # google v5e: 197 TFLOP/s bf16, 394 TOP/s int8, 16 GiB, 819 GB/s
        eight_bit=394e12,
        sources=("google v5e", "libtpu: 15.75 GiB available"),
    ),
    fast=ici(45e9, "book sharding.md: 9e10 B/s both ways for each of the two axes"),
    slow=dcn(3.125e9, "book tpus.md: 2.5e10 B/s a host; 8 chips a host"),
    dims=2,
    most=256,
    full_ring=16,
)  # book tpus.md: pod 16x16; smaller slices without wraps on dims < 16
V5P = Product(
    chip=tpu(
        "v5p",
        Memory(
            hbm_bytes=96 * GIB,
            usable_bytes=int(95.73 * GIB),
            hbm_bytes_per_s=2765e9,
            host_bytes_per_s=15e9,  # book tpus.md: typically 1.5e10 B/s a chip
        ),
        bf16=459e12,  # google v5p: 459 TFLOP/s bf16, 918 TOP/s int8, 2765 GB/s
        eight_bit=918e12,
        sources=("google v5p", "libtpu: 95.73 GiB available", "book tpus.md: 96 GB"),
    ),
    fast=ici(90e9, "book gpus.md: about 90 GB/s egress a link (v5p)"),
    slow=dcn(6.25e9, "book tpus.md: 2.5e10 B/s a host; 4 chips a host"),
    dims=3,
    most=8960,
)  # book tpus.md: pod 16x20x28
V6E = Product(
    chip=tpu(
        "v6e",
        Memory(
            hbm_bytes=32 * GIB,
            usable_bytes=int(31.24 * GIB),
            hbm_bytes_per_s=1640e9,
            host_bytes_per_s=32e9,  # book tpus.md: Trillium has 32 GB/s
        ),
        bf16=918e12,  # google v6e: 918 TFLOP/s bf16, 1836 TOP/s int8, 32 GiB, 1640 GB/s
        eight_bit=1836e12,
        sources=("google v6e", "libtpu: 31.24 GiB available"),
    ),
    fast=ici(90e9, "book tpus.md: 1.8e11 B/s both ways a link (v6e)"),
    slow=dcn(12.5e9, "google v6e: 4 x 200 Gbit/s for 8 chips"),
    dims=2,
    most=256,
    full_ring=16,
)  # book tpus.md: pod 16x16
TPU7X = Product(
    # google tpu7x, a chip: 2307 TFLOP/s bf16, 4614 TFLOP/s fp8, 192 GiB, 7380 GB/s; JAX sees its
    # two TensorCores as two devices.
    chip=tpu(
        "tpu7x",
        Memory(
            hbm_bytes=96 * GIB,
            usable_bytes=int(94.74 * GIB),
            hbm_bytes_per_s=7380e9 / 2,
            # assumed: the 32 GB/s of a v6e chip, shared by two devices; no published figure
            host_bytes_per_s=16e9,
        ),
        bf16=2307e12 / 2,
        eight_bit=4614e12 / 2,
        fp8=True,
        devices_per_chip=2,
        sources=(
            "google tpu7x, halved",
            "libtpu: 94.74 GiB available per device, two devices a chip",
        ),
    ),
    fast=ici(
        45e9,
        "scaling-book pull request 115: 9.0e10 B/s a link one way, as v5p; shared by the chip's two"
        " devices",
    ),
    slow=dcn(6.25e9, "scaling-book pull request 115: 12.5e9 B/s a chip; shared by its two devices"),
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
#: All TPUs, in listing order.
TPUS: tuple[Product, ...] = (V4, V5E, V5P, V6E, TPU7X)


# --------------------------------------------------------------------------------------------------
# The catalogue as a table.

#: Products by the chip name in the spelling of a topology, in listing order.
CATALOG: Mapping[str, Product] = {product.chip.name: product for product in (*TPUS, *GPUS, CPU)}


# --------------------------------------------------------------------------------------------------
# Slow links between separate machines: clusters, sites.
#
# All devices of a machine share one link, so each has a part of its rate. Of 1,538 bytes that cross
# it, 1,448 are payload: a frame of 1,500 bytes with the headers of IPv4 and TCP with timestamps
# (RFC 9293, RFC 7323), and 38 bytes around it (IEEE 802.3).
#
# For comparison: many parallel TCP connections reach 45 Gbit/s across Europe and 25 Gbit/s between
# Europe and America (PCCL, arXiv:2505.14065); light needs 5 ms for 1,000 km of fibre.

#: Share of the rate that is payload.
PAYLOAD = 1448 / 1538
#: Default latency, milliseconds: 2,000 km of fibre.
USUAL_MS = 10


def wide(gbit: float, ms: float, devices: int) -> Link:
    """A link between machines.

    Args:
        ms: latency in one direction, milliseconds.
    """
    return Link(
        name=f"{gbit:g} Gbit/s, {ms:g} ms",
        kind="network",
        bytes_per_s=gbit * 1e9 / 8 / devices,
        latency_s=ms / 1e3,
        efficiency=PAYLOAD,
        sources=("as spelled", "RFC 9293, RFC 7323, IEEE 802.3: payload of a frame"),
    )
