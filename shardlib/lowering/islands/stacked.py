"""Arrays of islands as one array over the devices of all, and back; no byte is copied.

Along their first dim the arrays stand one after the other, island by island: a dim of d rows
becomes one of K d, sharded over the islands outside of what shards it already. A device holds the
same bytes either way. Arrays without dims are given one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.axes import ISLAND


def mesh_of_all(meshes: Sequence[Mesh]) -> Mesh:
    """The mesh of all islands: those of the islands, one after the other."""
    devices, first = np.stack([mesh.devices for mesh in meshes]), meshes[0]
    names = (ISLAND.name, *first.axis_names)
    return Mesh(devices, names, axis_types=(AxisType.Auto, *first.axis_types))


def abstract_mesh_of_all(mesh: Mesh | AbstractMesh, islands: int) -> AbstractMesh:
    """The same without devices."""
    sizes = (islands, *mesh.shape.values())
    names = (ISLAND.name, *mesh.axis_names)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto, *mesh.axis_types))


def stacked_sharding(sharding: NamedSharding, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """How the stacked array of all islands is sharded."""
    first, *others = sharding.spec or (None,)
    inner = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    return NamedSharding(mesh, PartitionSpec((ISLAND.name, *inner), *others))


def stacked_shape(shape: Sequence[int], islands: int) -> tuple[int, ...]:
    """The shape of the stacked array."""
    first, *others = shape or (1,)
    return islands * first, *others


def stacked(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """The arrays of all islands as one."""
    one = [array if array.ndim else array.reshape(1) for array in arrays]
    first = one[0].sharding
    assert isinstance(first, NamedSharding)
    spec = stacked_sharding(first, mesh).spec
    return jax.make_array_from_single_device_arrays(
        stacked_shape(one[0].shape, len(one)),
        NamedSharding(mesh, spec, memory_kind=first.memory_kind),
        [shard.data for array in one for shard in array.addressable_shards],
    )


def unstacked(array: jax.Array, like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The array of each island of a stacked one."""
    return [_of_island(array, one) for one in like]


def over_islands(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Arrays of all islands, which are alike, as one over the devices of all."""
    first = arrays[0].sharding
    assert isinstance(first, NamedSharding)
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    sharding = NamedSharding(mesh, first.spec, memory_kind=first.memory_kind)
    return jax.make_array_from_single_device_arrays(arrays[0].shape, sharding, shards)


def local(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array of one island out of one that is the same on all."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, held(array, mesh))


def held(array: jax.Array, mesh: Mesh) -> list[jax.Array]:
    """What the devices of one island hold of an array."""
    found = {shard.device: shard.data for shard in array.addressable_shards}
    return [found[device] for device in mesh.devices.flat if device in found]


def _of_island(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    sharding: Any = like.sharding
    mine = held(array, sharding.mesh)
    array = jax.make_array_from_single_device_arrays(
        like.shape or (1,),
        sharding if like.shape else NamedSharding(sharding.mesh, PartitionSpec()),
        mine,
    )
    return array if like.shape else array.reshape(())
