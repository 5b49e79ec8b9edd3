"""A plan's pipeline for a traced loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.annotation.model import Tree
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.lowering.forward import LossJaxpr, Placements, Placing
from shardlib.lowering.mesh import parts_of
from shardlib.lowering.pipeline.chunk import Chunk
from shardlib.lowering.pipeline.cut import Cut, cut
from shardlib.lowering.pipeline.gathered import gathered
from shardlib.lowering.pipeline.stage import Stages
from shardlib.lowering.pipeline.ticks import Pipeline
from shardlib.lowering.shardings import ParameterShardings
from shardlib.planning.plan import Plan
from shardlib.report import Finding
from shardlib.schedules.timetable import Timetable
from shardlib.tracing.fold import fold
from shardlib.tracing.program import flatten, has_matmul


def pipeline(
    plan: Plan, traced: LossJaxpr, state: Tree, mesh: Mesh | AbstractMesh, params: ParameterShardings, placements: Placements
) -> tuple[Pipeline, tuple[Finding, ...]]:
    """Cuts a loss into the stages of a plan.

    Args:
        plan: a plan with stages.
        traced: the loss of one microbatch.
        state: the model state.
        mesh: the mesh of the program.
        params: shardings of the parameters.
        placements: layouts of activations.

    Returns:
        The pipeline, and what the user should know about it.

    Raises:
        PlanError: the loss has no layers that stages could share, or too few.
    """
    traced, placements, findings = _looped(traced, placements, len(jax.tree.leaves(params.compute)))
    program = flatten(traced.closed_jaxpr)
    states = len(jax.tree.leaves(state))
    whole = cut(program, len(jax.tree.leaves(params.compute)), states, len(program.outputs) - states)
    table = Timetable(schedule=plan.schedule, stages=plan.mesh["stage"], microbatches=plan.microbatches, virtual=plan.virtual_stages)
    chunks = table.stages * table.virtual
    if chunks > whole.layers:
        raise PlanError(f"{table.stages} stages of {table.virtual} chunk{'s' if table.virtual > 1 else ''} need {chunks} layers, and the loop over layers "
                        f"at {whole.loop.scope or whole.loop.path} has {whole.layers}\nTry: at most {whole.layers} stages")
    if table.virtual > 1 and table.microbatches < table.stages:
        raise PlanError(f"stages of several chunks need a microbatch for each of the {table.stages} stages, and there are {table.microbatches}\n"
                        "Try: more microbatches, or the schedule '1f1b'")
    placing = Placing.of(traced, plan, mesh, params, placements)
    each = -(-whole.layers // chunks)
    chunk = Chunk(cut=whole, layers=each, padded=each * chunks > whole.layers, remat=plan.remat, walk=lambda: placing.walk(jax.sharding.get_abstract_mesh()),
                  known=gathered(placing, whole, inside(mesh, parts_of(mesh, ("stage",)))) if plan.gather == "once" or plan.zero < 2 else None)
    travelling = _travelling(whole, chunks * chunk.layers)
    entering = len(whole.entering)
    leaving = (*range(len(whole.carry)), *range(entering, len(travelling)))
    layouts = tuple(placements.get((f"{whole.loop.path}/carry/{k}", 0)) if k < len(whole.carry) else None for k in range(len(travelling)))
    stages = Stages(table=table, chunk=chunk, mesh=mesh, axis=parts_of(mesh, ("stage",)), travelling=travelling, entering=entering, leaving=leaving, layouts=layouts,
                    spread=tuple(_spread(leaf, layout, table.stages, plan) for leaf, layout in zip(travelling, layouts, strict=True)))
    return Pipeline(cut=whole, stages=stages, placing=placing, traced=traced), (*findings, *_repeated(stages))


def inside(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> AbstractMesh:
    """The mesh as it is in a region that is manual over some axes."""
    return (mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh).update_axis_types(dict.fromkeys(axes, AxisType.Manual))


def _repeated(stages: Stages) -> tuple[Finding, ...]:
    """A finding where what comes before and after the layers cannot be shared out."""
    if any(dim is not None for dim in stages.spread):
        return ()
    return (Finding(code="ends-repeated", severity="warning", where=f"stage={stages.table.stages}",
                    message="no dim of what passes between the layers and the ends of the model divides by the stages: every stage computes embedding, head and loss.",
                    hint="a sequence, or a microbatch on each device, that is a multiple of the number of stages"),)


def _looped(traced: LossJaxpr, placements: Placements, parameters: int) -> tuple[LossJaxpr, Placements, tuple[Finding, ...]]:
    """The loss with a loop over its layers: itself, or where they are written out, the loss that does the same with a scan over stacked parameters."""
    program = flatten(traced.closed_jaxpr)
    if any(equation.name == "scan" and has_matmul(equation.eqn) for equation in program.equations):
        return traced, placements, ()
    folded = fold(program, set(range(parameters)))
    if not folded.loops:
        return traced, placements, ()
    avals = [jax.ShapeDtypeStruct(program.avals[number].shape, program.avals[number].dtype) for number in program.inputs]
    again = jax.make_jaxpr(lambda *leaves: folded.evaluate(folded.stack(leaves)))(*avals)
    finding = Finding(code="layers-stacked", severity="warning", where=f"{sum(loop.run.count for loop in folded.loops)} layers",
                      message="the layers are written out one by one: every stage holds all of them between steps, they are stacked in every step, and the layouts of activations "
                      "inside of them are left to the compiler.", hint="one stacked module: nnx.vmap over the constructor, and a scan over the result")
    return LossJaxpr(closed_jaxpr=again, out_tree=traced.out_tree), {}, (finding,)


def _travelling(whole: Cut, layers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of all that hops: the carry, what travels with it, and a row of every result of the layers for every layer."""
    avals = [whole.program.avals[number] for number in whole.entering]
    buffers = [jax.ShapeDtypeStruct((layers, *whole.program.avals[number].shape[1:]), whole.program.avals[number].dtype) for number in whole.stacked]
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in [*avals, *buffers])


def _spread(leaf: jax.ShapeDtypeStruct, layout: Layout | None, stages: int, plan: Plan) -> int | None:
    """The dim that the stages cut outside of the layers: the largest that the plan leaves whole and that divides, the last one (features) apart."""
    ways = [math.prod(plan.mesh[axis] for axis in layout[dim]) if layout is not None else 1 for dim in range(len(leaf.shape))]
    fitting = [dim for dim in range(len(leaf.shape) - 1) if ways[dim] == 1 and leaf.shape[dim] % stages == 0]
    return max(fitting, key=lambda dim: (leaf.shape[dim], dim), default=None)
