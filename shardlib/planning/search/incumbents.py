"""What came of pricing: the fastest plan that fits, the leanest, and the best of every mesh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.totals import Totals
from shardlib.cost.pricing.variants.mixed_remat import Each
from shardlib.cost.terms.knobs import Knobs
from shardlib.hardware.placement import Placement
from shardlib.planning.decisions.candidate import Decision, What, by_class
from shardlib.planning.decisions.dtypes import Dtypes
from shardlib.planning.search.ranking import Ranking
from shardlib.planning.units.quantity import TIE
from shardlib.propagation.assignment import Choice

Array = np.ndarray


@dataclass
class Best:
    """What a search has seen so far.

    Attributes:
        seconds, decision: of the fastest plan that fits.
        lean_bytes, lean: of the leanest plan.
        chosen: seconds of `decision`; ties go to simpler plans, so it may be above the least by
            rounding.
        by_mesh: the fastest plan of every mesh that was priced, or the leanest where none fits:
            (seconds, bytes, decision); seconds are infinite where it does not fit.
        counts: plans by outcome.
    """

    seconds: float = np.inf
    decision: Decision | None = None
    lean_bytes: float = np.inf
    lean: Decision | None = None
    chosen: float = np.inf
    by_mesh: dict[MeshShape, tuple[float, float, Decision]] = field(
        default_factory=dict[MeshShape, tuple[float, float, Decision]]
    )
    counts: dict[str, int] = field(
        default_factory=lambda: {"priced": 0, "memory": 0, "indivisible": 0, "bound": 0}
    )


@dataclass(frozen=True, kw_only=True)
class Block:
    """Candidates that are priced together.

    Attributes:
        places: (mesh, order, placement) of each.
        c: the candidates.
        choices: the choices that prices speak of, with whether tokens are routed.
        dtypes: of all plans, see `What`.
    """

    places: list[tuple[MeshShape, tuple[str, ...], Placement]]
    c: Candidates
    choices: list[tuple[Choice, bool]]
    dtypes: Dtypes = ()


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The decisions that priced rows stand for.

    Attributes:
        policy, how: of all rows.
        choices: number of each row's choice, see `Block.choices`.
        recomputed: layers that each row recomputes, see `What`; None where all do.
        classes: the policies of classes by row, see `What`; None where all classes are alike.
    """

    policy: str
    how: Knobs
    choices: Array
    recomputed: Array | None = None
    classes: list[Each] | None = None

    def take(self, which: Array) -> Offer:
        """Some of the rows."""
        return replace(
            self,
            choices=self.choices[which],
            recomputed=None if self.recomputed is None else self.recomputed[which],
            classes=None if self.classes is None else [self.classes[i] for i in which],
        )

    def what(self, at: int, choices: list[tuple[Choice, bool]]) -> What:
        """The decisions of one row."""
        choice, routes = choices[int(self.choices[at])]
        if self.classes is not None:
            policy, number = by_class(self.classes[at])
            return What(
                policy=policy,
                how=self.how,
                choice=choice,
                routes=routes,
                recomputed=number,
                classes=self.classes[at],
            )
        return What(
            policy=self.policy,
            how=self.how,
            choice=choice,
            routes=routes,
            recomputed=0 if self.recomputed is None else int(self.recomputed[at]),
        )


def _runs(values: Array) -> Array:
    """Position of the first of each run of equal values, for every value."""
    return np.maximum.accumulate(
        np.where(np.concatenate(([True], values[1:] != values[:-1])), np.arange(len(values)), 0)
    )


