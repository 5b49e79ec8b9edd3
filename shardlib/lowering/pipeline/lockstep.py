"""A pipeline as one program for all devices (SPMD): stages, ticks, and sums of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardlib.annotation.trees import Tree
from shardlib.errors import PlanError
from shardlib.findings import Finding, diagnostic
from shardlib.jax_types import Leaf, Metrics, Value
from shardlib.layout import Layout
from shardlib.lowering.collectives import regions_of
from shardlib.lowering.loss import fullest_stage, layer_policies, layer_runs, propagated_layouts
from shardlib.lowering.loss_layouts import LossLayouts, ValueLayouts
from shardlib.lowering.mesh import ParameterShardings, physical_axes, plan_indices
from shardlib.lowering.pipeline.layers import (
    PARAMETERS,
    STATE,
    Arrays,
    Chunk,
    ChunkGrads,
    OutsideGrads,
    SplitLoss,
    StageRemat,
    Values,
    is_differentiable,
    pregathered_weights,
    results_and_gradients,
    split_loss,
)
from shardlib.lowering.pipeline.stage import (
    InFlight,
    StageArrays,
    Stages,
    dim_of_stages,
    gathered_slots,
)
from shardlib.lowering.uses import LossFacts, LossJaxpr
from shardlib.lowering.weights import AFTER_PIPELINE, GradientReductions
from shardlib.planner.plan import Plan
from shardlib.schedules import ONE_F_ONE_B, Timetable
from shardlib.tracing.folding import fold
from shardlib.tracing.program import Program, has_matmul, with_frozen
from shardlib.tracing.rewriting import Walk, as_array, evaluate_equations, needed

# --------------------------------------------------------------------------------------------------
# Findings about a pipeline: work that every stage repeats, and weights gathered at every use.


@diagnostic
def repeated_outside_work(stages: Stages) -> tuple[Finding, ...]:
    """A finding if work before and after the layers cannot be sharded over the stages."""
    if any(dim is not None for dim in stages.stage_dims):
        return ()
    return (
        Finding(
            code="ends-repeated",
            severity="warning",
            where=f"stage={stages.table.stages}",
            message=(
                "no dim of what passes between the layers and the rest of the model divides by the"
                " stages: every stage computes embedding, head and loss."
            ),
            hint=(
                "a sequence, or a microbatch on each device, that is a multiple of the number of"
                " stages"
            ),
        ),
    )


@diagnostic
def nothing_gathered(stages: Stages, plan: Plan) -> tuple[Finding, ...]:
    """A finding if the plan gathers once, but no weight can be pregathered."""
    pregathered = stages.chunk.pregathered
    if plan.gather != "once" or (pregathered is not None and pregathered.operands):
        return ()
    return (
        Finding(
            code="nothing-gathered-once",
            severity="warning",
            where="gather=once",
            message=(
                "the layers have no matmul whose weight is stored sharded and could be gathered"
                " before the ticks: every operation gathers what it uses."
            ),
            hint=(
                "gather='use', or matmuls of parameters that fsdp shards, on a batch that is"
                " sharded over fsdp or data"
            ),
        ),
    )


@diagnostic
def gathered_at_use(sections: SplitLoss, plan: Plan) -> tuple[Finding, ...]:
    """A finding if the plan gathers once, but layers have frozen sharded weights, which are
    gathered at every use.
    """
    if plan.gather != "once" or plan.zero < 3 or not sections.frozen_layer_constants:
        return ()
    return (
        Finding(
            code="frozen-gathered-at-use",
            severity="warning",
            where="gather=once",
            message=(
                f"{len(sections.frozen_layer_constants)} stacks of frozen weights are gathered by"
                " every operation that uses them, for every microbatch; the cost"
                " estimate assumes that they are gathered once."
            ),
            hint="zero below 3, or a mesh without stages",
        ),
    )


# --------------------------------------------------------------------------------------------------
# Sums of gradients over microbatches, and their reduction after the last.
#
# Sums are at least float32, or in the dtype of the plan, and are placed where the microbatches make
# the gradients: gradients of layers at their stages; gradients of values that all layers use as one
# sum per stage; those of embedding and head as the optimizer reads them. Gradients that are reduced
# once per step are per-device partial sums until then (`PregatheredWeights`, `OutsideGrads`).

#: The carry of the scan over ticks, by name.
Carry = dict[str, Any]
#: The part of it that a step sums over its microbatches: gradients of stacked and shared
#: parameters, those of finished chunks, those of values read outside of the layers, partial sums of
#: such, loss and metrics.
SUMMED: tuple[str, ...] = ("sums", "done", "outside", "outside_partial_sums", "results")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PerStepValues:
    """Values that the loss computes once per step from trained parameters, or their gradients.

    Attributes:
        outside: values read outside of the layers, by number of the value.
        shared: values that all layers use.
        stacks: values with a slice per layer, [stages, chunks, layers, ...].
    """

    outside: Values
    shared: Arrays
    stacks: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PerStepConstants:
    """Values that the loss computes once per step and that have no gradient.

    Attributes:
        constant: arrays that all layers use.
        gathered: pregathered operands outside of the layers, by path.
        layer_constants: values with a slice per layer, [stages, chunks, layers, ...].
        values: values read outside of the layers, by number of the value.
    """

    constant: Arrays
    gathered: dict[str, Any]
    layer_constants: Arrays
    values: Values


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Initial values, reductions and results of the sums of a step.

    Attributes:
        outside_grads: operations outside of the layers, with gradients reduced after all ticks.
        gradient: sharding of gradients of parameters, by position of the parameter.
    """

    sections: SplitLoss
    stages: Stages
    outside_grads: OutsideGrads
    gradient: Sequence[NamedSharding]
    reductions: GradientReductions

    def zeros(self, leaf: Leaf, lead: tuple[int, ...] = ()) -> Value:
        """Zeros for the gradient sum of an array, [*lead, ...]."""
        return jnp.zeros((*lead, *leaf.shape), self.reductions.accumulator(leaf.dtype))

    def zeros_for_all(self, derived: PerStepValues) -> Carry:
        """Zeros for all sums, by the names of `SUMMED`, given the values computed from
        parameters.
        """
        stages, pregathered = self.stages, self.stages.chunk.pregathered
        count = stages.table.stages
        layers = ChunkGrads(
            weights=[
                stages.over_stages(self.zeros(derived.stacks[k]))
                for k in stages.chunk.per_tick_weights
            ],
            partial_sums=stages.zero_sums(),
            shared=[stages.over_stages(self.zeros(leaf, (count,))) for leaf in derived.shared],
        )
        done = (
            [
                stages.over_stages(
                    self.zeros(derived.stacks[self.sections.roles.weights.index(position)])
                )
                for position in pregathered.sources
            ]
            if pregathered and stages.in_rounds
            else []
        )
        accumulator, zero_sums = self.reductions.accumulator, self.outside_grads.zeros()
        outside_partial_sums = [leaf.astype(accumulator(leaf.dtype)) for leaf in zero_sums]
        return {
            "sums": layers,
            "done": done,
            "outside": self.as_gradients(jax.tree.map(self.zeros, self.unreduced(derived.outside))),
            "outside_partial_sums": outside_partial_sums,
            "results": self.zero_results(),
        }

    def zero_results(self) -> Arrays:
        """Zeros for loss and metrics."""
        avals = [self.sections.program.avals[number] for number in self.sections.results]
        return [jnp.zeros(aval.shape, jnp.promote_types(aval.dtype, jnp.float32)) for aval in avals]

    def unreduced(self, outside: Values) -> Values:
        """The values read outside of the layers whose gradients are made in every tick."""
        return {
            number: leaf
            for number, leaf in outside.items()
            if number not in self.outside_grads.fully_deferred
        }

    def as_gradients(self, outside: Values) -> Values:
        """Gradients of per-step values, in the sharding that the optimizer
        reads if the value is a parameter or a cast of one.
        """
        owners = self.sections.owners
        return {
            number: (
                jax.lax.with_sharding_constraint(leaf, self.gradient[owners[number]])
                if number in owners
                else leaf
            )
            for number, leaf in outside.items()
        }

    def gradients(self, arrays: StageArrays, sums: Carry) -> PerStepValues:
        """Gradients of the values computed from parameters, from the sums over all microbatches."""
        return PerStepValues(
            stacks=self._stacks(arrays, sums),
            shared=[total.sum(0) for total in sums["sums"].shared],
            outside=self._outside(sums),
        )

    def _stacks(self, arrays: StageArrays, sums: Carry) -> Arrays:
        """Gradients of stacked parameters, [stages, chunks, layers, ...]."""
        stages, positions, summed = self.stages, self.sections.roles.weights, sums["sums"]
        weights = stages.chunk.pregathered
        totals = {
            positions[k]: total
            for k, total in zip(stages.chunk.per_tick_weights, summed.weights, strict=True)
        }
        done = sums["done"] if stages.in_rounds else stages.reduce(arrays, summed.partial_sums)
        for position, gradient in zip(weights.sources if weights else (), done, strict=True):
            totals[position] = totals[position] + gradient if position in totals else gradient
        return [totals[position] for position in positions]

    def _outside(self, sums: Carry) -> Values:
        """Gradients of values read outside of the layers."""
        totals = dict(sums["outside"])
        for number, gradient in self.outside_grads.reduce(sums["outside_partial_sums"]).items():
            totals[number] = totals[number] + gradient if number in totals else gradient
        return totals


