"""A training step: storage of its state, gradients, guards, loss scale, and the update; and
evaluation without an update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.names import Model, PureLoss, UserLoss
from shardlib.annotation.trees import Partition, Tree
from shardlib.errors import BatchError, PlanError, SettingsError
from shardlib.findings import Finding
from shardlib.graph import Parameter, Problem
from shardlib.jax_types import Function, KeyPath, Metrics, Value
from shardlib.layout import Layout, LogicalAxes, MeshShape, Rules
from shardlib.lowering.accumulation import Microbatches
from shardlib.lowering.checks import own_state, require_state
from shardlib.lowering.collectives import Precision, cast_like
from shardlib.lowering.disk import GRADIENT
from shardlib.lowering.loss import loss_in_layouts
from shardlib.lowering.loss_layouts import LossLayouts, ValueLayouts
from shardlib.lowering.mesh import (
    HOST,
    ParameterShardings,
    batch_dims,
    constrain_tree,
    named_sharding,
    owner_of,
    resharded,
    shapes_of,
)
from shardlib.lowering.pipeline.lockstep import StagedLayouts, pipeline
from shardlib.lowering.random_keys import key_inputs, with_folds
from shardlib.lowering.runtime import (
    Gradients,
    GuardState,
    TrainState,
    put_batch,
    require_not_donated,
    shapes_of_batch,
)
from shardlib.lowering.uses import LossJaxpr, trace_loss
from shardlib.planner.layouts import batch_layouts
from shardlib.planner.plan import Plan
from shardlib.processes.values import in_every_process
from shardlib.propagation.colours import Colouring, colour
from shardlib.propagation.contractions import layout_constraints
from shardlib.schedules import GPIPE, Timetable
from shardlib.tracing.trace import describe_batch, graph_from_program, with_paths
from shardlib.untrusted.data import Kind, is_count, is_positive, require_kinds

# --------------------------------------------------------------------------------------------------
# Layouts of a loss on a number of rows that the step is not compiled for, or of another loss.
#
# The plan has the stored shardings of parameters and the mesh axes of logical axes. The loss is
# traced for the new rows, its values get the plan's colours by propagation from parameters and
# batch, and the plan's rules give their layouts. If the rows do not divide over all axes that shard
# the batch, they are sharded over the subset that divides them the most ways.


@dataclass(frozen=True, kw_only=True)
class EvaluationLoss:
    """The loss of an evaluation for a batch of certain shapes, and the layouts of its values.

    Attributes:
        value_layouts: layouts of activations.
        batch: layout of every array of the batch, by path.
        axes: logical axes of every array of the batch, by path.
        plan: the plan, adjusted to the number of rows.
        findings: findings of lowering.
    """

    traced: LossJaxpr
    value_layouts: ValueLayouts
    batch: tuple[tuple[str, Layout], ...]
    axes: Mapping[str, LogicalAxes]
    plan: Plan
    findings: tuple[Finding, ...]


def evaluation_loss(
    plan: Plan,
    model: Model,
    loss: PureLoss,
    batch: Tree,
    batch_axes: Tree,
    axes_by_path: Mapping[str, LogicalAxes],
) -> EvaluationLoss:
    """Traces a loss and gives its values layouts.

    Args:
        batch_axes: logical axes of the batch, a tree like it; None for those that are known, or
            else by convention.
    """
    described = _described(batch, batch_axes, axes_by_path)
    if not described or any(
        shape[axes.index("batch") if "batch" in axes else 0] == 0
        for _, shape, _, axes in described
        if shape
    ):
        raise BatchError(
            "a batch to evaluate has no rows:"
            f" {', '.join(f'{path} {list(shape)}' for path, shape, *_ in described) or 'no arrays'}"
            "\nTry: at least one row"
        )
    traced = trace_loss(loss, model.params, model.state, batch, what="an evaluation of")
    program = traced.program
    inputs = [(path or "params", "parameter") for path, _ in with_paths(model.params, "")]
    count = len(inputs)
    inputs += [(path, "state") for path, _ in with_paths(model.state, "state")] + [
        (path, "batch") for path, _ in with_paths(batch, "batch")
    ]
    graph = graph_from_program(program, inputs)
    problem = Problem(
        model=model.name,
        forward=graph,
        steps={},
        parameters=_coloured(plan),
        batch=described,
        state_bytes=0,
        tokens=0,
        compute_dtype="float32",
    )
    colouring = colour(problem)
    rules, findings = _rules_for_rows(plan.rules, colouring, described, plan.mesh)
    layouts = layout_constraints(
        graph,
        colouring.forward,
        rules,
        plan.mesh,
        colouring.batch_colour,
        traced.facts(count).call_sources,
    )
    if findings and plan.experts != "none":
        plan, findings = replace(plan, experts="none"), (*findings, _experts_as_written())
    return EvaluationLoss(
        traced=traced,
        value_layouts=layouts,
        batch=batch_layouts(problem, colouring.batch, plan.mesh, rules),
        axes={path: axes for path, _, _, axes in described},
        plan=plan,
        findings=findings,
    )


def _described(
    batch: Tree, batch_axes: Tree, axes_by_path: Mapping[str, LogicalAxes]
) -> tuple[Any, ...]:
    if batch_axes is not None:
        return describe_batch(batch, batch_axes)
    leaves = with_paths(batch, "batch")
    if all(
        len(axes_by_path.get(path, ())) == len(leaf.shape)
        and (path in axes_by_path or not leaf.shape)
        for path, leaf in leaves
    ):
        return tuple(
            (path, tuple(leaf.shape), leaf.dtype.name, tuple(axes_by_path.get(path, ())))
            for path, leaf in leaves
        )
    return describe_batch(batch)


def _coloured(plan: Plan) -> tuple[Parameter, ...]:
    """The parameters with the names that the plan's rules use for their dims."""
    return tuple(
        Parameter(
            path=parameter.path,
            shape=parameter.shape,
            dtype=parameter.dtype,
            axes=parameter.colours
            if len(parameter.colours) == len(parameter.shape)
            else (None,) * len(parameter.shape),
            state_bytes_per_element=0.0,
            state_arrays=0,
        )
        for parameter in plan.parameters
    )


