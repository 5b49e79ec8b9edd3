"""The timeline that a plan predicts: when each stage of its pipeline does what, in seconds.

The predicted timeline needs a plan and nothing else. A step is the ticks of the pipeline and what
lies beside them:

    ticks    m x (seconds of a microbatch on the slowest stage) + what stages wait, as in
             `shardlib.cost.pricing.pipeline_stages`: the timeline
    beside   the optimizer's update, and the rest: collectives of parameters and gradients that
             nothing hides, fixed costs of a step and of microbatches

All stages are drawn as busy as the slowest, as the estimate has it. Groups of microbatches
(`Plan.accumulation`) are drawn one after the other, each filling and draining the stages. Stages in
lockstep follow the timetable of the program; stages that wait for their neighbours alone are
simulated.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.errors import PlanError
from shardlib.graph.graph import Graph
from shardlib.planning.decisions.candidate import microbatches_text
from shardlib.planning.plan import Plan
from shardlib.planning.text.timeline import Slice, Timeline, label, work
from shardlib.planning.transfers.picture import transfers
from shardlib.schedules.orders import Task
from shardlib.schedules.simulation import Durations, makespan, simulate
from shardlib.schedules.table import named, orders
from shardlib.schedules.timetable import Timetable


def predicted(plan: Plan, forward: Graph | None = None) -> Timeline:
    """The timeline of a plan with stages, or with islands whose steps wait for their exchange.

    Args:
        forward: the loss as written, which knows the order in which parameters are used; None for
            none of the exchange.
    """
    exchange = None if forward is None else transfers(plan, forward)
    if exchange is not None and not named(plan.schedule).staged:
        return Timeline(
            name="predicted",
            title=exchange.title,
            stages=0,
            slices=(),
            seconds=exchange.replay.seconds,
            exchange=exchange,
        )
    stage, cost = plan.estimate.stage, plan.estimate
    if not named(plan.schedule).staged:
        raise PlanError(
            f"the plan for {plan.model} has no pipeline stages to draw\nTry: pin them, mesh.stage=4"
        )
    if plan.remat_classes:
        raise PlanError(
            "timelines know one remat policy for all layers, and the plan has remat_classes\nTry:"
            " pin remat instead"
        )
    if stage is None:
        raise PlanError(
            "the plan does not say how long a stage takes\nTry: make it again with `shardlib plan"
            " ... --out plan.json`"
        )
    table = Timetable(
        schedule=plan.schedule,
        stages=plan.mesh["stage"],
        microbatches=plan.microbatches // plan.accumulation,
        virtual=plan.virtual_stages,
    )
    apart = table.split
    durations = Durations(
        forward=stage.forward,
        backward=stage.backward if apart else stage.backward + stage.weights,
        weights=stage.weights if apart else 0.0,
    )
    draw, seconds = lockstep if stage.lockstep else free, 0.0
    slices: list[Slice] = []
    for group in range(plan.accumulation):
        found, each = draw(table, durations, group * table.microbatches)
        slices, seconds = (
            [
                *slices,
                *(replace(one, start=one.start + seconds) for one in found),
            ],
            seconds + each,
        )
    slices.sort(key=lambda one: (one.stage, one.start))
    beside = (
        ("optimizer update", cost.seconds.optimizer),
        (
            "other communication and overhead",
            max(0.0, cost.step_seconds - seconds - cost.seconds.optimizer),
        ),
    )
    return Timeline(
        name="predicted",
        title=title(plan, lockstep=stage.lockstep),
        stages=table.stages,
        slices=tuple(slices),
        seconds=seconds,
        beside=beside,
        exchange=exchange,
    )


def title(plan: Plan, *, lockstep: bool) -> str:
    """What runs where: the first line of a timeline."""
    how = (
        f"{named(plan.schedule).words(plan.virtual_stages)},"
        f" {microbatches_text(plan.microbatches, plan.accumulation)},"
        f" {'in lockstep' if lockstep else 'each stage on its own'}"
    )
    return f"{plan.model} on {plan.topology}: {plan.mesh['stage']} stages, {how}"


def lockstep(
    table: Timetable, durations: Durations, before: int = 0
) -> tuple[tuple[Slice, ...], float]:
    """Slices and seconds of stages that all do a tick at the same time, one kind of work after the
    other; microbatches are counted on from those `before`.

    Args:
        durations: seconds of each kind of work.
    """
    found: list[Slice] = []
    start = 0.0
    for first, stop, kinds in table.phases:
        offsets = {
            kind: sum(durations.of(before) for before in kinds[:k]) / table.virtual
            for k, kind in enumerate(kinds)
        }
        each = sum(durations.of(kind) for kind in kinds) / table.virtual
        for tick in range(first, stop):
            at = start + (tick - first) * each
            found += [
                Slice(
                    stage=stage,
                    kind=kind,
                    label=name,
                    start=at + offsets[kind],
                    seconds=durations.of(kind) / table.virtual,
                )
                for stage in range(table.stages)
                for kind, name in work(table, tick, stage, kinds, before)
            ]
        start += (stop - first) * each
    return tuple(sorted(found, key=lambda one: (one.stage, one.start))), start


def free(
    table: Timetable, durations: Durations, before: int = 0
) -> tuple[tuple[Slice, ...], float]:
    """Slices and seconds of stages that wait for their neighbours alone; a group of microbatches
    that is not full takes the time of a full one. See `lockstep` for `before`.
    """
    full = table.microbatches if table.virtual == 1 else table.units // table.virtual
    spans = simulate(
        orders(table.schedule, stages=table.stages, microbatches=full, virtual=table.virtual),
        durations,
    )

    def name(task: Task) -> str:
        return label(table, task.microbatch, task.chunk, before)

    return tuple(
        Slice(
            stage=one.stage,
            kind=one.task.kind,
            label=name(one.task),
            start=one.start,
            seconds=one.seconds,
        )
        for one in spans
        if one.task.microbatch < table.microbatches
    ), makespan(spans)
