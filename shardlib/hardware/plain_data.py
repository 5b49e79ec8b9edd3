"""Topologies as plain data, of a TOML file or of JSON: which keys they must and may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.chip import Chip
from shardlib.hardware.tier import Tier
from shardlib.untrusted import shown
from shardlib.untrusted.json_types import JsonMapping, JsonObject


def faults_of(data: JsonMapping) -> list[str]:
    """What is wrong with the keys of a topology as plain data: missing, unknown, no tables."""
    failures = _key_faults(
        data, "", ("chip", "tiers"), ("name", "corrections", "efficiency", "alone")
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
    return failures


def _tables(value: object) -> list[JsonObject] | None:
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
    data: JsonMapping, prefix: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> list[str]:
    missing = [f"{prefix + key!r} is missing" for key in required if key not in data]
    keys = (*required, *optional)
    return missing + [
        f"{shown(prefix + key)} is unknown; keys are {', '.join(keys)}"
        for key in data
        if key not in keys
    ]
