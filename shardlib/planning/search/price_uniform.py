"""Prices what is left to decide once mesh, place and colours are: remat policy, ZeRO stage,
schedule, when weights are gathered, and what rests in host memory.

A *row* is a candidate under a choice of colours. Many rows are priced at once, whatever their
choices and meshes are, one knob after another.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.exposed_communication import saved_by_gathering_once
from shardlib.cost.pricing.step_time import least_seconds
from shardlib.cost.pricing.sums import Sums
from shardlib.cost.pricing.totals import Totals, combine
from shardlib.cost.pricing.variants.offload_and_partial_remat import fullest, mix, offloaded
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.knobs import Knobs
from shardlib.hardware.topology import Topology
from shardlib.planning.bounds.step_time import EACH, passing, step_seconds
from shardlib.planning.decisions.pins import HOSTED
from shardlib.planning.search.incumbents import Offer, Seen
from shardlib.planning.search.price_by_layer_group import ClassPricer
from shardlib.planning.space import space
from shardlib.planning.space.workload import Workload
from shardlib.schedules.schedule import Pipelines
from shardlib.schedules.table import named

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Candidates under choices.

    Attributes:
        candidates: position of each row's candidate in its block.
        choices: number of each row's choice.
        c: the candidates of the rows.
        sums: by remat policy, quantities.
        ticks: by remat policy, bounds of the time of a microbatch, arrays [quantities, rows] as
            `Bounds.tick` gives them; also of `EACH` where classes of layers may differ.
    """

    candidates: Array
    choices: Array
    c: Candidates
    sums: dict[str, Sums]
    ticks: dict[str, Array]

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, which: Array) -> Rows:
        """Some of the rows, by ascending position."""
        if len(which) == len(self):
            return self
        return Rows(
            candidates=self.candidates[which],
            choices=self.choices[which],
            c=self.c.take(which),
            sums={policy: s.take(which) for policy, s in self.sums.items()},
            ticks={policy: tick[:, which] for policy, tick in self.ticks.items()},
        )


