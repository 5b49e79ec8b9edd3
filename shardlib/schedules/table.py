"""The pipeline schedules by name: to add one is a file with its `Schedule` and a line here.

>>> named("interleaved").words(2), named("gpipe") in pipelines()
('interleaved with 2 chunks a stage', True)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardlib.schedules.gpipe import GPIPE
from shardlib.schedules.interleaved import INTERLEAVED
from shardlib.schedules.none import NONE
from shardlib.schedules.one_f_one_b import ONE_F_ONE_B
from shardlib.schedules.orders import Order
from shardlib.schedules.schedule import Array, Pipelines, Schedule
from shardlib.schedules.zero_bubble import ZERO_BUBBLE

_LISTED: tuple[Schedule, ...] = (NONE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)
#: Schedules by name, in the order in which planning tries them.
SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _LISTED}


def named(name: str) -> Schedule:
    """The schedule of a name."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}")
    return SCHEDULES[name]


def lowered(name: str) -> bool:
    """Whether there is a schedule of a name that programs are lowered to."""
    return name in SCHEDULES and SCHEDULES[name].lowered


def pipelines() -> tuple[Schedule, ...]:
    """The schedules of pipelines: all that have stages."""
    return tuple(schedule for schedule in SCHEDULES.values() if schedule.staged)


def orders(schedule: str, *, stages: int, microbatches: int, virtual: int = 1) -> tuple[Order, ...]:
    """The order of every stage, where stages wait for their neighbours alone."""
    return named(schedule).order(stages=stages, microbatches=microbatches, chunks=virtual)


def least_in_flight(shape: Pipelines) -> Array:
    """Microbatches that no schedule undercuts, see `Schedule.in_flight`."""
    return np.minimum.reduce([schedule.least_in_flight(shape) for schedule in pipelines()])


def most_put_off(*, lockstep: bool) -> float:
    """See `Schedule.put_off`: the most of all schedules."""
    return max(schedule.put_off(lockstep=lockstep) for schedule in pipelines())
