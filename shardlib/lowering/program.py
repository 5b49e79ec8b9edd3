"""The compiled program: its construction from a plan, its step, and its evaluation."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core as jex
from jax.sharding import AbstractMesh, Mesh

from shardlib import _jax_compat, schedules
from shardlib.annotation.model import no_mesh
from shardlib.annotation.names import Model, PureLoss, Seed, UserLoss, UserModule, read_seed_or_key
from shardlib.annotation.trees import Partition, Tree, path_text
from shardlib.errors import ArgumentError, PlanError, StateError, TracingError
from shardlib.findings import Finding, diagnostic
from shardlib.graph import Rows
from shardlib.jax_types import Function, Index, Metrics
from shardlib.layout import Layout, LogicalAxes
from shardlib.lowering.accumulation import (
    AccumulatedLoss,
    Contribution,
    Microbatches,
    TracedMicrobatch,
    accumulated_gradients,
    contribution,
    microbatch_of,
    unchanged,
    whole_batch,
)
from shardlib.lowering.checks import (
    own_state,
    require_batch,
    require_functions,
    require_lowered,
    require_model,
    require_own_state,
    require_state,
)
from shardlib.lowering.collectives import Precision, cast_like, with_stored_dtypes
from shardlib.lowering.contractions import Interleaving
from shardlib.lowering.disk import CompileTarget, DiskArray, DiskStep, DiskWriter, disk_leaves
from shardlib.lowering.disk import disk_writer as disk_writer
from shardlib.lowering.loss import propagated_layouts
from shardlib.lowering.loss_layouts import LossLayouts, ValueLayouts
from shardlib.lowering.mesh import (
    ParameterShardings,
    abstract_mesh,
    batch_dims,
    batch_path,
    batch_shardings,
    device_mesh,
    named_sharding,
    optimizer_shardings,
    parameter_shardings,
    physical_parts,
    plan_indices,
    state_shardings,
    with_shardings,
)
from shardlib.lowering.optimizer import with_layout
from shardlib.lowering.pipeline.lockstep import Pipeline, StagedLayouts, pipeline
from shardlib.lowering.pipeline.per_stage import (
    SingleUpdate,
    StagePrograms,
    StepPrograms,
    Update,
    UpdateInputs,
    stage_programs,
)
from shardlib.lowering.random_keys import BatchDims, key_inputs, with_folds
from shardlib.lowering.runtime import (
    Gradients,
    TrainState,
    call_arguments,
    put_batch,
    require_not_donated,
    scaled_state,
    shapes_of_batch,
)
from shardlib.lowering.step import (
    Evaluation,
    Guards,
    LossRun,
    StateStorage,
    StepParts,
    apply_function,
    gradients_function,
    offload_shardings,
    step_function,
    trained_gradients,
    with_digest,
)
from shardlib.lowering.uses import LossJaxpr, same_program, trace_loss
from shardlib.lowering.weights import gather_updated
from shardlib.planner.compiler_flags import OptionValue, require_profile
from shardlib.planner.plan import Plan
from shardlib.processes.progress import Progress
from shardlib.processes.values import in_every_process
from shardlib.report.text import plan_card, plan_line
from shardlib.tracing.program import flatten

#: A value of one field of `BuildOptions`.
BuildOption = Any
#: Compiler options by name.
Options: TypeAlias = Mapping[str, OptionValue]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The devices that a program runs on, and other options besides a plan and a loss.

    Attributes:
        devices: exactly the devices to use; by default the first ones that JAX sees.
        abstract: lower for absent devices: the program can be exported, not run.
        guards: guards of the step; None for none.
        disk: folder for state that the plan puts on disk; by default that of `SHARDLIB_DISK_DIR`,
            or else the system's folder for temporary files.
        evaluation: the loss of `Program.evaluate`; by default the training loss.
        evaluation_user_loss: the same as the user wrote it; None if unknown.
        compiler_options: of the step, by the compiler's names; None for those of the plan.
    """

    devices: Sequence[jax.Device] | None = None
    abstract: bool = False
    guards: Guards | None = None
    disk: str | os.PathLike[str] | None = None
    evaluation: PureLoss | None = None
    evaluation_user_loss: UserLoss | None = None
    compiler_options: Options | None = None


# --------------------------------------------------------------------------------------------------
# The loss of one microbatch, with the layouts that were planned for the loss of the whole batch.
#
# The loss is traced again for the shapes of a microbatch. If its operations then differ, layouts
# are propagated from the parameters and the batch instead.


@dataclass(frozen=True, kw_only=True)
class PlannedLoss:
    """The planned loss: its trace, colours and layouts.

    Attributes:
        traced: the loss traced for the global batch; None if it was not.
        value_layouts: layouts of activations.
        outside_layers: layouts outside of a pipeline's layers, where stages may shard values.
        rows: how the loss depends on the rows of the batch; None if it is the mean over them.
        interleaving: operations that change where fused dims are interleaved.
    """

    traced: LossJaxpr | None = None
    value_layouts: ValueLayouts | None = None
    outside_layers: ValueLayouts | None = None
    rows: Rows | None = None
    interleaving: Interleaving | None = None


