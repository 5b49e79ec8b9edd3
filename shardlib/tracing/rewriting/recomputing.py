"""Is what is traced now a layer that its backward pass rematerialises?

What keeps little of itself for the backward pass may keep more in such a layer: it is in memory for
the backward pass of that layer alone.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from shardlib.jax_types import Function

_RECOMPUTES: ContextVar[bool] = ContextVar("shardlib_recomputes", default=False)


def recomputes() -> bool:
    """Whether what is traced now is rematerialised for its backward pass."""
    return _RECOMPUTES.get()


def recomputed(function: Function) -> Function:
    """A function inside of which `recomputes()` holds."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        token = _RECOMPUTES.set(True)
        try:
            return function(*arguments)
        finally:
            _RECOMPUTES.reset(token)

    return run
