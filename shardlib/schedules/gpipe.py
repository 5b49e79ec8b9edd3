"""GPipe: all forward work, then all backward work (arXiv:1811.06965, figure 2).

    stage 0  F0 F1 F2       B2 B1 B0         a stage goes back with the last microbatch first
    stage 1     F0 F1 F2 B2 B1 B0

A step takes (m + S - 1) t for t seconds a microbatch and stage, and the activations of all m
microbatches are held. In a single program (SPMD) a stage may have v chunks of layers, and all
microbatches go through one chunk before the next (breadth first, arXiv:2211.05953): (m + (S - 1) /
v) t, with an activation stash of m v + S - 1 places.

>>> [str(task) for task in GPIPE.order(stages=2, microbatches=3, chunks=1)[0]]
['F0', 'F1', 'F2', 'B2', 'B1', 'B0']
"""

from __future__ import annotations

import numpy as np

from shardlib.schedules.orders import BACKWARD, FORWARD, Order, plain
from shardlib.schedules.schedule import (
    PASSING,
    Array,
    Pipelines,
    enough_for_chunks,
    only_whole_stages,
    words_of,
)


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
        """Where it is pinned: it is as fast as 1F1B, and holds more. With chunks it is in the
        space for weights that are gathered once (`shardlib.planning.space`).
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