def plus(sums: Tree, more: Tree) -> Tree:
    """The sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), sums, more)


# --------------------------------------------------------------------------------------------------
# Loss and gradients of a pipeline, as one program.
#
# Once per step, the values that the loss derives from parameters alone are computed, and stacks of
# layers are divided among the stages. Then come the ticks of each group of microbatches: one scan
# per run of ticks with the same kinds of work (forward only, both, backward only). Each tick runs
# the equations before the layers for the microbatch that enters the first stage, and those after
# the layers, with their gradients, for the one that leaves the last. At the end the summed
# gradients are back-propagated through the per-step values.


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A loss whose layers are divided over stages.

    Attributes:
        layouts: layouts of values inside of the layers.
        outside_layouts: the same before and after them, where the stages may shard values too.
        layouts_known: whether all layouts outside of the layers are known; otherwise they, and
            those of gradients, are left to the compiler where the plan gives none.
        outside_grads: operations outside of the layers, with gradients reduced after all ticks.
        traced: the loss.
        remat: remat policy of the layers.
        groups: number of groups of microbatches, which go through the stages one after the other;
            the schedule is that of one group.
        fixed_state: see `shardlib.lowering.accumulation.Contribution`.
    """

    sections: SplitLoss
    stages: Stages
    layouts: LossLayouts
    outside_layouts: LossLayouts
    layouts_known: bool
    outside_grads: OutsideGrads
    traced: LossJaxpr
    remat: StageRemat
    groups: int = 1
    fixed_state: frozenset[int] = frozenset()

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.groups * self.stages.table.microbatches

    @property
    def loss_position(self) -> int:
        """Position of the loss among the results."""
        return jax.tree.unflatten(self.traced.out_tree, range(self.traced.out_tree.num_leaves))[0]

    @cached_property
    def sums(self) -> StepSums:
        """The sums over microbatches."""
        return StepSums(
            sections=self.sections,
            stages=self.stages,
            outside_grads=self.outside_grads,
            gradient=self.layouts.gradient,
            reductions=self.layouts.reductions,
        )

    def walk(self) -> Walk:
        """The placing of values outside of the layers."""
        return replace(
            self.outside_layouts.walk(loose=not self.layouts_known), layer_policies=self.remat.loops
        )

    def by_stage(self, stack: Value) -> Value:
        """A stack of layers [layers, ...] as [stages, chunks, layers of a chunk, ...], padded with
        copies of the last layer.
        """
        table, layers = self.stages.table, self.stages.chunk.layers
        shape = (table.virtual, table.stages, layers)
        missing = table.virtual * table.stages * layers - stack.shape[0]
        if missing:
            stack = jnp.concatenate(
                [stack, jnp.broadcast_to(stack[-1:], (missing, *stack.shape[1:]))]
            )
        chunks = stack.reshape(*shape, *stack.shape[1:])
        return self.stages.over_stages(
            chunks.reshape(table.stages, 1, layers, *stack.shape[1:])
            if table.virtual == 1
            else chunks.swapaxes(0, 1)
        )

    def states(self, state: Tree) -> tuple[Arrays, Arrays]:
        """Model state before each microbatch, [microbatches, ...], and after the last."""
        leaves, sections = jax.tree.leaves(state), self.sections
        if not leaves:
            return [], []
        avals = [sections.program.avals[number] for number in sections.program.inputs]
        first_state = next(
            i
            for i, number in enumerate(sections.program.inputs)
            if sections.labels[number] == frozenset({STATE})
        )

        def after(leaves: Arrays) -> Arrays:
            # The new state does not depend on the other inputs, whose values are arbitrary.
            inputs = [
                (
                    leaves[i - first_state]
                    if first_state <= i < first_state + len(leaves)
                    else jnp.zeros(aval.shape, aval.dtype)
                )
                for i, aval in enumerate(avals)
            ]
            equations, _ = needed(sections.program.equations, sections.state)
            inputs_by_number = dict(zip(sections.program.inputs, inputs, strict=True))
            env = {**sections.program.constants, **inputs_by_number}
            evaluate_equations(equations, env, self.walk())
            return [env[number] for number in sections.state]

        def step(states: Arrays, _: None) -> tuple[Arrays, Arrays]:
            entering = [
                leaves[index] if index in self.fixed_state else leaf
                for index, leaf in enumerate(states)
            ]
            return after(entering), entering

        last, before = jax.lax.scan(step, leaves, length=self.microbatches)
        return before, last

    def gradients(
        self, params: Tree, state: Tree, batch: Arrays, join: Callable[[Arrays], Tree]
    ) -> tuple[tuple[Value, tuple[Metrics, Tree]], Tree]:
        """((loss, (metrics, state)), gradients), averaged over the microbatches.

        Args:
            batch: arrays of the batch, [microbatches, ...].
            join: slices of these -> the batch of one microbatch.
        """
        leaves, structure = jax.tree.flatten(params)
        (derived, fixed), pull = self._per_step(leaves)
        states, after = self.states(state)
        arrays = self._stage_arrays(derived, fixed)
        sums = self._in_groups(
            self.sums.zeros_for_all(derived),
            states,
            batch,
            lambda sums, states, batch: Ticks(
                self, arrays, derived, fixed, states, batch, join
            ).run(sums),
        )
        cotangents = jax.tree.map(
            lambda total, leaf: (total / self.microbatches).astype(leaf.dtype),
            self.sums.gradients(arrays, sums),
            derived,
        )
        outputs = [total / self.microbatches for total in sums["results"]]
        return self.results(outputs, state, after), structure.unflatten(pull(cotangents))

    def results(
        self, outputs: Arrays, state: Tree, after: Arrays
    ) -> tuple[Value, tuple[Metrics, Tree]]:
        """(loss, (metrics, state after the step)).

        Args:
            outputs: loss and metrics.
            state: model state, for its structure.
            after: its arrays after the step.
        """
        loss, (metrics, _) = jax.tree.unflatten(self.traced.out_tree, [*outputs, *after])
        return loss, (metrics, jax.tree.unflatten(jax.tree.structure(state), after))

    def loss(
        self, params: Tree, state: Tree, batch: Arrays, join: Callable[[Arrays], Tree]
    ) -> tuple[Value, tuple[Metrics, Tree]]:
        """(loss, (metrics, state)), averaged over the microbatches, with forward ticks only;
        arguments as those of `gradients`.
        """
        (derived, fixed), _ = self._per_step(jax.tree.leaves(params))
        states, after = self.states(state)
        arrays = self._stage_arrays(derived, fixed)
        results = self._in_groups(
            self.sums.zero_results(),
            states,
            batch,
            lambda results, states, batch: Ticks(
                self, arrays, derived, fixed, states, batch, join
            ).evaluate(results),
        )
        avals = self.traced.closed_jaxpr.out_avals
        outputs = [
            _in_dtype(total / self.microbatches, aval.dtype)
            for total, aval in zip(results, avals, strict=False)
        ]
        return self.results(outputs, state, after)

    def _stage_arrays(self, derived: PerStepValues, fixed: PerStepConstants) -> StageArrays:
        """Arrays of the stages that stay the same through all ticks, without those of
        microbatches.
        """
        arrays = StageArrays(
            weights=derived.stacks,
            layer_constants=fixed.layer_constants,
            keys=[],
            shared=derived.shared,
            constant=fixed.constant,
            gathered=[],
        )
        if self.stages.in_rounds:
            return arrays
        return replace(arrays, gathered=self.stages.gather(arrays))

    def _in_groups(
        self, sums: Any, states: Arrays, batch: Arrays, run: Callable[[Any, Arrays, Arrays], Any]
    ) -> Any:
        """Sums over all microbatches; `run` adds those of one group, given model state and batch of
        its microbatches.
        """
        if self.groups == 1:
            return run(sums, states, batch)
        grouped = [
            [leaf.reshape(self.groups, -1, *leaf.shape[1:]) for leaf in leaves]
            for leaves in (states, batch)
        ]
        return jax.lax.scan(lambda sums, group: (run(sums, *group), None), sums, grouped)[0]

    def _per_step(self, leaves: Arrays) -> tuple[Any, Callable[[Any], Arrays]]:
        """((values with gradients, values without), function from gradients of the first to
        gradients of the parameters).
        """
        sections = self.sections

        def run(leaves: Arrays) -> tuple[PerStepValues, PerStepConstants]:
            parameters = self.layouts.parameters(leaves, self.outside_grads.uses)
            env: Values = {
                **sections.program.constants,
                **dict(zip(sections.program.inputs, parameters, strict=False)),
            }
            evaluate_equations(sections.per_step_equations, env, self.walk())
            values = {
                number: env[number]
                for number in sections.per_step
                if PARAMETERS in sections.labels[number] and is_differentiable(env[number])
            }
            fixed = {number: env[number] for number in sections.per_step if number not in values}
            stacks = [self.by_stage(values[sections.scanned[k]]) for k in sections.roles.weights]
            outside = {number: values[number] for number in sections.read_outside & values.keys()}
            shared = [values[sections.constants[k]] for k in sections.roles.shared]
            layer_constants = [
                self.by_stage(jnp.asarray(env[sections.scanned[k]]))
                for k in sections.roles.layer_constants
            ]
            constant = [jnp.asarray(env[sections.constants[k]]) for k in sections.roles.constant]
            derived = PerStepValues(stacks=stacks, shared=shared, outside=outside)
            return derived, PerStepConstants(
                values=fixed, layer_constants=layer_constants, constant=constant, gathered={}
            )

        derived, pull, fixed = jax.vjp(run, leaves, has_aux=True)
        return (
            derived,
            replace(fixed, gathered=self.outside_grads.gathered(derived.outside)),
        ), lambda cotangents: pull(cotangents)[0]


