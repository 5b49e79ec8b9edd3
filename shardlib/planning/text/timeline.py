"""When does each stage of a pipeline do what, in seconds?

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

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardlib.errors import PlanError
from shardlib.planning.decisions.candidate import microbatches_text
from shardlib.planning.decisions.plan_data import PlanData
from shardlib.planning.units.quantity import percent_text, seconds_text
from shardlib.schedules.orders import BACKWARD, FORWARD, WEIGHTS, Task
from shardlib.schedules.simulation import Durations, makespan, simulate
from shardlib.schedules.table import named, orders
from shardlib.schedules.timetable import Timetable

#: Kinds of slices: three kinds of work, forward and backward work in one, and ticks of a program in
#: lockstep in which a stage computes what nobody asks for.
BOTH, IDLE = "both", "idle"
KINDS = (FORWARD, BACKWARD, WEIGHTS, BOTH, IDLE)
#: What fills a slice in text, by kind.
_FILL = {FORWARD: ">", BACKWARD: "<", WEIGHTS: "=", BOTH: "x", IDLE: " "}
_WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHTS: "gradients of weights",
    BOTH: "forward and backward",
}
#: Columns of time in text.
_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one stage does for a while.

    Attributes:
        stage: its number.
        kind: one of `KINDS`.
        label: microbatches, after a letter for the chunk of layers where a stage has several: "3",
            "b3".
        start, seconds: when, from the start of the ticks, and how long.
    """

    stage: int
    kind: str
    label: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it is over."""
        return self.start + self.seconds


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step of a pipeline in time.

    Attributes:
        name: "predicted" or "measured".
        title: what runs where.
        stages: number of stages.
        slices: what they do, in order of time for every stage.
        seconds: of the ticks, from the first to the last.
        beside: (what, seconds) of the step beside the ticks.
    """

    name: str
    title: str
    stages: int
    slices: tuple[Slice, ...]
    seconds: float
    beside: tuple[tuple[str, float], ...] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return self.seconds + sum(seconds for _, seconds in self.beside)

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage does nothing that is asked for, on the average."""
        busy = sum(one.seconds for one in self.slices if one.kind != IDLE)
        return 1 - busy / (self.stages * self.seconds) if self.seconds else 0.0

    def of(self, stage: int) -> tuple[Slice, ...]:
        """The slices of one stage."""
        return tuple(one for one in self.slices if one.stage == stage)

    def to_json(self) -> dict[str, Any]:
        """The timeline as plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "stages": self.stages,
            "seconds": self.seconds,
            "bubble": self.bubble,
            "step_seconds": self.step_seconds,
            "beside": dict(self.beside),
            "slices": [asdict(one) for one in self.slices],
        }

    def __str__(self) -> str:
        rows = [
            f"stage {stage:<{len(str(self.stages - 1))}}  {self._row(stage)}"
            for stage in range(self.stages)
        ]
        legend = ", ".join(
            f"{_FILL[kind]} {_WORDS[kind]}"
            for kind in KINDS
            if kind in _WORDS and any(one.kind == kind for one in self.slices)
        )
        beside = "".join(
            f" + {what} {seconds_text(seconds)}" for what, seconds in self.beside if seconds > 0
        )
        return (
            "\n".join(
                [
                    self.title,
                    *(row.rstrip() for row in rows),
                    "",
                    (
                        f"{legend}; numbers are microbatches, a column is"
                        f" {seconds_text(self.seconds / _COLUMNS)}"
                    ),
                    (
                        f"{self.name}: ticks {seconds_text(self.seconds)}, of which stages wait"
                        f" {percent_text(self.bubble)}{beside} = a step of"
                        f" {seconds_text(self.step_seconds)}"
                    ),
                ]
            )
            + "\n"
        )

    def _row(self, stage: int) -> str:
        """A stage in `_COLUMNS` columns; labels stand where they fit."""
        cells, scale = [" "] * _COLUMNS, _COLUMNS / self.seconds if self.seconds else 0.0
        for one in self.of(stage):
            first, last = round(one.start * scale), round(one.end * scale)
            label = one.label if one.kind != IDLE and len(one.label) < last - first else ""
            cells[first:last] = f"{label:{_FILL[one.kind]}<{last - first}}" if last > first else ""
        return "".join(cells)


def predicted(plan: PlanData) -> Timeline:
    """The timeline of a plan with stages.

    Raises:
        PlanError: the plan has no stages, or was written before estimates knew what a stage does.
    """
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
    )


def title(plan: PlanData, *, lockstep: bool) -> str:
    """What runs where: the first line of a timeline."""
    how = (
        f"{named(plan.schedule).words(plan.virtual_stages)},"
        f" {microbatches_text(plan.microbatches, plan.accumulation)},"
        f" {'in lockstep' if lockstep else 'each stage on its own'}"
    )
    return f"{plan.model} on {plan.topology}: {plan.mesh['stage']} stages, {how}"


def label(table: Timetable, micro: int, chunk: int, before: int = 0) -> str:
    """A microbatch as slices name it, counted on from those of the groups before its own."""
    return str(before + micro) if table.virtual == 1 else f"{chr(ord('a') + chunk)}{before + micro}"


def work(
    table: Timetable, tick: int, stage: int, kinds: tuple[str, ...], before: int = 0
) -> Iterator[tuple[str, str]]:
    """(kind, label) of what a stage is asked for in a tick of some kinds of work."""
    for kind in kinds:
        micro, chunk, works = (
            table.weights(tick)
            if kind == WEIGHTS
            else (table.forward if kind == FORWARD else table.backward)(tick, stage)
        )
        if works:
            yield kind, label(table, micro, chunk, before)


def lockstep(
    table: Timetable, durations: Durations, before: int = 0
) -> tuple[tuple[Slice, ...], float]:
    """Slices and seconds of stages that all do a tick at the same time, one kind of work after the
    other; microbatches are counted on from those `before`.
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
