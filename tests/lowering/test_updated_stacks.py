"""Stacks of parameters that are stored replicated (ZeRO 1 and 2) are gathered after the update over
the old ones: nothing of the size of all parameters is there beside gradients and parameters.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib._jax_compat import compiled_memory
from tests.lowering import small

LAYERS, WIDTH, INNER = 8, 64, 256
SHAPES = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
AXES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
STACKS = 4 * sum(np.prod(shape) for shape in SHAPES.values())


def values(key):
    return {
        name: 0.1 * jnp.sin(1.7 * jnp.arange(np.prod(shape)).reshape(shape) % 61 + number)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def loss(params, batch, dtype=jnp.float32):
    def layer(x, p):
        used = {name: leaf.astype(dtype) for name, leaf in p.items()}
        inner = jnp.tanh(x.astype(dtype) @ used["up"])
        return x + (inner @ used["down"]).astype(x.dtype), None

    x, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean(x**2)


def batch():
    return {"x": np.random.default_rng(2).normal(size=(16, WIDTH)).astype(np.float32)}


def program(topology, pin, dtype=jnp.float32):
    return shardlib.compile(
        shardlib.tree(values, AXES),
        functools.partial(loss, dtype=dtype),
        optax.sgd(0.02, momentum=0.9),
        batch(),
        topology=topology,
        pin={"remat": "full", "microbatches": 1, **pin},
        batch_axes={"x": ("batch", None)},
    )


@pytest.mark.parametrize("zero", [1, 2])
def test_gathered_stacks_take_the_place_of_the_old_ones(zero):
    made = program("cpu:8", {"mesh": {"fsdp": 8}, "zero": zero}, jnp.bfloat16)
    found = compiled_memory(made.lower().compile())
    gradients = STACKS if zero == 1 else STACKS // 8
    # Beside gradients: weights in bfloat16, and activations; one more stack would be STACKS.
    assert found["temporaries"] < gradients + 0.75 * STACKS


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_after_three_steps_are_those_of_one_device(zero):
    def after(topology, pin):
        one = program(topology, pin)
        state = one.init(0)
        for _ in range(3):
            state, _ = one.step(state, batch())
        return state.params

    found = after("cpu:8", {"mesh": {"data": 2, "fsdp": 4}, "zero": zero})
    wanted = after("cpu:1", {})
    apart = small.differences(found, wanted)
    assert max(apart.values()) < 1e-5, apart
