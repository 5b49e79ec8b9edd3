"""What a training run found."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.planning.plan import Plan, plan_to_data
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One column of the final table.

    Attributes:
        step_seconds: seconds of a step; measured, the median after the first steps.
        tokens_per_second: tokens of the global batch over `step_seconds`.
        device_bytes: peak bytes on one device.
    """

    step_seconds: float
    tokens_per_second: float
    device_bytes: int

    def to_json(self) -> dict[str, float | int]:
        """The figures as plain data."""
        return {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "device_bytes": self.device_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run.

    Attributes:
        validation_loss: cross entropy on held-out text, nats a token.
        bigram_loss: that of a byte bigram model on the same predictions.
        predicted: what the plan said.
        measured: what the run took.
        plan: the plan that was carried out.
        steps: steps done.
        parameters: trained parameters of the model.
        losses: training loss of every step.
        sample: text that the trained model wrote, after its prompt.
        seconds: wall time of the whole run, compilation included.
        busy: share of the processors that other programs used during the steps; None where it is
            not known.
    """

    validation_loss: float
    bigram_loss: float
    predicted: Figures
    measured: Figures
    plan: Plan
    steps: int
    parameters: int
    losses: tuple[float, ...]
    sample: str
    seconds: float
    busy: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Measured tokens a second."""
        return self.measured.tokens_per_second

    def to_json(self) -> JsonObject:
        """The result as plain data."""
        return {
            "validation_loss": self.validation_loss,
            "bigram_loss": self.bigram_loss,
            "tokens_per_second": self.tokens_per_second,
            "predicted": self.predicted.to_json(),
            "measured": self.measured.to_json(),
            "steps": self.steps,
            "parameters": self.parameters,
            "training_loss": self.losses[-1] if self.losses else None,
            "seconds": self.seconds,
            "others_busy": self.busy,
            "sample": self.sample,
            "plan": plan_to_data(self.plan),
        }
