"""A model for the command line that is traced and planned at once: `tests.cli.perceptron:make`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import shardlib

WIDTH, HIDDEN, ROWS = 1024, 4096, 4096


def make() -> dict[str, Any]:
    """Two matrices, a loss, and a batch of its own."""

    def initialise(key: jax.Array) -> dict[str, jax.Array]:
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (WIDTH, HIDDEN)),
            "down": jax.random.normal(down, (HIDDEN, WIDTH)),
        }

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    return {
        "init": shardlib.tree(initialise, {"up": ("embed", "mlp"), "down": ("mlp", "embed")}),
        "loss": loss,
        "batch": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    }
