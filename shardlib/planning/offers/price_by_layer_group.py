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
        load, space: the model and the space.
        pricer: the machine.
        bounds: of the same model, space and machine.
        corners: makes the quantities of corners.
    """

    load: Workload
    space: Space
    pricer: Pricer
    bounds: GroupBounds
    corners: Corners

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
            rows_by_knob = self.bounds.wanted(uniform, c, knobs, seen)
        else:
            rows_by_knob = {
                decisions: np.flatnonzero(schedules.legal_zero(self.space, decisions.zero, c))
                for decisions in knobs
            }
        rows = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *rows_by_knob.values()]))
        if not len(rows):
            return
        quantities = self.corners.quantities(
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
        for parts in [pinned] if pinned is not None else [(), *self.bounds.offloads]:
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
        total, capacity = self.space.pins.remat_layers, self.bounds.capacity
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
