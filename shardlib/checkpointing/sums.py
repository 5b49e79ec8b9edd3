"""How is a flipped bit found, on whatever mesh the array lives? Two sums over its bits that do not depend on the layout.

The bit patterns of the elements, as unsigned integers, are summed modulo 2**32 with weights that depend on the element's flat index alone.
All weights are odd: a single flipped bit changes a sum by an odd multiple of a power of two below 2**32, which is never zero. The second
weight scrambles the index (finaliser of MurmurHash3), so that errors that cancel in one sum do not cancel in the other. Integer addition
wraps and is associative, so that the order, the mesh and the number of processes change nothing. Indices wrap too: elements that are
2**32 apart have the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def sums(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Two sums of every array, uint32 [arrays, 2], by sorted path; pure and jittable."""
    rows = [_sums(arrays[path]) for path in sorted(arrays)]
    return jnp.stack(rows) if rows else jnp.zeros((0, 2), jnp.uint32)


def _sums(array: jax.Array) -> jax.Array:
    bits = _bits(array)
    index = _flat_index(bits.shape)
    # Element-wise and without a reshape: every device sums what it holds, and only the sums travel.
    return jnp.stack([jnp.sum(bits * weight, dtype=jnp.uint32) for weight in (2 * index + 1, _scrambled(index) | 1)])


def _bits(array: jax.Array) -> jax.Array:
    """The bits of every element as uint32, with an inner dim of 2 for 64-bit elements and for complex ones."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _bits(jnp.stack([array.real, array.imag], -1))
    if jnp.issubdtype(array.dtype, jnp.floating):
        return lax.bitcast_convert_type(array, _UNSIGNED[min(jnp.finfo(array.dtype).bits, 32)]).astype(jnp.uint32)
    if array.dtype.itemsize > 4:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return array.astype(jnp.uint32)


_UNSIGNED = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _flat_index(shape: tuple[int, ...]) -> jax.Array:
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1:]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return index


def _scrambled(index: jax.Array) -> jax.Array:
    mixed = (index ^ (index >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def by_path(arrays: Mapping[str, jax.Array], found: np.ndarray) -> dict[str, tuple[int, int]]:
    """The result of `sums` on the host by path."""
    return {path: (int(row[0]), int(row[1])) for path, row in zip(sorted(arrays), found, strict=True)}
