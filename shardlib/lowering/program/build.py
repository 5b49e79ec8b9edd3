"""A plan becomes a program: its mesh, how state is stored, the loss with its layouts, the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.axes import LogicalAxes
from shardlib.errors import PlanError
from shardlib.lowering.accumulation.microbatches import part_of
from shardlib.lowering.host_memory.disk.step import writer as disk_writer
from shardlib.lowering.loss.contribution.contributions import contribution, whole_batch
from shardlib.lowering.loss.contribution.share import Contribution, Share, as_it_is
from shardlib.lowering.mesh import shardings
from shardlib.lowering.mesh.device_mesh import abstract_mesh, device_mesh, physical_parts
from shardlib.lowering.program.checks.unsupported import require_functions, require_lowered
from shardlib.lowering.program.driver import driver_of
from shardlib.lowering.program.evaluation import Evaluation
from shardlib.lowering.program.guards import Guards
from shardlib.lowering.program.loss_scale import scaled
from shardlib.lowering.program.options import BuildOptions
from shardlib.lowering.program.part import Part, PlannedLoss, kernel_findings, part_as_planned
from shardlib.lowering.program.program import Program
from shardlib.lowering.program.store import Store, abstract_state, store_of
from shardlib.lowering.program.update.parts import Run, StepParts
from shardlib.lowering.runtime.batches import shapes_of_batch
from shardlib.lowering.runtime.random_keys import with_keys
from shardlib.lowering.weights.gathering import gather_updated
from shardlib.planning.plan import Plan
from shardlib.report import Finding, diagnostic


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
        planned: what planning knows of the loss; by default nothing.
    """
    require_lowered(plan)
    planned, options = planned or PlannedLoss(), options or BuildOptions()
    chosen, plan = plan, _runnable(plan, options)
    mesh, device_findings = _mesh(plan, options)
    shapes = shapes_of_batch(batch)
    store = store_of(plan, model, optimizer, mesh)
    cut_batch = shardings.batch_shardings(plan, shapes, mesh)
    dims = shardings.batch_dims(batch_axes or _unnamed(shapes))
    part = part_as_planned(plan, model, loss, part_of(shapes, dims, plan.microbatches), planned)
    dims = with_keys(dims, shapes, part.traced.program)
    require_functions(plan, part.traced.read(store.parameters), lost=part.lost)
    share = _contribution(
        plan,
        model,
        planned,
        Share(traced=part.traced, dims=dims, shardings=cut_batch),
        shapes,
        mesh,
    )
    part = _scaled(replace(part, traced=share.traced), model, options.guards)
    driver = driver_of(plan, model, mesh, store, part, share, planned, options)
    _require_scale(driver.run, options.guards)
    state = abstract_state(plan, model, store, mesh, options.guards, driver.run.kept)
    writer, disk_findings = (
        disk_writer(options.disk) if "disk" in plan.offload and not options.abstract else (None, ())
    )
    return Program(
        plan=chosen,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        state=state,
        batch=shardings.with_shardings(shapes, cut_batch),
        findings=_each_once(
            plan.findings,
            model.findings,
            device_findings,
            store.findings,
            disk_findings,
            part.findings,
            kernel_findings(chosen, plan, part.lost),
            () if planned.interleaving is None else planned.interleaving.findings,
            driver.findings,
        ),
        parts=_step_parts(plan, model, store, driver.run, options.guards, mesh),
        evaluated=Evaluation(
            plan=plan,
            mesh=mesh,
            model=model,
            loss=options.evaluation or loss,
            written=options.evaluated,
            params=store.params,
            state=replace(state, opt_state=(), exchange=None),
            axes=batch_axes or {},
        ),
        programs=driver.programs,
        disk=writer,
        source=planned.traced,
    )


def _unnamed(batch: Tree) -> dict[str, LogicalAxes]:
    """No logical axes for any array of a batch, by path."""
    return {
        shardings.batch_path(path): () for path, _ in jax.tree_util.tree_leaves_with_path(batch)
    }


def _contribution(
    plan: Plan,
    model: Model,
    planned: PlannedLoss,
    part: Share,
    shapes: Tree,
    mesh: Mesh | AbstractMesh,
) -> Contribution:
    """What a microbatch contributes to the loss of the batch; the loss as it is where nothing is
    known of its rows.
    """
    if planned.rows is None or planned.traced is None:
        return as_it_is(part.traced, part.dims, part.shardings)
    batch = whole_batch(planned.traced, planned.rows, model, shapes, part.dims)
    return contribution(plan, batch, part, mesh)


def _require_scale(run: Run, guards: Guards | None) -> None:
    """Raises where the loss is scaled, and gradients that wait for the next step are not."""
    if run.kept is not None and guards is not None and guards.scale is not None:
        raise PlanError(
            "a gradient exchange that keeps what it does not send cannot be scaled with a loss"
            " whose scale changes\nTry: guards without a scale"
        )


def _step_parts(
    plan: Plan,
    model: Model,
    store: Store,
    run: Run,
    guards: Guards | None,
    mesh: Mesh | AbstractMesh,
) -> StepParts:
    """What a step is made of."""
    return StepParts(
        run=run,
        optimizer=store.optimizer,
        partition=model.partition,
        params=store.trained,
        gather=gather_updated(plan, store.trained_params, mesh),
        precision=store.precision,
        updated=store.precision.updated(store.trained_params),
        guards=guards,
        opt_state=store.opt_shardings,
    )


@diagnostic
def _each_once(*findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(itertools.chain(*findings)))


def _runnable(plan: Plan, options: BuildOptions) -> Plan:
    """The plan as it can be lowered: JAX lowers the kernel of cuDNN only where the GPUs are."""
    if options.abstract and plan.attention == "cudnn":
        return replace(plan, attention="blocks")
    return plan


def _mesh(plan: Plan, options: BuildOptions) -> tuple[Mesh | AbstractMesh, tuple[Finding, ...]]:
    """The mesh of a program, its axes in physical parts."""
    if options.abstract:
        return abstract_mesh(plan), ()
    return device_mesh(
        plan.mesh,
        options.devices,
        topology=plan.topology,
        order=plan.axis_order,
        parts=physical_parts(plan),
    )


def _scaled(part: Part, model: Model, guards: Guards | None) -> Part:
    """The loss of a microbatch, times the scale that the state carries where there is one."""
    if guards is None or guards.scale is None:
        return part
    params, states = len(jax.tree.leaves(model.params)), len(jax.tree.leaves(model.state))
    return replace(part, traced=scaled(part.traced, params, states))
