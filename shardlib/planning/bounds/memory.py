"""How few bytes can a plan take? Lower bounds of memory, before anything is priced.

Memory does not depend on links, and almost all of it is a sum over the components of the colours.
With all that ZeRO may shard sharded, all stages equally full and the fewest microbatches in
flight of any schedule, that sum is a bound of the peak under every ZeRO stage and schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardlib.axes import TOKEN_AXES
from shardlib.cost.pricing.device_memory import heap_share
from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import ROWS, Q
from shardlib.planning.space import schedules
from shardlib.planning.space.cost_tables import Account
from shardlib.planning.space.table_components import Parts, Scope, Under
from shardlib.schedules.schedule import Pipelines, Schedule
from shardlib.schedules.table import least_in_flight, named, pipelines

Array = np.ndarray
#: What rests, by quantity: with all that ZeRO may shard sharded, and whole.
RESTING = (
    Q.PARAMETERS_CUT,
    Q.STATE_CUT,
    Q.KEPT_CUT,
    Q.PARAMETERS,
    Q.STATE,
    Q.KEPT,
)
#: Frozen parameters rest beside the others.
_FROZEN = {Q.PARAMETERS_CUT: Q.FROZEN_CUT, Q.PARAMETERS: Q.FROZEN}
#: What occupies memory at a point, by what divides it: stacks that the forward pass saves for every
#: microbatch in flight, what else layers have, the ends, and what every stage has; and how many
#: bytes of stacks there are fewer than at the point that has the most, below zero.
STACKS, LAYERS, OUTSIDE_LAYERS, EVERYWHERE, LACKING = KINDS = range(5)


@dataclass(frozen=True, kw_only=True)
class Footprint:
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
    """

    resting: Array
    state: Array
    occupied: Array
    bare: Array
    turns: Array
    whole: tuple[Array, ...]
    breadth_first: Footprint | None = None

    def under(self, zero: int) -> Footprint:
        """The footprint under a ZeRO stage; as it is under 3."""
        parameters, kept, state = self.whole
        more = sum((parameters, kept)[: 3 - zero], np.zeros(1))
        return (
            self
            if zero == 3
            else replace(
                self,
                resting=self.resting + more,
                state=self.state + state if zero == 0 else self.state,
                breadth_first=None,
            )
        )

    def take(self, which: Array) -> Footprint:
        """Some of the candidates."""
        return Footprint(
            resting=self.resting[which],
            state=self.state[which],
            occupied=self.occupied[which],
            bare=self.bare[which],
            turns=self.turns[which],
            whole=tuple(one[which] for one in self.whole),
            breadth_first=None if self.breadth_first is None else self.breadth_first.take(which),
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
        at: numbers of the shapes, ascending.
    """

    def __init__(self, scope: Scope, pricer: Pricer, values: Values, at: Array) -> None:
        self._model, self._pricer, self._profile = scope.load.model, pricer, pricer.profile
        self._room, self.at, accounts = scope.room, at, scope.accounts
        shapes = values.shapes.take(at)

        def parts(account: Account, weights: Array, after: Callable[[Array], Array]) -> Parts:
            return Parts(
                scope,
                account,
                shapes,
                lambda tally, some: after(tally.weighed(weights).on(values, at[some])),
                len(weights),
            )

        self._rest = parts(accounts.rest, _resting(accounts.rest.segments), lambda found: found)
        self._points = {
            policy: parts(account, _occupying(account, pricer), _with_lacking)
            for policy in scope.room.policies
            for account in [accounts.points[policy, scope.routes]]
        }

    def least(self) -> tuple[Array, dict[str, Array]]:
        """The least that any choice takes, by shape: what rests, and by policy what occupies
        memory; see `of`.
        """
        return self._rest.least(), {policy: parts.least() for policy, parts in self._points.items()}

    def total(self, under: Under, shapes: Array) -> tuple[Array, dict[str, Array]]:
        """What choices take on some of the shapes, by number; see `of`.

        Args:
            under: the choice of each shape.
            shapes: numbers of shapes.

        Returns:
            Bytes of all moments of the step, and by remat policy.
        """
        where = np.searchsorted(self.at, shapes)
        return self._rest.total(under, where), {
            policy: parts.total(under, where) for policy, parts in self._points.items()
        }

    def of(self, rest: Array, points: Array, sizes: Mapping[str, Array]) -> Footprint:
        """The footprint of candidates.

        Args:
            rest: bytes of `RESTING` on all stages together, in layers and in the ends, by
                candidate: array [2 x 6, candidates].
            points: bytes of `KINDS` at every point, array [points x 5, candidates].
            sizes: of every mesh axis and "micro", by candidate.
        """
        stages, together = sizes["stage"], sizes["micro"] // schedules.groups(self._room)

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
        found = self._holding(
            rest,
            points,
            sizes,
            least_in_flight(shape(1)),
            longest,
        )
        if not schedules.breadth_first(self._room):
            return found
        most = np.maximum.reduce(
            [schedule.in_flight(shape(1)) for schedule in schedules.forward_first()]
        )
        return replace(found, breadth_first=self._holding(rest, points, sizes, together, most))

    def _in_flight(self) -> list[tuple[Schedule, int]]:
        """Schedules and chunks a stage, among which one has the most microbatches in flight."""
        if self._room.pins.schedule:
            return [(named(self._room.pins.schedule), chunks) for chunks in (1, 2)]
        return [
            (schedule, chunks)
            for schedule in pipelines()
            for chunks in schedule.tried(pinned=False, chunks=None, policy="none", most=2)
        ]

    def _holding(
        self, rest: Array, points: Array, sizes: Mapping[str, Array], held: Array, most: Array
    ) -> Footprint:
        """See `of`, with the least and the most microbatches in flight."""
        profile, stages, micro = self._profile, sizes["stage"], sizes["micro"]
        spread = profile.embedding_and_head == "spread"
        layers, ends = rest.reshape(2, len(RESTING), -1)
        parameters, state, kept, *whole = layers / stages + ends * (
            1.0 if spread else np.where(stages > 1, self._model.largest_end, 1.0)
        )
        stacks, others, at_ends, everywhere, lacking = np.moveaxis(
            points.reshape(len(points) // len(KINDS), len(KINDS), len(stages)), 1, 0
        )
        flying, others = (
            held / stages,
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
                profile.fragmentation * (whole[0] - parameters),
                keeps * (whole[2] - kept),
                whole[1] - state,
            ),
            resting=profile.fragmentation * (parameters + batch)
            + keeps * kept
            + (profile.fragmentation - 1) * state
            + profile.runtime_bytes,
            state=state,
            occupied=heap * (stacks * flying + others).max(0),
            bare=heap * (lacking * most * self._fullest(stages) + others).max(0),
            turns=micro / most / heap_share(self._pricer, stages),
        )

    def _fullest(self, stages: Array) -> Array:
        """The largest share that any stage has of the layers of a class, at most: whole layers in
        every chunk, and those that stages cut by work have more.
        """
        fewest = min(self._model.counts, default=1)
        return np.where(
            stages > 1,
            (1 + self._model.head_layers / fewest) / stages + schedules.MAX_VIRTUAL / fewest,
            1.0,
        )


def _resting(segments: int) -> Array:
    """Coefficients that turn a tally of what rests into `RESTING` in layers and in the ends: array
    [2 x 6, rows].
    """
    found = np.zeros((2, len(RESTING), segments, ROWS))
    for kind, quantity in enumerate(RESTING):
        for one in (quantity, _FROZEN.get(quantity, quantity)):
            found[0, kind, :-1, one] = found[1, kind, -1, one] = 1.0
    return found.reshape(2 * len(RESTING), -1)


def _occupying(account: Account, pricer: Pricer) -> Array:
    """Coefficients that turn a tally of memory into the `KINDS` of every point: array [points x 5,
    rows].
    """
    factors, layers = pricer.corrected(np.ones((ROWS, 1)))[:, 0], account.segments - 2
    found = np.zeros((account.lists, len(KINDS), account.lists, account.segments, ROWS))
    for point in range(account.lists):
        for quantity in (
            Q.SAVED,
            Q.TEMPORARY,
            Q.COPY_CUT,
            *(() if pricer.profile.gradient_buffer else (Q.GRADIENT_CUT,)),
        ):
            factor = factors[quantity]
            found[point, STACKS if quantity == Q.SAVED else LAYERS, point, :layers, quantity] = (
                factor
            )
            found[point, EVERYWHERE, point, layers, quantity] = found[
                point, OUTSIDE_LAYERS, point, layers + 1, quantity
            ] = factor
    return found.reshape(account.lists * len(KINDS), -1)


def _with_lacking(points: Array) -> Array:
    """Quantities with how many bytes of stacks each point has fewer than that with the most: all
    points together need at least what those of one would, less the most stacks.
    """
    found = points.reshape(len(points) // len(KINDS), len(KINDS), points.shape[-1])
    found[:, LACKING] = found[:, STACKS] - found[:, STACKS].max(0)
    return points
