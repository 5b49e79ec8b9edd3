"""The steps of `examples` with their losses marked; with `jax.value_and_grad` they are plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardlib
from tests.frontend import examples
from tests.frontend.examples import (
    EXAMPLES,
    WIDE,
    Batch,
    Example,
    State,
    ValueAndGrad,
    drawn,
    mlp,
    mlp_init,
    nll,
    unit,
)


def trained(
    value_and_grad: ValueAndGrad, init: Callable[[jax.Array], Any], loss: Any, batch: Batch
) -> Example:
    """One loss under AdamW."""
    optimizer = optax.adamw(1e-2, eps=1e-3)

    def start(key: jax.Array) -> State:
        params = init(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value}

    return Example(start, step, batch)


def in_batch(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Two views of every row, of which each meets all other rows of the batch."""

    def loss(encoder: Any, batch: Batch) -> jax.Array:
        one, two = (unit(mlp(encoder, batch[name])) for name in ("one", "two"))
        near = one @ two.T / 0.5
        right = jnp.diagonal(near)
        found = [jax.nn.logsumexp(near, at) - right for at in (0, 1)]
        return (found[0].mean() + found[1].mean()) / 2

    return trained(
        value_and_grad,
        lambda key: mlp_init(key, 16, WIDE, 8),
        loss,
        examples.contrastive().batch,
    )


def normals(key: jax.Array, **shapes: tuple[int, ...]) -> State:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, shape) * shape[-2] ** -0.5
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def attending(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Layers that call `shardlib.attention`."""

    def init(key: jax.Array) -> State:
        square = dict.fromkeys(("q", "k", "v", "o"), (2, 32, 32))
        return normals(key, embed=(24, 32), **square, up=(2, 32, 64), down=(2, 64, 32))

    def loss(params: State, batch: Batch) -> jax.Array:
        x = params["embed"][batch["ids"]]

        def layer(x: jax.Array, w: State) -> tuple[jax.Array, None]:
            q, k, v = ((x @ w[name]).reshape(*x.shape[:2], 4, 8) for name in "qkv")
            x = x + shardlib.attention(q, k, v, causal=True).reshape(x.shape) @ w["o"]
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        layers = {name: params[name] for name in params if name != "embed"}
        logits = jax.lax.scan(layer, x, layers)[0] @ params["embed"].T
        return nll(logits, batch["ids"]).mean()

    return trained(value_and_grad, init, loss, {"ids": examples.tokens(0)})


def experts(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Tokens that visit two of four experts."""

    def init(key: jax.Array) -> State:
        wide = dict.fromkeys(("up", "gate"), (4, 32, 64))
        return normals(key, enter=(16, 32), router=(32, 4), **wide, down=(4, 64, 32))

    def loss(params: State, batch: Batch) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params["enter"])
        routed = shardlib.route(x @ params["router"], 2)
        weights = (params[name] for name in ("up", "down", "gate"))
        found, _ = shardlib.visit(x, routed.weights, routed.chosen, *weights)
        return ((found.mean(-1) - batch["y"]) ** 2).mean()

    batch = {"x": drawn(1, examples.ROWS, 8, 16), "y": drawn(2, examples.ROWS, 8)}
    return trained(value_and_grad, init, loss, batch)


def marked(make: Callable[..., Example]) -> Callable[..., Example]:
    """An example that marks its losses unless another differentiation is given."""
    return lambda value_and_grad=shardlib.value_and_grad: make(value_and_grad)


MARKED: dict[str, Callable[..., Example]] = {
    make.__name__: marked(make) for make in (*EXAMPLES.values(), attending, experts)
}
