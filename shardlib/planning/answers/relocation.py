"""A plan for another machine, and what must move to get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardlib.compact import compact
from shardlib.hardware.topology import Topology
from shardlib.layout import Layout
from shardlib.planning.answers.resharding import Ranges, Shards
from shardlib.planning.plan import Plan, plan_to_data
from shardlib.planning.units.quantity import (
    bytes_text,
    clip,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted.json_types import JsonObject

#: Parts that the text lists.
_MOST_PARTS = 12


@dataclass(frozen=True, kw_only=True)
class Part:
    """One parameter, or its optimizer state, on its way from one layout to another.

    Attributes:
        path: tree path of the parameter.
        what: "parameter", "optimizer state" or, of islands, "outer state".
        bytes: bytes of the whole array.
        old, new: the layouts.
        received_bytes: bytes that all devices receive together.
        most_bytes: bytes that the device receives which receives most.
        lost_bytes: bytes that are on no surviving device.
        before, after: where its parts lie, by device.
    """

    path: str
    what: str
    bytes: int
    old: Layout
    new: Layout
    received_bytes: int
    most_bytes: int
    lost_bytes: int
    before: Shards = field(compare=False, repr=False)
    after: Shards = field(compare=False, repr=False)

    def ranges(self, device: int, survivors: Sequence[int]) -> tuple[Ranges | None, Ranges | None]:
        """The part of the array that a device of the new machine holds before and after, first and
        end per dim; None where it holds none.
        """
        return (
            self.before.ranges(survivors[device]) if device < len(survivors) else None
        ), self.after.ranges(device)

    def to_json(self) -> JsonObject:
        """The part as plain data, without the places of its shards."""
        return {
            "path": self.path,
            "what": self.what,
            "bytes": self.bytes,
            "old": self.old.to_json(),
            "new": self.new.to_json(),
            "received_bytes": self.received_bytes,
            "most_bytes": self.most_bytes,
            "lost_bytes": self.lost_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Replan:
    """A plan for another machine, and the way there.

    Attributes:
        old: the plan as it was.
        plan: the plan for the new machine.
        survivors: old device number of the new devices 0, 1, ..., as many as were there before.
        moved_bytes_per_device: bytes that each device of the new machine must receive.
        parts: every parameter and its optimizer state.
        changed: decisions that differ, "microbatches 8 -> 16".
        notes: what had to be given up or should be known, a sentence each.
        machine: the new machine.
        elsewhere: whether its chips are others, so that no device of it held anything before.
    """

    old: Plan
    plan: Plan
    survivors: tuple[int, ...]
    moved_bytes_per_device: tuple[int, ...]
    parts: tuple[Part, ...]
    changed: tuple[str, ...]
    notes: tuple[str, ...]
    machine: Topology
    elsewhere: bool = False

    __repr__ = compact

    @property
    def slowdown(self) -> float:
        """Predicted time of a step over that of the old plan."""
        return self.plan.estimate.step_seconds / self.old.estimate.step_seconds

    @property
    def lost_bytes(self) -> int:
        """Bytes that are on no surviving device."""
        return sum(part.lost_bytes for part in self.parts)

    @property
    def moving_seconds(self) -> float:
        """Time that the device which receives most needs, if every byte comes over one of the
        slowest links of the machine.
        """
        return max(self.moved_bytes_per_device, default=0) / min(
            tier.reached_bytes_per_s for tier in self.machine.tiers
        )

    @property
    def text(self) -> str:
        """The change for people."""
        return replan_text(self)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> JsonObject:
        """The change as plain data; the plan is under "plan"."""
        return {
            "plan": plan_to_data(self.plan),
            "old_topology": self.old.topology,
            "old_mesh": dict(self.old.mesh),
            "old_step_seconds": self.old.estimate.step_seconds,
            "slowdown": self.slowdown,
            "changed": list(self.changed),
            "notes": list(self.notes),
            "survivors": len(self.survivors),
            "moved_bytes_per_device": list(self.moved_bytes_per_device),
            "moved_bytes": sum(self.moved_bytes_per_device),
            "lost_bytes": self.lost_bytes,
            "moving_seconds": self.moving_seconds,
            "parts": [part.to_json() for part in self.parts],
            "text": self.text,
        }


def replan_text(change: Replan) -> str:
    """A change of machine for people."""
    old, new = change.old, change.plan
    moved = np.array(change.moved_bytes_per_device, np.int64)
    lines = [
        f"{new.model}: {old.topology} ({old.mesh}) -> {new.topology} ({new.mesh})",
        (
            f"{seconds_text(old.estimate.step_seconds)} ->"
            f" {seconds_text(new.estimate.step_seconds)} a step, {ratio_text(change.slowdown)} the"
            f" time · {count_text(new.estimate.tokens_per_second)} tokens/s ·"
            f" {bytes_text(new.estimate.device_bytes.peak)} a device"
        ),
        "",
        "What changes",
    ]
    lines += [
        line
        for text in (*(change.changed or ("nothing is decided differently",)), *change.notes)
        for line in wrapped("  - ", text)
    ]
    held = sum(part.bytes for part in change.parts)
    lines += ["", "What moves"]
    lines += wrapped(
        "  - ",
        f"{bytes_text(int(moved.sum()))} in all, at most {bytes_text(int(moved.max(initial=0)))} to"
        f" one device: {seconds_text(change.moving_seconds)} if all of it comes over the slowest"
        " links.",
    )
    lines += wrapped("  - ", _whence(change, held))
    return "\n".join([*lines, *_part_lines(change.parts)]) + "\n"


def _whence(change: Replan, held: int) -> str:
    """Where the bytes of the new machine come from."""
    if change.elsewhere:
        return (
            f"No device of the new machine holds any of {bytes_text(held)}: they come from a"
            " checkpoint, or from the old machine while it is still there."
        )
    lost = change.lost_bytes
    if lost:
        return (
            f"{bytes_text(lost)} ({percent_text(lost / held)} of {bytes_text(held)}) are on no"
            " surviving device and must come from a checkpoint."
        )
    return f"Every one of {bytes_text(held)} is on some surviving device: no checkpoint is needed."


def _part_lines(parts: Sequence[Part]) -> list[str]:
    """The parts that move most, equal ones folded."""

    def pattern(path: str) -> str:
        return ".".join("*" if word.isdigit() else word for word in path.split("."))

    groups: dict[tuple[object, ...], list[Part]] = {}
    for part in parts:
        if part.received_bytes:
            groups.setdefault((pattern(part.path), part.what, part.old, part.new), []).append(part)
    if not groups:
        return []

    def size(group: list[Part]) -> int:
        return sum(part.received_bytes for part in group)

    ranked = sorted(groups.values(), key=lambda group: -size(group))
    rows = [("part", "", "received", "a device", "layout")]
    rows += [
        (
            clip(pattern(group[0].path) if len(group) > 1 else group[0].path, 30),
            group[0].what + (f" x{len(group)}" if len(group) > 1 else ""),
            bytes_text(size(group)),
            bytes_text(sum(part.most_bytes for part in group)),
            str(group[0].old) + (f" -> {group[0].new}" if group[0].new != group[0].old else ""),
        )
        for group in ranked[:_MOST_PARTS]
    ]
    more = len(ranked) - _MOST_PARTS
    return [
        "",
        *aligned(rows, right={2, 3}),
        *([f"  and {more} kinds that receive less"] if more > 0 else []),
    ]
