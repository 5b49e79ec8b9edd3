"""Pipeline schedules: the order of the tasks on each stage, their exact simulation, lockstep
timetables, and both as text. It is arithmetic alone, shared by planning and lowering.

Everywhere: S stages, m (M) microbatches, v chunks of layers per stage (virtual stages), and t
seconds per microbatch and stage. F is the forward pass of a microbatch, B its backward pass, and W
its weight gradients, if a schedule splits them from B. A new schedule is a class that satisfies
`Schedule` and a line in the list of schedules.

>>> [str(task) for task in alternating(plain(FORWARD, 3), plain(BACKWARD, 3), 1)]
['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
>>> named("interleaved").label(2), named("gpipe") in pipelines()
('interleaved with 2 chunks per stage', True)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHTS: "W"}


@dataclass(frozen=True, kw_only=True, order=True)
class Task:
    """A task of a stage.

    Attributes:
        kind: "forward", "backward" (the whole backward pass, or only the part that the preceding
            stage waits for) or "weights" (the weight gradients, if split from the backward pass).
        microbatch: index of the microbatch.
        chunk: index of the chunk of layers on the stage.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = chr(ord("a") + self.chunk) if self.chunk else ""
        return f"{_LETTERS[self.kind]}{chunk}{self.microbatch}"


#: The tasks of a stage in execution order.
Order = tuple[Task, ...]


def plain(kind: str, microbatches: int) -> Order:
    """The tasks of one kind for all microbatches, in ascending order."""
    return tuple(Task(kind=kind, microbatch=micro) for micro in range(microbatches))


def alternating(forward: Sequence[Task], backward: Sequence[Task], first: int) -> Order:
    """`first` forward tasks, then one forward and one backward task in turn, then the remaining
    backward tasks.
    """
    tasks = list(forward[:first])
    for ahead, back in zip(forward[first:], backward, strict=False):
        tasks += [ahead, back]
    return (*tasks, *backward[max(0, len(forward) - first) :])


Array = np.ndarray

#: Chunks in transit to or from the activation stash of a single program: the one that a tick has
#: computed but not yet stashed, and the one that it has read.
PASSING = 2


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """The pipelines of many candidates, as arrays of shape [candidates].

    Attributes:
        stages: number of stages, S; 1 without a pipeline.
        chunks: chunks of layers on each stage (virtual stages), v.
        microbatches: microbatches that pass through the stages, m.
        lockstep: True if all stages advance together (a single SPMD program); False if each waits
            only for its neighbours.
    """

    stages: Array
    chunks: Array
    microbatches: Array
    lockstep: bool = False

    @classmethod
    def one(
        cls, *, stages: int, chunks: int = 1, microbatches: int, lockstep: bool = False
    ) -> Pipelines:
        """A single pipeline."""
        return cls(
            stages=np.array([stages]),
            chunks=np.array([chunks]),
            microbatches=np.array([microbatches]),
            lockstep=lockstep,
        )


