"""Candidates as arrays (meshes with their placements and numbers of microbatches), and their
pipeline stages: the fullest, the slowest, and how often they gather and reduce their weights.

Waiting times and numbers of microbatches in flight belong to each schedule (`shardlib.schedules`).
All schedules partition layers alike: a chain of layers is cut into S stages of v chunks as evenly
as whole layers allow.

>>> layer, outside = np.array([1.0]), np.array([0.0])
>>> slowest_stage([layer], [10], outside, np.array([4]), np.array([1])).item()
3.0
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self, TypeVar

import numpy as np

from shardlib.cost.collectives import SLOTS, LinkCosts, axis_group, link_costs, role_slots
from shardlib.cost.framework import FrameworkProfile
from shardlib.cost.tables import (
    BYTES,
    COUNTS,
    CollectiveSeconds,
    KernelTotals,
    MemoryPoint,
    Pricer,
    Quantity,
    StoredBytes,
)
from shardlib.cost.terms import OUTSIDE_LAYERS, SHARED_BY_ROWS, Degrees, LazyTable, distinct_rows
from shardlib.decisions.table import Decisions
from shardlib.graph import MatrixUpdate
from shardlib.layout import BATCH_AXES, MESH_AXES, TENSOR, MeshShape
from shardlib.machines.topology import Placement, Topology
from shardlib.schedules import Pipelines, Timetable, named

Array = np.ndarray
#: Classes of byte counts whose fields are named as rows of a tally.
ByteCounts = TypeVar("ByteCounts", MemoryPoint, StoredBytes)


@dataclass(frozen=True, kw_only=True)
class Meshes(LazyTable):
    """Meshes with microbatch counts, as arrays of equal length.

    Attributes:
        sizes: size of every mesh axis per candidate.
        micro: microbatches per candidate.
        links: costs of collectives per candidate.
        degrees: the distinct degrees of all candidates.
        degrees_index: index into them by candidate.
    """

    sizes: Mapping[str, Array]
    micro: Array
    links: LinkCosts
    degrees: Degrees = field(metadata=SHARED_BY_ROWS)
    degrees_index: Array

    @classmethod
    def placed(
        cls, meshes: Sequence[tuple[MeshShape, Placement]], micro: Sequence[int], topology: Topology
    ) -> Self:
        """Placed meshes with microbatch counts on a topology."""
        number_by_id: dict[int, int] = {}
        order = [
            number_by_id.setdefault(id(placement), len(number_by_id)) for _, placement in meshes
        ]
        unique = list({id(placement): placement for _, placement in meshes}.values())
        sizes = {
            axis: np.array([mesh[axis] for mesh, _ in meshes], dtype=np.int64) for axis in MESH_AXES
        }
        numbers = np.array(micro, dtype=np.int64)
        degrees, degrees_index = distinct({**sizes, "micro": numbers})
        return cls(
            sizes=sizes,
            micro=numbers,
            links=link_costs(unique, topology).take(np.array(order, dtype=np.int64)),
            degrees=degrees,
            degrees_index=degrees_index,
        )

    def __len__(self) -> int:
        return len(self.micro)

    @property
    def stage(self) -> Array:
        """Stages per candidate."""
        return self.sizes["stage"]

    @property
    def fsdp(self) -> Array:
        """Size of the fsdp axis per candidate."""
        return self.sizes["fsdp"]

    @property
    def context(self) -> Array:
        """Size of the context axis per candidate."""
        return self.sizes["context"]

    def ways(self, axes: Iterable[str]) -> Array:
        """Number of shards of a dim that is sharded over `axes`, per candidate."""
        return math.prod((self.sizes[axis] for axis in axes), start=np.ones_like(self.micro))


def distinct(sizes: dict[str, Array]) -> tuple[Degrees, Array]:
    """The distinct degrees among candidates, and the index into them by candidate."""
    degree = math.prod((sizes[axis] for axis in BATCH_AXES), start=sizes["micro"])
    first, which = distinct_rows(
        [degree, *(sizes[axis] for axis in ("context", "tensor", "expert", "fsdp"))]
    )
    return (
        Degrees(
            batch=degree,
            context=sizes["context"],
            tensor=sizes["tensor"],
            expert=sizes["expert"],
            fsdp=sizes["fsdp"],
        ).take(first),
        which,
    )


# --------------------------------------------------------------------------------------------------
# The quantities of a step by segment and candidate, with collectives in seconds, which all ZeRO
# stages and schedules share.


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model that pricing needs besides its items.

    Attributes:
        layer_counts: layers of each layer group.
        batch_bytes: bytes of the global batch, and of results with a value per row.
        state_bytes: bytes of replicated model state.
        largest_outside_share: share of the largest array in the parameters outside of the layers.
        largest_share: share of the largest trained array in the trained parameters.
        reduction_dtype_ratio: bytes of gradients in their communication dtype over those as traced.
        compute_dtype_ratio: bytes per element in the compute dtype, over those of a parameter.
        head_work: work of the matmuls outside of the layers, over that of a layer.
        updates: the parameters whose matrices the optimizer multiplies.
        stacked_in_steps: True if layers are written one after the other: a pipeline stacks them in
            every step, and every stage stores them all.
    """

    layer_counts: tuple[int, ...]
    batch_bytes: float
    state_bytes: float
    largest_outside_share: float = 1.0
    largest_share: float = 1.0
    reduction_dtype_ratio: float = 1.0
    compute_dtype_ratio: float = 1.0
    head_work: float = 0.0
    updates: tuple[MatrixUpdate, ...] = ()
    stacked_in_steps: bool = False

    @cached_property
    def matrices(self) -> tuple[tuple[MatrixUpdate, bool], ...]:
        """The updates of the optimizer's matrices, those with the same computation as one of
        [matrices, 1], and whether they are stacks in parameters, such as those of layers.
        """
        grouped: dict[tuple[str, bool], list[MatrixUpdate]] = defaultdict(list)
        for update in self.updates:
            grouped[update.alike, bool(update.stack)].append(update)
        return tuple(
            (
                replace(
                    group[0],
                    path=str(number),
                    shape=(sum(update.matrices for update in group), 1),
                    stack=(0,),
                    contractions=tuple(
                        replace(product, flops=product.flops / group[0].matrices)
                        for product in group[0].contractions
                    ),
                ),
                stacked,
            )
            for number, ((_, stacked), group) in enumerate(grouped.items())
        )


