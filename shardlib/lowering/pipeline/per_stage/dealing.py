"""Which layers does each chunk have, and how do stacks of layers go to the stages and come back?

Chunk c of stage s is number g = c S + s of all chunks, and takes the layers after those of chunk g
- 1. Where layers do not divide, the first chunks have one more.

>>> dealing = Dealing(layers=5, stages=2, virtual=2)
>>> dealing.counts, dealing.rows(0), dealing.rows(1), dealing.places
((2, 1, 1, 1), (0, 1, 2, 2), (3, 3, 4, 4), (0, 1, 2, 4, 6))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from shardlib.jax_types import Value


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """Layers dealt out to chunks.

    Attributes:
        layers: number of layers.
        stages: number of stages.
        virtual: chunks of a stage.
    """

    layers: int
    stages: int
    virtual: int

    @property
    def chunks(self) -> int:
        """Chunks of all stages."""
        return self.stages * self.virtual

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of every chunk."""
        return tuple(
            self.layers // self.chunks + (chunk < self.layers % self.chunks)
            for chunk in range(self.chunks)
        )

    @property
    def room(self) -> int:
        """Layers that every chunk has room for."""
        return self.counts[0]

    @property
    def plain(self) -> bool:
        """Whether a stack of layers, sharded over the stages, is dealt already."""
        return self.virtual == 1 and self.layers % self.stages == 0

    def first(self, chunk: int) -> int:
        """Number of a chunk's first layer."""
        return sum(self.counts[:chunk])

    def rows(self, turn: int) -> tuple[int, ...]:
        """For one chunk of every stage, the layer in each of their places; a place that is too many
        repeats the layer before it.
        """
        chunks = range(turn * self.stages, (turn + 1) * self.stages)
        return tuple(
            self.first(chunk) + min(place, self.counts[chunk] - 1)
            for chunk in chunks
            for place in range(self.room)
        )

    @property
    def places(self) -> tuple[int, ...]:
        """For every layer its place, where the places of all chunks follow each other."""
        return tuple(
            chunk * self.room + place
            for chunk in range(self.chunks)
            for place in range(self.counts[chunk])
        )

    def dealt(self, stack: Value) -> list[Value]:
        """A stack of layers [layers, ...] as one array [stages * room, ...] for each chunk of a
        stage.
        """
        return [
            stack if self.plain else stack[jnp.array(self.rows(turn))]
            for turn in range(self.virtual)
        ]

    def gathered(self, parts: Sequence[Value]) -> Value:
        """The stack of layers for what `dealt` gives."""
        return parts[0] if self.plain else jnp.concatenate(list(parts))[jnp.array(self.places)]
