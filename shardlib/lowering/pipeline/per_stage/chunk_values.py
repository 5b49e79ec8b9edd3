"""What a chunk of layers reads and makes for one microbatch, as functions that can be compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.jax_types import Index, Value
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.pipeline.shared.chunk import Chunk, Operands
from shardlib.lowering.pipeline.shared.layer_loop import PARAMETERS
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays, Cut, Values
from shardlib.lowering.pipeline.shared.stage_remat import StageRemat
from shardlib.tracing.rewriting.binding import as_array
from shardlib.tracing.rewriting.dependence import needed
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.walk import Walk


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Held:
    """What a chunk works with through a step.

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
        micro: number of the microbatch, int32 scalar.
    """
    return jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False)


@dataclass(frozen=True, kw_only=True)
class ChunkValues:
    """The values of one chunk.

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
        """What is read before the layers (first chunk), or after them (last chunk)."""
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
        """What comes from before the layers."""
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
        """What equations of a microbatch read."""
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
        """What is made from nothing."""
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
