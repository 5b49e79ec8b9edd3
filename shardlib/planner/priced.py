"""Prices a space of plans by branch and bound: candidates under choices of colours, on every
placement of their axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardlib.cost.framework import Framework
from shardlib.cost.roofline import fitting_bytes
from shardlib.cost.stages import Meshes, distinct, step_costs
from shardlib.cost.tables import MeasureValues, Pricer, Quantity
from shardlib.cost.terms import SINGLE, BoundedTable, Degrees
from shardlib.decisions.lowerings import facts_of_pins, require
from shardlib.decisions.pins import Pins
from shardlib.errors import PinError, raise_all
from shardlib.layout import MESH_AXES, MeshShape, Rules
from shardlib.machines.topology import Placement, Topology, device_counts, place, placements
from shardlib.planner.bounds import (
    ROUNDING,
    Entries,
    MicrobatchBounds,
    Pairs,
    PlanKind,
    StepBounds,
    bounded_policies,
)
from shardlib.planner.incumbents import (
    BestPlans,
    CandidateBlock,
    CandidateRows,
    Incumbents,
    MixturePricer,
    PricingInputs,
    RankedEntry,
    RankedMesh,
    Ranking,
    RowPricer,
)
from shardlib.planner.parts import Candidate, PricedPlan, choice_of_rules, rules_in_colours
from shardlib.planner.space import Scope, Space, spaces, unsupported_for
from shardlib.planner.workload import ItemTallies, Workload
from shardlib.propagation.colours import Choice

Array = np.ndarray
#: Approximate number of rows (a candidate under a choice) that are priced at once.
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class PlacedPairs(BoundedTable):
    """Placed pairs.

    Attributes:
        candidates: index of each pair's candidate in `block`.
        choices: index of each pair's choice.
        kinds: bounds by kind of plan, where they are known.
    """

    block: CandidateBlock
    candidates: Array
    choices: Array
    kinds: Mapping[PlanKind, Array]

    def compacted(self) -> PlacedPairs:
        """The same pairs in a block without other candidates."""
        used, positions = np.unique(self.candidates, return_inverse=True)
        block = replace(
            self.block,
            placements=[self.block.placements[i] for i in used],
            meshes=self.block.meshes.copied(used),
        )
        return replace(self, block=block, candidates=positions.reshape(-1))


@dataclass(frozen=True, kw_only=True)
class PairPricer(PricingInputs):
    """Prices pairs (an entry under a choice of colours) on their placements.

    Attributes:
        shardable: colours that some choice shards.
        best: receives the best plans.
        ranked_meshes: receives the mesh of each candidate, where there is a ranking.
    """

    shardable: tuple[str, ...]
    best: BestPlans
    ranked_meshes: list[RankedMesh]

    def price(
        self,
        entries: Entries,
        pairs: Pairs,
        slack: float,
        ranking: Ranking[Candidate] | None,
        *,
        default_placement: bool = False,
    ) -> None:
        """Prices pairs on every placement of their axes, or on the usual one."""
        if (placed := self.placed(entries, pairs, default_placement=default_placement)) is not None:
            self.price_placed(entries, placed, slack, ranking)

    def placed(
        self, entries: Entries, pairs: Pairs, *, default_placement: bool = False
    ) -> PlacedPairs | None:
        """Pairs on every placement of their axes, or on the usual one; None if there is no
        placement.
        """
        block, candidates = self._block(entries, pairs, default_placement)
        if block is None:
            return None
        pair = np.repeat(np.arange(len(pairs)), [len(part) for part in candidates])
        return PlacedPairs(
            block=block,
            candidates=np.array([row for part in candidates for row in part], dtype=np.int64),
            choices=pairs.choices[pair],
            bound=pairs.bound[pair],
            kinds={},
        )

    def bounded_by_links(self, entries: Entries, pairs: Pairs) -> PlacedPairs | None:
        """Pairs on every placement, sorted by bounds that use the links of each but not the choice;
        those not below the fastest plan are dropped. None if there is no placement.
        """
        placed = self.placed(entries, pairs)
        if placed is None or self.space.mixes_remat:
            return placed
        bounds = np.maximum(
            placed.bound,
            entries.seconds_on(placed.block.meshes, self.best.limit)[placed.candidates],
        )
        return replace(placed, bound=bounds).below(self.best.limit).compacted()

    def bounded_by_choice(self, entries: Entries, placed: PlacedPairs) -> PlacedPairs:
        """Placed pairs, sorted by bounds that use the choice too; those not below the fastest plan
        are dropped.
        """
        if self.space.mixes_remat or not len(placed):
            return placed
        placed = placed.compacted()
        kinds = entries.seconds_by_kind(
            placed.block.meshes, placed.candidates, placed.choices, self.best.limit
        )
        bounds = np.minimum.reduce([np.full(len(placed), np.inf), *kinds.values()])
        return replace(placed, bound=bounds, kinds=kinds).below(self.best.limit)

    def price_placed(
        self,
        entries: Entries,
        placed: PlacedPairs,
        slack: float,
        ranking: Ranking[Candidate] | None,
    ) -> None:
        """Prices placed pairs."""
        best = Incumbents(
            self.best, self.ranked_meshes, placed.block, self.capacity, slack, ranking
        )
        self._priced(entries, placed, best)
        best.close()

    def _priced(self, entries: Entries, placed: PlacedPairs, best: Incumbents) -> None:
        """Prices the candidates of a block, each under a choice. Those with the same choice and
        degrees share their quantities, so they are sorted by both.
        """
        order = np.lexsort((placed.block.meshes.degrees_index[placed.candidates], placed.choices))
        pricer = self._row_pricer(entries)
        for part in np.split(order, range(ROWS_AT_ONCE, len(order), ROWS_AT_ONCE)):
            pricer.price(self._rows(entries, placed.take(part), best.limit), best)

    def _row_pricer(self, entries: Entries) -> RowPricer:
        """A pricer for rows of the given entries, with a `MixturePricer` where layer groups may
        differ.
        """
        setting: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(PricingInputs)}
        if not self.space.mixes_remat:
            return RowPricer(**setting)
        groups = MixturePricer(**setting, values=entries.values, shardable=self.shardable)
        return RowPricer(**setting, mixture_pricer=groups)

    def _rows(self, entries: Entries, placed: PlacedPairs, limit: float) -> CandidateRows:
        """Candidates under choices, with their quantities, and bounds where there is a limit."""
        candidates, choices = placed.candidates, placed.choices
        meshes = placed.block.meshes.take(candidates)
        scope, policies = entries.scope, self.space.policies
        index, degrees_of_row = np.unique(meshes.degrees_index, return_inverse=True)
        keys, column = np.unique(
            np.stack([choices, degrees_of_row.reshape(-1)]), axis=1, return_inverse=True
        )
        needed = [
            (entries.choices[int(number)], keys[1, keys[0] == number])
            for number in np.unique(keys[0])
        ]

        def columns(tallies: ItemTallies) -> Array:
            return tallies.evaluated(entries.values, index).columns(needed)

        local, stored = (
            replace(meshes, degrees_index=column.reshape(-1)),
            columns(scope.model_tallies.stored.tallies[""])[0],
        )
        bounds = dict[str, MicrobatchBounds]()
        if np.isfinite(limit):
            of_all = entries.bounds.of_choices(keys[0], index[keys[1]]).take(local.degrees_index)
            for number, policy in enumerate(bounded_policies(self.space)):
                bounds[policy] = of_all.of_policy(number)
        saved = (
            {
                policy: columns(tallies)[0]
                for policy, tallies in self.workload.stack_tallies.of_shardable(self.shardable)
                .points(policies, routes=scope.routes)
                .tallies.items()
            }
            if self.space.mixes_remat
            else dict[str, Array]()
        )
        by_policy = {
            policy: step_costs(
                columns(scope.work.tallies[policy])[0],
                stored,
                list(columns(scope.points.tallies[policy])),
                self.workload.model,
                self.pricer,
                local,
                stacks=saved.get(policy),
            )
            for policy in policies
        }
        return CandidateRows(
            candidates=candidates,
            choices=choices,
            meshes=meshes,
            quantities=by_policy,
            bounds=bounds,
            kinds=placed.kinds,
        )

    def _block(
        self, entries: Entries, pairs: Pairs, default_placement: bool
    ) -> tuple[CandidateBlock | None, list[list[int]]]:
        """The candidates of some pairs on their placements, and the positions of each pair's
        candidates; (None, []) where there are none.
        """
        positions: dict[int, list[int]] = {}
        placements: list[tuple[MeshShape, tuple[str, ...], Placement]] = []
        entry_numbers: list[int] = []
        for entry in pairs.entries:
            if int(entry) not in positions:
                mesh = MeshShape({axis: int(entries.sizes[axis][entry]) for axis in MESH_AXES})
                options = self._placements(mesh, default_placement)
                first = len(entry_numbers)
                positions[int(entry)] = list(range(first, first + len(options)))
                placements += [(mesh, order, placement) for order, placement in options]
                entry_numbers += [int(entry)] * len(options)
        if not entry_numbers:
            return None, []
        meshes = Meshes.placed(
            [(mesh, placement) for mesh, _, placement in placements],
            [int(m) for m in entries.sizes["micro"][entry_numbers]],
            self.pricer.topology,
        )
        block = CandidateBlock(
            placements=placements,
            meshes=replace(
                meshes,
                degrees=entries.values.degrees,
                degrees_index=entries.degrees_index[entry_numbers],
            ),
            choices=[(choice, entries.scope.routes) for choice in entries.choices],
            unsupported=self.space.unsupported,
        )
        return block, [positions[int(entry)] for entry in pairs.entries]

    def _placements(
        self, mesh: MeshShape, default_placement: bool
    ) -> list[tuple[tuple[str, ...], Placement]]:
        """The placements of a mesh; with `default_placement`, one of them."""
        pinned, topology = self.space.pins.axis_order, self.pricer.topology
        if pinned is not None:
            order = mesh.in_order(pinned)
            placement = place(mesh, topology, order)
            return [] if placement is None else [(() if order == tuple(mesh) else order, placement)]
        if default_placement or not self.space.limits.abilities.free:
            placement = place(mesh, topology)
            return [] if placement is None else [((), placement)]
        return [*placements(mesh, topology)]


# --------------------------------------------------------------------------------------------------
# Candidates in the order of their bounds, and in growing blocks.

#: Growth factor of the blocks: a better incumbent leaves fewer candidates to price.
BLOCK_GROWTH = 12


def ascending(bounds: Array, limit: float) -> Array:
    """Positions of the bounds below a limit, sorted by bound."""
    below = np.flatnonzero(bounds < limit)
    return below[np.argsort(bounds[below], kind="stable")]


def blocks(first: int, count: int, largest: int | None = None) -> Iterator[tuple[int, int]]:
    """(start, end) of growing blocks that cover `count` items; `largest` limits the size of a
    block.
    """
    start, size = 0, first
    while start < count:
        yield start, min(start + size, count)
        start, size = start + size, min(size * BLOCK_GROWTH, largest or count)


# --------------------------------------------------------------------------------------------------
# Lower bounds from the unsharded step on one device: a plan on n devices takes at least 1/n of it.


@dataclass(frozen=True, kw_only=True)
class UnshardedBounds:
    """Bounds from the step on one device.

    Attributes:
        values: measures on degrees, the last of which are those of one device, if evaluated
            already; otherwise they are evaluated on those alone.
    """

    workload: Workload
    space: Space
    pricer: Pricer
    values: MeasureValues | None = None

    @cached_property
    def seconds(self) -> float:
        """Seconds of the kernels. Divided equally they are a lower bound for any plan, since the
        largest kernels are the most efficient.
        """
        totals = [
            self.pricer.corrected(self._total((policy, routes), routes=routes))[
                :, Quantity.COMPUTE, 0
            ]
            for routes in self.space.routes
            for policy in self.space.policies
        ]
        seconds = np.stack(totals)
        return float(seconds.min(0).sum() if self.space.mixes_remat else seconds.sum(1).min())

    def excludes(self, devices: int, limit: float) -> bool:
        """True if no plan on this many devices is faster than a limit in seconds."""
        return bool(np.isfinite(limit)) and self.seconds / devices >= limit

    @cached_property
    def parameter_bytes(self) -> float:
        """Bytes of parameters; however they are sharded, the fullest device has at least an equal
        share.
        """
        total = self._total(None, routes=False)[:, :, 0].sum(0)
        return float(total[Quantity.PARAMETERS] + total[Quantity.FROZEN]) * min(
            1.0, self.pricer.profile.fragmentation
        )

    def _total(self, key: tuple[str, bool] | None, *, routes: bool) -> Array:
        """Quantities of the stored arrays, or of a program: array [segments, rows, 1]."""
        values = (
            self.pricer.values(self.workload.tallies.index, SINGLE)
            if self.values is None
            else self.values
        )
        colouring = self.workload.colouring
        choice = Choice(
            batch=colouring.batch_colour,
            context=colouring.sequence_colour,
            expert=self.workload.expert if routes else None,
        )
        last = np.array([len(values.degrees) - 1])
        return self.workload.tallies.unsharded(key).evaluated(values, last).total(choice)[0]


# --------------------------------------------------------------------------------------------------
# Explores a space of plans for the fastest plan that fits, and for the minimum-memory plan.
#
# The cost is a sum over items that each depend on few colours (`cost/items.py`), so a plan's cost
# is a sum of tallies that are computed once per model (`planner/workload.py`). Entries, and then
# pairs (`planner/bounds.py`), are explored in the order of a lower bound on their step time; when
# the next bound is not below the incumbent, no remaining plan can be faster, and the search ends
# with a proof. Where a machine has far more devices than the batch has rows, the meshes of all
# numbers of devices are explored together.
#
# Each bound is computed for fewer candidates than the one before: the kernels of the unsharded
# step, divided equally; the fastest plan that could fit (`planner/bounds.py`) with each component
# of the colours sharded as is best for it; the same under one choice; and that on the links of each
# placement. Only what none of them excludes is priced.

#: Entries in the first block whose memory is bounded, and in the first block that is priced.
FIRST_BOUNDED_BLOCK, FIRST_PRICED_BLOCK = 1024, 1024
#: Most entries that are placed at once, and placed pairs in the first block that is bounded.
MAX_PLACED_ENTRIES, FIRST_PLACED_BLOCK = 8192, 4096
#: Pairs priced on all their placements in the first block; growth factor of the blocks; and the
#: factor after a block that gave no better incumbent.
FIRST_PAIR_BLOCK, PAIR_BLOCK_GROWTH, STALLED_BLOCK_GROWTH = 128, 4, 16
#: Entries whose quickest choice is priced first, as incumbent, where every entry has one placement.
SEED_ENTRIES = 4
#: Approximate ratio of parameters, gradients and optimizer state to parameters.
STATE_RATIO = 4
#: With at most `SMALL_SPACE` entries, the `SEED_PAIRS` pairs with the least bounds are priced
#: first.
SMALL_SPACE, SEED_PAIRS = 512, 32
#: Most entries of a first space that is explored alone.
MAX_FIRST_SPACE = 4096
#: Numbers of devices that are searched together.
DeviceCounts = tuple[int, ...]


class Explorer:
    """Prices the plans of one space on one topology.

    Args:
        capacity: usable bytes per device.
        previous: an explorer of the same model in other dtypes, with another attention strategy or
            on another number of devices, to whose results this one adds.
        any_fit: True to stop at the first plan that fits.

    Attributes:
        best: the best plans so far.
        ranked_meshes: the meshes of the candidates of a ranking.
    """

    def __init__(
        self,
        workload: Workload,
        space: Space,
        topology: Topology,
        capacity: float,
        previous: Explorer | None = None,
        *,
        any_fit: bool = False,
    ) -> None:
        self.workload, self.space, self.pricer = workload, space, Pricer(topology, workload.profile)
        self._unsharded = UnshardedBounds(workload=workload, space=space, pricer=self.pricer)
        self.topology = self.pricer.topology
        self.best = BestPlans() if previous is None else previous.best
        self.ranked_meshes: list[RankedMesh] = [] if previous is None else previous.ranked_meshes
        self._any_fit, self._explored = any_fit, dict[DeviceCounts, list[Entries]]()
        self._priced_entries, self._scopes = set[int](), dict[bool, Scope]()
        self._max_bytes = capacity * (1 + ROUNDING)
        self._too_large = set[int]()
        self._shardable = tuple(
            dict.fromkeys(
                [*space.tensor, *(name for choice in space.choices for name in choice.tensor)]
            )
        )
        self.pair_pricer = PairPricer(
            workload=workload,
            space=space,
            pricer=self.pricer,
            capacity=capacity,
            shardable=self._shardable,
            best=self.best,
            ranked_meshes=self.ranked_meshes,
        )
        pinned = space.pins.offload
        self._fitting = StepBounds(
            space=space,
            counts=workload.layer_counts,
            pricer=self.pricer,
            capacity=capacity,
            offloads=(pinned,) if pinned else ((), *self.pair_pricer.offloads),
        )

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is discarded."""
        return 0.0 if self._any_fit and self.best.fastest is not None else self.best.limit

    def run(
        self, counts: DeviceCounts, ranking: Ranking[Candidate] | None = None, slack: float = np.inf
    ) -> None:
        """Prices the plans on the given numbers of devices; none where any fits and one does."""
        if not self.limit:
            return
        slack = 1 if ranking is None else slack
        for entries in self._entries(counts, slack):
            if id(entries) not in self._priced_entries:
                self._explore(entries, slack, ranking)

    def seed(self, counts: DeviceCounts) -> None:
        """Prices, on each number of devices, the entry with the least bound among those that shard
        neither sequences nor experts: a first incumbent.
        """
        if not (self.space.choices and self.space.routes):
            return
        sampled = [self._simplest(devices) for devices in counts]
        for entries in self._entries_of([chosen for chosen in sampled if len(chosen["micro"])]):
            bounds = entries.seconds(np.arange(len(entries)), 0.0)
            order = np.lexsort((bounds, _devices(entries.sizes)))
            _, first = np.unique(_devices(entries.sizes)[order], return_index=True)
            best = order[first]
            pairs = entries.pairs(best[np.isfinite(bounds[best])])
            self.pair_pricer.price(entries, pairs.firsts(), 1, None)

    def _simplest(self, devices: int) -> dict[str, Array]:
        """Mesh sizes of the simplest entries on some number of devices."""
        sizes = self.space.mesh_sizes(self.workload.colouring, devices)
        simple = np.flatnonzero((sizes["context"] == 1) & (sizes["expert"] == 1))
        return {axis: size[simple] for axis, size in sizes.items()}

    def too_large(self, counts: DeviceCounts) -> bool:
        """True if bounds show that no plan on the given numbers of devices fits; False, without
        computing them, for a model far smaller than their memory.
        """
        if STATE_RATIO * self._unsharded.parameter_bytes / max(counts) < self._max_bytes:
            return False
        all_entries = self._entries(counts, 1)
        return not any(map(self._may_fit, all_entries))

    def least_seconds(self, counts: DeviceCounts) -> float:
        """Lower bound on the step time on the given numbers of devices; infinite where large spaces
        are not searched together.
        """
        searchable = self.space.choices and self.space.routes and not self.uniform_links
        return self._unsharded.seconds / max(counts) if searchable else np.inf

    def large(self, counts: DeviceCounts, limit: float) -> list[Entries]:
        """Sets of more than `SMALL_SPACE` entries that may have a plan below `limit` seconds."""
        if self.least_seconds(counts) >= limit:
            return []
        return [entries for entries in self._entries(counts, 1) if len(entries) > SMALL_SPACE]

    def is_small(self, counts: DeviceCounts) -> bool:
        """True if the entries on the given numbers of devices are few enough to explore alone."""
        return all(len(entries) <= MAX_FIRST_SPACE for entries in self._entries(counts, 1))

    def skip(self, counts: DeviceCounts, done: Container[int]) -> None:
        """Skips entries on the given numbers of devices that were explored already (`done`: by
        identity).
        """
        self._priced_entries |= {
            id(entries) for entries in self._explored.get(counts, []) if id(entries) in done
        }

    def _entries(self, counts: DeviceCounts, slack: float) -> list[Entries]:
        """The entries on the given numbers of devices, for each treatment of experts; without
        device counts on which no plan is fast enough.
        """
        if counts in self._explored:
            return self._explored[counts]
        if not (self.space.choices and self.space.routes):
            return []
        limit = self.limit * slack
        tried = [devices for devices in counts if not self._unsharded.excludes(devices, limit)]
        if self.best.fastest is None:
            large = {n for n in tried if self._unsharded.parameter_bytes / n > self._max_bytes}
            self._too_large |= large
            tried = [devices for devices in tried if devices not in large]
        return self._build_entries(counts, tried)

    def _build_entries(self, counts: DeviceCounts, tried: Sequence[int]) -> list[Entries]:
        """See `_entries`."""
        mesh_sizes = [self.space.mesh_sizes(self.workload.colouring, devices) for devices in tried]
        new_entries = self._entries_of([sizes for sizes in mesh_sizes if len(sizes["micro"])])
        if new_entries:
            self._explored[counts] = new_entries
        return new_entries

    def _entries_of(self, mesh_sizes: Sequence[dict[str, Array]]) -> list[Entries]:
        """The entries of some meshes with microbatches, for each treatment of experts."""
        if not mesh_sizes:
            return []
        sizes = {
            axis: np.concatenate([sizes_of[axis] for sizes_of in mesh_sizes])
            for axis in mesh_sizes[0]
        }
        degrees, degrees_index = distinct(sizes)
        values = self.pricer.values(self.workload.tallies.index, Degrees.joined([degrees, SINGLE]))
        self._unsharded = replace(self._unsharded, values=values)
        return [
            Entries(self._scope(routes), self.pricer, self._fitting, sizes, values, degrees_index)
            for routes in sorted(self.space.routes, reverse=True)  # routed is hardly ever slower
        ]

    def _scope(self, routes: bool) -> Scope:
        sequence = self.workload.colouring.sequence_colour  # costs nothing where no axis shards it
        if routes not in self._scopes:
            self._scopes[routes] = Scope(
                workload=self.workload,
                space=self.space,
                shardable=self._shardable,
                context_colour=sequence,
                routes=routes,
            )
        return self._scopes[routes]

    def _may_fit(self, entries: Entries) -> bool:
        every = np.arange(len(entries))
        return bool((entries.least_bytes(every, self._max_bytes) <= self._max_bytes).any())

    def _explore(self, entries: Entries, slack: float, ranking: Ranking[Candidate] | None) -> None:
        """Prices the entries that could fit."""
        if self.best.fastest is None and not self._may_fit(entries):
            self.best.counts["memory"] += len(entries)
            return
        order, fastest = entries.below(self.limit * slack)
        done = 0
        for start, end in blocks(FIRST_BOUNDED_BLOCK, len(order)):
            if fastest[start] >= self.limit * slack:
                break
            block, done = order[start:end], end
            self._price_fitting(
                entries, block[fastest[start:end] < self.limit * slack], slack, ranking
            )
        self.best.counts["bound"] += len(entries) - done

    def _price_fitting(
        self, entries: Entries, selected: Array, slack: float, ranking: Ranking[Candidate] | None
    ) -> None:
        """Prices the given entries that could fit, in the order of their bounds for plans that
        fit.
        """
        bounds = entries.seconds(selected, self.limit * slack)
        self.best.counts["memory"] += int((~np.isfinite(bounds)).sum())
        order = ascending(bounds, self.limit * slack)
        if ranking is not None or self.uniform_links:
            self._price_ranked(entries, selected[order], bounds[order], slack, ranking)
        else:
            self._price_bounded(entries, selected[order], bounds[order])

    @property
    def uniform_links(self) -> bool:
        """True if all links are alike, so that a mesh has one placement."""
        return len(self.topology.tiers) == 1 and len(self.topology.tiers[0].shape) == 1

    def _price_ranked(
        self,
        entries: Entries,
        order: Array,
        bounds: Array,
        slack: float,
        ranking: Ranking[Candidate] | None,
    ) -> None:
        """Prices entries in the order of their bounds, until no other can be faster."""
        self.pair_pricer.price(
            entries, entries.pairs(order[:SEED_ENTRIES], self.limit).firsts(), 1, None
        )
        for start, end in blocks(FIRST_PRICED_BLOCK, len(order)):
            limit = self.limit * slack
            self.pair_pricer.price(
                entries,
                entries.pairs(order[start:end][bounds[start:end] < limit], limit),
                slack,
                ranking,
            )

    def _price_bounded(self, entries: Entries, order: Array, bounds: Array) -> None:
        """Prices entries that no bound excludes, on every placement."""
        first_block = SEED_PAIRS if len(entries) <= SMALL_SPACE else FIRST_PLACED_BLOCK
        for start, end in blocks(FIRST_PRICED_BLOCK, len(order), MAX_PLACED_ENTRIES):
            pairs = entries.pairs(order[start:end][bounds[start:end] < self.limit], self.limit)
            if (placed := self.pair_pricer.bounded_by_links(entries, pairs)) is not None:
                for begin, until in blocks(first_block, len(placed)):
                    self._price_in_order(
                        entries, placed.after(begin).first(until - begin).below(self.limit)
                    )

    def _price_in_order(self, entries: Entries, placed: PlacedPairs) -> None:
        """Prices placed pairs in the order of their bounds, until no other can be faster."""
        placed, size = self.pair_pricer.bounded_by_choice(entries, placed), FIRST_PAIR_BLOCK
        while len(placed := placed.below(self.limit)):
            limit, count = self.limit, min(size, len(placed))
            self.pair_pricer.price_placed(entries, placed.first(count), 1, None)
            placed = placed.after(count)
            size *= PAIR_BLOCK_GROWTH if self.limit < limit else STALLED_BLOCK_GROWTH

    def _by_least_bytes(self) -> Iterator[Entries]:
        """All entries that may have the minimum-memory plan, those on the most devices first."""
        seen = {*self._explored, *((devices,) for devices in self._too_large)}
        for counts in sorted(seen, reverse=True):
            if self._unsharded.parameter_bytes / max(counts) < self.best.minimum_memory_bytes:
                yield from self._explored.get(counts) or self._build_entries(counts, counts)

    def minimum_memory(self) -> None:
        """Finds the minimum-memory plan, in the order of the entries' lower bounds on bytes; memory
        does not depend on placement.
        """
        best = self.best
        for entries in self._by_least_bytes():
            every = np.arange(len(entries))
            bounds = entries.least_bytes(every, best.minimum_memory_bytes)
            order = np.argsort(bounds, kind="stable")
            for start, end in blocks(FIRST_PRICED_BLOCK, len(order)):
                block = order[start:end]
                limit = best.minimum_memory_bytes
                size = FIRST_PAIR_BLOCK
                pairs = entries.pairs(block[bounds[block] < limit], limit, minimum_memory=True)
                while len(pairs := pairs.below(best.minimum_memory_bytes)):
                    self.pair_pricer.price(
                        entries, pairs.first(size), np.inf, None, default_placement=True
                    )
                    pairs, size = pairs.after(size), size * PAIR_BLOCK_GROWTH


