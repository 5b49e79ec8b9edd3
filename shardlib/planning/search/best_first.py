"""Explores several large spaces together, the plans with the least bounds first.

Bounds of entries, of pairs and of pairs on places come one after the other, each for what the one
before leaves below a limit that all spaces share. Where nothing is left below it the limit grows,
up to the seconds of the fastest plan; then no other plan is faster. What is above the limit waits,
so nothing is bounded or priced twice, and hardly more than what no bound excludes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardlib.planning.bounds.frontier import Entries
from shardlib.planning.offers.incumbents import Best
from shardlib.planning.search.branch_and_bound import Counts, Explorer
from shardlib.planning.search.pair_prices import PairPricer, Placed

Array = np.ndarray
#: Each limit is so many times the one before: at first, and once something is below it.
GROWTH, STEP = 1.5, 1.2
#: Entries that may fit with the least bounds that are enough for a first limit, and entries none of
#: which fits that end the search for them.
ENOUGH, HOPELESS = 32, 4096
#: No limit is larger than so many times the least bound of all, where nothing is below it.
FARTHEST = 1000.0
#: Entries that are bounded on their places at once.
AT_ONCE = 4096
#: Rows that are priced at first; each time so many times as many.
NEAREST, MORE = 64, 8


@dataclass(kw_only=True)
class Front:
    """What of a space waits to be bounded or priced.

    Attributes:
        entries: of the space.
        pricer: prices its pairs.
        best: what has been seen.
        seen, waiting: which entries have a bound of what fits, and those of them that wait.
        seconds: these bounds.
        near, placed: pairs on places that wait, without and with bounds that know the choice.
    """

    entries: Entries
    pricer: PairPricer
    best: Best
    seen: Array = field(init=False)
    waiting: Array = field(init=False)
    seconds: Array = field(init=False)
    near: list[Placed] = field(default_factory=list[Placed], init=False)
    placed: list[Placed] = field(default_factory=list[Placed], init=False)

    def __post_init__(self) -> None:
        self.seen = np.zeros(len(self.entries), dtype=bool)
        self.waiting, self.seconds = np.zeros(0, dtype=np.int64), np.zeros(0)

    def new(self, limit: float) -> tuple[Array, float]:
        """Entries that may have a plan below a limit and have not been taken, and their least
        bound.
        """
        fresh, _ = self.entries.below(limit)
        fresh = fresh[~self.seen[fresh]]
        if len(fresh):
            self.seen[fresh] = True
            self.waiting = np.concatenate([self.waiting, fresh])
            self.seconds = np.concatenate([self.seconds, self.entries.seconds(fresh)])
        return self.waiting[self.seconds < limit], float(self.seconds.min(initial=np.inf))

    def advance(self, new: Array, limit: float) -> None:
        """Prices what is below a limit.

        Args:
            limit: seconds.
        """
        later = self.seconds >= limit
        self.waiting, self.seconds = self.waiting[later], self.seconds[later]
        for start in range(0, len(new), AT_ONCE):
            pairs = self.entries.pairs(new[start : start + AT_ONCE], self.best.limit)
            if (placed := self.pricer.near(self.entries, pairs)) is not None:
                self.near.append(placed)
        near, self.near = self.near, []
        waiting, self.placed = self.placed, []
        for placed in waiting:
            self._price(placed, limit)
        for placed_near in near:
            if len(placed := placed_near.below(self.best.limit)):
                ready = int((placed.least < limit).sum())
                self.near.append(placed.after(ready))
                self._price(self.pricer.bounded(self.entries, placed.first(ready)), limit)

    def _price(self, placed: Placed, limit: float) -> None:
        """Prices what is below a limit, the least bounds first; the rest waits."""
        size = NEAREST
        while len(placed := placed.below(self.best.limit)):
            count = min(size, int((placed.least < limit).sum()))
            if not count:
                self.placed.append(placed)
                return
            self.pricer.price_placed(self.entries, placed.first(count), 1, None)
            placed, size = placed.after(count), size * MORE

    def close(self) -> None:
        """Counts what was not priced."""
        unfit = int(np.isinf(self.seconds).sum())
        taken = int(self.seen.sum()) - len(self.waiting)
        self.best.counts["memory"] += unfit
        self.best.counts["bound"] += len(self.entries) - unfit - taken


def explore(explorers: Sequence[Explorer], counts: Counts) -> None:
    """Prices all plans of large spaces on some numbers of devices that no bound excludes, where
    some are soon found that may fit; explorers then leave them out.
    """
    limit = min((explorer.least_seconds(counts) for explorer in explorers), default=np.inf)
    if not np.isfinite(limit) or all(explorer.too_large(counts) for explorer in explorers):
        return
    fronts, fresh_entries = dict[int, Front](), list[tuple[float, int, Array]]()
    farthest = limit * FARTHEST
    while sum(len(new) for *_, new in fresh_entries) < ENOUGH:
        seen = _below(fronts, limit)
        if seen >= HOPELESS or not limit < farthest:
            return
        limit *= STEP if seen else GROWTH
        fresh_entries = _new(explorers, counts, fronts, limit)
    best, previous = explorers[0].best, np.inf
    while limit != previous:
        previous = limit
        for _, number, new in sorted(fresh_entries, key=lambda entry: entry[:2]):
            fronts[number].advance(new, limit)
        if not np.isfinite(best.seconds) and _below(fronts, limit) >= HOPELESS:
            return
        limit = min(limit * STEP, best.limit) if limit < best.limit else limit
        fresh_entries = _new(explorers, counts, fronts, limit)
    for explorer in explorers:
        explorer.leave_out(counts, fronts)
    for front in fronts.values():
        front.close()


def _below(fronts: Mapping[int, Front], limit: float) -> int:
    """How many entries are below a limit."""
    return sum(len(front.entries.below(limit)[0]) for front in fronts.values())


def _new(
    explorers: Sequence[Explorer], counts: Counts, fronts: dict[int, Front], limit: float
) -> list[tuple[float, int, Array]]:
    """(least bound, identity of the space, entries) of what is below a limit; spaces of which
    something may be are added to the fronts.
    """
    for explorer in explorers:
        for entries in explorer.large(counts, limit):
            if id(entries) not in fronts:
                fronts[id(entries)] = Front(
                    entries=entries, pricer=explorer.pairs, best=explorer.best
                )
    return [
        (minimum, number, new)
        for number, front in fronts.items()
        for new, minimum in [front.new(limit)]
    ]
