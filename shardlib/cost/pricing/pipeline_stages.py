"""The slowest stage of a pipeline, and how often stages gather and reduce their weights.

How long stages wait and how many microbatches are in flight is said by each schedule
(`shardlib.schedules`). Here is what all schedules share: a chain of layers is cut into S stages of
v chunks as evenly as whole layers can be.

>>> layer, ends = np.array([1.0]), np.array([0.0])
>>> slowest([layer], [10], ends, np.array([4]), np.array([1])).item()
3.0
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.gradient_reduction import once_a_step
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import ends_on_all_stages
from shardlib.cost.terms.knobs import Knobs
from shardlib.schedules.table import named
from shardlib.schedules.timetable import Timetable

Array = np.ndarray

#: Halvings of the interval that the longest chunk lies in, when layers differ, which is as wide as
#: the slowest layer: it is found to 1e-6 of that layer.
_HALVINGS = 20
#: Relative rounding of a sum of layers.
_SLACK = 1 + 1e-12


def passes_over_weights(
    schedule: str, gather: str, virtual: int, microbatches: Array, groups: int = 1
) -> tuple[Array, Array, float]:
    """How often a stage gathers its weights and reduces their gradients in a step, and the share of
    them that is whole at a time.

    Gathered at every "use", that is twice (forward, backward) and once in every microbatch.
    Gathered "once" that is once each, or twice and once where all microbatches go through one chunk
    of layers before the next (breadth first, arXiv:2211.05953): then two chunks are whole at a
    time, while stages go over from one to the next, so that one chunk's sums are reduced before
    there are any, and groups of microbatches that go through the pipeline one after the other do
    that once each.
    """
    per_microbatch = np.asarray(microbatches, dtype=float)
    if gather == "use":
        return per_microbatch, per_microbatch, 0.0
    if named(schedule).forward_first and virtual > 1:
        reduced = groups * (virtual + 1) / virtual
        return (
            np.full_like(per_microbatch, groups),
            np.full_like(per_microbatch, reduced),
            min(1.0, 2 / virtual),
        )
    return np.full_like(per_microbatch, 0.5), np.ones_like(per_microbatch), 1.0


def passes_over_ends(knobs: Knobs, c: Candidates, profile: FrameworkProfile) -> Array:
    """How often the parameters of embedding and head are gathered, and their gradients reduced, in
    a step of a pipeline whose stages all compute both: once, where those of layers are, but for
    rounds of chunks, and in every microbatch otherwise.
    """
    assert ends_on_all_stages(profile)
    rounds = named(knobs.schedule).forward_first and knobs.virtual > 1
    late = once_a_step(profile, knobs) or (knobs.gather == "once" and not rounds)
    return np.where(knobs.zero < 2 or late, 1.0, c.micro)


def turns(knobs: Knobs, c: Candidates, profile: FrameworkProfile) -> Array:
    """How often a stage does its part for a microbatch in a step: in a pipeline in one program it
    does so while it waits, too, with what nobody asks for.
    """
    if profile.pipeline != "lockstep":
        return np.asarray(c.micro, dtype=float)
    return np.array(
        [
            (
                knobs.accumulation
                * Timetable(
                    schedule=knobs.schedule,
                    stages=int(stages),
                    microbatches=int(micro) // knobs.accumulation,
                    virtual=knobs.virtual,
                ).forward_ticks
                / knobs.virtual
                if stages > 1
                else float(micro)
            )
            for stages, micro in zip(c.stage, c.micro, strict=True)
        ]
    )


def slowest(
    layers: Sequence[Array], counts: Sequence[int], ends: Array, stages: Array, virtual: Array
) -> Array:
    """Seconds of the slowest stage when the last one has the head: a layer less than the others
    where the layers are not divisible.

    Args:
        layers: seconds of one layer of each class.
        ends: seconds of embedding and head, almost all of which are the head's.
    """
    chunks = stages * virtual
    plain = virtual * bottleneck(layers, counts, chunks)
    total = sum(counts)
    spare = (
        (np.ceil(total / chunks) * chunks > total) & (stages > 1)
        if counts
        else np.zeros(len(stages), dtype=bool)
    )
    return np.maximum(plain, plain + ends - np.where(spare, layers[-1] if layers else 0.0, 0.0))


def bottleneck(seconds: Sequence[Array], counts: Sequence[int], chunks: Array) -> Array:
    """Seconds of the slowest chunk when a chain of layers is cut into chunks as evenly as can be.

    The chain is some classes of equal layers, one class after the other, and chunks are runs of
    whole layers. The best cut is found by bisection on the longest chunk that is allowed, each
    tried by filling chunks from the front, which is exact for chains.

    Args:
        seconds: of one layer of each class, arrays of equal length.
    """
    if not counts:
        return np.zeros_like(chunks, dtype=float)
    if len(counts) == 1:
        return np.ceil(counts[0] / chunks) * seconds[0]
    total = np.asarray(sum(n * t for n, t in zip(counts, seconds, strict=True)), dtype=float)
    split = np.flatnonzero(chunks > 1)
    if len(split) < len(chunks):
        cut = bottleneck([t[split] for t in seconds], counts, chunks[split]) if len(split) else ()
        slowest = total.copy()
        slowest[split] = cut
        return slowest
    layers = [np.maximum(np.asarray(t, dtype=float), 1e-30) for t in seconds]
    longest = np.maximum.reduce(layers)
    # chunks that no layer fits into any more have more than an equal part of the time
    low, high = (
        np.maximum(total / chunks, longest),
        np.minimum(total, total / chunks + longest),
    )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _chunks_needed(layers, counts, middle) <= chunks
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return high


def _chunks_needed(seconds: Sequence[Array], counts: Sequence[int], limit: Array) -> Array:
    """Chunks that filling from the front takes when none may be longer than `limit` seconds."""
    used: Array | float = 0.0
    space: Array | None = None
    for count, t in zip(counts, seconds, strict=True):
        here = 0.0 if space is None else np.minimum(np.floor(space * _SLACK / t), count)
        left = count - here
        each = np.maximum(np.floor(limit * _SLACK / t), 1)
        more = np.ceil(left / each)
        used = used + more
        full = limit - (left - (more - 1) * each) * t
        space = full if space is None else np.where(more > 0, full, space - here * t)
    return np.asarray(used)
