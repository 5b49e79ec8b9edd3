"""Prices of rows over ZeRO, schedule, remat and offload, and the incumbents of a search.

A *row* is a candidate under a choice of colours. Rows that share most decisions are priced
together (`DecidedRows`); the best are kept as incumbents, and all, on request, in a ranking.

A `Landscape` is what a search priced, thinned to a few representative points.

>>> from shardlib.planner.incumbents import Landscape
>>> seen = Landscape[str]()
>>> for name, seconds, size in (("a", 1.0, 9.0), ("b", 1.001, 9.0), ("c", 2.0, 3.0)):
...     seen.add(name, seconds, size, fits=True)
>>> [point.decisions for point in seen.points(10)]  # "a" and "b" differ by a thousandth
['a', 'c']

A search keeps the best plan of each mesh; a `Ranking` keeps the price of every plan that fits,
fastest first. Ties go to the simpler plan, as in a search.

>>> ranking = Ranking[str]()
>>> ranking.add("small", np.array([True, True]), np.array([3.0, 1.0]), np.array([5.0, 6.0]))
>>> ranking.add("large", np.array([True, False]), np.array([2.0, 0.5]), np.array([7.0, 9.0]))
>>> ordered = ranking.ordered(lambda decisions, index: decisions)
>>> [(entry.decisions, entry.index, entry.seconds) for entry in ordered]
[('small', 1, 1.0), ('large', 0, 2.0), ('small', 0, 3.0)]
>>> [(entry.decisions, entry.seconds, entry.peak_bytes) for entry in ranking.pareto_front()]
[('small', 1.0, 6.0), ('small', 3.0, 5.0)]
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from shardlib.cost.pricing import Totals, combine, exposed, least_bytes, least_seconds
from shardlib.cost.stages import Meshes, Plans, StepCosts, step_costs
from shardlib.cost.tables import MeasureValues, Pricer
from shardlib.cost.terms import ArrayTable, LazyTable
from shardlib.cost.variants import (
    NO_REMAT,
    Corner,
    Pattern,
    PolicyTallies,
    RematLayers,
    best_mixture,
    corner_tallies,
    corners,
    interpolated,
    offloaded,
    partly_rematerialised,
    patterns,
    rematerialised_share,
)
from shardlib.decisions.lowerings import Unsupported, facts_of_decisions, facts_of_mesh, lowerable
from shardlib.decisions.table import HOST_ARRAYS, Decisions
from shardlib.layout import MeshShape
from shardlib.machines.topology import Placement
from shardlib.planner.bounds import (
    BEST_PER_GROUP,
    MicrobatchBounds,
    PlanKind,
    message_seconds,
    pipeline_overhead,
    step_seconds,
)
from shardlib.planner.parts import Candidate
from shardlib.planner.space import Space
from shardlib.planner.workload import ModelTallies, Workload
from shardlib.propagation.colours import Choice
from shardlib.report.elements import TIE
from shardlib.schedules import Pipelines, named

Array = np.ndarray

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison


#: Decisions of a plan.
Decided = TypeVar("Decided")
#: Grid cells per factor of e in time and in memory: plans within 1.6% are one point.
GRAIN = 64.0


@dataclass(frozen=True, kw_only=True)
class LandscapePoint(Generic[Decided]):
    """The decisions of a plan with its step time and peak bytes per device."""

    decisions: Decided
    seconds: float
    peak_bytes: float
    fits: bool


class Landscape(Generic[Decided]):
    """The fastest of each group of priced plans that cost about the same. Which plans it keeps does
    not depend on wall-clock time.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, bool], LandscapePoint[Decided]] = {}

    def add(self, decisions: Decided, seconds: float, peak_bytes: float, *, fits: bool) -> None:
        """Records a plan."""
        if not (0 < seconds < math.inf and 0 < peak_bytes < math.inf):
            return
        cell = round(GRAIN * math.log(seconds)), round(GRAIN * math.log(peak_bytes)), fits
        previous = self._cells.get(cell)
        if previous is None or (seconds, peak_bytes) < (previous.seconds, previous.peak_bytes):
            self._cells[cell] = LandscapePoint(
                decisions=decisions, seconds=seconds, peak_bytes=peak_bytes, fits=fits
            )

    def points(self, count: int) -> tuple[LandscapePoint[Decided], ...]:
        """The Pareto front of plans that fit, and points spread over all others, fastest first."""
        ordered = sorted(self._cells.values(), key=lambda p: (p.seconds, p.peak_bytes))
        thinned = pareto_front(ordered)[:count]
        grain = GRAIN
        while grain >= 1:
            more = _thinned(ordered, grain)
            if len(more) + len(thinned) <= count:
                thinned += [point for point in more if point not in thinned]
                break
            grain /= 2
        return tuple(sorted(thinned, key=lambda p: (p.seconds, p.peak_bytes)))


def pareto_front(points: Iterable[LandscapePoint[Decided]]) -> list[LandscapePoint[Decided]]:
    """The plans that fit and need less memory than every faster one; `points` come fastest
    first.
    """
    pareto: list[LandscapePoint[Decided]] = []
    for point in points:
        if point.fits and (not pareto or point.peak_bytes < pareto[-1].peak_bytes):
            pareto.append(point)
    return pareto


def _thinned(
    points: Iterable[LandscapePoint[Decided]], grain: float
) -> list[LandscapePoint[Decided]]:
    """The first point of every cell."""
    cells: dict[tuple[int, int, bool], LandscapePoint[Decided]] = {}
    for point in points:
        cell = (
            round(grain * math.log(point.seconds)),
            round(grain * math.log(point.peak_bytes)),
            point.fits,
        )
        cells.setdefault(cell, point)
    return list(cells.values())


# --------------------------------------------------------------------------------------------------
# Prices of many rows under the same decisions, and their minimum by candidate.


@dataclass(frozen=True, kw_only=True)
class CandidateBlock:
    """Candidates that are priced together.

    Attributes:
        placements: (mesh, order, placement) of each candidate.
        choices: the choices to which `DecidedRows.choices` refers, each with True where tokens are
            routed.
        unsupported: combinations that cannot be lowered and are not plans, whatever they cost.
    """

    placements: list[tuple[MeshShape, tuple[str, ...], Placement]]
    meshes: Meshes
    choices: list[tuple[Choice, bool]]
    unsupported: tuple[Unsupported, ...] = ()

    def lowerable(self, decided: DecidedRows, candidates: Array) -> Array:
        """Mask of the rows that can be lowered."""
        stages = {"stage": self.meshes.sizes["stage"][candidates]}
        return lowerable(
            facts_of_decisions(decided.decisions), facts_of_mesh(stages), self.unsupported
        )


def policy_and_layers(policies: RematLayers) -> tuple[str, int]:
    """The policy of the most rematerialised layers, and the number of all rematerialised layers."""
    return max(policies, key=lambda policy: policy[1])[0], sum(number for _, number in policies)


