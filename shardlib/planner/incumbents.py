"""Prices of rows with all layer groups alike, over ZeRO, schedule, remat and offload, and the
incumbents of a search. Every price is an `Offer`; the best offers are kept as incumbents, and all
of them, on request, in a ranking.

A `Landscape` is what a search priced, thinned to a few points that show where the others lie.

>>> from shardlib.planner.incumbents import Landscape
>>> seen = Landscape[str]()
>>> for name, seconds, size in (("a", 1.0, 9.0), ("b", 1.001, 9.0), ("c", 2.0, 3.0)):
...     seen.note(name, seconds, size, fits=True)
>>> [point.what for point in seen.points(10)]  # "b" is "a" but for a thousandth
['a', 'c']

A `Ranking` has the plans after the fastest. A search keeps the best plan of each mesh; a ranking
keeps the price of every plan that fits, in the order of their times. Equally fast plans come in the
order of their simplicity, as in a search.

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

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from shardlib.cost.pricing import Totals
from shardlib.cost.stages import Candidates, Sums
from shardlib.cost.terms import ArrayTable
from shardlib.cost.variants import Each
from shardlib.decisions.lowerings import Gap, along, facts, lowered
from shardlib.decisions.table import Decisions
from shardlib.layout import MeshShape
from shardlib.machines.topology import Placement
from shardlib.planner.bounds import Kind, Tick
from shardlib.planner.stored import Candidate, by_group
from shardlib.propagation.colours import Choice
from shardlib.report.elements import TIE

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison


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


# --------------------------------------------------------------------------------------------------
# Offers: prices of many rows under the same decisions, and the least of them by candidate.


@dataclass(frozen=True, kw_only=True)
class Block:
    """Candidates that are priced together.

    Attributes:
        places: (mesh, order, placement) of each.
        c: the candidates.
        choices: the choices that prices speak of, with whether tokens are routed.
        gaps: what has no lowering, and is not a plan whatever it costs.
    """

    places: list[tuple[MeshShape, tuple[str, ...], Placement]]
    c: Candidates
    choices: list[tuple[Choice, bool]]
    gaps: tuple[Gap, ...] = ()

    def lowered(self, offer: Offer, candidates: Array) -> Array:
        """Returns the rows of an offer that have a lowering."""
        stages = {"stage": self.c.sizes["stage"][candidates]}
        return lowered(facts(offer.decisions), along(stages), self.gaps)


@dataclass(frozen=True, kw_only=True)
class Offer(ArrayTable):
    """The decisions that priced rows stand for.

    Attributes:
        decisions: of all rows, but for what follows, meshes and microbatches.
        choices: number of each row's choice, see `Block.choices`.
        layers: how many layers of each row are rematerialised; None where all are.
        groups: the policies of layer groups by row, see `Candidate`; None where all groups are
            alike.
    """

    decisions: Decisions
    choices: Array
    layers: Array | None = None
    groups: list[Each] | None = None

    def but(self, **changes: object) -> Offer:
        """The same rows under other decisions."""
        return replace(self, decisions=replace(self.decisions, **changes))

    def candidate(self, row: int, choices: list[tuple[Choice, bool]]) -> Candidate:
        """The decisions of one row, on no mesh yet."""
        choice, routes = choices[int(self.choices[row])]
        if self.groups is not None:
            policy, layers = by_group(self.groups[row])
            each = self.groups[row]
        else:
            policy, each = self.decisions.remat, ()
            layers = 0 if self.layers is None else int(self.layers[row])
        return Candidate(
            decisions=replace(self.decisions, remat=policy, remat_layers=layers),
            choice=choice,
            groups=each,
            routes=routes,
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
        """Takes in an offer."""
        choices = offer.choices[rows]
        previous = self.values[candidates]
        better = (values < previous * (1 - TIE)) | (
            (values <= previous * (1 + TIE))
            & (choices < self._choices[candidates])
            & np.isfinite(values)
        )
        improved = np.flatnonzero(better)
        if not len(improved):
            return
        improved = improved[
            _first_choices(candidates[improved], values[improved], choices[improved])
        ]
        into = candidates[improved]
        self.values[into], self.offers[into], self.rows[into], self._choices[into] = (
            values[improved],
            number,
            rows[improved],
            choices[improved],
        )


def _first_choices(candidates: Array, values: Array, choices: Array) -> Array:
    """For each candidate the position of the row with the first choice among those whose value is
    the least, but for rounding; ascending by candidate.

    A candidate may have many rows, and values that should be equal differ in their last digits. So
    rows are sorted twice: by value, to know the least of each candidate and which rows are within
    a tie of it; then those by choice, to take the first.

    >>> candidates, choices = np.array([4, 4, 4, 9]), np.array([2, 1, 0, 5])
    >>> _first_choices(candidates, np.array([1.0, 1.0 + 1e-12, 3.0, 2.0]), choices)
    array([1, 3])
    """
    order = np.lexsort((choices, values, candidates))
    minima = values[order][_runs(candidates[order])]
    order = order[values[order] <= minima * (1 + TIE)]
    order = order[np.lexsort((choices[order], candidates[order]))]
    return order[np.unique(_runs(candidates[order]))]


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


# --------------------------------------------------------------------------------------------------
# Incumbents: the fastest plan that fits, the minimum-memory plan, and the best of every mesh.

Array = np.ndarray
#: (mesh, microbatches, order of the axes): the places that rows of a ranking stand for.
Place = tuple[MeshShape, int, tuple[str, ...]]


@dataclass
class Best:
    """The best plans that a search has priced so far.

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
        """The choices that the numbers in offers refer to."""
        return self._block.choices

    @property
    def ranks(self) -> bool:
        """True if every plan that fits is wanted, and not the fastest alone."""
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
    """Returns whether a plan comes before another: faster, or as fast and simpler."""
    if abs(seconds - incumbent_seconds) > 1e-9 * max(seconds, incumbent_seconds):
        return seconds < incumbent_seconds
    return candidate.simplicity() < incumbent.simplicity()


# --------------------------------------------------------------------------------------------------
# Rows: candidates under choices of colours, with the quantities that prices are made of.


@dataclass(frozen=True, kw_only=True)
class Rows(ArrayTable):
    """Candidates under choices.

    Attributes:
        candidates: position of each row's candidate in its block.
        choices: number of each row's choice.
        c: the candidates of the rows.
        sums: by remat policy, quantities.
        ticks: by remat policy, bounds for a microbatch; also of `EACH` where layer groups may
            differ.
        kinds: bounds of what fits by kind of plans, as far as they are known.
    """

    candidates: Array
    choices: Array
    c: Candidates
    sums: dict[str, Sums]
    ticks: dict[str, Tick]
    kinds: Mapping[Kind, Array]

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, which: Array) -> Rows:
        """Some of the rows, by ascending position."""
        return self if len(which) == len(self) else super().take(which)

    def below(
        self,
        zeros: Iterable[int],
        breadth_first: Iterable[bool],
        gathers: Iterable[str],
        limit: float,
    ) -> Array:
        """Rows that may have a plan faster than a limit that fits, boolean array [rows].

        Args:
            limit: seconds.
        """
        if not self.kinds:
            return np.ones(len(self), dtype=bool)
        kinds = itertools.product(zeros, breadth_first, gathers)
        return np.logical_or.reduce(
            [
                np.zeros(len(self), dtype=bool),
                *(self.kinds[kind] < limit for kind in kinds if kind in self.kinds),
            ]
        )
