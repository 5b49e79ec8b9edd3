"""States with random keys, and with static parts that `init` makes anew; steps that return the state
alone.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import shardlib
from shardlib.errors import PlanError, StateError
from shardlib.frontend.steps import StepProgram
from shardlib.islands.program import IslandsProgram
from shardlib.lowering.program import Program
from shardlib.verification.isolation import Limits
from tests.frontend.equality import plain
from tests.frontend.examples import drawn

ROWS, WIDTH = 16, 8
MESH = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 3)
SLOW = jax.random.key(4, impl="rbg")
BATCH = {
    "x": drawn(1, ROWS, WIDTH),
    "key": jax.random.key(8),
    "keys": jax.random.split(KEY, ROWS),
}


def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def keyed(state: Any, batch: Any) -> Any:
    """Keys that are closed over, constants of loops, carried, scanned, chosen; in the batch, in the
    state and among the metrics.
    """

    def loss(weight: jax.Array) -> jax.Array:
        x = dropped(KEY, batch["x"]) + jax.vmap(dropped)(batch["keys"], batch["x"])

        def body(carry: Any, item: Any) -> Any:
            key, x = carry
            key, own = jax.random.split(key)
            number, scanned = item
            x = jnp.tanh((dropped(own, x) + dropped(scanned, x)) @ weight)
            return (key, x + dropped(jax.random.fold_in(KEY, number), x)), None

        (_, x), _ = jax.lax.scan(body, (state["keys"][1, 2], x), (jnp.arange(3), KEYS))
        chosen = jax.lax.cond(state["steps"] > 0, lambda: KEYS[0], lambda: KEY)
        x = jax.lax.fori_loop(0, 2, lambda i, x: dropped(jax.random.fold_in(chosen, i), x), x)
        return ((x + dropped(batch["key"], x) + dropped(state["slow"], x)) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(state["weight"])
    new = {
        "weight": state["weight"] - 0.1 * gradient,
        "keys": jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 1)))(state["keys"]),
        "slow": jax.random.split(state["slow"])[0],
        "last": KEYS[2],
        "steps": state["steps"] + 1,
    }
    return new, {"loss": value, "key": KEY, "next": jax.random.fold_in(KEY, 1)}


def first_keys(key: jax.Array) -> Any:
    return {
        "weight": jnp.eye(WIDTH) + jax.random.normal(key, (WIDTH, WIDTH)) / 8,
        "keys": jax.random.split(key, (2, 3)),
        "slow": SLOW,
        "last": KEY,
        "steps": 0,
    }


def test_typed_keys_anywhere_give_the_numbers_of_one_device(tmp_path: Path):
    program = shardlib.compile_step(first_keys, keyed, BATCH, topology="cpu:8", pin=MESH)
    mine, theirs = program.init(seed=3), jax.jit(first_keys)(jax.random.key(3))
    for _ in range(2):
        mine, found = program.step(mine, BATCH)
        theirs, wanted = jax.jit(keyed)(theirs, BATCH)
        for one, other in zip(plain((mine, found)), plain((theirs, wanted)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    program.save(tmp_path / "state", mine)
    back = program.restore(tmp_path / "state")
    assert jax.random.key_impl(back["slow"]) == jax.random.key_impl(SLOW)
    for one, other in zip(plain(back), plain(mine), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loss_may_close_over_a_typed_key():
    def loss(params: Any, batch: Any) -> jax.Array:
        return ((dropped(KEY, batch["x"]) @ params["weight"]) ** 2).mean()

    def init(key: jax.Array) -> Any:
        return {"weight": jnp.eye(WIDTH)}

    batch = {"x": BATCH["x"]}
    program = shardlib.compile(
        shardlib.tree(init), loss, optax.sgd(0.1), batch, topology="cpu:8", pin=MESH
    )
    found = program.step(program.init(), batch)[1]["loss"]
    np.testing.assert_allclose(found, loss(init(KEY), batch), rtol=1e-5)


def first_anew(key: jax.Array) -> TrainState:
    """A state whose static parts are other objects at each call."""
    model = nn.Dense(WIDTH)
    params = model.init(key, jnp.ones((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def step_anew(state: TrainState, batch: Any) -> TrainState:
    def loss(params: Any) -> jax.Array:
        return (state.apply_fn({"params": params}, batch["x"]) ** 2).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def test_a_state_made_anew_is_the_traced_one_and_may_be_returned_alone():
    batch = {"x": BATCH["x"]}
    program = shardlib.compile_step(first_anew, step_anew, batch, topology="cpu:8", pin=MESH)
    wanted = jax.jit(step_anew)(first_anew(jax.random.key(0)), batch)
    parallel = shardlib.parallelize(step_anew, topology="cpu:8", pin=MESH)
    evaluation = program.evaluation(lambda state, batch: (state.params["kernel"] ** 2).mean())
    values = [
        float(evaluation.evaluate(state, batch)["loss"])
        for state in (program.init(seed=0), first_anew(jax.random.key(0)))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6) and values[0] > 0
    for state, rest in (
        program.step(program.init(seed=0), batch),
        program.step(first_anew(jax.random.key(0)), batch),
        (parallel(first_anew(jax.random.key(0)), batch), {}),
    ):
        assert isinstance(state, TrainState) and rest == {}
        for one, other in zip(plain(state), plain(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_state_of_another_form_is_told_apart_by_its_arrays():
    batch = {"x": BATCH["x"]}
    program = shardlib.compile_step(
        first_anew, step_anew, batch, topology="cpu:8", pin=MESH, abstract=True
    )
    state = first_anew(jax.random.key(0))
    with pytest.raises(
        StateError, match=r"params.bias is not in it(.|\n)*more is in it, and not in"
    ):
        program.step(state.replace(params={"kernel": 1.0, "more": 2.0}), batch)
    with pytest.raises(PlanError, match="no devices"):
        program.step(state, batch)

    def other(state: TrainState, batch: Any) -> TrainState:
        return step_anew(state, batch).replace(apply_fn=lambda *_: 0.0)

    with pytest.raises(StateError, match="TrainState: "):
        shardlib.compile_step(first_anew, other, batch, topology="cpu:8", abstract=True)


def test_a_model_with_functions_made_anew_is_compiled():
    def init(key: jax.Array) -> Any:
        return jax.tree_util.Partial(lambda weight, x: jnp.tanh(x @ weight), jnp.eye(WIDTH))

    batch = {"x": BATCH["x"]}
    program = shardlib.compile(
        shardlib.tree(init),
        lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optax.adam(0.1),
        batch,
        topology="cpu:8",
        pin={"mesh": {"fsdp": 8}},
    )
    found = program.step(program.init(), batch)[1]["loss"]
    np.testing.assert_allclose(found, (np.tanh(batch["x"]) ** 2).mean(), rtol=1e-5)


@pytest.mark.parametrize("name", ["compiled", "verify", "prepare", "memory", "init"])
def test_programs_of_all_kinds_have_the_same_calls(name: str):
    mine = [
        inspect.signature(getattr(kind, name)) for kind in (Program, IslandsProgram, StepProgram)
    ]
    assert len({tuple(one.parameters) for one in mine}) == 1


@pytest.mark.long
@pytest.mark.processes
def test_a_program_verifies_itself():
    batch = {"x": BATCH["x"]}
    program = shardlib.compile(
        shardlib.tree(lambda key: {"weight": jnp.eye(WIDTH)}),
        lambda params, batch: ((batch["x"] @ params["weight"]) ** 2).mean(),
        optax.sgd(0.1),
        batch,
        topology="cpu:8",
        pin={"mesh": {"data": 2, "fsdp": 4}},
    )
    found = program.verify(limits=Limits(seconds=300))
    assert found.ok and found.plan.digest == program.plan.digest
    assert found.compiled.device_bytes["peak"] > 0
