"""A step whose loss is marked has the numbers of plain JAX, and all plans of `shardlib.compile`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib
from shardlib.errors import AnnotationError, ArgumentError, PinError, TracingError
from tests.frontend.equality import compiled, plain, require_near
from tests.frontend.examples import ROWS, Batch, Example, State, drawn
from tests.frontend.marked import MARKED, in_batch


def net(params: State, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


def masked(params: State, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A ratio of sums, a count and a sum."""
    seen = (batch["y"] > 0).astype(jnp.float32)
    error = (net(params, batch["x"]) - batch["y"]) ** 2
    return (error * seen).sum() / seen.sum(), {"far": (error > 1).sum(), "sum": error.sum()}


def small(loss: Any, *rest: Any, grad: Any = shardlib.value_and_grad, **options: Any) -> Example:
    """Plain gradient steps of a small network."""

    def init(key: jax.Array) -> State:
        return {
            "up": jax.random.normal(key, (16, 32)) / 4,
            "down": jax.random.normal(key, (32, 8)) / 6,
        }

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        value, gradients = grad(loss, **options)(state, batch, *rest)
        changed = {name: state[name] - 0.1 * gradient for name, gradient in gradients.items()}
        return {**state, **changed}, {"value": value}

    return Example(init, step, {"x": drawn(1, ROWS, 16), "y": drawn(2, ROWS, 8)})


def test_ratios_counts_and_sums_are_those_of_the_whole_batch():
    wanted = small(masked, grad=jax.value_and_grad, has_aux=True)
    pin = {"mesh": {"data": 2, "fsdp": 2}, "zero": 3, "microbatches": 4}
    program = compiled(small(masked, has_aux=True), pin)
    state, metrics = program.step(program.init(seed=1), wanted.batch)
    theirs = jax.jit(wanted.step)(wanted.init(jax.random.key(1)), wanted.batch)
    require_near((state, metrics), plain(theirs))
    assert metrics["value"][1]["far"].dtype == jnp.int32


