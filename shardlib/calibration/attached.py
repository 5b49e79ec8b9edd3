"""Prices of attached devices: matmuls, memory, collectives by tier and kind, and their overlap.

`prices` measures on all devices of a job and returns a topology whose figures replace those of the
catalogue or of a topology file, each with the interval of its values from pass to pass.

>>> from shardlib.machines.topology import topology
>>> [name for name in figure_list(topology("2*h100:8")) if name.startswith("matmul.bf")]
['matmul.bfloat16.2048', 'matmul.bfloat16.8192']
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from shardlib.calibration import (
    CHAIN,
    KERNELS,
    MESSAGE,
    SMALL,
    Calibration,
    collective_seconds,
    cpu_model,
    exchange_figures,
    exchange_names,
    kernel_figures,
    line,
    line_of,
    machine_of_figures,
    measured_ways,
    now,
    per_device,
    speed_alone,
    timed,
)
from shardlib.cost.collectives import LinearCost, collective_cost
from shardlib.errors import TopologyError
from shardlib.layout import KINDS
from shardlib.machines.chips import Chip, Measurement, Tier
from shardlib.machines.topology import Span, Topology
from shardlib.processes.timing import Clock, cores
from shardlib.processes.values import of_first

#: Seconds for which a program is repeated in a pass; passes at least and at most.
BUDGET_S, LEAST_PASSES, MOST_PASSES = 0.1, 3, 12
#: Rows, columns and depth of the matmuls, the last one large enough for the best kernels.
SIDES = (2048, 8192)
#: float32 elements of the full array of a large collective: 64 MiB.
LARGE = 1 << 24
#: float32 elements of a pass over memory: 256 MiB.
STREAM = 1 << 26
#: Dtypes of matmuls, where a chip has a rate for them.
DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")

Figures = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A measured machine.

    Attributes:
        machine: the topology with measured figures; `machine.measured` has their intervals.
        figures: measured, by name.
        before: the same figures of the catalogue or the file, where it has them.
    """

    machine: Topology
    figures: Figures
    before: Figures


def figure_list(base: Topology) -> dict[str, str]:
    """Names of the figures that are measured, and what each is."""
    if base.chip.vendor == "cpu":
        names = dict(KERNELS)
        for kind in KINDS:
            for ways in measured_ways(base.devices):
                names |= described(exchange_names(kind, ways), kind, ways)
        return {**names, **({"overlap": OVERLAP} if base.devices > 1 else {})}
    names = {
        f"matmul.{dtype}.{side}": f"FLOP/s of a matmul of {side} x {side} x {side} in {dtype}"
        for dtype in _dtypes(base.chip)
        for side in SIDES
    }
    names["memory"] = f"bytes/s of a pass over {4 * STREAM >> 20} MiB"
    for tier in base.tiers:
        for kind in KINDS if tier.devices > 1 else ():
            names |= described(link_names(tier, kind), kind, tier.devices)
    return {**names, **({"overlap": OVERLAP} if base.devices > 1 else {})}


def described(names: tuple[str, str], kind: str, ways: int) -> dict[str, str]:
    """The two figures of a collective, and what each is."""
    small, per_byte = names
    return {
        small: f"seconds of the smallest {kind} among {ways}",
        per_byte: f"seconds per byte of the full array, {kind} among {ways}",
    }


OVERLAP = "share of an all-reduce that hides behind matmuls of the same program"


def link_names(tier: Tier, kind: str) -> tuple[str, str]:
    """Names of the figures of a collective over all positions of a tier."""
    return f"{tier.name}.{kind}.s", f"{tier.name}.{kind}.s_per_byte"


def _dtypes(chip: Chip) -> list[str]:
    return [dtype for dtype in DTYPES if dtype in dict(chip.flops_per_s)]


def prices(base: Topology, devices: Sequence[jax.Device], minutes: float) -> Prices:
    """Measures a machine on all its devices; to be called by all processes of a job.

    Args:
        base: the machine as it is known: shape and data sheet.
        devices: in the order of the topology.
        minutes: that passes may take, beside the compilation of the programs.

    Raises:
        TopologyError: the devices are not as many, or of another kind.
    """
    require_attached(base, devices)
    clock = Clock(budget_s=BUDGET_S)
    cpu = base.chip.vendor == "cpu"
    figures_now = partial(_cpu_figures if cpu else _figures, base, devices, clock)
    figures_now()  # makes the programs
    end = time.monotonic() + 60 * minutes
    for number in range(MOST_PASSES):
        goes_on = number < LEAST_PASSES or time.monotonic() < end
        if of_first(f"pass {number} of prices", lambda goes_on=goes_on: str(goes_on)) != "True":
            break
        clock.again(1)
    figures = figures_now()
    in_passes = [clock.in_pass(number, figures_now) for number in range(1, clock.count)]
    text = of_first(
        "prices",
        lambda: json.dumps([figures, intervals([figures, *in_passes]), now(), clock.load]),
    )  # every process would make a slightly different machine
    figures, ranges, date, load = json.loads(text)
    measured = Measurement(
        made=date,
        place=_place(devices),
        load=load,
        intervals=tuple((name, low, high) for name, (low, high) in ranges.items()),
    )
    make = cpu_machine if cpu else machine
    return Prices(
        machine=replace(make(base, figures), measured=measured),
        figures=figures,
        before=known(base),
    )


