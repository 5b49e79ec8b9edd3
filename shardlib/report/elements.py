r"""Figures and tables for people: bytes, seconds, counts and aligned rows as text; sections,
tables, bars and cards as HTML.

SI units stay inside the program; gigabytes and milliseconds appear only where text is made.

>>> bytes_text(61.3 * 2**30), seconds_text(0.00321), count_text(54_400), percent_text(0.5121)
('61.3 GiB', '3.21 ms', '54.4 k', '51.2%')

Rows and sentences fit into a hundred columns:

>>> print("\n".join(aligned([("mesh", "step"), ("data=2", "1 s")], right={1})))
  mesh    step
  data=2   1 s
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources

#: Times that differ by less than this part are equal.
TIE = 1e-9
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_EIGHTHS = " ▏▎▍▌▋▊▉"


def _digits(value: float) -> str:
    """Three significant digits, never in scientific notation; `value` is under 1000."""
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100 or rounded == 0:
        return f"{value:.0f}"
    return f"{rounded:.1f}" if abs(rounded) >= 10 else f"{rounded:.2f}"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> tuple[float, str]:
    step = 0
    while abs(float(f"{value:.3g}")) >= 1000 and step + 1 < len(units):
        value /= base
        step += 1
    return value, units[step]


def bytes_text(value: float) -> str:
    """Bytes in binary units."""
    scaled, unit = _scaled(value, 1024.0, _BINARY)
    return f"{scaled:.0f} B" if unit == "B" else f"{_digits(scaled)} {unit}"


def seconds_text(value: float) -> str:
    """A duration; minutes and hours from two minutes on."""
    if value >= 7200:
        return f"{_digits(value / 3600)} h" if value < 3.6e6 else f"{value / 3600:,.0f} h"
    if value >= 120:
        return f"{_digits(value / 60)} min"
    if value <= 0:
        return "0 s"
    size, unit = next(
        ((size, unit) for size, unit in _SECONDS if float(f"{value:.3g}") >= size), _SECONDS[-1]
    )
    return f"{_digits(value / size)} {unit}"


def count_text(value: float, unit: str = "") -> str:
    """A count with a decimal prefix: "54.4 k", "41.2 PFLOP"; exact below a thousand."""
    scaled, prefix = _scaled(value, 1000.0, _DECIMAL)
    number = str(int(value)) if not prefix and value == int(value) else _digits(scaled)
    return f"{number} {prefix}{unit}".rstrip()


def parameters_text(value: float) -> str:
    """A number of parameters, with the B and T that people use for it: "8.03 B"."""
    return count_text(value).replace("G", "B")


def percent_text(share: float) -> str:
    """A share as a percentage, one decimal."""
    return f"{100 * share:.1f}%"


def ratio_text(ratio: float) -> str:
    """A ratio as text: "1.08x"."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:,.0f}x"


def quantity_bar(share: float, width: int) -> str:
    """A horizontal bar of Unicode blocks, `width` columns for a share of 1, exact to an eighth of a
    column; padded.

    >>> quantity_bar(0.5, 8), quantity_bar(0.28, 4)
    ('████    ', '█▏  ')
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    eighths = max(eighths, 1) if share > 0 else 0
    full, remainder = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[remainder] if remainder else "")).ljust(width)


def clip(text: str, width: int) -> str:
    """The text in at most `width` columns; the middle gives way to an ellipsis."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


# --------------------------------------------------------------------------------------------------
# Elements of an HTML page: sections, tables, stacked bars as inline SVG.

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


# --------------------------------------------------------------------------------------------------
# A value as a card in a notebook: a heading, bars, a table, and its whole text behind a click.
#
# One string of HTML with its own styles and nothing from elsewhere; light or dark as the page is.

