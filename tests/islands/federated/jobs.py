"""What clients of the tests train, and federated averaging in plain optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from shardlib.islands import federated

Tree = Any
WIDTH, BATCH, EPOCHS, CLIENTS = 4, 8, 2, 3
#: Rows of each client: whole batches, more, and fewer than one.
ROWS = (24, 21, 5)
AXES = {"up": ("embed", "mlp"), "down": ("mlp", None), "bias": ()}


def weights(key: jax.Array) -> Tree:
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (WIDTH, 2 * WIDTH)) * WIDTH**-0.5,
        "down": jax.random.normal(second, (2 * WIDTH, 1)) * (2 * WIDTH) ** -0.5,
        "bias": jnp.full((), 0.5),
    }


def loss(params: Tree, batch: Tree) -> jax.Array:
    found = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"]
    return jnp.mean((found[:, 0] - batch["y"]) ** 2)


def rows(partition: int, partitions: int) -> dict[str, np.ndarray]:
    """Each client has rows from another place, and another function of them."""
    assert partitions == CLIENTS
    draw = np.random.default_rng(partition)
    x = draw.normal(loc=partition - 1, size=(ROWS[partition], WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + partition * x[:, 1]}


ABSTRACT = {
    "x": jax.ShapeDtypeStruct((BATCH, WIDTH), np.float32),
    "y": jax.ShapeDtypeStruct((BATCH,), np.float32),
}


def job(**changed: Any) -> federated.Job:
    given = {
        "init": shardlib.tree(weights, AXES),
        "loss": loss,
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "batch": ABSTRACT,
        "rows": rows,
        "topology": "cpu:1",
        "local": federated.Local(epochs=EPOCHS),
    }
    return federated.Job(**(given | changed))


def first(seed: int = 0) -> Tree:
    """The parameters that all begin with."""
    return {path: np.asarray(leaf) for path, leaf in weights(jax.random.key(seed)).items()}


def averaged(
    rounds: int,
    optimizer: optax.GradientTransformation,
    *,
    mu: float = 0.0,
    loss: Callable[[Tree, Tree], jax.Array] = loss,
    mean: Callable[[Tree, list[Tree]], Tree] | None = None,
) -> Tree:
    """Federated averaging, or FedProx, with nothing of shardlib."""
    theta = first()
    for number in range(1, rounds + 1):
        local = [trained(theta, k, number, optimizer, mu, loss) for k in range(CLIENTS)]
        theta = weighted(local) if mean is None else mean(theta, local)
    return theta


def weighted(local: list[Tree]) -> Tree:
    """The mean of parameters over rows."""
    return jax.tree.map(
        lambda *p: sum(n / sum(ROWS) * q for n, q in zip(ROWS, p, strict=True)), *local
    )


def trained(
    theta: Tree,
    client: int,
    number: int,
    optimizer: optax.GradientTransformation,
    mu: float,
    loss: Callable[[Tree, Tree], jax.Array],
) -> Tree:
    """One client in one round."""

    @jax.jit
    def gradient(params: Tree, batch: Tree) -> Tree:
        def whole(params: Tree) -> jax.Array:
            apart = jax.tree.map(lambda p, q: jnp.sum((p - q) ** 2), params, theta)
            return loss(params, batch) + mu / 2 * sum(jax.tree.leaves(apart))

        return jax.grad(whole)(params)

    own, params, state = rows(client, CLIENTS), theta, optimizer.init(theta)
    draw, many = np.random.default_rng((0, client, number)), ROWS[client]
    order = np.concatenate([draw.permutation(many) for _ in range(EPOCHS + BATCH)])
    for step in range(max(1, EPOCHS * many // BATCH)):
        batch = {name: array[order[step * BATCH :][:BATCH]] for name, array in own.items()}
        updates, state = optimizer.update(gradient(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params
