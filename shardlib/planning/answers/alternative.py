"""A plan that was not chosen, and what it decides differently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.axes import MeshShape
from shardlib.planning.units.quantity import bytes_text, ratio_text, seconds_text
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that was not chosen.

    Attributes:
        place: 1 for the best of them.
        mesh: its mesh.
        summary: its other decisions in a few words.
        step_seconds: predicted time of a step.
        peak_bytes: predicted bytes per device.
        ratio: its time over the chosen plan's.
        differs: what it decides differently, "remat dots -> full".
        ties: further plans that are predicted to be equally fast.
    """

    place: int
    mesh: MeshShape
    summary: str
    step_seconds: float
    peak_bytes: int
    ratio: float
    differs: tuple[str, ...]
    ties: int = 0

    def to_json(self) -> JsonObject:
        """The alternative as plain data."""
        return {**self.__dict__, "mesh": dict(self.mesh), "differs": list(self.differs)}


def alternatives_text(found: Iterable[Alternative]) -> str:
    """The alternatives as a table for people."""
    rows = [("", "step", "time", "memory", "mesh", "other decisions")]
    rows += [
        (
            f"{one.place}.",
            seconds_text(one.step_seconds),
            ratio_text(one.ratio),
            bytes_text(one.peak_bytes),
            str(one.mesh),
            (one.summary or "-") + (f" (and {one.ties:,} as fast)" if one.ties else ""),
        )
        for one in found
    ]
    if len(rows) == 1:
        return (
            "\n".join(["Alternatives", *wrapped("  - ", "none: no other plan is legal and fits.")])
            + "\n"
        )
    return "\n".join(["Alternatives, by predicted time", *aligned(rows, right={0, 1, 2, 3})]) + "\n"
