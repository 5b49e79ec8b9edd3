"""No schedule: a step without pipeline stages.

>>> NONE.words(1), NONE.staged
('', False)
"""

from __future__ import annotations

import numpy as np

from shardlib.schedules.orders import Order
from shardlib.schedules.schedule import Array, Pipelines


class NoSchedule:
    """A step without stages: one microbatch at a time, and nothing waits."""

    name = "none"
    staged = False
    lowered = True
    forward_first = False
    backward_in_two = False

    def words(self, chunks: int) -> str:
        """Nothing: there are no stages to speak of."""
        return ""

    def order(self, *, stages: int, microbatches: int, chunks: int) -> tuple[Order, ...]:
        """None."""
        raise ValueError(f"there is no schedule {self.name!r}")

    def allows(self, chunks: int, *, lockstep: bool) -> bool:
        """One chunk alone: all layers."""
        return chunks == 1

    def fits(self, pipelines: Pipelines) -> Array:
        """All that have no stages."""
        return pipelines.stages == 1

    def tried(
        self, *, pinned: bool, chunks: int | None, policy: str, limit: int
    ) -> tuple[int, ...]:
        """Where it is pinned."""
        return (1,) if pinned and chunks in (None, 1) else ()

    def in_flight(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return np.ones(len(pipelines.stages))

    def least_in_flight(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return self.in_flight(pipelines)

    def held_by_last(self, pipelines: Pipelines) -> Array:
        """One microbatch."""
        return self.in_flight(pipelines)

    def waiting(self, pipelines: Pipelines, tick: Array, weights: Array | None) -> Array:
        """No seconds."""
        return np.zeros(len(pipelines.stages))

    def rounds(self, pipelines: Pipelines) -> Array:
        """No rounds."""
        return np.zeros(len(pipelines.stages))

    def put_off(self, *, lockstep: bool) -> float:
        """Nothing."""
        return 0.0


NONE = NoSchedule()
