"""Seconds of a program on a machine that others may use at the same time.

Other work only ever slows a run down, so the fastest of several runs counts. Where a program keeps
all cores busy, its processor time over the cores is what it takes without the others; where it does
not, processor time says too little.

>>> quiet_seconds([0.5, 0.3, 0.4], [0.4, 0.4, 0.4], cores=2, all_busy=True)
0.2
>>> quiet_seconds([0.5, 0.3, 0.4], [0.4, 0.4, 0.4], cores=2, all_busy=False)
0.3
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import jax

#: Seconds for which a program is run again and again.
BUDGET_S = 0.15
#: Runs at least, however long they take.
RUNS = 3


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quiet_seconds(
    walls: Sequence[float], processor: Sequence[float], *, cores: int, all_busy: bool
) -> float:
    """Seconds of a program without what others do.

    Args:
        walls: seconds of each run.
        processor: seconds that each run took of all cores together.
    """
    if not all_busy:
        return min(walls)
    return min(min(walls), sorted(processor)[len(processor) // 4] / cores)


def seconds_of(
    call: Callable[..., object], *operands: jax.Array, devices: int, budget_s: float = BUDGET_S
) -> float:
    """Seconds of a call that has been made before, so that it is compiled."""
    jax.block_until_ready(call(*operands))
    walls: list[float] = []
    processor: list[float] = []
    end = time.perf_counter() + budget_s
    while len(walls) < RUNS or time.perf_counter() < end:
        start, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(call(*operands))
        walls.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return quiet_seconds(walls, processor, cores=cores(), all_busy=devices >= cores())