def _devices(sizes: Mapping[str, Array]) -> Array:
    """Number of devices of each mesh."""
    return np.prod([sizes[axis] for axis in MESH_AXES], axis=0)


# --------------------------------------------------------------------------------------------------
# Explores several large spaces together, in the order of their bounds.
#
# Entries, pairs and placed pairs are bounded in turn, each only where the bound before is below a
# limit that all spaces share. When nothing is left below the limit it grows, up to the seconds of
# the fastest plan; then no other plan is faster. What is above the limit waits, so nothing is
# bounded or priced twice, and hardly more is priced than what no bound excludes.

#: Growth factors of the limit: at first, and once something is below it.
EMPTY_LIMIT_GROWTH, LIMIT_GROWTH = 1.5, 1.2
#: Number of entries that may fit below the first limit; and number of entries below it, none of
#: which fits, at which `explore` gives up.
MIN_FITTING_ENTRIES, MAX_UNFIT_ENTRIES = 32, 4096
#: Largest limit, in multiples of the least bound of all, while too few entries are below it.
MAX_LIMIT_RATIO = 1000.0
#: Entries that are placed and bounded at once.
PLACED_AT_ONCE = 4096
#: Rows in the first block that is priced, and growth factor of the blocks.
FIRST_ROW_BLOCK, ROW_BLOCK_GROWTH = 64, 8


