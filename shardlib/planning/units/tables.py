"""How do rows and sentences fit into a hundred columns?

>>> print("\\n".join(aligned([("mesh", "step"), ("data=2", "1 s")], right={1})))
  mesh    step
  data=2   1 s
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

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
