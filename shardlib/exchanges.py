"""Exchanges between islands, as far as the core knows them: a plan has one, and that of one island
is `EXACT`. All others are of `shardlib.islands.exchanges`.

>>> read_exchange("exchange", "exact")
Exact()
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, ClassVar, Protocol

from shardlib import wings
from shardlib.untrusted.data import JsonObject, shown


class Exchange(Protocol):
    """The exchange of islands, which are parts of a machine; frozen and hashable."""

    @property
    def islands(self) -> int:
        """Number of islands."""
        ...

    @property
    def keeps(self) -> bool:
        """Returns whether there are outer parameters, which belong to all islands."""
        ...

    @property
    def delay(self) -> int:
        """Steps that islands do while something crosses; 0 where they wait for it."""
        ...

    def met(self, step: int) -> int:
        """Number of meetings whose results have arrived after so many steps."""
        ...

    def to_json(self) -> JsonObject:
        """The exchange as plain data, with its kind."""
        ...


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


@dataclass(frozen=True, kw_only=True)
class Exact(Shown):
    """There is one island: gradients of the whole batch are reduced in every step, as planned."""

    kind: ClassVar[str] = "exact"
    places: ClassVar[tuple[str, ...]] = ()
    #: One island, of which nothing is outer, and nothing crosses beside steps.
    islands = 1
    keeps = False
    delay = 0

    def met(self, step: int) -> int:
        """No meetings.

        Args:
            step: number of steps done.
        """
        return 0

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind}

    def __str__(self) -> str:
        return self.kind


#: One island.
EXACT = Exact()


def read_exchange(word: str, value: object) -> Exchange:
    """An exchange of a value, a word, or plain data."""
    if isinstance(value, Exact):
        return value
    if value == EXACT.kind or value == EXACT.to_json():
        return EXACT
    return wings.islands("exchanges", f"{word}={shown(value)}").read_exchange(word, value)