def _rules_for_rows(
    rules: Rules, colouring: Colouring, described: tuple[Any, ...], mesh: MeshShape
) -> tuple[Rules, tuple[Finding, ...]]:
    """The rules with the batch sharded over as many devices as its rows divide over; a finding if
    that is not all.
    """
    name = colouring.batch_colour
    rows = math.gcd(
        *(
            shape[dim]
            for path, shape, _, _ in described
            for dim, colour in enumerate(colouring.batch[path])
            if name is not None and colour == name
        )
    )
    rows = rows or 1  # a single row has no colour
    batch_names = {name, "batch"} if name is not None else {"batch"}
    fewer: dict[tuple[str, ...], tuple[str, ...]] = {}
    entries: list[tuple[str, tuple[str, ...]]] = []
    for logical, axes in rules.entries:
        if logical in batch_names:
            dividing = _widest_axes(tuple(axis for axis in axes if axis in mesh), rows, mesh)
            if mesh.ways(dividing) < mesh.ways(tuple(axis for axis in axes if axis in mesh)):
                fewer[axes] = dividing
            entries.append((logical, dividing))
        else:
            entries.append((logical, axes))
    if not fewer:
        return rules, ()
    axes, kept_axes = max(fewer.items(), key=lambda item: len(item[0]))
    finding = Finding(
        code="evaluation-replicated",
        severity="info",
        where=f"{rows} rows",
        message=(
            f"{rows} rows do not divide over {'·'.join(axes)}"
            f" ({mesh.ways(tuple(axis for axis in axes if axis in mesh))} ways): they are"
            f" {'sharded over ' + '·'.join(kept_axes) + ' alone' if kept_axes else 'replicated'},"
            " and the devices along the other axes compute the same rows."
        ),
        hint="rows that divide",
    )
    return Rules(tuple(entries)), (finding,)


