"""Seconds and bytes of candidate plans, as arrays: compute, exposed collectives, pipeline bubbles,
optimizer, memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from shardlib.collective import Collective
from shardlib.cost.collectives import collective_cost
from shardlib.cost.communication import dealt_out, exposed
from shardlib.cost.estimate import DeviceBytes, Estimate, Seconds
from shardlib.cost.framework import XLA, FrameworkProfile, Knobs
from shardlib.cost.roofline import efficiency
from shardlib.cost.stages import (
    Candidates,
    Model,
    Sums,
    bottleneck,
    chunks_of,
    cut_by_work,
    in_the_last,
    on_stage,
    passes_over_weights,
    pipelines_of,
    shares_at_rest,
    shares_moved,
    shares_of,
    slowest,
)
from shardlib.cost.tables import Point, Pricer
from shardlib.cost.terms import OUTSIDE_LAYERS, ArrayTable
from shardlib.layout import BATCH_AXES, HIDEABLE_AXES, TOKEN_AXES, MeshShape
from shardlib.machines.topology import Span, Topology, place
from shardlib.schedules import named

# --------------------------------------------------------------------------------------------------
# Bytes per device: stored between steps, and allocated by a step at its peak.

Array = np.ndarray

#: Heap of a pipeline in one program over its live bytes, on GPUs: XLA copies stacks of saved
#: activations and sums of gradients between the loops of a step, and buffers of different sizes
#: cannot reuse each other's memory. For Llama 3 405B with 2 stages 1.11 (126 layers, one per
#: chunk), 1.25 (24 layers) and 1.40 (126 layers, three per chunk), by the compiler's own live
#: ranges (JAX 0.10.2).
PIPELINE_ON_GPUS = 1.25


def stored_bytes(
    s: Sums, scale: Array, knobs: Knobs, model: Model, profile: FrameworkProfile, c: Candidates
) -> tuple[Array, Array, Array, Array]:
    """Bytes of trained and of frozen parameters, of gradients and of optimizer state, as stored;
    plus unsharded parameters and gradients if a stage gathers and reduces once per step.

    Args:
        scale: share of each segment on the fullest stage, [segments, candidates].
    """
    frozen = on_stage(s.stored.frozen_cut if knobs.zero >= 3 else s.stored.frozen, scale)
    parameters, gradients = (
        on_stage(s.stored.parameters_cut if knobs.zero >= 3 else s.stored.parameters, scale),
        on_stage(s.stored.kept_cut if knobs.zero >= 2 else s.stored.kept, scale),
    )
    gathered_share = (
        (1.0 if profile.stage_gathers == "step" else passes_over_weights(knobs, c)[2])
        if knobs.zero >= 3
        else 0.0
    )
    if gathered_share:
        parameters = parameters + np.where(
            c.stage > 1, on_stage(s.stored.parameters, scale) * model.working * gathered_share, 0.0
        )
        gradients = gradients + np.where(
            c.stage > 1, on_stage(s.stored.kept, scale) * gathered_share, 0.0
        )
    return (
        parameters,
        frozen,
        gradients,
        on_stage(s.stored.state_cut if knobs.zero >= 1 else s.stored.state, scale),
    )


def least_bytes(
    s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> tuple[Array, Array, Array]:
    """Lower bounds of the bytes per device at the end of the forward pass: of stored arrays without
    optimizer state, of that state, and of each class's saved layers.

    Returns:
        Arrays [candidates], [candidates] and [classes, candidates].
    """
    profile = pricer.profile
    scale, layers = shares_of(knobs, model, c, profile), len(model.counts)
    in_flight = named(knobs.schedule).in_flight(pipelines_of(knobs, c, profile))
    parameters, frozen, gradients, state = stored_bytes(
        s, shares_at_rest(knobs, model, c, profile), knobs, model, profile, c
    )
    batch = model.batch_bytes / c.ways(TOKEN_AXES) + model.state_bytes
    return (
        parameters
        + frozen
        + batch
        + (gradients if profile.gradient_buffer else np.where(c.micro > 1, gradients, 0.0)),
        state,
        s.stacks[:layers] * scale[:layers] * in_flight,
    )


@dataclass(frozen=True, kw_only=True)
class _Occupied:
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
class _Stage:
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
    s: Sums,
    gradients: Array,
    scale: Array,
    in_flight: Array,
    knobs: Knobs,
    model: Model,
    c: Candidates,
    profile: FrameworkProfile,
) -> tuple[dict[str, Array], Array]:
    """Bytes allocated by a step, by part; and those of the stacks that the forward pass saves, less
    two layers, which offloading could move.

    Args:
        gradients: bytes of gradients accumulated over microbatches, array [candidates].
        scale: share of each segment on the fullest stage, array [segments, candidates].
    """
    stages = _stages(scale, in_flight, knobs, c, profile)
    peak = _fullest(
        [_at(s, point, on, knobs, c, profile) for on in stages for point in s.points], c
    )
    flying, stacks = stages[0].in_flight, np.zeros(len(c))
    for point in s.points:
        movable = (
            point.saved[k] * flying[k] * np.maximum(0.0, 1 - 2 / (n * scale[k]))
            for k, n in enumerate(model.counts)
        )
        stacks = np.maximum(stacks, sum(movable, np.zeros(len(c))))
    buffered = gradients if profile.gradient_buffer else np.where(c.micro > 1, gradients, 0.0)
    memory = {
        "gradients": peak.gradients + buffered,
        "activations": peak.saved,
        "temporaries": peak.temporaries,
        "communication": peak.gathered + (s.buffer if knobs.context == "all-gather" else 0.0),
    }
    return memory, np.minimum(stacks, peak.saved)


def _at(
    s: Sums, point: Point, stage: _Stage, knobs: Knobs, c: Candidates, profile: FrameworkProfile
) -> _Occupied:
    """The memory of a stage at a point where it may peak."""
    together, stored = profile.collected == "together", stage.stored
    saved = on_stage(point.saved, stage.in_flight) + on_stage(
        point.copy_cut if knobs.zero >= 3 else point.copy, stored
    )
    if knobs.zero < 3:
        saved = saved + np.where(c.stage > 1, 0.0, on_stage(point.cast, stored))
    replicated = together or knobs.zero < 2
    alive = (
        np.zeros(len(c))
        if profile.gradient_buffer
        else on_stage(point.gradient if replicated else point.gradient_cut, stored)
    )
    if knobs.zero < 3:
        gathered = np.zeros(len(c))
    elif together:
        gathered = np.maximum(0.0, on_stage(s.stored.parameters + s.stored.frozen, stored) - alive)
    else:
        gathered = on_stage(point.gathered, stored)
    return _Occupied(
        saved=saved,
        temporaries=on_stage(point.temporary, stage.once),
        gradients=alive,
        gathered=gathered,
    )


def _fullest(points: list[_Occupied], c: Candidates) -> _Occupied:
    """The point with the most bytes, by candidate."""
    if not points:
        zeros = np.zeros(len(c))
        return _Occupied(saved=zeros, temporaries=zeros, gradients=zeros, gathered=zeros)
    index = np.argmax(np.stack([point.total for point in points]), axis=0)
    return _Occupied(
        **{
            field.name: np.choose(index, [getattr(point, field.name) for point in points])
            for field in fields(_Occupied)
        }
    )


def _stages(
    scale: Array, in_flight: Array, knobs: Knobs, c: Candidates, profile: FrameworkProfile
) -> list[_Stage]:
    """Stages whose memory may be the fullest.

    If embedding and head are spread, all stages are equal. Otherwise the first has the most
    microbatches in flight, and the last has the logits.
    """
    layers = len(scale) - 2
    first = scale.copy()
    first[:layers] *= in_flight
    if profile.embedding_and_head == "spread":
        resting = scale.copy()
        resting[OUTSIDE_LAYERS] = 1.0
        return [_Stage(once=scale, in_flight=first, stored=resting)]
    with_head, without = scale.copy(), scale.copy()
    with_head[OUTSIDE_LAYERS], without[OUTSIDE_LAYERS] = 1.0, np.where(c.stage > 1, 0.0, 1.0)
    first[OUTSIDE_LAYERS] = without[OUTSIDE_LAYERS]
    last = with_head.copy()
    last[:layers] *= named(knobs.schedule).held_by_last(pipelines_of(knobs, c, profile))
    return [
        _Stage(once=without, in_flight=first, stored=without),
        _Stage(once=with_head, in_flight=last, stored=with_head),
    ]


def working_sets(pricer: Pricer, knobs: Knobs, c: Candidates) -> Array:
    """Sets of buffers for the values of a microbatch, in a program without stages.

    XLA's compiler for CPUs shares a buffer between two loops only if one depends on the other, and
    stacks that a loop fills depend on nothing. So the last microbatch, which reduces gradients, has
    buffers separate from those of the loop over the others: for a transformer of four layers on two
    devices, 1.8 to 2.1 times as many bytes as one microbatch (JAX 0.10.2).
    """
    separate = pricer.topology.chip.vendor == "cpu" and in_the_last(pricer.profile, knobs)
    return np.where(separate & (c.micro > 1) & (c.stage == 1) & (c.ways(BATCH_AXES) > 1), 2.0, 1.0)


def heap_share(pricer: Pricer, stages: Array) -> Array:
    """Heap over live bytes, of the allocations of a step."""
    copied = (
        pricer.profile.name == XLA.name
        and pricer.profile.pipeline == "lockstep"
        and pricer.topology.chip.vendor == "nvidia"
    )
    return np.where((stages > 1) & copied, PIPELINE_ON_GPUS, 1.0)


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
# This is the rule of `cost/communication.py` with three differences, because a compiled program
# does not distinguish them: small sums of activations along data and fsdp count as hidden here,
# reductions of gradients along tensor alone as blocking, and the compiler's kernel seconds include
# the optimizer update, so that `optimizer` is 0 then. If the compiler estimates no time (GPU and
# CPU), kernels are the predicted ones. A collective whose groups are not a product of mesh axes is
# priced as one over the whole mesh.


def group_seconds(
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
    spans = tuple(span for axis in axes or tuple(mesh) for span in placed.get(axis, ()))
    degree = mesh.ways(tuple(axes)) if axes else mesh.devices
    partial = kind != "collective-permute" and members != degree
    return collective_cost(kind, _part(spans, members) if partial else spans, topology).seconds(
        size
    )


def _part(spans: tuple[Span, ...], members: int) -> tuple[Span, ...]:
    """The innermost spans with a group of `members` devices; all spans if there are no such
    spans.
    """
    for count in range(1, len(spans) + 1):
        for chosen in itertools.combinations(reversed(spans), count):
            if math.prod(span.ways for span in chosen) == members:
                return chosen
    cut = next((span for span in reversed(spans) if span.ways % members == 0), None)
    return (replace(cut, ways=members),) if cut else spans


def reprice(
    predicted: Seconds,
    priced: Iterable[Collective],
    kernels: float,
    vendor: str,
    *,
    zero: int,
) -> Seconds:
    """The step time with the compiler's figures, by the formula above.

    Args:
        priced: the compiled collectives with the seconds of all their executions.
        kernels: the compiler's seconds of all kernels; 0 if it estimates none.
    """
    hidden = blocking = 0.0
    for c in priced:
        hides = vendor != "google" or (zero >= 3 and c.kind == "all-gather")
        if hides and not set(HIDEABLE_AXES).isdisjoint(c.axes):
            hidden += c.seconds
        else:
            blocking += c.seconds
    compute = kernels or predicted.compute
    exposed = blocking + max(0.0, hidden - efficiency(vendor).overlap * compute)
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


def least_seconds(s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of a step with all gathers of parameters and reductions of gradients hidden, which
    does not depend on the ZeRO stage.
    """
    stages = c.stage
    tick = tick_seconds(s, knobs, model, pricer, c)
    each = named(knobs.schedule).waiting(
        pipelines_of(knobs, c, pricer.profile), tick, s.kernels.weights / stages
    )
    busy = c.micro * (tick + s.collectives.ends)
    return busy + np.where(stages > 1, knobs.accumulation * each, 0.0)


