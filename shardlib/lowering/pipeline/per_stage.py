"""Per-stage programs (MPMD): one process drives a pipeline whose stages are programs of their own.

One process sees all devices. Each stage has its own mesh (the devices of the program's mesh at one
index of the stage axis) and its own compiled programs: forward, backward and, where the schedule
splits the backward pass, weight gradients. A step calls program after program in an order in which
none waits for a later one (`shardlib.schedules.orders`, `simulation`); outputs of a chunk are
copied to the devices of the next chunk.

Nothing in this loop waits for a device: programs are compiled beforehand, and calls return when the
work is queued. Stages therefore wait for their neighbours only, as in MPMD pipelines (JaxPP,
arXiv:2412.14374), and may have different numbers of layers. A chunk's stash is freed when the last
program that reads it is queued; gradient sums are donated from program to program. Where the
schedule runs the last chunk's backward pass right after its forward pass, both are one program.
Chunk c of stage s is number g = c S + s of all chunks, and takes the layers after those of chunk g
- 1. If the layers do not divide evenly, the first chunks have one more.

>>> layer_split = LayerSplit(layers=5, stages=2, virtual=2)
>>> layer_split.counts
(2, 1, 1, 1)
>>> layer_split.layers_of(0), layer_split.layers_of(1), layer_split.padded_positions
((0, 1, 2, 2), (3, 3, 4, 4), (0, 1, 2, 4, 6))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.trees import Tree
from shardlib.errors import PlanError
from shardlib.jax_types import Index, Metrics, Value
from shardlib.layout import MeshShape
from shardlib.lowering.accumulation import Microbatches
from shardlib.lowering.contractions import as_dtype
from shardlib.lowering.loss_layouts import LossLayouts
from shardlib.lowering.mesh import HOST, ParameterShardings, batch_path, physical_axes, without_axes
from shardlib.lowering.pipeline.layers import (
    PARAMETERS,
    Arrays,
    Chunk,
    ChunkGrads,
    ChunkOperands,
    SplitLoss,
    StageRemat,
    Values,
    is_differentiable,
    pregathered_weights,
    results_and_gradients,
)
from shardlib.lowering.pipeline.lockstep import Pipeline, plus
from shardlib.lowering.random_keys import BatchDims
from shardlib.lowering.runtime import Executable, TracedFunction, TrainState
from shardlib.planner.plan import Plan
from shardlib.processes.progress import counted
from shardlib.schedules import BACKWARD, FORWARD, WEIGHTS, Durations, Order, Task, orders, simulate
from shardlib.tracing.rewriting import Walk, as_array, evaluate_equations, needed

# --------------------------------------------------------------------------------------------------
# The work of a stage on one microbatch, for one chunk of layers on the mesh of its stage.
#
# What precedes the layers runs with the first chunk's forward pass, and again in its backward pass;
# what follows the layers runs, with its gradient, in the last chunk's backward pass.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChunkInputs:
    """Inputs of a chunk that stay the same through a step.

    Attributes:
        stacks: the chunk's layers of each stacked parameter, trained ones first, [max_layers, ...].
        per_step: other values that the loss computes from parameters.
        states: model state before each microbatch, [microbatches, ...].
        batch: arrays of the batch, [microbatches, ...]; those without a batch dim unchanged.
        gathered: pregathered matmul operands, [layers, ...].
    """

    stacks: Arrays
    per_step: Values
    states: Arrays
    batch: Arrays
    gathered: Arrays


def microbatch_slice(leaf: Value, micro: Index) -> Value:
    """One microbatch of an array [microbatches, ...]."""
    return jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OutsideSums:
    """The `early` sums: those that are updated with the input-gradient half of the backward pass.

    Attributes:
        outside: gradients of values read before and after the layers, [1, ...].
        results: loss and metrics of the last chunk, [1, ...].
    """

    outside: Values
    results: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WeightSums:
    """The `late` sums: those of weight gradients, which the schedule may delay.

    Attributes:
        weights: gradients of stacked parameters, [max_layers, ...]; during the microbatches, of
            those in `Chunk.per_tick_weights` only.
        shared: gradients of parameters that all layers use, [1, ...].
        partial_sums: per-device partial sums for pregathered matmul operands,
            [layers, ...].
    """

    weights: Arrays
    shared: Arrays
    partial_sums: Arrays


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """The work of one chunk.

    Attributes:
        sections: the loss, split around its loop over layers.
        layouts: layouts of values over the devices of the stage.
        first_layer: index of the chunk's first layer; 0 for the first chunk.
        activations: shape and dtype of everything that is sent from stage to stage.
        entering_count: number of these that are computed before the layers.
        loss_position: position of the loss among the results.
        is_split: for each array of the batch, whether it is split into microbatches.
        remat: what layers save for their backward passes.
    """

    sections: SplitLoss
    layouts: LossLayouts
    chunk: Chunk
    first_layer: int
    is_last: bool
    activations: tuple[jax.ShapeDtypeStruct, ...]
    entering_count: int
    loss_position: int
    is_split: tuple[bool, ...]
    remat: StageRemat

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the activations that gradients flow through."""
        return tuple(k for k, leaf in enumerate(self.activations) if is_differentiable(leaf))

    @property
    def shared(self) -> tuple[int, ...]:
        """Values used by all layers."""
        return tuple(self.sections.constants[k] for k in self.sections.roles.shared)

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """Values computed from trained parameters and read before the layers (first chunk) or after
        them (last chunk).
        """
        return tuple(
            number
            for number in self.sections.per_step
            if number in self._reads and PARAMETERS in self.sections.labels[number]
        )

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        """Values computed from frozen parameters and read there, or by all layers."""
        reads = self._reads | {self.sections.constants[k] for k in self.sections.roles.constant}
        return tuple(
            number
            for number in self.sections.per_step
            if number in reads
            and self.sections.labels[number]
            and PARAMETERS not in self.sections.labels[number]
        )

    @cached_property
    def _reads(self) -> set[int]:
        """Values read before the layers (first chunk) or after them (last chunk)."""
        sections, reads = self.sections, set[int]()
        if not self.first_layer:
            reads |= needed(sections.before, sections.entering)[1]
        if self.is_last:
            from_layers = (*sections.final, *sections.stacked)
            reads |= needed(sections.after, sections.results, from_layers)[1]
        return reads

    def _walk(self) -> Walk:
        return replace(self.layouts.walk(), layer_policies=self.remat.loops)

    def _entering(self, arrays: ChunkInputs, micro: Index, entering: Arrays) -> Arrays:
        if self.first_layer:
            return entering
        before = self._before(arrays, arrays.per_step, micro)
        buffers = self.activations[self.entering_count :]
        return [*before, *(jnp.zeros(leaf.shape, leaf.dtype) for leaf in buffers)]

    def _before(self, arrays: ChunkInputs, derived: Values, micro: Index) -> Arrays:
        """Activations computed before the layers."""
        env = self._env(arrays, derived, micro)
        evaluate_equations(self.sections.before, env, self._walk())
        return [jnp.asarray(env[number]) for number in self.sections.entering]

    def _results(
        self, arrays: ChunkInputs, derived: Values, micro: Index, outputs: Arrays
    ) -> Arrays:
        """Loss and metrics from the outputs of the last chunk."""
        sections, env, walk = self.sections, self._env(arrays, derived, micro), self._walk()
        count = len(sections.final)
        env.update(
            zip(
                sections.final,
                (
                    walk.apply(f"{sections.loop.path}/final/{k}", 0, leaf)
                    for k, leaf in enumerate(outputs[:count])
                ),
                strict=True,
            )
        )
        env.update(zip(sections.stacked, outputs[self.entering_count :], strict=True))
        evaluate_equations(sections.after, env, walk)
        return [as_array(sections.program, number, env[number]) for number in sections.results]

    def _env(self, arrays: ChunkInputs, derived: Values, micro: Index) -> Values:
        """Values that the equations of a microbatch read."""
        used = {
            number: self._used(number, leaf)
            for number, leaf in {**arrays.per_step, **derived}.items()
        }
        return {
            **self.sections.program.constants,
            **self._constants(),
            **used,
            **self._inputs(arrays, micro),
        }

    def _inputs(self, arrays: ChunkInputs, micro: Index) -> Values:
        """Model state and batch of a microbatch."""
        states = [microbatch_slice(leaf, micro) for leaf in arrays.states]
        batch = [
            microbatch_slice(leaf, micro) if split else leaf
            for leaf, split in zip(arrays.batch, self.is_split, strict=True)
        ]
        return self.sections.of_microbatch(states, batch)

    def _used(self, number: int, leaf: Any) -> Any:
        """A value computed from parameters, in the layout in which the loss reads it."""
        inputs = self.sections.program.inputs
        return self.layouts.parameter(inputs.index(number), leaf) if number in inputs else leaf

    def _constants(self) -> Values:
        """Values computed without any input."""
        sections = self.sections
        numbers = [number for number in sections.per_step if not sections.labels[number]]
        env: Values = dict(sections.program.constants)
        evaluate_equations(needed(sections.per_step_equations, numbers)[0], env, Walk())
        return {number: env[number] for number in numbers}

    def _operands(self, arrays: ChunkInputs, micro: Index) -> ChunkOperands:
        sections = self.sections
        values = {**self.sections.program.constants, **self._constants()}
        layers = self.chunk.layers
        layers_of_chunk = slice(self.first_layer, self.first_layer + layers)
        stacks = [
            [leaf[k] for k in range(layers)] if self.chunk.unrolled else leaf[:layers]
            for leaf in arrays.stacks
        ]
        stacked_constants = dict(
            zip(sections.frozen_layer_constants, stacks[len(sections.roles.weights) :], strict=True)
        )
        layer_constants = [
            stacked_constants[k]
            if k in stacked_constants
            else jnp.asarray(values[sections.scanned[k]])[layers_of_chunk]
            for k in sections.roles.layer_constants
        ]
        values |= {number: self._used(number, arrays.per_step[number]) for number in self.frozen}
        return ChunkOperands(
            weights=stacks[: len(sections.roles.weights)],
            layer_constants=layer_constants,
            keys=[leaf[layers_of_chunk] for leaf in self._keys(arrays, micro)],
            shared=[self._used(number, arrays.per_step[number]) for number in self.shared],
            constant=[jnp.asarray(values[sections.constants[k]]) for k in sections.roles.constant],
            gathered=arrays.gathered,
            first_layer=self.first_layer,
        )

    def _keys(self, arrays: ChunkInputs, micro: Index) -> Arrays:
        """Per-layer slices of model state and of random keys in the batch, for all layers."""
        if not self.sections.roles.keys:
            return []
        return self.sections.keys(self._inputs(arrays, micro), self._walk())

    def _zeros(self) -> Arrays:
        """Zeros with the shapes of the activations that are sent between stages."""
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.activations]

    def forward(self, arrays: ChunkInputs, micro: Index, entering: Arrays) -> tuple[Arrays, Arrays]:
        """(outputs of the chunk, its stash for the backward pass); the first chunk computes its own
        inputs.
        """
        return self.chunk.forward(
            self._operands(arrays, micro), self._entering(arrays, micro, entering)
        )

    def backward(
        self,
        arrays: ChunkInputs,
        micro: Index,
        outputs: Arrays,
        stash: Arrays,
        cotangents: Arrays,
        early: OutsideSums,
        late: WeightSums,
    ) -> tuple[OutsideSums, WeightSums, Arrays]:
        """The whole backward pass."""
        early, cotangents = self._after_layers(arrays, micro, outputs, cotangents, early)
        gradients, input_grads = self.chunk.backward(
            self._operands(arrays, micro), self._zeros(), stash, cotangents
        )
        return (
            self._before_layers(arrays, micro, early, input_grads),
            self._summed(late, gradients),
            self._sent(input_grads),
        )

    def backward_inputs(
        self,
        arrays: ChunkInputs,
        micro: Index,
        outputs: Arrays,
        stash: Arrays,
        cotangents: Arrays,
        early: OutsideSums,
    ) -> tuple[OutsideSums, Arrays, Arrays]:
        """The input-gradient half of the backward pass, which the previous stage waits for; also
        gives the residuals that `backward_weights` needs besides the stash.
        """
        early, cotangents = self._after_layers(arrays, micro, outputs, cotangents, early)
        input_grads, residuals = self.chunk.backward_inputs(
            self._operands(arrays, micro), self._zeros(), stash, cotangents
        )
        return (
            self._before_layers(arrays, micro, early, input_grads),
            self._sent(input_grads),
            residuals,
        )

    def backward_weights(
        self, arrays: ChunkInputs, micro: Index, stash: Arrays, residuals: Arrays, late: WeightSums
    ) -> WeightSums:
        """The weight-gradient half of the backward pass, which no stage waits for."""
        return self._summed(
            late,
            self.chunk.backward_weights(
                self._operands(arrays, micro), self._zeros(), stash, residuals
            ),
        )

    def gather(self, arrays: ChunkInputs) -> Arrays:
        """The operands in `ChunkInputs.gathered`."""
        pregathered = self.chunk.pregathered
        return [] if pregathered is None else pregathered.gather(self._sources(arrays))

    def reduced(self, arrays: ChunkInputs, late: WeightSums) -> WeightSums:
        """Gradients of all stacked parameters after the last microbatch, with the partial sums
        reduced into them.
        """
        pregathered, positions = self.chunk.pregathered, self.sections.roles.weights
        assert pregathered is not None
        totals = {
            positions[k]: total
            for k, total in zip(self.chunk.per_tick_weights, late.weights, strict=True)
        }
        for position, gradient, stack in zip(
            pregathered.sources,
            pregathered.reduce(self._sources(arrays), late.partial_sums),
            self._sources(arrays, padded=True),
            strict=True,
        ):
            total = totals.get(
                position, jnp.zeros(stack.shape, self.layouts.reductions.accumulator(stack.dtype))
            )
            totals[position] = total.at[: self.chunk.layers].add(gradient.astype(total.dtype))
        weights = [totals[position] for position in positions]
        return WeightSums(weights=weights, shared=late.shared, partial_sums=[])

    def _sources(self, arrays: ChunkInputs, *, padded: bool = False) -> Arrays:
        """Stacks that pregathered operands are computed from, for the chunk's layers or padded to
        `LayerSplit.max_layers`.
        """
        assert self.chunk.pregathered is not None
        stacks = [
            arrays.stacks[self.sections.roles.weights.index(position)]
            for position in self.chunk.pregathered.sources
        ]
        return stacks if padded else [leaf[: self.chunk.layers] for leaf in stacks]

    def _sent(self, input_grads: Arrays) -> Arrays:
        return input_grads if self.first_layer else []

    def _after_layers(
        self,
        arrays: ChunkInputs,
        micro: Index,
        outputs: Arrays,
        cotangents: Arrays,
        early: OutsideSums,
    ) -> tuple[OutsideSums, Arrays]:
        """Loss and metrics, and the cotangents of the last chunk's outputs; does nothing for other
        chunks.
        """
        if not self.is_last:
            return early, cotangents

        results, (outside, cotangents) = results_and_gradients(
            lambda derived, outputs: self._results(arrays, derived, micro, outputs),
            self.loss_position,
            outputs,
            self._derived(arrays),
        )
        return (
            OutsideSums(outside=plus(early.outside, outside), results=plus(early.results, results)),
            cotangents,
        )

    def _before_layers(
        self, arrays: ChunkInputs, micro: Index, early: OutsideSums, input_grads: Arrays
    ) -> OutsideSums:
        """Gradients of the values that the first chunk reads before the layers; does nothing for
        other chunks.
        """
        if self.first_layer:
            return early
        positions = [k for k in self.differentiable if k < self.entering_count]

        def run(derived: Values) -> Arrays:
            entering = self._before(arrays, derived, micro)
            return [entering[k] for k in positions]

        outside = jax.vjp(run, self._derived(arrays))[1](input_grads[: len(positions)])[0]
        return OutsideSums(outside=plus(early.outside, outside), results=early.results)

    def _derived(self, arrays: ChunkInputs) -> Values:
        """Values with a gradient that are read before or after the layers."""
        return {
            number: arrays.per_step[number]
            for number in self.outside
            if is_differentiable(arrays.per_step[number])
        }

    def _summed(self, late: WeightSums, gradients: ChunkGrads) -> WeightSums:
        def added(total: Any, gradient: Any) -> Any:
            stacked = jnp.stack(gradient) if isinstance(gradient, list) else gradient
            return (
                total.at[: len(stacked)].add(stacked.astype(total.dtype))
                if len(stacked) < len(total)
                else total + stacked.astype(total.dtype)
            )

        return WeightSums(
            weights=[
                added(total, gradient)
                for total, gradient in zip(late.weights, gradients.weights, strict=True)
            ],
            partial_sums=[
                added(total, gradient)
                for total, gradient in zip(late.partial_sums, gradients.partial_sums, strict=True)
            ],
            shared=plus(late.shared, gradients.shared),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ZeroSums:
    """Zero sums before the first microbatch.

    Attributes:
        chunks: (early, late) of each chunk of a stage.
        outside, results: zeros for the sums that only other stages compute.
    """

    chunks: list[tuple[OutsideSums, WeightSums]]
    outside: Values
    results: Arrays


# --------------------------------------------------------------------------------------------------
# The programs of one chunk, compiled for the devices of its stage.
#
# Arguments and results are flat lists, in the order given at the fields of `ChunkPrograms`. Sums
# come first among the results, so that the donated buffers are reused for them.

Avals = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPrograms:
    """The programs of one chunk.

    Attributes:
        gather: arrays -> matmul operands gathered before the first microbatch; None if there are
            none.
        reduce: arrays, late sums -> gradients after the last microbatch; None if the late sums
            are the gradients already.
        forward: arrays, microbatch, inputs -> outputs, stash; None with `fused`.
        backward: arrays, microbatch, outputs (last chunk), stash, cotangents (other chunks), sums
            -> sums, cotangents of the inputs, residuals for `weight_gradients`; None with
            `fused`.
        fused: arrays, microbatch, inputs, sums -> sums, cotangents of the inputs,
            stash and residuals for `weight_gradients`; None if the schedule separates them.
        weight_gradients: arrays, microbatch, stash, residuals, sums -> sums; None if weight
            gradients are part of `backward`.
        outputs: those of the chunk, with shardings.
        stash_positions: positions in the stash that `weight_gradients` reads.
        sent_count: number of cotangents sent to the previous stage.
    """

    gather: Executable | None = None
    reduce: Executable | None = None
    forward: Executable | None = None
    backward: Executable | None = None
    fused: Executable | None = None
    weight_gradients: Executable | None = None
    outputs: Avals = ()
    stash_positions: tuple[int, ...] = ()
    sent_count: int = 0

    @property
    def all(self) -> tuple[Executable, ...]:
        """The programs that are not None."""
        return tuple(program for program in vars(self).values() if isinstance(program, Executable))


@dataclass(frozen=True, kw_only=True)
class ChunkAvals:
    """Inputs of the programs of a chunk, abstract and with shardings.

    Attributes:
        arrays: see `ChunkInputs`.
        micro: index of a microbatch.
        entering: activations that enter the chunk; empty for the first chunk.
        early, late: sums.
        gradients: final gradients of stacked parameters.
    """

    arrays: ChunkInputs
    micro: jax.ShapeDtypeStruct
    entering: Avals
    early: OutsideSums
    late: WeightSums
    gradients: Avals


def chunk_programs(
    work: ChunkWork, avals: ChunkAvals, mesh: Mesh, name: str, *, split: bool, fuse: bool
) -> ChunkPrograms:
    """Compiles the programs of a chunk."""
    programs, avals = _gather_and_reduce(work, avals, mesh, name)
    arguments = (avals.arrays, avals.micro, list(avals.entering))
    forward = _traced(work.forward, arguments, mesh)
    count = len(work.activations)  # outputs, which precede the stash
    saved = [
        _on_host(leaf, mesh) if on_host else leaf
        for leaf, on_host in zip(forward.results[count:], forward.on_host[count:], strict=True)
    ]
    gradients, positions = _weight_gradients(work, avals, saved, mesh) if split else (None, ())
    sent = [leaf.sharding for leaf in avals.entering if is_differentiable(leaf)]
    if fuse:
        run, arguments, sums = _fused(work, avals, positions, split)
        traced = _traced(run, arguments, mesh)
        fused = _with_sums(traced, sums, sent, mesh, f"{name}_both")
        results = fused.results[len(sums) + len(sent) :]
        saved, residuals = results[: len(positions)], results[len(positions) :]
        programs = replace(programs, fused=fused, stash_positions=positions, sent_count=len(sent))
    else:
        forward_program = forward.compiled(f"{name}_forward", mesh)
        outputs, saved = forward_program.results[:count], forward_program.results[count:]
        traced, sums = _backward(work, avals, outputs, saved, mesh, split)
        backward = _with_sums(traced, sums, sent, mesh, f"{name}_backward")
        saved, residuals = [saved[k] for k in positions], backward.results[len(sums) + len(sent) :]
        programs = replace(
            programs,
            forward=forward_program,
            backward=backward,
            outputs=tuple(outputs),
            stash_positions=positions,
            sent_count=len(sent),
        )
    if gradients is None:
        return programs
    inputs = jax.tree.leaves((avals.arrays, avals.micro, list(saved), list(residuals), avals.late))
    return replace(
        programs,
        weight_gradients=_with_sums(
            replace(gradients, inputs=tuple(inputs)),
            jax.tree.leaves(avals.late),
            [],
            mesh,
            f"{name}_weights",
        ),
    )


def _traced(
    function: Callable[..., Tree], arguments: tuple[Tree, ...], mesh: Mesh
) -> TracedFunction:
    """A traced function of trees, with their leaves as flat arguments and results."""
    structure = jax.tree.structure(arguments)
    return TracedFunction.of(
        lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves))),
        jax.tree.leaves(arguments),
        mesh,
    )


