"""Learned factors: by how much the cost model is wrong for a chip and its compiler.

A correction is one factor on one quantity of a prediction, learned from programs that the real
compiler made, and kept with the evidence behind it (`learned/*.json`, made by
`benchmarks/learn_corrections.py`). A topology file can bring factors of its own:

    [corrections]
    temporaries = 1.15
    compute = 1.0          # as the model says, whatever was learned

A factor of the topology takes the place of the learned one. Which XLA is installed on the machine
that plans does not matter: of several versions the newest learned one counts, and a verification
says where the compiler is another.

One factor is no correction: the *margin*, by which a program may need more memory than predicted. A
plan fits where its predicted peak times the margin does. It is the largest that was learned for the
chip with any compiler, else for chips of its vendor, else `UNKNOWN_MARGIN`. Simulated devices have
none: how much memory they share is not known so exactly.

>>> from shardlib.hardware.topology import topology
>>> [(one.quantity, one.factor) for one in applied(topology("h100:8"), known=())]
[('margin', 1.1)]
>>> applied(topology("cpu:8"), known=())
()
>>> entry = Correction(
...     chip="h100", versions=(("jaxlib", "0.10.2"),), quantity="temporaries", factor=1.2, n=24,
...     median_error_before=0.2, median_error_after=0.05, held_out_error=0.07,
... )
>>> [(one.quantity, one.factor, one.n) for one in applied(topology("h100:8"), known=(entry,))]
[('margin', 1.1, 0), ('temporaries', 1.2, 24)]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from shardlib.errors import PinError
from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.chip import Chip
from shardlib.hardware.topology import CORRECTABLE, Topology
from shardlib.untrusted import construct
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: The margin of a compiler that nothing was learned of.
UNKNOWN_MARGIN = 1.1


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One compiled program.

    Attributes:
        case: model, topology and pins in a few words.
        family: the model; what a correction learns from one family must help the others.
        predicted: peak bytes of a device, or seconds of kernels, without any correction.
        compiled: the same by the compiler.
    """

    case: str
    family: str
    predicted: float
    compiled: float


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A factor on one quantity, and why.

    Attributes:
        chip: name in the catalogue.
        versions: (package, version) of the compiler that it was learned from.
        quantity: one of `shardlib.hardware.topology.CORRECTABLE`.
        factor: what the model's figure is multiplied by.
        n: compiled programs behind it.
        median_error_before: median of |predicted - compiled| / compiled without the factor.
        median_error_after: the same with it.
        held_out_error: the same for each family of models with the factor that the other families
            give.
        evidence: the programs.
    """

    chip: str
    versions: tuple[tuple[str, str], ...]
    quantity: str
    factor: float
    n: int
    median_error_before: float
    median_error_after: float
    held_out_error: float
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        assert self.quantity in CORRECTABLE, self.quantity
        assert 0 < self.factor < math.inf, self.factor

    def to_json(self) -> JsonObject:
        """The correction as plain data."""
        return {
            **self.__dict__,
            "versions": dict(self.versions),
            "evidence": [item.__dict__ for item in self.evidence],
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Correction:
        """Reads what `to_json` wrote."""
        return construct(cls, data, "the correction", PinError)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A factor that is in an estimate.

    Attributes:
        quantity: one of `CORRECTABLE`.
        factor: what it was multiplied by.
        n: compiled programs behind it; 0 for a factor of the topology's own.
        versions: (package, version) of their compiler.
        unknown: whether nothing is known of the compiler (`UNKNOWN_MARGIN`).
    """

    quantity: str
    factor: float
    n: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    unknown: bool = False

    def to_json(self) -> JsonObject:
        """The factor as plain data."""
        return {**self.__dict__, "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, data: JsonMapping) -> Applied:
        """Reads what `to_json` wrote."""
        return construct(cls, data, "the correction", PinError)

    def __str__(self) -> str:
        compiler = " ".join(f"{name} {version}" for name, version in self.versions)
        return f"{self.quantity} x {self.factor:.3g}, " + (
            f"learned from {self.n} programs compiled with {compiler}"
            if self.n
            else "nothing was learned of this compiler"
            if self.unknown
            else "from the topology file"
        )


@lru_cache(maxsize=1)
def learned() -> tuple[Correction, ...]:
    """The corrections that come with shardlib."""
    folder = resources.files("shardlib.cost") / "learned"
    files = (
        sorted(
            (file for file in folder.iterdir() if file.name.endswith(".json")),
            key=lambda file: file.name,
        )
        if folder.is_dir()
        else []
    )
    return tuple(
        Correction.from_json(entry)
        for file in files
        for entry in json.loads(file.read_text(encoding="utf-8"))
    )


def applied(
    topology: Topology, corrections: Iterable[Correction] | None = None
) -> tuple[Applied, ...]:
    """The factors that predictions for a topology are multiplied by, sorted by quantity; none that
    is 1.
    """
    corrections = tuple(learned() if corrections is None else corrections)
    of_chip = (
        entry
        for entry in corrections
        if entry.chip == topology.chip.name and entry.quantity != "margin"
    )
    newest = {entry.quantity: entry for entry in sorted(of_chip, key=_age)}
    factors = {
        quantity: Applied(
            quantity=quantity, factor=entry.factor, n=entry.n, versions=entry.versions
        )
        for quantity, entry in newest.items()
    }
    if topology.chip.vendor != "cpu":
        factors["margin"] = _held_back(corrections, topology.chip)
    factors |= {
        quantity: Applied(quantity=quantity, factor=factor)
        for quantity, factor in topology.corrections
    }
    return tuple(factors[quantity] for quantity in sorted(factors) if factors[quantity].factor != 1)


def margin(topology: Topology) -> float:
    """By how much a program may need more memory than predicted: at least 1."""
    return next(
        (correction.factor for correction in applied(topology) if correction.quantity == "margin"),
        1.0,
    )


def fitting_bytes(topology: Topology) -> float:
    """The largest predicted peak with which a plan fits on a device, bytes."""
    return topology.chip.usable_bytes / margin(topology)


def without_margin(topology: Topology) -> Topology:
    """The topology with nothing held back: plans that fit by their prediction fit."""
    others = (correction for correction in topology.corrections if correction[0] != "margin")
    return replace(topology, corrections=(*others, ("margin", 1.0)))


def _held_back(corrections: Iterable[Correction], chip: Chip) -> Applied:
    """The margin of a chip that is not the topology's own: the largest of all compilers that made
    programs for it, else for chips of its vendor.
    """
    margins = [entry for entry in corrections if entry.quantity == "margin"]
    of_chip = [entry for entry in margins if entry.chip == chip.name]
    related = [
        entry
        for entry in margins
        if entry.chip in CATALOG and CATALOG[entry.chip].chip.vendor == chip.vendor
    ]
    if not (of_chip or related):
        return Applied(quantity="margin", factor=UNKNOWN_MARGIN, unknown=True)
    largest = max(of_chip or related, key=lambda entry: (entry.factor, _age(entry)))
    return Applied(quantity="margin", factor=largest.factor, n=largest.n, versions=largest.versions)


def _age(entry: Correction) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Sorts versions by their numbers, packages by name."""
    return tuple(
        (name, tuple(map(int, re.findall(r"\d+", version))))
        for name, version in sorted(entry.versions)
    )
