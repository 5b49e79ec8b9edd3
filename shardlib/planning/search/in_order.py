"""Candidates in the order of their bounds, and in growing blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Array = np.ndarray
#: Each block is so many times as large as the one before, since a better plan to compare with
#: leaves fewer to look at.
GROWTH = 12


def ascending(bounds: Array, limit: float) -> Array:
    """Positions of the bounds below a limit, the least first."""
    below = np.flatnonzero(bounds < limit)
    return below[np.argsort(bounds[below], kind="stable")]


def blocks(first: int, count: int, largest: int | None = None) -> Iterator[tuple[int, int]]:
    """Begin and end of growing blocks of so many in all.

    Args:
        largest: of a block; None for no limit.
    """
    start, size = 0, first
    while start < count:
        yield start, min(start + size, count)
        start, size = start + size, min(size * GROWTH, largest or count)
