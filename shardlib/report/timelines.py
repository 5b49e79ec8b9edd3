"""The timeline of a pipeline step, predicted or measured: as text, as an SVG file, or as a trace
that https://ui.perfetto.dev and chrome://tracing open.

Picture and trace take any number of timelines, such as the predicted and the measured one: one
above the other in the picture, a process each in the trace. Nothing is fetched, and there are no
scripts. The trace is in Chrome's trace event format: complete events ("X") and metadata ("M"),
times in microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from shardlib import wings
from shardlib.compact import compact
from shardlib.errors import PlanError
from shardlib.graph import Graph
from shardlib.planner.plan import Plan
from shardlib.planner.stored import microbatches_text
from shardlib.report.elements import percent_text, seconds_text, style
from shardlib.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Durations,
    Task,
    Timetable,
    makespan,
    named,
    orders,
    simulate,
)
from shardlib.untrusted.data import JsonObject

# --------------------------------------------------------------------------------------------------
# A timeline: the work of each pipeline stage over time, in seconds; `str` draws it.

#: Kinds of slices: three kinds of work, forward and backward work in one, and ticks of a program in
#: lockstep in which a stage computes what nobody asks for.
BOTH, IDLE = "both", "idle"
KINDS = (FORWARD, BACKWARD, WEIGHTS, BOTH, IDLE)
#: What fills a slice in text, by kind.
_FILL = {FORWARD: ">", BACKWARD: "<", WEIGHTS: "=", BOTH: "x", IDLE: " "}
_TIMELINE_WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHTS: "gradients of weights",
    BOTH: "forward and backward",
}
#: Columns of time in text.
_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One activity of one stage in time.

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
        """The time at which it ends."""
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
        exchange: what islands exchange, in the order of use; None where steps do not wait for it.
    """

    name: str
    title: str
    stages: int
    slices: tuple[Slice, ...]
    seconds: float
    beside: tuple[tuple[str, float], ...] = ()
    exchange: Any = None

    __repr__ = compact

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return self.seconds + sum(seconds for _, seconds in self.beside)

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage does nothing that is asked for, on the average."""
        busy = sum(one.seconds for one in self.slices if one.kind != IDLE)
        return 1 - busy / (self.stages * self.seconds) if self.seconds and self.stages else 0.0

    def of(self, stage: int) -> tuple[Slice, ...]:
        """The slices of one stage."""
        return tuple(one for one in self.slices if one.stage == stage)

    def svg(self) -> str:
        """The timeline as an SVG document that fetches nothing."""

        return timeline_svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()

    def to_json(self) -> JsonObject:
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
            **({} if self.exchange is None else {"exchange": self.exchange.to_json()}),
        }

    def __str__(self) -> str:
        exchange = "" if self.exchange is None else str(self.exchange)
        if not self.stages:
            return exchange
        return "\n".join([self._stages_text(), *([exchange] if exchange else [])])

    def _stages_text(self) -> str:
        rows = [
            f"stage {stage:<{len(str(self.stages - 1))}}  {self._row(stage)}"
            for stage in range(self.stages)
        ]
        legend = ", ".join(
            f"{_FILL[kind]} {_TIMELINE_WORDS[kind]}"
            for kind in KINDS
            if kind in _TIMELINE_WORDS and any(one.kind == kind for one in self.slices)
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


# --------------------------------------------------------------------------------------------------
# The predicted timeline of a plan.
#
# The predicted timeline needs a plan and nothing else. A step is the ticks of the pipeline and
# what lies beside them:
#
#     ticks    m x (seconds of a microbatch on the slowest stage) + what stages wait, as in
#              `shardlib.cost.stages`: the timeline
#     beside   the optimizer's update, and the rest: collectives of parameters and gradients that
#              nothing hides, fixed costs of a step and of microbatches
#
# All stages are drawn as busy as the slowest, as the estimate has it. Groups of microbatches
# (`Plan.accumulation`) are drawn one after the other, each filling and draining the stages. Stages
# in lockstep follow the timetable of the program; stages that wait for their neighbours alone are
# simulated.


def predicted(plan: Plan, forward: Graph | None = None) -> Timeline:
    """The timeline of a plan with stages, or with islands whose steps wait for their exchange.

    Args:
        forward: the loss as written, which knows the order in which parameters are used; None for
            none of the exchange.
    """
    exchange = None
    if forward is not None and plan.exchange.islands > 1:
        exchange = wings.islands("transfers").transfers(plan, forward)
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
    """The first line of a timeline: what runs where."""
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


#: Size of the picture, user units: its width and margins, and the height of a stage.
WIDTH, LEFT, RIGHT, TOP, ROW = 1080, 76, 24, 64, 26
#: Blue, orange, green and purple of Okabe and Ito (2008), which people who see no red or green can
#: tell apart.
_COLOURS = {
    FORWARD: "#0072b2",
    BACKWARD: "#e69f00",
    WEIGHTS: "#009e73",
    BOTH: "#cc79a7",
    IDLE: "#d8d8dc",
    "beside": "#8a8a90",
}
#: Names of colours of Chrome's trace viewer; Perfetto chooses its own by the name of a slice.
_TRACE_COLOURS = {
    FORWARD: "thread_state_running",
    BACKWARD: "thread_state_iowait",
    WEIGHTS: "good",
    BOTH: "rail_animation",
    IDLE: "grey",
    "beside": "generic_work",
}
_TIMELINES_WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHTS: "gradients of weights",
    BOTH: "forward and backward",
    IDLE: "waits in lockstep",
    "beside": "beside the ticks",
}
#: Nanoseconds of a second.
_NANO = 1e9
#: Width of a digit in a slice, user units.
_DIGIT = 7.0


def timeline_svg(*timelines: Timeline) -> str:
    """Returns the picture of timelines, a complete SVG document; all have one scale of seconds."""
    longest = max((timeline.step_seconds for timeline in timelines), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    shapes: list[str] = []
    top = TOP
    for timeline in timelines:
        shapes += _rows(timeline, scale, top)
        top += timeline.stages * ROW + 44
    title = timelines[0].title if timelines else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 12}" width="{WIDTH}"'
        f' height="{top + 12}"'
        f' role="img">\n<title>{escape(title)}</title>\n<style>{style("timeline.css")}</style>\n'
        '<rect class="page"'
        f' width="{WIDTH}" height="{top + 12}"/>\n<text class="title" x="{LEFT}"'
        f' y="26">{escape(title)}</text>\n'
        + "\n".join([*_legend(timelines), *_axis(longest, scale, top), *shapes])
        + "\n</svg>\n"
    )


def _rows(timeline: Timeline, scale: float, top: float) -> list[str]:
    told = (
        f"{timeline.name}: a step of {seconds_text(timeline.step_seconds)}, stages wait"
        f" {percent_text(timeline.bubble)} of the ticks"
    )
    shapes = [f'<text class="soft" x="{LEFT}" y="{top + 12}">{escape(told)}</text>']
    top += 20
    for stage in range(timeline.stages):
        shapes.append(
            f'<text class="soft" x="{LEFT - 8}" y="{top + stage * ROW + 17}"'
            f' text-anchor="end">stage {stage}</text>'
        )
    shapes += [shape for piece in timeline.slices for shape in _slice(piece, scale, top)]
    start = timeline.seconds
    for what, seconds in timeline.beside:
        if seconds > 0:
            shapes.append(
                f'<rect class="work" x="{LEFT + start * scale:.2f}" y="{top:.1f}"'
                f' width="{seconds * scale:.2f}" height="{timeline.stages * ROW - 2}" style="fill:'
                f' {_COLOURS["beside"]}"><title>{escape(what)}:'
                f" {seconds_text(seconds)}</title></rect>"
            )
        start += seconds
    return shapes


def _slice(piece: Slice, scale: float, top: float) -> Iterator[str]:
    x, y, width = LEFT + piece.start * scale, top + piece.stage * ROW, piece.seconds * scale
    yield (
        f'<rect class="work" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{ROW - 2}"'
        f' style="fill: {_COLOURS[piece.kind]}"><title>stage {piece.stage}:'
        f" {escape(name_of(piece))}, {seconds_text(piece.seconds)} from"
        f" {seconds_text(piece.start)}</title></rect>"
    )
    if piece.kind != IDLE and width > _DIGIT * (len(piece.label) + 0.5):
        yield (
            f'<text class="in" x="{x + width / 2:.2f}" y="{y + 16:.1f}"'
            f' text-anchor="middle">{escape(piece.label)}</text>'
        )


def name_of(piece: Slice) -> str:
    """Names a slice: "forward 3"."""
    return f"{_TIMELINES_WORDS[piece.kind]} {piece.label}".rstrip()


def _legend(timelines: tuple[Timeline, ...]) -> list[str]:
    shown = [
        kind
        for kind in _COLOURS
        if any(piece.kind == kind for timeline in timelines for piece in timeline.slices)
        or (kind == "beside" and any(timeline.beside for timeline in timelines))
    ]
    shapes: list[str] = []
    x = float(LEFT)
    for kind in shown:
        shapes.append(
            f'<rect x="{x:.0f}" y="38" width="12" height="12" style="fill: {_COLOURS[kind]}"/><text'
            f' class="soft" x="{x + 17:.0f}" y="48">{_TIMELINES_WORDS[kind]}</text>'
        )
        x += 36 + _DIGIT * len(_TIMELINES_WORDS[kind])
    return shapes


def _axis(longest: float, scale: float, bottom: float) -> list[str]:
    """A line for every round number of seconds, about eight of them."""
    power = 10.0 ** math.floor(math.log10(longest / 8))
    step = next(power * factor for factor in (1, 2, 5, 10) if longest / (power * factor) <= 8)
    shapes: list[str] = []
    for k in range(int(longest / step) + 1):
        x = LEFT + k * step * scale
        shapes += [
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 16}" y2="{bottom - 20}"/>',
            (
                f'<text class="soft" x="{x:.1f}" y="{bottom - 4}"'
                f' text-anchor="middle">{seconds_text(k * step)}</text>'
            ),
        ]
    return shapes


def perfetto(*timelines: Timeline) -> str:
    """Returns a trace of timelines as JSON: a process for each, a thread for each stage and one for
    what lies beside the ticks.
    """
    trace_events = [
        event
        for number, timeline in enumerate(timelines, start=1)
        for event in events(timeline, number, timeline.name)
    ]
    return json.dumps(
        {
            "traceEvents": trace_events,
            "displayTimeUnit": "ms",
            "otherData": {timeline.name: timeline.title for timeline in timelines},
        },
        ensure_ascii=False,  # Perfetto shows escapes as they are
    )


def span(start: float, seconds: float) -> JsonObject:
    """Returns start and duration of an event of a trace, in microseconds.

    It ends two nanoseconds early: Perfetto rounds starts and ends of its own, and drops an event
    that begins within another.

    Args:
        start, seconds: in seconds.
    """
    first, last = round(start * _NANO), round((start + seconds) * _NANO)
    return {"ts": first / 1000, "dur": max(0, last - first - 2) / 1000}


def events(timeline: Timeline, process: int, name: str) -> Iterator[JsonObject]:
    """The events of a timeline, from second 0 on."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for stage in range(timeline.stages):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": stage + 1,
            "args": {"name": f"stage {stage}"},
        }
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": process,
            "tid": stage + 1,
            "args": {"sort_index": stage + 1},
        }
    for piece in timeline.slices:
        yield {
            "ph": "X",
            "name": name_of(piece),
            "cat": piece.kind,
            "cname": _TRACE_COLOURS[piece.kind],
            "pid": process,
            "tid": piece.stage + 1,
            **span(piece.start, piece.seconds),
            "args": {"microbatch": piece.label},
        }
    if timeline.beside:
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": timeline.stages + 1,
            "args": {"name": "beside the ticks"},
        }
    start = timeline.seconds
    for what, seconds in timeline.beside:
        yield {
            "ph": "X",
            "name": what,
            "cat": "beside",
            "cname": _TRACE_COLOURS["beside"],
            "pid": process,
            "tid": timeline.stages + 1,
            **span(start, seconds),
            "args": {},
        }
        start += seconds
