"""Prices a space of plans: what is the fastest that fits, and what is the leanest?

The cost is a sum over items that each depend on few colours (`cost/items.py`): items with the same colours form a group, each group is tallied once per restricted
choice for all shapes at once, and a plan's cost is a sum of group tallies. Candidates (a mesh with microbatches) are priced in the order of a lower bound of their
step time, in blocks; when the bound of the next block is not below the fastest plan found, no plan of the rest can be faster, and the search ends with a proof.

The bound of a candidate: kernels and the collectives that compute waits for, in every microbatch, with the fewest recomputations, every axis on the fastest links that it
could have alone, all stages equally full, with the smallest bubble of any schedule; the least over all choices. Gathers of parameters and reductions of gradients may
hide behind compute, so the bound leaves them out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.cost.links import Links, links, role_slots
from shardlib.cost.pricing import Candidates, Knobs, Sums, Totals, candidates, combine, distinct, fullest, mix, offloaded, sums
from shardlib.cost.shapes import Shapes
from shardlib.cost.tally import BYTES, COUNTS, ROWS, Pricer, Q
from shardlib.cost.terms import Compute, Item, Term, Transfer
from shardlib.hardware.placement import Placement, place, placements
from shardlib.hardware.topology import Topology
from shardlib.planning import space
from shardlib.planning.decision import Decision, What
from shardlib.planning.pins import OFFLOAD
from shardlib.planning.ranking import Ranking
from shardlib.planning.workload import Workload
from shardlib.propagation.assignment import Choice

Array = np.ndarray
#: Candidates of the first block, which finds a plan to compare with, and of the others.
FIRST, BLOCK = 512, 1 << 15
_ALL: tuple[type[Term], ...] = ()


class Terms:
    """The terms of items under the choices that were asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Choice], tuple[tuple[int, Term], ...]] = {}

    def of(self, number: int, items: list[Item], choice: Choice) -> tuple[tuple[int, Term], ...]:
        """(segment, term) of the items of a group.

        Args:
            number: of the group; the caller keeps the items of a group the same.
            items: of the group.
            choice: restricted to the colours of the group.
        """
        key = number, choice
        if key not in self._known:
            self._known[key] = tuple((item.segment, term) for item in items for term in item.terms(choice))
        return self._known[key]


class Table:
    """Sums of items, kept by the part of the choice that they depend on."""

    def __init__(self, items: list[Item], relevant: frozenset[str], pricer: Pricer, shapes: Shapes, classes: int, kinds: tuple[type[Term], ...] = _ALL) -> None:
        groups: dict[frozenset[str], list[Item]] = defaultdict(list)
        for item in items:
            groups[item.colours & relevant].append(item)
        self._groups = tuple(groups.items())
        self._pricer, self._shapes, self._classes, self._kinds = pricer, shapes, classes, kinds
        self._known: dict[tuple[frozenset[str], Choice], Array] = {}

    def total(self, choice: Choice) -> Array:
        """Quantities of all items under a choice: array [segments, rows, shapes]."""
        total = np.zeros((self._classes + 2, ROWS, len(self._shapes)))
        for colours, items in self._groups:
            key = colours, choice.restrict(colours)
            if key not in self._known:
                kinds = {"kinds": self._kinds} if self._kinds else {}
                self._known[key] = self._pricer.tally(items, key[1], self._shapes, self._classes, **kinds)
            total += self._known[key]
        return total


