"""Entries (meshes with microbatches) under choices of colours, each with a bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Entries under choices, arrays of equal length.

    Attributes:
        entries: indices of entries.
        choices: numbers of choices.
        least: a bound of each.
    """

    entries: Array
    choices: Array
    least: Array

    def __len__(self) -> int:
        return len(self.entries)

    def take(self, which: Array) -> Pairs:
        """Some of the pairs."""
        return Pairs(
            entries=self.entries[which], choices=self.choices[which], least=self.least[which]
        )

    def below(self, limit: float) -> Pairs:
        """Those whose bound is below a limit, the least first."""
        order = np.argsort(self.least, kind="stable")
        return self.take(order[: int(np.searchsorted(self.least[order], limit))])

    def first(self, count: int) -> Pairs:
        """So many of them."""
        return self.take(np.arange(min(count, len(self))))

    def after(self, count: int) -> Pairs:
        """All but the first so many."""
        return self.take(np.arange(min(count, len(self)), len(self)))

    def firsts(self) -> Pairs:
        """The first pair of every entry."""
        return self.take(np.sort(np.unique(self.entries, return_index=True)[1]))


def joined(parts: Iterable[Pairs]) -> Pairs:
    """The pairs of several, one after the other."""
    listed = [
        Pairs(
            entries=np.zeros(0, dtype=np.int64),
            choices=np.zeros(0, dtype=np.int64),
            least=np.zeros(0),
        ),
        *parts,
    ]
    return Pairs(
        **{
            name: np.concatenate([getattr(part, name) for part in listed])
            for name in ("entries", "choices", "least")
        }
    )
