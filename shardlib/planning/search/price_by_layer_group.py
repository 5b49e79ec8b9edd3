"""Prices plans whose classes of layers follow different remat policies, or a policy with different
numbers of their layers.

Such plans are between *corners*, see `shardlib.cost.pricing.variants.mixed_remat`. A row (a candidate under
a choice of colours) is worth the trouble where recomputing nothing would be fast enough but does
not fit, or where a class is quicker under another policy than under none. For each such row all
corners are priced. Every mixture's (bytes of activations, seconds) is a weighted average of those
of the corners, so Lagrange's bound over the corners is one for all mixtures; for rows that it
leaves the best mixture is found exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.device_memory import least_bytes
from shardlib.cost.pricing.step_time import least_seconds
from shardlib.cost.pricing.sums import Sums, joined, sums
from shardlib.cost.pricing.totals import Totals, combine
from shardlib.cost.pricing.variants.best_mixtures import Pattern, best_mixture, patterns
from shardlib.cost.pricing.variants.mixed_remat import (
    NONE,
    Corner,
    Tallies,
    between,
    composed,
    corners,
)
from shardlib.cost.pricing.variants.offload_and_partial_remat import fullest_by_class, offloaded
from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.knobs import Knobs
from shardlib.planning.search.incumbents import Offer, Seen
from shardlib.planning.space import space
from shardlib.planning.space.cost_tables import Accounts
from shardlib.planning.space.workload import Workload
from shardlib.propagation.assignment import Choice
from shardlib.schedules.schedule import Pipelines
from shardlib.schedules.table import named

Array = np.ndarray
#: Quantities of `Sums` that a step is the slower the more there is of them.
_SLOWER: tuple[str, ...] = ("compute", "block", "context", "reduce", "scatter", "gather", "host")


@dataclass(frozen=True, kw_only=True)
class ClassPricer:
    """Prices mixtures.

    Attributes:
        load, room: the model and the space.
        pricer: the machine.
        capacity: usable bytes of a device.
        values: measures on all shapes.
        offloads: what may be put in host memory, beside nothing; with a pinned offload, that alone.
        cuttable: colours that some choice cuts.
    """

    load: Workload
    room: space.Space
    pricer: Pricer
    capacity: float
    values: Values
    offloads: Sequence[tuple[str, ...]]
    cuttable: tuple[str, ...]

    @cached_property
    def _patterns(self) -> list[Pattern]:
        return patterns(self.room.policies, len(self.load.counts))

    @cached_property
    def _accounts(self) -> Accounts:
        return self.load.ledger.accounts(self.cuttable)

    @cached_property
    def _moments(self) -> Accounts:
        return self.load.moments.accounts(self.cuttable)

    def price(
        self,
        known: Mapping[str, Sums],
        choices: Array,
        candidates: Array,
        c: Candidates,
        knobs: Sequence[Knobs],
        seen: Seen,
    ) -> None:
        """Offers the best mixtures of some rows under one schedule.

        Args:
            known: quantities by policy.
            choices, candidates: number of the choice, and position of the candidate in its block,
                by row.
            c: the candidates of the rows.
            knobs: ZeRO stages of the schedule.
            seen: takes the plans.
        """
        if self.room.pins.remat_layers is None and not self.room.each:
            wanted = self._wanted(known, choices, candidates, c, knobs, seen)
        else:
            wanted = {how: np.flatnonzero(space.legal_zero(how.zero, c)) for how in knobs}
        rows = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *wanted.values()]))
        if not len(rows):
            return
        quantities = self._corners(
            {policy: s.take(rows) for policy, s in known.items()}, choices[rows], c.take(rows), seen
        )
        for how, mine in wanted.items():
            if len(mine):
                at, some = np.searchsorted(rows, mine), c.take(mine)
                prices = {
                    corner: combine(s.take(at), how, self.load.model, self.pricer, some)
                    for corner, s in quantities.items()
                }
                self._offer(
                    prices,
                    Offer(policy=NONE, how=how, choices=choices[mine]),
                    candidates[mine],
                    some,
                    seen,
                )

    def _wanted(
        self,
        known: Mapping[str, Sums],
        choices: Array,
        candidates: Array,
        c: Candidates,
        knobs: Sequence[Knobs],
        seen: Seen,
    ) -> dict[Knobs, Array]:
        """Rows of which a mixture may be the best plan, by ZeRO stage.

        Where every class is the quickest with nothing recomputed, no mixture is faster than that,
        so it must be below the limit and not fit; then the bounds of `_floor` decide. Where bounds
        of the candidates are all that is asked for, they are handed over, and no row is wanted.
        """
        plain = np.logical_and.reduce(
            [
                (getattr(s, name) >= getattr(known[NONE], name)).all(0)
                for s in known.values()
                for name in _SLOWER
            ]
        )
        hopeful = ~plain | (
            least_seconds(known[NONE], knobs[0], self.load.model, self.pricer, c) < seen.limit
        )
        alive: dict[Knobs, tuple[Array, Totals]] = {}
        for how in knobs:
            at = np.flatnonzero(hopeful & space.legal_zero(how.zero, c))
            none = combine(known[NONE].take(at), how, self.load.model, self.pricer, c.take(at))
            left = np.flatnonzero(
                ~plain[at] | ((none.step_seconds < seen.limit) & (none.peak_bytes > self.capacity))
            )
            alive[how] = at[left], none.take(left)
        rows = np.unique(np.concatenate([at for at, _ in alive.values()]))
        if not len(rows):
            return {}
        known, c, plain = (
            {policy: s.take(rows) for policy, s in known.items()},
            c.take(rows),
            plain[rows],
        )
        busy = {
            corner: self._composed(corner, known)
            for corner in corners(self.room.policies, len(self.load.counts))
        }
        least = {
            corner: (least_seconds(s, knobs[0], self.load.model, self.pricer, c), s.compute.sum(0))
            for corner, s in busy.items()
        }
        wanted: dict[Knobs, Array] = {}
        for how, (mine, none) in alive.items():
            at = np.searchsorted(rows, mine)
            some = {
                corner: (seconds[at], compute[at]) for corner, (seconds, compute) in least.items()
            }
            bound = self._floor(
                {policy: s.take(at) for policy, s in known.items()},
                some,
                none,
                how,
                plain[at],
                c.take(at),
            )
            wanted[how] = mine[bound < seen.limit]
            if not seen.settles:
                seen.at_least(choices[mine], candidates[mine], bound)
        return wanted if seen.settles else {}

    def _composed(self, corner: Corner, known: Mapping[str, Sums]) -> Sums:
        """The quantities of a corner, but for memory and the gradients of weights: what
        `least_seconds` reads.
        """
        counts = self.load.counts
        first = known[corner[0]]
        found: dict[str, Array] = {}
        for name in _SLOWER:
            arrays: list[Array] = [getattr(known[policy], name) for policy in corner]
            found[name] = sum(
                (
                    array * (count / sum(counts))
                    for array, count in zip(arrays, counts, strict=True)
                ),
                np.zeros(arrays[0].shape),
            )
            found[name][: len(counts)] = [array[k] for k, array in enumerate(arrays)]
        return replace(first, **found)

    def _floor(
        self,
        known: Mapping[str, Sums],
        least: Mapping[Corner, tuple[Array, Array]],
        none: Totals,
        how: Knobs,
        plain: Array,
        c: Candidates,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Bounds as in `_bound`: a corner has at least what rests and what its layers save when the
        forward pass ends, and hides no more communication than it has more compute.

        Args:
            known: quantities by policy.
            least: seconds as `least_seconds` has them and seconds of kernels, by corner.
            none: the price with nothing recomputed.
            how: the ZeRO stage and the schedule.
            plain: whether that is the quickest of every class.
            c: the candidates.
        """
        first, compute = least[(NONE,) * len(self.load.counts)]
        beside = np.where(
            plain,
            none.step_seconds - first,
            0.0,
            # what `least_seconds` does not count: exposed communication, the optimizer, and what all
            # plans have
        )
        constant = none.seconds["optimizer"] + self.pricer.constants.step_s
        resting, state, _ = least_bytes(known[NONE], how, self.load.model, self.pricer, c)
        saves = {
            policy: least_bytes(s, how, self.load.model, self.pricer, c)[2]
            for policy, s in known.items()
        }
        seconds: list[Array] = []
        sizes: list[Array] = []
        hides: list[Array] = []
        for corner, (busy, mine) in least.items():
            more = np.maximum(0.0, mine - compute) * c.micro / c.stage
            seconds.append(busy + np.maximum(constant, beside - more))
            sizes.append(
                sum((saves[policy][k] for k, policy in enumerate(corner)), np.zeros(len(c)))
            )
            hides.append(self.pricer.constants.overlap * mine * c.micro / c.stage)
        return self._lagrange(
            np.stack(seconds), np.stack(sizes), np.stack(hides), resting, state, c, how
        )

    def _lagrange(
        self,
        seconds: Array,
        sizes: Array,
        hides: Array,
        resting: Array,
        state: Array,
        c: Candidates,
        how: Knobs,
    ) -> Array:
        """Seconds that no mixture which fits can beat, by row.

        Args:
            seconds, sizes, hides: bounds of seconds and of bytes of activations, and seconds of
                transfers that compute hides, by corner and row.
            resting, state: bytes at rest, and those of the optimizer's state.
        """
        rate = self.pricer.topology.chip.host_bytes_per_s
        moves = {part for parts in self.offloads for part in parts} | set(
            self.room.pins.offload or ()
        )
        held = named(how.schedule).in_flight(
            Pipelines(
                stages=c.stage,
                chunks=np.where(c.stage > 1, how.virtual, 1),
                microbatches=c.micro,
                lockstep=self.pricer.stack.pipeline == "lockstep",
            )
        )
        slow = (
            2 * c.micro / held / rate if "activations" in moves else np.full(len(c), np.inf)
        )  # seconds for a byte of activations in host memory
        free = np.where(
            np.isfinite(slow), np.minimum(sizes, hides / slow), 0.0
        )  # bytes that go there for nothing
        best = np.zeros(seconds.shape[1])
        for price in (
            *_rates(seconds, sizes),
            np.where(np.isfinite(slow), slow, 0.0),
            np.full_like(best, 2 / rate if "optimizer" in moves else 0.0),
        ):
            saved = (seconds + np.minimum(price, slow) * (sizes - free)).min(0)
            kept = (
                np.zeros_like(best)
                if "disk" in moves
                else state * (np.minimum(price, 2 / rate) if "optimizer" in moves else price)
            )
            best = np.maximum(best, saved + kept + price * (resting - self.capacity))
        return best

    def _corners(
        self, known: Mapping[str, Sums], choices: Array, c: Candidates, seen: Seen
    ) -> dict[Corner, Sums]:
        """Quantities of every corner by row."""
        every = corners(self.room.policies, len(self.load.counts))
        mixed = [corner for corner in every if len(set(corner)) > 1]
        order = np.argsort(choices, kind="stable")
        parts: dict[Corner, list[Sums]] = {corner: [] for corner in mixed}
        for number in np.unique(choices):
            at = np.flatnonzero(choices == number)
            for corner, s in self._of_choice(mixed, *seen.choices[int(number)], c.take(at)).items():
                parts[corner].append(s)
        back = np.argsort(order)
        return {
            corner: joined(parts[corner]).take(back) if corner in parts else known[corner[0]]
            for corner in every
        }

    def _of_choice(
        self, mixed: Sequence[Corner], choice: Choice, routes: bool, c: Candidates
    ) -> dict[Corner, Sums]:
        """Quantities of corners whose classes differ, under one choice."""
        shapes = np.unique(c.shape)
        local = replace(c, shape=np.searchsorted(shapes, c.shape))
        segments = [moment.segment for moment in self.load.programs[NONE, routes].moments]
        parts = {
            policy: self._tallies(policy, routes, choice, shapes) for policy in self.room.policies
        }
        rest = self._accounts.rest.on(self.values, shapes).columns(
            [(choice, np.arange(len(shapes)))]
        )[0]
        found: dict[Corner, Sums] = {}
        for corner in mixed:
            work, points = composed(corner, parts, segments, self.load.counts)
            found[corner] = sums(work, rest, points, self.load.model, self.pricer, local)
        return found

    def _tallies(self, policy: str, routes: bool, choice: Choice, shapes: Array) -> Tallies:
        """The tallies of a program on some shapes, in the order of `Workload.moments`."""
        wanted = [(choice, np.arange(len(shapes)))]
        work = self._accounts.work[policy, routes].on(self.values, shapes).columns(wanted)[0]
        lists = list(self._moments.points[policy, routes].on(self.values, shapes).columns(wanted))
        points: list[tuple[Array, ...]] = []
        stacks: list[Array] = []
        for moment in self.load.programs[policy, routes].moments:
            first, *lists = lists
            stacks.append(first)
            points.append(tuple(lists[: len(moment.points)]))
            lists = lists[len(moment.points) :]
        return Tallies(work=work, points=tuple(points), stacks=tuple(stacks))

    def _offer(
        self,
        prices: Mapping[Corner, Totals],
        offer: Offer,
        candidates: Array,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers the best mixture of each row, with nothing in host memory and with something."""
        pinned = self.room.pins.offload
        for parts in [pinned] if pinned is not None else [(), *self.offloads]:
            moved = (
                {
                    corner: offloaded(totals, parts, self.pricer, c.micro)
                    for corner, totals in prices.items()
                }
                if parts
                else prices
            )
            at = (
                np.flatnonzero(self._bound(moved) < seen.limit)
                if self.room.pins.remat_layers is None and not self.room.each
                else np.arange(len(c))
            )
            if self.room.each:
                self._pinned(
                    moved,
                    replace(offer, how=replace(offer.how, offload=parts)),
                    candidates,
                    c,
                    seen,
                )
            elif len(at):
                some = {corner: totals.take(at) for corner, totals in moved.items()}
                part = offer.take(at)
                self._best(
                    some,
                    replace(part, how=replace(part.how, offload=parts)),
                    candidates[at],
                    c.take(at),
                    seen,
                )

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
                    for rate in _rates(seconds, sizes)
                ],
                axis=0,
            ),
        )

    def _pinned(
        self,
        prices: Mapping[Corner, Totals],
        offer: Offer,
        candidates: Array,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers the plans whose classes follow the pinned policies with the pinned numbers of
        layers.
        """
        layers = fullest_by_class(offer.how, self.load.model, c)
        numbers = [
            (
                np.zeros(len(c))
                if policy == NONE
                else most
                if number is None
                else np.full(len(c), float(number))
            )
            for (policy, number), most in zip(self.room.each, layers, strict=True)
        ]
        at = np.flatnonzero(
            np.logical_and.reduce(
                [number <= most for number, most in zip(numbers, layers, strict=True)]
            )
        )
        self._mixtures(
            prices,
            offer,
            tuple(policy for policy, _ in self.room.each),
            np.stack(numbers),
            at,
            candidates,
            c,
            seen,
        )

    def _mixtures(
        self,
        prices: Mapping[Corner, Totals],
        offer: Offer,
        corner: Corner,
        numbers: Array,
        at: Array,
        candidates: Array,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers mixtures of some rows; `numbers` are layers that follow the corner's policies,
        array [classes, rows].
        """
        if len(at):
            layers = fullest_by_class(offer.how, self.load.model, c)
            totals = between(
                [(policy, numbers[k, at]) for k, policy in enumerate(corner)],
                [most[at] for most in layers],
                lambda one: prices[one].take(at),
            )
            each = [
                tuple((policy, int(numbers[k, i])) for k, policy in enumerate(corner)) for i in at
            ]
            seen.offer(replace(offer.take(at), classes=each), totals, candidates[at])

    def _best(
        self,
        prices: Mapping[Corner, Totals],
        offer: Offer,
        candidates: Array,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers the fastest mixture of each row that fits; with a pinned number of layers also one
        where none fits.
        """
        layers, total = fullest_by_class(offer.how, self.load.model, c), self.room.pins.remat_layers
        found = best_mixture(prices, self._patterns, layers, self.capacity, total=total)
        if total is not None and (found.pattern < 0).all():
            found = best_mixture(prices, self._patterns, layers, np.inf, total=total)
        for number in np.unique(found.pattern[found.pattern >= 0]):
            self._mixtures(
                prices,
                offer,
                self._patterns[int(number)].corner,
                found.numbers,
                np.flatnonzero(found.pattern == number),
                candidates,
                c,
                seen,
            )


def _rates(seconds: Array, sizes: Array) -> Array:
    """Seconds for a byte that each corner asks for beside the quickest, array [corners, rows]; 0
    where it is not smaller.
    """
    quickest = np.argmin(seconds, axis=0)[None]
    slower, smaller = (
        seconds - np.take_along_axis(seconds, quickest, axis=0),
        np.take_along_axis(sizes, quickest, axis=0) - sizes,
    )
    return np.where(smaller > 0, slower / np.where(smaller > 0, smaller, 1.0), 0.0)
