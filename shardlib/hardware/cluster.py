"""Clusters of unlike devices: boards, phones, cards of several generations on one network.

A `Device` is some equal members of such a cluster. A TOML file lists them, with a chip of the
catalogue or a table with the fields of `Chip`:

    [[devices]]
    name = "board"
    count = 4                       # may be left out: 1
    link_bytes_per_s = 1.25e8       # of its port, one direction
    link_latency_s = 2e-4           # may be left out: from the device to the network, or back
    # may be left out: measured, of one layer of the model for the batch that is planned for
    layer_seconds = 0.031
    [devices.chip]
    name = "board"
    vendor = "cpu"
    flops_per_s = { float32 = 2.5e10 }
    hbm_bytes = 4_000_000_000
    hbm_bytes_per_s = 1.2e10
    # may be left out: figures measured on it, see `shardlib.cost.machine.efficiency`
    [devices.efficiency]
    matmul = 0.6
    [[devices]]
    name = "card"
    chip = "a100"
    link_bytes_per_s = 1.25e9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from shardlib.errors import MissingFileError, TopologyError, raise_all
from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.chip import LARGEST, Chip
from shardlib.untrusted import construct, read_toml, shown
from shardlib.untrusted.json_types import JsonMapping
from shardlib.untrusted.shown import bounded


@dataclass(frozen=True, kw_only=True)
class Device:
    """Some equal devices of a cluster.

    Attributes:
        name: what people call them.
        chip: compute and memory of one of them.
        link_bytes_per_s: rate of its port in one direction; a message takes the rate of the slower
            of two ports.
        count: how many there are.
        link_latency_s: seconds from the device to the network, or back; a message takes that of
            both its ends.
        layer_seconds: measured seconds of one layer, of the layer group with the most; the
            prediction for everything on this device is scaled to meet it. None: as predicted.
        efficiency: (figure, value) pairs measured on it, see `shardlib.cost.machine.efficiency`.
            Any mapping is accepted.

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


def message_seconds(size: float, source: Device, target: Device) -> float:
    """Seconds of a message of `size` bytes from one device to another.

    Args:
        size: bytes.
    """
    return (
        source.link_latency_s
        + target.link_latency_s
        + size / min(source.link_bytes_per_s, target.link_bytes_per_s)
    )


def cluster(spec: str | Path | Sequence[Device]) -> tuple[Device, ...]:
    """The devices of a TOML file; devices are checked and returned as they are."""
    devices = _from_file(Path(spec)) if isinstance(spec, str | Path) else tuple(spec)
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


def _from_file(path: Path) -> tuple[Device, ...]:
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
        _read(cast("Mapping[str, Any]", table), f"devices[{i}] of {str(path)!r}")
        for i, table in enumerate(cast("list[Any]", tables))
    )


def _read(data: JsonMapping, source: str) -> Device:
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
