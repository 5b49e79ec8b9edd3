"""Lower bounds of memory and of step time, of all plans and of those that fit, admissible before
anything is placed or priced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from shardlib.cost.collectives import (
    ALONG,
    INDEX,
    SLOTS,
    Links,
    Slot,
    best_links,
    least_hops,
    role_slots,
    stored,
)
from shardlib.cost.framework import ends_on_all_stages
from shardlib.cost.pricing import heap_share
from shardlib.cost.stages import Candidates, in_the_last, once_a_step, scatters
from shardlib.cost.tables import BYTES, COUNTS, ROWS, Pricer, Q, Tally, Values
from shardlib.cost.terms import ArrayTable, BoundedTable, distinct_rows
from shardlib.decisions.table import Decisions
from shardlib.layout import MESH_AXES, STORED_AXES, TOKEN_AXES
from shardlib.planner.space import (
    FEWEST,
    MAX_VIRTUAL,
    Filled,
    Parts,
    Scope,
    Space,
    Under,
    alone,
    forward_first,
)
from shardlib.planner.workload import Account
from shardlib.propagation.colours import Choice
from shardlib.schedules import (
    NONE,
    Pipelines,
    Schedule,
    least_in_flight,
    most_put_off,
    named,
    pipelines,
)

Array = np.ndarray

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
        for row in (quantity, _FROZEN.get(quantity, quantity)):
            coefficients[0, kind, :-1, row] = coefficients[1, kind, -1, row] = 1.0
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


# --------------------------------------------------------------------------------------------------
# The least time of mixtures of remat policies that fit.


def mixed(points: Sequence[tuple[Array, Array]], capacity: float) -> Array:
    """The least seconds of all mixtures of some points that are no larger than a capacity, by
    candidate; infinite where there is none.

    Args:
        points: (seconds, bytes) by candidate; a mixture of two lies on the straight line between
            them, or above.
        capacity: bytes.
    """
    fastest = np.minimum.reduce([np.where(size <= capacity, time, np.inf) for time, size in points])
    for (quick, large), (slow, small) in itertools.permutations(points, 2):
        improved = np.flatnonzero((large > capacity) & (small <= capacity) & (quick < fastest))
        share = (large[improved] - capacity) / (large[improved] - small[improved])
        fastest[improved] = np.minimum(
            fastest[improved], quick[improved] + (slow[improved] - quick[improved]) * share
        )
    return fastest


# --------------------------------------------------------------------------------------------------
# Entries (meshes with microbatches) under choices of colours, each with a bound.


@dataclass(frozen=True, kw_only=True)
class Pairs(BoundedTable):
    """Entries under choices, both by number, with a bound of each."""

    entries: Array
    choices: Array

    def firsts(self) -> Pairs:
        """The first pair of every entry."""
        return self.take(np.sort(np.unique(self.entries, return_index=True)[1]))


# --------------------------------------------------------------------------------------------------
# Lower bounds of a microbatch on all stages together, by candidate.

#: Rows of a `Tick`.
QUANTITIES = 7


@dataclass(frozen=True)
class Tick(ArrayTable):
    """Lower bounds for a microbatch and all stages together.

    Attributes:
        rows: array [QUANTITIES, candidates]; the properties are its rows.
    """

    rows: Array

    @property
    def busy(self) -> Array:
        """Seconds that stages are busy with kernels and with collectives that compute waits for."""
        return self.rows[0]

    @property
    def free(self) -> Array:
        """The same seconds less what gradients of weights take off a bubble of zero-bubble."""
        return self.rows[1]

    @property
    def loaded(self) -> Array:
        """The same seconds with what goes around a ring, in place of the compute under which that
        could hide.
        """
        return self.rows[2]

    @property
    def messages(self) -> Array:
        """Number of messages between stages, for a microbatch and chunk of layers."""
        return self.rows[3]

    @property
    def message_bytes(self) -> Array:
        """Bytes of these messages."""
        return self.rows[4]

    @property
    def blocked(self) -> Array:
        """Those seconds of `busy` that collectives take."""
        return self.rows[5]

    @property
    def layers(self) -> Array:
        """Those seconds of `busy` that are spent in layers, of which each stage has whole ones; 0
        where they differ.
        """
        return self.rows[6]

    def waiting(self, blocked: Array) -> Tick:
        """The same bounds where collectives that compute waits for take so many seconds."""
        more = blocked - self.blocked
        return Tick(
            np.concatenate([self.rows[:3] + more, self.rows[3:5], blocked[None], self.rows[6:]])
        )


# --------------------------------------------------------------------------------------------------
# Lower bounds of the step time before anything is placed.
#
# A stage is busy in every microbatch with kernels and with the collectives that compute waits for.
# With every group of axes on the fastest links that it could have alone, all stages equally full,
# messages between stages on the fastest links and the smallest bubble of any schedule, that is a
# bound of the step time. Gathers of parameters and reductions of gradients may hide behind
# compute, so it leaves them out. It is a sum over the components of the colours
# (`planner/space.py`).

#: In the place of a policy: for each layer group the least of all policies.
EACH = "each"


class Bounds:
    """Lower bounds of step times.

    Args:
        scope: the choices.
        pricer: the machine.
        values: measures on all shapes of the space.
    """

    def __init__(self, scope: Scope, pricer: Pricer, values: Values) -> None:
        self._pricer, self._values = pricer, values
        self._waiting, self._ring = waited(scope), hidden(scope)
        self._alike = len(scope.load.counts) == 1 and pricer.profile.embedding_and_head != "owners"
        self._layers, self._put_off = (
            len(scope.load.counts),
            most_put_off(lockstep=pricer.profile.pipeline == "lockstep"),
        )
        work = values.work
        none = np.ones(len(work), dtype=np.int64)
        self._links = best_links(
            {
                **dict.fromkeys(MESH_AXES, none),
                "expert": work.expert,
                "context": work.context,
                "tensor": work.tensor,
            },
            pricer.topology,
        )
        self._first = np.zeros(len(work), dtype=np.int64)
        self._first[values.which[::-1]] = np.arange(len(values.which))[::-1]
        self._parts = {
            policy: Parts(
                scope, scope.accounts.work[policy, scope.routes], work, self._seconds, QUANTITIES
            )
            for policy in scope.space.policies
        }
        self._by_class = (
            [
                [
                    Parts(
                        scope,
                        scope.accounts.work[policy, scope.routes],
                        work,
                        partial(self._of_segment, segment),
                        QUANTITIES,
                    )
                    for policy in scope.space.policies
                ]
                for segment in range(self._layers + 2)
            ]
            if scope.space.apart
            else []
        )

    def work_of(self, shapes: Array) -> Array:
        """Numbers of shapes that kernels tell apart, of some shapes by number."""
        return self._values.which[shapes]

    def tick(self, policy: str, choice: Choice, shapes: Array) -> Tick:
        """Returns lower bounds of a microbatch under a choice, on some shapes by number."""
        return self.ticks(policy, alone(choice, len(shapes)), shapes)

    def ticks(self, policy: str, row_choices: Under, shapes: Array) -> Tick:
        """Returns lower bounds of a microbatch under choices, on some shapes by number."""
        if policy != EACH:
            return Tick(self._parts[policy].total(row_choices, self._values.which[shapes]))
        return Tick(
            sum(
                (
                    np.minimum.reduce(
                        [parts.total(row_choices, self._values.which[shapes]) for parts in segment]
                    )
                    for segment in self._by_class
                ),
                np.zeros((QUANTITIES, len(shapes))),
            )
        )

    def least(self, policy: str, shapes: Array, first: int | None = None) -> Tick:
        """The least of all choices on some shapes, by number; infinite where no choice fits. With
        `first`, as `Parts.least` takes it, a bound of it.
        """
        if policy != EACH:
            return Tick(self._parts[policy].least(self._values.which[shapes], first))
        work, which = np.unique(self._values.which[shapes], return_inverse=True)
        return Tick(
            sum(
                (
                    np.minimum.reduce([parts.least(work, first) for parts in segment])
                    for segment in self._by_class
                ),
                np.zeros(1),
            )[:, which]
        )

    def _of_segment(self, segment: int, tally: Tally, shapes: Array) -> Array:
        """See `_seconds`, of one segment."""
        of_segment = tally.rows // ROWS == segment
        return self._seconds(
            replace(tally, rows=tally.rows[of_segment], matrix=tally.matrix[of_segment]), shapes
        )

    def _seconds(self, tally: Tally, shapes: Array) -> Array:
        """The rows of a `Tick`, on some of the shapes but for fsdp."""
        block, ring, stage = self._waiting, self._ring, role_slots("stage")
        waits = [first + slot for first in (COUNTS, BYTES) for slot in block]

        def rows_of(segments: int, quantities: list[int]) -> Array:
            folded = tally.folded(ROWS * segments, ROWS, quantities)
            rows = np.zeros((ROWS, len(shapes)))
            rows[folded.rows] = folded.on(self._values, self._first[shapes])
            return self._pricer.corrected(rows)

        def waiting(rows: Array, slots: list[int]) -> Array:
            used = [slot for slot in slots if rows[COUNTS + slot].any()]
            shares = self._pricer.waits(used)[:, 0] if used else ()
            return sum(
                (
                    share
                    * (
                        rows[COUNTS + slot] * self._links.latency[slot, shapes]
                        + rows[BYTES + slot] * self._links.per_byte[slot, shapes]
                    )
                    for share, slot in zip(shares, used, strict=True)
                ),
                np.zeros(len(shapes)),
            )

        rows = rows_of(
            self._layers + 2,
            [
                Q.COMPUTE,
                Q.WEIGHTS,
                *waits,
                *(first + slot for first in (COUNTS, BYTES) for slot in (*ring, *stage)),
            ],
        )
        blocked = waiting(rows, block)
        busy, layers = rows[Q.COMPUTE] + blocked, np.zeros(len(shapes))
        if self._alike:
            inside = rows_of(1, [Q.COMPUTE, *waits])
            layers = inside[Q.COMPUTE] + waiting(inside, block)
        (hop,), (share,) = stage, self._pricer.waits(stage)[:, 0]
        return np.stack(
            [
                busy,
                busy - self._put_off * rows[Q.WEIGHTS],
                busy - self._pricer.constants.overlap * rows[Q.COMPUTE] + waiting(rows, ring),
                share * rows[COUNTS + hop],
                share * rows[BYTES + hop],
                blocked,
                layers,
            ]
        )


def waited(scope: Scope) -> list[int]:
    """Slots of collectives that compute waits for."""
    along = ALONG[scope.space.strategy.decisions.context]
    return role_slots("block", *(role for role in along if role != "ring"))


def hidden(scope: Scope) -> list[int]:
    """Slots of what goes around a ring, beside compute."""
    along = ALONG[scope.space.strategy.decisions.context]
    return role_slots(*(role for role in along if role == "ring"))


def passing(tick: Tick, stages: Array, pricer: Pricer) -> Array:
    """Seconds of the messages of a microbatch and chunk of layers that no place undercuts, by
    candidate; see `step_seconds`.
    """
    latency, per_byte = least_hops(stages, pricer.topology)
    return np.where(
        np.isfinite(tick.messages),
        np.nan_to_num(tick.messages) * latency + np.nan_to_num(tick.message_bytes) * per_byte,
        0.0,
    ) * (1 - pricer.profile.send_overlap)


def step_seconds(
    tick: Tick,
    stages: Array,
    micro: Array,
    rounds: Array | None,
    layers: int,
    groups: int = 1,
    passes: Array | float = 0.0,
    hiding: Array | float = 0.0,
) -> Array:
    """A bound of the step time.

    Args:
        rounds: times that a stage waits as long as it is busy with a microbatch, at least
            (`Schedule.rounds`), by candidate, for one group; None in a schedule whose gradients of
            weights fill the time.
        passes: seconds of the messages of a microbatch.
        hiding: seconds of a step of what moves behind compute.
    """
    finite = np.isfinite(tick.busy)
    fuller = np.where(finite, tick.layers, 0.0) * (
        np.ceil(layers / stages) / max(layers, 1) - 1 / stages
    )
    busy, free, loaded = (
        seconds / stages + fuller + passes for seconds in (tick.busy, tick.free, tick.loaded)
    )
    waiting = (
        (stages - 1) * np.maximum(0.0, np.where(finite, free, 0.0))
        if rounds is None
        else rounds * np.where(finite, busy, 0.0)
    )
    return np.maximum(busy * micro, loaded * micro + hiding) + np.where(
        finite, groups * waiting, 0.0
    )


def breadth_first_seconds(
    tick: Tick,
    stages: Array,
    micro: Array,
    chunks: Array,
    layers: int,
    groups: int,
    passes: Array,
    hiding: Array | float = 0.0,
    *,
    pinned: bool,
) -> Array:
    """A bound of the step time of pipelines that take all microbatches through one chunk of layers
    before the next; more chunks have a smaller bubble and more messages.

    Args:
        tick, stages, micro, layers, groups: as `step_seconds` takes them.
        passes: seconds of the messages of a microbatch and chunk.
        hiding: seconds of a step of what moves behind compute.
    """
    fits = chunks > 0
    if not pinned:
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.sqrt(groups * (stages - 1) * tick.busy / stages / (micro * passes))
        chunks = np.clip(np.nan_to_num(best, nan=np.inf), FEWEST, np.maximum(chunks, FEWEST))
    chunks = np.maximum(chunks, 1)
    return np.where(
        fits,
        step_seconds(
            tick, stages, micro, (stages - 1) / chunks, layers, groups, passes * chunks, hiding
        ),
        np.inf,
    )


# --------------------------------------------------------------------------------------------------
# Seconds of gathers of parameters and reductions of gradients that no place undercuts.
#
# They hide behind compute, but only behind so much of it: a step takes at least as long as they
# do, and what compute cannot hide them (`Tick.loaded`). With every group of axes on the fastest
# links that it could have alone they are a sum over the components of the colours.


@dataclass(frozen=True, kw_only=True)
class Moved(ArrayTable):
    """Seconds on the stage that has the most, at least; arrays [candidates].

    Attributes:
        gather: of gathers of parameters that are stored sharded, in a microbatch.
        scatter: of reductions of gradients to shards, in a microbatch.
        reduce: of reductions of gradients that are stored replicated, in a microbatch.
        routed: those of `reduce` that are gradients of experts on their devices.
        blocked: of collectives that compute waits for, in a microbatch and on all stages.
        updated: of the gather of updated parameters, in a step.
    """

    gather: Array
    scatter: Array
    reduce: Array
    routed: Array
    blocked: Array
    updated: Array

    def seconds(self, zero: int, pricer: Pricer, sizes: Mapping[str, Array], gather: str) -> Array:
        """Seconds of a step under a ZeRO stage."""
        micro, staged, decisions = sizes["micro"], sizes["stage"] > 1, Decisions(zero=zero)
        if zero == 3:
            times = np.where(staged, 0.5, micro) if gather == "once" else micro
            return self.gather * times + self.scatter * np.maximum(times, 1)
        updated = self.updated if zero else 0.0
        reduced = self.scatter if scatters(pricer.profile, decisions) else self.reduce
        if once_a_step(pricer.profile, decisions):
            return reduced + updated
        if zero == 2:
            return reduced * micro + updated
        if in_the_last(pricer.profile, decisions):
            return reduced + np.where(staged, 0.0, self.routed * (micro - 1)) + updated
        return reduced * np.where(staged, 1, micro) + updated


class Traffic:
    """Bounds of what moves, for some candidates.

    Args:
        scope: the choices.
        pricer: machine and software.
        values: measures on all shapes of the space.
        shape: number of the shape of each candidate.
        sizes: of every mesh axis and "micro", by candidate.
        links: costs of collectives by candidate; those that no place undercuts by default.
    """

    def __init__(
        self,
        scope: Scope,
        pricer: Pricer,
        values: Values,
        shape: Array,
        sizes: Mapping[str, Array],
        links: Links | None = None,
    ) -> None:
        profile, stages, model = pricer.profile, sizes["stage"], scope.load.model
        self._values, self._shape, self._layers = values, shape, len(model.counts)
        self._distinct, self._place = np.unique(shape, return_inverse=True)
        # what hides where a profile says it itself is not part of `Tick.loaded`
        measured_here = profile.gather_overlap is None and profile.reduce_overlap is None
        if profile.embedding_and_head == "owners":
            ends = np.where(stages > 1, model.largest_end, 1.0)
        else:
            ends = np.ones(len(stages)) if ends_on_all_stages(profile) else 1 / stages
        layers = [np.ceil(count / stages) / count for count in model.counts]
        self._shares = np.stack([*layers, np.ones(len(stages)), ends])
        if links is None:
            links = best_links({axis: sizes[axis] for axis in MESH_AXES}, pricer.topology)
        waits = waited(scope)
        slots = sorted({*waits, *(role_slots(*_ROLES) if measured_here else ())})
        factors = pricer.waits(slots) * np.array(
            [
                [model.reduction if SLOTS[slot].role in ("reduce", "scatter") else 1.0]
                for slot in slots
            ]
        )
        into = np.array(
            [
                *([SLOTS[slot].role == role for slot in slots] for role in _ROLES),
                [SLOTS[slot].role == "reduce" and SLOTS[slot].group.of_experts for slot in slots],
                [slot in waits for slot in slots],
            ],
            dtype=float,
        )
        unsharded = np.array([slot in waits for slot in slots])
        self._roles = _Weights(
            rows=np.array([first + slot for first in (COUNTS, BYTES) for slot in slots]),
            rates=np.concatenate(
                [figures[slots] * factors for figures in (links.latency, links.per_byte)]
            ),
            into=np.concatenate([into, into], axis=1),
            whole=np.concatenate([unsharded, unsharded]),
        )
        dense, experts = (
            links.per_byte[INDEX[Slot("gather", stored(experts=flag), "all-gather")]]
            for flag in (False, True)
        )
        if not measured_here:
            dense, experts = np.zeros_like(dense), np.zeros_like(dense)
        self._updates = _Weights(
            rows=np.array([Q.PARAMETERS, Q.EXPERTS]),
            rates=np.stack([dense, experts - dense]),
            into=np.ones((1, 2)),
            whole=np.zeros(2, dtype=bool),
        )
        accounts, shapes = scope.accounts, values.shapes.take(shape)
        self._work = {
            policy: Parts(
                scope,
                accounts.work[policy, scope.routes],
                shapes,
                lambda tally, positions: self._seconds(tally, positions, self._roles),
                len(into),
            )
            for policy in scope.space.policies
        }
        self._rest = Parts(
            scope,
            accounts.rest,
            shapes,
            lambda tally, positions: self._seconds(tally, positions, self._updates),
            1,
        )

    def least(self, positions: Array) -> dict[str, Moved]:
        """The least of all choices by remat policy; infinite where none fits."""
        updates = self._rest.least(positions)
        return {
            policy: _moved(parts.least(positions), updates) for policy, parts in self._work.items()
        }

    def total(self, row_choices: Under, positions: Array) -> dict[str, Moved]:
        """Returns the traffic under choices, by remat policy."""
        updates = self._rest.total(row_choices, positions)
        return {
            policy: _moved(parts.total(row_choices, positions), updates)
            for policy, parts in self._work.items()
        }

    def _seconds(self, tally: Tally, positions: Array, weights: _Weights) -> Array:
        """Seconds of the rows of a tally, by kind."""
        which = np.searchsorted(weights.rows, tally.rows % ROWS)
        which = np.minimum(which, len(weights.rows) - 1)
        weighted = np.flatnonzero(weights.rows[which] == tally.rows % ROWS)
        matrix, which = tally.matrix[weighted], which[weighted]
        used = np.flatnonzero(matrix.any(0))
        if not len(used):
            return np.zeros((len(weights.into), len(positions)))
        here = self._place[positions]
        present = np.zeros(len(self._distinct), dtype=bool)
        present[here] = True
        shapes, place = self._distinct[present], (np.cumsum(present) - 1)[here]
        values = matrix[:, used] @ self._values.stacked(
            tuple(tally.measures[i] for i in used), shapes
        )
        shares = np.where(
            weights.whole[which][:, None],
            1.0,
            self._shares[tally.rows[weighted] // ROWS][:, positions],
        )
        return weights.into[:, which] @ (
            values[:, place] * shares * weights.rates[which][:, positions]
        )


#: Roles of collectives, in the order of the first fields of `Moved`.
_ROLES = ("gather", "scatter", "reduce")


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Coefficients of some rows of a tally.

    Attributes:
        rows: of a segment, ascending.
        rates: seconds by row and candidate.
        into: which kinds of seconds each row is part of, array [kinds, rows].
        whole: which rows are those of all stages, and not of one.
    """

    rows: Array
    rates: Array
    into: Array
    whole: Array


