"""Prices what is left to decide once mesh, place and colours are: remat policy, ZeRO stage,
schedule, when weights are gathered, and what is offloaded.

A *row* is a candidate under a choice of colours. Many rows are priced at once, whatever their
choices and meshes are, one decision after another.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.cost.pricing.exposed_communication import saved_by_gathering_once
from shardlib.cost.pricing.step_time import least_seconds
from shardlib.cost.pricing.totals import Totals, combine
from shardlib.cost.tables.pricer import Pricer
from shardlib.decisions.table import Decisions
from shardlib.planning.bounds.step_time import EACH, passing, step_seconds
from shardlib.planning.offers.incumbents import Seen
from shardlib.planning.offers.offer import Offer
from shardlib.planning.offers.price_by_layer_group import GroupPricer
from shardlib.planning.offers.rows import Rows
from shardlib.planning.offers.variants import Variants
from shardlib.planning.space import schedules
from shardlib.planning.space.space import Space
from shardlib.planning.space.workload import Workload
from shardlib.schedules.schedule import Pipelines
from shardlib.schedules.table import named

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class RowPricer:
    """Prices rows whose layer groups are alike.

    Attributes:
        load, space: the model and the space.
        pricer: the machine.
        variants: what is offered beside a price: less that is rematerialised, something offloaded.
        groups: prices plans whose layer groups follow policies of their own; None where all are
            alike.
    """

    load: Workload
    space: Space
    pricer: Pricer
    variants: Variants
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
                for decisions in schedules.zeros_and_schedules(self.space, policy, pipelined=piped):
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
            legal = schedules.legal_schedule(
                self.space,
                Decisions(
                    schedule=schedule,
                    virtual_stages=virtual,
                    accumulation=schedules.groups(self.space),
                ),
                rows.c,
            )
        seen.skip(int((~legal).sum()))
        if not legal.any():
            return
        zeros = {decisions.zero for listed in knobs.values() for decisions in listed}
        orders = self._ways(schedule, virtual)
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

    @cached_property
    def _kinds(self) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        """Schedules with chunks, but for breadth first, and breadth first."""
        return schedules.usual(self.space), schedules.first(self.space)

    def _ways(self, schedule: str, chunks: int) -> tuple[bool, ...]:
        """Whether pipelines of a schedule may work breadth first (True), or otherwise (False)."""
        usual, first = self._kinds
        return tuple(
            breadth_first
            for breadth_first, listed in ((False, usual), (True, first))
            if (schedule, chunks) in listed or (not breadth_first and not named(schedule).staged)
        )

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
        orders: tuple[bool, ...],
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
            legal = schedules.legal_zero(self.space, zero, less.c)
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
            np.logical_or.reduce(list(worth.values())) & schedules.legal_zero(self.space, 3, rows.c)
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
        groups = schedules.groups(self.space)
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
                (fast[1].peak_bytes > self.variants.capacity) | bool(self.space.pins.remat_layers)
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
        self.variants.offer(
            Offer(decisions=decisions, choices=rows.choices[hopeful]),
            rows.candidates[hopeful],
            totals,
            quick,
            c,
            seen,
        )
        return hopeful, totals