def _on_host(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array in host memory, with a placeholder sharding."""
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=HOST)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _gather_and_reduce(
    work: ChunkWork, avals: ChunkAvals, mesh: Mesh, name: str
) -> tuple[ChunkPrograms, ChunkAvals]:
    """The programs before the first and after the last microbatch, and the inputs of the other
    programs.
    """
    if work.chunk.pregathered is None:
        return ChunkPrograms(), avals
    traced = _traced(work.gather, (avals.arrays,), mesh)
    gather = traced.compiled(f"{name}_gather", mesh) if traced.sources else None
    avals = replace(
        avals,
        arrays=replace(
            avals.arrays, gathered=list(on_stage(gather.results, mesh)) if gather else []
        ),
    )
    arguments = (avals.arrays, avals.late)
    reduce = _traced(work.reduced, arguments, mesh)
    return (
        ChunkPrograms(
            gather=gather,
            reduce=reduce.compiled(
                f"{name}_reduce",
                mesh,
                shardings=[
                    *(leaf.sharding for leaf in avals.gradients),
                    *(leaf.sharding for leaf in avals.late.shared),
                ],
            ),
        ),
        avals,
    )


def _with_sums(
    traced: TracedFunction,
    sums: Sequence[jax.ShapeDtypeStruct],
    sent: Sequence[Any],
    mesh: Mesh,
    name: str,
) -> Executable:
    """A program whose last inputs and first results are sums, compiled."""
    return traced.compiled(
        name,
        mesh,
        shardings=[*(leaf.sharding for leaf in sums), *sent],
        donated=range(len(traced.inputs) - len(sums), len(traced.inputs)),
    )


def _weight_gradients(
    work: ChunkWork, avals: ChunkAvals, saved: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
) -> tuple[TracedFunction, tuple[int, ...]]:
    """The function of the weight gradients alone, and the positions in the stash that it reads;
    shardings of these, and of the residuals, are not known yet.
    """

    def residuals(
        arrays: ChunkInputs,
        micro: Any,
        outputs: Any,
        stash: Any,
        cotangents: Any,
        early: OutsideSums,
    ) -> Any:
        return work.backward_inputs(arrays, micro, outputs, stash, cotangents, early)[2]

    outputs, cotangents = _backward_arguments(work, work.activations)
    shapes = jax.eval_shape(
        residuals, avals.arrays, avals.micro, outputs, list(saved), cotangents, avals.early
    )
    arguments = (avals.arrays, avals.micro, list(saved), shapes, avals.late)
    traced = _traced(work.backward_weights, arguments, mesh)
    first = len(jax.tree.leaves(avals.arrays)) + 1
    dropped = [k for k in range(first, first + len(saved)) if k not in traced.read_inputs]
    return traced.without_inputs(dropped), tuple(
        k for k in range(len(saved)) if first + k not in dropped
    )


def _backward_arguments(
    work: ChunkWork, outputs: Sequence[jax.ShapeDtypeStruct]
) -> tuple[list[Any], list[Any]]:
    """(outputs, cotangents of outputs) that a backward pass receives: the last chunk computes the
    cotangents from the outputs.
    """
    return (
        (list(outputs), [])
        if work.is_last
        else ([], [leaf for leaf in outputs if is_differentiable(leaf)])
    )


def _backward(
    work: ChunkWork,
    avals: ChunkAvals,
    outputs: Sequence[jax.ShapeDtypeStruct],
    saved: Sequence[jax.ShapeDtypeStruct],
    mesh: Mesh,
    split: bool,
) -> tuple[TracedFunction, list[Any]]:
    """The backward pass (without weight gradients if these are split off), and its sums."""
    outputs, cotangents = _backward_arguments(work, outputs)
    sums = (avals.early,) if split else (avals.early, avals.late)
    arguments = (avals.arrays, avals.micro, outputs, list(saved), cotangents, *sums)
    run = work.backward_inputs if split else work.backward
    return _traced(run, arguments, mesh), jax.tree.leaves(sums)


def _fused(
    work: ChunkWork, avals: ChunkAvals, positions: Sequence[int], split: bool
) -> tuple[Callable[..., Any], Any, list[Any]]:
    """Forward and backward in one, its arguments, and its sums."""

    def run(
        arrays: ChunkInputs, micro: Any, entering: Any, early: OutsideSums, late: WeightSums
    ) -> Any:
        outputs, saved = work.forward(arrays, micro, entering)
        return work.backward(arrays, micro, outputs, saved, [], early, late)

    def run_inputs(arrays: ChunkInputs, micro: Any, entering: Any, early: OutsideSums) -> Any:
        outputs, saved = work.forward(arrays, micro, entering)
        early, input_grads, residuals = work.backward_inputs(
            arrays, micro, outputs, saved, [], early
        )
        return early, input_grads, [saved[k] for k in positions], residuals

    sums = (avals.early,) if split else (avals.early, avals.late)
    return (
        run_inputs if split else run,
        (avals.arrays, avals.micro, list(avals.entering), *sums),
        jax.tree.leaves(sums),
    )


def on_stage(leaves: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> Avals:
    """Outputs of one stage as inputs of another."""
    specs = [
        leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        for leaf in leaves
    ]
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """Assignment of layers to chunks.

    Attributes:
        virtual: chunks per stage.
    """

    layers: int
    stages: int
    virtual: int

    @property
    def chunks(self) -> int:
        """Number of chunks of all stages."""
        return self.stages * self.virtual

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each chunk."""
        return tuple(
            self.layers // self.chunks + (chunk < self.layers % self.chunks)
            for chunk in range(self.chunks)
        )

    @property
    def max_layers(self) -> int:
        """The most layers of a chunk; chunks with fewer are padded."""
        return self.counts[0]

    @property
    def is_contiguous(self) -> bool:
        """True if a stack of layers that is sharded over the stages needs no rearrangement."""
        return self.virtual == 1 and self.layers % self.stages == 0

    def first_layer(self, chunk: int) -> int:
        """Index of a chunk's first layer."""
        return sum(self.counts[:chunk])

    def layers_of(self, local_chunk: int) -> tuple[int, ...]:
        """The layers of one chunk of every stage, each chunk padded to `max_layers` with its last
        layer.
        """
        chunks = range(local_chunk * self.stages, (local_chunk + 1) * self.stages)
        return tuple(
            self.first_layer(chunk) + min(position, self.counts[chunk] - 1)
            for chunk in chunks
            for position in range(self.max_layers)
        )

    @property
    def padded_positions(self) -> tuple[int, ...]:
        """The position of each layer in the padded chunks, one after the other."""
        return tuple(
            chunk * self.max_layers + position
            for chunk in range(self.chunks)
            for position in range(self.counts[chunk])
        )

    def chunk_stacks(self, stack: Value) -> list[Value]:
        """A stack [layers, ...] as one array [stages * max_layers, ...] per chunk of a stage."""
        return [
            stack if self.is_contiguous else stack[jnp.array(self.layers_of(local_chunk))]
            for local_chunk in range(self.virtual)
        ]

    def layer_stack(self, chunks: Sequence[Value]) -> Value:
        """The stack of layers from the arrays of `chunk_stacks` (its inverse)."""
        if self.is_contiguous:
            return chunks[0]
        return jnp.concatenate(list(chunks))[jnp.array(self.padded_positions)]


# --------------------------------------------------------------------------------------------------
# The arrays of one stage as shards of global arrays.
#
# A stage's mesh has the devices of the program's mesh at one index of the stage axis, which it
# keeps with size 1. An array whose leading dim is sharded over the stages, or that is replicated
# over them, splits into arrays over these meshes without a copy (the buffers are the same), and
# they join into it.


@dataclass(frozen=True, kw_only=True, eq=False)
class StageMeshes:
    """The meshes of the stages.

    Attributes:
        mesh: the mesh of the program.
        stages: the mesh of each stage.
    """

    mesh: Mesh
    stages: tuple[Mesh, ...]

    @staticmethod
    def of(mesh: Mesh) -> StageMeshes:
        """The stages of a mesh."""
        axes = physical_axes(mesh, ("stage",))
        sizes, ones = [mesh.shape[axis] for axis in axes], (1,) * len(axes)
        # The stage axis is the first one.
        grids = mesh.devices.reshape(int(np.prod(sizes)), *ones, *mesh.devices.shape[len(axes) :])
        return StageMeshes(
            mesh=mesh,
            stages=tuple(Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types) for grid in grids),
        )

    @property
    def axis(self) -> tuple[str, ...]:
        """Names of the stage axis."""
        return physical_axes(self.mesh, ("stage",))

    def over_stages(self, tail: Sequence[object] = ()) -> NamedSharding:
        """The sharding of an array with its leading dim over the stages, other dims as given."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis, *tail))

    def is_over_stages(self, sharding: NamedSharding) -> bool:
        """True if the leading dim is sharded over the stages and over no other axis."""
        lead = sharding.spec[0] if len(sharding.spec) else None
        return (lead if isinstance(lead, tuple) else (lead,)) == self.axis

    def stage_sharding(self, sharding: NamedSharding, stage: int) -> NamedSharding:
        """A sharding over all devices restricted to the devices of one stage."""
        return NamedSharding(self.stages[stage], sharding.spec)

    def shape(self, leaf: jax.ShapeDtypeStruct | jax.Array) -> tuple[int, ...]:
        """Shape of one stage's shard of an array."""
        sharding = leaf.sharding
        assert isinstance(sharding, NamedSharding)
        return (
            (leaf.shape[0] // len(self.stages), *leaf.shape[1:])
            if self.is_over_stages(sharding)
            else tuple(leaf.shape)
        )

    def stage_shard(self, leaf: jax.ShapeDtypeStruct, stage: int) -> jax.ShapeDtypeStruct:
        """One stage's shard of an abstract array."""
        assert isinstance(leaf.sharding, NamedSharding)
        return jax.ShapeDtypeStruct(
            self.shape(leaf), leaf.dtype, sharding=self.stage_sharding(leaf.sharding, stage)
        )

    def split(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """Each stage's shard of an array."""
        assert isinstance(array.sharding, NamedSharding)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        shape = self.shape(array)
        return tuple(
            jax.make_array_from_single_device_arrays(
                shape,
                self.stage_sharding(array.sharding, stage),
                [shards[device] for device in mesh.devices.flat],
            )
            for stage, mesh in enumerate(self.stages)
        )

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The array whose leading dim concatenates the shards of the stages."""
        first = arrays[0].sharding
        assert isinstance(first, NamedSharding)
        shape = (arrays[0].shape[0] * len(arrays), *arrays[0].shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape,
            self.over_stages(first.spec[1:]),
            [shard.data for array in arrays for shard in array.addressable_shards],
        )


# --------------------------------------------------------------------------------------------------
# The programs before the first microbatch and after the last, both over all devices.
#
# The setup computes what the loss derives from parameters alone, distributes stacks of layers to
# the stages, splits the batch into microbatches, and gives the model state before each of them. The
# update joins the sums of the stages, back-propagates them to the parameters, and then does what a
# step without stages does.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Values read by all microbatches, over all devices.

    Attributes:
        stacks: each stacked parameter, trained ones first, as [stages * max_layers, ...] per
            chunk of a stage, sharded over the stages.
        per_step: other values computed from parameters, replicated over the stages.
        states: model state before each microbatch, [microbatches, ...].
        after: model state after the last.
        batch: arrays of the batch, [microbatches, ...]; those without a batch dim unchanged.
    """

    stacks: list[Arrays]
    per_step: Values
    states: Arrays
    after: Arrays
    batch: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StageSums:
    """Sums of the stages, over all devices and sharded over the stages.

    Attributes:
        stacks: gradients like `StepInputs.stacks`.
        shared: gradients of parameters that all layers use, [stages, ...] per chunk of a stage.
        outside: gradients of values read before and after the layers, [stages, ...].
        results: loss and metrics, [stages, ...].
    """

    stacks: list[Arrays]
    shared: list[Arrays]
    outside: Values
    results: Arrays


@dataclass(frozen=True, kw_only=True)
class WholeMeshPrograms:
    """The programs before the first microbatch and after the last, over all devices.

    Attributes:
        pipeline: the loss, split into stages.
        params: shardings of the parameters.
        batch: shardings of the batch.
        dims: batch dim of each array of the batch, by path.
        prologue: (model state, batch) -> batch, with values of the whole batch that every
            microbatch reads added to it.
    """

    pipeline: Pipeline
    meshes: StageMeshes
    split: LayerSplit
    params: ParameterShardings
    batch: Tree
    dims: BatchDims
    prologue: Callable[[Tree, Tree], Tree]

    @property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return self.pipeline.microbatches

    @cached_property
    def stacks(self) -> tuple[int, ...]:
        """Values computed from trained parameters that have a slice per layer."""
        sections = self.pipeline.sections
        return tuple(sections.scanned[k] for k in sections.roles.weights)

    @cached_property
    def all_stacks(self) -> tuple[int, ...]:
        """`stacks`, followed by the same for frozen parameters."""
        sections = self.pipeline.sections
        return (*self.stacks, *(sections.scanned[k] for k in sections.frozen_layer_constants))

    @cached_property
    def per_step(self) -> tuple[int, ...]:
        """Other values computed from parameters that the rest of the loss reads."""
        sections = self.pipeline.sections
        reads = sections.read_outside | {
            sections.constants[k] for k in (*sections.roles.shared, *sections.roles.constant)
        }
        return tuple(
            number for number in sections.per_step if number in reads and sections.labels[number]
        )

    @property
    def is_split(self) -> tuple[bool, ...]:
        """For each array of the batch, whether it is split into microbatches."""
        return tuple(
            self.dims[batch_path(path)] is not None
            for path, _ in jax.tree_util.tree_leaves_with_path(self.batch)
        )

    def step_inputs(self, params: Tree, state: Tree, batch: Tree) -> StepInputs:
        """The values read by all microbatches."""
        values = self.derived_values(jax.tree.leaves(params))
        states, after = self.pipeline.states(state)
        stacked, join = Microbatches(
            shardings=self.batch, dims=self.dims, count=self.microbatches
        ).split(self.prologue(state, batch))
        return StepInputs(
            stacks=[self._chunk_stacks(number, values[number]) for number in self.all_stacks],
            per_step={number: self._replicated(number, values[number]) for number in self.per_step},
            states=states,
            after=after,
            batch=jax.tree.leaves(join(stacked)),
        )

    def gradients(
        self, params: Tree, state: Tree, inputs: tuple[Arrays, StageSums]
    ) -> tuple[tuple[Value, tuple[Metrics, Tree]], Tree]:
        """((loss, (metrics, state)), gradients), averaged over the microbatches.

        Args:
            inputs: model state after the step, and the sums of the stages.
        """
        after, summed = inputs
        leaves, structure = jax.tree.flatten(params)

        def differentiable(leaves: Arrays) -> Values:
            return {
                number: leaf
                for number, leaf in self.derived_values(leaves).items()
                if is_differentiable(leaf) and PARAMETERS in self.pipeline.sections.labels[number]
            }

        values, pull = jax.vjp(differentiable, leaves)
        sums = self._sums(summed)
        cotangents = {
            number: (sums[number] / self.microbatches).astype(leaf.dtype)
            for number, leaf in values.items()
        }
        totals = [total.sum(0) / self.microbatches for total in summed.results]
        results = self.pipeline.results(totals, state, after)
        return results, structure.unflatten(pull(cotangents)[0])

    def derived_values(self, leaves: Arrays) -> Values:
        """Values that the loss computes from parameters alone."""
        sections = self.pipeline.sections
        stored = dict(zip(sections.program.inputs, leaves, strict=False))
        env: Values = {
            **sections.program.constants,
            **{
                number: as_dtype(leaf, sections.program.avals[number].dtype)
                for number, leaf in stored.items()
            },
        }
        evaluate_equations(sections.per_step_equations, env, self.pipeline.layouts.walk(loose=True))
        return {
            number: stored.get(number, env[number])
            for number in dict.fromkeys((*self.all_stacks, *self.per_step))
        }

    def gradient(self, number: int, *, layers: bool) -> NamedSharding:
        """The sharding of the summed gradient of a value: [layers, ...] for a stack of layers,
        [stages, ...] for others.
        """
        owner = self.pipeline.sections.owners.get(number)
        spec = () if owner is None else jax.tree.leaves(self.params.gradient)[owner].spec
        return self.meshes.over_stages(self._without_stage_axis(spec[1:] if layers else spec))

    def _sums(self, summed: StageSums) -> Values:
        """Sums of gradients by value."""
        totals: Values = dict(
            zip(self.stacks, map(self.split.layer_stack, summed.stacks), strict=True)
        )
        shared = zip(
            (self.pipeline.sections.constants[k] for k in self.pipeline.sections.roles.shared),
            ([leaf.sum(0) for leaf in chunks] for chunks in summed.shared),
            strict=True,
        )
        for number, more in (
            *((number, sum(leaves[1:], leaves[0])) for number, leaves in shared),
            *((number, leaf.sum(0)) for number, leaf in summed.outside.items()),
        ):
            totals[number] = totals[number] + more if number in totals else more
        return totals

    def _stored_sharding(self, number: int) -> NamedSharding | None:
        """Stored sharding of the parameter that a value is, or is a cast of."""
        owner = self.pipeline.sections.owners.get(number)
        return None if owner is None else jax.tree.leaves(self.params.stored)[owner]

    def _chunk_stacks(self, number: int, stack: Any) -> Arrays:
        """A stack of layers, sharded over the stages; unchanged if it is stored so."""
        stored = self._stored_sharding(number)
        if (
            self.split.is_contiguous
            and number in self.pipeline.sections.program.inputs
            and stored is not None
            and self.meshes.is_over_stages(stored)
        ):
            return [stack]
        spec = () if stored is None else stored.spec[1:]
        sharding = self.meshes.over_stages(self._without_stage_axis(spec))
        return [
            jax.lax.with_sharding_constraint(leaf, sharding)
            for leaf in self.split.chunk_stacks(stack)
        ]

    def _replicated(self, number: int, leaf: Any) -> Any:
        """A value replicated over the stages; unchanged if it is stored so."""
        stored = self._stored_sharding(number)
        spec = PartitionSpec(*self._without_stage_axis(() if stored is None else stored.spec))
        if (
            number in self.pipeline.sections.program.inputs
            and stored is not None
            and spec == stored.spec
        ):
            return leaf
        return jax.lax.with_sharding_constraint(
            jnp.asarray(leaf), NamedSharding(self.meshes.mesh, spec)
        )

    def _without_stage_axis(self, spec: Iterable[Any]) -> tuple[Any, ...]:
        """A spec without the stage axis."""

        def other_axes(entry: Any) -> Any:
            axes = tuple(
                axis
                for axis in (entry if isinstance(entry, tuple) else (entry,))
                if axis is not None and axis not in self.meshes.axis
            )
            return None if not axes else axes[0] if len(axes) == 1 else axes

        return tuple(map(other_axes, spec))


# --------------------------------------------------------------------------------------------------
# Parameters in flight before the work of a step, and the update after it.
#
# While parameters are being received, each stage starts when its own are complete. Tasks of one
# stage keep their order, so the results do not change; a stage that waits for its parameters delays
# only the stages that need its outputs.

#: Model state after a step, and the sums of the stages.
UpdateInputs = tuple[Arrays, StageSums]


class ArrivingParameters(Protocol):
    """Parameters that some stages have received and others still wait for."""

    def has_arrived(self, stage: int) -> bool:
        """True if a stage has all its parameters, or if receiving them has failed."""
        ...

    def shard(self, array: jax.Array, stage: int) -> jax.Array | None:
        """A stage's shard of a parameter, given the placeholder array; None for an array that is
        not a placeholder.
        """
        ...


class Update(Protocol):
    """The update from gradients to the next state, after the last microbatch: one program, or
    several if some of the state is not in device memory.
    """

    def step(self, state: TrainState, batch: UpdateInputs, /) -> tuple[TrainState, Metrics]:
        """(state, (model state after the step, `StageSums`)) -> (state, metrics); the state is
        donated.
        """
        ...

    def memory(self) -> dict[str, int]:
        """Bytes per device of the program that needs the most."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleUpdate:
    """An update that is one program."""

    call: jax.stages.Compiled
    run: Callable[..., tuple[TrainState, Metrics]]

    def step(self, state: TrainState, batch: UpdateInputs, /) -> tuple[TrainState, Metrics]:
        """The next state, and metrics."""
        return self.run(state, batch)

    def memory(self) -> dict[str, int]:
        """Bytes per device of the program."""
        return _jax_compat.compiled_memory(self.call)


def run_tasks(
    tasks: Sequence[tuple[int, Task]],
    is_ready: Callable[[int, Task], bool],
    do: Callable[[int, Task], None],
    arriving: ArrivingParameters,
) -> None:
    """Runs all tasks, each as soon as its stage has its parameters and its inputs from its
    neighbours; if no task can run, waits for the first task's parameters.
    """
    remaining = list(tasks)
    while remaining:
        waiting, later = set[int](), list[tuple[int, Task]]()
        for stage, task in remaining:
            if stage in waiting or not (is_ready(stage, task) and arriving.has_arrived(stage)):
                waiting.add(stage)
                later.append((stage, task))
            else:
                do(stage, task)
        if len(later) == len(remaining):
            stage, task = later.pop(0)
            do(stage, task)  # blocks until its parameters have arrived
        remaining = later


# --------------------------------------------------------------------------------------------------
# One step: the programs called in the order of the schedule.

#: (stage, task) pairs, in an order in which every task comes after the tasks it reads from.
TaskOrder = tuple[tuple[int, Task], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageConstants:
    """The zero sums of one stage, and the indices of the microbatches.

    Attributes:
        zeros: program that makes the first sums: `ZeroSums`.
        indices: the index of each microbatch, as an array.
    """

    zeros: jax.stages.Compiled
    indices: tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPrograms:
    """All programs of a step.

    Attributes:
        setup: parameters, model state, batch -> `StepInputs`.
        inputs_treedef: tree structure of `StepInputs`.
        stacks: number of stacked parameters.
        per_step: for each chunk, the values computed from parameters that it reads.
        outside: for each chunk, the values other than layers whose gradients it sums.
        entering_shardings, cotangent_shardings: for each chunk, of its inputs and of the
            cotangents of its outputs.
        tasks: all tasks in the order in which they are called.
    """

    meshes: StageMeshes
    setup: Executable
    inputs_treedef: Any
    stacks: int
    per_step: tuple[tuple[int, ...], ...]
    outside: tuple[tuple[int, ...], ...]
    chunks: tuple[ChunkPrograms, ...]
    stages: tuple[StageConstants, ...]
    entering_shardings: tuple[list[Any], ...]
    cotangent_shardings: tuple[list[Any], ...]
    tasks: TaskOrder
    update: Update

    def memory(self) -> dict[str, int]:
        """Bytes per device of the program that needs the most."""
        compiled = (
            self.setup.compiled,
            *(program.compiled for chunk in self.chunks for program in chunk.all),
        )
        return max(
            (*map(_jax_compat.compiled_memory, compiled), self.update.memory()),
            key=lambda sizes: sizes["peak"],
        )

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, Metrics]:
        """(state, metrics) after a step; the state is donated."""
        inputs: StepInputs = jax.tree.unflatten(
            self.inputs_treedef,
            self.setup(jax.tree.leaves((state.params, state.loss_state, batch))),
        )
        run = StepRun(self, inputs)
        for task in self.tasks:
            run.do(*task)
        return self.update.step(state, (inputs.after, run.summed()))

    def start(
        self, params: Tree, model_state: Tree, batch: Tree, arriving: ArrivingParameters
    ) -> StepRun:
        """Queues the work of a step whose parameters are still being received; no update."""
        leaves = jax.tree.leaves((params, model_state, batch))
        run = StepRun(self, jax.tree.unflatten(self.inputs_treedef, self.setup(leaves)), arriving)
        run_tasks(self.tasks, run.is_ready, run.do, arriving)
        return run


class StepRun:
    """The state of one step in progress. Arrays are freed when the last program that reads them is
    queued.

    Attributes:
        inputs: values read by all microbatches.
        early, late: sums of each chunk.
    """

    def __init__(
        self, programs: StepPrograms, inputs: StepInputs, arriving: ArrivingParameters | None = None
    ) -> None:
        self.programs, self.stage_count = programs, len(programs.stages)
        self.inputs, self._arriving = inputs, arriving
        self._stage_arrays, self._shards = dict[int, Arrays](), dict[int, tuple[jax.Array, ...]]()
        self.zero_sums: list[ZeroSums] = [stage.zeros() for stage in programs.stages]
        self.early, self.late = dict[int, Arrays](), dict[int, Arrays]()
        for number in range(len(programs.chunks)):
            early, late = self.zero_sums[number % self.stage_count].chunks[
                number // self.stage_count
            ]
            self.early[number], self.late[number] = (jax.tree.leaves(early), jax.tree.leaves(late))
        self.entering, self.outputs, self.saved, self.cotangents = (
            dict[tuple[int, int], Arrays]() for _ in range(4)
        )
        self.work = {FORWARD: self._forward, BACKWARD: self._backward, WEIGHTS: self._weights}

    def do(self, stage: int, task: Task) -> None:
        """Queues a task."""
        self.work[task.kind](task.chunk * self.stage_count + stage, task.microbatch)

    def is_ready(self, stage: int, task: Task) -> bool:
        """True if the neighbours have computed the inputs of a task."""
        chunk = task.chunk * self.stage_count + stage
        program, index = self.programs.chunks[chunk], (chunk, task.microbatch)
        if task.kind == FORWARD or (task.kind == BACKWARD and program.fused is not None):
            is_empty = task.kind == FORWARD and program.forward is None
            return is_empty or not chunk or index in self.entering
        last = chunk == len(self.programs.chunks) - 1
        return task.kind == WEIGHTS or last or index in self.cotangents

    def summed(self) -> StageSums:
        """The sums of the stages, over all devices."""
        programs, join = self.programs, self.programs.meshes.join
        chunk_groups = [
            range(start, start + self.stage_count)
            for start in range(0, len(programs.chunks), self.stage_count)
        ]
        stacks, last = programs.stacks, len(programs.chunks) - 1
        late = [
            [
                join(leaves)
                for leaves in zip(*(self._reduced(number) for number in chunks), strict=True)
            ]
            for chunks in chunk_groups
        ]
        # Zeros from every stage that does not compute a sum.
        sums: list[Values] = [dict(stage_sums.outside) for stage_sums in self.zero_sums]
        for number in (0, last):
            sums[number % self.stage_count].update(
                zip(programs.outside[number], self.early[number], strict=False)
            )
        outside = {number: join([values[number] for values in sums]) for number in sorted(sums[0])}
        results = zip(
            *(stage_sums.results for stage_sums in self.zero_sums[:-1]),
            self.early[last][len(programs.outside[last]) :],
            strict=True,
        )
        return StageSums(
            stacks=[[leaves[k] for leaves in late] for k in range(stacks)],
            shared=[[leaves[k] for leaves in late] for k in range(stacks, len(late[0]))],
            outside=outside,
            results=[join(leaves) for leaves in results],
        )

    def arrays(self, chunk: int) -> Arrays:
        """The inputs of a chunk, in the order of `ChunkInputs`."""
        if chunk not in self._stage_arrays:
            local_chunk, stage = divmod(chunk, self.stage_count)
            inputs, gather = self.inputs, self.programs.chunks[chunk].gather
            leaves = [
                *(chunks[local_chunk] for chunks in inputs.stacks),
                *(inputs.per_step[number] for number in sorted(self.programs.per_step[chunk])),
                *inputs.states,
                *inputs.batch,
            ]
            shards = [self._shard(leaf, stage) for leaf in leaves]
            self._stage_arrays[chunk] = shards if gather is None else [*shards, *gather(shards)]
        return self._stage_arrays[chunk]

    def _shard(self, array: jax.Array, stage: int) -> jax.Array:
        """One stage's shard of an array."""
        received = None if self._arriving is None else self._arriving.shard(array, stage)
        if received is not None:
            return received
        if id(array) not in self._shards:
            self._shards[id(array)] = self.programs.meshes.split(array)
        return self._shards[id(array)][stage]

    def _reduced(self, chunk: int) -> Arrays:
        """Gradients of stacked parameters, and of parameters that all layers use."""
        reduce, late = self.programs.chunks[chunk].reduce, self.late[chunk]
        return late if reduce is None else reduce([*self.arrays(chunk), *late])

    def _arguments(self, chunk: int, micro: int) -> Arrays:
        return [*self.arrays(chunk), self.programs.stages[chunk % self.stage_count].indices[micro]]

    def _forward(self, chunk: int, micro: int) -> None:
        program, index = self.programs.chunks[chunk], (chunk, micro)
        if program.forward is None:
            return  # done by the backward pass
        results = program.forward([*self._arguments(*index), *self.entering.pop(index, ())])
        count = len(program.outputs)
        outputs, self.saved[index] = results[:count], results[count:]
        if chunk + 1 < len(self.programs.chunks):
            self.entering[chunk + 1, micro] = jax.device_put(
                outputs, self.programs.entering_shardings[chunk + 1]
            )
        else:
            self.outputs[index] = outputs

    def _backward(self, chunk: int, micro: int) -> None:
        program, index = self.programs.chunks[chunk], (chunk, micro)
        sums = [*self.early[chunk], *(self.late[chunk] if program.weight_gradients is None else ())]
        if program.fused is not None:
            inputs = [*self._arguments(*index), *self.entering.pop(index, ())]
            results = program.fused([*inputs, *sums])
        else:
            assert program.backward is not None
            saved = self.saved.pop(index)
            results = program.backward(
                [
                    *self._arguments(*index),
                    *self.outputs.pop(index, ()),
                    *saved,
                    *self.cotangents.pop(index, ()),
                    *sums,
                ]
            )
        outside_count, count = len(self.early[chunk]), len(sums)
        self.early[chunk] = results[:outside_count]
        if chunk:
            self.cotangents[chunk - 1, micro] = jax.device_put(
                results[count : count + program.sent_count],
                self.programs.cotangent_shardings[chunk - 1],
            )
        if program.weight_gradients is None:
            self.late[chunk] = results[outside_count:count]
        elif program.fused is not None:
            self.saved[index] = results[count + program.sent_count :]
        else:
            self.saved[index] = [
                *(saved[k] for k in program.stash_positions),
                *results[count + program.sent_count :],
            ]

    def _weights(self, chunk: int, micro: int) -> None:
        program, index = self.programs.chunks[chunk], (chunk, micro)
        assert program.weight_gradients is not None
        self.late[chunk] = program.weight_gradients(
            [*self._arguments(*index), *self.saved.pop(index), *self.late[chunk]]
        )


# --------------------------------------------------------------------------------------------------
# The programs of all stages of a pipeline, and the order in which one process calls them.


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePrograms:
    """A pipeline with one program per stage, before compilation.

    Attributes:
        whole_mesh: the programs over all devices.
        order: the tasks of each stage, in order.
    """

    plan: Plan
    whole_mesh: WholeMeshPrograms
    work: tuple[ChunkWork, ...]
    order: tuple[Order, ...]

    def _per_step_reads(self, chunk: int) -> tuple[int, ...]:
        """Values computed from parameters that a chunk reads besides its layers."""
        work = self.work[chunk]
        return tuple(sorted({*work.outside, *work.shared, *work.frozen}))

    def _stage_arrays(self, chunk: int, inputs: StepInputs) -> ChunkInputs:
        """The inputs of a chunk, abstract."""
        meshes = self.whole_mesh.meshes
        local_chunk, stage = divmod(chunk, len(meshes.stages))
        return ChunkInputs(
            stacks=[meshes.stage_shard(chunks[local_chunk], stage) for chunks in inputs.stacks],
            per_step={
                number: meshes.stage_shard(inputs.per_step[number], stage)
                for number in self._per_step_reads(chunk)
            },
            states=[meshes.stage_shard(leaf, stage) for leaf in inputs.states],
            batch=[meshes.stage_shard(leaf, stage) for leaf in inputs.batch],
            gathered=[],
        )

    def _sums(self, chunk: int) -> dict[str, Any]:
        """The sums of a chunk, abstract."""
        work = self.work[chunk]
        outside = {
            number: self._sum(number, chunk) for number in work.outside if self._has_grad(number)
        }
        return {
            "early": OutsideSums(
                outside=outside, results=self._zero_results(chunk) if work.is_last else []
            ),
            "late": WeightSums(
                weights=[self._gradients(chunk)[k] for k in work.chunk.per_tick_weights],
                shared=[self._sum(number, chunk) for number in work.shared],
                partial_sums=self._partial_sums(chunk),
            ),
        }

    def _gradients(self, chunk: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Gradients of stacked parameters, abstract."""
        return tuple(self._sum(number, chunk, layers=True) for number in self.whole_mesh.stacks)

    def _partial_sums(self, chunk: int) -> Arrays:
        """Per-device partial sums for pregathered operands, abstract."""
        chunk_layers = self.work[chunk].chunk
        uses = chunk_layers.pregathered.uses.values() if chunk_layers.pregathered else ()
        return [
            self._like(
                (chunk_layers.layers, *use.sums_aval.shape),
                self._accumulator(use.sums_aval.dtype),
                PartitionSpec(None, *use.sums_spec),
                chunk,
            )
            for use in uses
        ]

    def _zero_results(self, chunk: int) -> Arrays:
        sections = self.work[0].sections
        avals = [sections.program.avals[number] for number in sections.results]
        return [
            self._like(
                (1, *aval.shape),
                jnp.promote_types(aval.dtype, jnp.float32),
                PartitionSpec(self.whole_mesh.meshes.axis),
                chunk,
            )
            for aval in avals
        ]

    def _sum(self, number: int, chunk: int, *, layers: bool = False) -> jax.ShapeDtypeStruct:
        """The abstract sum of the gradient of a value."""
        aval = self.work[0].sections.program.avals[number]
        shape = (self.whole_mesh.split.max_layers, *aval.shape[1:]) if layers else (1, *aval.shape)
        return self._like(
            shape,
            self._accumulator(aval.dtype),
            self.whole_mesh.gradient(number, layers=layers).spec,
            chunk,
        )

    def _like(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, chunk: int
    ) -> jax.ShapeDtypeStruct:
        meshes = self.whole_mesh.meshes
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(meshes.stages[chunk % len(meshes.stages)], spec)
        )

    def _accumulator(self, dtype: Any) -> Any:
        """The dtype in which gradients of a given dtype are summed."""
        return self.whole_mesh.pipeline.layouts.reductions.accumulator(dtype)

    def _has_grad(self, number: int) -> bool:
        return is_differentiable(self.work[0].sections.program.avals[number])

    @property
    def splits_backward(self) -> bool:
        """True if the schedule computes weight gradients separately."""
        return any(task.kind == WEIGHTS for task in self.order[0])

    @property
    def fuses_last(self) -> bool:
        """True if the last chunk runs backward right after forward for every microbatch."""
        last = [
            task
            for task in self.order[-1]
            if task.chunk == self.plan.virtual_stages - 1 and task.kind != WEIGHTS
        ]
        pairs = zip(self.order[-1], self.order[-1][1:], strict=False)
        return sum(
            task.kind == FORWARD and following == replace(task, kind=BACKWARD) and task in last
            for task, following in pairs
        ) * 2 == len(last)

    def compiled(
        self, state: Tree, batch: Tree, update: Callable[[UpdateInputs], Update], name: str
    ) -> StepPrograms:
        """Compiles all programs."""
        whole_mesh, meshes = self.whole_mesh, self.whole_mesh.meshes
        arguments = (state.params, state.loss_state, batch)
        structure = jax.tree.structure(jax.eval_shape(whole_mesh.step_inputs, *arguments))
        setup_program = _traced(whole_mesh.step_inputs, arguments, meshes.mesh).compiled(
            f"{name}_setup", meshes.mesh
        )
        step_inputs: StepInputs = jax.tree.unflatten(
            structure, on_stage(setup_program.results, meshes.mesh)
        )
        count, last, chunks = len(meshes.stages), len(self.work) - 1, list[ChunkPrograms]()
        entering = list[tuple[jax.ShapeDtypeStruct, ...]]([()])
        for number, work in enumerate(counted(self.work, "compiling programs of stages")):
            mesh = meshes.stages[number % count]
            avals = ChunkAvals(
                arrays=self._stage_arrays(number, step_inputs),
                micro=_index(mesh),
                entering=entering[-1],
                gradients=self._gradients(number),
                **self._sums(number),
            )
            chunks.append(
                chunk_programs(
                    work,
                    avals,
                    mesh,
                    f"{name}_chunk{number}",
                    split=self.splits_backward,
                    fuse=self.fuses_last and number == last,
                )
            )
            if number < last:
                entering.append(on_stage(chunks[-1].outputs, meshes.stages[(number + 1) % count]))
        return StepPrograms(
            meshes=meshes,
            setup=setup_program,
            inputs_treedef=structure,
            stacks=len(whole_mesh.stacks),
            per_step=tuple(self._per_step_reads(number) for number in range(last + 1)),
            outside=tuple(
                tuple(sorted(self._sums(number)["early"].outside)) for number in range(last + 1)
            ),
            chunks=tuple(chunks),
            stages=tuple(map(self._stage, range(count))),
            entering_shardings=tuple([leaf.sharding for leaf in leaves] for leaves in entering),
            cotangent_shardings=tuple(
                [
                    NamedSharding(meshes.stages[number % count], leaf.sharding.spec)
                    for leaf in leaves
                    if is_differentiable(leaf)
                ]
                for number, leaves in enumerate(entering[1:])
            ),
            tasks=_task_order(self.order),
            update=update((step_inputs.after, self._summed())),
        )

    def _stage(self, stage: int) -> StageConstants:
        """The zero sums of a stage, and the indices of its microbatches."""
        mesh, last = self.whole_mesh.meshes.stages[stage], len(self.work) - 1
        count = len(self.order)
        chunks = [tuple(self._sums(number).values()) for number in range(stage, last + 1, count)]
        summed_here = {number for early, _ in chunks for number in early.outside}
        outside_values = {
            number for end in (0, last) for number in self._sums(end)["early"].outside
        }
        zero_sums = ZeroSums(
            chunks=chunks,
            outside={number: self._sum(number, stage) for number in outside_values - summed_here},
            results=[] if stage == count - 1 else self._zero_results(stage),
        )
        zeros = (
            jax.jit(
                lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), zero_sums),
                out_shardings=jax.tree.map(lambda leaf: leaf.sharding, zero_sums),
            )
            .lower()
            .compile()
        )
        return StageConstants(
            zeros=zeros,
            indices=tuple(
                jax.device_put(np.int32(micro), NamedSharding(mesh, PartitionSpec()))
                for micro in range(self.plan.microbatches)
            ),
        )

    def _summed(self) -> StageSums:
        """The sums of the stages after the last microbatch, abstract."""
        whole_mesh, meshes, count = self.whole_mesh, self.whole_mesh.meshes, len(self.order)

        def whole(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (leaf.shape[0] * count, *leaf.shape[1:]),
                leaf.dtype,
                sharding=NamedSharding(meshes.mesh, leaf.sharding.spec),
            )

        late = [
            WeightSums(
                weights=[whole(leaf) for leaf in self._gradients(number)],
                shared=[whole(leaf) for leaf in self._sums(number)["late"].shared],
                partial_sums=[],
            )
            for number in range(0, len(self.work), count)
        ]
        ends = [self._sums(number)["early"] for number in (0, len(self.work) - 1)]
        return StageSums(
            stacks=[[sums.weights[k] for sums in late] for k in range(len(whole_mesh.stacks))],
            shared=[[sums.shared[k] for sums in late] for k in range(len(late[0].shared))],
            outside=jax.tree.map(whole, {**ends[0].outside, **ends[1].outside}),
            results=[whole(leaf) for leaf in ends[1].results],
        )


def _task_order(order: tuple[Order, ...]) -> TaskOrder:
    """All tasks, in the order in which they would start if forward work took half as long as
    backward work.
    """
    split = any(task.kind == WEIGHTS for task in order[0])
    spans = simulate(order, Durations(forward=1.0, backward=1.0 if split else 2.0, weights=1.0))
    return tuple(
        (span.stage, span.task)
        for span in sorted(spans, key=lambda span: (span.start, span.end, -span.stage))
    )


def _index(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))


# --------------------------------------------------------------------------------------------------
# A plan's pipeline as programs of its stages.

#: The most layers of a chunk that are unrolled; a chunk with more is a loop.
MAX_UNROLLED_LAYERS = 8


def stage_programs(
    plan: Plan,
    pipeline: Pipeline,
    mesh: Mesh | AbstractMesh,
    params: ParameterShardings,
    batch: Tree,
    dims: BatchDims,
    prologue: Callable[[Tree, Tree], Tree] = lambda state, batch: batch,
) -> StagePrograms:
    """The stages of a plan as programs of their own."""
    meshes, order = StageMeshes.of(_with_devices(mesh)), _order(plan)
    layer_split = LayerSplit(
        layers=pipeline.sections.layers, stages=len(meshes.stages), virtual=plan.virtual_stages
    )
    whole_mesh = WholeMeshPrograms(
        pipeline=pipeline,
        meshes=meshes,
        split=layer_split,
        params=params,
        batch=batch,
        dims=dims,
        prologue=prologue,
    )
    stage_plan = replace(
        plan,
        mesh=MeshShape({**plan.mesh, "stage": 1}),
        parameters=tuple(without_axes(parameter, ("stage",)) for parameter in plan.parameters),
    )
    work = tuple(_work(number, whole_mesh, stage_plan) for number in range(layer_split.chunks))
    return StagePrograms(plan=plan, whole_mesh=whole_mesh, work=work, order=order)


def _with_devices(mesh: Mesh | AbstractMesh) -> Mesh:
    """The concrete mesh, if there is a single process: with several, the processes whose devices
    are not in a stage could not call its programs.
    """
    others = f"there are {jax.process_count()} processes"
    if isinstance(mesh, AbstractMesh) or jax.process_count() > 1:
        raise PlanError(
            "pipeline='programs' runs from one process that has all devices, and"
            f" {'there are none here' if isinstance(mesh, AbstractMesh) else others}"
            "\nTry: pipeline='lockstep'"
        )
    return mesh


def _order(plan: Plan) -> tuple[tuple[Task, ...], ...]:
    """The tasks of each stage in order: the schedule, repeated for each group of microbatches."""
    try:
        group = orders(
            plan.schedule,
            stages=plan.mesh["stage"],
            microbatches=plan.microbatches // plan.accumulation,
            virtual=plan.virtual_stages,
        )
    except ValueError as error:
        raise PlanError(
            f"pipeline='programs' cannot follow the plan: {error}\nTry: pipeline='lockstep', or"
            " another schedule"
        ) from error
    starts = range(0, plan.microbatches, plan.microbatches // plan.accumulation)
    return tuple(
        tuple(
            replace(task, microbatch=start + task.microbatch) for start in starts for task in tasks
        )
        for tasks in group
    )


def _work(number: int, whole_mesh: WholeMeshPrograms, stage_plan: Plan) -> ChunkWork:
    """The work of one chunk of layers, on the mesh of its stage."""
    pipeline, split, stages = whole_mesh.pipeline, whole_mesh.split, whole_mesh.meshes.stages
    layers, mesh = split.counts[number], stages[number % len(stages)]
    sections = pipeline.sections
    on_mesh = jax.tree.map(lambda leaf: NamedSharding(mesh, leaf.spec), vars(whole_mesh.params))
    layouts = LossLayouts.of(
        pipeline.traced, stage_plan, mesh, ParameterShardings(**on_mesh), pipeline.layouts.values
    )
    layouts = replace(layouts, reductions=pipeline.layouts.reductions)
    chunk = Chunk(
        sections=sections,
        layers=layers,
        padded=False,
        remat=pipeline.remat.of_chunk(number // len(stages), layers),
        walk=layouts.walk,
        pregathered=pregathered_weights(layouts, sections, mesh),
        unrolled=layers <= MAX_UNROLLED_LAYERS,
    )
    return ChunkWork(
        sections=sections,
        layouts=layouts,
        chunk=chunk,
        first_layer=split.first_layer(number),
        is_last=number == split.chunks - 1,
        activations=pipeline.stages.activations,
        entering_count=pipeline.stages.entering_count,
        loss_position=pipeline.loss_position,
        is_split=whole_mesh.is_split,
        remat=pipeline.remat,
    )
