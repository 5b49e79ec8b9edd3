"""What layers save under a remat policy, the backward pass does not compute again."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib


def layers_of_a_matmul(key):
    return {"up": jax.random.normal(key, (4, 16, 16)) / 4}


@pytest.mark.parametrize(
    "mesh", [{"data": 1}, {"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}]
)
def test_saved_results_of_matmuls_are_not_computed_again(mesh):
    """What the backward pass of layers computes again, by the program: no matmul under "dots"."""

    def loss(params, batch):
        def layer(x, up):
            return jnp.tanh(x @ up), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params["up"])[0] ** 2)

    def matmuls(remat):
        program = shardlib.compile(
            shardlib.tree(layers_of_a_matmul, {"up": ("layers", "in", "out")}),
            loss,
            optax.sgd(0.1),
            {"x": np.zeros((8, 16), np.float32)},
            topology=f"cpu:{math.prod(mesh.values())}",
            pin={"mesh": mesh, "remat": remat, "microbatches": 1, "zero": 0},
        )
        return program.lower().as_text().count("stablehlo.dot_general")

    assert matmuls("dots") == matmuls("none") < matmuls("full")
