"""Topologies: the machine that a plan is for, its spelling, the placement of mesh axes on its
links, and machines of other sizes.

A topology is one kind of chip and the link tiers that connect its devices, the outermost (slowest)
tier first. Devices are numbered through the tiers in that order; the last dim of the innermost tier
varies fastest.

>>> cluster = topology("16*h100:8")
>>> cluster.devices, [(tier.name, tier.shape) for tier in cluster.tiers]
(128, [('InfiniBand', (16,)), ('NVLink', (8,))])
>>> topology("v5e:16x8").tiers[0].wrap
(True, False)

Spelling: `chip:count` for GPUs and simulated CPU devices; `chip:AxB` or `chip:AxBxC` (in chips) for
TPU slices; a leading `N*` for N such fast domains joined by the slow network; a leading
`N@rate-delay*` for N machines joined by a link of that rate and delay. A path that ends in `.toml`
describes any other cluster:

    chip = "h100"               # a name of the catalogue, or a table with the fields of `Chip`
    [[tiers]]                   # outermost first
    name = "RoCE"
    kind = "network"            # "torus", "mesh", "switch", "network" or "memory"
    shape = [13]
    bytes_per_s = 25e9          # per device, one direction; for a torus, per link in one dim
    latency_s = 5e-6            # optional, as are efficiency, ring, wrap (torus), sources
    [[tiers]]
    name = "NVLink"
    kind = "switch"
    shape = [8]
    bytes_per_s = 450e9
    # optional: factors on predictions for this machine (`shardlib.cost.roofline`)
    [corrections]
    temporaries = 1.15
    margin = 1.02  # plans may fill a device to usable bytes / 1.02
    # optional: figures measured on this machine (`shardlib.cost.roofline`)
    [efficiency]
    matmul = 0.72
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from shardlib.errors import MissingFileError, TopologyError, raise_all
from shardlib.layout import ISLAND, MESH_AXES, MeshShape
from shardlib.machines.catalog import CATALOG, USUAL_MS, wide
from shardlib.machines.chips import LARGEST, Chip, Link, Measurement, Product, Tier
from shardlib.untrusted.data import JsonMapping, JsonObject, bounded, construct, read_toml, shown

EXAMPLES = (
    "'cpu:8', 'h100:8', '16*h100:8', 'v5e:16x16', 'v5p:4x4x8', '2*v5e:16x16', or a path to a .toml"
    " file"
)
#: Most digits of a size.
DIGITS = 9


def spelled(text: str) -> tuple[str, Chip, tuple[Tier, ...]]:
    """The name, the chip and the tiers of a lower-case spelling.

    >>> name, chip, tiers = spelled("2*v5e:16x16")
    >>> chip.name, [tier.kind for tier in tiers]
    ('v5e', ['network', 'torus'])
    >>> name, chip, tiers = spelled("2@10gbit-50ms*v5e:4x4")
    >>> tiers[0].name, tiers[0].bytes_per_s * 16 * 8, tiers[0].latency_s
    ('10 Gbit/s, 50 ms', 10000000000.0, 0.05)
    """
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
    """The same for several machines joined by a slow link: "2@10gbit-50ms*16*h100:8"."""
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
    """A sentence with the nearest valid spelling; empty if none is close."""
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
    """The dims of a TPU slice that are rings, as booleans.

    Scaling book, tpus.md: on v5e and v6e only dims of the full 16 wrap. On v4, v5p and TPU7x
    optical switches close the rings of whole 4x4x4 cubes, so every dim wraps if all are multiples
    of 4, and otherwise none ("a 2x2x4 won't have any wraparounds").
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


# --------------------------------------------------------------------------------------------------
# The topology of JAX devices, from their attributes; JAX itself is not imported.
#
# The axes of a `jax.sharding.Mesh` are ignored, only its devices count; `pin={"mesh": mesh.shape}`
# fixes a mesh.


class JaxDevice(Protocol):
    """The attributes read of a `jax.Device`."""

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """The vendor's name of the device."""
        ...

    @property
    def process_index(self) -> int:
        """The index of its process."""
        ...


class DeviceMesh(Protocol):
    """The attributes read of a `jax.sharding.Mesh`."""

    @property
    def devices(self) -> np.ndarray:
        """The devices, in an array of any shape."""
        ...


#: Catalogue name -> substring of `device_kind`, as JAX 0.10 to 0.12 report it.
_KINDS = {
    "v4": r"TPU v4",
    "v5e": r"TPU v5( lite|e)",
    "v5p": r"TPU v5p?",
    "v6e": r"TPU v6( lite|e)",
    "tpu7x": r"TPU ?v?7x?",
    "a100-40gb": r"NVIDIA A100.*40GB.*",
    "a100": r"NVIDIA A100.*80GB.*",
    "h100": r"NVIDIA H100.*HBM3.*",
    "h200": r"NVIDIA H200\b.*",
    "gb200": r"NVIDIA GB200\b.*",
    "b200": r"NVIDIA B200\b.*",
}


def devices_of(value: object) -> list[Any] | None:
    """The devices of a mesh, list or array, in order; None for any other value."""
    if _is_device(value):
        return [value]
    if hasattr(value, "axis_names"):
        try:
            devices: object = getattr(value, "devices")  # noqa: B009
        except ValueError:  # an AbstractMesh raises it
            devices = None
        if not isinstance(devices, np.ndarray):
            raise TopologyError(
                f"topology is of type {type(value).__name__}, which has no devices\nTry: a"
                ' jax.sharding.Mesh, or a spelling such as topology="v5e:16x16"'
            )
        listed = list(cast("Sequence[Any]", devices.reshape(-1)))
    elif isinstance(value, (list, tuple, np.ndarray)):
        listed = list(cast("Sequence[Any]", np.asarray(value, dtype=object).reshape(-1)))
    else:
        return None
    if not listed or not all(map(_is_device, listed)):
        return None
    if len(set(map(id, listed))) < len(listed):
        raise TopologyError("topology names a device twice\nTry: every device once")
    return listed


