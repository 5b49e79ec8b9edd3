"""What islands refuse before anything runs."""

from __future__ import annotations

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError, StateError
from shardlib.lowering.islands.state import IslandsState
from shardlib.lowering.mesh.shardings import batch_path
from shardlib.lowering.runtime.random_keys import BatchDims


def require_islands(state: object, islands: int) -> None:
    """Refuses what is no state of so many islands.

    Args:
        state: what a user gave.
        islands: of the program.

    Raises:
        StateError: it is none.
    """
    if not isinstance(state, IslandsState):
        raise StateError(
            f"the state is of type {type(state).__name__}, and not of islands\nTry: program.init()"
        )
    if len(state.islands) != islands:
        raise StateError(
            f"the state has {len(state.islands)} islands, and the program {islands}\nTry: the"
            " program that it was made by"
        )


def require_rows(batch: Tree, dims: BatchDims, islands: int) -> None:
    """Refuses a batch whose rows do not divide among islands.

    Args:
        batch: of all islands.
        dims: the batch dim of each array, by path.
        islands: their number.

    Raises:
        BatchError: they do not.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        dim = dims[batch_path(path)]
        if isinstance(dim, int) and (np.ndim(leaf) <= dim or np.shape(leaf)[dim] % islands):
            raise BatchError(
                f"{batch_path(path)} has shape {np.shape(leaf)}, whose rows do not divide among"
                f" {islands} islands\nTry: the batch that the program was compiled for, whose rows"
                " are those of all islands"
            )
