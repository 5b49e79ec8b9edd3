"""What the whole batch says beforehand reaches stages whose layers are written out one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib

ROWS, WIDTH, LAYERS = 16, 8, 4


def init(key: Any) -> Any:
    keys = jax.random.split(key, LAYERS)
    return {"layers": [jax.random.normal(one, (WIDTH, WIDTH)) / 3 for one in keys]}


def outputs(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for weight in params["layers"]:
        x = x + jnp.tanh(x @ weight)
    return x


def each(params: Any, batch: Any) -> Any:
    return ((outputs(params, batch) - batch["y"]) ** 2).mean(-1)


def masked(params: Any, batch: Any) -> Any:
    return (each(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def mean_where(params: Any, batch: Any) -> Any:
    return jnp.mean(each(params, batch), where=batch["mask"] > 0.5)


def rolled(params: Any, batch: Any) -> Any:
    return ((outputs(params, batch) - jnp.roll(batch["y"], 1, 0)) ** 2).mean()


def numbered(params: Any, batch: Any) -> Any:
    return each(params, batch) @ jnp.arange(len(batch["x"])) / 100


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y, "mask": np.linspace(0, 3, ROWS).astype(np.float32)}


def unsharded(loss: Callable[..., Any], params: Any, steps: int) -> tuple[Any, list[Any]]:
    """Parameters and losses of plain gradient descent."""
    seen, step = [], jax.jit(jax.value_and_grad(loss))
    for _ in range(steps):
        value, gradients = step(params, batch())
        params = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, params, gradients)
        seen.append(value)
    return params, seen


@pytest.mark.parametrize(
    ("loss", "pin"),
    [
        (masked, {"mesh": {"stage": 2}, "schedule": "gpipe"}),
        (masked, {"mesh": {"stage": 4, "data": 2}, "schedule": "1f1b", "microbatches": 4}),
        (masked, {"mesh": {"stage": 2}, "pipeline": "programs"}),
        (masked, {"mesh": {"stage": 4}, "pipeline": "programs", "microbatches": 4}),
        (mean_where, {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "1f1b"}),
        (rolled, {"mesh": {"stage": 4}, "schedule": "gpipe"}),
        (rolled, {"mesh": {"stage": 2, "data": 2}, "pipeline": "programs"}),
        (numbered, {"mesh": {"stage": 2, "data": 2}, "schedule": "1f1b"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value["mesh"]),
)
def test_written_out_layers_give_the_numbers_of_the_whole(loss: Any, pin: dict[str, Any]):
    program = shardlib.compile(
        shardlib.tree(init),
        loss,
        optax.sgd(0.1),
        batch(),
        topology="cpu:8",
        pin={"microbatches": 2, **pin},
    )
    state = program.init(0)
    params, wanted = unsharded(loss, jax.tree.map(np.asarray, state.params), 2)
    for expected in wanted:
        state, metrics = program.step(state, batch())
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    jax.tree.map(
        lambda leaf, plain: np.testing.assert_allclose(leaf, plain, rtol=1e-5, atol=1e-5),
        jax.tree.map(np.asarray, state.params),
        params,
    )
