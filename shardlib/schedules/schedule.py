"""What a pipeline schedule is: an order of work, what is in flight, how long stages wait, and which
numbers of microbatches and chunks it is legal for.

Each schedule has a file of its own (`gpipe`, `one_f_one_b`, `interleaved`, `zero_bubble`, `none`),
and `shardlib.schedules.table` lists them. Nothing else in shardlib knows a schedule by its name:
planning, pricing and lowering ask what the schedule says of itself. With S stages, m microbatches
and v chunks of layers on a stage:

>>> from shardlib.schedules.gpipe import GPIPE
>>> pipeline = Pipelines.one(stages=4, chunks=1, microbatches=8)
>>> GPIPE.in_flight(pipeline).item(), GPIPE.waiting(pipeline, np.array([2.0]), None).item()
(8.0, 6.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardlib.schedules.orders import Order

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
        """What each stage does one after the other, where it waits for its neighbours alone."""
        ...

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """Whether stages may have so many chunks of layers."""
        ...

    def fits(self, pipelines: Pipelines) -> Array:
        """Which pipelines have the microbatches that it needs: booleans [candidates]."""
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
        """What `in_flight` is not below, however many chunks a stage has."""
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
        """How often the time of gradients of weights is taken off each of the S - 1 rounds of
        waiting, at the most.
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
    """Which pipelines have a microbatch for every stage, if they have several chunks on it."""
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
