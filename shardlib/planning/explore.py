"""Prices a space of plans: what is the fastest that fits, and what is the leanest?

The cost is a sum over items that each depend on few colours (`cost/items.py`), so a plan's cost is a sum of tallies that are made once for a model (`planning/ledger.py`).
Candidates (a mesh with microbatches) are priced in the order of a lower bound of their step time, in blocks; when the bound of the next block is not below the fastest
plan found, no plan of the rest can be faster, and the search ends with a proof.

There are three bounds. The first is that of `planning/bounds.py` for the best choice of colours; the second is the same for each choice and remat policy. The third is what
a candidate would cost with every group on the fastest links that it could have alone, memory included; only candidates that none of them excludes are priced on each place
that their axes can have.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.cost.candidates import Candidates, candidates, distinct
from shardlib.cost.links import best_links
from shardlib.cost.pricing import sums
from shardlib.cost.shapes import Shapes
from shardlib.cost.tally import ROWS, Pricer, Q
from shardlib.hardware.placement import Placement, place, placements
from shardlib.hardware.topology import Topology
from shardlib.planning import space
from shardlib.planning.bounds import Bounds, Program, step_seconds
from shardlib.planning.decision import What
from shardlib.planning.ledger import subsets
from shardlib.planning.outcomes import Best, Block, Seen
from shardlib.planning.ranking import Ranking
from shardlib.planning.rows import RowPricer, Rows, together
from shardlib.planning.workload import Workload
from shardlib.propagation.assignment import Choice

Array = np.ndarray
#: Candidates of the first block; each block is so many times as large as the one before, since a better plan to compare with leaves fewer to price.
FIRST, GROWTH = 64, 12
#: Candidates that are priced on all their places, at least.
NEAREST = 24
#: Candidates whose quickest choices are priced first, so that there is a plan to compare with.
SEEDS = 16
#: Rows (a candidate under a choice) that are priced at once, about.
ROWS_AT_ONCE = 16384


class Explorer:
    """Prices the plans of one space on one topology.

    Args:
        load: the model.
        room: the space.
        topology: the machine.
        capacity: usable bytes of a device.

    Attributes:
        best: what has been seen.
        rows: (mesh, microbatches, order) of the candidates that a ranking speaks of.
        sizes: every mesh with microbatches on the devices that are being priced, see `space.sizes`.
    """

    def __init__(self, load: Workload, room: space.Space, topology: Topology, capacity: float) -> None:
        self.pricer = Pricer(topology, load.stack)
        self.load, self.room, self.topology, self.capacity = load, room, self.pricer.topology, capacity
        self.best = Best()
        self.rows: list[tuple[MeshShape, int, tuple[str, ...]]] = []
        self.sizes: dict[str, Array] = {}
        self._uncut: float | None = None
        self._cuttable = tuple(dict.fromkeys([*room.tensor, *(name for choice in room.choices for name in choice.tensor)]))
        self._accounts = load.ledger.accounts(self._cuttable)
        self._programs: list[Program] = [(policy, routes) for routes in room.routes for policy in room.policies]
        self._row_pricer = RowPricer(load=load, room=room, pricer=self.pricer, topology=self.topology, capacity=capacity)

    def run(self, devices: int, ranking: Ranking[What] | None = None, slack: float = np.inf) -> None:
        """Prices the plans on some number of devices.

        Args:
            devices: how many a plan uses.
            ranking: takes the price of every plan that fits, among those that are priced.
            slack: with a ranking, price every candidate whose bound is at most so many times the fastest plan.
        """
        best, self.sizes = self.best, space.sizes(self.room, self.load.colouring, devices)
        reach = 1 if ranking is None else slack
        if self._least_seconds(devices) >= best.seconds * reach or not len(self.sizes["micro"]) or not self.room.choices or not self.room.routes:
            return
        shapes, self._shape = distinct(self.sizes)
        self._values = self.pricer.values(self.load.ledger.book, shapes)
        along = self.load.colouring.sequence_colour if (self.sizes["context"] > 1).any() else None
        self._bounds = Bounds(self.load, self.room, self.pricer, self._values, self._cuttable, along)
        bounds, floors = self._bound(), self._floors()
        within = (floors <= self.capacity) & np.isfinite(bounds)
        best.counts["memory"] += int((floors > self.capacity).sum())
        order = np.flatnonzero(within)[np.argsort(bounds[within], kind="stable")]
        flat = len(self.topology.tiers) == 1 and len(self.topology.tiers[0].shape) == 1
        if ranking is not None or flat or self.room.lowered:
            self._in_order(order, bounds, reach, ranking)
        else:
            self._narrowed(order, bounds)
        if best.decision is None:
            self._price(np.argsort(np.where(np.isfinite(bounds), floors, np.inf), kind="stable")[:FIRST], np.inf, ranking)

    def _in_order(self, order: Array, bounds: Array, reach: float, ranking: Ranking[What] | None) -> None:
        """Prices candidates in the order of their bounds, until no other can be faster."""
        done, size = 0, 16 * FIRST
        while done < len(order) and bounds[order[done]] < self.best.seconds * reach:
            block = order[done:done + size]
            done, size = done + len(block), size * GROWTH
            self._price(block[bounds[block] < self.best.seconds * reach], reach, ranking)
        self.best.counts["bound"] += len(order) - done

    def _narrowed(self, order: Array, bounds: Array) -> None:
        """Prices candidates on the best links first, and those that this does not exclude on every place that they can have."""
        self._price(order[:SEEDS], 1, None, most=2)
        done, size, entries, least = 0, FIRST, np.zeros(0, dtype=np.int64), np.zeros(0)
        while done < len(order) and bounds[order[done]] < self.best.seconds:
            block = order[done:done + size]
            done, size = done + len(block), size * GROWTH
            block = block[bounds[block] < self.best.seconds]
            entries, least = np.concatenate([entries, block]), np.concatenate([least, self._on_best_links(block)])
            nearest = np.argsort(least, kind="stable")[:NEAREST]
            self._price(entries[nearest[np.isfinite(least[nearest])]], 1, None)
            entries, least = np.delete(entries, nearest), np.delete(least, nearest)
        while len(entries) and (least < self.best.seconds).any():
            nearest = np.argsort(least, kind="stable")[:NEAREST]
            self._price(entries[nearest[least[nearest] < self.best.seconds]], 1, None)
            entries, least = np.delete(entries, nearest), np.delete(least, nearest)
        self.best.counts["bound"] += len(order) - done

    def _least_seconds(self, devices: int) -> float:
        """Seconds that no plan on so many devices can beat: the kernels of the uncut step, equally spread; the largest kernels are the most efficient."""
        if self._uncut is None:
            one = np.ones(1, dtype=np.int64)
            values = self.pricer.values(self.load.ledger.book, Shapes(batch=one, context=one, tensor=one, expert=one, fsdp=one))
            choice = Choice(batch=self.load.colouring.batch_colour)
            self._uncut = min(self._uncut_seconds(self._accounts[program].on(values, np.zeros(1, dtype=np.int64)).total(choice)) for program in self._programs)
        return self._uncut / devices

    def _uncut_seconds(self, total: Array) -> float:
        """Seconds of the kernels of a tally on one device."""
        return float(self.pricer.corrected(total[0])[:, Q.COMPUTE].sum())

    def _choices(self, ways: int) -> list[Choice]:
        """The choices that fit a size of the tensor axis."""
        colours = self.load.colouring.colours
        return [choice for choice in self.room.choices
                if bool(choice.tensor or choice.sequence) == (ways > 1) and all(colours[name].divisor % ways == 0 for name in choice.tensor)]

    def _bound(self) -> Array:
        """Lower bounds of the step time by entry; infinite where no choice fits."""
        stages, micro, which = self.sizes["stage"], self.sizes["micro"], self._values.which[self._shape]
        found = [step_seconds(self._bounds.least(program)[:, which], stages, micro, self.room, zero_bubble=space.zero_bubble(self.room, program[0])) for program in self._programs]
        return np.minimum.reduce(found) + self.pricer.constants.step_s

    def _floors(self) -> Array:
        """The fewest bytes that parameters and optimizer state can take, by entry of the space; the state may be in host memory."""
        kept = [Q.PARAMETERS_CUT] if self._row_pricer.offloads() else [Q.PARAMETERS_CUT, Q.STATE_CUT]
        most = self._bounds.choice(Choice(batch=self.load.colouring.batch_colour), True in self.room.routes)
        account, every = self._accounts[None], np.arange(len(self._values.shapes))

        def size(part: tuple[str, ...], cut: tuple[str, ...]) -> Array:
            _, tally = account.of(part, replace(most, tensor=cut))
            return tally.folded(account.segments * ROWS, ROWS, kept).on(self._values, every).sum(0)

        least = size((), ()) + sum((np.minimum.reduce([size(part, cut) for cut in subsets(part)]) for part in account.parts), np.zeros(len(every)))
        return least[self._shape] / self.sizes["stage"]

    def _block(self, entries: Array) -> Block | None:
        known: dict[MeshShape, list[tuple[tuple[str, ...], Placement]]] = {}
        wanted = self.room.pins.axis_order
        places: list[tuple[MeshShape, tuple[str, ...], Placement]] = []
        rows: list[int] = []
        for entry in entries:
            mesh = MeshShape({axis: int(self.sizes[axis][entry]) for axis in MESH_AXES})
            if mesh not in known:
                known[mesh] = self._places(mesh, wanted)
            for order, placement in known[mesh]:
                places.append((mesh, order, placement))
                rows.append(int(entry))
        if not rows:
            return None
        micro = self.sizes["micro"][rows]
        c = candidates([(mesh, placement) for mesh, _, placement in places], [int(m) for m in micro], self.topology)
        return Block(entries=np.array(rows), places=places, c=replace(c, shapes=self._values.shapes, shape=self._shape[rows]), choices=[])

    def _places(self, mesh: MeshShape, wanted: tuple[str, ...] | None) -> list[tuple[tuple[str, ...], Placement]]:
        if wanted is not None:
            order = tuple(axis for axis in (*wanted, *(a for a in MESH_AXES if a not in wanted)) if axis in mesh)
            placement = place(mesh, self.topology, order)
            return [] if placement is None else [(() if order == tuple(mesh) else order, placement)]
        if self.room.lowered:
            placement = place(mesh, self.topology)
            return [] if placement is None else [((), placement)]
        return placements(mesh, self.topology)

    def _price(self, entries: Array, reach: float, ranking: Ranking[What] | None, most: int | None = None) -> None:
        """Prices entries on every place that their axes can have; with `most`, only so many of the quickest choices."""
        block = self._block(entries)
        if block is not None:
            seen = Seen(self.best, self.rows, block, self.capacity, reach, ranking)
            self._price_block(block, seen, most)
            seen.close()

    def _on_best_links(self, entries: Array) -> Array:
        """Seconds of the fastest plan that fits of each entry, if every group of axes had the fastest links that it could have alone; infinite where none fits."""
        sizes = {axis: values[entries] for axis, values in self.sizes.items()}
        c = Candidates(**sizes, links=best_links(sizes, self.topology), shapes=self._values.shapes, shape=self._shape[entries])
        places: list[tuple[MeshShape, tuple[str, ...], Placement]] = [(MeshShape({axis: int(sizes[axis][at]) for axis in MESH_AXES}), (), {}) for at in range(len(entries))]
        block = Block(entries=entries, places=places, c=c, choices=[])
        seen = Seen(self.best, self.rows, block, self.capacity, 1, None, settles=False)
        self._price_block(block, seen)
        return seen.close()

    def _price_block(self, block: Block, seen: Seen, most: int | None = None) -> None:
        """Prices candidates under every choice that fits, or the quickest of them."""
        waiting: list[Rows] = []
        for ways in np.unique(block.c.tensor):
            for routes in self.room.routes:
                waiting += self._rows(block, int(ways), routes, seen.limit, most)
                if sum(map(len, waiting)) > ROWS_AT_ONCE:
                    self._row_pricer.price(together(waiting, block.c), seen)
                    waiting = []
        if waiting:
            self._row_pricer.price(together(waiting, block.c), seen)

    def _rows(self, block: Block, ways: int, routes: bool, limit: float, most: int | None) -> list[Rows]:
        """The rows of candidates with one size of the tensor axis that their bounds do not exclude."""
        mine = np.flatnonzero((block.c.tensor == ways) & (True if routes else block.c.expert == 1))
        c = block.c.take(mine)
        which = self._values.which[c.shape]
        alive: list[tuple[float, Choice, Array, dict[str, Array]]] = []
        for given in self._choices(ways):
            choice = self._bounds.choice(given, routes)
            ticks = {policy: self._bounds.tick((policy, routes), choice)[:, which] for policy in self.room.policies}
            least = [step_seconds(ticks[policy], c.stage, c.micro, self.room, zero_bubble=space.zero_bubble(self.room, policy)) for policy in self.room.policies]
            bound = np.minimum.reduce(least)
            at = np.flatnonzero(space.legal(choice, self.room.limits, routes, c) & (bound < limit))
            if len(at):
                alive.append((float(bound.sum()), choice, at, ticks))
        alive = sorted(alive, key=lambda one: one[0])[:most]  # of choices that cost the same, a plan has the quickest
        return self._summed(block, c, mine, routes, alive) if alive else []

    def _summed(self, block: Block, c: Candidates, mine: Array, routes: bool, alive: list[tuple[float, Choice, Array, dict[str, Array]]]) -> list[Rows]:
        """Rows with their quantities."""
        shapes = np.unique(c.shape[np.unique(np.concatenate([at for _, _, at, _ in alive]))])
        accounts = {policy: self._accounts[policy, routes].on(self._values, shapes) for policy in self.room.policies}
        resting = self._accounts[None].on(self._values, shapes)
        found: list[Rows] = []
        for _, choice, at, ticks in alive:
            some = c.take(at)
            local = replace(some, shape=np.searchsorted(shapes, some.shape))
            rest = resting.total(choice)[0]
            totals = {policy: account.total(choice) for policy, account in accounts.items()}
            known = {policy: sums(total[0], rest, list(total[1:]), self.load.model, self.pricer, local) for policy, total in totals.items()}
            found.append(Rows(candidates=mine[at], choices=np.full(len(at), len(block.choices)), c=some, sums=known, ticks={policy: tick[:, at] for policy, tick in ticks.items()}))
            block.choices.append((choice, routes))
        return found
