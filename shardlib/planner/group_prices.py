"""Prices of plans whose layer groups follow different remat policies, the bounds that say which
rows are worth pricing so, and offload.

A row (a candidate under a choice of colours) is worth pricing where rematerialising nothing would
be fast enough but does not fit, or where a group is quicker under another policy than under none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.cost.communication import saved_by_gathering_once
from shardlib.cost.pricing import Totals, combine, least_bytes, least_seconds
from shardlib.cost.stages import Candidates, Sums, sums
from shardlib.cost.tables import Pricer, Values
from shardlib.cost.terms import ArrayTable
from shardlib.cost.variants import (
    NONE,
    Corner,
    Pattern,
    Tallies,
    best_mixture,
    between,
    composed,
    corners,
    fullest,
    fullest_by_class,
    mix,
    offloaded,
    patterns,
    rematerialised_share,
)
from shardlib.decisions.lowerings import along, facts, lowered
from shardlib.decisions.table import HOSTED, Decisions
from shardlib.planner.bounds import EACH, passing, step_seconds
from shardlib.planner.incumbents import Offer, Rows, Seen
from shardlib.planner.space import Space
from shardlib.planner.workload import Accounts, Workload
from shardlib.propagation.colours import Choice
from shardlib.schedules import Pipelines, named

Array = np.ndarray
#: Quantities of `Sums` that a step is the slower the more there is of them.
_SLOWER: Mapping[str, tuple[str, ...]] = {
    "kernels": ("compute", "host"),
    "collectives": ("block", "context", "reduce", "scatter", "gather"),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The model, the space, the machine and the usable bytes of a device that prices are of."""

    load: Workload
    space: Space
    pricer: Pricer
    capacity: float

    @cached_property
    def offloads(self) -> list[tuple[str, ...]]:
        """The sets of arrays that may be offloaded, beside the empty one, where none is pinned."""
        pinned = self.space.pins.offload
        if self.pricer.topology.chip.host_bytes_per_s <= 0 or pinned is not None:
            return []
        options = (*((part,) for part in HOSTED), HOSTED)
        return [parts for parts in options if {*parts} <= {*self.space.limits.able.offload}]


# --------------------------------------------------------------------------------------------------
# Prices of plans whose layer groups follow different remat policies, or a policy with different
# numbers of their layers.
#
# Such plans are between *corners*, see `shardlib.cost.variants`: steps whose layer groups each
# follow one policy in all their layers. Bounds from the quantities of the policies alone say which
# rows are worth the trouble; of those all corners are priced. Every mixture's (bytes of
# activations, seconds) is a weighted average of those of the corners, so Lagrange's bound over the
# corners is one for all mixtures; for rows that it leaves the best mixture is found exactly.


def rates(seconds: Array, sizes: Array) -> Array:
    """Seconds for a byte that each corner asks for beside the quickest, array [corners, rows]; 0
    where it is not smaller.

    Args:
        seconds: of a layer, [corners, rows].
        sizes: bytes of a layer, [corners, rows].
    """
    quickest = np.argmin(seconds, axis=0)[None]
    slower, smaller = (
        seconds - np.take_along_axis(seconds, quickest, axis=0),
        np.take_along_axis(sizes, quickest, axis=0) - sizes,
    )
    return np.where(smaller > 0, slower / np.where(smaller > 0, smaller, 1.0), 0.0)


def _joined(parts: Sequence[Sums]) -> Sums:
    """The candidates of several, one after the other; where one has fewer points of memory than
    others, its first stands for the others.
    """
    count = max(len(part.points) for part in parts)
    return Sums.joined(
        replace(part, points=(*part.points, *part.points[:1] * (count - len(part.points))))
        for part in parts
    )