@dataclass(frozen=True, kw_only=True)
class MicrobatchLoss:
    """The loss of one microbatch.

    Attributes:
        traced: the traced loss.
        value_layouts: layouts of its values.
        findings: findings if these are not the layouts of the plan.
    """

    traced: LossJaxpr
    value_layouts: ValueLayouts
    findings: tuple[Finding, ...] = ()

    @property
    def layouts_lost(self) -> bool:
        """True if the layouts of the plan are not those of this loss."""
        return bool(self.findings)


def microbatch_loss(
    plan: Plan, model: Model, loss: PureLoss, batch: Tree, planned: PlannedLoss
) -> MicrobatchLoss:
    """The loss of one microbatch, with the layouts of the plan if its operations are the planned
    ones.

    Args:
        batch: abstract batch of a microbatch.
    """
    traced, value_layouts = planned.traced, planned.value_layouts or {}
    if traced is not None and plan.microbatches == 1:
        return MicrobatchLoss(traced=traced, value_layouts=value_layouts)
    retraced = trace_loss(loss, model.params, model.state, batch)
    if traced is not None and not same_program(traced, retraced):
        return MicrobatchLoss(
            traced=retraced,
            value_layouts=propagated_layouts(
                plan, retraced, plan_indices(plan, model.params), len(jax.tree.leaves(model.state))
            ),
            findings=(lost_layouts(len(value_layouts)),),
        )
    return MicrobatchLoss(traced=retraced, value_layouts=value_layouts)


@diagnostic
def kernel_findings(planned: Plan, lowered: Plan, layouts_lost: bool) -> tuple[Finding, ...]:
    """Findings for attention that is not computed as planned."""
    if planned.attention != lowered.attention:
        return (
            Finding(
                code="kernel-left-out",
                severity="info",
                where=f"attention={planned.attention}",
                message=(
                    "JAX lowers the cuDNN kernel only where the GPUs are; here, blockwise attention"
                    " replaces it, which stores no scores either and is slower"
                ),
            ),
        )
    if layouts_lost and lowered.attention != "traced":
        return (
            Finding(
                code="attention-as-written",
                severity="warning",
                where=f"attention={lowered.attention}",
                message=(
                    "the loss computes different operations on a microbatch than on the whole"
                    " batch, so attention is left to the compiler as the model is written: it"
                    " stores the scores, which the prediction does not count"
                ),
                hint="pin microbatches to 1, or attention to 'traced'",
            ),
        )
    return ()


