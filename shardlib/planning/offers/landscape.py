"""What a search priced, thinned to a few points that show where the others lie.

>>> from shardlib.planning.offers.landscape import Landscape
>>> seen = Landscape[str]()
>>> for name, seconds, size in (("a", 1.0, 9.0), ("b", 1.001, 9.0), ("c", 2.0, 3.0)):
...     seen.note(name, seconds, size, fits=True)
>>> [point.what for point in seen.points(10)]  # "b" is "a" but for a thousandth
['a', 'c']
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

#: Decisions of a plan.
What = TypeVar("What")
#: Cells in a factor of e of time and of memory: plans nearer than 1.6% are one point.
GRAIN = 64.0


@dataclass(frozen=True, kw_only=True)
class Point(Generic[What]):
    """A plan and its price.

    Attributes:
        what: its decisions.
        seconds: of a step.
        peak_bytes: per device.
        fits: whether it fits.
    """

    what: What
    seconds: float
    peak_bytes: float
    fits: bool


class Landscape(Generic[What]):
    """Plans that were priced, of those that cost about the same the fastest; which it keeps does
    not depend on the clock.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, bool], Point[What]] = {}

    def note(self, what: What, seconds: float, peak_bytes: float, *, fits: bool) -> None:
        """Takes in a plan.

        Args:
            seconds: of a step.
            peak_bytes: per device.
        """
        if not (0 < seconds < math.inf and 0 < peak_bytes < math.inf):
            return
        cell = round(GRAIN * math.log(seconds)), round(GRAIN * math.log(peak_bytes)), fits
        previous = self._cells.get(cell)
        if previous is None or (seconds, peak_bytes) < (previous.seconds, previous.peak_bytes):
            self._cells[cell] = Point(what=what, seconds=seconds, peak_bytes=peak_bytes, fits=fits)

    def points(self, count: int) -> tuple[Point[What], ...]:
        """The Pareto front of what fits and points spread over the rest, the fastest first."""
        ordered = sorted(self._cells.values(), key=lambda p: (p.seconds, p.peak_bytes))
        chosen = front(ordered)[:count]
        grain = GRAIN
        while grain >= 1:
            more = _thinned(ordered, grain)
            if len(more) + len(chosen) <= count:
                chosen += [point for point in more if point not in chosen]
                break
            grain /= 2
        return tuple(sorted(chosen, key=lambda p: (p.seconds, p.peak_bytes)))


def front(points: Iterable[Point[What]]) -> list[Point[What]]:
    """Of plans that fit, those that need less memory than all faster ones."""
    pareto: list[Point[What]] = []
    for point in points:
        if point.fits and (not pareto or point.peak_bytes < pareto[-1].peak_bytes):
            pareto.append(point)
    return pareto


def _thinned(points: Iterable[Point[What]], grain: float) -> list[Point[What]]:
    """The first point of every cell."""
    cells: dict[tuple[int, int, bool], Point[What]] = {}
    for point in points:
        cell = (
            round(grain * math.log(point.seconds)),
            round(grain * math.log(point.peak_bytes)),
            point.fits,
        )
        cells.setdefault(cell, point)
    return list(cells.values())
