"""Adapters of one base: each request names its own, and all of them run in one program.

Of the parameters that adapters have, those of all adapters are stacked; each token takes those of
the adapter that its request names (`jax.vmap` makes a batched product of it), and a token without
one the model's own. So `y = x W + x A B` costs a gather of A and B for each token (Chen et al.,
"Punica", arXiv:2310.18547), and W is read once for all.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.model import Tree
from shardlib.annotation.trees.paths import path_text
from shardlib.errors import ArgumentError, raise_all
from shardlib.lowering.serving.adapted import Adapted
from shardlib.lowering.serving.held.columns import Columns
from shardlib.lowering.serving.stored import Layered, is_held, is_stored
from shardlib.serving.scheduling.requests import Asked

#: Dotted path of a parameter -> the array that an adapter has in its place.
Parts = dict[str, jax.Array]


class Adapters:
    """Adapters of an engine.

    Args:
        most: of them; 0 for none.

    Attributes:
        rows: number of each, from 1 on, by name.
    """

    def __init__(self, limit: int) -> None:
        self.most = limit
        self.rows: dict[str, int] = {}
        self._stacks: dict[int, jax.Array] = {}

    def failures(self, request: Asked) -> list[str]:
        """Why the adapter of a request cannot be served; empty where it can."""
        if not request.adapter or request.adapter in self.rows:
            return []
        there = ", ".join(map(repr, self.rows)) or "none"
        return [f"there is no adapter {request.adapter!r}; there are {there}"]

    def wrapped(self, weights: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Weights with those of all adapters."""
        if not self._stacks:
            return weights
        return Adapted(params=weights[0], stacks=self._stacks), weights[1]

    def add(self, name: str, arrays: Tree, weights: tuple[Tree, Tree]) -> None:
        """One more adapter."""
        leaves = jax.tree_util.tree_leaves_with_path(weights[0], is_leaf=is_held)
        stored = any(map(is_stored, jax.tree.leaves(weights[0], is_leaf=is_stored)))
        places = {path_text(path): index for index, (path, _) in enumerate(leaves)}
        parts = parts_of(arrays)
        failures = [
            why
            for why, wrong in (
                ("weights are stored in eight bits", stored),
                (f"there is room for {self.most}", len({*self.rows, name}) > self.most),
                ("the name is empty", not name),
                ("it has no parameters", not parts),
            )
            if wrong
        ]
        for path, array in parts.items():
            if path not in places:
                failures.append(f"the model has no parameter {path}")
            elif tuple(array.shape) != tuple(leaves[places[path]][1].shape):
                parameter = list(leaves[places[path]][1].shape)
                failures.append(f"{path} is {list(array.shape)}; that of the model is {parameter}")
        adapted = {places[path] for path in parts if path in places}
        if self._stacks and adapted != set(self._stacks):
            failures.append("it has other parameters than the adapters that are there")
        if failures:
            raise_all(ArgumentError, f"the adapter {name!r} cannot be served", failures[:5])
        row = self.rows.get(name, len(self.rows) + 1)
        for path, array in parts.items():
            index, parameter = places[path], leaves[places[path]][1]
            stack = self._stacks.get(index)
            if stack is None:
                stack = empty_stack(parameter, self.most)
            new = jnp.asarray(array, parameter.dtype)
            self._stacks = {
                **self._stacks,
                index: jax.jit(
                    lambda stack, new, row: stack.at[row].set(new), out_shardings=stack.sharding
                )(stack, new, row - 1),
            }
        self.rows[name] = row


def parts_of(tree: Tree) -> Parts:
    """Arrays by dotted path."""
    if isinstance(tree, Mapping) and all(hasattr(array, "shape") for array in tree.values()):
        return {str(path): array for path, array in tree.items()}
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def empty_stack(parameter: jax.Array | Layered | Columns, count: int) -> jax.Array:
    """Room for so many arrays like one of the model, sharded as it is."""
    sharding = parameter.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.device_put(jnp.zeros((count, *parameter.shape), parameter.dtype), sharding)
