r"""Figures and tables for people as text: bytes, seconds, counts and aligned rows.

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

#: Times that differ by less than this part are equal.
TIE = 1e-9
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


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


def clip(text: str, width: int) -> str:
    """The text in at most `width` columns; the middle gives way to an ellipsis."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


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
    line, in every row, and one that is longer than a line is wrapped.
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
                if len(cell) + 7 > WIDTH:
                    *before, cell = textwrap.wrap(cell, WIDTH - 7)
                    lines += [f"       {part}" for part in before]
            line += (" " if i == 0 else "  ") + (
                f"{cell:>{widths[i]}}" if i in aligned_right else f"{cell:{widths[i]}}"
            )
        lines.append(line.rstrip())
    return [line for line in lines if line]


def and_more(count: int, what: str) -> list[str]:
    """A line for what a list leaves out; nothing where it leaves nothing out."""
    return [f"  and {count} {what if count > 1 else what.replace('kinds', 'kind')}"][: count > 0]