@dataclass(frozen=True, kw_only=True)
class _Priced(ArrayTable):
    """Rows whose corners are priced, under the same decisions.

    Attributes:
        corners: prices by corner.
        offer: the decisions.
        candidates: position of each row's candidate in its block.
        c: the candidates of the rows.
    """

    corners: Mapping[Corner, Totals]
    offer: Offer
    candidates: Array
    c: Candidates

    def offloaded(self, parts: tuple[str, ...], pricer: Pricer) -> _Priced:
        """The rows with some parts in host memory."""
        moved = {
            corner: offloaded(totals, parts, pricer, self.c)
            for corner, totals in self.corners.items()
        }
        return replace(
            self,
            corners=moved if parts else self.corners,
            offer=self.offer.but(offload=parts),
        )


@dataclass(frozen=True, kw_only=True)
class GroupPricer(Setting):
    """Prices mixtures of remat policies.

    Attributes:
        values: measures on all shapes.
        cuttable: colours that some choice shards.
    """

    values: Values
    cuttable: tuple[str, ...]

    def _wanted(
        self,
        sums: Mapping[str, Sums],
        c: Candidates,
        knobs: Sequence[Decisions],
        seen: Seen,
    ) -> dict[Decisions, Array]:
        """Rows of which a mixture may be the best plan, by ZeRO stage.

        Where every class is the quickest with nothing recomputed, no mixture is faster than that,
        so it must be below the limit and not fit; then the bounds of `_floor` decide.
        """
        plain = np.logical_and.reduce(
            [
                (getattr(getattr(s, part), name) >= getattr(getattr(sums[NONE], part), name)).all(0)
                for s in sums.values()
                for part, names in _SLOWER.items()
                for name in names
            ]
        )
        hopeful = ~plain | (
            least_seconds(sums[NONE], knobs[0], self.load.model, self.pricer, c) < seen.limit
        )
        alive: dict[Decisions, tuple[Array, Totals]] = {}
        for decisions in knobs:
            legal = np.flatnonzero(hopeful & self.space.legal_zero(decisions.zero, c))
            none = combine(
                sums[NONE].take(legal), decisions, self.load.model, self.pricer, c.take(legal)
            )
            left = np.flatnonzero(
                ~plain[legal]
                | ((none.step_seconds < seen.limit) & (none.peak_bytes > self.capacity))
            )
            alive[decisions] = legal[left], none.take(left)
        rows = np.unique(np.concatenate([positions for positions, _ in alive.values()]))
        if not len(rows):
            return {}
        sums, c, plain = (
            {policy: s.take(rows) for policy, s in sums.items()},
            c.take(rows),
            plain[rows],
        )
        busy = {
            corner: self._busy(corner, sums)
            for corner in corners(self.space.policies, len(self.load.counts))
        }
        minima = {
            corner: (
                least_seconds(s, knobs[0], self.load.model, self.pricer, c),
                s.kernels.compute.sum(0),
            )
            for corner, s in busy.items()
        }
        hopeful_rows: dict[Decisions, Array] = {}
        for decisions, (own_rows, none) in alive.items():
            legal = np.searchsorted(rows, own_rows)
            selected = {
                corner: (seconds[legal], compute[legal])
                for corner, (seconds, compute) in minima.items()
            }
            bound = self._floor(
                {policy: s.take(legal) for policy, s in sums.items()},
                selected,
                none,
                decisions,
                plain[legal],
                c.take(legal),
            )
            hopeful_rows[decisions] = own_rows[bound < seen.limit]
        return hopeful_rows

    def _busy(self, corner: Corner, sums: Mapping[str, Sums]) -> Sums:
        """The quantities of a corner, but for memory and the gradients of weights: what
        `least_seconds` reads.
        """
        counts = self.load.counts
        first = sums[corner[0]]

        def mixed(part: str, name: str) -> Array:
            arrays: list[Array] = [getattr(getattr(sums[policy], part), name) for policy in corner]
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
            {name: mixed(part, name) for name in names} for part, names in _SLOWER.items()
        )
        return replace(
            first,
            kernels=replace(first.kernels, **kernels),
            collectives=replace(first.collectives, **collectives),
        )

    def _floor(
        self,
        sums: Mapping[str, Sums],
        minima: Mapping[Corner, tuple[Array, Array]],
        none: Totals,
        decisions: Decisions,
        plain: Array,
        c: Candidates,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Bounds as in `_bound`: a corner has at least what rests and what its layers save when the
        forward pass ends, and hides no more communication than it has more compute.

        Args:
            minima: seconds as `least_seconds` has them and seconds of kernels, by corner.
        """
        first, compute = minima[(NONE,) * len(self.load.counts)]
        # what `least_seconds` does not count: exposed communication, the optimizer, and what all
        # plans have
        beside = np.where(plain, none.step_seconds - first, 0.0)
        constant = none.seconds["optimizer"] + self.pricer.constants.step_s
        resting, state, _ = least_bytes(sums[NONE], decisions, self.load.model, self.pricer, c)
        saves = {
            policy: least_bytes(s, decisions, self.load.model, self.pricer, c)[2]
            for policy, s in sums.items()
        }
        seconds: list[Array] = []
        sizes: list[Array] = []
        hides: list[Array] = []
        for corner, (busy, compute_of_corner) in minima.items():
            more = np.maximum(0.0, compute_of_corner - compute) * c.micro / c.stage
            seconds.append(busy + np.maximum(constant, beside - more))
            sizes.append(
                sum((saves[policy][k] for k, policy in enumerate(corner)), np.zeros(len(c)))
            )
            hides.append(self.pricer.constants.overlap * compute_of_corner * c.micro / c.stage)
        return self._lagrange(
            np.stack(seconds), np.stack(sizes), np.stack(hides), resting, state, c, decisions
        )

    def _lagrange(
        self,
        seconds: Array,
        sizes: Array,
        hides: Array,
        resting: Array,
        state: Array,
        c: Candidates,
        decisions: Decisions,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Args:
            seconds, sizes, hides: bounds of seconds and of bytes of activations, and seconds of
                transfers that compute hides, by corner and row.
            resting, state: stored bytes, and those of the optimizer's state.
        """
        rate = self.pricer.topology.chip.host_bytes_per_s
        moves = {part for parts in self.offloads for part in parts} | set(
            self.space.pins.offload or ()
        )
        in_flight = named(decisions.schedule).in_flight(
            Pipelines(
                stages=c.stage,
                chunks=np.where(c.stage > 1, decisions.virtual_stages, 1),
                microbatches=c.micro,
                lockstep=self.pricer.profile.pipeline == "lockstep",
            )
        )
        slow = (
            2 * c.micro / in_flight / rate if "activations" in moves else np.full(len(c), np.inf)
        )  # seconds for a byte of activations in host memory
        free = np.where(
            np.isfinite(slow), np.minimum(sizes, hides / slow), 0.0
        )  # bytes that go there for nothing
        best = np.zeros(seconds.shape[1])
        for price in (
            *rates(seconds, sizes),
            np.where(np.isfinite(slow), slow, 0.0),
            np.full_like(best, 2 / rate if "optimizer" in moves else 0.0),
        ):
            saved = (seconds + np.minimum(price, slow) * (sizes - free)).min(0)
            hidden = (
                np.zeros_like(best)
                if "disk" in moves
                else state * (np.minimum(price, 2 / rate) if "optimizer" in moves else price)
            )
            best = np.maximum(best, saved + hidden + price * (resting - self.capacity))
        return best

    @cached_property
    def _accounts(self) -> Accounts:
        return self.load.ledger.accounts(self.cuttable)

    @cached_property
    def _moments(self) -> Accounts:
        return self.load.moments.accounts(self.cuttable)

    def _quantities(
        self,
        uniform: Mapping[str, Sums],
        choices: Array,
        c: Candidates,
        listed: Sequence[tuple[Choice, bool]],
    ) -> dict[Corner, Sums]:
        """Quantities of every corner by row."""
        all_corners = corners(self.space.policies, len(self.load.counts))
        mixed = [corner for corner in all_corners if len(set(corner)) > 1]
        order = np.argsort(choices, kind="stable")
        parts: dict[Corner, list[Sums]] = {corner: [] for corner in mixed}
        for number in np.unique(choices):
            rows = np.flatnonzero(choices == number)
            for corner, s in self._of_choice(mixed, *listed[int(number)], c.take(rows)).items():
                parts[corner].append(s)
        back = np.argsort(order)
        return {
            corner: _joined(parts[corner]).take(back) if corner in parts else uniform[corner[0]]
            for corner in all_corners
        }

    def _of_choice(
        self, mixed: Sequence[Corner], choice: Choice, routes: bool, c: Candidates
    ) -> dict[Corner, Sums]:
        """Quantities of corners whose layer groups differ, under one choice."""
        shapes = np.unique(c.shape)
        local = replace(c, shape=np.searchsorted(shapes, c.shape))
        segments = [moment.segment for moment in self.load.programs[NONE, routes].moments]
        parts = {
            policy: self._tallies(policy, routes, choice, shapes) for policy in self.space.policies
        }
        resting = self._accounts.rest.on(self.values, shapes).columns(
            [(choice, np.arange(len(shapes)))]
        )[0]
        by_corner: dict[Corner, Sums] = {}
        for corner in mixed:
            work, points = composed(corner, parts, segments, self.load.counts)
            by_corner[corner] = sums(work, resting, points, self.load.model, self.pricer, local)
        return by_corner

    def _tallies(self, policy: str, routes: bool, choice: Choice, shapes: Array) -> Tallies:
        """The tallies of a program on some shapes, in the order of `Workload.moments`."""
        columns = [(choice, np.arange(len(shapes)))]
        work = self._accounts.work[policy, routes].on(self.values, shapes).columns(columns)[0]
        lists = list(self._moments.points[policy, routes].on(self.values, shapes).columns(columns))
        points: list[tuple[Array, ...]] = []
        stacks: list[Array] = []
        for moment in self.load.programs[policy, routes].moments:
            first, *lists = lists
            stacks.append(first)
            points.append(tuple(lists[: len(moment.points)]))
            lists = lists[len(moment.points) :]
        return Tallies(work=work, points=tuple(points), stacks=tuple(stacks))

    @cached_property
    def _patterns(self) -> list[Pattern]:
        return patterns(self.space.policies, len(self.load.counts))

    def price(
        self,
        uniform: Mapping[str, Sums],
        choices: Array,
        candidates: Array,
        c: Candidates,
        knobs: Sequence[Decisions],
        seen: Seen,
    ) -> None:
        """Offers the best mixtures of some rows under one schedule."""
        if self.space.pins.remat_layers is None and not self.space.each:
            rows_by_knob = self._wanted(uniform, c, knobs, seen)
        else:
            rows_by_knob = {
                decisions: np.flatnonzero(self.space.legal_zero(decisions.zero, c))
                for decisions in knobs
            }
        rows = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *rows_by_knob.values()]))
        if not len(rows):
            return
        quantities = self._quantities(
            {policy: s.take(rows) for policy, s in uniform.items()},
            choices[rows],
            c.take(rows),
            seen.choices,
        )
        for decisions, own_rows in rows_by_knob.items():
            if len(own_rows):
                positions, selected = np.searchsorted(rows, own_rows), c.take(own_rows)
                priced = _Priced(
                    corners={
                        corner: combine(
                            s.take(positions), decisions, self.load.model, self.pricer, selected
                        )
                        for corner, s in quantities.items()
                    },
                    offer=Offer(decisions=decisions, choices=choices[own_rows]),
                    candidates=candidates[own_rows],
                    c=selected,
                )
                self._offer(priced, seen)

    def _offer(self, priced: _Priced, seen: Seen) -> None:
        """Offers the best mixture of each row, with nothing in host memory and with something."""
        pinned = self.space.pins.offload
        for parts in [pinned] if pinned is not None else [(), *self.offloads]:
            moved = priced.offloaded(parts, self.pricer)
            if self.space.each:
                self._pinned(moved, seen)
                continue
            hopeful = (
                np.flatnonzero(self._bound(moved.corners) < seen.limit)
                if self.space.pins.remat_layers is None
                else np.arange(len(priced.c))
            )
            if len(hopeful):
                self._best(moved.take(hopeful), seen)

    def _bound(self, prices: Mapping[Corner, Totals]) -> Array:
        """Seconds that no mixture which fits can beat: the largest of Lagrange's bounds with the
        rates, seconds for a byte, at which each corner trades them.
        """
        seconds, sizes = (
            np.stack([totals.step_seconds for totals in prices.values()]),
            np.stack([totals.peak_bytes for totals in prices.values()]),
        )
        return np.where(
            sizes.min(0) > self.capacity,
            np.inf,
            np.max(
                [
                    (seconds + rate * (sizes - self.capacity)).min(0)
                    for rate in rates(seconds, sizes)
                ],
                axis=0,
            ),
        )

    def _pinned(self, priced: _Priced, seen: Seen) -> None:
        """Offers the plans whose layer groups follow the pinned policies with the pinned numbers of
        layers.
        """
        layers = fullest_by_class(priced.offer.decisions, self.load.model, priced.c)
        numbers = [
            (
                np.zeros(len(priced.c))
                if policy == NONE
                else count
                if number is None
                else np.full(len(priced.c), float(number))
            )
            for (policy, number), count in zip(self.space.each, layers, strict=True)
        ]
        legal = np.flatnonzero(
            np.logical_and.reduce(
                [number <= count for number, count in zip(numbers, layers, strict=True)]
            )
        )
        corner = tuple(policy for policy, _ in self.space.each)
        self._mixtures(priced, corner, np.stack(numbers), legal, seen)

    def _mixtures(
        self, priced: _Priced, corner: Corner, numbers: Array, rows: Array, seen: Seen
    ) -> None:
        """Offers mixtures of some rows; `numbers` are layers that follow the corner's policies,
        array [layer groups, rows].
        """
        if not len(rows):
            return
        layers = fullest_by_class(priced.offer.decisions, self.load.model, priced.c)
        totals = between(
            [(policy, numbers[k, rows]) for k, policy in enumerate(corner)],
            [count[rows] for count in layers],
            lambda mixed_corner: priced.corners[mixed_corner].take(rows),
        )
        each = [
            tuple((policy, int(numbers[k, i])) for k, policy in enumerate(corner)) for i in rows
        ]
        seen.offer(replace(priced.offer.take(rows), groups=each), totals, priced.candidates[rows])

    def _best(self, priced: _Priced, seen: Seen) -> None:
        """Offers the fastest mixture of each row that fits; with a pinned number of layers also one
        where none fits.
        """
        layers = fullest_by_class(priced.offer.decisions, self.load.model, priced.c)
        total, capacity = self.space.pins.remat_layers, self.capacity
        best = best_mixture(priced.corners, self._patterns, layers, capacity, total=total)
        if total is not None and (best.pattern < 0).all():
            best = best_mixture(priced.corners, self._patterns, layers, np.inf, total=total)
        for number in np.unique(best.pattern[best.pattern >= 0]):
            self._mixtures(
                priced,
                self._patterns[int(number)].corner,
                best.numbers,
                np.flatnonzero(best.pattern == number),
                seen,
            )