@dataclass(kw_only=True)
class Frontier:
    """The part of a space that waits to be bounded or priced.

    Attributes:
        bounded: mask of the entries that have a bound for plans that fit.
        waiting: those of them that wait.
        seconds: the bounds of `waiting`.
        unlimited, fitting: pairs that wait, with bounds for unlimited memory or for plans that fit.
        by_links, by_choices: placed pairs that wait, with bounds that ignore or use the choice.
    """

    entries: Entries
    pair_pricer: PairPricer
    best: BestPlans
    bounded: Array = field(init=False)
    waiting: Array = field(init=False)
    seconds: Array = field(init=False)
    unlimited: Pairs = field(init=False)
    fitting: Pairs = field(init=False)
    by_links: list[PlacedPairs] = field(default_factory=list[PlacedPairs], init=False)
    by_choices: list[PlacedPairs] = field(default_factory=list[PlacedPairs], init=False)

    def __post_init__(self) -> None:
        self.bounded = np.zeros(len(self.entries), dtype=bool)
        self.waiting, self.seconds = np.zeros(0, dtype=np.int64), np.zeros(0)
        self.unlimited = self.fitting = Pairs(
            entries=self.waiting, choices=self.waiting, bound=self.seconds
        )

    def ready_entries(self, limit: float) -> tuple[Array, float]:
        """Waiting entries that may have a plan below a limit, and the least bound of all that
        wait.
        """
        new, _ = self.entries.below(limit)
        new = new[~self.bounded[new]]
        if len(new):
            self.bounded[new] = True
            self.waiting = np.concatenate([self.waiting, new])
        self.seconds = self.entries.seconds(self.waiting, limit)
        return self.waiting[self.seconds < limit], float(self.seconds.min(initial=np.inf))

    def advance(self, ready: Array, limit: float) -> None:
        """Prices what is below `limit` seconds."""
        waits = self.seconds >= limit
        self.waiting, self.seconds = self.waiting[waits], self.seconds[waits]
        new = self.entries.unlimited_pairs(ready)
        ready_pairs, self.unlimited = Pairs.joined([self.unlimited, new]).split(limit)
        new = self.entries.fitting_pairs(ready_pairs, self.best.limit)
        ready_pairs, self.fitting = Pairs.joined([self.fitting, new]).split(limit)
        ready_pairs = ready_pairs.below(self.best.limit)
        if (placed := self.pair_pricer.bounded_by_links(self.entries, ready_pairs)) is not None:
            self.by_links.append(placed)
        by_links, self.by_links = self.by_links, []
        by_choices, self.by_choices = self.by_choices, []
        for placed in by_choices:
            self._price(placed, limit)
        for waiting in by_links:
            if len(placed := waiting.below(self.best.limit)):
                ready_placed, later = placed.split(limit)
                self.by_links.append(later)
                self._price(self.pair_pricer.bounded_by_choice(self.entries, ready_placed), limit)

    def _price(self, placed: PlacedPairs, limit: float) -> None:
        """Prices what is below a limit, sorted by bound; the rest waits."""
        size = FIRST_ROW_BLOCK
        while len(placed := placed.below(self.best.limit)):
            count = min(size, int((placed.bound < limit).sum()))
            if not count:
                self.by_choices.append(placed)
                return
            self.pair_pricer.price_placed(self.entries, placed.first(count), 1, None)
            placed, size = placed.after(count), size * ROW_BLOCK_GROWTH

    def close(self) -> None:
        """Counts what was not priced."""
        unfit = int(np.isinf(self.seconds).sum())
        priced = int(self.bounded.sum()) - len(self.waiting)
        self.best.counts["memory"] += unfit
        self.best.counts["bound"] += len(self.entries) - unfit - priced