# --------------------------------------------------------------------------------------------------
# The driver of a step: a pipeline, or microbatches one after the other.


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The function that runs the loss over a whole batch.

    Attributes:
        run: the loss and its gradients.
        programs: the stages of a pipeline, if each has its own program.
        findings: findings of lowering.
    """

    run: LossRun
    programs: StagePrograms | None
    findings: tuple[Finding, ...]


def build_driver(
    plan: Plan,
    model: Model,
    mesh: Mesh | AbstractMesh,
    store: StateStorage,
    loss: MicrobatchLoss,
    contribution: Contribution,
    planned: PlannedLoss,
    options: BuildOptions,
) -> Driver:
    """The driver of a plan: a pipeline, or microbatches one after the other."""
    loops = unused_ring_loops(loss.traced, plan, mesh, store.param_shardings, loss.value_layouts)
    if plan.mesh["stage"] == 1:
        layouts = LossLayouts.of(
            loss.traced,
            plan,
            mesh,
            store.param_shardings,
            loss.value_layouts,
            None if loss.layouts_lost else planned.interleaving,
        )
        microbatches = Microbatches(
            shardings=contribution.shardings,
            dims=contribution.dims,
            count=plan.microbatches,
            fixed_state=contribution.fixed_state,
            row_dims=contribution.row_dims,
        )
        run = without_pipeline(
            loss.traced, layouts, microbatches, store.trained_shardings.gradient, model.partition
        )
        run = run.with_prologue(contribution.prologue).with_finish(contribution.finish)
        return Driver(run=run, programs=None, findings=loops)
    guards = options.guards
    state = model.state
    if guards is not None and guards.scale is not None:
        state = scaled_state(state, jax.ShapeDtypeStruct((), np.float32))
    staged, findings = pipeline(
        plan,
        loss.traced,
        state,
        mesh,
        store.param_shardings,
        StagedLayouts(
            layers=loss.value_layouts,
            outside_values={} if loss.layouts_lost else planned.outside_layers or {},
            whole_value_layouts=contribution.whole_value_layouts,
        ),
        key_inputs(contribution.dims, loss.traced.closed_jaxpr),
        contribution.fixed_state,
    )
    run, programs = with_pipeline(staged, contribution.shardings, contribution.dims), None
    run = run.with_prologue(contribution.prologue)
    if plan.pipeline == "programs":
        programs = stage_programs(
            plan,
            staged,
            mesh,
            store.param_shardings,
            contribution.shardings,
            contribution.dims,
            contribution.prologue,
        )
        run = LossRun(gradients=programs.whole_mesh.gradients, timetable=run.timetable)
    return Driver(
        run=trained_gradients(run, model.partition).with_finish(contribution.finish),
        programs=programs,
        findings=(*findings, *loops),
    )


# --------------------------------------------------------------------------------------------------
# A program: a plan, a mesh, and three compiled functions.
#
#     program = build_program(plan, model, loss, optimizer, batch)
#     state = program.init(seed=0)
#     state, metrics = program.step(state, batch)     # donates `state`
#
# There is no ambient state: layouts, rules and the mesh are fixed when the program is built, and
# every program compiles its own functions.

#: (program, limits, options) -> `shardlib.Verification`.
Verifier: TypeAlias = Callable[[Any, Any, Options | None], Any]


def verified_by(
    verifier: Verifier | None, program: Any, limits: Any, options: Options | None
) -> Any:
    """The verification of a program.

    Args:
        verifier: the program's; None if it was lowered as a part of another program.
    """
    if verifier is None:
        raise PlanError(
            "this program is a part of another, which is verified as a whole\nTry:"
            " shardlib.compile(...).verify()"
        )
    return verifier(program, limits, options)


def shardings_of(tree: Tree) -> Tree:
    """The shardings of abstract arrays, as a tree like them."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Program:
    """A compiled training step with its plan, mesh and abstract inputs.

    Attributes:
        plan: the plan that it implements.
        mesh: its devices.
        model: the user's model.
        optimizer: the user's optimizer.
        state: abstract training state, each leaf with its sharding.
        batch: abstract batch, each leaf with its sharding.
        findings: findings of the plan, then those of lowering.
        parts: the parts of a step.
        programs: the stages of a pipeline, if each has its own program.
        disk: the folder of optimizer state that is stored on disk.
        verifier: the function behind `verify`, given by a higher layer.
        evaluated: the evaluation behind `evaluate`.
        source: the loss traced for the global batch, before any plan; None if it was not.
        compiler_options: that the step is compiled with.
    """

    plan: Plan
    mesh: Mesh | AbstractMesh
    model: Model
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: Tree
    findings: tuple[Finding, ...]
    parts: StepParts
    programs: StagePrograms | None = None
    disk: DiskWriter | None = None
    verifier: Verifier | None = None
    evaluated: Evaluation
    source: LossJaxpr | None = None
    compiler_options: Options = field(default_factory=dict)

    @property
    def rows(self) -> Tree:
        """Abstract global batch, each leaf with its sharding."""
        return self.batch

    @property
    def loss_program(self) -> Program:
        """The program itself (`shardlib.lowering.training_program`)."""
        return self

    @property
    def metrics(self) -> None:
        """None: metrics are not known beforehand, except that "loss" is among them."""

    def learned(self, state: TrainState) -> TrainState:
        """The state that evaluations and exports read: the state itself.

        Args:
            state: of this program.
        """
        return state

    def init_with(self, first: Callable[[Program], TrainState]) -> TrainState:
        """The state before the first step, as `IslandsProgram.init_with` makes it.

        Args:
            first: makes the state of a program.
        """
        return first(self)

    def __repr__(self) -> str:
        return plan_line(self.plan, type(self).__name__)

    def _repr_html_(self) -> str:
        return plan_card(self.plan)

    def lower(self) -> jax.stages.Lowered:
        """The step lowered for its mesh, without executing anything; works on meshes of absent
        devices.

        Raises:
            PlanError: the stages of the pipeline have their own programs, or the optimizer's state
                is on disk.
        """
        self._require_one_program()
        with _jax_compat.in_mesh(self.mesh):
            return self._jitted_step.lower(self.state, self.batch)

    @cached_property
    def _jitted_step(self) -> jax.stages.Wrapped:
        return self._jit(
            self.step_function(),
            donate_argnums=(0,),
            in_shardings=shardings_of((self.state, self.batch)),
            out_shardings=(shardings_of(self.state), named_sharding(self.mesh, Layout())),
        )

    def _jit(self, function: Function, **where: Any) -> jax.stages.Wrapped:
        return jax.jit(function, compiler_options=dict(self.compiler_options), **where)

    @cached_property
    def _run_step(self) -> Callable[[TrainState, Tree], tuple[TrainState, Metrics]]:
        """The compiled step."""
        return _jax_compat.runnable(
            self._jitted_step, self.compiled(), (self.state, self.batch), self.mesh
        )

    def step_function(self) -> Callable[[TrainState, Tree], tuple[TrainState, Metrics]]:
        """The step before it is compiled, for other ways of compiling it.

        Returns:
            (state, batch) -> (state, metrics), not jitted.

        Raises:
            PlanError: see `lower`.
        """
        self._require_one_program()
        return with_digest(step_function(self.parts), "step", self.plan.digest)

    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; compiled at the first call.

        Raises:
            PlanError: see `lower`.
        """
        return self._compiled_step

    def verify(self, *, limits: Any = None, options: Options | None = None) -> Any:
        """Compiles the step for the machine of its plan, which may be absent, and compares the
        compiled program with the plan: `shardlib.verify(program)`.

        Args:
            limits: `shardlib.verification.isolation.Limits`, the seconds and bytes of memory that
                the compiler may use.
            options: compiler options by name.

        Returns:
            A `shardlib.Verification`.

        Raises:
            ShardlibError: see `shardlib.verify`.
        """
        return verified_by(self.verifier, self, limits, options)

    def prepare(self) -> None:
        """Compiles everything that a step runs, if not yet compiled."""
        if self.programs is not None:
            _ = self._stage_step
        elif self.disk is not None:
            self._on_disk.prepare()
        else:
            _ = self._compiled_step

    def memory(self) -> dict[str, int]:
        """Bytes per device of the compiled step: "arguments", "outputs", "aliased", "temporaries"
        and "peak".

        If a step is several programs, those of the program that needs the most; arrays that
        per-stage programs keep between calls are not counted.

        Returns:
            Bytes by name.
        """
        runner = self._runner
        return _jax_compat.compiled_memory(self.compiled()) if runner is None else runner.memory()

    def timeline(self) -> str:
        """The schedule of the pipeline as text, one column per tick, or per task if each stage has
        its own program; empty without stages.
        """
        if self.programs is not None:
            return schedules.orders_text(self.programs.order)
        return "" if self.parts.run.timetable is None else schedules.text(self.parts.run.timetable)

    @cached_property
    def _gradients(self) -> Callable[[TrainState, Tree], Gradients]:
        """The first half of a step; it does not donate the state."""
        self._require_one_program()
        run = with_digest(gradients_function(self.parts), "gradients", self.plan.digest)
        with _jax_compat.in_mesh(self.mesh):
            jitted = self._jit(run, in_shardings=shardings_of((self.state, self.batch)))
            compiled = jitted.lower(self.state, self.batch).compile()
        return _jax_compat.runnable(jitted, compiled, (self.state, self.batch), self.mesh)

    @cached_property
    def _apply(self) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
        """The second half of a step; it donates the state."""
        self._require_one_program()
        run = with_digest(apply_function(self.parts), "apply", self.plan.digest)
        replicated = named_sharding(self.mesh, Layout())
        return self._jit(
            run, donate_argnums=(0,), out_shardings=(shardings_of(self.state), replicated)
        )

    @property
    def _runner(self) -> StepPrograms | DiskStep | None:
        """The runner of a step that is several programs; None if it is one program."""
        return (
            self._stage_step
            if self.programs is not None
            else self._on_disk
            if self.disk is not None
            else None
        )

    def _require_one_program(self) -> None:
        if self.disk is not None:
            raise PlanError(
                "a step whose optimizer state is on disk is not a single program\nTry:"
                " offload=['optimizer'], or shardlib.verify(init, loss, optimizer, batch,"
                " plan=program.plan), which compiles it with that state in host memory"
            )
        if self.programs is not None:
            raise PlanError(
                "a step whose stages are programs of their own (pipeline='programs') is not a"
                " single program\nTry: pipeline='lockstep'"
            )

    @cached_property
    def _compiled_step(self) -> jax.stages.Compiled:
        try:
            with Progress("compiling the step"):
                return self.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if not self.compiler_options or "compile option" not in str(error):
                raise
            raise ArgumentError(
                f"the compiler refuses compiler_options {dict(self.compiler_options)}:"
                f" {str(error)[:300]}\nTry: its own names of options, or compiler_options={{}}"
            ) from error

    @cached_property
    def _stage_step(self) -> StepPrograms:
        assert self.programs is not None
        return self.programs.compiled(
            self.state, self.batch, self._compiled_update, f"shardlib_{self.plan.digest}"
        )

    def _compiled_update(self, inputs: UpdateInputs) -> Update:
        """The compiled update after per-stage programs."""
        if self.disk is not None:
            step = self._with_disk(inputs)
            step.prepare()
            return step
        run = with_digest(step_function(self.parts), "update", self.plan.digest)
        replicated = named_sharding(self.mesh, Layout())
        jitted = jax.jit(
            run, donate_argnums=(0,), out_shardings=(shardings_of(self.state), replicated)
        )
        compiled = jitted.lower(self.state, inputs).compile()
        run = _jax_compat.runnable(jitted, compiled, (self.state, inputs), None)
        return SingleUpdate(call=compiled, run=run)

    @property
    def _init_function(self) -> Callable[[Any], TrainState]:
        """seed -> the state before the first step."""
        parts = self.parts
        return init_function(self.model, parts.optimizer, parts.precision, parts.guards)

    @cached_property
    def _on_disk(self) -> DiskStep:
        """The step with its state on disk; per-stage programs only use it to make the initial
        state.
        """
        return self._with_disk(self.batch)

    def _with_disk(self, batch: Tree) -> DiskStep:
        """The step (or its update, after per-stage programs) with state on disk, for an abstract
        batch.
        """
        assert self.disk is not None and isinstance(self.mesh, Mesh)
        target = CompileTarget(
            mesh=self.mesh,
            state=self.state,
            replicated=named_sharding(self.mesh, Layout()),
            digest=self.plan.digest,
        )
        return DiskStep(
            target=target,
            batch=batch,
            function=step_function(self.parts),
            init_state=self._init_function,
            writer=self.disk,
        )

    @cached_property
    def _init(self) -> Callable[[Any], TrainState]:
        """A seed, or the data of a key -> the state before the first step."""
        init = with_digest(self._init_function, "init", self.plan.digest)
        return jax.jit(init, out_shardings=shardings_of(self.state))

    def init(self, seed: Seed = 0) -> TrainState:
        """Makes the state before the first step, each array in its stored sharding, with the values
        of the user's own constructor.

        Args:
            seed: of the random streams of the constructor, 0 to 2**31 - 1; or a key, typed or raw,
                where `jax.random.key(3)` gives the numbers of seed 3.

        Returns:
            The state; `step` donates it.

        Raises:
            ArgumentError: the seed is neither an integer from 0 to 2**31 - 1 nor a key.
        """
        number = read_seed_or_key(seed)
        if self.disk is not None:
            return self._on_disk.init(number)
        with no_mesh():
            return self._init(number)

    def step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """Runs one training step.

        Args:
            state: from `init` or the step before; its buffers are donated and cannot be used again.
            batch: the global batch, host arrays, or arrays that `put` has placed.

        Returns:
            The next state, and metrics as arrays on the devices: "loss", the mean over the global
            batch, those of guards ("gradient_norm", "skipped", "loss_scale"), and the user's own.

        Raises:
            StateError: arrays of the state were donated to a step before, or deleted, or it is the
                state of another program.
            BatchError: the batch does not match the one that the program was compiled for.
            DiskError: state on disk cannot be read or written.
        """
        require_state("step", state)
        require_not_donated("step", state)
        if self.disk is not None:
            # its arrays are taken over one by one: half would be gone before a mismatch is found
            require_own_state("step", state, self.state)
        require_batch(batch, self.batch)
        runner = self._runner
        with own_state("step", state, self.state):
            if runner is None:
                state, metrics = self._run_step(state, call_arguments(batch, self.batch))
            else:
                state, metrics = runner.step(state, put_batch(batch, self.batch))
        return state, in_every_process(metrics)

    def gradients(self, state: TrainState, batch: Tree) -> Gradients:
        """The first half of a step, which does not donate the state; `params` of the result may be
        changed before `apply`.

        Args:
            state: see `step`.
            batch: see `step`.

        Raises:
            StateError, BatchError: see `step`.
            PlanError: a step is several programs: per-stage programs, or state on disk.
        """
        require_state("gradients", state)
        require_not_donated("gradients", state)
        require_batch(batch, self.batch)
        with own_state("gradients", state, self.state):
            return self._gradients(state, call_arguments(batch, self.batch))

    def apply(
        self, state: TrainState, gradients: Gradients
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The second half of a step: the optimizer, and guards if there are any.

        Args:
            state: the state whose gradients were computed; it is donated.
            gradients: from `gradients`.

        Raises:
            StateError, PlanError: see `gradients`.
        """
        require_state("apply", state)
        require_not_donated("apply", state)
        require_own_state("apply", state, self.state)
        with _jax_compat.in_mesh(self.mesh):
            state, metrics = self._apply(state, gradients)
        return state, in_every_process(metrics)

    def evaluate(self, state: TrainState, batch: Tree) -> dict[str, jax.Array]:
        """The exact metrics of a batch of any number of rows, without an update; the state is not
        donated.

        NNX models are in `model.eval()` mode (no dropout, running statistics); Linen models and
        pytrees follow their loss, so give `compile` an `evaluation` loss if theirs is for training.
        See `docs/evaluation.md`.

        Args:
            state: from `init` or a step.
            batch: the rows, host arrays or arrays on devices; dims other than the first as compiled
                for.

        Returns:
            "loss" and the user's own metrics, by name.

        Raises:
            StateError: arrays of the state were donated to a step before, or deleted, or it is the
                state of another program.
            BatchError: the batch has no rows, or does not have the dims that it was compiled for.
            TracingError: the loss cannot be traced for these shapes.
            PlanError: the program was lowered for absent devices.
        """
        return self.evaluated.evaluate(state, batch)

    def evaluation(self, loss: UserLoss | None = None, *, batch_axes: Tree = None) -> Evaluation:
        """An evaluation of another loss, or of other batches; reuse it, since it caches compiled
        programs.

        Args:
            loss: (model, batch) -> scalar or (scalar, metrics), with the parameters in the
                shardings of the step; by default that of `evaluate`.
            batch_axes: logical axes of its batch, see `shardlib.compile`; by default those of a
                step, or else by convention.

        Returns:
            An evaluation: `evaluation.evaluate(state, batch)` gives metrics by name. Programs are
            compiled at their first use.
        """
        return (
            self.evaluated
            if loss is None and batch_axes is None
            else self.evaluated.for_loss(loss, batch_axes)
        )

    def put(self, batch: Tree) -> Tree:
        """Places the arrays of a batch on the devices where a step expects them.

        Every process passes the whole global batch; arrays that are in place already are unchanged.

        Args:
            batch: the global batch, a tree like the one that was traced.

        Returns:
            The same tree of arrays, sharded as a step takes them.

        Raises:
            BatchError: tree, shapes or dtypes differ from the batch that was traced; all arrays
                concerned are listed.
        """
        require_batch(batch, self.batch)
        return put_batch(batch, self.batch)

    @property
    def disk_paths(self) -> frozenset[str]:
        """Paths of the arrays of a state that are stored on disk."""
        return frozenset(disk_leaves(self.state).values()) if self.disk is not None else frozenset()

    def put_on_disk(self, array: jax.Array, checksums: jax.Array | np.ndarray) -> DiskArray:
        """Puts an array of a state on disk; its path is one of `disk_paths`.

        Args:
            array: laid out as in `state`.
            checksums: its checksums, see `shardlib.lowering.runtime`.

        Returns:
            The leaf that replaces the array in the state.

        Raises:
            PlanError: the program keeps nothing on disk.
            DiskError: the disk is full or cannot be written.
        """
        if self.disk is None:
            raise PlanError("the program keeps nothing on disk\nTry: pin={'offload': ['disk']}")
        return self.disk.put(array, checksums)

    def anew(self, state: TrainState) -> TrainState:
        """A state with its optimizer and guards as before the first step.

        Args:
            state: of this program; parameters and model state are shared, not copied.

        Returns:
            A state for `step`, with the same step number.

        Raises:
            StateError: parameters or model state were donated to a step before, or deleted, or are
                those of another program.
        """
        require_model("anew", state, self.state)
        with own_state("anew", state.inference, self.state.inference):
            opt_state = self._initial_opt_state(state.params)
        guard = (
            None
            if self.parts.guards is None
            else jax.jit(
                self.parts.guards.first_state, out_shardings=shardings_of(self.state.guard)
            )()
        )
        return replace(state, opt_state=opt_state, guard=guard)

    @cached_property
    def _initial_opt_state(self) -> Callable[[Tree], Tree]:
        """Parameters -> the optimizer's state before the first step; compiled once."""

        def init(params: Tree) -> Tree:
            return self.parts.optimizer.init(
                self.model.partition.trained(cast_like(params, self.model.params))
            )

        if self.disk is not None:
            return lambda params: self._on_disk.init_optimizer(init, params)
        return jax.jit(init, out_shardings=shardings_of(self.state.opt_state))

    def module(self, state: TrainState) -> UserModule:
        """The user's own model with the arrays of a state: an nnx module, or a params tree.

        Args:
            state: of this program.

        Returns:
            The model; its arrays are those of the state, in their shardings.

        Raises:
            StateError: parameters or model state were donated to a step before, or deleted, or are
                those of another program.
        """
        require_model("module", state, self.state)
        return self.model.rebuild(cast_like(state.params, self.model.params), state.model_state)

    def state_dict(self, state: TrainState) -> dict[str, jax.Array]:
        """The arrays of the model by dotted path, parameters first: those of the state, not copied,
        in their shardings. `plan.parameters` and checkpoints have the same paths.

        Args:
            state: of this program.

        Raises:
            StateError: see `module`; or a parameter and an array of the model's state share a path.
        """
        require_model("state_dict", state, self.state)
        return arrays_by_path(state)


