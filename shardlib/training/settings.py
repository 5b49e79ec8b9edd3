"""Settings of a run: how it is kept, watched and judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardlib.checkpointing.keep import Keep
from shardlib.errors import ModelError, raise_all
from shardlib.training.measures.judge import Policy


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is kept, watched and judged; none of it changes what is computed, except after a
    bad loss.

    Attributes:
        run: folder of the run; None keeps nothing.
        save_every: steps between checkpoints.
        save_seconds: seconds between checkpoints, beside that; None for no such rule.
        keep: which checkpoints stay.
        policy: what follows a bad loss.
        hang_seconds: how long a step may take before the process is ended as hung; None for any
            time.
        tensorboard: whether to write event files.
        profile: (first step, number of steps) to record a trace of; None for none.
        allow_changes: what may be another than the run in the folder was begun with: "loss",
            "optimizer", "lr" (the numbers of the optimizer), "data", "seed", "model", "batch",
            "exchange" (how islands meet), or a word of `identity`. A difference that is not named
            is an error; one that is, is said and written down in the folder. An optimizer whose
            state has other arrays starts anew. "identity" goes on from checkpoints in a folder
            whose `run.json` is gone.
        doctor_seconds: that several processes may take to look at their hosts before the first step
            (`shardlib.doctor`); what is wrong is an error that names the host. None looks at
            nothing.

    Raises:
        ModelError: numbers out of range, all of them listed.
    """

    run: str | Path | None = None
    save_every: int = 50
    save_seconds: float | None = None
    keep: Keep = field(default_factory=Keep)
    policy: Policy = field(default_factory=Policy)
    hang_seconds: float | None = None
    tensorboard: bool = True
    profile: tuple[int, int] | None = None
    allow_changes: tuple[str, ...] = ()
    doctor_seconds: float | None = 60.0

    def __post_init__(self) -> None:
        failures = (
            [f"save_every is {self.save_every}; it must be at least 1"]
            if self.save_every < 1
            else []
        )
        failures += [
            f"{name} is {value}; it must be positive"
            for name, value in (
                ("save_seconds", self.save_seconds),
                ("hang_seconds", self.hang_seconds),
                ("doctor_seconds", self.doctor_seconds),
            )
            if value is not None and not value > 0
        ]
        if self.profile is not None and min(self.profile) < 1:
            failures.append(
                f"profile is {self.profile}; the first step and the number of steps are at least 1"
            )
        if isinstance(self.allow_changes, str):
            failures.append(f"allow_changes is {self.allow_changes!r}; it must be a tuple of names")
        if failures:
            raise_all(ModelError, "the settings of the run are not usable", failures)
