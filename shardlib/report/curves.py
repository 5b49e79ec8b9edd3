"""A scaling curve as a picture: one SVG file: tokens per second over devices, both logarithmic, and
the efficiency of every point.

The dashed line is what perfect scaling from the first point would bring; hollow crosses on the axis
are machines that do not hold the model.
"""

from __future__ import annotations

import math

from shardlib.planner.scaling import Curve, Point
from shardlib.report.elements import count_text
from shardlib.report.markup import BLUE, Box, LogAxis, render

BOX = Box(width=760, height=420, left=84, right=736, top=48, bottom=364)


def curve_svg(curve: Curve) -> str:
    """Returns the picture of a scaling curve, a complete SVG document."""
    last = curve.enough
    note = "" if last is None else "all devices pay"
    if last is not None and curve.reason:
        note = f"more than {last.devices:,} devices do not pay"
    devices = [math.log2(point.devices) for point in curve.points] or [0.0]
    rates = [_rate(point) for point in curve.fitting]
    ideal = [rates[0] * point.devices / curve.fitting[0].devices for point in curve.fitting]
    powers = [math.log2(rate) for rate in (*rates, *ideal) if rate > 0] or [0.0, 1.0]
    first, most = min(devices), max(max(devices), min(devices) + 1)
    low = math.floor(min(powers))
    high = max(math.ceil(max(powers)), low + 1)
    x = LogAxis(
        low=2.0**first,
        high=2.0**most,
        start=BOX.left,
        end=BOX.right,
        marks=[(2.0**p, f"{2**p:,}") for p in range(math.ceil(first), math.floor(most) + 1)],
    )
    y = LogAxis(
        low=2.0**low,
        high=2.0**high,
        start=BOX.bottom,
        end=BOX.top,
        marks=[
            (2.0**p, count_text(2.0**p))
            for p in range(low, high + 1, max(1, round((high - low) / 8)))
        ],
    )
    return render(
        "report/templates/curve.svg",
        title=f"{curve.model}, {curve.kind} scaling",
        note=note,
        curve=curve,
        box=BOX,
        x=x,
        y=y,
        fitting=[(x(p.devices), y(rate)) for p, rate in zip(curve.fitting, rates, strict=True)],
        ideal=[(x(p.devices), y(rate)) for p, rate in zip(curve.fitting, ideal, strict=True)],
        good=BLUE,
    )


def _rate(point: Point) -> float:
    return point.plan.estimate.tokens_per_second if point.plan is not None else 0.0
