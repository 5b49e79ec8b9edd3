"""Which pages does a request need in layers that look back a few tokens alone?

>>> behind(window=8, computed=17, size=4), longest(8, 4, [True, True, False, True, True, True])
(2, 6)
>>> longest(8, 4, [True, True, False, True])
2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def behind(*, window: int, computed: int, size: int) -> int:
    """Pages, from the first on, that no token to come sees."""
    return max(computed - window + 1, 0) // size if window else 0


def longest(window: int, size: int, there: Sequence[bool]) -> int:
    """The most pages that a request may begin with, where some are there and some are not: those
    that its next token sees have to be.
    """
    pages = run = 0
    for count, present in enumerate(there, 1):
        run = run + 1 if present else 0
        if run >= count - behind(window=window, computed=count * size, size=size):
            pages = count
    return pages


@dataclass(kw_only=True, eq=False)
class Held:
    """Pages that a request has in a cache group.

    Attributes:
        gone: how many it has given back, or never had: those before its window.
        pages: the others, in order.
    """

    gone: int = 0
    pages: list[int] = field(default_factory=list[int])

    @property
    def end(self) -> int:
        """Pages from the first token to the last that there is room for."""
        return self.gone + len(self.pages)

    def at(self, number: int) -> int:
        """The page that holds some tokens."""
        assert number >= self.gone, f"page {number} was given back"
        return self.pages[number - self.gone]
