"""Values of a traced function are pinned to shardings; on one device there is nothing to pin."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.mesh.memories import HOST


def held(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A value held to a layout, inside a traced function; as it is where there is one device."""
    if sharding.mesh.size == 1 and sharding.memory_kind != HOST:
        return value
    return jax.lax.with_sharding_constraint(value, sharding)


def constrain(tree: Tree, shardings: Tree) -> Tree:
    """Pins the layout of every leaf, inside a traced function."""
    return jax.tree.map(held, tree, shardings)


def moved(tree: Tree, before: Tree, after: Tree) -> Tree:
    """Pins the leaves that change their layout; the others are laid out already."""
    return jax.tree.map(
        lambda leaf, old, new: leaf if old == new else held(leaf, new), tree, before, after
    )


def returning(gradient: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """The identity, whose gradient comes back in a layout: that of a parameter laid out for the
    optimizer, so that the compiler can reduce-scatter it.
    """
    if gradient.mesh.size == 1:
        return lambda leaf: leaf

    @jax.custom_vjp
    def same(leaf: jax.Array) -> jax.Array:
        return leaf

    same.defvjp(
        lambda leaf: (leaf, None),
        lambda _, cotangent: (jax.lax.with_sharding_constraint(cotangent, gradient),),
    )
    return same
