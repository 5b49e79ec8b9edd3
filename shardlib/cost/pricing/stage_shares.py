"""What the fullest stage of a pipeline has of a model: whole layers, and a part of embedding and
head.
"""

from __future__ import annotations

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.sums import Model
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA, ends_on_all_stages
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import OUTSIDE_LAYERS
from shardlib.schedules.schedule import Pipelines

Array = np.ndarray


def chunks_of(knobs: Knobs, c: Candidates) -> Array:
    """Chunks of layers on a stage; 1 where there are no stages."""
    return np.where(c.stage > 1, knobs.virtual, 1)


def pipelines_of(knobs: Knobs, c: Candidates, profile: FrameworkProfile) -> Pipelines:
    """The pipelines of candidates, each with the microbatches of one group."""
    return Pipelines(
        stages=c.stage,
        chunks=chunks_of(knobs, c),
        microbatches=c.micro // knobs.accumulation,
        lockstep=profile.pipeline == "lockstep",
    )


def shares_of(knobs: Knobs, model: Model, c: Candidates, profile: FrameworkProfile = XLA) -> Array:
    """Part of each segment that the fullest stage has: whole layers of every group, and of
    embedding and head an equal part or an array; array [segments, candidates].
    """
    virtual = chunks_of(knobs, c)
    layers = [_most(count, c, virtual, model, profile) / count for count in model.counts]
    ends = (
        np.where(c.stage > 1, model.largest_end, 1.0)
        if profile.embedding_and_head == "owners"
        else 1 / c.stage
    )
    return np.stack([*layers, np.ones(len(c)), ends])


def shares_at_rest(
    knobs: Knobs, model: Model, c: Candidates, profile: FrameworkProfile = XLA
) -> Array:
    """Part of each segment's parameters, gradients and optimizer state that the fullest stage has:
    as `shares_of`, but every stage has all of embedding and head where their work is spread over
    the sequence.
    """
    shares = shares_of(knobs, model, c, profile)
    if profile.embedding_and_head == "spread":
        shares[OUTSIDE_LAYERS] = 1.0
    return shares


def shares_moved(
    knobs: Knobs, model: Model, c: Candidates, profile: FrameworkProfile = XLA
) -> Array:
    """Part of each segment's parameters that the fullest stage gathers, and whose gradients it
    reduces: as `shares_of`, but every stage does so with all of embedding and head where it
    computes them for a part of the sequence.
    """
    shares = shares_of(knobs, model, c, profile)
    if ends_on_all_stages(profile):
        shares[OUTSIDE_LAYERS] = 1.0
    return shares


def dealt(
    stored: Array, knobs: Knobs, model: Model, c: Candidates, profile: FrameworkProfile
) -> Array:
    """Bytes that a device has when layers were dealt out to stages of several chunks, as pipelines
    in one program do with parameters in every step, and with gradients back: stored are the layers
    in order, and stage s of S has chunks s, S + s, and so on. Where S does not divide the chunks of
    a stage, the partitioner gathers all of them. Layers that do not divide are not counted.

    Args:
        stored: bytes by segment, of all stages, [segments, candidates].
    """
    if knobs.virtual == 1 or not ends_on_all_stages(profile):
        return np.zeros(len(c))
    moved = stored * shares_of(knobs, model, c, profile)
    layers = np.zeros(len(c))
    for k, count in enumerate(model.counts):
        layers = layers + np.where(count % (c.stage * knobs.virtual), 0.0, moved[k])
    return np.where(c.stage > 1, layers * np.where(knobs.virtual % c.stage, c.stage, 1), 0.0)


def _most(
    count: int, c: Candidates, virtual: Array, model: Model, profile: FrameworkProfile
) -> Array:
    """Layers of a class that the fullest stage has: equally many, or, where stages are cut by work,
    those that begin before its part of the work is done.
    """
    equal = virtual * np.ceil(count / (c.stage * virtual))
    if profile.balance == "layers":
        return equal
    return np.where(
        (c.stage > 1) & (virtual == 1),
        np.minimum(count, np.floor((count + model.head_layers) / c.stage) + 1),
        equal,
    )


def on_stage(quantity: Array, scale: Array) -> Array:
    """What the fullest stage has of a quantity by segment.

    Args:
        quantity: of one microbatch or step, [segments, candidates].
        scale: part of each segment that the stage has, [segments, candidates].
    """
    return (quantity * scale).sum(0)
