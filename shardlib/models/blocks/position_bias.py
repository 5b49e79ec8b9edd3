"""Relative position biases: what a head adds to the score of a key for its distance from the query
(T5, arXiv:1910.10683, section 2.1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardlib.functions.biases import BiasForm


def position_bias(
    table: jax.Array, queries: int, keys: int, *, max_distance: int, both: bool
) -> jax.Array:
    """Bias [heads, queries, keys] of scores, float32, from a table [buckets, heads]; see
    `shardlib.functions.biases`.

    Args:
        table: float [buckets, heads].
    """
    shape = queries, keys
    ahead = jax.lax.broadcasted_iota(jnp.int32, shape, 1) - jax.lax.broadcasted_iota(
        jnp.int32, shape, 0
    )
    return BiasForm(kind="relative", max_distance=max_distance, both=both).of(table, ahead)
