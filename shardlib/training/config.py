"""What an operator may change about the training of a byte-level transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import optax

from shardlib.checkpointing.keep import Keep
from shardlib.errors import (
    ModelError,
    raise_all,
)
from shardlib.training.measures.judge import Policy
from shardlib.training.run.differences import unknown_names
from shardlib.training.settings import Settings
from shardlib.training.states.average import with_average
from shardlib.untrusted.arguments import SEEDS
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: Steps in a row that may be left out.
SKIPS = 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What an operator may change about a run.

    Attributes:
        data: file or folder of text; None for the Python standard library.
        model: preset, configuration file or model card; its vocabulary has at least 256 tokens, one
            for each byte.
        steps: optimizer steps.
        batch: sequences of the global batch.
        seq: bytes of a sequence.
        lr: peak learning rate; warms up over the first steps and falls to a twentieth along a
            cosine.
        average: decay of a moving average of the parameters, which `shardlib serve --average`
            serves; None keeps none.
        seed: of parameters, batches and the sample.
        topology: what to plan for; "cpu:8" simulates eight devices on this machine. None for the
            CPU devices that the processes of the job were given, or else eight.
        pin: decisions fixed by hand.
        sample_bytes: bytes of text to write at the end; 0 for none.
        run: folder of the run, which keeps checkpoints and metrics and goes on where it was; None
            keeps nothing.
        save_every: steps between checkpoints.
        keep: newest checkpoints that stay.
        hang_seconds: how long a step may take before the process ends as hung; None for any time.
        spike: standard deviations above the last losses that make a spike, after which the run goes
            back to its newest checkpoint; 0 looks for none.
        profile: (first step, number of steps) to record a trace of.
        allow_changes: what may be another than the run was begun with, see `Settings`.
        elastic: where fewer devices are there than `topology` has, plan for those that are.
        json: print one JSON object as the last line of standard output; everything else goes to
            standard error.
        quiet: show nothing but the result.

    Raises:
        ModelError: numbers out of range, all of them listed.
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
        failures = [
            f"{name} is {getattr(self, name)!r}; it must be at least 1"
            for name in ("steps", "batch", "seq", "save_every", "keep")
            if getattr(self, name) < 1
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
        """What is wrong with how the run is kept and watched."""
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
        """How the run is kept, watched and judged."""
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
        """What is trained, in words: what processes of one run have in common. The model and the
        data count by what is in them (`_identity`, `TokenDataset.digest`), not by where they are.
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
    """AdamW with a short warm-up and a cosine; gradients are clipped before (`GUARDS`). With an
    average of the parameters where one is asked for.
    """
    warm_up = min(max(config.steps // 10, 1), 50)
    rate = optax.warmup_cosine_decay_schedule(
        config.lr / 20, config.lr, warm_up, max(config.steps, warm_up + 1), config.lr / 20
    )
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.05)
    return adamw if config.average is None else with_average(adamw, config.average)
