"""The exact price of one candidate, without any table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.axes import STAGE
from shardlib.cost.machine.collective_tables import Slot, along, stored
from shardlib.cost.pricing.candidates import Candidates, candidates
from shardlib.cost.pricing.stage_shares import dealt, shares_moved
from shardlib.cost.pricing.sums import sums
from shardlib.cost.pricing.totals import Totals, combine
from shardlib.cost.pricing.variants.collective_matmul import Saving, looped, saving
from shardlib.cost.pricing.variants.mixed_remat import Corner, Tallies, between, composed
from shardlib.cost.pricing.variants.offload_and_partial_remat import (
    fullest_by_class,
    mix,
    offloaded,
    rematerialised_share,
)
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import Q
from shardlib.cost.terms.terms import Item
from shardlib.hardware.placement import Placement, place
from shardlib.hardware.topology import Topology
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.space.programs import Program
from shardlib.planning.space.workload import Workload

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class OnMachine:
    """One candidate on a machine.

    Attributes:
        load: the model, as the candidate's dtypes and its attention change it.
        candidate: the decisions.
        pricer: the machine and the framework.
        placed: where its axes lie.
        c: the candidate as an array of one.
    """

    load: Workload
    candidate: Candidate
    pricer: Pricer
    placed: Placement
    c: Candidates

    @classmethod
    def of(cls, load: Workload, topology: Topology, candidate: Candidate) -> OnMachine:
        """A candidate of a model on a topology."""
        one = candidate.decisions
        load = load.under(one.dtypes, one.fused)
        pricer = Pricer(topology.in_use(one.mesh.devices), load.profile)
        placed = place(one.mesh, topology, one.axis_order)
        assert placed is not None, f"{one.mesh} does not fit {topology.name}"
        c = candidates([(one.mesh, placed)], [one.microbatches], pricer.topology)
        return cls(load=load, candidate=candidate, pricer=pricer, placed=placed, c=c)

    def totals(self) -> Totals:
        """The price."""
        return looped(self._without_loops(), self.saving())

    def saving(self) -> Saving | None:
        """What loops over tensor save; None without any."""
        one, load = self.candidate, self.load
        if one.decisions.collective_matmul != "loop" or one.mesh["stage"] > 1:
            return None
        return saving(
            load.programs[one.decisions.remat, one.routes].facts,
            one.choice,
            self.placed,
            self.c,
            self.pricer,
            len(load.counts),
        )

    def tally(self, items: list[Item]) -> Array:
        """Quantities of items, see `Pricer.tally`."""
        return self.pricer.tally(items, self.candidate.choice, self.c.shapes, len(self.load.counts))

    def programs(self) -> list[tuple[Program, Array]]:
        """The program of every remat policy that layers follow, with the part of each segment that
        does: those of layer groups, what has none, and the embedding and head.
        """
        one, groups = self.candidate.decisions, self.candidate.groups
        layers = [float(each[0]) for each in fullest_by_class(one, self.load.model, self.c)]
        if groups:
            shares = [
                (policy, number / count)
                for (policy, number), count in zip(groups, layers, strict=True)
            ]
        else:
            share = float(self._share()[0]) if one.remat_layers else 1.0
            shares = [(one.remat, share)] * len(layers)
        parts = {
            policy: np.zeros(len(layers) + 2)
            for policy in dict.fromkeys((one.remat, *(policy for policy, _ in shares), "none"))
        }
        parts[one.remat][len(layers) :] = 1.0
        for k, (policy, share) in enumerate(shares):
            parts[policy][k] += share
            parts["none"][k] += 1 - share
        return [
            (self.load.programs[policy, self.candidate.routes], part)
            for policy, part in parts.items()
            if part.any()
        ]

    def once_a_step(self) -> dict[tuple[Slot, str], float]:
        """Bytes on a device of what moves once a step, by slot and cause: parameters after their
        update, and layers that are dealt out to stages.
        """
        rest = self.tally(self.load.rest)[..., self.c.shape]
        how, model, profile = self.candidate.decisions, self.load.model, self.pricer.profile
        found: dict[tuple[Slot, str], float] = {}
        if how.zero in (1, 2):
            shares = shares_moved(how, model, self.c, profile)
            experts = float((rest[:, Q.EXPERTS] * shares).sum())
            sizes = float((rest[:, Q.PARAMETERS] * shares).sum()) - experts, experts
            for flag, size in zip((False, True), sizes, strict=True):
                slot = Slot("gather", stored(experts=flag), "all-gather")
                found[slot, "updated parameters"] = size
        parameters, gradients = (
            (Q.PARAMETERS_CUT, Q.FROZEN_CUT) if how.zero >= 3 else (Q.PARAMETERS, Q.FROZEN),
            (Q.KEPT_CUT if how.zero >= 2 else Q.KEPT,),
        )
        kind = "all-gather" if how.virtual_stages % how.mesh["stage"] else "all-to-all"
        for rows, cause in ((parameters, "layers to stages"), (gradients, "gradients of layers")):
            size = dealt(rest[:, rows].sum(1), how, model, self.c, profile)
            found[Slot("deal", along(STAGE), kind), cause] = float(size[0])
        return found

    def _without_loops(self) -> Totals:
        one, load, c = self.candidate, self.load, self.c
        how = one.decisions

        def priced(work: Array, points: Sequence[Array]) -> Totals:
            quantities = sums(work, self.tally(load.rest), points, load.model, self.pricer, c)
            totals = combine(quantities, how, load.model, self.pricer, c)
            return offloaded(totals, how.offload, self.pricer, c) if how.offload else totals

        def corner(policies: Corner) -> Totals:
            programs = {policy: load.programs[policy, one.routes] for policy in policies}
            first = programs[policies[0]]
            if len(programs) == 1:
                return priced(self.tally(first.work), [self.tally(items) for items in first.points])
            parts = {
                policy: Tallies(
                    work=self.tally(program.work),
                    stacks=tuple(self.tally(moment.stacks) for moment in program.moments),
                    points=tuple(
                        tuple(map(self.tally, moment.points)) for moment in program.moments
                    ),
                )
                for policy, program in programs.items()
            }
            segments = [moment.segment for moment in first.moments]
            return priced(*composed(policies, parts, segments, load.counts))

        if one.groups:
            return between(one.groups, fullest_by_class(how, load.model, c), corner)
        rematerialised = corner((how.remat,))
        if not how.remat_layers:
            return rematerialised
        return mix(corner(("none",)), rematerialised, self._share())

    def _share(self) -> Array:
        """Part of the layers that rematerialise, where a number of them does."""
        how = self.candidate.decisions
        return rematerialised_share(
            how.remat_layers, how, self.load.model, self.c, self.pricer.profile
        )


def price(load: Workload, topology: Topology, candidate: Candidate) -> Totals:
    """Prices one candidate on its own.

    Returns:
        Seconds and bytes, arrays of one candidate.
    """
    return OnMachine.of(load, topology, candidate).totals()
