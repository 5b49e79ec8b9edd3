"""Decisions of one process for all, and failures that are known to all, so that none waits for ever
for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlib import errors
from shardlib.processes.agreement import all_say

T = TypeVar("T")


def is_first() -> bool:
    """Whether this process is the one that deletes and renames."""
    return jax.process_index() == 0


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
    return (
        well
        if jax.process_count() == 1
        else bool(np.all(multihost_utils.process_allgather(np.bool_(well))))
    )


def first_decides(name: str, decide: Callable[[], T]) -> T | None:
    """What the first process comes to; nothing in the others, or the error that the first has come
    to; to be called by all.
    """
    if jax.process_count() == 1:
        return decide()
    if not is_first():
        _raise_alike(all_say(name, "")[0])
        return None
    try:
        decision = decide()
    except errors.ShardlibError as error:
        all_say(name, json.dumps({"kind": type(error).__name__, "message": str(error)}))
        raise
    all_say(name, "")
    return decision


def _raise_alike(message: str) -> None:
    if message:
        data: dict[str, Any] = json.loads(message)
        raise getattr(errors, data["kind"], errors.ShardlibError)(data["message"])