def require_attached(base: Topology, devices: Sequence[jax.Device]) -> None:
    """Raises if a topology is not that of the attached devices."""
    platform = devices[0].platform
    vendors = {"gpu": "nvidia", "cuda": "nvidia", "tpu": "google", "cpu": "cpu"}
    if vendors.get(platform, platform) != base.chip.vendor or len(devices) != base.devices:
        raise TopologyError(
            f"{base.name} has {base.devices} devices {base.chip.name}, and {len(devices)} of"
            f" {platform} ({devices[0].device_kind}) are attached\nTry: the topology of these"
            " devices, or leave it out; --dry-run says what would be measured without them"
        )


def _place(devices: Sequence[jax.Device]) -> str:
    kind = f"{cpu_model()}, {cores()} cores" if devices[0].platform == "cpu" else ""
    several = f" in {count} processes" if (count := jax.process_count()) > 1 else ""
    return (
        f"{kind or devices[0].device_kind}, {len(devices)} devices{several},"
        f" JAX {jax.__version__}, jaxlib {metadata.version('jaxlib')}"
    )


def intervals(passes: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of every figure in several passes.

    >>> intervals([{"a": 2.0}, {"a": 1.0}, {"a": 1.5}])
    {'a': (1.0, 2.0)}
    """
    values = {name: [figures[name] for figures in passes] for name in passes[0]}
    return {name: (min(runs), max(runs)) for name, runs in values.items()}


# --------------------------------------------------------------------------------------------------
# What is run.


def _cpu_figures(base: Topology, devices: Sequence[jax.Device], clock: Clock) -> dict[str, float]:
    """Figures of simulated devices: kernels on those of each process at the same time, collectives
    among all.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    return {
        **kernel_figures(line_of(local), clock),
        "alone": speed_alone(local, clock) if len(local) > 1 else 1.0,
        **exchange_figures(devices, clock),
        **_overlap(devices, clock, 256, MESSAGE),
    }


def _figures(base: Topology, devices: Sequence[jax.Device], clock: Clock) -> dict[str, float]:
    """Figures of accelerators."""
    mesh = line_of(devices)
    time_of = partial(timed, clock, mesh)
    figures: dict[str, float] = {}
    for dtype in _dtypes(base.chip):
        for side in SIDES:
            x = per_device(side, side, dtype=jnp.dtype(dtype))
            name = f"matmul.{dtype}.{side}"
            figures[name] = 2 * side**3 / time_of(name, _product, x, x)
    figures["memory"] = 8 * STREAM / time_of("stream", lambda a: a * 0.5, per_device(STREAM))
    for number, tier in enumerate(base.tiers):
        for kind in KINDS if tier.devices > 1 else ():
            along = along_tier(base, number, devices)
            sizes = (SMALL * tier.devices**2, -(-LARGE // tier.devices**2) * tier.devices**2)
            seconds = [collective_seconds(along, kind, size, clock) for size in sizes]
            values = line(seconds[0], seconds[1], elements=sizes[1])
            figures |= dict(zip(link_names(tier, kind), values, strict=True))
    return {**figures, **_overlap(devices, clock, SIDES[-1], LARGE)}


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return lax.dot(x, w, preferred_element_type=wide)


def along_tier(base: Topology, tier: int, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh whose axis "along" is a tier of the topology; all its groups work at once."""
    shape = [level.devices for level in base.tiers]
    grid = np.moveaxis(np.array(devices, dtype=object).reshape(shape), tier, -1)
    return Mesh(grid.reshape(-1, shape[tier]), ("groups", "along"), axis_types=(AxisType.Auto,) * 2)


def _overlap(
    devices: Sequence[jax.Device], clock: Clock, side: int, elements: int
) -> dict[str, float]:
    """The share of an all-reduce that hides behind matmuls of the same program."""
    if len(devices) == 1:
        return {}
    mesh = line_of(devices)

    def matmuls(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = x @ x * 1e-3
        return x

    def sums(a: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            a = lax.psum(a, "all") * 1e-3
        return a

    def both(x: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        return matmuls(x), sums(a)

    x, a = per_device(side, side), per_device(elements)
    compute, communication, together = (
        timed(clock, mesh, "matmuls", matmuls, x),
        timed(clock, mesh, "sums", sums, a),
        timed(clock, mesh, "matmuls and sums", both, x, a),
    )
    return {"overlap": hidden(compute, communication, together)}


def hidden(compute: float, communication: float, together: float) -> float:
    """The share of the shorter of two that takes no time beside the longer one.

    >>> hidden(3.0, 2.0, 3.5), hidden(3.0, 2.0, 6.0)
    (0.75, 0.0)
    """
    saved = compute + communication - together
    return min(max(saved / min(compute, communication), 0.0), 1.0)


# --------------------------------------------------------------------------------------------------
# The machine of measured figures.


def cpu_machine(base: Topology, figures: Figures) -> Topology:
    """The topology of simulated devices, each of which was measured with all others at work."""
    calibration = Calibration(figures=figures, made=now())
    return machine_of_figures(base.devices, base.devices, calibration)


def machine(base: Topology, figures: Figures) -> Topology:
    """A topology with measured rates of matmuls, memory and links in place of the known ones."""
    reached = {dtype: figures[f"matmul.{dtype}.{SIDES[-1]}"] for dtype in _dtypes(base.chip)}
    peaks = dict(base.chip.flops_per_s)
    usual = "bfloat16" if "bfloat16" in reached else next(iter(reached))
    share = min(1.0, reached[usual] / peaks[usual])
    memory = min(1.0, figures["memory"] / base.chip.hbm_bytes_per_s)
    chip = replace(
        base.chip,
        flops_per_s={**peaks, **{dtype: rate / share for dtype, rate in reached.items()}},
        hbm_bytes_per_s=figures["memory"] / memory,
        sources=(*base.chip.sources, "rates of matmuls and memory measured"),
    )
    efficiency: dict[str, Any] = {
        **dict(base.efficiency),
        "matmul": share,
        "eight_bit": share,
        "memory": memory,
        # links have the rates that collectives reach
        "fast": 1.0,
        "slow": 1.0,
        "ring_step_s": 0.0,
        **({"hidden": max(figures["overlap"], 1e-3)} if "overlap" in figures else {}),
    }
    tiers = tuple(_measured_tier(base, number, figures) for number in range(len(base.tiers)))
    return replace(base, chip=chip, tiers=tiers, efficiency=tuple(efficiency.items()))


def _measured_tier(base: Topology, number: int, figures: Figures) -> Tier:
    """A tier with the rate and the latency at which the formulas give the measured collectives, in
    the median of the kinds.
    """
    tier = base.tiers[number]
    if tier.devices == 1:
        return tier
    unit = costs_of(base, number, bytes_per_s=1.0, latency_s=1.0)
    rates, latencies = [], []
    for kind, cost in unit.items():
        small, per_byte = (figures[name] for name in link_names(tier, kind))
        of_result = per_byte * (tier.devices if kind == "reduce-scatter" else 1)
        rates.append(cost.seconds_per_byte / of_result)
        latencies.append(small / cost.latency_s)
    rate = statistics.median(rates)
    peak = max(tier.bytes_per_s, rate)
    return replace(
        tier,
        bytes_per_s=peak,
        efficiency=rate / peak,
        latency_s=statistics.median(latencies),
        ring=False,
        sources=(*tier.sources, "rate and latency measured"),
    )


def costs_of(
    base: Topology, number: int, *, bytes_per_s: float, latency_s: float
) -> dict[str, LinearCost]:
    """The cost of each kind of collective over a whole tier of such links, per byte of the
    result.
    """
    tier = base.tiers[number]
    changed = replace(
        tier, bytes_per_s=bytes_per_s, latency_s=latency_s, efficiency=1.0, ring=False, exchanges=()
    )
    tiers = (*base.tiers[:number], changed, *base.tiers[number + 1 :])
    machine = replace(base, name=f"{base.name} {bytes_per_s} {latency_s}", tiers=tiers)
    spans = tuple(Span(number, dim, ways, 1) for dim, ways in enumerate(tier.shape) if ways > 1)
    return {kind: collective_cost(kind, spans, machine) for kind in KINDS}


def known(base: Topology) -> dict[str, float]:
    """The figures of a machine that its topology gives, by the names of those that are measured."""
    if base.chip.vendor == "cpu":
        return {}
    figures = {
        f"matmul.{dtype}.{side}": rate
        for dtype, rate in base.chip.flops_per_s
        if dtype in DTYPES
        for side in SIDES
    }
    figures["memory"] = base.chip.hbm_bytes_per_s
    for number, tier in enumerate(base.tiers):
        if tier.devices == 1:
            continue
        costs = costs_of(
            base, number, bytes_per_s=tier.reached_bytes_per_s, latency_s=tier.latency_s
        )
        for kind, cost in costs.items():
            full = tier.devices if kind == "reduce-scatter" else 1
            values = (cost.latency_s, cost.seconds_per_byte / full)
            figures |= dict(zip(link_names(tier, kind), values, strict=True))
    return {name: value for name, value in figures.items() if math.isfinite(value)}
