"""Which plan comes next, after the fastest?

A search keeps the best plan of each mesh; a `Ranking` keeps the price of every plan that fits, so
that the next best can be asked for, one after another. Equally fast plans come in the order of
their simplicity, as in a search.

>>> ranking = Ranking[str]()
>>> ranking.offer("small", np.array([True, True]), np.array([3.0, 1.0]), np.array([5.0, 6.0]))
>>> ranking.offer("large", np.array([True, False]), np.array([2.0, 0.5]), np.array([7.0, 9.0]))
>>> ordered = ranking.ordered(lambda what, index: what)
>>> [(entry.what, entry.index, entry.seconds) for entry in ordered]
[('small', 1, 1.0), ('large', 0, 2.0), ('small', 0, 3.0)]
>>> [(entry.what, entry.seconds, entry.peak_bytes) for entry in ranking.front()]
[('small', 1.0, 6.0), ('small', 3.0, 5.0)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from shardlib.planning.units.quantity import TIE

#: Decisions that a block of prices has in common.
What = TypeVar("What")


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[What]):
    """The price of one plan.

    Attributes:
        what: its decisions other than mesh and microbatches.
        index: its mesh and microbatches, a position among the candidates.
        seconds: predicted time of a step.
        peak_bytes: predicted bytes per device.
    """

    what: What
    index: int
    seconds: float
    peak_bytes: float


class Ranking(Generic[What]):
    """Prices of plans that fit, in blocks as they were priced."""

    def __init__(self) -> None:
        self._whats: list[What] = []
        self._indexes: list[np.ndarray] = []
        self._seconds: list[np.ndarray] = []
        self._peaks: list[np.ndarray] = []

    def offer(
        self,
        what: What,
        fits: np.ndarray,
        seconds: np.ndarray,
        peak_bytes: np.ndarray,
        rows: np.ndarray | None = None,
    ) -> None:
        """Takes in a block.

        Args:
            seconds: step time by candidate.
            peak_bytes: bytes per device by candidate.
            rows: index of each candidate; by default its position in the block.
        """
        indexes = np.flatnonzero(fits)
        if len(indexes):
            self._whats.append(what)
            self._indexes.append(indexes if rows is None else rows[indexes])
            self._seconds.append(seconds[indexes])
            self._peaks.append(peak_bytes[indexes])

    def __len__(self) -> int:
        return sum(map(len, self._indexes))

    def front(self) -> Iterator[Entry[What]]:
        """Plans that need less memory than every faster one, the fastest first."""
        if not self._whats:
            return
        blocks = np.repeat(np.arange(len(self._whats)), [len(block) for block in self._indexes])
        indexes, seconds, peaks = (
            np.concatenate(rows) for rows in (self._indexes, self._seconds, self._peaks)
        )
        order = np.lexsort((peaks, seconds))
        minima = np.minimum.accumulate(peaks[order])
        for i in order[np.concatenate(([True], peaks[order][1:] < minima[:-1]))]:
            yield Entry(
                what=self._whats[blocks[i]],
                index=int(indexes[i]),
                seconds=float(seconds[i]),
                peak_bytes=float(peaks[i]),
            )

    def ordered(
        self, simplicity: Callable[[What, int], SupportsRichComparison]
    ) -> Iterator[Entry[What]]:
        """All plans, the fastest first; equally fast ones by `simplicity(what, index)`, the
        smallest first.
        """
        if not self._whats:
            return
        blocks = np.repeat(np.arange(len(self._whats)), [len(block) for block in self._indexes])
        indexes, seconds, peaks = (
            np.concatenate(rows) for rows in (self._indexes, self._seconds, self._peaks)
        )
        order = np.argsort(seconds, kind="stable")
        start = 0
        while start < len(order):
            end = start + int(
                np.searchsorted(
                    seconds[order[start:]], seconds[order[start]] * (1 + TIE), side="right"
                )
            )
            tied = [
                Entry(
                    what=self._whats[blocks[i]],
                    index=int(indexes[i]),
                    seconds=float(seconds[i]),
                    peak_bytes=float(peaks[i]),
                )
                for i in order[start:end]
            ]
            yield from sorted(tied, key=lambda entry: simplicity(entry.what, entry.index))
            start = end
