"""The machine of a row as a `Topology`: figures of the file, and of the catalogue where the file is
silent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.environment import table
from benchmarks.published.document import Document, Entry
from shardlib.machines.catalog import CATALOG
from shardlib.machines.chips import Chip, Product, Tier
from shardlib.machines.topology import CORRECTABLE, Topology

_TABLE = table("published_machines")
#: Chip of a file -> the product of the catalogue that lends launch time, efficiency of links and,
#: for a chip that is the same product, its name.
PRODUCTS: Mapping[str, str] = _TABLE["products"]
#: Chips that are exactly the product that they map to.
SAME: frozenset[str] = frozenset(_TABLE["same"])
#: Dtypes whose peak the file calls bf16.
_GPU_DTYPES: tuple[str, ...] = ("bfloat16", "float16")
#: Formats with a peak of their own, and its name in the file.
_NARROW: Mapping[str, str] = {
    "float8_e4m3fn": "peak_fp8_tflops",
    "float4_e2m1fn": "peak_fp4_tflops",
}


def chip_of(name: str, entry: Entry) -> Chip:
    """The chip with the file's peaks and memory."""
    product = CATALOG[PRODUCTS[name]]
    if name in SAME:
        return product.chip
    devices = int(entry.get("devices_per_chip") or 1)
    peak = entry["peak_bf16_tflops"] * 1e12 / devices
    flops = {
        **{
            dtype: rate
            for dtype, rate in product.chip.flops_per_s
            if dtype not in (*_NARROW, "int8")
        },
        **dict.fromkeys(_GPU_DTYPES, peak),
    }
    flops["float32"] = min(flops["float32"], peak)
    for dtype, figure in _NARROW.items():
        if entry.get(figure):
            flops[dtype] = entry[figure] * 1e12 / devices
    return replace(
        product.chip,
        name=name,
        flops_per_s=tuple(flops.items()),
        hbm_bytes=int(entry["hbm_gb"] * 1e9 / devices),
        reserved_bytes=0,
        hbm_bytes_per_s=entry["hbm_gb_per_s"] * 1e9 / devices,
        devices_per_chip=devices,
        sources=(str(entry.get("source", "")),),
    )


def topology_of(document: Document, row: Entry) -> Topology:
    """The machine of a row."""
    system = document.systems[row["system"]]
    name = str(row.get("chip") or system["chip"])
    chip, product = chip_of(name, document.chips[name]), CATALOG[PRODUCTS[name]]
    tiers = (
        _torus(row, document.chips[name], product, chip)
        if product.fast.kind == "torus"
        else _domains(row, system, document.chips[name], product)
    )
    found = Topology(
        name=f"{row['num_devices']} of {row['system']}",
        chip=chip,
        tiers=tiers,
        corrections=dict.fromkeys(CORRECTABLE, 1.0),
    )
    if found.devices != row["num_devices"]:
        raise ValueError(f"{row['num_devices']} devices, but the machine has {found.devices}")
    return found


def _domains(row: Entry, system: Entry, chip: Entry, product: Product) -> tuple[Tier, ...]:
    """GPUs: the largest equal domains that the machine allows, and the network between them."""
    devices, most = int(row["num_devices"]), int(system["scaleup_domain_chips"])
    inner = max(n for n in range(1, min(devices, most) + 1) if devices % n == 0)
    fast, slow = product.fast, product.slow
    mesh = "mesh" in str(system.get("note"))
    used = (inner - 1) / (most - 1) if mesh and inner > 1 else 1.0
    tiers = (
        Tier(
            name=fast.name,
            kind="mesh" if mesh else fast.kind,
            shape=(inner,),
            bytes_per_s=chip["scaleup_gb_per_s_per_dir"] * 1e9 * used,
            latency_s=fast.latency_s,
            efficiency=fast.efficiency,
            sources=fast.sources,
        ),
    )
    if devices == inner:
        return tiers
    network = Tier(
        name=slow.name,
        kind=slow.kind,
        shape=(devices // inner,),
        bytes_per_s=system["scaleout_gb_per_s_per_chip_per_dir"] * 1e9,
        latency_s=slow.latency_s,
        efficiency=slow.efficiency,
        sources=slow.sources,
    )
    return (network, *tiers)


def _torus(row: Entry, entry: Entry, product: Product, chip: Chip) -> tuple[Tier, ...]:
    """TPUs: slices of a torus, joined by the data-centre network."""
    slices = int(row.get("slices") or 1)
    shape = _shape(
        str(row.get("topology") or ""),
        int(row["num_chips"]) // slices,
        product.dims if entry.get("torus", "")[:1] != "2" else 2,
    )
    ring = product.full_ring
    wrap = (
        tuple(n == ring for n in shape) if ring else (all(n % 4 == 0 for n in shape),) * len(shape)
    )
    rate = product.fast.bytes_per_s
    tiers = [
        Tier(
            name="ICI",
            kind="torus",
            shape=shape,
            wrap=wrap,
            bytes_per_s=rate,
            latency_s=product.fast.latency_s,
            efficiency=product.fast.efficiency,
        )
    ]
    if slices > 1:
        slow = product.slow
        tiers.insert(
            0,
            Tier(
                name=slow.name,
                kind=slow.kind,
                shape=(slices,),
                bytes_per_s=slow.bytes_per_s,
                latency_s=slow.latency_s,
                efficiency=slow.efficiency,
            ),
        )
    if chip.devices_per_chip > 1:
        link = product.on_chip or product.fast
        tiers.append(
            Tier(
                name="on chip",
                kind="switch",
                shape=(chip.devices_per_chip,),
                bytes_per_s=link.bytes_per_s,
                latency_s=link.latency_s,
            )
        )
    return tuple(tiers)


def _shape(text: str, chips: int, dims: int) -> tuple[int, ...]:
    """The shape that is named, if it has all the chips, or the most compact one."""
    named = re.search(r"\d+(?:x\d+)+", text)
    if named:
        shape = tuple(int(n) for n in named[0].split("x"))
        if math.prod(shape) == chips:
            return shape
    return compact(chips, dims)


def compact(chips: int, dims: int) -> tuple[int, ...]:
    """The factorisation of `chips` into `dims` sizes with the least sum, ascending."""
    if dims == 1:
        return (chips,)
    options = [
        tuple(sorted((n, *compact(chips // n, dims - 1))))
        for n in range(1, chips + 1)
        if chips % n == 0
    ]
    return min(options, key=lambda shape: (sum(shape), shape))
