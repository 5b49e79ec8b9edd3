"""Spellings of topologies: "16*h100:8" as a chip of the catalogue and its tiers of links.

>>> name, chip, tiers = spelled("2*v5e:16x16")
>>> chip.name, [tier.kind for tier in tiers]
('v5e', ['network', 'torus'])
>>> name, chip, tiers = spelled("2@10gbit-50ms*v5e:4x4")
>>> tiers[0].name, tiers[0].bytes_per_s * 16 * 8, tiers[0].latency_s
('10 Gbit/s, 50 ms', 10000000000.0, 0.05)
"""

from __future__ import annotations

import difflib
import math
import re

from shardlib.errors import TopologyError
from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.catalog.wide import USUAL_MS, wide
from shardlib.hardware.chip import Chip
from shardlib.hardware.products import Link, Product
from shardlib.hardware.tier import Tier
from shardlib.untrusted import shown

EXAMPLES = (
    "'cpu:8', 'h100:8', '16*h100:8', 'v5e:16x16', 'v5p:4x4x8', '2*v5e:16x16', or a path to a .toml"
    " file"
)
#: Of a size, at most.
DIGITS = 9


def spelled(text: str) -> tuple[str, Chip, tuple[Tier, ...]]:
    """The name, the chip and the tiers that a spelling in lower case stands for."""
    if "@" in text:
        return _apart(text)
    match = re.fullmatch(r"(?:([0-9]+)\*)?([a-z0-9.-]+):([0-9]+(?:x[0-9]+){0,7})", text)
    if match is None:
        raise TopologyError(
            f"topology {shown(text)} does not parse.{_hint(text)} Spellings: {EXAMPLES}"
        )
    if max(map(len, re.findall("[0-9]+", f"{match[1]} {match[3]}"))) > DIGITS:
        raise TopologyError(
            f"topology {shown(text)} has a size of more than {10**DIGITS - 1:,}, which no machine"
            f" has. Spellings: {EXAMPLES}"
        )
    domains, sizes = int(match[1] or 1), tuple(int(size) for size in match[3].split("x"))
    if match[2] not in CATALOG:
        raise TopologyError(
            f"topology {text!r} names the unknown chip {match[2]!r}.{_hint(text)} "
            f"Chips: {', '.join(CATALOG)}; any other cluster can be described in a .toml file"
        )
    product = CATALOG[match[2]]
    if domains < 1 or min(sizes) < 1:
        raise TopologyError(
            f"topology {text!r} has a size of 0; sizes are at least 1, e.g. {product.example!r}"
        )
    _check_sizes(text, product, sizes)
    tiers = [] if domains == 1 else [_tier(product.slow, (domains,))]
    tiers.append(
        _tier(product.fast, sizes, _wrap(product, sizes) if product.fast.kind == "torus" else ())
    )
    if product.on_chip is not None:
        tiers.append(_tier(product.on_chip, (product.chip.devices_per_chip,)))
    front = "" if domains == 1 else f"{domains}*"
    return f"{front}{match[2]}:{'x'.join(map(str, sizes))}", product.chip, tuple(tiers)


def _apart(text: str) -> tuple[str, Chip, tuple[Tier, ...]]:
    """The same of several machines that a slow link joins: "2@10gbit-50ms*16*h100:8"."""
    number = r"([0-9]+(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"([0-9]+)@{number}(g|m)bit(?:-{number}ms)?\*([^@]*)", text)
    if match is None:
        raise TopologyError(
            f"topology {shown(text)} does not parse. Machines that a slow link joins are spelled"
            " '2@10gbit*h100:8' or '2@10gbit-50ms*16*h100:8': how many, the rate of the link"
            f" (gbit or mbit), its latency ({USUAL_MS} ms unless it is said), and each machine"
        )
    machines, rate, ms = int(match[1]), float(match[2]), float(match[4] or USUAL_MS)
    gbit = rate / 1000 if match[3] == "m" else rate
    if not (2 <= machines < 10**DIGITS and 0 < gbit < 1e6 and ms < 1e6):
        raise TopologyError(
            f"topology {shown(text)} has {machines} machines on a link of {gbit:g} Gbit/s and"
            f" {ms:g} ms; they are 2 or more, and a link has a rate\nTry: '2@10gbit-50ms*h100:8'"
        )
    name, chip, tiers = spelled(match[5])
    devices = math.prod(tier.devices for tier in tiers)
    outer = _tier(wide(gbit, ms, devices), (machines,))
    return f"{text[: text.index('*')]}*{name}", chip, (outer, *tiers)


def _hint(text: str) -> str:
    """A sentence that names the nearest spelling the catalogue knows; empty where none is near."""
    crossed = re.fullmatch(r"(\d+)\s*[x-]\s*([a-z].*)", text)
    if crossed and crossed[2].partition(":")[0] in CATALOG:
        return f" Did you mean '{crossed[1]}*{crossed[2]}'?"
    name = re.sub(r"^\d+\*", "", text).partition(":")[0]
    near = [name] if name in CATALOG else difflib.get_close_matches(name, CATALOG, n=1, cutoff=0.5)
    return f" Did you mean {CATALOG[near[0]].example!r}?" if near else ""


def _check_sizes(text: str, product: Product, sizes: tuple[int, ...]) -> None:
    name, chips = product.chip.name, math.prod(sizes)
    if len(sizes) != product.dims:
        kind = "a count" if product.dims == 1 else f"{product.dims} sizes joined by 'x'"
        raise TopologyError(
            f"topology {text!r} has {len(sizes)} size{'s' * (len(sizes) > 1)}; {name} takes {kind},"
            f" e.g. {product.example!r}"
        )
    ring = product.full_ring
    if chips <= product.most and (not ring or max(sizes) <= ring):
        return
    if product.dims == 1:
        parts = math.ceil(chips / product.most)
        instead = (
            f"{parts}*{name}:{chips // parts}"
            if chips % parts == 0
            else f"{parts}*{name}:{product.most}"
        )
        raise TopologyError(
            f"topology {text!r} asks for {chips} {_domain(product)}; {name} has at most"
            f" {product.most}. Write {instead!r} for {parts} domains joined by {product.slow.name}"
        )
    limit = f"{ring}x{ring}" if ring else f"{product.most} chips"
    raise TopologyError(
        f"topology {text!r} is larger than a {name} pod, which has at most {limit}. "
        f"Write e.g. '2*{product.example}' for several slices joined by {product.slow.name}"
    )


def _domain(product: Product) -> str:
    return "devices of one host" if product.chip.vendor == "cpu" else "GPUs in one NVLink domain"


def _wrap(product: Product, sizes: tuple[int, ...]) -> tuple[bool, ...]:
    """Which dims of a TPU slice are rings.

    Scaling book, tpus.md: v5e and v6e wrap on dims of the full 16 only. On v4, v5p and TPU7x
    optical switches close the rings of whole 4x4x4 cubes, so every dim wraps where all are
    multiples of 4, and none does otherwise ("a 2x2x4 won't have any wraparounds").
    """
    if product.full_ring:
        return tuple(size == product.full_ring for size in sizes)
    return (all(size % 4 == 0 for size in sizes),) * len(sizes)


def _tier(link: Link, shape: tuple[int, ...], wrap: tuple[bool, ...] = ()) -> Tier:
    return Tier(
        name=link.name,
        kind=link.kind,
        shape=shape,
        wrap=wrap,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        efficiency=link.efficiency,
        sources=link.sources,
    )
