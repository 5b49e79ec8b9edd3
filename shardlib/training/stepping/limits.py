"""The limit above which a step leaves its loss out, of one island or of several."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from shardlib.lowering.islands.learned import first_of
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.islands.state import IslandsState
from shardlib.lowering.program.guards import limited
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState

S = TypeVar("S", TrainState, IslandsState)


def has_limit(program: Program | IslandsProgram) -> bool:
    """Whether a program has a guard that leaves spikes out."""
    guard = first_of(program).state.guard
    return guard is not None and guard.limit is not None


def limited_to(state: S, limit: float) -> S:
    """The state with a limit for the loss of the next step, the same on all islands.

    Args:
        state: of a program with such a guard.
        limit: the largest loss that is no spike.
    """
    if isinstance(state, IslandsState):
        return replace(state, islands=tuple(limited(one, limit) for one in state.islands))
    return limited(state, limit)