class Least:
    """The least of some quantity for each candidate of a block, with the offer that has it; of
    equal ones the first choice, then the first offer.

    Args:
        size: number of candidates.
    """

    def __init__(self, size: int) -> None:
        self.values, self.offers, self.rows, self._choices = (
            np.full(size, np.inf),
            np.full(size, -1),
            np.zeros(size, dtype=np.int64),
            np.zeros(size, dtype=np.int64),
        )

    def take_in(
        self, number: int, offer: Offer, candidates: Array, values: Array, rows: Array
    ) -> None:
        """Takes in an offer.

        Args:
            number: of the offer.
            offer: whose choices break ties.
            candidates: position in the block of each row.
            values: the quantity.
            rows: position in the offer.
        """
        choices = offer.choices[rows]
        known = self.values[candidates]
        better = (values < known * (1 - TIE)) | (
            (values <= known * (1 + TIE))
            & (choices < self._choices[candidates])
            & np.isfinite(values)
        )
        at = np.flatnonzero(better)
        if not len(at):
            return
        at = at[np.lexsort((choices[at], values[at], candidates[at]))]
        least = values[at][_runs(candidates[at])]
        at = at[values[at] <= least * (1 + TIE)]
        at = at[np.lexsort((choices[at], candidates[at]))]
        at = at[np.unique(_runs(candidates[at]))]
        into = candidates[at]
        self.values[into], self.offers[into], self.rows[into], self._choices[into] = (
            values[at],
            number,
            rows[at],
            choices[at],
        )


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

    def __init__(
        self,
        best: Best,
        rows: list[tuple[MeshShape, int, tuple[str, ...]]],
        block: Block,
        capacity: float,
        reach: float,
        ranking: Ranking[What] | None,
        *,
        settles: bool = True,
    ) -> None:
        self._best, self._block, self._capacity, self._ranking, self._reach, self._settles = (
            best,
            block,
            capacity,
            ranking,
            reach,
            settles,
        )
        size = len(block.c)
        self._by_row = np.full((len(block.choices), size), np.inf)
        self._offers: list[Offer] = []
        self._fast, self._lean, self._peak = Least(size), Least(size), np.zeros(size)
        self._offset = len(rows)
        if ranking is not None:
            rows += [
                (mesh, int(micro), order)
                for (mesh, order, _), micro in zip(block.places, block.c.micro, strict=True)
            ]

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is of no interest."""
        return self._best.seconds * self._reach

    @property
    def choices(self) -> list[tuple[Choice, bool]]:
        """What the numbers of choices of offers stand for."""
        return self._block.choices

    @property
    def ranks(self) -> bool:
        """Whether every plan that fits is wanted, and not the fastest alone."""
        return self._ranking is not None

    @property
    def settles(self) -> bool:
        """Whether prices are those of plans, and not bounds of them."""
        return self._settles

    def at_least(self, choices: Array, candidates: Array, seconds: Array) -> None:
        """Takes in bounds of plans that fit, in the place of their prices."""
        np.minimum.at(self._by_row, (choices, candidates), seconds)

    def skip(self, count: int) -> None:
        """Counts plans that cannot be, since something does not divide."""
        self._best.counts["indivisible"] += count

    def offer(self, offer: Offer, totals: Totals, candidates: Array) -> None:
        """Takes in prices of plans; `candidates` are positions in the block, of which one may have
        many rows.
        """
        seconds, peak, counts = totals.step_seconds, totals.peak_bytes, self._best.counts
        fits = peak <= self._capacity
        counts["priced"] += len(fits)
        counts["memory"] += int((~fits).sum())
        number = len(self._offers)
        self._offers.append(offer)
        at = np.flatnonzero(fits)
        if self._ranking is not None:
            self._rank(offer, fits, seconds, peak, candidates, self._ranking)
        if len(at):
            self._fast.take_in(number, offer, candidates[at], seconds[at], at)
            mine = np.flatnonzero(
                (self._fast.offers[candidates[at]] == number)
                & (self._fast.rows[candidates[at]] == at)
            )
            self._peak[candidates[at[mine]]] = peak[at[mine]]
            if self._settles:
                self._best.seconds = min(self._best.seconds, float(seconds[at].min()))
            else:
                np.minimum.at(self._by_row, (offer.choices[at], candidates[at]), seconds[at])
        every = np.arange(len(peak))
        self._lean.take_in(number, offer, candidates, peak, every)

    def _rank(
        self,
        offer: Offer,
        fits: Array,
        seconds: Array,
        peak: Array,
        candidates: Array,
        ranking: Ranking[What],
    ) -> None:
        """Hands every plan that fits to a ranking, those with the same decisions together."""
        if offer.classes is not None:
            for at in range(len(fits)):
                ranking.offer(
                    self._what(offer, at),
                    fits[at : at + 1],
                    seconds[at : at + 1],
                    peak[at : at + 1],
                    candidates[at : at + 1] + self._offset,
                )
            return
        recomputed = (
            np.zeros(len(fits), dtype=np.int64) if offer.recomputed is None else offer.recomputed
        )
        pairs, which = np.unique(
            np.stack([offer.choices, recomputed], axis=1), axis=0, return_inverse=True
        )
        for number in range(len(pairs)):
            at = np.flatnonzero(which.reshape(-1) == number)
            ranking.offer(
                self._what(offer, int(at[0])),
                fits[at],
                seconds[at],
                peak[at],
                candidates[at] + self._offset,
            )

    def _what(self, offer: Offer, at: int) -> What:
        """The decisions of one row of an offer."""
        what = offer.what(at, self._block.choices)
        return replace(what, dtypes=self._block.dtypes) if self._block.dtypes else what

    def close(self) -> Array:
        """Hands over the results; prices that do not settle anything count only where nothing fits.

        Returns:
            Where prices do not settle anything, seconds of the fastest plan that fits, by choice
            and candidate.
        """
        fast, lean = self._fast, self._lean
        noted = np.flatnonzero((lean.offers >= 0) & (self._settles | ~np.isfinite(fast.values)))
        for row in noted:
            mesh, order, _ = self._block.places[row]
            least = self._what(self._offers[int(lean.offers[row])], int(lean.rows[row]))
            what = (
                self._what(self._offers[int(fast.offers[row])], int(fast.rows[row]))
                if fast.offers[row] >= 0
                else least
            )
            decision = Decision(
                mesh=mesh,
                micro=int(self._block.c.micro[row]),
                what=settled(what, mesh),
                order=order,
            )
            self._note(
                decision,
                replace(decision, what=settled(least, mesh)),
                float(fast.values[row]),
                float(self._peak[row]),
                float(lean.values[row]),
            )
        return self._by_row

    def _note(
        self, decision: Decision, lean: Decision, seconds: float, peak: float, least: float
    ) -> None:
        best = self._best
        fits = np.isfinite(seconds)
        if least < best.lean_bytes * (1 - 1e-9):
            best.lean_bytes, best.lean = least, lean
        if fits and (
            best.decision is None or _before(seconds, decision, best.chosen, best.decision)
        ):
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
    how = what.how if "context" in mesh else replace(what.how, context="all-gather")
    return replace(
        what,
        choice=choice,
        how=how if "stage" in mesh else replace(how, schedule="none", virtual=1, accumulation=1),
    )
