"""Prices a space of plans: what is the fastest that fits, and what is the leanest?

The cost is a sum over items that each depend on few colours (`cost/items.py`): items with the same colours form a group, each group is tallied once per restricted
choice for all shapes at once, and a plan's cost is a sum of group tallies. Candidates (a mesh with microbatches) are priced in the order of a lower bound of their
step time, in blocks; when the bound of the next block is not below the fastest plan found, no plan of the rest can be faster, and the search ends with a proof.

There are two bounds. The first is quick: kernels and the collectives that compute waits for, in every microbatch, with the fewest recomputations, every group of axes on
the fastest links that it could have alone, all stages equally full, with the smallest bubble of any schedule; the least over all choices. Gathers of parameters and
reductions of gradients may hide behind compute, so it leaves them out. The second is what a candidate would cost with every group on the fastest links that it could have
alone, memory included; only candidates that it does not exclude are priced on each place that their axes can have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.cost.candidates import Candidates, candidates, distinct
from shardlib.cost.links import Links, best_links, role_slots
from shardlib.cost.pricing import Knobs, Sums, Totals, combine, fullest, least_seconds, sums
from shardlib.cost.shapes import Shapes
from shardlib.cost.tally import BYTES, COUNTS, ROWS, Pricer, Q
from shardlib.cost.terms import Compute, Transfer
from shardlib.cost.variants import mix, offloaded
from shardlib.hardware.placement import Placement, place, placements
from shardlib.hardware.topology import Topology
from shardlib.planning import space
from shardlib.planning.decision import What
from shardlib.planning.frontier import Group, Table, components, grouped, on_frontier, quantities, subsets
from shardlib.planning.outcomes import Best, Block, Seen
from shardlib.planning.pins import OFFLOAD
from shardlib.planning.ranking import Ranking
from shardlib.planning.workload import Workload
from shardlib.propagation.assignment import Choice

Array = np.ndarray
#: Candidates of the first block; each block is so many times as large as the one before, since a better plan to compare with leaves fewer to price.
FIRST, GROWTH = 64, 12
#: Candidates that are priced on all their places, at least.
NEAREST = 24
#: Candidates whose quickest choices are priced first, so that there is a plan to compare with.
SEEDS = 16


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
        self._groups: dict[tuple[str, bool, int] | None, tuple[Group, ...]] = {}
        self.sizes: dict[str, Array] = {}
        self._along = False
        self._uncut: float | None = None
        self._bounds: dict[bool, Array] = {}
        self._ordered = tuple(dict.fromkeys([*room.tensor, *(name for choice in room.choices for name in choice.tensor)]))
        self._cuttable = frozenset(self._ordered)
        self._groups_known = [(policy, routes, part) for policy in room.policies for routes in room.routes for part in range(1 + len(load.programs[policy, routes].points))]
        self._relevant = frozenset({*room.tensor, *(name for choice in room.choices for name in choice.tensor), load.colouring.batch_colour or "", load.colouring.sequence_colour or ""})

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
        self._along = bool((self.sizes["context"] > 1).any())
        self._bounds = self._bound()
        bounds, floors = np.minimum.reduce(list(self._bounds.values())), self._floors()
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
        """Seconds that no plan on so many devices can beat: the kernels of the uncut step without their launches, equally spread; the largest kernels are the most efficient."""
        if self._uncut is None:
            one = np.ones(1, dtype=np.int64)
            shapes = Shapes(batch=one, context=one, tensor=one, expert=one, fsdp=one)
            choice = Choice(batch=self.load.colouring.batch_colour)
            found: list[float] = []
            for program in self.load.programs.values():
                terms = [term for item in program.work for term in item.terms(choice) if isinstance(term, Compute)]
                tally = self.pricer.corrected(self.pricer.tally_terms([(0, term) for term in terms], shapes, len(self.load.counts)))
                found.append(float(tally[0, Q.COMPUTE, 0]) - self.topology.chip.launch_s * sum(term.trips for term in terms))
            self._uncut = min(found)
        return max(0.0, self._uncut) / devices

    def _choices(self, routes: bool, ways: int) -> list[Choice]:
        """The choices that fit a size of the tensor axis, with what the context and expert axes cut."""
        along = self.load.colouring.sequence_colour if self._along else None
        colours = self.load.colouring.colours
        return [replace(choice, context=along, expert=self.load.expert if routes else None) for choice in self.room.choices
                if bool(choice.tensor or choice.sequence) == (ways > 1) and all(colours[name].divisor % ways == 0 for name in choice.tensor)]

    def _bound(self) -> dict[bool, Array]:
        """Lower bounds of the step time by entry, where tokens are routed and where not; infinite where no choice fits."""
        sizes, room = self.sizes, self.room
        shapes, which = distinct({**sizes, "fsdp": np.ones_like(sizes["fsdp"]), "data": sizes["data"] * sizes["fsdp"]})
        alone = best_links({**dict.fromkeys(("stage", "data", "fsdp"), shapes.ones), "expert": shapes.expert, "context": shapes.context, "tensor": shapes.tensor}, self.topology)
        stages, micro = sizes["stage"], sizes["micro"]
        found: dict[bool, Array] = {}
        for routes in room.routes:
            ticks, halves = (np.full(len(shapes), np.inf) for _ in range(2))
            for policy in room.policies:
                for tick, half in self._least_busy(routes, policy, shapes, alone):
                    legal = True if routes else shapes.expert == 1
                    ticks, halves = np.minimum(ticks, np.where(legal, tick, np.inf)), np.minimum(halves, np.where(legal, half, np.inf))
            tick, half = ticks[which] / stages, halves[which] / stages
            least = np.minimum(tick / (room.pins.virtual_stages or space.MAX_VIRTUAL), half)
            found[routes] = tick * micro + (stages - 1) * np.where(np.isfinite(least), least, 0.0) + self.pricer.constants.step_s
        return found

    def _least_busy(self, routes: bool, policy: str, shapes: Shapes, alone: Links) -> Iterator[tuple[Array, Array]]:
        """For the sequence cut over tensor or not: the least seconds of one microbatch, and the least of them less twice the gradients of weights.

        Every group of items takes the choice that is the best for itself; infinite where the size of the tensor axis fits no choice.
        """
        groups, fixed = self._grouped(policy, routes, 0), self.room.pins.rules is not None
        table = Table(groups, self.pricer, shapes, len(self.load.counts), self._cuttable, (Compute, Transfer))
        along = self.load.colouring.sequence_colour if self._along else None
        for flag in dict.fromkeys(choice.sequence for choice in self.room.choices):
            mine = [choice for choice in self.room.choices if choice.sequence == flag]
            tick, half = (np.where((shapes.tensor > 1) | (flag is None), 0.0, np.inf) for _ in range(2))
            for number, group in enumerate(groups):
                names = [name for name in self._ordered if name in group.colours]
                options = {tuple(name for name in choice.tensor if name in group.colours) for choice in mine} if fixed else subsets(names)
                least = [np.full(len(shapes), np.inf), np.full(len(shapes), np.inf)]
                for cut in options:
                    fits = np.logical_and.reduce([self.load.colouring.colours[name].divisor % shapes.tensor == 0 for name in cut] + [shapes.tensor > (1 if cut else 0)])
                    choice = replace(mine[0], tensor=cut, context=along, expert=self.load.expert if routes else None)
                    for at, seconds in enumerate(self._busy(*table.part(number, choice), alone)):
                        least[at] = np.minimum(least[at], np.where(fits, seconds, np.inf))
                tick, half = tick + least[0], half + least[1]
            yield tick, half

    def _busy(self, rows: Array, values: Array, alone: Links) -> tuple[Array, Array]:
        """Seconds of one microbatch by shape: kernels with the collectives that compute waits for; and the same less twice the kernels for gradients of weights."""
        work = np.zeros((ROWS, values.shape[-1]))
        work[rows] = values.sum(0)
        work = self.pricer.corrected(work)
        seconds, slots = work[Q.COMPUTE], [slot for slot in role_slots("block") if COUNTS + slot in rows]
        if slots:
            counts, sizes = work[[COUNTS + slot for slot in slots]], work[[BYTES + slot for slot in slots]]
            seconds = seconds + ((counts * alone.latency[slots] + sizes * alone.per_byte[slots]) * self.pricer.waits(slots)).sum(0)
        return seconds, np.maximum(0.0, seconds - 2 * work[Q.WEIGHTS])

    def _floors(self) -> Array:
        """The fewest bytes that parameters and optimizer state can take, by entry of the space; the state may be in host memory."""
        sizes, room = self.sizes, self.room
        shapes, which = distinct({**sizes, "micro": np.ones_like(sizes["micro"])})
        table = Table(self._resting(), self.pricer, shapes, len(self.load.counts), self._cuttable)
        kept = (Q.PARAMETERS_CUT,) if self._offloads() else (Q.PARAMETERS_CUT, Q.STATE_CUT)
        most = Choice(batch=self.load.colouring.batch_colour, expert=self.load.expert if True in room.routes else None)

        def size(choice: Choice, part: tuple[str, ...]) -> Array:
            total = table.total(choice, frozenset(part))
            return np.asarray(sum(total[:, row].sum(0) for row in kept))

        least = size(most, ())
        for part in components(self._resting(), self._ordered):
            least = least + np.minimum.reduce([size(replace(most, tensor=subset), part) for subset in subsets(part)])
        return least[which] / sizes["stage"]

    def _offloads(self) -> list[tuple[str, ...]]:
        """What may be put in host memory, beside nothing."""
        pinned = self.room.pins.offload
        if self.topology.chip.host_bytes_per_s <= 0 or pinned is not None or self.room.lowered:
            return []
        return [*((part,) for part in OFFLOAD), OFFLOAD]

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
        return Block(entries=np.array(rows), places=places, c=candidates([(mesh, placement) for mesh, _, placement in places], [int(m) for m in micro], self.topology))

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
        for part in self._alike(entries):
            block = self._block(entries[part])
            if block is not None:
                seen = Seen(self.best, self.rows, block, self.capacity, reach, ranking)
                self._price_block(block, seen, every=ranking is not None, most=most)
                seen.close()

    def _on_best_links(self, entries: Array) -> Array:
        """Seconds of the fastest plan that fits of each entry, if every group of axes had the fastest links that it could have alone; infinite where none fits."""
        found = np.full(len(entries), np.inf)
        for part in self._alike(entries):
            chosen = entries[part]
            sizes = {axis: values[chosen] for axis, values in self.sizes.items()}
            shapes, shape = distinct(sizes)
            c = Candidates(**sizes, links=best_links(sizes, self.topology), shapes=shapes, shape=shape)
            places: list[tuple[MeshShape, tuple[str, ...], Placement]] = [(MeshShape({axis: int(sizes[axis][at]) for axis in MESH_AXES}), (), {}) for at in range(len(chosen))]
            block = Block(entries=chosen, places=places, c=c)
            seen = Seen(self.best, self.rows, block, self.capacity, 1, None, settles=False)
            self._price_block(block, seen, every=False)
            found[part] = seen.close()
        return found

    def _alike(self, entries: Array) -> list[Array]:
        """Positions of entries with the same size of the tensor axis, which have the same choices."""
        ways = self.sizes["tensor"][entries]
        return [np.flatnonzero(ways == size) for size in np.unique(ways)]

    def _price_block(self, block: Block, seen: Seen, *, every: bool, most: int | None = None) -> None:
        """Prices candidates with one size of the tensor axis; unless every plan is wanted, only choices on the frontier, or the first of them."""
        load, room, c = self.load, self.room, block.c
        rest = Table(self._resting(), self.pricer, c.shapes, len(load.counts), self._cuttable)
        for routes in room.routes:
            if not (self._bounds[routes][block.entries] < seen.limit).any():
                continue
            tables = {policy: self._tables(policy, routes, c.shapes) for policy in room.policies}
            choices = self._choices(routes, int(c.tensor[0]))
            for choice in choices if every else self._frontier(choices, rest, tables)[:most]:
                legal = space.legal(choice, room.limits, routes, c)
                if not legal.any():
                    continue
                legal &= self._quickest(choice, tables, c) < seen.limit
                if not legal.any():
                    continue
                resting = rest.total(choice)
                totals = {policy: (work.total(choice), [point.total(choice) for point in points]) for policy, (work, points) in tables.items()}
                for piped in (False, True):
                    some = np.flatnonzero(legal & ((c.stage > 1) == piped))
                    if len(some):
                        part = _part(c, some)
                        known = {policy: sums(work, resting, points, load.model, self.pricer, part) for policy, (work, points) in totals.items()}
                        self._price_choice(choice, routes, some, part, known, piped, seen)

    def _quickest(self, choice: Choice, tables: dict[str, tuple[Table, list[Table]]], c: Candidates) -> Array:
        """Seconds that no plan of a choice can beat, by candidate: what every stage is busy with, were all equally full."""
        slots = role_slots("block")
        found = np.full(len(c), np.inf)
        for work, _ in tables.values():
            total = self.pricer.corrected(work.total(choice)).sum(0)
            busy = total[Q.COMPUTE][c.shape]
            used = [slot for slot in slots if total[COUNTS + slot].any()]
            if used:
                counts, sizes = (total[[row + slot for slot in used]][:, c.shape] for row in (COUNTS, BYTES))
                busy = busy + ((counts * c.links.latency[used] + sizes * c.links.per_byte[used]) * self.pricer.waits(used)).sum(0)
            found = np.minimum(found, busy)
        return found / c.stage * c.micro

    def _frontier(self, choices: list[Choice], rest: Table, tables: dict[str, tuple[Table, list[Table]]]) -> list[Choice]:
        """The choices that can be part of a best plan, see `planning/frontier.py`."""
        if self.room.pins.rules is not None or len(choices) < 3:
            return choices
        groups = [group for policy, routes, part in self._groups_known for group in self._grouped(policy, routes, part)] + list(self._resting())
        parts = components(groups, self._ordered)
        every = [table for work, points in tables.values() for table in (work, *points)] + [rest]
        found: list[Choice] = []
        for flag in dict.fromkeys(choice.sequence for choice in choices):
            mine = [choice for choice in choices if choice.sequence == flag]
            cuts = [[tuple(name for name in choice.tensor if name in part) for part in parts] for choice in mine]
            vectors: list[dict[tuple[str, ...], Array]] = []
            for number, part in enumerate(parts):
                options = dict(zip((cut[number] for cut in cuts), mine, strict=True))
                values = quantities([[table.total(choice, frozenset(part)) for table in every] for choice in options.values()])
                vectors.append(dict(zip(options, values, strict=True)))
            keep = on_frontier(cuts, vectors)
            found += [choice for choice, kept in zip(mine, keep, strict=True) if kept]
        works = [work for work, _ in tables.values()]
        return sorted(found, key=lambda choice: min(float(work.total(choice)[:, Q.COMPUTE].sum()) for work in works))

    def _grouped(self, policy: str, routes: bool, part: int) -> tuple[Group, ...]:
        """The groups of the work items (part 0) or of a memory point (1, 2, ...) of a program."""
        key = policy, routes, part
        if key not in self._groups:
            program = self.load.programs[policy, routes]
            self._groups[key] = grouped(program.points[part - 1] if part else program.work, self._relevant)
        return self._groups[key]

    def _resting(self) -> tuple[Group, ...]:
        """The groups of parameters at rest."""
        if None not in self._groups:
            self._groups[None] = grouped(self.load.rest, self._relevant)
        return self._groups[None]

    def _tables(self, policy: str, routes: bool, shapes: Shapes) -> tuple[Table, list[Table]]:
        work, *points = (Table(self._grouped(policy, routes, part), self.pricer, shapes, len(self.load.counts), self._cuttable)
                         for part in range(1 + len(self.load.programs[policy, routes].points)))
        return work, points

    def _price_choice(self, choice: Choice, routes: bool, rows: Array, c: Candidates, known: dict[str, Sums], piped: bool, seen: Seen) -> None:
        """Prices every policy, ZeRO stage and schedule of one choice."""
        fast: dict[Knobs, Totals] = {}
        layers = max(self.load.counts, default=0)
        for policy in self.room.policies:
            for how in space.knobs(self.room, policy, piped):
                legal = space.legal_zero(how.zero, c) & (space.legal_schedule(how, layers, c) if piped else True)
                worth = legal & (least_seconds(known[policy], how, self.load.model, self.pricer, c) < seen.limit)
                quick = fast.get(how)
                if policy != "none" and quick is not None:  # where recomputing a part of the layers could do
                    worth |= legal & (quick.step_seconds < seen.limit) & (quick.peak_bytes > self.capacity)
                if not worth.any():
                    continue
                totals = combine(known[policy], how, self.load.model, self.pricer, c)
                what = What(policy=policy, choice=choice, routes=routes, how=how)
                if policy == "none":
                    fast[how] = totals
                self._variants(what, totals, fast.get(how), legal, rows, c, seen)

    def _variants(self, what: What, totals: Totals, fast: Totals | None, legal: Array, rows: Array, c: Candidates, seen: Seen) -> None:
        """Offers a price; where it does not fit also with something in host memory, and where more than enough is recomputed with less of it."""
        pins, wanted = self.room.pins, self.room.pins.remat_layers
        pinned = pins.offload or ()
        if pinned:
            totals = offloaded(totals, pinned, self.pricer, c.micro)
            fast = fast and offloaded(fast, pinned, self.pricer, c.micro)
            what = replace(what, how=replace(what.how, offload=pinned))
        if not wanted:
            seen.offer(what, totals, legal, rows)
        slower = totals.step_seconds >= seen.limit  # what follows only adds seconds
        self._mixed(what, totals, fast, legal, rows, c, seen)
        short = np.flatnonzero(legal & ~slower & (totals.peak_bytes > self.capacity))
        if not len(short) or wanted:
            return
        for parts in self._offloads():
            less = offloaded(totals.take(short), parts, self.pricer, c.micro[short])
            moved = replace(what, how=replace(what.how, offload=parts))
            seen.offer(moved, less, np.ones(len(short), dtype=bool), rows[short])
            if fast is not None and what.policy != "none":
                self._mixed(moved, less, offloaded(fast.take(short), parts, self.pricer, c.micro[short]), np.ones(len(short), dtype=bool), rows[short], _part(c, short), seen)

    def _mixed(self, what: What, lean: Totals, fast: Totals | None, legal: Array, rows: Array, c: Candidates, seen: Seen) -> None:
        """Offers the plan that recomputes no more layers than memory asks for."""
        wanted = self.room.pins.remat_layers
        if fast is None or what.policy == "none" or wanted == 0 or (self.room.lowered and wanted is None):
            return
        legal = legal & (fast.step_seconds < seen.limit)
        if wanted is None:
            legal = legal & (fast.peak_bytes > self.capacity) & (fast.step_seconds < lean.step_seconds)
        if not legal.any():
            return
        layers = fullest(what.how, self.load.model, c)
        if wanted:
            needed = np.where(layers > wanted, float(wanted), 0.0)
        else:
            saved, less = fast.device_bytes["activations"], lean.device_bytes["activations"]
            others = sum((np.maximum(size, lean.device_bytes[name]) for name, size in fast.device_bytes.items() if name != "activations"), np.zeros(len(c)))
            needed = np.ceil((others + saved - self.capacity) / np.maximum(saved - less, 1e-9) * layers - 1e-9)
        use = legal & (needed >= 1) & (needed < layers)
        for number in np.unique(needed[use]):
            at = np.flatnonzero(use & (needed == number))
            share = number / layers[at]
            seen.offer(replace(what, recomputed=int(number)), mix(fast.take(at), lean.take(at), share), np.ones(len(at), dtype=bool), rows[at])


def _part(c: Candidates, rows: Array) -> Candidates:
    """Some of the candidates; shapes stay shared."""
    return replace(c, **{name: getattr(c, name)[rows] for name in (*MESH_AXES, "micro", "shape")}, links=c.links.take(rows))
