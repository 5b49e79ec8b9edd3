"""The style sheets of pages and pictures, files beside this one; each stands in the page itself."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def style(name: str) -> str:
    """The text of a style sheet, "report.css" say."""
    return (resources.files("shardlib.planning.pictures") / name).read_text(encoding="utf-8")
