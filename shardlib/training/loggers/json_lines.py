"""Lines of JSON in a file of one's own; a run with a folder has `metrics.jsonl` anyway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardlib.training.loggers.logger import LoggedRun
from shardlib.training.measures.metrics import JsonLines as Lines
from shardlib.training.measures.metrics import Sink


@dataclass(frozen=True)
class JsonLines:
    """A line of JSON for every step, validation and event.

    Attributes:
        path: of the file, which is added to.
    """

    path: str | Path

    def open(self, run: LoggedRun, /) -> Sink:
        """Opens the file."""
        return Lines(Path(self.path))
