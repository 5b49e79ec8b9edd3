"""Pytree models with state: what a loss returns is the state of the next step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import AnnotationError, TracingError

ROWS = 16
BATCH = {
    "x": np.random.default_rng(0).standard_normal((ROWS, 8)).astype(np.float32),
    "y": np.random.default_rng(1).standard_normal((ROWS, 4)).astype(np.float32),
}


def init(key: jax.Array) -> tuple[Any, Any]:
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (8, 16)) / 3, "down": jax.random.normal(down, (16, 4))}
    return params, {"mean": jnp.zeros(16), "steps": jnp.zeros((), jnp.int32)}


def loss(pair: Any, batch: Any) -> Any:
    """A layer whose results are centred over the batch, with a running mean beside it."""
    params, state = pair
    hidden = batch["x"] @ params["up"]
    mean = hidden.mean(0)
    after = {"mean": 0.9 * state["mean"] + 0.1 * mean, "steps": state["steps"] + 1}
    error = jnp.mean((jax.nn.relu(hidden - mean) @ params["down"] - batch["y"]) ** 2)
    return error, {"centre": jnp.sum(mean**2)}, after


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_params_and_state_are_those_of_plain_optax(mesh: dict[str, int]) -> None:
    optimizer = optax.adam(1e-2)
    program = shardlib.compile(
        shardlib.tree(init, stateful=True),
        loss,
        optimizer,
        BATCH,
        topology="cpu:8",
        pin={"mesh": mesh, "zero": 3},
    )
    state = program.init(seed=0)

    params, running = init(jax.random.key(0))
    moments = optimizer.init(params)

    def value(params: Any, running: Any) -> Any:
        error, metrics, after = loss((params, running), BATCH)
        return error, (metrics, after)

    for _ in range(3):
        state, metrics = program.step(state, BATCH)
        (error, (wanted, running)), gradients = jax.value_and_grad(value, has_aux=True)(
            params, running
        )
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], error, rtol=1e-5)
        np.testing.assert_allclose(metrics["centre"], wanted["centre"], rtol=1e-5)
    found = program.module(state)
    assert isinstance(found, tuple) and int(found[1]["steps"]) == 3
    for mine, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves((params, running)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def planned(made: Any, loss: Any = loss) -> None:
    shardlib.plan(shardlib.tree(made, stateful=True), loss, optax.sgd(0.1), BATCH, topology="cpu:8")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda key: init(key)[0], "makes a pair (params, state)"),
        (lambda key: init(key)[::-1][:1], "makes a pair (params, state)"),
        (lambda key: ({"steps": jnp.zeros((), int)}, init(key)[1]), "no floating-point arrays"),
        (lambda key: (init(key)[0], {}), "a state without arrays"),
    ],
)
def test_what_is_no_pair_is_refused(made: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=message.replace("(", r"\(").replace(")", r"\)")):
        planned(made)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda error, metrics, after: error, "expected (loss, state) or (loss, metrics, state)"),
        (lambda error, metrics, after: (error, metrics), "another structure"),
        (
            lambda error, metrics, after: (error, {**after, "mean": after["mean"][:8]}),
            "mean: float32[8], and not float32[16]",
        ),
        (lambda error, metrics, after: (error, 1.0, after), "dict of metrics"),
    ],
)
def test_a_loss_that_loses_the_state_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(TracingError) as error:
        planned(init, lambda pair, batch: returned(*loss(pair, batch)))
    assert message in str(error.value)
