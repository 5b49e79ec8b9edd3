"""What islands should compute, as a loop over a list of replicas with optax: no line of shardlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


def diloco(
    loss: Callable[[Tree, Tree], jax.Array],
    params: Tree,
    inner: optax.GradientTransformation,
    batches: Sequence[Sequence[Tree]],
    *,
    every: int,
    rate: float,
    momentum: float,
    fragments: Sequence[Tree] = (True,),
) -> tuple[list[list[float]], Tree, list[Tree]]:
    """DiLoCo (arXiv:2311.08105, algorithm 1), `batches[step][replica]`; of several fragments, trees
    that are true where a parameter belongs to it, one meets after another (arXiv:2501.18512).

    Returns:
        Losses by step and replica, outer parameters, and the parameters of the replicas.
    """
    outer_optimizer = optax.sgd(rate, momentum=momentum, nesterov=True)
    outer, outer_state = params, outer_optimizer.init(params)
    replicas = [params for _ in batches[0]]
    states = [inner.init(params) for _ in batches[0]]
    losses: list[list[float]] = []
    gradient = jax.jit(jax.value_and_grad(loss))
    for number, rows in enumerate(batches, 1):
        losses.append([])
        for k, batch in enumerate(rows):
            value, found = gradient(replicas[k], batch)
            updates, states[k] = inner.update(found, states[k], replicas[k])
            replicas[k] = optax.apply_updates(replicas[k], updates)
            losses[-1].append(float(value))
        if number % (between := every // len(fragments)) == 0:
            mine = fragments[(number // between - 1) % len(fragments)]
            mean = jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), 0), *replicas)
            found = jax.tree.map(jnp.subtract, outer, mean)
            updates, state = outer_optimizer.update(found, outer_state, outer)
            outer = only(mine, optax.apply_updates(outer, updates), outer)
            trace = only(mine, state[0].trace, outer_state[0].trace)
            outer_state = (state[0]._replace(trace=trace), *state[1:])
            replicas = [only(mine, outer, replica) for replica in replicas]
    return losses, outer, replicas


def only(mine: Tree, new: Tree, old: Tree) -> Tree:
    """`new` where `mine` is true, `old` elsewhere."""
    mine = jax.tree.map(lambda _: mine, new) if isinstance(mine, bool) else mine
    return jax.tree.map(jnp.where, mine, new, old)


def gossip(
    loss: Callable[[Tree, Tree], jax.Array],
    params: Tree,
    inner: optax.GradientTransformation,
    batches: Sequence[Sequence[Tree]],
    mixing: Sequence[Sequence[Sequence[float]]],
) -> tuple[list[list[float]], list[Tree]]:
    """Steps, then a product with a mixing matrix, one after another (arXiv:1705.09056)."""
    replicas = [params for _ in batches[0]]
    states = [inner.init(params) for _ in batches[0]]
    losses: list[list[float]] = []
    gradient = jax.jit(jax.value_and_grad(loss))
    for number, rows in enumerate(batches):
        losses.append([])
        for k, batch in enumerate(rows):
            value, found = gradient(replicas[k], batch)
            updates, states[k] = inner.update(found, states[k], replicas[k])
            replicas[k] = optax.apply_updates(replicas[k], updates)
            losses[-1].append(float(value))
        matrix = jnp.asarray(mixing[number % len(mixing)])
        replicas = [
            jax.tree.map(
                lambda *x, row=row: sum(w * y for w, y in zip(row, x, strict=True)), *replicas
            )
            for row in matrix
        ]
    return losses, replicas
