"""Lower bounds on memory and step time for candidate plans.

No plan of a candidate needs fewer bytes or seconds than its bounds. They are computed before
pricing, most of them before the axes are placed on the links, so branch and bound can discard most
of the space cheaply. Terms (tally, degrees, component, entry, pair) are those of
`shardlib/planner/__init__.py`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import numpy as np

from shardlib.cost.collectives import (
    CONTEXT_ROLES,
    SLOT_INDEX,
    SLOTS,
    LinkCosts,
    Slot,
    least_link_costs,
    least_stage_send,
    role_slots,
    storage_group,
)
from shardlib.cost.facts import traits
from shardlib.cost.pricing import INTERLEAVING, adds_in_place
from shardlib.cost.stages import Meshes, shares_of_stacks
from shardlib.cost.tables import (
    BYTES,
    COUNTS,
    ROWS,
    MeasureValues,
    Pricer,
    Quantity,
)
from shardlib.cost.terms import ArrayTable, BoundedTable, LazyTable, distinct_rows
from shardlib.layout import MESH_AXES, STORED_AXES, TOKEN_AXES
from shardlib.planner.space import (
    MAX_CHUNKS,
    ComponentCosts,
    LazyColumns,
    Scope,
    Space,
    forward_first,
)
from shardlib.planner.workload import (
    MAX_POLICY_GROUPS,
    ComponentTallies,
    ItemTallies,
    Programs,
)
from shardlib.schedules import Pipelines, Schedule, least_in_flight, named, pipelines

Array = np.ndarray

#: Stored quantities: with everything that ZeRO may shard sharded, and replicated.
_SHARDED = (Quantity.PARAMETERS_SHARDED, Quantity.STATE_SHARDED, Quantity.ACCUMULATED_SHARDED)
STORED = (*_SHARDED, Quantity.PARAMETERS, Quantity.STATE, Quantity.ACCUMULATED)
#: Trained parameters, replicated: what a stage keeps that all-gathers its weights once per step.
TRAINED = len(STORED)
#: Frozen parameters count as parameters here.
_FROZEN = {
    Quantity.PARAMETERS_SHARDED: Quantity.FROZEN_SHARDED,
    Quantity.PARAMETERS: Quantity.FROZEN,
}
#: Bytes that are alive at a point of the step where memory may peak: activation stacks (saved for
#: every microbatch in flight) and other arrays of layers, both divided by the stages; those of
#: embedding and head; those inside a layer, which every stage has; and the stack bytes minus those
#: of the point that has the most (zero or negative).
LIVE_STACKS, LIVE_LAYERS, LIVE_GRADIENTS, *_ = LIVE_KINDS = range(6)
LIVE_OUTSIDE, LIVE_EVERYWHERE, STACK_DEFICIT = LIVE_KINDS[3:]


def stored_coefficients(segments: int) -> Array:
    """Coefficients that turn a tally of stored arrays into `STORED` and `TRAINED`, for each group
    of layers and for the embedding and head: array [7 x (groups + 1), rows].
    """
    kinds = [{quantity, _FROZEN.get(quantity, quantity)} for quantity in STORED]
    kinds.append({Quantity.PARAMETERS})
    places = [*range(segments - 2), segments - 1]
    coefficients = np.zeros((len(kinds), len(places), segments, ROWS))
    for kind, rows in enumerate(kinds):
        for number, place in enumerate(places):
            coefficients[kind, number, place, [*rows]] = 1.0
    return coefficients.reshape(len(kinds) * len(places), -1)


def live_coefficients(tallies: ItemTallies, pricer: Pricer) -> Array:
    """Coefficients that turn a tally of memory into bytes of all `LIVE_KINDS` at every point of the
    live range: array [points x kinds, rows].
    """
    factors, layers = pricer.corrected(np.ones((ROWS, 1)))[:, 0], tallies.segments - 2
    kinds = {Quantity.SAVED: LIVE_STACKS, Quantity.GRADIENT_SHARDED: LIVE_GRADIENTS}
    coefficients = np.zeros((tallies.lists, len(LIVE_KINDS), tallies.lists, tallies.segments, ROWS))
    for point in range(tallies.lists):
        for quantity in (
            Quantity.SAVED,
            Quantity.TEMPORARY,
            Quantity.COPY_SHARDED,
            *(() if pricer.profile.gradient_buffer else (Quantity.GRADIENT_SHARDED,)),
        ):
            factor = factors[quantity]
            kind = kinds.get(quantity, LIVE_LAYERS)
            coefficients[point, kind, point, :layers, quantity] = factor
            coefficients[point, LIVE_EVERYWHERE, point, layers, quantity] = coefficients[
                point, LIVE_OUTSIDE, point, layers + 1, quantity
            ] = factor
    return coefficients.reshape(tallies.lists * len(LIVE_KINDS), -1)


def with_stack_deficits(points: Array) -> Array:
    """Fills in `STACK_DEFICIT`: the stack bytes of each point minus those of the point
    with the most.

    Offloading all stacks takes at most the largest ones off the peak, so every point still needs at
    least its own bytes less the largest stacks.
    """
    by_point = points.reshape(len(points) // len(LIVE_KINDS), len(LIVE_KINDS), *points.shape[1:])
    by_point[:, STACK_DEFICIT] = by_point[:, LIVE_STACKS] - by_point[:, LIVE_STACKS].max(0)
    return by_point.reshape(points.shape)


# --------------------------------------------------------------------------------------------------
# Lower bounds on the memory of a choice.
#
# Memory does not depend on links, and almost all of it is a sum over the components of the
# colours. With everything that ZeRO may shard sharded, all stages equally full and the fewest
# microbatches in flight of any schedule, that sum bounds the peak under every ZeRO stage and
# schedule.


@dataclass(frozen=True, kw_only=True)
class Needed(ArrayTable):
    """Lower bounds on the bytes per device of candidates under a ZeRO stage; arrays [candidates],
    or, of what lives during a step, [policies, candidates].

    Attributes:
        stored: parameters, the batch, and gradients that are accumulated over microbatches.
        state: optimizer state.
        live: live arrays of a step (activations, temporaries, copies).
        live_without_stacks: the same with all activation stacks offloaded to host memory.
        stack_fills: least bytes of activations that a step writes to stacks, per byte that the
            stacks take: microbatches over those in flight.
    """

    stored: Array
    state: Array
    live: Array
    live_without_stacks: Array
    stack_fills: Array

    def device_bytes(self, offload: tuple[str, ...]) -> Array:
        """Bytes per device with some parts offloaded to host memory ("optimizer", "activations") or
        to disk ("disk").
        """
        return (
            self.stored
            + (self.live_without_stacks if "activations" in offload else self.live)
            + (0.0 if {"optimizer", "disk"}.intersection(offload) else self.state)
        )


@dataclass(frozen=True, kw_only=True)
class Footprint(ArrayTable):
    """Lower bounds on the bytes per device of candidates; arrays of equal length.

    Attributes:
        needed: with everything that ZeRO may shard sharded.
        breadth_first: that of breadth-first pipelines, whose stages keep the activations of all
            microbatches that are in the pipeline together; None where the space has none.
        replicated: extra bytes where parameters, accumulated gradients, and state are stored
            replicated.
        gathered_once: extra bytes where stages all-gather sharded parameters once for all
            microbatches.
        redistributed: bytes of the parameters and the accumulated gradients of each layer group, as
            they are stored, of all stages, array [groups, candidates].
    """

    needed: Needed
    replicated: tuple[Array, ...]
    gathered_once: Array
    redistributed: Array
    breadth_first: Needed | None = None

    def with_zero(self, zero: int, gather: str = "use") -> Needed:
        """The bytes under a ZeRO stage, of pipelines that do not work breadth first."""
        needed = self.needed
        if zero == 3:
            extra = self.gathered_once if gather == "once" else 0.0
            return replace(needed, stored=needed.stored + extra)
        parameters, gradients, state = self.replicated
        return replace(
            needed,
            stored=needed.stored + sum((parameters, gradients)[: 3 - zero], np.zeros(1)),
            state=needed.state + state if zero == 0 else needed.state,
        )


class Footprints:
    """Lower bounds on bytes, by degrees of parallelism.

    Args:
        pricer: the corrections and the software.
        values: measures on all degrees of the space.
    """

    def __init__(self, scope: Scope, pricer: Pricer, values: MeasureValues) -> None:
        self._model, self._pricer, self._profile = scope.workload.model, pricer, pricer.profile
        self._space, corrections = scope.space, pricer.corrected(np.ones((ROWS, 1))).tobytes()

        def costs_of(
            programs: Programs,
            coefficients: Callable[[ItemTallies], Array],
            after: Callable[[Array], Array],
        ) -> ComponentCosts:
            weights = [coefficients(tallies) for tallies in programs.tallies.values()]
            count = max(map(len, weights))

            def prepared(tallies: ComponentTallies) -> Callable[[Array], Array]:
                tally = tallies.joined(
                    count,
                    (corrections, self._profile.gradient_buffer),
                    lambda policy, tally: tally.weighted(weights[policy]),
                )
                number = len(tallies)

                def evaluated(index: Array) -> Array:
                    sums = np.zeros((number * count, len(index)))
                    sums[tally.rows] = tally.evaluated(values, index)
                    return after(sums.reshape(number, count, -1).swapaxes(0, 1))

                return evaluated

            return ComponentCosts(scope, programs, values.degrees, prepared, count)

        self._stored = costs_of(
            scope.model_tallies.stored,
            lambda tallies: stored_coefficients(tallies.segments),
            lambda quantities: quantities,
        )
        self._live = lambda: costs_of(
            scope.points, lambda tallies: live_coefficients(tallies, pricer), with_stack_deficits
        )

    @cached_property
    def _points(self) -> ComponentCosts:
        return self._live()

    def least(self, index: Array, sizes: Mapping[str, Array]) -> Footprint:
        """The minimum over all choices on the given degrees (by index)."""
        return self._footprint(self._stored.least(index)[:, 0], self._points.least(index), sizes)

    def total(self, choices: Array, index: Array, sizes: Mapping[str, Array]) -> Footprint:
        """The footprint of the given choices on the given degrees (by index)."""
        stored = self._stored.total(choices, index)[:, 0]
        return self._footprint(stored, self._points.total(choices, index), sizes)

    def least_stored(self, index: Array, sizes: Mapping[str, Array]) -> Footprint:
        """`least`, if nothing lived during a step but what is stored: far quicker to compute."""
        return self._footprint(self._stored.least(index)[:, 0], self._nothing_alive(sizes), sizes)

    def total_stored(self, choices: Array, index: Array, sizes: Mapping[str, Array]) -> Footprint:
        """`total`, if nothing lived during a step but what is stored."""
        stored = self._stored.total(choices, index)[:, 0]
        return self._footprint(stored, self._nothing_alive(sizes), sizes)

    def _nothing_alive(self, sizes: Mapping[str, Array]) -> Array:
        return np.zeros((len(LIVE_KINDS), len(self._space.policies), len(sizes["micro"])))

    def _footprint(self, stored: Array, points: Array, sizes: Mapping[str, Array]) -> Footprint:
        """The footprint of candidates.

        Args:
            stored: bytes of `STORED` and `TRAINED` summed over all stages, in layers and in
                embedding and head, by candidate: array [7 x (groups + 1), candidates].
            points: bytes of `LIVE_KINDS` at every point: array [points x kinds, policies,
                candidates].
        """
        stages, concurrent = sizes["stage"], sizes["micro"] // self._space.accumulation_groups

        def pipelines_of(chunks: int) -> Pipelines:
            return Pipelines(
                stages=stages,
                chunks=np.full_like(stages, chunks),
                microbatches=concurrent,
                lockstep=self._profile.pipeline == "lockstep",
            )

        max_in_flight = np.maximum.reduce(
            [
                schedule.in_flight(pipelines_of(chunks))
                for schedule, chunks in self._extreme_schedules()
            ]
        )
        in_flight, pinned = least_in_flight(pipelines_of(1)), self._space.pins.schedule
        forward_first_pinned = pinned is not None and named(pinned).forward_first
        footprint = self._with_in_flight(
            stored,
            points,
            sizes,
            in_flight,
            max_in_flight,
            0.0 if forward_first_pinned else 1.0,
        )
        if not self._space.breadth_first_chunks:
            return footprint
        max_forward_first = np.maximum.reduce(
            [schedule.in_flight(pipelines_of(1)) for schedule in forward_first()]
        )
        chunks = self._space.max_breadth_first_chunks(sizes)
        # two chunks are all-gathered at a time
        gathered_share = np.minimum(1.0, 2 / np.maximum(chunks, 1))
        breadth_first = self._with_in_flight(
            stored,
            points,
            sizes,
            concurrent,
            max_forward_first,
            gathered_share,
        )
        return replace(footprint, breadth_first=breadth_first.with_zero(3, "once"))

    def _extreme_schedules(self) -> list[tuple[Schedule, int]]:
        """Schedules with chunks per stage, one of which has the most microbatches in flight."""
        if self._space.pins.schedule:
            return [(named(self._space.pins.schedule), chunks) for chunks in (1, 2)]
        return [
            (schedule, chunks)
            for schedule in pipelines()
            for chunks in schedule.chunk_options(pinned=False, chunks=None, policy="none", limit=2)
        ]

    def _with_in_flight(
        self,
        stored: Array,
        points: Array,
        sizes: Mapping[str, Array],
        in_flight: Array,
        max_in_flight: Array,
        gathered_share: Array | float,
    ) -> Footprint:
        """The footprint for a least (`in_flight`) and a most (`max_in_flight`) number of
        microbatches in flight; `gathered_share` is the least share of the parameters that is
        resident where stages all-gather them once for all microbatches.
        """
        profile, stages, micro = self._profile, sizes["stage"], sizes["micro"]
        spread, model = profile.embedding_and_head == "spread", self._model
        # the fullest stage has whole layers of every group
        layers = [np.ceil(count / stages) / count for count in model.layer_counts]
        outside = np.where((stages > 1) & (not spread), model.largest_outside_share, 1.0)
        shares = np.stack([*layers, outside])
        in_stacks, sliced = shares_of_stacks(shares, shares, stages, model, profile)
        hoisted = traits(self._pricer.topology.chip.vendor).hoists_casts
        used = in_stacks + sliced * (model.compute_dtype_ratio if hoisted else 1.0)
        parts = stored.reshape(len(STORED) + 1, len(shares), -1)
        parameters, state, gradients, *replicated, trained = (
            (part * share).sum(0)
            for part, share in zip(
                parts,
                (used, in_stacks, shares, used, in_stacks, shares, shares),
                strict=True,
            )
        )
        stacks, others, beside, outside, everywhere, deficits = np.moveaxis(
            points.reshape(len(points) // len(LIVE_KINDS), len(LIVE_KINDS), *points.shape[1:]), 1, 0
        )
        least_share = np.minimum.reduce(layers or [1 / stages])
        beside = np.where(adds_in_place(profile, stages, micro), 0.0, beside)
        others = (others + beside) * least_share + everywhere
        others = others + outside * (1 / stages if spread else stages == 1)
        batch = (
            self._model.batch_bytes / math.prod(sizes[axis] for axis in TOKEN_AXES)
            + self._model.state_bytes
        )
        heap = profile.fragmentation
        accumulating = heap * ((micro > 1) | profile.gradient_buffer)
        return Footprint(
            replicated=(
                profile.fragmentation * (replicated[0] - parameters),
                accumulating * (replicated[2] - gradients),
                replicated[1] - state,
            ),
            gathered_once=np.where(stages > 1, gathered_share, 0.0)
            * (
                profile.fragmentation * self._model.compute_dtype_ratio * trained
                + accumulating * replicated[2]
            ),
            redistributed=(parts[0] + parts[2])[:-1],
            needed=Needed(
                stored=profile.fragmentation * (parameters + batch)
                + accumulating * gradients
                + (profile.fragmentation - 1) * state
                + profile.runtime_bytes,
                state=state,
                live=heap * (stacks * (in_flight * least_share) + others).max(0),
                live_without_stacks=heap
                * (deficits * max_in_flight * self._max_layer_share(stages) + others).max(0),
                stack_fills=micro / max_in_flight,
            ),
        )

    def _max_layer_share(self, stages: Array) -> Array:
        """Upper bound on the share of a group's layers that one stage has.

        Every chunk has whole layers, and stages that are balanced by work can have more of them.
        """
        fewest_layers = min(self._model.layer_counts, default=1)
        return np.where(
            stages > 1,
            (1 + self._model.head_work / fewest_layers) / stages + MAX_CHUNKS / fewest_layers,
            1.0,
        )


# --------------------------------------------------------------------------------------------------
# The least time of a mixture of remat policies that fits.


def fastest_mixture(seconds: Array, sizes: Array, capacity: float) -> Array:
    """The least seconds of any mixture of two points whose bytes are within the capacity, by
    candidate; infinite where there is none.

    Args:
        seconds, sizes: of every point, [points, candidates]; a mixture is on the straight line
            between two, or above it.
        capacity: bytes.
    """
    within = sizes <= capacity
    fastest = np.where(within, seconds, np.inf).min(0)
    beyond = np.where(within, np.inf, seconds).min(0)
    columns = np.flatnonzero((beyond < fastest) & np.isfinite(fastest))
    if not len(columns):
        return fastest
    seconds, sizes, within = (array[:, columns] for array in (seconds, sizes, within))
    best = fastest[columns]
    for quick, large, fits in zip(seconds, sizes, within, strict=True):
        mixed = np.flatnonzero(~fits & (quick < best))
        quick, large, own = quick[mixed], large[mixed], within[:, mixed]
        slow = np.where(own, seconds[:, mixed], quick)
        share = (large - capacity) / np.where(own, large - sizes[:, mixed], np.inf)
        mixtures = np.where(own, quick + (slow - quick) * share, np.inf)
        best[mixed] = np.minimum(best[mixed], mixtures.min(0))
    fastest[columns] = best
    return fastest


# --------------------------------------------------------------------------------------------------
# An *entry* is a mesh with a number of microbatches, a *pair* an entry under a choice of colours.


@dataclass(frozen=True, kw_only=True)
class Pairs(BoundedTable):
    """Pairs of an entry and a choice, both by index, with a lower bound for each."""

    entries: Array
    choices: Array

    def firsts(self) -> Pairs:
        """The first pair of every entry."""
        return self.take(np.sort(np.unique(self.entries, return_index=True)[1]))


# --------------------------------------------------------------------------------------------------
# Lower bounds for one microbatch, summed over stages, by candidate.


@dataclass(frozen=True, kw_only=True)
class MicrobatchBounds(LazyTable):
    """Lower bounds for one microbatch, summed over all stages; arrays [policies, candidates].

    Attributes:
        busy: seconds of kernels and of collectives that block compute.
        undeferrable: `busy` less the weight gradients that zero-bubble schedules compute while a
            stage would wait.
        ring_exposed: `busy` plus the ring transfers, less the compute that can hide them.
        message_count: number of messages between stages, per microbatch and chunk of layers.
        message_bytes: bytes of these messages.
        compute: those seconds of `busy` that are kernels.
        ring: seconds of ring transfers.
        layers: those seconds of `busy` that are spent in each layer group, where stages are made of
            whole layers, array [groups, policies, candidates].
    """

    busy: Array
    undeferrable: Array
    ring_exposed: Array
    message_count: Array
    message_bytes: Array
    compute: Array
    ring: Array
    layers: Array

    @classmethod
    def of(cls, rows: Array) -> MicrobatchBounds:
        """The bounds from an array [`SINGLE_BOUNDS` + groups, policies, candidates]."""
        return cls(
            **{f.name: row for f, row in zip(fields(cls)[:SINGLE_BOUNDS], rows, strict=False)},
            layers=rows[SINGLE_BOUNDS:],
        )

    def of_policy(self, number: int) -> MicrobatchBounds:
        """The bounds of one policy."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicrobatchBounds(**{name: array[..., number, :] for name, array in values.items()})

    def with_blocked(self, blocked: Array) -> MicrobatchBounds:
        """The bounds of given choices with `blocked` seconds of collectives that block compute."""
        extra_s = self.compute + blocked - self.busy
        return replace(
            self,
            busy=self.busy + extra_s,
            undeferrable=self.undeferrable + extra_s,
            ring_exposed=self.ring_exposed + extra_s,
        )

    def with_least_blocked(self, blocked: Array, overlap: float) -> MicrobatchBounds:
        """Minima over choices with at least `blocked` seconds of collectives that block compute.
        The choice with the least of one quantity may not have the least of another.

        Args:
            overlap: share of compute that hides ring transfers.
        """
        return replace(
            self,
            busy=np.maximum(self.busy, self.compute + blocked),
            ring_exposed=np.maximum(
                self.ring_exposed, (1 - overlap) * self.compute + self.ring + blocked
            ),
        )


