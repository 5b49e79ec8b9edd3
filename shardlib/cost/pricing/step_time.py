"""Seconds of a step: what stages are busy with, and how long they wait.

With m microbatches and S stages, a stage is busy for `tick` seconds with one microbatch, forward
and backward: its layers and its part of embedding and head.

    step = m x (tick + ends) + groups x waiting(schedule) + exposed parameters and gradients
           + optimizer + overhead

"ends" is what all stages exchange when a microbatch enters and leaves a pipeline in one program.
"compute" and "exposed" are what a stage is busy with on the average; "bubble" is the rest: waiting,
and stages that have less work than the slowest.
"""

from __future__ import annotations

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.exposed_communication import dealt_out, exposed
from shardlib.cost.pricing.pipeline_stages import (
    bottleneck,
    slowest,
)
from shardlib.cost.pricing.stage_shares import chunks_of, pipelines_of
from shardlib.cost.pricing.sums import Model, Sums
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import OUTSIDE_LAYERS
from shardlib.schedules.table import named

Array = np.ndarray


def least_seconds(s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of a step with all gathers of parameters and reductions of gradients hidden: what no
    ZeRO stage changes.
    """
    stages = c.stage
    tick = tick_seconds(s, knobs, model, pricer, c)
    each = named(knobs.schedule).waiting(
        pipelines_of(knobs, c, pricer.profile), tick, s.kernels.weights / stages
    )
    busy = c.micro * (tick + s.collectives.ends)
    return busy + np.where(stages > 1, knobs.accumulation * each, 0.0)


def _passes(s: Sums, knobs: Knobs, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of handing a microbatch from stage to stage and back, that nothing hides."""
    return np.where(c.stage > 1, s.collectives.passes * chunks_of(knobs, c), 0.0) * (
        1 - pricer.profile.send_overlap
    )


def tick_seconds(s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Array:
    """Seconds of one microbatch on the slowest stage, forward and backward, but for what all stages
    do together when it enters and leaves: nobody does that while others wait.
    """
    key = knobs.context, knobs.virtual
    if key not in s.ticks:
        stages, virtual = c.stage, chunks_of(knobs, c)
        busy = s.kernels.compute + s.collectives.block + s.along(knobs)
        layers = [busy[k] / count for k, count in enumerate(model.counts)]
        if pricer.profile.embedding_and_head == "owners":
            tick = slowest(layers, model.counts, busy[OUTSIDE_LAYERS], stages, virtual)
        else:
            tick = (
                virtual * bottleneck(layers, model.counts, stages * virtual)
                + busy[OUTSIDE_LAYERS] / stages
            )
        s.ticks[key] = tick + _passes(s, knobs, pricer, c) + _starved(s, busy, c)
    return s.ticks[key]


def _starved(s: Sums, busy: Array, c: Candidates) -> Array:
    """Seconds of a microbatch that a stage waits for the host to launch kernels: where launching
    takes longer than running them.
    """
    return np.maximum(0.0, s.kernels.host.sum(0) - busy.sum(0)) / c.stage


def seconds_by_part(
    s: Sums, scale: Array, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> tuple[dict[str, Array], Array]:
    """Seconds of compute, exposed communication and bubble; and FLOPs.

    Args:
        scale: part of each segment whose parameters the fullest stage moves, [segments,
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
