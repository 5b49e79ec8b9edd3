"""What items add to a tally under choices.

Programs of a model differ in little: their forward passes are the same, and what is rematerialised
is the forward pass again. So what an item adds is kept for every item that is made of the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from shardlib.cost.tables.basis_functions import Book
from shardlib.cost.tables.charges import charges
from shardlib.cost.tables.quantities import ROWS
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.terms import Item
from shardlib.propagation.assignment import Choice

#: One entry of a tally: row, number of the measure, coefficient.
Entry = tuple[int, int, float]


class Charged:
    """What items add under choices; of items that are made of the same it is made once.

    Args:
        book: numbers the measures.
        profile: framework profile.
        segments: number of segments.
    """

    def __init__(self, book: Book, profile: FrameworkProfile, segments: int) -> None:
        self.book, self.segments, self._profile = book, segments, profile
        self._numbers: dict[Hashable, int] = {}
        self._items: list[Item] = []
        self._entries: dict[Choice, dict[int, list[Entry]]] = {}

    def number(self, item: Item) -> int:
        """The number of an item; those of a segment that are made of the same have one."""
        key = id(item) if item.made_of is None else (item.segment, item.made_of)
        number = self._numbers.setdefault(key, len(self._items))
        if number == len(self._items):
            self._items.append(item)
        return number

    def entries(self, choice: Choice, items: Iterable[tuple[int, int]]) -> Iterator[Entry]:
        """What some items add under a choice."""
        entries = self._entries.setdefault(choice, {})
        for offset, number in items:
            if number not in entries:
                entries[number] = list(self._made(self._items[number], choice))
            for row, measure, amount in entries[number]:
                yield offset * ROWS + row, measure, amount

    def _made(self, item: Item, choice: Choice) -> Iterator[Entry]:
        offset = item.segment % self.segments * ROWS
        for term in item.terms(choice):
            for row, measure, amount in charges(item.segment, term, self._profile):
                yield offset + row, self.book.number(measure), amount