# --------------------------------------------------------------------------------------------------
# Construction of a program from a plan: its mesh, stored state, the loss with its layouts, the
# step.


def build_program(
    plan: Plan,
    model: Model,
    loss: PureLoss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    batch_axes: Mapping[str, LogicalAxes] | None = None,
    planned: PlannedLoss | None = None,
    options: BuildOptions | None = None,
) -> Program:
    """Lowers a plan.

    Args:
        planned: the planned loss, if planning has traced one.
    """
    require_lowered(plan)
    planned, options = planned or PlannedLoss(), options or BuildOptions()
    original_plan, plan = plan, _runnable(plan, options)
    mesh, device_findings = _mesh(plan, options)
    shapes = shapes_of_batch(batch)
    store = state_storage(plan, model, optimizer, mesh)
    data_shardings = batch_shardings(plan, shapes, mesh)
    dims = batch_dims(batch_axes or _without_axes(shapes))
    microbatch = microbatch_loss(
        plan, model, loss, microbatch_of(shapes, dims, plan.microbatches), planned
    )
    dims = with_folds(dims, shapes, microbatch.traced.program)
    require_functions(
        plan, microbatch.traced.facts(store.num_parameters), layouts_lost=microbatch.layouts_lost
    )
    contribution = _contribution(
        plan,
        model,
        planned,
        TracedMicrobatch(traced=microbatch.traced, dims=dims, shardings=data_shardings),
        shapes,
        mesh,
    )
    microbatch = _with_loss_scale(
        replace(microbatch, traced=contribution.traced), model, options.guards
    )
    driver = build_driver(plan, model, mesh, store, microbatch, contribution, planned, options)
    state = abstract_state(plan, model, store, mesh, options.guards)
    writer, disk_findings = (
        disk_writer(options.disk) if "disk" in plan.offload and not options.abstract else (None, ())
    )
    return Program(
        plan=original_plan,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        state=state,
        batch=with_shardings(shapes, data_shardings),
        findings=_unique(
            plan.findings,
            model.findings,
            device_findings,
            store.findings,
            disk_findings,
            microbatch.findings,
            kernel_findings(original_plan, plan, microbatch.layouts_lost),
            () if planned.interleaving is None else planned.interleaving.findings,
            driver.findings,
        ),
        parts=_step_parts(plan, model, store, driver.run, options.guards, mesh),
        evaluated=Evaluation(
            plan=plan,
            mesh=mesh,
            model=model,
            loss=options.evaluation or loss,
            user_loss=options.evaluation_user_loss,
            params=store.param_shardings,
            state=replace(state, opt_state=()),
            axes=batch_axes or {},
        ),
        programs=driver.programs,
        disk=writer,
        source=planned.traced,
        compiler_options=_compiler_options(
            original_plan, mesh, options.compiler_options, driver.programs
        ),
    )


