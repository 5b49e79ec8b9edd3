"""Settings of a run: storage, supervision, and judgement of losses."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optax

from shardlib.checkpointing.store import Keep
from shardlib.compact import plain_fields
from shardlib.errors import ModelError, SettingsError, raise_all
from shardlib.planner.plan import Plan, plan_to_data
from shardlib.training.callbacks import BestCheckpoint, Callback
from shardlib.training.loggers import Logger, TensorBoard
from shardlib.training.measures import Policy
from shardlib.training.run import unknown_names
from shardlib.training.states import with_average
from shardlib.training.validation import Validation
from shardlib.untrusted.data import (
    SEEDS,
    JsonMapping,
    JsonObject,
    Kind,
    is_count,
    is_positive,
    require_kinds,
    require_types,
)


def _is_folder(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and str(value) != "" and "\0" not in str(value)


def _are_callables(value: Any) -> bool:
    return isinstance(value, tuple) and all(callable(item) for item in value)


def _is_logger(value: Any) -> bool:
    return hasattr(value, "open") and not isinstance(value, type)


_SECONDS = "a finite number of seconds above 0"
#: Expected kinds of the values of `Settings`.
_KINDS: Mapping[str, Kind] = {
    "run": (_is_folder, "the path of a folder", 'run="runs/first", or None'),
    "save_every": (is_count, "an integer of at least 1", "save_every=50"),
    "save_seconds": (is_positive, _SECONDS, "save_seconds=600.0, or None"),
    "keep": (
        lambda value: isinstance(value, Keep),
        "rules for keeping checkpoints",
        "keep=shardlib.checkpointing.store.Keep(newest=3)",
    ),
    "policy": (
        lambda value: isinstance(value, Policy),
        "a policy for bad losses",
        'policy=shardlib.training.measures.Policy(action="roll-back")',
    ),
    "hang_seconds": (is_positive, _SECONDS, "hang_seconds=600.0, or None"),
    "profile": (
        lambda value: (
            isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_count, value))
        ),
        "the first step and the number of steps, integers of at least 1",
        "profile=(10, 3), or None",
    ),
    "allow_changes": (
        lambda value: (
            isinstance(value, Collection)
            and not isinstance(value, str)
            and all(isinstance(item, str) for item in value)
        ),
        "a tuple of names",
        'allow_changes=("lr",)',
    ),
    "doctor_seconds": (is_positive, _SECONDS, "doctor_seconds=60.0, or None"),
    "validation": (
        lambda value: isinstance(value, Validation),
        "a validation",
        "validation=shardlib.training.validation.Validation(data=held_out), or None",
    ),
    "callbacks": (_are_callables, "a tuple of callbacks", "callbacks=(function,)"),
    "loggers": (
        lambda value: isinstance(value, tuple) and all(map(_is_logger, value)),
        "a tuple of loggers",
        "loggers=(shardlib.training.loggers.TensorBoard(),)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run: storage, supervision and judgement of losses; none of them changes what is
    computed, except after a bad loss.

    Attributes:
        run: folder of the run; None stores nothing.
        save_every: steps between checkpoints.
        save_seconds: maximum seconds between checkpoints, in addition; None for no such rule.
        keep: checkpoints to keep.
        policy: response to a bad loss.
        hang_seconds: maximum duration of a step, after which the process is ended as hung; None for
            no limit.
        profile: (first step, number of steps) to record a trace of; None for none.
        allow_changes: accepted differences from the run in the folder: "loss", "optimizer", "lr"
            (the constants of the optimizer), "data", "seed", "model", "batch", "exchange" (the
            outer step of islands), or a key of `identity`. Any other difference is an error; an
            accepted one is shown and recorded in the folder. An optimizer whose state has other
            arrays starts anew. "identity" resumes from checkpoints in a folder whose `run.json` is
            missing.
        doctor_seconds: time limit for the examination of hosts before the first step, in runs of
            several processes (`shardlib.launch.doctor`); a fault is an error that names the host.
            None for no examination.
        validation: validation during the run; None for none.
        callbacks: called before the first step, after every step and validation, and at the end.
        loggers: destinations of numbers and events, in addition to `metrics.jsonl` in the folder;
            by default event files for TensorBoard in the folder.

    Raises:
        SettingsError: values of another kind or out of range, all of them listed.
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
        require_kinds(
            "Settings",
            _KINDS,
            vars(self),
            needed=("save_every", "keep", "policy", "allow_changes", "callbacks", "loggers"),
            error=SettingsError,
            more=self._best(),
        )

    @property
    def kept(self) -> Keep:
        """The checkpoints to keep: `keep`, and those of a `BestCheckpoint`."""
        best = self._bests()
        if not best:
            return self.keep
        return replace(
            self.keep, best=best[0].metric, best_mode=best[0].mode, best_count=best[0].count
        )

    def _bests(self) -> list[BestCheckpoint]:
        callbacks = self.callbacks if _are_callables(self.callbacks) else ()
        return [callback for callback in callbacks if isinstance(callback, BestCheckpoint)]

    def _best(self) -> list[str]:
        """The errors in a best checkpoint."""
        best = self._bests()
        if len(best) > 1 or (best and getattr(self.keep, "best", None) is not None):
            return ["there is more than one best checkpoint: `BestCheckpoint`, `Keep(best=...)`"]
        if best and self.run is None:
            return ["a best checkpoint needs a folder to be kept in: run"]
        return []


# --------------------------------------------------------------------------------------------------
# Settings for the training of a byte-level transformer on the command line.

#: Maximum number of consecutive skipped steps.
SKIPS = 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Command-line settings of a run.

    Attributes:
        data: file or folder of text; None for the Python standard library.
        model: preset, configuration file or model card; its vocabulary has at least 256 tokens, one
            for each byte.
        steps: optimizer steps.
        batch: sequences per global batch.
        seq: bytes per sequence.
        lr: peak learning rate; warms up over the first steps and decays along a cosine to a
            twentieth.
        average: decay of a moving average of the parameters, which `shardlib serve --average`
            serves; None for none.
        seed: of parameters, batches and the sample.
        topology: machine to plan for; "cpu:8" simulates eight devices on this machine. None for the
            CPU devices given to the processes of the job, or else eight.
        pin: decisions fixed by hand.
        sample_bytes: bytes of text to generate at the end; 0 for none.
        run: folder of the run, with checkpoints and metrics, from which it resumes; None stores
            nothing.
        save_every: steps between checkpoints.
        keep: number of newest checkpoints to keep.
        hang_seconds: maximum duration of a step, after which the process ends as hung; None for no
            limit.
        spike: standard deviations above the last losses that make a spike, after which the run
            rolls back to its newest checkpoint; 0 for no detection.
        profile: (first step, number of steps) to record a trace of.
        allow_changes: accepted differences from the stored run, see `Settings`.
        elastic: whether to plan for the available devices if there are fewer than in `topology`.
        json: print one JSON object as the last line of standard output; everything else goes to
            standard error.
        quiet: show only the result.

    Raises:
        ModelError: values of another kind or out of range, all of them listed.
    """

    data: str | Path | None = None
    model: str = "demo"
    steps: int = 400
    batch: int = 16
    seq: int = 128
    lr: float = 4e-3
    average: float | None = None
    seed: int = 0
    topology: str | None = None
    pin: JsonMapping | None = None
    sample_bytes: int = 300
    run: str | Path | None = None
    save_every: int = 50
    keep: int = 3
    hang_seconds: float | None = None
    spike: float = 20.0
    profile: tuple[int, int] | None = None
    allow_changes: tuple[str, ...] = ()
    elastic: bool = False
    json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        require_types(self, "shardlib.training.settings.TrainConfig", SettingsError)
        failures = [
            f"{name} is {getattr(self, name)!r}; it must be at least 1"
            for name in ("steps", "batch", "seq", "save_every", "keep")
            if getattr(self, name) < 1
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it must be below {SEEDS}"
            for name in ("steps", "batch", "seq")
            if getattr(self, name) >= SEEDS
        ]
        if not (math.isfinite(self.lr) and self.lr > 0):
            failures.append(f"lr is {self.lr!r}; it must be positive")
        failures += [
            f"{name} is {getattr(self, name)!r}; it must not be negative"
            for name in ("seed", "sample_bytes", "spike")
            if not getattr(self, name) >= 0
        ]
        failures += (
            [f"seed is {self.seed!r}; it must be below {SEEDS}"] if self.seed >= SEEDS else []
        )
        if self.average is not None and not 0 <= self.average < 1:
            failures.append(f"average is {self.average!r}; it must be at least 0 and below 1")
        failures += self._of_the_run()
        if failures:
            raise_all(ModelError, "the training run is not usable", failures)

    def _of_the_run(self) -> list[str]:
        """The errors in the storage and supervision of the run."""
        failures: list[str] = []
        if self.hang_seconds is not None and not self.hang_seconds > 0:
            failures.append(f"hang_seconds is {self.hang_seconds!r}; it must be positive")
        if self.profile is not None and min(self.profile) < 1:
            failures.append(
                f"profile is {self.profile}; the first step and the number of steps are at least 1"
            )
        if self.run is None and self.profile is not None:
            failures.append("profile needs a folder to write to: run")
        if self.run is None and self.allow_changes:
            failures.append("allow_changes needs the folder of a run that was begun: run")
        if isinstance(self.allow_changes, str):
            return [*failures, f"allow_changes is {self.allow_changes!r}; it is a tuple of names"]
        return failures + unknown_names(self.allow_changes, {"model": "", **self.identity})

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return Settings(
            run=self.run,
            save_every=self.save_every,
            keep=Keep(newest=self.keep),
            policy=Policy(spike=self.spike, skips=SKIPS),
            hang_seconds=self.hang_seconds,
            profile=self.profile,
            allow_changes=self.allow_changes,
        )

    @property
    def identity(self) -> JsonObject:
        """The training task as plain data, which all processes of one run share. The model and the
        data are identified by content (`_identity`, `TokenDataset.digest`), not by path.
        """
        return {
            "steps": self.steps,
            "batch": self.batch,
            "seq": self.seq,
            "lr": self.lr,
            "seed": self.seed,
            **({} if self.average is None else {"average": self.average}),
        }


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with a short warm-up and cosine decay, after gradient clipping (`GUARDS`), with an
    average of the parameters if requested.
    """
    warm_up = min(max(config.steps // 10, 1), 50)
    rate = optax.warmup_cosine_decay_schedule(
        config.lr / 20, config.lr, warm_up, max(config.steps, warm_up + 1), config.lr / 20
    )
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.05)
    return adamw if config.average is None else with_average(adamw, config.average)


# --------------------------------------------------------------------------------------------------
# The result of a training run.


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One column of the final table.

    Attributes:
        step_seconds: seconds per step; measured, the median after the first steps.
        tokens_per_second: tokens of the global batch over `step_seconds`.
        device_bytes: peak bytes per device.
    """

    step_seconds: float
    tokens_per_second: float
    device_bytes: int

    def to_json(self) -> dict[str, float | int]:
        """The figures as plain data."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run.

    Attributes:
        validation_loss: cross entropy on held-out text, nats per token.
        bigram_loss: that of a byte bigram model on the same predictions.
        predicted, measured: figures of the plan and of the run.
        parameters: number of trained parameters.
        losses: training loss of every step.
        sample: text that the trained model generated, after its prompt.
        seconds: wall time of the whole run, compilation included.
        busy: fraction of processor time used by other programs during the steps; None if unknown.
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
        """Measured tokens per second."""
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
