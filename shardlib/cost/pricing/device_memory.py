"""Bytes of a device: of what is stored between steps, and of what a step makes, at the point where
they are the most.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from shardlib.axes import BATCH_AXES, TOKEN_AXES
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.exposed_communication import passes_over
from shardlib.cost.pricing.gradient_reduction import in_the_last
from shardlib.cost.pricing.stage_shares import on_stage, pipelines_of, shares_at_rest, shares_of
from shardlib.cost.pricing.sums import Model, Sums
from shardlib.cost.tables.by_candidate import Point
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import OUTSIDE_LAYERS
from shardlib.schedules.table import named

Array = np.ndarray

#: Heap of a pipeline in one program over what is alive in it at once, on GPUs: XLA copies stacks of
#: saved activations and sums of gradients between the loops of a step, and what is of many sizes
#: does not fit in each other's place. Of Llama 3 405B with 2 stages 1.11 (126 layers, one to a
#: chunk), 1.25 (24 layers) and 1.40 (126 layers, three to a chunk), by the compiler's own live
#: ranges (JAX 0.10.2).
PIPELINE_ON_GPUS = 1.25


def stored_bytes(
    s: Sums, scale: Array, knobs: Knobs, model: Model, profile: FrameworkProfile, c: Candidates
) -> tuple[Array, Array, Array, Array]:
    """Bytes of trained and of frozen parameters, of gradients and of optimizer state as they are
    stored; whole ones beside the shards where a stage gathers and reduces once a step.

    Args:
        scale: part of each segment that the fullest stage has, [segments, candidates].
    """
    frozen = on_stage(s.stored.frozen_cut if knobs.zero >= 3 else s.stored.frozen, scale)
    parameters, gradients = (
        on_stage(s.stored.parameters_cut if knobs.zero >= 3 else s.stored.parameters, scale),
        on_stage(s.stored.kept_cut if knobs.zero >= 2 else s.stored.kept, scale),
    )
    gathered_share = (
        (1.0 if profile.stage_gathers == "step" else passes_over(knobs, c)[2])
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
    """Bytes that a device has at the least when the forward pass ends: of stored arrays but for
    the optimizer's state, of that state, and of each class's saved layers.

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
    """Bytes that one point of a step occupies on one stage, arrays [candidates].

    Attributes:
        saved: what the forward pass saved, and copies of parameters.
        temporaries: results that are read and freed.
        gradients: those that are alive, where they have no buffer of their own.
        gathered: parameters in use, where they are stored sharded (ZeRO 3).
    """

    saved: Array
    temporaries: Array
    gradients: Array
    gathered: Array

    @property
    def total(self) -> Array:
        """All of them."""
        return self.saved + self.temporaries + self.gradients + self.gathered


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What a stage that may be the fullest has of each segment, arrays [segments, candidates].

    Attributes:
        once: part of values that are made once at a time.
        in_flight: part of values that every microbatch in flight has, times those.
        stored: part of parameters and gradients.
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
    """Bytes of what a step makes, by part; and those of the stacks that the forward pass saves,
    less two layers, which offloading could move.

    Args:
        gradients: bytes of gradients that are kept over microbatches, array [candidates].
        scale: part of each segment that the fullest stage has, array [segments, candidates].
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
    """What a point where memory may peak occupies on a stage."""
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
    """The point that occupies the most, by candidate."""
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

    Where embedding and head are spread all stages are alike. Otherwise the first holds the most
    microbatches, and the last the logits.
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
    """Sets of buffers for what a microbatch makes, in a program without stages.

    XLA's compiler for CPUs shares a buffer between two loops only where one needs what the other
    makes, and stacks that a loop fills need nothing. So the last microbatch, which reduces
    gradients, has buffers beside those of the loop over the others: of a transformer of four layers
    on two devices, 1.8 to 2.1 times as many bytes as one microbatch (JAX 0.10.2).
    """
    separate = pricer.topology.chip.vendor == "cpu" and in_the_last(pricer.profile, knobs)
    return np.where(separate & (c.micro > 1) & (c.stage == 1) & (c.ways(BATCH_AXES) > 1), 2.0, 1.0)


def heap_share(pricer: Pricer, stages: Array) -> Array:
    """Heap over live buffers, of what a step makes."""
    copied = (
        pricer.profile.name == XLA.name
        and pricer.profile.pipeline == "lockstep"
        and pricer.topology.chip.vendor == "nvidia"
    )
    return np.where((stages > 1) & copied, PIPELINE_ON_GPUS, 1.0)