def _widest_axes(axes: tuple[str, ...], rows: int, mesh: MeshShape) -> tuple[str, ...]:
    """The subset of axes that divides the rows the most ways; the first of equals."""
    subsets = [
        subset
        for count in range(len(axes), -1, -1)
        for subset in itertools.combinations(axes, count)
        if rows % mesh.ways(subset) == 0
    ]
    return max(subsets, key=mesh.ways)


def _experts_as_written() -> Finding:
    return Finding(
        code="experts-as-written",
        severity="info",
        where="experts=none",
        message=(
            "rows that do not divide over the devices are not exchanged between experts: these are"
            " computed as the model is written."
        ),
    )


def abstract_batch(
    batch: Tree, planned: EvaluationLoss, shard: Callable[[Layout], NamedSharding]
) -> Tree:
    """An abstract batch with shardings.

    Args:
        shard: layout -> sharding.
    """
    layouts = [layout for _, layout in planned.batch]
    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten(
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shard(layout))
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]
    )


# --------------------------------------------------------------------------------------------------
# Evaluation of a loss on any number of rows, without gradients.
#
#     program = shardlib.compile(init, loss, optimizer, batch, evaluation=validation_loss)
#     metrics = program.evaluate(state, rows)                      # any number of rows
#
# A call evaluates the loss of exactly the given rows, all at once, without padding or microbatches,
# so that the result is exact for every loss (mean, sum or anything else). Each number of rows has
# its own program, with the plan's shardings of the parameters, compiled at first use and kept. Rows
# are sharded over as many devices as they divide over.


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationProgram:
    """An evaluation compiled for batches of certain shapes.

    Attributes:
        call: (parameters, model state, batch) -> metrics.
        batch: abstract batch, each leaf with its sharding.
        findings: findings of lowering.
    """

    call: Callable[..., dict[str, Any]]
    batch: Tree
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """A loss to be evaluated on batches of any number of rows; made by `Program.evaluation`.

    Attributes:
        plan: the plan of the training step.
        mesh: its devices.
        model: the user's model.
        loss: the evaluated loss.
        params: shardings of the parameters.
        state: abstract training state, each leaf with its sharding.
        axes: logical axes of the batch of a step, by path.
        batch_axes: logical axes of batches, a tree like them; None for those of a step, or else by
            convention.
        user_loss: the loss as the user wrote it; None if unknown.
        programs: compiled programs, by structure, shapes and dtypes of the batch.
    """

    plan: Plan
    mesh: Any
    model: Model
    loss: PureLoss
    params: ParameterShardings
    state: TrainState
    axes: Mapping[str, LogicalAxes]
    batch_axes: Tree = None
    user_loss: UserLoss | None = None
    programs: dict[Any, EvaluationProgram] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all evaluations compiled so far."""
        return tuple(
            dict.fromkeys(
                finding for program in self.programs.values() for finding in program.findings
            )
        )

    @property
    def pure(self) -> tuple[PureLoss, Tree, Tree]:
        """The loss, and its abstract parameters and model state."""
        return self.loss, self.model.params, self.model.state

    def evaluate(self, state: TrainState, batch: Tree) -> dict[str, jax.Array]:
        """The metrics of a batch: "loss", and the user's own. The state is not donated."""
        require_state("evaluate", state)
        require_not_donated("evaluate", state.inference)
        program = self.compiled(batch)
        rows = put_batch(batch, program.batch)
        with own_state("evaluate", state.inference, self.state.inference):
            return in_every_process(program.call(state.params, state.model_state, rows))

    def compiled(self, batch: Tree) -> EvaluationProgram:
        """The program for batches of these shapes; compiled at the first call.

        Args:
            batch: arrays, or `jax.ShapeDtypeStruct`; only shapes and dtypes matter.
        """
        shapes = shapes_of_batch(batch)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self.programs:
            self.programs[key] = self._compiled(shapes)
        return self.programs[key]

    def _compiled(self, batch: Tree) -> EvaluationProgram:
        if not isinstance(self.mesh, Mesh):
            raise PlanError(
                "a program for devices that are not here cannot evaluate\nTry:"
                " shardlib.compile(...) on the devices themselves"
            )
        planned = evaluation_loss(
            _whole_batch_plan(self.plan),
            self.model,
            self._fixed_state_loss,
            batch,
            self.batch_axes,
            self.axes,
        )
        replicated = named_sharding(self.mesh, Layout())
        sharded = abstract_batch(batch, planned, lambda layout: named_sharding(self.mesh, layout))
        loss, findings = self._lowered(planned, sharded)

        def evaluate(params: Tree, model_state: Tree, batch: Tree) -> dict[str, Any]:
            value, (metrics, _) = loss(params, model_state, batch)
            return {"loss": value, **metrics}

        evaluate.__name__ = evaluate.__qualname__ = f"shardlib_evaluate_{self.plan.digest}"
        arguments = (self.state.params, self.state.model_state, sharded)
        with _jax_compat.in_mesh(self.mesh):
            jitted = jax.jit(
                evaluate,
                in_shardings=jax.tree.map(lambda leaf: leaf.sharding, arguments),
                out_shardings=replicated,
            )
            compiled = jitted.lower(*arguments).compile()
        call = _jax_compat.runnable(jitted, compiled, arguments, self.mesh)
        return EvaluationProgram(call=call, batch=sharded, findings=(*planned.findings, *findings))

    def _fixed_state_loss(self, params: Tree, state: Tree, batch: Tree) -> Any:
        """The loss, with the model state returned unchanged."""
        value, (metrics, _) = self.loss(params, state, batch)
        return value, (metrics, state)

    def _lowered(
        self, planned: EvaluationLoss, batch: Tree
    ) -> tuple[PureLoss, tuple[Finding, ...]]:
        """The loss with its layouts, run through the stages if there are any."""
        plan = planned.plan
        if plan.mesh["stage"] > 1:
            dims = with_folds(batch_dims(planned.axes), batch, planned.traced.program)
            try:
                staged, findings = pipeline(
                    plan,
                    planned.traced,
                    self.model.state,
                    self.mesh,
                    self.params,
                    StagedLayouts(layers=planned.value_layouts, outside_values={}),
                    key_inputs(dims, planned.traced.closed_jaxpr),
                )
            except PlanError as error:
                return self._without_pipeline(planned), (
                    Finding(
                        code="evaluation-without-stages",
                        severity="warning",
                        where=f"stage={plan.mesh['stage']}",
                        message=(
                            "the evaluation does not go through the stages, and every device"
                            f" gathers all layers: {error}"
                        ),
                    ),
                )
            shardings = jax.tree.map(lambda leaf: leaf.sharding, batch)
            whole = Microbatches(shardings=shardings, dims=dims, count=1)
            return (
                lambda params, state, batch: staged.loss(params, state, *whole.split(batch)),
                findings,
            )
        return self._without_pipeline(planned), ()

    def _without_pipeline(self, planned: EvaluationLoss) -> PureLoss:
        return loss_in_layouts(
            planned.traced,
            LossLayouts.of(
                planned.traced, planned.plan, self.mesh, self.params, planned.value_layouts
            ),
        )

    def for_loss(self, loss: UserLoss | None, batch_axes: Tree) -> Evaluation:
        """The evaluation of another loss.

        Args:
            loss: (model, batch) -> scalar or (scalar, metrics); None for this one.
            batch_axes: logical axes of its batches; None for the convention.
        """
        return replace(
            self,
            loss=self.loss if loss is None else self.model.evaluated(loss),
            batch_axes=batch_axes,
            user_loss=self.user_loss if loss is None else loss,
            programs={},
        )


