"""How long do pipeline stages wait, and how many microbatches are in flight?

With S stages, m microbatches, v chunks of layers a stage (virtual stages), and t seconds a stage
works on one microbatch forward and backward:

- GPipe (arXiv:1811.06965) and 1F1B (PipeDream-Flush, arXiv:2006.09503): (m + S - 1) t. GPipe with v
  chunks (breadth first, arXiv:2211.05953): (m + (S - 1) / v) t.
- interleaved 1F1B (arXiv:2104.04473, section 2.2): (m + (S - 1) / v) t, for microbatches in groups
  of S; where S does not divide m, a group of fewer takes as long as a full one.
- zero-bubble H1 (arXiv:2401.10241, table 1): the bubble of 1F1B, (S - 1)(F + B + W), becomes (S -
  1)(F + B - W), where the backward pass is split into B, which the stage before waits for, and W,
  the gradients of weights, which nothing waits for. That takes m >= S: each microbatch but the last
  has one W to fill a gap with, so the bubble is (S - 1)(F + B) - min(S, m) W + W. It takes W <= F
  and W <= B, too, which holds since every gradient of a weight has the FLOPs of a matmul of each.
  In lockstep F and B fill S - 1 more ticks than there are microbatches each, and W none: the bubble
  is (S - 1)(F + B).

All of these are exact for stages that take equally long: `shardlib.schedules.simulation` finds the
same by doing every task as early as it can be done.

Microbatches whose activations the first stage holds: m in GPipe; min(m, S) in 1F1B and zero-bubble
H1; S + (S - 1) / v in interleaved 1F1B (arXiv:2205.05198, section 4.2.3). A program in lockstep,
where every tick does one forward and one backward on every stage, has a ring of 2vS - 1 places for
what a chunk saved, since a microbatch returns to the first stage 2S - 2 ticks after it left, and of
m v + S - 1 in GPipe (`shardlib.schedules.timetable.Timetable.slots`); beside it are what the tick
has made and not yet put there, and what it has read. Zero-bubble in lockstep keeps S more, those
whose cotangents wait for the products that make gradients of weights, which are about as many bytes
as what the forward pass saved.

Microbatches may go through the pipeline in groups, one group after the other: then m above is that
of a group, and the pipeline fills and drains for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray

#: Halvings of the interval that the longest chunk lies in, when layers differ: it is found to 1e-7
#: of the time of the whole chain.
_HALVINGS = 24
#: Chunks whose saved values are on their way to or from the ring of a program in lockstep.
_PASSING = 2
#: Schedules of a pipeline.
SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def in_flight(
    schedule: str, stages: Array, virtual: Array, microbatches: Array, *, lockstep: bool
) -> Array:
    """Microbatches whose activations the first stage holds at once, as many as whole stages; 1
    without stages.
    """
    if not lockstep:
        held = (
            microbatches
            if schedule == "gpipe"
            else stages + np.where(virtual > 1, (stages - 1) / virtual, 0.0)
        )
        return np.where(stages > 1, np.minimum(held, microbatches), 1.0)
    units = microbatches * virtual + stages - 1
    ring = units if schedule == "gpipe" else np.minimum(2 * virtual * stages - 1, units)
    passing = _PASSING - (
        schedule == "gpipe"
    )  # which goes forward and backward in ticks of their own
    waiting_for_weights = stages if schedule == "zero-bubble" else 0.0
    return np.where(stages > 1, (ring + passing) / virtual + waiting_for_weights, 1.0)


def least_in_flight(stages: Array, microbatches: Array, *, lockstep: bool) -> Array:
    """Microbatches that no schedule undercuts, see `in_flight`; with ever more chunks of layers a
    ring in lockstep comes down to 2S, or to all microbatches.
    """
    one = in_flight("1f1b", stages, np.ones_like(stages), microbatches, lockstep=lockstep)
    return (
        np.where(stages > 1, np.minimum(one, np.minimum(2 * stages, microbatches)), 1.0)
        if lockstep
        else one
    )


def put_off(*, lockstep: bool) -> float:
    """How often the bubble of zero-bubble is shorter than that of 1F1B by the time of gradients of
    weights.
    """
    return 1.0 if lockstep else 2.0


def passes_over_weights(
    schedule: str, gather: str, virtual: int, microbatches: Array, groups: int = 1
) -> tuple[Array, Array, float]:
    """How often a stage gathers its weights and reduces their gradients in a step, and the share of
    them that is whole at a time.

    Gathered at every "use", that is twice (forward, backward) and once in every microbatch.
    Gathered "once" that is once each, or twice and once where all microbatches go through one chunk
    of layers before the next (breadth first, arXiv:2211.05953): then two chunks are whole at a
    time, while stages go over from one to the next, and groups of microbatches that go through the
    pipeline one after the other do that once each.

    Args:
        schedule: pipeline schedule.
        gather: "use" or "once".
        virtual: chunks of layers on each stage.
        microbatches: of a step, all groups together.
        groups: of microbatches.

    Returns:
        Pairs of gathers (one forward, one backward), reductions, and the share.
    """
    every = np.asarray(microbatches, dtype=float)
    if gather == "use":
        return every, every, 0.0
    if schedule == "gpipe" and virtual > 1:
        return np.full_like(every, groups), np.full_like(every, groups), min(1.0, 2 / virtual)
    return np.full_like(every, 0.5), np.ones_like(every), 1.0


def held_by_last(schedule: str, stages: Array, virtual: Array, microbatches: Array) -> Array:
    """Microbatches whose activations the last stage holds at once, as many as whole stages, where
    stages wait for their neighbours alone.

    It starts on a microbatch's backward pass as soon as it has done the forward pass: 1, and with v
    chunks the (v - 1) S chunks that went before (arXiv:2104.04473, figure 4).
    """
    held = microbatches if schedule == "gpipe" else ((virtual - 1) * stages + 1) / virtual
    return np.where(stages > 1, np.minimum(held, microbatches), 1.0)


def slowest(
    layers: Sequence[Array], counts: Sequence[int], ends: Array, stages: Array, virtual: Array
) -> Array:
    """Seconds of the slowest stage when the last one has the head: a layer less than the others
    where the layers are not divisible.

    Args:
        layers: seconds of one layer of each class.
        counts: layers of each class.
        ends: seconds of the ends, almost all of which are the head's.
        stages, virtual: stages, and chunks of layers on each.
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