# --------------------------------------------------------------------------------------------------
# Prices of rows: remat policy, ZeRO stage, schedule, time of gathers, and offload, once mesh, place
# and colours are chosen.
#
# A *row* is a candidate under a choice of colours. Many rows are priced at once, whatever their
# choices and meshes are, one decision after another.


@dataclass(frozen=True, kw_only=True)
class RowPricer(Setting):
    """Prices rows; `groups` prices plans whose layer groups follow policies of their own, None
    where all are alike.
    """

    groups: GroupPricer | None = None

    def price(self, rows: Rows, seen: Seen) -> None:
        """Offers every plan of some rows that no bound excludes."""
        for piped in (False, True):
            selected = np.flatnonzero((rows.c.stage > 1) == piped)
            if not len(selected):
                continue
            less = rows if len(selected) == len(rows) else rows.take(selected)
            by_schedule = defaultdict[tuple[str, int], dict[str, list[Decisions]]](
                lambda: {policy: [] for policy in self.space.policies}
            )
            for policy in self.space.policies:
                for decisions in self.space.zeros_and_schedules(policy, pipelined=piped):
                    by_schedule[decisions.schedule, decisions.virtual_stages][policy].append(
                        decisions
                    )
            for (schedule, virtual), knobs in by_schedule.items():
                self._scheduled(less, schedule, virtual, knobs, seen)

    def _scheduled(
        self, rows: Rows, schedule: str, virtual: int, knobs: dict[str, list[Decisions]], seen: Seen
    ) -> None:
        """Offers the plans of one schedule."""
        piped = named(schedule).staged
        legal = np.ones(len(rows), dtype=bool)
        if piped:
            legal = self.space.legal_schedule(
                Decisions(
                    schedule=schedule,
                    virtual_stages=virtual,
                    accumulation=self.space.accumulation_groups,
                ),
                rows.c,
            )
        seen.skip(int((~legal).sum()))
        if not legal.any():
            return
        zeros = {decisions.zero for listed in knobs.values() for decisions in listed}
        orders = self.space.orders(schedule, virtual)
        gathers = {decisions.gather for listed in knobs.values() for decisions in listed}
        fitting = legal & rows.below(zeros, orders, gathers, seen.limit)
        if not fitting.any() and self.groups is None:
            return
        worth = {
            policy: fitting & (self._least(rows, policy, schedule, virtual) < seen.limit)
            for policy in self.space.policies
            if knobs[policy]
        }
        selected = np.flatnonzero(np.logical_or.reduce(list(worth.values())))
        if len(selected) and not self.space.each:
            self._alike(
                rows.take(selected),
                {p: rows_worth[selected] for p, rows_worth in worth.items()},
                orders,
                knobs,
                seen,
            )
        self._apart(rows, legal, knobs[self.space.policies[-1]], seen)

    def _apart(self, rows: Rows, legal: Array, knobs: list[Decisions], seen: Seen) -> None:
        """Offers the plans of one schedule whose layer groups differ."""
        if self.groups is None or not knobs:
            return
        hopeful = np.flatnonzero(
            legal
            & (self._least(rows, EACH, knobs[0].schedule, knobs[0].virtual_stages) < seen.limit)
        )
        if len(hopeful):
            less = rows.take(hopeful)
            self.groups.price(less.sums, less.choices, less.candidates, less.c, knobs, seen)

    def _alike(
        self,
        less: Rows,
        worth: dict[str, Array],
        orders: list[bool],
        knobs: dict[str, list[Decisions]],
        seen: Seen,
    ) -> None:
        """Offers the plans of one schedule whose layer groups are alike."""
        for policy in worth:  # the same for all ZeRO stages
            bound = least_seconds(
                less.sums[policy], knobs[policy][0], self.load.model, self.pricer, less.c
            )
            worth[policy] = worth[policy] & (bound < seen.limit)
        for zero, gather in sorted(
            {
                (decisions.zero, decisions.gather)
                for listed in knobs.values()
                for decisions in listed
            },
            key=lambda pair: (pair[0], pair[1] != "use"),
        ):
            fitting = less.below((zero,), orders, (gather,), seen.limit)
            legal = self.space.legal_zero(zero, less.c)
            selected = {policy: rows_worth & fitting for policy, rows_worth in worth.items()}
            if (
                gather == "once"
                and "use" in self.space.gathers
                and not seen.ranks
                and (
                    chosen := next(
                        (
                            candidate
                            for listed in knobs.values()
                            for candidate in listed
                            if candidate.gather == "use"
                        ),
                        None,
                    )
                )
            ):
                selected = self._saving(less, selected, chosen)
            fast: tuple[Array, Totals] | None = None
            for policy in worth:
                chosen = next(
                    (
                        decisions
                        for decisions in knobs[policy]
                        if (decisions.zero, decisions.gather) == (zero, gather)
                    ),
                    None,
                )
                if chosen is None:
                    continue
                totals = self._policy(less, policy, chosen, legal, selected[policy], fast, seen)
                fast = totals if policy == "none" else fast

    def _saving(
        self, rows: Rows, worth: dict[str, Array], decisions: Decisions
    ) -> dict[str, Array]:
        """Rows, by policy, in which gathering weights once saves time under one policy at least:
        the others are no faster than those that gather at every use, and larger.
        """
        hopeful = np.flatnonzero(
            np.logical_or.reduce(list(worth.values())) & self.space.legal_zero(3, rows.c)
        )
        less, saving = rows.take(hopeful), np.zeros(len(rows), dtype=bool)
        for policy in worth:
            saving[hopeful] |= (
                saved_by_gathering_once(
                    less.sums[policy],
                    replace(decisions, zero=3),
                    self.load.model,
                    self.pricer,
                    less.c,
                )
                > 0
            )
        return {policy: rows_worth & saving for policy, rows_worth in worth.items()}

    def _least(self, rows: Rows, policy: str, schedule: str, virtual: int) -> Array:
        """A bound of the step time under a schedule, by row."""
        groups = self.space.accumulation_groups
        shape = Pipelines(
            stages=rows.c.stage,
            chunks=np.full_like(rows.c.stage, virtual),
            microbatches=rows.c.micro // groups,
        )
        rounds = None if named(schedule).backward_in_two else named(schedule).rounds(shape)
        passes = (
            passing(rows.ticks[policy], rows.c.stage, self.pricer) * virtual
            if named(schedule).staged
            else 0.0
        )
        return step_seconds(
            rows.ticks[policy],
            rows.c.stage,
            rows.c.micro,
            rounds,
            self.space.limits.layers,
            groups,
            passes,
        )

    def _policy(
        self,
        rows: Rows,
        policy: str,
        decisions: Decisions,
        legal: Array,
        worth: Array,
        fast: tuple[Array, Totals] | None,
        seen: Seen,
    ) -> tuple[Array, Totals] | None:
        """Offers the plans of one policy under one knob; returns their prices and the rows that
        they are of.
        """
        partly = np.zeros(len(rows), dtype=bool)
        if fast is not None and policy != "none":
            partly[fast[0]] = (fast[1].step_seconds < seen.limit) & (
                (fast[1].peak_bytes > self.capacity) | bool(self.space.pins.remat_layers)
            )
        seen.skip(int(((worth | partly) & ~legal).sum()))
        hopeful = np.flatnonzero(legal & (worth | partly))
        if not len(hopeful):
            return None
        s, c = (
            (rows.sums[policy], rows.c)
            if len(hopeful) == len(rows)
            else (rows.sums[policy].take(hopeful), rows.c.take(hopeful))
        )
        totals = combine(s, decisions, self.load.model, self.pricer, c)
        quick: Totals | None = None
        if fast is not None and policy != "none":
            position = np.full(len(rows), -1)
            position[fast[0]] = np.arange(len(fast[0]))
            quick = fast[1].take(position[hopeful])
            quick.seconds["overhead"][position[hopeful] < 0] = (
                np.inf
            )  # not priced because it cannot be fast enough
        self._offer(
            Offer(decisions=decisions, choices=rows.choices[hopeful]),
            rows.candidates[hopeful],
            totals,
            quick,
            c,
            seen,
        )
        return hopeful, totals

    def _offer(
        self,
        offer: Offer,
        rows: Array,
        totals: Totals,
        fast: Totals | None,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers a price; where it does not fit also with something in host memory, and where more
        than enough is recomputed with less of it.
        """
        pins, pinned_layers = self.space.pins, self.space.pins.remat_layers
        pinned = pins.offload or ()
        if pinned:
            totals = offloaded(totals, pinned, self.pricer, c)
            fast = fast and offloaded(fast, pinned, self.pricer, c)
            offer = offer.but(offload=pinned)
        if not pinned_layers:
            seen.offer(offer, totals, rows)
        self._mixed(offer, rows, totals, fast, c, seen)
        lacking = (totals.step_seconds < seen.limit) & (
            totals.peak_bytes > self.capacity
        )  # what follows only adds seconds
        if fast is not None:  # with something in host memory, fewer layers need to be recomputed
            lacking |= (fast.step_seconds < np.minimum(seen.limit, totals.step_seconds)) & (
                fast.peak_bytes > self.capacity
            )
        short = np.flatnonzero(lacking)
        if not len(short) or pinned_layers:
            return
        part, c = offer.take(short), c.take(short)
        for parts in self.offloads:
            less = offloaded(totals.take(short), parts, self.pricer, c)
            moved = part.but(offload=parts)
            seen.offer(moved, less, rows[short])
            if fast is not None:
                self._mixed(
                    moved,
                    rows[short],
                    less,
                    offloaded(fast.take(short), parts, self.pricer, c),
                    c,
                    seen,
                )

    def _mixed(
        self,
        offer: Offer,
        rows: Array,
        rematerialised: Totals,
        fast: Totals | None,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers the plans that recompute no more layers than memory asks for."""
        pinned_layers = self.space.pins.remat_layers
        if (
            fast is None
            or pinned_layers == 0
            or self.space.apart
            or "partly" not in self.space.limits.able.remat
        ):
            return
        legal = fast.step_seconds < seen.limit
        legal &= lowered(facts(offer.decisions), along(c.sizes), self.space.gaps)
        if pinned_layers is None:
            legal &= (fast.peak_bytes > self.capacity) & (
                fast.step_seconds < rematerialised.step_seconds
            )
        if not legal.any():
            return
        layers = fullest(offer.decisions, self.load.model, c)
        if pinned_layers:
            needed = np.where(layers > pinned_layers, float(pinned_layers), 0.0)
        else:
            saved, less = (
                fast.device_bytes["activations"],
                rematerialised.device_bytes["activations"],
            )
            others = sum(
                (
                    np.maximum(size, rematerialised.device_bytes[name])
                    for name, size in fast.device_bytes.items()
                    if name != "activations"
                ),
                np.zeros(len(c)),
            )
            needed = np.ceil(
                (others + saved - self.capacity) / np.maximum(saved - less, 1e-9) * layers - 1e-9
            )
            needed = np.round(self._share(needed, offer, c) * layers)
        mixed = np.flatnonzero(legal & (needed >= 1) & (needed < layers))
        if len(mixed):
            share = self._share(needed, offer, c)[mixed]
            seen.offer(
                replace(offer.take(mixed), layers=needed[mixed].astype(np.int64)),
                mix(fast.take(mixed), rematerialised.take(mixed), share),
                rows[mixed],
            )

    def _share(self, number: Array, offer: Offer, c: Candidates) -> Array:
        """Part of the layers that rematerialise where so many of the fullest stage are to."""
        return rematerialised_share(
            number, offer.decisions, self.load.model, c, self.pricer.profile
        )
