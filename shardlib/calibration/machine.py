"""The topology of this machine's simulated devices, from what was measured."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from shardlib.calibration.exchanges import exchange_figures
from shardlib.calibration.figures import (
    cache_path,
    cpu_model,
    exchange_names,
    measured_ways,
    read_figures,
    write_figures,
)
from shardlib.calibration.programs import kernel_figures, line_of, speed_alone
from shardlib.calibration.stopwatch import cores
from shardlib.collective import KINDS
from shardlib.errors import TopologyError
from shardlib.hardware.catalog import CPU
from shardlib.hardware.chip import Chip
from shardlib.hardware.tier import Exchange, Tier
from shardlib.hardware.topology import Topology, topology
from shardlib.processes.agreement import of_first
from shardlib.processes.devices import let_collectives_wait

#: Rows, columns and share of the blocks of a matmul that a core computes in its registers.
BLOCK = (8.0, 16.0, 1.0)
#: Bytes that chains of element-wise ops, views and reductions move over those of perfectly fused
#: chains: XLA:CPU clears and copies the stacks of loops, and reads operands again. And bytes that
#: the transposed copies around a weight's gradient cost, as if they moved in order, for each byte
#: of it. Both were chosen on the transformer of `benchmarks/hand_sharded.py`, with one and four
#: microbatches on data 8, which take 2.51 and 2.93 s of two cores.
UNFUSED, TRANSPOSED = 2.15, 30.0


def measured_cpu(devices: int, refresh: bool = False) -> Topology:
    """The topology of `devices` simulated CPU devices on this machine, as measured.

    Where JAX has fewer local CPU devices than asked for, those that exist are measured and their
    compute and memory rates are divided among the devices asked for, since they share the same
    cores. One device exchanges with nobody: the catalogue's static link figures stay. A cache
    folder that cannot be written costs a measurement in every process. Of processes that have
    joined each other, the first measures for all.
    """
    if devices < 1:
        raise TopologyError(f"measured_cpu(devices={devices}) needs at least one device")
    let_collectives_wait()
    local = jax.local_devices(backend="cpu")[:devices]
    # Every process would measure a little differently, and then plan differently.
    figures = json.loads(
        of_first(f"figures of cpu:{devices}", lambda: json.dumps(_figures(devices, local, refresh)))
    )
    return machine_of_figures(devices, len(local), figures)


def _figures(devices: int, local: Sequence[jax.Device], refresh: bool) -> dict[str, float]:
    path = cache_path(devices, len(local))
    figures = None if refresh else read_figures(path, len(local))
    if figures is None:
        figures = measure(local)
        write_figures(path, figures)
    return figures


def measure(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Runs every measurement on JAX devices."""
    return {
        **kernel_figures(line_of(devices)),
        "alone": speed_alone(devices) if len(devices) > 1 else 1.0,
        **exchange_figures(devices),
    }


def machine_of_figures(devices: int, local: int, figures: Mapping[str, float]) -> Topology:
    """The topology of `devices` devices by the figures of `local` ones."""
    share = local / devices
    sources = (
        f"measured on {cpu_model()}, {cores()} cores, {local} devices, JAX {jax.__version__}",
    )
    peak = max(figures["float32_flops_per_s"], figures["bfloat16_flops_per_s"])
    memory = figures["memory_bytes_per_s"]
    chip = Chip(
        name="cpu",
        vendor="cpu",
        hbm_bytes=max(1, _memory_bytes() // devices),
        hbm_bytes_per_s=memory * share,
        flops_per_s=(
            ("float32", figures["float32_flops_per_s"] * share),
            ("bfloat16", figures["bfloat16_flops_per_s"] * share),
        ),
        launch_s=figures["launch_s"] / share,
        sources=sources,
    )
    elements = min(figures["elements_per_s"], figures["bfloat16_flops_per_s"])
    busy = min(max(1.0, figures["cores"]), max(1.0, cores() / local))
    efficiency = {
        "matmul": 1.0,  # the rates of matmuls were measured
        "tiles": (BLOCK,),
        "cores": busy,
        "batched_cores": min(max(1.0, busy * figures["batched"]), busy),
        "depth": figures["matmul_start"],
        "memory": 1.0,
        "at_once": False,  # a core does one thing after another
        "unfused": UNFUSED,
        "transposed": TRANSPOSED,
        "vector": elements / figures["bfloat16_flops_per_s"],
        "transcendental": elements / figures["transcendental_per_s"],
        "convolution": min(1.0, figures["convolution_flops_per_s"] / peak),
        "optimizer": min(1.0, figures["optimizer_bytes_per_s"] / memory),
        "gather": min(1.0, figures["gather_bytes_per_s"] / memory),
        "fresh": memory / figures["fresh_bytes_per_s"],
        "step_s": figures["step_s"] / share,
    }
    static = topology(f"cpu:{devices}")
    return Topology(
        name=static.name,
        chip=chip,
        tiers=(_tier(static.tiers[0], local, share, figures, sources),),
        efficiency=tuple(efficiency.items()),
        alone=min(float(devices), figures["alone"] / share),
    )


def _tier(
    static: Tier,
    local: int,
    share: float,
    figures: Mapping[str, float],
    sources: tuple[str, ...],
) -> Tier:
    """The memory through which devices exchange."""
    if local == 1:
        return static
    return replace(
        static,
        exchanges=tuple(
            Exchange(
                kind=kind,
                ways=degree,
                latency_s=figures[latency] / share,
                seconds_per_byte=figures[per_byte] / share,
            )
            for kind in KINDS
            for degree in measured_ways(local)
            for latency, per_byte in [exchange_names(kind, degree)]
        ),
        sources=sources,
    )


def _memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    sizes = (
        [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
        else []
    )
    with contextlib.suppress(OSError, ValueError):  # no control groups, or the word "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=8 * CPU.chip.hbm_bytes)
