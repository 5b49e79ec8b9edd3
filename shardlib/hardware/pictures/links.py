"""The links of a machine as a small SVG: a row for each tier, the slowest first.

A row has a box for each part that the tier connects; a box of the last row is a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from shardlib.hardware.tier import Tier

_WIDE, _LEFT, _BOX, _GAP, _ROW = 720, 190, 22, 4, 64
#: Boxes of a row that are drawn; of more, a number says how many there are.
_MOST = 16
#: Blue, orange and green of Okabe and Ito (2008), which people who see no red or green tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73")


def links_svg(title: str, tiers: Sequence[Tier]) -> str:
    """A complete SVG document, of some kilobytes; nothing is fetched, and there are no scripts."""
    rows = "".join(
        "".join(_row(tier, 40 + _ROW * number, _COLOURS[number % len(_COLOURS)]))
        for number, tier in enumerate(tiers)
    )
    height = 44 + _ROW * len(tiers)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {height}" width="{_WIDE}"'
        f' height="{height}" role="img" font-family="system-ui, sans-serif" font-size="13">'
        f'<title>{escape(title)}</title><rect width="{_WIDE}" height="{height}" fill="#ffffff"/>'
        f'<text x="12" y="24" font-weight="600">{escape(title)}</text>{rows}</svg>'
    )


def _row(tier: Tier, top: int, colour: str) -> Iterator[str]:
    parts = math.prod(tier.shape)
    shape = " x ".join(f"{size:,}" for size in tier.shape)
    rate = f"{shape} · {tier.bytes_per_s / 1e9:,.1f} GB/s"
    yield f'<text x="12" y="{top + 18}">{escape(tier.name)}</text>'
    yield f'<text x="12" y="{top + 36}" fill="#5c5c64">{rate}</text>'
    drawn = min(parts, _MOST)
    step = _BOX + _GAP
    middle = top + 12 + _BOX / 2
    end = _LEFT + drawn * step
    yield (
        f'<line x1="{_LEFT}" x2="{end}" y1="{middle}" y2="{middle}" stroke="{colour}"'
        ' stroke-width="3"/>'
    )
    for number in range(drawn):
        yield (
            f'<rect x="{_LEFT + number * step}" y="{top + 12}" width="{_BOX}" height="{_BOX}"'
            f' rx="3" fill="{colour}"/>'
        )
    if parts > drawn:
        yield f'<text x="{end + 4}" y="{top + 28}">of {parts:,}</text>'
