"""Shapes of a picture, the colours of mesh axes, and a figure with its caption."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

#: A colour for each mesh axis, which people who see no red or green can tell apart (Okabe and Ito,
#: 2008), and what is written on it.
AXIS_COLOURS = {
    "island": ("#b2a000", "#111"),
    "stage": ("#d55e00", "#111"),
    "data": ("#0072b2", "#fff"),
    "fsdp": ("#009e73", "#111"),
    "expert": ("#cc79a7", "#111"),
    "context": ("#56b4e9", "#111"),
    "tensor": ("#e69f00", "#111"),
}
#: User units of a picture.
WIDTH = 860


def picture(label: str, height: float, shapes: Sequence[str]) -> str:
    """An SVG element that is as wide as the page."""
    return (
        f'<svg class="picture" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
        f' aria-label="{escape(label)}">\n' + "\n".join(shapes) + "\n</svg>"
    )


def rect(
    x: float, y: float, width: float, height: float, *, fill: str = "", cls: str = "", tip: str = ""
) -> str:
    """A rectangle."""
    style = f' style="fill: {fill}"' if fill else ""
    name = f' class="{cls}"' if cls else ""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect{name} x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}"'
        f' height="{height:.1f}"{style}>{inner}</rect>'
    )


def words(x: float, y: float, text: str, *, cls: str = "", anchor: str = "", fill: str = "") -> str:
    """Text.

    Args:
        fill: its colour; by default that of the page's text.
    """
    name = f' class="{cls}"' if cls else ""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    style = f' style="fill: {fill}"' if fill else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}"{anchored}{style}>{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, cls: str = "grid") -> str:
    """A line from one point to another."""
    return f'<line class="{cls}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def figure(content: str, note: str, more: str = "") -> str:
    """A picture with what it means, and a table behind a click."""
    behind = f"<details><summary>as a table</summary>{more}</details>" if more else ""
    return f'<figure>{content}<figcaption class="soft">{escape(note)}</figcaption></figure>{behind}'