@dataclass(frozen=True, kw_only=True)
class DecidedRows(ArrayTable):
    """The decisions of priced rows.

    Attributes:
        decisions: shared by all rows, except for the attributes below, meshes and microbatches.
        choices: index of each row's choice, see `CandidateBlock.choices`.
        layers: number of rematerialised layers of each row; None for all layers.
        group_policies: policies of the layer groups by row, see `Candidate`; None where all groups
            share one.
    """

    decisions: Decisions
    choices: Array
    layers: Array | None = None
    group_policies: list[RematLayers] | None = None

    def replace(self, **changes: object) -> DecidedRows:
        """The same rows under other decisions."""
        return replace(self, decisions=replace(self.decisions, **changes))

    def candidate(self, row: int, choices: list[tuple[Choice, bool]]) -> Candidate:
        """The decisions of one row, without a mesh."""
        choice, routes = choices[int(self.choices[row])]
        if self.group_policies is not None:
            policy, layers = policy_and_layers(self.group_policies[row])
            policies = self.group_policies[row]
        else:
            policy, policies = self.decisions.remat, ()
            layers = 0 if self.layers is None else int(self.layers[row])
        return Candidate(
            decisions=replace(self.decisions, remat=policy, remat_layers=layers),
            choice=choice,
            group_policies=policies,
            routes=routes,
        )


def _runs(values: Array) -> Array:
    """For every value, the position of the first of its run of equal values."""
    return np.maximum.accumulate(
        np.where(np.concatenate(([True], values[1:] != values[:-1])), np.arange(len(values)), 0)
    )


class LeastByCandidate:
    """The least value of a quantity for each candidate of a block, and the row that has it.

    Ties go to the first choice, then to the rows that were recorded first.
    """

    def __init__(self, size: int) -> None:
        self.values = np.full(size, np.inf)
        self.decided = np.full(size, -1)
        self.rows = np.zeros(size, dtype=np.int64)
        self._choices = np.zeros(size, dtype=np.int64)

    def update(
        self, number: int, decided: DecidedRows, candidates: Array, values: Array, rows: Array
    ) -> None:
        """Updates the minima with rows that were recorded at index `number`."""
        choices = decided.choices[rows]
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
        self.values[into], self.decided[into], self.rows[into], self._choices[into] = (
            values[improved],
            number,
            rows[improved],
            choices[improved],
        )


def _first_choices(candidates: Array, values: Array, choices: Array) -> Array:
    """For each candidate, the position of the row with the first choice among the rows whose value
    is minimal up to rounding; ascending by candidate.

    A candidate may have many rows, and equal values may differ in their last digits. So rows are
    sorted twice: by value, to find the minimum of each candidate and the rows tied with it; then
    those by choice, to take the first.

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
class RankedEntry(Generic[Decided]):
    """The price of one plan.

    Attributes:
        decisions: its decisions other than mesh and microbatches.
        index: its mesh and microbatches, as a position among the candidates.
        seconds: predicted step time.
        peak_bytes: predicted bytes per device.
    """

    decisions: Decided
    index: int
    seconds: float
    peak_bytes: float


class Ranking(Generic[Decided]):
    """Prices of plans that fit, stored in blocks."""

    def __init__(self) -> None:
        self._decisions: list[Decided] = []
        self._indexes: list[np.ndarray] = []
        self._seconds: list[np.ndarray] = []
        self._peaks: list[np.ndarray] = []

    def add(
        self,
        decisions: Decided,
        fits: np.ndarray,
        seconds: np.ndarray,
        peak_bytes: np.ndarray,
        indexes: np.ndarray | None = None,
    ) -> None:
        """Adds a block.

        Args:
            indexes: index of each candidate; by default its position in the block.
        """
        fitting = np.flatnonzero(fits)
        if len(fitting):
            self._decisions.append(decisions)
            self._indexes.append(fitting if indexes is None else indexes[fitting])
            self._seconds.append(seconds[fitting])
            self._peaks.append(peak_bytes[fitting])

    def __len__(self) -> int:
        return sum(map(len, self._indexes))

    def _columns(self) -> tuple[Array, Array, Array, Array]:
        """Index of the block, index in it, seconds and bytes of every plan."""
        if not self._decisions:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, np.zeros(0), np.zeros(0)
        blocks = np.repeat(np.arange(len(self._decisions)), [len(block) for block in self._indexes])
        indexes = np.concatenate(self._indexes)
        return blocks, indexes, np.concatenate(self._seconds), np.concatenate(self._peaks)

    def _entries(
        self, columns: tuple[Array, Array, Array, Array], order: Array
    ) -> Iterator[RankedEntry[Decided]]:
        blocks, indexes, seconds, peaks = columns
        for i in order:
            yield RankedEntry(
                decisions=self._decisions[blocks[i]],
                index=int(indexes[i]),
                seconds=float(seconds[i]),
                peak_bytes=float(peaks[i]),
            )

    def pareto_front(self) -> Iterator[RankedEntry[Decided]]:
        """Plans that need less memory than every faster one, fastest first."""
        columns = self._columns()
        _, _, seconds, peaks = columns
        order = np.lexsort((peaks, seconds))
        minima = np.minimum.accumulate(np.concatenate(([np.inf], peaks[order])))[:-1]
        return self._entries(columns, order[peaks[order] < minima])

    def ordered(
        self, simplicity: Callable[[Decided, int], SupportsRichComparison]
    ) -> Iterator[RankedEntry[Decided]]:
        """All plans, fastest first; ties by ascending `simplicity(decisions, index)`."""
        columns = self._columns()
        seconds = columns[2]
        order = np.argsort(seconds, kind="stable")
        start, ascending = 0, seconds[order]
        while start < len(order):
            end = int(np.searchsorted(ascending, float(ascending[start]) * (1 + TIE), side="right"))
            tied = self._entries(columns, order[start:end])
            yield from sorted(tied, key=lambda entry: simplicity(entry.decisions, entry.index))
            start = end


# --------------------------------------------------------------------------------------------------
# Incumbents: the fastest plan that fits, the minimum-memory plan, and the best of every mesh.

#: (mesh, microbatches, order of the axes) of a row of a ranking.
RankedMesh = tuple[MeshShape, int, tuple[str, ...]]


@dataclass
class BestPlans:
    """The best plans that a search has priced so far.

    Attributes:
        seconds: least step time of a plan that fits.
        fastest: the fastest plan that fits.
        fastest_seconds: step time of `fastest`; ties go to simpler plans, so it may exceed
            `seconds` by rounding.
        by_mesh: (seconds, bytes, candidate) of the fastest plan of every mesh that was priced;
            where none fits, of the minimum-memory plan, with infinite seconds.
        counts: number by outcome: of plans that were priced or do not fit, and of entries that a
            bound excludes.
        landscape: the fastest and the minimum-memory plan of every candidate.
    """

    seconds: float = np.inf
    fastest: Candidate | None = None
    minimum_memory_bytes: float = np.inf
    minimum_memory: Candidate | None = None
    fastest_seconds: float = np.inf
    by_mesh: dict[MeshShape, tuple[float, float, Candidate]] = field(
        default_factory=dict[MeshShape, tuple[float, float, Candidate]]
    )
    counts: dict[str, int] = field(
        default_factory=lambda: {"priced": 0, "memory": 0, "indivisible": 0, "bound": 0}
    )
    landscape: Landscape[Candidate] = field(default_factory=Landscape[Candidate])

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is slower than the fastest one, beyond rounding."""
        return self.seconds * (1 + 1e-9)


