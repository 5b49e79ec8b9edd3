"""Zero-bubble, the handcrafted schedule H1: 1F1B with the gradients of weights (W) apart
(arXiv:2401.10241, section 2.2 and table 1).

The backward pass is split into B, which the stage before waits for, and W, the gradients of
weights, which nothing waits for. Stage s does the first W after s + 1 B. So every stage holds as
much as the first does in 1F1B, and the W that are left fill the time in which 1F1B waits for the
last B: its bubble, (S - 1)(F + B + W), becomes (S - 1)(F + B - W). That takes m >= S: each
microbatch but the last has one W to fill a gap with, so the bubble is (S - 1)(F + B) - min(S, m) W
+ W. It takes W <= F and W <= B, too, which holds since every gradient of a weight has the FLOPs of
a matmul of each.

In a single program (SPMD) F and B fill S - 1 more ticks than there are microbatches each, and W
none: the bubble is (S - 1)(F + B). It keeps S more microbatches than 1F1B, those whose cotangents
wait for the products that make gradients of weights, which are about as many bytes as what the
forward pass saved.

>>> [str(task) for task in ZERO_BUBBLE.order(stages=2, microbatches=3, chunks=1)[1]]
['F0', 'B0', 'F1', 'B1', 'W0', 'F2', 'B2', 'W1', 'W2']
"""

from __future__ import annotations

import numpy as np

from shardlib.schedules.orders import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Order,
    Task,
    alternating,
    plain,
)
from shardlib.schedules.schedule import (
    Array,
    Pipelines,
    last_in_turn,
    one_in_turn,
    only_whole_stages,
    words_of,
)


class ZeroBubble:
    """1F1B with gradients of weights made late."""

    name = "zero-bubble"
    staged = True
    lowered = True
    forward_first = False
    backward_in_two = True

    def words(self, chunks: int) -> str:
        """The name."""
        return words_of(self.name, chunks)

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """1F1B with each W after the B that comes s microbatches later."""
        only_whole_stages(self.name, chunks)
        return tuple(_late_weights(microbatches, stages - s - 1, s) for s in range(stages))

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """One chunk alone."""
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        """Any number of microbatches."""
        return pipelines.chunks == 1

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Where nothing is rematerialised: what gradients of weights are made from is kept
        whatever the remat policy is.
        """
        return (1,) if chunks in (None, 1) and (pinned or policy == "none") else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """As 1F1B, and S cotangents more in a single program."""
        return _with_cotangents(pipelines)

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """The same: there is one chunk."""
        return _with_cotangents(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return last_in_turn(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """(S - 1)(F + B), less the W that fill it where stages wait for their neighbours alone."""
        assert weights is not None, "a bubble filled with weights needs their seconds"
        rounds, micro = pipelines.stages - 1, pipelines.microbatches
        filled = 0.0 if pipelines.lockstep else np.minimum(rounds, micro - 1) * weights
        return np.maximum(0.0, rounds * (tick - weights) - filled)

    def rounds(self, pipelines: Pipelines) -> Array:
        """S - 1."""
        return (pipelines.stages - 1) / np.ones_like(pipelines.chunks)

    def put_off(self, *, lockstep: bool) -> float:
        """Once, where W is late, and once more where it fills a gap."""
        return 1.0 if lockstep else 2.0


def _with_cotangents(pipelines: Pipelines) -> Array:
    in_flight = one_in_turn(pipelines)
    if not pipelines.lockstep:
        return in_flight
    return np.where(pipelines.stages > 1, in_flight + pipelines.stages, in_flight)


def _late_weights(microbatches: int, first: int, late: int) -> Order:
    """1F1B with each W after the B that comes `late` microbatches later."""
    tasks: list[Task] = []
    for task in alternating(plain(FORWARD, microbatches), plain(BACKWARD, microbatches), first):
        tasks.append(task)
        if task.kind == BACKWARD and task.microbatch >= late:
            tasks.append(Task(kind=WEIGHTS, microbatch=task.microbatch - late))
    return (*tasks, *plain(WEIGHTS, microbatches)[max(0, microbatches - late) :])


ZERO_BUBBLE = ZeroBubble()
