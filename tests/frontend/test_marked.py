"""A step whose loss is marked has the numbers of plain JAX, and all plans of `shardlib.compile`."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.errors import AnnotationError, ArgumentError, PinError, TracingError
from tests.frontend.examples import ROWS, Batch, Example, State, drawn, lm, lm_init, nll
from tests.frontend.marked import MARKED
from tests.frontend.test_equal import plain

STEPS = 3
MESHES: dict[str, dict[str, Any]] = {
    "data4-parts4": {"mesh": {"data": 4}, "microbatches": 4},
    **{
        f"all-zero{zero}-parts2": {
            "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
            "zero": zero,
            "microbatches": 2,
        }
        for zero in (1, 2, 3)
    },
    "fsdp4-zero3-parts4": {"mesh": {"fsdp": 4}, "zero": 3, "microbatches": 4},
    "planned": {},
}
#: Plans of repeated layers, in one loss that gets all weights.
DEEP: dict[str, dict[str, Any]] = {
    "remat": {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 2, "remat": "full"},
    "context2-parts2": {"mesh": {"data": 2, "context": 2}, "microbatches": 2},
    "stage2-parts4": {"mesh": {"data": 2, "stage": 2}, "microbatches": 4},
    "stage2-fsdp4-zero2": {"mesh": {"fsdp": 4, "stage": 2}, "microbatches": 2, "zero": 2},
}
#: Meshes of those that call `shardlib.attention` and `shardlib.visit`.
CALLS: dict[str, dict[str, Any]] = {
    "attending ring": {"mesh": {"data": 2, "context": 2}, "microbatches": 2, "context": "ring"},
    "attending ulysses": {"mesh": {"fsdp": 2, "context": 2}, "zero": 3, "context": "ulysses"},
    "experts dropless": {
        "mesh": {"data": 2, "expert": 2},
        "microbatches": 2,
        "experts": "dropless",
    },
    "experts zero3": {"mesh": {"fsdp": 2, "expert": 4}, "zero": 3, "experts": "dropless"},
}
CASES = [
    *((name, mesh) for name in MARKED for mesh in MESHES),
    *((name, mesh) for name in ("language_model", "dpo") for mesh in DEEP),
    *((mesh.split()[0], mesh) for mesh in CALLS),
]


@cache
def reference(name: str) -> list[list[np.ndarray]]:
    example = MARKED[name](jax.value_and_grad)
    step, state = jax.jit(example.step), jax.jit(example.init)(jax.random.key(3))
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, example.batch)
        found.append(plain((state, metrics)))
    return found


def compiled(example: Example, pin: dict[str, Any]) -> Any:
    return shardlib.compile_step(
        example.init,
        example.step,
        example.batch,
        topology="cpu:8",
        pin=pin,
        batch_axes=example.batch_axes,
    )


def require_near(mine: Any, wanted: list[np.ndarray]) -> None:
    for found, theirs in zip(plain(mine), wanted, strict=True):
        limit = 1e-5 * max(1.0, np.abs(theirs).max(initial=0))
        assert np.abs(found - theirs).max(initial=0) <= limit


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_marked_step_gives_the_numbers_of_one_device(name: str, mesh: str):
    example, pin = MARKED[name](), {**MESHES, **DEEP, **CALLS}[mesh]
    program = compiled(example, pin)
    assert program.plan.microbatches == pin.get("microbatches", program.plan.microbatches)
    state = program.init(seed=3)
    for wanted in reference(name):
        state, metrics = program.step(state, example.batch)
        require_near((state, metrics), wanted)
    kept = jax.tree.map(lambda leaf, asked: leaf.sharding == asked.sharding, state, program.state)
    assert all(jax.tree.leaves(kept))


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


@pytest.mark.long
def test_a_marked_loss_is_planned_as_that_of_compile():
    optimizer = optax.adamw(1e-2)

    def loss(params: State, batch: Batch) -> jax.Array:
        return nll(lm(params, batch["ids"]), batch["ids"]).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = shardlib.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
            "loss": value
        }

    def init(key: jax.Array) -> State:
        return {"params": lm_init(key), "opt": optimizer.init(lm_init(key))}

    batch = MARKED["language_model"]().batch
    for pin in ({}, {"mesh": {"stage": 2, "fsdp": 4}, "microbatches": 4, "remat": "full"}):
        mine = shardlib.compile_step(
            init, step, batch, topology="h100:8", pin=pin, abstract=True
        ).plan
        theirs = shardlib.plan(
            shardlib.tree(lm_init), loss, optimizer, batch, topology="h100:8",
            pin={"offload": [], **pin},
        )  # fmt: skip
        assert mine.mesh == theirs.mesh
        assert mine.microbatches == theirs.microbatches
        assert mine.estimate.step_seconds == pytest.approx(theirs.estimate.step_seconds)
        assert mine.estimate.device_bytes.peak == pytest.approx(
            theirs.estimate.device_bytes.peak, rel=0.01
        )
    assert "microbatches" in mine.explain()
    assert "x" in mine.why_not(microbatches=2)


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