def explore(explorers: Sequence[Explorer], counts: DeviceCounts) -> None:
    """Prices all plans of large spaces that no bound excludes; explorers then skip them.

    Does nothing where no entry that may fit is found soon.
    """
    limit = min((explorer.least_seconds(counts) for explorer in explorers), default=np.inf)
    if not np.isfinite(limit) or all(explorer.too_large(counts) for explorer in explorers):
        return
    best, frontiers = explorers[0].best, dict[int, Frontier]()
    fresh_entries = list[tuple[float, int, Array]]()
    farthest = limit * MAX_LIMIT_RATIO
    while sum(len(new) for *_, new in fresh_entries) < MIN_FITTING_ENTRIES:
        seen = _count_below(frontiers, limit)
        if seen >= MAX_UNFIT_ENTRIES or not limit < farthest:
            return
        limit = _grown(limit, LIMIT_GROWTH if seen else EMPTY_LIMIT_GROWTH, best.limit)
        fresh_entries = _ready_entries(explorers, counts, frontiers, limit)
        if limit == best.limit:
            break
    previous = np.inf
    while limit != previous:
        previous = limit
        for _, number, new in sorted(fresh_entries, key=lambda entry: entry[:2]):
            frontiers[number].advance(new, limit)
        if not np.isfinite(best.seconds) and _count_below(frontiers, limit) >= MAX_UNFIT_ENTRIES:
            return
        limit = _grown(limit, LIMIT_GROWTH, best.limit) if limit < best.limit else limit
        fresh_entries = _ready_entries(explorers, counts, frontiers, limit)
    for explorer in explorers:
        explorer.skip(counts, frontiers)
    for frontier in frontiers.values():
        frontier.close()


