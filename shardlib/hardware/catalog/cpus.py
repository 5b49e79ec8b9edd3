"""Simulated devices, with rough figures; `shardlib.calibration` measures the real ones."""

from __future__ import annotations

from shardlib.hardware.chip import Chip
from shardlib.hardware.products import GIB, Link, Product

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
