"""Draws of a microbatch at the positions that its rows have in the whole batch.

>>> key, rows = jax.random.key(0), jnp.arange(1, 8, 2, dtype=jnp.uint32)
>>> whole = jax.random.bits(key, (3, 8))
>>> part = bits(key, rows, Draw(dim=1, inner=1), shape=(3, 4), parts=2, width=32)
>>> bool((part == whole[:, 1::2]).all())
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from shardlib.jax_types import Eqn
from shardlib.tracing.rows.draws import Draw

_LOW = 0xFFFFFFFF


def drawn(
    eqn: Eqn, keys: jax.Array, rows: jax.Array, draw: Draw, parts: int
) -> tuple[jax.Array, ...]:
    """The results of a draw."""
    shape = tuple(eqn.params["shape"])
    if eqn.primitive.name == "random_bits":
        return (bits(keys, rows, draw, shape=shape, parts=parts, width=eqn.params["bit_width"]),)
    words = jnp.stack(_threefry(keys, rows, draw, shape, parts), axis=-1)
    return (jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys)),)


def bits(
    keys: jax.Array, rows: jax.Array, draw: Draw, *, shape: Sequence[int], parts: int, width: int
) -> jax.Array:
    """Random bits [*keys.shape, *shape] as `jax.random.bits` draws them for the whole batch."""
    high, low = _threefry(keys, rows, draw, shape, parts)
    if width == 64:
        return high.astype(jnp.uint64) << 32 | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{width}")


def _threefry(
    keys: jax.Array, rows: jax.Array, draw: Draw, shape: Sequence[int], parts: int
) -> list[jax.Array]:
    """Two words for each position, [*keys.shape, *shape] each."""
    words = jax.random.key_data(keys)
    full_shape = (*keys.shape, *shape)
    ones = (1,) * len(shape)
    return threefry2x32_p.bind(
        *(
            jnp.broadcast_to(words[..., index].reshape(*keys.shape, *ones), full_shape)
            for index in (0, 1)
        ),
        *(jnp.broadcast_to(word, full_shape) for word in positions(rows, draw, shape, parts)),
    )


def positions(
    rows: jax.Array, draw: Draw, shape: Sequence[int], parts: int
) -> tuple[jax.Array, jax.Array]:
    """The positions of the elements of a microbatch's draw in that of the whole batch: the higher
    and the lower 32 bits, of a shape that broadcasts to `shape`.
    """
    sizes = [size * (parts if dim == draw.dim else 1) for dim, size in enumerate(shape)]
    high = low = jnp.zeros((1,) * len(shape), jnp.uint32)
    for dim, size in enumerate(shape):
        along = jnp.arange(size, dtype=jnp.uint32)
        if dim == draw.dim:
            inner = jnp.arange(draw.inner, dtype=jnp.uint32)
            along = (rows[:, None] * jnp.uint32(draw.inner) + inner).reshape(size)
        more = [
            word.reshape(*(-1 if axis == dim else 1 for axis in range(len(shape))))
            for word in _times(along, math.prod(sizes[dim + 1 :]))
        ]
        after = low + more[1]
        high, low = high + more[0] + (after < low).astype(jnp.uint32), after
    return high, low


def _times(numbers: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """32-bit numbers times a factor of up to 64 bits: the higher and the lower 32 bits."""
    first, second = factor & 0xFFFF, (factor >> 16) & 0xFFFF
    low, high = numbers & 0xFFFF, numbers >> 16
    corner, cross, two = low * first, low * second, high * first
    middle = (corner >> 16) + (cross & 0xFFFF) + (two & 0xFFFF)
    carried = high * second + (cross >> 16) + (two >> 16) + (middle >> 16)
    return carried + numbers * jnp.uint32((factor >> 32) & _LOW), numbers * jnp.uint32(
        factor & _LOW
    )
