"""The model's part of a state, as it is looked at from outside."""

from __future__ import annotations

import jax

from shardlib.annotation.trees.paths import path_text
from shardlib.errors import StateError
from shardlib.lowering.program.checks.belonging import require_own, require_state
from shardlib.lowering.runtime.donated import require_present
from shardlib.lowering.runtime.state import TrainState


def require_model(asked: str, state: TrainState, own: TrainState) -> None:
    """Refuses a state whose parameters and model state are gone or have other shapes."""
    require_state(asked, state)
    require_present(asked, state.inference)
    require_own(asked, state.inference, own.inference, laid_out=False)


def arrays_by_path(state: TrainState) -> dict[str, jax.Array]:
    """Parameters and model state by dotted path, parameters first; nothing is copied."""
    found: dict[str, jax.Array] = {}
    for tree in (state.params, state.model_state):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path_text(path)
            if name in found:
                raise StateError(
                    f"two arrays of the state are called {name}\nTry: names without dots, and"
                    " others for the model's state than for parameters"
                )
            found[name] = leaf
    return found
