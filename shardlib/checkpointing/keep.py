"""Checkpoints that stay: the newest, the best, one in so many seconds; whoever has a reason to stay
stays.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp

from shardlib.checkpointing.about import About
from shardlib.errors import CheckpointError, raise_all

_managers = ocp.checkpoint_managers


@dataclass(kw_only=True)
class _Info:
    """What Orbax's policies look at."""

    step: int
    time: datetime.datetime
    metrics: Any


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Reasons to keep a checkpoint; one is enough.

    Attributes:
        newest: how many of the latest; None keeps all.
        best: name of a metric by which the best are kept too.
        best_count: how many of the best.
        best_mode: "min" where less is better, or "max".
        every_seconds: the first one is kept, and each that is so much later than the last one kept;
            None for no such rule.

    Raises:
        CheckpointError: numbers out of range, all of them listed.
    """

    newest: int | None = 3
    best: str | None = None
    best_count: int = 1
    best_mode: str = "min"
    every_seconds: float | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value!r}; it must be at least 1"
            for name, value in (("newest", self.newest), ("best_count", self.best_count))
            if value is not None and value < 1
        ]
        wrong += [f"every_seconds is {self.every_seconds!r}; it must be positive"] * (
            self.every_seconds is not None and self.every_seconds <= 0
        )
        wrong += [f"best_mode is {self.best_mode!r}; known are min, max"] * (
            self.best_mode not in ("min", "max")
        )
        if wrong:
            raise_all(CheckpointError, "no checkpoints can be kept like this", wrong)

    def superfluous(self, checkpoints: Sequence[About]) -> list[int]:
        """Steps of the checkpoints that have no reason to stay; never the latest."""
        ordered = sorted(checkpoints, key=lambda about: about.step)
        infos = [
            _Info(
                step=about.step,
                time=datetime.datetime.fromtimestamp(about.time, datetime.UTC),
                metrics=self._metric(about),
            )
            for about in ordered
        ]
        stays = (
            _managers.AnyPreservationPolicy(self._policies()).should_preserve(
                infos, context=_managers.PreservationContext()
            )
            if infos
            else []
        )
        return [
            about.step for about, reason in zip(ordered[:-1], stays[:-1], strict=True) if not reason
        ]

    def _policies(self) -> list[_managers.PreservationPolicy]:
        policies: list[_managers.PreservationPolicy] = [_managers.LatestN(self.newest)]
        if self.best:
            policies.append(
                _managers.BestN(
                    get_metric_fn=lambda metric: metric,
                    reverse=self.best_mode == "min",
                    n=self.best_count,
                    keep_checkpoints_without_metrics=False,
                )
            )
        if self.every_seconds:
            seconds: Any = self.every_seconds  # a float, too
            policies.append(_managers.EveryNSeconds(seconds))
        return policies

    def _metric(self, about: About) -> float | None:
        """The number to compare; None where there is none, or none that can be compared."""
        value = about.metrics.get(self.best) if self.best else None
        return value if value is not None and math.isfinite(value) else None
