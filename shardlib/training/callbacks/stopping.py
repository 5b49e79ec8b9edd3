"""The end of a run whose metric no longer improves."""

from __future__ import annotations

import math

from shardlib.errors import ModelError
from shardlib.training.callbacks.moment import Moment
from shardlib.training.callbacks.watched import Watched
from shardlib.untrusted.json_types import JsonMapping


class EarlyStop:
    """Stops a run once a metric has not improved for some time. What it has seen is a part of
    checkpoints, and a run that it has ended stays ended, unless `patience` is larger.

    Args:
        metric: name of a number of a validation, "validation/loss", or of a step, "loss".
        patience: times that the metric may be seen without an improvement.
        mode: "min" where less is better, or "max".
        delta: less than this is no improvement.

    Raises:
        ModelError: arguments out of range.
    """

    def __init__(
        self,
        metric: str = "validation/loss",
        *,
        patience: int = 3,
        mode: str = "min",
        delta: float = 0.0,
    ) -> None:
        if patience < 1:
            raise ModelError(f"patience is {patience!r}; it must be at least 1")
        self.patience, self._watched, self._waited = patience, Watched(metric, mode, delta), 0

    def __call__(self, moment: Moment, /) -> None:
        """Counts, and asks for the end where it is time."""
        better = self._watched.seen(moment.numbers)
        if better is None and moment.event != "begin":
            return
        if better is not None:
            self._waited = 0 if better else self._waited + 1
        if self._waited >= self.patience:
            moment.stop(
                f"{self._watched.metric} has not improved on {self._watched.best:.6g} for"
                f" {self._waited} times"
            )

    def memory(self) -> JsonMapping:
        """The best value so far, and how often there was none."""
        best = self._watched.best
        return {"best": None if math.isnan(best) else best, "waited": self._waited}

    def remember(self, memory: JsonMapping, /) -> None:
        """Goes on from there."""
        best = memory.get("best")
        self._watched.best = math.nan if best is None else float(best)
        self._waited = int(memory.get("waited", 0))
