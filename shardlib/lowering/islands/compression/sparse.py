"""The largest numbers of gradients alone (arXiv:1712.01887), in a region that is manual over all
mesh axes: each device sends those of its shard, and where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardlib.axes import ISLAND
from shardlib.exchanges.compressors import TopK
from shardlib.jax_types import Value


def largest(
    by: TopK,
    stage: int,
    islands: int,
    gradients: Sequence[Value],
    residuals: Sequence[Value],
    momenta: Sequence[Value],
) -> tuple[list[Value], list[Value], list[Value]]:
    """What is sent of gradients."""
    us = [by.momentum * u + g for g, u in zip(gradients, momenta, strict=True)]
    vs = [v + u for v, u in zip(residuals, us, strict=True)]
    places = [_places(v, by.sent(math.prod(v.shape), stage)) for v in vs]
    numbers = [v.reshape(-1)[place] for v, place in zip(vs, places, strict=True)]
    bits = [jax.lax.bitcast_convert_type(one, jnp.int32) for one in numbers]
    sent = jnp.concatenate([*bits, *places])
    every = jax.lax.all_gather(sent, ISLAND.name)
    means, start, half = list[Value](), 0, sent.shape[0] // 2
    for v, place in zip(vs, places, strict=True):
        size = place.shape[0]
        values = jax.lax.bitcast_convert_type(every[:, start : start + size], jnp.float32)
        where = every[:, half + start : half + start + size]
        zeros = jnp.zeros(math.prod(v.shape), jnp.float32)
        total = zeros.at[where.reshape(-1)].add(values.reshape(-1))
        means.append((total / islands).reshape(v.shape))
        start += size
    return means, _cleared(vs, places), _cleared(us, places)


def _places(array: Value, count: int) -> Value:
    """Where the largest numbers are; always as many."""
    flat = jnp.abs(array.reshape(-1))
    if count == flat.shape[0]:
        return jnp.arange(count, dtype=jnp.int32)
    return jax.lax.top_k(flat, count)[1].astype(jnp.int32)


def _cleared(arrays: Sequence[Value], places: Sequence[Value]) -> list[Value]:
    return [
        one.reshape(-1).at[place].set(0.0).reshape(one.shape)
        for one, place in zip(arrays, places, strict=True)
    ]
