"""Pipeline schedules: the order of work of each stage, its exact simulation, timetables of stages
in lockstep, and both as text. Arithmetic alone: planning prices and draws schedules with it,
lowering makes programs of it.

The order of work of a stage, where stages wait for their neighbours alone:

A stage works on a microbatch forward (F) and backward (B); a schedule may make the gradients of
weights (W), which nothing waits for, apart from the rest of the backward pass. With v chunks of
layers a stage, a task belongs to one chunk. The orders are those that were published.

>>> [str(task) for task in alternating(plain(FORWARD, 3), plain(BACKWARD, 3), 1)]
['F0', 'F1', 'B0', 'F2', 'B1', 'B2']

A `Schedule` is an order of work, the number of microbatches in flight, the waiting time of stages,
and the legal numbers of microbatches and chunks.

Nothing outside of this file knows a schedule by its name: planning, pricing and lowering ask the
schedule itself. With S stages, m microbatches and v chunks of layers on a stage:

>>> from shardlib.schedules import GPIPE
>>> pipeline = Pipelines.one(stages=4, chunks=1, microbatches=8)
>>> GPIPE.in_flight(pipeline).item(), GPIPE.waiting(pipeline, np.array([2.0]), None).item()
(8.0, 6.0)

GPipe: all forward work, then all backward work (arXiv:1811.06965, figure 2).

    stage 0  F0 F1 F2       B2 B1 B0         a stage goes back with the last microbatch first
    stage 1     F0 F1 F2 B2 B1 B0

A step takes (m + S - 1) t for t seconds a microbatch and stage, and the activations of all m
microbatches are held. In a single program (SPMD) a stage may have v chunks of layers, and all
microbatches go through one chunk before the next (breadth first, arXiv:2211.05953): (m + (S - 1) /
v) t, with an activation stash of m v + S - 1 places.

>>> [str(task) for task in GPIPE.order(stages=2, microbatches=3, chunks=1)[0]]
['F0', 'F1', 'F2', 'B2', 'B1', 'B0']

Interleaved 1F1B: v chunks of layers a stage, each for a group of S microbatches
(arXiv:2104.04473, section 2.2).

Chunk c of stage s comes after chunk c of stage s - 1, chunk c + 1 of stage 0 after chunk c of the
last stage. Stage s goes forward (v - 1) S + 2 (S - s - 1) times before it goes back. A step takes
(m + (S - 1) / v) t, for microbatches in groups of S: where S does not divide m, a group of fewer
takes as long as a full one. The first stage holds S + (S - 1) / v microbatches (arXiv:2205.05198,
section 4.2.3).

>>> order = INTERLEAVED.order(stages=2, microbatches=2, chunks=2)
>>> [str(task) for task in order[1]]
['F0', 'F1', 'Fb0', 'Bb0', 'Fb1', 'Bb1', 'B0', 'B1']

No schedule: a step without pipeline stages.

>>> NONE.words(1), NONE.staged
('', False)

1F1B: stage s of S goes forward S - s - 1 times, then one forward and one backward in turn
(PipeDream-Flush, arXiv:2006.09503, section 2.2).

    stage 0  F0 F1    B0 F2 B1    B2
    stage 1     F0 B0 F1 B1 F2 B2

A step takes as long as GPipe's, (m + S - 1) t, and the first stage holds min(m, S) microbatches; in
a single program (SPMD) the 2S - 1 places of its activation stash, and what passes.

>>> [str(task) for task in ONE_F_ONE_B.order(stages=2, microbatches=3, chunks=1)[0]]
['F0', 'F1', 'B0', 'F2', 'B1', 'B2']

`simulate` gives the earliest time of every task of a pipeline: a stage starts as soon as what it
needs is there.

A task waits for the one before it on its stage, and for what it reads: F of a chunk for F of the
chunk before it, B for F of its own chunk and for B of the chunk after it, W for its B. Chunk c of
stage s comes after chunk c of stage s - 1; chunk c + 1 of stage 0 comes after chunk c of the last
stage. What goes from one stage to another takes `hop` seconds. The simulation is exact: there is
one earliest time for every task of given orders.

>>> from shardlib.schedules import orders
>>> spans = simulate(orders("1f1b", stages=2, microbatches=2), Durations(forward=1, backward=2))
>>> [(str(span.task), span.start, span.end) for span in spans if span.stage == 1]
[('F0', 1.0, 2.0), ('B0', 2.0, 4.0), ('F1', 4.0, 5.0), ('B1', 5.0, 7.0)]
>>> makespan(spans), most_held(spans, 0), most_held(spans, 1)
(9.0, 2, 1)

Zero-bubble, the handcrafted schedule H1: 1F1B with separate tasks for the gradients of weights (W)
(arXiv:2401.10241, section 2.2 and table 1).

The backward pass is split into B, which the stage before waits for, and W, the gradients of
weights, which nothing waits for. Stage s does the first W after s + 1 B. So every stage holds as
much as the first does in 1F1B, and the W that are left fill the time in which 1F1B waits for the
last B: its bubble, (S - 1)(F + B + W), becomes (S - 1)(F + B - W). That takes m >= S: each
microbatch but the last has one W to fill a gap with, so the bubble is (S - 1)(F + B) - min(S, m) W
+ W. It takes W <= F and W <= B, too, which holds since every gradient of a weight has the FLOPs of
a matmul of each.

In a single program (SPMD) F and B fill S - 1 more ticks than there are microbatches each, and W
none: the bubble is (S - 1)(F + B). It keeps S more microbatches than 1F1B, those whose cotangents
wait for the products that make gradients of weights, which are about as many bytes as what the
forward pass saved.

>>> [str(task) for task in ZERO_BUBBLE.order(stages=2, microbatches=3, chunks=1)[1]]
['F0', 'B0', 'F1', 'B1', 'W0', 'F2', 'B2', 'W1', 'W2']

Schedules are listed by name: a new one is a class and a line in that list.

>>> named("interleaved").words(2), named("gpipe") in pipelines()
('interleaved with 2 chunks a stage', True)

A `Timetable` of a pipeline in lockstep says which stage works on what at which tick.

Microbatches go through the stages in groups of S, the number of stages: a stage does chunk 0 for a
whole group, then chunk 1 for the same group, and so on, which is the order of interleaved 1F1B
(arXiv:2104.04473, section 2.2) and, with one chunk, that of PipeDream-Flush. Stage s does its unit
u forward at tick u + s, where unit u = (group v + chunk) S + (microbatch in the group); what leaves
the last stage at one tick enters stage 0 at the next, one chunk further. Backward is the mirror
image: the last stage begins with the last chunk, in the tick in which it has done it forward
(1F1B), or when all forward work is done (GPipe, arXiv:1811.06965).

With M microbatches, a multiple of S if v > 1, forward and backward work each take M v + S - 1
ticks, and 1F1B takes the time of (M v + S - 1) chunks forward and backward: that of the ideal
schedule.

GPipe with several chunks works through all microbatches with one chunk before it goes on to the
next (breadth first, arXiv:2211.05953): with at least as many microbatches as stages, what leaves
the last stage waits M - S ticks before the first stage.

Zero-bubble is 1F1B with the backward pass in two parts (arXiv:2401.10241): what the stage before
waits for is done at once, gradients of weights are done by all stages in the tick in which the
first stage goes back with the microbatch. The S - 1 ticks that only fill the pipeline are free of
them: a step takes M (F + B + W) + (S - 1)(F + B). In lockstep that is the least, since there are M
+ S - 1 ticks with F and with B, and M with W.

>>> table = Timetable(schedule="1f1b", stages=2, microbatches=3)
>>> [table.forward(tick, 1) for tick in range(3)]
[(0, 0, False), (0, 0, True), (1, 0, True)]

`text` and `orders_text` show schedules, a column a tick.

>>> print(text(Timetable(schedule="1f1b", stages=2, microbatches=3)))
tick         0 1 2 3 4
stage 0  >   0 1 2 · ·
         <   · · 0 1 2
stage 1  >   · 0 1 2 ·
         <   · 0 1 2 ·
>>> from shardlib.schedules import orders
>>> print(orders_text(orders("zero-bubble", stages=2, microbatches=2)))
stage 0  F0 F1 ·· B0 W0 B1 W1
stage 1  ·· F0 B0 F1 B1 W0 W1
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


Array = np.ndarray

#: Chunks whose saved values are on their way to or from the activation stash of a single program:
#: what a tick has made and not yet stashed, and what it has read.
PASSING = 2


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """The pipelines of many candidates at once, arrays [candidates].

    Attributes:
        stages: number of stages, S; 1 where there is no pipeline.
        chunks: chunks of layers on each stage (virtual stages), v.
        microbatches: microbatches that go through the stages together, m.
        lockstep: whether all stages move at once (a single SPMD program), or each waits for its
            neighbours alone.
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
        name: what pins, plans and people call it.
        staged: whether it is for the stages of a pipeline; False of "none" alone.
        lowered: whether programs are lowered to it.
        forward_first: whether a stage does all forward work before any backward work. With several
            chunks all microbatches then go through one chunk before the next (breadth first,
            arXiv:2211.05953), and a chunk's weights need be gathered once for all of them.
        backward_in_two: whether gradients of weights, which no stage waits for, are made apart
            from those of activations (arXiv:2401.10241).
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
    def backward_in_two(self) -> bool: ...

    def words(self, chunks: int) -> str:
        """The schedule with so many chunks of layers on a stage, for people; "" without stages."""
        ...

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """Returns the order of tasks on each stage, where it waits for its neighbours alone."""
        ...

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """Returns whether stages may have so many chunks of layers."""
        ...

    def fits(self, pipelines: Pipelines) -> Array:
        """Returns the pipelines that have the microbatches that the schedule needs: booleans
        [candidates].
        """
        ...

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Numbers of chunks a stage with which planning tries the schedule."""
        ...

    def in_flight(self, pipelines: Pipelines) -> Array:
        """Microbatches whose activations the first stage holds at once, as many as whole stages; 1
        without stages. Floats [candidates].
        """
        ...

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """Returns a lower bound of `in_flight` over all numbers of chunks."""
        ...

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """Microbatches whose activations the last stage holds at once, as many as whole stages,
        where stages wait for their neighbours alone.
        """
        ...

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """Seconds that a stage waits in a step (the bubble), for one group of microbatches.

        Args:
            tick: seconds of one microbatch on one stage, forward and backward.
            weights: seconds of that which compute gradients of weights; may be None of a schedule
                whose backward pass is one.
        """
        ...

    def rounds(self, pipelines: Pipelines) -> Array:
        """`waiting` in times of a microbatch on one stage, without what `put_off` takes away: no
        pipeline of the schedule waits less.
        """
        ...

    def put_off(self, *, lockstep: bool) -> float:
        """The times that the gradients of weights of a microbatch shorten each of the S - 1 rounds
        of waiting, at most.
        """
        ...


def only_whole_stages(name: str, chunks: int) -> None:
    """Refuses several chunks on a stage."""
    if chunks > 1:
        raise ValueError(f"the schedule {name!r} has one chunk a stage, not {chunks}")


def words_of(name: str, chunks: int) -> str:
    """A schedule in words."""
    return f"{name} with {chunks} chunks a stage" if chunks > 1 else name


def enough_for_chunks(pipelines: Pipelines) -> Array:
    """Returns the pipelines that have a microbatch for every stage, if they have several chunks on
    it.
    """
    return (pipelines.chunks == 1) | (pipelines.microbatches >= pipelines.stages)


def one_in_turn(pipelines: Pipelines) -> Array:
    """Microbatches that the first stage holds where forward and backward work take turns.

    min(m, S) where stages wait for their neighbours alone; S + (S - 1) / v with v > 1 chunks
    (arXiv:2205.05198, section 4.2.3). In a single program a microbatch returns to the first stage
    2S - 2 ticks after it left, so the activation stash has 2vS - 1 places, and `PASSING` chunks
    are beside it.
    """
    stages, chunks, micro = pipelines.stages, pipelines.chunks, pipelines.microbatches
    if not pipelines.lockstep:
        in_flight = stages + np.where(chunks > 1, (stages - 1) / chunks, 0.0)
        return np.where(stages > 1, np.minimum(in_flight, micro), 1.0)
    stash = np.minimum(2 * chunks * stages - 1, micro * chunks + stages - 1)
    return np.where(stages > 1, (stash + PASSING) / chunks, 1.0)


def last_in_turn(pipelines: Pipelines) -> Array:
    """Microbatches that the last stage holds where forward and backward work take turns.

    It starts on a microbatch's backward pass as soon as it has done the forward pass: 1, and with v
    chunks the (v - 1) S chunks that went before (arXiv:2104.04473, figure 4).
    """
    stages, chunks = pipelines.stages, pipelines.chunks
    in_flight = ((chunks - 1) * stages + 1) / chunks
    return np.where(stages > 1, np.minimum(in_flight, pipelines.microbatches), 1.0)


class GPipe:
    """All forward work first."""

    name = "gpipe"
    staged = True
    lowered = True
    forward_first = True
    backward_in_two = False

    def words(self, chunks: int) -> str:
        """The name, and how many chunks."""
        return words_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """The same on every stage."""
        only_whole_stages(self.name, chunks)
        backward = reversed(plain(BACKWARD, microbatches))
        return ((*plain(FORWARD, microbatches), *backward),) * stages

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """Several chunks in a single program alone."""
        return chunks == 1 or lockstep

    def fits(self, pipelines: Pipelines) -> Array:
        """A microbatch for every stage, where stages have several chunks."""
        return enough_for_chunks(pipelines)

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Tried only where it is pinned: it is as fast as 1F1B, and holds more. With chunks it is
        in the space for weights that are gathered once (`shardlib.planner`).
        """
        return (chunks or 1,) if pinned else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """All microbatches; in a single program the activation stash, and the chunk that passes:
        ticks go forward or backward.
        """
        stages, chunks, micro = pipelines.stages, pipelines.chunks, pipelines.microbatches
        if not pipelines.lockstep:
            return np.where(stages > 1, micro, 1.0)
        stash = micro * chunks + stages - 1
        return np.where(stages > 1, (stash + PASSING - 1) / chunks, 1.0)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """All microbatches."""
        return np.where(pipelines.stages > 1, pipelines.microbatches, 1.0)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """All microbatches."""
        return np.where(pipelines.stages > 1, pipelines.microbatches, 1.0)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1) t / v."""
        return (pipelines.stages - 1) * tick / pipelines.chunks

    def rounds(self, pipelines: Pipelines) -> Array:
        """(S - 1) / v."""
        return (pipelines.stages - 1) / pipelines.chunks

    def put_off(self, *, lockstep: bool) -> float:
        """Nothing."""
        return 0.0


GPIPE = GPipe()


class Interleaved:
    """Chunks take turns for groups of S microbatches."""

    name = "interleaved"
    staged = True
    lowered = True
    forward_first = False
    backward_in_two = False

    def words(self, chunks: int) -> str:
        """The name, and how many chunks."""
        return words_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """Chunk after chunk for groups of S microbatches."""
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
        """A microbatch for every stage; whole groups of S where stages wait for their neighbours
        alone, as it was published.
        """
        fits = enough_for_chunks(pipelines)
        if pipelines.lockstep:
            return fits
        return fits & (pipelines.microbatches % pipelines.stages == 0)

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """With two chunks or more: with one it is 1F1B."""
        return tuple(n for n in ((chunks,) if chunks else range(2, limit + 1)) if n > 1)

    def in_flight(self, pipelines: Pipelines) -> Array:
        """S + (S - 1) / v; the activation stash in a single program."""
        return one_in_turn(pipelines)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """S; with ever more chunks an activation stash comes down to 2S, or to all microbatches."""
        turns = 2 if pipelines.lockstep else 1
        in_flight = np.minimum(turns * pipelines.stages, pipelines.microbatches)
        return np.where(pipelines.stages > 1, in_flight, 1.0)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """One microbatch, and the chunks before the last."""
        return last_in_turn(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1) t / v, and what fills up the last group."""
        stages, chunks = pipelines.stages, pipelines.chunks
        filling = np.where(chunks > 1, -pipelines.microbatches % stages * tick, 0.0)
        return (stages - 1) * tick / chunks + filling

    def rounds(self, pipelines: Pipelines) -> Array:
        """(S - 1) / v, and the microbatches that fill up the last group."""
        stages, chunks = pipelines.stages, pipelines.chunks
        return (stages - 1) / chunks + np.where(chunks > 1, -pipelines.microbatches % stages, 0)

    def put_off(self, *, lockstep: bool) -> float:
        """Nothing."""
        return 0.0