#: Fields of `MicrobatchBounds` before `layers`.
SINGLE_BOUNDS = len(fields(MicrobatchBounds)) - 1


# --------------------------------------------------------------------------------------------------
# Lower bounds on the step time before placement.
#
# In every microbatch a stage runs kernels and the collectives that block compute. With every group
# of axes on the fastest links that it could have alone, all stages equally full, messages between
# stages on the fastest links and the smallest bubble of any schedule, that bounds the step time.
# Parameter all-gathers and gradient reductions may overlap with compute, so they are left out. The
# bound is a sum over the components of the colours (`planner/space.py`).

#: In place of a policy: the least of all policies for each layer group.
BEST_PER_GROUP = "each"


def bounded_policies(space: Space) -> tuple[str, ...]:
    """What `MicrobatchBounds` of a space are for, in order."""
    return (*space.policies, BEST_PER_GROUP) if space.mixes_remat else space.policies


class ComputeBounds:
    """Lower bounds on step time.

    Args:
        values: measures on all degrees of the space.
    """

    def __init__(self, scope: Scope, pricer: Pricer, values: MeasureValues) -> None:
        self._pricer, self._values = pricer, values
        self._blocking, self._ring = blocking_slots(scope), ring_slots(scope)
        self._group_count = len(scope.workload.layer_counts)
        # stages of whole layers are known where embedding and head do not decide on their balance
        few = self._group_count <= MAX_POLICY_GROUPS
        self._whole_layers = few and pricer.profile.embedding_and_head != "owners"
        lockstep = pricer.profile.pipeline == "lockstep"
        self._deferrable = max(schedule.deferrable(lockstep=lockstep) for schedule in pipelines())
        work = values.kernel_degrees
        ones = np.ones(len(work), dtype=np.int64)
        self._links = least_link_costs(
            {
                **dict.fromkeys(MESH_AXES, ones),
                "expert": work.expert,
                "context": work.context,
                "tensor": work.tensor,
            },
            pricer.topology,
        )
        self._first = np.zeros(len(work), dtype=np.int64)
        self._first[values.kernel_index[::-1]] = np.arange(len(values.kernel_index))[::-1]
        self._factors = pricer.corrected(np.ones((ROWS, 1)))[:, 0]

        def costs(segment: int | None) -> ComponentCosts:
            prepared = partial(self._seconds, segment)
            count = SINGLE_BOUNDS + self._group_count * self._whole_layers
            return ComponentCosts(scope, scope.work, work, prepared, count)

        self._costs = costs(None)
        segments = range(self._group_count + 2) if scope.space.mixes_remat else ()
        self._by_group = [costs(segment) for segment in segments]

    def kernel_index(self, index: Array) -> Array:
        """Indices into `MeasureValues.kernel_degrees` of the given degrees."""
        return self._values.kernel_index[index]

    def of_choices(self, choices: Array, index: Array) -> MicrobatchBounds:
        """Lower bounds for one microbatch under the given choices, on the given degrees."""
        work = self._values.kernel_index[index]
        return self._bounds(lambda costs: costs.total(choices, work))

    def least(self, index: Array, stop: int | None = None) -> MicrobatchBounds:
        """The minimum over all choices on the given degrees; infinite where no choice fits.

        With `stop`, a bound on that minimum from the components before that index; see
        `ComponentCosts.least`.
        """
        work = self._values.kernel_index[index]
        return self._bounds(lambda costs: costs.least(work, stop))

    def _bounds(self, quantities: Callable[[ComponentCosts], Array]) -> MicrobatchBounds:
        """Bounds by policy, and by the best policy of each layer group where these may differ."""
        rows = quantities(self._costs)
        if self._by_group:
            best = sum(quantities(costs).min(1, keepdims=True) for costs in self._by_group)
            rows = np.concatenate([rows, best], axis=1)
        return MicrobatchBounds.of(rows)

    def _seconds(self, segment: int | None, tallies: ComponentTallies) -> Callable[[Array], Array]:
        """Prepares to compute the rows of a `MicrobatchBounds` by tally on the given degrees,
        whatever fsdp is; of one segment, or of all (None).
        """
        block, ring, (send,) = self._blocking, self._ring, role_slots("stage")
        slots = list(dict.fromkeys((*block, *ring, send)))
        rows = np.array(
            [
                *(Quantity.COMPUTE, Quantity.WEIGHT_GRADIENTS),
                *(first + slot for first in (COUNTS, BYTES) for slot in slots),
            ]
        )
        links, sent = self._links, np.array(slots)[:, None] == send
        moved = [np.where(sent, 1.0, costs[slots]) for costs in (links.latency, links.per_byte)]
        shares = self._pricer.exposed_share(slots)
        ones = np.ones((2, moved[0].shape[1]))
        rates = np.concatenate([ones, *(costs * shares for costs in moved)])
        rates *= self._factors[rows][:, None]
        compute, gradients = rows == Quantity.COMPUTE, rows == Quantity.WEIGHT_GRADIENTS
        blocking, around_ring = (
            np.isin(rows, [first + slot for first in (COUNTS, BYTES) for slot in slots])
            for slots in (block, ring)
        )
        busy = (compute | blocking) * 1.0
        kinds = np.stack(
            [
                busy,
                busy - self._deferrable * gradients,
                busy - self._pricer.efficiency.overlap * compute + around_ring,
                rows == COUNTS + send,
                rows == BYTES + send,
                compute,
                around_ring,
            ]
        )
        # rows of layers have labels of their own by group
        groups = self._group_count * self._whole_layers
        in_layers = np.zeros((groups, groups + 1, len(rows)))
        in_layers[range(groups), range(groups)] = busy
        kinds = np.concatenate(
            [np.tile(kinds, groups + 1), in_layers.reshape(groups, kinds.shape[1] * (groups + 1))]
        )
        position = np.full(ROWS, -1)
        position[rows] = np.arange(len(rows))
        segments = np.arange(self._group_count + 2)[:, None]
        labels = np.minimum(segments, groups) * len(rows) + position
        skipped = (position < 0) | (segments != (segments if segment is None else segment))
        sums = _WeightedSums(tallies, np.where(skipped, -1, labels).reshape(-1), kinds)
        return lambda index: sums.evaluated(
            self._values, self._first[index], rates.take(index, axis=1)
        )


