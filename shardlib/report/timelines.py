"""The timeline of a pipeline step, predicted or measured: as text, as an SVG file, or as a trace
that https://ui.perfetto.dev and chrome://tracing open.

Picture and trace take any number of timelines, such as the predicted and the measured one: one
above the other in the picture, a process each in the trace. Nothing is fetched, and there are no
scripts. The trace is in Chrome's trace event format: complete events ("X") and metadata ("M"),
times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardlib import wings
from shardlib.compact import compact
from shardlib.errors import PlanError
from shardlib.graph import Graph
from shardlib.layout import KINDS as COLLECTIVE_KINDS
from shardlib.planner.parts import microbatches_text
from shardlib.planner.plan import Plan
from shardlib.report.elements import TIE, percent_text, seconds_text
from shardlib.report.markup import BLUE, GREEN, ORANGE, PURPLE, render, round_steps
from shardlib.report.text import lanes, parts_of
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
        since: where what is drawn begins, from the start of the ticks.
    """

    name: str
    title: str
    stages: int
    slices: tuple[Slice, ...]
    seconds: float
    beside: tuple[tuple[str, float], ...] = ()
    exchange: Any = None
    since: float = 0.0

    __repr__ = compact

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return self.seconds + sum(seconds for _, seconds in self.beside)

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage does nothing that is asked for, on the average."""
        busy = sum(part.seconds for part in self.slices if part.kind != IDLE)
        return 1 - busy / (self.stages * self.seconds) if self.seconds and self.stages else 0.0

    def of(self, stage: int) -> tuple[Slice, ...]:
        """The slices of one stage."""
        return tuple(part for part in self.slices if part.stage == stage)

    @property
    def closer(self) -> tuple[Timeline, ...]:
        """The passes of the first microbatch through the first layers of every stage, where the
        slices of the whole are too short to be named.
        """
        named = [(piece.kind, piece.label) for piece in self.slices if piece.kind != IDLE]
        if any(s.seconds * _COLUMNS > len(s.label) * self.seconds for s in self.slices if s.label):
            return ()
        passes: list[Timeline] = []
        for key in dict.fromkeys(name for name in named if name[1] == named[0][1]):
            through = [piece for piece in self.slices if (piece.kind, piece.label) == key]
            since = min(piece.start for piece in through)
            end = max(piece.end for piece in through)
            slices = tuple(
                replace(piece, start=start, seconds=min(piece.end, end) - start)
                for piece in self.slices
                if (start := max(piece.start, since)) < min(piece.end, end) - self.seconds * TIE
            )
            passed = replace(self, slices=slices, since=since, seconds=end - since, beside=())
            passes.append(replace(passed, name=name_of(through[0]), exchange=None))
        return tuple(passes)

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
            "slices": [asdict(part) for part in self.slices],
            **({} if self.exchange is None else {"exchange": self.exchange.to_json()}),
        }

    def __str__(self) -> str:
        exchange = "" if self.exchange is None else str(self.exchange)
        if not self.stages:
            return exchange
        return "\n".join([self._stages_text(), *([exchange] if exchange else [])])

    def _stages_text(self) -> str:
        closer = [line for passed in self.closer for line in ("", passed.told, *passed.rows)]
        kinds = {piece.kind for piece in self.slices} - {IDLE}
        legend = ", ".join(f"{_FILL[kind]} {_NAMES[kind]}" for kind in KINDS if kind in kinds)
        beside = [f" + {what} {seconds_text(seconds)}" for what, seconds in self.beside if seconds]
        figures = (
            f"{legend}; numbers are microbatches, a column is"
            f" {seconds_text(self.seconds / _COLUMNS)}{' above' if closer else ''}\n{self.name}:"
            f" ticks {seconds_text(self.seconds)}, of which stages wait"
            f" {percent_text(self.bubble)}{''.join(beside)} = a step of"
            f" {seconds_text(self.step_seconds)}\n"
        )
        return "\n".join([self.title, *self.rows, *closer, "", figures])

    @property
    def told(self) -> str:
        """What a pass is, and when."""
        times = [seconds_text(time) for time in (self.since, self.since + self.seconds)]
        return (
            f"closer, {self.name}: the first microbatch in the first layers of every stage,"
            f" {' to '.join(times)}"
        )

    @property
    def rows(self) -> list[str]:
        """A line of text for each stage."""
        width = len(str(self.stages - 1))
        return [f"stage {n:<{width}}  {self._row(n)}".rstrip() for n in range(self.stages)]

    def _row(self, stage: int) -> str:
        """A stage in `_COLUMNS` columns; labels stand where they fit."""
        cells, scale = [" "] * _COLUMNS, _COLUMNS / self.seconds if self.seconds else 0.0
        for part in self.of(stage):
            first, last = (round((time - self.since) * scale) for time in (part.start, part.end))
            label = part.label if part.kind != IDLE and len(part.label) < last - first else ""
            cells[first:last] = f"{label:{_FILL[part.kind]}<{last - first}}" if last > first else ""
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
    split = table.split
    durations = Durations(
        forward=stage.forward,
        backward=stage.backward if split else stage.backward + stage.weights,
        weights=stage.weights if split else 0.0,
    )
    draw, seconds = lockstep if stage.lockstep else free, 0.0
    slices: list[Slice] = []
    for group in range(plan.accumulation):
        drawn, each = draw(table, durations, group * table.microbatches)
        slices, seconds = (
            [
                *slices,
                *(replace(part, start=part.start + seconds) for part in drawn),
            ],
            seconds + each,
        )
    slices.sort(key=lambda part: (part.stage, part.start))
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
    words = (
        f"{named(plan.schedule).label(plan.virtual_stages)},"
        f" {microbatches_text(plan.microbatches, plan.accumulation)},"
        f" {'in lockstep' if lockstep else 'each stage on its own'}"
    )
    return f"{plan.model} on {plan.topology}: {plan.mesh['stage']} stages, {words}"


def lockstep(
    table: Timetable, durations: Durations, before: int = 0
) -> tuple[tuple[Slice, ...], float]:
    """Slices and seconds of stages that all do a tick at the same time, one kind of work after the
    other; microbatches are counted on from those `before`.

    Args:
        durations: seconds of each kind of work.
    """
    slices: list[Slice] = []
    start = 0.0
    for first, stop, kinds in table.phases:
        offsets = {
            kind: sum(durations.of(before) for before in kinds[:k]) / table.virtual
            for k, kind in enumerate(kinds)
        }
        each = sum(durations.of(kind) for kind in kinds) / table.virtual
        for tick in range(first, stop):
            begin = start + (tick - first) * each
            slices += [
                Slice(
                    stage=stage,
                    kind=kind,
                    label=name,
                    start=begin + offsets[kind],
                    seconds=durations.of(kind) / table.virtual,
                )
                for stage in range(table.stages)
                for kind, name in work(table, tick, stage, kinds, before)
            ]
        start += (stop - first) * each
    return tuple(sorted(slices, key=lambda part: (part.stage, part.start))), start


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
            stage=span.stage,
            kind=span.task.kind,
            label=name(span.task),
            start=span.start,
            seconds=span.seconds,
        )
        for span in spans
        if span.task.microbatch < table.microbatches
    ), makespan(spans)


# --------------------------------------------------------------------------------------------------
# Timelines as one SVG file, one above the other.

#: Size of the picture, user units: its width and margins, and the height of a stage.
WIDTH, LEFT, RIGHT, TOP, ROW = 1080, 76, 24, 64, 26
_COLOURS = {
    FORWARD: BLUE,
    BACKWARD: ORANGE,
    WEIGHTS: GREEN,
    BOTH: PURPLE,
    IDLE: "#d8d8dc",
    "beside": "#8a8a90",
}
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHTS: "gradients of weights",
    BOTH: "forward and backward",
    IDLE: "waits in lockstep",
    "beside": "beside the ticks",
}


def timeline_svg(*timelines: Timeline) -> str:
    """Returns the picture of timelines, a complete SVG document; all have one scale of seconds, and
    so have their closer views.
    """
    kinds = {piece.kind for timeline in timelines for piece in timeline.slices}
    kinds |= {"beside" for timeline in timelines if timeline.beside}
    closer = [passed for timeline in timelines for passed in timeline.closer]
    panels = [
        (group, (WIDTH - LEFT - RIGHT) / longest, round_steps(longest, 8))
        for group in (timelines, closer)
        if (longest := max((each.step_seconds for each in group), default=0.0))
    ]
    return render(
        "report/templates/timeline.svg",
        title=timelines[0].title if timelines else "",
        panels=panels,
        width=WIDTH,
        left=LEFT,
        top=TOP,
        row=ROW,
        legend=[(_NAMES[kind], colour) for kind, colour in _COLOURS.items() if kind in kinds],
        colours=_COLOURS,
        name_of=name_of,
    )


def name_of(piece: Slice) -> str:
    """Names a slice: "forward 3"."""
    return f"{_NAMES[piece.kind]} {piece.label}".rstrip()


# --------------------------------------------------------------------------------------------------
# Traces: of timelines, and of a step as predicted and as measured on one axis of time.
#
# They are in Chrome's trace event format, which https://ui.perfetto.dev opens: complete events
# ("X") and metadata ("M"), times in microseconds. In the trace of a step the start of the first
# measured step is 0. The prediction stands at the start of every measured step that it has room
# for; without measured steps, once.
#
#     predicted         the parts of the step one after the other, as the estimate has no
#                       order; then the kinds of collectives, each from the start on, its
#                       exposed part separate
#     predicted stages  what each stage does when, where the plan has a pipeline
#     measured, device  the recorded steps, and the instructions of the program: computation and
#                       collectives apart, those that run at the same time below each other

#: Names of colours of Chrome's trace viewer; Perfetto chooses its own by the name of a slice.
_TRACE_COLOURS = {
    FORWARD: "thread_state_running",
    BACKWARD: "thread_state_iowait",
    WEIGHTS: "good",
    BOTH: "rail_animation",
    IDLE: "grey",
    "beside": "generic_work",
}
#: Nanoseconds of a second.
_NANO = 1e9


def perfetto(*timelines: Timeline) -> str:
    """Returns a trace of timelines as JSON: a process for each, a thread for each stage and one for
    what lies beside the ticks.
    """
    trace_events = [
        event
        for number, timeline in enumerate(timelines, start=1)
        for event in _timeline_events(timeline, number, timeline.name)
    ]
    return _trace(trace_events, {timeline.name: timeline.title for timeline in timelines})


def _trace(trace_events: Sequence[JsonObject], titles: dict[str, str]) -> str:
    trace = {"traceEvents": trace_events, "displayTimeUnit": "ms", "otherData": titles}
    return json.dumps(trace, ensure_ascii=False)  # Perfetto shows escapes as they are


def _span(start: float, seconds: float) -> JsonObject:
    """Returns start and duration of an event of a trace, in microseconds.

    It ends two nanoseconds early: Perfetto rounds starts and ends of its own, and drops an event
    that begins within another.
    """
    first, last = round(start * _NANO), round((start + seconds) * _NANO)
    return {"ts": first / 1000, "dur": max(0, last - first - 2) / 1000}


def _named(process: int, name: str, threads: Sequence[str]) -> Iterator[JsonObject]:
    """The names of a process and of its threads, which are counted from 1."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for number, thread in enumerate(threads, start=1):
        track = {"pid": process, "tid": number}
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": number}}


