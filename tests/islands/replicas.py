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
) -> tuple[list[list[float]], Tree, list[Tree]]:
    """DiLoCo (arXiv:2311.08105, algorithm 1), `batches[step][replica]`.

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
        if number % every == 0:
            mean = jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), 0), *replicas)
            found = jax.tree.map(jnp.subtract, outer, mean)
            updates, outer_state = outer_optimizer.update(found, outer_state, outer)
            outer = optax.apply_updates(outer, updates)
            replicas = [outer for _ in replicas]
    return losses, outer, replicas
