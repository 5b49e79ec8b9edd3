"""Elements of an HTML page: sections, tables, stacked bars as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from shardlib.planning.units.quantity import (
    percent_text,
)

#: Colours that can be told apart on white and on black, also by people who see no red or green
#: (Okabe and Ito, 2008).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b2a000")
_SPARE = "var(--faint)"
#: (label, size, size in words)
Part = tuple[str, float, str]


def section(title: str, content: str) -> list[str]:
    """A heading and what is below it; nothing where that is empty."""
    return [f"<h2>{title}</h2>", content] if content else []


def bar(parts: Sequence[Part]) -> str:
    """A stacked bar with its legend; the widths are per mille of the whole."""
    coloured = [
        (label, size, text, _SPARE if label == "spare" else _COLOURS[i % len(_COLOURS)])
        for i, (label, size, text) in enumerate(parts)
        if size > 0
    ]
    total = sum(size for _, size, _, _ in coloured) or 1.0
    start = 0.0
    shapes: list[str] = []
    for label, size, text, colour in coloured:
        width = 1000 * size / total
        shapes.append(
            f'<rect x="{start:.2f}" y="0" width="{width:.2f}" height="10" style="fill: {colour}">'
            f"<title>{escape(label)}: {text} ({percent_text(size / total)})</title></rect>"
        )
        start += width
    legend = "".join(
        f'<span><i style="background: {colour}"></i>{escape(label)} {text} <span'
        f' class="soft">{percent_text(size / total)}</span></span>'
        for label, size, text, colour in coloured
    )
    return (
        '<svg viewBox="0 0 1000 10" preserveAspectRatio="none"'
        f' role="img">{"".join(shapes)}</svg>\n<div class="legend">{legend}</div>'
    )


def table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), *, right: Iterable[int] = ()
) -> str:
    aligned_right = set(right)

    def row(cells: Sequence[str], tag: str) -> str:
        marks = (' class="right"' if i in aligned_right else "" for i in range(len(cells)))
        return (
            "<tr>"
            + "".join(
                f"<{tag}{mark}>{escape(cell)}</{tag}>" if cell else "<td></td>"
                for cell, mark in zip(cells, marks, strict=True)
            )
            + "</tr>"
        )

    return (
        '<div class="wide"><table>\n'
        + "\n".join([*([row(head, "th")] if head else []), *(row(cells, "td") for cells in rows)])
        + "\n</table></div>"
    )