def _grown(limit: float, growth: float, farthest: float) -> float:
    """A limit one step farther; all the way where little would be left for another step."""
    return farthest if farthest <= limit * growth * LIMIT_GROWTH else limit * growth


def _count_below(frontiers: Mapping[int, Frontier], limit: float) -> int:
    """Number of entries below a limit."""
    return sum(len(frontier.entries.below(limit)[0]) for frontier in frontiers.values())


def _ready_entries(
    explorers: Sequence[Explorer],
    counts: DeviceCounts,
    frontiers: dict[int, Frontier],
    limit: float,
) -> list[tuple[float, int, Array]]:
    """(least bound, identity of the `Entries`, entries below the limit) of what is below a limit;
    adds frontiers for spaces that may have something below it.
    """
    for explorer in explorers:
        for entries in explorer.large(counts, limit):
            if id(entries) not in frontiers:
                frontiers[id(entries)] = Frontier(
                    entries=entries, pair_pricer=explorer.pair_pricer, best=explorer.best
                )
    return [
        (minimum, number, new)
        for number, frontier in frontiers.items()
        for new, minimum in [frontier.ready_entries(limit)]
    ]


# --------------------------------------------------------------------------------------------------
# A priced space.

#: Ratio of bandwidth inside a part to that between parts above which one part is searched first.
SLOW_LINK_RATIO = 100
#: With more than `MANY_DEVICES_PER_ROW` devices per row, or more than `MANY_DEVICES` in all, all
#: device counts are searched together, since no bound shows beforehand how many of them help; with
#: at most `FEW_DEVICES`, since their spaces are small and each has costs of its own.
MANY_DEVICES_PER_ROW, MANY_DEVICES, FEW_DEVICES = 8, 200_000, 128