def _is_device(value: object) -> bool:
    return hasattr(value, "device_kind") and hasattr(value, "platform")


def spelling_of(devices: Sequence[JaxDevice]) -> str:
    """The spelling of the topology of these devices: "cpu:8", "2*h100:8", "v5e:4x4"."""
    kinds = Counter((device.platform, device.device_kind) for device in devices)
    if len(kinds) > 1:
        description = ", ".join(f"{count} of {kind}" for (_, kind), count in sorted(kinds.items()))
        raise TopologyError(f"topology is {description}\nTry: devices of one kind")
    platform, kind = next(iter(kinds))
    if platform == "cpu":
        return f"cpu:{len(devices)}"
    name = next((name for name, form in _KINDS.items() if re.fullmatch(form, kind, re.I)), None)
    if name is None:
        raise TopologyError(
            f"topology is {len(devices)} of {shown(kind)}, which the catalogue does not have\nTry:"
            f" name it, one of {', '.join(CATALOG)}, or a .toml file"
        )
    parts: dict[int, list[JaxDevice]] = {}
    for device in devices:  # a fast domain is a slice, where JAX says which, or else a process
        parts.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    shapes = {_devices_shape(name, part) for part in parts.values()}
    if len(shapes) > 1:
        raise TopologyError(
            f"topology is {len(devices)} of {shown(kind)} in {len(parts)} unlike parts:"
            f" {', '.join(sorted(shapes))}\nTry: as many devices of every one"
        )
    front = f"{len(parts)}*" if len(parts) > 1 else ""
    return f"{front}{name}:{shapes.pop()}"


def _devices_shape(name: str, devices: Sequence[JaxDevice]) -> str:
    """The size of a fast domain as text: a count of GPUs, or the sides of a box of TPU chips."""
    product = CATALOG[name]
    if product.dims == 1:
        return str(len(devices))
    coords = {tuple(cast("Sequence[int]", getattr(device, "coords", ()))) for device in devices}
    sides = [max(places) - min(places) + 1 for places in zip(*coords, strict=True)]
    shape, outer, chips = sides[: product.dims], sides[product.dims :], len(coords)
    if math.prod(shape) != chips or any(side > 1 for side in outer):
        raise TopologyError(
            f"topology is {chips} chips of {name} that are not a whole box: their coordinates span"
            f" {'x'.join(map(str, sides))}\nTry: all chips of a box"
        )
    return "x".join(map(str, shape))


# --------------------------------------------------------------------------------------------------
# Topologies as plain data, from TOML or JSON: required and optional keys.


def faults_of(data: JsonMapping) -> list[str]:
    """The faults in the keys of a topology as plain data: missing, unknown, not tables."""
    failures = _key_faults(
        data, "", ("chip", "tiers"), ("name", "corrections", "efficiency", "alone", "measured")
    ) + _chip_faults(data.get("chip"))
    if not isinstance(data.get("corrections", {}), Mapping):
        failures.append("'corrections' is not a table from quantity to factor")
    if not isinstance(data.get("efficiency", {}), Mapping):
        failures.append("'efficiency' is not a table from figure to value")
    tables = _tables(data.get("tiers", []))
    if tables is None:
        failures.append("'tiers' is not a list of tables ([[tiers]])")
    for i, tier in enumerate(tables or []):
        failures += _key_faults(tier, f"tiers[{i}].", *_keys(Tier))
    return failures


def _tables(value: object) -> list[JsonObject] | None:
    """The value as a list of tables; None if it is not one."""
    items = cast("list[Any]", value) if isinstance(value, list) else None
    return items if items is not None and all(isinstance(item, Mapping) for item in items) else None


def _chip_faults(chip: object) -> list[str]:
    if chip is None:  # reported as a missing key
        return []
    if isinstance(chip, str):
        return (
            []
            if chip in CATALOG
            else [f"chip {shown(chip)} is unknown; chips are {', '.join(CATALOG)}"]
        )
    if not isinstance(chip, Mapping):
        return [f"'chip' is {shown(chip)}; it is a name or a table"]
    table = cast("Mapping[str, Any]", chip)
    failures = _key_faults(table, "chip.", *_keys(Chip))
    if not isinstance(table.get("flops_per_s", {}), Mapping):
        failures.append("'chip.flops_per_s' is not a table from dtype to FLOP/s")
    return failures


