"""Models of Flax that say how their parameters are sharded, in each of its ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

ONES = nn.initializers.ones


class Scaled(nn.Module):
    """Scales by a matrix that is stored transposed."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.with_partitioning(ONES, ("data", None)), (64, 256))
        return x * kernel.T


class ScaledAsItShouldBe(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.with_partitioning(ONES, (None, "data")), (64, 256))
        return x * kernel.T


class Logical(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param(
            "kernel", nn.with_logical_partitioning(ONES, ("embed", "heads")), (8, 8)
        )
        return x @ kernel


class Layers(nn.Module):
    def setup(self):
        self.up = nn.Dense(32, kernel_init=nn.with_partitioning(ONES, (None, "model")))
        self.down = nn.Dense(
            8,
            kernel_init=nn.with_partitioning(ONES, ("model", None)),
            bias_init=nn.with_partitioning(ONES, ("model",)),
        )

    def __call__(self, x):
        x = self.down(nn.relu(self.up(x)))
        return nn.Dense(8, kernel_init=nn.with_partitioning(ONES, ("data", "model")))(x)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.ones((8, 8)), out_sharding=jax.P("data", None))
        self.up = nnx.Linear(8, 32, kernel_metadata={"out_sharding": (None, "model")}, rngs=rngs)

    def __call__(self, x):
        return self.up(x @ self.table)