class _WeightedSums:
    """Weighted sums of rows of tallies.

    Args:
        labels: label of every row of a tally; rows with a negative one do not count.
        kinds: weight of every label in each kind of sum, array [kinds, labels].
    """

    def __init__(self, tallies: ComponentTallies, labels: Array, kinds: Array) -> None:
        key, count = labels.tobytes(), kinds.shape[1]
        self._tally = tallies.joined(count, key, lambda _, tally: tally.summed(key, labels))
        number, self._label = np.divmod(self._tally.rows, count)
        ends = np.searchsorted(number, np.arange(len(tallies) + 1))
        self._parts = [
            (slice(start, end), kinds[:, self._label[start:end]])
            for start, end in itertools.pairwise(ends)
        ]
        self._kinds = len(kinds)

    def evaluated(
        self, values: MeasureValues, index: Array, rates: Array, position: Array | None = None
    ) -> Array:
        """The sums on some degrees, by index: array [kinds, tallies, columns].

        Args:
            rates: what a label is multiplied with, modulo their number: array [rates, columns].
            position: position in `index` of each column; by default they are the columns.
        """
        rows = self._tally.evaluated(values, index)
        rate = self._label % len(rates)
        sums = np.zeros((self._kinds, len(self._parts), rates.shape[1]))
        for number, (part, kinds) in enumerate(self._parts):
            if len(kinds[0]):
                taken = rows[part] if position is None else rows[part].take(position, axis=1)
                sums[:, number] = kinds @ (taken * rates[rate[part]])
        return sums