@dataclass(frozen=True, kw_only=True)
class StepCosts(LazyTable):
    """The quantities of one remat policy under one choice, by segment and candidate, with
    collectives in seconds; all ZeRO stages and schedules share them.

    Attributes:
        kernels: seconds and FLOPs of kernels.
        collectives: seconds of collectives.
        stored: bytes between steps.
        points: memory at each point where it may peak.
        buffer: bytes of keys and values gathered along the context, array [candidates].
        stacks: bytes that loops over layers have saved when the last one ends, array [segments,
            candidates]; [0, candidates] if not needed.
        microbatch_seconds: cache of the seconds of one microbatch on the slowest stage, by (way of
            context parallelism, chunks per stage).
    """

    kernels: KernelTotals
    collectives: CollectiveSeconds
    stored: StoredBytes
    points: tuple[MemoryPoint, ...]
    buffer: Array
    stacks: Array
    microbatch_seconds: dict[tuple[str, int], Array] = field(
        default_factory=dict[tuple[str, int], Array], init=False, compare=False, repr=False
    )

    def context_seconds(self, context: str) -> Array:
        """Exposed seconds of collectives along the sequence, by the way of context parallelism."""
        roles = self.collectives
        return roles.context + (
            roles.keys
            if context == "all-gather"
            else roles.head_exchange
            if context == "ulysses"
            else 0.0
        )


