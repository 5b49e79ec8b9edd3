"""What machine is a plan for, and how is it spelled?

A topology is one kind of chip and the link tiers that connect its devices, the outermost (slowest)
tier first. Device numbers run through the tiers in that order, the last dim of the innermost tier
fastest.

>>> cluster = topology("16*h100:8")
>>> cluster.devices, [(tier.name, tier.shape) for tier in cluster.tiers]
(128, [('InfiniBand', (16,)), ('NVLink', (8,))])
>>> topology("v5e:16x8").tiers[0].wrap
(True, False)

Spelling: `chip:count` for GPUs and simulated CPU devices, `chip:AxB` or `chip:AxBxC` (in chips) for
TPU slices, and `N*` in front for N such fast domains joined by the slow network. A path that ends
in `.toml` describes any other cluster:

    chip = "h100"               # a name of the catalogue, or a table with the fields of `Chip`
    [[tiers]]                   # outermost first
    name = "RoCE"
    kind = "network"            # "torus", "mesh", "switch", "network" or "memory"
    shape = [13]
    bytes_per_s = 25e9          # of one device, one direction; for a torus, of the link in one dim
    latency_s = 5e-6            # may be left out, as may efficiency, wrap (torus) and sources
    [[tiers]]
    name = "NVLink"
    kind = "switch"
    shape = [8]
    bytes_per_s = 450e9
    [corrections]               # may be left out: factors on predictions for this machine, see `shardlib.cost.machine.corrections`
    temporaries = 1.15
    [efficiency]                # may be left out: figures measured on this machine, see `shardlib.cost.machine.efficiency`
    matmul = 0.72
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from shardlib.errors import MissingFileError, TopologyError, raise_all
from shardlib.hardware.catalog import CATALOG, Link, Product
from shardlib.hardware.chip import LARGEST, Chip
from shardlib.untrusted import construct, read_toml, shown
from shardlib.untrusted.shown import bounded

#: Quantities of a prediction that a factor can correct: seconds of kernels; bytes of values saved
#: for the backward pass, of other values, and of gathered parameters.
CORRECTABLE: tuple[str, ...] = ("compute", "activations", "temporaries", "communication")
KINDS: tuple[str, ...] = ("torus", "mesh", "switch", "network", "memory")
EXAMPLES = (
    "'cpu:8', 'h100:8', '16*h100:8', 'v5e:16x16', 'v5p:4x4x8', '2*v5e:16x16', or a path to a .toml"
    " file"
)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Links of one kind.

    Attributes:
        name: what people call it.
        kind: "torus" (neighbours only, one link a dim), "mesh" (a link from everyone to everyone: a
            group has those between its members), "switch" or "network" (everyone reaches everyone
            through one port), or "memory" (simulated devices of one process; the latency is that of
            a whole collective).
        shape: devices or domains along each dim; one dim unless it is a torus.
        wrap: for each dim, whether the last is a neighbour of the first; False unless it is a
            torus.
        bytes_per_s: peak rate in one direction: of the link in each dim for a torus, of a device's
            port, or of all its links in a mesh, otherwise.
        latency_s: time of one hop or step that carries no data.
        efficiency: part of the rate that large collectives reach.
        sources: where the figures come from.

    Raises:
        TopologyError: the fields do not fit each other.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes_per_s: float
    latency_s: float = 0.0
    wrap: tuple[bool, ...] = ()
    efficiency: float = 1.0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "wrap", tuple(self.wrap) or (False,) * len(self.shape))
        object.__setattr__(self, "sources", tuple(self.sources))
        failures = (
            [f"kind is {self.kind!r}; kinds are {', '.join(KINDS)}"]
            if self.kind not in KINDS
            else []
        )
        if not self.shape or any(type(n) is not int or n < 1 for n in self.shape):
            failures.append(f"shape is {list(self.shape)}; it needs integers of at least 1")
        if self.kind in KINDS[1:] and len(self.shape) != 1:
            failures.append(f"shape is {list(self.shape)}; a {self.kind} has one dim")
        if len(self.wrap) != len(self.shape):
            failures.append(f"wrap has {len(self.wrap)} entries for {len(self.shape)} dims")
        if any(self.wrap) and self.kind != "torus":
            failures.append(f"wrap is set, which only a torus has; the kind is {self.kind!r}")
        if not self.bytes_per_s > 0:
            failures.append(f"bytes_per_s is {self.bytes_per_s}; it must be positive")
        if self.latency_s < 0:
            failures.append(f"latency_s is {self.latency_s}; it must not be negative")
        if not 0 < self.efficiency <= 1:
            failures.append(f"efficiency is {self.efficiency}; it must be above 0 and at most 1")
        if failures:
            raise_all(TopologyError, f"tier {self.name!r} is not usable", failures)

    @property
    def devices(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def reached_bytes_per_s(self) -> float:
        """The rate that large collectives reach."""
        return self.bytes_per_s * self.efficiency

    def to_json(self) -> dict[str, Any]:
        """The tier as plain data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "wrap": list(self.wrap),
            "bytes_per_s": self.bytes_per_s,
            "latency_s": self.latency_s,
            "efficiency": self.efficiency,
            "sources": list(self.sources),
        }


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A machine: equal devices and the tiers of links between them.

    Attributes:
        name: its spelling; `topology(name)` gives it back unless it was measured.
        chip: what each device can do.
        tiers: links, the outermost first, at least one.
        efficiency: (figure, value) pairs, measured on this machine, that take the place of those of
            `shardlib.cost.machine.efficiency`, which knows the figures and checks them. Any mapping
            is accepted.
        corrections: (quantity, factor) pairs that take the place of learned ones; quantities are
            `CORRECTABLE`. Any mapping is accepted.
    """

    name: str
    chip: Chip
    tiers: tuple[Tier, ...]
    corrections: tuple[tuple[str, float], ...] = ()
    efficiency: tuple[tuple[str, Any], ...] = ()

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
        if faults:
            raise_all(
                TopologyError, f"the corrections of topology {self.name!r} are not usable", faults
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

    def to_json(self) -> dict[str, Any]:
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
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        """Reads what `to_json` wrote, or the same structure from a TOML file.

        Raises:
            TopologyError: keys are missing or unknown, all of them listed, or values do not fit.
        """
        return _read(data, str(data.get("name", "")) or "custom", "the topology")

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier.name} {'x'.join(map(str, tier.shape))}" for tier in self.tiers)
        return f"{self.name}: {self.devices} devices {self.chip.name} ({tiers})"


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return (
        tuple(_frozen(one) for one in cast("Iterable[Any]", value))
        if isinstance(value, list | tuple)
        else value
    )


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down."""
    return (
        [_plain(one) for one in cast("Iterable[Any]", value)] if isinstance(value, tuple) else value
    )


