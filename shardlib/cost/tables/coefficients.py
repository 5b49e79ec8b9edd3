"""Tallies: coefficients of measures, by quantity, for any shapes.

Tallies of different items add up, so tables of partial sums can be combined; only
`shardlib.cost.pricing` does anything that is no sum.

>>> tally = tallied([(0, 5, 2.0), (0, 5, 1.0), (3, 7, 4.0)])
>>> tally.rows.tolist(), tally.measures, tally.matrix.tolist()
([0, 3], (5, 7), [[3.0, 0.0], [0.0, 4.0]])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardlib.cost.tables.basis_functions import Values

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A tally for any shapes: a matrix of coefficients times measures.

    Attributes:
        rows: numbers of the rows that are not empty, ascending.
        measures: numbers of the measures, in a `Book`.
        matrix: array [rows, measures].
    """

    rows: Array
    measures: tuple[int, ...]
    matrix: Array
    _folded: dict[tuple[int, int, tuple[int, ...]], Tally] = field(
        default_factory=dict[tuple[int, int, tuple[int, ...]], "Tally"], init=False, repr=False
    )

    def folded(self, length: int, width: int, rows: Sequence[int]) -> Tally:
        """Segments of `width` rows added up, as many as there are in `length`, and of the result
        only some rows, as far as they are not empty.
        """
        key = length, width, tuple(rows)
        if key not in self._folded:
            self._folded[key] = self._fold(length, width, rows)
        return self._folded[key]

    def _fold(self, length: int, width: int, rows: Sequence[int]) -> Tally:
        """See `folded`."""
        kept_rows, which = np.unique(self.rows % width, return_inverse=True)
        matrix = np.zeros((len(kept_rows), len(self.measures)))
        np.add.at(matrix, which, np.where((self.rows < length)[:, None], self.matrix, 0.0))
        selected = np.isin(kept_rows, rows) & matrix.any(1)
        used = np.flatnonzero(matrix[selected].any(0))
        return Tally(
            rows=kept_rows[selected],
            measures=tuple(self.measures[i] for i in used),
            matrix=matrix[np.ix_(selected, used)],
        )

    def weighed(self, weights: Array) -> Tally:
        """Sums of the rows by coefficients, array [sums, all rows]; every sum is a row of the
        result.
        """
        matrix = weights[:, self.rows] @ self.matrix
        used = np.flatnonzero(matrix.any(0))
        return Tally(
            rows=np.arange(len(weights)),
            measures=tuple(self.measures[i] for i in used),
            matrix=matrix[:, used],
        )

    def on(self, values: Values, which: Array) -> Array:
        """The rows on some of the shapes, array [rows, shapes]."""
        return self.matrix @ values.stacked(self.measures, which)


def tallied(entries: Iterable[tuple[int, int, float]]) -> Tally:
    """The tally of (row, number of the measure, coefficient)."""
    listed = [entry for entry in entries if entry[2]]
    if not listed:
        return Tally(rows=np.zeros(0, dtype=np.int64), measures=(), matrix=np.zeros((0, 0)))
    rows, position = np.unique([row for row, _, _ in listed], return_inverse=True)
    measures, used = np.unique([number for _, number, _ in listed], return_inverse=True)
    matrix = np.zeros((len(rows), len(measures)))
    np.add.at(matrix, (position, used), [amount for _, _, amount in listed])
    return Tally(rows=rows, measures=tuple(measures.tolist()), matrix=matrix)