@dataclass(frozen=True, kw_only=True)
class PricedSpace:
    """A priced space.

    Attributes:
        space: the space; of several, the last.
        rules: pinned rules, in the colours of the model.
        ranked_meshes: the meshes of the candidates of a ranking.
        devices: the most devices of any mesh of the space.
    """

    space: Space
    best: BestPlans
    rules: Rules | None
    ranked_meshes: list[RankedMesh]
    devices: int
    _points: list[PricedPlan] = field(default_factory=list[PricedPlan], init=False, repr=False)

    def landscape(self, count: int) -> tuple[PricedPlan, ...]:
        """The priced plans, thinned; cached at the first call."""
        if not self._points:
            self._points.extend(
                PricedPlan.of(point.decisions, point.seconds, point.peak_bytes, fits=point.fits)
                for point in self.best.landscape.points(count)
            )
        return tuple(self._points)

    def candidate(self, entry: RankedEntry[Candidate]) -> Candidate:
        """The candidate of an entry of the ranking."""
        return entry.decisions.on_mesh(*self.ranked_meshes[entry.index])

    def simplicity(self, decisions: Candidate, index: int) -> tuple[object, ...]:
        """Sort key for equally fast entries of the ranking."""
        return decisions.on_mesh(*self.ranked_meshes[index]).simplicity()