@dataclass(frozen=True, kw_only=True)
class RowPricer:
    """Prices rows.

    Attributes:
        load, room: the model and the space.
        pricer, topology: the machine.
        capacity: usable bytes of a device.
        classes: prices plans whose classes of layers follow policies of their own; None where all
            are alike.
    """

    load: Workload
    room: space.Space
    pricer: Pricer
    topology: Topology
    capacity: float
    classes: ClassPricer | None = None

    def price(self, rows: Rows, seen: Seen) -> None:
        """Offers every plan of some rows that no bound excludes."""
        for piped in (False, True):
            mine = np.flatnonzero((rows.c.stage > 1) == piped)
            if not len(mine):
                continue
            less = rows if len(mine) == len(rows) else rows.take(mine)
            every = defaultdict[tuple[str, int], dict[str, list[Knobs]]](
                lambda: {policy: [] for policy in self.room.policies}
            )
            for policy in self.room.policies:
                for how in space.knobs(self.room, policy, piped):
                    every[how.schedule, how.virtual][policy].append(how)
            for (schedule, virtual), knobs in every.items():
                self._scheduled(less, schedule, virtual, knobs, seen)

    def _scheduled(
        self, rows: Rows, schedule: str, virtual: int, knobs: dict[str, list[Knobs]], seen: Seen
    ) -> None:
        """Offers the plans of one schedule.

        Args:
            rows: of meshes with or without stages.
            schedule, virtual: the schedule.
            knobs: ZeRO stages and when weights are gathered, by policy.
            seen: takes the plans.
        """
        piped = named(schedule).staged
        legal = np.ones(len(rows), dtype=bool)
        if piped:
            legal = space.legal_schedule(
                self.room,
                Knobs(schedule=schedule, virtual=virtual, accumulation=space.groups(self.room)),
                rows.c,
            )
        seen.skip(int((~legal).sum()))
        if not legal.any():
            return
        worth = {
            policy: legal & (self._least(rows, policy, schedule, virtual) < seen.limit)
            for policy in self.room.policies
            if knobs[policy]
        }
        some = np.flatnonzero(np.logical_or.reduce(list(worth.values())))
        if len(some) and not self.room.each:
            self._alike(rows, some, worth, knobs, seen)
        self._apart(rows, legal, knobs[self.room.policies[-1]], seen)

    def _apart(self, rows: Rows, legal: Array, knobs: list[Knobs], seen: Seen) -> None:
        """Offers the plans of one schedule whose classes of layers differ."""
        if self.classes is None or not knobs:
            return
        at = np.flatnonzero(
            legal & (self._least(rows, EACH, knobs[0].schedule, knobs[0].virtual) < seen.limit)
        )
        if len(at):
            less = rows.take(at)
            self.classes.price(less.sums, less.choices, less.candidates, less.c, knobs, seen)

    def _alike(
        self,
        rows: Rows,
        some: Array,
        worth: dict[str, Array],
        knobs: dict[str, list[Knobs]],
        seen: Seen,
    ) -> None:
        """Offers the plans of one schedule whose classes of layers are alike."""
        less = rows.take(some)
        for policy in worth:  # the same for all ZeRO stages
            least = least_seconds(
                less.sums[policy], knobs[policy][0], self.load.model, self.pricer, less.c
            )
            worth[policy] = worth[policy][some] & (least < seen.limit)
        for zero, gather in sorted(
            {(how.zero, how.gather) for listed in knobs.values() for how in listed},
            key=lambda one: (one[0], one[1] != "use"),
        ):
            legal, wanted = space.legal_zero(zero, less.c), worth
            if (
                gather == "once"
                and "use" in self.room.gathers
                and not seen.ranks
                and (
                    how := next(
                        (one for listed in knobs.values() for one in listed if one.gather == "use"),
                        None,
                    )
                )
            ):
                wanted = self._saving(less, worth, how)
            fast: tuple[Array, Totals] | None = None
            for policy in worth:
                how = next(
                    (how for how in knobs[policy] if (how.zero, how.gather) == (zero, gather)), None
                )
                if how is None:
                    continue
                totals = self._policy(less, policy, how, legal, wanted[policy], fast, seen)
                fast = totals if policy == "none" else fast

    def _saving(self, rows: Rows, worth: dict[str, Array], how: Knobs) -> dict[str, Array]:
        """Rows, by policy, in which gathering weights once saves time under one policy at least:
        the others are no faster than those that gather at every use, and larger.
        """
        at = np.flatnonzero(
            np.logical_or.reduce(list(worth.values())) & space.legal_zero(3, rows.c)
        )
        less, saving = rows.take(at), np.zeros(len(rows), dtype=bool)
        for policy in worth:
            saving[at] |= (
                saved_by_gathering_once(
                    less.sums[policy], replace(how, zero=3), self.load.model, self.pricer, less.c
                )
                > 0
            )
        return {policy: mine & saving for policy, mine in worth.items()}

    def _least(self, rows: Rows, policy: str, schedule: str, virtual: int) -> Array:
        """A bound of the step time under a schedule, by row."""
        groups = space.groups(self.room)
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
        return step_seconds(rows.ticks[policy], rows.c.stage, rows.c.micro, rounds, groups, passes)

    def _policy(
        self,
        rows: Rows,
        policy: str,
        how: Knobs,
        legal: Array,
        worth: Array,
        fast: tuple[Array, Totals] | None,
        seen: Seen,
    ) -> tuple[Array, Totals] | None:
        """Offers the plans of one policy under one knob; returns their prices and the rows that
        they are of.

        Args:
            fast: the prices without recomputation.
        """
        partly = np.zeros(len(rows), dtype=bool)
        if fast is not None and policy != "none":
            partly[fast[0]] = (fast[1].step_seconds < seen.limit) & (
                (fast[1].peak_bytes > self.capacity) | bool(self.room.pins.remat_layers)
            )
        seen.skip(int(((worth | partly) & ~legal).sum()))
        at = np.flatnonzero(legal & (worth | partly))
        if not len(at):
            return None
        s, c = (
            (rows.sums[policy], rows.c)
            if len(at) == len(rows)
            else (rows.sums[policy].take(at), rows.c.take(at))
        )
        totals = combine(s, how, self.load.model, self.pricer, c)
        quick: Totals | None = None
        if fast is not None and policy != "none":
            position = np.full(len(rows), -1)
            position[fast[0]] = np.arange(len(fast[0]))
            quick = fast[1].take(position[at])
            quick.seconds["overhead"][position[at] < 0] = (
                np.inf
            )  # not priced because it cannot be fast enough
        self._variants(
            Offer(policy=policy, how=how, choices=rows.choices[at]),
            rows.candidates[at],
            totals,
            quick,
            c,
            seen,
        )
        return at, totals

    def _variants(
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
        pins, wanted = self.room.pins, self.room.pins.remat_layers
        pinned = pins.offload or ()
        if pinned:
            totals = offloaded(totals, pinned, self.pricer, c.micro)
            fast = fast and offloaded(fast, pinned, self.pricer, c.micro)
            offer = replace(offer, how=replace(offer.how, offload=pinned))
        if not wanted:
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
        if not len(short) or wanted:
            return
        part, c = offer.take(short), c.take(short)
        for parts in self.offloads():
            less = offloaded(totals.take(short), parts, self.pricer, c.micro)
            moved = replace(part, how=replace(part.how, offload=parts))
            seen.offer(moved, less, rows[short])
            if fast is not None:
                self._mixed(
                    moved,
                    rows[short],
                    less,
                    offloaded(fast.take(short), parts, self.pricer, c.micro),
                    c,
                    seen,
                )

    def offloads(self) -> list[tuple[str, ...]]:
        """What may be put in host memory, beside nothing."""
        pinned = self.room.pins.offload
        if self.topology.chip.host_bytes_per_s <= 0 or pinned is not None or self.room.lowered:
            return []
        return [*((part,) for part in HOSTED), HOSTED]

    def _mixed(
        self,
        offer: Offer,
        rows: Array,
        lean: Totals,
        fast: Totals | None,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers the plans that recompute no more layers than memory asks for."""
        wanted = self.room.pins.remat_layers
        if fast is None or wanted == 0 or self.classes is not None:
            return
        legal = fast.step_seconds < seen.limit
        if self.room.lowered and wanted is None:  # layers of stages recompute alike
            legal &= c.stage == 1
        if wanted is None:
            legal &= (fast.peak_bytes > self.capacity) & (fast.step_seconds < lean.step_seconds)
        if not legal.any():
            return
        layers = fullest(offer.how, self.load.model, c)
        if wanted:
            needed = np.where(layers > wanted, float(wanted), 0.0)
        else:
            saved, less = fast.device_bytes["activations"], lean.device_bytes["activations"]
            others = sum(
                (
                    np.maximum(size, lean.device_bytes[name])
                    for name, size in fast.device_bytes.items()
                    if name != "activations"
                ),
                np.zeros(len(c)),
            )
            needed = np.ceil(
                (others + saved - self.capacity) / np.maximum(saved - less, 1e-9) * layers - 1e-9
            )
        at = np.flatnonzero(legal & (needed >= 1) & (needed < layers))
        if len(at):
            share = needed[at] / layers[at]
            seen.offer(
                replace(offer.take(at), recomputed=needed[at].astype(np.int64)),
                mix(fast.take(at), lean.take(at), share),
                rows[at],
            )
