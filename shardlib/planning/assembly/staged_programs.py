"""What a pipeline in one program would take as per-stage programs, on simulated devices.

Stages in lockstep compute in every tick, also where they have no microbatch. On devices of their
own that time is idle anyway; simulated devices share the cores of one machine and lose it
(docs/pipelines.md has measured ratios). Per-stage programs are called by one process, so a plan for
several hosts is not made of them by itself: a finding says what they would give.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.cost.terms.framework_profiles import XLA
from shardlib.hardware.topology import Topology
from shardlib.planning.assembly.candidate_price import price
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.plan import Plan
from shardlib.planning.space.workload import Workload, prepare
from shardlib.planning.units.quantity import seconds_text
from shardlib.report import Finding, diagnostic
from shardlib.schedules.schedule import Pipelines
from shardlib.schedules.table import named

#: Shares of a step below which a difference of predictions is not spoken of.
TOLD = 0.05


@diagnostic
def faster_as_programs(
    load: Workload, topology: Topology, candidate: Candidate, plan: Plan
) -> tuple[Finding, ...]:
    """A finding where stages of one program on simulated devices would be faster as programs of
    their own.
    """
    if (
        load.profile.name != XLA.name
        or any(tier.kind != "memory" for tier in topology.tiers)
        or not _can_be_programs(plan)
    ):
        return ()
    apart = replace(
        candidate, decisions=replace(candidate.decisions, pipeline="programs", gather="use")
    )
    profile = replace(load.profile, pipeline="asynchronous")
    other = prepare(load.problem, load.vendor, profile, load.framework)
    seconds = float(price(other, topology, apart).step_seconds[0])
    if seconds > (1 - TOLD) * plan.estimate.step_seconds:
        return ()
    return (
        Finding(
            code="faster-as-programs",
            severity="info",
            where=f"stage={plan.mesh['stage']}",
            message=(
                f"as per-stage programs a step is predicted to take {seconds_text(seconds)} instead"
                f" of {seconds_text(plan.estimate.step_seconds)}: in one program stages also"
                " compute where they have no microbatch, and simulated devices share their cores"
            ),
            hint="pipeline=programs, where one process has all devices",
        ),
    )


def _can_be_programs(plan: Plan) -> bool:
    """Whether the stages of a plan are one program, and could be programs of their own."""
    if plan.mesh["stage"] == 1 or plan.pipeline != "lockstep":
        return False
    shape = Pipelines.one(
        stages=plan.mesh["stage"],
        chunks=plan.virtual_stages,
        microbatches=plan.microbatches // plan.accumulation,
        lockstep=False,
    )
    return bool(named(plan.schedule).fits(shape)[0])