def step_costs(
    work: Array,
    stored: Array,
    points: Sequence[Array],
    model: ModelFacts,
    pricer: Pricer,
    meshes: Meshes,
    *,
    stacks: Array | None = None,
) -> StepCosts:
    """Converts tallies by degrees into quantities by candidate.

    Args:
        work: tally of `work_items`, array [segments, rows, degrees].
    """
    degrees_index = meshes.degrees_index
    work = pricer.corrected(work)

    def by_candidate(by_degrees: Array) -> Array:
        return by_degrees.take(degrees_index, axis=-1)  # several times faster than an index

    def role(name: str, *, experts: bool = False) -> Array:
        slots = [slot for slot in role_slots(name) if SLOTS[slot].group.of_experts or not experts]
        counts = work[:, [COUNTS + slot for slot in slots]]
        sizes = work[:, [BYTES + slot for slot in slots]]
        used = [i for i in range(len(slots)) if counts[:, i].any()]
        factors = pricer.exposed_share(slots)[:, 0] * (
            model.reduction_dtype_ratio if name in ("reduce", "scatter") else 1.0
        )
        seconds = np.zeros((work.shape[0], len(meshes)))
        if pricer.profile.bucket_bytes and name in ("gather", "reduce", "scatter"):
            buckets = np.ceil(sizes.sum(0) / pricer.profile.bucket_bytes)
            counts = counts * np.minimum(1.0, buckets / np.maximum(counts.sum(0), 1e-9))
        for i in used:
            seconds += factors[i] * (
                by_candidate(counts[:, i]) * meshes.links.latency[slots[i]]
                + by_candidate(sizes[:, i]) * meshes.links.per_byte[slots[i]]
            )
        return seconds

    def bytes_of(kind: type[ByteCounts], tally: Array) -> ByteCounts:
        """A row of the tally for each field."""
        return kind(
            **{
                field.name: by_candidate(tally[:, Quantity[field.name.upper()]])
                for field in fields(kind)
            }
        )

    outside = {
        field: role(name)[OUTSIDE_LAYERS]
        for field, name in (("stage_sends", "stage"), ("ends", "ends"))
    }
    by_role = {
        field.name: role(field.name)
        for field in fields(CollectiveSeconds)
        if field.name not in ("routed", *outside)
    }
    return StepCosts(
        kernels=KernelTotals(
            compute=by_candidate(work[:, Quantity.COMPUTE]),
            weight_gradients=by_candidate(work[:, Quantity.WEIGHT_GRADIENTS].sum(0)),
            host=by_candidate(work[:, Quantity.HOST]) + _stalls(work, pricer, meshes),
            flops=by_candidate(work[:, Quantity.FLOPS].sum(0)),
        ),
        collectives=CollectiveSeconds(**by_role, routed=role("reduce", experts=True), **outside),
        stored=bytes_of(StoredBytes, stored),
        points=tuple(bytes_of(MemoryPoint, pricer.corrected(tally)) for tally in points),
        buffer=np.where(meshes.context > 1, by_candidate(_context_buffer(work, model)), 0.0),
        stacks=(
            np.zeros((0, len(degrees_index)))
            if stacks is None
            else by_candidate(pricer.corrected(stacks)[:, Quantity.SAVED])
        ),
    )


def _stalls(work: Array, pricer: Pricer, meshes: Meshes) -> Array:
    """Seconds that the collectives over tensor of a microbatch stall (`tensor_stall_s`), by
    segment and candidate.
    """
    stall = pricer.profile.tensor_stall_s
    if not stall or len(pricer.topology.tiers) < 2:
        return np.zeros((work.shape[0], len(meshes)))
    slots = [
        COUNTS + slot for slot in role_slots("block") if SLOTS[slot].group == axis_group(TENSOR)
    ]
    others = np.where(meshes.stage > 1, meshes.sizes["tensor"] - 1, 0)
    return stall * work[:, slots].sum(1)[:, meshes.degrees_index] * others


def _context_buffer(work: Array, model: ModelFacts) -> Array:
    """Bytes of the keys and values of one layer, gathered along the context: half of the bytes
    gathered in forward and backward pass.
    """
    rows = [
        BYTES + number
        for number, slot in enumerate(SLOTS)
        if slot.role in ("context", "keys") and slot.kind == "all-gather"
    ]
    largest = np.zeros(work.shape[-1])
    for k, count in enumerate(model.layer_counts):
        largest = np.maximum(largest, work[k, rows].sum(0) / (2 * count))
    return largest