def test_what_is_frozen_has_no_gradient():
    def other(path: tuple[str, ...], leaf: Any) -> bool:
        return path[-1] == "down"

    program = compiled(
        small(masked, has_aux=True, wrt=other), {"mesh": {"fsdp": 4}, "microbatches": 2}
    )
    assert {one.path: one.role for one in program.plan.parameters} == {
        "up": "frozen",
        "down": "trained",
    }
    example = small(masked)
    first = example.init(jax.random.key(0))
    state = program.step(program.init(), example.batch)[0]
    (_, gradients) = jax.grad(masked, has_aux=True)(first, example.batch)[::-1]
    np.testing.assert_array_equal(state["up"], first["up"])
    np.testing.assert_allclose(state["down"], first["down"] - 0.1 * gradients["down"], atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_random_key_that_a_loss_does_not_use_may_be_given(parts: int):
    def loss(a: jax.Array, batch: Batch, rest: dict[str, jax.Array]) -> jax.Array:
        return ((batch["x"] @ a) ** 2).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradient = shardlib.value_and_grad(loss)(state["a"], batch, {"key": state["key"]})
        return {"a": state["a"] - 0.1 * gradient, "key": state["key"]}, {"loss": value}

    example = Example(
        lambda key: {"a": jnp.ones((16, 8)), "key": key}, step, {"x": drawn(1, ROWS, 16)}
    )
    program = compiled(example, {"mesh": {"data": 2, "fsdp": 2}, "microbatches": parts})
    found = program.step(program.init(seed=3), example.batch)
    require_near(found, plain(jax.jit(step)(example.init(jax.random.key(3)), example.batch)))


def test_outside_of_a_plan_it_is_what_jax_has():
    example = small(masked)
    params, batch = example.init(jax.random.key(0)), example.batch
    mine = shardlib.value_and_grad(masked, has_aux=True)
    theirs = jax.value_and_grad(masked, has_aux=True)
    for run in (lambda f: f, jax.jit):
        for one, other in zip(
            jax.tree.leaves(run(mine)(params, batch)),
            jax.tree.leaves(run(theirs)(params, batch)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)

    def each(function: Any) -> Any:
        rows = jax.tree.map(lambda leaf: leaf[:, None], batch)
        return jax.jit(jax.vmap(function, (None, 0)))(params, rows)

    def twice(function: Any) -> Any:
        return jax.grad(lambda p: (function(p, batch)[1]["up"] ** 2).sum())(params)

    for how in (each, twice):
        require_near(how(mine), plain(how(theirs)))


def test_adapters_of_flax_are_chosen_by_their_type():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.LoRALinear(16, 8, lora_rank=2, rngs=rngs)

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    batch = {"x": drawn(1, ROWS, 16), "y": drawn(2, ROWS, 8)}

    def loss(params: Any, batch: Batch) -> jax.Array:
        return ((nnx.merge(graph, params).layer(batch["x"]) - batch["y"]) ** 2).mean()

    value, gradients = shardlib.value_and_grad(loss, wrt=nnx.LoRAParam)(params, batch)
    wanted = jax.value_and_grad(loss)(params, batch)
    assert value == wanted[0]
    found = nnx.to_pure_dict(gradients)
    assert list(found["layer"]) == ["lora"]
    for name, leaf in found["layer"]["lora"].items():
        np.testing.assert_array_equal(leaf, wanted[1]["layer"]["lora"][name][...])


def contrastive(params: State, batch: Batch) -> jax.Array:
    found = net(params, batch["x"])
    return -jax.nn.log_softmax(found @ found.T)[:, 0].mean()


def by_rows(params: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
    error = (net(params, batch["x"]) - batch["y"]) ** 2
    return error.mean(), error.mean(-1)


def made_of_several(state: State, batch: Batch) -> Any:
    def loss(weight: jax.Array, batch: Batch) -> jax.Array:
        return ((batch["x"] @ weight - batch["y"]) ** 2).mean()

    return state, shardlib.value_and_grad(loss)(state["up"] @ state["down"], batch)[0]


@pytest.mark.parametrize(
    ("step", "pin", "error", "said"),
    [
        (small(contrastive).step, {"microbatches": 2}, PinError, "rows meet other rows"),
        (small(by_rows, has_aux=True).step, {"mesh": {"stage": 2}}, PinError, "every row, .*aux"),
        (made_of_several, {}, TracingError, "not arrays of the state"),
        (small(masked, has_aux=True).step, {"offload": ["optimizer"]}, PinError, "updates its"),
        (small(masked, has_aux=True).step, {"moment_dtype": "bfloat16"}, PinError, "updates its"),
        (small(lambda p, b: net(p, b["x"])).step, {}, TracingError, "scalar"),
        (small(masked, has_aux=True, wrt=lambda *_: False).step, {}, AnnotationError, "nothing"),
    ],
)
def test_wrong_losses_say_what_is_wrong(step: Any, pin: Any, error: type, said: str):
    example = small(masked)
    with pytest.raises(error, match=said):
        shardlib.compile_step(example.init, step, example.batch, topology="cpu:8", pin=pin)


@pytest.mark.long
def test_what_has_no_stages_says_why():
    for name, said in {
        "gan": "marks 2 losses",
        "ppo": "in a loop",
        "distillation": "weights that its loss does not get: teacher",
    }.items():
        with pytest.raises(PinError, match=said):
            compiled(MARKED[name](), {"mesh": {"stage": 2}})
    with pytest.raises(ArgumentError, match="it is a function"):
        shardlib.value_and_grad(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_are_refused_where_rows_meet(parts: int):
    said = (
        f"{parts} microbatches would change the numbers.*the loss: rows meet other rows"
        r" \(dot_general at marked.py"
    )
    with pytest.raises(PinError, match=said):
        compiled(in_batch(), {"mesh": {"data": 2}, "microbatches": parts})


def test_what_is_planned_freely_has_one_microbatch_where_rows_meet():
    plan = compiled(in_batch(), {}).plan
    assert plan.microbatches == 1
    with pytest.raises(PinError, match="rows meet other rows"):
        plan.why_not(microbatches=2)
