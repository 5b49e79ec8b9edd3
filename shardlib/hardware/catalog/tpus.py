"""TPUs, each figure with its source, whose short names `shardlib.hardware.catalog` explains."""

from __future__ import annotations

from shardlib.hardware.products import GIB, Link, Memory, Product, dcn, ici, tpu

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
#: All TPUs, in the order in which they are listed.
TPUS: tuple[Product, ...] = (V4, V5E, V5P, V6E, TPU7X)