class Schedule(Protocol):
    """A pipeline schedule.

    Attributes:
        name: its name in pins, plans and output.
        staged: True for schedules of pipelines, that is, for all but "none".
        lowered: True if programs can be lowered to it.
        forward_first: True if a stage does all forward work before any backward work. With several
            chunks, all microbatches then go through one chunk before the next (breadth first,
            arXiv:2211.05953), and the weights of a chunk are gathered once for all of them.
        splits_backward: True if weight gradients, which no stage waits for, are computed separately
            from activation gradients (arXiv:2401.10241).
    """

    @property
    def name(self) -> str: ...
    @property
    def staged(self) -> bool: ...
    @property
    def lowered(self) -> bool: ...
    @property
    def forward_first(self) -> bool: ...
    @property
    def splits_backward(self) -> bool: ...

    def label(self, chunks: int) -> str:
        """The schedule and its number of chunks per stage as text; "" without stages."""
        ...

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """The order of tasks on each stage if stages wait only for their neighbours."""
        ...

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """True if a stage may have this many chunks of layers."""
        ...

    def fits(self, pipelines: Pipelines) -> Array:
        """Boolean mask [candidates]: True where the number of microbatches suits the schedule."""
        ...

    def chunk_options(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """The numbers of chunks per stage that planning tries with this schedule."""
        ...

    def in_flight(self, pipelines: Pipelines) -> Array:
        """The most microbatches whose activations the first stage keeps at once, in units of whole
        stages; 1 without stages. Floats [candidates].
        """
        ...

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """A lower bound of `in_flight` over all numbers of chunks."""
        ...

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """The most microbatches whose activations the last stage keeps at once, in units of whole
        stages, if stages wait only for their neighbours.
        """
        ...

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """Idle seconds of a stage per step (the bubble), for one group of microbatches.

        Args:
            tick: seconds of one microbatch on one stage, forward and backward.
            weights: the part of `tick` that computes weight gradients; may be None if the schedule
                does not split the backward pass.
        """
        ...

    def bubble(self, pipelines: Pipelines) -> Array:
        """A lower bound of `waiting` in units of `tick`, before `deferrable` is subtracted."""
        ...

    def deferrable(self, *, lockstep: bool) -> float:
        """The reduction of each of the S - 1 rounds of waiting, at most, in units of the seconds of
        a microbatch's weight gradients.
        """
        ...


def only_whole_stages(name: str, chunks: int) -> None:
    """Raises ValueError for more than one chunk per stage."""
    if chunks > 1:
        raise ValueError(f"the schedule {name!r} has one chunk a stage, not {chunks}")


def label_of(name: str, chunks: int) -> str:
    """The name of a schedule, and its number of chunks."""
    return f"{name} with {chunks} chunks per stage" if chunks > 1 else name


def enough_for_chunks(pipelines: Pipelines) -> Array:
    """True where there is a microbatch for every stage, or only one chunk per stage."""
    return (pipelines.chunks == 1) | (pipelines.microbatches >= pipelines.stages)


def one_in_turn(pipelines: Pipelines) -> Array:
    """Microbatches that the first stage keeps if forward and backward tasks alternate.

    min(m, S) if stages wait only for their neighbours; S + (S - 1) / v with v > 1 chunks
    (arXiv:2205.05198, section 4.2.3). In a single program a microbatch returns to the first stage
    2S - 2 ticks after it left, so the activation stash has 2vS - 1 slots, plus `PASSING` chunks in
    transit.
    """
    stages, chunks, micro = pipelines.stages, pipelines.chunks, pipelines.microbatches
    if not pipelines.lockstep:
        in_flight = stages + np.where(chunks > 1, (stages - 1) / chunks, 0.0)
        return np.where(stages > 1, np.minimum(in_flight, micro), 1.0)
    stash = np.minimum(2 * chunks * stages - 1, micro * chunks + stages - 1)
    return np.where(stages > 1, (stash + PASSING) / chunks, 1.0)


def last_in_turn(pipelines: Pipelines) -> Array:
    """Microbatches that the last stage keeps if forward and backward tasks alternate.

    Its backward pass follows directly on the forward pass: 1 microbatch, plus, with v chunks, the
    (v - 1) S chunks that went before (arXiv:2104.04473, figure 4).
    """
    stages, chunks = pipelines.stages, pipelines.chunks
    in_flight = ((chunks - 1) * stages + 1) / chunks
    return np.where(stages > 1, np.minimum(in_flight, pipelines.microbatches), 1.0)


class GPipe:
    """All forward work, then all backward work (arXiv:1811.06965, figure 2).

        stage 0  F0 F1 F2       B2 B1 B0         backward starts with the last microbatch
        stage 1     F0 F1 F2 B2 B1 B0

    A step takes (m + S - 1) t, and the activations of all m microbatches are kept. In a single
    program (SPMD) a stage may have v chunks of layers, and all microbatches go through one chunk
    before the next (breadth first, arXiv:2211.05953): (m + (S - 1) / v) t, with an activation stash
    of m v + S - 1 slots.

    >>> pipeline = Pipelines.one(stages=4, chunks=1, microbatches=8)
    >>> GPIPE.in_flight(pipeline).item(), GPIPE.waiting(pipeline, np.array([2.0]), None).item()
    (8.0, 6.0)
    >>> [str(task) for task in GPIPE.order(stages=2, microbatches=3, chunks=1)[0]]
    ['F0', 'F1', 'F2', 'B2', 'B1', 'B0']
    """

    name = "gpipe"
    staged = True
    lowered = True
    forward_first = True
    splits_backward = False

    def label(self, chunks: int) -> str:
        return label_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """The same order on every stage."""
        only_whole_stages(self.name, chunks)
        backward = reversed(plain(BACKWARD, microbatches))
        return ((*plain(FORWARD, microbatches), *backward),) * stages

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """Several chunks only in a single program."""
        return chunks == 1 or lockstep

    def fits(self, pipelines: Pipelines) -> Array:
        """With several chunks, at least one microbatch per stage."""
        return enough_for_chunks(pipelines)

    def chunk_options(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Tried only if pinned: it is as fast as 1F1B and keeps more activations. With chunks it is
        in the space for weights that are gathered once (`shardlib.planner`).
        """
        return (chunks or 1,) if pinned else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """All microbatches; in a single program the activation stash plus one chunk in transit,
        since a tick is either forward or backward.
        """
        stages, chunks, micro = pipelines.stages, pipelines.chunks, pipelines.microbatches
        if not pipelines.lockstep:
            return np.where(stages > 1, micro, 1.0)
        stash = micro * chunks + stages - 1
        return np.where(stages > 1, (stash + PASSING - 1) / chunks, 1.0)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        return np.where(pipelines.stages > 1, pipelines.microbatches, 1.0)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        return np.where(pipelines.stages > 1, pipelines.microbatches, 1.0)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1) t / v."""
        return (pipelines.stages - 1) * tick / pipelines.chunks

    def bubble(self, pipelines: Pipelines) -> Array:
        """(S - 1) / v."""
        return (pipelines.stages - 1) / pipelines.chunks

    def deferrable(self, *, lockstep: bool) -> float:
        return 0.0


GPIPE = GPipe()


class Interleaved:
    """Interleaved 1F1B: v chunks of layers per stage, each for a group of S microbatches in turn
    (arXiv:2104.04473, section 2.2).

    Chunk c of stage s follows chunk c of stage s - 1; chunk c + 1 of stage 0 follows chunk c of the
    last stage. Stage s runs (v - 1) S + 2 (S - s - 1) forward tasks before its first backward task.
    A step takes (m + (S - 1) / v) t if S divides m; a last, smaller group takes as long as a full
    one. The first stage keeps S + (S - 1) / v microbatches (arXiv:2205.05198, section 4.2.3).

    >>> order = INTERLEAVED.order(stages=2, microbatches=2, chunks=2)
    >>> [str(task) for task in order[1]]
    ['F0', 'F1', 'Fb0', 'Bb0', 'Fb1', 'Bb1', 'B0', 'B1']
    """

    name = "interleaved"
    staged = True
    lowered = True
    forward_first = False
    splits_backward = False

    def label(self, chunks: int) -> str:
        return label_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        if microbatches % stages:
            raise ValueError(
                f"interleaved stages take microbatches in groups of {stages}, which do not divide"
                f" {microbatches}"
            )

        def units(kind: str, numbers: Sequence[int]) -> Order:
            return tuple(
                Task(kind=kind, microbatch=micro, chunk=chunk)
                for group in range(0, microbatches, stages)
                for chunk in numbers
                for micro in range(group, group + stages)
            )

        forward, backward = (
            units(FORWARD, range(chunks)),
            units(BACKWARD, range(chunks - 1, -1, -1)),
        )
        return tuple(
            alternating(forward, backward, (chunks - 1) * stages + 2 * (stages - s - 1))
            for s in range(stages)
        )

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """Any number of chunks."""
        return True

    def fits(self, pipelines: Pipelines) -> Array:
        """At least one microbatch per stage; whole groups of S if stages wait only for their
        neighbours, as published.
        """
        fits = enough_for_chunks(pipelines)
        if pipelines.lockstep:
            return fits
        return fits & (pipelines.microbatches % pipelines.stages == 0)

    def chunk_options(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """With two chunks or more: with one it is 1F1B."""
        return tuple(n for n in ((chunks,) if chunks else range(2, limit + 1)) if n > 1)

    def in_flight(self, pipelines: Pipelines) -> Array:
        """S + (S - 1) / v; the activation stash in a single program."""
        return one_in_turn(pipelines)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """S; in a single program the stash approaches 2S as v grows, or all microbatches."""
        turns = 2 if pipelines.lockstep else 1
        in_flight = np.minimum(turns * pipelines.stages, pipelines.microbatches)
        return np.where(pipelines.stages > 1, in_flight, 1.0)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """One microbatch, plus the chunks before the last."""
        return last_in_turn(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1) t / v, plus the unused part of the last group."""
        stages, chunks = pipelines.stages, pipelines.chunks
        filling = np.where(chunks > 1, -pipelines.microbatches % stages * tick, 0.0)
        return (stages - 1) * tick / chunks + filling

    def bubble(self, pipelines: Pipelines) -> Array:
        """(S - 1) / v, plus the missing microbatches of the last group."""
        stages, chunks = pipelines.stages, pipelines.chunks
        return (stages - 1) / chunks + np.where(chunks > 1, -pipelines.microbatches % stages, 0)

    def deferrable(self, *, lockstep: bool) -> float:
        return 0.0


INTERLEAVED = Interleaved()


class NoSchedule:
    """A step without pipeline stages: one microbatch at a time, and no waiting.

    >>> NONE.label(1), NONE.staged
    ('', False)
    """

    name = "none"
    staged = False
    lowered = True
    forward_first = False
    splits_backward = False

    def label(self, chunks: int) -> str:
        return ""

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        raise ValueError(f"there is no schedule {self.name!r}")

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """One chunk only: all layers."""
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        """True for candidates without stages."""
        return pipelines.stages == 1

    def chunk_options(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Tried only if pinned."""
        return (1,) if pinned and chunks in (None, 1) else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        return np.ones(len(pipelines.stages))

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        return self.in_flight(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        return self.in_flight(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        return np.zeros(len(pipelines.stages))

    def bubble(self, pipelines: Pipelines) -> Array:
        return np.zeros(len(pipelines.stages))

    def deferrable(self, *, lockstep: bool) -> float:
        return 0.0


NONE = NoSchedule()


class OneForwardOneBackward:
    """1F1B: stage s runs S - s - 1 forward tasks, then one forward and one backward task in turn
    (PipeDream-Flush, arXiv:2006.09503, section 2.2).

        stage 0  F0 F1    B0 F2 B1    B2
        stage 1     F0 B0 F1 B1 F2 B2

    A step takes as long as with GPipe, (m + S - 1) t. The first stage keeps min(m, S) microbatches;
    in a single program (SPMD), the 2S - 1 slots of its activation stash plus the chunks in transit.

    >>> [str(task) for task in ONE_F_ONE_B.order(stages=2, microbatches=3, chunks=1)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """

    name = "1f1b"
    staged = True
    lowered = True
    forward_first = False
    splits_backward = False

    def label(self, chunks: int) -> str:
        return label_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """Later stages run fewer forward tasks before their first backward task."""
        only_whole_stages(self.name, chunks)
        forward, backward = plain(FORWARD, microbatches), plain(BACKWARD, microbatches)
        return tuple(alternating(forward, backward, stages - s - 1) for s in range(stages))

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        return pipelines.chunks == 1

    def chunk_options(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        return (1,) if chunks in (None, 1) else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """min(m, S); the activation stash in a single program."""
        return one_in_turn(pipelines)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """Equal to `in_flight`: there is only one chunk."""
        return one_in_turn(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        return last_in_turn(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1) t."""
        return (pipelines.stages - 1) * tick / pipelines.chunks

    def bubble(self, pipelines: Pipelines) -> Array:
        return (pipelines.stages - 1) / np.ones_like(pipelines.chunks)

    def deferrable(self, *, lockstep: bool) -> float:
        return 0.0


ONE_F_ONE_B = OneForwardOneBackward()


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of one microbatch on one stage, summed over its chunks.

    Attributes:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass, without `weights` if that is a task of its own.
        weights: seconds of the weight gradients; 0 if they are part of `backward`.
        hop: seconds of a transfer from one stage to the next, during which neither waits.
    """

    forward: float
    backward: float
    weights: float = 0.0
    hop: float = 0.0

    def of(self, kind: str) -> float:
        """Seconds of a task of this kind."""
        return {FORWARD: self.forward, BACKWARD: self.backward, WEIGHTS: self.weights}[kind]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A task with its start time and duration in seconds."""

    stage: int
    task: Task
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


def simulate(schedule: Sequence[Order], durations: Durations) -> tuple[Span, ...]:
    """The earliest start of every task, stage by stage in execution order.

    A task waits for the preceding task of its stage and for its inputs: F of a chunk for F of the
    preceding chunk, B for F of its own chunk and for B of the following chunk, W for its B. Chunk c
    of stage s follows chunk c of stage s - 1; chunk c + 1 of stage 0 follows chunk c of the last
    stage. A transfer between stages takes `hop` seconds. The simulation is exact: given the orders,
    the earliest times are unique.

    >>> spans = simulate(orders("1f1b", stages=2, microbatches=2), Durations(forward=1, backward=2))
    >>> [(str(span.task), span.start, span.end) for span in spans if span.stage == 1]
    [('F0', 1.0, 2.0), ('B0', 2.0, 4.0), ('F1', 4.0, 5.0), ('B1', 5.0, 7.0)]
    >>> makespan(spans), most_held(spans, 0), most_held(spans, 1)
    (9.0, 2, 1)
    """
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
    """The (stage, task) pairs whose results a task reads."""
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
    """Seconds until the last task ends."""
    return max((span.end for span in spans), default=0.0)


def most_held(spans: Iterable[Span], stage: int, *, until: str = BACKWARD) -> int:
    """The most chunks in the activation stash of a stage at once; each is kept from the start of
    its F to the end of its `until` task.
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


class ZeroBubble:
    """Zero-bubble, the handcrafted schedule H1: 1F1B with separate tasks W for weight gradients
    (arXiv:2401.10241, section 2.2 and table 1).

    The backward pass is split into B, which the preceding stage waits for, and W, which nothing
    waits for. Stage s runs its first W after s + 1 B. So every stage keeps as many activations as
    the first stage of 1F1B, and the remaining W fill the time in which 1F1B waits for the last B:
    its bubble, (S - 1)(F + B + W), becomes (S - 1)(F + B - W). This takes m >= S: each microbatch
    but the last has one W to fill a gap with, so the bubble is (S - 1)(F + B) - min(S, m) W + W. It
    also takes W <= F and W <= B, which holds since every weight gradient has the FLOPs of one
    matmul of F and of B.

    In a single program (SPMD), F and B each take S - 1 more ticks than there are microbatches, and
    W none: the bubble is (S - 1)(F + B). The program keeps S more microbatches than 1F1B:
    cotangents that wait for the weight-gradient matmuls, which are about as many bytes as the saved
    activations.

    >>> [str(task) for task in ZERO_BUBBLE.order(stages=2, microbatches=3, chunks=1)[1]]
    ['F0', 'B0', 'F1', 'B1', 'W0', 'F2', 'B2', 'W1', 'W2']
    """

    name = "zero-bubble"
    staged = True
    lowered = True
    forward_first = False
    splits_backward = True

    def label(self, chunks: int) -> str:
        return label_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """1F1B with each W after the B of the microbatch s positions later."""
        only_whole_stages(self.name, chunks)
        return tuple(_late_weights(microbatches, stages - s - 1, s) for s in range(stages))

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        return pipelines.chunks == 1

    def chunk_options(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Tried only without rematerialisation: the operands of the weight gradients are kept under
        any remat policy.
        """
        return (1,) if chunks in (None, 1) and (pinned or policy == "none") else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """As 1F1B, plus S cotangents in a single program."""
        return _with_cotangents(pipelines)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """Equal to `in_flight`: there is only one chunk."""
        return _with_cotangents(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        return last_in_turn(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1)(F + B), less the W that fill it if stages wait only for their neighbours."""
        assert weights is not None, "a bubble filled with weights needs their seconds"
        rounds, micro = pipelines.stages - 1, pipelines.microbatches
        filled = 0.0 if pipelines.lockstep else np.minimum(rounds, micro - 1) * weights
        return np.maximum(0.0, rounds * (tick - weights) - filled)

    def bubble(self, pipelines: Pipelines) -> Array:
        return (pipelines.stages - 1) / np.ones_like(pipelines.chunks)

    def deferrable(self, *, lockstep: bool) -> float:
        """Once for the W that run late, and once more for the W that fill gaps."""
        return 1.0 if lockstep else 2.0


def _with_cotangents(pipelines: Pipelines) -> Array:
    in_flight = one_in_turn(pipelines)
    if not pipelines.lockstep:
        return in_flight
    return np.where(pipelines.stages > 1, in_flight + pipelines.stages, in_flight)


def _late_weights(microbatches: int, first: int, late: int) -> Order:
    """1F1B with each W after the B of the microbatch `late` positions later."""
    tasks: list[Task] = []
    for task in alternating(plain(FORWARD, microbatches), plain(BACKWARD, microbatches), first):
        tasks.append(task)
        if task.kind == BACKWARD and task.microbatch >= late:
            tasks.append(Task(kind=WEIGHTS, microbatch=task.microbatch - late))
    return (*tasks, *plain(WEIGHTS, microbatches)[max(0, microbatches - late) :])


ZERO_BUBBLE = ZeroBubble()


_LISTED: tuple[Schedule, ...] = (NONE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)
#: Schedules by name, in the order in which planning tries them.
SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _LISTED}


def named(name: str) -> Schedule:
    """The schedule with this name."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}")
    return SCHEDULES[name]


def lowered(name: str) -> bool:
    """True if programs can be lowered to the schedule with this name."""
    return name in SCHEDULES and SCHEDULES[name].lowered


def pipelines() -> tuple[Schedule, ...]:
    """The schedules that have stages."""
    return tuple(schedule for schedule in SCHEDULES.values() if schedule.staged)


def orders(schedule: str, *, stages: int, microbatches: int, virtual: int = 1) -> tuple[Order, ...]:
    """The order of tasks on each stage if stages wait only for their neighbours."""
    return named(schedule).order(stages=stages, microbatches=microbatches, chunks=virtual)


def least_in_flight(shape: Pipelines) -> Array:
    """A lower bound of `Schedule.in_flight` over all schedules."""
    return np.minimum.reduce([schedule.least_in_flight(shape) for schedule in pipelines()])


#: An integer or an array of integers: NumPy, or JAX inside a program.
Number = Any


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """A schedule in lockstep: the task of each stage at each tick.

    Microbatches pass through the stages in groups of S: a stage runs chunk 0 for a whole group,
    then chunk 1 for the same group, and so on. This is the order of interleaved 1F1B
    (arXiv:2104.04473, section 2.2) and, with one chunk, that of PipeDream-Flush. Stage s runs
    forward unit u at tick u + s, where u = (group v + chunk) S + (microbatch in the group). The
    output of the last stage at one tick enters stage 0 at the next, as the input of the next chunk.
    The backward pass is the mirror image: the last stage starts with its last chunk, in the tick of
    that chunk's forward pass (1F1B) or after all forward work (GPipe, arXiv:1811.06965).

    With M microbatches, a multiple of S if v > 1, forward and backward work take M v + S - 1 ticks
    each, and 1F1B takes the time of (M v + S - 1) chunks forward and backward: that of the ideal
    schedule.

    GPipe with several chunks takes all microbatches through one chunk before the next (breadth
    first, arXiv:2211.05953): if M >= S, outputs of the last stage wait M - S ticks before they
    enter the first.

    Zero-bubble is 1F1B with a split backward pass (arXiv:2401.10241): activation gradients are
    computed at once; weight gradients are computed on all stages in the tick of the first stage's
    backward pass. The S - 1 ticks that only fill the pipeline have none: a step takes M (F + B + W)
    + (S - 1)(F + B). No lockstep schedule is faster, since M + S - 1 ticks have F, M + S - 1 have
    B, and M have W.

    Attributes:
        schedule: name of the schedule.
        stages: number of stages, S.
        microbatches: number of microbatches, M.
        virtual: chunks of layers on each stage, v.

    >>> table = Timetable(schedule="1f1b", stages=2, microbatches=3)
    >>> [table.forward(tick, 1) for tick in range(3)]
    [(0, 0, False), (0, 0, True), (1, 0, True)]
    """

    schedule: str
    stages: int
    microbatches: int
    virtual: int = 1

    @property
    def forward_first(self) -> bool:
        """True if all forward work is done before any backward work."""
        return named(self.schedule).forward_first

    @property
    def units(self) -> int:
        """Chunks that a stage computes in each direction, including the padding of the last
        group.
        """
        return -(-self.microbatches // self.group) * self.group * self.virtual

    @property
    def group(self) -> int:
        """Microbatches that go through a chunk before the next chunk starts."""
        return self.microbatches if self.virtual == 1 or self.forward_first else self.stages

    @property
    def lag(self) -> int:
        """Ticks that an output of the last stage waits for its next chunk on the first stage; the
        same in the backward direction.
        """
        return max(0, self.group - self.stages) if self.virtual > 1 else 0

    @property
    def rounds(self) -> int:
        """Rounds of M ticks in which each stage starts one chunk; 0 if chunks alternate for groups
        of S microbatches.
        """
        return self.virtual if self.forward_first and self.virtual > 1 else 0

    @property
    def forward_ticks(self) -> int:
        """The number of ticks with forward work: [0, n)."""
        return self.units + self.stages - 1

    @property
    def turn(self) -> int:
        """The first tick with backward work."""
        return self.forward_ticks if self.forward_first else self.virtual * self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks per step."""
        return self.turn + self.forward_ticks

    @property
    def split(self) -> bool:
        """True if weight gradients are computed later than activation gradients."""
        return named(self.schedule).splits_backward

    @property
    def weights_turn(self) -> int:
        """The first tick with weight gradients."""
        return self.turn + (self.stages - 1) * self.split

    @property
    def phases(self) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """(first tick, end tick, kinds of work: "forward", "backward", "weights") of each run of
        ticks with the same kinds of work.
        """
        spans = {"forward": (0, self.forward_ticks), "backward": (self.turn, self.ticks)} | (
            {"weights": (self.weights_turn, self.ticks)} if self.split else {}
        )
        bounds = sorted({tick for span in spans.values() for tick in span})
        return tuple(
            (
                start,
                stop,
                tuple(
                    kind for kind, (first, last) in spans.items() if first <= start and stop <= last
                ),
            )
            for start, stop in itertools.pairwise(bounds)
        )

    @property
    def slots(self) -> int:
        """Slots of the activation stash: units in flight between their forward and their backward
        tick, on the first stage in the first chunk.
        """
        return (
            self.forward_ticks
            if self.forward_first
            else min(2 * self.virtual * self.stages - 1, self.forward_ticks)
        )

    @property
    def last_chunk(self) -> int:
        return self.virtual - 1

    def forward(self, tick: Number, stage: Number) -> tuple[Number, Number, Number]:
        """(microbatch, chunk, True if there is work) of a stage at a tick; integers or arrays.
        Without work the first two are within bounds but meaningless.
        """
        return self._of(tick - stage)

    def backward(self, tick: Number, stage: Number) -> tuple[Number, Number, Number]:
        """(microbatch, chunk, True if there is work) of the backward pass, as in `forward`."""
        micro, mirrored, works = self._of(tick - self.turn - (self.stages - 1 - stage))
        return micro, self.last_chunk - mirrored, works

    def weights(self, tick: Number) -> tuple[Number, Number, Number]:
        """(microbatch, chunk, True if there is work) of the weight gradients, the same on all
        stages.
        """
        micro, mirrored, works = self._of(tick - self.weights_turn)
        return micro, self.last_chunk - mirrored, works

    def forward_slot(self, tick: Number, stage: Number) -> Number:
        """Stash slot that the forward work of a tick writes; without work, an unused slot."""
        return (tick - stage) % self.slots

    def backward_slot(self, tick: Number, stage: Number) -> Number:
        """Stash slot that the backward work of a tick reads."""
        return self._unit(*self.backward(tick, stage)[:2]) % self.slots

    def weights_slot(self, tick: Number) -> Number:
        """Stash slot that the weight gradients of a tick read."""
        return self._unit(*self.weights(tick)[:2]) % self.slots

    def residual_slot_written(self, tick: Number, stage: Number) -> Number:
        """Slot, of S, that the backward work of a tick writes its cotangents to, for the weight
        gradients.
        """
        return (tick - self.turn - (self.stages - 1 - stage)) % self.stages

    def residual_slot_read(self, tick: Number) -> Number:
        """Slot of cotangents that the weight gradients of a tick read."""
        return (tick - self.weights_turn) % self.stages

    def _unit(self, micro: Number, chunk: Number) -> Number:
        return (micro // self.group * self.virtual + chunk) * self.group + micro % self.group

    def _of(self, unit: Number) -> tuple[Number, Number, Number]:
        inside = (unit >= 0) & (unit < self.units)
        unit = unit * inside
        rounds, place = unit // self.group, unit % self.group
        micro = rounds // self.virtual * self.group + place
        works = inside & (micro < self.microbatches)
        return micro * works, rounds % self.virtual, works


IDLE = "·"


def text(table: Timetable) -> str:
    """A timetable as text: per stage a forward (>) and a backward (<) row, a column per tick with
    the index of the microbatch, after a letter for the chunk if there are several.

    >>> print(text(Timetable(schedule="1f1b", stages=2, microbatches=3)))
    tick         0 1 2 3 4
    stage 0  >   0 1 2 · ·
             <   · · 0 1 2
    stage 1  >   · 0 1 2 ·
             <   · 0 1 2 ·
    """
    rows = [("tick", "", [str(tick) for tick in range(table.ticks)])]
    for stage in range(table.stages):
        rows.append(
            (
                f"stage {stage}",
                ">",
                [
                    _cell(table, table.forward(tick, stage), tick < table.forward_ticks)
                    for tick in range(table.ticks)
                ],
            )
        )
        rows.append(
            (
                "",
                "<",
                [
                    _cell(table, table.backward(tick, stage), tick >= table.turn)
                    for tick in range(table.ticks)
                ],
            )
        )
    label = max(len(name) for name, _, _ in rows) + 2
    width = max(len(cell) for _, _, cells in rows for cell in cells)
    return "\n".join(
        f"{name:{label}}{direction:4}{' '.join(f'{cell:>{width}}' for cell in cells)}"
        for name, direction, cells in rows
    )


def orders_text(schedule: Sequence[Order]) -> str:
    """Orders of tasks as text: a row per stage, if stages wait only for their neighbours and all
    tasks take equally long.

    >>> print(orders_text(orders("zero-bubble", stages=2, microbatches=2)))
    stage 0  F0 F1 ·· B0 W0 B1 W1
    stage 1  ·· F0 B0 F1 B1 W0 W1
    """
    spans = simulate(schedule, Durations(forward=1.0, backward=1.0, weights=1.0))
    each = min(span.seconds for span in spans)
    cells = {(span.stage, round(span.start / each)): str(span.task) for span in spans}
    width, columns = max(map(len, cells.values())), range(1 + max(column for _, column in cells))
    rows = [
        (f"stage {stage}", [cells.get((stage, column), IDLE * width) for column in columns])
        for stage in range(len(schedule))
    ]
    label = max(len(name) for name, _ in rows) + 2
    return "\n".join(
        f"{name:{label}}{' '.join(f'{cell:>{width}}' for cell in row)}".rstrip(f" {IDLE}")
        for name, row in rows
    )


def _cell(table: Timetable, work: tuple[int, int, bool], within: bool) -> str:
    micro, chunk, works = work
    if not (works and within):
        return IDLE
    return str(micro) if table.virtual == 1 else f"{chr(ord('a') + chunk)}{micro}"
