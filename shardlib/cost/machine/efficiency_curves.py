"""Curves of chips under framework profiles, and links as fast as collectives reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from shardlib.cost.machine.efficiency import Efficiency, efficiency
from shardlib.errors import PinError
from shardlib.hardware.topology import Topology
from shardlib.untrusted import construct
from shardlib.untrusted.json_types import JsonMapping


def linked(topology: Topology, constants: Efficiency) -> Topology:
    """The topology with the links as fast as a stack's collectives reach; the same object where the
    figures are 1.
    """
    if constants.fast == constants.slow == 1:
        return topology
    tiers = (
        replace(
            tier,
            efficiency=min(
                1.0,
                tier.efficiency * (constants.slow if tier.kind == "network" else constants.fast),
            ),
        )
        for tier in topology.tiers
    )
    return replace(topology, tiers=tuple(tiers))


#: Published runs that a fitted figure takes, for its value to say something of other runs.
ROWS_A_FIGURE = 3


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What is known of a chip, or of a chip under a stack, beyond its vendor's constants.

    Attributes:
        chip: name of the chip.
        stack: name of the stack; "" for all but "xla".
        values: (figure, value) pairs that replace those of `Efficiency`.
        sources: a source, or a physical meaning with the word "assumed", for each of them.
        evidence: measurements that values were fitted to, as plain data.
    """

    chip: str
    stack: str = ""
    values: tuple[tuple[str, Any], ...]
    sources: tuple[str, ...]
    evidence: str = ""

    @property
    def rows(self) -> int:
        """Published runs that figures were fitted to; 0 where all are sourced."""
        return len(json.loads(self.evidence or "{}").get("rows", ()))

    @property
    def fitted(self) -> tuple[str, ...]:
        """Names of the figures that were fitted to published runs."""
        return tuple(
            name
            for name, _ in self.values
            if any(source.startswith(f"{name}: fitted") for source in self.sources)
        )

    @property
    def pooled(self) -> tuple[str, ...]:
        """Names of the figures that were fitted to runs of other chips or frameworks, too."""
        return tuple(
            name
            for name, _ in self.values
            if any(source.startswith(f"{name}: pooled") for source in self.sources)
        )

    @property
    def well_founded(self) -> bool:
        """Whether the curve rests on at least `ROWS_A_FIGURE` runs for every fitted figure."""
        return self.rows >= ROWS_A_FIGURE * len(self.fitted)

    @classmethod
    def from_json(cls, data: JsonMapping) -> Curve:
        """Reads a file of `framework_profiles/curves`."""
        return construct(
            cls,
            {**data, "evidence": json.dumps(data.get("evidence", {}), sort_keys=True)},
            "the curve",
            PinError,
        )


@lru_cache(maxsize=1)
def curves() -> Mapping[tuple[str, str], Curve]:
    """The curves that come with shardlib, by chip and stack."""
    folder = resources.files("shardlib.cost") / "framework_profiles" / "curves"
    loaded = [
        Curve.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {
        (curve.chip, curve.stack): curve
        for curve in sorted(loaded, key=lambda curve: (curve.chip, curve.stack))
    }


def evidence_of(stack: str) -> tuple[Curve, ...]:
    """The curves of a framework profile that were fitted to published runs, by chip.

    >>> [(one.chip, one.rows, len(one.fitted)) for one in evidence_of("nanotron")]
    [('h100', 12, 1)]
    """
    return tuple(curve for curve in curves().values() if curve.stack == stack and curve.rows)


def efficiency_of(
    chip: str, vendor: str, stack: str, measured: JsonMapping | None = None
) -> Efficiency:
    """The figures of a chip under a stack: the vendor's, then the chip's, then those of both, then
    the user's own.
    """
    figures = efficiency(vendor)
    for key in ([] if stack == "xla" else [(chip, "")]) + [(chip, stack)]:
        if key in curves():
            figures = figures.with_values(dict(curves()[key].values))
    return figures.with_values(measured or {})
