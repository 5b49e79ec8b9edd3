"""The batches of a run, one after the other, from whichever step it goes on."""

from __future__ import annotations

from shardlib.annotation.trees.paths import Tree
from shardlib.training.stepping.batches import Stream, opened
from shardlib.training.stepping.task import Task


class Feed:
    """Gives the batch of each step; a stream is opened at the first one that is asked for.

    Args:
        task: what the run is to do.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._open = task, opened(task.data)
        self._stream: Stream | None = None

    def next(self, step: int, offset: int) -> Tree:
        """The batch of a step."""
        if self._stream is None:
            task = self._task
            abstract = (
                task.program.rows
                if len(task.programs) == 1
                else lambda number: task.at(number - offset).rows
            )
            self._stream = self._open(abstract, step + offset)
        number, batch = next(self._stream)
        assert number == step + offset, (
            f"the stream gave the batch of step {number} for that of step {step + offset}"
        )
        return batch

    def close(self) -> None:
        """Ends the stream; the next batch opens another one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
