"""Explores a space of plans for the fastest plan that fits, and for the minimum-memory plan.

The cost is a sum over items that each depend on few colours (`cost/items/items.py`), so a plan's
cost is a sum of tallies that are made once for a model (`planning/space/cost_tables.py`). Meshes
with microbatches, and then each of them under every choice of colours
(`planning/bounds/frontier.py`), are taken in the order of a lower bound of their step time; when
the bound of the next is not below the fastest plan found, no plan of the rest can be faster, and
the search ends with a proof. Where a machine has far more devices than the batch has rows, the
meshes of all numbers of devices are taken together.

Each bound is asked of fewer candidates than the one before: the kernels of the uncut step, equally
spread; the fastest plan that could fit (`planning/bounds/step_time_that_fits.py`) with each
component of the colours cut as is best for it; the same under one choice; and that on the links of
each place that the axes can have. Only what none of them excludes is priced.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardlib.axes import MESH_AXES
from shardlib.cost.pricing.candidates import distinct
from shardlib.cost.tables.pricer import Pricer
from shardlib.hardware.topology import Topology
from shardlib.planning.bounds.frontier import Entries
from shardlib.planning.bounds.step_time_that_fits import ROUNDING, Fitting
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.offers.incumbents import Best, Place
from shardlib.planning.offers.ranking import Ranking
from shardlib.planning.offers.variants import Variants
from shardlib.planning.search.in_order import ascending, blocks
from shardlib.planning.search.pair_prices import PairPricer, Placed
from shardlib.planning.search.uncut import Uncut
from shardlib.planning.space import meshes
from shardlib.planning.space.space import Space
from shardlib.planning.space.table_components import Scope
from shardlib.planning.space.workload import Workload

Array = np.ndarray
#: Entries whose memory is bounded first, and of which a first block is priced.
AHEAD, FIRST = 1024, 1024
#: Most entries that are placed at once, and pairs on places of them that are bounded first.
PLACED, FEW = 8192, 4096
#: Pairs that are priced on all their places at first; each time so many times as many as before,
#: and many times as many after those that gave no better plan to compare with.
NEAREST, MORE, MANY = 128, 4, 16
#: Entries whose quickest choice is priced before all others where every entry has one place, so
#: that there is a plan to compare with.
SEEDS = 4
#: Parameters, gradients and the state of an optimizer over parameters, about.
TIGHT = 4
#: Where there are no more entries than so many, the pairs with the least bounds, so many of them,
#: are the plans to compare with.
SMALL, QUICKEST = 512, 32
#: A space with no more entries is explored alone, if it is the first.
MODERATE = 4096
#: Numbers of devices that are searched together.
Counts = tuple[int, ...]


class Explorer:
    """Prices the plans of one space on one topology.

    Args:
        load: the model.
        space: the space.
        topology: the machine.
        capacity: usable bytes of a device.
        before: an explorer of the same model in other dtypes, whose results this one adds to.
        any_plan: whether the first plan that fits is enough.

    Attributes:
        best: what has been seen.
        rows: places of the candidates that a ranking speaks of.
    """

    def __init__(
        self,
        load: Workload,
        space: Space,
        topology: Topology,
        capacity: float,
        before: Explorer | None = None,
        *,
        any_plan: bool = False,
    ) -> None:
        self.load, self.space, self.pricer = load, space, Pricer(topology, load.profile)
        self._uncut = Uncut(load=load, space=space, pricer=self.pricer)
        self.topology = self.pricer.topology
        self.best = Best() if before is None else before.best
        self.rows: list[Place] = [] if before is None else before.rows
        self._any_plan, self._explored = any_plan, dict[Counts, list[Entries]]()
        self._done, self._scopes = set[int](), dict[bool, Scope]()
        self._most = capacity * (1 + ROUNDING)
        self._large = set[int]()
        self._cuttable = tuple(
            dict.fromkeys(
                [*space.tensor, *(name for choice in space.choices for name in choice.tensor)]
            )
        )
        self.pairs = PairPricer(
            variants=Variants(load=load, space=space, pricer=self.pricer, capacity=capacity),
            cuttable=self._cuttable,
            best=self.best,
            rows=self.rows,
        )
        pinned = space.pins.offload
        self._fitting = Fitting(
            space=space,
            pricer=self.pricer,
            capacity=capacity,
            offloads=(pinned,) if pinned else ((), *self.pairs.variants.offloads()),
        )

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is of no interest."""
        return 0.0 if self._any_plan and self.best.fastest is not None else self.best.limit

    def run(
        self, counts: Counts, ranking: Ranking[Candidate] | None = None, slack: float = np.inf
    ) -> None:
        """Prices the plans on some numbers of devices."""
        reach = 1 if ranking is None else slack
        for entries in self._entries(counts, reach):
            if id(entries) not in self._done:
                self._explore(entries, reach, ranking)

    def seed(self, counts: Counts) -> None:
        """Prices the entry of the least bound on each of some numbers of devices, among those that
        shard neither sequences nor experts, so that there is a plan to compare with.
        """
        if not (self.space.choices and self.space.routes):
            return
        sampled = [self._few(devices) for devices in counts]
        for entries in self._of([sizes for sizes in sampled if len(sizes["micro"])]):
            bounds = entries.seconds(np.arange(len(entries)))
            order = np.lexsort((bounds, _devices(entries.sizes)))
            _, first = np.unique(_devices(entries.sizes)[order], return_index=True)
            best = order[first]
            pairs = entries.pairs(best[np.isfinite(bounds[best])])
            self.pairs.price(entries, pairs.firsts(), 1, None)

    def _few(self, devices: int) -> dict[str, Array]:
        """Sizes of meshes of the simplest entries on some number of devices."""
        sizes = meshes.sizes(self.space, self.load.colouring, devices)
        plain = np.flatnonzero((sizes["context"] == 1) & (sizes["expert"] == 1))
        return {axis: size[plain] for axis, size in sizes.items()}

    def too_large(self, counts: Counts) -> bool:
        """Whether bounds say that no plan on some numbers of devices fits; not asked of a model
        that is far smaller than their memory.
        """
        if TIGHT * self._uncut.resting_bytes / max(counts) < self._most:
            return False
        all_entries = self._entries(counts, 1)
        return not any((entries.fewest_bytes <= self._most).any() for entries in all_entries)

    def least_seconds(self, counts: Counts) -> float:
        """Seconds that no plan on some numbers of devices beats; infinite where a good plan to
        compare with is not looked for.
        """
        searchable = self.space.choices and self.space.routes and not self.flat
        return self._uncut.seconds / max(counts) if searchable else np.inf

    def large(self, counts: Counts, limit: float) -> list[Entries]:
        """Entries on some numbers of devices that may have a plan faster than a limit, where they
        are many.

        Args:
            limit: seconds.
        """
        if self.least_seconds(counts) >= limit:
            return []
        return [entries for entries in self._entries(counts, 1) if len(entries) > SMALL]

    def is_small(self, counts: Counts) -> bool:
        """Whether the entries on some numbers of devices are soon looked through."""
        return all(len(entries) <= MODERATE for entries in self._entries(counts, 1))

    def leave_out(self, counts: Counts, done: Container[int]) -> None:
        """Leaves out entries on some numbers of devices, by identity."""
        self._done |= {
            id(entries) for entries in self._explored.get(counts, []) if id(entries) in done
        }

    def _entries(self, counts: Counts, reach: float) -> list[Entries]:
        """The entries on some numbers of devices, with experts treated in each way; without those
        on which no plan is fast enough.
        """
        if counts in self._explored:
            return self._explored[counts]
        if not (self.space.choices and self.space.routes):
            return []
        limit = self.limit * reach
        enough = [devices for devices in counts if not self._uncut.slower(devices, limit)]
        if self.best.fastest is None:
            large = {n for n in enough if self._uncut.resting_bytes / n > self._most}
            self._large |= large
            enough = [devices for devices in enough if devices not in large]
        return self._made(counts, enough)

    def _made(self, counts: Counts, enough: Sequence[int]) -> list[Entries]:
        """See `_entries`."""
        mesh_sizes = [meshes.sizes(self.space, self.load.colouring, devices) for devices in enough]
        made_entries = self._of([sizes for sizes in mesh_sizes if len(sizes["micro"])])
        if made_entries:
            self._explored[counts] = made_entries
        return made_entries

    def _of(self, mesh_sizes: Sequence[dict[str, Array]]) -> list[Entries]:
        """The entries of some meshes with microbatches, with experts treated in each way."""
        if not mesh_sizes:
            return []
        sizes = {
            axis: np.concatenate([sizes_of[axis] for sizes_of in mesh_sizes])
            for axis in mesh_sizes[0]
        }
        shapes, shape = distinct(sizes)
        values = self.pricer.values(self.load.ledger.book, shapes.and_one())
        self._uncut = replace(self._uncut, values=values)
        return [
            Entries(self._scope(routes), self.pricer, self._fitting, sizes, values, shape)
            for routes in sorted(self.space.routes, reverse=True)  # hardly ever slower
        ]

    def _scope(self, routes: bool) -> Scope:
        along = self.load.colouring.sequence_colour  # where nothing shards it, it costs nothing
        if routes not in self._scopes:
            self._scopes[routes] = Scope(
                load=self.load,
                space=self.space,
                cuttable=self._cuttable,
                along=along,
                routes=routes,
            )
        return self._scopes[routes]

    def _explore(self, entries: Entries, reach: float, ranking: Ranking[Candidate] | None) -> None:
        """Prices the entries that could fit."""
        if self.best.fastest is None and not (entries.fewest_bytes <= self._most).any():
            self.best.counts["memory"] += len(entries)
            return
        order, fastest = entries.below(self.limit * reach)
        done = 0
        for start, end in blocks(AHEAD, len(order)):
            if fastest[start] >= self.limit * reach:
                break
            block, done = order[start:end], end
            self._fitted(entries, block[fastest[start:end] < self.limit * reach], reach, ranking)
        self.best.counts["bound"] += len(entries) - done

    def _fitted(
        self, entries: Entries, selected: Array, reach: float, ranking: Ranking[Candidate] | None
    ) -> None:
        """Prices those of some entries that could fit, in the order of a bound of what does."""
        bounds = entries.seconds(selected)
        self.best.counts["memory"] += int((~np.isfinite(bounds)).sum())
        order = ascending(bounds, self.limit * reach)
        if ranking is not None or self.flat:
            self._in_order(entries, selected[order], bounds[order], reach, ranking)
        else:
            self._narrowed(entries, selected[order], bounds[order])

    @property
    def flat(self) -> bool:
        """Whether all links are alike, so that a mesh has one place."""
        return len(self.topology.tiers) == 1 and len(self.topology.tiers[0].shape) == 1

    def _in_order(
        self,
        entries: Entries,
        order: Array,
        bounds: Array,
        reach: float,
        ranking: Ranking[Candidate] | None,
    ) -> None:
        """Prices entries in the order of their bounds, until no other can be faster."""
        self.pairs.price(entries, entries.pairs(order[:SEEDS], self.limit).firsts(), 1, None)
        for start, end in blocks(FIRST, len(order)):
            limit = self.limit * reach
            self.pairs.price(
                entries,
                entries.pairs(order[start:end][bounds[start:end] < limit], limit),
                reach,
                ranking,
            )

    def _narrowed(self, entries: Entries, order: Array, bounds: Array) -> None:
        """Prices entries that no bound excludes on every place that they can have."""
        small = len(entries) <= SMALL
        for start, end in blocks(FIRST, len(order), PLACED):
            pairs = entries.pairs(order[start:end][bounds[start:end] < self.limit], self.limit)
            if (near := self.pairs.near(entries, pairs)) is not None:
                for begin, until in blocks(QUICKEST if small else FEW, len(near)):
                    self._settle(entries, near.after(begin).first(until - begin).below(self.limit))

    def _settle(self, entries: Entries, near: Placed) -> None:
        """Prices pairs on places in the order of their bounds, until no other can be faster."""
        placed, size = self.pairs.bounded(entries, near), NEAREST
        while len(placed := placed.below(self.limit)):
            limit, count = self.limit, min(size, len(placed))
            self.pairs.price_placed(entries, placed.first(count), 1, None)
            placed = placed.after(count)
            size *= MORE if self.limit < limit else MANY

    def _leanest_first(self) -> Iterator[Entries]:
        """All entries that may have the minimum-memory plan, those on the most devices first."""
        seen = {*self._explored, *((devices,) for devices in self._large)}
        for counts in sorted(seen, reverse=True):
            if self._uncut.resting_bytes / max(counts) < self.best.minimum_memory_bytes:
                yield from self._explored.get(counts) or self._made(counts, counts)

    def minimum_memory(self) -> None:
        """Finds the minimum-memory plan, in the order of the least bytes that an entry can take;
        memory does not depend on places.
        """
        best = self.best
        for entries in self._leanest_first():
            bounds = entries.fewest_bytes
            order = np.argsort(bounds, kind="stable")
            for start, end in blocks(FIRST, len(order)):
                block, limit, size = order[start:end], best.minimum_memory_bytes, NEAREST
                pairs = entries.pairs(block[bounds[block] < limit], limit, minimum_memory=True)
                while len(pairs := pairs.below(best.minimum_memory_bytes)):
                    self.pairs.price(entries, pairs.first(size), np.inf, None, usual=True)
                    pairs, size = pairs.after(size), size * MORE


def _devices(sizes: Mapping[str, Array]) -> Array:
    """Devices of each mesh."""
    return np.prod([sizes[axis] for axis in MESH_AXES], axis=0)
