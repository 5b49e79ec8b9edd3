"""How is a flipped bit found, on whatever mesh the array lives? Two sums over its bits that do not
depend on the layout.

The bit patterns of the elements, as unsigned integers, are summed modulo 2**32 with weights that
depend on the element's flat index alone. All weights are odd: a single flipped bit changes a sum by
an odd multiple of a power of two below 2**32, which is never zero. The second weight scrambles the
index (finaliser of MurmurHash3), so that errors that cancel in one sum do not cancel in the other.
Integer addition wraps and is associative, so that the order, the mesh and the number of processes
change nothing. Indices wrap too: elements that are 2**32 apart have the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


def sums(
    arrays: Mapping[str, jax.Array], shardings: Mapping[str, Sharding] | None = None
) -> jax.Array:
    """Two sums of every array, uint32 [arrays, 2], by sorted path; pure and jittable."""
    rows = [_spread(arrays[path], (shardings or {}).get(path)) for path in sorted(arrays)]
    return jnp.stack(rows) if rows else jnp.zeros((0, 2), jnp.uint32)


def _spread(array: jax.Array, sharding: Sharding | None) -> jax.Array:
    """The sums of an array by those of its pieces. In automatic partitioning a reduction of two
    arrays at once would gather them.
    """
    if (
        not isinstance(sharding, NamedSharding)
        or not isinstance(sharding.mesh, Mesh)
        or jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    ):
        return _sums(array, array.shape, ())
    cuts = [
        () if dim is None else dim if isinstance(dim, tuple) else (dim,) for dim in sharding.spec
    ]
    names = tuple(name for dim in cuts for name in dim)

    def piece(local: jax.Array) -> jax.Array:
        offsets = tuple(
            lax.axis_index(dim) * local.shape[number] if dim else 0
            for number, dim in enumerate(cuts)
        )
        sums = _sums(local, array.shape, offsets)
        return lax.psum(sums, names) if names else sums

    return jax.shard_map(
        piece,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=PartitionSpec(),
        check_vma=False,
    )(array)


def _sums(piece: jax.Array, shape: tuple[int, ...], offsets: Sequence[Any]) -> jax.Array:
    """The sums of a piece of an array of some shape, whose first element is at `offsets`; dims
    beyond those begin at 0.
    """
    bits = _bits(piece)
    index = _flat_index(bits.shape, (*shape, *bits.shape[piece.ndim :]), offsets)
    zero = jnp.uint32(0)
    return jnp.stack(
        lax.reduce(
            (bits * (2 * index + 1), bits * (_scrambled(index) | 1)),
            (zero, zero),
            lambda left, right: (left[0] + right[0], left[1] + right[1]),
            tuple(range(bits.ndim)),
        )
    )


def _bits(array: jax.Array) -> jax.Array:
    """The bits of every element as uint32, with an inner dim of 2 for 64-bit elements and for
    complex ones.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _bits(jnp.stack([array.real, array.imag], -1))
    if jnp.issubdtype(array.dtype, jnp.floating):
        return lax.bitcast_convert_type(
            array, _UNSIGNED[min(jnp.finfo(array.dtype).bits, 32)]
        ).astype(jnp.uint32)
    if array.dtype.itemsize > 4:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return array.astype(jnp.uint32)


_UNSIGNED = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _flat_index(
    local: tuple[int, ...], shape: tuple[int, ...], offsets: Sequence[Any]
) -> jax.Array:
    """Flat indices, in an array of some shape, of a piece of it."""
    index = jnp.zeros(local, jnp.uint32)
    for dim in range(len(local)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        place = lax.broadcasted_iota(jnp.uint32, local, dim) + jnp.asarray(
            offsets[dim] if dim < len(offsets) else 0
        ).astype(jnp.uint32)
        index += place * jnp.uint32(stride)
    return index


def _scrambled(index: jax.Array) -> jax.Array:
    mixed = (index ^ (index >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def by_path(arrays: Mapping[str, jax.Array], rows: np.ndarray) -> dict[str, tuple[int, int]]:
    """The result of `sums` on the host by path.

    Args:
        rows: uint32 [arrays, 2], in the order of the sorted paths.
    """
    return {
        path: (int(row[0]), int(row[1])) for path, row in zip(sorted(arrays), rows, strict=True)
    }
