"""Which arrays of the params are trained, and which are frozen?

The split lives here alone: a `Partition` takes the trained part out of a tree of params, and puts
the tree together again. Gradients, optimizer state and updates are trees like the trained part;
whatever else there is (layouts, states, checkpoints) has both.

>>> parts = Partition.of({"base": 1.0, "lora": {"a": 2.0, "b": 3.0}}, frozen={"base"})
>>> parts.trained({"base": 1.0, "lora": {"a": 2.0, "b": 3.0}})
{'lora': {'a': 2.0, 'b': 3.0}}
>>> parts.joined({"lora": {"a": 5.0, "b": 6.0}}, {"base": 1.0, "lora": {"a": 2.0, "b": 3.0}})
{'base': 1.0, 'lora': {'a': 5.0, 'b': 6.0}}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from shardlib.annotation.trees.paths import Tree, path_text


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The trained part of a tree of params.

    Attributes:
        flags: for each leaf in tree order, whether it is trained.
    """

    flags: tuple[bool, ...]

    @staticmethod
    def of(params: Tree, frozen: Collection[str]) -> Partition:
        """The partition of params, some of whose dotted paths are frozen."""
        return Partition(
            flags=tuple(
                (path_text(path) or "params") not in frozen
                for path, _ in jax.tree_util.tree_leaves_with_path(params)
            )
        )

    @property
    def whole(self) -> bool:
        """Whether all params are trained."""
        return all(self.flags)

    def trained(self, params: Tree) -> Tree:
        """The trained part: dicts without what is frozen, and None for that in other containers."""
        if self.whole:
            return params
        leaves, structure = jax.tree.flatten(params)
        return _pruned(
            structure.unflatten(
                [leaf if flag else None for leaf, flag in zip(leaves, self.flags, strict=True)]
            )
        )

    def joined(self, trained: Tree, params: Tree) -> Tree:
        """Params with another trained part."""
        if self.whole:
            return trained
        leaves, structure = jax.tree.flatten(params)
        fresh = iter(jax.tree.leaves(trained))
        return structure.unflatten(
            [next(fresh) if flag else leaf for leaf, flag in zip(leaves, self.flags, strict=True)]
        )

    def mapped(self, function: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Params whose trained part went through a function.

        Args:
            function: trained part -> trained part.
        """
        return self.joined(function(self.trained(params)), params)

    def numbered(self, positions: Iterable[int]) -> frozenset[int]:
        """Positions of trained leaves among all leaves, as positions among the trained ones."""
        number = {
            position: k
            for k, position in enumerate(
                position for position, flag in enumerate(self.flags) if flag
            )
        }
        return frozenset(number[position] for position in positions)


def _pruned(tree: Any) -> Any:
    """Nested dicts without branches that hold nothing."""
    if type(tree) is not dict:
        return tree
    branches = {key: _pruned(branch) for key, branch in tree.items()}
    return {key: branch for key, branch in branches.items() if jax.tree.leaves(branch)}
