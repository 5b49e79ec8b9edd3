"""A metric that is to fall, or to rise, and the best of it so far."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardlib.errors import ModelError

#: Which values are better.
MODES = ("min", "max")


class Watched:
    """A metric and its best value.

    Attributes:
        metric: its name.
        mode: "min" where less is better, or "max".
        delta: less than this is no improvement.
        best: the best value so far; not a number before the first.
    """

    def __init__(self, metric: str, mode: str = "min", delta: float = 0.0) -> None:
        if mode not in MODES:
            raise ModelError(f"mode is {mode!r}\nTry: one of {', '.join(MODES)}")
        if not delta >= 0:
            raise ModelError(f"delta is {delta!r}; it must not be negative")
        self.metric, self.mode, self.delta, self.best = metric, mode, delta, math.nan

    def seen(self, numbers: Mapping[str, float]) -> bool | None:
        """Whether the metric is better than ever; None where it is not among the numbers."""
        if self.metric not in numbers:
            return None
        value = numbers[self.metric]
        gain = self.best - value if self.mode == "min" else value - self.best
        better = math.isfinite(value) and (math.isnan(self.best) or gain > self.delta)
        if better:
            self.best = value
        return better