def blocking_slots(scope: Scope) -> list[int]:
    """Slots of collectives that block compute."""
    context_roles = CONTEXT_ROLES[scope.space.strategy.decisions.context]
    return role_slots("block", *(role for role in context_roles if role != "ring"))


def ring_slots(scope: Scope) -> list[int]:
    """Slots of ring transfers, which overlap with compute."""
    context_roles = CONTEXT_ROLES[scope.space.strategy.decisions.context]
    return role_slots(*(role for role in context_roles if role == "ring"))


def message_seconds(bounds: MicrobatchBounds, stages: Array, pricer: Pricer) -> Array:
    """Lower bound on the seconds of the stage-to-stage messages of one microbatch and chunk of
    layers under any placement, by candidate; see `step_seconds`.
    """
    latency, per_byte = least_stage_send(stages, pricer.topology)
    return np.where(
        np.isfinite(bounds.message_count),
        np.nan_to_num(bounds.message_count) * latency
        + np.nan_to_num(bounds.message_bytes) * per_byte,
        0.0,
    ) * (1 - pricer.profile.send_overlap)


def step_seconds(
    bounds: MicrobatchBounds,
    stages: Array,
    micro: Array,
    overhead: Array | float,
    overlappable: Array | float = 0.0,
    exposed_share: float = 0.0,
) -> Array:
    """A lower bound on the step time.

    Args:
        overhead: seconds per step beyond an equal share of the work for every stage, see
            `pipeline_overhead`.
        overlappable: seconds per step of transfers that overlap with compute.
        exposed_share: least share of them that does not.
    """
    rounds = micro / stages
    return (
        np.maximum(
            bounds.busy * rounds + exposed_share * overlappable,
            bounds.ring_exposed * rounds + overlappable,
        )
        + overhead
    )


def pipeline_overhead(
    bounds: MicrobatchBounds,
    pipelines: Pipelines,
    schedule: Schedule,
    message_s: Array | float,
    counts: Sequence[int],
    accumulation_groups: int = 1,
) -> Array:
    """A lower bound on the seconds per step beyond those of stages that share the work equally: the
    fullest stage has more layers, and there are messages and waiting.

    Args:
        pipelines: with the microbatches of one accumulation group.
        message_s: seconds of the messages of one microbatch and chunk.
        counts: layers of each group.
    """
    stages, chunks = pipelines.stages, pipelines.chunks
    finite = np.isfinite(bounds.busy)
    per_microbatch = (
        _uneven_seconds(np.where(finite, bounds.layers, 0.0), counts, stages, chunks)
        + message_s * chunks
    )
    if schedule.splits_backward:  # weight gradients fill the bubble
        undeferrable = np.where(finite, bounds.undeferrable, 0.0) / stages + per_microbatch
        waiting = (stages - 1) * np.maximum(0.0, undeferrable)
    else:
        busy = np.where(finite, bounds.busy, 0.0) / stages + per_microbatch
        waiting = schedule.bubble(pipelines) * busy
    return accumulation_groups * (per_microbatch * pipelines.microbatches + waiting)


def _uneven_seconds(
    layers: Array, counts: Sequence[int], stages: Array, chunks: Array
) -> Array | float:
    """A lower bound on the seconds that the slowest stage has beyond an equal share of the layers:
    of some chunk, which has as many layers of a group as an equal part, rounded up, or as many
    layers of any.

    Args:
        layers: seconds of each group, [groups, ..., candidates].
    """
    if not len(layers):
        return 0.0
    parts, total = stages * chunks, layers.sum(0)
    slowest, quickest = total / parts, np.full_like(total, np.inf)
    for seconds, count in zip(layers, counts, strict=True):
        slowest = np.maximum(slowest, np.ceil(count / parts) / count * seconds)
        quickest = np.minimum(quickest, seconds / count)
    return chunks * np.maximum(slowest, np.ceil(sum(counts) / parts) * quickest) - total / stages


# --------------------------------------------------------------------------------------------------
# Lower bounds on parameter all-gathers and gradient reductions, under any placement.
#
# They overlap with compute, but only up to its length: a step takes at least their time plus the
# time that cannot overlap with them (`MicrobatchBounds.ring_exposed`). With every group of axes on
# the fastest links that it could have alone they are a sum over the components of the colours.