def topology(spec: str | Topology) -> Topology:
    """Returns the topology of a spelling or of a TOML file; a `Topology` is returned as it is.

    Raises:
        TopologyError: the spelling does not parse, the catalogue does not know the chip, or the
            file is not usable.
        MissingFileError: the file is not there.
    """
    if isinstance(spec, Topology):
        return spec
    if not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"topology is {spec!r} of type {type(spec).__name__}; give a spelling like {EXAMPLES},"
            " or a Topology"
        )
    text = spec.strip()
    return _from_file(Path(text)) if text.endswith(".toml") else _parse(text.lower())


@lru_cache(maxsize=256)
def _parse(text: str) -> Topology:
    match = re.fullmatch(r"(?:([0-9]{1,9})\*)?([a-z0-9.-]+):([0-9]{1,9}(?:x[0-9]{1,9}){0,7})", text)
    if match is None:
        raise TopologyError(
            f"topology {shown(text)} does not parse.{_hint(text)} Spellings: {EXAMPLES}"
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
    return Topology(
        name=f"{front}{match[2]}:{'x'.join(map(str, sizes))}", chip=product.chip, tiers=tuple(tiers)
    )


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
            f"topology {text!r} asks for {chips} GPUs in one NVLink domain; {name} has at most"
            f" {product.most}. Write {instead!r} for {parts} domains joined by {product.slow.name}"
        )
    limit = f"{ring}x{ring}" if ring else f"{product.most} chips"
    raise TopologyError(
        f"topology {text!r} is larger than a {name} pod, which has at most {limit}. "
        f"Write e.g. '2*{product.example}' for several slices joined by {product.slow.name}"
    )


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


def _from_file(path: Path) -> Topology:
    if not path.is_file():
        raise MissingFileError(
            f"topology file {str(path)!r} is not there (looked in {Path.cwd()}). Spellings:"
            f" {EXAMPLES}"
        )
    data = read_toml(path, "topology file", TopologyError)
    return _read({"name": str(path), **data}, str(path), f"topology file {str(path)!r}")


def _read(data: Mapping[str, Any], name: str, where: str) -> Topology:
    """Builds a topology from plain data, reporting every missing and unknown key at once."""
    failures = _key_faults(
        data, "", ("chip", "tiers"), ("name", "corrections", "efficiency")
    ) + _chip_faults(data.get("chip"))
    if not isinstance(data.get("corrections", {}), Mapping):
        failures.append("'corrections' is no table from quantity to factor")
    if not isinstance(data.get("efficiency", {}), Mapping):
        failures.append("'efficiency' is no table from figure to value")
    tables = _tables(data.get("tiers", []))
    if tables is None:
        failures.append("'tiers' is no list of tables ([[tiers]])")
    for i, tier in enumerate(tables or []):
        failures += _key_faults(tier, f"tiers[{i}].", *_keys(Tier))
    if failures:
        raise_all(TopologyError, f"{where} is not usable", bounded(failures))
    chip = data["chip"]
    given = {
        **{key: value for key, value in data.items() if key != "corrections"},
        "name": name,
        "chip": CATALOG[chip].chip if isinstance(chip, str) else chip,
    }
    return replace(
        construct(Topology, given, where, TopologyError, most=LARGEST),
        corrections=data.get("corrections", {}),
    )


def _tables(value: object) -> list[dict[str, Any]] | None:
    """The value as a list of tables; None when it is something else."""
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
        failures.append("'chip.flops_per_s' is no table from dtype to FLOP/s")
    return failures


def _keys(kind: type[Chip] | type[Tier]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Required and optional keys of a value: those without and with a default."""
    required = tuple(field.name for field in fields(kind) if field.name not in vars(kind))
    return required, tuple(field.name for field in fields(kind) if field.name not in required)


def _key_faults(
    data: Mapping[str, Any], prefix: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> list[str]:
    missing = [f"{prefix + key!r} is missing" for key in required if key not in data]
    known = (*required, *optional)
    return missing + [
        f"{shown(prefix + key)} is unknown; keys are {', '.join(known)}"
        for key in data
        if key not in known
    ]
