"""`shardlib.value_and_grad` takes what `jax.value_and_grad` and `nnx.value_and_grad` take, and losses
that close over what the step computes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.errors import ArgumentError, PinError
from tests.frontend.equality import plain, require_near
from tests.frontend.examples import drawn

ROWS, WIDTH = 16, 8
PARTS = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3, "microbatches": 2}


def small(grad: Any) -> Any:
    """A step whose loss closes over its batch, over what the step makes of it, over a weight of the
    state, a random key, a number of rows and a scalar of all rows.
    """

    def step(state: Any, batch: Any) -> Any:
        rows = batch["x"].shape[0]
        inputs = {"x": jnp.tanh(batch["x"]), "y": batch["y"]}
        seen = (batch["y"] > 0).astype(jnp.float32)
        count = seen.sum()
        noise = jax.random.normal(state["key"], batch["x"].shape)
        turned = batch["y"].T

        def loss(params: Any) -> Any:
            found = jnp.tanh((inputs["x"] + 0.1 * noise) @ params["up"]) @ params["down"]
            error = ((found - inputs["y"] @ state["target"]) ** 2).mean(-1)
            near = (error[:, None] * seen).sum() / count
            return near + (turned.T * found).sum() / rows, {"far": (error > 1).sum()}

        (value, aux), gradients = grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda one, slope: one - 0.1 * slope, state["params"], gradients)
        return {**state, "params": params}, {"loss": value, **aux}

    return step


def first(key: jax.Array) -> Any:
    return {
        "params": {
            "up": jax.random.normal(key, (WIDTH, 32)) / 3,
            "down": jax.random.normal(key, (32, WIDTH)) / 6,
        },
        "target": jax.random.normal(key, (WIDTH, WIDTH)) / 3,
        "key": key,
    }


BATCH = {"x": drawn(1, ROWS, WIDTH), "y": drawn(2, ROWS, WIDTH)}


@pytest.mark.parametrize("pin", [PARTS, {"mesh": {"fsdp": 4}, "microbatches": 4}])
def test_rows_among_what_a_loss_closes_over_are_found(pin: Any):
    program = shardlib.compile_step(
        first, small(shardlib.value_and_grad), BATCH, topology="cpu:8", pin=pin
    )
    assert {one.path: one.role for one in program.plan.parameters} == {
        "params.down": "trained",
        "params.up": "trained",
        "target": "frozen",
    }
    wanted = jax.jit(small(jax.value_and_grad))(first(jax.random.key(3)), BATCH)
    require_near(program.step(program.init(seed=3), BATCH), plain(wanted))


def of_halves(state: Any, batch: Any) -> Any:
    halves = batch["x"].reshape(2, 8, WIDTH)
    return state, shardlib.value_and_grad(lambda weight: ((halves @ weight) ** 2).mean())(state)[0]


def of_minibatches(state: Any, batch: Any) -> Any:
    def minibatch(weight: jax.Array, x: jax.Array) -> Any:
        value, slope = shardlib.value_and_grad(lambda w: ((x @ w) ** 2).mean())(weight)
        return weight - 0.1 * slope, value

    return jax.lax.scan(minibatch, state, batch["x"].reshape(-1, 8, WIDTH))


@pytest.mark.parametrize(
    ("step", "said"),
    [(of_halves, "rows"), (of_minibatches, "none of its arrays grows with the rows")],
)
def test_a_loss_of_a_fixed_number_of_rows_keeps_the_batch_in_one_piece(step: Any, said: str):
    def compile(pin: Any) -> Any:
        return shardlib.compile_step(
            lambda key: jnp.eye(WIDTH), step, BATCH, topology="cpu:8", pin=pin, abstract=True
        )

    assert compile({"mesh": {"fsdp": 4}}).plan.microbatches == 1
    with pytest.raises(PinError, match=said):
        compile({"microbatches": 2})


def test_values_of_every_row_are_those_of_the_whole_batch():
    def valued(grad: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            def loss(params: Any) -> Any:
                found = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
                return ((found - batch["y"]) ** 2).mean(), found

            (value, found), gradients = grad(loss, has_aux=True)(state["params"])
            params = jax.tree.map(lambda one, slope: one - slope, state["params"], gradients)
            return {**state, "params": params}, {"loss": value, "best": found.argmax(-1)}

        return step

    program = shardlib.compile_step(
        first, valued(shardlib.value_and_grad), BATCH, topology="cpu:8", pin=PARTS
    )
    wanted = jax.jit(valued(jax.value_and_grad))(first(jax.random.key(3)), BATCH)
    require_near(program.step(program.init(seed=3), BATCH), plain(wanted))


def pair(a: Any, b: Any, scale: float = 1.0, *, on: bool = True) -> jax.Array:
    if not on:
        return jnp.zeros(())
    return ((a["x"] @ b) ** 2).mean() * scale


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"argnums": 1},
        {"argnums": (0, 1)},
        {"argnums": (1,)},
        {"argnums": [1, 0]},
        {"argnums": (0, 2)},
        {"argnums": -1},
        {"argnums": (0, -2)},
        {"allow_int": True},
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_it_takes_the_forms_of_jax(options: Any, jit: bool):
    args = ({"x": drawn(3, 4, WIDTH)}, drawn(4, WIDTH, WIDTH), 2.0)
    for kwargs in ({}, {"on": True}, {"on": False}):
        results = []
        for grad in (shardlib.value_and_grad, jax.value_and_grad):

            def run(*args: Any, grad: Any = grad, kwargs: Any = kwargs) -> Any:
                return grad(pair, **options)(*args, **kwargs)

            results.append((jax.jit(run) if jit else run)(*args))
        assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
        require_near(results[0], plain(jax.tree.map(jnp.asarray, results[1])))


def test_too_few_arguments_are_told():
    for number in (3, -3):
        said = f"differentiated by argument {number}, and is called with 2"
        with pytest.raises(ArgumentError, match=said):
            shardlib.value_and_grad(pair, argnums=number)({"x": jnp.ones((4, 4))}, jnp.eye(4))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.LoRALinear(32, WIDTH, lora_rank=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


def far(model: Net, batch: Any, scale: float = 1.0) -> Any:
    found = model(batch["x"])
    return scale * ((found - batch["y"]) ** 2).mean(), found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"argnums": nnx.DiffState(0, nnx.LoRAParam)},
        {"argnums": (0, 1)},
        {"argnums": (nnx.DiffState(0, nnx.Any(nnx.LoRAParam)),)},
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_it_takes_the_forms_of_nnx(options: Any, jit: bool):
    results = []
    for grad in (shardlib.value_and_grad, nnx.value_and_grad):
        model = Net(nnx.Rngs(0))
        graph, state = nnx.split(model)

        def run(state: Any, batch: Any, grad: Any = grad, graph: Any = graph) -> Any:
            model = nnx.merge(graph, state, copy=True)
            found = grad(far, has_aux=True, **options)(model, batch, 2.0)
            return found, nnx.state(model)

        results.append((jax.jit(run) if jit else run)(state, BATCH))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    require_near(results[0], plain(results[1]))


def test_a_diff_state_may_be_what_is_trained():
    model = Net(nnx.Rngs(0))
    mine = shardlib.value_and_grad(far, has_aux=True, wrt=nnx.DiffState(0, nnx.LoRAParam))
    theirs = nnx.value_and_grad(far, has_aux=True, argnums=nnx.DiffState(0, nnx.LoRAParam))
    found, wanted = mine(model, BATCH)[1], theirs(Net(nnx.Rngs(0)), BATCH)[1]
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    require_near(found, plain(wanted))


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.down(nnx.relu(self.norm(self.up(x))))


def trained(grad: Any) -> Any:
    """A step of NNX as its guides write it."""

    def init(key: jax.Array) -> Any:
        model = Plain(nnx.Rngs(key))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        return {"model": model, "optimizer": optimizer, "metrics": metrics}

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(model: Plain) -> Any:
            found = model(batch["x"])
            return ((found - batch["y"]) ** 2).mean(), found.sum()

        (value, total), slopes = grad(loss_fn, has_aux=True)(state["model"])
        state["optimizer"].update(state["model"], slopes)
        state["metrics"].update(loss=value)
        return state, {"loss": value, "total": total}

    return init, step


def test_a_step_of_nnx_marks_its_loss_by_one_word():
    init, step = trained(shardlib.value_and_grad)
    program = shardlib.compile_step(init, step, BATCH, topology="cpu:8", pin=PARTS)
    mine = program.init(seed=3)
    init, step = trained(nnx.value_and_grad)
    theirs = jax.jit(init)(jax.random.key(3))
    for _ in range(2):
        mine, found = program.step(mine, BATCH)
        theirs, wanted = jax.jit(step)(theirs, BATCH)
        require_near((mine, found), plain((theirs, wanted)))
    assert mine["model"].calls[...] == 2
