"""What workers of the tests train: each process loads this file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardlib
from shardlib.islands import servers

Tree = Any
WIDTH, ROWS = 8, 16


def weights(key: jax.Array) -> Tree:
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (WIDTH, 2 * WIDTH)) * WIDTH**-0.5,
        "down": jax.random.normal(second, (2 * WIDTH, 1)) * (2 * WIDTH) ** -0.5,
        "bias": jnp.zeros(()),
    }


AXES = {"up": ("embed", "mlp"), "down": ("mlp", None), "bias": ()}


def loss(params: Tree, batch: Tree) -> jax.Array:
    found = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"]
    return jnp.mean((found[:, 0] - batch["y"]) ** 2)


def rows(worker: int, step: int) -> dict[str, np.ndarray]:
    """Rows of a worker's step."""
    x = np.random.default_rng([worker, step]).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + 0.5 * x[:, 1]}


def slow_rows(worker: int, step: int) -> dict[str, np.ndarray]:
    """The same; a step takes some time. Where the test says so, three workers begin together."""
    together = os.environ.get("TEST_TOGETHER")
    while together and step == 1 and len([*Path(together).glob("worker-*.jsonl")]) < 3:
        time.sleep(0.01)
    time.sleep(0.02)
    return rows(worker, step)


def uneven_rows(worker: int, step: int) -> dict[str, np.ndarray]:
    """Worker 0 is fast, and waits in its second step until worker 1 has begun."""
    while (worker, step) == (0, 1) and not os.path.exists(os.environ["TEST_BEGUN"]):
        time.sleep(0.01)
    time.sleep(0.1 if (worker, step) == (0, 1) else 0.05 * worker)
    return rows(worker, step)


def bad_rows(worker: int, step: int) -> dict[str, np.ndarray]:
    """Worker 1 has a row of NaN at its step 3."""
    found = rows(worker, step)
    if (worker, step) == (1, 3):
        found["x"][0] = np.nan
    return found


def job() -> servers.Job:
    """Two simulated devices, as the test starts them."""
    return servers.Job(init=shardlib.tree(weights, AXES), loss=loss, rows=rows)


def slow_job() -> servers.Job:
    return servers.Job(init=shardlib.tree(weights, AXES), loss=loss, rows=slow_rows)


def uneven_job() -> servers.Job:
    return servers.Job(init=shardlib.tree(weights, AXES), loss=loss, rows=uneven_rows)


def bad_job() -> servers.Job:
    return servers.Job(init=shardlib.tree(weights, AXES), loss=loss, rows=bad_rows)


def wrong_job() -> servers.Job:
    """A pin that is none."""
    return servers.Job(init=shardlib.tree(weights, AXES), loss=loss, rows=rows, pin={"zero": 9})
