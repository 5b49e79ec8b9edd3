"""The batch of all islands, and the part of each: rows one after the other, island by island."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
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
        batch: of all islands; rows divide by their number.
        dims: the batch dim of each array, by path; None for one without, a `Fold` for a key.
        islands: their number.
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