@dataclass(frozen=True, kw_only=True)
class TrafficBounds(ArrayTable):
    """Lower bounds on collective seconds, on the stage that has the most; arrays [policies,
    candidates].

    Attributes:
        gather: all-gathers of parameters that are stored sharded, for the forward and the backward
            pass of a microbatch.
        scatter: reduce-scatters of gradients, per microbatch.
        reduce: all-reduces of gradients that are stored replicated, per microbatch.
        routed: the part of `reduce` that is gradients of experts to which tokens are routed.
        blocked: collectives that block compute, per microbatch and over all stages.
        outside_gather, outside_scatter: the parts of `gather` and `scatter` that are parameters of
            embedding and head.
        gather_updated: the all-gather of updated parameters, per step.
        redistribute: seconds per byte of a stage that is redistributed to interleaved stages, if
            their chunks divide, and if not, array [2, candidates].
    """

    gather: Array
    scatter: Array
    reduce: Array
    routed: Array
    blocked: Array
    outside_gather: Array
    outside_scatter: Array
    gather_updated: Array
    redistribute: Array

    @classmethod
    def of(cls, work: Array, updates: Array, redistribute: Array) -> TrafficBounds:
        """The bounds from arrays [kinds, policies, candidates]; updates do not depend on the
        policy.
        """
        names = (f.name for f in fields(cls))
        return cls(**dict(zip(names, (*work, updates[0, 0], redistribute), strict=True)))

    def seconds(
        self, zero: int, pricer: Pricer, sizes: Mapping[str, Array], gather_time: str
    ) -> Array:
        """Seconds per step under a ZeRO stage, of pipelines that do not work breadth first."""
        micro, staged, profile = sizes["micro"], sizes["stage"] > 1, pricer.profile
        if zero == 3:
            if gather_time == "use":
                return (self.gather + self.scatter) * micro
            once = self.gather / 2 + self.scatter
            if profile.outside_on_all_stages:
                once = once + self.outside_gather / 2
            return np.where(staged, once, (self.gather + self.scatter) * micro)
        update = self.gather_updated if zero else 0.0
        reduced = self.scatter if profile.scatters(zero) else self.reduce
        if profile.reduces_once_per_step(zero):
            return reduced + update
        if zero == 2:
            return reduced * micro + update
        if profile.reduces_in_last_microbatch(zero):
            return reduced + np.where(staged, 0.0, self.routed * (micro - 1)) + update
        return reduced * np.where(staged, 1, micro) + update

    def breadth_first_seconds(
        self, pricer: Pricer, micro: Array, max_chunks: Array, accumulation_groups: int
    ) -> Array:
        """Seconds per step of pipelines that work breadth first. The weights of layers are gathered
        (for both passes) and their gradients reduced once per group of microbatches, and the
        gradients of one chunk twice; those of embedding and head for every microbatch.
        """
        gathers = accumulation_groups
        scatters = accumulation_groups * (1 + 1 / np.maximum(max_chunks, 1))
        seconds = self.gather * gathers + self.scatter * scatters
        if not pricer.profile.outside_on_all_stages:
            return seconds
        return (
            seconds
            + self.outside_gather * np.maximum(micro - gathers, 0)
            + self.outside_scatter * np.maximum(micro - scatters, 0)
        )


class Traffic:
    """Lower bounds on parameter and gradient traffic, for some candidates.

    Args:
        values: measures on all degrees of the space.
        index: index of the degrees of each candidate.
        sizes: size of every mesh axis, and "micro", by candidate.
        links: costs of collectives by candidate; by default those of the best placement.
    """

    def __init__(
        self,
        scope: Scope,
        pricer: Pricer,
        values: MeasureValues,
        index: Array,
        sizes: Mapping[str, Array],
        links: LinkCosts | None = None,
    ) -> None:
        profile, stages, model = pricer.profile, sizes["stage"], scope.workload.model
        self._values, self._degrees_index, self._layers = values, index, len(model.layer_counts)
        self._distinct, self._position = np.unique(index, return_inverse=True)
        # overlaps that a profile states are not in `MicrobatchBounds.ring_exposed`
        counts_overlap = not profile.states_overlap
        if profile.embedding_and_head == "owners":
            outside_share = np.where(stages > 1, model.largest_outside_share, 1.0)
        else:
            outside_share = np.ones(len(stages)) if profile.outside_on_all_stages else 1 / stages
        layers = [np.ceil(count / stages) / count for count in model.layer_counts]
        self._shares = np.stack([*layers, np.ones(len(stages)), outside_share])
        if links is None:
            links = least_link_costs({axis: sizes[axis] for axis in MESH_AXES}, pricer.topology)
        self._redistribute = links.per_byte[INTERLEAVING] * profile.outside_on_all_stages
        blocking = blocking_slots(scope)
        slots = sorted({*blocking, *(role_slots(*_ROLES) if counts_overlap else ())})
        factors = pricer.exposed_share(slots) * np.array(
            [
                [model.reduction_dtype_ratio if SLOTS[slot].role in ("reduce", "scatter") else 1.0]
                for slot in slots
            ]
        )
        roles = [SLOTS[slot].role for slot in slots]
        kinds = np.array(
            [
                *([of_slot == role for of_slot in roles] for role in _ROLES),
                [SLOTS[slot].role == "reduce" and SLOTS[slot].group.of_experts for slot in slots],
                [slot in blocking for slot in slots],
                *([of_slot == role for of_slot in roles] for role in _OUTSIDE_ROLES),
            ],
            dtype=float,
        )
        work = _TrafficRows(
            rows=np.array([first + slot for first in (COUNTS, BYTES) for slot in slots]),
            rates=np.concatenate(
                [figures[slots] * factors for figures in (links.latency, links.per_byte)]
            ),
            kinds=np.concatenate([kinds, kinds], axis=1),
            all_stages=np.array([slot in blocking for slot in slots] * 2),
            outside_kinds=len(_OUTSIDE_ROLES),
        )
        dense, experts = (
            links.per_byte[SLOT_INDEX[Slot("gather", storage_group(experts=flag), "all-gather")]]
            for flag in (False, True)
        )
        if not counts_overlap:
            dense, experts = np.zeros_like(dense), np.zeros_like(dense)
        updates = _TrafficRows(
            rows=np.array([Quantity.PARAMETERS, Quantity.EXPERTS]),
            rates=np.stack([dense, experts - dense]),
            kinds=np.ones((1, 2)),
            all_stages=np.zeros(2, dtype=bool),
        )
        degrees = values.degrees.take(index)
        self._work, self._stored = (
            ComponentCosts(scope, programs, degrees, partial(self._seconds, rows), len(rows.kinds))
            for programs, rows in ((scope.work, work), (scope.model_tallies.stored, updates))
        )

    def least(self, positions: Array) -> TrafficBounds:
        """The minimum over all choices, by remat policy; infinite where none fits."""
        work, stored = (costs.least(positions) for costs in (self._work, self._stored))
        return TrafficBounds.of(work, stored, self._redistribute.take(positions, axis=1))

    def total(self, choices: Array, positions: Array) -> TrafficBounds:
        """The traffic of the given choices, by remat policy."""
        work, stored = (costs.total(choices, positions) for costs in (self._work, self._stored))
        return TrafficBounds.of(work, stored, self._redistribute.take(positions, axis=1))

    def _seconds(
        self, counted: _TrafficRows, tallies: ComponentTallies
    ) -> Callable[[Array], Array]:
        """Prepares to compute the seconds of the rows of tallies, by kind."""
        shares = np.concatenate([self._shares, np.ones((1, self._shares.shape[1]))])
        position = np.full(ROWS, -1)
        position[counted.rows] = np.arange(len(counted.rows))
        # a label for each row and share
        share = np.arange(len(self._shares))[:, None]
        share = np.where(counted.all_stages[position], len(self._shares), share)
        labels = np.where(position < 0, -1, share * len(counted.rows) + position)
        kinds = np.concatenate([counted.kinds] * len(shares), axis=1)
        if counted.outside_kinds:
            outside = (len(self._shares) - 1) * len(counted.rows)  # the first label there
            kinds[-counted.outside_kinds :, :outside] = 0.0
            kinds[-counted.outside_kinds :, outside + len(counted.rows) :] = 0.0
        sums = _WeightedSums(tallies, labels.reshape(-1), kinds)

        def evaluated(positions: Array) -> Array:
            distinct, position = np.unique(self._position[positions], return_inverse=True)
            rates = shares[:, None, positions] * counted.rates[:, positions]
            return sums.evaluated(
                self._values,
                self._distinct[distinct],
                rates.reshape(-1, len(positions)),
                position.reshape(-1),
            )

        return evaluated


#: Roles of collectives, in the order of the first fields of `TrafficBounds`.
_ROLES = ("gather", "scatter", "reduce")
#: Those of `TrafficBounds.outside_gather` and the field after it.
_OUTSIDE_ROLES = ("gather", "scatter")


@dataclass(frozen=True, kw_only=True)
class _TrafficRows:
    """Rows of a tally that count as traffic.

    Attributes:
        rows: indices of rows within a segment.
        rates: seconds by row and candidate.
        kinds: the kinds of seconds that each row counts towards, array [kinds, rows].
        all_stages: True for rows that are summed over all stages instead of taken from one.
        outside_kinds: how many kinds, the last ones, count only embedding and head.
    """

    rows: Array
    rates: Array
    kinds: Array
    all_stages: Array
    outside_kinds: int = 0


