"""What islands should compute, as a loop over a list of replicas with optax: no line of shardlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    delay: int = 0,
    mixing: float = 0.0,
    all_arrive: bool = False,
) -> tuple[list[list[float]], Tree, list[Tree]]:
    """DiLoCo (arXiv:2311.08105, algorithm 1), `batches[step][replica]`; of several fragments, trees
    that are true where a parameter belongs to it, one meets after another, and what replicas sent
    arrives `delay` steps later (arXiv:2501.18512), or, with `all_arrive`, after the last step.

    Returns:
        Losses by step and replica, outer parameters, and the parameters of the replicas.
    """
    outer_optimizer = optax.sgd(rate, momentum=momentum, nesterov=True)
    outer, outer_state = params, outer_optimizer.init(params)
    replicas = [params for _ in batches[0]]
    states = [inner.init(params) for _ in batches[0]]
    losses: list[list[float]] = []
    sent: dict[int, tuple[Tree, Tree]] = {}
    gradient = jax.jit(jax.value_and_grad(loss))

    def arrive(number: int) -> None:
        nonlocal outer, outer_state, replicas
        mine, difference = sent.pop(number)
        updates, state = outer_optimizer.update(difference, outer_state, outer)
        outer = only(mine, optax.apply_updates(outer, updates), outer)
        trace = only(mine, state[0].trace, outer_state[0].trace)
        outer_state = (state[0]._replace(trace=trace), *state[1:])
        mixed = [
            jax.tree.map(lambda a, b: mixing * a + (1 - mixing) * b, replica, outer)
            for replica in replicas
        ]
        replicas = [only(mine, *pair) for pair in zip(mixed, replicas, strict=True)]

    for number, rows in enumerate(batches, 1):
        losses.append([])
        for k, batch in enumerate(rows):
            value, found = gradient(replicas[k], batch)
            updates, states[k] = inner.update(found, states[k], replicas[k])
            replicas[k] = optax.apply_updates(replicas[k], updates)
            losses[-1].append(float(value))
        if number in sent:
            arrive(number)
        if number % (between := every // len(fragments)) == 0:
            mine = fragments[(number // between - 1) % len(fragments)]
            mean = jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), 0), *replicas)
            sent[number + delay] = mine, jax.tree.map(jnp.subtract, outer, mean)
            if not delay:
                arrive(number)
    for number in sorted(sent) if all_arrive else ():
        arrive(number)
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


def compressed(
    loss: Callable[[Tree, Tree], jax.Array],
    params: Tree,
    inner: optax.GradientTransformation,
    batches: Sequence[Sequence[Tree]],
    exchange: Callable[[list[Tree], Tree], tuple[Tree, Tree]],
    kept: Tree,
) -> tuple[list[list[float]], Tree]:
    """Steps by what `exchange` makes of the gradients of all replicas and what it keeps."""
    state, losses = inner.init(params), list[list[float]]()
    gradient = jax.jit(jax.value_and_grad(loss))
    for rows in batches:
        found = [gradient(params, batch) for batch in rows]
        losses.append([float(value) for value, _ in found])
        mean, kept = exchange([one for _, one in found], kept)
        updates, state = inner.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return losses, params


def power_sgd(gradients: list[Tree], kept: Tree) -> tuple[Tree, Tree]:
    """PowerSGD (arXiv:1905.13727, algorithm 1 and error feedback) of dicts of matrices, those of
    layers one after the other; what has no Q in `kept` is sent as it is.
    """
    sent, after = {}, {}
    for name in gradients[0]:
        if name not in kept:
            sent[name] = sum(one[name] for one in gradients) / len(gradients)
            continue
        errors, right = kept[name]
        sums = [one[name] + error for one, error in zip(gradients, errors, strict=True)]
        left, _ = jnp.linalg.qr(sum(one @ right for one in sums) / len(sums))
        turned = [jnp.swapaxes(one, -1, -2) @ left for one in sums]
        right = sum(turned) / len(sums)
        sent[name] = left @ jnp.swapaxes(right, -1, -2)
        after[name] = ([one - sent[name] for one in sums], right)
    return sent, after


def top_k(
    density: float, momentum: float, blocks: dict[str, list[Any]]
) -> Callable[[list[Tree], Tree], tuple[Tree, Tree]]:
    """Deep Gradient Compression (arXiv:1712.01887, algorithm 1 without clipping), of each block of
    a parameter by itself.
    """

    def exchange(gradients: list[Tree], kept: Tree) -> tuple[Tree, Tree]:
        sent, after = {}, {}
        for name, places in blocks.items():
            total = np.zeros(gradients[0][name].shape, np.float32)
            after[name] = []
            for one, (u, v) in zip(gradients, kept[name], strict=True):
                u = np.array(momentum * u + np.asarray(one[name]))
                v = np.array(v + u)
                for place in places:
                    block = np.abs(v[place]).ravel()
                    largest = np.argsort(-block, kind="stable")[: math.ceil(density * block.size)]
                    chosen = np.zeros(block.size, bool)
                    chosen[largest] = True
                    chosen = chosen.reshape(v[place].shape)
                    total[place] += np.where(chosen, v[place], 0)
                    u[place], v[place] = (
                        np.where(chosen, 0, u[place]),
                        np.where(chosen, 0, v[place]),
                    )
                after[name].append((u, v))
            sent[name] = jnp.asarray(total / len(gradients))
        return sent, after

    return exchange


def sign(gradients: list[Tree], kept: Tree) -> tuple[Tree, Tree]:
    """EF-SignSGD (arXiv:1901.09847, algorithm 1) with the mean over replicas."""
    sent, after = {}, {}
    for name in gradients[0]:
        sums = [one[name] + error for one, error in zip(gradients, kept[name], strict=True)]
        mine = [jnp.where(one >= 0, 1, -1) * jnp.mean(jnp.abs(one)) for one in sums]
        sent[name] = sum(mine) / len(mine)
        after[name] = [one - own for one, own in zip(sums, mine, strict=True)]
    return sent, after


def close(found: Tree, wanted: Tree, within: float = 1e-5) -> None:
    """Trees are alike, relatively and absolutely."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=within, atol=within), found, wanted
    )
