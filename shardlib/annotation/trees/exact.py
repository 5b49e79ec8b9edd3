"""How does a compiled initialiser give exactly the numbers of the user's own constructor?

A constructor runs op by op; compiled as one program, neighbouring ops are fused and constants
folded, which changes last bits. Here each op of the constructor is fenced off from its neighbours,
as it is when it runs by itself; what the constructor calls through `jax.jit` (JAX's random
distributions, for example) stays one piece, as it is when it runs by itself. Layouts pass through
the fences, so the result is still made in shards where it will stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Index


def op_by_op(function: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """The same function of a seed, to be compiled without mixing its ops."""

    def fenced(seed: Index) -> Tree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(seed)
        values = dict(
            zip(
                (*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, seed), strict=True
            )
        )

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else values[atom]

        for eqn in closed.jaxpr.eqns:
            arguments = jax.lax.optimization_barrier(
                list(map(read, eqn.invars))
            )  # a literal is an argument like any other, and not folded
            results = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params))
            values.update(
                zip(
                    eqn.outvars,
                    jax.lax.optimization_barrier(
                        list(results) if eqn.primitive.multiple_results else [results]
                    ),
                    strict=True,
                )
            )
        leaves = [
            _array(leaf) if isinstance(leaf, jex.Literal) else values[leaf]
            for leaf in closed.jaxpr.outvars
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return fenced


def _array(literal: jex.Literal) -> jax.Array:
    """A leaf that no op makes; the number of a literal has no shape that an optimizer could ask."""
    return jnp.asarray(literal.val, getattr(literal.aval, "dtype", None))
