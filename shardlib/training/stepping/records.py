"""The records of a run: its losses, its metrics, a line a step, and its events.

    records.event("spike", step=12, loss=9.1)
    records.losses[12]

Metrics go to `metrics.jsonl` of the folder and to loggers, in the first process; losses and
seconds are known to all.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

from shardlib.checkpointing.owner import Owner
from shardlib.errors import RunError
from shardlib.processes.ranks import rank
from shardlib.training.loggers import LoggedRun, Logger
from shardlib.training.measures.metrics import (
    JsonLines,
    Sink,
    by_step,
    number,
    read_lines,
    validations,
)
from shardlib.training.run.folder import RunFolder
from shardlib.untrusted.json_types import Json, JsonMapping


class Records:
    """Losses, seconds, metrics and events; what is written goes to the sinks that are open.

    Args:
        say: where to say that something cannot be read or written.
        owner: the right to write to the folder, where this process has it.
    """

    def __init__(self, say: Callable[[str], None], owner: Owner | None) -> None:
        self.say, self.owner = say, owner
        self.losses: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.validations: dict[int, dict[str, float]] = {}
        self._sinks: list[Sink] = []
        self._told = False

    def open(
        self,
        folder: RunFolder | None,
        step: int,
        stack: contextlib.ExitStack,
        loggers: Sequence[Logger],
        words: JsonMapping,
    ) -> None:
        """Reads what the folder has of the steps until now, and opens sinks.

        Args:
            folder: of the run; None where nothing is kept.
        """
        if folder is not None:
            self._read(folder, step)
        if rank():
            return
        run = LoggedRun(folder=None if folder is None else folder.path, step=step, words=words)
        try:
            if folder is not None:
                lines = JsonLines(folder.metrics, own=True)
                self._sinks.append(stack.enter_context(contextlib.closing(lines)))
            for logger in loggers:
                sink = logger.open(run)
                if sink is not None:
                    self._sinks.append(stack.enter_context(contextlib.closing(sink)))
        except OSError as error:
            raise RunError(
                f"the metrics of the run cannot be written to {run.place('')}: {error}\nTry:"
                " another folder, or free some space; nothing was changed"
            ) from error

    def _read(self, folder: RunFolder, step: int) -> None:
        """What the folder has of the steps until now."""
        lines = read_lines(folder.metrics)
        known = {done: one for done, one in by_step(lines.records).items() if done <= step}
        self.losses = {done: record["loss"] for done, record in known.items()}
        self.seconds = {done: number(record, "seconds") for done, record in known.items()}
        self.validations = {
            done: one for done, one in validations(lines.records).items() if done <= step
        }
        if lines.unread:
            self.say(
                f"{lines.unread} of the lines of {folder.metrics} cannot be read and are passed"
                " over; they stay there"
            )

    def last(self) -> float:
        """The loss of the newest step; not a number where there is none."""
        return self.losses[max(self.losses)] if self.losses else math.nan

    def forget_after(self, step: int) -> None:
        """Takes back the losses of later steps."""
        self.losses = {kept: value for kept, value in self.losses.items() if kept <= step}
        self.validations = {kept: one for kept, one in self.validations.items() if kept <= step}

    def event(self, event: str, step: int, **more: Json) -> None:
        """Writes down what happened."""
        self.write({"event": event, "step": step, "time": time.time(), **more})

    def skipped(self, step: int, share: float) -> None:
        """Writes down, and says, that a step was left out."""
        self.event("skipped", step)
        where = " on some islands" if share < 1 else ""
        self.say(
            f"step {step} was left out{where}: its gradients were not finite, or its loss was a"
            " spike"
        )

    def write(self, record: JsonMapping) -> None:
        """Writes a record down; that there is no room for it is said once, and training goes on.
        Only whoever owns the folder writes.
        """
        if self._sinks and self.owner is not None:
            self.owner.require()
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # whatever a logger raises
                if not self._told:
                    why = error.strerror if isinstance(error, OSError) else None
                    self.say(f"metrics cannot be written: {why or error}; training goes on")
                self._told = True


def in_order(by_step: Mapping[int, float]) -> tuple[float, ...]:
    """Values by step, the first step first."""
    return tuple(by_step[step] for step in sorted(by_step))
