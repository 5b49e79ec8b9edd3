"""What came of pricing: the fastest plan that fits, the leanest, and the best of every mesh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.candidates import Candidates
from shardlib.cost.pricing import Totals
from shardlib.hardware.placement import Placement
from shardlib.planning.decision import Decision, What
from shardlib.planning.ranking import Ranking

Array = np.ndarray


@dataclass
class Best:
    """What a search has seen so far.

    Attributes:
        seconds, decision: of the fastest plan that fits.
        lean_bytes, lean: of the leanest plan.
        chosen: seconds of `decision`; ties go to simpler plans, so it may be above the least by rounding.
        by_mesh: the fastest plan of every mesh that was priced, or the leanest where none fits: (seconds, bytes, decision); seconds are infinite where it does not fit.
        counts: plans by outcome.
    """

    seconds: float = np.inf
    decision: Decision | None = None
    lean_bytes: float = np.inf
    lean: Decision | None = None
    chosen: float = np.inf
    by_mesh: dict[MeshShape, tuple[float, float, Decision]] = field(default_factory=dict[MeshShape, tuple[float, float, Decision]])
    counts: dict[str, int] = field(default_factory=lambda: {"priced": 0, "memory": 0, "indivisible": 0, "bound": 0})


@dataclass(frozen=True, kw_only=True)
class Block:
    """Candidates that are priced together.

    Attributes:
        entries: index of each candidate in the space.
        places: (mesh, order, placement) of each.
        c: the candidates.
    """

    entries: Array
    places: list[tuple[MeshShape, tuple[str, ...], Placement]]
    c: Candidates


class Seen:
    """The fastest plan that fits and the leanest, for each candidate of a block.

    Args:
        best: takes the results.
        rows: takes the candidates, where a ranking speaks of them.
        block: the candidates.
        capacity: usable bytes of a device.
        reach: plans slower than so many times the fastest are of no interest.
        ranking: takes every plan that fits.
        settles: whether these are prices of plans, and not bounds of them.
    """

    def __init__(self, best: Best, rows: list[tuple[MeshShape, int, tuple[str, ...]]], block: Block, capacity: float, reach: float, ranking: Ranking[What] | None, *, settles: bool = True) -> None:
        self._best, self._block, self._capacity, self._ranking, self._reach, self._settles = best, block, capacity, ranking, reach, settles
        size = len(block.c)
        self._seconds, self._bytes, self._peak = np.full(size, np.inf), np.full(size, np.inf), np.zeros(size)
        self._fits: list[What | None] = [None] * size
        self._lean: list[What | None] = [None] * size
        self._offset = len(rows)
        if ranking is not None:
            rows += [(mesh, int(micro), order) for (mesh, order, _), micro in zip(block.places, block.c.micro, strict=True)]

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is of no interest."""
        return self._best.seconds * self._reach

    def offer(self, what: What, totals: Totals, legal: Array, rows: Array) -> None:
        """Takes in prices of the candidates `rows`, of which `legal` says which can be."""
        seconds, peak, counts = totals.step_seconds, totals.peak_bytes, self._best.counts
        fits = legal & (peak <= self._capacity)
        counts["priced"] += int(legal.sum())
        counts["memory"] += int((legal & ~fits).sum())
        counts["indivisible"] += int((~legal).sum())
        if self._ranking is not None:
            self._ranking.offer(what, fits, seconds, peak, rows + self._offset)
        for at in np.flatnonzero(fits & (seconds < self._seconds[rows] * (1 - 1e-9))):
            row = rows[at]
            self._seconds[row], self._peak[row], self._fits[row] = seconds[at], peak[at], what
        if self._settles and fits.any():
            least = float(seconds[fits].min())
            self._best.seconds = min(self._best.seconds, least)
        leaner = legal & (peak < self._bytes[rows] * (1 - 1e-9))
        if leaner.any():
            self._bytes[rows[leaner]] = peak[leaner]
            for row in rows[leaner]:
                self._lean[row] = what

    def close(self) -> Array:
        """Hands over the results; prices that do not settle anything count only where nothing fits.

        Returns:
            Seconds of the fastest plan that fits, by candidate.
        """
        for row, (mesh, order, _) in enumerate(self._block.places):
            what, lean = self._fits[row] or self._lean[row], self._lean[row]
            if what is None or lean is None or (self._fits[row] is not None and not self._settles):
                continue
            micro = int(self._block.c.micro[row])
            decision = Decision(mesh=mesh, micro=micro, what=settled(what, mesh), order=order)
            self._note(decision, replace(decision, what=settled(lean, mesh)), float(self._seconds[row]), float(self._peak[row]), float(self._bytes[row]))
        return self._seconds

    def _note(self, decision: Decision, lean: Decision, seconds: float, peak: float, least: float) -> None:
        best = self._best
        fits = np.isfinite(seconds)
        if least < best.lean_bytes * (1 - 1e-9):
            best.lean_bytes, best.lean = least, lean
        if fits and (best.decision is None or _before(seconds, decision, best.chosen, best.decision)):
            best.chosen, best.decision = seconds, decision
        entry = seconds, peak if fits else least, decision
        known = best.by_mesh.get(decision.mesh)
        if known is None or entry[:2] < known[:2]:
            best.by_mesh[decision.mesh] = entry


def _before(seconds: float, decision: Decision, other: float, known: Decision) -> bool:
    """Whether a plan comes before another: faster, or as fast and simpler."""
    if abs(seconds - other) > 1e-9 * max(seconds, other):
        return seconds < other
    return decision.simplicity() < known.simplicity()


def decided(what: What, row: tuple[MeshShape, int, tuple[str, ...]]) -> Decision:
    """The plan of a candidate."""
    mesh, micro, order = row
    return Decision(mesh=mesh, micro=micro, what=settled(what, mesh), order=order)


def settled(what: What, mesh: MeshShape) -> What:
    """The decisions as they are told: without what the mesh has no axis for."""
    choice = what.choice if "context" in mesh else replace(what.choice, context=None)
    how = what.how if "context" in mesh else replace(what.how, ring=False)
    return replace(what, choice=choice, how=how if "stage" in mesh else replace(how, schedule="none", virtual=1))
