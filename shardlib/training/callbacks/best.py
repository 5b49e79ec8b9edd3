"""The checkpoint with the best metric."""

from __future__ import annotations

import math

from shardlib.training.callbacks.moment import Moment
from shardlib.training.callbacks.watched import Watched
from shardlib.untrusted.json_types import JsonMapping


class BestCheckpoint:
    """Saves the state whenever a metric of a validation is better than ever, and keeps the best of
    these checkpoints beside those that `Settings.keep` keeps.

    Args:
        metric: name of a number of a validation.
        mode: "min" where less is better, or "max".
        count: how many of the best stay.

    Raises:
        ModelError: arguments out of range.

    Attributes:
        metric, mode, count: as they were given.
    """

    def __init__(
        self, metric: str = "validation/loss", *, mode: str = "min", count: int = 1
    ) -> None:
        self.metric, self.mode, self.count = metric, mode, count
        self._watched = Watched(metric, mode)

    def __call__(self, moment: Moment, /) -> None:
        """Asks for a save where the metric is better than ever."""
        if moment.event == "validation" and self._watched.seen(moment.numbers):
            moment.save()

    def memory(self) -> JsonMapping:
        """The best value so far."""
        best = self._watched.best
        return {"best": None if math.isnan(best) else best}

    def remember(self, memory: JsonMapping, /) -> None:
        """Goes on from there."""
        best = memory.get("best")
        self._watched.best = math.nan if best is None else float(best)