# --------------------------------------------------------------------------------------------------
# Candidates under the same decisions: the fullest pipeline stage (whole layers, and a part of
# embedding and head), and how often a stage gathers its weights and reduces their gradients.


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Plans of one model on one machine that share all decisions but mesh and microbatches.

    Attributes:
        decisions: the shared decisions.
        meshes: mesh and microbatches of each plan.
    """

    decisions: Decisions
    model: ModelFacts
    pricer: Pricer
    meshes: Meshes

    def __len__(self) -> int:
        return len(self.meshes)

    @property
    def profile(self) -> FrameworkProfile:
        """The framework profile."""
        return self.pricer.profile

    def with_decisions(self, **changes: object) -> Plans:
        """The same candidates under other decisions."""
        return replace(self, decisions=replace(self.decisions, **changes))

    @cached_property
    def chunks(self) -> Array:
        """Chunks of layers per stage; 1 without stages."""
        return np.where(self.meshes.stage > 1, self.decisions.virtual_stages, 1)

    @cached_property
    def pipelines(self) -> Pipelines:
        """The pipelines, each with the microbatches of one group."""
        return Pipelines(
            stages=self.meshes.stage,
            chunks=self.chunks,
            microbatches=self.meshes.micro // self.decisions.accumulation,
            lockstep=self.profile.pipeline == "lockstep",
        )

    @cached_property
    def in_flight(self) -> Array:
        """Microbatches in flight on the first stage."""
        return named(self.decisions.schedule).in_flight(self.pipelines)

    @cached_property
    def layers(self) -> list[Array]:
        """Layers of the fullest stage, by layer group, if stages have equally many layers."""
        return [
            self.chunks * np.ceil(count / (self.meshes.stage * self.chunks))
            for count in self.model.layer_counts
        ]

    @cached_property
    def shares(self) -> Array:
        """Share of each segment on the fullest stage: whole layers of every group, and of embedding
        and head an equal part or a whole array; array [segments, candidates].

        If stages are balanced by work, the fullest has the layers that begin before its share of
        the work is reached.
        """
        model, stages, layers = self.model, self.meshes.stage, self.layers
        if self.profile.balance != "layers":
            by_work = [
                partition_by_work(count, model.head_work, stages)[0] for count in model.layer_counts
            ]
            unchunked = (stages > 1) & (self.chunks == 1)
            layers = [np.where(unchunked, *pair) for pair in zip(by_work, layers, strict=True)]
        outside = (
            np.where(stages > 1, model.largest_outside_share, 1.0)
            if self.profile.embedding_and_head == "owners"
            else 1 / stages
        )
        parts = [number / count for number, count in zip(layers, model.layer_counts, strict=True)]
        return np.stack([*parts, np.ones(len(self)), outside])

    @cached_property
    def shares_held(self) -> Array:
        """Share of each segment's gradients, and of parameters while stages use them, on the
        fullest stage: as `shares`, but every stage has all of embedding and head if their work is
        spread over the sequence.
        """
        return self._with_outside(self.profile.embedding_and_head == "spread")

    @cached_property
    def shares_stored(self) -> Array:
        """Share of each segment's parameters and optimizer state stored on the fullest stage: as
        `shares_held`, but in one program, whose arrays are in equal parts, every stage stores all
        layers of a stack that the stages do not divide.
        """
        return self._of_stacks[0]

    @cached_property
    def shares_sliced(self) -> Array:
        """Share of each segment's parameters that the fullest stage of one program has once more,
        as they are stored: its own layers of a stack that is stored whole (all of one that every
        step makes), or, with several chunks of layers, those that it has from other stages
        (`interleaved_bytes`).
        """
        return self._of_stacks[1]

    @cached_property
    def _of_stacks(self) -> tuple[Array, Array]:
        return shares_of_stacks(
            self.shares, self.shares_held, self.meshes.stage, self.model, self.profile, self.chunks
        )

    @cached_property
    def shares_moved(self) -> Array:
        """Share of each segment's parameters that the fullest stage gathers, and whose gradients it
        reduces: as `shares`, but all of embedding and head if each stage computes them for a part
        of the sequence.
        """
        return self._with_outside(self.profile.outside_on_all_stages)

    def _with_outside(self, all_stages: bool) -> Array:
        """`shares`, with all of embedding and head on every stage or not."""
        shares = self.shares.copy()
        if all_stages:
            shares[OUTSIDE_LAYERS] = 1.0
        return shares

    def interleaved_bytes(self, stored: Array) -> Array:
        """Bytes per device after layers are redistributed to stages of several chunks, as
        interleaved pipelines in one program do with parameters in every step, and with gradients in
        reverse: layers are stored in order, and stage s of S computes chunks s, S + s, and so on.
        If S does not divide the chunks per stage, the partitioner gathers all of them. Layers that
        do not divide are not counted.

        Args:
            stored: bytes by segment, of all stages, [segments, candidates].
        """
        virtual, stages = self.decisions.virtual_stages, self.meshes.stage
        if virtual == 1 or not self.profile.outside_on_all_stages:
            return np.zeros(len(self))
        moved = stored * self.shares
        layers = np.zeros(len(self))
        for k, count in enumerate(self.model.layer_counts):
            layers = layers + np.where(count % (stages * virtual), 0.0, moved[k])
        return np.where(stages > 1, layers * np.where(virtual % stages, stages, 1), 0.0)

    @property
    def weight_gathers(self) -> tuple[Array, Array, float]:
        """The gathers of its weights and the reductions of their gradients by a stage per step, and
        the share of them that is unsharded at a time.

        With gathers at every "use": two gathers (forward, backward) and one reduction per
        microbatch. With "once": one of each, or two and one if all microbatches go through one
        chunk of layers before the next (breadth first, arXiv:2211.05953). Then two chunks are
        unsharded at a time, during the transition between chunks; the sums of one chunk are reduced
        before those of the next exist; and each group of microbatches in sequence repeats this.
        """
        decisions, micro = self.decisions, self.meshes.micro.astype(float)
        if decisions.gather == "use":
            return micro, micro, 0.0
        if self._breadth_first:
            gathered = np.full_like(micro, decisions.accumulation)
            return (
                gathered,
                gathered * (decisions.virtual_stages + 1) / decisions.virtual_stages,
                2 / decisions.virtual_stages,
            )
        return np.full_like(micro, 0.5), np.ones_like(micro), 1.0

    @property
    def in_rounds(self) -> bool:
        """True if stages gather the weights of one chunk after the other."""
        return self.decisions.gather == "once" and self._breadth_first

    @property
    def head_gathers(self) -> Array:
        """The number of gathers of embedding and head, and of reductions of their gradients, per
        step of a pipeline whose stages all compute both: once if those of layers are (except with
        rounds of chunks), otherwise per microbatch.
        """
        assert self.profile.outside_on_all_stages
        late = self.profile.reduces_once_per_step(self.decisions.zero) or (
            self.decisions.gather == "once" and not self._breadth_first
        )
        return np.where(self.decisions.zero < 2 or late, 1.0, self.meshes.micro)

    @property
    def _breadth_first(self) -> bool:
        """True if all microbatches go through one of several chunks of layers before the next."""
        return named(self.decisions.schedule).forward_first and self.decisions.virtual_stages > 1

    @cached_property
    def stage_runs(self) -> Array:
        """The number of times per step that a stage runs its computation for a microbatch; a
        pipeline in one program also computes while it waits, and discards the result.
        """
        decisions, meshes = self.decisions, self.meshes
        if self.profile.pipeline != "lockstep":
            return np.asarray(meshes.micro, dtype=float)
        return np.array(
            [
                (
                    decisions.accumulation
                    * Timetable(
                        schedule=decisions.schedule,
                        stages=int(stages),
                        microbatches=int(micro) // decisions.accumulation,
                        virtual=decisions.virtual_stages,
                    ).forward_ticks
                    / decisions.virtual_stages
                    if stages > 1
                    else float(micro)
                )
                for stages, micro in zip(meshes.stage, meshes.micro, strict=True)
            ]
        )


def shares_of_stacks(
    shares: Array,
    in_use: Array,
    stages: Array,
    model: ModelFacts,
    profile: FrameworkProfile,
    chunks: Array | int = 1,
) -> tuple[Array, Array]:
    """`Plans.shares_stored` and `Plans.shares_sliced`, from `shares` and `shares_held`."""
    stored, sliced = in_use.copy(), np.zeros_like(in_use)
    if profile.outside_on_all_stages:
        for k, count in enumerate(model.layer_counts):
            undivided = (count % stages > 0) | (model.stacked_in_steps & (stages > 1))
            stored[k] = np.where(undivided, 1.0, in_use[k])
            copied = (stages > 1) & (undivided | (np.asarray(chunks) > 1))
            sliced[k] = np.where(copied, 1.0 if model.stacked_in_steps else shares[k], 0.0)
    return stored, sliced


# --------------------------------------------------------------------------------------------------
# The slowest stage and the longest chunk of a chain of layers.

#: Bisection steps for the longest chunk over layers of different kinds; the interval is as wide as
#: the slowest layer, so the result is within 1e-6 of that layer.
_HALVINGS = 20
#: Relative rounding error of a sum of layers.
_SLACK = 1 + 1e-12


def partition_by_work(count: int, head: float, stages: Array) -> tuple[Array, Array]:
    """Layers of the fullest stage and of the last one, which has the head, where a stage ends with
    the layer in which an equal part of the work is passed.

    Args:
        head: work of the head, in layers.
    """
    part = (count + head) / stages

    def passed(parts: Array) -> Array:
        return np.minimum(count, np.ceil(parts * part - 1e-9))

    return passed(np.ones_like(part)), count - np.where(stages > 1, passed(stages - 1), 0)


def stage_part(quantity: Array, scale: Array) -> Array:
    """The part of a quantity on the fullest stage, by segment.

    Args:
        quantity: per microbatch or step, [segments, candidates].
        scale: share of each segment on the stage, [segments, candidates].
    """
    return (quantity * scale).sum(0)


def slowest_stage(
    layers: Sequence[Array], counts: Sequence[int], outside: Array, stages: Array, virtual: Array
) -> Array:
    """Seconds of the slowest stage when the last one has the head: one layer fewer than the others
    if the layers do not divide.

    Args:
        layers: seconds of one layer of each group.
        outside: seconds of embedding and head, almost all of them the head's.
    """
    chunks = stages * virtual
    without_head = virtual * slowest_chunk(layers, counts, chunks)
    total = sum(counts)
    spare = (
        (np.ceil(total / chunks) * chunks > total) & (stages > 1)
        if counts
        else np.zeros(len(stages), dtype=bool)
    )
    return np.maximum(
        without_head, without_head + outside - np.where(spare, layers[-1] if layers else 0.0, 0.0)
    )


def slowest_chunk(seconds: Sequence[Array], counts: Sequence[int], chunks: Array) -> Array:
    """Seconds of the slowest chunk when a chain of layers is cut into chunks as evenly as possible.

    The chain consists of groups of equal layers, one group after the other; chunks are runs of
    whole layers. The best cut is found by bisection on the length of the longest chunk, filling
    chunks from the front, which is exact for chains.

    Args:
        seconds: of one layer of each group, arrays [..., candidates].
    """
    if not counts:
        return np.zeros_like(chunks, dtype=float)
    if len(counts) == 1:
        return np.ceil(counts[0] / chunks) * seconds[0]
    total = np.asarray(sum(n * time for n, time in zip(counts, seconds, strict=True)), dtype=float)
    split = np.flatnonzero(chunks > 1)
    if len(split) < len(chunks):
        slowest_of_split = (
            slowest_chunk([time[..., split] for time in seconds], counts, chunks[split])
            if len(split)
            else ()
        )
        slowest = total.copy()
        slowest[..., split] = slowest_of_split
        return slowest
    layers = [np.maximum(np.asarray(time, dtype=float), 1e-30) for time in seconds]
    longest = np.maximum.reduce(layers)
    # chunks that no further layer fits into have more than an equal share of the time
    low = np.maximum(total / chunks, longest)
    high = np.minimum(total, total / chunks + longest)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _chunks_needed(layers, counts, middle) <= chunks
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return high


def _chunks_needed(seconds: Sequence[Array], counts: Sequence[int], limit: Array) -> Array:
    """Number of chunks, filled from the front, if none may be longer than `limit` seconds."""
    used: Array | float = 0.0
    space: Array | None = None
    for count, time in zip(counts, seconds, strict=True):
        fitting = 0.0 if space is None else np.minimum(np.floor(space * _SLACK / time), count)
        left = count - fitting
        per_chunk = np.maximum(np.floor(limit * _SLACK / time), 1)
        more = np.ceil(left / per_chunk)
        used = used + more
        full = limit - (left - (more - 1) * per_chunk) * time
        space = full if space is None else np.where(more > 0, full, space - fitting * time)
    return np.asarray(used)
