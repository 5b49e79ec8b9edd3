"""The work of a stage on one microbatch.

Functions of lists of arrays, for one chunk of layers on the mesh of its stage. What comes before
the layers is done with the first chunk, and again when that goes back; what comes after them, with
its gradient, when the last chunk goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.trees import Tree
from shardlib.jax_types import Index, Value
from shardlib.lowering.pipeline.layers import (
    PARAMETERS,
    Arrays,
    Chunk,
    Cut,
    Gradients,
    Operands,
    StageRemat,
    Values,
    is_floating,
)
from shardlib.lowering.placing import Placing
from shardlib.tracing.rewriting import Walk, as_array, evaluate_equations, needed


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Held:
    """Arrays that a chunk works with through a step.

    Attributes:
        stacks: of each stacked parameter the chunk's layers, trained ones first, [room, ...].
        kept: what else the loss makes of parameters.
        states: model state before each microbatch, [microbatches, ...].
        parts: arrays of the batch, [microbatches, ...]; those without a batch dim as they are.
        ready: operands of matmuls that are gathered beforehand, [layers, ...].
    """

    stacks: Arrays
    kept: Values
    states: Arrays
    parts: Arrays
    ready: Arrays


def part_of_microbatch(leaf: Value, micro: Index) -> Value:
    """One microbatch of an array.

    Args:
        leaf: [microbatches, ...].
    """
    return jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False)


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
class Work:
    """The work of one chunk.

    Attributes:
        cut: the loss around its loop.
        placing: how values are laid out over the devices of the stage.
        chunk: its layers.
        first: number of its first layer; 0 for the first chunk.
        last: whether it is the last chunk.
        activations: shape and dtype of all that hops.
        entering: how many of these come from before the layers.
        loss: position of the loss among the results.
        in_parts: for every array of the batch, whether it has a part for every microbatch.
        remat: what layers save for their backward passes.
    """

    cut: Cut
    placing: Placing
    chunk: Chunk
    first: int
    last: bool
    activations: tuple[jax.ShapeDtypeStruct, ...]
    entering: int
    loss: int
    in_parts: tuple[bool, ...]
    remat: StageRemat

    @property
    def moving(self) -> tuple[int, ...]:
        """Positions of what gradients flow through."""
        return tuple(k for k, leaf in enumerate(self.activations) if is_floating(leaf))

    @property
    def shared(self) -> tuple[int, ...]:
        """Values that all layers use."""
        return tuple(self.cut.constants[k] for k in self.cut.roles.shared)

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """Values made from trained parameters that are read before the layers (first chunk), or
        after them (last chunk).
        """
        return tuple(
            number
            for number in self.cut.kept
            if number in self._reads and PARAMETERS in self.cut.labels[number]
        )

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        """Values made from frozen parameters that are read there, or by all layers."""
        reads = self._reads | {self.cut.constants[k] for k in self.cut.roles.constant}
        return tuple(
            number
            for number in self.cut.kept
            if number in reads
            and self.cut.labels[number]
            and PARAMETERS not in self.cut.labels[number]
        )

    @cached_property
    def _reads(self) -> set[int]:
        """Returns what is read before the layers (first chunk), or after them (last chunk)."""
        cut, reads = self.cut, set[int]()
        if not self.first:
            reads |= needed(cut.before, cut.entering)[1]
        if self.last:
            reads |= needed(cut.after, cut.results, (*cut.final, *cut.stacked))[1]
        return reads

    def _walk(self) -> Walk:
        return replace(self.placing.walk(), apart=self.remat.outside)

    def _entering(self, resident: Held, micro: Index, entering: Arrays) -> Arrays:
        if self.first:
            return entering
        return [
            *self._before(resident, resident.kept, micro),
            *(jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.activations[self.entering :]),
        ]

    def _before(self, resident: Held, derived: Values, micro: Index) -> Arrays:
        """Returns what comes from before the layers."""
        env = self._env(resident, derived, micro)
        evaluate_equations(self.cut.before, env, self._walk())
        return [jnp.asarray(env[number]) for number in self.cut.entering]

    def _results(self, resident: Held, derived: Values, micro: Index, left: Arrays) -> Arrays:
        """Loss and metrics, for what left the last chunk."""
        cut, env, walk = self.cut, self._env(resident, derived, micro), self._walk()
        count = len(cut.final)
        env.update(
            zip(
                cut.final,
                (
                    walk.put(f"{cut.loop.path}/final/{k}", 0, leaf)
                    for k, leaf in enumerate(left[:count])
                ),
                strict=True,
            )
        )
        env.update(zip(cut.stacked, left[self.entering :], strict=True))
        evaluate_equations(cut.after, env, walk)
        return [as_array(cut.program, number, env[number]) for number in cut.results]

    def _env(self, resident: Held, derived: Values, micro: Index) -> Values:
        """Returns what equations of a microbatch read."""
        used = {
            number: self._used(number, leaf)
            for number, leaf in {**resident.kept, **derived}.items()
        }
        return {
            **self.cut.program.constants,
            **self._known(),
            **used,
            **self._inputs(resident, micro),
        }

    def _inputs(self, resident: Held, micro: Index) -> Values:
        """Model state and batch of a microbatch."""
        inputs = self.cut.program.inputs
        states = [part_of_microbatch(leaf, micro) for leaf in resident.states]
        batch = [
            part_of_microbatch(leaf, micro) if cuts else leaf
            for leaf, cuts in zip(resident.parts, self.in_parts, strict=True)
        ]
        return dict(
            zip(inputs[len(inputs) - len(states) - len(batch) :], [*states, *batch], strict=True)
        )

    def _used(self, number: int, leaf: Any) -> Any:
        """A value made from parameters as the loss takes it."""
        inputs = self.cut.program.inputs
        return self.placing.enter(inputs.index(number), leaf) if number in inputs else leaf

    def _known(self) -> Values:
        """Returns what is made from nothing."""
        cut = self.cut
        numbers = [number for number in cut.kept if not cut.labels[number]]
        env: Values = dict(cut.program.constants)
        evaluate_equations(needed(cut.once, numbers)[0], env, Walk())
        return {number: env[number] for number in numbers}

    def _operands(self, resident: Held, micro: Index) -> Operands:
        cut, values, layers = (
            self.cut,
            {**self.cut.program.constants, **self._known()},
            self.chunk.layers,
        )
        layers_of_chunk = slice(self.first, self.first + layers)
        stacks = [
            [leaf[k] for k in range(layers)] if self.chunk.unrolled else leaf[:layers]
            for leaf in resident.stacks
        ]
        held_tables = dict(zip(cut.frozen_tables, stacks[len(cut.roles.weights) :], strict=True))
        tables = [
            held_tables[k]
            if k in held_tables
            else jnp.asarray(values[cut.scanned[k]])[layers_of_chunk]
            for k in cut.roles.tables
        ]
        values.update({number: self._used(number, resident.kept[number]) for number in self.frozen})
        return Operands(
            weights=stacks[: len(cut.roles.weights)],
            tables=tables,
            drawn=[leaf[layers_of_chunk] for leaf in self._drawn(resident, micro)],
            shared=[self._used(number, resident.kept[number]) for number in self.shared],
            constant=[jnp.asarray(values[cut.constants[k]]) for k in cut.roles.constant],
            ready=resident.ready,
            first=self.first,
        )

    def _drawn(self, resident: Held, micro: Index) -> Arrays:
        """Slices of model state, and of keys of the batch, for all layers."""
        cut = self.cut
        if not cut.roles.drawn:
            return []
        env = {**cut.program.constants, **self._inputs(resident, micro)}
        numbers = [cut.scanned[k] for k in cut.roles.drawn]
        evaluate_equations(needed(cut.program.equations, numbers)[0], env, self._walk())
        return [env[number] for number in numbers]

    def _like(self) -> Arrays:
        """Arrays like those that hop."""
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.activations]

    def forward(self, resident: Held, micro: Index, entering: Arrays) -> tuple[Arrays, Arrays]:
        """(what leaves the chunk, what its backward pass has to remember); what enters the first
        chunk is made here.
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
        """The whole backward pass."""
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
    """A function of trees as one of lists of leaves, for trees like the given ones."""
    structure = jax.tree.structure(arguments)
    return lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))


def _plus(sums: Values, more: Values) -> Values:
    return {number: total + more[number].astype(total.dtype) for number, total in sums.items()}


@jax.tree_util.register_dataclass
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
