"""The state of islands as named arrays over the devices of all: what a checkpoint has of it. No
byte of an array is copied, and every device holds what it held.

    islands.params.up    trained parameters of all islands, stacked; likewise all else of a state
    frozen.table         parameters that no step changes, once
    outer.params.up      what belongs to all islands, by the paths of trained parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.lowering.islands.stacked import (
    local,
    mesh_of_all,
    stacked,
    stacked_shape,
    stacked_sharding,
    unstacked,
)
from shardlib.lowering.islands.state import IslandsState
from shardlib.lowering.runtime.state import TrainState


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StoredIslands:
    """The state of islands, each array over the devices of all.

    Attributes:
        islands: states of the islands, each array stacked; of the parameters the trained ones, by
            path.
        frozen: parameters that are not trained, by path.
        outer: what belongs to all islands: by the name of the field, and there by the path of the
            parameter.
    """

    islands: TrainState
    frozen: dict[str, Tree]
    outer: dict[str, Tree]


def together(state: IslandsState) -> StoredIslands:
    """The state of islands as arrays over the devices of all."""
    mesh = mesh_of_islands(state)
    split = [_split(one.params, state.trained) for one in state.islands]
    states = [
        replace(one, params=trained) for one, (trained, _) in zip(state.islands, split, strict=True)
    ]
    return StoredIslands(
        islands=jax.tree.map(lambda *leaves: _stacked(leaves, mesh), *states),
        frozen=jax.tree.map(lambda *leaves: _alike(leaves, mesh), *(one for _, one in split)),
        outer={
            field.name: _over_all(_by_path(getattr(state.exchange, field.name), state), mesh)
            for field in fields(state.exchange)
        },
    )


def apart(stored: StoredIslands, like: IslandsState) -> IslandsState:
    """The state of islands out of arrays over the devices of all."""
    count = len(like.islands)
    trained, frozen = zip(*(_split(one.params, like.trained) for one in like.islands), strict=True)
    wanted = [
        replace(one, params=params) for one, params in zip(like.islands, trained, strict=True)
    ]
    leaves, structure = jax.tree.flatten(stored.islands)
    split = [
        unstacked(leaf, ones)
        for leaf, ones in zip(leaves, zip(*map(jax.tree.leaves, wanted), strict=True), strict=True)
    ]
    islands: list[TrainState] = []
    for number in range(count):
        own = structure.unflatten([arrays[number] for arrays in split])
        fixed = {
            path: local(array, frozen[number][path].sharding)
            for path, array in stored.frozen.items()
        }
        islands.append(replace(own, params=_joined(like.islands[number].params, own.params, fixed)))
    return replace(like, islands=tuple(islands), exchange=_outer(stored.outer, like))


def on_all(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array of one island as one that is the same on all."""
    sharding: Any = leaf.sharding
    moved = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=moved)


def mesh_of_islands(state: IslandsState) -> Mesh:
    """The mesh of all islands of a state."""
    return mesh_of_all([one.step.sharding.mesh for one in state.islands])


def _split(params: Tree, trained: Sequence[str]) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Trained parameters and the others, by path."""
    wanted = set(trained)
    found = {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return (
        {path: leaf for path, leaf in found.items() if path in wanted},
        {path: leaf for path, leaf in found.items() if path not in wanted},
    )


def _joined(like: Tree, trained: dict[str, Tree], frozen: dict[str, Tree]) -> Tree:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: trained[name] if (name := path_text(path)) in trained else frozen[name],
        like,
    )


def _by_path(value: Tree, state: IslandsState) -> Tree:
    """A list with an array for each trained parameter as a dict by path; others as they are."""
    if isinstance(value, list) and len(value) == len(state.trained):
        return dict(zip(state.trained, value, strict=True))
    return value


def _outer(stored: dict[str, Tree], like: IslandsState) -> Any:
    """What is outer, as the program holds it: numbers on the host, and lists."""
    found: dict[str, Tree] = {}
    for name, value in stored.items():
        asked = getattr(like.exchange, name)
        if isinstance(asked, list) and isinstance(value, dict):
            found[name] = [value[path] for path in like.trained]
        else:
            found[name] = np.asarray(value)[()] if np.ndim(value) == 0 else value
    return replace(like.exchange, **found)


def _stacked(leaves: Sequence[Any], mesh: Mesh) -> Any:
    """One array of all islands, abstract where its parts are."""
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        spec, kind = stacked_sharding(leaves[0].sharding, mesh).spec, leaves[0].sharding.memory_kind
        return jax.ShapeDtypeStruct(
            stacked_shape(leaves[0].shape, len(leaves)),
            leaves[0].dtype,
            sharding=NamedSharding(mesh, spec, memory_kind=kind),
        )
    return stacked(leaves, mesh)


def _alike(leaves: Sequence[Any], mesh: Mesh) -> Any:
    """One array that is the same on all islands, abstract where its parts are."""
    like = on_all(leaves[0], mesh)
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return like
    shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _over_all(value: Tree, mesh: Mesh) -> Tree:
    """What is outer with numbers of the host on the devices of all islands."""
    whole = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> Any:
        held = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
        return leaf if held else jax.device_put(leaf, whole)

    return jax.tree.map(put, value)
