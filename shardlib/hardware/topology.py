"""The machine that a plan is for, and how it is spelled.

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
    # may be left out: factors on predictions for this machine
    # (`shardlib.cost.machine.corrections`)
    [corrections]
    temporaries = 1.15
    margin = 1.02  # plans may fill a device to usable bytes / 1.02
    # may be left out: figures measured on this machine (`shardlib.cost.machine.efficiency`)
    [efficiency]
    matmul = 0.72
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, cast

from shardlib.errors import MissingFileError, TopologyError, raise_all
from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.chip import LARGEST, Chip
from shardlib.hardware.devices import DeviceMesh, JaxDevice, devices_of, spelling_of
from shardlib.hardware.pictures.links import links_svg
from shardlib.hardware.plain_data import faults_of
from shardlib.hardware.spelling import EXAMPLES, spelled
from shardlib.hardware.tier import Tier
from shardlib.untrusted import construct, read_toml
from shardlib.untrusted.json_types import JsonMapping, JsonObject
from shardlib.untrusted.shown import bounded

#: Larger machines are refused: nobody has built one, and placing a mesh takes time with its size.
MOST_DEVICES = 1 << 20
#: Quantities of a prediction that a factor can correct: seconds of kernels; bytes of values saved
#: for the backward pass, of other values, and of gathered parameters; and the memory that a program
#: may need over the memory that is predicted, which nothing is multiplied by.
CORRECTABLE: tuple[str, ...] = ("compute", "activations", "temporaries", "communication", "margin")


@dataclass(frozen=True, kw_only=True, repr=False)
class Topology:
    """A machine: equal devices and the tiers of links between them.

    Attributes:
        name: its spelling; `topology(name)` gives it back unless it was measured.
        chip: what each device can do.
        tiers: links, the outermost first, at least one.
        efficiency: (figure, value) pairs, measured on this machine, that take the place of those of
            `shardlib.cost.machine.efficiency`, which knows the figures and checks them. Any mapping
            is accepted.
        alone: how many times as fast a device computes while the others idle: simulated devices
            share the cores and the memory of their machine; 1 where each has its own.
        corrections: (quantity, factor) pairs that take the place of learned ones; quantities are
            `CORRECTABLE`. Any mapping is accepted.
    """

    name: str
    chip: Chip
    tiers: tuple[Tier, ...]
    corrections: tuple[tuple[str, float], ...] = ()
    efficiency: tuple[tuple[str, Any], ...] = ()
    alone: float = 1.0

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
        """The machine as a program on so many of its devices finds it: what the idle ones leave of
        what they share makes the others faster, up to `alone`. The same object where that is
        nothing.

        >>> from dataclasses import replace
        >>> shared = replace(topology("cpu:8"), alone=3.0)
        >>> [shared.in_use(n).chip.peak("float32") / shared.chip.peak("float32") for n in (8, 4, 1)]
        [1.0, 2.0, 3.0]

        Args:
            devices: that are at work.
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
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Topology:
        """Reads what `to_json` wrote, or the same structure from a TOML file.

        Args:
            data: "chip", a name of the catalogue or a table; "tiers", a list of tables; and what
                may be left out: "name", "corrections", "efficiency", "alone".

        Returns:
            An equal topology; without "name" it is called "custom".

        Raises:
            TopologyError: keys are missing or unknown, all of them listed, or values do not fit.
        """
        return _read(data, str(data.get("name", "")) or "custom", "the topology")

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
    """Lists as tuples, all the way down."""
    return (
        tuple(_frozen(item) for item in cast("Iterable[Any]", value))
        if isinstance(value, list | tuple)
        else value
    )


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down."""
    return (
        [_plain(item) for item in cast("Iterable[Any]", value)]
        if isinstance(value, tuple)
        else value
    )


#: What names a topology: a spelling or a .toml file, the value itself, or JAX devices.
TopologyLike = str | Topology | DeviceMesh | Sequence[JaxDevice]


def topology(spec: TopologyLike) -> Topology:
    """Returns the topology of a spelling, a TOML file or JAX devices; a `Topology` as it is.

    Args:
        spec: a spelling such as "16*h100:8" or "v5e:16x16", upper or lower case, or a path that
            ends in ".toml"; the module's text has all forms. Or a `jax.sharding.Mesh` or a list of
            devices, which are the machine; what the axes of the mesh are called says nothing.

    Returns:
        The topology; its rates are bytes a second and FLOP/s of one device.

    Raises:
        TopologyError: the spelling does not parse, the catalogue does not know the chip, the
            file is not usable, or the devices are no whole machine.
        MissingFileError: the file is not there.
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
    return _from_file(Path(text)) if text.endswith(".toml") else _parse(text.lower())


@lru_cache(maxsize=256)
def _parse(text: str) -> Topology:
    name, chip, tiers = spelled(text)
    return Topology(name=name, chip=chip, tiers=tiers)


def _from_file(path: Path) -> Topology:
    if not path.is_file():
        raise MissingFileError(
            f"topology file {str(path)!r} is not there (looked in {Path.cwd()}). Spellings:"
            f" {EXAMPLES}"
        )
    data = read_toml(path, "topology file", TopologyError)
    return _read({"name": str(path), **data}, str(path), f"topology file {str(path)!r}")


def _read(data: JsonMapping, name: str, source: str) -> Topology:
    """Builds a topology from plain data, reporting every missing and unknown key at once."""
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
