"""The work of one stage in one tick.

Functions of one stage's arrays, for `jax.shard_map` over the stage axis alone; the other mesh axes
stay automatic inside. A stage's array is a slice of a global array with a leading dim of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.jax_types import Index, Value
from shardlib.layout import Layout
from shardlib.lowering.collectives import Regions, row_major
from shardlib.lowering.mesh import named_sharding, physical_axes
from shardlib.lowering.pipeline.layers import (
    Arrays,
    Chunk,
    ChunkGrads,
    ChunkOperands,
    PregatheredWeights,
    SumPlace,
    is_differentiable,
)
from shardlib.schedules import Timetable

# --------------------------------------------------------------------------------------------------
# Stage activations, and the dim along which they are sharded over the stages outside of the layers.


def dim_of_stages(layout: Layout | None) -> int | None:
    """The dim that is sharded over the stages, or None."""
    return (
        next((dim for dim, axes in enumerate(layout) if "stage" in axes), None)
        if layout is not None
        else None
    )


# --------------------------------------------------------------------------------------------------
# Arrays of the stages, as pytrees with a leading dim of stages.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StageArrays:
    """Arrays of every stage that stay the same through all ticks.

    Attributes:
        weights: each stacked parameter, [stages, chunks, layers, ...], sharded over the stages.
        layer_constants: the same of each constant with a slice per layer.
        keys: each array of model state with a slice per layer, [microbatches, stages, chunks,
            layers, ...].
        shared, constant: see `ChunkOperands`.
        gathered: pregathered operands, [stages, chunks, layers, ...]; of two chunks
            only if a chunk is gathered when its round begins.
    """

    weights: Arrays
    layer_constants: Arrays
    keys: Arrays
    shared: Arrays
    constant: Arrays
    gathered: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Arrays in flight between stages.

    Attributes:
        next: arrays received from the neighbour, [stages, ...].
        waiting: arrays that wait at the first stage (backward: the last) until it starts the next
            chunk, [stages, ticks, ...]; empty if nothing waits.
    """

    next: Arrays
    waiting: Arrays


@dataclass(frozen=True, kw_only=True)
class BackwardTick:
    """Results of a backward tick.

    Attributes:
        in_flight, sums, residuals: see `Stages.backward`.
        input_grads: cotangents of the first stage's inputs, in the order of
            `Stages.differentiable`, for `from_stages`.
    """

    in_flight: InFlight
    sums: ChunkGrads
    residuals: Arrays
    input_grads: Arrays


def slot_of(stash: Arrays, slot: Index) -> Arrays:
    """One slot of a stage's activation stash, arrays [its stage, slots, ...]."""
    return [jax.lax.dynamic_index_in_dim(slots[0], slot, 0, keepdims=False) for slots in stash]


def with_slot(stash: Arrays, arrays: Arrays, slot: Index) -> Arrays:
    """The activation stash, arrays [its stage, slots, ...], with one slot replaced."""
    return [
        jax.lax.dynamic_update_index_in_dim(slots[0], leaf, slot, 0)[None]
        for slots, leaf in zip(stash, arrays, strict=True)
    ]


def or_zeros(condition: Value, array: Value) -> Value:
    """An array where a condition holds, otherwise zeros."""
    return jnp.where(condition, array, jnp.zeros_like(array))


#: Names of the messages between stages in a compiled program, by direction.
HOPS = {"forward": "shardlib-hop-forward", "backward": "shardlib-hop-backward"}


def in_rounds(table: Timetable, pregathered: PregatheredWeights | None) -> bool:
    """True if chunks are gathered when their rounds begin."""
    return bool(table.rounds and pregathered and pregathered.operands)


def gathered_slots(table: Timetable, pregathered: PregatheredWeights | None) -> int:
    """Number of chunks whose operands are gathered at a time: two in rounds, while stages move from
    one chunk to the next.
    """
    return 2 if in_rounds(table, pregathered) else table.virtual