def _event(
    track: tuple[int, int],
    name: str,
    start: float,
    seconds: float,
    *,
    category: str = "",
    args: JsonObject | None = None,
) -> JsonObject:
    """A complete event on a thread of a process.

    Args:
        category: by default the first part of the name; kinds of slices have a colour.
    """
    process, thread = track
    return {
        "ph": "X",
        "name": name,
        "cat": category or name.partition(".")[0],
        **({"cname": _TRACE_COLOURS[category]} if category else {}),
        "pid": process,
        "tid": thread,
        **_span(start, seconds),
        "args": args or {},
    }


def _timeline_events(timeline: Timeline, process: int, name: str) -> Iterator[JsonObject]:
    """The events of a timeline, from second 0 on."""
    stages = [f"stage {stage}" for stage in range(timeline.stages)]
    beside = ["beside the ticks"] if timeline.beside else []
    yield from _named(process, name, [*stages, *beside])
    for piece in timeline.slices:
        yield _event(
            (process, piece.stage + 1),
            name_of(piece),
            piece.start,
            piece.seconds,
            category=piece.kind,
            args={"microbatch": piece.label},
        )
    start = timeline.seconds
    for what, seconds in timeline.beside:
        yield _event((process, timeline.stages + 1), what, start, seconds, category="beside")
        start += seconds


