"""What islands start with: outer parameters, which are those of all, and random streams of their
own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.islands.state import OuterState, ResidualState
from shardlib.lowering.runtime.random_keys import is_key
from shardlib.lowering.runtime.state import TrainState


def outer_shardings(mesh: Mesh, states: Sequence[NamedSharding]) -> list[NamedSharding]:
    """How what is outer is sharded: alike on all islands."""
    return [NamedSharding(mesh, one.spec) for one in states]


def _parameters(
    mesh: Mesh, states: Sequence[NamedSharding], trained: Sequence[Sequence[jax.Array]]
) -> list[jax.Array]:
    """The outer parameters before the first step, those that all islands start from: float32, on
    the devices of each.
    """
    found: list[jax.Array] = []
    for arrays, sharding in zip(
        zip(*trained, strict=True), outer_shardings(mesh, states), strict=True
    ):
        held: list[jax.Array] = []
        for array in arrays:
            assert isinstance(array.sharding, NamedSharding)
            own = NamedSharding(array.sharding.mesh, sharding.spec)
            copy = jax.jit(_float32, out_shardings=own)(array)
            held += [shard.data for shard in copy.addressable_shards]
        found.append(jax.make_array_from_single_device_arrays(arrays[0].shape, sharding, held))
    return found


def abstract_outer(
    mesh: Mesh, states: Sequence[NamedSharding], trained: Sequence[jax.ShapeDtypeStruct]
) -> OuterState:
    """What is outer, abstract, with shardings."""
    shardings = outer_shardings(mesh, states) if trained else []
    outer = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)
        for leaf, sharding in zip(trained, shardings, strict=True)
    ]
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    return OuterState(step=step, params=outer, momentum=outer)


def first_outer(
    mesh: Mesh, states: Sequence[NamedSharding], trained: Sequence[Sequence[jax.Array]]
) -> OuterState:
    """What is outer before the first step."""
    params = _parameters(mesh, states, trained) if trained else []
    zeros = [jax.jit(jnp.zeros_like, out_shardings=one.sharding)(one) for one in params]
    return OuterState(step=np.int32(0), params=params, momentum=zeros)


def zeros(leaf: Tree) -> jax.Array:
    """An array of zeros."""
    return jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def bytes_of(outer: OuterState | ResidualState) -> int:
    """Bytes of what is outer on a device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(outer)
    )


def _float32(array: jax.Array) -> jax.Array:
    """A float32 copy, in a buffer of its own."""
    return jnp.copy(array.astype(jnp.float32))


def streams_of(number: int, state: TrainState) -> TrainState:
    """A state whose model draws other random numbers than that of the first island."""
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
