"""One communication step between devices, predicted or found in compiled code: the same type.

>>> step = Collective(kind="all-gather", axes=("fsdp",), bytes=1 << 20, count=32, cause="mlp")
>>> step.total_bytes
33554432
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.layout import MESH_AXES

#: What XLA calls the collectives that shardlib plans and reads.
KINDS: tuple[str, ...] = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective over a group of devices.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes that the group spans, in the order of `MESH_AXES`.
        bytes: bytes that a device holds of the result: the gathered array, the reduced array, the
            shard, the message.
        count: executions in one training step; of a meeting of islands, in one meeting.
        every: steps from one meeting of islands to the next, for what belongs to meetings; 0 for
            what belongs to every step.
        seconds: predicted time of these executions, whether hidden behind compute or not; 0 when
            not predicted.
        cause: the parameter or operation that needs it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int = 1
    seconds: float = 0.0
    cause: str = ""
    every: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert all(axis in MESH_AXES for axis in self.axes), self.axes
        assert self.bytes >= 0 and self.count >= 0, (self.bytes, self.count)
        assert self.every >= 0, self.every

    @property
    def total_bytes(self) -> int:
        """Bytes of all executions in one step, or in one meeting."""
        return self.bytes * self.count

    def to_json(self) -> dict[str, object]:
        """The collective as plain data."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "bytes": self.bytes,
            "count": self.count,
            "seconds": self.seconds,
            "cause": self.cause,
            **({"every": self.every} if self.every else {}),
        }