def _whole_batch_plan(plan: Plan) -> Plan:
    """A plan for all rows at once: one microbatch, one chunk per stage, no rematerialisation."""
    return replace(
        plan,
        microbatches=1,
        accumulation=1,
        virtual_stages=1,
        schedule=GPIPE.name if plan.mesh["stage"] > 1 else plan.schedule,
        gather="use",
        remat="none",
        remat_layers=0,
        remat_classes=(),
        offload=(),
        pipeline="lockstep",
    )


# --------------------------------------------------------------------------------------------------
# Guards of a step: finite checks, loss scale, gradient clipping, a limit for the loss.
#
#     guards = shardlib.Guards(clip=1.0, scale=2.0**15)
#     program = shardlib.compile(init, loss, optimizer, batch, guards=guards)
#     state, metrics = program.step(state, batch)
#     metrics["gradient_norm"], metrics["skipped"], metrics["loss_scale"]
#
# All of it is part of the compiled step: nothing waits for the host. The gradient norm is one
# scalar from one all-reduce; it is not finite if any gradient is not, so it serves as the check
# too.


#: Expected kinds of the values of `Guards`.
_GUARDS: Mapping[str, Kind] = {
    "clip": (is_positive, "a finite number above 0", "clip=1.0, or None"),
    "scale": (is_positive, "a finite number above 0", "scale=2.0**15, or None"),
    "growth": (is_count, "an integer of at least 1", "growth=2000"),
    "spike": (lambda value: isinstance(value, bool), "true or false", "spike=True"),
}


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Guards of a training step. A step whose loss or gradients are not finite leaves parameters,
    optimizer state and model state unchanged.

    Attributes:
        clip: largest global norm of the gradients, which are scaled down to it; None for no
            clipping.
        scale: initial scale of the loss, for gradients in float16; None for no scale. It is halved
            after gradients that are not finite and doubled after `growth` steps without
            (arXiv:1710.03740, section 3.2; torch.amp.GradScaler).
        growth: steps after which the scale is doubled.
        spike: skip steps whose loss is above the `limit` of the state, which is infinite until
            `limited` sets it.

    Raises:
        SettingsError: values of another kind or out of range, all of them listed.
    """

    clip: float | None = None
    scale: float | None = None
    growth: int = 2000
    spike: bool = False

    def __post_init__(self) -> None:
        require_kinds(
            "Guards", _GUARDS, vars(self), needed=("growth", "spike"), error=SettingsError
        )

    def first_state(self) -> GuardState:
        """The guard state before the first step."""
        return GuardState(
            scale=None if self.scale is None else jnp.float32(self.scale),
            good=None if self.scale is None else jnp.int32(0),
            limit=jnp.float32(jnp.inf) if self.spike else None,
        )

    def next_state(self, state: GuardState, finite: Value) -> GuardState:
        """The guard state after a step.

        Args:
            state: guard state before the step.
            finite: whether loss and gradients are finite, boolean scalar.

        Returns:
            The state with the scale, if there is one, halved or doubled when due.
        """
        if state.scale is None:
            return state
        grown = state.good + 1 >= self.growth
        return replace(
            state,
            scale=jnp.where(
                finite, jnp.where(grown, state.scale * 2, state.scale), state.scale / 2
            ),
            good=jnp.where(finite & ~grown, state.good + 1, 0),
        )


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """Loss and gradients of a step, after its guards.

    Attributes:
        loss: unscaled.
        gradients: unscaled and clipped.
        norm: global norm of the gradients before clipping.
        finite: whether all of them are finite.
        applies: whether the update is applied.
    """

    loss: Any
    gradients: Tree
    norm: Any
    finite: Any
    applies: Any

    def select(self, new: Tree, old: Tree) -> Tree:
        """The new arrays if the update is applied, otherwise the old ones."""
        return jax.tree.map(lambda after, before: jnp.where(self.applies, after, before), new, old)

    def metrics(self, state: GuardState) -> Metrics:
        """Metrics of the guards for a step that began with a given guard state."""
        metrics = {"gradient_norm": self.norm, "skipped": 1 - self.applies.astype(jnp.int32)}
        return metrics if state.scale is None else {**metrics, "loss_scale": state.scale}


def check_gradients(
    guards: Guards, state: GuardState, loss: Value, gradients: Tree, shardings: Tree
) -> Guarded:
    """Unscales, checks and clips the gradients of a step."""
    if state.scale is not None:
        loss = loss / state.scale
        gradients = jax.tree.map(lambda leaf: leaf / state.scale.astype(leaf.dtype), gradients)
    norm = global_norm(jax.tree.leaves(gradients), jax.tree.leaves(shardings))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    applies = finite if state.limit is None else finite & (loss <= state.limit)
    if guards.clip is not None:
        clip, within_clip = guards.clip, norm < guards.clip
        gradients = jax.tree.map(
            lambda leaf: jnp.where(within_clip, leaf, leaf / norm.astype(leaf.dtype) * clip),
            gradients,
        )
    return Guarded(loss=loss, gradients=gradients, norm=norm, finite=finite, applies=applies)


def global_norm(leaves: Sequence[Value], shardings: Sequence[NamedSharding]) -> Value:
    """Euclidean norm of all elements of all arrays, in float32 at least: every device sums its
    shards, and a single all-reduce adds these sums.
    """
    mesh = shardings[0].mesh

    def local(*shards: Any) -> Any:
        # every replica adds the sum of its shard, divided by the number of replicas
        sums = [
            jnp.sum(
                jnp.square(
                    jnp.abs(shard).astype(jnp.promote_types(jnp.abs(shard).dtype, jnp.float32))
                )
            )
            * (_ways(sharding) / mesh.size)
            for shard, sharding in zip(shards, shardings, strict=True)
        ]
        return jax.lax.psum(sum(sums[1:], sums[0]), mesh.axis_names)

    specs = tuple(sharding.spec for sharding in shardings)
    return jnp.sqrt(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(
            *leaves
        )
    )


def _ways(sharding: NamedSharding) -> int:
    """Number of distinct shards of an array."""
    names = [
        name
        for dim in sharding.spec
        if dim is not None
        for name in (dim if isinstance(dim, tuple) else (dim,))
    ]
    return math.prod(sharding.mesh.shape[name] for name in names)


def limited(state: TrainState, limit: float) -> TrainState:
    """The state with a new limit for the loss: later steps whose loss is above it are skipped."""
    if state.guard is None or state.guard.limit is None:
        raise PlanError(
            "the program has no limit for the loss\nTry: shardlib.compile(...,"
            " guards=shardlib.Guards(spike=True))"
        )
    old = state.guard.limit
    return replace(
        state,
        guard=replace(
            state.guard, limit=jax.device_put(jnp.asarray(limit, old.dtype), old.sharding)
        ),
    )


# --------------------------------------------------------------------------------------------------
# Parts of a step.

#: Results of a loss: the loss, and (metrics, model state after the step).
Results = tuple[Value, tuple[Metrics, Tree]]


@dataclass(frozen=True, kw_only=True)
class LossRun:
    """The loss over a whole batch, with its layouts in place, as a function of (params, state,
    batch); parameters are in their stored sharding.

    Attributes:
        gradients: -> ((loss, (metrics, state)), gradients of the trained parameters).
        timetable: the schedule of a pipeline; None without stages.
    """

    gradients: Callable[[Tree, Tree, Tree], tuple[Results, Tree]]
    timetable: Timetable | None = None

    def with_prologue(self, prologue: Callable[[Tree, Tree], Tree]) -> LossRun:
        """The run with a prologue applied to the batch first."""
        return replace(
            self,
            gradients=lambda params, state, batch: self.gradients(
                params, state, prologue(state, batch)
            ),
        )

    def with_finish(self, finish: Callable[[Results, Tree], tuple[Results, Tree]]) -> LossRun:
        """The run with its results post-processed after the last microbatch."""
        return replace(self, gradients=lambda *arguments: finish(*self.gradients(*arguments)))


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a step.

    Attributes:
        run: the loss and its gradient.
        partition: which parameters are trained.
        param_shardings: shardings of the trained parameters.
        gather: gathers updated parameters to their stored sharding, over the old ones.
        update_params: abstract parameters in the dtypes of the update.
        guards: None for none.
        opt_shardings: shardings of the optimizer's state, with memory kinds.
    """

    run: LossRun
    optimizer: optax.GradientTransformation
    partition: Partition
    param_shardings: ParameterShardings
    gather: Callable[[Tree, Tree], Tree]
    precision: Precision
    update_params: Tree
    guards: Guards | None = None
    opt_shardings: Tree = None