_STYLE = (
    ".shardlib-card{font:13px/1.5 system-ui,sans-serif;border:1px solid #8886;border-radius:8px;"
    "padding:10px 14px;max-width:860px;--faint:#8884}"
    ".shardlib-card h4{margin:0 0 2px;font-size:15px}"
    ".shardlib-card h5{margin:10px 0 3px;font-size:12px;font-weight:600;opacity:.75}"
    ".shardlib-card p{margin:0;opacity:.85}"
    ".shardlib-card svg{width:100%;height:14px;border-radius:3px;display:block}"
    ".shardlib-card .legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px}"
    ".shardlib-card .legend i{display:inline-block;width:9px;height:9px;border-radius:2px;"
    "margin-right:5px}"
    ".shardlib-card .soft{opacity:.7}"
    ".shardlib-card table{border-collapse:collapse;font-size:12px;background:none}"
    ".shardlib-card td,.shardlib-card th{padding:1px 14px 1px 0;text-align:left;"
    "vertical-align:top;background:none}"
    ".shardlib-card .right{text-align:right}"
    ".shardlib-card details{margin-top:8px;overflow-x:auto}"
    ".shardlib-card summary{cursor:pointer;font-size:12px}"
    ".shardlib-card pre{font-size:11px;line-height:1.35;overflow-x:auto;background:none}"
)


def card(
    title: str,
    lines: Sequence[str] = (),
    *,
    bars: Sequence[tuple[str, Sequence[Part]]] = (),
    rows: Sequence[Sequence[str]] = (),
    head: Sequence[str] = (),
    text: str = "",
    drawn: tuple[str, str] = ("", ""),
) -> str:
    """A card."""
    body = [f"<h4>{escape(title)}</h4>", *(f"<p>{escape(line)}</p>" for line in lines)]
    for heading, parts in bars:
        body += [f"<h5>{escape(heading)}</h5>", bar(parts)]
    if rows:
        body.append(table(rows, head))
    if text:
        body.append(f"<details><summary>all of it</summary><pre>{escape(text)}</pre></details>")
    if drawn[1]:
        summary = f"<summary>{escape(drawn[0])}</summary>"
        body.append(f"<details>{summary}{drawn[1]}</details>")
    return f'<div class="shardlib-card"><style>{_STYLE}</style>\n' + "\n".join(body) + "\n</div>"


def short(name: str, *words: str) -> str:
    """One line for a value: its class, and what matters of it.

    >>> short("Plan", "demo on cpu:8", "data=8")
    '<Plan demo on cpu:8, data=8>'

    Args:
        name: of the class.
        words: what matters.
    """
    return f"<{name} {', '.join(word for word in words if word)}>"


#: Columns of a text for people.
WIDTH = 100


def wrapped(prefix: str, text: str) -> list[str]:
    """A text in lines of at most `WIDTH` columns: the first after a prefix, the others below its
    text.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [prefix.rstrip()]


def aligned(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Rows in aligned columns, indented by two; columns that would pass the width go to a second
    line, in every row.
    """
    aligned_right = set(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    starts = {
        i for i in range(1, len(widths)) if 2 + sum(w + 2 for w in widths[:i]) + widths[i] > WIDTH
    }
    lines: list[str] = []
    for row in rows:
        line = " "
        for i, cell in enumerate(row):
            if i in starts:
                lines.append(line.rstrip())
                line = "     "
            line += (" " if i == 0 else "  ") + (
                f"{cell:>{widths[i]}}" if i in aligned_right else f"{cell:{widths[i]}}"
            )
        lines.append(line.rstrip())
    return [line for line in lines if line]


def and_more(count: int, what: str) -> list[str]:
    """A line for what a list leaves out; nothing where it leaves nothing out."""
    return [f"  and {count} {what}"] if count > 0 else []


# --------------------------------------------------------------------------------------------------
# The style sheets of pages and pictures, files beside this one; each stands in the page itself.


@cache
def style(name: str) -> str:
    """The text of a style sheet, "report.css" say."""
    return (resources.files("shardlib.report") / name).read_text(encoding="utf-8")
