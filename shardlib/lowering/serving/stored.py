"""Weights of eight bits, each with a scale that some elements share.

A step computes with them as with any others: where an equation multiplies, values are scaled to the
dtype of the model, which compilers do as they read them, so that memory holds and moves bytes.

>>> stored = store(jnp.asarray([[1.0, -127.0], [2.0, 254.0]]), 1, "int8")
>>> stored.values.tolist(), plain(stored).tolist()
([[1, -127], [1, 127]], [[1.0, -127.0], [2.0, 254.0]])
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Value

#: Dtype and largest value of each way to store.
DTYPES = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Stored:
    """An array of eight bits.

    Attributes:
        values: as they are stored.
        scale: float32, 1 long along the dim whose elements share it.
        dtype: of the array that it stands for.
    """

    values: jax.Array
    scale: jax.Array
    dtype: str = field(metadata={"static": True})


def store(array: Value, dim: int, how: str) -> Stored:
    """An array in eight bits.

    Args:
        array: of floats.
        dim: whose elements share a scale.
        how: a word of `DTYPES`.
    """
    dtype, most = DTYPES[how]
    wide = array.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=dim, keepdims=True) / most, 1e-30)
    values = wide / scale
    if how == "int8":
        values = jnp.round(values)
    return Stored(
        values=jnp.clip(values, -most, most).astype(dtype), scale=scale, dtype=str(array.dtype)
    )


def plain(value: Value | Stored) -> Value:
    """The array that a value stands for."""
    if not isinstance(value, Stored):
        return value
    dtype = jnp.dtype(value.dtype)
    return value.values.astype(dtype) * value.scale.astype(dtype)


def is_stored(value: object) -> bool:
    """Whether a value is an array of eight bits."""
    return isinstance(value, Stored)


def all_plain(tree: Tree) -> Tree:
    """A tree of arrays in place of one with arrays of eight bits."""
    return jax.tree.map(plain, tree, is_leaf=is_stored)


def fitting(array: Value, dtype: jnp.dtype) -> Value:
    """An array in the dtype of a cache; what eight bits of floats cannot hold is the largest value
    that they can.

    Args:
        array: keys or values.
        dtype: of the cache.
    """
    if dtype == jnp.float8_e4m3fn:
        most = DTYPES["fp8"][1]
        array = jnp.clip(array, -most, most)
    return array.astype(dtype)