#: Numbers of the processes of a trace; that of a device follows `_DEVICES`.
_PREDICTED, _STAGES, _DEVICES = 1, 2, 10


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One execution of an instruction on a device.

    Attributes:
        device: its number.
        name: of the instruction, "all-gather.3".
        start: seconds on the clock of the profile.
        seconds: that it took.
    """

    device: int
    name: str
    start: float
    seconds: float

    @property
    def collective(self) -> bool:
        """True if it is a collective, by its name."""
        return self.name.startswith(COLLECTIVE_KINDS)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One recorded step.

    Attributes:
        name: "step 6".
        start: seconds on the clock of the profile.
        seconds: from the first instruction of any device to the last.
        operations: on every device that was recorded.
    """

    name: str
    start: float
    seconds: float
    operations: tuple[Operation, ...]


def step_trace(
    plan: Plan, measured: Sequence[MeasuredStep] = (), pipeline: Timeline | None = None
) -> str:
    """A trace as JSON."""
    zero = measured[0].start if measured else 0.0
    starts = _starts([step.start - zero for step in measured] or [0.0], plan.estimate.step_seconds)
    trace_events = list(_predicted_events(plan, starts))
    if pipeline is not None:
        trace_events += _repeated(
            list(_timeline_events(pipeline, _STAGES, "predicted stages")), starts
        )
    for device in sorted({operation.device for step in measured for operation in step.operations}):
        trace_events += _device_events(device, measured, zero)
    titles = {"predicted": f"{plan.model} on {plan.topology}, plan {plan.digest}"}
    if measured:
        titles["measured"] = ", ".join(step.name for step in measured)
    return _trace(trace_events, titles)


