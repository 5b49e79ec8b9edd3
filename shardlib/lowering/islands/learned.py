"""What a training run has learned, whether there is one island or several."""

from __future__ import annotations

from shardlib.lowering.islands.checks import require_islands
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.islands.state import IslandsState
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState


def learned(program: Program | IslandsProgram, state: TrainState | IslandsState) -> TrainState:
    """A state with the parameters that a run is about: of islands the outer ones."""
    if isinstance(program, IslandsProgram):
        require_islands(state, len(program.programs))
        assert isinstance(state, IslandsState)
        return program.outer(state)
    assert isinstance(state, TrainState)
    return state


def first_of(program: Program | IslandsProgram) -> Program:
    """The program of the first island, which has the model and the optimizer; the program itself
    where there is one island.
    """
    return program.programs[0] if isinstance(program, IslandsProgram) else program
