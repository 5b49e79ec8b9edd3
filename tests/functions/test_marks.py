"""Custom calls are found again, and nothing else that JAX gives their name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import shardlib
from shardlib.functions.attention import Attention, form_of

BATCH, SEQ, HEADS, WIDTH, LAYERS = 8, 6, 4, 16, 4
SHAPE = (BATCH, SEQ, HEADS, WIDTH // HEADS)


def forms(function: Any, *arrays: Any) -> list[Any]:
    """What every equation that bears the name of a call is."""
    return [
        form_of(eqn)
        for eqn in jax.make_jaxpr(function)(*arrays).eqns
        if str(eqn.params.get("name", "")).startswith("shardlib_attention")
    ]


def test_derivatives_and_batches_of_a_call_are_no_calls():
    one, several = jnp.ones(SHAPE), jnp.ones((3, *SHAPE))
    (form,) = forms(shardlib.attention, one, one, one)
    assert isinstance(form, Attention)
    assert forms(jax.vmap(shardlib.attention), several, several, several) == [None]
    slope = forms(lambda x: jax.jvp(shardlib.attention, (x,) * 3, (x,) * 3), one)
    assert slope == [None]
    assert forms(jax.jit(lambda x: x), one) == []


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        query, key, value = (nn.Dense(WIDTH)(x).reshape(SHAPE) for _ in range(3))
        mixed = shardlib.attention(query, key, value)
        return x + nn.Dense(WIDTH)(mixed.reshape(x.shape)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return layers()(x, None)[0]


def loss(params: Any, batch: Any) -> Any:
    return ((Scanned().apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("mesh", [{"tensor": 2, "data": 2}, {"fsdp": 2, "stage": 2}], ids=str)
def test_attention_in_a_scan_of_linen_gives_the_numbers_of_plain_jax(mesh: dict[str, int]):
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32) for name in "xy"}
    program = shardlib.compile(
        shardlib.linen(Scanned(), batch["x"]),
        loss,
        optax.sgd(0.1),
        batch,
        topology="cpu:4",
        pin={"mesh": mesh, "microbatches": 1},
    )
    state = program.init(0)
    params = jax.tree.map(np.asarray, state.params)
    for _ in range(2):
        state, metrics = program.step(state, batch)
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
        params = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, params, gradients)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
