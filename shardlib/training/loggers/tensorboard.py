"""Event files for TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardlib.training.loggers.logger import LoggedRun
from shardlib.training.measures.metrics import EventFiles, Sink


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Numbers as scalars and events as text, for TensorBoard.

    Attributes:
        folder: of event files; by default `tensorboard/` in the folder of the run. A run without a
            folder has none then.
    """

    folder: str | Path | None = None

    def open(self, run: LoggedRun, /) -> Sink | None:
        """Opens event files; those of later steps are hidden."""
        if self.folder is None and run.folder is None:
            return None
        folder = Path(self.folder) if self.folder is not None else run.place("tensorboard")
        return EventFiles(folder, after=run.step)
