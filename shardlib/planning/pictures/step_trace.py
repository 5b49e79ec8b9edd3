"""One trace of a step as it was predicted and as it was measured, on one axis of time.

The trace is in Chrome's trace event format, which https://ui.perfetto.dev opens: complete events
("X") and metadata ("M"), times in microseconds. The start of the first measured step is 0. The
prediction stands at the start of every measured step that it has room for; without measured steps,
once.

    predicted         the parts of the step one after the other, as the estimate has no order; then
                      the kinds of collectives, each from the start on, its exposed part apart
    predicted stages  what each stage does when, where the plan has a pipeline
    measured, device  the recorded steps, and the instructions of the program: computation and
                      collectives apart, those that run at the same time below each other
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from shardlib.collective import KINDS
from shardlib.planning.pictures.report.step import lanes
from shardlib.planning.pictures.timelines import events, span
from shardlib.planning.plan import Plan
from shardlib.planning.text.figures import LABELS
from shardlib.planning.text.timeline import Timeline
from shardlib.untrusted.json_types import JsonObject

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
    def communicates(self) -> bool:
        """Whether it is a collective, by its name."""
        return self.name.startswith(KINDS)


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
    trace_events = list(_predicted(plan, starts))
    if pipeline is not None:
        trace_events += _moved(list(events(pipeline, _STAGES, "predicted stages")), starts)
    for device in sorted({operation.device for step in measured for operation in step.operations}):
        trace_events += _device(device, measured, zero)
    titles: JsonObject = {"predicted": f"{plan.model} on {plan.topology}, plan {plan.digest}"}
    if measured:
        titles["measured"] = ", ".join(step.name for step in measured)
    trace: JsonObject = {"traceEvents": trace_events, "displayTimeUnit": "ms", "otherData": titles}
    return json.dumps(trace, ensure_ascii=False)  # Perfetto shows escapes as they are


def _starts(requested: Sequence[float], seconds: float) -> list[float]:
    """The starts at which a prediction does not run into the one before."""
    accepted: list[float] = []
    for start in requested:
        if not accepted or start >= accepted[-1] + seconds:
            accepted.append(start)
    return accepted


def _named(process: int, name: str, threads: Sequence[str]) -> Iterator[JsonObject]:
    """The names of a process and of its threads, which are counted from 1."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for number, thread in enumerate(threads, start=1):
        named = {"pid": process, "tid": number}
        yield {"ph": "M", "name": "thread_name", **named, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", **named, "args": {"sort_index": number}}


def _slice(
    track: tuple[int, int], name: str, start: float, seconds: float, **args: str | int
) -> JsonObject:
    process, thread = track
    return {
        "ph": "X",
        "name": name,
        "cat": name.partition(".")[0],
        "pid": process,
        "tid": thread,
        **span(start, seconds),
        "args": dict(args),
    }


def _predicted(plan: Plan, starts: Sequence[float]) -> Iterator[JsonObject]:
    """What a plan predicts of a step."""
    predicted_lanes = lanes(plan)
    rows = [f"{lane.row.kind} over {'·'.join(lane.row.axes)}" for lane in predicted_lanes]
    yield from _named(_PREDICTED, "predicted", ["a device", *rows])
    seconds = plan.estimate.seconds
    parts = [
        (LABELS.get(field.name, field.name), getattr(seconds, field.name))
        for field in fields(seconds)
    ]
    note = "the order within a step is not known"
    for start in starts:
        time = start
        for name, length in parts:
            if length > 0:
                yield _slice((_PREDICTED, 1), name, time, length, note=note)
                time += length
        for thread, lane in enumerate(predicted_lanes, start=2):
            hidden = lane.row.seconds - lane.exposed
            args = {"count": lane.row.count, "bytes": lane.row.bytes, "for": lane.row.cause}
            if lane.exposed > 0:
                yield _slice((_PREDICTED, thread), "exposed", start, lane.exposed, **args)
            if hidden > 0:
                yield _slice((_PREDICTED, thread), "hidden", start + lane.exposed, hidden, **args)


def _moved(pipeline_events: Sequence[JsonObject], starts: Sequence[float]) -> Iterator[JsonObject]:
    """The events of a step at every start."""
    yield from (event for event in pipeline_events if event["ph"] == "M")
    for start in starts:
        for event in pipeline_events:
            if event["ph"] == "X":
                yield {**event, "ts": event["ts"] + span(start, 0.0)["ts"]}


def _device(device: int, measured: Sequence[MeasuredStep], zero: float) -> Iterator[JsonObject]:
    """What was recorded of a device."""
    on_device = [
        operation
        for step in measured
        for operation in step.operations
        if operation.device == device
    ]
    tracks = {
        "steps": _below([_whole(step, device) for step in measured]),
        "computation": _below([operation for operation in on_device if not operation.communicates]),
        "collectives": _below([operation for operation in on_device if operation.communicates]),
    }
    process = _DEVICES + device
    yield from _named(
        process, f"measured, device {device}", [name for name, rows in tracks.items() for _ in rows]
    )
    for thread, row in enumerate((row for rows in tracks.values() for row in rows), start=1):
        for operation in row:
            yield _slice(
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
