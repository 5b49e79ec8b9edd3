"""Quantities of corners: steps whose layer groups each follow one remat policy, in all their layers
(`shardlib.cost.pricing.variants.mixed_remat`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.sums import Sums, joined, sums
from shardlib.cost.pricing.variants.mixed_remat import NONE, Corner, Tallies, composed, corners
from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.pricer import Pricer
from shardlib.planning.space.cost_tables import Accounts
from shardlib.planning.space.workload import Workload
from shardlib.propagation.assignment import Choice

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Corners:
    """Makes quantities of corners.

    Attributes:
        load: the model.
        policies: remat policies of the space.
        pricer: the machine.
        values: measures on all shapes.
        cuttable: colours that some choice shards.
    """

    load: Workload
    policies: tuple[str, ...]
    pricer: Pricer
    values: Values
    cuttable: tuple[str, ...]

    @cached_property
    def _accounts(self) -> Accounts:
        return self.load.ledger.accounts(self.cuttable)

    @cached_property
    def _moments(self) -> Accounts:
        return self.load.moments.accounts(self.cuttable)

    def quantities(
        self,
        uniform: Mapping[str, Sums],
        choices: Array,
        c: Candidates,
        listed: Sequence[tuple[Choice, bool]],
    ) -> dict[Corner, Sums]:
        """Quantities of every corner by row."""
        all_corners = corners(self.policies, len(self.load.counts))
        mixed = [corner for corner in all_corners if len(set(corner)) > 1]
        order = np.argsort(choices, kind="stable")
        parts: dict[Corner, list[Sums]] = {corner: [] for corner in mixed}
        for number in np.unique(choices):
            rows = np.flatnonzero(choices == number)
            for corner, s in self._of_choice(mixed, *listed[int(number)], c.take(rows)).items():
                parts[corner].append(s)
        back = np.argsort(order)
        return {
            corner: joined(parts[corner]).take(back) if corner in parts else uniform[corner[0]]
            for corner in all_corners
        }

    def _of_choice(
        self, mixed: Sequence[Corner], choice: Choice, routes: bool, c: Candidates
    ) -> dict[Corner, Sums]:
        """Quantities of corners whose layer groups differ, under one choice."""
        shapes = np.unique(c.shape)
        local = replace(c, shape=np.searchsorted(shapes, c.shape))
        segments = [moment.segment for moment in self.load.programs[NONE, routes].moments]
        parts = {policy: self._tallies(policy, routes, choice, shapes) for policy in self.policies}
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
