"""Puts the arrays of a batch where a program expects them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.runtime.random_keys import dtype_of, is_key, placed_keys


def shapes_of_batch(batch: Tree) -> Tree:
    """Shapes and dtypes of a batch as JAX has them, without shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), dtype_of(leaf)), batch)


def placed(batch: Tree, target: Tree) -> Tree:
    """A batch on the devices; arrays that are in place already are passed on.

    Args:
        batch: arrays of the asked shapes and dtypes.
    """
    return jax.tree.map(_placed, batch, target)


def given(batch: Tree, target: Tree) -> Tree:
    """A batch for the call of one compiled program: as `placed`, but arrays of NumPy are left to
    the call, which puts them for less than half of what it costs to put them one by one.

    Args:
        batch: arrays of the asked shapes and dtypes.
    """
    if jax.process_count() > 1:  # a call takes arrays that are alike in all processes, and compares
        return placed(batch, target)
    return jax.tree.map(
        lambda leaf, aval: (
            np.asarray(leaf, aval.dtype) if isinstance(leaf, np.ndarray) else _placed(leaf, aval)
        ),
        batch,
        target,
    )


def _placed(leaf: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
    """A whole array as the step expects it. Several processes take each what its devices hold;
    `jax.device_put` would have them compare all of it first, every step.
    """
    if isinstance(leaf, jax.Array) and leaf.sharding == target.sharding:
        return leaf
    if is_key(leaf):
        return placed_keys(leaf, target.sharding)
    host = (
        np.asarray(leaf, target.dtype)
        if isinstance(leaf, (int, float, np.ndarray, np.generic))
        else leaf
    )
    if jax.process_count() > 1 and isinstance(host, np.ndarray):
        return jax.make_array_from_callback(
            target.shape, target.sharding, lambda index: host[index], dtype=target.dtype
        )
    return jax.device_put(host, target.sharding)
