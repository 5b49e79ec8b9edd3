"""The order of work of each stage of a pipeline, where stages wait for their neighbours alone.

A stage works on a microbatch forward (F) and backward (B); a schedule may make the gradients of
weights (W), which nothing waits for, apart from the rest of the backward pass. With v chunks of
layers a stage, a task belongs to one chunk. The orders themselves are those that were
published, each in the file of its schedule.

>>> [str(task) for task in alternating(plain(FORWARD, 3), plain(BACKWARD, 3), 1)]
['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHTS: "W"}


@dataclass(frozen=True, kw_only=True, order=True)
class Task:
    """Some work of a stage.

    Attributes:
        kind: "forward", "backward" (all of the backward pass, or what the stage before waits for)
            or "weights" (gradients of weights, made apart).
        microbatch: its number.
        chunk: number of the chunk of layers on the stage.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = chr(ord("a") + self.chunk) if self.chunk else ""
        return f"{_LETTERS[self.kind]}{chunk}{self.microbatch}"


#: What a stage does, one after the other.
Order = tuple[Task, ...]


def plain(kind: str, microbatches: int) -> Order:
    """One kind of work on all microbatches, the first one first."""
    return tuple(Task(kind=kind, microbatch=micro) for micro in range(microbatches))


def alternating(forward: Sequence[Task], backward: Sequence[Task], first: int) -> Order:
    """`first` tasks forward, then one forward and one backward in turn, then what is left of the
    backward work.
    """
    tasks = list(forward[:first])
    for ahead, back in zip(forward[first:], backward, strict=False):
        tasks += [ahead, back]
    return (*tasks, *backward[max(0, len(forward) - first) :])