@dataclass(frozen=True, kw_only=True)
class StateStorage:
    """Storage of parameters and of the optimizer's state.

    Attributes:
        param_shardings, trained_shardings: of all parameters, and of the trained ones.
        trained_params: abstract.
        optimizer: the user's, with its state in the dtypes of `precision`.
        opt_state: abstract.
        opt_shardings: shardings of the optimizer's state, with memory kinds.
        findings: findings about the storage.
    """

    param_shardings: ParameterShardings
    trained_shardings: ParameterShardings
    trained_params: Tree
    precision: Precision
    optimizer: optax.GradientTransformation
    opt_state: Tree
    opt_shardings: Tree
    findings: tuple[Finding, ...]

    @property
    def num_parameters(self) -> int:
        """Number of parameter arrays."""
        return len(jax.tree.leaves(self.param_shardings.compute))


# --------------------------------------------------------------------------------------------------
# Optimizer state offloaded to host memory, and its transfers to the device and back.
#
# Where the plan says so, arrays of optimizer state that have a parameter's shape are stored in
# `pinned_host` memory and copied to the device for the update and back; the compiler schedules the
# copies. All computation is on the device: whatever is read is copied first, or the compiler would
# compute on the host. State on disk is read and written by the host (`shardlib.lowering.disk`); a
# program lowered for absent devices has that state in host memory, which makes no difference to the
# devices.

