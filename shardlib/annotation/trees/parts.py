"""Which leaves of a pytree are trained, and what becomes of the others?

A module of Equinox, or of any library whose modules are pytrees, has leaves that are no arrays:
activation functions, flags, rates. Its floating-point arrays are trained, its other arrays are
state that stays as it is, and the rest is kept as the initialiser made it. The loss gets the whole
module.

>>> parts = Parts.of({"w": jax.ShapeDtypeStruct((2,), "float32"), "act": len})
>>> parts.split({"w": 1.0, "act": len})[0], parts.whole({"act": None, "w": 2.0}, {})
({'act': None, 'w': 1.0}, {'act': <built-in function len>, 'w': 2.0})
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.report import Finding


def is_array(leaf: Tree) -> bool:
    """Whether a leaf is an array, or stands for one."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


def is_plain(leaves: Sequence[Tree]) -> bool:
    """Whether all leaves are arrays or floats: then all of them are trained."""
    return all(is_array(leaf) or isinstance(leaf, float) for leaf in leaves)


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """A tree, and which of its leaves are trained.

    Attributes:
        structure: of the whole tree.
        paths: of its leaves.
        kept: leaves that are no arrays, by position.
        trained: positions of floating-point arrays.
        fixed: positions of other arrays.
    """

    structure: jax.tree_util.PyTreeDef
    paths: tuple[str, ...]
    kept: dict[int, Any]
    trained: tuple[int, ...]
    fixed: tuple[int, ...]

    @staticmethod
    def of(tree: Tree) -> Parts:
        """Reads a tree."""
        leaves, structure = jax.tree.flatten(tree)
        paths = tuple(path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
        trained = tuple(
            index
            for index, leaf in enumerate(leaves)
            if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
        fixed = tuple(
            index for index, leaf in enumerate(leaves) if is_array(leaf) and index not in trained
        )
        return Parts(
            structure=structure,
            paths=paths,
            kept={index: leaf for index, leaf in enumerate(leaves) if not is_array(leaf)},
            trained=trained,
            fixed=fixed,
        )

    def split(self, tree: Tree) -> tuple[Tree, Tree]:
        """(what is trained, a tree like the whole one with None in the place of everything else;
        other arrays by path).
        """
        leaves = jax.tree.leaves(tree)
        trained = jax.tree.unflatten(
            self.structure,
            [leaf if index in self.trained else None for index, leaf in enumerate(leaves)],
        )
        return trained, {self.paths[index]: leaves[index] for index in self.fixed}

    def whole(self, params: Tree, state: Tree) -> Tree:
        """The whole tree around what is trained and the other arrays."""
        arrays = dict(zip(self.trained, jax.tree.leaves(params), strict=True)) | {
            index: state[self.paths[index]] for index in self.fixed
        }
        return jax.tree.unflatten(
            self.structure,
            [
                self.kept[index] if index in self.kept else arrays[index]
                for index in range(len(self.paths))
            ],
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is not trained though it is a number."""
        numbers = [
            f"{self.paths[index]} = {leaf!r}"
            for index, leaf in self.kept.items()
            if isinstance(leaf, (bool, int, float, complex))
        ]
        numbers += [self.paths[index] for index in self.fixed]
        if not numbers:
            return ()
        return (
            Finding(
                code="not-trained",
                severity="info",
                where=numbers[0].split(" ")[0],
                message=(
                    f"{len(numbers)} leaves of the module are numbers or integer arrays and stay as"
                    f" they are: {', '.join(numbers[:8])}"
                ),
                hint="make an array of what is to be trained",
            ),
        )


def made_abstractly(initialise: Callable[[jax.Array], Tree]) -> Tree:
    """What an initialiser makes, with `jax.ShapeDtypeStruct` in the place of arrays and all other
    leaves as they are.
    """
    seen: list[tuple[Any, list[Any]]] = []

    def arrays() -> list[Any]:
        leaves, structure = jax.tree.flatten(initialise(jax.random.key(0)))
        seen.append((structure, [None if is_array(leaf) else leaf for leaf in leaves]))
        return [leaf for leaf in leaves if is_array(leaf)]

    abstract = iter(jax.eval_shape(arrays))
    structure, leaves = seen[-1]
    return jax.tree.unflatten(
        structure, [next(abstract) if leaf is None else leaf for leaf in leaves]
    )