def _compiler_options(
    plan: Plan, mesh: Mesh | AbstractMesh, asked: Options | None, programs: StagePrograms | None
) -> Options:
    """The compiler options of a step: the user's, or those of the plan where it runs on the
    devices that it was made for.

    Args:
        programs: of a step that is not a single program.
    """
    several = programs is not None or "disk" in plan.offload
    if asked and several:
        raise PlanError(
            "compiler_options are for a step that is a single program; this one is several"
            " (pipeline='programs', or optimizer state on disk)\nTry: the variable XLA_FLAGS"
        )
    require_profile(asked or {})
    on_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform in ("gpu", "cuda")
    return asked if asked is not None else plan.compiler_options if on_gpus and not several else {}


def _without_axes(batch: Tree) -> dict[str, LogicalAxes]:
    """No logical axes for any array of a batch, by path."""
    return {batch_path(path): () for path, _ in jax.tree_util.tree_leaves_with_path(batch)}


def _contribution(
    plan: Plan,
    model: Model,
    planned: PlannedLoss,
    microbatch: TracedMicrobatch,
    shapes: Tree,
    mesh: Mesh | AbstractMesh,
) -> Contribution:
    """The contribution of a microbatch to the loss of the whole batch; the unchanged loss
    if its dependence on rows is unknown.
    """
    if planned.rows is None or planned.traced is None:
        return unchanged(microbatch.traced, microbatch.dims, microbatch.shardings)
    whole = whole_batch(planned.traced, planned.rows, model, shapes, microbatch.dims)
    return contribution(plan, whole, microbatch, mesh)


