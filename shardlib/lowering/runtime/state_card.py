"""Arrays of a state as a card in a notebook: shape, dtype, and what a device has of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.runtime.sharding_tree import sharding_tree
from shardlib.planning.units.cards import card
from shardlib.planning.units.quantity import bytes_text

#: Arrays that are listed, the largest first.
_MOST = 40
_HEAD = ("array", "shape", "dtype", "sharded over", "a device")


def state_card(title: str, parts: Mapping[str, Tree]) -> str:
    """The arrays of a state as HTML; nothing is fetched from devices."""
    rows: list[tuple[int, tuple[str, ...]]] = []
    lines: list[str] = []
    for name, tree in parts.items():
        sized_rows = [
            _row(f"{name}{jax.tree_util.keystr(path)}", leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        ]
        if sized_rows:
            local = bytes_text(sum(size for size, _ in sized_rows))
            lines.append(f"{name}: {len(sized_rows)} arrays, {local} a device")
        rows += sized_rows
    rows.sort(key=lambda row: -row[0])
    if len(rows) > _MOST:
        lines.append(f"the {_MOST} largest of {len(rows)} arrays:")
    tree = "which device has which part, as a tree", sharding_tree(parts)
    return card(title, lines, rows=[row for _, row in rows[:_MOST]], head=_HEAD, drawn=tree)


def _row(name: str, leaf: Any) -> tuple[int, tuple[str, ...]]:
    """Bytes that a device has of an array, and its row."""
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape)
    local = sharding.shard_shape(shape) if sharding is not None else shape
    size = math.prod(local) * leaf.dtype.itemsize
    over = str(tuple(sharding.spec)) if isinstance(sharding, NamedSharding) else "-"
    shown = " x ".join(map(str, shape)) or "scalar"
    return size, (name, shown, str(leaf.dtype), over, bytes_text(size))
