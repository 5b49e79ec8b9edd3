"""What came of pricing: the fastest plan that fits, the minimum-memory plan, and the best of every
mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.pricing.totals import Totals
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.offers.landscape import Landscape
from shardlib.planning.offers.offer import Block, Least, Offer
from shardlib.planning.offers.ranking import Ranking
from shardlib.propagation.assignment import Choice

Array = np.ndarray
#: (mesh, microbatches, order of the axes): the places that rows of a ranking stand for.
Place = tuple[MeshShape, int, tuple[str, ...]]


@dataclass
class Best:
    """What a search has seen so far.

    Attributes:
        seconds, fastest: of the fastest plan that fits.
        minimum_memory_bytes, minimum_memory: of the minimum-memory plan.
        chosen: seconds of `fastest`; ties go to simpler plans, so it may be above the least by
            rounding.
        by_mesh: the fastest plan of every mesh that was priced, or the minimum-memory plan where
            none fits: (seconds, bytes, candidate); seconds are infinite where it does not fit.
        counts: plans by outcome.
        landscape: of what was priced: of every place the fastest plan and the leanest.
    """

    seconds: float = np.inf
    fastest: Candidate | None = None
    minimum_memory_bytes: float = np.inf
    minimum_memory: Candidate | None = None
    chosen: float = np.inf
    by_mesh: dict[MeshShape, tuple[float, float, Candidate]] = field(
        default_factory=dict[MeshShape, tuple[float, float, Candidate]]
    )
    counts: dict[str, int] = field(
        default_factory=lambda: {"priced": 0, "memory": 0, "indivisible": 0, "bound": 0}
    )
    landscape: Landscape[Candidate] = field(default_factory=Landscape[Candidate])

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is neither faster than the fastest nor as fast."""
        return self.seconds * (1 + 1e-9)