@dataclass
class Best:
    """What a search has seen so far.

    Attributes:
        seconds, decision: of the fastest plan that fits.
        lean_bytes, lean: of the leanest plan.
        by_mesh: the fastest plan of every mesh that was priced, or the leanest where none fits: (seconds, bytes, decision); seconds are infinite where it does not fit.
        counts: plans by outcome.
    """

    seconds: float = np.inf
    decision: Decision | None = None
    lean_bytes: float = np.inf
    lean: Decision | None = None
    by_mesh: dict[MeshShape, tuple[float, float, Decision]] = field(default_factory=dict[MeshShape, tuple[float, float, Decision]])
    counts: dict[str, int] = field(default_factory=lambda: {"priced": 0, "memory": 0, "indivisible": 0, "bound": 0})


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Candidates that are priced together.

    Attributes:
        entries: index of each candidate in the space.
        places: (mesh, order, placement) of each.
        c: the candidates.
    """

    entries: Array
    places: list[tuple[MeshShape, tuple[str, ...], Placement]]
    c: Candidates


class Explorer:
    """Prices the plans of one space on one topology.

    Args:
        load: the model.
        room: the space.
        topology: the machine.
        capacity: usable bytes of a device.

    Attributes:
        best: what has been seen.
        chosen: seconds of the decision that is chosen so far; ties go to simpler ones, so it may be above the least by rounding.
        rows: (mesh, microbatches, order) of the candidates that a ranking speaks of.
    """

    def __init__(self, load: Workload, room: space.Space, topology: Topology, capacity: float) -> None:
        self.load, self.room, self.topology, self.capacity = load, room, topology, capacity
        self.pricer = Pricer(topology)
        self.best, self.chosen = Best(), np.inf
        self.rows: list[tuple[MeshShape, int, tuple[str, ...]]] = []
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
        self._bound()
        bounds, floors = self._bounds.min(axis=0), self._floors()
        within = (floors <= self.capacity) & np.isfinite(bounds)
        best.counts["memory"] += int((floors > self.capacity).sum())
        order = np.flatnonzero(within)[np.argsort(bounds[within], kind="stable")]
        done = 0
        while done < len(order) and bounds[order[done]] < best.seconds * reach:
            block = order[done:done + (FIRST if done == 0 else BLOCK)]
            done += len(block)
            self._price(block[bounds[block] < best.seconds * reach], reach, ranking)
        best.counts["bound"] += len(order) - done
        if best.decision is None:
            self._price(np.argsort(np.where(np.isfinite(bounds), floors, np.inf), kind="stable")[:FIRST], np.inf, ranking)

    def _least_seconds(self, devices: int) -> float:
        """Seconds that no plan on so many devices can beat: the FLOPs without recomputation, equally spread, at the peak."""
        chip, constants = self.topology.chip, self.pricer.constants
        flops = min(program.facts.graph.flops for program in self.load.programs.values())
        peak = max(rate for _, rate in chip.flops_per_s) * max(constants.matmul, constants.vector)
        return flops / (peak * devices)

    def _choices(self, routes: bool, context: bool) -> list[Choice]:
        """The choices, with what the context and expert axes cut."""
        along = self.load.colouring.sequence_colour if context else None
        return [replace(choice, context=along, expert=self.load.expert if routes else None) for choice in self.room.choices]

    def _bound(self) -> None:
        """Lower bounds of the step time: array [routes x choices, entries]; infinite where a choice does not fit."""
        sizes, room, load = self.sizes, self.room, self.load
        shapes, which = distinct({**sizes, "fsdp": np.ones_like(sizes["fsdp"]), "data": sizes["data"] * sizes["fsdp"]})
        alone = self._alone(shapes)
        context = bool((sizes["context"] > 1).any())
        stages, micro = sizes["stage"], sizes["micro"]
        most = room.pins.virtual_stages or space.MAX_VIRTUAL
        self._bounds = np.full((len(room.routes) * len(room.choices), len(micro)), np.inf)
        number = 0
        for routes in room.routes:
            table = Table(load.programs[room.policies[0], routes].work, self._relevant, self.pricer, shapes, len(load.counts), (Compute, Transfer))
            for choice in self._choices(routes, context):
                legal = space.legal(choice, load.colouring, room.limits, routes, sizes)
                if legal.any():
                    busy, weights = self._busy(table.total(choice), alone)
                    tick, kept = busy[which[legal]] / stages[legal], weights[which[legal]] / stages[legal]
                    waits = (stages[legal] - 1) * np.minimum(tick / most, np.maximum(0.0, tick - 2 * kept))
                    self._bounds[number, legal] = tick * micro[legal] + waits + self.pricer.constants.step_s
                number += 1

    def _alone(self, shapes: Shapes) -> Links:
        """Costs of collectives if every axis had the innermost links."""
        sizes = {"context": shapes.context, "tensor": shapes.tensor, "expert": shapes.expert}
        table, which = np.unique(np.stack(list(sizes.values()), axis=1), axis=0, return_inverse=True)
        found: list[Placement] = []
        for row in table:
            found.append({axis: (place(MeshShape({axis: int(n)}), self.topology) or {}).get(axis, ()) for axis, n in zip(sizes, row, strict=True)})
        return links(found, self.topology).take(which.reshape(-1))

    def _busy(self, work: Array, alone: Links) -> tuple[Array, Array]:
        """Seconds of one microbatch by shape: kernels with the collectives that compute waits for, and those of kernels for gradients of weights."""
        work = self.pricer.corrected(work).sum(0)
        slots = role_slots("block")
        counts, sizes = work[[COUNTS + slot for slot in slots]], work[[BYTES + slot for slot in slots]]
        waits = (counts * alone.latency[slots] + sizes * alone.per_byte[slots]).sum(0)
        return work[Q.COMPUTE] + waits, work[Q.WEIGHTS]

    def _floors(self) -> Array:
        """The fewest bytes that parameters and optimizer state can take, by entry of the space; the state may be in host memory."""
        sizes, room = self.sizes, self.room
        shapes, which = distinct({**sizes, "micro": np.ones_like(sizes["micro"])})
        table = Table(self.load.rest, self._relevant, self.pricer, shapes, len(self.load.counts))
        least = np.full(len(shapes), np.inf)
        kept = (Q.PARAMETERS_CUT,) if self._offloads(()) else (Q.PARAMETERS_CUT, Q.STATE_CUT)
        for routes in room.routes:
            for choice in self._choices(routes, False):
                least = np.minimum(least, sum(table.total(choice)[:, row].sum(0) for row in kept))
        return least[which] / sizes["stage"]

    def _offloads(self, wanted: tuple[str, ...]) -> list[tuple[str, ...]]:
        """What may be put in host memory, beside nothing."""
        pinned = self.room.pins.offload
        if self.topology.chip.host_bytes_per_s <= 0 or pinned is not None or self.room.lowered:
            return []
        return [*((part,) for part in OFFLOAD), OFFLOAD]

    def _blocks(self, entries: Array) -> Iterator[_Block]:
        """The candidates of some entries, with every place that their meshes can have; those alike in what they need are together."""
        sizes = self.sizes
        piped, along = sizes["stage"][entries] > 1, sizes["context"][entries] > 1
        for stages in (False, True):
            for context in (False, True):
                chosen = entries[(piped == stages) & (along == context)]
                if len(chosen):
                    block = self._block(chosen)
                    if block is not None:
                        yield block

    def _block(self, entries: Array) -> _Block | None:
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
        return _Block(entries=np.array(rows), places=places, c=candidates([(mesh, placement) for mesh, _, placement in places], [int(m) for m in micro], self.topology))

    def _places(self, mesh: MeshShape, wanted: tuple[str, ...] | None) -> list[tuple[tuple[str, ...], Placement]]:
        if wanted is not None:
            order = tuple(axis for axis in (*wanted, *(a for a in MESH_AXES if a not in wanted)) if axis in mesh)
            placement = place(mesh, self.topology, order)
            return [] if placement is None else [(() if order == tuple(mesh) else order, placement)]
        if self.room.lowered:
            placement = place(mesh, self.topology)
            return [] if placement is None else [((), placement)]
        return placements(mesh, self.topology)

    def _price(self, entries: Array, reach: float, ranking: Ranking[What] | None) -> None:
        for block in self._blocks(entries):
            self._price_block(block, reach, ranking)

    def _price_block(self, block: _Block, reach: float, ranking: Ranking[What] | None) -> None:
        load, room, c = self.load, self.room, block.c
        piped, along = bool(c.stage[0] > 1), bool(c.context[0] > 1)
        seen = _Seen(self, block, reach, ranking)
        rest = Table(load.rest, self._relevant, self.pricer, c.shapes, len(load.counts))
        number = 0
        for routes in room.routes:
            tables = {policy: self._tables(policy, routes, c.shapes) for policy in room.policies}
            options = list(enumerate(self._choices(routes, along), number))
            number += len(options)
            for index, choice in sorted(options, key=lambda option: float(self._bounds[option[0], block.entries].min())):
                bounds = self._bounds[index, block.entries]
                rows = np.flatnonzero(bounds < self.best.seconds * reach)
                self.best.counts["indivisible"] += int((~np.isfinite(bounds)).sum())
                if not len(rows):
                    continue
                part = _part(c, rows)
                known = {policy: sums(work.total(choice), rest.total(choice), [point.total(choice) for point in points], load.model, self.pricer, part)
                         for policy, (work, points) in tables.items()}
                self._price_choice(choice, routes, rows, part, known, piped, seen)
        seen.close()

    def _tables(self, policy: str, routes: bool, shapes: Shapes) -> tuple[Table, list[Table]]:
        program, classes = self.load.programs[policy, routes], len(self.load.counts)
        return (Table(program.work, self._relevant, self.pricer, shapes, classes), [Table(items, self._relevant, self.pricer, shapes, classes) for items in program.points])

    def _price_choice(self, choice: Choice, routes: bool, rows: Array, c: Candidates, known: dict[str, Sums], piped: bool, seen: _Seen) -> None:
        """Prices every policy, ZeRO stage and schedule of one choice."""
        fast: dict[Knobs, Totals] = {}
        layers = max(self.load.counts, default=0)
        for policy in self.room.policies:
            for how in space.knobs(self.room, policy, piped):
                legal = space.legal_zero(how.zero, c) & (space.legal_schedule(how, layers, c) if piped else True)
                if not legal.any():
                    continue
                totals = combine(known[policy], how, self.load.model, self.pricer, c)
                what = What(policy=policy, choice=choice, routes=routes, how=how)
                if policy == "none":
                    fast[how] = totals
                self._variants(what, totals, fast.get(how), legal, rows, c, seen)

    def _variants(self, what: What, totals: Totals, fast: Totals | None, legal: Array, rows: Array, c: Candidates, seen: _Seen) -> None:
        """Offers a price; where it does not fit also with something in host memory, and where more than enough is recomputed with less of it."""
        pins, wanted = self.room.pins, self.room.pins.remat_layers
        pinned = pins.offload or ()
        if pinned and self.topology.chip.host_bytes_per_s > 0:
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
        for parts in self._offloads(pinned):
            less = offloaded(totals.take(short), parts, self.pricer, c.micro[short])
            moved = replace(what, how=replace(what.how, offload=parts))
            seen.offer(moved, less, np.ones(len(short), dtype=bool), rows[short])
            if fast is not None and what.policy != "none":
                self._mixed(moved, less, offloaded(fast.take(short), parts, self.pricer, c.micro[short]), np.ones(len(short), dtype=bool), rows[short], _part(c, short), seen)

    def _mixed(self, what: What, lean: Totals, fast: Totals | None, legal: Array, rows: Array, c: Candidates, seen: _Seen) -> None:
        """Offers the plan that recomputes no more layers than memory asks for."""
        wanted = self.room.pins.remat_layers
        if fast is None or what.policy == "none" or wanted == 0 or (self.room.lowered and wanted is None):
            return
        legal = legal & (fast.step_seconds < seen.limit)
        if not legal.any():
            return
        layers = fullest(what.how, self.load.model, c)
        whole = mix(fast, lean, np.ones(len(c)))
        if wanted:
            needed = np.where(layers > wanted, float(wanted), 0.0)
        else:
            spare = self.capacity - whole.peak_bytes + lean.device_bytes["activations"] - fast.device_bytes["activations"]
            gained = np.maximum(fast.device_bytes["activations"] - lean.device_bytes["activations"], 1e-9)
            needed = np.ceil(-spare / gained * layers - 1e-9)
        use = legal & (needed >= 1) & (needed < layers)
        if wanted is None:
            use = use & (fast.peak_bytes > self.capacity) & (fast.step_seconds < lean.step_seconds)
        for number in np.unique(needed[use]):
            at = np.flatnonzero(use & (needed == number))
            share = number / layers[at]
            seen.offer(replace(what, recomputed=int(number)), mix(fast.take(at), lean.take(at), share), np.ones(len(at), dtype=bool), rows[at])


def _part(c: Candidates, rows: Array) -> Candidates:
    """Some of the candidates; shapes stay shared."""
    return replace(c, **{name: getattr(c, name)[rows] for name in (*MESH_AXES, "micro", "shape")}, links=c.links.take(rows))


class _Seen:
    """The fastest plan that fits and the leanest, for each candidate of a block."""

    def __init__(self, explorer: Explorer, block: _Block, reach: float, ranking: Ranking[What] | None) -> None:
        self._explorer, self._block, self._ranking, self._reach = explorer, block, ranking, reach
        size = len(block.c)
        self._seconds, self._bytes, self._peak = np.full(size, np.inf), np.full(size, np.inf), np.zeros(size)
        self._fits: list[What | None] = [None] * size
        self._lean: list[What | None] = [None] * size
        self._offset = len(explorer.rows)
        if ranking is not None:
            explorer.rows += [(mesh, int(micro), order) for (mesh, order, _), micro in zip(block.places, block.c.micro, strict=True)]

    @property
    def limit(self) -> float:
        """Seconds from which on a plan is of no interest."""
        return self._explorer.best.seconds * self._reach

    def offer(self, what: What, totals: Totals, legal: Array, rows: Array) -> None:
        """Takes in prices of the candidates `rows`, of which `legal` says which can be."""
        seconds, peak, counts = totals.step_seconds, totals.peak_bytes, self._explorer.best.counts
        fits = legal & (peak <= self._explorer.capacity)
        counts["priced"] += int(legal.sum())
        counts["memory"] += int((legal & ~fits).sum())
        counts["indivisible"] += int((~legal).sum())
        if self._ranking is not None:
            self._ranking.offer(what, fits, seconds, peak, rows + self._offset)
        for at in np.flatnonzero(fits & (seconds < self._seconds[rows] * (1 - 1e-9))):
            row = rows[at]
            self._seconds[row], self._peak[row], self._fits[row] = seconds[at], peak[at], what
        if fits.any():
            least = float(seconds[fits].min())
            self._explorer.best.seconds = min(self._explorer.best.seconds, least)
        for at in np.flatnonzero(legal & (peak < self._bytes[rows] * (1 - 1e-9))):
            self._bytes[rows[at]], self._lean[rows[at]] = peak[at], what

    def close(self) -> None:
        """Hands the results to the explorer."""
        best = self._explorer.best
        for row, (mesh, order, _) in enumerate(self._block.places):
            what = self._fits[row] or self._lean[row]
            if what is None:
                continue
            decision = Decision(mesh=mesh, micro=int(self._block.c.micro[row]), what=settled(what, mesh), order=order)
            seconds, size = float(self._seconds[row]), float(self._peak[row] if self._fits[row] else self._bytes[row])
            if self._lean[row] is not None and self._bytes[row] < best.lean_bytes * (1 - 1e-9):
                lean = self._lean[row]
                assert lean is not None
                best.lean_bytes, best.lean = float(self._bytes[row]), replace(decision, what=settled(lean, mesh))
            if self._fits[row] and (best.decision is None or _before(seconds, decision, self._explorer.chosen, best.decision)):
                self._explorer.chosen, best.decision = seconds, decision
            known = best.by_mesh.get(mesh)
            if known is None or (seconds, size) < known[:2]:
                best.by_mesh[mesh] = (seconds, size, decision)


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