def _moved(work: Array, updates: Array) -> Moved:
    gather, scatter, reduce, routed, blocked = work
    return Moved(
        gather=gather,
        scatter=scatter,
        reduce=reduce,
        routed=routed,
        blocked=blocked,
        updated=updates[0],
    )


# --------------------------------------------------------------------------------------------------
# Lower bounds of the step time of plans that fit.
#
# The fastest plans are often far too large. Rematerialising a part of the layers lies between none
# and all of them, in time and in memory; so a plan that fits takes at least the time at which the
# straight line between two policies meets the capacity. What moves to host memory takes its time
# beside compute, or in place of it.

#: Plans that a bound speaks of: their ZeRO stage, whether their pipelines work breadth first, and
#: when stages gather weights that are stored sharded ("use" where they are not).
Kind = tuple[int, bool, str]
#: Relative rounding that a sum of bytes may have.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Lower bounds under a capacity.

    Attributes:
        space: the space.
        pricer: the machine.
        capacity: usable bytes of a device.
        offloads: what may be in host memory, () among it where nothing must.
    """

    space: Space
    pricer: Pricer
    capacity: float
    offloads: tuple[tuple[str, ...], ...]

    def seconds(
        self,
        ticks: Mapping[str, Tick],
        footprints: Mapping[str, Footprint],
        moved: Mapping[str, Moved],
        sizes: Mapping[str, Array],
    ) -> Array:
        """Seconds of a step that no plan beats that fits; infinite where none fits."""
        kinds = self.by_kind(ticks, footprints, moved, sizes)
        return np.minimum.reduce([np.full(len(sizes["micro"]), np.inf), *kinds.values()])

    def by_kind(
        self,
        ticks: Mapping[str, Tick],
        footprints: Mapping[str, Footprint],
        moved: Mapping[str, Moved],
        sizes: Mapping[str, Array],
    ) -> dict[Kind, Array]:
        """The same for every kind of plans; arguments as those of `seconds`."""
        constants = self.pricer.constants
        fixed = constants.step_s + constants.microbatch_s * (
            sizes["micro"] + self.space.accumulation_groups * (sizes["stage"] - 1)
        )
        kinds = dict[Kind, Array]()
        for zero, gather, legal in self._ways(sizes):
            by_policy = {
                policy: footprint.under(zero, gather) for policy, footprint in footprints.items()
            }
            state = next(iter(by_policy.values())).state
            hiding = {
                policy: traffic.seconds(zero, self.pricer, sizes, gather)
                for policy, traffic in moved.items()
            }
            for times, breadth_first in self._alternatives(ticks, sizes, hiding, gather):
                kind = zero, breadth_first, gather
                minimum = kinds.get(kind, np.full(len(sizes["micro"]), np.inf))
                for parts in self.offloads:
                    points = [
                        point
                        for policy, time in times.items()
                        for point in self._points(
                            time,
                            _breadth_first(footprints[policy])
                            if breadth_first
                            else by_policy[policy],
                            parts,
                        )
                    ]
                    within = mixed(points, self.capacity * (1 + ROUNDING))
                    if "optimizer" in parts:
                        within = within + 2 * state / self.pricer.topology.chip.host_bytes_per_s
                    minimum = np.minimum(minimum, np.where(legal, within, np.inf))
                kinds[kind] = minimum
        return {kind: minimum + fixed for kind, minimum in kinds.items()}

    def fastest(self, ticks: Mapping[str, Tick], sizes: Mapping[str, Array]) -> Array:
        """Seconds of a step that no plan beats, whether it fits or not."""
        return np.minimum.reduce(
            [
                time
                for times, _ in self._alternatives(ticks, sizes, {}, "once")
                for time in times.values()
            ]
        )

    def _ways(self, sizes: Mapping[str, Array]) -> list[tuple[int, str, Array]]:
        """ZeRO stages of the space with when weights are gathered, and candidates that they fit."""
        stored, alone = (
            np.prod([sizes[axis] for axis in STORED_AXES], axis=0) > 1,
            sizes["fsdp"] == 1,
        )
        zeros = [zero for zero in range(4) if self.space.pins.zero in (None, zero)]
        stages = [(zero, "use", stored if zero else alone) for zero in zeros]
        staged = stored & (sizes["stage"] > 1)
        once = 3 in zeros and "once" in self.space.gathers and bool(staged.any())
        return [*stages, (3, "once", staged)] if once else stages

    def _alternatives(
        self,
        ticks: Mapping[str, Tick],
        sizes: Mapping[str, Array],
        hiding: Mapping[str, Array],
        gather: str,
    ) -> list[tuple[dict[str, Array], bool]]:
        """Bounds of the step time by policy, each with whether it is that of breadth first:
        policies that a plan may mix, those of schedules with the backward pass in two, which none
        mixes, and those of breadth first, whose stages gather weights once.
        """
        stages, micro = sizes["stage"], sizes["micro"]
        space, groups, layers = self.space, self.space.accumulation_groups, self.space.limits.layers
        behind = {policy: hiding.get(policy, 0.0) for policy in ticks}
        if not (stages > 1).any():
            return [
                (
                    {
                        policy: step_seconds(
                            tick,
                            stages,
                            micro,
                            self._rounds(policy, stages, micro),
                            layers,
                            hiding=behind[policy],
                        )
                        for policy, tick in ticks.items()
                    },
                    False,
                )
            ]
        passes = {policy: passing(tick, stages, self.pricer) for policy, tick in ticks.items()}
        mixing = {
            policy: step_seconds(
                tick,
                stages,
                micro,
                self._rounds(policy, stages, micro),
                layers,
                groups,
                passes[policy],
                behind[policy],
            )
            for policy, tick in ticks.items()
        }
        alone = [
            {
                policy: step_seconds(
                    tick, stages, micro, None, layers, groups, passes[policy], behind[policy]
                )
            }
            for policy, tick in ticks.items()
            if any(schedule.backward_in_two for schedule in space.schedules(policy))
        ]
        usual = [(times, False) for times in [mixing, *alone]]
        chunks, pinned = space.most_rounds(sizes), space.pins.virtual_stages is not None
        if gather != "once" or not chunks.any():
            return usual
        return [
            *usual,
            (
                {
                    policy: breadth_first_seconds(
                        tick,
                        stages,
                        micro,
                        chunks,
                        layers,
                        groups,
                        passes[policy],
                        behind[policy],
                        pinned=pinned,
                    )
                    for policy, tick in ticks.items()
                },
                True,
            ),
        ]

    def _rounds(self, policy: str, stages: Array, micro: Array) -> Array:
        """Times that a stage waits as long as it is busy with a microbatch: in whole stages, or
        with as many chunks as a stage can have.
        """
        together = micro // self.space.accumulation_groups
        limit = self.space.most_chunks(policy, stages, micro)
        return np.minimum.reduce(
            [
                schedule.rounds(Pipelines(stages=stages, chunks=chunks, microbatches=together))
                for schedule in self.space.schedules(policy) or (NONE,)
                for chunks in (np.ones_like(limit), limit)
            ]
        )

    def _points(
        self, seconds: Array, footprint: Footprint, parts: tuple[str, ...]
    ) -> list[tuple[Array, Array]]:
        """(seconds, bytes) between which all plans of a policy lie, with some parts in host memory.

        Activations move in `moving` seconds a byte, a share of them beside compute, which takes its
        time itself. So some can move for nothing, and to move all takes at least the time of moving
        what there would be too much of.
        """
        bare = footprint.least(parts)
        if "activations" not in parts:
            return [(seconds, bare)]
        moving = (
            2
            * footprint.turns
            / (self.pricer.topology.chip.host_bytes_per_s * max(1.0, self.pricer.constants.overlap))
        )
        full = bare + footprint.occupied - footprint.bare
        return [
            (seconds, np.maximum(bare, full - seconds / moving)),
            (np.maximum(seconds, (full - bare) * moving), bare),
        ]

    def leanest(self, footprints: Mapping[str, Footprint]) -> Array:
        """Bytes that no plan undercuts."""
        return np.minimum.reduce(
            [footprint.least(parts) for footprint in footprints.values() for parts in self.offloads]
        )


def _breadth_first(footprint: Footprint) -> Footprint:
    assert footprint.breadth_first is not None, "the space has pipelines that work breadth first"
    return footprint.breadth_first


# --------------------------------------------------------------------------------------------------
# Memory-agnostic lower bounds of the step time, per mesh and number of microbatches (an *entry*).
#
# Entries whose kernels and stages are the same are alike in this, however data and fsdp share the
# batch, so the bound is made once for all of them. It is made in steps, each for what the step
# before leaves: with what depends on no colour, with some components of the colours, and with all.

#: Components of the colours that are added up before all of them (None) are, for what is left:
#: none, and all but the last, which can be cut in the most ways.
COMPONENTS: tuple[int | None, ...] = (0, -1, None)
#: Of so many entries all components are added up at once.
FEW = 512


class Fastest:
    """Bounds of some entries, which are kept.

    Args:
        bounds: of a microbatch, by shape.
        fitting: bounds of a step.
        policies: remat policies of the space.
        sizes: of every mesh axis and "micro", by entry.
        shape: number of the shape of each entry.
    """

    def __init__(
        self,
        bounds: Bounds,
        fitting: Fitting,
        policies: Sequence[str],
        sizes: Mapping[str, Array],
        shape: Array,
    ) -> None:
        self._bounds, self._fitting, self._policies = bounds, fitting, policies
        self._first, self._which = distinct_rows(
            [bounds.work_of(shape), sizes["stage"], sizes["micro"], sizes["fsdp"] > 1]
        )
        self._shape = shape[self._first]
        self._sizes = {axis: size[self._first] for axis, size in sizes.items()}
        nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        self._last = np.inf, -np.inf, nothing  # bounds between which the answer is the same
        count = len(self._first)
        self._known = {
            first: Filled(1, count, partial(self._bound, first)) for first in (*COMPONENTS, None)
        }

    def __len__(self) -> int:
        return len(self._which)

    def of_all(self) -> Array:
        """The bound of every entry; infinite where no choice fits."""
        return self._of(np.arange(len(self._first)), None)[self._which]

    def below(self, limit: float) -> tuple[Array, Array]:
        """Entries whose bound is below a limit, the least first, and these bounds."""
        low, high, result = self._last
        if low < limit <= high:
            return result
        rows, high = np.arange(len(self._first)), np.inf
        for first in COMPONENTS if np.isfinite(limit) and len(self) > FEW else (None,):
            bounds = self._of(rows, first)
            fits = bounds < limit
            high = min(high, float(bounds[~fits].min(initial=np.inf)))
            rows = rows[fits]
        selected = np.zeros(len(self._first), dtype=bool)
        selected[rows] = True
        entries = np.flatnonzero(selected[self._which])
        seconds = self._of(self._which[entries], None)
        order = np.argsort(seconds, kind="stable")
        result = entries[order], seconds[order]
        self._last = float(result[1].max(initial=0.0)), high, result
        return result

    def _of(self, rows: Array, first: int | None) -> Array:
        """The bound of distinct entries with so many components."""
        return self._known[first].on(rows)[0]

    def _bound(self, first: int | None, rows: Array) -> Array:
        ticks = {
            policy: self._bounds.least(policy, self._shape[rows], first)
            for policy in self._policies
        }
        sizes = {axis: size[rows] for axis, size in self._sizes.items()}
        return self._fitting.fastest(ticks, sizes)[None]


# --------------------------------------------------------------------------------------------------
# Entries and pairs on some number of devices, with their lower bounds.
#
# An *entry* is a mesh with microbatches, a *pair* an entry under a choice of colours.


class Entries:
    """Every mesh with microbatches on some number of devices, with experts treated in one way, and
    what bounds say of them.

    Args:
        scope: the choices.
        pricer: the machine.
        fitting: the capacity.
        sizes: of every mesh axis and "micro", by entry (`Space.mesh_sizes`).
        values: measures on the shapes of the entries.
        shape: number of the shape of each entry.
    """

    def __init__(
        self,
        scope: Scope,
        pricer: Pricer,
        fitting: Fitting,
        sizes: Mapping[str, Array],
        values: Values,
        shape: Array,
    ) -> None:
        self.scope, self.sizes, self.values, self.shape = scope, sizes, values, shape
        self.bounds, self._pricer, self._fitting = Bounds(scope, pricer, values), pricer, fitting
        self.choices, self._seconds = scope.choices, Filled(1, len(shape), self._fitting_seconds)
        self._apart = scope.space.apart  # then the bounds do not know memory
        self._policies = (*scope.space.policies, EACH) if self._apart else scope.space.policies
        self._fastest = Fastest(self.bounds, fitting, self._policies, sizes, shape)

    def __len__(self) -> int:
        return len(self.shape)

    def at(self, entries: Array) -> dict[str, Array]:
        """Sizes of some entries."""
        return {axis: values[entries] for axis, values in self.sizes.items()}

    def below(self, limit: float) -> tuple[Array, Array]:
        """Entries of which a plan may be faster than a limit, whether it fits or not, the least
        bound first, and these bounds; those of which no choice fits are none.
        """
        return self._fastest.below(limit)

    @cached_property
    def fastest(self) -> Array:
        """Seconds of a step that no plan beats, by entry, whether it fits or not; infinite where no
        choice fits.
        """
        return self._fastest.of_all()

    @cached_property
    def _footprints(self) -> Footprints:
        return Footprints(self.scope, self._pricer, self.values)

    @cached_property
    def _mesh(self) -> Array:
        """Number of the mesh of each entry, whatever its microbatches."""
        return distinct_rows([self.sizes[axis] for axis in MESH_AXES])[1]

    @cached_property
    def _traffic(self) -> Traffic:
        """The traffic of each mesh that compute may hide, which is the same for all microbatches,
        on the best links.
        """
        last = np.zeros(self._mesh.max() + 1, dtype=np.int64)
        last[self._mesh] = np.arange(len(self))
        return Traffic(self.scope, self._pricer, self.values, self.shape[last], self.at(last))

    def _traffic_on(self, c: Candidates) -> Traffic:
        sizes = {**c.sizes, "micro": c.micro}
        return Traffic(self.scope, self._pricer, self.values, c.shape, sizes, c.links)

    def _least(self, shape: Array, sizes: Mapping[str, Array]) -> dict[str, Footprint]:
        """The least that any choice takes, by policy; infinite where no choice fits."""
        resting, points = self._footprints.least(shape)
        return {
            policy: self._footprints.of(resting, points[policy], sizes) for policy in self._policies
        }

    @cached_property
    def fewest_bytes(self) -> Array:
        """Bytes that no plan undercuts, by entry; infinite where no choice fits."""
        if self._apart:
            return np.where(np.isfinite(self.fastest), 0.0, np.inf)
        return self.leanest(np.arange(len(self)))

    def leanest(self, entries: Array) -> Array:
        """Bytes that no plan of some entries undercuts; infinite where no choice fits."""
        if self._apart:
            return np.zeros(len(entries))
        with np.errstate(invalid="ignore"):  # bytes of what does not fit are infinite
            minimum_bytes = self._fitting.leanest(
                self._least(self.shape[entries], self.at(entries))
            )
        return np.nan_to_num(minimum_bytes, nan=np.inf, posinf=np.inf)

    def seconds(self, entries: Array) -> Array:
        """Seconds of a step that no plan of some entries beats that fits; infinite where none
        fits.
        """
        if self._apart:
            return self.fastest[entries]
        return self._seconds.on(entries)[0]

    def _fitting_seconds(self, entries: Array) -> Array:
        moved = self._traffic.least(self._mesh[entries])
        return self._least_seconds(self.shape[entries], self.at(entries), moved)[None]

    def seconds_on(self, c: Candidates) -> Array:
        """The same of entries on places, whose links are known."""
        moved = self._traffic_on(c).least(np.arange(len(c)))
        return self._least_seconds(c.shape, {**c.sizes, "micro": c.micro}, moved, waits=True)

    def _least_seconds(
        self,
        shape: Array,
        sizes: Mapping[str, Array],
        moved: Mapping[str, Moved],
        *,
        waits: bool = False,
    ) -> Array:
        """See `seconds`."""
        with np.errstate(invalid="ignore"):  # what no choice fits is infinite
            ticks = {policy: self.bounds.least(policy, shape) for policy in self._policies}
            if waits:
                ticks = {p: tick.waiting(moved[p].blocked) for p, tick in ticks.items()}
            return self._fitting.seconds(ticks, self._least(shape, sizes), moved, sizes)

    def pairs(
        self, entries: Array, limit: float = np.inf, *, minimum_memory: bool = False
    ) -> Pairs:
        """Some entries under every choice that fits, with a bound that is below a limit, the least
        first.

        Args:
            limit: seconds, or bytes.
            minimum_memory: the bound is that of bytes, and not of seconds.
        """
        fitting = self._fit(entries)
        if not len(fitting):
            return fitting
        row_choices, shapes, sizes = self._rows(fitting)
        if minimum_memory:
            minimum_bytes = (
                np.zeros(len(fitting))
                if self._apart
                else self._fitting.leanest(self._footprint(row_choices, shapes, sizes))
            )
            return replace(fitting, least=minimum_bytes).below(limit)
        ticks = {
            policy: self.bounds.ticks(policy, row_choices, shapes) for policy in self._policies
        }
        fastest = self._fitting.fastest(ticks, sizes)
        below = np.flatnonzero(fastest < limit)
        fitting_pairs = replace(fitting, least=fastest).take(below)
        if not self._apart and len(fitting_pairs):
            row_choices, shapes, sizes = self._rows(fitting_pairs)
            fitting_pairs = replace(
                fitting_pairs,
                least=self._fitting.seconds(
                    {policy: tick.take(below) for policy, tick in ticks.items()},
                    self._footprint(row_choices, shapes, sizes),
                    self._traffic.total(row_choices, self._mesh[fitting_pairs.entries]),
                    sizes,
                ),
            )
        return fitting_pairs.take(
            np.lexsort((fitting_pairs.choices, self.sizes["tensor"][fitting_pairs.entries]))
        ).below(limit)

    def _rows(self, pairs: Pairs) -> tuple[Under, Array, dict[str, Array]]:
        """Choices, numbers of shapes and sizes of pairs."""
        return (
            Under(self.scope.chosen, pairs.choices),
            self.shape[pairs.entries],
            self.at(pairs.entries),
        )

    def on_places(self, c: Candidates, positions: Array, choices: Array) -> dict[Kind, Array]:
        """Seconds of a step that no plan of a kind beats that fits, on places whose links are
        known.
        """
        sizes, row_choices = {**c.sizes, "micro": c.micro}, Under(self.scope.chosen, choices)
        shape, sizes = c.shape[positions], {axis: size[positions] for axis, size in sizes.items()}
        moved = self._traffic_on(c).total(row_choices, positions)
        return self._fitting.by_kind(
            {
                policy: self.bounds.ticks(policy, row_choices, shape).waiting(moved[policy].blocked)
                for policy in self._policies
            },
            self._footprint(row_choices, shape, sizes),
            moved,
            sizes,
        )

    def _fit(self, entries: Array) -> Pairs:
        """Some entries under every choice that fits them, choice by choice."""
        space, sizes, colours = (
            self.scope.space,
            self.at(entries),
            self.scope.load.colouring.colours,
        )
        none = np.zeros(0, dtype=np.int64)
        fitted = [Pairs(entries=none, choices=none, least=np.zeros(0))]
        tensor = sizes["tensor"]
        divides = {
            name: colours[name].divisor % tensor == 0
            for name in {name for choice in self.choices for name in choice.tensor}
        }
        for number, choice in enumerate(self.choices):
            fits = (tensor > 1) == bool(choice.tensor or choice.sequence)
            for name in choice.tensor:
                fits &= divides[name]
            rows = entries[fits & space.legal(choice, self.scope.routes, sizes)]
            fitted.append(
                Pairs(entries=rows, choices=np.full(len(rows), number), least=np.zeros(len(rows)))
            )
        return Pairs.joined(fitted)

    def _footprint(
        self, row_choices: Under, shape: Array, sizes: Mapping[str, Array]
    ) -> dict[str, Footprint]:
        """Footprints of candidates under choices, by policy."""
        resting, points = self._footprints.total(row_choices, shape)
        return {
            policy: self._footprints.of(resting, points[policy], sizes) for policy in self._policies
        }