# --------------------------------------------------------------------------------------------------
# Lower bounds on the step time of plans that fit.
#
# The fastest plans often need far too much memory. Rematerialising some of the layers costs between
# none and all of them, in time and in memory; so a plan that fits takes at least the time at which
# the straight line between two policies meets the capacity. Offloading to host memory either
# overlaps with compute or adds to it.

#: The kind of plan that a bound covers: (ZeRO stage, True for breadth-first pipelines, when stages
#: all-gather weights that are stored sharded; "use" where they are not).
PlanKind = tuple[int, bool, str]
#: Relative rounding error allowed in a sum of bytes.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class StepBounds:
    """Lower bounds under a memory capacity (usable bytes per device).

    Attributes:
        counts: layers of each group.
        offloads: sets of parts that may be in host memory; includes () where none must.
    """

    space: Space
    counts: tuple[int, ...]
    pricer: Pricer
    capacity: float
    offloads: tuple[tuple[str, ...], ...]

    def seconds(
        self,
        bounds: MicrobatchBounds,
        footprint: Footprint,
        traffic: TrafficBounds,
        sizes: Mapping[str, Array],
        limit: float = np.inf,
    ) -> Array:
        """Lower bound on the step time of plans that fit; infinite where none fits."""
        kinds = self.by_kind(bounds, footprint, traffic, sizes, limit)
        return np.minimum.reduce([np.full(len(sizes["micro"]), np.inf), *kinds.values()])

    def by_kind(
        self,
        bounds: MicrobatchBounds,
        footprint: Footprint,
        traffic: TrafficBounds,
        sizes: Mapping[str, Array],
        limit: float = np.inf,
    ) -> dict[PlanKind, Array]:
        """The same for every kind of plan.

        Args:
            limit: seconds; memory is not considered for candidates that take as long with unlimited
                memory.
        """
        chip, efficiency = self.pricer.topology.chip, self.pricer.efficiency
        groups, stages, micro = self.space.accumulation_groups, sizes["stage"], sizes["micro"]
        fixed = efficiency.step_s + efficiency.microbatch_s * (micro + groups * (stages - 1))
        options = self._pipeline_options(bounds, sizes, footprint, traffic)
        #: kind of plan, bytes, overhead, seconds of transfers that may overlap, and others
        forms = list[tuple[PlanKind, Needed, Array, Array, Array]]()
        for zero, gather, legal in self._zero_options(sizes):
            with_zero = footprint.with_zero(zero, gather)
            update_s = 2 * with_zero.state / (chip.hbm_bytes_per_s * efficiency.update_share)
            added = np.where(legal, update_s, np.inf) + fixed
            moved = traffic.seconds(zero, self.pricer, sizes, gather)
            for overhead, breadth_first in options:
                if not breadth_first:
                    forms.append(((zero, False, gather), with_zero, overhead, moved, added))
                elif gather == "once" and footprint.breadth_first is not None:
                    chunks = self.space.max_breadth_first_chunks(sizes)
                    seldom = traffic.breadth_first_seconds(self.pricer, micro, chunks, groups)
                    needed = footprint.breadth_first
                    forms.append(((zero, True, gather), needed, overhead, seldom, added))
        overhead, overlappable, added = (
            np.stack(arrays) for arrays in zip(*(form[2:] for form in forms), strict=True)
        )
        exposed = 0.0 if self.pricer.profile.states_overlap else 1 - efficiency.hidden
        seconds = step_seconds(bounds, stages, micro, overhead, overlappable, exposed)
        fastest = seconds.min(1) + added
        fastest = np.nan_to_num(fastest, nan=np.inf, posinf=np.inf)  # no choice fits
        # memory is considered in the columns of every form that are below the limit
        columns = [np.flatnonzero(row) for row in fastest < limit]
        number = np.repeat(np.arange(len(forms)), [len(column) for column in columns])
        column = np.concatenate(columns)
        hidden = efficiency.overlap * (bounds.busy - traffic.blocked) * micro / stages
        blocking = bounds.busy * micro / stages + exposed * overlappable + overhead
        fastest[number, column] = self._fitting_seconds(
            Needed.joined(
                needed.take(column) for (_, needed, *_), column in zip(forms, columns, strict=True)
            ),
            seconds[number, :, column].T,
            added[number, column],
            blocking[number, :, column].T,
            hidden[:, column],
            stages[column],
        )
        kinds = dict[PlanKind, Array]()
        for (kind, *_), row in zip(forms, fastest, strict=True):
            kinds[kind] = np.minimum(kinds[kind], row) if kind in kinds else row
        return kinds

    def _fitting_seconds(
        self,
        needed: Needed,
        seconds: Array,
        added: Array,
        blocking: Array,
        hidden: Array,
        stages: Array,
    ) -> Array:
        """The least seconds of plans that fit, by candidate; infinite where none fits.

        Args:
            seconds: of plans of every policy, [policies, candidates], besides `added`.
            blocking: those of them in which no transfer overlaps with compute.
            hidden: seconds of transfers that compute hides, [policies, candidates].
        """
        unlimited, capacity = seconds.min(0) + added, self.capacity * (1 + ROUNDING)
        best = np.full(len(unlimited), np.inf)
        for offload in self.offloads:
            moved = np.zeros(len(unlimited))
            if "optimizer" in offload:
                moved = 2 * needed.state / self.pricer.topology.chip.host_bytes_per_s
            rows = np.flatnonzero(unlimited + moved < best)
            if not len(rows):
                continue
            points = self._time_memory_points(
                needed.copied(rows),
                offload,
                seconds[:, rows],
                blocking[:, rows],
                hidden[:, rows],
                stages[rows],
            )
            mixed = fastest_mixture(points[0], points[1], capacity)
            best[rows] = np.minimum(best[rows], mixed + (added + moved)[rows])
        return best

    def unlimited_seconds(self, bounds: MicrobatchBounds, sizes: Mapping[str, Array]) -> Array:
        """Lower bound on the step time with unlimited memory."""
        return np.minimum.reduce(
            [
                step_seconds(bounds, sizes["stage"], sizes["micro"], overhead).min(0)
                for overhead, _ in self._pipeline_options(bounds, sizes)
            ]
        )

    def _zero_options(self, sizes: Mapping[str, Array]) -> list[tuple[int, str, Array]]:
        """ZeRO stages of the space, when each gathers weights, and the candidates for which it is
        legal.
        """
        stored = np.prod([sizes[axis] for axis in STORED_AXES], axis=0) > 1
        unsharded_fsdp = sizes["fsdp"] == 1
        zeros = [zero for zero in range(4) if self.space.pins.zero in (None, zero)]
        stages = [(zero, "use", stored if zero else unsharded_fsdp) for zero in zeros]
        staged = stored & (sizes["stage"] > 1)
        once = 3 in zeros and "once" in self.space.gathers and bool(staged.any())
        return [*stages, (3, "once", staged)] if once else stages

    def _pipeline_options(
        self,
        bounds: MicrobatchBounds,
        sizes: Mapping[str, Array],
        footprint: Footprint | None = None,
        traffic: TrafficBounds | None = None,
    ) -> list[tuple[Array, bool]]:
        """Lower bounds on `pipeline_overhead`, [policies, candidates], each with a flag that is
        True for breadth first; infinite where no schedule fits.

        Three sets: schedules under which one plan may mix policies; for schedules that split the
        backward pass in two, each policy alone (plans do not mix them there); and breadth-first
        pipelines, whose stages all-gather weights once.

        Args:
            bounds: [policies, candidates].
        """
        stages, micro, space = sizes["stage"], sizes["micro"], self.space
        policies = bounded_policies(space)
        mixed = np.full((len(policies), len(stages)), np.inf)
        mixed[:, stages == 1] = 0.0
        staged = np.flatnonzero(stages > 1)
        if not len(staged):
            return [(mixed, False)]
        groups, layers = space.accumulation_groups, space.limits.layers

        def least(rows: Array, schedule: Schedule, chunks: Sequence[int]) -> Array:
            """The least over some numbers of chunks per stage, [policies, rows]."""
            own, stages_of_rows = bounds.take(rows), stages[rows]
            pipelines = Pipelines(
                stages=stages_of_rows,
                chunks=np.array(chunks)[:, None, None],
                microbatches=micro[rows] // groups,
                lockstep=self.pricer.profile.pipeline == "lockstep",
            )
            message_s = message_seconds(own, stages_of_rows, self.pricer)
            overhead = pipeline_overhead(own, pipelines, schedule, message_s, self.counts, groups)
            if footprint is not None and traffic is not None:
                overhead = overhead + self._interleaving_seconds(
                    footprint.redistributed[:, rows], traffic.redistribute[:, rows], pipelines
                )
            fits = (pipelines.chunks == 1) | (
                (pipelines.microbatches >= stages_of_rows)
                & (stages_of_rows * pipelines.chunks <= layers)
            )
            return np.where(fits, overhead, np.inf).min(0)

        split = list[Array]()
        by_schedule = defaultdict[Schedule, dict[str, list[int]]](dict)
        for policy in policies:
            for schedule, chunks in space.schedules(policy):
                by_schedule[schedule].setdefault(policy, []).append(chunks)
        for schedule, chunks in by_schedule.items():
            overhead = least(staged, schedule, next(iter(chunks.values())))
            for number, policy in enumerate(policies):
                if policy not in chunks:
                    continue
                if schedule.splits_backward:
                    split.append(np.full_like(mixed, np.inf))
                    split[-1][number, staged] = overhead[number]
                else:
                    mixed[number, staged] = np.minimum(mixed[number, staged], overhead[number])
        options = [(overhead, False) for overhead in (mixed, *split)]
        if "once" not in space.gathers or not space.max_breadth_first_chunks(sizes).any():
            return options
        breadth_first = np.full_like(mixed, np.inf)
        for rows, chunks in space.breadth_first_rows(sizes):
            breadth_first[:, rows] = least(rows, forward_first()[0], chunks)
        return [*options, (breadth_first, True)]

    def _interleaving_seconds(
        self, redistributed: Array, second_per_byte: Array, pipelines: Pipelines
    ) -> Array:
        """A lower bound on the seconds per step in which layers are redistributed to interleaved
        stages (`shardlib.cost.pricing.interleaving_seconds`), whatever the latency.
        """
        stages, chunks = pipelines.stages, pipelines.chunks
        divide, gather = second_per_byte
        parts = [
            size / stages * ((chunks > 1) & (count % (stages * chunks) == 0))
            for size, count in zip(redistributed, self.counts, strict=True)
        ]
        rate = divide + (stages * gather - divide) * (chunks % stages > 0)
        return sum(parts, np.zeros(1)) * rate

    def _time_memory_points(
        self,
        needed: Needed,
        offload: tuple[str, ...],
        seconds: Array,
        blocking: Array,
        hidden: Array,
        stages: Array,
    ) -> tuple[Array, Array]:
        """Corners of a lower bound on seconds over bytes for plans of every policy, [points,
        candidates], with some parts in host memory: no plan lies below the lines between them.

        With offloaded activations the corners are: none moved, as many bytes moved as kernels hide,
        and all moved, which takes the rest of their transfer. In lockstep, stages also write zeros
        to the stacks in host memory before compute begins.

        Args:
            seconds, blocking, hidden: see `_fitting_seconds`.
        """
        least_bytes = needed.device_bytes(offload)
        if "activations" not in offload:
            return seconds, least_bytes
        second_per_byte = 1 / self.pricer.topology.chip.host_bytes_per_s
        moving = 2 * needed.stack_fills * second_per_byte
        in_lockstep = (stages > 1) & (self.pricer.profile.pipeline == "lockstep")
        filling = np.where(in_lockstep, second_per_byte, 0.0)
        movable = needed.live - needed.live_without_stacks
        free = np.minimum(movable, hidden / moving)
        waiting = np.maximum(0.0, movable * moving - hidden) + movable * filling
        times = [np.maximum(seconds, blocking + extra) for extra in (free * filling, waiting)]
        sizes = [least_bytes + movable - free, least_bytes]
        if in_lockstep.any():
            times, sizes = [seconds, *times], [least_bytes + movable, *sizes]
        return np.concatenate(times), np.concatenate(sizes)

    def least_bytes(self, footprint: Footprint) -> Array:
        """Lower bound on bytes per device."""
        return np.minimum.reduce(
            [footprint.needed.device_bytes(offload).min(0) for offload in self.offloads]
        )


