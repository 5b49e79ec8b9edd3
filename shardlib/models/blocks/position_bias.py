"""Relative position biases: what a head adds to the score of a key for its distance from the query
(T5, arXiv:1910.10683, section 2.1).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def distance_buckets(
    queries: int, keys: int, *, buckets: int, max_distance: int, both: bool
) -> jax.Array:
    """The bucket of every pair: one for each of the short distances, then ever wider ones up to
    `max_distance`, and the last for all beyond.

    Args:
        queries: number of queries, at positions from 0.
        keys: number of keys.
        buckets: number of buckets.
        max_distance: where the last bucket begins.
        both: whether keys after the query have half of the buckets; otherwise they are as if they
            were at the query.

    Returns:
        int32 [queries, keys].
    """
    ahead = jax.lax.broadcasted_iota(jnp.int32, (queries, keys), 1) - jax.lax.broadcasted_iota(
        jnp.int32, (queries, keys), 0
    )
    first = jnp.where(ahead > 0, buckets // 2, 0) if both else 0
    count = buckets // 2 if both else buckets
    distance = jnp.abs(ahead) if both else jnp.maximum(-ahead, 0)
    exact = count // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(
        max_distance / exact
    )
    wide = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
    return first + jnp.where(distance < exact, distance, wide)


def position_bias(
    table: jax.Array, queries: int, keys: int, *, max_distance: int, both: bool
) -> jax.Array:
    """Bias [heads, queries, keys] of scores, float32, from a table [buckets, heads]; see
    `distance_buckets`.

    Args:
        table: float [buckets, heads].
        queries: positions of queries, from 0.
        keys: positions of keys, from 0.
        max_distance: from which on all distances share a bucket.
        both: whether keys after the query have buckets of their own.
    """
    found = distance_buckets(
        queries, keys, buckets=table.shape[0], max_distance=max_distance, both=both
    )
    # A product with rows of ones, as in T5X: of a gather, TPUs pad each row of heads to 128 lanes.
    return jnp.einsum(
        "bh,bqk->hqk",
        table.astype(jnp.float32),
        jax.nn.one_hot(found, table.shape[0], axis=0, dtype=jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
