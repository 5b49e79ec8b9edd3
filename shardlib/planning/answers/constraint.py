"""What holds a plan back: memory, pins, and sizes that divide no further."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.axes import MeshShape
from shardlib.planning.units.quantity import bytes_text, seconds_text
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted.json_types import JsonObject

#: Rows of the table of plans that do not fit.
_MOST_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class OutOfReach:
    """A plan that is faster and does not fit; none that needs less memory is as fast, unless it
    recomputes a part of the layers only.

    Attributes:
        mesh: its mesh.
        summary: its other decisions in a few words.
        step_seconds: predicted time of a step.
        peak_bytes: predicted bytes per device.
        short_bytes: bytes that a device lacks for it.
    """

    mesh: MeshShape
    summary: str
    step_seconds: float
    peak_bytes: int
    short_bytes: int

    def to_json(self) -> JsonObject:
        """The plan as plain data."""
        return {**self.__dict__, "mesh": dict(self.mesh)}


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A constraint without which the plan would be faster, or could be.

    Attributes:
        kind: "memory", "pin" or "size".
        what: the memory of the chip, the pin, or the colour whose size it is.
        message: one sentence.
        step_seconds: time of the best plan without it; 0 where it is not known.
    """

    kind: str
    what: str
    message: str
    step_seconds: float = 0.0

    def to_json(self) -> JsonObject:
        """The constraint as plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What holds a plan back.

    Attributes:
        step_seconds: time of the plan.
        binding: the constraints, the one that costs most first.
        staircase: faster plans that do not fit, the one that lacks least first; each is faster than
            all before it.
    """

    step_seconds: float
    binding: tuple[Binding, ...]
    staircase: tuple[OutOfReach, ...]

    def to_json(self) -> JsonObject:
        """The constraints as plain data."""
        return {
            "step_seconds": self.step_seconds,
            "binding": [one.to_json() for one in self.binding],
            "staircase": [one.to_json() for one in self.staircase],
        }

    def __str__(self) -> str:
        lines = ["What holds the plan back"]
        lines += [line for one in self.binding for line in wrapped("  - ", one.message)] or wrapped(
            "  - ", "nothing: no memory, pin or size stands in the way of a faster plan."
        )
        if self.staircase:
            rows = [("step", "memory", "lacking", "mesh", "other decisions")]
            rows += [
                (
                    seconds_text(one.step_seconds),
                    bytes_text(one.peak_bytes),
                    bytes_text(one.short_bytes),
                    str(one.mesh),
                    one.summary or "-",
                )
                for one in self.staircase[:_MOST_ROWS]
            ]
            more = len(self.staircase) - _MOST_ROWS
            lines += [
                "",
                "Faster plans that do not fit",
                *aligned(rows, right={0, 1, 2}),
                *([f"  and {more} that lack still more"] if more > 0 else []),
            ]
        return "\n".join(lines) + "\n"
