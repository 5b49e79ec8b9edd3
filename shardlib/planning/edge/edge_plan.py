"""A model over a chain of unlike devices: what each does, and how fast they are together."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardlib.planning.units.quantity import bytes_text, count_text, percent_text, seconds_text
from shardlib.planning.units.tables import aligned
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class EdgeStage:
    """What one device does.

    Attributes:
        device: its name.
        first, last: numbers of its first and last piece.
        pieces: the same in words.
        seconds: of a batch on it.
        received_bytes, receive_seconds: what comes from the device before it, and how long that
            takes; 0 for the first.
        bytes: memory that it needs: weights, values, and what comes in and goes out.
        capacity_bytes: memory that it has.
    """

    device: str
    first: int
    last: int
    pieces: str
    seconds: float
    received_bytes: float
    receive_seconds: float
    bytes: float
    capacity_bytes: float


@dataclass(frozen=True, kw_only=True)
class EdgePlan:
    """A model over a chain of unlike devices.

    Attributes:
        model: its name.
        stages: what each device does, in order.
        examples: in a batch.
        idle: (device, count) of those that take no part.
        single_seconds: of a batch on the fastest device that holds the whole model; None where none
            does.
    """

    model: str
    stages: tuple[EdgeStage, ...]
    examples: int
    idle: tuple[tuple[str, int], ...] = ()
    single_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds between two batches: of the slowest device or message."""
        return max(max(stage.seconds, stage.receive_seconds) for stage in self.stages)

    @property
    def latency(self) -> float:
        """Seconds of one batch from end to end."""
        return sum(stage.seconds + stage.receive_seconds for stage in self.stages)

    @property
    def throughput(self) -> float:
        """Examples a second."""
        return self.examples / self.seconds

    @property
    def bottleneck(self) -> str:
        """What takes the longest, in words."""
        number = max(
            range(len(self.stages)),
            key=lambda k: max(self.stages[k].seconds, self.stages[k].receive_seconds),
        )
        stage = self.stages[number]
        return (
            f"the message from stage {number - 1} to stage {number}"
            if stage.receive_seconds > stage.seconds
            else f"stage {number} on {stage.device}"
        )

    def explain(self) -> str:
        """The plan as text for people."""
        rows = [["stage", "device", "pieces", "a batch", "busy", "received in", "memory", "of"]]
        rows += [
            [
                str(k),
                stage.device,
                stage.pieces,
                seconds_text(stage.seconds),
                percent_text(stage.seconds / self.seconds),
                seconds_text(stage.receive_seconds) if k else "",
                bytes_text(stage.bytes),
                bytes_text(stage.capacity_bytes),
            ]
            for k, stage in enumerate(self.stages)
        ]
        lines = [
            (
                f"{self.model} on {len(self.stages)} device{'s' * (len(self.stages) > 1)}:"
                f" {count_text(self.throughput)} examples/s, a batch of {self.examples} every"
                f" {seconds_text(self.seconds)}, {seconds_text(self.latency)} from end to end"
            ),
            "",
            *aligned(rows, right={3, 4, 5, 6, 7}),
            "",
            f"{self.bottleneck.capitalize()} is the slowest.",
        ]
        if self.single_seconds is not None:
            lines.append(
                f"The best device alone takes {seconds_text(self.single_seconds)} a batch:"
                f" {self.single_seconds / self.seconds:.2f}x the throughput of that."
            )
        if self.idle:
            lines.append(
                f"Without a part: {', '.join(f'{count} {name}' for name, count in self.idle)}."
            )
        return "\n".join(lines) + "\n"

    def to_json(self) -> JsonObject:
        """The plan as plain data."""
        return {
            "model": self.model,
            "examples": self.examples,
            "seconds": self.seconds,
            "latency": self.latency,
            "throughput": self.throughput,
            "bottleneck": self.bottleneck,
            "single_seconds": self.single_seconds,
            "stages": [asdict(stage) for stage in self.stages],
            "idle": dict(self.idle),
        }