#: Memory kind of the device.
DEVICE = "device"


def has_host_memory(mesh: Mesh | AbstractMesh) -> bool:
    """True if the devices of a mesh have host memory; abstract ones are assumed to."""
    return isinstance(mesh, AbstractMesh) or all(
        HOST in {memory.kind for memory in device.addressable_memories()}
        for device in mesh.local_devices
    )


def offload_shardings(
    plan: Plan, opt_state: Tree, params: Tree, shardings: Tree, mesh: Mesh | AbstractMesh
) -> tuple[Tree, tuple[Finding, ...]]:
    """The shardings of optimizer state, with the memory kinds of a plan."""
    if "optimizer" not in plan.offload and not (
        "disk" in plan.offload and isinstance(mesh, AbstractMesh)
    ):
        return shardings, ()
    if not has_host_memory(mesh):
        return shardings, (
            Finding(
                code="no-host-memory",
                severity="warning",
                where="offload=optimizer",
                message=(
                    f"the devices cannot reach memory of the host ({HOST}): optimizer state stays"
                    " on the device"
                ),
                hint="leave the offload out, or a higher zero stage",
            ),
        )
    shapes = shapes_of(params)

    def with_memory_kind(path: KeyPath, leaf: Tree, sharding: NamedSharding) -> NamedSharding:
        return sharding if owner_of(path, leaf, shapes) is None else sharding.with_memory_kind(HOST)

    return jax.tree_util.tree_map_with_path(with_memory_kind, opt_state, shardings), ()


