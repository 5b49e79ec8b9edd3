"""Interleaved 1F1B: v chunks of layers a stage, each for a group of S microbatches
(arXiv:2104.04473, section 2.2).

Chunk c of stage s comes after chunk c of stage s - 1, chunk c + 1 of stage 0 after chunk c of the
last stage. Stage s goes forward (v - 1) S + 2 (S - s - 1) times before it goes back. A step takes
(m + (S - 1) / v) t, for microbatches in groups of S: where S does not divide m, a group of fewer
takes as long as a full one. The first stage holds S + (S - 1) / v microbatches (arXiv:2205.05198,
section 4.2.3).

>>> order = INTERLEAVED.order(stages=2, microbatches=2, chunks=2)
>>> [str(task) for task in order[1]]
['F0', 'F1', 'Fb0', 'Bb0', 'Fb1', 'Bb1', 'B0', 'B1']
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardlib.schedules.orders import BACKWARD, FORWARD, Order, Task, alternating
from shardlib.schedules.schedule import (
    Array,
    Pipelines,
    enough_for_chunks,
    last_in_turn,
    one_in_turn,
    words_of,
)


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
