"""The step of a pipeline as a picture: an SVG file, or a trace that https://ui.perfetto.dev and
chrome://tracing open.

Both take any number of timelines, such as the predicted and the measured one: one above the other
in the picture, a process each in the trace. Nothing is fetched, and there are no scripts. The trace
is in Chrome's trace event format: complete events ("X") and metadata ("M"), times in microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from html import escape

from shardlib.planning.pictures.style_sheets import style
from shardlib.planning.text.timeline import BOTH, IDLE, Slice, Timeline
from shardlib.planning.units.quantity import percent_text, seconds_text
from shardlib.schedules.orders import BACKWARD, FORWARD, WEIGHTS
from shardlib.untrusted.json_types import JsonObject

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
_WORDS = {
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
    """What a slice is called: "forward 3"."""
    return f"{_WORDS[piece.kind]} {piece.label}".rstrip()


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
            f' class="soft" x="{x + 17:.0f}" y="48">{_WORDS[kind]}</text>'
        )
        x += 36 + _DIGIT * len(_WORDS[kind])
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
    """When an event of a trace begins and how long it takes, in microseconds.

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
