"""A plan's pipeline for a traced loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.lowering.loss.followed import followed
from shardlib.lowering.loss.placing import Placements, Placing
from shardlib.lowering.mesh.device_mesh import parts_of
from shardlib.lowering.mesh.gradient_exchange import GradientExchange
from shardlib.lowering.mesh.shardings import ParameterShardings, parameter_order
from shardlib.lowering.pipeline.lockstep.findings import gathered_at_use, not_gathered, repeated
from shardlib.lowering.pipeline.lockstep.pipeline import Pipeline
from shardlib.lowering.pipeline.lockstep.stage import Stages
from shardlib.lowering.pipeline.lockstep.stage_sharding import (
    dim_of_stages,
    sharded_dim,
    stage_activations,
)
from shardlib.lowering.pipeline.shared.chunk import Chunk
from shardlib.lowering.pipeline.shared.ends import Ends, ends
from shardlib.lowering.pipeline.shared.gathered_weights import gathered
from shardlib.lowering.pipeline.shared.partition import Cut, cut
from shardlib.lowering.pipeline.shared.stage_remat import StageRemat, stage_remat
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.weights.reduction_plan import DEFERRED
from shardlib.planning.plan import Plan
from shardlib.report import Finding
from shardlib.schedules.one_f_one_b import ONE_F_ONE_B
from shardlib.schedules.timetable import Timetable
from shardlib.tracing.program import has_matmul, with_frozen
from shardlib.tracing.rewriting.fold import fold


@dataclass(frozen=True, kw_only=True)
class StagedLayouts:
    """Layouts of activations in a pipeline.

    Attributes:
        layers: those of the plan.
        around: the same outside of the layers, where the stages may shard them too; empty where
            they are not known.
        handed: of what the loss takes beside the batch, made of the whole batch before.
    """

    layers: Placements
    around: Placements
    handed: tuple[Layout, ...] = ()


def pipeline(
    plan: Plan,
    traced: LossJaxpr,
    state: Tree,
    mesh: Mesh | AbstractMesh,
    params: ParameterShardings,
    layouts: StagedLayouts,
    keys: Collection[int] = (),
    exchange: GradientExchange | None = None,
    same_state: frozenset[int] = frozenset(),
) -> tuple[Pipeline, tuple[Finding, ...]]:
    """Cuts a loss into the stages of a plan.

    Args:
        exchange: how partial sums of gradients are exchanged; by default as the plan says.
    """
    written, states = traced, len(jax.tree.leaves(state))
    traced, layouts, findings = _with_loop(plan, traced, states, params, layouts)
    placements, around = layouts.layers, layouts.around
    program = traced.program
    parameters = [plan.parameters[number] for number in parameter_order(plan, params.compute)]
    frozen = {i for i, parameter in enumerate(parameters) if not parameter.trained}
    loss_cut = cut(
        program,
        len(jax.tree.leaves(params.compute)),
        states,
        len(program.outputs) - states,
        keys,
        frozen,
    )
    placing = Placing.of(traced, plan, mesh, params, placements, exchange=exchange)
    remat = stage_remat(
        plan,
        loss_cut,
        with_frozen(written.program, frozen),
        written.read(len(parameters)),
        [parameter.path for parameter in parameters],
    )
    stages = _stages(plan, loss_cut, placing, mesh, placements, around, remat)
    exact = bool(around) and all(
        layout is not None for layout in stages.outside[: len(loss_cut.carry)]
    )
    placing_around = replace(placing, placements=around)
    late = (
        ends(placing_around, loss_cut, mesh)
        if exact and placing.reductions.when == DEFERRED and not stages.in_rounds
        else Ends(mesh=mesh, uses={}, complete=frozenset())
    )
    built = Pipeline(
        cut=loss_cut,
        stages=stages,
        placing=placing,
        around=placing_around if exact else placing,
        exact=exact,
        ends=late,
        traced=traced,
        remat=remat,
        groups=plan.accumulation,
        repeated=same_state,
    )
    return built, (
        *findings,
        *repeated(stages),
        *not_gathered(stages, plan),
        *gathered_at_use(loss_cut, plan),
    )


def _with_loop(
    plan: Plan,
    traced: LossJaxpr,
    states: int,
    params: ParameterShardings,
    layouts: StagedLayouts,
) -> tuple[LossJaxpr, StagedLayouts, tuple[Finding, ...]]:
    """The loss with a loop over its layers, and the layouts of its activations."""
    looped, findings = _looped(traced, len(jax.tree.leaves(params.compute)))
    if looped is traced:
        return traced, layouts, findings
    if plan.context in ("ring", "ulysses") or plan.experts != "none":
        raise PlanError(
            "attention and experts on their devices need layers under a scan, and those of the loss"
            " are written out one by one\nTry: nnx.scan or jax.lax.scan over the layers, or a mesh"
            " without stages"
        )
    order = parameter_order(plan, params.compute)
    layers = followed(plan, looped, order, states, layouts.handed)
    return looped, replace(layouts, layers=layers, around={}), findings


def _timetable(plan: Plan, loss_cut: Cut) -> Timetable:
    """The schedule of one group of microbatches."""
    table = Timetable(
        schedule=plan.schedule,
        stages=plan.mesh["stage"],
        microbatches=plan.microbatches // plan.accumulation,
        virtual=plan.virtual_stages,
    )
    looped, chunks = table.virtual > 1, table.stages * table.virtual
    by = "(stages times virtual_stages)"
    if chunks > loss_cut.layers:
        raise PlanError(
            f"{table.stages} stages of {table.virtual} chunk{'s' if looped else ''} need {chunks}"
            " layers, and the loop over layers "
            f"at {loss_cut.loop.scope or loss_cut.loop.path} has {loss_cut.layers}\n"
            f"Try: at most {loss_cut.layers}"
            f" {f'chunks on all stages together {by}' if looped else 'stages'}"
        )
    if looped and table.microbatches < table.stages:
        raise PlanError(
            f"stages of several chunks need a microbatch for each of the {table.stages} stages, and"
            " there are"
            f" {table.microbatches}{' in each group' if plan.accumulation > 1 else ''}\nTry: more"
            f" microbatches, or the schedule {ONE_F_ONE_B.name!r}"
        )
    return table


def _stages(
    plan: Plan,
    loss_cut: Cut,
    placing: Placing,
    mesh: Mesh | AbstractMesh,
    placements: Placements,
    around: Placements,
    remat: StageRemat,
) -> Stages:
    """The stages of a plan for a loss; arguments as those of `pipeline`."""
    table, axis = _timetable(plan, loss_cut), parts_of(mesh, ("stage",))
    chunks = table.stages * table.virtual
    each = -(-loss_cut.layers // chunks)
    chunk = Chunk(
        cut=loss_cut,
        layers=each,
        padded=each * chunks > loss_cut.layers,
        saved=remat.alike,
        walk=lambda: placing.walk(jax.sharding.get_abstract_mesh()),
        known=gathered(placing, loss_cut, inside(mesh, axis)),
    )
    activations, entering, carried = (
        stage_activations(loss_cut, chunks * each),
        len(loss_cut.entering),
        len(loss_cut.carry),
    )

    def of_carry(layouts: Placements) -> tuple[Layout | None, ...]:
        return tuple(
            layouts.get((f"{loss_cut.loop.path}/carry/{k}", 0)) if k < carried else None
            for k in range(len(activations))
        )

    layouts, layouts_around = of_carry(placements), of_carry(around)
    spread = tuple(
        sharded_dim(leaf, layout, outside, table.stages, plan)
        for leaf, layout, outside in zip(activations, layouts, layouts_around, strict=True)
    )
    return Stages(
        table=table,
        chunk=chunk,
        mesh=mesh,
        axis=axis,
        activations=activations,
        entering=entering,
        leaving=(*range(carried), *range(entering, len(activations))),
        spread=spread,
        layouts=layouts,
        outside=tuple(
            layout if dim_of_stages(layout) is not None or dim is None else None
            for layout, dim in zip(layouts_around, spread, strict=True)
        ),
    )


def inside(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> AbstractMesh:
    """The mesh as it is in a region that is manual over some axes."""
    return (mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh).update_axis_types(
        dict.fromkeys(axes, AxisType.Manual)
    )


def _looped(traced: LossJaxpr, parameters: int) -> tuple[LossJaxpr, tuple[Finding, ...]]:
    """The loss with a loop over its layers: itself, or where they are written out, the loss that
    does the same with a scan over stacked parameters.
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
    again = jax.make_jaxpr(lambda *leaves: folded.evaluate(folded.stack(leaves)))(*avals)
    finding = Finding(
        code="layers-stacked",
        severity="warning",
        where=f"{sum(loop.run.count for loop in folded.loops)} layers",
        message=(
            "the layers are written out one by one: every stage holds all of them between steps,"
            " they are stacked in every step, and the layouts of activations inside of them are"
            " left to the compiler."
        ),
        hint="one stacked module: nnx.vmap over the constructor, and a scan over the result",
    )
    return LossJaxpr(closed_jaxpr=again, out_tree=traced.out_tree), (finding,)