def _in_dtype(average: jax.Array, dtype: Any) -> jax.Array:
    """An average cast to a dtype; integers and booleans, which are whole numbers for a whole
    batch, are rounded.
    """
    return (average if jnp.issubdtype(dtype, jnp.inexact) else jnp.round(average)).astype(dtype)


@dataclass(frozen=True, kw_only=True)
class EntryAndExit:
    """Entry into a pipeline and exit from it, which occur in some ticks only.

    Attributes:
        has_entering: whether microbatches enter the first stage (backward: the last one).
        has_leaving: whether microbatches leave the last stage (backward: the first one).
    """

    has_entering: bool
    has_leaving: bool


class Ticks:
    """The scans over the ticks of a step."""

    def __init__(
        self,
        pipeline: Pipeline,
        arrays: StageArrays,
        derived: PerStepValues,
        fixed: PerStepConstants,
        states: Arrays,
        batch: Arrays,
        join: Callable[[Arrays], Tree],
    ) -> None:
        self.pipeline = pipeline
        self.sections = pipeline.sections
        self.stages = pipeline.stages
        self.table = pipeline.stages.table
        self.derived = derived
        self.fixed = fixed
        self.states = states
        self.batch = batch
        self.join = join
        self.arrays, self.in_rounds = replace(arrays, keys=self._keys()), self.stages.in_rounds
        self.sums, self.unreduced = pipeline.sums, pipeline.sums.unreduced(derived.outside)

    def _from_last_stage(self, outputs: Arrays) -> Arrays:
        """Outputs of the last stage, in their sharding outside of the layers."""
        return [
            self.stages.from_stages(leaf, k)
            for leaf, k in zip(outputs, self.stages.leaving, strict=True)
        ]

    def _outside(self, carry: Carry, more: Values, sums: Arrays) -> Carry:
        """Adds one microbatch's gradients of values read outside of the layers, and its partial
        sums of such.
        """
        return {
            "outside": self.sums.as_gradients(plus(carry["outside"], more)),
            "outside_partial_sums": plus(carry["outside_partial_sums"], sums),
        }

    def _after(self, carry: Carry, tick: Any, ends: EntryAndExit) -> tuple[Carry, Arrays]:
        """Loss and metrics of the microbatch that leaves the last stage, and the cotangents of its
        activations.
        """
        micro, chunk, active = self.table.backward(tick, self.table.stages - 1)
        positions = [k for k in self.stages.leaving if k in self.stages.differentiable]
        if not ends.has_entering:
            return carry, [
                jnp.zeros(self.stages.activations[k].shape, self.stages.activations[k].dtype)
                for k in positions
            ]

        def after() -> tuple[Arrays, tuple[Values, Arrays], Arrays]:
            outputs = carry["outputs"]
            if self.table.forward_first:
                outputs = [
                    jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False) for leaf in outputs
                ]
            else:
                outputs = self._from_last_stage(outputs)

            results, (outside, sums, cotangents) = results_and_gradients(
                lambda outside, sums, outputs: self._results(outside, micro, outputs, sums),
                self.pipeline.loss_position,
                outputs,
                self.unreduced,
                self.pipeline.outside_grads.zeros(),
            )
            return (
                results,
                (self.sums.as_gradients(outside), sums),
                [
                    self.stages.inside_layout(leaf, k)
                    for leaf, k in zip(cotangents, positions, strict=True)
                ],
            )

        is_last = chunk == self.table.last_chunk
        results, outside, cotangents = self._or_zeros(is_last & active, after)
        return {
            **carry,
            "results": plus(carry["results"], results),
            **self._outside(carry, *outside),
        }, cotangents

    def _entering(self, tick: Any, ends: EntryAndExit) -> Arrays:
        """Input of the first stage at a tick, replicated over the stages; zeros if the first stage
        continues an older microbatch.
        """
        if not ends.has_entering:
            return [
                jnp.zeros(leaf.shape, leaf.dtype)
                for leaf in self.stages.activations[: self.stages.entering_count]
            ]
        micro, chunk, active = self.table.forward(tick, 0)
        return self._or_zeros(
            (chunk == 0) & active,
            lambda: [
                self.stages.inside_layout(leaf, k)
                for k, leaf in enumerate(self._before(self.derived.outside, micro))
            ],
        )

    def _before(self, outside: Values, micro: Any, sums: Arrays | None = None) -> Arrays:
        """Input of the first stage for a microbatch; partial sums are discarded by default."""
        env = self._env(outside, micro)
        evaluate_equations(self.sections.before, env, self._walk(sums))
        return [
            self.stages.outside_layout(jnp.asarray(env[number]), k)
            for k, number in enumerate(self.sections.entering)
        ]

    def _walk(self, sums: Arrays | None) -> Walk:
        """A walk outside of the layers, whose operations pass gradients to `sums`."""
        outside = self.pipeline.outside_grads
        return outside.walk(
            self.pipeline.walk(), self.fixed.gathered, outside.zeros() if sums is None else sums
        )

    def _results(
        self, outside: Values, micro: Any, outputs: Arrays, sums: Arrays | None = None
    ) -> Arrays:
        """Loss and metrics from the last stage's outputs; partial sums are discarded by default."""
        sections, env = self.sections, self._env(outside, micro)
        values = [
            self.stages.outside_layout(leaf, k)
            for leaf, k in zip(outputs, self.stages.leaving, strict=True)
        ]
        env.update(zip(sections.final, values, strict=False))
        stacked = [leaf[: sections.layers] for leaf in values[len(sections.final) :]]
        env.update(zip(sections.stacked, stacked, strict=True))
        evaluate_equations(sections.after, env, self._walk(sums))
        return [as_array(sections.program, number, env[number]) for number in sections.results]

    def _env(self, outside: Values, micro: Any) -> Values:
        return {
            **self.sections.program.constants,
            **self.fixed.values,
            **self.derived.outside,
            **outside,
            **self._inputs(self._slices(self.states, micro), self._slices(self.batch, micro)),
        }

    def _inputs(self, state: Arrays, part: Arrays) -> Values:
        """Model state and batch of a microbatch, by value."""
        return self.sections.of_microbatch(state, jax.tree.leaves(self.join(part)))

    def _slices(self, arrays: Sequence[Any], micro: Any) -> Arrays:
        return [jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False) for leaf in arrays]

    def _keys(self) -> Arrays:
        """Per-layer slices of model state and of random keys in the batch, [microbatches, stages,
        chunks, layers, ...].
        """
        if not self.sections.roles.keys:
            return []
        keys = jax.lax.map(
            lambda micro: self.sections.keys(self._inputs(*micro), self.pipeline.walk()),
            (self.states, self.batch),
        )
        return [jax.vmap(self.pipeline.by_stage)(leaf) for leaf in keys]

    def _or_zeros(self, condition: Any, make: Callable[[], Any]) -> Any:
        """The result of `make` if the condition holds, otherwise zeros; the condition is the same
        on all devices.
        """
        shapes = jax.eval_shape(make)
        return jax.lax.cond(
            condition,
            make,
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
        )

    def run(self, sums: Carry) -> Carry:
        """Adds up gradients, loss and metrics over all ticks."""
        carry = {**self._start(), **sums}
        work = {"forward": self._forward, "backward": self._backward, "weights": self._weights}
        for start, stop, kinds in self.table.phases:
            if "forward" not in kinds:
                carry.pop("forward", None)  # no more forward work

            def tick(
                carry: Carry,
                tick: Any,
                arrays: StageArrays,
                ends: EntryAndExit,
                kinds: tuple[str, ...] = kinds,
            ) -> Carry:
                for kind in kinds:
                    carry = work[kind](carry, tick, arrays, ends)
                return carry

            carry = self._ticks(tick, carry, start, stop, forward="backward" not in kinds)
        return {name: carry[name] for name in SUMMED}

    def evaluate(self, results: Arrays) -> Arrays:
        """Adds up loss and metrics over forward ticks, without gradients."""

        def tick(carry: Carry, tick: Any, arrays: StageArrays, ends: EntryAndExit) -> Carry:
            in_flight, _, outputs = self.stages.forward(
                tick, arrays, carry["forward"], self._entering(tick, ends), []
            )
            if not ends.has_leaving:
                return {**carry, "forward": in_flight}
            micro, chunk, active = self.table.forward(tick, self.table.stages - 1)
            results = self._or_zeros(
                (chunk == self.table.last_chunk) & active,
                lambda: self._results(self.derived.outside, micro, self._from_last_stage(outputs)),
            )
            return {**carry, "forward": in_flight, "results": plus(carry["results"], results)}

        start = {
            "forward": self._activations(range(len(self.stages.activations))),
            "results": results,
            "gathered": self._zero_operands(),
        }
        return self._ticks(tick, start, 0, self.table.forward_ticks, forward=True)["results"]

    def _ticks(
        self,
        tick: Callable[[Carry, Any, StageArrays, EntryAndExit], Carry],
        carry: Carry,
        start: int,
        stop: int,
        *,
        forward: bool,
    ) -> Carry:
        """Runs ticks with the same kinds of work. With `in_rounds`, each round gathers the chunk
        that its ticks begin, and reduces the gradients of the chunk that the last round finished.
        """

        def run(carry: Carry, start: Any, count: int, ends: EntryAndExit) -> Carry:
            arrays = (
                replace(self.arrays, gathered=carry["gathered"]) if self.in_rounds else self.arrays
            )
            return jax.lax.scan(
                lambda carry, number: (tick(carry, number, arrays, ends), None),
                carry,
                start + jnp.arange(count),
            )[0]

        if not self.in_rounds:
            both = EntryAndExit(has_entering=True, has_leaving=True)
            return run(carry, start, stop - start, both)

        def run_round(carry: Carry, number: Any, ends: EntryAndExit) -> Carry:
            chunk = number if forward else self.table.last_chunk - number
            slots = self.stages.gathered_slots
            slot = chunk % slots
            carry = (
                carry
                if forward or ends.has_entering
                else self._reduced(carry, jnp.minimum(chunk + slots, self.table.last_chunk), slot)
            )
            gathered = self.stages.gather_into_slot(
                self.arrays,
                carry["gathered"],
                _with_dependence(
                    chunk,
                    carry["results"] if forward else (carry["outputs"], carry["backward"].next),
                ),
            )
            return run(
                {**carry, "gathered": gathered},
                start + number * self.table.microbatches,
                self.table.microbatches,
                ends,
            )

        last = self.table.rounds - 1
        carry = run_round(carry, jnp.int32(0), EntryAndExit(has_entering=True, has_leaving=False))
        if last > 1:
            carry, _ = jax.lax.scan(
                lambda carry, number: (
                    run_round(carry, number, EntryAndExit(has_entering=False, has_leaving=False)),
                    None,
                ),
                carry,
                jnp.arange(1, last),
            )
        leaving = EntryAndExit(has_entering=False, has_leaving=True)
        carry = run_round(carry, jnp.int32(last), leaving)
        in_rounds = self.table.rounds * self.table.microbatches
        carry = run(carry, start + in_rounds, stop - start - in_rounds, leaving)
        for chunk in () if forward else reversed(range(self.stages.gathered_slots)):
            carry = self._reduced(carry, jnp.int32(chunk), jnp.int32(chunk))
        return carry

    def _reduced(self, carry: Carry, chunk: Any, slot: Any) -> Carry:
        """Adds the partial sums in one slot to the gradients of a chunk, and zeroes the slot."""
        sums: ChunkGrads = carry["sums"]
        gradients, empty = self.stages.reduce_slot(self.arrays, sums.partial_sums, slot)
        done = [
            jax.lax.dynamic_update_index_in_dim(
                total,
                jax.lax.dynamic_index_in_dim(total, chunk, 1, keepdims=False) + more,
                chunk,
                1,
            )
            for total, more in zip(carry["done"], gradients, strict=True)
        ]
        return {**carry, "done": done, "sums": replace(sums, partial_sums=empty)}

    def _zero_operands(self) -> Arrays:
        """Zeros for the operands that a round gathers, [stages, chunks, layers, ...]."""
        if not self.in_rounds:
            return []
        shapes = jax.eval_shape(lambda: self.stages.gather(self.arrays))
        return [
            self.stages.over_stages(
                jnp.zeros((leaf.shape[0], self.stages.gathered_slots, *leaf.shape[2:]), leaf.dtype)
            )
            for leaf in shapes
        ]

    def _activations(self, positions: Sequence[int]) -> InFlight:
        """Zeros for the activations at some positions that are in flight between stages."""
        leaves = [self.stages.activations[k] for k in positions]
        count = self.table.stages
        lag = self.table.lag
        return InFlight(
            next=[
                self.stages.over_stages(jnp.zeros((count, *leaf.shape), leaf.dtype))
                for leaf in leaves
            ],
            waiting=(
                [
                    self.stages.over_stages(jnp.zeros((count, lag, *leaf.shape), leaf.dtype))
                    for leaf in leaves
                ]
                if lag
                else []
            ),
        )

    def _start(self) -> Carry:
        """The initial carry of the ticks, without the sums."""
        stages, count = self.stages, self.table.stages
        gathered = self._zero_operands()
        arrays = replace(self.arrays, gathered=gathered) if self.in_rounds else self.arrays

        def zeros(slots: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return stages.over_stages(jnp.zeros((count, slots, *leaf.shape[1:]), leaf.dtype))

        stash = [
            jax.device_put(zeros(self.table.slots, leaf), jax.memory.Space.Host)
            if on_host
            else zeros(self.table.slots, leaf)
            for leaf, on_host in zip(
                stages.stash_avals(arrays), stages.in_host_memory(arrays), strict=True
            )
        ]
        residuals = [zeros(count, leaf) for leaf in stages.residual_avals(arrays)]
        leaves = [stages.activations[k] for k in stages.leaving]
        if self.table.forward_first:
            leaving = [
                jnp.zeros((self.table.microbatches, *leaf.shape), leaf.dtype) for leaf in leaves
            ]
        else:
            leaving = [
                self.stages.over_stages(jnp.zeros((count, *leaf.shape), leaf.dtype))
                for leaf in leaves
            ]
        return {
            "forward": self._activations(range(len(stages.activations))),
            "backward": self._activations(stages.differentiable),
            "stash": stash,
            "residuals": residuals,
            "outputs": leaving,
            "gathered": self._zero_operands(),
        }

    def _forward(self, carry: Carry, tick: Any, arrays: StageArrays, ends: EntryAndExit) -> Carry:
        in_flight, stash, outputs = self.stages.forward(
            tick, arrays, carry["forward"], self._entering(tick, ends), carry["stash"]
        )
        if self.table.forward_first:
            outputs = (
                self._collected(tick, carry["outputs"], outputs)
                if ends.has_leaving
                else carry["outputs"]
            )
        return {**carry, "forward": in_flight, "stash": stash, "outputs": outputs}

    def _collected(self, tick: Any, collected: Arrays, outputs: Arrays) -> Arrays:
        """The outputs of the last stage, [microbatches, ...], updated after a tick."""
        micro, chunk, active = self.table.forward(tick, self.table.stages - 1)

        def with_outputs(collected: Arrays, outputs: Arrays) -> Arrays:
            return [
                jax.lax.dynamic_update_index_in_dim(buffer, leaf, micro, 0)
                for buffer, leaf in zip(collected, self._from_last_stage(outputs), strict=True)
            ]

        return jax.lax.cond(
            (chunk == self.table.last_chunk) & active,
            with_outputs,
            lambda collected, _: collected,
            collected,
            outputs,
        )

    def _backward(self, carry: Carry, tick: Any, arrays: StageArrays, ends: EntryAndExit) -> Carry:
        carry, leaving = self._after(carry, tick, ends)
        stash, sums, residuals = carry["stash"], carry["sums"], carry["residuals"]
        result = self.stages.backward(
            tick, arrays, carry["backward"], leaving, stash, sums, residuals
        )
        sums = {"sums": result.sums, "residuals": result.residuals}
        carry = {**carry, "backward": result.in_flight, **sums}
        if not ends.has_leaving:
            return carry
        micro, chunk, active = self.table.backward(tick, 0)

        def before() -> tuple[Values, Arrays]:
            def run(outside: Values, sums: Arrays) -> Arrays:
                return [
                    leaf
                    for k, leaf in enumerate(self._before(outside, micro, sums))
                    if k in self.stages.differentiable
                ]

            input_grads = [
                self.stages.from_stages(leaf, k)
                for leaf, k in zip(result.input_grads, self.stages.differentiable, strict=False)
            ]
            outside, sums = jax.vjp(run, self.unreduced, self.pipeline.outside_grads.zeros())[1](
                input_grads
            )
            return self.sums.as_gradients(outside), sums

        return {**carry, **self._outside(carry, *self._or_zeros((chunk == 0) & active, before))}

    def _weights(self, carry: Carry, tick: Any, arrays: StageArrays, _: EntryAndExit) -> Carry:
        return {
            **carry,
            "sums": self.stages.weight_gradients(
                tick, arrays, carry["stash"], carry["sums"], carry["residuals"]
            ),
        }


def _with_dependence(number: Any, arrays: Any) -> Any:
    """A number with a data dependence on other arrays.

    Chunks are gathered by this index; otherwise the compiler would reuse what it gathered in the
    forward pass, or in the previous group of microbatches, and keep it until then.
    """
    return jax.lax.optimization_barrier((number, arrays))[0]


# --------------------------------------------------------------------------------------------------
# A plan's pipeline for a traced loss.


@dataclass(frozen=True, kw_only=True)
class StagedLayouts:
    """Layouts of activations in a pipeline.

    Attributes:
        layers: those of the plan.
        outside_values: the same outside of the layers, where the stages may shard too; empty if
            unknown.
        whole_value_layouts: layouts of values of the whole batch that every microbatch reads.
    """

    layers: ValueLayouts
    outside_values: ValueLayouts
    whole_value_layouts: tuple[Layout, ...] = ()


def pipeline(
    plan: Plan,
    traced: LossJaxpr,
    state: Tree,
    mesh: Mesh | AbstractMesh,
    params: ParameterShardings,
    staged: StagedLayouts,
    keys: Collection[int] = (),
    fixed_state: frozenset[int] = frozenset(),
) -> tuple[Pipeline, tuple[Finding, ...]]:
    """Partitions a loss into the stages of a plan."""
    original, num_state = traced, len(jax.tree.leaves(state))
    traced, staged, findings = _with_loop(plan, traced, num_state, params, staged)
    value_layouts, outside_values = staged.layers, staged.outside_values
    program = traced.program
    parameters = [plan.parameters[number] for number in plan_indices(plan, params.compute)]
    frozen = {i for i, parameter in enumerate(parameters) if not parameter.trained}
    sections = split_loss(
        program,
        len(jax.tree.leaves(params.compute)),
        num_state,
        len(program.outputs) - num_state,
        keys,
        frozen,
    )
    layouts = LossLayouts.of(traced, plan, mesh, params, value_layouts)
    remat = stage_remat(
        plan,
        sections,
        with_frozen(original.program, frozen),
        original.facts(len(parameters)),
        [parameter.path for parameter in parameters],
    )
    stages = _stages(plan, sections, layouts, mesh, value_layouts, outside_values, remat)
    layouts_known = bool(outside_values) and all(
        layout is not None for layout in stages.outside[: len(sections.carry)]
    )
    outside_layouts = replace(layouts, values=outside_values)
    outside_grads = (
        OutsideGrads.of(outside_layouts, sections, mesh)
        if layouts_known and layouts.reductions.when == AFTER_PIPELINE and not stages.in_rounds
        else OutsideGrads(mesh=mesh, uses={}, fully_deferred=frozenset())
    )
    pipeline = Pipeline(
        sections=sections,
        stages=stages,
        layouts=layouts,
        outside_layouts=outside_layouts if layouts_known else layouts,
        layouts_known=layouts_known,
        outside_grads=outside_grads,
        traced=traced,
        remat=remat,
        groups=plan.accumulation,
        fixed_state=fixed_state,
    )
    return pipeline, (
        *findings,
        *repeated_outside_work(stages),
        *nothing_gathered(stages, plan),
        *gathered_at_use(sections, plan),
    )


def _with_loop(
    plan: Plan, traced: LossJaxpr, num_state: int, params: ParameterShardings, staged: StagedLayouts
) -> tuple[LossJaxpr, StagedLayouts, tuple[Finding, ...]]:
    """The loss with a loop over its layers, and the layouts of its activations."""
    folded, findings = _with_folded_layers(traced, len(jax.tree.leaves(params.compute)))
    if folded is traced:
        return traced, staged, findings
    if plan.context in ("ring", "ulysses") or plan.experts != "none":
        raise PlanError(
            "sharded attention and expert parallelism need layers under a scan, and those of the"
            " loss are unrolled\nTry: nnx.scan or jax.lax.scan over the layers, or a mesh without"
            " stages"
        )
    indices = plan_indices(plan, params.compute)
    layers = propagated_layouts(plan, folded, indices, num_state, staged.whole_value_layouts)
    return folded, replace(staged, layers=layers, outside_values={}), findings


def _timetable(plan: Plan, sections: SplitLoss) -> Timetable:
    """The schedule of one group of microbatches."""
    table = Timetable(
        schedule=plan.schedule,
        stages=plan.mesh["stage"],
        microbatches=plan.microbatches // plan.accumulation,
        virtual=plan.virtual_stages,
    )
    several_chunks, chunks = table.virtual > 1, table.stages * table.virtual
    by = "(stages times virtual_stages)"
    if chunks > sections.layers:
        raise PlanError(
            f"{table.stages} stages of {table.virtual} chunk{'s' if several_chunks else ''} need"
            f" {chunks} layers, and the loop over layers at"
            f" {sections.loop.scope or sections.loop.path} has {sections.layers}\n"
            f"Try: at most {sections.layers}"
            f" {f'chunks on all stages together {by}' if several_chunks else 'stages'}"
        )
    if several_chunks and table.microbatches < table.stages:
        raise PlanError(
            f"stages of several chunks need a microbatch for each of the {table.stages} stages, and"
            " there are"
            f" {table.microbatches}{' in each group' if plan.accumulation > 1 else ''}\nTry: more"
            f" microbatches, or the schedule {ONE_F_ONE_B.name!r}"
        )
    return table


def _stages(
    plan: Plan,
    sections: SplitLoss,
    layouts: LossLayouts,
    mesh: Mesh | AbstractMesh,
    value_layouts: ValueLayouts,
    outside_values: ValueLayouts,
    remat: StageRemat,
) -> Stages:
    """The stages of a plan for a loss; arguments as those of `pipeline`."""
    table, axis = _timetable(plan, sections), physical_axes(mesh, ("stage",))
    chunks = table.stages * table.virtual
    layers = -(-sections.layers // chunks)
    pregathered = pregathered_weights(layouts, sections, manual_mesh(mesh, axis))
    chunk = Chunk(
        sections=sections,
        layers=layers,
        padded=layers * chunks > sections.layers,
        remat=remat.of_every_chunk,
        walk=lambda: layouts.walk(jax.sharding.get_abstract_mesh()),
        pregathered=pregathered,
        sums=(table.virtual, gathered_slots(table, pregathered), layouts.reductions.accumulator),
    )
    activations = stage_activations(sections, chunks * layers)
    entering = len(sections.entering)
    carried = len(sections.carry)

    def of_carry(layouts: ValueLayouts) -> tuple[Layout | None, ...]:
        return tuple(
            layouts.get((f"{sections.loop.path}/carry/{k}", 0)) if k < carried else None
            for k in range(len(activations))
        )

    carry_layouts, outside_layouts = of_carry(value_layouts), of_carry(outside_values)
    stage_dims = tuple(
        sharded_dim(leaf, layout, outside, table.stages, plan)
        for leaf, layout, outside in zip(activations, carry_layouts, outside_layouts, strict=True)
    )
    return Stages(
        table=table,
        chunk=chunk,
        mesh=mesh,
        regions=regions_of(plan, mesh),
        axis=axis,
        activations=activations,
        entering_count=entering,
        leaving=(*range(carried), *range(entering, len(activations))),
        stage_dims=stage_dims,
        layouts=carry_layouts,
        outside=tuple(
            layout if dim_of_stages(layout) is not None or dim is None else None
            for layout, dim in zip(outside_layouts, stage_dims, strict=True)
        ),
    )


def manual_mesh(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> AbstractMesh:
    """The mesh inside a region that is manual over some axes."""
    return (mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh).update_axis_types(
        dict.fromkeys(axes, AxisType.Manual)
    )


def _with_folded_layers(
    traced: LossJaxpr, parameters: int
) -> tuple[LossJaxpr, tuple[Finding, ...]]:
    """The loss with a loop over its layers: unchanged, or, if the layers are unrolled, an
    equivalent loss with a scan over stacked parameters.
    """
    program = traced.program
    if any(equation.name == "scan" and has_matmul(equation.eqn) for equation in program.equations):
        return traced, ()
    folded = fold(program, set(range(parameters)))
    if not folded.loops:
        return traced, ()
    avals = [
        jax.ShapeDtypeStruct(program.avals[number].shape, program.avals[number].dtype)
        for number in program.inputs
    ]
    retraced = jax.make_jaxpr(lambda *leaves: folded.evaluate(folded.stack(leaves)))(*avals)
    finding = Finding(
        code="layers-stacked",
        severity="warning",
        where=f"{sum(loop.run.count for loop in folded.loops)} layers",
        message=(
            "the layers are unrolled: every stage holds all of them between steps, they are stacked"
            " in every step, and the layouts of activations inside of them are left to the"
            " compiler."
        ),
        hint="one stacked module: nnx.vmap over the constructor, and a scan over the result",
    )
    return LossJaxpr(closed_jaxpr=retraced, out_tree=traced.out_tree), (finding,)


def stage_remat(
    plan: Plan, sections: SplitLoss, program: Program, loss: LossFacts, paths: Sequence[str]
) -> StageRemat:
    """The rematerialisation in the stages of a plan."""
    fullest = fullest_stage(plan, sections.layers)
    policies = layer_policies(plan, program, loss, paths)
    uniform = StageRemat(
        policy=plan.remat,
        count=fullest,
        layers=fullest,
        virtual=plan.virtual_stages,
        offloaded="activations" in plan.offload,
    )
    if not policies:
        return uniform
    counts = {group.path: group.count for group in layer_runs(program, loss)}
    # unrolled layers are one loop in the partitioned program
    pipelined = (
        sections.loop.path
        if sections.loop.path in counts
        else max(reversed(counts), key=counts.__getitem__)
    )
    policy, count = policies[pipelined]
    loops = {
        path: (name, math.ceil(number * counts[path] / fullest_stage(plan, counts[path]) - 1e-9))
        for path, (name, number) in policies.items()
        if path != pipelined
    }
    return replace(uniform, policy=policy if count else "none", count=count, loops=loops)


def stage_activations(sections: SplitLoss, layers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of everything sent between stages: the carry, the values sent along with it,
    and a buffer [layers, ...] for every stacked result of the layers.
    """
    avals = [sections.program.avals[number] for number in sections.entering]
    buffers = [
        jax.ShapeDtypeStruct(
            (layers, *sections.program.avals[number].shape[1:]),
            sections.program.avals[number].dtype,
        )
        for number in sections.stacked
    ]
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in [*avals, *buffers])


def sharded_dim(
    leaf: jax.ShapeDtypeStruct,
    layout: Layout | None,
    outside: Layout | None,
    stages: int,
    plan: Plan,
) -> int | None:
    """The dim that is sharded over the stages outside of the layers: that of the layout there, or
    else the largest dim that the plan does not shard and that divides, except the last (features).
    """
    if (outside_dim := dim_of_stages(outside)) is not None:
        return outside_dim
    ways = [
        math.prod(plan.mesh[axis] for axis in layout[dim]) if layout is not None else 1
        for dim in range(len(leaf.shape))
    ]
    candidates = [
        dim
        for dim in range(len(leaf.shape) - 1)
        if ways[dim] == 1 and leaf.shape[dim] % stages == 0
    ]
    return max(candidates, key=lambda dim: (leaf.shape[dim], dim), default=None)
