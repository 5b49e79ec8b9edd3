"""Ranks of processes that run one program, and what they agree on."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlib import _jax_compat

#: Steps between two times that processes ask each other whether one of them wants to stop.
ASK_EVERY = 10


def rank() -> int:
    """Number of this process."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process is the one that speaks for all; asking does not start JAX's devices."""
    coordination = _jax_compat.coordination()
    return coordination is None or coordination[1] == 0


def is_alone() -> bool:
    """Whether this process is the only one of its job; asking does not start JAX's devices."""
    coordination = _jax_compat.coordination()
    return coordination is None or coordination[2] == 1


def anywhere(condition: bool, *, needed: bool, step: int = 0) -> bool:
    """Whether this holds in any process; all of them get the same answer, at the same step."""
    if jax.process_count() == 1:
        return condition
    if not needed or step % ASK_EVERY:
        return False
    return bool(np.any(multihost_utils.process_allgather(np.asarray(condition))))
