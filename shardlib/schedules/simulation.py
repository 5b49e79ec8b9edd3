"""The earliest time of every task of a pipeline: a stage starts as soon as what it needs is there.

A task waits for the one before it on its stage, and for what it reads: F of a chunk for F of the
chunk before it, B for F of its own chunk and for B of the chunk after it, W for its B. Chunk c of
stage s comes after chunk c of stage s - 1; chunk c + 1 of stage 0 comes after chunk c of the last
stage. What goes from one stage to another takes `hop` seconds. The simulation is exact: there is
one earliest time for every task of given orders.

>>> from shardlib.schedules.table import orders
>>> spans = simulate(orders("1f1b", stages=2, microbatches=2), Durations(forward=1, backward=2))
>>> [(str(span.task), span.start, span.end) for span in spans if span.stage == 1]
[('F0', 1.0, 2.0), ('B0', 2.0, 4.0), ('F1', 4.0, 5.0), ('B1', 5.0, 7.0)]
>>> makespan(spans), most_held(spans, 0), most_held(spans, 1)
(9.0, 2, 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardlib.schedules.orders import BACKWARD, FORWARD, WEIGHTS, Order, Task


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of one microbatch on one stage, all its chunks together.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, but for `weights` where that is done apart.
        weights: gradients of weights; 0 where no task does them apart.
        hop: from one stage to the next, while neither waits.
    """

    forward: float
    backward: float
    weights: float = 0.0
    hop: float = 0.0

    def of(self, kind: str) -> float:
        """Seconds of a kind of task."""
        return {FORWARD: self.forward, BACKWARD: self.backward, WEIGHTS: self.weights}[kind]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A task in its place.

    Attributes:
        stage: number of the stage.
        task: what it does.
        start, seconds: when, and for how long.
    """

    stage: int
    task: Task
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it is done."""
        return self.start + self.seconds


def simulate(schedule: Sequence[Order], durations: Durations) -> tuple[Span, ...]:
    """The spans of all tasks, stage by stage in order."""
    stages, virtual = (
        len(schedule),
        1 + max((task.chunk for order in schedule for task in order), default=0),
    )
    done: dict[tuple[int, Task], Span] = {}
    clock, position = [0.0] * stages, [0] * stages
    waiting = [stage for stage, order in enumerate(schedule) if order]
    while waiting:
        before = len(done)
        for stage in waiting:
            while position[stage] < len(schedule[stage]):
                task = schedule[stage][position[stage]]
                needed = list(_needs(stage, task, stages, virtual))
                if not all(need in done for need in needed):
                    break
                ready = (
                    done[need].end + (durations.hop if need[0] != stage else 0) for need in needed
                )
                span = Span(
                    stage=stage,
                    task=task,
                    start=max(clock[stage], *ready, 0),
                    seconds=(
                        durations.of(task.kind) / virtual
                        if virtual > 1
                        else durations.of(task.kind)
                    ),
                )
                done[stage, task], clock[stage], position[stage] = (
                    span,
                    span.end,
                    position[stage] + 1,
                )
        waiting = [stage for stage in waiting if position[stage] < len(schedule[stage])]
        if waiting and len(done) == before:
            stuck = ", ".join(
                f"stage {stage} at {schedule[stage][position[stage]]}" for stage in waiting
            )
            raise ValueError(f"stages wait for each other: {stuck}")
    return tuple(sorted(done.values(), key=lambda span: (span.stage, span.start, span.end)))


def _needs(stage: int, task: Task, stages: int, virtual: int) -> Iterator[tuple[int, Task]]:
    """(stage, task) of what a task reads."""
    micro, chunk = task.microbatch, task.chunk
    position = chunk * stages + stage
    if task.kind == FORWARD and position > 0:
        yield (
            (position - 1) % stages,
            Task(kind=FORWARD, microbatch=micro, chunk=(position - 1) // stages),
        )
    if task.kind == BACKWARD:
        yield stage, Task(kind=FORWARD, microbatch=micro, chunk=chunk)
        if position < stages * virtual - 1:
            yield (
                (position + 1) % stages,
                Task(kind=BACKWARD, microbatch=micro, chunk=(position + 1) // stages),
            )
    if task.kind == WEIGHTS:
        yield stage, Task(kind=BACKWARD, microbatch=micro, chunk=chunk)


def makespan(spans: Iterable[Span]) -> float:
    """Seconds until the last task is done."""
    return max((span.end for span in spans), default=0.0)


def most_held(spans: Iterable[Span], stage: int, *, until: str = BACKWARD) -> int:
    """The most chunks that a stage keeps stashed at once: from the start of F to the end of
    `until`.
    """
    stage_spans = [span for span in spans if span.stage == stage]
    events = sorted(
        [(span.start, 1) for span in stage_spans if span.task.kind == FORWARD]
        + [(span.end, -1) for span in stage_spans if span.task.kind == until]
    )
    stashed = peak = 0
    for _, change in events:
        stashed += change
        peak = max(peak, stashed)
    return peak
