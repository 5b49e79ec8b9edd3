"""Which parameter does an array of optimizer state belong to?"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.jax_types import KeyPath


def owned(path: KeyPath, leaf: Tree, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The parameter that an array of optimizer state belongs to: its path ends the array's, and it
    has the array's shape. None where there is none.
    """
    keys = path_text(path).split(".")
    names = (".".join(keys[start:]) for start in range(len(keys)))  # the longest suffix first
    return next((name for name in names if shapes.get(name) == tuple(leaf.shape)), None)


def shapes_of(params: Tree) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters, by path."""
    return {
        path_text(path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
