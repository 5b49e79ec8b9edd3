"""A plan that a search priced, as one point of the landscape of plans: time against memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import cast

from shardlib.axes import MeshShape
from shardlib.decisions.table import TABLE
from shardlib.planning.decisions.candidate import Candidate
from shardlib.untrusted.json_types import JsonObject

#: Decisions that a point tells otherwise, or not at all.
_TOLD = frozenset({"mesh", "rules", "sequence_parallel", "experts", "remat_classes", "exchange"})
_DEFAULTS = {word: str(entry.default) for word, entry in TABLE.items()}


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A plan that was priced exactly.

    Attributes:
        mesh: its mesh.
        decided: (word, value) of its other decisions that are not the default, in words.
        step_seconds: predicted time of a step, six digits.
        peak_bytes: predicted bytes per device.
        fits: whether it fits into the memory that plans may fill.
    """

    mesh: MeshShape
    decided: tuple[tuple[str, str], ...] = ()
    step_seconds: float
    peak_bytes: int
    fits: bool = True

    @classmethod
    def of(cls, candidate: Candidate, seconds: float, peak_bytes: float, *, fits: bool) -> Priced:
        """A candidate with its price.

        Args:
            seconds: predicted time of a step.
            peak_bytes: predicted bytes per device.
        """
        return cls(
            mesh=candidate.mesh,
            decided=_decided(candidate),
            step_seconds=float(f"{seconds:.6g}"),
            peak_bytes=math.ceil(peak_bytes),
            fits=fits,
        )

    def to_json(self) -> JsonObject:
        """The point as plain data."""
        return {
            "mesh": dict(self.mesh),
            "decided": dict(self.decided),
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def _decided(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    one, choice = candidate.decisions, candidate.choice
    told = [
        (field.name, _text(getattr(one, field.name)))
        for field in fields(one)
        if field.name not in _TOLD
    ]
    told = [(word, text) for word, text in told if text and text != _DEFAULTS.get(word)]
    if choice.tensor:
        told.append(("tensor shards", ", ".join(choice.tensor)))
    if choice.sequence:
        told.append(("sequence_parallel", "True"))
    if candidate.routes:
        told.append(("experts", "routed"))
    return tuple(told)


def _text(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    parts = cast("tuple[object, ...]", value)
    return ", ".join(
        " ".join(map(str, cast("tuple[object, ...]", part)))
        if isinstance(part, tuple)
        else str(part)
        for part in parts
    )
