"""A step as bars to one scale: what devices are busy with, and every kind of collective, as far as
compute hides it and as far as devices wait.

An estimate says how long each collective takes and how much of all of them is exposed. Collectives
over axes that compute waits for (`shardlib.axes.Axis.waits`) are exposed; what is left of the
exposed time is shared out among the others by their seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from shardlib.axes import AXES
from shardlib.planning.pictures.report.svg import WIDTH, line, picture, rect, words
from shardlib.planning.plan import Plan
from shardlib.planning.text.figures import (
    LABELS,
    CollectiveRow,
    collective_rows,
    in_every_step,
)
from shardlib.planning.units.quantity import clip, percent_text, seconds_text

_LEFT, _ROW, _MOST = 230, 24, 14
_PART_COLOURS = {
    "compute": "#0072b2",
    "exposed": "#d55e00",
    "bubble": "#cc79a7",
    "optimizer": "#009e73",
    "overhead": "#b2a000",
    "exchange": "#e69f00",
}


@dataclass(frozen=True, kw_only=True)
class Lane:
    """All collectives of one kind over the same axes.

    Attributes:
        row: the collectives.
        exposed: seconds of them that devices wait.
    """

    row: CollectiveRow
    exposed: float


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """The kinds of collectives of a step with what is exposed of each, the slowest first; exposed
    seconds add up to no more than the estimate's.
    """
    rows = collective_rows(in_every_step(plan.estimate.collectives))
    waiting = {id(row): all(AXES[axis].waits for axis in row.axes) for row in rows}
    left = plan.estimate.seconds.exposed
    blocked = sum(row.seconds for row in rows if waiting[id(row)])
    others = sum(row.seconds for row in rows) - blocked
    part = min(1.0, left / blocked) if blocked else 0.0
    remaining = max(0.0, left - blocked)
    share = min(1.0, remaining / others) if others else 0.0
    return tuple(
        Lane(row=row, exposed=row.seconds * (part if waiting[id(row)] else share)) for row in rows
    )


def step_picture(plan: Plan, *, limit: int = _MOST) -> str:
    """The picture of a step."""
    listed = lanes(plan)
    total = plan.estimate.step_seconds
    longest = max([total, *(lane.row.seconds for lane in listed)]) or 1.0
    scale = (WIDTH - _LEFT - 60) / longest
    height = 44 + _ROW * (1 + min(len(listed), limit)) + 20
    shapes = [*_grid(longest, scale, height), *_busy(plan, scale)]
    y = 24.0 + _ROW + 14
    for lane in listed[:limit]:
        shapes += _lane(lane, scale, y)
        y += _ROW
    label = (
        f"A step of {seconds_text(total)}: "
        + ", ".join(f"{name} {seconds_text(value)}" for name, value in _parts(plan))
        + ". Collectives: "
        + ", ".join(
            f"{lane.row.kind} over {' and '.join(lane.row.axes)} {seconds_text(lane.row.seconds)}"
            for lane in listed[:limit]
        )
    )
    return picture(label, height, shapes)


def _parts(plan: Plan) -> list[tuple[str, float]]:
    seconds = plan.estimate.seconds
    return [
        (LABELS.get(field.name, field.name), getattr(seconds, field.name))
        for field in fields(seconds)
        if getattr(seconds, field.name) > 0
    ]


def _busy(plan: Plan, scale: float) -> Iterator[str]:
    seconds, x = plan.estimate.seconds, float(_LEFT)
    yield words(0, 41, "a device", cls="strong")
    for field in fields(seconds):
        value = getattr(seconds, field.name)
        if value <= 0:
            continue
        name = LABELS.get(field.name, field.name)
        share = percent_text(value / (seconds.total or 1.0))
        tip = f"{name}: {seconds_text(value)} ({share})"
        yield rect(x, 26, value * scale, _ROW - 4, fill=_PART_COLOURS[field.name], tip=tip)
        if value * scale > 7.5 * len(name):
            ink = "#fff" if field.name == "compute" else "#111"
            yield words(x + value * scale / 2, 41, name, anchor="middle", fill=ink)
        x += value * scale
    yield words(x + 6, 41, seconds_text(seconds.total))


def _lane(lane: Lane, scale: float, y: float) -> Iterator[str]:
    row = lane.row
    name = f"{row.kind} · {'·'.join(row.axes)}"
    yield words(0, y + 15, clip(name, 34))
    hidden = row.seconds - lane.exposed
    yield rect(
        _LEFT,
        y,
        lane.exposed * scale,
        _ROW - 8,
        fill=_PART_COLOURS["exposed"],
        tip=f"{name}: {seconds_text(lane.exposed)} exposed",
    )
    if hidden > 0:
        yield rect(
            _LEFT + lane.exposed * scale,
            y,
            hidden * scale,
            _ROW - 8,
            cls="hidden-part",
            tip=f"{name}: {seconds_text(hidden)} hidden behind compute",
        )
    yield words(_LEFT + row.seconds * scale + 6, y + 13, seconds_text(row.seconds), cls="soft")


def _grid(longest: float, scale: float, height: float) -> Iterator[str]:
    for k in range(5):
        x = _LEFT + longest * scale * k / 4
        yield line(x, 20, x, height - 22)
        yield words(x, height - 6, seconds_text(longest * k / 4), cls="soft", anchor="middle")


def lane_rows(plan: Plan) -> list[tuple[str, ...]]:
    """(kind, axes, count, seconds, exposed, hidden) of the collectives of a step."""
    return [
        (
            lane.row.kind,
            "·".join(lane.row.axes),
            f"{lane.row.count:,}",
            seconds_text(lane.row.seconds),
            seconds_text(lane.exposed),
            seconds_text(lane.row.seconds - lane.exposed),
        )
        for lane in lanes(plan)
    ]
