"""How does one loop over layers become two, of which only the first recomputes?

The layers of a loop are slices of stacks. Cutting a stack in two would copy it, so both loops read
the whole stack, each its own layers of it; the gradients of what they read come out as two stacks,
and are put together after the backward pass, when what was saved of the layers is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Function
from shardlib.tracing.rewriting.remat_policies import READ


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the layers.

    Attributes:
        first, count: which.
        kept: layer -> the same layer, with what the backward pass finds saved of it.
    """

    first: int
    count: int
    kept: Callable[[Callable[..., Any]], Callable[..., Any]]


def keeping(body: Function) -> Function:
    """A layer that keeps for the backward pass what it makes, and nothing that it reads from
    stacks.

    Of a value that is pinned to a layout, it keeps what is pinned, and pins that again: JAX rounds
    what it keeps, and the rounded value is a free one, which XLA's partitioner would lay out as the
    only constraint that reads it says, gathered for a matmul.
    """
    return jax.checkpoint(body, policy=_made, prevent_cse=False)


_ANYTHING = jax.checkpoint_policies.save_anything_except_these_names(READ)


def _made(primitive: Any, *avals: Any, **params: Any) -> Any:
    return primitive.name != "sharding_constraint" and _ANYTHING(primitive, *avals, **params)


def in_parts(
    parts: Sequence[Part],
    body: Function,
    init: Tree,
    stacks: Tree,
    loop: Callable[[Function, Tree, Tree, int], tuple[Tree, Tree]],
) -> Tree:
    """Runs all parts of a loop.

    Args:
        body: (carry, slices) -> (carry, results) of one layer.
        loop: (body, carry, slices, number of layers) -> (carry, stacked results).
    """
    leaves, structure = jax.tree.flatten(stacks)
    fixed = [jax.lax.stop_gradient(leaf) if _by_number(leaf) else None for leaf in leaves]
    carry, results = init, {}
    for part in parts:

        def layer(carry: Any, sliced: tuple[Any, list[Any]]) -> Any:
            number, slices = sliced
            read = [
                (
                    own_slice
                    if stack is None
                    else _standing_for(
                        own_slice, jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
                    )
                )
                for own_slice, stack in zip(slices, fixed, strict=True)
            ]
            return body(carry, structure.unflatten(read))

        part_slices = [
            jax.lax.slice_in_dim(leaf, part.first, part.first + part.count) for leaf in leaves
        ]
        carry, results[part.first] = loop(
            part.kept(layer),
            carry,
            (jnp.arange(part.first, part.first + part.count), part_slices),
            part.count,
        )
    ordered = [results[first] for first in sorted(results)]
    return carry, jax.tree.map(lambda *stacked: jnp.concatenate(stacked), *ordered)


def _by_number(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@jax.custom_vjp
def _standing_for(own_slice: jax.Array, read: jax.Array) -> jax.Array:
    """The array that was read, whose gradient is that of the slice: the slice itself is never
    looked at.
    """
    return checkpoint_name(read, READ)


_standing_for.defvjp(
    lambda values, read: (checkpoint_name(read, READ), None),
    lambda _, cotangent: (cotangent, jnp.zeros_like(cotangent)),
)
