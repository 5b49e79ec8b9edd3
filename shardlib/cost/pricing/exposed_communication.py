"""Seconds of gathers, reductions and rings that compute does not hide.

XLA for GPUs hides all of them behind all of compute. For TPUs it hides gathers of parameters that
are stored sharded, and rings, and waits for reductions and for gathers of updated parameters
(`benchmarks/order_by_compiler.py` reads that from compiled schedules). A framework that says what
it hides has its gathers in the forward pass (a third of compute) or, under ZeRO 3, in both, and its
reductions in the backward pass (two thirds), of the last microbatch where it reduces once a step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardlib.axes import STAGE
from shardlib.cost.machine.collective_tables import SLOTS, Slot, along, stored
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.gradient_reduction import in_the_last, once_a_step, scatters
from shardlib.cost.pricing.pipeline_stages import passes_over_ends, passes_over_weights
from shardlib.cost.pricing.stage_shares import dealt, on_stage, shares_moved
from shardlib.cost.pricing.sums import Model, Sums
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA, ends_on_all_stages
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import OUTSIDE_LAYERS

Array = np.ndarray


def exposed(
    s: Sums, scale: Array, knobs: Knobs, c: Candidates, pricer: Pricer, compute: Array
) -> Array:
    """Seconds of gathers of parameters, reductions of gradients and rings of keys and values that
    compute does not hide, in a step.

    Args:
        scale: part of each segment whose parameters the fullest stage moves, [segments,
            candidates].
        compute: seconds of compute of a microbatch, [candidates].
    """
    profile, micro, constants = pricer.profile, c.micro, pricer.constants
    reduced, gathered = _reduced(s, scale, knobs, c, profile), np.zeros(len(c))
    if knobs.zero:
        gathered = (
            _in_step(s.collectives.gather, scale, passes_over(knobs, c)[0], knobs, c, profile)
            if knobs.zero >= 3
            else _updated_gather(s, scale, c)
        )
    ring = s.collectives.ring.sum(0) / c.stage * micro if knobs.ring else np.zeros(len(c))
    if profile.gather_overlap is None and profile.reduce_overlap is None:
        if profile.name == XLA.name and pricer.topology.chip.vendor == "google":
            return _on_tpus(reduced, gathered, ring, constants.overlap * compute * micro, knobs)
        if in_the_last(
            profile, knobs
        ):  # without stages, beside the backward pass of the last microbatch
            late = np.maximum(0.0, reduced - constants.overlap * compute) + np.maximum(
                0.0, gathered + ring - constants.overlap * compute * (micro - 1)
            )
            return np.where(
                (c.stage > 1) | (micro == 1),
                np.maximum(0.0, reduced + gathered + ring - constants.overlap * compute * micro),
                late,
            )
        return np.maximum(0.0, reduced + gathered + ring - constants.overlap * compute * micro)
    gathers, reduces = (
        constants.overlap if share is None else share
        for share in (profile.gather_overlap, profile.reduce_overlap)
    )
    beside = compute * micro if knobs.zero >= 3 else compute / 3
    backward = compute * (1 if once_a_step(profile, knobs) else micro) * 2 / 3
    separate = np.maximum(0.0, gathered - gathers * beside) + np.maximum(
        0.0, reduced - reduces * backward
    )
    together = (
        gathered + reduced - max(gathers, reduces) * compute * micro
    )  # nothing hides two of them at once
    return np.maximum(separate, together) + np.maximum(
        0.0, ring - constants.overlap * compute * micro
    )


def _on_tpus(reduced: Array, gathered: Array, ring: Array, behind: Array, knobs: Knobs) -> Array:
    """The seconds that a program of the TPU compiler waits: it starts gathers of parameters before
    they are used, where they are stored sharded, and waits for all reductions and for gathers of
    updated parameters (`benchmarks/order_by_compiler.py`).
    """
    if knobs.zero >= 3:
        return reduced + np.maximum(0.0, gathered + ring - behind)
    return reduced + gathered + np.maximum(0.0, ring - behind)


def saved_by_gathering_once(
    s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> Array:
    """Seconds of a step that a pipeline with ZeRO 3 saves which gathers weights and reduces
    gradients once for all microbatches, and not at every use.
    """
    scale, compute = (
        shares_moved(knobs, model, c, pricer.profile),
        s.kernels.compute.sum(0) / c.stage,
    )
    use, once = (
        exposed(s, scale, replace(knobs, gather=gather), c, pricer, compute)
        for gather in ("use", "once")
    )
    return use - once


def _reduced(
    s: Sums, scale: Array, knobs: Knobs, c: Candidates, profile: FrameworkProfile
) -> Array:
    """Seconds of reductions of gradients: in every microbatch; once a step in a pipeline without
    ZeRO 2 and 3, and where the framework does so, but for those of experts on their devices.
    """
    seconds = s.collectives.scatter if scatters(profile, knobs) else s.collectives.reduce
    once = np.ones(len(c))
    if once_a_step(profile, knobs):
        return _in_step(seconds, scale, once, knobs, c, profile)
    if knobs.zero >= 2:
        return _in_step(seconds, scale, passes_over(knobs, c)[1], knobs, c, profile)
    if in_the_last(profile, knobs):
        return _in_step(seconds, scale, once, knobs, c, profile) + np.where(
            c.stage > 1, 0.0, on_stage(s.collectives.routed, scale) * (c.micro - 1)
        )
    return _in_step(seconds, scale, np.where(c.stage > 1, 1, c.micro), knobs, c, profile)


def _in_step(
    seconds: Array,
    scale: Array,
    times: Array,
    knobs: Knobs,
    c: Candidates,
    profile: FrameworkProfile,
) -> Array:
    """Seconds of a step of what is moved so many times in it, but for what lies outside of the
    layers of a pipeline in one program, see `passes_over_ends`.
    """
    moved = seconds * scale
    total = moved.sum(0) * times
    if not ends_on_all_stages(profile):
        return total
    ends = moved[OUTSIDE_LAYERS] * (passes_over_ends(knobs, c, profile) - times)
    return total + np.where(c.stage > 1, ends, 0.0)


def dealt_out(
    s: Sums, knobs: Knobs, model: Model, c: Candidates, profile: FrameworkProfile
) -> Array:
    """Seconds of a step in which layers are dealt out to stages of several chunks, and their
    gradients back.
    """
    candidates, slots = np.arange(len(c)), _DEALING[np.minimum(knobs.virtual % c.stage, 1)]
    total = np.zeros(len(c))
    for stored_bytes in (
        s.stored.parameters_cut + s.stored.frozen_cut
        if knobs.zero >= 3
        else s.stored.parameters + s.stored.frozen,
        s.stored.kept_cut if knobs.zero >= 2 else s.stored.kept,
    ):
        size = dealt(stored_bytes, knobs, model, c, profile)
        cost = c.links.latency[slots, candidates] + size * c.links.per_byte[slots, candidates]
        total += np.where(size > 0, cost, 0.0)
    return total


#: Numbers of the slots in which layers are dealt out where their chunks divide, and where not.
_DEALING = np.array(
    [SLOTS.index(Slot("deal", along(STAGE), kind)) for kind in ("all-to-all", "all-gather")]
)


def passes_over(knobs: Knobs, c: Candidates) -> tuple[Array, Array, float]:
    """How often a stage reads its weights and reduces its gradients in a step; see
    `passes_over_weights`.
    """
    return passes_over_weights(
        knobs.schedule, knobs.gather, knobs.virtual, c.micro, knobs.accumulation
    )


def _updated_gather(s: Sums, scale: Array, c: Candidates) -> Array:
    """Seconds of the gather of updated parameters after the optimizer (ZeRO 1, 2)."""
    experts = on_stage(s.stored.experts, scale)
    dense = on_stage(s.stored.parameters, scale) - experts
    total = np.zeros(len(c))
    for group, size in ((stored(), dense), (stored(experts=True), experts)):
        slot = SLOTS.index(Slot("gather", group, "all-gather"))
        total += np.where(size > 0, c.links.latency[slot] + size * c.links.per_byte[slot], 0.0)
    return total