def _keys(kind: type[Chip] | type[Tier]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The required and the optional fields of a class: without and with a default."""
    required = tuple(field.name for field in fields(kind) if field.name not in vars(kind))
    return required, tuple(field.name for field in fields(kind) if field.name not in required)


def _key_faults(
    data: JsonMapping, prefix: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> list[str]:
    missing = [f"{prefix + key!r} is missing" for key in required if key not in data]
    keys = (*required, *optional)
    return missing + [
        f"{shown(prefix + key)} is unknown; keys are {', '.join(keys)}"
        for key in data
        if key not in keys
    ]


# --------------------------------------------------------------------------------------------------
# Heterogeneous clusters: boards, phones, cards of several generations on one network.
#
# A `Device` stands for `count` equal members of such a cluster. A TOML file lists them, each with a
# chip of the catalogue or a table with the fields of `Chip`:
#
#     [[devices]]
#     name = "board"
#     count = 4                       # optional: 1
#     link_bytes_per_s = 1.25e8       # of its port, one direction
#     link_latency_s = 2e-4           # optional: from the device to the network, or back
#     # optional: measured seconds of one layer of the model, for the planned batch
#     layer_seconds = 0.031
#     [devices.chip]
#     name = "board"
#     vendor = "cpu"
#     flops_per_s = { float32 = 2.5e10 }
#     hbm_bytes = 4_000_000_000
#     hbm_bytes_per_s = 1.2e10
#     # optional: figures measured on it, see `shardlib.cost.roofline`
#     [devices.efficiency]
#     matmul = 0.6
#     [[devices]]
#     name = "card"
#     chip = "a100"
#     link_bytes_per_s = 1.25e9


@dataclass(frozen=True, kw_only=True)
class Device:
    """A number of equal devices of a cluster.

    Attributes:
        name: the name in output.
        chip: compute and memory per device.
        link_bytes_per_s: rate of its port in one direction; a message takes the rate of the slower
            of two ports.
        count: number of such devices.
        link_latency_s: seconds from the device to the network, or back; a message takes that of
            both its ends.
        layer_seconds: measured seconds of one layer of the largest layer group; all predictions for
            this device are scaled to match it. None: as predicted.
        efficiency: (figure, value) pairs measured on it, see `shardlib.cost.roofline`. Any mapping
            is accepted.

    Raises:
        TopologyError: a figure is not positive.
    """

    name: str
    chip: Chip
    link_bytes_per_s: float
    count: int = 1
    link_latency_s: float = 0.0
    layer_seconds: float | None = None
    efficiency: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "efficiency", tuple(dict(self.efficiency).items()))
        failures = [
            f"{name} is {getattr(self, name)}; it must be positive"
            for name in ("link_bytes_per_s", "count")
            if not getattr(self, name) > 0
        ]
        failures += (
            [f"link_latency_s is {self.link_latency_s}; it must not be negative"]
            if self.link_latency_s < 0
            else []
        )
        failures += (
            [f"layer_seconds is {self.layer_seconds}; it must be positive"]
            if self.layer_seconds is not None and not self.layer_seconds > 0
            else []
        )
        if failures:
            raise_all(TopologyError, f"device {self.name!r} is not usable", failures)


def cluster(spec: str | Path | Sequence[Device]) -> tuple[Device, ...]:
    """The devices of a TOML file; a sequence of devices is checked and returned."""
    devices = _cluster_from_file(Path(spec)) if isinstance(spec, str | Path) else tuple(spec)
    names = [device.name for device in devices]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not devices:
        raise TopologyError(
            f"devices have one name: {', '.join(twice)}\nTry: one entry with count ="
            f" {names.count(twice[0])}"
            if twice
            else "there are no devices\nTry: [[devices]]"
        )
    return devices


def _cluster_from_file(path: Path) -> tuple[Device, ...]:
    if not path.is_file():
        raise MissingFileError(
            f"device file {str(path)!r} is not there (looked in {Path.cwd()})\nTry: a TOML file"
            " with [[devices]]"
        )
    data = read_toml(path, "device file", TopologyError)
    tables = data.get("devices")
    if not isinstance(tables, list) or not all(
        isinstance(table, Mapping) for table in cast("list[Any]", tables)
    ):
        raise TopologyError(f"device file {str(path)!r} has no list of tables [[devices]]")
    return tuple(
        _cluster_read(cast("Mapping[str, Any]", table), f"devices[{i}] of {str(path)!r}")
        for i, table in enumerate(cast("list[Any]", tables))
    )


def _cluster_read(data: JsonMapping, source: str) -> Device:
    names = [field.name for field in fields(Device)]
    failures = [
        f"{key!r} is missing" for key in ("name", "chip", "link_bytes_per_s") if key not in data
    ]
    failures += [
        f"{shown(key)} is unknown; keys are {', '.join(names)}" for key in data if key not in names
    ]
    chip = data.get("chip")
    if isinstance(chip, str) and chip not in CATALOG:
        failures.append(f"chip {shown(chip)} is unknown; chips are {', '.join(CATALOG)}")
    elif chip is not None and not isinstance(chip, str | Mapping):
        failures.append(f"'chip' is {shown(chip)}; it is a name or a table")
    if failures:
        raise_all(TopologyError, f"{source} is not usable", bounded(failures))
    return construct(
        Device,
        {**data, "chip": CATALOG[chip].chip if isinstance(chip, str) else chip},
        source,
        TopologyError,
        most=LARGEST,
    )


# --------------------------------------------------------------------------------------------------
# The links of a machine as a small SVG: a row per tier, the slowest first, with a box for each part
# that the tier connects; the boxes of the last row are devices.

_WIDE, _LEFT, _BOX, _GAP, _ROW = 720, 190, 22, 4, 64
#: Most boxes per row; beyond that, the total is written as a number.
_MOST = 16
#: The colour-blind-safe blue, orange and green of Okabe and Ito (2008).
_COLOURS = ("#0072b2", "#e69f00", "#009e73")


def links_svg(title: str, tiers: Sequence[Tier]) -> str:
    """A complete SVG document of some kilobytes, without external resources or scripts."""
    rows = "".join(
        "".join(_row(tier, 40 + _ROW * number, _COLOURS[number % len(_COLOURS)]))
        for number, tier in enumerate(tiers)
    )
    height = 44 + _ROW * len(tiers)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {height}" width="{_WIDE}"'
        f' height="{height}" role="img" font-family="system-ui, sans-serif" font-size="13">'
        f'<title>{escape(title)}</title><rect width="{_WIDE}" height="{height}" fill="#ffffff"/>'
        f'<text x="12" y="24" font-weight="600">{escape(title)}</text>{rows}</svg>'
    )


def _row(tier: Tier, top: int, colour: str) -> Iterator[str]:
    parts = math.prod(tier.shape)
    shape = " x ".join(f"{size:,}" for size in tier.shape)
    rate = f"{shape} · {tier.bytes_per_s / 1e9:,.1f} GB/s"
    yield f'<text x="12" y="{top + 18}">{escape(tier.name)}</text>'
    yield f'<text x="12" y="{top + 36}" fill="#5c5c64">{rate}</text>'
    drawn = min(parts, _MOST)
    step = _BOX + _GAP
    middle = top + 12 + _BOX / 2
    end = _LEFT + drawn * step
    yield (
        f'<line x1="{_LEFT}" x2="{end}" y1="{middle}" y2="{middle}" stroke="{colour}"'
        ' stroke-width="3"/>'
    )
    for number in range(drawn):
        yield (
            f'<rect x="{_LEFT + number * step}" y="{top + 12}" width="{_BOX}" height="{_BOX}"'
            f' rx="3" fill="{colour}"/>'
        )
    if parts > drawn:
        yield f'<text x="{end + 4}" y="{top + 28}">of {parts:,}</text>'


#: Larger machines are rejected: none exists, and the time to place a mesh grows with their size.
MOST_DEVICES = 1 << 20
#: Quantities of a prediction that a factor can correct: seconds of kernels; bytes of values saved
#: for the backward pass, of other values, and of gathered parameters; and the margin, the memory
#: that a program may need over the predicted memory, which is compared but not multiplied.
CORRECTABLE: tuple[str, ...] = ("compute", "activations", "temporaries", "communication", "margin")


@dataclass(frozen=True, kw_only=True, repr=False)
class Topology:
    """A machine: equal devices and the tiers of links between them.

    Attributes:
        name: its spelling; `topology(name)` returns an equal topology unless the machine was
            measured.
        chip: compute and memory per device.
        tiers: links, the outermost first, at least one.
        efficiency: (figure, value) pairs, measured on this machine, that replace those of
            `shardlib.cost.roofline`, which defines the figures and checks them. Any mapping is
            accepted.
        alone: speed-up of a device while all others are idle: simulated devices share the cores and
            the memory of their host; 1 for separate devices.
        corrections: (quantity, factor) pairs that replace learned ones; quantities are
            `CORRECTABLE`. Any mapping is accepted.
        measured: when and on what the figures were measured; None for those of data sheets.
    """

    name: str
    chip: Chip
    tiers: tuple[Tier, ...]
    corrections: tuple[tuple[str, float], ...] = ()
    efficiency: tuple[tuple[str, Any], ...] = ()
    alone: float = 1.0
    measured: Measurement | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", tuple(self.tiers))
        object.__setattr__(
            self,
            "efficiency",
            tuple((name, _frozen(value)) for name, value in sorted(dict(self.efficiency).items())),
        )
        object.__setattr__(self, "corrections", tuple(sorted(dict(self.corrections).items())))
        faults = [
            f"{name!r} is unknown; quantities are {', '.join(CORRECTABLE)}"
            for name, _ in self.corrections
            if name not in CORRECTABLE
        ]
        faults += [
            f"{name} is {factor!r}; it must be a positive number"
            for name, factor in self.corrections
            if isinstance(factor, bool)
            or not isinstance(factor, int | float)  # pyright: ignore[reportUnnecessaryIsInstance]
            or not 0 < factor < math.inf
        ]
        faults += [
            f"margin is {factor!r}; it is at least 1, which holds nothing back"
            for name, factor in self.corrections
            if name == "margin" and not faults and factor < 1
        ]
        if self.tiers and not 1 <= self.alone <= self.devices:
            raise TopologyError(
                f"alone of topology {self.name!r} is {self.alone}; it is from 1 to the number of"
                f" devices, {self.devices}"
            )
        if faults:
            raise_all(
                TopologyError, f"the corrections of topology {self.name!r} are not usable", faults
            )
        if self.tiers and self.devices > MOST_DEVICES:
            raise TopologyError(
                f"topology {self.name!r} has {self.devices} devices; at most {MOST_DEVICES} are"
                " planned for"
            )
        if not self.tiers:
            raise TopologyError(
                f"topology {self.name!r} has no tiers; give at least one, e.g. a switch with"
                " shape [1]"
            )

    def __hash__(
        self,
    ) -> int:  # equal topologies have equal names; hashing every figure would be slow in caches
        return hash(self.name)

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return math.prod(tier.devices for tier in self.tiers)

    def in_use(self, devices: int) -> Topology:
        """The machine for a program that uses only some of its devices: the others leave shared
        cores and memory idle, so each device is faster, up to `alone` times. The same object if
        nothing changes.

        >>> from dataclasses import replace
        >>> shared = replace(topology("cpu:8"), alone=3.0)
        >>> [shared.in_use(n).chip.peak("float32") / shared.chip.peak("float32") for n in (8, 4, 1)]
        [1.0, 2.0, 3.0]

        Args:
            devices: number of devices in use.
        """
        faster = min(self.alone, self.devices / devices)
        if faster <= 1:
            return self
        rates = tuple((dtype, rate * faster) for dtype, rate in self.chip.flops_per_s)
        chip = replace(
            self.chip,
            flops_per_s=rates,
            hbm_bytes_per_s=self.chip.hbm_bytes_per_s * faster,
            launch_s=self.chip.launch_s / faster,
        )
        return replace(self, chip=chip, alone=1.0)

    def to_json(self) -> JsonObject:
        """The topology as plain data; `from_json` gives an equal topology."""
        return {
            "name": self.name,
            "chip": self.chip.to_json(),
            "tiers": [tier.to_json() for tier in self.tiers],
            **({"corrections": dict(self.corrections)} if self.corrections else {}),
            **(
                {"efficiency": {name: _plain(value) for name, value in self.efficiency}}
                if self.efficiency
                else {}
            ),
            **({"alone": self.alone} if self.alone != 1 else {}),
            **({"measured": self.measured.to_json()} if self.measured is not None else {}),
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Topology:
        """Reads what `to_json` wrote, or the same structure from a TOML file.

        Args:
            data: "chip", a name of the catalogue or a table; "tiers", a list of tables; optionally
                "name", "corrections", "efficiency", "alone" and "measured".

        Returns:
            An equal topology; without "name" it is called "custom".

        Raises:
            TopologyError: keys are missing or unknown, all of them listed, or values do not fit.
        """
        return _topology_read(data, str(data.get("name", "")) or "custom", "the topology")

    def __repr__(self) -> str:
        return f"<Topology {self}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(tier.name)}</th><td>{tier.kind}</td>"
            f"<td>{' x '.join(f'{n:,}' for n in tier.shape)}</td>"
            f"<td>{tier.bytes_per_s / 1e9:,.1f} GB/s</td></tr>"
            for tier in self.tiers
        )
        memory = f"{self.chip.hbm_bytes / 2**30:,.1f} GiB each"
        title = f"{escape(self.name)}: {self.devices:,} devices {escape(self.chip.name)}, {memory}"
        return f"<table><caption>{title}</caption>{rows}</table>"

    def _repr_svg_(self) -> str:
        return links_svg(f"{self.name}: {self.devices:,} x {self.chip.name}", self.tiers)

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier.name} {'x'.join(map(str, tier.shape))}" for tier in self.tiers)
        return f"{self.name}: {self.devices} devices {self.chip.name} ({tiers})"


def _frozen(value: Any) -> Any:
    """Lists as tuples, recursively."""
    return (
        tuple(_frozen(item) for item in cast("Iterable[Any]", value))
        if isinstance(value, list | tuple)
        else value
    )


def _plain(value: Any) -> Any:
    """Tuples as lists, recursively."""
    return (
        [_plain(item) for item in cast("Iterable[Any]", value)]
        if isinstance(value, tuple)
        else value
    )


#: Ways to give a topology: a spelling or a .toml file, a `Topology`, or JAX devices.
TopologyLike = str | Topology | DeviceMesh | Sequence[JaxDevice]


def topology(spec: TopologyLike) -> Topology:
    """The topology of a spelling, a TOML file or JAX devices; a `Topology` is returned unchanged.

    Args:
        spec: a spelling such as "16*h100:8" or "v5e:16x16", upper or lower case, or a path that
            ends in ".toml"; the docstring of this module has all forms. Or the devices of the
            machine, as a list or a `jax.sharding.Mesh`, whose axes are ignored.

    Returns:
        The topology; its rates are bytes per second and FLOP/s per device.

    Raises:
        TopologyError: the spelling does not parse, the catalogue does not know the chip, the file
            is not usable, or the devices are not a whole machine.
        MissingFileError: the file does not exist.
    """
    if isinstance(spec, Topology):
        return spec
    if (devices := devices_of(spec)) is not None:
        return _parse(spelling_of(devices))
    if not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"topology is {spec!r} of type {type(spec).__name__}; give a spelling like {EXAMPLES},"
            " a Topology, a jax.sharding.Mesh, or a list of devices"
        )
    text = spec.strip()
    return _topology_from_file(Path(text)) if text.endswith(".toml") else _parse(text.lower())


@lru_cache(maxsize=256)
def _parse(text: str) -> Topology:
    name, chip, tiers = spelled(text)
    return Topology(name=name, chip=chip, tiers=tiers)


def _topology_from_file(path: Path) -> Topology:
    if not path.is_file():
        raise MissingFileError(
            f"topology file {str(path)!r} is not there (looked in {Path.cwd()}). Spellings:"
            f" {EXAMPLES}"
        )
    data = read_toml(path, "topology file", TopologyError)
    return _topology_read({"name": str(path), **data}, str(path), f"topology file {str(path)!r}")


def _topology_read(data: JsonMapping, name: str, source: str) -> Topology:
    """The topology of plain data; every missing and unknown key is reported at once."""
    if failures := faults_of(data):
        raise_all(TopologyError, f"{source} is not usable", bounded(failures))
    chip = data["chip"]
    values = {
        **{key: value for key, value in data.items() if key != "corrections"},
        "name": name,
        "chip": CATALOG[chip].chip if isinstance(chip, str) else chip,
    }
    return replace(
        construct(Topology, values, source, TopologyError, most=LARGEST),
        corrections=data.get("corrections", {}),
    )


# --------------------------------------------------------------------------------------------------
# Sizes of machines, as clouds and vendors offer them.

#: Longest side of a slice in a pod of 4x4x4 cubes, in chips: the shortest side of a v5p pod of
#: 16x20x28 (jax-ml/scaling-book, tpus.md), and every side of a v4 pod.
LONGEST_SIDE = 16
#: From this many chips on, slices of three dims consist of 4x4x4 cubes, whose rings close
#: (jax-ml/scaling-book, tpus.md).
CUBE = 64


def of_size(member: TopologyLike, devices: int) -> Topology:
    """The machine of the same family with another number of devices, in a shape that is offered: as
    many full NVLink domains as needed; the TPU slice nearest to a cube (or square), and several
    slices beyond the largest.

    >>> [of_size("16*h100:8", n).name for n in (4, 8, 64)]
    ['h100:4', 'h100:8', '8*h100:8']
    >>> of_size("v5e:16x16", 32).name, of_size("v5p:4x4x4", 8192).name
    ('v5e:4x8', '2*v5p:16x16x16')
    """
    machine = topology(member)
    if devices < 1:
        raise TopologyError(f"a machine of {devices} devices was asked for; it has at least 1")
    if devices == machine.devices:
        return machine
    product = CATALOG.get(machine.chip.name)
    if (
        product is None
        or product.chip != machine.chip
        or ":" not in machine.name
        or machine != topology(machine.name)
    ):
        return _resized(machine, devices)
    return topology(
        _slices(product, devices) if product.dims > 1 else _domains(machine, product, devices)
    )


def _domains(machine: Topology, product: Product, devices: int) -> str:
    """GPUs: domains of the family's size, or the fewest equal domains if that does not divide
    `devices`.
    """
    size = machine.tiers[-1].devices if len(machine.tiers) > 1 else product.most
    count = next(
        number for number in range(math.ceil(devices / size), devices + 1) if devices % number == 0
    )
    return (
        f"{count}*{product.chip.name}:{devices // count}"
        if count > 1
        else f"{product.chip.name}:{devices}"
    )


def _slices(product: Product, devices: int) -> str:
    """TPUs: one slice if there is one of that size, else the fewest equal slices."""
    per_chip = product.chip.devices_per_chip
    chips, remainder = divmod(devices, per_chip)
    if remainder:
        raise TopologyError(
            f"{product.chip.name} has {per_chip} devices a chip, and {devices} devices are not a"
            " whole number of chips"
        )
    for count in (number for number in range(1, chips + 1) if chips % number == 0):
        shape = _family_shape(product, chips // count)
        if shape is not None:
            spelled = f"{product.chip.name}:{'x'.join(map(str, shape))}"
            return f"{count}*{spelled}" if count > 1 else spelled
    raise AssertionError("one chip is a slice")


def _family_shape(product: Product, chips: int) -> tuple[int, ...] | None:
    """The slice shape nearest to a cube or square, sides ascending; None if no slice has that many
    chips.
    """
    longest = product.full_ring or LONGEST_SIDE
    candidates = [sides for sides in _sides(chips, product.dims, longest) if chips <= product.most]
    if product.dims == 3 and chips >= CUBE:
        candidates = [sides for sides in candidates if all(side % 4 == 0 for side in sides)]
    return min(candidates, key=lambda sides: sides[::-1], default=None)


def _sides(number: int, dims: int, longest: int, smallest: int = 1) -> Iterator[tuple[int, ...]]:
    """Every ascending tuple of `dims` factors, each at most `longest`, with product `number`."""
    if dims == 1:
        if smallest <= number <= longest:
            yield (number,)
        return
    for first in (side for side in range(smallest, longest + 1) if number % side == 0):
        for factors in _sides(number // first, dims - 1, longest, first):
            yield (first, *factors)


def _resized(machine: Topology, devices: int) -> Topology:
    """A machine outside of the catalogue with more or fewer of its outermost parts."""
    outer, inner = machine.tiers[0], machine.tiers[1:]
    domain = machine.devices // outer.devices
    if len(outer.shape) > 1 or devices % domain:
        what = (
            f"{domain} devices each"
            if len(outer.shape) == 1
            else "a torus, whose size does not change alone"
        )
        raise TopologyError(
            f"{machine.name} has no member of {devices} devices: its outermost parts are"
            f" {what}\nTry: a multiple of {domain}"
        )
    return replace(
        machine,
        name=f"{machine.name} ({devices} devices)",
        tiers=(replace(outer, shape=(devices // domain,)), *inner),
    )


@dataclass(frozen=True)
class Span:
    """The part of one dim of one tier that a mesh axis takes.

    Attributes:
        tier: index into `Topology.tiers`.
        dim: index into the tier's shape.
        ways: positions along the dim, at least 2.
        stride: distance between neighbouring positions, in positions of the dim; axes further
            inside use the positions between.
    """

    tier: int
    dim: int
    ways: int
    stride: int = 1


Placement = Mapping[str, tuple[Span, ...]]


@lru_cache(maxsize=1 << 16)
def place(mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()) -> Placement | None:
    """The placement of the axes of a mesh on the tiers of a topology.

    An axis takes parts of one or several dims; it is the mixed-radix product of its spans, the
    major one first. Axes are placed from the innermost (tensor) outwards. Each takes the greatest
    common divisor of its size and what is left of the innermost tier, and the rest from the next
    tier. On a torus an axis prefers whole dims, since half a ring is only a line; among equal
    choices it takes the one with the fastest gather, then the last dims.
    `jax.experimental.mesh_utils.create_device_mesh(allow_split_physical_axes=True)` does the same
    by hand-written preference.

    >>> spans = place(MeshShape(data=8, tensor=16), topology("16*h100:8"))
    >>> spans["tensor"]
    (Span(tier=0, dim=0, ways=2, stride=1), Span(tier=1, dim=0, ways=8, stride=1))
    >>> spans["data"]
    (Span(tier=0, dim=0, ways=8, stride=2),)

    A mesh smaller than the topology takes the innermost devices. The result is shared between
    callers and immutable.

    Args:
        order: mesh axes from the outermost links to the innermost; by default as in `MESH_AXES`.

    Returns:
        The spans of every axis larger than 1, major span first; None if the mesh does not fit on
        the topology.
    """
    used = used_shapes(mesh.devices, topology)
    if used is None:
        return None
    left, spans = used, dict[str, tuple[Span, ...]]()
    for axis in reversed(dict.fromkeys((ISLAND.name, *order)) if order else MESH_AXES):
        if mesh[axis] > 1:
            spans[axis], left = _take(mesh[axis], topology, used, left)
    return MappingProxyType({axis: spans[axis] for axis in mesh})


def orders(mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    """Orders in which the axes of a mesh can take the links: the default, and those that move one
    axis to the innermost or the outermost links.

    The default comes first, as `()`; the others are in the form that `place` takes.

    >>> orders(MeshShape(data=2, tensor=4))
    ((), ('tensor', 'data'))
    """
    axes = tuple(mesh)
    candidates: dict[tuple[str, ...], None] = {axes: None}
    for axis in axes:
        others = tuple(a for a in axes if a != axis)
        candidates |= {(*others, axis): None, (axis, *others): None}
    return ((), *(order for order in candidates if order != axes))


@lru_cache(maxsize=1 << 14)
def placements(
    mesh: MeshShape, topology: Topology
) -> tuple[tuple[tuple[str, ...], Placement], ...]:
    """The (order, placement) pairs of a mesh on a topology that differ in the cost of collectives,
    the default first; empty if the mesh does not fit. Of orders with equal cost, the first in
    alphabetical order is kept.

    The distance between the devices of a group matters only on a torus: a switch or a network takes
    the same time wherever they are.
    """
    distinct: dict[object, tuple[tuple[str, ...], Placement]] = {}
    flat = len(topology.tiers) == 1 and len(topology.tiers[0].shape) == 1
    is_torus = [tier.kind == "torus" for tier in topology.tiers]
    for order in orders(mesh)[:1] if flat else sorted(orders(mesh)):
        placement = place(mesh, topology, order)
        if placement is None:
            return ()
        lies = tuple(
            (axis, *((s.tier, s.dim, s.ways, s.stride if is_torus[s.tier] else 1) for s in spans))
            for axis, spans in placement.items()
        )
        distinct.setdefault(lies, (order, placement))
    return tuple(distinct.values())


def device_order(
    mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> NDArray[np.int64] | None:
    """Device numbers at each position of the mesh; None if the mesh does not fit."""
    spans = place(mesh, topology, order)
    if spans is None:
        return None
    strides = _number_strides(topology)
    numbers = np.zeros((), np.int64)
    for axis in MESH_AXES:
        along = np.zeros(1, np.int64)
        for span in spans.get(axis, ()):
            step = np.arange(span.ways, dtype=np.int64) * span.stride * strides[span.tier][span.dim]
            along = np.add.outer(along, step).reshape(-1)
        numbers = np.add.outer(numbers, along)
    return numbers


def _number_strides(topology: Topology) -> list[list[int]]:
    """The distance in device numbers between neighbours along each dim."""
    strides: list[list[int]] = []
    step = 1
    for tier in reversed(topology.tiers):
        row: list[int] = []
        for size in reversed(tier.shape):
            row.insert(0, step)
            step *= size
        strides.insert(0, row)
    return strides


@lru_cache(maxsize=4096)
def used_shapes(devices: int, topology: Topology) -> tuple[tuple[int, ...], ...] | None:
    """The sub-block of every tier that a mesh of this many devices uses, inner tiers filled first;
    None if no sub-block has that many devices.
    """
    if devices > topology.devices:
        return None
    if devices == topology.devices:
        return tuple(tier.shape for tier in topology.tiers)
    return _fill(devices, topology.tiers)


def _fill(devices: int, tiers: tuple[Tier, ...]) -> tuple[tuple[int, ...], ...] | None:
    if not tiers:
        return () if devices == 1 else None
    inner = tiers[-1]
    for part in reversed(divisors(devices, inner.devices)):
        blocks = list(_factorings(part, inner.shape))
        outer = _fill(devices // part, tiers[:-1]) if blocks else None
        if outer is not None:
            return (
                *outer,
                min(blocks, key=lambda block: _preference(block, block, (1,) * len(block), inner)),
            )
    return None


def divisors(number: int, limit: int | None = None) -> list[int]:
    """All divisors of `number` (at least 1) up to `limit`, ascending. An unbounded number such as a
    batch needs only small ones, and finding all takes time of the order of its square root.

    >>> divisors(12), divisors(10**12, limit=10)
    ([1, 2, 3, 4, 6, 12], [1, 2, 4, 5, 8, 10])
    """
    limit = number if limit is None else limit
    small = [n for n in range(1, min(math.isqrt(number), limit) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small if number // n <= limit)})


def _factorings(number: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write `number` as a product with one factor per entry of `limits`, none above
    its entry.
    """
    if len(limits) == 1:
        if number <= limits[0]:
            yield (number,)
        return
    for first in (d for d in range(1, min(number, limits[0]) + 1) if number % d == 0):
        for factors in _factorings(number // first, limits[1:]):
            yield (first, *factors)


@lru_cache(maxsize=1 << 14)
def _take(
    degree: int,
    topology: Topology,
    used: tuple[tuple[int, ...], ...],
    left: tuple[tuple[int, ...], ...],
) -> tuple[tuple[Span, ...], tuple[tuple[int, ...], ...]]:
    """The spans of `degree` positions, taken from the remaining positions of the innermost tier
    first, and the positions that remain afterwards.
    """
    spans: list[Span] = []
    then = list(left)
    for i in reversed(range(len(left))):
        share = math.gcd(degree, math.prod(left[i]))
        if share == 1:
            continue
        stride = tuple(u // size for u, size in zip(used[i], left[i], strict=True))
        parts = _split(share, left[i], stride, topology.tiers[i])
        spans[:0] = [Span(i, dim, part, stride[dim]) for dim, part in enumerate(parts) if part > 1]
        then[i] = tuple(size // part for size, part in zip(left[i], parts, strict=True))
        degree //= share
    assert degree == 1, "the used devices are a multiple of every axis, prime by prime"
    return tuple(spans), tuple(then)


@lru_cache(maxsize=1 << 14)
def _split(
    share: int, left: tuple[int, ...], stride: tuple[int, ...], tier: Tier
) -> tuple[int, ...]:
    """The positions of each dim of one tier that an axis takes."""
    if len(left) == 1:
        return (share,)
    options = itertools.product(
        *([d for d in range(1, size + 1) if size % d == 0 and share % d == 0] for size in left)
    )
    exact = [option for option in options if math.prod(option) == share]
    return min(exact, key=lambda option: _preference(option, left, stride, tier))


def _preference(
    parts: tuple[int, ...], left: tuple[int, ...], stride: tuple[int, ...], tier: Tier
) -> tuple[object, ...]:
    """Sort key of the choices: fewest partial dims, then the fastest gather, then the last dims."""
    in_part = sum(1 for part, size in zip(parts, tier.shape, strict=True) if 1 < part < size)
    rate = sum(
        (1 + (tier.wrap[d] and part * stride[d] == tier.shape[d])) / stride[d]
        for d, part in enumerate(parts)
        if part > 1
    )
    leftover = tuple(size // part for part, size in zip(parts, left, strict=True))
    return in_part, -rate, tuple(-n for n in leftover)


def island_of(machine: Topology, islands: int) -> Topology:
    """The machine of one island: one of several equal parts of a machine whose devices are
    neighbours. All islands are in use.

    >>> island_of(topology("2*v5e:4x4"), 2).name, island_of(topology("16*h100:8"), 4).name
    ('v5e:4x4', '4*h100:8')
    >>> island_of(topology("cpu:8"), 2).name
    'cpu:4'
    >>> island_of(topology("2@10gbit*16*h100:8"), 2).name
    '16*h100:8'
    >>> island_of(topology("4@1gbit*h100:8"), 2).name
    '2@1gbit*h100:8'
    """
    if islands == 1:
        return machine
    outer = machine.tiers[0]
    size = outer.devices
    if machine.name.endswith(".toml") or ":" not in machine.name:
        raise TopologyError(
            f"islands need a machine that has a spelling, and {machine.name!r} is described by a"
            " file\nTry: its spelling, such as '2*h100:8'"
        )
    if outer.kind == "torus":
        raise TopologyError(
            f"islands are whole slices, and {machine.name} is one\nTry:"
            f" topology='{islands}*{machine.name}', or a smaller slice {islands} times"
        )
    if size % islands:
        what = "devices" if len(machine.tiers) == 1 else "domains"
        raise TopologyError(
            f"{islands} islands do not divide the {size} {what} of {machine.name}\nTry: a number of"
            f" islands that divides {size}"
        )
    left = size // islands
    tiers = (*_of(outer, left, inner=len(machine.tiers) > 1), *machine.tiers[1:])
    part = replace(machine, name=_spelled(machine, left), tiers=tiers, alone=1.0)
    return replace(part, alone=min(machine.alone, float(part.devices)))


def _of(outer: Tier, left: int, *, inner: bool) -> tuple[Tier, ...]:
    """An island's part of the outermost tier; empty if the island does not cross it."""
    return () if left == 1 and inner else (replace(outer, shape=(left,)),)


def _spelled(machine: Topology, left: int) -> str:
    """The spelling of an island with `left` parts of the outermost tier."""
    joined, star, inner = machine.name.partition("*")
    if "@" in joined:
        return inner if left == 1 else f"{left}@{joined.partition('@')[2]}{star}{inner}"
    domain = machine.name.rpartition("*")[2]
    if len(machine.tiers) == 1 or "*" not in machine.name:
        return f"{domain.partition(':')[0]}:{left}"
    return domain if left == 1 else f"{left}*{domain}"


#: Machines of at most this many devices may be used with any number of them.
SMALL = 64


def slice_of(machine: Topology, devices: int) -> Topology | None:
    """The slice of a TPU machine that a mesh of fewer devices runs on, since the compiler does not
    compile for part of a slice. None if the mesh uses all devices, or if the compiler has no slice
    of that size (its hosts have 2 x 2 chips).

    >>> slice_of(topology("v5e:2x4"), 4).name, slice_of(topology("2*v5e:4x4"), 16).name
    ('v5e:2x2', 'v5e:4x4')
    >>> slice_of(topology("v5e:2x4"), 2) is None
    True
    """
    used = used_shapes(devices, machine) if machine.chip.vendor == "google" else None
    torus_tiers = [i for i, tier in enumerate(machine.tiers) if tier.kind == "torus"]
    if used is None or len(torus_tiers) != 1 or devices == machine.devices:
        return None
    shape, chips = machine.tiers[torus_tiers[0]].shape, math.prod(used[torus_tiers[0]])
    sizes = [[n for n in range(1, side + 1) if chips % n == 0] for side in shape]
    blocks = [
        block
        for block in itertools.product(*sizes)
        if math.prod(block) == chips and block[0] % 2 == block[1] % 2 == 0
    ]
    if not blocks:
        return None
    block = "x".join(map(str, min(blocks, key=lambda shape: (max(shape), shape))))
    slices = math.prod(math.prod(shape) for shape in used[: torus_tiers[0]])
    return topology(f"{f'{slices}*' if slices > 1 else ''}{machine.chip.name}:{block}")


def device_counts(topology: Topology, batch: int = 1) -> tuple[int, ...]:
    """The numbers of devices that meshes may use, largest first. On a small machine, every number
    that has a placement on the links; on a large one, the divisors of the total and the largest
    product of a divisor of the batch and a power of two. On a TPU slice, a number that does not
    divide the total counts only if the compiler has a slice of that size.

    The numbers do not depend on pins, so a pinned search covers a subset of the unpinned one.

    >>> device_counts(topology("3*a100:2")), device_counts(topology("v5e:4x4"))
    ((6, 4, 3, 2, 1), (16, 8, 4, 2, 1))
    """
    total = topology.devices
    torus = any(tier.kind == "torus" for tier in topology.tiers)

    def usable(devices: int) -> bool:
        has_slice = not torus or total % devices == 0 or slice_of(topology, devices) is not None
        return has_slice and used_shapes(devices, topology) is not None

    if total <= SMALL:
        return tuple(n for n in range(total, 0, -1) if usable(n))
    sizes = {n for n in divisors(total) if usable(n)}
    others = {
        odd << twos
        for odd in divisors(batch, total)
        if odd % 2
        for twos in range((total // odd).bit_length())
    }
    along = next((n for n in sorted(others, reverse=True) if usable(n)), 1)
    return tuple(sorted({*sizes, along}, reverse=True))
