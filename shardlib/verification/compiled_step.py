"""What a compiler made of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.collective import Collective
from shardlib.untrusted.json_types import JsonObject
from shardlib.verification.hlo.overlap import Scheduled


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What a compiler made of a training step.

    Attributes:
        device_bytes: bytes per device: "arguments", "outputs", "aliased", "temporaries", "peak".
        collectives: every collective of a step, the most bytes first; their seconds are what the
            cost model gives them.
        wire_bytes: bytes that a device sends in a step, by ring algorithms.
        compute_seconds: the compiler's own estimate of the time of a step's kernels; 0 where it
            gives none (GPU and CPU).
        device_kind: what the compiler calls the device.
        unread: what of the program could not be read, one line each.
        reductions: (kind, axes, dtype, bytes of the results of a step) of every kind of reduction.
        scheduled: the collectives as they stand in the schedule, with the matmuls that they hide
            behind; absent from JSON.
        meeting: what it made of the meeting of islands; None where there is one island.
    """

    device_bytes: Mapping[str, int]
    collectives: tuple[Collective, ...]
    wire_bytes: float
    compute_seconds: float
    device_kind: str
    unread: tuple[str, ...] = ()
    reductions: tuple[tuple[str, tuple[str, ...], str, int], ...] = ()
    scheduled: tuple[Scheduled, ...] = ()
    meeting: CompiledStep | None = None

    def to_json(self) -> JsonObject:
        """The step as plain data."""
        return {
            "device_bytes": dict(self.device_bytes),
            "wire_bytes": self.wire_bytes,
            "compute_seconds": self.compute_seconds,
            "device_kind": self.device_kind,
            "unread": list(self.unread),
            "reductions": [
                [kind, list(axes), dtype, size] for kind, axes, dtype, size in self.reductions
            ],
            "collectives": [
                {
                    "kind": c.kind,
                    "axes": list(c.axes),
                    "count": c.count,
                    "bytes": c.bytes,
                    "cause": c.cause,
                }
                for c in self.collectives
            ],
            **({"meeting": self.meeting.to_json()} if self.meeting else {}),
        }