def priced_space(
    workload: Workload,
    topology: Topology,
    pins: Pins,
    ranking: Ranking[Candidate] | None = None,
    slack: float = np.inf,
    *,
    any_fit: bool = False,
    all_devices: bool = False,
) -> PricedSpace:
    """Prices the space of a model under pins."""
    rules = _require_supported(workload, topology, pins)
    devices_wanted = pins.mesh.devices if pins.mesh is not None else topology.devices
    all_spaces, runs = _explorers(
        workload, topology, pins, rules, devices_wanted, any_fit=any_fit, all_devices=all_devices
    )
    part_devices, largest = devices_within_slow_links(topology), max(devices for devices, _ in runs)
    counts_by_explorer = dict[Explorer, DeviceCounts]()
    for devices, explorer in runs:
        if devices:
            counts_by_explorer[explorer] = (*counts_by_explorer.get(explorer, ()), devices)
    many = largest > min(MANY_DEVICES, MANY_DEVICES_PER_ROW * all_spaces[-1].limits.batch)
    if (many or largest <= FEW_DEVICES) and not any_fit and not part_devices:
        _price_all_counts(counts_by_explorer, ranking, slack)
    else:
        if ranking is None and not any_fit:
            if part_devices:
                explore(
                    [explorer for devices, explorer in runs if devices == part_devices],
                    (part_devices,),
                )
            on_all = [explorer for devices, explorer in runs if 0 < devices == largest]
            if on_all and on_all[0].is_small((largest,)):  # its plan may exclude all other spaces
                explore(on_all[:1], (largest,))
                on_all = on_all[1:]
            explore(on_all, (largest,))
        # plans on all devices are usually fastest, unless a slow link joins them
        for devices, explorer in sorted(runs, key=lambda run: (run[0] != part_devices, -run[0])):
            if devices:
                explorer.run((devices,), ranking, slack)
    explorer = runs[0][1]
    if explorer.best.fastest is None and not any_fit:
        for searcher in dict.fromkeys(explorer for _, explorer in runs):
            searcher.minimum_memory()
    if explorer.best.minimum_memory is None and not any_fit:
        from shardlib.planner.no_plan import explain_empty

        raise explain_empty(workload, pins, devices_wanted)
    return PricedSpace(
        space=all_spaces[-1],
        best=explorer.best,
        rules=rules,
        ranked_meshes=explorer.ranked_meshes,
        devices=max(devices for devices, _ in runs),
    )


