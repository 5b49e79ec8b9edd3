"""What islands refuse before anything runs."""

from __future__ import annotations

from shardlib.errors import StateError
from shardlib.lowering.islands.state import IslandsState


def require_islands(state: object, islands: int) -> None:
    """Refuses what is no state of so many islands."""
    if not isinstance(state, IslandsState):
        raise StateError(
            f"the state is of type {type(state).__name__}, and not of islands\nTry: program.init()"
        )
    if len(state.islands) != islands:
        raise StateError(
            f"the state has {len(state.islands)} islands, and the program {islands}\nTry: the"
            " program that it was made by"
        )
