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


def roofline_picture(kernels: Kernels) -> str:
    """The picture of the kernels."""
    total = kernels.seconds or 1.0
    shown = [
        kernel
        for kernel in kernels.kernels
        if kernel.flops > 0 and kernel.intensity > 0 and kernel.seconds > _LEAST * total
    ]
    if not shown:
        return ""
    low = math.floor(math.log10(min(1.0, *(kernel.intensity for kernel in shown), 1.0)))
    high = math.ceil(math.log10(max(kernel.intensity for kernel in shown) * 2))
    peak = max(rate for _, rate in kernels.peak_flops_per_s)
    bottom = math.floor(math.log10(min(kernel.flops / kernel.seconds for kernel in shown)))
    scale = _Scale(low, high, bottom, math.log10(peak) + 0.25)
    shapes = [*_grid(scale), *_roofs(kernels, scale)]
    shapes += [_mark(kernel, kernels, total, scale) for kernel in shown]
    for k, (phase, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 12 + 130 * k
        shapes.append(f'<circle cx="{x}" cy="{_TOP - 10}" r="5" style="fill: {colour}"/>')
        shapes.append(words(x + 10, _TOP - 6, phase))
    label = f"Roofline of one {kernels.chip}: " + ", ".join(
        f"{kernel.name} {kernel.phase} {percent_text(kernels.bound(kernel) / kernel.seconds)} of"
        " the roofline"
        for kernel in shown[:8]
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


def _grid(scale: _Scale) -> Iterator[str]:
    for power in range(math.ceil(scale.low), math.floor(scale.high) + 1):
        x = scale.x(10.0**power)
        yield line(x, _TOP, x, _TOP + _HEIGHT)
        text = count_text(10.0**power) if power >= 0 else f"{10.0**power:g}"
        anchor = "middle" if x < WIDTH - 24 else "end"
        yield words(x, _TOP + _HEIGHT + 16, text, cls="soft", anchor=anchor)
    for power in range(math.ceil(scale.bottom), math.floor(scale.top) + 1):
        y = scale.y(10.0**power)
        yield line(_LEFT, y, WIDTH - 16, y)
        yield words(_LEFT - 6, y + 4, count_text(10.0**power), cls="soft", anchor="end")
    y = _TOP + _HEIGHT + 34
    yield words(
        (_LEFT + WIDTH) / 2, y, "FLOP a byte of memory traffic", cls="soft", anchor="middle"
    )
    yield words(0, _TOP - 6, "FLOP/s", cls="soft")


def _roofs(kernels: Kernels, scale: _Scale) -> Iterator[str]:
    by_peak: dict[float, list[str]] = {}
    for dtype, peak in kernels.peak_flops_per_s:
        if "float" in dtype or dtype in ("int8", "uint8"):  # what matrix units multiply
            by_peak.setdefault(peak, []).append(dtype)
    for peak, dtypes in by_peak.items():
        ridge = peak / kernels.bytes_per_s
        left = 10.0**scale.low
        points = [(left, left * kernels.bytes_per_s), (ridge, peak), (10.0**scale.high, peak)]
        path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
        yield f'<polyline class="roof" points="{path}"/>'
        text = f"{', '.join(dtypes)} {count_text(peak)}FLOP/s"
        yield words(scale.x(ridge) - 10, scale.y(peak) + 4, text, cls="halo", anchor="end")


def _mark(kernel: KernelTime, kernels: Kernels, total: float, scale: _Scale) -> str:
    radius = 3 + 22 * math.sqrt(kernel.seconds / total)
    tip = (
        f"{kernel.name}, {kernel.phase}: {seconds_text(kernel.seconds)} a step"
        f" ({percent_text(kernel.seconds / total)}),"
        f" {count_text(kernel.flops / kernel.seconds)}FLOP/s,"
        f" {percent_text(kernels.bound(kernel) / kernel.seconds)} of the roofline"
    )
    return (
        f'<circle class="kernel" cx="{scale.x(kernel.intensity):.1f}"'
        f' cy="{scale.y(kernel.flops / kernel.seconds):.1f}" r="{radius:.1f}" style="fill:'
        f' {_COLOURS[kernel.phase]}"><title>{escape(tip)}</title></circle>'
    )
