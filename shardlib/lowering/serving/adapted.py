"""Parameters of which some tokens have others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Value
from shardlib.lowering.serving.stored import Layered, is_held, plain


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adapted:
    """Parameters, and those of adapters.

    Attributes:
        params: of the base.
        stacks: number of a leaf of the params -> [adapters, ...], what they have in its place.
    """

    params: Tree
    stacks: Mapping[int, jax.Array]


def base_of(weights: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """(params, state) of the model itself."""
    params, state = weights
    return (params.params if isinstance(params, Adapted) else params), state


def leaves_for(params: Tree, state: Tree, adapter: Value | np.ndarray | None) -> list[Value]:
    """Leaves of params and state, as one token has them.

    Args:
        adapter: int32, that of the token, from 1 on; 0, or None, for the base.
    """
    if not isinstance(params, Adapted):
        return jax.tree.leaves((params, state), is_leaf=is_held)
    leaves = jax.tree.leaves((params.params, state), is_leaf=is_held)
    if adapter is None:
        return leaves
    for index, stack in params.stacks.items():
        adapted, base = jnp.take(stack, jnp.maximum(adapter - 1, 0), axis=0), leaves[index]
        if isinstance(base, Layered):
            both = zip(adapted, base.rows, strict=True)
            rows = [jnp.where(adapter > 0, adapted_row, plain(row)) for adapted_row, row in both]
            leaves[index] = Layered(rows=tuple(rows))
        else:
            leaves[index] = jnp.where(adapter > 0, adapted, plain(base))
    return leaves
