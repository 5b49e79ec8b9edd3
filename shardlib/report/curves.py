"""A scaling curve as a picture: one SVG file: tokens per second over devices, both logarithmic, and
the efficiency of every point.

The dashed line is what perfect scaling from the first point would bring; hollow crosses on the axis
are machines that do not hold the model. Nothing is fetched, and there are no scripts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shardlib.planner.scaling import Curve, Point
from shardlib.report.elements import bytes_text, count_text, percent_text, seconds_text, style

#: Size of the picture and its margins, user units.
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 48, 56
#: Blue, orange and vermilion of Okabe and Ito (2008), which people who see no red or green can tell
#: apart.
_GOOD, _BAD, _LACKS = "#0072b2", "#e69f00", "#d55e00"


def curve_svg(curve: Curve) -> str:
    """Returns the picture of a scaling curve, a complete SVG document."""
    scale = _Scale(curve)
    shapes = [
        *_grid(scale),
        *_lines(curve, scale),
        *(_mark(point, scale) for point in curve.points),
    ]
    title = f"{curve.model}, {curve.kind} scaling"
    last = curve.enough
    note = (
        ""
        if last is None
        else f"more than {last.devices:,} devices do not pay"
        if curve.reason
        else "all devices pay"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}"'
        f' role="img">\n<title>{escape(title)}</title>\n<style>{style("curve.css")}</style>\n'
        '<rect class="page"'
        f' width="{WIDTH}" height="{HEIGHT}"/>\n<text class="title" x="{LEFT}"'
        f' y="26">{escape(title)}</text>\n<text class="soft" x="{WIDTH - RIGHT}" y="26"'
        f' text-anchor="end">{escape(note)}</text>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


class _Scale:
    """Coordinates of devices and rates in the picture; both axes are powers of two."""

    def __init__(self, curve: Curve) -> None:
        devices = [math.log2(point.devices) for point in curve.points] or [0.0]
        rates = [math.log2(rate) for point in curve.fitting if (rate := _rate(point)) > 0]
        ideal = [math.log2(value) for value in _ideal(curve) if value > 0]
        self.first, self.last = min(devices), max(max(devices), min(devices) + 1)
        self.low, self.high = (
            math.floor(min([*rates, *ideal], default=0)),
            math.ceil(max([*rates, *ideal], default=1)),
        )
        self.high = max(self.high, self.low + 1)

    def x(self, devices: float) -> float:
        return LEFT + (math.log2(devices) - self.first) / (self.last - self.first) * (
            WIDTH - LEFT - RIGHT
        )

    def y(self, rate: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (math.log2(rate) - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)
        )


def _rate(point: Point) -> float:
    return point.plan.estimate.tokens_per_second if point.plan is not None else 0.0


def _ideal(curve: Curve) -> list[float]:
    """Tokens per second of perfect scaling, from the first point that fits."""
    if not curve.fitting:
        return []
    first = curve.fitting[0]
    return [_rate(first) * point.devices / first.devices for point in curve.fitting]


def _grid(scale: _Scale) -> list[str]:
    shapes: list[str] = []
    for power in range(math.ceil(scale.first), math.floor(scale.last) + 1):
        x = scale.x(2.0**power)
        shapes += [
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
            (
                f'<text class="soft" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}"'
                f' text-anchor="middle">{2**power:,}</text>'
            ),
        ]
    step = max(1, round((scale.high - scale.low) / 8))
    for power in range(scale.low, scale.high + 1, step):
        y = scale.y(2.0**power)
        shapes += [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            (
                f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}"'
                f' text-anchor="end">{count_text(2.0**power)}</text>'
            ),
        ]
    return [
        *shapes,
        (
            f'<text class="soft" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}"'
            ' text-anchor="middle">devices</text>'
        ),
        f'<text class="soft" x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end">tokens/s</text>',
    ]


def _lines(curve: Curve, scale: _Scale) -> list[str]:
    def path(rates: Sequence[float]) -> str:
        return " ".join(
            f"{scale.x(point.devices):.1f},{scale.y(rate):.1f}"
            for point, rate in zip(curve.fitting, rates, strict=True)
        )

    if len(curve.fitting) < 2:
        return []
    return [
        f'<polyline class="ideal" points="{path(_ideal(curve))}"/>',
        (
            f'<polyline points="{path([_rate(point) for point in curve.fitting])}" style="fill:'
            f' none; stroke: {_GOOD}; stroke-width: 2"/>'
        ),
    ]


def _mark(point: Point, scale: _Scale) -> str:
    """A point with its figures as a tooltip, its efficiency beside it; a cross on the axis where
    nothing fits.
    """
    x = scale.x(point.devices)
    if point.plan is None:
        y, lacking = (
            HEIGHT - BOTTOM,
            (
                f"lacks {bytes_text(point.short_bytes)} a device"
                if point.short_bytes
                else point.message
            ),
        )
        return (
            f'<g class="lacks"><path d="M {x - 5:.1f} {y - 5} l 10 10 m 0 -10 l -10 10"'
            f' style="stroke: {_LACKS}; stroke-width: 2"/><title>{point.devices:,} devices:'
            f" {escape(lacking)}</title></g>"
        )
    y, cost = scale.y(_rate(point)), point.plan.estimate
    told = (
        f"{point.devices:,} devices: {seconds_text(cost.step_seconds)} a step,"
        f" {count_text(cost.tokens_per_second)} tokens/s, MFU {percent_text(point.mfu)},"
        f" {point.plan.mesh}"
    )
    return (
        f'<g class="point"><circle cx="{x:.1f}" cy="{y:.1f}" r="5" style="fill:'
        f' {_GOOD if point.pays else _BAD}"><title>{escape(told)}</title></circle><text'
        f' class="soft" x="{x:.1f}" y="{y + 20:.1f}"'
        f' text-anchor="middle">{percent_text(point.efficiency)}</text></g>'
    )