# --------------------------------------------------------------------------------------------------
# Memory-agnostic lower bounds on the step time, per entry.
#
# Entries with the same kernels and stages share a bound, whatever the sizes of data and fsdp (only
# whether there is fsdp counts), so it is computed once for all of them. It is refined in steps,
# each for the entries that the step before could not discard: from the terms that depend on no
# colour, from some components of the colours, and from all.

#: Components of the colours summed in each refinement step: none, all but the last (which can be
#: sharded in the most ways), and all (None).
REFINEMENTS: tuple[int | None, ...] = (0, -1, None)
#: At most this many entries are bounded with all components at once.
MAX_AT_ONCE = 512


class MemoryAgnosticBounds:
    """Cached lower bounds on the step time of entries, whether or not they fit.

    Args:
        sizes: size of every mesh axis, and "micro", by entry.
        index: index of the degrees of each entry.
    """

    def __init__(
        self,
        bounds: ComputeBounds,
        step_bounds: StepBounds,
        sizes: Mapping[str, Array],
        index: Array,
    ) -> None:
        self._bounds, self._step_bounds = bounds, step_bounds
        self._first, self._group = distinct_rows(
            [bounds.kernel_index(index), sizes["stage"], sizes["micro"], sizes["fsdp"] > 1]
        )
        self._index = index[self._first]
        self._sizes = {axis: size[self._first] for axis, size in sizes.items()}
        empty = np.zeros(0, dtype=np.int64), np.zeros(0)
        self._last_answer = np.inf, -np.inf, empty  # limits between which the answer is the same
        count = len(self._first)
        self._columns = {
            stop: LazyColumns((1,), count, partial(self._bound, stop))
            for stop in (*REFINEMENTS, None)
        }

    def __len__(self) -> int:
        return len(self._group)

    def of_all(self) -> Array:
        """The bound of every entry; infinite where no choice fits."""
        return self._of(np.arange(len(self._first)), None)[self._group]

    def below(self, limit: float) -> tuple[Array, Array]:
        """Entries whose bound is below a limit, sorted by bound, and their bounds."""
        low, high, result = self._last_answer
        if low < limit <= high:
            return result
        rows, high = np.arange(len(self._first)), np.inf
        for stop in REFINEMENTS if np.isfinite(limit) and len(self) > MAX_AT_ONCE else (None,):
            bounds = self._of(rows, stop)
            fits = bounds < limit
            high = min(high, float(bounds[~fits].min(initial=np.inf)))
            rows = rows[fits]
        selected = np.zeros(len(self._first), dtype=bool)
        selected[rows] = True
        entries = np.flatnonzero(selected[self._group])
        seconds = self._of(self._group[entries], None)
        order = np.argsort(seconds, kind="stable")
        result = entries[order], seconds[order]
        self._last_answer = float(result[1].max(initial=0.0)), high, result
        return result

    def _of(self, rows: Array, stop: int | None) -> Array:
        """The bounds of distinct entries, from the first components only."""
        return self._columns[stop].take(rows)[0]

    def _bound(self, stop: int | None, rows: Array) -> Array:
        bounds = self._bounds.least(self._index[rows], stop)
        sizes = {axis: size[rows] for axis, size in self._sizes.items()}
        return self._step_bounds.unlimited_seconds(bounds, sizes)[None]


# --------------------------------------------------------------------------------------------------
# Entries and pairs on some number of devices, with their lower bounds.


def _refined(rough: LazyColumns, exact: LazyColumns, entries: Array, limit: float) -> Array:
    """The exact bounds of entries whose rough ones are within a limit, and the rough of others."""
    if limit == np.inf:
        return exact.take(entries)[0]
    bounds = rough.take(entries)[0].copy()
    near = bounds <= limit
    bounds[near] = exact.take(entries[near])[0]
    return bounds


