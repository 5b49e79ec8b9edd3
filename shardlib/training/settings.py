"""Settings of a run: how it is kept, watched and judged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from shardlib.checkpointing.keep import Keep
from shardlib.errors import ModelError, raise_all
from shardlib.training.callbacks import BestCheckpoint, Callback
from shardlib.training.loggers import Logger, TensorBoard
from shardlib.training.measures.judge import Policy
from shardlib.training.validation import Validation


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
        validation: what is validated on the way; None for nothing.
        callbacks: called before the first step, after every step and validation, and at the end.
        loggers: where numbers and events go, beside `metrics.jsonl` in the folder; by default event
            files for TensorBoard in the folder.

    Raises:
        ModelError: numbers out of range, all of them listed.
    """

    run: str | Path | None = None
    save_every: int = 50
    save_seconds: float | None = None
    keep: Keep = field(default_factory=Keep)
    policy: Policy = field(default_factory=Policy)
    hang_seconds: float | None = None
    profile: tuple[int, int] | None = None
    allow_changes: tuple[str, ...] = ()
    doctor_seconds: float | None = 60.0
    validation: Validation | None = None
    callbacks: tuple[Callback, ...] = ()
    loggers: tuple[Logger, ...] = (TensorBoard(),)

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
        failures += [
            f"{name} is {value!r}; it must be a tuple of {name}"
            for name, value in (("callbacks", self.callbacks), ("loggers", self.loggers))
            if not isinstance(value, tuple)
        ]
        failures += self._best()
        if failures:
            raise_all(ModelError, "the settings of the run are not usable", failures)

    @property
    def kept(self) -> Keep:
        """Which checkpoints stay: `keep`, and what a `BestCheckpoint` keeps."""
        best = self._bests()
        if not best:
            return self.keep
        return replace(
            self.keep, best=best[0].metric, best_mode=best[0].mode, best_count=best[0].count
        )

    def _bests(self) -> list[BestCheckpoint]:
        return [one for one in self.callbacks if isinstance(one, BestCheckpoint)]

    def _best(self) -> list[str]:
        """What is wrong with a best checkpoint."""
        best = self._bests()
        if len(best) > 1 or (best and self.keep.best is not None):
            return ["there is more than one best checkpoint: `BestCheckpoint`, `Keep(best=...)`"]
        if best and self.run is None:
            return ["a best checkpoint needs a folder to be kept in: run"]
        return []
