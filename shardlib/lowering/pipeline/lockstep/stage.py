"""What one stage does in one tick.

Functions of what one stage holds, for `jax.shard_map` over the stage axis alone; the other mesh
axes stay automatic inside. What a stage holds is a slice of a global array with a leading dim of
stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.jax_types import Index, Value
from shardlib.lowering.mesh.memories import in_host_memory
from shardlib.lowering.pipeline.lockstep.stage_layouts import OWN
from shardlib.lowering.pipeline.lockstep.stage_values import (
    Backward,
    Held,
    Hop,
    added_layer_by_layer,
    added_to_chunk,
    only_if,
    slot_of,
    with_slot,
)
from shardlib.lowering.pipeline.lockstep.stage_weights import StageWeights
from shardlib.lowering.pipeline.shared.chunk import Gradients, Operands
from shardlib.lowering.pipeline.shared.partition import Arrays


@dataclass(frozen=True, kw_only=True)
class Stages(StageWeights):
    """The stages of a pipeline."""

    def forward(
        self, tick: Index, resident: Held, hop: Hop, entering: Arrays, ring: Arrays
    ) -> tuple[Hop, Arrays, Arrays]:
        """One tick forward.

        Args:
            tick: its number.
            resident: see `Held`.
            hop: what came from the stage before.
            entering: of the microbatch that enters the first stage.
            ring: [stages, slots, ...], what the stages remember; empty where nothing goes back.

        Returns:
            `hop` and `ring` after the tick, and what left the last stage, in the order of
            `leaving`, for `handed_out`.
        """
        replicated = PartitionSpec()
        run = self._manual(
            self._forward, (OWN, replicated, self._held(), OWN, replicated, OWN), (OWN, OWN, OWN)
        )
        return run(self._numbers(), tick, resident, hop, entering, ring)

    def backward(
        self,
        tick: Index,
        resident: Held,
        hop: Hop,
        leaving: Arrays,
        ring: Arrays,
        sums: Gradients,
        passed: Arrays,
    ) -> Backward:
        """One tick backward.

        Args:
            tick, held, ring: as for the forward tick.
            hop: cotangents from the stage after, in the order of `moving`.
            leaving: cotangents of what left the last stage, in the order of those of `leaving` that
                gradients flow through.
            sums: gradients summed so far: of weights [stages, chunks, layers, ...], of shared
                parameters [stages, ...], and the partial sums [stages, chunks, layers, ...].
            passed: [stages, stages, ...], what waits for the making of gradients of weights; empty
                where these are made at once.
        """
        replicated = PartitionSpec()
        run = self._manual(
            self._backward,
            (OWN, replicated, self._held(), OWN, replicated, OWN, OWN, OWN),
            (OWN, OWN, OWN, OWN),
        )
        hop, sums, passed, entered = run(
            self._numbers(), tick, resident, hop, leaving, ring, sums, passed
        )
        return Backward(hop=hop, sums=sums, passed=passed, entered=entered)

    def weights(
        self, tick: Index, resident: Held, ring: Arrays, sums: Gradients, passed: Arrays
    ) -> Gradients:
        """Gradients of weights of one tick, where they are made on their own; arguments as those of
        `backward`, results as its `sums`.
        """
        run = self._manual(self._weights, (OWN, PartitionSpec(), self._held(), OWN, OWN, OWN), OWN)
        return run(self._numbers(), tick, resident, ring, sums, passed)

    def stashed(self, resident: Held) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of what is stashed of one unit, [stages, ...]."""
        return self._shapes(
            lambda operands, zeros: self.chunk.forward(operands, zeros)[1], resident
        )

    def in_host_memory(self, resident: Held) -> list[bool]:
        """Of what is stashed whether it waits in host memory."""
        on_host: list[bool] = []

        def one(operands: Operands, zeros: Arrays) -> Arrays:
            saved = self.chunk.forward(operands, zeros)[1]
            on_host[:] = [in_host_memory(leaf) for leaf in saved]
            return saved

        self._shapes(one, resident)
        return on_host

    def passed_on(self, resident: Held) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of what waits for the making of gradients of weights of one unit,
        [stages, ...].
        """

        def one(operands: Operands, zeros: Arrays) -> Arrays:
            return self.chunk.backward_inputs(
                operands,
                zeros,
                self.chunk.forward(operands, zeros)[1],
                [zeros[k] for k in self.moving],
            )[1]

        return self._shapes(one, resident) if self.table.split else []

    def _shapes(
        self, function: Callable[[Operands, Arrays], Arrays], resident: Held
    ) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of what a function of a chunk's operands and of what enters it gives on
        every stage.
        """

        def one(resident: Held) -> Arrays:
            return [
                leaf[None] for leaf in function(self._operands(resident, 0, 0, 0), self._like())
            ]

        return jax.eval_shape(self._manual(one, (self._held(),), OWN), resident)

    def _forward(
        self, numbers: Value, tick: Index, resident: Held, hop: Hop, entering: Arrays, ring: Arrays
    ) -> tuple[Hop, Arrays, Arrays]:
        stage = numbers[0]
        micro, chunk, works = self.table.forward(tick, stage)
        first = (stage == 0) & (chunk == 0)
        fresh = [
            *entering,
            *(jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.activations[self.entering :]),
        ]
        arrived, waiting = self._arrived(tick, hop, stage == 0)
        arriving = [
            self._inside(jnp.where(first, new, old), k)
            for k, (new, old) in enumerate(zip(fresh, arrived, strict=True))
        ]
        operands = self._operands(resident, stage, micro, chunk)
        left, saved = self._worked(
            works,
            lambda: (
                self.chunk.forward(operands, arriving)
                if ring
                else (self.chunk.run(operands, arriving), [])
            ),
        )
        ring = with_slot(ring, saved, self.table.forward_slot(tick, stage))
        out = [only_if(stage == self.table.stages - 1, left[k])[None] for k in self.leaving]
        return Hop(next=self._hop(left, 1), waiting=waiting), ring, out

    def _arrived(self, tick: Index, hop: Hop, end: Value) -> tuple[Arrays, Arrays]:
        """(what a stage goes on with, what waits after that): what has just come, and at the end
        where the next chunk begins, what came `lag` ticks ago.
        """
        came = [leaf[0] for leaf in hop.next]
        if not hop.waiting:
            return came, []
        slot = tick % self.table.lag
        return [
            jnp.where(end, old, new)
            for old, new in zip(slot_of(hop.waiting, slot), came, strict=True)
        ], with_slot(hop.waiting, came, slot)

    def _backward(
        self,
        numbers: Value,
        tick: Index,
        resident: Held,
        hop: Hop,
        leaving: Arrays,
        ring: Arrays,
        sums: Gradients,
        passed: Arrays,
    ) -> tuple[Hop, Gradients, Arrays, Arrays]:
        stage = numbers[0]
        micro, chunk, works = self.table.backward(tick, stage)
        last = (stage == self.table.stages - 1) & (chunk == self.table.last_chunk)
        last_cotangents = dict(
            zip([k for k in self.leaving if k in self.moving], leaving, strict=True)
        )
        arrived, waiting = self._arrived(tick, hop, stage == self.table.stages - 1)
        cotangents = [
            self._inside(
                jnp.where(
                    last, last_cotangents[k] if k in last_cotangents else jnp.zeros_like(old), old
                ),
                k,
            )
            for k, old in zip(self.moving, arrived, strict=True)
        ]
        operands, saved = (
            self._operands(resident, stage, micro, chunk),
            slot_of(ring, self.table.backward_slot(tick, stage)),
        )
        if self.table.split:
            entered, passing = self._worked(
                works, lambda: self.chunk.backward_inputs(operands, self._like(), saved, cotangents)
            )
            passed = with_slot(passed, passing, self.table.passing_slot(tick, stage))
        else:
            gradients, entered = self._worked(
                works, lambda: self.chunk.backward(operands, self._like(), saved, cotangents)
            )
            sums = self._summed(sums, gradients, chunk, works)
        out = [
            only_if((stage == 0) & (chunk == 0) & works, leaf)[None]
            for k, leaf in zip(self.moving, entered, strict=True)
            if k < self.entering
        ]
        return Hop(next=self._hop(entered, -1), waiting=waiting), sums, passed, out

    def _weights(
        self,
        numbers: Value,
        tick: Index,
        resident: Held,
        ring: Arrays,
        sums: Gradients,
        passed: Arrays,
    ) -> Gradients:
        micro, chunk, works = self.table.weights(tick)
        operands = self._operands(resident, numbers[0], micro, chunk)
        gradients = self.chunk.backward_weights(
            operands,
            self._like(),
            slot_of(ring, self.table.weights_slot(tick)),
            slot_of(passed, self.table.passed_slot(tick)),
        )
        return self._summed(sums, gradients, chunk, works)

    def _worked(self, works: Value, make: Callable[[], Any]) -> Any:
        """What `make` makes; where there is no work zeros, without making them if no other device
        takes part in the making.

        A stage that waits could as well compute, but simulated devices share their cores, and real
        ones their power.
        """
        if self.chunk.saved.offloaded or any(
            size > 1 for axis, size in self.mesh.shape.items() if axis not in self.axis
        ):  # results in host memory have no zeros to stand for them
            return make()
        return jax.lax.cond(
            works,
            make,
            lambda: jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make)
            ),
        )

    def _summed(self, sums: Gradients, more: Gradients, chunk: Value, works: Value) -> Gradients:
        """The sums of gradients, with those of one unit."""

        return Gradients(
            weights=[
                added_to_chunk(total[0], gradient, chunk, works)[None]
                for total, gradient in zip(sums.weights, more.weights, strict=True)
            ],
            sums=added_layer_by_layer(sums.sums, more.sums, chunk % self.window, works),
            shared=[
                total + jnp.where(works, gradient, 0).astype(total.dtype)[None]
                for total, gradient in zip(sums.shared, more.shared, strict=True)
            ],
        )

    def _operands(self, resident: Held, stage: Any, micro: Any, chunk: Any) -> Operands:
        """What one stage works with in one chunk."""
        of_chunk = partial(jax.lax.dynamic_index_in_dim, index=chunk, axis=0, keepdims=False)
        drawn = [
            of_chunk(jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False)[0])
            for leaf in resident.drawn
        ]
        ready = [
            jax.lax.dynamic_index_in_dim(leaf[0], chunk % self.window, 0, keepdims=False)
            for leaf in resident.ready
        ]
        return Operands(
            weights=[of_chunk(leaf[0]) for leaf in resident.weights],
            tables=[of_chunk(leaf[0]) for leaf in resident.tables],
            drawn=drawn,
            shared=resident.shared,
            constant=resident.constant,
            ready=ready,
            first=(chunk * self.table.stages + stage) * self.chunk.layers,
        )
