"""Event files for TensorBoard."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from shardlib.errors import ShardlibError
from shardlib.planning.plan import Plan
from shardlib.training.loggers.logger import LoggedRun
from shardlib.training.measures.metrics import EventFiles, Sink
from shardlib.untrusted import read_regular

#: Where a run keeps its plan (`shardlib.training.run.folder`).
_PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Numbers as scalars, events and the plan of the run as text, for TensorBoard.

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
        sink = EventFiles(folder, after=run.step)
        if text := _plan_text(run):
            sink.page("plan", text, run.step)
        return sink


def _plan_text(run: LoggedRun) -> str:
    """The plan of a run as Markdown; empty where it has none that can be read."""
    if run.folder is None:
        return ""
    with contextlib.suppress(OSError, ShardlibError):
        plan = Plan.from_json(read_regular(run.folder / _PLAN))
        # Lines that are indented are shown as they are, whatever is in them.
        return "\n".join(f"    {line}" for line in plan.explain().splitlines())
    return ""
