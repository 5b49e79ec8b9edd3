"""Arrays that are attributes of NNX modules, masks and tables of positions, are state of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.errors import TracingError

BATCH = {"x": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)}


class Turned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.angles, self.mask = jnp.arange(8.0), jnp.arange(8) < 6

    def __call__(self, x: Any) -> Any:
        return jnp.where(self.mask, self.up(x) * jnp.cos(self.angles), 0)


class Graph(nnx.Module, pytree=False):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = Turned(rngs)
        self.scale = jnp.full(8, 2.0)

    def __call__(self, x: Any) -> Any:
        return self.inner(x) * self.scale


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - 1) ** 2)


@pytest.mark.parametrize("kind", [Turned, Graph])
def test_they_are_kept_and_not_trained(kind: Any) -> None:
    program = shardlib.compile(
        kind, loss, optax.sgd(0.1), BATCH, topology="cpu:8", pin={"mesh": {"fsdp": 8}, "zero": 3}
    )
    assert all("up" in one.path for one in program.plan.parameters if one.role == "trained")
    state = program.init(seed=0)
    model = kind(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
        state, metrics = program.step(state, BATCH)
        wanted, gradients = nnx.value_and_grad(loss)(model, BATCH)
        optimizer.update(model, gradients)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    mine, theirs = (getattr(one, "inner", one) for one in (program.module(state), model))
    np.testing.assert_array_equal(mine.angles, theirs.angles)
    np.testing.assert_array_equal(mine.mask, theirs.mask)
    np.testing.assert_allclose(mine.up.kernel[...], theirs.up.kernel[...], rtol=1e-5)


def test_arrays_that_functions_of_a_pytree_hold_are_refused() -> None:
    def scaled(by: jax.Array) -> Any:
        return lambda x: x * by

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (8, 8)), "act": scaled(jnp.arange(8.0))}

    with pytest.raises(TracingError, match=r"holds in functions or static .*: float32\[8\]\nTry"):
        shardlib.plan(
            shardlib.tree(init),
            lambda model, batch: jnp.mean(model["act"](batch["x"] @ model["w"]) ** 2),
            optax.sgd(0.1),
            BATCH,
            topology="cpu:8",
        )


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class Named:
    """An array whose `==` is that of its elements, as of Penzai's named arrays."""

    array: Any

    def __eq__(self, other: object) -> Any:
        return self.array == jnp.asarray(other.array)


def test_nodes_of_a_pytree_may_compare_their_elements() -> None:
    optimizer = optax.adam(1e-2)
    program = shardlib.compile(
        shardlib.tree(lambda key: Named(jax.random.normal(key, (8, 8)))),
        lambda params, batch: jnp.mean((batch["x"] @ params.array - 1) ** 2),
        optimizer,
        BATCH,
        topology="cpu:8",
    )
    _, metrics = program.step(program.init(seed=0), BATCH)
    weights = jax.random.normal(jax.random.key(0), (8, 8))
    wanted = jnp.mean((BATCH["x"] @ weights - 1) ** 2)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
