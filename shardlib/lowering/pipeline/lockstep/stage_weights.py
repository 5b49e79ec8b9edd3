"""Weights that stages gather once for many ticks, and the reduction of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.jax_types import Index
from shardlib.lowering.pipeline.lockstep.stage_layouts import OWN, StageLayouts
from shardlib.lowering.pipeline.lockstep.stage_values import (
    Held,
)
from shardlib.lowering.pipeline.shared.chunk import Chunk
from shardlib.lowering.pipeline.shared.partition import Arrays


@dataclass(frozen=True, kw_only=True)
class StageWeights(StageLayouts):
    """The weights of the stages that are gathered beforehand.

    Attributes:
        chunk: some layers.
    """

    chunk: Chunk

    @property
    def window(self) -> int:
        """Chunks whose operands are gathered at a time: while stages go over from one chunk to the
        next, two.
        """
        return 2 if self.in_rounds else self.table.virtual

    @property
    def in_rounds(self) -> bool:
        """Whether chunks are gathered when their rounds begin."""
        gathered = self.chunk.known
        return bool(self.table.rounds and gathered and gathered.operands)

    def gather(self, resident: Held) -> Arrays:
        """The operands that are gathered beforehand, [stages, chunks, layers, ...].

        Args:
            resident: what each stage has for the whole step.
        """
        if self.chunk.known is None:
            return []
        return self._manual(self._gather, (self._held(),), OWN)(resident)

    def gather_over(self, resident: Held, ready: Arrays, chunk: Index) -> Arrays:
        """The operands that are gathered beforehand [stages, window, layers, ...], with those of
        one chunk in its slot.

        Args:
            resident: what each stage has for the whole step.
            ready: those of other chunks.
            chunk: number of the chunk, int32 scalar.
        """
        replicated = PartitionSpec()
        return self._manual(self._gather_over, (self._held(), OWN, replicated), OWN)(
            resident, ready, chunk
        )

    def reduce(self, resident: Held, sums: Arrays) -> Arrays:
        """Gradients of weights for the partial sums of what is gathered beforehand, [stages,
        chunks, layers, ...].

        Args:
            resident: what each stage has for the whole step.
            sums: partial sums, in the order of what is gathered.
        """
        if self.chunk.known is None:
            return []
        return self._manual(self._reduce, (self._held(), OWN), OWN)(resident, sums)

    def reduce_out(self, resident: Held, sums: Arrays, slot: Index) -> tuple[Arrays, Arrays]:
        """(gradients of weights [stages, layers, ...] for the partial sums in one slot, the sums
        with zeros there).

        Args:
            resident: what each stage has for the whole step.
            sums: partial sums [stages, window, layers, ...], in the order of what is gathered.
            slot: number of the slot, int32 scalar.
        """
        run = self._manual(self._reduce_out, (self._held(), OWN, PartitionSpec()), (OWN, OWN))
        return run(resident, sums, slot)

    def no_sums(self) -> Arrays:
        """Where the partial sums go, [stages, chunks, layers, ...] in float32 at least."""

        def zeros() -> Arrays:
            gathered = self.chunk.known
            leaves = gathered.zeros((1, self.window, self.chunk.layers)) if gathered else []
            return [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]

        return self._manual(zeros, (), OWN)()

    def _gather(self, resident: Held) -> Arrays:
        gathered = self.chunk.known
        assert gathered is not None
        weights = [leaf[0] for leaf in self._sources(resident)]
        operands = gathered.gather([leaf.reshape(-1, *leaf.shape[2:]) for leaf in weights])
        return [leaf.reshape(1, self.table.virtual, -1, *leaf.shape[1:]) for leaf in operands]

    def _gather_over(self, resident: Held, ready: Arrays, chunk: Index) -> Arrays:
        gathered = self.chunk.known
        assert gathered is not None
        weights = [
            jax.lax.dynamic_index_in_dim(leaf[0], chunk, 0, keepdims=False)
            for leaf in self._sources(resident)
        ]
        operands = gathered.gather_over(weights, [leaf[0] for leaf in ready], chunk % self.window)
        return [leaf[None] for leaf in operands]

    def _reduce(self, resident: Held, sums: Arrays) -> Arrays:
        gathered = self.chunk.known
        assert gathered is not None
        weights = [leaf[0, 0] for leaf in self._sources(resident)]
        gradients = gathered.reduce(
            weights, [leaf[0].reshape(-1, *leaf.shape[3:]) for leaf in sums]
        )
        return [leaf.reshape(1, self.table.virtual, -1, *leaf.shape[1:]) for leaf in gradients]

    def _reduce_out(self, resident: Held, sums: Arrays, slot: Index) -> tuple[Arrays, Arrays]:
        gathered = self.chunk.known
        assert gathered is not None
        weights = [leaf[0, 0] for leaf in self._sources(resident)]
        gradients, emptied = gathered.reduce_out(weights, [leaf[0] for leaf in sums], slot)
        return [leaf[None] for leaf in gradients], [leaf[None] for leaf in emptied]

    def _sources(self, resident: Held) -> Arrays:
        """The weights that gathered operands are made from, [its stage, chunks, layers, ...]."""
        gathered = self.chunk.known
        assert gathered is not None
        places = self.chunk.cut.roles.weights
        return [resident.weights[places.index(position)] for position in gathered.sources]

    def _held(self) -> Held:
        """Specs of what stages hold, in the place of the arrays."""
        per_stage: Any = PartitionSpec(self.axis)
        replicated: Any = PartitionSpec()
        drawn: Any = PartitionSpec(None, self.axis)
        return Held(
            weights=per_stage,
            tables=per_stage,
            drawn=drawn,
            shared=replicated,
            constant=replicated,
            ready=per_stage,
        )
