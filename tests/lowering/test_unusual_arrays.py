"""Arrays of fewer than 8 bits, of no elements, and loops over no layers: the numbers of plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib

RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(16, 16)).astype(np.float32),
    "y": RANDOM.normal(size=(16, 8)).astype(np.float32),
}
PINS: list[dict[str, Any]] = [
    {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3, "microbatches": 2},
    {"mesh": {"fsdp": 8}, "zero": 3},
]


def init(key: Any, **more: Any) -> dict[str, Any]:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (16, 32)) * 0.2,
        "down": jax.random.normal(down, (32, 8)) * 0.2,
        **more,
    }


def mse(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def check(init: Any, loss: Any, batch: Any, pin: Any, **more: Any) -> None:
    optimizer = optax.adam(1e-2)
    program = shardlib.compile(
        shardlib.tree(init), loss, optimizer, batch, topology="cpu:8", pin=pin, **more
    )
    state = program.init(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state.params)
    trained = {name: leaf for name, leaf in params.items() if leaf.dtype == jnp.float32}

    def of(trained: Any) -> jax.Array:
        return loss({**params, **trained}, batch)

    kept = optimizer.init(trained)
    for _ in range(2):
        state, metrics = program.step(state, batch)
        value, gradients = jax.value_and_grad(of)(trained)
        np.testing.assert_allclose(float(metrics["loss"]), float(value), rtol=1e-5)
        updates, kept = optimizer.update(gradients, kept)
        trained = optax.apply_updates(trained, updates)
    for name, leaf in {**params, **trained}.items():
        np.testing.assert_allclose(
            np.asarray(state.params[name]).astype(np.float32),
            np.asarray(leaf).astype(np.float32),
            atol=1e-5,
            err_msg=name,
        )
    np.testing.assert_allclose(
        float(program.evaluate(state, batch)["loss"]), float(of(trained)), rtol=1e-5
    )


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn", "int2"])
def test_frozen_arrays_of_fewer_than_8_bits(dtype: str):
    def quantized(key: Any) -> Any:
        return init(key, q=jax.random.randint(key, (16, 32), 0, 2, jnp.int8).astype(dtype))

    def loss(params: Any, batch: Any) -> jax.Array:
        return mse({**params, "up": params["up"] + 0.1 * params["q"].astype(jnp.float32)}, batch)

    pin = PINS[dtype in ("uint4", "int2")]
    check(quantized, loss, BATCH, pin, wrt=lambda path, leaf: "q" not in str(path))


def used(params: Any, batch: Any) -> jax.Array:
    return mse(params, batch) + jnp.sum(params["z"])


def of_rank_zero(params: Any, batch: Any) -> jax.Array:
    return mse({**params, "up": params["up"] + params["a"] @ params["b"]}, batch)


def no_layers(params: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])
    return mse(params, {**batch, "x": x})


def in_the_batch(params: Any, batch: Any) -> jax.Array:
    return mse(params, batch) + batch["z"].sum()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (used, {"z": (0, 16)}),
        (mse, {"z": (0, 16)}),
        (of_rank_zero, {"a": (16, 0), "b": (0, 32)}),
        (no_layers, {"layers": (0, 16, 16)}),
        (in_the_batch, {}),
    ],
    ids=["used", "unused", "rank 0", "no layers", "in the batch"],
)
def test_arrays_of_no_elements(loss: Any, more: dict[str, tuple[int, ...]]):
    batch = {**BATCH, "z": np.zeros((16, 0), np.float32)} if loss is in_the_batch else BATCH
    check(
        lambda key: init(key, **{name: jnp.zeros(shape) for name, shape in more.items()}),
        loss,
        batch,
        PINS[loss in (used, of_rank_zero)],
    )


def test_a_frozen_array_of_no_elements():
    check(
        lambda key: init(key, z=jnp.zeros((0, 16))),
        lambda params, batch: used(params, batch),
        BATCH,
        None,
        wrt=lambda path, leaf: "z" not in str(path),
    )


@pytest.mark.long
def test_a_step_and_stages_with_frozen_arrays_of_4_bits():
    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, given: Any) -> Any:
            w, q = given
            return x + jnp.tanh(x @ (w + 0.1 * q.astype(jnp.float32))), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], (params["w"], params["q"]))[0] ** 2)

    def stacked(key: Any) -> Any:
        return {
            "w": jax.random.normal(key, (4, 16, 16)) * 0.1,
            "q": jax.random.randint(key, (4, 16, 16), 0, 3, jnp.int8).astype(jnp.int4),
        }

    def trained(path: Any, leaf: Any) -> bool:
        return "w" in str(path)

    for more in ({}, {"pipeline": "programs"}):
        pin = {"mesh": {"stage": 2, "data": 2}, "microbatches": 2, "schedule": "1f1b", **more}
        check(stacked, loss, BATCH, pin, wrt=trained)

    def step(state: Any, batch: Any) -> Any:
        of_w = jax.value_and_grad(lambda w: loss({**state, "w": w}, batch))
        value, gradient = of_w(state["w"])
        return {**state, "w": state["w"] - 0.1 * gradient}, {"loss": value}

    program = shardlib.compile_step(
        stacked, step, BATCH, topology="cpu:8", pin={"mesh": {"data": 2, "fsdp": 2}}
    )
    state = program.init(0)
    plain = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
    for _ in range(2):
        state, metrics = program.step(state, BATCH)
        plain, wanted = step(plain, BATCH)
        np.testing.assert_allclose(float(metrics["loss"]), float(wanted["loss"]), rtol=1e-5)
    np.testing.assert_allclose(state["w"], plain["w"], atol=1e-6)
