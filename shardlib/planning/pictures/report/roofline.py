"""The kernels of a step under the roofline of the chip: FLOP/s over FLOPs a byte, both logarithmic;
the area of a point is its share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from shardlib.planning.answers.kernels import Kernels, KernelTime
from shardlib.planning.pictures.report.svg import WIDTH, line, picture, words
from shardlib.planning.units.quantity import count_text, percent_text, seconds_text

_LEFT, _TOP, _HEIGHT, _BOTTOM = 80, 16, 260, 40
#: Points that are drawn; the others take less than a thousandth of the time.
_LEAST = 1e-3
_COLOURS = {"forward": "#0072b2", "backward": "#e69f00", "rematerialised": "#cc79a7"}


def roofline_picture(found: Kernels) -> str:
    """The picture of the kernels.

    Args:
        found: the kernels of a plan.
    """
    total = found.seconds or 1.0
    shown = [
        one
        for one in found.kernels
        if one.flops > 0 and one.intensity > 0 and one.seconds > _LEAST * total
    ]
    if not shown:
        return ""
    low = math.floor(math.log10(min(1.0, *(one.intensity for one in shown), 1.0)))
    high = math.ceil(math.log10(max(one.intensity for one in shown) * 2))
    peak = max(rate for _, rate in found.peak_flops_per_s)
    bottom = math.floor(math.log10(min(one.flops / one.seconds for one in shown)))
    at = _Scale(low, high, bottom, math.log10(peak) + 0.25)
    shapes = [*_grid(at), *_roofs(found, at)]
    shapes += [_mark(one, found, total, at) for one in shown]
    for k, (phase, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 12 + 130 * k
        shapes.append(f'<circle cx="{x}" cy="{_TOP - 10}" r="5" style="fill: {colour}"/>')
        shapes.append(words(x + 10, _TOP - 6, phase))
    label = f"Roofline of one {found.chip}: " + ", ".join(
        f"{one.name} {one.phase} {percent_text(found.bound(one) / one.seconds)} of the roofline"
        for one in shown[:8]
    )
    return picture(label, _TOP + _HEIGHT + _BOTTOM, shapes)


class _Scale:
    """Where intensities and rates lie; both logarithmic."""

    def __init__(self, low: float, high: float, bottom: float, top: float) -> None:
        self.low, self.high, self.bottom, self.top = low, high, bottom, top

    def x(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.low) / (self.high - self.low)
        return _LEFT + (WIDTH - _LEFT - 16) * share

    def y(self, rate: float) -> float:
        share = (math.log10(max(rate, 1e-9)) - self.bottom) / (self.top - self.bottom)
        return _TOP + _HEIGHT * (1 - max(share, 0.0))


def _grid(at: _Scale) -> Iterator[str]:
    for power in range(math.ceil(at.low), math.floor(at.high) + 1):
        x = at.x(10.0**power)
        yield line(x, _TOP, x, _TOP + _HEIGHT)
        text = count_text(10.0**power) if power >= 0 else f"{10.0**power:g}"
        anchor = "middle" if x < WIDTH - 24 else "end"
        yield words(x, _TOP + _HEIGHT + 16, text, cls="soft", anchor=anchor)
    for power in range(math.ceil(at.bottom), math.floor(at.top) + 1):
        y = at.y(10.0**power)
        yield line(_LEFT, y, WIDTH - 16, y)
        yield words(_LEFT - 6, y + 4, count_text(10.0**power), cls="soft", anchor="end")
    y = _TOP + _HEIGHT + 34
    yield words(
        (_LEFT + WIDTH) / 2, y, "FLOP a byte of memory traffic", cls="soft", anchor="middle"
    )
    yield words(0, _TOP - 6, "FLOP/s", cls="soft")


def _roofs(found: Kernels, at: _Scale) -> Iterator[str]:
    by_peak: dict[float, list[str]] = {}
    for dtype, peak in found.peak_flops_per_s:
        if "float" in dtype or dtype in ("int8", "uint8"):  # what matrix units multiply
            by_peak.setdefault(peak, []).append(dtype)
    for peak, dtypes in by_peak.items():
        ridge = peak / found.bytes_per_s
        left = 10.0**at.low
        points = [(left, left * found.bytes_per_s), (ridge, peak), (10.0**at.high, peak)]
        path = " ".join(f"{at.x(x):.1f},{at.y(y):.1f}" for x, y in points)
        yield f'<polyline class="roof" points="{path}"/>'
        text = f"{', '.join(dtypes)} {count_text(peak)}FLOP/s"
        yield words(at.x(ridge) - 10, at.y(peak) + 4, text, cls="halo", anchor="end")


def _mark(one: KernelTime, found: Kernels, total: float, at: _Scale) -> str:
    radius = 3 + 22 * math.sqrt(one.seconds / total)
    tip = (
        f"{one.name}, {one.phase}: {seconds_text(one.seconds)} a step"
        f" ({percent_text(one.seconds / total)}), {count_text(one.flops / one.seconds)}FLOP/s,"
        f" {percent_text(found.bound(one) / one.seconds)} of the roofline"
    )
    return (
        f'<circle class="kernel" cx="{at.x(one.intensity):.1f}"'
        f' cy="{at.y(one.flops / one.seconds):.1f}" r="{radius:.1f}" style="fill:'
        f' {_COLOURS[one.phase]}"><title>{escape(tip)}</title></circle>'
    )
