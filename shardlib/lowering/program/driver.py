"""The driver of a step: a pipeline, or microbatches one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.model import Model
from shardlib.lowering.accumulation.microbatches import Microbatches
from shardlib.lowering.loss.contribution.share import Contribution
from shardlib.lowering.loss.forward import unused_loops
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.pipeline.lockstep.build import StagedLayouts, pipeline
from shardlib.lowering.pipeline.per_stage.build import stage_programs
from shardlib.lowering.pipeline.per_stage.programs import StagePrograms
from shardlib.lowering.program.options import BuildOptions
from shardlib.lowering.program.part import Part, PlannedLoss
from shardlib.lowering.program.step import of_trained, pipelined, unpiped
from shardlib.lowering.program.store import Store
from shardlib.lowering.program.update.parts import Run
from shardlib.lowering.runtime.random_keys import key_inputs
from shardlib.lowering.runtime.state import scaled_state
from shardlib.planning.plan import Plan
from shardlib.report import Finding


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The loss over a whole batch, as it is run.

    Attributes:
        run: it.
        programs: the stages of a pipeline, where they are programs of their own.
        findings: what the user should know about it.
    """

    run: Run
    programs: StagePrograms | None
    findings: tuple[Finding, ...]


def driver_of(
    plan: Plan,
    model: Model,
    mesh: Mesh | AbstractMesh,
    store: Store,
    part: Part,
    share: Contribution,
    planned: PlannedLoss,
    options: BuildOptions,
) -> Driver:
    """The driver that a plan asks for: a pipeline, or microbatches one after the other."""
    loops = unused_loops(part.traced, plan, mesh, store.params, part.placements)
    if plan.mesh["stage"] == 1:
        placing = Placing.of(
            part.traced,
            plan,
            mesh,
            store.params,
            part.placements,
            None if part.lost else planned.interleaving,
            options.exchange,
        )
        microbatches = Microbatches(
            shardings=share.shardings,
            dims=share.dims,
            count=plan.microbatches,
            repeated=share.repeated,
            by_row=share.by_row,
        )
        run = unpiped(part.traced, placing, microbatches, store.trained.gradient, model.partition)
        run = run.of_parts(share.prologue).finished(share.finish)
        return Driver(run=run, programs=None, findings=loops)
    guards = options.guards
    state = model.state
    if guards is not None and guards.scale is not None:
        state = scaled_state(state, jax.ShapeDtypeStruct((), np.float32))
    staged, findings = pipeline(
        plan,
        part.traced,
        state,
        mesh,
        store.params,
        StagedLayouts(
            layers=part.placements,
            around={} if part.lost else planned.around or {},
            handed=share.handed,
        ),
        key_inputs(share.dims, part.traced.closed_jaxpr),
        options.exchange,
        share.repeated,
    )
    run, programs = pipelined(staged, share.shardings, share.dims).of_parts(share.prologue), None
    if plan.pipeline == "programs":
        programs = stage_programs(
            plan, staged, mesh, store.params, share.shardings, share.dims, share.prologue
        )
        run = Run.of(programs.opening.gradients, run.table)
    return Driver(
        run=of_trained(run, model.partition).finished(share.finish),
        programs=programs,
        findings=(*findings, *loops),
    )
