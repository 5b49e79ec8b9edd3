"""The records of a run: its losses, its metrics, a line a step, and its events.

    records.event("spike", step=12, loss=9.1)
    records.losses[12]

Metrics go to `metrics.jsonl` of the folder and to TensorBoard, in the first process; losses and
seconds are known to all.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping

from shardlib.checkpointing.owner import Owner
from shardlib.errors import RunError
from shardlib.processes.ranks import rank
from shardlib.training.measures.metrics import (
    JsonLines,
    Sink,
    TensorBoard,
    by_step,
    number,
    read_lines,
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
        self._sinks: list[Sink] = []
        self._told = False

    def open(
        self, folder: RunFolder, step: int, stack: contextlib.ExitStack, *, tensorboard: bool
    ) -> None:
        """Reads what the folder has of the steps until now, and opens its sinks.

        Args:
            folder: of the run.
            step: steps that are done.
            stack: closes the sinks.
            tensorboard: whether to write event files.

        Raises:
            RunError: the metrics cannot be written.
        """
        lines = read_lines(folder.metrics)
        known = {done: one for done, one in by_step(lines.records).items() if done <= step}
        self.losses = {done: record["loss"] for done, record in known.items()}
        self.seconds = {done: number(record, "seconds") for done, record in known.items()}
        if lines.unread:
            self.say(
                f"{lines.unread} of the lines of {folder.metrics} cannot be read and are passed"
                " over; they stay there"
            )
        if rank():
            return
        try:
            opened: list[Sink] = [JsonLines(folder.metrics)]
            opened += [TensorBoard(folder.tensorboard, after=step)] if tensorboard else []
        except OSError as error:
            raise RunError(
                f"the metrics of the run cannot be written to {folder.path}: {error}\nTry: another"
                " folder, or free some space; nothing was changed"
            ) from error
        self._sinks = [stack.enter_context(contextlib.closing(sink)) for sink in opened]

    def last(self) -> float:
        """The loss of the newest step; not a number where there is none."""
        return self.losses[max(self.losses)] if self.losses else math.nan

    def forget_after(self, step: int) -> None:
        """Takes back the losses of later steps."""
        self.losses = {kept: value for kept, value in self.losses.items() if kept <= step}

    def event(self, event: str, step: int, **more: Json) -> None:
        """Writes down what happened.

        Args:
            event: "saved", "skipped" and the like.
            step: steps done.
            more: plain data of the event.
        """
        self.write({"event": event, "step": step, "time": time.time(), **more})

    def write(self, record: JsonMapping) -> None:
        """Writes a record down; that there is no room for it is said once, and training goes on.
        Only whoever owns the folder writes.

        Raises:
            OwnedError: another process has taken the folder.
        """
        if self._sinks and self.owner is not None:
            self.owner.require()
        for sink in self._sinks:
            try:
                sink.write(record)
            except OSError as error:
                if not self._told:
                    self.say(
                        f"metrics cannot be written: {error.strerror or error}; training goes on"
                    )
                self._told = True


def in_order(by_step: Mapping[int, float]) -> tuple[float, ...]:
    """Values by step, the first step first."""
    return tuple(by_step[step] for step in sorted(by_step))