INTERLEAVED = Interleaved()


class NoSchedule:
    """A step without stages: one microbatch at a time, and nothing waits."""

    name = "none"
    staged = False
    lowered = True
    forward_first = False
    backward_in_two = False

    def words(self, chunks: int) -> str:
        """Nothing: there are no stages to speak of."""
        return ""

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """None."""
        raise ValueError(f"there is no schedule {self.name!r}")

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """One chunk alone: all layers."""
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        """All that have no stages."""
        return pipelines.stages == 1

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Tried only where it is pinned."""
        return (1,) if pinned and chunks in (None, 1) else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return np.ones(len(pipelines.stages))

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return self.in_flight(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return self.in_flight(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """No seconds."""
        return np.zeros(len(pipelines.stages))

    def rounds(self, pipelines: Pipelines) -> Array:
        """No rounds."""
        return np.zeros(len(pipelines.stages))

    def put_off(self, *, lockstep: bool) -> float:
        """Nothing."""
        return 0.0


NONE = NoSchedule()


class OneForwardOneBackward:
    """Forward and backward work in turn."""

    name = "1f1b"
    staged = True
    lowered = True
    forward_first = False
    backward_in_two = False

    def words(self, chunks: int) -> str:
        """The name."""
        return words_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """Later stages go forward fewer times before they go back."""
        only_whole_stages(self.name, chunks)
        forward, backward = plain(FORWARD, microbatches), plain(BACKWARD, microbatches)
        return tuple(alternating(forward, backward, stages - s - 1) for s in range(stages))

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """One chunk alone."""
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        """Any number of microbatches."""
        return pipelines.chunks == 1

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Always."""
        return (1,) if chunks in (None, 1) else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """min(m, S); the activation stash in a single program."""
        return one_in_turn(pipelines)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """The same: there is one chunk."""
        return one_in_turn(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return last_in_turn(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1) t."""
        return (pipelines.stages - 1) * tick / pipelines.chunks

    def rounds(self, pipelines: Pipelines) -> Array:
        """S - 1."""
        return (pipelines.stages - 1) / np.ones_like(pipelines.chunks)

    def put_off(self, *, lockstep: bool) -> float:
        """Nothing."""
        return 0.0


ONE_F_ONE_B = OneForwardOneBackward()


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
        """The time at which it is done."""
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


class ZeroBubble:
    """1F1B with gradients of weights made late."""

    name = "zero-bubble"
    staged = True
    lowered = True
    forward_first = False
    backward_in_two = True

    def words(self, chunks: int) -> str:
        """The name."""
        return words_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """1F1B with each W after the B that comes s microbatches later."""
        only_whole_stages(self.name, chunks)
        return tuple(_late_weights(microbatches, stages - s - 1, s) for s in range(stages))

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """One chunk alone."""
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        """Any number of microbatches."""
        return pipelines.chunks == 1

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Tried only where nothing is rematerialised: what gradients of weights are made from is
        kept whatever the remat policy is.
        """
        return (1,) if chunks in (None, 1) and (pinned or policy == "none") else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """As 1F1B, and S cotangents more in a single program."""
        return _with_cotangents(pipelines)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """The same: there is one chunk."""
        return _with_cotangents(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return last_in_turn(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1)(F + B), less the W that fill it where stages wait for their neighbours alone."""
        assert weights is not None, "a bubble filled with weights needs their seconds"
        rounds, micro = pipelines.stages - 1, pipelines.microbatches
        filled = 0.0 if pipelines.lockstep else np.minimum(rounds, micro - 1) * weights
        return np.maximum(0.0, rounds * (tick - weights) - filled)

    def rounds(self, pipelines: Pipelines) -> Array:
        """S - 1."""
        return (pipelines.stages - 1) / np.ones_like(pipelines.chunks)

    def put_off(self, *, lockstep: bool) -> float:
        """Once, where W is late, and once more where it fills a gap."""
        return 1.0 if lockstep else 2.0


def _with_cotangents(pipelines: Pipelines) -> Array:
    in_flight = one_in_turn(pipelines)
    if not pipelines.lockstep:
        return in_flight
    return np.where(pipelines.stages > 1, in_flight + pipelines.stages, in_flight)


def _late_weights(microbatches: int, first: int, late: int) -> Order:
    """1F1B with each W after the B that comes `late` microbatches later."""
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
    """The schedule of a name."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}")
    return SCHEDULES[name]


def lowered(name: str) -> bool:
    """Returns whether there is a schedule of a name that programs are lowered to."""
    return name in SCHEDULES and SCHEDULES[name].lowered


def pipelines() -> tuple[Schedule, ...]:
    """The schedules of pipelines: all that have stages."""
    return tuple(schedule for schedule in SCHEDULES.values() if schedule.staged)


def orders(schedule: str, *, stages: int, microbatches: int, virtual: int = 1) -> tuple[Order, ...]:
    """The order of every stage, where stages wait for their neighbours alone."""
    return named(schedule).order(stages=stages, microbatches=microbatches, chunks=virtual)


def least_in_flight(shape: Pipelines) -> Array:
    """Microbatches that no schedule undercuts, see `Schedule.in_flight`."""
    return np.minimum.reduce([schedule.least_in_flight(shape) for schedule in pipelines()])


def most_put_off(*, lockstep: bool) -> float:
    """See `Schedule.put_off`: the most of all schedules."""
    return max(schedule.put_off(lockstep=lockstep) for schedule in pipelines())


#: A whole number, or an array of them: of NumPy, or JAX's own inside of a program.
Number = Any


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """A schedule in lockstep.

    Attributes:
        schedule: its name, see `shardlib.schedules`.
        stages: number of stages, S.
        microbatches: number of microbatches, M.
        virtual: chunks of layers on each stage, v.
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
        """Chunks that a stage does in each direction, those of microbatches that fill up the last
        group included.
        """
        return -(-self.microbatches // self.group) * self.group * self.virtual

    @property
    def group(self) -> int:
        """Microbatches that a chunk works on before the next chunk does."""
        return self.microbatches if self.virtual == 1 or self.forward_first else self.stages

    @property
    def lag(self) -> int:
        """Ticks that what leaves the last stage, for the next chunk, waits before the first stage;
        the same the other way.
        """
        return max(0, self.group - self.stages) if self.virtual > 1 else 0

    @property
    def rounds(self) -> int:
        """Rounds of M ticks in which each stage begins one chunk; 0 where chunks take turns for
        groups of S microbatches.
        """
        return self.virtual if self.forward_first and self.virtual > 1 else 0

    @property
    def forward_ticks(self) -> int:
        """Ticks [0, n) have forward work."""
        return self.units + self.stages - 1

    @property
    def turn(self) -> int:
        """The first tick with backward work."""
        return self.forward_ticks if self.forward_first else self.virtual * self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return self.turn + self.forward_ticks

    @property
    def split(self) -> bool:
        """True if gradients of weights are made later than those of activations."""
        return named(self.schedule).backward_in_two

    @property
    def weights_turn(self) -> int:
        """The first tick with gradients of weights."""
        return self.turn + (self.stages - 1) * self.split

    @property
    def phases(self) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """(first tick, tick after the last, kinds of work: "forward", "backward", "weights") of
        every run of equal ticks.
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
        """Units whose forward work a stage remembers: from the tick that did it to the tick that
        goes back, on the first stage in the first chunk.
        """
        return (
            self.forward_ticks
            if self.forward_first
            else min(2 * self.virtual * self.stages - 1, self.forward_ticks)
        )

    @property
    def last_chunk(self) -> int:
        """Number of the last chunk of a stage."""
        return self.virtual - 1

    def forward(self, tick: Number, stage: Number) -> tuple[Number, Number, Number]:
        """(microbatch, chunk, whether there is work) of a stage at a tick; numbers or arrays of
        them. Without work the first two are within bounds and mean nothing.
        """
        return self._of(tick - stage)

    def backward(self, tick: Number, stage: Number) -> tuple[Number, Number, Number]:
        """The same for backward work."""
        micro, mirrored, works = self._of(tick - self.turn - (self.stages - 1 - stage))
        return micro, self.last_chunk - mirrored, works

    def weights(self, tick: Number) -> tuple[Number, Number, Number]:
        """The same for gradients of weights, which all stages do for the same unit."""
        micro, mirrored, works = self._of(tick - self.weights_turn)
        return micro, self.last_chunk - mirrored, works

    def forward_slot(self, tick: Number, stage: Number) -> Number:
        """Place of the activation stash for the forward work of a tick; without work, a place that
        nothing is waiting in.
        """
        return (tick - stage) % self.slots

    def backward_slot(self, tick: Number, stage: Number) -> Number:
        """Place of the activation stash with the forward work that goes back in a tick."""
        return self._unit(*self.backward(tick, stage)[:2]) % self.slots

    def weights_slot(self, tick: Number) -> Number:
        """Returns the place of the forward work whose gradients of weights are made in a tick."""
        return self._unit(*self.weights(tick)[:2]) % self.slots

    def passing_slot(self, tick: Number, stage: Number) -> Number:
        """Returns the place, of S, that keeps what the backward work of a tick passes on to the
        making of gradients of weights.
        """
        return (tick - self.turn - (self.stages - 1 - stage)) % self.stages

    def passed_slot(self, tick: Number) -> Number:
        """The place that the making of gradients of weights reads in a tick."""
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
    """Two rows a stage, forward (>) and backward (<) work, a column a tick: numbers of
    microbatches, after a letter for the chunk of layers where a stage has several.
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
    """A row a stage, what it does one after the other (`shardlib.schedules`), where it waits
    for nothing but its neighbours and all work takes equally long.
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