class Incumbents:
    """The fastest plan that fits and the minimum-memory plan, for each candidate of a block.

    Args:
        best: receives the best plans.
        ranked_meshes: receives the mesh of each candidate of the block, where there is a ranking.
        capacity: usable bytes per device.
        slack: plans slower than `slack` times the fastest are discarded.
        ranking: receives every plan that fits.
    """

    def __init__(
        self,
        best: BestPlans,
        ranked_meshes: list[RankedMesh],
        block: CandidateBlock,
        capacity: float,
        slack: float,
        ranking: Ranking[Candidate] | None,
    ) -> None:
        self._best = best
        self._block = block
        self._capacity = capacity
        self._ranking = ranking
        self._slack = slack
        size = len(block.meshes)
        self._decided: list[DecidedRows] = []
        self._fastest, self._minimum_memory = LeastByCandidate(size), LeastByCandidate(size)
        self._peak = np.zeros(size)
        self._minimum_memory_seconds = np.zeros(size)
        self._offset = len(ranked_meshes)
        if ranking is not None:
            ranked_meshes += [
                (mesh, int(micro), order)
                for (mesh, order, _), micro in zip(
                    block.placements, block.meshes.micro, strict=True
                )
            ]

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is discarded."""
        return self._best.limit * self._slack

    @property
    def choices(self) -> list[tuple[Choice, bool]]:
        """The choices to which `DecidedRows.choices` refers."""
        return self._block.choices

    @property
    def ranks(self) -> bool:
        """True if every plan that fits is wanted, not only the fastest."""
        return self._ranking is not None

    def skip(self, count: int) -> None:
        """Counts plans that are illegal: something does not divide, or they cannot be lowered."""
        self._best.counts["indivisible"] += count

    def record(self, decided: DecidedRows, totals: Totals, candidates: Array) -> None:
        """Records prices; `candidates` are positions in the block, and one candidate may have many
        rows.
        """
        legal = self._block.lowerable(decided, candidates)
        if not legal.all():
            self.skip(int((~legal).sum()))
            decided, totals, candidates = decided.take(legal), totals.take(legal), candidates[legal]
        if not len(candidates):
            return
        seconds, peak, counts = totals.step_seconds, totals.peak_bytes, self._best.counts
        fits = peak <= self._capacity
        counts["priced"] += len(fits)
        counts["memory"] += int((~fits).sum())
        number = len(self._decided)
        self._decided.append(decided)
        fitting = np.flatnonzero(fits)
        if self._ranking is not None:
            self._rank(decided, fits, seconds, peak, candidates, self._ranking)
        if len(fitting):
            self._fastest.update(number, decided, candidates[fitting], seconds[fitting], fitting)
            improved = np.flatnonzero(
                (self._fastest.decided[candidates[fitting]] == number)
                & (self._fastest.rows[candidates[fitting]] == fitting)
            )
            self._peak[candidates[fitting[improved]]] = peak[fitting[improved]]
            self._best.seconds = min(self._best.seconds, float(seconds[fitting].min()))
        positions = np.arange(len(peak))
        self._minimum_memory.update(number, decided, candidates, peak, positions)
        rows = np.flatnonzero(
            (self._minimum_memory.decided[candidates] == number)
            & (self._minimum_memory.rows[candidates] == positions)
        )
        self._minimum_memory_seconds[candidates[rows]] = seconds[rows]

    def _rank(
        self,
        decided: DecidedRows,
        fits: Array,
        seconds: Array,
        peak: Array,
        candidates: Array,
        ranking: Ranking[Candidate],
    ) -> None:
        """Adds every plan that fits to a ranking, those with the same decisions together."""
        if decided.group_policies is not None:
            for row in range(len(fits)):
                ranking.add(
                    decided.candidate(row, self.choices),
                    fits[row : row + 1],
                    seconds[row : row + 1],
                    peak[row : row + 1],
                    candidates[row : row + 1] + self._offset,
                )
            return
        layers = np.zeros(len(fits), dtype=np.int64) if decided.layers is None else decided.layers
        pairs, numbers = np.unique(
            np.stack([decided.choices, layers], axis=1), axis=0, return_inverse=True
        )
        for number in range(len(pairs)):
            rows = np.flatnonzero(numbers.reshape(-1) == number)
            ranking.add(
                decided.candidate(int(rows[0]), self.choices),
                fits[rows],
                seconds[rows],
                peak[rows],
                candidates[rows] + self._offset,
            )

    def close(self) -> None:
        """Updates `best` with the minima of all candidates."""
        fastest_rows, minimum_memory = self._fastest, self._minimum_memory
        priced = np.flatnonzero(minimum_memory.decided >= 0)
        for number in priced:
            mesh, order, _ = self._block.placements[number]
            ranked_mesh = mesh, int(self._block.meshes.micro[number]), order
            smallest_candidate = self._decided[int(minimum_memory.decided[number])].candidate(
                int(minimum_memory.rows[number]), self.choices
            )
            smallest = smallest_candidate.on_mesh(*ranked_mesh)
            fastest = (
                self._decided[int(fastest_rows.decided[number])]
                .candidate(int(fastest_rows.rows[number]), self.choices)
                .on_mesh(*ranked_mesh)
                if fastest_rows.decided[number] >= 0
                else smallest
            )
            self._update_best(
                fastest,
                smallest,
                float(fastest_rows.values[number]),
                float(self._peak[number]),
                float(minimum_memory.values[number]),
            )
            size = float(minimum_memory.values[number])
            seconds = float(self._minimum_memory_seconds[number])
            self._best.landscape.add(smallest, seconds, size, fits=size <= self._capacity)

    def _update_best(
        self,
        fastest: Candidate,
        minimum_memory: Candidate,
        seconds: float,
        peak: float,
        least_bytes: float,
    ) -> None:
        best = self._best
        fits = np.isfinite(seconds)
        smallest = best.minimum_memory
        if least_bytes < best.minimum_memory_bytes * (1 - 1e-9) or (
            smallest is not None
            and smallest.decisions == minimum_memory.decisions
            and _before(least_bytes, minimum_memory, best.minimum_memory_bytes, smallest)
        ):
            best.minimum_memory_bytes, best.minimum_memory = least_bytes, minimum_memory
        if fits and (
            best.fastest is None or _before(seconds, fastest, best.fastest_seconds, best.fastest)
        ):
            best.fastest_seconds, best.fastest = seconds, fastest
        if fits:
            best.landscape.add(fastest, seconds, peak, fits=True)
        entry = seconds, peak if fits else least_bytes, fastest
        previous = best.by_mesh.get(fastest.mesh)
        if previous is None or entry[:2] < previous[:2]:
            best.by_mesh[fastest.mesh] = entry


def _before(
    seconds: float, candidate: Candidate, incumbent_seconds: float, incumbent: Candidate
) -> bool:
    """True if a plan comes before the incumbent: it is faster, or as fast and simpler."""
    if abs(seconds - incumbent_seconds) > 1e-9 * max(seconds, incumbent_seconds):
        return seconds < incumbent_seconds
    return candidate.simplicity() < incumbent.simplicity()


# --------------------------------------------------------------------------------------------------
# Rows: candidates under choices of colours, with the quantities from which prices are computed.


@dataclass(frozen=True, kw_only=True)
class CandidateRows(LazyTable):
    """Candidates under choices.

    Attributes:
        candidates: position of each row's candidate in its block.
        choices: index of each row's choice.
        meshes: the candidates, by row.
        quantities: by remat policy.
        bounds: bounds for one microbatch, by remat policy; also for `BEST_PER_GROUP` where layer
            groups may differ.
        kinds: bounds for plans that fit, by kind of plan, where they are known.
    """

    candidates: Array
    choices: Array
    meshes: Meshes
    quantities: dict[str, StepCosts]
    bounds: dict[str, MicrobatchBounds]
    kinds: Mapping[PlanKind, Array]

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, rows: Array) -> CandidateRows:
        """The rows at the given ascending positions."""
        return self if len(rows) == len(self) else super().take(rows)

    def may_beat(
        self,
        zeros: Iterable[int],
        breadth_first: Iterable[bool],
        gathers: Iterable[str],
        limit: float,
    ) -> Array:
        """Mask of the rows that may have a plan that fits and is faster than `limit` seconds."""
        if not self.kinds:
            return np.ones(len(self), dtype=bool)
        kinds = itertools.product(zeros, breadth_first, gathers)
        return np.logical_or.reduce(
            [
                np.zeros(len(self), dtype=bool),
                *(self.kinds[kind] < limit for kind in kinds if kind in self.kinds),
            ]
        )


#: Fields of `StepCosts` that only ever add to the step time.
_ADDITIVE: Mapping[str, tuple[str, ...]] = {
    "kernels": ("compute", "host"),
    "collectives": ("block", "context", "reduce", "scatter", "gather"),
}


@dataclass(frozen=True, kw_only=True)
class PricingInputs:
    """Inputs of pricing: the model, the space, the machine, and the usable bytes per device."""

    workload: Workload
    space: Space
    pricer: Pricer
    capacity: float

    def plans(self, decisions: Decisions, meshes: Meshes) -> Plans:
        """Candidates under the same decisions."""
        return Plans(
            decisions=decisions, model=self.workload.model, pricer=self.pricer, meshes=meshes
        )

    @cached_property
    def offloads(self) -> list[tuple[str, ...]]:
        """The non-empty sets of arrays that may be offloaded; none where offload is pinned."""
        pinned = self.space.pins.offload
        if self.pricer.topology.chip.host_bytes_per_s <= 0 or pinned is not None:
            return []
        options = (*((part,) for part in HOST_ARRAYS), HOST_ARRAYS)
        return [parts for parts in options if {*parts} <= {*self.space.limits.abilities.offload}]


# --------------------------------------------------------------------------------------------------
# Prices of plans whose layer groups follow different remat policies, or one policy in different
# numbers of their layers.
#
# Such plans are between *corners* (`shardlib.cost.variants`): steps whose layer groups each follow
# one policy in all their layers. Bounds from the quantities of single policies discard most rows;
# for the others all corners are priced. The (activation bytes, seconds) of every mixture are a
# weighted average of those of the corners, so a Lagrangian bound over the corners holds for all
# mixtures; where it does not discard a row, the best mixture is computed exactly.


def seconds_per_byte_saved(seconds: Array, sizes: Array) -> Array:
    """Seconds that each corner costs per byte that it saves, relative to the fastest corner: array
    [corners, rows]; 0 where it saves none.

    Args:
        seconds: per layer, [corners, rows].
        sizes: bytes per layer, [corners, rows].
    """
    fastest = np.argmin(seconds, axis=0)[None]
    slower = seconds - np.take_along_axis(seconds, fastest, axis=0)
    smaller = np.take_along_axis(sizes, fastest, axis=0) - sizes
    return np.where(smaller > 0, slower / np.where(smaller > 0, smaller, 1.0), 0.0)


def _joined(parts: Sequence[StepCosts]) -> StepCosts:
    """The concatenated candidates. A part with fewer memory points than the others repeats its
    first.
    """
    count = max(len(part.points) for part in parts)
    return StepCosts.joined(
        replace(part, points=(*part.points, *part.points[:1] * (count - len(part.points))))
        for part in parts
    )


@dataclass(frozen=True, kw_only=True)
class _PricedCorners(ArrayTable):
    """Rows under the same decisions, with the prices of their corners.

    Attributes:
        corners: prices by corner.
        candidates: position of each row's candidate in its block.
        meshes: the candidates, by row.
    """

    corners: Mapping[Corner, Totals]
    decided: DecidedRows
    candidates: Array
    meshes: Meshes

    def offloaded(self, parts: tuple[str, ...], pricer: Pricer) -> _PricedCorners:
        """The rows with some parts offloaded to host memory."""
        corners = {
            corner: offloaded(totals, parts, pricer, self.meshes)
            for corner, totals in self.corners.items()
        }
        return replace(
            self,
            corners=corners if parts else self.corners,
            decided=self.decided.replace(offload=parts),
        )


@dataclass(frozen=True, kw_only=True)
class MixturePricer(PricingInputs):
    """Prices mixtures of remat policies.

    Attributes:
        values: measures on all degrees.
        shardable: colours that some choice shards.
    """

    values: MeasureValues
    shardable: tuple[str, ...]

    def _promising(
        self,
        quantities: Mapping[str, StepCosts],
        meshes: Meshes,
        alternatives: Sequence[Decisions],
        incumbents: Incumbents,
    ) -> dict[Decisions, Array]:
        """Rows of which a mixture may be the best plan, by ZeRO stage and time of all-gathers.

        Where every layer group is fastest without rematerialisation, no mixture is faster than
        that, so that plan must be below the limit and not fit; then the bounds of `_mixture_bound`
        decide.
        """
        no_remat_fastest = np.logical_and.reduce(
            [
                (
                    getattr(getattr(costs, part), name)
                    >= getattr(getattr(quantities[NO_REMAT], part), name)
                ).all(0)
                for costs in quantities.values()
                for part, names in _ADDITIVE.items()
                for name in names
            ]
        )
        promising = ~no_remat_fastest | (
            least_seconds(quantities[NO_REMAT], self.plans(alternatives[0], meshes))
            < incumbents.limit
        )
        unfit: dict[Decisions, tuple[Array, Totals]] = {}
        for decisions in alternatives:
            legal = np.flatnonzero(promising & self.space.legal_zero(decisions.zero, meshes))
            no_remat = combine(
                quantities[NO_REMAT].take(legal), self.plans(decisions, meshes.take(legal))
            )
            undecided = np.flatnonzero(
                ~no_remat_fastest[legal]
                | (
                    (no_remat.step_seconds < incumbents.limit)
                    & (no_remat.peak_bytes > self.capacity)
                )
            )
            unfit[decisions] = legal[undecided], no_remat.take(undecided)
        rows = np.unique(np.concatenate([positions for positions, _ in unfit.values()]))
        if not len(rows):
            return {}
        quantities = {policy: costs.take(rows) for policy, costs in quantities.items()}
        meshes = meshes.take(rows)
        no_remat_fastest = no_remat_fastest[rows]
        additive = {
            corner: self._additive_quantities(corner, quantities)
            for corner in corners(self.space.policies, len(self.workload.layer_counts))
        }
        plans = self.plans(alternatives[0], meshes)
        minima = {
            corner: (least_seconds(costs, plans), costs.kernels.compute.sum(0))
            for corner, costs in additive.items()
        }
        promising_rows: dict[Decisions, Array] = {}
        for decisions, (own_rows, no_remat) in unfit.items():
            legal = np.searchsorted(rows, own_rows)
            selected = {
                corner: (seconds[legal], compute[legal])
                for corner, (seconds, compute) in minima.items()
            }
            bound = self._mixture_bound(
                {policy: costs.take(legal) for policy, costs in quantities.items()},
                selected,
                no_remat,
                no_remat_fastest[legal],
                self.plans(decisions, meshes.take(legal)),
            )
            promising_rows[decisions] = own_rows[bound < incumbents.limit]
        return promising_rows

    def _additive_quantities(
        self, corner: Corner, quantities: Mapping[str, StepCosts]
    ) -> StepCosts:
        """The quantities of a corner that `least_seconds` reads (no memory, no weight
        gradients).
        """
        counts = self.workload.layer_counts
        first = quantities[corner[0]]

        def weighted(part: str, name: str) -> Array:
            arrays: list[Array] = [
                getattr(getattr(quantities[policy], part), name) for policy in corner
            ]
            array_sum = sum(
                (
                    array * (count / sum(counts))
                    for array, count in zip(arrays, counts, strict=True)
                ),
                np.zeros(arrays[0].shape),
            )
            array_sum[: len(counts)] = [array[k] for k, array in enumerate(arrays)]
            return array_sum

        kernels, collectives = (
            {name: weighted(part, name) for name in names} for part, names in _ADDITIVE.items()
        )
        return replace(
            first,
            kernels=replace(first.kernels, **kernels),
            collectives=replace(first.collectives, **collectives),
        )

    def _mixture_bound(
        self,
        quantities: Mapping[str, StepCosts],
        minima: Mapping[Corner, tuple[Array, Array]],
        no_remat: Totals,
        no_remat_fastest: Array,
        plans: Plans,
    ) -> Array:
        """Lower bound on the seconds of mixtures that fit, by row.

        See `_lagrange`. A corner needs at least its stored bytes and what its layers save at the
        end of the forward pass, and hides no more extra communication than it has extra compute.

        Args:
            minima: by corner, the seconds of `least_seconds` and the seconds of kernels.
        """
        meshes, uniform = plans.meshes, (NO_REMAT,) * len(self.workload.layer_counts)
        first, compute = minima[uniform]
        # not counted by `least_seconds`: exposed communication, the optimizer, and fixed costs
        not_counted = np.where(no_remat_fastest, no_remat.step_seconds - first, 0.0)
        constant = no_remat.seconds["optimizer"] + self.pricer.efficiency.step_s
        stored, state, _ = least_bytes(quantities[NO_REMAT], plans)
        saves = {policy: least_bytes(costs, plans)[2] for policy, costs in quantities.items()}
        seconds: list[Array] = []
        sizes: list[Array] = []
        hidden_s: list[Array] = []
        for corner, (seconds_of_corner, compute_of_corner) in minima.items():
            extra_s = np.maximum(0.0, compute_of_corner - compute) * meshes.micro / meshes.stage
            seconds.append(seconds_of_corner + np.maximum(constant, not_counted - extra_s))
            sizes.append(
                sum((saves[policy][k] for k, policy in enumerate(corner)), np.zeros(len(meshes)))
            )
            hidden_s.append(
                self.pricer.efficiency.overlap * compute_of_corner * meshes.micro / meshes.stage
            )
        return self._lagrange(
            np.stack(seconds), np.stack(sizes), np.stack(hidden_s), stored, state, plans
        )

    def _lagrange(
        self,
        seconds: Array,
        sizes: Array,
        hidden_s: Array,
        stored: Array,
        state: Array,
        plans: Plans,
    ) -> Array:
        """Lower bound on the seconds of mixtures that fit, by row.

        Args:
            seconds, sizes, hidden_s: by corner and row, bounds on seconds and on activation bytes,
                and the seconds of transfers that compute hides.
            stored, state: stored bytes, and those of the optimizer state.
        """
        rate, meshes = self.pricer.topology.chip.host_bytes_per_s, plans.meshes
        offloadable = {part for parts in self.offloads for part in parts} | set(
            self.space.pins.offload or ()
        )
        in_flight = named(plans.decisions.schedule).in_flight(
            replace(plans.pipelines, microbatches=meshes.micro)
        )
        # seconds per byte of offloaded activations
        s_per_byte = (
            2 * meshes.micro / in_flight / rate
            if "activations" in offloadable
            else np.full(len(meshes), np.inf)
        )
        hidden_bytes = np.where(
            np.isfinite(s_per_byte), np.minimum(sizes, hidden_s / s_per_byte), 0.0
        )
        best = np.zeros(seconds.shape[1])
        for multiplier in (
            *seconds_per_byte_saved(seconds, sizes),
            np.where(np.isfinite(s_per_byte), s_per_byte, 0.0),
            np.full_like(best, 2 / rate if "optimizer" in offloadable else 0.0),
        ):
            lagrangian = (
                seconds + np.minimum(multiplier, s_per_byte) * (sizes - hidden_bytes)
            ).min(0)
            state_seconds = (
                np.zeros_like(best)
                if "disk" in offloadable
                else state
                * (np.minimum(multiplier, 2 / rate) if "optimizer" in offloadable else multiplier)
            )
            best = np.maximum(
                best, lagrangian + state_seconds + multiplier * (stored - self.capacity)
            )
        return best

    @cached_property
    def _model_tallies(self) -> ModelTallies:
        return self.workload.tallies.of_shardable(self.shardable)

    @cached_property
    def _phases(self) -> ModelTallies:
        return self.workload.phase_tallies.of_shardable(self.shardable)

    def _quantities(
        self,
        uniform: Mapping[str, StepCosts],
        choices: Array,
        meshes: Meshes,
        all_choices: Sequence[tuple[Choice, bool]],
    ) -> dict[Corner, StepCosts]:
        """Quantities of every corner, by row."""
        all_corners = corners(self.space.policies, len(self.workload.layer_counts))
        mixed = [corner for corner in all_corners if len(set(corner)) > 1]
        order = np.argsort(choices, kind="stable")
        parts: dict[Corner, list[StepCosts]] = {corner: [] for corner in mixed}
        for number in np.unique(choices):
            rows = np.flatnonzero(choices == number)
            for corner, costs in self._of_choice(
                mixed, *all_choices[int(number)], meshes.take(rows)
            ).items():
                parts[corner].append(costs)
        inverse = np.argsort(order)
        return {
            corner: _joined(parts[corner]).take(inverse) if corner in parts else uniform[corner[0]]
            for corner in all_corners
        }

    def _of_choice(
        self, mixed: Sequence[Corner], choice: Choice, routes: bool, meshes: Meshes
    ) -> dict[Corner, StepCosts]:
        """Quantities of the corners whose layer groups differ, under one choice."""
        index = np.unique(meshes.degrees_index)
        local = replace(meshes, degrees_index=np.searchsorted(index, meshes.degrees_index))
        segments = [phase.segment for phase in self.workload.programs[NO_REMAT, routes].phases]
        parts = {
            policy: self._tallies(policy, routes, choice, index) for policy in self.space.policies
        }
        stored = self._model_tallies.stored.tallies[""].evaluated(self.values, index)
        stored = stored.columns([(choice, np.arange(len(index)))])[0]
        by_corner: dict[Corner, StepCosts] = {}
        for corner in mixed:
            work, points = corner_tallies(corner, parts, segments, self.workload.layer_counts)
            by_corner[corner] = step_costs(
                work, stored, points, self.workload.model, self.pricer, local
            )
        return by_corner

    def _tallies(self, policy: str, routes: bool, choice: Choice, index: Array) -> PolicyTallies:
        """The tallies of a program on some degrees, in the order of `Workload.phase_tallies`."""
        columns, policies = [(choice, np.arange(len(index)))], self.space.policies
        work, phases = (
            programs.tallies[policy].evaluated(self.values, index).columns(columns)
            for programs in (
                self._model_tallies.work(policies, routes=routes),
                self._phases.points(policies, routes=routes),
            )
        )
        lists = list(phases)
        points: list[tuple[Array, ...]] = []
        stacks: list[Array] = []
        for phase in self.workload.programs[policy, routes].phases:
            first, *lists = lists
            stacks.append(first)
            points.append(tuple(lists[: len(phase.points)]))
            lists = lists[len(phase.points) :]
        return PolicyTallies(work=work[0], points=tuple(points), stacks=tuple(stacks))

    @cached_property
    def _patterns(self) -> list[Pattern]:
        return patterns(self.space.policies, len(self.workload.layer_counts))

    def price(
        self,
        uniform: Mapping[str, StepCosts],
        choices: Array,
        candidates: Array,
        meshes: Meshes,
        alternatives: Sequence[Decisions],
        incumbents: Incumbents,
    ) -> None:
        """Records the best mixtures of some rows under one schedule."""
        if self.space.pins.remat_layers is None and not self.space.group_policies:
            rows_by_decisions = self._promising(uniform, meshes, alternatives, incumbents)
        else:
            rows_by_decisions = {
                decisions: np.flatnonzero(self.space.legal_zero(decisions.zero, meshes))
                for decisions in alternatives
            }
        rows = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *rows_by_decisions.values()]))
        if not len(rows):
            return
        quantities = self._quantities(
            {policy: costs.take(rows) for policy, costs in uniform.items()},
            choices[rows],
            meshes.take(rows),
            incumbents.choices,
        )
        for decisions, own_rows in rows_by_decisions.items():
            if len(own_rows):
                positions = np.searchsorted(rows, own_rows)
                plans = self.plans(decisions, meshes.take(own_rows))
                priced = _PricedCorners(
                    corners={
                        corner: combine(costs.take(positions), plans)
                        for corner, costs in quantities.items()
                    },
                    decided=DecidedRows(decisions=decisions, choices=choices[own_rows]),
                    candidates=candidates[own_rows],
                    meshes=plans.meshes,
                )
                self._record_best(priced, incumbents)

    def _record_best(self, priced: _PricedCorners, incumbents: Incumbents) -> None:
        """Records the best mixture of each row, without offloading and with each set of
        `offloads`.
        """
        pinned = self.space.pins.offload
        for parts in [pinned] if pinned is not None else [(), *self.offloads]:
            offloaded_rows = priced.offloaded(parts, self.pricer)
            if self.space.group_policies:
                self._record_pinned(offloaded_rows, incumbents)
                continue
            promising = (
                np.flatnonzero(self._bound(offloaded_rows.corners) < incumbents.limit)
                if self.space.pins.remat_layers is None
                else np.arange(len(priced.meshes))
            )
            if len(promising):
                self._record_fastest(offloaded_rows.take(promising), incumbents)

    def _bound(self, prices: Mapping[Corner, Totals]) -> Array:
        """Lower bound on the seconds of mixtures that fit: the largest Lagrangian bound over the
        exchange rates (seconds per byte) of the corners.
        """
        seconds = np.stack([totals.step_seconds for totals in prices.values()])
        sizes = np.stack([totals.peak_bytes for totals in prices.values()])
        return np.where(
            sizes.min(0) > self.capacity,
            np.inf,
            np.max(
                [
                    (seconds + rate * (sizes - self.capacity)).min(0)
                    for rate in seconds_per_byte_saved(seconds, sizes)
                ],
                axis=0,
            ),
        )

    def _record_pinned(self, priced: _PricedCorners, incumbents: Incumbents) -> None:
        """Records the plans whose layer groups follow the pinned policies in the pinned numbers of
        layers.
        """
        layers = self.plans(priced.decided.decisions, priced.meshes).layers
        numbers = [
            np.zeros(len(priced.meshes))
            if policy == NO_REMAT
            else count
            if number is None
            else np.full(len(priced.meshes), float(number))
            for (policy, number), count in zip(self.space.group_policies, layers, strict=True)
        ]
        legal = np.flatnonzero(
            np.logical_and.reduce(
                [number <= count for number, count in zip(numbers, layers, strict=True)]
            )
        )
        corner = tuple(policy for policy, _ in self.space.group_policies)
        self._record_mixtures(priced, corner, np.stack(numbers), legal, incumbents)

    def _record_mixtures(
        self,
        priced: _PricedCorners,
        corner: Corner,
        numbers: Array,
        rows: Array,
        incumbents: Incumbents,
    ) -> None:
        """Records mixtures of some rows; `numbers` are the layers that follow the corner's
        policies, array [layer groups, rows].
        """
        if not len(rows):
            return
        layers = self.plans(priced.decided.decisions, priced.meshes).layers
        totals = partly_rematerialised(
            [(policy, numbers[k, rows]) for k, policy in enumerate(corner)],
            [count[rows] for count in layers],
            lambda mixed_corner: priced.corners[mixed_corner].take(rows),
        )
        policies = [
            tuple((policy, int(numbers[k, i])) for k, policy in enumerate(corner)) for i in rows
        ]
        incumbents.record(
            replace(priced.decided.take(rows), group_policies=policies),
            totals,
            priced.candidates[rows],
        )

    def _record_fastest(self, priced: _PricedCorners, incumbents: Incumbents) -> None:
        """Records the fastest mixture of each row that fits; with a pinned number of layers, the
        fastest one where none fits.
        """
        layers = self.plans(priced.decided.decisions, priced.meshes).layers
        total, capacity = self.space.pins.remat_layers, self.capacity
        mixture = best_mixture(priced.corners, self._patterns, layers, capacity, total=total)
        if total is not None and (mixture.pattern < 0).all():
            mixture = best_mixture(priced.corners, self._patterns, layers, np.inf, total=total)
        for number in np.unique(mixture.pattern[mixture.pattern >= 0]):
            self._record_mixtures(
                priced,
                self._patterns[int(number)].corner,
                mixture.numbers,
                np.flatnonzero(mixture.pattern == number),
                incumbents,
            )


# --------------------------------------------------------------------------------------------------
# Prices of rows: remat policy, ZeRO stage, schedule, time of all-gathers, and offload, once mesh,
# placement and colours are chosen.
#
# Many rows are priced at once, whatever their choices and meshes, one decision after another.


def saved_by_gathering_once(quantities: StepCosts, plans: Plans) -> Array:
    """Seconds per step that a pipeline with ZeRO 3 saves if it gathers weights and reduces
    gradients once for all microbatches, and not at every use.
    """
    compute = quantities.kernels.compute.sum(0) / plans.meshes.stage
    use, once = (
        exposed(quantities, plans.with_decisions(gather=gather), compute)
        for gather in ("use", "once")
    )
    return use - once


@dataclass(frozen=True, kw_only=True)
class RowPricer(PricingInputs):
    """Prices rows; `mixture_pricer` prices plans whose layer groups follow different policies, None
    where all groups share one.
    """

    mixture_pricer: MixturePricer | None = None

    def price(self, rows: CandidateRows, incumbents: Incumbents) -> None:
        """Records every plan of some rows that no bound excludes."""
        for staged in (False, True):
            selected = np.flatnonzero((rows.meshes.stage > 1) == staged)
            if not len(selected):
                continue
            subset = rows if len(selected) == len(rows) else rows.take(selected)
            by_schedule = defaultdict[tuple[str, int], dict[str, list[Decisions]]](
                lambda: {policy: [] for policy in self.space.policies}
            )
            for policy in self.space.policies:
                for decisions in self.space.zeros_and_schedules(policy, pipelined=staged):
                    by_schedule[decisions.schedule, decisions.virtual_stages][policy].append(
                        decisions
                    )
            for (schedule, virtual), alternatives in by_schedule.items():
                self._price_schedule(subset, schedule, virtual, alternatives, incumbents)

    def _price_schedule(
        self,
        rows: CandidateRows,
        schedule: str,
        virtual: int,
        alternatives: dict[str, list[Decisions]],
        incumbents: Incumbents,
    ) -> None:
        """Records the plans of one schedule."""
        staged = named(schedule).staged
        legal = np.ones(len(rows), dtype=bool)
        if staged:
            legal = self.space.legal_schedule(
                Decisions(
                    schedule=schedule,
                    virtual_stages=virtual,
                    accumulation=self.space.accumulation_groups,
                ),
                rows.meshes,
            )
        incumbents.skip(int((~legal).sum()))
        if not legal.any():
            return
        zeros = {decisions.zero for listed in alternatives.values() for decisions in listed}
        breadth_first_options = self.space.breadth_first_options(schedule, virtual)
        gathers = {decisions.gather for listed in alternatives.values() for decisions in listed}
        fitting = legal & rows.may_beat(zeros, breadth_first_options, gathers, incumbents.limit)
        if not fitting.any() and self.mixture_pricer is None:
            return
        promising = {
            policy: fitting & (self._bound(rows, policy, schedule, virtual) < incumbents.limit)
            for policy in self.space.policies
            if alternatives[policy]
        }
        selected = np.flatnonzero(np.logical_or.reduce(list(promising.values())))
        if len(selected) and not self.space.group_policies:
            self._price_uniform(
                rows.take(selected),
                {p: mask[selected] for p, mask in promising.items()},
                breadth_first_options,
                alternatives,
                incumbents,
            )
        self._price_mixtures(rows, legal, alternatives[self.space.policies[-1]], incumbents)

    def _price_mixtures(
        self,
        rows: CandidateRows,
        legal: Array,
        alternatives: list[Decisions],
        incumbents: Incumbents,
    ) -> None:
        """Records the plans of one schedule whose layer groups differ."""
        if self.mixture_pricer is None or not alternatives:
            return
        promising = np.flatnonzero(
            legal
            & (
                self._bound(
                    rows, BEST_PER_GROUP, alternatives[0].schedule, alternatives[0].virtual_stages
                )
                < incumbents.limit
            )
        )
        if len(promising):
            subset = rows.take(promising)
            self.mixture_pricer.price(
                subset.quantities,
                subset.choices,
                subset.candidates,
                subset.meshes,
                alternatives,
                incumbents,
            )

    def _price_uniform(
        self,
        rows: CandidateRows,
        promising: dict[str, Array],
        breadth_first_options: list[bool],
        alternatives: dict[str, list[Decisions]],
        incumbents: Incumbents,
    ) -> None:
        """Records the plans of one schedule whose layer groups are alike."""
        for policy in promising:  # the same for all ZeRO stages
            plans = self.plans(alternatives[policy][0], rows.meshes)
            promising[policy] = promising[policy] & (
                least_seconds(rows.quantities[policy], plans) < incumbents.limit
            )
        for zero, gather in sorted(
            {
                (decisions.zero, decisions.gather)
                for listed in alternatives.values()
                for decisions in listed
            },
            key=lambda pair: (pair[0], pair[1] != "use"),
        ):
            fitting = rows.may_beat((zero,), breadth_first_options, (gather,), incumbents.limit)
            legal = self.space.legal_zero(zero, rows.meshes)
            selected = {policy: mask & fitting for policy, mask in promising.items()}
            if (
                gather == "once"
                and "use" in self.space.gathers
                and not incumbents.ranks
                and (
                    chosen := next(
                        (
                            candidate
                            for listed in alternatives.values()
                            for candidate in listed
                            if candidate.gather == "use"
                        ),
                        None,
                    )
                )
            ):
                selected = self._where_gathering_once_saves(rows, selected, chosen)
            no_remat: tuple[Array, Totals] | None = None
            for policy in promising:
                chosen = next(
                    (
                        decisions
                        for decisions in alternatives[policy]
                        if (decisions.zero, decisions.gather) == (zero, gather)
                    ),
                    None,
                )
                if chosen is None:
                    continue
                totals = self._price_policy(
                    rows, policy, chosen, legal, selected[policy], no_remat, incumbents
                )
                no_remat = totals if policy == "none" else no_remat

    def _where_gathering_once_saves(
        self, rows: CandidateRows, promising: dict[str, Array], decisions: Decisions
    ) -> dict[str, Array]:
        """By policy, the rows in which all-gathering weights once saves time under at least one
        policy. The others are no faster than those that all-gather at every use, and need more
        memory.
        """
        positions = np.flatnonzero(
            np.logical_or.reduce(list(promising.values())) & self.space.legal_zero(3, rows.meshes)
        )
        subset, saving = rows.take(positions), np.zeros(len(rows), dtype=bool)
        plans = self.plans(replace(decisions, zero=3), subset.meshes)
        for policy in promising:
            saving[positions] |= saved_by_gathering_once(subset.quantities[policy], plans) > 0
        return {policy: mask & saving for policy, mask in promising.items()}

    def _bound(self, rows: CandidateRows, policy: str, schedule: str, virtual: int) -> Array:
        """A lower bound on the step time under a schedule, by row; 0 where there is no limit."""
        if not rows.bounds:
            return np.zeros(len(rows))
        groups, bounds = self.space.accumulation_groups, rows.bounds[policy]
        stages, micro = rows.meshes.stage, rows.meshes.micro
        pipelines = Pipelines(
            stages=stages,
            chunks=np.full_like(stages, virtual),
            microbatches=micro // groups,
        )
        message_s = message_seconds(bounds, stages, self.pricer) if named(schedule).staged else 0.0
        overhead = pipeline_overhead(
            bounds, pipelines, named(schedule), message_s, self.workload.layer_counts, groups
        )
        return step_seconds(bounds, stages, micro, overhead)

    def _price_policy(
        self,
        rows: CandidateRows,
        policy: str,
        decisions: Decisions,
        legal: Array,
        promising: Array,
        no_remat: tuple[Array, Totals] | None,
        incumbents: Incumbents,
    ) -> tuple[Array, Totals] | None:
        """Records the plans of one policy with the given decisions; returns the priced rows and
        their prices.
        """
        partial = np.zeros(len(rows), dtype=bool)
        if no_remat is not None and policy != "none":
            partial[no_remat[0]] = (no_remat[1].step_seconds < incumbents.limit) & (
                (no_remat[1].peak_bytes > self.capacity) | bool(self.space.pins.remat_layers)
            )
        incumbents.skip(int(((promising | partial) & ~legal).sum()))
        positions = np.flatnonzero(legal & (promising | partial))
        if not len(positions):
            return None
        quantities, meshes = (
            (rows.quantities[policy], rows.meshes)
            if len(positions) == len(rows)
            else (rows.quantities[policy].take(positions), rows.meshes.take(positions))
        )
        totals = combine(quantities, self.plans(decisions, meshes))
        no_remat_rows: Totals | None = None
        if no_remat is not None and policy != "none":
            position = np.full(len(rows), -1)
            position[no_remat[0]] = np.arange(len(no_remat[0]))
            no_remat_rows = no_remat[1].take(position[positions])
            # not priced because they cannot be fast enough
            no_remat_rows.seconds["overhead"][position[positions] < 0] = np.inf
        self._record(
            DecidedRows(decisions=decisions, choices=rows.choices[positions]),
            rows.candidates[positions],
            totals,
            no_remat_rows,
            meshes,
            incumbents,
        )
        return positions, totals

    def _record(
        self,
        decided: DecidedRows,
        candidates: Array,
        totals: Totals,
        no_remat: Totals | None,
        meshes: Meshes,
        incumbents: Incumbents,
    ) -> None:
        """Records prices; of plans that do not fit, also with arrays offloaded, and with fewer
        rematerialised layers where fewer suffice.
        """
        pins, pinned_layers = self.space.pins, self.space.pins.remat_layers
        pinned = pins.offload or ()
        if pinned:
            totals = offloaded(totals, pinned, self.pricer, meshes)
            no_remat = no_remat and offloaded(no_remat, pinned, self.pricer, meshes)
            decided = decided.replace(offload=pinned)
        if not pinned_layers:
            incumbents.record(decided, totals, candidates)
        self._record_partial_remat(decided, candidates, totals, no_remat, meshes, incumbents)
        # offloading only adds seconds
        unfit = (totals.step_seconds < incumbents.limit) & (totals.peak_bytes > self.capacity)
        if no_remat is not None:  # with offloading, fewer layers need to rematerialise
            unfit |= (no_remat.step_seconds < np.minimum(incumbents.limit, totals.step_seconds)) & (
                no_remat.peak_bytes > self.capacity
            )
        positions = np.flatnonzero(unfit)
        if not len(positions) or pinned_layers:
            return
        unfit_rows, meshes = decided.take(positions), meshes.take(positions)
        for host_arrays in self.offloads:
            offloaded_totals = offloaded(totals.take(positions), host_arrays, self.pricer, meshes)
            offloaded_rows = unfit_rows.replace(offload=host_arrays)
            incumbents.record(offloaded_rows, offloaded_totals, candidates[positions])
            if no_remat is not None:
                self._record_partial_remat(
                    offloaded_rows,
                    candidates[positions],
                    offloaded_totals,
                    offloaded(no_remat.take(positions), host_arrays, self.pricer, meshes),
                    meshes,
                    incumbents,
                )

    def _record_partial_remat(
        self,
        decided: DecidedRows,
        candidates: Array,
        rematerialised: Totals,
        no_remat: Totals | None,
        meshes: Meshes,
        incumbents: Incumbents,
    ) -> None:
        """Records the plans that rematerialise no more layers than memory requires."""
        pinned_layers = self.space.pins.remat_layers
        if (
            no_remat is None
            or pinned_layers == 0
            or self.space.mixes_remat
            or "partly" not in self.space.limits.abilities.remat
        ):
            return
        legal = no_remat.step_seconds < incumbents.limit
        legal &= lowerable(
            facts_of_decisions(decided.decisions),
            facts_of_mesh(meshes.sizes),
            self.space.unsupported,
        )
        if pinned_layers is None:
            legal &= (no_remat.peak_bytes > self.capacity) & (
                no_remat.step_seconds < rematerialised.step_seconds
            )
        if not legal.any():
            return
        plans = self.plans(decided.decisions, meshes)
        layers = sum(plans.layers, np.zeros(len(meshes)))
        if pinned_layers:
            needed = np.where(layers > pinned_layers, float(pinned_layers), 0.0)
        else:
            saved = no_remat.device_bytes["activations"]
            remaining = rematerialised.device_bytes["activations"]
            others = sum(
                (
                    np.maximum(size, rematerialised.device_bytes[name])
                    for name, size in no_remat.device_bytes.items()
                    if name != "activations"
                ),
                np.zeros(len(meshes)),
            )
            needed = np.ceil(
                (others + saved - self.capacity) / np.maximum(saved - remaining, 1e-9) * layers
                - 1e-9
            )
            needed = np.round(rematerialised_share(needed, plans) * layers)
        mixed = np.flatnonzero(legal & (needed >= 1) & (needed < layers))
        if len(mixed):
            share = rematerialised_share(needed, plans)[mixed]
            incumbents.record(
                replace(decided.take(mixed), layers=needed[mixed].astype(np.int64)),
                interpolated(no_remat.take(mixed), rematerialised.take(mixed), share),
                candidates[mixed],
            )