def waiting(
    schedule: str,
    stages: Array,
    virtual: Array,
    microbatches: Array,
    tick: Array,
    weights: Array,
    *,
    lockstep: bool,
) -> Array:
    """Seconds that a stage waits in a step.

    Args:
        schedule: one of `SCHEDULES`; "none" without stages.
        stages, virtual, microbatches: stages, chunks of layers on each, and microbatches.
        tick: seconds of one microbatch on one stage, forward and backward.
        weights: seconds of that which compute gradients of weights.
        lockstep: whether all stages move at once.
    """
    rounds = stages - 1
    if schedule == "zero-bubble":
        filled = 0.0 if lockstep else np.minimum(rounds, microbatches - 1) * weights
        return np.maximum(0.0, rounds * (tick - weights) - filled)
    filling = (
        np.where(virtual > 1, -microbatches % stages * tick, 0.0)
        if schedule == "interleaved"
        else 0.0
    )
    return rounds * tick / virtual + filling


def bottleneck(seconds: Sequence[Array], counts: Sequence[int], chunks: Array) -> Array:
    """Seconds of the slowest chunk when a chain of layers is cut into chunks as evenly as can be.

    The chain is some classes of equal layers, one class after the other, and chunks are runs of
    whole layers. The best cut is found by bisection on the longest chunk that is allowed, each
    tried by filling chunks from the front, which is exact for chains.

    Args:
        seconds: of one layer of each class, arrays of equal length.
        counts: layers of each class.
        chunks: number of chunks.
    """
    if not counts:
        return np.zeros_like(chunks, dtype=float)
    if len(counts) == 1:
        return np.ceil(counts[0] / chunks) * seconds[0]
    total = sum(n * t for n, t in zip(counts, seconds, strict=True))
    if np.all(chunks == 1):
        return np.asarray(total, dtype=float)
    longest = np.maximum.reduce([np.asarray(t, dtype=float) for t in seconds])
    low, high = np.maximum(total / chunks, longest), np.asarray(total, dtype=float)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _chunks_needed(seconds, counts, middle) <= chunks
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return high


def _chunks_needed(seconds: Sequence[Array], counts: Sequence[int], most: Array) -> Array:
    """Chunks that filling from the front takes when none may be longer than `most` seconds."""
    used, room = np.zeros_like(most), np.zeros_like(most)
    slack = 1 + 1e-12
    for count, t in zip(counts, seconds, strict=True):
        t = np.maximum(t, 1e-30)
        here = np.minimum(np.floor(room * slack / t), count)
        left = count - here
        each = np.maximum(np.floor(most * slack / t), 1)
        more = np.ceil(left / each)
        used = used + more
        room = np.where(more > 0, most - (left - (more - 1) * each) * t, room - here * t)
    return used