#: Spec of an array with a leading dim of stages, of which each stage has its own slice.
STAGE = "stage"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a pipeline.

    Attributes:
        table: the schedule.
        axis: names of the stage axis in the mesh.
        activations: shape and dtype of everything sent from stage to stage: the carry, the values
            sent along with it, and buffers of the layers' stacked results.
        entering_count: number of these that are computed before the layers; the buffers start as
            zeros.
        leaving: positions of those that are read after the layers.
        stage_dims: for each, its dim sharded over the stages outside of the pipeline, or None.
        layouts: for each, its layout in the plan over the other axes; None if left to the compiler.
        outside: for each, its layout outside of the pipeline, if fully known.
        chunk: the function of a run of layers.
        regions: manual regions over all mesh axes.
    """

    table: Timetable
    mesh: Mesh | AbstractMesh
    axis: tuple[str, ...]
    activations: tuple[jax.ShapeDtypeStruct, ...]
    entering_count: int
    leaving: tuple[int, ...]
    stage_dims: tuple[int | None, ...]
    layouts: tuple[Layout | None, ...]
    outside: tuple[Layout | None, ...]
    chunk: Chunk
    regions: Regions

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the activations that gradients flow through."""
        return tuple(k for k, leaf in enumerate(self.activations) if is_differentiable(leaf))

    def over_stages(self, array: Value) -> Value:
        """An array [stages, ...] with its leading dim sharded over the stages."""
        free = PartitionSpec.UNCONSTRAINED
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(self.axis, *[free] * (array.ndim - 1)))
        )

    def outside_layout(self, array: Value, position: int) -> Value:
        """A stage activation in its sharding outside of the pipeline."""
        dim, layout = self.stage_dims[position], self.outside[position]
        if layout is not None:
            return jax.lax.with_sharding_constraint(array, named_sharding(self.mesh, layout))
        if self.layouts[position] is None and dim is None:
            return array
        spec_dims = self._spec_dims(position, array.ndim)
        if dim is not None:
            spec_dims[dim] = self.axis
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(*spec_dims))
        )

    def from_stages(self, arrays: Value, position: int) -> Value:
        """The slice of the one stage whose entry in `arrays` [stages, ...] is not zero, in its
        sharding outside of the pipeline.
        """
        arrays = self._row_major(arrays, position, self.axis)
        return self.outside_layout(
            jax.lax.reduce(arrays, np.zeros((), arrays.dtype), jax.lax.add, (0,)), position
        )

    def inside_layout(self, array: Value, position: int) -> Value:
        """The reverse of `outside_layout`: replicated over the stages, as every stage reads it."""
        dim = self.stage_dims[position]
        if dim is None:
            return array
        spec_dims = self._spec_dims(position, array.ndim)
        if self.outside[position] is None:
            spec_dims[dim] = None  # the plan does not shard this dim inside of the pipeline
        array = jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(*spec_dims))
        )
        return self._row_major(array, position)

    def _row_major(self, array: Value, position: int, *lead: tuple[str, ...]) -> Value:
        """An activation, after dims sharded over `lead`, with its last dim innermost in memory.

        The collectives over the stages want their dim outermost. XLA for GPUs gives that memory
        layout to the activation stash of some loops over ticks and not of others, and copies all
        of it between them (Llama 2 70B on 16*h100:8: 47.5 GiB for 37.1, JAX 0.10.2).
        """
        if self.regions.torus or self.layouts[position] is None or not self.stage_dims[position]:
            return array
        spec = PartitionSpec(*lead, *self._spec_dims(position, array.ndim - len(lead)))
        return self.regions.manual(row_major, (spec,), spec)(array)

    def _spec_dims(self, position: int, rank: int) -> list[Any]:
        """Mesh axes of the plan by dim, for an array of `activations`; unconstrained where the plan
        has no layout for it.
        """
        layout = self.layouts[position]
        return [
            PartitionSpec.UNCONSTRAINED if layout is None else physical_axes(self.mesh, layout[k])
            for k in range(rank)
        ]

    def _inside(self, array: Value, position: int) -> Value:
        """An activation in its sharding inside of a stage."""
        layout, mesh = self.layouts[position], jax.sharding.get_abstract_mesh()
        if layout is None:
            return array
        return jax.lax.with_sharding_constraint(array, named_sharding(mesh, layout))

    def _stage_indices(self) -> Value:
        """The index of every stage, [stages]: an operand of the work of a stage.

        `axis_index` would be a manual region of its own without operands, since other axes are
        automatic around it; XLA moves its PartitionId out of there, and then rejects it (JAX 0.10.2
        with TPUs).
        """
        return self.over_stages(jnp.arange(self.table.stages, dtype=jnp.int32))

    def _zeros(self) -> Arrays:
        """Zeros with the shapes of the activations that are sent between stages."""
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.activations]

    def _hop(self, arrays: Arrays, direction: int) -> Arrays:
        """Sends arrays to the next stage (1), or the one before (-1)."""
        count = self.table.stages
        with jax.named_scope(HOPS["forward" if direction > 0 else "backward"]):
            return [
                jax.lax.ppermute(
                    leaf, self.axis, [(i, (i + direction) % count) for i in range(count)]
                )[None]
                for leaf in arrays
            ]

    def _manual(
        self, function: Callable[..., Any], arguments: Sequence[Any], results: Any
    ) -> Callable[..., Any]:
        """A function in a region that is manual over the stage axis.

        Args:
            arguments, results: their specs, or `STAGE`.
        """

        def spec(entry: Any) -> Any:
            return PartitionSpec(self.axis) if entry is STAGE else entry

        specs = (
            tuple(spec(entry) for entry in arguments),
            (tuple(map(spec, results)) if isinstance(results, tuple) else spec(results)),
        )
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs[0],
            out_specs=specs[1],
            axis_names=set(self.axis),
            check_vma=False,
        )

    @property
    def gathered_slots(self) -> int:
        """Number of chunks whose operands are gathered at a time."""
        return gathered_slots(self.table, self.chunk.pregathered)

    @property
    def in_rounds(self) -> bool:
        """True if chunks are gathered when their rounds begin."""
        return in_rounds(self.table, self.chunk.pregathered)

    def gather(self, arrays: StageArrays) -> Arrays:
        """The pregathered operands, [stages, chunks, layers, ...]."""
        if self.chunk.pregathered is None:
            return []
        return self._manual(self._gather, (self._specs(),), STAGE)(arrays)

    def gather_into_slot(self, arrays: StageArrays, gathered: Arrays, chunk: Index) -> Arrays:
        """The pregathered operands, [stages, gathered_slots, layers, ...], with one chunk's
        gathered into its slot.
        """
        replicated = PartitionSpec()
        return self._manual(self._gather_into_slot, (self._specs(), STAGE, replicated), STAGE)(
            arrays, gathered, chunk
        )

    def reduce(self, arrays: StageArrays, sums: Arrays) -> Arrays:
        """Gradients of weights from the partial sums for pregathered operands,
        [stages, chunks, layers, ...].
        """
        if self.chunk.pregathered is None:
            return []
        return self._manual(self._reduce, (self._specs(), STAGE), STAGE)(arrays, sums)

    def reduce_slot(self, arrays: StageArrays, sums: Arrays, slot: Index) -> tuple[Arrays, Arrays]:
        """(gradients of weights [stages, layers, ...] from the partial sums in one slot, the sums
        [stages, gathered_slots, layers, ...] with that slot zeroed).
        """
        run = self._manual(
            self._reduce_slot, (self._specs(), STAGE, PartitionSpec()), (STAGE, STAGE)
        )
        return run(arrays, sums, slot)

    def zero_sums(self) -> Arrays:
        """Zeros for the partial sums, [stages, chunks, layers, ...], float32 at least."""

        zeros = partial(self.chunk.zero_partial_sums, (1, self.gathered_slots))
        return self._manual(zeros, (), STAGE)()

    def _gather(self, arrays: StageArrays) -> Arrays:
        pregathered = self.chunk.pregathered
        assert pregathered is not None
        weights = [leaf[0] for leaf in self._sources(arrays)]
        operands = pregathered.gather([leaf.reshape(-1, *leaf.shape[2:]) for leaf in weights])
        return [leaf.reshape(1, self.table.virtual, -1, *leaf.shape[1:]) for leaf in operands]

    def _gather_into_slot(self, arrays: StageArrays, gathered: Arrays, chunk: Index) -> Arrays:
        pregathered = self.chunk.pregathered
        assert pregathered is not None
        weights = [
            jax.lax.dynamic_index_in_dim(leaf[0], chunk, 0, keepdims=False)
            for leaf in self._sources(arrays)
        ]
        operands = pregathered.gather_into_slot(
            weights, [leaf[0] for leaf in gathered], chunk % self.gathered_slots
        )
        return [leaf[None] for leaf in operands]

    def _reduce(self, arrays: StageArrays, sums: Arrays) -> Arrays:
        pregathered = self.chunk.pregathered
        assert pregathered is not None
        weights = [leaf[0, 0] for leaf in self._sources(arrays)]
        gradients = pregathered.reduce(
            weights, [leaf[0].reshape(-1, *leaf.shape[3:]) for leaf in sums]
        )
        return [leaf.reshape(1, self.table.virtual, -1, *leaf.shape[1:]) for leaf in gradients]

    def _reduce_slot(self, arrays: StageArrays, sums: Arrays, slot: Index) -> tuple[Arrays, Arrays]:
        pregathered = self.chunk.pregathered
        assert pregathered is not None
        weights = [leaf[0, 0] for leaf in self._sources(arrays)]
        gradients, emptied = pregathered.reduce_slot(weights, [leaf[0] for leaf in sums], slot)
        return [leaf[None] for leaf in gradients], [leaf[None] for leaf in emptied]

    def _sources(self, arrays: StageArrays) -> Arrays:
        """The weights that gathered operands are made from, [its stage, chunks, layers, ...]."""
        pregathered = self.chunk.pregathered
        assert pregathered is not None
        positions = self.chunk.sections.roles.weights
        return [arrays.weights[positions.index(position)] for position in pregathered.sources]

    def _specs(self) -> StageArrays:
        """The specs of a `StageArrays`."""
        per_stage: Any = PartitionSpec(self.axis)
        replicated: Any = PartitionSpec()
        keys: Any = PartitionSpec(None, self.axis)
        return StageArrays(
            weights=per_stage,
            layer_constants=per_stage,
            keys=keys,
            shared=replicated,
            constant=replicated,
            gathered=per_stage,
        )

    def forward(
        self, tick: Index, arrays: StageArrays, in_flight: InFlight, entering: Arrays, stash: Arrays
    ) -> tuple[InFlight, Arrays, Arrays]:
        """One tick forward.

        Args:
            stash: activation stash, [stages, slots, ...]; empty if there is no backward pass.
        """
        replicated = PartitionSpec()
        run = self._manual(
            self._forward,
            (STAGE, replicated, self._specs(), STAGE, replicated, STAGE),
            (STAGE, STAGE, STAGE),
        )
        return run(self._stage_indices(), tick, arrays, in_flight, entering, stash)

    def backward(
        self,
        tick: Index,
        arrays: StageArrays,
        in_flight: InFlight,
        leaving: Arrays,
        stash: Arrays,
        sums: ChunkGrads,
        residuals: Arrays,
    ) -> BackwardTick:
        """One tick backward.

        Args:
            sums: gradients summed so far: of weights [stages, chunks, layers, ...], of shared
                parameters [stages, ...], and the partial sums [stages, chunks, layers, ...].
            residuals: [stages, stages, ...], kept for delayed weight gradients; empty if
                weight gradients are not delayed.
        """
        replicated = PartitionSpec()
        run = self._manual(
            self._backward,
            (STAGE, replicated, self._specs(), STAGE, replicated, STAGE, STAGE, STAGE),
            (STAGE, STAGE, STAGE, STAGE),
        )
        in_flight, sums, residuals, input_grads = run(
            self._stage_indices(), tick, arrays, in_flight, leaving, stash, sums, residuals
        )
        return BackwardTick(
            in_flight=in_flight, sums=sums, residuals=residuals, input_grads=input_grads
        )

    def weight_gradients(
        self, tick: Index, arrays: StageArrays, stash: Arrays, sums: ChunkGrads, residuals: Arrays
    ) -> ChunkGrads:
        """Weight gradients of one tick, if these are delayed; arguments as those of `backward`,
        results as its `sums`.
        """
        specs = (STAGE, PartitionSpec(), self._specs(), STAGE, STAGE, STAGE)
        run = self._manual(self._weight_gradients, specs, STAGE)
        return run(self._stage_indices(), tick, arrays, stash, sums, residuals)

    def stash_avals(self, arrays: StageArrays) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of the stash of one chunk and microbatch, [stages, ...]."""
        return self._shapes(lambda operands, zeros: self.chunk.forward(operands, zeros)[1], arrays)

    def in_host_memory(self, arrays: StageArrays) -> list[bool]:
        """For each array of the stash, whether it is in host memory."""
        on_host: list[bool] = []

        def stash(operands: ChunkOperands, zeros: Arrays) -> Arrays:
            saved = self.chunk.forward(operands, zeros)[1]
            on_host[:] = [jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in saved]
            return saved

        self._shapes(stash, arrays)
        return on_host

    def residual_avals(self, arrays: StageArrays) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of the residuals of one chunk and microbatch for delayed weight
        gradients, [stages, ...].
        """

        def residuals(operands: ChunkOperands, zeros: Arrays) -> Arrays:
            return self.chunk.backward_inputs(
                operands,
                zeros,
                self.chunk.forward(operands, zeros)[1],
                [zeros[k] for k in self.differentiable],
            )[1]

        return self._shapes(residuals, arrays) if self.table.split else []

    def _shapes(
        self, function: Callable[[ChunkOperands, Arrays], Arrays], arrays: StageArrays
    ) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of the results, on every stage, of a function of a chunk's operands and
        inputs.
        """

        def of_stage(arrays: StageArrays) -> Arrays:
            return [leaf[None] for leaf in function(self._operands(arrays, 0, 0, 0), self._zeros())]

        return jax.eval_shape(self._manual(of_stage, (self._specs(),), STAGE), arrays)

    def _forward(
        self,
        stage_indices: Value,
        tick: Index,
        arrays: StageArrays,
        in_flight: InFlight,
        entering: Arrays,
        stash: Arrays,
    ) -> tuple[InFlight, Arrays, Arrays]:
        stage = stage_indices[0]
        micro, chunk, active = self.table.forward(tick, stage)
        first = (stage == 0) & (chunk == 0)
        buffers = self.activations[self.entering_count :]
        computed = [*entering, *(jnp.zeros(leaf.shape, leaf.dtype) for leaf in buffers)]
        arrived, waiting = self._arrived(tick, in_flight, stage == 0)
        arriving = [
            self._inside(jnp.where(first, new, old), k)
            for k, (new, old) in enumerate(zip(computed, arrived, strict=True))
        ]
        operands = self._operands(arrays, stage, micro, chunk)
        outputs, saved = self._if_active(
            active,
            lambda: (
                self.chunk.forward(operands, arriving)
                if stash
                else (self.chunk.run(operands, arriving), [])
            ),
        )
        stash = with_slot(stash, saved, self.table.forward_slot(tick, stage))
        out = [or_zeros(stage == self.table.stages - 1, outputs[k])[None] for k in self.leaving]
        return InFlight(next=self._hop(outputs, 1), waiting=waiting), stash, out

    def _arrived(self, tick: Index, in_flight: InFlight, at_end: Value) -> tuple[Arrays, Arrays]:
        """(a stage's inputs at a tick, the new `waiting`): arrays that have just been received, or,
        at the end of the pipeline where the next chunk begins, those received `lag` ticks ago.
        """
        received = [leaf[0] for leaf in in_flight.next]
        if not in_flight.waiting:
            return received, []
        slot = tick % self.table.lag
        return [
            jnp.where(at_end, old, new)
            for old, new in zip(slot_of(in_flight.waiting, slot), received, strict=True)
        ], with_slot(in_flight.waiting, received, slot)

    def _backward(
        self,
        stage_indices: Value,
        tick: Index,
        arrays: StageArrays,
        in_flight: InFlight,
        leaving: Arrays,
        stash: Arrays,
        sums: ChunkGrads,
        residuals: Arrays,
    ) -> tuple[InFlight, ChunkGrads, Arrays, Arrays]:
        stage = stage_indices[0]
        micro, chunk, active = self.table.backward(tick, stage)
        last = (stage == self.table.stages - 1) & (chunk == self.table.last_chunk)
        last_cotangents = dict(
            zip([k for k in self.leaving if k in self.differentiable], leaving, strict=True)
        )
        arrived, waiting = self._arrived(tick, in_flight, stage == self.table.stages - 1)
        cotangents = [
            self._inside(
                jnp.where(
                    last, last_cotangents[k] if k in last_cotangents else jnp.zeros_like(old), old
                ),
                k,
            )
            for k, old in zip(self.differentiable, arrived, strict=True)
        ]
        operands = self._operands(arrays, stage, micro, chunk, active)
        saved = slot_of(stash, self.table.backward_slot(tick, stage))
        if self.table.split:
            input_grads, new_residuals = self._if_active(
                active,
                lambda: self.chunk.backward_inputs(operands, self._zeros(), saved, cotangents),
            )
            residuals = with_slot(
                residuals, new_residuals, self.table.residual_slot_written(tick, stage)
            )
        else:
            before = of_stage(sums)
            after, input_grads = self._if_active(
                active,
                lambda: self.chunk.backward(operands, self._zeros(), saved, cotangents, before),
                lambda zeros: (replace(before, shared=zeros[0].shared), zeros[1]),
            )
            sums = _summed(sums, after, active)
        out = [
            or_zeros((stage == 0) & (chunk == 0) & active, leaf)[None]
            for k, leaf in zip(self.differentiable, input_grads, strict=True)
            if k < self.entering_count
        ]
        return InFlight(next=self._hop(input_grads, -1), waiting=waiting), sums, residuals, out

    def _weight_gradients(
        self,
        stage_indices: Value,
        tick: Index,
        arrays: StageArrays,
        stash: Arrays,
        sums: ChunkGrads,
        residuals: Arrays,
    ) -> ChunkGrads:
        micro, chunk, active = self.table.weights(tick)
        operands = self._operands(arrays, stage_indices[0], micro, chunk, active)
        after = self.chunk.backward_weights(
            operands,
            self._zeros(),
            slot_of(stash, self.table.weights_slot(tick)),
            slot_of(residuals, self.table.residual_slot_read(tick)),
            of_stage(sums),
        )
        return _summed(sums, after, active)

    def _if_active(
        self,
        active: Value,
        make: Callable[[], Any],
        idle: Callable[[Any], Any] = lambda zeros: zeros,
    ) -> Any:
        """The result of `make` if the stage has work; otherwise `idle` of zeros like it, without
        calling `make` if no other device takes part in it.

        An idle stage could as well compute, but simulated devices share their cores, and real ones
        their power.
        """
        if self.chunk.remat.offloaded or any(
            size > 1 for axis, size in self.mesh.shape.items() if axis not in self.axis
        ):  # results in host memory cannot be replaced by zeros
            return make()
        return jax.lax.cond(
            active,
            make,
            lambda: idle(
                jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make))
            ),
        )

    def _operands(
        self, arrays: StageArrays, stage: Any, micro: Any, chunk: Any, active: Any = True
    ) -> ChunkOperands:
        """The operands of one stage in one chunk."""
        of_chunk = partial(jax.lax.dynamic_index_in_dim, index=chunk, axis=0, keepdims=False)
        keys = [
            of_chunk(jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False)[0])
            for leaf in arrays.keys
        ]
        gathered = [
            jax.lax.dynamic_index_in_dim(leaf[0], chunk % self.gathered_slots, 0, keepdims=False)
            for leaf in arrays.gathered
        ]
        place = SumPlace(chunk=chunk, slot=chunk % self.gathered_slots, active=active)
        return ChunkOperands(
            weights=[of_chunk(leaf[0]) for leaf in arrays.weights],
            layer_constants=[of_chunk(leaf[0]) for leaf in arrays.layer_constants],
            keys=keys,
            shared=arrays.shared,
            constant=arrays.constant,
            gathered=gathered,
            first_layer=(chunk * self.table.stages + stage) * self.chunk.layers,
            place=jax.tree.map(jnp.asarray, place),
        )


def of_stage(sums: ChunkGrads) -> ChunkGrads:
    """The sums of the one stage that a region sees, without the dim of stages."""
    return jax.tree.map(lambda leaf: leaf[0], sums)


def _summed(sums: ChunkGrads, after: ChunkGrads, active: Value) -> ChunkGrads:
    """The sums after a chunk on one microbatch, to which its layers have added their gradients;
    those of parameters that all layers use are added here.
    """
    return ChunkGrads(
        weights=[leaf[None] for leaf in after.weights],
        partial_sums=[leaf[None] for leaf in after.partial_sums],
        shared=[
            total + jnp.where(active, gradient, 0).astype(total.dtype)[None]
            for total, gradient in zip(sums.shared, after.shared, strict=True)
        ],
    )