def _price_all_counts(
    counts_by_explorer: Mapping[Explorer, DeviceCounts],
    ranking: Ranking[Candidate] | None,
    slack: float,
) -> None:
    """Prices spaces on all numbers of devices at once, after a seed plan for each number; where a
    bound shows that none fits, only counts them.
    """
    if not all(explorer.too_large(counts) for explorer, counts in counts_by_explorer.items()):
        for explorer, counts in counts_by_explorer.items():
            if explorer.best.fastest is None:
                explorer.seed(counts)
        for counts in dict.fromkeys(counts_by_explorer.values()) if ranking is None else ():
            explore([own for own, listed in counts_by_explorer.items() if listed == counts], counts)
    for explorer, counts in counts_by_explorer.items():
        explorer.run(counts, ranking, slack)


def devices_within_slow_links(topology: Topology) -> int:
    """Devices per part of a machine whose parts are joined by far slower links than those inside
    them; 0 where there is none. A plan within one part is quick to find, and others are hardly
    faster.
    """
    first, *others = topology.tiers
    slow = others and first.bytes_per_s * SLOW_LINK_RATIO < min(tier.bytes_per_s for tier in others)
    return topology.devices // first.devices if slow else 0


def _explorers(
    workload: Workload,
    topology: Topology,
    pins: Pins,
    rules: Rules | None,
    device_count: int,
    *,
    any_fit: bool,
    all_devices: bool,
) -> tuple[list[Space], list[tuple[int, Explorer]]]:
    """The spaces, one for each attention strategy and dtype combination, and an explorer for each
    number of devices that a plan may use; 0 devices where a space has no plan.
    """
    pinned_choice = choice_of_rules(rules, workload.colouring, pins) if rules is not None else None
    all_spaces: list[Space] = []
    runs: list[tuple[int, Explorer]] = []
    for variant, space in spaces(workload, topology.chip, pins, pinned_choice):
        all_spaces.append(space)
        counts = [
            count
            for count in _counts(all_spaces[-1], variant, topology, device_count)
            if count == topology.devices or not all_devices
        ]
        explorers: dict[Topology, Explorer] = {}
        for devices in counts or [device_count]:
            machine = topology.in_use(devices)
            if machine not in explorers:
                explorers[machine] = Explorer(
                    variant,
                    all_spaces[-1],
                    machine,
                    fitting_bytes(topology),
                    runs[0][1] if runs else None,
                    any_fit=any_fit,
                )
            runs.append((devices if counts else 0, explorers[machine]))
    return all_spaces, runs


def _require_supported(workload: Workload, topology: Topology, pins: Pins) -> Rules | None:
    """Raises if the model or the machine does not support what is pinned.

    Returns:
        Pinned rules, in the colours of the model; None where none are pinned.
    """
    _require_framework_support(workload.framework, pins)
    require(facts_of_pins(pins), "the pins ask for what has no lowering", unsupported_for(workload))
    rules = rules_in_colours(pins.rules, workload.colouring) if pins.rules is not None else None
    if pins.mesh is not None and pins.mesh.devices > topology.devices:
        raise PinError(
            f"the mesh {pins.mesh} has {pins.mesh.devices} devices and {topology.name} has"
            f" {topology.devices}\nTry: a smaller mesh, or a topology of as many devices"
        )
    called, ours = "attention" in workload.problem.functions, bool(unsupported_for(workload))
    if ours and pins.context in ("ring", "ulysses") and not called:
        raise PinError(
            f"context={pins.context!r} is pinned, and {workload.problem.model} does not call"
            " attention as a function\nTry: shardlib.attention in the model, or"
            " context='all-gather'"
        )
    offloaded = [part for part in pins.offload or () if part != "disk"]
    if offloaded and not topology.chip.host_bytes_per_s:
        raise PinError(
            f"offload={offloaded} needs the rate between host memory and {topology.chip.name},"
            f" which {topology.name} does not give\n"
            "Try: host_bytes_per_s in the chip of a topology file"
        )
    return rules


def _require_framework_support(framework: Framework | None, pins: Pins) -> None:
    """Raises if the framework that runs the plan does not support what is pinned."""
    if framework is None:
        return
    axes = dict(pins.mesh) if pins.mesh is not None else dict(pins.axes)
    failures = framework.abilities.refusals(dict(pins.fixed), axes)
    if failures:
        what = f"framework {framework.name!r} cannot do what is pinned"
        raise_all(PinError, what, failures, hint="other pins, or no framework")


def _counts(
    space: Space, workload: Workload, topology: Topology, device_count: int
) -> Iterator[int]:
    """Numbers of devices that a plan may use, the largest first; where none of the usual ones has a
    mesh, the largest number that has one.
    """

    def has_mesh(devices: int) -> bool:
        return len(space.mesh_sizes(workload.colouring, devices)["micro"]) > 0

    if space.pins.mesh is not None:
        yield device_count
        return
    tried = device_counts(topology, space.limits.batch)
    others = (
        n
        for n in range(device_count, 0, -1)
        if n not in tried and place(MeshShape({"data": n}), topology) is not None
    )
    largest = next((n for n in itertools.chain(tried, others) if has_mesh(n)), 0)
    if largest in tried:
        yield from (n for n in tried if n <= largest)
    elif largest:
        yield largest
