"""Draws of a part of the batch are those of the whole batch at its rows."""

from __future__ import annotations

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import PinError
from shardlib.lowering.accumulation import bits, draw_positions
from shardlib.tracing.row_kinds import Draw
from tests.zoo import random_losses
from tests.zoo.parity import relative_errors


@pytest.mark.parametrize(
    ("shape", "dim", "inner", "step"),
    [((6,), 0, 1, 1), ((3, 12), 1, 2, 1 << 28), ((4, 5, 3, 2), 0, 2, (1 << 26) + 11)],
)
def test_positions_are_those_of_the_whole_draw_beyond_32_bits(shape, dim, inner, step):
    count, parts = shape[dim] // inner, step
    rows = np.arange(count, dtype=np.uint32) * np.uint32(step) + np.uint32(step - 1)
    whole = [size * (parts if at == dim else 1) for at, size in enumerate(shape)]
    at = np.indices(shape).astype(object)
    at[dim] = rows.astype(object)[np.indices(shape)[dim] // inner] * inner + at[dim] % inner
    wanted = sum(at[axis] * math.prod(whole[axis + 1 :]) for axis in range(len(shape)))
    high, low = draw_positions(jnp.asarray(rows), Draw(dim=dim, inner=inner), shape, parts)
    found = np.asarray(high).astype(object) * 2**32 + np.asarray(low).astype(object)
    assert (np.broadcast_to(found, shape) == wanted).all()
    assert step == 1 or wanted.max() > 2**32


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("keys", [(), (3,)], ids=["one key", "several"])
@pytest.mark.parametrize(("shape", "dim", "inner"), [((12,), 0, 1), ((5, 24, 2), 1, 2)])
def test_bits_are_those_of_jax(shape, dim, inner, keys, width):
    key = jax.random.split(jax.random.key(1), keys) if keys else jax.random.key(1)
    count = shape[dim] // inner
    rows = np.random.default_rng(0).permutation(2 * count)[:count]
    whole = list(shape)
    whole[dim] *= 2

    def draw(key: Any) -> Any:
        return jax.random.bits(key, tuple(whole), f"uint{width}")

    wanted = np.asarray(jax.vmap(draw)(key) if keys else draw(key))
    taken = np.take(
        wanted,
        (rows[:, None] * inner + np.arange(inner)).reshape(-1),
        axis=len(keys) + dim,
    )
    found = bits(
        key,
        jnp.asarray(rows, jnp.uint32),
        Draw(dim=dim, inner=inner),
        shape=shape,
        count=2,
        width=width,
    )
    assert found.dtype == taken.dtype
    np.testing.assert_array_equal(found, taken)


PINS: list[dict[str, Any]] = [
    {"mesh": {"data": 2, "fsdp": 2}, "microbatches": 4, "zero": 3},
    {"mesh": {"data": 2, "tensor": 2}, "microbatches": 2, "remat": "full"},
    {"mesh": {"stage": 2, "data": 2}, "microbatches": 4, "schedule": "1f1b"},
    {"mesh": {"stage": 2}, "microbatches": 4, "schedule": "gpipe", "pipeline": "programs"},
]


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(24))
def test_no_plan_changes_what_a_loss_draws(seed):
    """More of them in `benchmarks/drawn_losses.py --random`."""
    drawn = random_losses.draw(random.Random(seed))
    pin = PINS[seed % len(PINS) if drawn.layers else 0]

    try:
        program = random_losses.program(drawn, pin)
    except PinError:
        assert not drawn.exact, drawn.name
        program = random_losses.program(drawn, {"mesh": {"data": 2}})
        assert program.plan.microbatches == 1
    wrong = relative_errors(program, drawn.loss, drawn.batch)
    assert max(wrong.values()) < 1e-5, (drawn.name, wrong)


def mean_loss(params: Any, batch: Any) -> jax.Array:
    mask = jax.random.bernoulli(jax.random.key(5), 0.5, batch["x"].shape)
    return jnp.mean((jnp.where(mask, batch["x"], 0) @ params["w"] - 1) ** 2)


def test_a_loss_that_is_said_to_be_a_mean_draws_what_the_whole_batch_draws():
    batch = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}
    program = shardlib.compile(
        shardlib.tree(lambda key: {"w": jnp.eye(8)}),
        mean_loss,
        optax.sgd(0.1),
        batch,
        topology="cpu:2",
        pin={"mesh": {"data": 2}, "microbatches": 4},
        rows="mean",
    )
    _, metrics = program.step(program.init(0), batch)
    np.testing.assert_allclose(
        float(metrics["loss"]), float(mean_loss({"w": jnp.eye(8)}, batch)), rtol=1e-5
    )


def test_a_marked_loss_draws_what_the_whole_batch_draws_from_a_key_of_the_state():
    batch = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.mean((params["w"] * jax.random.normal(key, batch["x"].shape) - 1) ** 2)

    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])
        value, gradients = shardlib.value_and_grad(loss)(state["params"], batch, now)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
        return {"params": params, "key": key}, {"loss": value}

    def init(key: Any) -> Any:
        return {"params": {"w": jnp.ones(8)}, "key": jax.random.PRNGKey(3)}

    program = shardlib.compile_step(
        init, step, batch, topology="cpu:2", pin={"mesh": {"data": 2}, "microbatches": 4}
    )
    state, plain = program.init(0), init(None)
    for _ in range(2):
        state, metrics = program.step(state, batch)
        now = jax.random.split(plain["key"])[1]
        wanted = loss(plain["params"], batch, now)
        gradients = jax.grad(loss)(plain["params"], batch, now)
        plain = {
            "params": jax.tree.map(lambda p, g: p - 0.1 * g, plain["params"], gradients),
            "key": jax.random.split(plain["key"])[0],
        }
        np.testing.assert_allclose(float(metrics["loss"]), float(wanted), rtol=1e-5)
