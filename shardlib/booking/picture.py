"""A comparison as one SVG file: days of the run over devices, both logarithmic, a line for each
kind of machine, and the deadline.

A filled circle is a size in time, a ring one that is not; the cheapest of each kind is named.
Figures are tooltips. Nothing is fetched, and there are no scripts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shardlib.booking.comparison import Comparison
from shardlib.booking.offers import Offer, Offers, device_hours
from shardlib.planning.answers.run_cost import DAY
from shardlib.planning.pictures.style_sheets import style
from shardlib.planning.units.quantity import count_text, percent_text

#: Size of the picture and its margins, user units.
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 120, 48, 56
#: Blue, vermilion, green, orange, purple, sky of Okabe and Ito (2008), which people who see no red
#: or green can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9")


def comparison_svg(comparison: Comparison) -> str:
    """Returns the picture of a comparison, a complete SVG document."""
    scale = _Scale(comparison)
    shapes = [*_grid(scale), *_deadline(comparison, scale)]
    for family, colour in zip(comparison.families, _colours(len(comparison.families)), strict=True):
        shapes += _family(family, colour, scale)
    title = comparison.title
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img">\n<title>{escape(title)}</title>\n'
        f'<style>{style("curve.css")}</style>\n<rect class="page" width="{WIDTH}"'
        f' height="{HEIGHT}"/>\n<text class="title" x="{LEFT}" y="26">{escape(title)}</text>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _priced(family: Offers) -> list[Offer]:
    return [offer for offer in family.tried if offer.cost is not None]


def _days(offer: Offer) -> float:
    assert offer.cost is not None
    return offer.cost.wall_seconds / DAY


class _Scale:
    """Where devices and days lie in the picture."""

    def __init__(self, comparison: Comparison) -> None:
        priced = [offer for family in comparison.families for offer in _priced(family)]
        devices = [math.log2(offer.devices) for offer in priced] or [0.0]
        days = [math.log10(_days(offer)) for offer in priced]
        days.append(math.log10(comparison.target.days))
        self.first, self.last = math.floor(min(devices)), math.ceil(max(devices))
        self.last = max(self.last, self.first + 1)
        self.low, self.high = min(days) - 0.1, max(days) + 0.1

    def x(self, devices: float) -> float:
        share = (math.log2(devices) - self.first) / (self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, days: float) -> float:
        share = (math.log10(days) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 ... days between two powers of ten."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    days = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [value for value in days if low <= math.log10(value) <= high]


def _grid(scale: _Scale) -> list[str]:
    shapes: list[str] = []
    for power in range(scale.first, scale.last + 1):
        x = scale.x(2.0**power)
        shapes += [
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
            f'<text class="soft" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}"'
            f' text-anchor="middle">{2**power:,}</text>',
        ]
    for days in _ticks(scale.low, scale.high):
        y = scale.y(days)
        shapes += [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}"'
            f' text-anchor="end">{days:,.6g}</text>',
        ]
    return [
        *shapes,
        f'<text class="soft" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}"'
        ' text-anchor="middle">devices</text>',
        f'<text class="soft" x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end">days</text>',
    ]


def _deadline(comparison: Comparison, scale: _Scale) -> list[str]:
    y = scale.y(comparison.target.days)
    return [
        f'<line class="ideal" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="soft" x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}">deadline</text>',
    ]


def _family(family: Offers, colour: str, scale: _Scale) -> list[str]:
    priced = _priced(family)
    if not priced:
        return []
    points = " ".join(f"{scale.x(o.devices):.1f},{scale.y(_days(o)):.1f}" for o in priced)
    line = f'<polyline points="{points}" style="fill: none; stroke: {colour}; stroke-width: 2"/>'
    return [
        line,
        *(_mark(offer, colour, scale) for offer in priced),
        *_names(family, colour, scale),
    ]


def _mark(offer: Offer, colour: str, scale: _Scale) -> str:
    label = (
        f"{offer.topology}: {_days(offer):,.1f} days, {count_text(device_hours(offer))}"
        f" device-hours, MFU {percent_text(offer.mfu)}"
    )
    fill = f"fill: {colour}" if offer.meets else f"fill: none; stroke: {colour}; stroke-width: 2"
    return (
        f'<circle cx="{scale.x(offer.devices):.1f}" cy="{scale.y(_days(offer)):.1f}" r="5"'
        f' style="{fill}"><title>{escape(label)}</title></circle>'
    )


def _names(family: Offers, colour: str, scale: _Scale) -> Sequence[str]:
    best = family.cheapest or _priced(family)[-1]
    x, y = scale.x(best.devices), scale.y(_days(best))
    return [
        f'<text x="{x + 9:.1f}" y="{y - 8:.1f}" style="fill: {colour}">'
        f"{escape(best.topology)}</text>"
    ]
