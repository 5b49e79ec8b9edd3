"""The layouts of a plan never change its numbers: loss and gradients of programs whose weights want
one mesh axis along two dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies

import shardlib
from shardlib.lowering.uses import LossFacts
from shardlib.tracing.program import flatten
from tests.zoo.parity import capture, relative_errors
from tests.zoo.random_programs import case
from tests.zoo.random_programs import errors as random_errors

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
AXES = {"w1": ("in", "h1"), "w2": ("h1", "h2"), "w3": ("h2", "out")}


def init(key):
    shapes = {"w1": (16, 32), "w2": (32, 32), "w3": (32, 8)}
    return {
        name: jax.random.normal(own, shape) / 5
        for own, (name, shape) in zip(jax.random.split(key, 3), shapes.items(), strict=True)
    }


def loss(params, batch):
    hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"])
    return jnp.mean((hidden @ params["w3"] - batch["y"]) ** 2)


def require_equal(loss, batch, pin, rows="prove"):
    """Requires loss and gradients to be those of JAX on one device."""
    model = shardlib.tree(init, AXES)
    pin = {"remat": "none", **pin}
    program = shardlib.compile(model, loss, capture(), batch, topology="cpu:8", pin=pin, rows=rows)
    wrong = relative_errors(program, loss, batch)
    assert max(wrong.values()) < 1e-5, wrong


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((16, 16)).astype(np.float32),
        "y": random.standard_normal((16, 8)).astype(np.float32),
    }


@pytest.mark.matrix
@pytest.mark.parametrize("order", [("h1", "h2"), ("h2", "h1")], ids="-".join)
@pytest.mark.parametrize("zero", [3, 2, 1, 0])
def test_a_square_weight_with_both_dims_on_tensor(zero, order, batch):
    rules = [*([name, "tensor"] for name in order), ["batch", ["data", "fsdp"]]]
    mesh = MESH if zero else {"data": 4, "tensor": 2}
    require_equal(loss, batch, {"mesh": mesh, "zero": zero, "microbatches": 1, "rules": rules})


def halves(params, batch):
    """Another program for eight rows than for sixteen."""
    return (
        loss(params, batch)
        if batch["x"].shape[0] > 8
        else loss(params, jax.tree.map(lambda leaf: 2 * leaf / 2, batch))
    )


def test_a_loss_that_is_another_program_for_a_microbatch(batch):
    pin = {
        "mesh": MESH,
        "zero": 3,
        "microbatches": 2,
        "rules": [["h1", "tensor"], ["h2", "tensor"], ["batch", ["data", "fsdp"]]],
    }
    require_equal(halves, batch, pin, rows="mean")


@pytest.mark.long
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(data=strategies.data())
def test_random_programs_compute_what_one_device_computes(data):
    """Weights used in many forms, on any mesh, under any rules."""
    chosen = case(lambda options: data.draw(strategies.sampled_from(list(options))))
    found = random_errors(chosen)
    assert max(found.values()) < 1e-5, (chosen, found)


def test_tables_are_parameters_that_lookups_and_slices_alone_read():
    """Learned positions are a slice of rows: gathered before, as what is looked up is."""

    def loss(words, positions, fused, kernel, tokens):
        x = words[tokens] + positions[: tokens.shape[1]]
        return jnp.mean(x @ fused[:, :8] + x @ kernel[:16] + kernel.sum())

    shapes = [(64, 16), (32, 16), (16, 32), (32, 8)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    tokens = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    program = flatten(jax.make_jaxpr(loss)(*arrays, tokens))
    assert LossFacts(program=program, num_parameters=len(arrays)).lookup_tables == {0, 1}