def _passes(s: Sums, knobs: Knobs, pricer: Pricer, c: Candidates) -> Array:
    """Exposed seconds of sending a microbatch from stage to stage and its cotangents back."""
    return np.where(c.stage > 1, s.collectives.passes * chunks_of(knobs, c), 0.0) * (
        1 - pricer.profile.send_overlap
    )


def tick_seconds(s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of one microbatch on the slowest stage, forward and backward, without the collectives
    when it enters and leaves: all stages run those together, so that they do not add to the bubble.
    """
    key = knobs.context, knobs.virtual
    if key not in s.ticks:
        stages, virtual = c.stage, chunks_of(knobs, c)
        busy = s.kernels.compute + s.collectives.block + s.along(knobs)
        s.ticks[key] = np.maximum(
            _slowest_stage(busy, stages, virtual, model, pricer.profile),
            _slowest_stage(s.kernels.host, stages, virtual, model, pricer.profile),
        ) + _passes(s, knobs, pricer, c)
    return s.ticks[key]


def _slowest_stage(
    seconds: Array, stages: Array, virtual: Array, model: Model, profile: FrameworkProfile
) -> Array:
    """Seconds of the slowest stage in a microbatch.

    Args:
        seconds: of all layers of each class, and of embedding and head, [segments, candidates].
    """
    layers, ends = (
        [seconds[k] / count for k, count in enumerate(model.counts)],
        seconds[OUTSIDE_LAYERS],
    )
    if profile.embedding_and_head == "spread":
        return virtual * bottleneck(layers, model.counts, stages * virtual) + ends / stages
    tick = slowest(layers, model.counts, ends, stages, virtual)
    if profile.balance == "layers" or len(layers) != 1:
        return tick
    most, last = cut_by_work(model.counts[0], model.head_layers, stages)
    by_work = np.maximum(most * layers[0], last * layers[0] + ends)
    return np.where((stages > 1) & (virtual == 1), by_work, tick)


def _starved(s: Sums, busy: Array, c: Candidates) -> Array:
    """Seconds per microbatch that a stage waits for the host to launch kernels, if launching takes
    longer than running them.
    """
    return np.maximum(0.0, s.kernels.host.sum(0) - busy.sum(0)) / c.stage


def seconds_by_part(
    s: Sums, scale: Array, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> tuple[dict[str, Array], Array]:
    """Seconds of compute, exposed communication and bubble; and FLOPs.

    Args:
        scale: share of each segment whose parameters the fullest stage moves, [segments,
            candidates].
    """
    stages, micro = c.stage, c.micro
    block = s.collectives.block + s.along(knobs)
    compute, blocked = (
        s.kernels.compute.sum(0) / stages,
        block.sum(0) / stages + _passes(s, knobs, pricer, c) + s.collectives.ends,
    )
    starved = _starved(s, s.kernels.compute + block, c)
    bubble = np.where(
        stages > 1,
        least_seconds(s, knobs, model, pricer, c) - micro * (compute + blocked + starved),
        0.0,
    )
    waited = blocked * micro + exposed(s, scale, knobs, c, pricer, compute)
    waited = waited + dealt_out(s, knobs, model, c, pricer.profile)
    return {
        "compute": compute * micro,
        "exposed": waited,
        "bubble": np.maximum(bubble, 0.0),
        "overhead": starved * micro,
    }, s.kernels.flops / stages * micro


# --------------------------------------------------------------------------------------------------
# Priced candidates: the parts of the step time and of the memory, as arrays.
#
# A candidate is a mesh with its placement and a number of microbatches. `combine` does everything
# that is not a sum: hiding communication behind compute, pipeline bubbles, the maximum over several
# memory points.

#: Smallest buffer that the host's allocator returns to the system when it is freed, so that it is
#: mapped again in every step: glibc keeps smaller ones (mallopt(3), M_MMAP_THRESHOLD: at most 32
#: MiB where longs have 8 bytes).
GIVEN_BACK = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Totals(ArrayTable):
    """Priced candidates, as arrays; the names are those of `Seconds` and `DeviceBytes`.

    Attributes:
        seconds: parts of the step time per candidate.
        device_bytes: parts of the memory per candidate.
        flops: executed FLOPs per device and step, averaged over the stages.
        stacks: heap bytes of the saved activations of layers, less two layers: the part that
            offloading can move.
        held: microbatches whose activations are live at once.
    """

    seconds: dict[str, Array]
    device_bytes: dict[str, Array]
    flops: Array
    stacks: Array
    held: Array

    @cached_property
    def step_seconds(self) -> Array:
        """Seconds of a step per candidate."""
        return sum(self.seconds.values(), np.zeros_like(self.flops))

    @cached_property
    def peak_bytes(self) -> Array:
        """Bytes per device per candidate."""
        return sum(self.device_bytes.values(), np.zeros_like(self.flops))


def combine(s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Totals:
    """Combines quantities into the parts of time and memory."""
    profile = pricer.profile
    scale, resting = shares_of(knobs, model, c, profile), shares_at_rest(knobs, model, c, profile)
    in_flight = named(knobs.schedule).in_flight(pipelines_of(knobs, c, profile))
    parameters, frozen, gradients, state = stored_bytes(s, resting, knobs, model, profile, c)
    moved = shares_moved(knobs, model, c, profile)
    seconds, flops = seconds_by_part(s, moved, knobs, model, pricer, c)
    parts, stacks = bytes_by_part(s, gradients, scale, in_flight, knobs, model, c, profile)
    heap = heap_share(pricer, c.stage)
    memory, stacks = {name: size * heap for name, size in parts.items()}, stacks * heap
    sets = working_sets(pricer, knobs, c)
    memory |= {name: memory[name] * sets for name in ("activations", "temporaries")}
    memory |= {
        "parameters": parameters,
        "frozen": frozen,
        "optimizer": state,
        "batch": model.batch_bytes / c.ways(TOKEN_AXES) + model.state_bytes,
    }
    updated = on_stage(s.stored.parameters_cut if knobs.zero >= 1 else s.stored.parameters, resting)
    update = (3 * updated + 2 * state) / (
        pricer.topology.chip.hbm_bytes_per_s * pricer.constants.update_share
    )
    seconds["overhead"] = (
        seconds["overhead"]
        + pricer.constants.step_s
        + pricer.constants.microbatch_s * (c.micro + knobs.accumulation * (c.stage - 1))
        + pricer.constants.fresh * mapped_anew(memory) / pricer.topology.chip.hbm_bytes_per_s
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
        held=in_flight,
    )


def mapped_anew(memory: Mapping[str, Array]) -> Array:
    """Bytes per device that a step touches first: all except those that stay between steps, if they
    are so many that the allocator returns them to the system. The prediction may be half of what a
    CPU program allocates (20 MiB for 34, an MLP of three layers), so bytes count partially from
    half of `GIVEN_BACK` on, and fully from `GIVEN_BACK` on.

    Args:
        memory: bytes per device by part, by candidate.
    """
    resting = ("parameters", "frozen", "optimizer", "batch")
    touched = sum((size for part, size in memory.items() if part not in resting), np.zeros(1))
    return touched * np.clip(2 * touched / GIVEN_BACK - 1, 0.0, 1.0)


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
