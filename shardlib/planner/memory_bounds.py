"""Lower bounds of memory, before anything is priced: kinds of bytes, and how tallies add up to
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.pricing import heap_share
from shardlib.cost.tables import ROWS, Pricer, Q, Tally, Values
from shardlib.cost.terms import ArrayTable
from shardlib.layout import TOKEN_AXES
from shardlib.planner.space import MAX_VIRTUAL, Parts, Scope, Under, forward_first
from shardlib.planner.workload import Account
from shardlib.schedules import Pipelines, Schedule, least_in_flight, named, pipelines

#: What is stored, by quantity: with all that ZeRO may shard sharded, and whole.
RESTING = (
    Q.PARAMETERS_CUT,
    Q.STATE_CUT,
    Q.KEPT_CUT,
    Q.PARAMETERS,
    Q.STATE,
    Q.KEPT,
)
#: Trained parameters, whole: what stages hold beside shards that they gather once for a step.
TRAINED = len(RESTING)
#: Frozen parameters rest beside the others.
_FROZEN = {Q.PARAMETERS_CUT: Q.FROZEN_CUT, Q.PARAMETERS: Q.FROZEN}
#: What occupies memory at a point, by what divides it: stacks that the forward pass saves for every
#: microbatch in flight, what else layers have, the ends, and what every stage has; and how many
#: bytes of stacks there are fewer than at the point that has the most, below zero.
STACKS, LAYERS, OUTSIDE_LAYERS, EVERYWHERE, LACKING = KINDS = range(5)


def resting(segments: int) -> Array:
    """Coefficients that turn a tally of what is stored into `RESTING` and `TRAINED` in layers and
    in embedding and head: array [2 x 7, rows].
    """
    coefficients = np.zeros((2, len(RESTING) + 1, segments, ROWS))
    for kind, quantity in enumerate(RESTING):
        for stored in (quantity, _FROZEN.get(quantity, quantity)):
            coefficients[0, kind, :-1, stored] = coefficients[1, kind, -1, stored] = 1.0
    coefficients[0, TRAINED, :-1, Q.PARAMETERS] = coefficients[1, TRAINED, -1, Q.PARAMETERS] = 1.0
    return coefficients.reshape(2 * (len(RESTING) + 1), -1)


def occupying(account: Account, pricer: Pricer) -> Array:
    """Coefficients that turn a tally of memory into the `KINDS` of every point: array [points x 5,
    rows].
    """
    factors, layers = pricer.corrected(np.ones((ROWS, 1)))[:, 0], account.segments - 2
    coefficients = np.zeros((account.lists, len(KINDS), account.lists, account.segments, ROWS))
    for point in range(account.lists):
        for quantity in (
            Q.SAVED,
            Q.TEMPORARY,
            Q.COPY_CUT,
            *(() if pricer.profile.gradient_buffer else (Q.GRADIENT_CUT,)),
        ):
            factor = factors[quantity]
            coefficients[
                point, STACKS if quantity == Q.SAVED else LAYERS, point, :layers, quantity
            ] = factor
            coefficients[point, EVERYWHERE, point, layers, quantity] = coefficients[
                point, OUTSIDE_LAYERS, point, layers + 1, quantity
            ] = factor
    return coefficients.reshape(account.lists * len(KINDS), -1)


def with_lacking(points: Array) -> Array:
    """Quantities with how many bytes of stacks each point has fewer than that with the most: all
    points together need at least what those of one would, less the most stacks.
    """
    by_point = points.reshape(len(points) // len(KINDS), len(KINDS), points.shape[-1])
    by_point[:, LACKING] = by_point[:, STACKS] - by_point[:, STACKS].max(0)
    return points


# --------------------------------------------------------------------------------------------------
# Lower bounds of the memory of a choice.
#
# Memory does not depend on links, and almost all of it is a sum over the components of the
# colours. With all that ZeRO may shard sharded, all stages equally full and the fewest
# microbatches in flight of any schedule, that sum is a bound of the peak under every ZeRO stage
# and schedule.

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Footprint(ArrayTable):
    """Bytes of candidates that no plan undercuts, arrays of equal length.

    Attributes:
        resting: parameters, the batch, and gradients that are kept over microbatches.
        state: of the optimizer.
        occupied: what a step makes.
        bare: what it makes with all stacks of activations in host memory.
        turns: times that the stacks that are there at once are made in a step, at least, over
            their part of the heap.
        breadth_first: the same where stages remember all microbatches that are in the pipeline
            together; None where no pipeline does so unless that is pinned.
        whole: bytes more where parameters, kept gradients, and state are stored replicated.
        once: bytes more where stages gather sharded parameters once for all microbatches.
    """

    resting: Array
    state: Array
    occupied: Array
    bare: Array
    turns: Array
    whole: tuple[Array, ...]
    once: Array
    breadth_first: Footprint | None = None

    def under(self, zero: int, gather: str = "use") -> Footprint:
        """The footprint under a ZeRO stage."""
        if zero == 3:
            return replace(self, resting=self.resting + self.once) if gather == "once" else self
        parameters, gradients, state = self.whole
        more = sum((parameters, gradients)[: 3 - zero], np.zeros(1))
        return replace(
            self,
            resting=self.resting + more,
            state=self.state + state if zero == 0 else self.state,
            breadth_first=None,
        )

    def least(self, offload: tuple[str, ...]) -> Array:
        """Bytes of a device with some parts in host memory ("optimizer", "activations") or on disk
        ("disk").
        """
        return (
            self.resting
            + (self.bare if "activations" in offload else self.occupied)
            + (0.0 if {"optimizer", "disk"}.intersection(offload) else self.state)
        )


class Footprints:
    """Lower bounds of bytes on some shapes.

    Args:
        scope: the choices.
        pricer: the corrections and the software.
        values: measures on all shapes of the space.
    """

    def __init__(self, scope: Scope, pricer: Pricer, values: Values) -> None:
        self._model, self._pricer, self._profile = scope.load.model, pricer, pricer.profile
        self._space, accounts = scope.space, scope.accounts

        def parts(account: Account, weights: Array, after: Callable[[Array], Array]) -> Parts:
            weighed: dict[int, Tally] = {}

            def measured(tally: Tally, shapes: Array) -> Array:
                if id(tally) not in weighed:  # the account keeps it
                    weighed[id(tally)] = tally.weighed(weights)
                return after(weighed[id(tally)].on(values, shapes))

            return Parts(scope, account, values.shapes, measured, len(weights))

        self._rest = parts(
            accounts.rest, resting(accounts.rest.segments), lambda quantities: quantities
        )
        self._points = {
            policy: parts(account, occupying(account, pricer), with_lacking)
            for policy in scope.space.policies
            for account in [accounts.points[policy, scope.routes]]
        }

    def least(self, shapes: Array) -> tuple[Array, dict[str, Array]]:
        """The least that any choice takes on some of the shapes, by number: what is stored, and by
        policy what occupies memory; see `of`.
        """
        return self._rest.least(shapes), {
            policy: parts.least(shapes) for policy, parts in self._points.items()
        }

    def total(self, row_choices: Under, shapes: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the bytes under choices on some of the shapes, by number; see `of`."""
        return self._rest.total(row_choices, shapes), {
            policy: parts.total(row_choices, shapes) for policy, parts in self._points.items()
        }

    def of(self, resting: Array, points: Array, sizes: Mapping[str, Array]) -> Footprint:
        """The footprint of candidates.

        Args:
            resting: bytes of `RESTING` and `TRAINED` on all stages together, in layers and in the
                ends, by candidate: array [2 x 7, candidates].
            points: bytes of `KINDS` at every point, array [points x 5, candidates].
        """
        stages, together = sizes["stage"], sizes["micro"] // self._space.accumulation_groups

        def shape(chunks: int) -> Pipelines:
            return Pipelines(
                stages=stages,
                chunks=np.full_like(stages, chunks),
                microbatches=together,
                lockstep=self._profile.pipeline == "lockstep",
            )

        longest = np.maximum.reduce(
            [schedule.in_flight(shape(chunks)) for schedule, chunks in self._in_flight()]
        )
        in_flight, pinned = least_in_flight(shape(1)), self._space.pins.schedule
        rounds = pinned is not None and named(pinned).forward_first
        footprint = self._holding(
            resting, points, sizes, in_flight, longest, 0.0 if rounds else 1.0
        )
        if not self._space.breadth_first_chunks:
            return footprint
        longest_in_flight = np.maximum.reduce(
            [schedule.in_flight(shape(1)) for schedule in forward_first()]
        )
        chunks = self._space.most_rounds(sizes)
        whole_share = np.minimum(1.0, 2 / np.maximum(chunks, 1))  # two chunks are whole at a time
        first = self._holding(resting, points, sizes, together, longest_in_flight, whole_share)
        return replace(footprint, breadth_first=first.under(3, "once"))

    def _in_flight(self) -> list[tuple[Schedule, int]]:
        """Schedules and chunks a stage, among which one has the most microbatches in flight."""
        if self._space.pins.schedule:
            return [(named(self._space.pins.schedule), chunks) for chunks in (1, 2)]
        return [
            (schedule, chunks)
            for schedule in pipelines()
            for chunks in schedule.tried(pinned=False, chunks=None, policy="none", limit=2)
        ]

    def _holding(
        self,
        resting: Array,
        points: Array,
        sizes: Mapping[str, Array],
        in_flight: Array,
        longest: Array,
        once: Array | float,
    ) -> Footprint:
        """See `of`, with the least and the most microbatches in flight, and the least share of
        parameters that are whole where stages gather them once for all microbatches.
        """
        profile, stages, micro = self._profile, sizes["stage"], sizes["micro"]
        spread = profile.embedding_and_head == "spread"
        layers, ends = resting.reshape(2, len(RESTING) + 1, -1)
        parameters, state, gradients, *replicated, trained = layers / stages + ends * (
            1.0 if spread else np.where(stages > 1, self._model.largest_end, 1.0)
        )
        stacks, others, at_ends, everywhere, lacking = np.moveaxis(
            points.reshape(len(points) // len(KINDS), len(KINDS), len(stages)), 1, 0
        )
        flying, others = (
            in_flight / stages,
            others / stages + everywhere + at_ends * (1 / stages if spread else stages == 1),
        )
        batch = (
            self._model.batch_bytes / math.prod(sizes[axis] for axis in TOKEN_AXES)
            + self._model.state_bytes
        )
        heap = profile.fragmentation * heap_share(self._pricer, stages)
        keeps = heap * ((micro > 1) | profile.gradient_buffer)
        return Footprint(
            whole=(
                profile.fragmentation * (replicated[0] - parameters),
                keeps * (replicated[2] - gradients),
                replicated[1] - state,
            ),
            once=np.where(stages > 1, once, 0.0)
            * (profile.fragmentation * self._model.working * trained + keeps * replicated[2]),
            resting=profile.fragmentation * (parameters + batch)
            + keeps * gradients
            + (profile.fragmentation - 1) * state
            + profile.runtime_bytes,
            state=state,
            occupied=heap * (stacks * flying + others).max(0),
            bare=heap * (lacking * longest * self._fullest(stages) + others).max(0),
            turns=micro / longest / heap_share(self._pricer, stages),
        )

    def _fullest(self, stages: Array) -> Array:
        """The largest share that any stage has of the layers of a class, at most: whole layers in
        every chunk, and those that stages cut by work have more.
        """
        fewest = min(self._model.counts, default=1)
        return np.where(
            stages > 1,
            (1 + self._model.head_layers / fewest) / stages + MAX_VIRTUAL / fewest,
            1.0,
        )