def _step_parts(
    plan: Plan,
    model: Model,
    store: StateStorage,
    run: LossRun,
    guards: Guards | None,
    mesh: Mesh | AbstractMesh,
) -> StepParts:
    """The parts of a step."""
    updated = store.precision.for_update(store.trained_params)
    return StepParts(
        run=run,
        optimizer=with_layout(store.optimizer, plan, updated, store.trained_shardings.state),
        partition=model.partition,
        param_shardings=store.trained_shardings,
        gather=gather_updated(plan, store.trained_params, mesh),
        precision=store.precision,
        update_params=updated,
        guards=guards,
        opt_shardings=store.opt_shardings,
    )


@diagnostic
def _unique(*findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(itertools.chain(*findings)))


def _runnable(plan: Plan, options: BuildOptions) -> Plan:
    """The plan as it can be lowered here: JAX lowers the cuDNN kernel only where GPUs are
    present.
    """
    if options.abstract and plan.attention == "cudnn":
        return replace(plan, attention="blocks")
    return plan


def _mesh(plan: Plan, options: BuildOptions) -> tuple[Mesh | AbstractMesh, tuple[Finding, ...]]:
    """The mesh of a program, its axes split into physical parts."""
    if options.abstract:
        return abstract_mesh(plan), ()
    return device_mesh(
        plan.mesh,
        options.devices,
        topology=plan.topology,
        axis_order=plan.axis_order,
        parts=physical_parts(plan),
    )


