"""The table of `docs/pins.md`, written from the table of decisions.

    python -m shardlib.decisions.page docs/pins.md

writes it anew, between its two marks; everything else on the page is prose.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardlib.decisions.entry import ANY, Entry
from shardlib.decisions.table import TABLE

#: Where the table begins and ends on the page.
BEGIN, END = "<!-- table of decisions -->", "<!-- end of the table -->"


def rows(table: Mapping[str, Entry] = TABLE) -> Iterator[tuple[str, str, str]]:
    """(pin, values, meaning) of every decision, in Markdown."""
    for word, entry in table.items():
        legal = [*entry.choices, *((ANY,) if entry.left_open else ())]
        spelled = ", ".join(f"`{json.dumps(value)}`" for value in legal)
        yield f"`{word}`", entry.values or spelled, entry.meaning
        yield from entry.also


def table_text(table: Mapping[str, Entry] = TABLE) -> str:
    """The table in Markdown."""
    head = [("pin", "values", "meaning"), ("---", "---", "---")]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows(table)])


def page(text: str, table: Mapping[str, Entry] = TABLE) -> str:
    """The page with the table anew."""
    before, _, remainder = text.partition(BEGIN)
    _, _, after = remainder.partition(END)
    return f"{before}{BEGIN}\n{table_text(table)}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
