"""The batch of all islands, and the part of each: rows one after the other, island by island."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.axes import ISLAND
from shardlib.lowering.islands.stacked import held
from shardlib.lowering.mesh.shardings import batch_path
from shardlib.lowering.runtime.random_keys import BatchDims, Fold


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IslandBatches:
    """A batch for each island, placed on its devices.

    Attributes:
        islands: the batches.
    """

    islands: tuple[Tree, ...]


def parts(batch: Tree, dims: BatchDims, islands: int) -> tuple[Tree, ...]:
    """The part of a batch that each island trains on. A random key that belongs to no row is
    another one on each.

    Args:
        dims: the batch dim of each array, by path; None for one without, a `Fold` for a key.
    """

    def part(number: int) -> Tree:
        def of_leaf(path: Any, leaf: Any) -> Any:
            dim = dims[batch_path(path)]
            if isinstance(dim, Fold):
                return dim.stacked(jnp.asarray(leaf), islands)[number]
            if dim is None:
                return leaf
            rows = leaf.shape[dim] // islands
            where = [slice(None)] * dim + [slice(number * rows, (number + 1) * rows)]
            return leaf[tuple(where)]

        return jax.tree_util.tree_map_with_path(of_leaf, batch)

    return tuple(part(number) for number in range(islands))


def of_all(batch: Tree, dims: BatchDims, mesh: Mesh) -> Tree:
    """The abstract batch of all islands, sharded over the islands, and then as on one."""

    def of_leaf(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        dim, shape, spec = dims[batch_path(path)], list(leaf.shape), [*leaf.sharding.spec]
        if isinstance(dim, int):
            spec += [None] * (dim + 1 - len(spec))
            inner = spec[dim] or ()
            spec[dim] = (ISLAND.name, *((inner,) if isinstance(inner, str) else inner))
            shape[dim] *= mesh.shape[ISLAND.name]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(of_leaf, batch)


def placed_parts(batch: Tree, whole: Tree, batches: IslandBatches) -> tuple[Tree, ...]:
    """The parts of a batch that lies on the devices of all islands, without a copy; nothing where
    it does not.
    """
    leaves, structure = jax.tree.flatten(batch)
    if not all(
        isinstance(leaf, jax.Array)
        and leaf.sharding == asked.sharding
        and leaf.shape == asked.shape
        for leaf, asked in zip(leaves, jax.tree.leaves(whole), strict=True)
    ):
        return ()
    return tuple(
        structure.unflatten(
            [_own(leaf, asked) for leaf, asked in zip(leaves, jax.tree.leaves(one), strict=True)]
        )
        for one in batches.islands
    )


def _own(leaf: jax.Array, asked: jax.ShapeDtypeStruct) -> jax.Array:
    sharding: Any = asked.sharding
    return jax.make_array_from_single_device_arrays(
        asked.shape, sharding, held(leaf, sharding.mesh)
    )