def _with_loss_scale(loss: MicrobatchLoss, model: Model, guards: Guards | None) -> MicrobatchLoss:
    """The loss of a microbatch, multiplied by the loss scale of the state if there is one."""
    if guards is None or guards.scale is None:
        return loss
    num_parameters, num_state = (
        len(jax.tree.leaves(model.params)),
        len(jax.tree.leaves(model.state)),
    )
    return replace(loss, traced=with_loss_scale(loss.traced, num_parameters, num_state))


def arrays_by_path(state: TrainState) -> dict[str, jax.Array]:
    """Parameters and model state by dotted path, parameters first; nothing is copied."""
    arrays: dict[str, jax.Array] = {}
    for tree in (state.params, state.model_state):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path_text(path)
            if name in arrays:
                raise StateError(
                    f"two arrays of the state are called {name}\nTry: names without dots, and"
                    " others for the model's state than for parameters"
                )
            arrays[name] = leaf
    return arrays


@diagnostic
def unused_ring_loops(
    traced: LossJaxpr,
    plan: Plan,
    mesh: Mesh | AbstractMesh,
    params: ParameterShardings,
    value_layouts: ValueLayouts,
) -> tuple[Finding, ...]:
    """Findings if a plan has loops over the tensor axis, but the program has none."""
    if plan.collective_matmul != "loop" or (
        plan.mesh["stage"] == 1
        and LossLayouts.of(traced, plan, mesh, params, value_layouts).ring_loops(mesh)
    ):
        return ()
    return (
        Finding(
            code="collective-matmul-unused",
            severity="warning",
            where="program",
            message=(
                "collective_matmul='loop' changes nothing: the program has no matmul of a weight"
                " that gathers or scatters the sequence over tensor, or it has stages"
            ),
            hint="a mesh with tensor and without stages, and sequence_parallel=True",
        ),
    )


def lost_layouts(count: int) -> Finding:
    """The finding that the loss of a microbatch is not the same program as the loss of the batch.

    Args:
        count: number of layouts that are lost.
    """
    return Finding(
        code="placements-lost",
        severity="warning",
        message=(
            "the loss computes different operations on a microbatch than on the whole batch; "
            f"{count} layouts of activations were left to the compiler."
        ),
        hint="pin microbatches to 1",
    )


