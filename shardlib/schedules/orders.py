"""In which order does each stage of a pipeline do its work, where stages wait for nothing but their
neighbours?

A stage works on a microbatch forward (F) and backward (B); a schedule may do the gradients of
weights (W), which nothing waits for, apart from the rest of the backward pass. With v chunks of
layers a stage, a piece of work belongs to one chunk. The orders are those that were published:

- gpipe (arXiv:1811.06965, figure 2): all F, then all B, the last microbatch first.
- 1f1b (PipeDream-Flush, arXiv:2006.09503, section 2.2): stage s of S goes forward S - s - 1 times,
  then one forward and one backward in turn.
- interleaved (arXiv:2104.04473, section 2.2): microbatches in groups of S, of which there is a
  whole number; each chunk for a whole group; (v - 1) S + 2 (S - s - 1) forward first.
- zero-bubble, the handcrafted schedule H1 (arXiv:2401.10241, section 2.2): 1F1B with W apart, and
  stage s does the first W after s + 1 B. So every stage remembers as much as the first does in
  1F1B, and the W that are left fill the time in which 1F1B waits for the last B.

>>> [str(task) for task in orders("1f1b", stages=2, microbatches=3)[0]]
['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
>>> [str(task) for task in orders("zero-bubble", stages=2, microbatches=3)[1]]
['F0', 'B0', 'F1', 'B1', 'W0', 'F2', 'B2', 'W1', 'W2']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHTS: "W"}


@dataclass(frozen=True, kw_only=True, order=True)
class Task:
    """A piece of work of a stage.

    Attributes:
        kind: "forward", "backward" (all of the backward pass, or what the stage before waits for)
            or "weights" (gradients of weights, done apart).
        microbatch: its number.
        chunk: number of the chunk of layers on the stage.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{chr(ord('a') + self.chunk) if self.chunk else ''}{self.microbatch}"


#: What a stage does, one after the other.
Order = tuple[Task, ...]


def orders(schedule: str, *, stages: int, microbatches: int, virtual: int = 1) -> tuple[Order, ...]:
    """The order of every stage.

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble".
        stages: number of stages, S.
        microbatches: number of microbatches, M.
        virtual: chunks of layers on each stage, v; 1 but for "interleaved".

    Raises:
        ValueError: there is no such schedule, it has no chunks, or, interleaved, M is no multiple
            of S.
    """
    if virtual > 1 and schedule != "interleaved":
        raise ValueError(f"the schedule {schedule!r} has one chunk a stage, not {virtual}")
    match schedule:
        case "gpipe":
            return (_gpipe(microbatches),) * stages
        case "1f1b":
            return tuple(
                _alternating(
                    _plain(FORWARD, microbatches),
                    _plain(BACKWARD, microbatches),
                    stages - stage - 1,
                )
                for stage in range(stages)
            )
        case "interleaved":
            return tuple(
                _interleaved(stages, microbatches, virtual, stage) for stage in range(stages)
            )
        case "zero-bubble":
            return tuple(
                _late_weights(microbatches, stages - stage - 1, stage) for stage in range(stages)
            )
        case _:
            raise ValueError(f"there is no schedule {schedule!r}")


def _plain(kind: str, microbatches: int) -> Order:
    return tuple(Task(kind=kind, microbatch=micro) for micro in range(microbatches))


def _gpipe(microbatches: int) -> Order:
    return (*_plain(FORWARD, microbatches), *reversed(_plain(BACKWARD, microbatches)))


def _alternating(forward: Sequence[Task], backward: Sequence[Task], first: int) -> Order:
    """Some forward work, then forward and backward work in turn, then what is left of the backward
    work.
    """
    found = list(forward[:first])
    for ahead, back in zip(forward[first:], backward, strict=False):
        found += [ahead, back]
    return (*found, *backward[max(0, len(forward) - first) :])


def _interleaved(stages: int, microbatches: int, virtual: int, stage: int) -> Order:
    """Chunk after chunk for groups of S microbatches."""
    if microbatches % stages:
        raise ValueError(
            f"interleaved stages take microbatches in groups of {stages}, which do not divide"
            f" {microbatches}"
        )

    def units(kind: str, chunks: Sequence[int]) -> Order:
        return tuple(
            Task(kind=kind, microbatch=micro, chunk=chunk)
            for group in range(0, microbatches, stages)
            for chunk in chunks
            for micro in range(group, group + stages)
        )

    return _alternating(
        units(FORWARD, range(virtual)),
        units(BACKWARD, range(virtual - 1, -1, -1)),
        (virtual - 1) * stages + 2 * (stages - stage - 1),
    )


def _late_weights(microbatches: int, first: int, late: int) -> Order:
    """1F1B with each W after the B that comes `late` microbatches later."""
    found: list[Task] = []
    for task in _alternating(_plain(FORWARD, microbatches), _plain(BACKWARD, microbatches), first):
        found.append(task)
        if task.kind == BACKWARD and task.microbatch >= late:
            found.append(Task(kind=WEIGHTS, microbatch=task.microbatch - late))
    return (*found, *_plain(WEIGHTS, microbatches)[max(0, microbatches - late) :])
