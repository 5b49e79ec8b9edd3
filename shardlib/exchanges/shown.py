"""A value as a table in a notebook."""

from __future__ import annotations

from html import escape
from typing import Any


def table_of(title: str, rows: list[tuple[str, str]]) -> str:
    """A heading and rows of two cells, HTML without styles of its own."""
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"


class Shown:
    """A frozen value whose fields a notebook shows as a table."""

    def _repr_html_(self) -> str:
        fields: dict[str, Any] = self.__dict__
        return table_of(str(self), [(name, str(value)) for name, value in fields.items()])