def move_offloaded(tree: Tree, shardings: Tree, memory: str) -> Tree:
    """Moves arrays that are stored in host memory to a memory kind, of the host or of the device;
    arrays stored on the device are unchanged.
    """
    return jax.tree.map(
        lambda leaf, sharding: (
            jax.device_put(leaf, sharding.with_memory_kind(memory))
            if sharding.memory_kind == HOST
            else leaf
        ),
        tree,
        shardings,
    )


# --------------------------------------------------------------------------------------------------
# One training step, as a function that `jax.jit` compiles.


def updated_state(
    parts: StepParts,
    state: TrainState,
    loss: Value,
    gradients: Tree,
    model_state: Tree,
    select: Callable[[Tree, Tree], Tree] = lambda new, old: new,
) -> TrainState:
    """The state after the optimizer's update.

    Args:
        gradients: of the trained parameters, in the dtypes of the update.
    """
    optimizer = optax.with_extra_args_support(parts.optimizer)
    stored = parts.partition.trained(state.params)
    params = cast_like(
        resharded(stored, parts.param_shardings.stored, parts.param_shardings.state),
        parts.update_params,
    )
    before = move_offloaded(state.opt_state, parts.opt_shardings, DEVICE)
    gradients = jax.tree.map(lambda gradient: checkpoint_name(gradient, GRADIENT), gradients)
    updates, opt_state = optimizer.update(gradients, before, params, value=loss)
    updated = parts.precision.as_stored(
        select(
            optax.apply_updates(params, constrain_tree(updates, parts.param_shardings.state)),
            params,
        )
    )
    stored_params = parts.partition.joined(
        resharded(
            parts.gather(updated, stored), parts.param_shardings.state, parts.param_shardings.stored
        ),
        state.params,
    )
    return TrainState(
        step=state.step + 1,
        params=stored_params,
        model_state=select(model_state, state.model_state),
        opt_state=move_offloaded(select(opt_state, before), parts.opt_shardings, HOST),
    )