class Entries:
    """All (mesh, microbatch count) entries for some number of devices and one treatment of experts,
    with their lower bounds.

    Args:
        sizes: size of every mesh axis, and "micro", by entry (`Space.mesh_sizes`).
        values: measures on the degrees of the entries.
        index: index of the degrees of each entry.
    """

    def __init__(
        self,
        scope: Scope,
        pricer: Pricer,
        step_bounds: StepBounds,
        sizes: Mapping[str, Array],
        values: MeasureValues,
        index: Array,
    ) -> None:
        self.scope, self.sizes, self.values, self.degrees_index = (scope, sizes, values, index)
        self._pricer, self._step_bounds = pricer, step_bounds
        self.bounds = ComputeBounds(scope, pricer, values)
        self.choices = scope.choices
        self._seconds, self._rough_seconds, self._bytes, self._rough_bytes = (
            LazyColumns((1,), len(index), partial(evaluate, rough))
            for evaluate in (self._evaluate, self._least_bytes)
            for rough in (False, True)
        )
        self._mixes_remat = scope.space.mixes_remat  # then the bounds ignore memory
        self._fastest = MemoryAgnosticBounds(self.bounds, step_bounds, sizes, index)

    def __len__(self) -> int:
        return len(self.degrees_index)

    def sizes_of(self, entries: Array) -> dict[str, Array]:
        """Sizes of the given entries."""
        return {axis: values[entries] for axis, values in self.sizes.items()}

    def below(self, limit: float) -> tuple[Array, Array]:
        """Entries whose lower bound, regardless of memory, is below `limit`, sorted by bound, and
        their bounds; entries without a feasible choice are dropped.
        """
        return self._fastest.below(limit)

    @cached_property
    def unlimited_seconds(self) -> Array:
        """Lower bound on the step time with unlimited memory, by entry; infinite where no choice
        fits.
        """
        return self._fastest.of_all()

    @cached_property
    def _footprints(self) -> Footprints:
        return Footprints(self.scope, self._pricer, self.values)

    @cached_property
    def _mesh(self) -> Array:
        """Index of the mesh of each entry, whatever its microbatches."""
        return distinct_rows([self.sizes[axis] for axis in MESH_AXES])[1]

    @cached_property
    def _traffic(self) -> Traffic:
        """The traffic of each mesh that can overlap with compute, on the best links; it does not
        depend on the microbatches.
        """
        last = np.zeros(self._mesh.max() + 1, dtype=np.int64)
        last[self._mesh] = np.arange(len(self))
        return Traffic(
            self.scope, self._pricer, self.values, self.degrees_index[last], self.sizes_of(last)
        )

    def _traffic_on(self, meshes: Meshes) -> Traffic:
        sizes = {**meshes.sizes, "micro": meshes.micro}
        return Traffic(
            self.scope, self._pricer, self.values, meshes.degrees_index, sizes, meshes.links
        )

    def least_bytes(self, entries: Array, limit: float = np.inf) -> Array:
        """Lower bound on bytes per device of the given entries; infinite where no choice fits.

        Args:
            limit: as in `seconds`, in bytes.
        """
        if self._mixes_remat:
            return np.where(np.isfinite(self.unlimited_seconds[entries]), 0.0, np.inf)
        return _refined(self._rough_bytes, self._bytes, entries, limit)

    def _least_bytes(self, rough: bool, entries: Array) -> Array:
        footprints = self._footprints
        with np.errstate(invalid="ignore"):  # bytes of what does not fit are infinite
            footprint = (footprints.least_stored if rough else footprints.least)(
                self.degrees_index[entries], self.sizes_of(entries)
            )
            needed = self._step_bounds.least_bytes(footprint)
        return np.nan_to_num(needed, nan=np.inf, posinf=np.inf)[None]

    def seconds(self, entries: Array, limit: float = np.inf) -> Array:
        """Lower bound on the step time of plans of the given entries that fit; infinite where none
        fits.

        Args:
            limit: seconds; what lives during a step is not considered for entries that take as long
                without it.
        """
        if self._mixes_remat:
            return self.unlimited_seconds[entries]
        return _refined(self._rough_seconds, self._seconds, entries, limit)

    def _evaluate(self, rough: bool, entries: Array) -> Array:
        traffic = self._traffic.least(self._mesh[entries])
        index = self.degrees_index[entries]
        return self._least_seconds(index, self.sizes_of(entries), traffic, rough=rough)[None]

    def seconds_on(self, meshes: Meshes, limit: float = np.inf) -> Array:
        """The same for placed candidates, whose links are known."""
        traffic = self._traffic_on(meshes).least(np.arange(len(meshes)))
        return self._least_seconds(
            meshes.degrees_index,
            {**meshes.sizes, "micro": meshes.micro},
            traffic,
            limit,
            placed=True,
        )

    def _least_seconds(
        self,
        index: Array,
        sizes: Mapping[str, Array],
        traffic: TrafficBounds,
        limit: float = np.inf,
        *,
        placed: bool = False,
        rough: bool = False,
    ) -> Array:
        """See `seconds`."""
        with np.errstate(invalid="ignore"):  # what no choice fits is infinite
            bounds = self.bounds.least(index)
            if placed:
                overlap = self._pricer.efficiency.overlap
                bounds = bounds.with_least_blocked(traffic.blocked, overlap)
            footprints = self._footprints
            footprint = (footprints.least_stored if rough else footprints.least)(index, sizes)
            return self._step_bounds.seconds(bounds, footprint, traffic, sizes, limit)

    def pairs(
        self, entries: Array, limit: float = np.inf, *, minimum_memory: bool = False
    ) -> Pairs:
        """The given entries under every choice that fits, where the bound is below a limit; sorted
        by bound.

        Args:
            limit: seconds, or bytes with `minimum_memory`.
            minimum_memory: bound bytes instead of seconds.
        """
        if not minimum_memory:
            return self.fitting_pairs(self.unlimited_pairs(entries), limit)
        pairs = self._legal_pairs(entries)
        if self._mixes_remat or not len(pairs):
            return pairs.below(limit)
        index, sizes = self._rows(pairs)
        footprint = self._footprints.total(pairs.choices, index, sizes)
        return replace(pairs, bound=self._step_bounds.least_bytes(footprint)).below(limit)

    def unlimited_pairs(self, entries: Array) -> Pairs:
        """The given entries under every choice that fits, with bounds for unlimited memory."""
        pairs = self._legal_pairs(entries)
        if not len(pairs):
            return pairs
        index, sizes = self._rows(pairs)
        bounds = self.bounds.of_choices(pairs.choices, index)
        return replace(pairs, bound=self._step_bounds.unlimited_seconds(bounds, sizes))

    def fitting_pairs(self, pairs: Pairs, limit: float) -> Pairs:
        """Pairs with bounds for plans that fit, where these are below a limit; sorted by bound."""
        footprints = self._footprints
        for footprint in () if self._mixes_remat else (footprints.total_stored, footprints.total):
            pairs = pairs.below(limit)
            if len(pairs):
                index, sizes = self._rows(pairs)
                bound = self._step_bounds.seconds(
                    self.bounds.of_choices(pairs.choices, index),
                    footprint(pairs.choices, index, sizes),
                    self._traffic.total(pairs.choices, self._mesh[pairs.entries]),
                    sizes,
                    limit,
                )
                pairs = replace(pairs, bound=bound)
        return pairs.take(np.lexsort((pairs.choices, self.sizes["tensor"][pairs.entries]))).below(
            limit
        )

    def _rows(self, pairs: Pairs) -> tuple[Array, dict[str, Array]]:
        """Indices of degrees, and sizes of pairs."""
        return self.degrees_index[pairs.entries], self.sizes_of(pairs.entries)

    def seconds_by_kind(
        self, meshes: Meshes, positions: Array, choices: Array, limit: float = np.inf
    ) -> dict[PlanKind, Array]:
        """Lower bound on the step time by kind of plan, for placed candidates, whose links are
        known.
        """
        index = meshes.degrees_index[positions]
        sizes = {axis: size[positions] for axis, size in meshes.sizes.items()}
        sizes["micro"] = meshes.micro[positions]
        traffic = self._traffic_on(meshes).total(choices, positions)
        return self._step_bounds.by_kind(
            self.bounds.of_choices(choices, index).with_blocked(traffic.blocked),
            self._footprints.total(choices, index, sizes),
            traffic,
            sizes,
            limit,
        )

    def _legal_pairs(self, entries: Array) -> Pairs:
        """The given entries under every choice that fits them, choice by choice."""
        space = self.scope.space
        sizes = self.sizes_of(entries)
        colours = self.scope.workload.colouring.colours
        empty = np.zeros(0, dtype=np.int64)
        tables = [Pairs(entries=empty, choices=empty, bound=np.zeros(0))]
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
            tables.append(
                Pairs(entries=rows, choices=np.full(len(rows), number), bound=np.zeros(len(rows)))
            )
        return Pairs.joined(tables)
