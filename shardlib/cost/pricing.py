"""Seconds and bytes of candidate plans, as arrays: compute, exposed collectives, pipeline bubbles,
optimizer, memory. The result for one plan is its `Estimate`, with its collectives one by one.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from importlib.metadata import version

import numpy as np

from shardlib.compact import compact
from shardlib.cost.collectives import (
    CONTEXT_ROLES,
    SLOT_INDEX,
    SLOTS,
    CollectiveStep,
    DeviceGroup,
    Slot,
    axis_group,
    collective_cost,
    replica_group,
    result_ratio,
    slot_cost,
    spans_of,
    steps_of,
    stepwise,
    storage_group,
    token_group,
)
from shardlib.cost.facts import traits
from shardlib.cost.framework import XLA, FrameworkProfile, Interval
from shardlib.cost.roofline import (
    Applied,
    efficiency_of,
    kernel_seconds,
    vendor_efficiency,
    with_reached_rates,
)
from shardlib.cost.stages import (
    Meshes,
    Plans,
    StepCosts,
    partition_by_work,
    slowest_chunk,
    slowest_stage,
    stage_part,
)
from shardlib.cost.tables import MemoryPoint, Pricer, transfer_collectives
from shardlib.cost.terms import OUTSIDE_LAYERS, Amount, Compute, Item, LazyTable, Matmul, Transfer
from shardlib.errors import PlanError
from shardlib.graph import ITEMSIZE, Contraction, MatrixUpdate
from shardlib.layout import (
    BATCH_AXES,
    HIDEABLE_AXES,
    STAGE,
    TENSOR,
    TOKEN_AXES,
    Collective,
    MeshShape,
)
from shardlib.machines.topology import Placement, Span, Topology, place
from shardlib.matrix_updates import Axes, busiest, exchanges, update_groups
from shardlib.propagation.colours import Choice
from shardlib.schedules import named
from shardlib.untrusted.data import JsonMapping, construct

# --------------------------------------------------------------------------------------------------
# The estimate of a step: a value whose parts add up to the whole. Totals are derived, not stored,
# so they cannot disagree with the parts.

#: Upper limit of any number of a plan: FLOPs of the largest steps are about 1e24.
MAX_PLAN_NUMBER = 1e40


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one training step on the slowest device; the parts sum to `total`.

    Attributes:
        compute: matmuls, convolutions and memory-bound ops, including rematerialisation.
        exposed: communication not hidden behind compute, over all mesh axes.
        bubble: idle time of pipeline stages.
        optimizer: reading and writing parameters, gradients and optimizer state, and products of
            their matrices.
        overhead: fixed cost of launching the program.
        exchange: synchronisation of islands, amortised per step.
    """

    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes on the fullest device; the parts sum to `peak`.

    Attributes:
        parameters: trained parameters, as stored.
        gradients: gradients while the optimizer runs, and accumulators.
        optimizer: optimizer state, as stored.
        activations: values saved from the forward pass for the backward pass.
        temporaries: the largest set of other values alive at once.
        communication: gathered parameters and buffers of collectives in flight.
        batch: the input batch, results with a value per row, and model state that is not
            floating-point (random streams, integers).
        frozen: stored parameters that are not trained, and other floating-point state of the model.
        exchange: copies and buffers for the synchronisation of islands.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0
    communication: int = 0
    batch: int = 0
    frozen: int = 0
    exchange: int = 0

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Seconds of one microbatch on the slowest pipeline stage, summed over its chunks of layers.

    Attributes:
        forward: forward pass, including preparations for the backward pass.
        backward: backward pass with rematerialisation, without `weights`.
        weights: kernels that compute weight gradients.
        lockstep: True if all stages advance together; otherwise a stage waits only for its
            neighbours.
    """

    forward: float
    backward: float
    weights: float
    lockstep: bool = True

    @property
    def total(self) -> float:
        """Seconds of the microbatch, forward and backward."""
        return self.forward + self.backward + self.weights


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """The parts of a step that are offloaded to host memory or disk, each kind entirely or not at
    all.

    Attributes:
        device_bytes: additional bytes per device without offloading.
        seconds: additional seconds per step with offloading.
    """

    device_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted cost of one training step.

    Attributes:
        seconds: the parts of the step time.
        device_bytes: the parts of the memory.
        collectives: every collective of a step, largest time first.
        tokens: tokens in the global batch (batch x seq; examples if the batch has no sequence).
        model_flops: FLOPs that the step needs without rematerialisation, whole mesh.
        hardware_flops: FLOPs that the step executes, including rematerialisation, whole mesh.
        peak_flops_per_s: peak of all devices of the mesh in the compute dtype, while devices
            outside of the mesh idle.
        corrections: factors applied to seconds and bytes (`shardlib.cost.roofline`).
        stage: seconds of a pipeline stage per microbatch; None without stages.
        offloaded: the offloaded parts; None if there are none.
        interval: measured over predicted step times of published runs; None where there are none.
    """

    seconds: Seconds
    device_bytes: DeviceBytes
    collectives: tuple[Collective, ...] = ()
    tokens: int = 0
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    peak_flops_per_s: float = 1.0
    corrections: tuple[Applied, ...] = ()
    stage: StageSeconds | None = None
    offloaded: Offloaded | None = None
    interval: Interval | None = None

    __repr__ = compact

    @property
    def margin(self) -> float:
        """The margin: memory that the program may need over the predicted peak, at least 1."""
        return next(
            (
                correction.factor
                for correction in self.corrections
                if correction.quantity == "margin"
            ),
            1.0,
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.seconds.total

    @property
    def step_interval(self) -> tuple[float, float] | None:
        """Seconds between which one step lies for most programs (`Interval.share`); None where
        nothing was published.
        """
        interval = self.interval
        return interval and (interval.low * self.step_seconds, interval.high * self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch per second, whole mesh."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: useful FLOP/s over peak (PaLM, arXiv:2204.02311, appendix B)."""
        return (
            self.model_flops / (self.step_seconds * self.peak_flops_per_s)
            if self.step_seconds
            else 0.0
        )

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: executed FLOP/s over peak. Above `mfu` by what is
        rematerialised; below it where kernels skip products of the traced model, such as masked
        blocks of attention and empty rows of experts.
        """
        return (
            self.hardware_flops / (self.step_seconds * self.peak_flops_per_s)
            if self.step_seconds
            else 0.0
        )

    def to_json(self) -> dict[str, object]:
        """The estimate as plain data, with totals."""
        return {
            "step_seconds": self.step_seconds,
            "step_interval": self.step_interval,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "device_bytes": {**asdict(self.device_bytes), "peak": self.device_bytes.peak},
            "collectives": [collective.to_json() for collective in self.collectives],
            "tokens": self.tokens,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "peak_flops_per_s": self.peak_flops_per_s,
            "corrections": [correction.to_json() for correction in self.corrections],
            "stage": asdict(self.stage) if self.stage else None,
            "offloaded": asdict(self.offloaded) if self.offloaded else None,
            "interval": self.interval.to_json() if self.interval else None,
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Estimate:
        """Reads what `to_json` wrote; totals are recomputed.

        Args:
            data: keys as in `to_json`; totals may be missing.

        Returns:
            An equal estimate.

        Raises:
            PlanError: fields are missing or have values of another type; all of them are listed.
        """
        return construct(cls, data, "the estimate", PlanError, least=0.0, most=MAX_PLAN_NUMBER)


# --------------------------------------------------------------------------------------------------
# The collectives of one plan.

Array = np.ndarray

#: Roles of the collectives of parameters and their gradients.
_OF_PARAMETERS = ("gather", "reduce", "scatter")


def collectives(
    work: Sequence[tuple[Iterable[Item], Array]],
    choice: Choice,
    plan: Plans,
    once_per_step: Mapping[tuple[Slot, str], float],
    mesh: MeshShape,
    placement: Placement,
    collective_matmuls: Mapping[Transfer, tuple[float, int, float]] | None = None,
) -> tuple[Collective, ...]:
    """The collectives of one plan on the fullest stage, equal ones added up, the slowest first.

    Args:
        once_per_step: bytes per device, by slot and cause, that are moved once per step.
        collective_matmuls: for each collective that a collective matmul replaces: bytes of a
            message, messages per execution, and seconds per message (`shardlib.cost.variants`).
    """
    meshes, pricer = plan.meshes, plan.pricer
    assert len(meshes) == 1
    roles, sums = _roles(plan), _CollectiveSums(mesh, placement, pricer.topology)
    for item, part in (
        (item, part)
        for items, parts in work
        for item in items
        if (part := float(parts[item.segment]))
    ):
        for term in item.terms(choice):
            if not isinstance(term, Transfer):
                continue
            for slot, size, count in transfer_collectives(
                term, item.segment, meshes.degrees, pricer
            ):
                if slot.role not in roles:
                    continue
                runs = float(count[0]) * part * _executions(term, slot, item.segment, plan)
                if collective_matmuls and term in collective_matmuls:
                    message, each, hop = collective_matmuls[term]
                    key = ("collective-permute", ("tensor",), round(message), term.cause)
                    sums.add(key, each * runs, each * hop * runs)
                else:
                    size_of_each = float(size[0]) / _head_parts(slot, item.segment, plan)
                    sums.add_slot(slot, size_of_each, runs, term.cause)
    for (slot, cause), size in once_per_step.items():
        sums.add_slot(slot, size, 1.0 if size else 0.0, cause)
    return sums.listed()


def _roles(plan: Plans) -> set[str]:
    """The roles of the collectives of one plan."""
    zero = plan.decisions.zero
    return {
        "block",
        "ends",
        *CONTEXT_ROLES[plan.decisions.context],
        "scatter" if plan.profile.scatters(zero) else "reduce",
        *(("gather",) if zero >= 3 else ()),
        *(("stage",) if plan.meshes.stage[0] > 1 else ()),
    }


#: Key of the collectives of a step: kind, mesh axes, bytes of each, cause.
_Key = tuple[str, tuple[str, ...], int, str]


class _CollectiveSums:
    """Collectives of a step, equal ones added up."""

    def __init__(self, mesh: MeshShape, placement: Placement, topology: Topology) -> None:
        self._mesh, self._placement, self._topology = mesh, placement, topology
        self._sums: dict[_Key, tuple[float, float]] = {}

    def add(self, key: _Key, count: float, seconds: float) -> None:
        """Adds `count` collectives that take `seconds` in total."""
        number, before = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = number + count, before + seconds

    def add_slot(self, slot: Slot, size: float, count: float, cause: str) -> None:
        """Adds the collectives of a slot, by each step that they consist of.

        Args:
            size: bytes of each.
        """
        mesh, placement = self._mesh, self._placement
        axes = tuple(axis for axis in mesh if axis in slot.group.axes)
        if not axes or not count:
            return
        spans = spans_of(slot.group, placement)
        parts = (
            steps_of(slot.kind, spans, self._topology)
            if stepwise(slot)
            else (
                CollectiveStep(
                    spans=spans, share=1.0, cost=slot_cost(slot, placement, self._topology)
                ),
            )
        )
        ratio = result_ratio(slot, math.prod(mesh[axis] for axis in axes))
        hops = ratio if slot.role == "ring" else 1
        for part in parts:
            used = tuple(axis for axis in axes if set(part.spans) & set(placement.get(axis, ())))
            key = (slot.kind, used or axes, round(size * part.share / ratio), cause)
            seconds = part.cost.seconds(size * part.share) * count
            self.add(key, count * max(1, hops - 1), seconds)

    def listed(self) -> tuple[Collective, ...]:
        """All collectives, the slowest first."""
        listing = [
            Collective(
                kind=kind,
                axes=axes,
                bytes=size,
                count=math.ceil(count - 1e-9),
                seconds=seconds,
                cause=cause,
            )
            for (kind, axes, size, cause), (count, seconds) in self._sums.items()
        ]
        return tuple(sorted(listing, key=lambda x: (-x.seconds, x.kind, x.axes, x.cause, x.bytes)))


def _executions(term: Transfer, slot: Slot, segment: int, plan: Plans) -> float:
    """Executions per step of a collective that runs once per microbatch."""
    role, micro, stage_runs = slot.role, int(plan.meshes.micro[0]), float(plan.stage_runs[0])
    if role == "stage":
        return stage_runs * plan.decisions.virtual_stages
    spread = _spreads_head(plan)
    in_spread_head = spread and segment == OUTSIDE_LAYERS
    runs = micro if in_spread_head or segment < 0 else stage_runs
    share = float(plan.shares_moved[segment, 0])
    if role not in _OF_PARAMETERS:
        return runs * (share if segment >= 0 else 1.0)
    # In a pipeline in one program, nothing depends on gradients of vectors.
    waits = not spread or len(term.shape) > 1
    per_step = _runs_per_step(slot, in_spread_head, plan) if waits else None
    return (runs if per_step is None else per_step) * share


def _runs_per_step(slot: Slot, in_spread_head: bool, plan: Plans) -> float | None:
    """The number of times that a stage gathers parameters or reduces gradients per step; None: once
    per microbatch.
    """
    zero = plan.decisions.zero
    if in_spread_head:
        return None if plan.head_gathers[0] > 1 else 1.0
    if slot.role != "gather" and plan.profile.reduces_once_per_step(zero):
        return 1.0
    if slot.role == "reduce":
        last = plan.profile.reduces_in_last_microbatch(zero) and not slot.group.of_experts
        return 1.0 if int(plan.meshes.stage[0]) > 1 or last else None
    if plan.decisions.gather == "use":
        return None
    pairs, reductions, _ = plan.weight_gathers
    return float((pairs if slot.role == "gather" else reductions)[0])


def _head_parts(slot: Slot, segment: int, plan: Plans) -> int:
    """Number of parts of an activation if all stages compute embedding and head, each for a
    part.
    """
    separate = segment == OUTSIDE_LAYERS and slot.role not in ("stage", "ends", *_OF_PARAMETERS)
    return int(plan.meshes.stage[0]) if separate and _spreads_head(plan) else 1


def _spreads_head(plan: Plans) -> bool:
    """True if several stages all compute embedding and head."""
    return bool(plan.meshes.stage[0] > 1) and plan.profile.outside_on_all_stages


# --------------------------------------------------------------------------------------------------
# Exposed seconds of gathers, reductions and rings.
#
# XLA for GPUs hides all of them behind all of compute. For TPUs it hides gathers of parameters that
# are stored sharded, and rings; reductions and gathers of updated parameters block (read from
# compiled schedules, `benchmarks/order_by_compiler.py`). A framework profile with overlaps of its
# own hides gathers in the forward pass (a third of compute) or, under ZeRO 3, in both passes, and
# reductions in the backward pass (two thirds), of the last microbatch if it reduces once per step.


def exposed(costs: StepCosts, plans: Plans, compute: Array) -> Array:
    """Exposed seconds per step of gathers of parameters, reductions of gradients and rings of keys
    and values.

    Args:
        compute: seconds of compute of a microbatch, [candidates].
    """
    profile, meshes, zero = plans.profile, plans.meshes, plans.decisions.zero
    overlap = plans.pricer.efficiency.overlap
    micro, scale = meshes.micro, plans.shares_moved
    reduced, gathered = _reduction_seconds(costs, scale, plans), np.zeros(len(meshes))
    if zero:
        gathered = (
            _per_step(costs.collectives.gather, scale, plans.weight_gathers[0], plans)
            if zero >= 3
            else _updated_gather(costs, scale, meshes)
        )
    ring = costs.collectives.ring.sum(0) / meshes.stage * micro * plans.decisions.ring
    if not profile.states_overlap:
        hideable = overlap * compute * micro
        if profile.name == XLA.name and plans.pricer.topology.chip.vendor == "google":
            return _on_tpus(reduced, gathered, ring, hideable, zero)
        least = (1 - plans.pricer.efficiency.hidden) * (reduced + gathered)
        combined = np.maximum(least, reduced + gathered + ring - hideable)
        if not profile.reduces_in_last_microbatch(zero):
            return combined
        # without stages, during the backward pass of the last microbatch
        late = np.maximum(0.0, reduced - overlap * compute) + np.maximum(
            0.0, gathered + ring - overlap * compute * (micro - 1)
        )
        return np.where((meshes.stage > 1) | (micro == 1), combined, np.maximum(least, late))
    gather_overlap, reduce_overlap = (
        overlap if share is None else share
        for share in (
            profile.gather_overlap,
            profile.reduce_overlap
            if zero or profile.replicated_overlap is None
            else profile.replicated_overlap,
        )
    )
    window = compute * micro if zero >= 3 else compute / 3
    backward = compute * (1 if profile.reduces_once_per_step(zero) else micro) * 2 / 3
    separate = np.maximum(0.0, gathered - gather_overlap * window) + np.maximum(
        0.0, reduced - reduce_overlap * backward
    )
    combined = (
        gathered + reduced - max(gather_overlap, reduce_overlap) * compute * micro
    )  # two of them cannot hide at once
    return np.maximum(separate, combined) + np.maximum(0.0, ring - overlap * compute * micro)


def _on_tpus(reduced: Array, gathered: Array, ring: Array, hideable: Array, zero: int) -> Array:
    """Exposed seconds of a program of the TPU compiler: it prefetches parameters that are stored
    sharded, and waits for all reductions and for gathers of updated parameters
    (`benchmarks/order_by_compiler.py`).
    """
    if zero >= 3:
        return reduced + np.maximum(0.0, gathered + ring - hideable)
    return reduced + gathered + np.maximum(0.0, ring - hideable)


def _reduction_seconds(costs: StepCosts, scale: Array, plans: Plans) -> Array:
    """Seconds of reductions of gradients: per microbatch; or once per step in a pipeline without
    ZeRO 2 and 3, or if the framework does so, except for those of experts.
    """
    meshes, profile, zero = plans.meshes, plans.profile, plans.decisions.zero
    seconds = costs.collectives.scatter if profile.scatters(zero) else costs.collectives.reduce
    once = np.ones(len(meshes))
    if profile.reduces_once_per_step(zero):
        return _per_step(seconds, scale, once, plans)
    if zero >= 2:
        return _per_step(seconds, scale, plans.weight_gathers[1], plans)
    if profile.reduces_in_last_microbatch(zero):
        return _per_step(seconds, scale, once, plans) + np.where(
            meshes.stage > 1, 0.0, stage_part(costs.collectives.routed, scale) * (meshes.micro - 1)
        )
    return _per_step(seconds, scale, np.where(meshes.stage > 1, 1, meshes.micro), plans)


def _per_step(seconds: Array, scale: Array, times: Array, plans: Plans) -> Array:
    """Seconds per step of transfers repeated `times`; outside of the layers of a pipeline in one
    program as often as `head_gathers` says.
    """
    moved = seconds * scale
    total = moved.sum(0) * times
    if not plans.profile.outside_on_all_stages:
        return total
    outside = moved[OUTSIDE_LAYERS] * (plans.head_gathers - times)
    return total + np.where(plans.meshes.stage > 1, outside, 0.0)


def interleaving_seconds(costs: StepCosts, plans: Plans) -> Array:
    """Seconds per step in which layers are redistributed to interleaved stages, which have several
    chunks each, and their gradients back.
    """
    meshes, links, zero = plans.meshes, plans.meshes.links, plans.decisions.zero
    slots = INTERLEAVING[np.minimum(plans.decisions.virtual_stages % meshes.stage, 1)]
    candidates, total = np.arange(len(meshes)), np.zeros(len(meshes))
    for stored_bytes in (
        costs.stored.parameters_sharded + costs.stored.frozen_sharded
        if zero >= 3
        else costs.stored.parameters + costs.stored.frozen,
        costs.stored.accumulated_sharded if zero >= 2 else costs.stored.accumulated,
    ):
        size = plans.interleaved_bytes(stored_bytes)
        cost = links.latency[slots, candidates] + size * links.per_byte[slots, candidates]
        total += np.where(size > 0, cost, 0.0)
    return total


#: Indices of the slots that redistribute layers if their chunks divide, and if not.
INTERLEAVING = np.array(
    [SLOTS.index(Slot("regroup", axis_group(STAGE), kind)) for kind in ("all-to-all", "all-gather")]
)


def _updated_gather(costs: StepCosts, scale: Array, meshes: Meshes) -> Array:
    """Seconds of the gather of updated parameters after the optimizer (ZeRO 1, 2)."""
    experts = stage_part(costs.stored.experts, scale)
    dense = stage_part(costs.stored.parameters, scale) - experts
    links, total = meshes.links, np.zeros(len(meshes))
    for group, size in ((storage_group(), dense), (storage_group(experts=True), experts)):
        slot = SLOTS.index(Slot("gather", group, "all-gather"))
        total += np.where(size > 0, links.latency[slot] + size * links.per_byte[slot], 0.0)
    return total


# --------------------------------------------------------------------------------------------------
# Bytes per device: stored between steps, and allocated by a step at its peak.


def stored_bytes(costs: StepCosts, plans: Plans) -> tuple[Array, Array, Array, Array]:
    """Bytes of trained and of frozen parameters, of gradients and of optimizer state, as stored;
    plus unsharded parameters and gradients if a stage gathers and reduces once per step, and slices
    of stacks that are not stored as stages use them.
    """
    stored, zero, scale = costs.stored, plans.decisions.zero, plans.shares_held
    staged = plans.meshes.stage > 1
    hoisted = traits(plans.pricer.topology.chip.vendor).hoists_casts
    kept = plans.shares_stored + plans.shares_sliced * (
        plans.model.compute_dtype_ratio if hoisted else 1.0
    )
    frozen = stage_part(stored.frozen_sharded if zero >= 3 else stored.frozen, kept)
    parameters = stage_part(stored.parameters_sharded if zero >= 3 else stored.parameters, kept)
    gradients = stage_part(stored.accumulated_sharded if zero >= 2 else stored.accumulated, scale)
    gathered_share = (
        (1.0 if plans.profile.stage_gathers == "step" else plans.weight_gathers[2])
        if zero >= 3
        else 0.0
    )
    if gathered_share:
        ratio = plans.model.compute_dtype_ratio
        gathered = stage_part(stored.parameters, scale) * ratio * gathered_share
        parameters = parameters + np.where(staged, gathered, 0.0)
        gradients = gradients + np.where(
            staged, stage_part(stored.accumulated, scale) * gathered_share, 0.0
        )
    return (
        parameters,
        frozen,
        gradients,
        stage_part(stored.state_sharded if zero >= 1 else stored.state, plans.shares_stored),
    )


def least_bytes(costs: StepCosts, plans: Plans) -> tuple[Array, Array, Array]:
    """Lower bounds of the bytes per device at the end of the forward pass: of stored arrays without
    optimizer state, of that state, and of the saved layers of each layer group.

    Returns:
        Arrays [candidates], [candidates] and [layer groups, candidates].
    """
    model, meshes, layers = plans.model, plans.meshes, len(plans.model.layer_counts)
    parameters, frozen, gradients, state = stored_bytes(costs, plans)
    batch = model.batch_bytes / meshes.ways(TOKEN_AXES) + model.state_bytes
    return (
        parameters + frozen + batch + _buffered(gradients, plans),
        state,
        costs.stacks[:layers] * plans.shares[:layers] * plans.in_flight,
    )


def _buffered(gradients: Array, plans: Plans) -> Array:
    """Bytes of gradients that have a buffer of their own: all, or those of several microbatches."""
    if plans.profile.gradient_buffer:
        return gradients
    return np.where(plans.meshes.micro > 1, gradients * (1.0 + _last_apart(plans)), 0.0)


def adds_in_place(profile: FrameworkProfile, stages: Array, micro: Array) -> Array:
    """True where backward loops add the gradients of layers to the sums of the microbatches, beside
    which no stack of them lives (`shardlib.tracing.rewriting.summing_gradient`).
    """
    in_one_program = (stages > 1) & (profile.pipeline == "lockstep")
    return (in_one_program | ((stages == 1) & (micro > 1))) & (profile.name == XLA.name)


def _last_apart(plans: Plans) -> Array:
    """True where the last of several microbatches reads the sums of the others and makes the
    gradients of all beside them, which are reduced as it goes.
    """
    meshes = plans.meshes
    apart = (meshes.micro > 1) & (meshes.stage == 1) & (meshes.ways(BATCH_AXES) > 1)
    return apart & plans.profile.reduces_in_last_microbatch(plans.decisions.zero)


@dataclass(frozen=True, kw_only=True)
class _LiveBytes:
    """Bytes at one point of a step on one stage, arrays [candidates].

    Attributes:
        saved: values saved by the forward pass, and copies of parameters.
        temporaries: results that are read and freed.
        gradients: live gradients, if they have no buffer of their own.
        gathered: parameters in use, if they are stored sharded (ZeRO 3).
    """

    saved: Array
    temporaries: Array
    gradients: Array
    gathered: Array

    @property
    def total(self) -> Array:
        return self.saved + self.temporaries + self.gradients + self.gathered


@dataclass(frozen=True, kw_only=True)
class _StageShares:
    """The quantities of each segment on a stage that may be the fullest, arrays [segments,
    candidates].

    Attributes:
        once: share of values of which one microbatch is live at a time.
        in_flight: share of values of every microbatch in flight, times their number.
        stored: share of parameters and gradients.
    """

    once: Array
    in_flight: Array
    stored: Array


def bytes_by_part(
    costs: StepCosts, gradients: Array, plans: Plans
) -> tuple[dict[str, Array], Array]:
    """Bytes allocated by a step, by part; and those of the stacks that the forward pass saves, less
    two layers, which offloading could move.

    Args:
        gradients: bytes of gradients accumulated over microbatches, array [candidates].
    """
    stages, meshes, scale = _fullest_stages(plans), plans.meshes, plans.shares
    points = [
        _memory_at(costs, gradients, point, stage, plans)
        for stage in stages
        for point in costs.points
    ]
    peak = _fullest_point(points, meshes)
    in_flight, stacks = stages[0].in_flight, np.zeros(len(meshes))
    for point in costs.points:
        movable = (
            point.saved[k] * in_flight[k] * np.maximum(0.0, 1 - 2 / (n * scale[k]))
            for k, n in enumerate(plans.model.layer_counts)
        )
        stacks = np.maximum(stacks, sum(movable, np.zeros(len(meshes))))
    buffer = costs.buffer if plans.decisions.context == "all-gather" else 0.0
    memory = {
        "gradients": peak.gradients + _buffered(gradients, plans),
        "activations": peak.saved,
        "temporaries": peak.temporaries,
        "communication": peak.gathered + buffer,
    }
    return memory, np.minimum(stacks, peak.saved)


#: Beginnings of names of the chips of which the compiler keeps values of the part "deferred".
_DEFERRING: tuple[str, ...] = ("h", "gh", "b", "gb", "v5e")


def defers_weight_gradients(chip: str) -> bool:
    """True if the program of a chip has values of the part "deferred", which its schedule keeps
    for weight gradients.

    From Hopper on, XLA for GPUs hides latencies by default (openxla/xla
    `xla/service/gpu/gpu_hlo_schedule.cc`), and nothing but the end of the step waits for a weight
    gradient: those of a loop come at the end of an iteration, that of the head after the backward
    loop, until when the gradient of the logits lives. For A100 it schedules by memory. For TPU v5e
    it computes the weight gradient of the head before the gradient of its input, for v5p and v6e
    after it (programs of `benchmarks/compiled_cases.json`).
    """
    return chip.startswith(_DEFERRING)


@cache
def _jaxlib() -> tuple[int, ...]:
    return tuple(map(int, version("jaxlib").split(".")[:2]))


def zeroes_early(chip: str) -> bool:
    """True if stacks of gradients are in memory, as zeros, before the gradient of the head is
    computed, in programs with collectives of weights (ZeRO 1 to 3): seen in the buffers of XLA for
    GPUs from Hopper on, in that of JAX 0.10.2; that of 0.12 writes them just before the loop.
    """
    return chip.startswith(_DEFERRING[:-1]) and _jaxlib() < (0, 12)


def _memory_at(
    costs: StepCosts, gradients: Array, point: MemoryPoint, stage: _StageShares, plans: Plans
) -> _LiveBytes:
    """The memory of a stage at a point where it may peak; `gradients` as in `bytes_by_part`."""
    zero, meshes, stored = plans.decisions.zero, plans.meshes, stage.stored
    combined = plans.profile.collected == "together"
    saved = stage_part(point.saved, stage.in_flight) + stage_part(
        point.copy_sharded if zero >= 3 else point.copy, stored
    )
    cast = stage_part(point.cast_sharded if zero >= 3 else point.cast, stored)
    # weights that are gathered once per step are cast as they are gathered
    saved = saved + np.where(meshes.stage > 1, 1.0 - plans.weight_gathers[2], 1.0) * cast
    unsharded = combined or zero < 2
    beside = stored.copy()
    layers = len(plans.model.layer_counts)
    beside[:layers] *= ~adds_in_place(plans.profile, meshes.stage, meshes.micro)
    added = stage_part(point.added if unsharded else point.added_sharded, stored)
    alive = (
        np.zeros(len(meshes))
        if plans.profile.gradient_buffer
        else stage_part(point.gradient if unsharded else point.gradient_sharded, beside)
        + np.where((meshes.micro > 1) & (meshes.stage == 1), 0.0, added)
    )
    if zero >= 1 and zeroes_early(plans.pricer.topology.chip.name):
        alive = alive + stage_part(point.zeroed if unsharded else point.zeroed_sharded, beside)
    alive = np.where(_last_apart(plans), np.maximum(0.0, alive - gradients), alive)
    if zero < 3:
        gathered = np.zeros(len(meshes))
    elif combined:
        gathered = np.maximum(
            0.0, stage_part(costs.stored.parameters + costs.stored.frozen, stored) - alive
        )
    else:
        gathered = stage_part(point.gathered, stored)
        if plans.in_rounds and not combined:
            gathered = np.maximum(gathered, _chunk_bytes(costs, plans))
    defers = defers_weight_gradients(plans.pricer.topology.chip.name)
    deferred = point.deferred if defers else point.peeled if zero >= 3 else 0.0
    if defers and zero >= 3:
        deferred = deferred + point.recomputed
    if zero < 2 and not defers:
        deferred = deferred + point.undeferred
    return _LiveBytes(
        saved=saved,
        temporaries=stage_part(point.temporary + deferred, stage.once),
        gradients=alive,
        gathered=gathered,
    )


def _chunk_bytes(costs: StepCosts, plans: Plans) -> Array:
    """Bytes of the weights of one chunk of layers in the dtype of compute: stages of one program
    slice those in use from the gathered chunks (`shardlib.lowering.pipeline.stage`).
    """
    layers = len(plans.model.layer_counts)
    weights = (costs.stored.parameters[:layers] * plans.shares[:layers]).sum(0)
    held = weights * plans.model.compute_dtype_ratio / plans.chunks
    return np.where(plans.meshes.stage > 1, held, 0.0)


def _fullest_point(points: list[_LiveBytes], meshes: Meshes) -> _LiveBytes:
    """The point with the most bytes, by candidate."""
    if not points:
        zeros = np.zeros(len(meshes))
        return _LiveBytes(saved=zeros, temporaries=zeros, gradients=zeros, gathered=zeros)
    index = np.argmax(np.stack([point.total for point in points]), axis=0)
    return _LiveBytes(
        **{
            field.name: np.choose(index, [getattr(point, field.name) for point in points])
            for field in fields(_LiveBytes)
        }
    )


def _fullest_stages(plans: Plans) -> list[_StageShares]:
    """Stages whose memory may be the fullest.

    If embedding and head are spread, all stages are equal. Otherwise the first has the most
    microbatches in flight, and the last has the logits.
    """
    scale = plans.shares
    layers, first = len(scale) - 2, scale.copy()
    first[:layers] *= plans.in_flight
    if plans.profile.embedding_and_head == "spread":
        return [_StageShares(once=scale, in_flight=first, stored=plans.shares_held)]
    with_head, without = scale.copy(), scale.copy()
    with_head[OUTSIDE_LAYERS] = 1.0
    without[OUTSIDE_LAYERS] = np.where(plans.meshes.stage > 1, 0.0, 1.0)
    first[OUTSIDE_LAYERS] = without[OUTSIDE_LAYERS]
    last = with_head.copy()
    last[:layers] *= named(plans.decisions.schedule).held_by_last(plans.pipelines)
    return [
        _StageShares(once=without, in_flight=first, stored=without),
        _StageShares(once=with_head, in_flight=last, stored=with_head),
    ]


def buffer_sets(plans: Plans) -> Array:
    """Sets of buffers for the values of a microbatch, in a program without stages.

    XLA's compiler for CPUs shares a buffer between two loops only if one depends on the other, and
    stacks that a loop fills depend on nothing. So the last microbatch, which reduces gradients, has
    buffers separate from those of the loop over the others: for a transformer of four layers on two
    devices, 1.8 to 2.1 times as many bytes as one microbatch (JAX 0.10.2).
    """
    vendor = plans.pricer.topology.chip.vendor
    return np.where(_last_apart(plans) & (vendor == "cpu"), 2.0, 1.0)


# --------------------------------------------------------------------------------------------------
# The price of a step with the collectives of the compiled program.
#
# The compiler says which collectives a program runs (and, for TPUs, how long its kernels take); the
# cost model says what a collective costs on the links. With c the seconds of one collective,
# latency + bytes x seconds per byte (`cost/collectives.py`):
#
#     hidden   = sum of count x c over collectives along data or fsdp, alone or with tensor:
#                gathers and reductions of parameters
#     blocking = sum of count x c over all others: compute waits for them
#     step     = kernels + blocking + max(0, hidden - overlap x kernels) + bubble + optimizer
#                + overhead
#
# On TPUs only gathers of parameters that are stored sharded hide (ZeRO 3); reductions and gathers
# of updated parameters block, too.
#
# This is the rule of `exposed` with three differences, because a compiled program
# does not distinguish them: small sums of activations along data and fsdp count as hidden here,
# reductions of gradients along tensor alone as blocking, and the compiler's kernel seconds include
# the optimizer update, so that `optimizer` is 0 then. If the compiler estimates no time (GPU and
# CPU), kernels are the predicted ones. A collective whose groups are not a product of mesh axes is
# priced as one over the whole mesh.


def collective_seconds(
    kind: str,
    axes: Sequence[str],
    members: int,
    size: float,
    mesh: MeshShape,
    topology: Topology,
    order: tuple[str, ...] = (),
) -> float:
    """Seconds of one collective of a compiled program.

    Args:
        size: bytes of the result per device.
        order: order of the mesh axes on the links, as in a plan; by default the usual one.
    """
    placed = place(mesh, topology, order)
    assert placed is not None, f"{mesh} does not fit {topology.name}"
    chip = topology.chip
    figures = efficiency_of(chip.name, chip.vendor, XLA.name, dict(topology.efficiency))
    spans = tuple(span for axis in axes or tuple(mesh) for span in placed.get(axis, ()))
    degree = mesh.ways(tuple(axes)) if axes else mesh.devices
    partial = kind != "collective-permute" and members != degree
    group = _part(spans, members) if partial else spans
    return collective_cost(kind, group, with_reached_rates(topology, figures)).seconds(size)


def _part(spans: tuple[Span, ...], members: int) -> tuple[Span, ...]:
    """The innermost spans with a group of `members` devices; all spans if there are no such
    spans.
    """
    for count in range(1, len(spans) + 1):
        for subset in itertools.combinations(reversed(spans), count):
            if math.prod(span.ways for span in subset) == members:
                return subset
    divisible = next((span for span in reversed(spans) if span.ways % members == 0), None)
    return (replace(divisible, ways=members),) if divisible else spans


def reprice(
    predicted: Seconds, priced: Iterable[Collective], kernels: float, vendor: str, *, zero: int
) -> Seconds:
    """The step time with the compiler's figures, by the formula above.

    Args:
        priced: the compiled collectives with the seconds of all their executions.
        kernels: the compiler's seconds of all kernels; 0 if it estimates none.
    """
    hidden = blocking = 0.0
    for collective in priced:
        hides = vendor != "google" or (zero >= 3 and collective.kind == "all-gather")
        if hides and not set(HIDEABLE_AXES).isdisjoint(collective.axes):
            hidden += collective.seconds
        else:
            blocking += collective.seconds
    compute = kernels or predicted.compute
    exposed = blocking + max(0.0, hidden - vendor_efficiency(vendor).overlap * compute)
    return replace(
        predicted,
        compute=compute,
        exposed=exposed,
        optimizer=0.0 if kernels else predicted.optimizer,
    )


# --------------------------------------------------------------------------------------------------
# Seconds of a step: busy time and waiting time of stages.
#
# With m microbatches and S stages, a stage is busy for `tick` seconds with one microbatch, forward
# and backward: its layers and its part of embedding and head.
#
#     step = m x (tick + ends) + groups x waiting(schedule) + exposed parameters and gradients
#            + optimizer + overhead
#
# "ends" are the collectives of all stages when a microbatch enters and leaves a pipeline in one
# program. "compute" and "exposed" are averages over the stages; "bubble" is the rest: waiting, and
# stages with less work than the slowest.


def least_seconds(costs: StepCosts, plans: Plans) -> Array:
    """Seconds of a step with all gathers of parameters and reductions of gradients hidden, which
    does not depend on the ZeRO stage.
    """
    stages, decisions, tick = plans.meshes.stage, plans.decisions, microbatch_seconds(costs, plans)
    deferrable = costs.kernels.weight_gradients / stages
    waits = named(decisions.schedule).waiting(plans.pipelines, tick, deferrable)
    busy = plans.meshes.micro * (tick + costs.collectives.ends)
    return busy + np.where(stages > 1, decisions.accumulation * waits, 0.0)


def _stage_sends(costs: StepCosts, plans: Plans) -> Array:
    """Exposed seconds of sending a microbatch from stage to stage and its cotangents back."""
    return np.where(plans.meshes.stage > 1, costs.collectives.stage_sends * plans.chunks, 0.0) * (
        1 - plans.profile.send_overlap
    )


def microbatch_seconds(costs: StepCosts, plans: Plans) -> Array:
    """Seconds of one microbatch on the slowest stage, forward and backward, without the collectives
    when it enters and leaves: all stages run those together, so that they do not add to the bubble.
    """
    key = plans.decisions.context, plans.decisions.virtual_stages
    if key not in costs.microbatch_seconds:
        busy = costs.kernels.compute + costs.collectives.block
        busy = busy + costs.context_seconds(plans.decisions.context)
        both = np.stack([busy, costs.kernels.host], axis=1)
        costs.microbatch_seconds[key] = _slowest_stage(both, plans).max(0) + _stage_sends(
            costs, plans
        )
    return costs.microbatch_seconds[key]


def _slowest_stage(seconds: Array, plans: Plans) -> Array:
    """Seconds of the slowest stage in a microbatch.

    Args:
        seconds: of all layers of each layer group, and of embedding and head, [segments, ...,
            candidates].
    """
    model, stages, virtual = plans.model, plans.meshes.stage, plans.chunks
    counts, outside = model.layer_counts, seconds[OUTSIDE_LAYERS]
    layers = [seconds[k] / count for k, count in enumerate(counts)]
    if plans.profile.embedding_and_head == "spread":
        return virtual * slowest_chunk(layers, counts, stages * virtual) + outside / stages
    tick = slowest_stage(layers, counts, outside, stages, virtual)
    if plans.profile.balance == "layers" or len(layers) != 1:
        return tick
    most, last = partition_by_work(counts[0], model.head_work, stages)
    by_work = np.maximum(most * layers[0], last * layers[0] + outside)
    return np.where((stages > 1) & (virtual == 1), by_work, tick)


def _starved(costs: StepCosts, busy: Array, meshes: Meshes) -> Array:
    """Seconds per microbatch that a stage waits for the host to launch kernels, if launching takes
    longer than running them.
    """
    return np.maximum(0.0, costs.kernels.host.sum(0) - busy.sum(0)) / meshes.stage


def seconds_by_part(costs: StepCosts, plans: Plans) -> tuple[dict[str, Array], Array]:
    """Seconds of compute, exposed communication and bubble; and FLOPs."""
    stages, micro = plans.meshes.stage, plans.meshes.micro
    block = costs.collectives.block + costs.context_seconds(plans.decisions.context)
    compute = costs.kernels.compute.sum(0) / stages
    blocked = block.sum(0) / stages + _stage_sends(costs, plans) + costs.collectives.ends
    starved = _starved(costs, costs.kernels.compute + block, plans.meshes)
    bubble = np.where(
        stages > 1, least_seconds(costs, plans) - micro * (compute + blocked + starved), 0.0
    )
    waited = blocked * micro + exposed(costs, plans, compute) + interleaving_seconds(costs, plans)
    return {
        "compute": compute * micro,
        "exposed": waited,
        "bubble": np.maximum(bubble, 0.0),
        "overhead": starved * micro,
    }, costs.kernels.flops / stages * micro


# --------------------------------------------------------------------------------------------------
# Seconds of an optimizer's matrix updates, by layout (`shardlib.matrix_updates`).
#
#     seconds = products of the device that has the most + collectives of shards
#
# Groups are priced by what their stacks and updates are, as if tensor and the storage axes sharded
# all of them; the listed collectives of a plan are those of its layouts.


def matrix_seconds(plans: Plans) -> Array:
    """Seconds per step of the matrix updates; 0 where the partitioner shards the products, whose
    collectives are not predicted.
    """
    total, layout = np.zeros(len(plans)), plans.decisions.matrix_layout
    if layout == "sharded" or not plans.model.matrices:
        return total
    meshes, sharded = plans.meshes, plans.decisions.zero >= 1
    device_groups: dict[Axes, DeviceGroup] = {
        ("stages",): axis_group(STAGE),
        ("replicas",): replica_group() if sharded else token_group(),
        ("shards",): storage_group(tensor=True) if sharded else axis_group(TENSOR),
        ("replicas", "shards"): token_group(tensor=True),
    }
    axes = ("stages", "replicas", "shards")
    ways = np.array([meshes.ways(device_groups[axis,].axes) for axis in axes])
    for sizes in np.unique(ways, axis=1).T:
        chosen = (ways == sizes[:, None]).all(axis=0)
        priced = _on_devices(plans, dict(zip(axes, map(int, sizes), strict=True)), layout)
        total[chosen] = priced[0]
        for (kind, group), size in priced[1].items():
            slot = SLOT_INDEX[Slot("update", device_groups[group], kind)]
            cost = meshes.links.latency[slot] + size * meshes.links.per_byte[slot]
            total[chosen] += cost[chosen]
    return total


def _on_devices(
    plans: Plans, sizes: Mapping[str, int], layout: str
) -> tuple[float, dict[tuple[str, Axes], float]]:
    """Seconds of the products of matrix updates on devices that hold stages, replicas and shards,
    and bytes of collectives by kind and axes.
    """
    updates, specs, seconds = list[MatrixUpdate](), dict[str, list[Axes]](), dict[str, float]()
    for update, stacked in plans.model.matrices:
        number = update.shape[0] + (-update.shape[0] % sizes["stages"] if stacked else 0)
        products = tuple(replace(p, flops=p.flops * number) for p in update.contractions)
        updates.append(replace(update, shape=(number, 1), contractions=products))
        specs[update.path] = [("stages",) if stacked else (), ("shards",)]
        seconds[update.path] = sum(
            _product_seconds(product, plans.pricer) for product in update.contractions
        )
    groups = update_groups(updates, specs, sizes, layout)
    moved: dict[tuple[str, Axes], float] = defaultdict(float)
    for kind, axes, size in exchanges(groups):
        inside = tuple(axis for axis in axes if axis != "stages")
        moved[kind, inside or axes] += size
    return busiest(groups, [seconds[group.updates[0].path] for group in groups]), moved


def _product_seconds(product: Contraction, pricer: Pricer) -> float:
    """Seconds of the executions of one product of one matrix."""
    size = ITEMSIZE.get(product.dtype, 4)
    sides = [Amount(total=side, batch=False, tensor=False) for side in product.sides]
    traffic = size * sum(np.prod(product.sides) / side for side in product.sides) if sides else 0.0
    kernel = Compute(
        flops=Amount(total=product.flops, batch=False, tensor=False),
        dtype=product.dtype,
        traffic=(Amount(total=float(traffic), batch=False, tensor=False),),
        trips=1,
        matmul=Matmul(rows=sides[0], columns=sides[1], depth=sides[2]) if sides else None,
        category="matmul" if sides else "",
    )
    seconds = kernel_seconds(
        kernel, lambda amount: np.array([amount.total]), pricer.topology.chip, pricer.efficiency
    )
    return float(seconds[0]) * product.trips


# --------------------------------------------------------------------------------------------------
# Priced candidates: the parts of the step time and of the memory, as arrays.
#
# A candidate is a mesh with its placement and a number of microbatches. `combine` does everything
# that is not a sum: hiding communication behind compute, pipeline bubbles, the maximum over several
# memory points.

#: Smallest buffer that the host's allocator returns to the system when it is freed, so that it is
#: mapped again in every step: glibc keeps smaller ones (mallopt(3), M_MMAP_THRESHOLD: at most 32
#: MiB where longs have 8 bytes).
UNMAP_THRESHOLD = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Totals(LazyTable):
    """Priced candidates, as arrays; the names are those of `Seconds` and `DeviceBytes`.

    Attributes:
        seconds: parts of the step time per candidate.
        device_bytes: parts of the memory per candidate.
        flops: executed FLOPs per device and step, averaged over the stages.
        stacks: bytes of the saved activations of layers, less two layers: the part that offloading
            can move.
        in_flight: microbatches whose activations are live at once.
        largest_state: bytes of optimizer state of the largest parameter.
    """

    seconds: dict[str, Array]
    device_bytes: dict[str, Array]
    flops: Array
    stacks: Array
    in_flight: Array
    largest_state: Array

    @cached_property
    def step_seconds(self) -> Array:
        """Seconds of a step per candidate."""
        return sum(self.seconds.values(), np.zeros_like(self.flops))

    @cached_property
    def peak_bytes(self) -> Array:
        """Bytes per device per candidate."""
        return sum(self.device_bytes.values(), np.zeros_like(self.flops))


def combine(costs: StepCosts, plans: Plans) -> Totals:
    """Combines quantities into the parts of time and memory."""
    meshes, model, pricer = plans.meshes, plans.model, plans.pricer
    profile, zero = plans.profile, plans.decisions.zero
    parameters, frozen, gradients, state = stored_bytes(costs, plans)
    seconds, flops = seconds_by_part(costs, plans)
    memory, stacks = bytes_by_part(costs, gradients, plans)
    sets = buffer_sets(plans)
    memory |= {name: memory[name] * sets for name in ("activations", "temporaries")}
    memory |= {
        "parameters": parameters,
        "frozen": frozen,
        "optimizer": state,
        "batch": model.batch_bytes / meshes.ways(TOKEN_AXES) + model.state_bytes,
    }
    updated = stage_part(
        costs.stored.parameters_sharded if zero >= 1 else costs.stored.parameters,
        plans.shares_stored,
    )
    update = (3 * updated + 2 * state) / (
        pricer.topology.chip.hbm_bytes_per_s * pricer.efficiency.update_share
    ) + matrix_seconds(plans)
    seconds["overhead"] = (
        seconds["overhead"]
        + pricer.efficiency.step_s
        + pricer.efficiency.microbatch_s
        * (meshes.micro + plans.decisions.accumulation * (meshes.stage - 1))
        + pricer.efficiency.fresh * freshly_mapped(memory) / pricer.topology.chip.hbm_bytes_per_s
    )
    memory["temporaries"] = (
        memory["temporaries"]
        + (profile.fragmentation - 1) * sum(memory.values())
        + profile.runtime_bytes
    )
    return Totals(
        seconds={**seconds, "optimizer": update},
        device_bytes=memory,
        flops=flops,
        stacks=stacks,
        in_flight=plans.in_flight,
        largest_state=model.largest_share * state,
    )


def freshly_mapped(memory: Mapping[str, Array]) -> Array:
    """Bytes per device that a step touches first: all except those that stay between steps, if they
    are so many that the allocator returns them to the system. The prediction may be half of what a
    CPU program allocates (20 MiB for 34, an MLP of three layers), so bytes count partially from
    half of `UNMAP_THRESHOLD` on, and fully from `UNMAP_THRESHOLD` on.

    Args:
        memory: bytes per device by part, by candidate.
    """
    stored_parts = ("parameters", "frozen", "optimizer", "batch")
    touched = sum((size for part, size in memory.items() if part not in stored_parts), np.zeros(1))
    return touched * np.clip(2 * touched / UNMAP_THRESHOLD - 1, 0.0, 1.0)


# --------------------------------------------------------------------------------------------------
# The estimate of one candidate, from the arrays of all.


def estimate(
    totals: Totals,
    index: int,
    *,
    listed: tuple[Collective, ...],
    tokens: int,
    model_flops: float,
    mesh: MeshShape,
    peak_flops_per_s: float,
) -> Estimate:
    """The estimate of one priced candidate."""
    return Estimate(
        seconds=Seconds(**{name: float(values[index]) for name, values in totals.seconds.items()}),
        device_bytes=DeviceBytes(
            **{name: math.ceil(values[index]) for name, values in totals.device_bytes.items()}
        ),
        collectives=listed,
        tokens=tokens,
        model_flops=model_flops,
        hardware_flops=float(totals.flops[index]) * mesh.devices,
        peak_flops_per_s=peak_flops_per_s * mesh.devices,
    )
