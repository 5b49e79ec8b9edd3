"""Random streams of the models of islands: each island draws others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from shardlib.lowering.runtime.random_keys import is_key
from shardlib.lowering.runtime.state import TrainState


def streams_of(number: int, state: TrainState) -> TrainState:
    """A state whose model draws other random numbers than that of the first island.

    Args:
        number: of the island.
        state: with the streams of the first.
    """
    if number == 0:
        return state

    def other(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        keys = jax.jit(_folded, static_argnums=1, out_shardings=leaf.sharding)
        return keys(leaf, number)

    return replace(state, model_state=jax.tree.map(other, state.model_state))


def _folded(keys: jax.Array, number: int) -> jax.Array:
    flat = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return flat.reshape(keys.shape)
