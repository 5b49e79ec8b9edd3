"""Prices plans whose layer groups follow different remat policies, or a policy with different
numbers of their layers.

Such plans are between *corners*, see `shardlib.cost.pricing.variants.mixed_remat`. For each row
that is worth the trouble (`shardlib.planning.offers.layer_group_bounds`) all corners are priced.
Every mixture's (bytes of activations, seconds) is a weighted average of those of the corners, so
Lagrange's bound over the corners is one for all mixtures; for rows that it leaves the best mixture
is found exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.sums import Sums
from shardlib.cost.pricing.totals import Totals, combine
from shardlib.cost.pricing.variants.best_mixtures import Pattern, best_mixture, patterns
from shardlib.cost.pricing.variants.mixed_remat import NONE, Corner, between
from shardlib.cost.pricing.variants.offload_and_partial_remat import fullest_by_class, offloaded
from shardlib.cost.tables.pricer import Pricer
from shardlib.decisions.table import Decisions
from shardlib.planning.offers.incumbents import Seen
from shardlib.planning.offers.layer_group_bounds import GroupBounds, rates
from shardlib.planning.offers.layer_group_corners import Corners
from shardlib.planning.offers.offer import Offer
from shardlib.planning.space import schedules
from shardlib.planning.space.space import Space
from shardlib.planning.space.workload import Workload

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Priced:
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

    def take(self, which: Array) -> _Priced:
        """Some of the rows."""
        return _Priced(
            corners={corner: totals.take(which) for corner, totals in self.corners.items()},
            offer=self.offer.take(which),
            candidates=self.candidates[which],
            c=self.c.take(which),
        )

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
class GroupPricer:
    """Prices mixtures.

    Attributes:
        load, room: the model and the space.
        pricer: the machine.
        bounds: of the same model, space and machine.
        corners: makes the quantities of corners.
    """

    load: Workload
    room: Space
    pricer: Pricer
    bounds: GroupBounds
    corners: Corners

    @cached_property
    def _patterns(self) -> list[Pattern]:
        return patterns(self.room.policies, len(self.load.counts))

    def price(
        self,
        known: Mapping[str, Sums],
        choices: Array,
        candidates: Array,
        c: Candidates,
        knobs: Sequence[Decisions],
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
            wanted = self.bounds.wanted(known, c, knobs, seen)
        else:
            wanted = {
                how: np.flatnonzero(schedules.legal_zero(self.room, how.zero, c)) for how in knobs
            }
        rows = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *wanted.values()]))
        if not len(rows):
            return
        quantities = self.corners.quantities(
            {policy: s.take(rows) for policy, s in known.items()},
            choices[rows],
            c.take(rows),
            seen.choices,
        )
        for how, mine in wanted.items():
            if len(mine):
                at, some = np.searchsorted(rows, mine), c.take(mine)
                priced = _Priced(
                    corners={
                        corner: combine(s.take(at), how, self.load.model, self.pricer, some)
                        for corner, s in quantities.items()
                    },
                    offer=Offer(decisions=how, choices=choices[mine]),
                    candidates=candidates[mine],
                    c=some,
                )
                self._offer(priced, seen)

    def _offer(self, priced: _Priced, seen: Seen) -> None:
        """Offers the best mixture of each row, with nothing in host memory and with something."""
        pinned = self.room.pins.offload
        for parts in [pinned] if pinned is not None else [(), *self.bounds.offloads]:
            moved = priced.offloaded(parts, self.pricer)
            if self.room.each:
                self._pinned(moved, seen)
                continue
            at = (
                np.flatnonzero(self._bound(moved.corners) < seen.limit)
                if self.room.pins.remat_layers is None
                else np.arange(len(priced.c))
            )
            if len(at):
                self._best(moved.take(at), seen)

    def _bound(self, prices: Mapping[Corner, Totals]) -> Array:
        """Seconds that no mixture which fits can beat: the largest of Lagrange's bounds with the
        rates, seconds for a byte, at which each corner trades them.
        """
        seconds, sizes = (
            np.stack([totals.step_seconds for totals in prices.values()]),
            np.stack([totals.peak_bytes for totals in prices.values()]),
        )
        return np.where(
            sizes.min(0) > self.bounds.capacity,
            np.inf,
            np.max(
                [
                    (seconds + rate * (sizes - self.bounds.capacity)).min(0)
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
                else most
                if number is None
                else np.full(len(priced.c), float(number))
            )
            for (policy, number), most in zip(self.room.each, layers, strict=True)
        ]
        at = np.flatnonzero(
            np.logical_and.reduce(
                [number <= most for number, most in zip(numbers, layers, strict=True)]
            )
        )
        corner = tuple(policy for policy, _ in self.room.each)
        self._mixtures(priced, corner, np.stack(numbers), at, seen)

    def _mixtures(
        self, priced: _Priced, corner: Corner, numbers: Array, at: Array, seen: Seen
    ) -> None:
        """Offers mixtures of some rows; `numbers` are layers that follow the corner's policies,
        array [layer groups, rows].
        """
        if not len(at):
            return
        layers = fullest_by_class(priced.offer.decisions, self.load.model, priced.c)
        totals = between(
            [(policy, numbers[k, at]) for k, policy in enumerate(corner)],
            [most[at] for most in layers],
            lambda one: priced.corners[one].take(at),
        )
        each = [tuple((policy, int(numbers[k, i])) for k, policy in enumerate(corner)) for i in at]
        seen.offer(replace(priced.offer.take(at), groups=each), totals, priced.candidates[at])

    def _best(self, priced: _Priced, seen: Seen) -> None:
        """Offers the fastest mixture of each row that fits; with a pinned number of layers also one
        where none fits.
        """
        layers = fullest_by_class(priced.offer.decisions, self.load.model, priced.c)
        total, capacity = self.room.pins.remat_layers, self.bounds.capacity
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