# --------------------------------------------------------------------------------------------------
# Loss scaling, by a scale that changes from step to step.
#
# Gradients in float16 underflow below 6e-8. So the loss is multiplied by a scale, and gradients are
# divided by it before the update (arXiv:1710.03740, section 3.2). The scale is an input of the
# traced loss next to the model state, so that it reaches the loss wherever that is computed: in
# microbatches, and in both forms of pipelines.


def with_loss_scale(traced: LossJaxpr, num_parameters: int, num_state: int) -> LossJaxpr:
    """The loss of (params, state, batch) as one of (params, {"model": state, "scale": scale},
    batch), multiplied by the scale in float32 at least.
    """
    leading = num_parameters + num_state
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.closed_jaxpr.in_avals]

    def run(params_and_state: list[Any], scale: Any, batch: list[Any]) -> Any:
        loss, (metrics, state) = jax.tree.unflatten(
            traced.out_tree, jex.jaxpr_as_fun(traced.closed_jaxpr)(*params_and_state, *batch)
        )
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * scale, (
            metrics,
            scaled_state(state, scale),
        )

    with no_mesh():
        retraced, shapes = jax.make_jaxpr(run, return_shape=True)(
            avals[:leading], jax.ShapeDtypeStruct((), jnp.float32), avals[leading:]
        )
    old, new = (
        [(equation.path, equation.name) for equation in flatten(jaxpr).equations]
        for jaxpr in (traced.closed_jaxpr, retraced)
    )
    if new[: len(old)] != old:
        raise TracingError(
            "the loss does not trace again with a scale: its equations change\nTry: guards without"
            " a loss scale"
        )
    return LossJaxpr(closed_jaxpr=retraced, out_tree=jax.tree.structure(shapes))


def state_storage(
    plan: Plan, model: Model, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> StateStorage:
    """The storage of a model's parameters and an optimizer's state under a plan."""
    param_shardings, precision = parameter_shardings(plan, model, mesh), Precision.of(plan)
    trained_params = model.partition.trained(model.params)
    trained_shardings = param_shardings.trained_only(model.partition)
    optimizer = with_stored_dtypes(optimizer, trained_params, precision)
    opt_state = jax.eval_shape(optimizer.init, trained_params)
    on_devices, findings = optimizer_shardings(
        opt_state, trained_params, trained_shardings.state, mesh
    )
    opt_shardings, offload_findings = offload_shardings(
        plan, opt_state, trained_params, on_devices, mesh
    )
    return StateStorage(
        param_shardings=param_shardings,
        trained_shardings=trained_shardings,
        trained_params=trained_params,
        precision=precision,
        optimizer=optimizer,
        opt_state=opt_state,
        opt_shardings=opt_shardings,
        findings=(*findings, *offload_findings),
    )


def abstract_state(
    plan: Plan, model: Model, store: StateStorage, mesh: Mesh | AbstractMesh, guards: Guards | None
) -> TrainState:
    """The state of a program, each leaf with its sharding; replicated if the plan has no layout for
    it.
    """
    replicated = named_sharding(mesh, Layout())

    def as_replicated(tree: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), tree
        )

    return TrainState(
        step=jax.ShapeDtypeStruct((), np.int32, sharding=replicated),
        params=with_shardings(
            model.partition.mapped(store.precision.as_stored, model.params),
            store.param_shardings.stored,
        ),
        model_state=with_shardings(model.state, state_shardings(plan, model.state, mesh)),
        opt_state=with_shardings(store.opt_state, store.opt_shardings),
        guard=None if guards is None else as_replicated(jax.eval_shape(guards.first_state)),
    )


def without_pipeline(
    traced: LossJaxpr,
    layouts: LossLayouts,
    microbatches: Microbatches,
    gradient: Tree,
    partition: Partition,
) -> LossRun:
    """The run of a whole batch at once, or of one microbatch after another."""
    loss = AccumulatedLoss.of(traced, layouts, microbatches.count, partition)
    return LossRun(
        gradients=lambda params, state, batch: accumulated_gradients(
            loss, batch, microbatches, gradient
        )(params, state)
    )


def with_pipeline(pipeline: Pipeline, shardings: Tree, dims: BatchDims) -> LossRun:
    """The run of the microbatches through the stages of a pipeline."""
    microbatches = Microbatches(shardings=shardings, dims=dims, count=pipeline.microbatches)
    return LossRun(
        gradients=lambda params, state, batch: pipeline.gradients(
            params, state, *microbatches.split(batch)
        ),
        timetable=pipeline.stages.table,
    )


def init_function(
    model: Model,
    optimizer: optax.GradientTransformation,
    precision: Precision,
    guards: Guards | None = None,
) -> Callable[[Index], TrainState]:
    """seed -> the state before the first step.

    Args:
        precision: dtypes of stored arrays.
    """

    def init(seed: Index) -> TrainState:
        # static parts that `init` creates anew, such as functions, differ from the traced objects
        traced = jax.tree.structure((model.params, model.state))
        params, state = traced.unflatten(jax.tree.leaves(model.init(seed)))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=model.partition.mapped(precision.as_stored, params),
            model_state=state,
            opt_state=optimizer.init(model.partition.trained(params)),
            guard=None if guards is None else guards.first_state(),
        )

    return init