def _starts(requested: Sequence[float], seconds: float) -> list[float]:
    """The starts at which a prediction does not run into the one before."""
    accepted: list[float] = []
    for start in requested:
        if not accepted or start >= accepted[-1] + seconds:
            accepted.append(start)
    return accepted


def _predicted_events(plan: Plan, starts: Sequence[float]) -> Iterator[JsonObject]:
    """Yields the trace events that a plan predicts of a step."""
    predicted_lanes = lanes(plan)
    rows = [f"{lane.row.kind} over {'·'.join(lane.row.axes)}" for lane in predicted_lanes]
    yield from _named(_PREDICTED, "predicted", ["per device", *rows])
    note = "the order within a step is not known"
    for start in starts:
        time = start
        for name, length, _ in parts_of(plan.estimate.seconds):
            yield _event((_PREDICTED, 1), name, time, length, args={"note": note})
            time += length
        for thread, lane in enumerate(predicted_lanes, start=2):
            args = {"count": lane.row.count, "bytes": lane.row.bytes, "for": lane.row.cause}
            hidden = lane.row.seconds - lane.exposed
            for name, begin, length in (
                ("exposed", start, lane.exposed),
                ("hidden", start + lane.exposed, hidden),
            ):
                if length > 0:
                    yield _event((_PREDICTED, thread), name, begin, length, args=args)


def _repeated(
    pipeline_events: Sequence[JsonObject], starts: Sequence[float]
) -> Iterator[JsonObject]:
    """The events of a step at every start."""
    yield from (event for event in pipeline_events if event["ph"] == "M")
    for start in starts:
        for event in pipeline_events:
            if event["ph"] == "X":
                yield {**event, "ts": event["ts"] + _span(start, 0.0)["ts"]}


def _device_events(
    device: int, measured: Sequence[MeasuredStep], zero: float
) -> Iterator[JsonObject]:
    """Yields the recorded trace events of a device."""
    on_device = [
        operation
        for step in measured
        for operation in step.operations
        if operation.device == device
    ]
    tracks = {
        "steps": _below([_whole(step, device) for step in measured]),
        "computation": _below([operation for operation in on_device if not operation.collective]),
        "collectives": _below([operation for operation in on_device if operation.collective]),
    }
    process = _DEVICES + device
    yield from _named(
        process, f"measured, device {device}", [name for name, rows in tracks.items() for _ in rows]
    )
    for thread, row in enumerate((row for rows in tracks.values() for row in rows), start=1):
        for operation in row:
            yield _event(
                (process, thread), operation.name, operation.start - zero, operation.seconds
            )


def _whole(step: MeasuredStep, device: int) -> Operation:
    """A step on one device, from its first instruction to its last."""
    on_device = [operation for operation in step.operations if operation.device == device]
    start = min((operation.start for operation in on_device), default=step.start)
    end = max((operation.start + operation.seconds for operation in on_device), default=step.start)
    return Operation(device=device, name=step.name, start=start, seconds=end - start)


def _below(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations in rows in each of which none begins before the one in front is over."""
    rows: list[list[Operation]] = []
    for operation in sorted(operations, key=lambda each: (each.start, -each.seconds)):
        for row in rows:
            if row[-1].start + row[-1].seconds <= operation.start:
                row.append(operation)
                break
        else:
            rows.append([operation])
    return rows
