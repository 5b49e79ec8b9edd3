"""A model of islands that trains in a second: dropout, whose random streams are state, a scalar, a
frozen table, and an optimizer with a count.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib

WIDTH, ROWS = 8, 16
#: Meshes of an island, and what is sharded on them.
MESHES: dict[str, dict[str, Any]] = {
    "zero-1": {"mesh": {"fsdp": 4}, "zero": 1},
    "zero-3": {"mesh": {"fsdp": 4}, "zero": 3},
    "tensor": {"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3},
    "two": {"mesh": {"fsdp": 2}, "zero": 3},
}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (WIDTH, WIDTH)), out_sharding=("in", "embed")
        )
        self.up = nnx.Linear(
            WIDTH, 16, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs
        )
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(
            16, WIDTH, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs
        )
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale[...] * self.down(self.drop(nnx.gelu(self.up(x @ self.table[...]))))


def loss(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def rows(step: int) -> dict[str, np.ndarray]:
    """A batch of all islands."""
    x = np.random.default_rng((7, step)).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


@functools.cache
def program(
    mesh: str = "zero-3",
    exchange: str | None = "diloco:2:4:rate=0.5:momentum=0.8",
    optimizer: optax.GradientTransformation | None = None,
    topology: str = "cpu:8",
    **more: Any,
) -> Any:
    """Islands, or one where there is no exchange; what `more` has goes to `compile`."""
    pin = {**MESHES[mesh], **({} if exchange is None else {"exchange": exchange})}
    return shardlib.compile(
        Net,
        loss,
        optimizer or optax.adam(1e-2),
        rows(0),
        topology=topology,
        pin=pin,
        wrt=nnx.All(nnx.Param, nnx.Not(lambda path, _: path[0] == "table")),
        **more,
    )


def stepped(made: Any, state: Any, first: int, last: int) -> Any:
    """The state after the steps from `first` to before `last`."""
    for step in range(first, last):
        state, _ = made.step(state, rows(step))
    return state