class Seen:
    """The fastest plan that fits and the leanest, for each candidate of a block.

    Args:
        best: takes the results.
        rows: takes the candidates, where a ranking speaks of them.
        block: the candidates.
        capacity: usable bytes of a device.
        reach: plans slower than so many times the fastest are of no interest.
        ranking: takes every plan that fits.
    """

    def __init__(
        self,
        best: Best,
        rows: list[Place],
        block: Block,
        capacity: float,
        reach: float,
        ranking: Ranking[Candidate] | None,
    ) -> None:
        self._best, self._block, self._capacity, self._ranking, self._reach = (
            best,
            block,
            capacity,
            ranking,
            reach,
        )
        size = len(block.c)
        self._offers: list[Offer] = []
        self._fast, self._minimum_memory, self._peak = Least(size), Least(size), np.zeros(size)
        self._lean_seconds = np.zeros(size)
        self._offset = len(rows)
        if ranking is not None:
            rows += [
                (mesh, int(micro), order)
                for (mesh, order, _), micro in zip(block.places, block.c.micro, strict=True)
            ]

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is of no interest."""
        return self._best.limit * self._reach

    @property
    def choices(self) -> list[tuple[Choice, bool]]:
        """What the numbers of choices of offers stand for."""
        return self._block.choices

    @property
    def ranks(self) -> bool:
        """Whether every plan that fits is wanted, and not the fastest alone."""
        return self._ranking is not None

    def skip(self, count: int) -> None:
        """Counts plans that cannot be, since something does not divide."""
        self._best.counts["indivisible"] += count

    def offer(self, offer: Offer, totals: Totals, candidates: Array) -> None:
        """Takes in prices of plans; `candidates` are positions in the block, of which one may have
        many rows.
        """
        fine = self._block.lowered(offer, candidates)
        if not fine.all():
            self.skip(int((~fine).sum()))
            offer, totals, candidates = offer.take(fine), totals.take(fine), candidates[fine]
        if not len(candidates):
            return
        seconds, peak, counts = totals.step_seconds, totals.peak_bytes, self._best.counts
        fits = peak <= self._capacity
        counts["priced"] += len(fits)
        counts["memory"] += int((~fits).sum())
        number = len(self._offers)
        self._offers.append(offer)
        fitting = np.flatnonzero(fits)
        if self._ranking is not None:
            self._rank(offer, fits, seconds, peak, candidates, self._ranking)
        if len(fitting):
            self._fast.take_in(number, offer, candidates[fitting], seconds[fitting], fitting)
            improved = np.flatnonzero(
                (self._fast.offers[candidates[fitting]] == number)
                & (self._fast.rows[candidates[fitting]] == fitting)
            )
            self._peak[candidates[fitting[improved]]] = peak[fitting[improved]]
            self._best.seconds = min(self._best.seconds, float(seconds[fitting].min()))
        positions = np.arange(len(peak))
        self._minimum_memory.take_in(number, offer, candidates, peak, positions)
        rows = np.flatnonzero(
            (self._minimum_memory.offers[candidates] == number)
            & (self._minimum_memory.rows[candidates] == positions)
        )
        self._lean_seconds[candidates[rows]] = seconds[rows]

    def _rank(
        self,
        offer: Offer,
        fits: Array,
        seconds: Array,
        peak: Array,
        candidates: Array,
        ranking: Ranking[Candidate],
    ) -> None:
        """Hands every plan that fits to a ranking, those with the same decisions together."""
        if offer.groups is not None:
            for rows in range(len(fits)):
                ranking.offer(
                    offer.candidate(rows, self.choices),
                    fits[rows : rows + 1],
                    seconds[rows : rows + 1],
                    peak[rows : rows + 1],
                    candidates[rows : rows + 1] + self._offset,
                )
            return
        layers = np.zeros(len(fits), dtype=np.int64) if offer.layers is None else offer.layers
        pairs, which = np.unique(
            np.stack([offer.choices, layers], axis=1), axis=0, return_inverse=True
        )
        for number in range(len(pairs)):
            rows = np.flatnonzero(which.reshape(-1) == number)
            ranking.offer(
                offer.candidate(int(rows[0]), self.choices),
                fits[rows],
                seconds[rows],
                peak[rows],
                candidates[rows] + self._offset,
            )

    def close(self) -> None:
        """Hands over the results."""
        fast, minimum_memory = self._fast, self._minimum_memory
        noted = np.flatnonzero(minimum_memory.offers >= 0)
        for row in noted:
            mesh, order, _ = self._block.places[row]
            place = mesh, int(self._block.c.micro[row]), order
            leanest_candidate = self._offers[int(minimum_memory.offers[row])].candidate(
                int(minimum_memory.rows[row]), self.choices
            )
            leanest = leanest_candidate.on(*place)
            fastest = (
                self._offers[int(fast.offers[row])]
                .candidate(int(fast.rows[row]), self.choices)
                .on(*place)
                if fast.offers[row] >= 0
                else leanest
            )
            self._note(
                fastest,
                leanest,
                float(fast.values[row]),
                float(self._peak[row]),
                float(minimum_memory.values[row]),
            )
            lean = float(minimum_memory.values[row])
            self._best.landscape.note(
                leanest, float(self._lean_seconds[row]), lean, fits=lean <= self._capacity
            )

    def _note(
        self,
        fastest: Candidate,
        minimum_memory: Candidate,
        seconds: float,
        peak: float,
        fewest_bytes: float,
    ) -> None:
        best = self._best
        fits = np.isfinite(seconds)
        leanest = best.minimum_memory
        if fewest_bytes < best.minimum_memory_bytes * (1 - 1e-9) or (
            leanest is not None
            and leanest.decisions == minimum_memory.decisions
            and _before(fewest_bytes, minimum_memory, best.minimum_memory_bytes, leanest)
        ):
            best.minimum_memory_bytes, best.minimum_memory = fewest_bytes, minimum_memory
        if fits and (best.fastest is None or _before(seconds, fastest, best.chosen, best.fastest)):
            best.chosen, best.fastest = seconds, fastest
        if fits:
            best.landscape.note(fastest, seconds, peak, fits=True)
        entry = seconds, peak if fits else fewest_bytes, fastest
        previous = best.by_mesh.get(fastest.mesh)
        if previous is None or entry[:2] < previous[:2]:
            best.by_mesh[fastest.mesh] = entry


def _before(
    seconds: float, candidate: Candidate, incumbent_seconds: float, incumbent: Candidate
) -> bool:
    """Whether a plan comes before another: faster, or as fast and simpler."""
    if abs(seconds - incumbent_seconds) > 1e-9 * max(seconds, incumbent_seconds):
        return seconds < incumbent_seconds
    return candidate.simplicity() < incumbent.simplicity()
