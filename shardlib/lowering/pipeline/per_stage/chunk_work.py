"""What does a stage do with one microbatch?

Functions of lists of arrays, for one chunk of layers on the mesh of its stage. What comes before
the layers is done with the first chunk, and again when that goes back; what comes after them, with
its gradient, when the last chunk goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Index
from shardlib.lowering.pipeline.per_stage.chunk_values import ChunkValues, Held
from shardlib.lowering.pipeline.shared.chunk import Gradients
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays, Values


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Early:
    """Sums of what the stage before does not wait for, and the backward pass of the ends makes at
    once.

    Attributes:
        outside: gradients of what is read before and after the layers, [1, ...].
        totals: loss and metrics, [1, ...]; of the last chunk.
    """

    outside: Values
    totals: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Late:
    """Sums of gradients that may be made apart.

    Attributes:
        weights: of stacked parameters, [room, ...]; while microbatches are under way, of those in
            `Chunk.own`.
        shared: of parameters that all layers use, [1, ...].
        sums: partial sums of every device for the operands of matmuls that are gathered beforehand,
            [layers, ...].
    """

    weights: Arrays
    shared: Arrays
    sums: Arrays


@dataclass(frozen=True, kw_only=True)
class Work(ChunkValues):
    """The work of one chunk."""

    def forward(self, resident: Held, micro: Index, entering: Arrays) -> tuple[Arrays, Arrays]:
        """(what leaves the chunk, what its backward pass has to remember); what enters the first
        chunk is made here.

        Args:
            resident: what the stage has for the whole step.
            micro: number of the microbatch, int32 scalar.
            entering: stage activations that enter the chunk.
        """
        return self.chunk.forward(
            self._operands(resident, micro), self._entering(resident, micro, entering)
        )

    def backward(
        self,
        resident: Held,
        micro: Index,
        left: Arrays,
        stashed: Arrays,
        back: Arrays,
        early: Early,
        late: Late,
    ) -> tuple[Early, Late, Arrays]:
        """The whole backward pass.

        Args:
            resident: see `Held`.
            micro: number of the microbatch.
            left: what left the last chunk; empty for others.
            stashed: what `forward` gave.
            back: cotangents of what left, in the order of `moving`; empty for the last chunk.
            early, late: sums so far.

        Returns:
            The sums, and cotangents of what entered, in the order of `moving`; none for the first
            chunk.
        """
        early, back = self._after_layers(resident, micro, left, back, early)
        gradients, entered = self.chunk.backward(
            self._operands(resident, micro), self._like(), stashed, back
        )
        return (
            self._before_layers(resident, micro, early, entered),
            self._summed(late, gradients),
            self._sent(entered),
        )

    def backward_inputs(
        self,
        resident: Held,
        micro: Index,
        left: Arrays,
        stashed: Arrays,
        back: Arrays,
        early: Early,
    ) -> tuple[Early, Arrays, Arrays]:
        """The part of it that the stage before waits for; gives what `backward_weights` has to be
        given in addition.
        """
        early, back = self._after_layers(resident, micro, left, back, early)
        entered, passed = self.chunk.backward_inputs(
            self._operands(resident, micro), self._like(), stashed, back
        )
        return self._before_layers(resident, micro, early, entered), self._sent(entered), passed

    def backward_weights(
        self, resident: Held, micro: Index, stashed: Arrays, passed: Arrays, late: Late
    ) -> Late:
        """The part that nothing waits for."""
        return self._summed(
            late,
            self.chunk.backward_weights(
                self._operands(resident, micro), self._like(), stashed, passed
            ),
        )

    def gather(self, resident: Held) -> Arrays:
        """`Held.ready`."""
        gathered = self.chunk.known
        return [] if gathered is None else gathered.gather(self._sources(resident))

    def reduced(self, resident: Held, late: Late) -> Late:
        """Gradients of all stacked parameters, with what the partial sums make of them, once all
        microbatches are done.

        Args:
            resident: what the stage has for the whole step.
            late: sums over all microbatches.
        """
        gathered, positions = self.chunk.known, self.cut.roles.weights
        assert gathered is not None
        totals = {
            positions[k]: total for k, total in zip(self.chunk.own, late.weights, strict=True)
        }
        for position, gradient, stack in zip(
            gathered.sources,
            gathered.reduce(self._sources(resident), late.sums),
            self._sources(resident, padded=True),
            strict=True,
        ):
            total = totals.get(
                position, jnp.zeros(stack.shape, self.placing.reductions.accumulator(stack.dtype))
            )
            totals[position] = total.at[: self.chunk.layers].add(gradient.astype(total.dtype))
        return Late(
            weights=[totals[position] for position in positions], shared=late.shared, sums=[]
        )

    def _sources(self, resident: Held, *, padded: bool = False) -> Arrays:
        """Stacks that operands are gathered beforehand of, for the chunk's layers or with all the
        room there is.
        """
        assert self.chunk.known is not None
        stacks = [
            resident.stacks[self.cut.roles.weights.index(position)]
            for position in self.chunk.known.sources
        ]
        return stacks if padded else [leaf[: self.chunk.layers] for leaf in stacks]

    def _sent(self, entered: Arrays) -> Arrays:
        return entered if self.first else []

    def _after_layers(
        self, resident: Held, micro: Index, left: Arrays, back: Arrays, early: Early
    ) -> tuple[Early, Arrays]:
        """Loss and metrics, and the cotangents of what left the last chunk; for other chunks
        nothing happens.
        """
        if not self.last:
            return early, back

        def run(derived: Values, moving: Arrays) -> tuple[Any, Arrays]:
            floating = iter(moving)
            results = self._results(
                resident,
                derived,
                micro,
                [next(floating) if is_floating(leaf) else leaf for leaf in left],
            )
            return results[self.loss], results

        derived = {
            number: resident.kept[number]
            for number in self.outside
            if is_floating(resident.kept[number])
        }
        _, pull, results = jax.vjp(
            run, derived, [leaf for leaf in left if is_floating(leaf)], has_aux=True
        )
        outside, back = pull(jnp.ones((), results[self.loss].dtype))
        return (
            Early(
                outside=_plus(early.outside, outside),
                totals=[
                    total + leaf.astype(total.dtype)
                    for total, leaf in zip(early.totals, results, strict=True)
                ],
            ),
            back,
        )

    def _before_layers(self, resident: Held, micro: Index, early: Early, entered: Arrays) -> Early:
        """Gradients of what the first chunk reads before the layers; for other chunks nothing
        happens.
        """
        if self.first:
            return early
        positions = [k for k in self.moving if k < self.entering]

        def run(derived: Values) -> Arrays:
            entering = self._before(resident, derived, micro)
            return [entering[k] for k in positions]

        derived = {
            number: resident.kept[number]
            for number in self.outside
            if is_floating(resident.kept[number])
        }
        outside = jax.vjp(run, derived)[1](entered[: len(positions)])[0]
        return Early(outside=_plus(early.outside, outside), totals=early.totals)

    def _summed(self, late: Late, gradients: Gradients) -> Late:
        def added(total: Any, gradient: Any) -> Any:
            stacked = jnp.stack(gradient) if isinstance(gradient, list) else gradient
            return (
                total.at[: len(stacked)].add(stacked.astype(total.dtype))
                if len(stacked) < len(total)
                else total + stacked.astype(total.dtype)
            )

        return Late(
            weights=[
                added(total, gradient)
                for total, gradient in zip(late.weights, gradients.weights, strict=True)
            ],
            sums=[
                added(total, gradient)
                for total, gradient in zip(late.sums, gradients.sums, strict=True)
            ],
            shared=[
                total + gradient.astype(total.dtype)
                for total, gradient in zip(late.shared, gradients.shared, strict=True)
            ],
        )


def flat(function: Callable[..., Tree], arguments: tuple[Tree, ...]) -> Callable[..., Arrays]:
    """A function of trees as one of lists of leaves, for trees like the given ones.

    Args:
        function: of trees.
        arguments: tuple of trees, arrays or abstract.
    """
    structure = jax.tree.structure(arguments)
    return lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))


def _plus(sums: Values, more: Values) -> Values:
    return {number: total + more[number].astype(total.dtype) for number, total in sums.items()}


@dataclass(frozen=True, kw_only=True)
class First:
    """Sums before the first microbatch.

    Attributes:
        chunks: (early, late) of each chunk of a stage.
        outside, totals: zeros for what other stages alone sum up.
    """

    chunks: list[tuple[Early, Late]]
    outside: Values
    totals: Arrays


jax.tree_util.register_dataclass(First, data_fields=["chunks", "outside", "totals"], meta_fields=[])
