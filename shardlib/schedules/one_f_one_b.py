"""1F1B: stage s of S goes forward S - s - 1 times, then one forward and one backward in turn
(PipeDream-Flush, arXiv:2006.09503, section 2.2).

    stage 0  F0 F1    B0 F2 B1    B2
    stage 1     F0 B0 F1 B1 F2 B2

A step takes as long as GPipe's, (m + S - 1) t, and the first stage holds min(m, S) microbatches; in
a single program (SPMD) the 2S - 1 places of its activation stash, and what passes.

>>> [str(task) for task in ONE_F_ONE_B.order(stages=2, microbatches=3, chunks=1)[0]]
['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
"""

from __future__ import annotations

import numpy as np

from shardlib.schedules.orders import BACKWARD, FORWARD, Order, alternating, plain
from shardlib.schedules.schedule import (
    Array,
    Pipelines,
    last_in_turn,
    one_in_turn,
    only_whole_stages,
    words_of,
)


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
