"""What is outer before the first step: the parameters that all islands start from."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding


def outer_shardings(mesh: Mesh, states: Sequence[NamedSharding]) -> list[NamedSharding]:
    """How what is outer is sharded: alike on all islands.

    Args:
        mesh: of all islands.
        states: of optimizer state on one island.
    """
    return [NamedSharding(mesh, one.spec) for one in states]


def outer_parameters(
    mesh: Mesh, states: Sequence[NamedSharding], trained: Sequence[Sequence[jax.Array]]
) -> list[jax.Array]:
    """The outer parameters before the first step, those that all islands start from: float32, on
    the devices of each.

    Args:
        mesh: of all islands.
        states: of optimizer state on one island.
        trained: the trained parameters of each island.
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


def _float32(array: jax.Array) -> jax.Array:
    """A float32 copy, in a buffer of its own."""
    return jnp.copy(array.astype(jnp.float32))
