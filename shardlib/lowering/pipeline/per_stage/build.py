"""A plan's pipeline as programs of its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.annotation.trees.paths import Tree
from shardlib.axes import MeshShape
from shardlib.errors import PlanError
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.mesh.shardings import ParameterShardings, without_axes
from shardlib.lowering.pipeline.lockstep.pipeline import Pipeline
from shardlib.lowering.pipeline.per_stage.chunk_work import Work
from shardlib.lowering.pipeline.per_stage.dealing import Dealing
from shardlib.lowering.pipeline.per_stage.programs import StagePrograms
from shardlib.lowering.pipeline.per_stage.prologue import Opening
from shardlib.lowering.pipeline.per_stage.shards import Places
from shardlib.lowering.pipeline.shared.chunk import Chunk
from shardlib.lowering.pipeline.shared.gathered_weights import gathered
from shardlib.lowering.runtime.random_keys import BatchDims
from shardlib.planning.plan import Plan
from shardlib.schedules.orders import Task
from shardlib.schedules.table import orders

#: Layers of a chunk that are written out one after the other; more of them are a loop.
WRITTEN_OUT = 8


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
    places, order = Places.of(_with_devices(mesh)), _order(plan)
    dealing = Dealing(
        layers=pipeline.cut.layers, stages=len(places.stages), virtual=plan.virtual_stages
    )
    opening = Opening(
        pipeline=pipeline,
        places=places,
        dealing=dealing,
        params=params,
        batch=batch,
        dims=dims,
        prologue=prologue,
    )
    alone = replace(
        plan,
        mesh=MeshShape({**plan.mesh, "stage": 1}),
        parameters=tuple(without_axes(parameter, ("stage",)) for parameter in plan.parameters),
    )
    works = tuple(_work(number, opening, alone) for number in range(dealing.chunks))
    return StagePrograms(plan=plan, opening=opening, works=works, order=order)


def _with_devices(mesh: Mesh | AbstractMesh) -> Mesh:
    """The mesh, if this process is alone: of several, those without a device would have no part in
    it.
    """
    others = f"there are {jax.process_count()} processes"
    if isinstance(mesh, AbstractMesh) or jax.process_count() > 1:
        raise PlanError(
            "pipeline='programs' runs from one process that has all devices, and"
            f" {'here are none' if isinstance(mesh, AbstractMesh) else others}"
            "\nTry: pipeline='lockstep'"
        )
    return mesh


def _order(plan: Plan) -> tuple[tuple[Task, ...], ...]:
    """What each stage does, one after the other: the schedule, once for each group of microbatches."""
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
    firsts = range(0, plan.microbatches, plan.microbatches // plan.accumulation)
    return tuple(
        tuple(
            replace(task, microbatch=first + task.microbatch) for first in firsts for task in tasks
        )
        for tasks in group
    )


def _work(number: int, opening: Opening, alone: Plan) -> Work:
    """The work of one chunk of layers, on the mesh of its stage."""
    pipeline, dealing, stages = opening.pipeline, opening.dealing, opening.places.stages
    cut, layers, here = pipeline.cut, dealing.counts[number], stages[number % len(stages)]
    moved = jax.tree.map(lambda sharding: NamedSharding(here, sharding.spec), vars(opening.params))
    laid_out = Placing.of(
        pipeline.traced, alone, here, ParameterShardings(**moved), pipeline.placing.placements
    )
    placing = replace(laid_out, reductions=pipeline.placing.reductions)
    chunk = Chunk(
        cut=cut,
        layers=layers,
        padded=False,
        saved=pipeline.remat.of_chunk(number // len(stages), layers),
        walk=placing.walk,
        known=gathered(placing, cut, here),
        unrolled=layers <= WRITTEN_OUT,
    )
    return Work(
        cut=cut,
        placing=placing,
        chunk=chunk,
        first=dealing.first(number),
        last=number == dealing.chunks - 1,
        activations=pipeline.stages.activations,
        entering=pipeline.stages.entering,
        loss=pipeline.loss_position,
        in_parts=opening.in_parts,
        remat=pipeline.remat,
    )
