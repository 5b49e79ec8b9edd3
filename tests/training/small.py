"""A model that trains in a second, for tests of the loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib
from shardlib.lowering.program import Program

WIDTH, BATCH = 16, 8


class Model(nnx.Module):
    """Two layers with dropout, whose random stream is a part of the state."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(
            WIDTH, 32, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs
        )
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(
            32, WIDTH, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs
        )


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model.down(model.drop(nnx.gelu(model.up(batch["x"])))) - batch["y"]) ** 2)


def batch_of(step: int, size: int = BATCH) -> dict[str, np.ndarray]:
    x = np.random.default_rng((7, step)).normal(size=(size, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def compiled(mesh: dict[str, int], size: int = BATCH) -> Program:
    """The program under a mesh, compiled once in a process."""
    return _compiled(tuple(mesh.items()), size)


@functools.cache
def _compiled(mesh: tuple[tuple[str, int], ...], size: int) -> Program:
    axes = dict(mesh)
    return shardlib.compile(
        Model,
        loss,
        optax.adam(1e-2),
        batch_of(0, size),
        topology=f"cpu:{np.prod([*axes.values()])}",
        pin={"mesh": axes, "zero": 3 if "fsdp" in axes else 0},
    )
