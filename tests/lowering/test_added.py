"""A matrix that is only added to activations, with the numbers of one device: its gradient is
scattered over one part of a torus after the other.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.planner.plan import Link

LENGTH, WIDTH, BATCH = 8, 16, 16
AXES = {"positions": ("seq", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
PARTS = tuple(Link(kind="torus", ways=ways) for ways in (2, 4))


def values():
    sizes = {"positions": (LENGTH, WIDTH), "up": (WIDTH, 32), "down": (32, WIDTH)}
    return {
        name: jnp.sin(1.0 + i + jnp.arange(float(np.prod(shape)))).reshape(shape)
        for i, (name, shape) in enumerate(sizes.items())
    }


def added(positions, x):
    return x + positions


def added_first(positions, x):
    return positions[None].astype(jnp.float32) + x


def added_twice(positions, x):
    return jnp.tanh(x + positions) + positions


@pytest.mark.parametrize("how", (added, added_first, added_twice))
@pytest.mark.parametrize("zero", (2, 3))
def test_a_step_is_that_of_one_device(how, zero):
    def loss(params, batch):
        x = how(params["positions"], batch["x"])
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    x = np.cos(np.arange(BATCH * LENGTH * WIDTH, dtype=np.float32))
    batch, optimizer = {"x": x.reshape(BATCH, LENGTH, WIDTH)}, optax.sgd(1.0)
    model = shardlib.tree(lambda key: values(), AXES)
    named = {"x": ("batch", "seq", "embed")}
    pin = {"mesh": {"fsdp": 8}, "zero": zero, "microbatches": 1}
    plan = shardlib.plan(model, loss, optimizer, batch, topology="cpu:8", pin=pin, batch_axes=named)
    plan = dataclasses.replace(plan, placement=(("fsdp", PARTS),))
    program = shardlib.compile(model, loss, optimizer, batch, plan=plan, batch_axes=named)
    state, _ = program.step(program.init(0), batch)
    wanted = jax.tree.map(lambda p, g: p - g, values(), jax.grad(loss)(values(), batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), wanted, state.params)
    matrices = 2 if how is added_twice else 3  # of two uses the sum is the compiler's
    assert program.lower().as_text().count("stablehlo.reduce_scatter") == matrices * len(PARTS)
