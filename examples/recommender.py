"""A recommender of two towers learns who likes what, with the other rows as wrong answers.

    python examples/recommender.py
    python examples/recommender.py --topology v5e:16x16

Tables of users and items are most of the parameters; a plan shards them. The loss compares every
user with every item of the batch: rows meet, so that shardlib never divides the batch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there are no accelerators

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib

USERS, ITEMS, TASTES, ROWS, WIDE = 512, 256, 16, 512, 64


class Tower(nnx.Module):
    def __init__(self, count: int, rngs: nnx.Rngs):
        self.table = nnx.Embed(count, WIDE, rngs=rngs)
        self.out = nnx.Linear(WIDE, WIDE, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.out(nnx.relu(self.table(ids)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Towers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.users, self.items = Tower(USERS, rngs), Tower(ITEMS, rngs)


def loss(model, batch):
    scores = 10 * model.users(batch["user"]) @ model.items(batch["item"]).T
    right = jnp.arange(scores.shape[0])
    error = optax.softmax_cross_entropy_with_integer_labels(scores, right).mean()
    return error, {"first": (scores.argmax(-1) == right).mean()}


def rows(number):
    """Users and items have tastes; a user meets items of their own taste."""
    rng = np.random.default_rng(number)
    taste = rng.integers(0, TASTES, ROWS)
    return {
        "user": (taste + TASTES * rng.integers(0, USERS // TASTES, ROWS)).astype(np.int32),
        "item": (taste + TASTES * rng.integers(0, ITEMS // TASTES, ROWS)).astype(np.int32),
    }


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns how far the loss is from the best there is, at the start and the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=150)
    asked = parser.parse_args(arguments)
    program = shardlib.compile(Towers, loss, optax.adam(1e-2), rows(0), topology=asked.topology)
    print(program.plan.explain().split("\n\n")[0])
    state, losses = program.init(seed=0), []
    best = float(np.log(ROWS / TASTES))  # who knows the taste still guesses among its items
    for number in range(asked.steps):
        state, metrics = program.step(state, rows(number))
        losses.append(float(metrics["loss"]) - best)
        if number % 25 == 0 or number == asked.steps - 1:
            print(f"step {number}: {losses[-1]:.3f} nats above the best")
    return [losses[0], float(np.mean(losses[-5:]))]


if __name__ == "__main__":
    main()