def trained_gradients(run: LossRun, partition: Partition) -> LossRun:
    """A run with the gradients of trained parameters only, from one with those of all."""

    def gradients(*arguments: Any) -> Any:
        results, all_gradients = run.gradients(*arguments)
        return results, partition.trained(all_gradients)

    return replace(run, gradients=gradients)


def step_function(parts: StepParts) -> Callable[[TrainState, Tree], tuple[TrainState, Metrics]]:
    """(state, batch) -> (state, metrics): gradients, then the optimizer, applied to each device's
    shards of the state.
    """
    gradients, apply = gradients_function(parts), apply_function(parts)

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        return apply(state, gradients(state, batch))

    return step


def gradients_function(parts: StepParts) -> Callable[[TrainState, Tree], Gradients]:
    """(state, batch) -> gradients, the first half of a step."""

    def gradients(state: TrainState, batch: Tree) -> Gradients:
        (loss, (metrics, model_state)), parameter_gradients = parts.run.gradients(
            state.params, state.loss_state, batch
        )
        return Gradients(
            params=cast_like(
                constrain_tree(parameter_gradients, parts.param_shardings.gradient),
                parts.update_params,
            ),
            loss=loss,
            metrics=dict(metrics),
            model_state=model_state,
        )

    return gradients


def apply_function(
    parts: StepParts,
) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
    """(state, gradients) -> (state, metrics), the second half of a step."""

    def apply(state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        if parts.guards is None or state.guard is None:
            after = updated_state(
                parts, state, gradients.loss, gradients.params, gradients.model_state
            )
            return after, {"loss": gradients.loss, **gradients.metrics}
        outcome = check_gradients(
            parts.guards,
            state.guard,
            gradients.loss,
            gradients.params,
            parts.param_shardings.gradient,
        )
        after = updated_state(
            parts,
            state,
            outcome.loss,
            outcome.gradients,
            gradients.model_state if state.guard.scale is None else gradients.model_state["model"],
            outcome.select,
        )
        guard = parts.guards.next_state(state.guard, outcome.finite)
        return replace(after, guard=guard), {
            "loss": outcome.loss,
            **outcome.metrics(state.guard),
            **gradients.metrics,
        }

    return apply


def with_digest(function: Function, kind: str, digest: str) -> Function:
    """A function with the plan's digest in its name, which becomes the name of the compiled
    module.
    """
    function.__name__ = function.__qualname__ = f"shardlib_{kind}_{digest}"
    return function
