"""What do all processes agree on? One decides for all, and one that fails is known to all, so that none waits for ever for another."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process is the one that deletes and renames."""
    return jax.process_index() == 0


def options() -> ocp.options.MultiprocessingOptions:
    """How Orbax waits for other processes: by JAX's coordination service.

    Its default are collectives on the devices, which must not run in a thread beside those of the training loop.
    """
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def steps_of_first(steps: Sequence[int]) -> tuple[int, ...]:
    """The steps that the first process sees; to be called by all."""
    if jax.process_count() == 1:
        return tuple(steps)
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    numbers = np.zeros(count, np.int32)
    numbers[: min(count, len(steps))] = steps[:count]
    return tuple(int(step) for step in multihost_utils.broadcast_one_to_all(numbers))


def all_well(well: bool) -> bool:
    """Whether it went well in every process; to be called by all."""
    return well if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.bool_(well))))
