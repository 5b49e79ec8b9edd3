"""States of several islands in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from shardlib.annotation.trees import Tree
from shardlib.checkpointing.tree import Spec
from shardlib.lowering.islands.program import (
    FlyingState,
    IslandsProgram,
    IslandsState,
    OuterState,
    ResidualState,
    apart,
    together,
)
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState

#: Of a step of the user's own, the state is any tree.
State: TypeAlias = TrainState | IslandsState | Tree
AnyProgram: TypeAlias = Program | IslandsProgram
#: What goes before the paths of arrays of islands.
OF_ISLANDS = "islands."
#: Names of what an optimizer, and all that comes with it, has in a training state.
_OPTIMIZER = ("opt_state", "guard", "exchange")


def form_of(state: State) -> Tree:
    """A tree with the arrays of a state as they are stored."""
    return together(state) if isinstance(state, IslandsState) else state


def state_of(form: Tree, like: State) -> State:
    """The state of a tree as `form_of` gives it."""
    return apart(form, like) if isinstance(like, IslandsState) else form


def islands_of(state: State) -> int:
    """Number of islands of a state."""
    return len(state.islands) if isinstance(state, IslandsState) else 1


def islands_in(arrays: Mapping[str, Spec]) -> int:
    """Number of islands of a checkpoint."""
    step = arrays.get(f"{OF_ISLANDS}step")
    return step.shape[0] if step is not None and step.shape else 1


def keeps_outer(arrays: Mapping[str, Spec]) -> bool:
    """Returns whether a checkpoint has outer parameters."""
    return any(path.startswith("outer.params.") for path in arrays)


def is_alike(arrays: Mapping[str, Spec], state: State) -> bool:
    """Returns whether a checkpoint has as many islands as a state, and outer parameters where that
    has.
    """
    exchange = state.exchange if isinstance(state, IslandsState) else None
    if not isinstance(state, TrainState | IslandsState):
        return True
    return (
        islands_in(arrays) == islands_of(state)
        and keeps_outer(arrays) == has_outer(state)
        and _has(arrays, "residual") == isinstance(exchange, ResidualState)
        and _has(arrays, "sent") == isinstance(exchange, FlyingState)
    )


def _has(arrays: Mapping[str, Spec], name: str) -> bool:
    return any(path.startswith(f"outer.{name}.") for path in arrays)


def has_outer(state: State) -> bool:
    """Returns whether a state has outer parameters."""
    exchange = state.exchange if isinstance(state, IslandsState) else None
    return isinstance(exchange, OuterState) and bool(exchange.params)


def without_optimizer(state: State) -> State:
    """A state without that of the optimizer and of what comes with it."""
    if isinstance(state, IslandsState):
        return replace(state, islands=tuple(_bare(island) for island in state.islands))
    return _bare(state)


def is_of_optimizer(path: str) -> bool:
    """Returns whether an array is of the state of an optimizer, or of what comes with it."""
    return path.removeprefix(OF_ISLANDS).partition(".")[0] in _OPTIMIZER


def anew(program: AnyProgram, state: State) -> State:
    """A state with its optimizers as before the first step."""
    if isinstance(program, IslandsProgram):
        assert isinstance(state, IslandsState)
        pairs = zip(program.programs, state.islands, strict=True)
        return replace(
            state, islands=tuple(own_program.anew(island) for own_program, island in pairs)
        )
    assert isinstance(state, TrainState)
    return program.anew(state)


def _bare(state: TrainState) -> TrainState:
    return TrainState(
        step=state.step, params=state.params, model_state=state.model_state, opt_state=()
    )
