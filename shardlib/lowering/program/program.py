"""What does a user hold in hand after compiling? A program: a plan, a mesh, and three compiled
functions.

    program = build_program(plan, model, loss, optimizer, batch, placements)
    state = program.init(seed=0)
    state, metrics = program.step(state, batch)     # donates `state`

Nothing is ambient: layouts, rules and the mesh were fixed when the program was built, and every
program compiles functions of its own, so changing rules or meshes around it changes nothing in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from shardlib import _jax_compat
from shardlib.annotation.activations import manual_regions, no_mesh, pinned_activations
from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.axes import LogicalAxes
from shardlib.errors import BatchError, PlanError, raise_all
from shardlib.graph.rows import Rows
from shardlib.layout import Layout
from shardlib.lowering.accumulation.microbatches import part_of
from shardlib.lowering.host_memory.disk.arrays import DiskArray, Writer
from shardlib.lowering.host_memory.disk.compiling import Where
from shardlib.lowering.host_memory.disk.compiling import on_disk as stored_leaves
from shardlib.lowering.host_memory.disk.step import DiskStep
from shardlib.lowering.host_memory.disk.step import writer as disk_writer
from shardlib.lowering.host_memory.offload import hosted
from shardlib.lowering.loss.contributions import as_it_is, contribution, whole_batch
from shardlib.lowering.loss.followed import followed
from shardlib.lowering.loss.forward import lost_placements, unused_loops
from shardlib.lowering.loss.placing import Placements, Placing, parameter_order
from shardlib.lowering.mesh import shardings
from shardlib.lowering.mesh.collectives import machine_of
from shardlib.lowering.mesh.device_mesh import abstract_mesh, device_mesh, physical_parts
from shardlib.lowering.mesh.precision import Precision, like, stored
from shardlib.lowering.pipeline.lockstep.build import pipeline
from shardlib.lowering.pipeline.per_stage.build import StagePrograms, stage_programs
from shardlib.lowering.pipeline.per_stage.dispatch import Dispatch
from shardlib.lowering.program.arguments import read_seed
from shardlib.lowering.program.belonging import FOREIGN, require_own, require_state
from shardlib.lowering.program.evaluation import Evaluation
from shardlib.lowering.program.guards import Guards
from shardlib.lowering.program.loss_scale import scaled
from shardlib.lowering.program.step import (
    StepParts,
    init_function,
    named,
    of_trained,
    pipelined,
    step_function,
    unpiped,
)
from shardlib.lowering.program.unsupported import require_functions, require_lowered
from shardlib.lowering.reading.fused_dims import Interleaving
from shardlib.lowering.reading.traced_loss import LossJaxpr, same_program, trace_loss
from shardlib.lowering.runtime.batches import placed as placed_batch
from shardlib.lowering.runtime.batches import shapes_of_batch
from shardlib.lowering.runtime.donated import require_present
from shardlib.lowering.runtime.random_keys import dtype_of, key_inputs, with_keys
from shardlib.lowering.runtime.state import TrainState, scaled_state
from shardlib.planning.decisions.plan_data import ParameterLayout
from shardlib.planning.plan import Plan
from shardlib.report import Finding
from shardlib.schedules import picture
from shardlib.tracing.program import flatten

__all__ = ["Program", "TrainState", "build_program"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A compiled training step and what belongs to it.

    Attributes:
        plan: the decisions it carries out.
        mesh: its devices.
        model: the user's model.
        optimizer: the user's optimizer.
        state: abstract training state, each leaf with its sharding.
        batch: abstract batch, each leaf with its sharding.
        findings: what lowering noticed, after what the plan has to say.
        parts: what a step is made of.
        evaluated: what `evaluate` does.
        programs: the stages of a pipeline, where they are programs of their own.
        disk: where the optimizer's state rests, where that is on disk.
        source: the loss as it was traced for the global batch, before any plan; None where it was
            not.
    """

    plan: Plan
    mesh: Mesh | AbstractMesh
    model: Model
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: Tree
    findings: tuple[Finding, ...]
    parts: StepParts
    evaluated: Evaluation
    programs: StagePrograms | None = None
    disk: Writer | None = None
    source: LossJaxpr | None = None

    def init(self, seed: int = 0) -> TrainState:
        """Makes the state before the first step, each array where it will stay, with the numbers of
        the user's own constructor.

        Raises:
            ArgumentError: the seed is no integer from 0 to 2**31 - 1.
        """
        number = np.int32(read_seed(seed))
        return self._compiled_init(number) if self.disk is None else self._on_disk.init(number)

    def step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """Does one training step.

        Args:
            state: from `init` or the step before; its buffers are donated and cannot be used again.
            batch: host arrays, or arrays that `put` has placed.

        Returns:
            The next state, and metrics: "loss", the mean over the global batch, and the user's own.

        Raises:
            StateError: arrays of the state were donated to a step before, or deleted, or it is the
                state of another program.
            BatchError: the batch is not the one that the program was compiled for.
            DiskError: state that rests on disk cannot be read or written there.
        """
        require_state("step", state)
        require_present("step", state)
        if self.disk is not None:
            require_own(
                "step",
                state,
                self.state,
                # its arrays are taken over one by one: half of them would be gone before one does not
                # fit
            )
        several, placed = self._several, self.put(batch)
        run = self.compiled() if several is None else several.step
        try:
            return run(state, placed)
        except FOREIGN as error:
            require_own("step", state, self.state, error=error)
            raise

    def evaluate(self, state: TrainState, batch: Tree) -> dict[str, jax.Array]:
        """The metrics of a batch of any number of rows, exactly, with no update; the state stays
        usable.

        NNX models are in `model.eval()` mode (no dropout, running statistics); Linen models and
        pytrees do what their loss says, so give `compile` an `evaluation` loss for them where it
        trains. See `docs/evaluation.md`.

        Raises:
            StateError: arrays of the state were donated to a step before, or deleted, or it is the
                state of another program.
            BatchError: the batch has no rows, or has not the dims that it was compiled for.
            TracingError: the loss does not trace for these shapes.
        """
        return self.evaluated.evaluate(state, batch)

    def evaluation(
        self, loss: Callable[[Any, Any], Any] | None = None, *, batch_axes: Tree = None
    ) -> Evaluation:
        """An evaluation of another loss, or of other batches; keep it, since it keeps what it
        compiles.

        Args:
            loss: (model, batch) -> scalar or (scalar, metrics), with the parameters as the step
                shards them; by default that of `evaluate`.
            batch_axes: logical axes of its batch, see `shardlib.compile`; by default those of a
                step, or else by convention.
        """
        return (
            self.evaluated
            if loss is None and batch_axes is None
            else self.evaluated.of(loss, batch_axes)
        )

    def put(self, batch: Tree) -> Tree:
        """Places the arrays of a batch on the devices where a step expects them.

        Every process gives the whole global batch; arrays that are in place already are passed on.

        Raises:
            BatchError: tree, shapes or dtypes differ from the batch that was traced; all arrays
                concerned are listed.
        """
        expected, structure = jax.tree_util.tree_flatten_with_path(self.batch)
        if jax.tree.structure(batch) != structure:
            raise BatchError(
                f"the batch has the tree {jax.tree.structure(batch)}, the program was compiled for"
                f" {structure}"
            )
        leaves = jax.tree.leaves(batch)
        failures = [
            f"{shardings.batch_path(path)}: found {found}, compiled for"
            f" {asked.dtype}{list(asked.shape)}"
            for (path, asked), leaf in zip(expected, leaves, strict=True)
            if (found := _mismatch(leaf, asked))
        ]
        if failures:
            raise_all(
                BatchError,
                "the batch is not the one that the program was compiled for",
                failures,
                hint="compile again for these shapes, or pad the batch",
            )
        return placed_batch(batch, self.batch)

    def lower(self) -> jax.stages.Lowered:
        """The step lowered for its mesh, with nothing executed; works on meshes of devices that are
        not there.

        Raises:
            PlanError: the stages of the pipeline are programs of their own, or the optimizer's
                state is on disk.
        """
        self._one_program()
        with _jax_compat.in_mesh(self.mesh):
            return jax.jit(
                self.step_function(),
                donate_argnums=(0,),
                in_shardings=_of((self.state, self.batch)),
                out_shardings=(_of(self.state), shardings.named_sharding(self.mesh, Layout())),
            ).lower(self.state, self.batch)

    def step_function(self) -> Callable[[TrainState, Tree], tuple[TrainState, dict[str, Any]]]:
        """The step before it is compiled, for those who compile it otherwise.

        Raises:
            PlanError: see `lower`.
        """
        self._one_program()
        return named(step_function(self.parts), "step", self.plan.digest)

    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; compiled at the first call.

        Raises:
            PlanError: see `lower`.
        """
        return self._compiled_step

    def prepare(self) -> None:
        """Compiles all that a step runs, if that has not been done."""
        if self.disk is not None:
            self._on_disk.prepare()
        else:
            _ = self._compiled_step if self.programs is None else self._dispatch

    @property
    def stored(self) -> frozenset[str]:
        """Paths of the arrays of a state that rest on disk."""
        return (
            frozenset(stored_leaves(self.state).values()) if self.disk is not None else frozenset()
        )

    def stow(self, array: jax.Array, sums: Any) -> DiskArray:
        """Puts an array of a state on disk, where it is one of `stored`.

        Args:
            array: laid out as in `state`.
            sums: its sums, see `shardlib.lowering.runtime.checksums`.

        Raises:
            PlanError: the program keeps nothing on disk.
            DiskError: the disk is full or cannot be written.
        """
        if self.disk is None:
            raise PlanError("the program keeps nothing on disk\nTry: pin={'offload': ['disk']}")
        return self.disk.put(array, sums)

    def anew(self, state: TrainState) -> TrainState:
        """A state with its optimizer and guards as before the first step.

        Raises:
            StateError: parameters or model state were donated to a step before, or deleted, or are
                those of another program.
        """
        self._require_model("anew", state)

        def init(params: Tree) -> Tree:
            return self.parts.optimizer.init(
                self.model.partition.trained(like(params, self.model.params))
            )

        try:
            opt_state = (
                jax.jit(init, out_shardings=_of(self.state.opt_state))(state.params)
                if self.disk is None
                else self._on_disk.fresh(init, state.params)
            )
        except FOREIGN as error:
            require_own("anew", state.inference, self.state.inference, error=error)
            raise
        guard = (
            None
            if self.parts.guards is None
            else jax.jit(self.parts.guards.first, out_shardings=_of(self.state.guard))()
        )
        return replace(state, opt_state=opt_state, guard=guard)

    def memory(self) -> dict[str, int]:
        """Bytes per device of the compiled step: "arguments", "outputs", "aliased", "temporaries"
        and "peak".

        Where a step is several programs, of the one that needs the most; what stages that are
        programs of their own keep beside it is not counted.
        """
        several = self._several
        return _jax_compat.compiled_memory(self.compiled()) if several is None else several.memory()

    def timeline(self) -> str:
        """The schedule of the pipeline as text, a column a tick, or a task where stages are
        programs of their own; empty without stages.
        """
        if self.programs is not None:
            return picture.orders_text(self.programs.order)
        return "" if self.parts.run.table is None else picture.text(self.parts.run.table)

    def module(self, state: TrainState) -> Any:
        """The user's own model around the arrays of a state: an nnx module, or a params tree.

        Raises:
            StateError: parameters or model state were donated to a step before, or deleted, or are
                those of another program.
        """
        self._require_model("module", state)
        return self.model.rebuild(like(state.params, self.model.params), state.model_state)

    def _require_model(self, asked: str, state: Any) -> None:
        """Refuses a state whose parameters and model state are gone or have other shapes."""
        require_state(asked, state)
        require_present(asked, state.inference)
        require_own(asked, state.inference, self.state.inference, laid_out=False)

    @property
    def _several(self) -> Dispatch | DiskStep | None:
        """What runs a step that is several programs; None where it is one."""
        return (
            self._on_disk
            if self.disk is not None
            else self._dispatch
            if self.programs is not None
            else None
        )

    def _one_program(self) -> None:
        if self.disk is not None:
            raise PlanError(
                "a step whose optimizer state is on disk is no single program\nTry:"
                " offload=['optimizer'], or shardlib.verify(init, loss, optimizer, batch,"
                " plan=program.plan), which compiles it with that state in host memory"
            )
        if self.programs is not None:
            raise PlanError(
                "a step whose stages are programs of their own (pipeline='programs') is no single"
                " program\nTry: pipeline='lockstep'"
            )

    @cached_property
    def _compiled_step(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @cached_property
    def _dispatch(self) -> Dispatch:
        assert self.programs is not None
        return self.programs.compiled(
            self.state,
            self.batch,
            step_function(self.parts),
            shardings.named_sharding(self.mesh, Layout()),
            f"shardlib_{self.plan.digest}",
        )

    @cached_property
    def _on_disk(self) -> DiskStep:
        assert self.disk is not None and isinstance(self.mesh, Mesh)
        where = Where(
            mesh=self.mesh,
            state=self.state,
            whole=shardings.named_sharding(self.mesh, Layout()),
            digest=self.plan.digest,
        )
        return DiskStep(
            where=where,
            batch=self.batch,
            function=step_function(self.parts),
            first=init_function(
                self.model, self.parts.optimizer, self.parts.precision, self.parts.guards
            ),
            writer=self.disk,
        )

    @cached_property
    def _compiled_init(self) -> jax.stages.Compiled:
        init = named(
            init_function(
                self.model, self.parts.optimizer, self.parts.precision, self.parts.guards
            ),
            "init",
            self.plan.digest,
        )
        with no_mesh():
            return (
                jax.jit(init, out_shardings=_of(self.state))
                .lower(jax.ShapeDtypeStruct((), np.int32))
                .compile()
            )


def _of(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _mismatch(leaf: Any, asked: jax.ShapeDtypeStruct) -> str:
    """What a leaf is, where that is not what was asked; 64-bit host numbers stand for what JAX
    makes of them.
    """
    shape = tuple(np.shape(leaf))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if shape == tuple(asked.shape) and dtype_of(leaf) == asked.dtype:
        return ""
    return f"{dtype}{list(shape)}"


def build_program(
    plan: Plan,
    model: Model,
    loss: PureLoss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    placements: Placements | None = None,
    around: Placements | None = None,
    batch_axes: Mapping[str, LogicalAxes] | None = None,
    traced: LossJaxpr | None = None,
    devices: Sequence[jax.Device] | None = None,
    abstract: bool = False,
    guards: Guards | None = None,
    disk: str | os.PathLike[str] | None = None,
    evaluation: PureLoss | None = None,
    rows: Rows | None = None,
    interleaving: Interleaving | None = None,
) -> Program:
    """Lowers a plan.

    Args:
        plan: the decisions.
        model: the model that was planned.
        loss: its loss, as `model.bind` gives it.
        optimizer: an optax transformation.
        batch: arrays or abstract arrays of the global batch.
        placements: layouts of activations.
        around: the same outside of the layers of a pipeline, where the stages may cut them too.
        batch_axes: logical axes of every array of the batch, by path; needed for microbatches.
        traced: the loss traced for the global batch, if it has been already.
        devices: exactly the devices to use; by default the first ones that JAX sees.
        abstract: lower for devices that are not here: the program can be exported, not run.
        guards: of the step; None for none.
        disk: folder for state that the plan puts on disk; by default what `SHARDLIB_DISK_DIR` says,
            or else the system's folder for temporary files.
        evaluation: what `Program.evaluate` evaluates; by default the loss.
        rows: how the loss depends on the rows of the batch; None where it is the mean over them.
        interleaving: what the loss does otherwise where fused dims are interleaved.

    Raises:
        TopologyError: not enough devices.
        LayoutError: the plan does not fit the model.
        BatchError: the plan does not fit the batch.
        PinError: the plan decides something that lowering cannot carry out.
        DiskError: the folder for state on disk cannot be written.
    """
    require_lowered(plan)
    split = traced is None or not manual_regions(traced.closed_jaxpr)
    findings: tuple[Finding, ...] = ()
    chosen, plan = (
        plan,
        (replace(plan, attention="blocks") if abstract and plan.attention == "cudnn" else plan),
    )
    if abstract:
        mesh: Mesh | AbstractMesh = abstract_mesh(plan, split=split)
    else:
        mesh, findings = device_mesh(
            plan.mesh,
            devices,
            topology=plan.topology,
            parts=physical_parts(plan) if split else None,
        )
    shapes = shapes_of_batch(batch)
    params = shardings.parameter_shardings(plan, model, mesh)
    cut_batch = shardings.batch_shardings(plan, shapes, mesh)
    precision = Precision.of(plan)
    trained, cuts = model.partition.trained(model.params), params.of(model.partition)
    kept = stored(optimizer, trained, precision)
    opt_state = jax.eval_shape(kept.init, trained)
    cut_opt_state, opt_findings = shardings.optimizer_shardings(
        opt_state, trained, cuts.state, mesh
    )
    cut_opt_state, host_findings = hosted(plan, opt_state, trained, cut_opt_state, mesh)
    dims = shardings.batch_dims(
        batch_axes
        or {
            shardings.batch_path(path): ()
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
        }
    )
    placed, lost = _placed(
        plan, model, loss, part_of(shapes, dims, plan.microbatches), mesh, placements or {}, traced
    )
    dims = with_keys(dims, shapes, flatten(placed.traced.closed_jaxpr))
    require_functions(
        plan,
        flatten(placed.traced.closed_jaxpr),
        len(jax.tree.leaves(model.params)),
        lost=bool(lost),
    )
    kernel = _kernel_findings(chosen, plan, bool(lost))
    share = (
        as_it_is(placed.traced, dims, cut_batch)
        if rows is None or traced is None
        else contribution(
            plan,
            whole_batch(traced, rows, model, shapes, dims),
            placed.traced,
            dims,
            cut_batch,
            placed.mesh,
            mesh,
        )
    )
    placed, dims, cut_parts = replace(placed, traced=share.traced), share.dims, share.shardings
    inputs = model.state
    if guards is not None and guards.scale is not None:
        inputs = scaled_state(inputs, jax.ShapeDtypeStruct((), np.float32))
        placed = replace(
            placed,
            traced=scaled(
                placed.traced,
                len(jax.tree.leaves(model.params)),
                len(jax.tree.leaves(model.state)),
                placed.mesh,
            ),
        )
    staged, told = (
        pipeline(
            plan,
            placed.traced,
            inputs,
            mesh,
            params,
            placed.placements,
            {} if lost else around or {},
            key_inputs(dims, placed.traced.closed_jaxpr),
        )
        if plan.mesh["stage"] > 1
        else (None, ())
    )
    told = (*told, *unused_loops(placed.traced, plan, mesh, params, placed.placements))
    state = _abstract_state(
        plan,
        model,
        precision,
        params,
        shardings.with_shardings(opt_state, cut_opt_state),
        mesh,
        guards,
    )
    run = (
        pipelined(staged, cut_parts, dims)
        if staged is not None
        else unpiped(
            placed.traced,
            Placing.of(
                placed.traced, plan, mesh, params, placed.placements, None if lost else interleaving
            ),
            cut_parts,
            dims,
            cuts.gradient,
            precision,
            model.partition,
        )
    )
    run = run.of_parts(share.prologue)
    programs = (
        stage_programs(plan, staged, mesh, params, cut_parts, dims, share.prologue)
        if staged is not None and plan.pipeline == "programs"
        else None
    )
    run = run if programs is None else replace(run, gradients=programs.opening.gradients)
    run = (run if staged is None else of_trained(run, model.partition)).finished(share.finish)
    parts = StepParts(
        run=run,
        optimizer=kept,
        partition=model.partition,
        params=cuts,
        gather=_gather(plan, trained, mesh),
        precision=precision,
        updated=precision.updated(trained),
        guards=guards,
        opt_state=cut_opt_state,
    )
    evaluated = Evaluation(
        plan=plan,
        mesh=mesh,
        model=model,
        loss=evaluation or loss,
        params=params,
        state=replace(state, opt_state=()),
        axes=batch_axes or {},
    )
    writer, disk_findings = (
        disk_writer(disk) if "disk" in plan.offload and not abstract else (None, ())
    )
    return Program(
        plan=chosen,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        state=state,
        batch=shardings.with_shardings(shapes, cut_batch),
        findings=tuple(
            dict.fromkeys(
                (
                    *plan.findings,
                    *model.findings,
                    *findings,
                    *opt_findings,
                    *host_findings,
                    *disk_findings,
                    *lost,
                    *kernel,
                    *(() if interleaving is None else interleaving.findings),
                    *told,
                )
            )
        ),
        parts=parts,
        evaluated=evaluated,
        programs=programs,
        disk=writer,
        source=traced,
    )


def _abstract_state(
    plan: Plan,
    model: Model,
    precision: Precision,
    params: shardings.ParameterShardings,
    opt_state: Tree,
    mesh: Mesh | AbstractMesh,
    guards: Guards | None,
) -> TrainState:
    """The state of a program, each leaf with its sharding; what the plan has no layout for is
    replicated.
    """
    whole = shardings.named_sharding(mesh, Layout())

    def everywhere(tree: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree
        )

    return TrainState(
        step=jax.ShapeDtypeStruct((), np.int32, sharding=whole),
        params=shardings.with_shardings(
            model.partition.mapped(precision.resting, model.params), params.rest
        ),
        model_state=shardings.with_shardings(
            model.state, shardings.state_shardings(plan, model.state, mesh)
        ),
        opt_state=opt_state,
        guard=None if guards is None else everywhere(jax.eval_shape(guards.first)),
    )


def _kernel_findings(chosen: Plan, lowered: Plan, lost: bool) -> tuple[Finding, ...]:
    """Attention that is not computed as it was planned."""
    if chosen.attention != lowered.attention:
        return (
            Finding(
                code="kernel-left-out",
                severity="info",
                where=f"attention={chosen.attention}",
                message=(
                    "JAX lowers the kernel of cuDNN only where the GPUs are; in its place stands"
                    " attention in blocks, which keeps no scores either and is slower"
                ),
            ),
        )
    if lost and lowered.attention != "traced":
        return (
            Finding(
                code="attention-as-written",
                severity="warning",
                where=f"attention={lowered.attention}",
                message=(
                    "the loss computes other operations on a microbatch than on the whole batch, so"
                    " that attention is left to the compiler as the model is written: it keeps"
                    " scores, unlike what is predicted"
                ),
                hint="pin microbatches to 1, or attention to 'traced'",
            ),
        )
    return ()


def _gather(plan: Plan, trained: Tree, mesh: Mesh | AbstractMesh) -> Callable[[Tree], Tree]:
    """Gathers updated parameters that rest whole and whose optimizer state does not (ZeRO 1 and 2).

    Stacks of matrices are gathered one by one, into the place where the stack rests: gathered at
    once they would be there twice.
    """
    machine, order = machine_of(plan, mesh), parameter_order(plan, trained)

    def function(one: ParameterLayout) -> Callable[[Any], Any] | None:
        if one.state == one.rest:
            return None
        stacked = len(one.shape) > 2 and not one.state[0] and not one.rest[0]
        first = 1 if stacked else 0
        whole = machine.gather(
            one.shape[first:],
            dict(enumerate(tuple(one.state)[first:])),
            dict(enumerate(tuple(one.rest)[first:])),
        )
        return (lambda leaf: jax.lax.map(whole, leaf)) if stacked else whole

    functions = [function(plan.parameters[i]) for i in order]

    def gather(params: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(
            [
                leaf if function is None else function(leaf)
                for leaf, function in zip(leaves, functions, strict=True)
            ]
        )

    return gather


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """The loss of one microbatch, layouts for its values, and the mesh that it was traced under
    again, if any.
    """

    traced: LossJaxpr
    placements: Placements
    mesh: Mesh | AbstractMesh | None = None


def _placed(
    plan: Plan,
    model: Model,
    loss: PureLoss,
    part: Tree,
    mesh: Mesh | AbstractMesh,
    placements: Placements,
    traced: LossJaxpr | None,
) -> tuple[_Placed, tuple[Finding, ...]]:
    pinned = traced is None or bool(pinned_activations(traced.closed_jaxpr))
    if traced is not None and plan.microbatches == 1 and not pinned:
        return _Placed(traced=traced, placements=placements), ()
    # JAX writes the mesh into what it traces: a stage runs under a mesh of another kind, and
    # equations differ from those of the loss as it was planned. Where the user names no mesh axis,
    # none is needed.
    under = mesh if pinned else None
    again = trace_loss(loss, model.params, model.state, part, under)
    if traced is not None and not same_program(traced.closed_jaxpr, again.closed_jaxpr):
        return _Placed(
            traced=again,
            placements=followed(
                plan,
                again,
                parameter_order(plan, model.params),
                len(jax.tree.leaves(model.state)),
            ),
            mesh=under,
        ), (lost_placements(len(placements)),)
    return _Placed(traced=again, placements=placements, mesh=under), ()
