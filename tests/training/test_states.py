"""Steps in halves, and states read and changed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.errors import StateError
from shardlib.lowering.program import Program
from shardlib.training.states import learning_rate, operate, steps_done
from tests.checkpointing import states

WIDE, ROWS = 16, 8
RATE = optax.linear_schedule(1e-2, 0.0, 10)
OPTIMIZER = optax.inject_hyperparams(optax.adam)(learning_rate=RATE)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, vocab: int = 24, adapters: bool = False):
        self.embed = nnx.Embed(
            vocab, WIDE, embedding_metadata={"out_sharding": ("vocab", "embed")}, rngs=rngs
        )
        metadata = {"out_sharding": ("embed", "mlp")}
        self.up = (
            nnx.LoRALinear(WIDE, 32, lora_rank=2, kernel_metadata=metadata, rngs=rngs)
            if adapters
            else nnx.Linear(WIDE, 32, kernel_metadata=metadata, rngs=rngs)
        )
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.drop(nnx.gelu(self.up(self.embed(ids))))


def loss(model: Model, batch: Any) -> Any:
    out = model(batch["ids"])
    return jnp.mean((out.mean(-1) - batch["y"]) ** 2), {"size": jnp.mean(out**2)}


def rows(seed: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed)
    return {
        "ids": drawn.integers(0, 24, (ROWS, 4)).astype(np.int32),
        "y": drawn.normal(size=(ROWS, 4)).astype(np.float32),
    }


def compiled(init: Any, mesh: dict[str, int], zero: int, **more: Any) -> Program:
    return shardlib.compile(
        init,
        loss,
        OPTIMIZER,
        rows(0),
        topology=f"cpu:{np.prod([*mesh.values()])}",
        pin={"mesh": mesh, "zero": zero, **more.pop("pin", {})},
        **more,
    )


@pytest.fixture(scope="module")
def program() -> Program:
    guards = shardlib.Guards(clip=1.0)
    return compiled(Model, {"fsdp": 4}, 3, guards=guards, pin={"microbatches": 2})


def numbers(tree: Any) -> list[np.ndarray]:
    return jax.tree.leaves(states.numbers(tree))


def equal(one: Any, other: Any) -> bool:
    return all(
        np.allclose(a, b, rtol=1e-6, atol=1e-7)
        for a, b in zip(numbers(one), numbers(other), strict=True)
    )


@pytest.mark.long
def test_two_halves_are_a_step(program: Program):
    whole, halves = program.init(0), program.init(0)
    for number in range(3):
        whole, wanted = program.step(whole, rows(number))
        gradients = program.gradients(halves, rows(number))
        halves, found = program.apply(halves, gradients)
        assert found.keys() == wanted.keys() and equal(found, wanted)
    assert equal(halves, whole)
    assert learning_rate(halves) == pytest.approx(float(RATE(2))) and steps_done(halves) == 3
    specs = [str(leaf.sharding.spec) for leaf in jax.tree.leaves(gradients.params)]
    assert any("fsdp" in spec for spec in specs)
    frozen = replace(gradients, params=jax.tree.map(jnp.zeros_like, gradients.params))
    with pytest.raises(StateError, match="deleted"):
        program.apply(program.step(whole, rows(0)) and whole, frozen)


@pytest.mark.long
def test_gradients_are_those_of_plain_jax():
    def steady(rngs: nnx.Rngs) -> Model:
        model = Model(rngs)
        model.eval()
        return model

    program = compiled(steady, {"data": 2, "tensor": 2}, 0)
    state = program.init(0)
    model = program.module(state)
    graph, params, rest = nnx.split(jax.device_get(model), nnx.Param, ...)
    wanted = jax.grad(lambda p: loss(nnx.merge(graph, p, rest), rows(1))[0])(params)
    found = program.gradients(state, rows(1)).params
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(one, other, atol=1e-6)


@pytest.mark.long
def test_a_module_stays_sharded_under_jit(program: Program):
    state = program.init(0)
    model = program.module(state)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree))(nnx.state(model, nnx.Param))  # fmt: skip
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    for one, other in zip(before, jax.tree.leaves(doubled), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    model.eval()
    out = nnx.jit(lambda model, ids: model(ids))(model, rows(0)["ids"])
    evaluated = program.evaluate(state, rows(0))
    assert float(jnp.mean(out**2)) == pytest.approx(float(evaluated["size"]), rel=1e-5)


@pytest.mark.long
def test_a_state_dict_has_the_arrays_themselves(program: Program):
    """Under Flax's own paths, and the plan's."""
    state = program.init(seed=0)
    found = program.state_dict(state)
    flat = nnx.to_flat_state(nnx.state(program.module(state)))
    assert found.keys() == {".".join(map(str, path)) for path, _ in flat}
    assert list(found)[: len(program.plan.parameters)] == [p.path for p in program.plan.parameters]
    kernel = found["up.kernel"]
    assert any(kernel is one for one in jax.tree.leaves(state.params))
    assert kernel.sharding == program.state.params["up"]["kernel"].sharding
    state, _ = program.step(state, rows(1))
    assert program.state_dict(state)["up.kernel"].shape == kernel.shape
    with pytest.raises(StateError, match=r"state_dict"):
        program.state_dict(replace(state, params={"up": found}))


@pytest.mark.long
def test_surgery_resizes_freezes_and_adds_adapters_under_a_new_plan(program: Program):
    state, _ = program.step(program.init(0), rows(0))

    def changed(rngs: nnx.Rngs) -> Model:
        return Model(rngs, vocab=32, adapters=True)

    after = compiled(changed, {"data": 2, "tensor": 2}, 0, wrt=nnx.Any(nnx.LoRAParam, lambda path, _: "embed" in path))  # fmt: skip
    with pytest.raises(StateError, match=r"params.embed.embedding is .*\[24, 16\], and"):
        operate(after, state)
    surgery = operate(after, state, resize=("embed.embedding",))
    assert "resized  params.embed.embedding: float32[24, 16] -> float32[32, 16]" in str(surgery)
    assert any("lora_a" in path for path in surgery.new)
    made, fresh = surgery.state(seed=1), after.init(1)
    old = numbers(state.params["embed"])[0]
    assert (numbers(made.params["embed"])[0][:24] == old).all()
    assert (numbers(made.params["embed"])[0][24:] == numbers(fresh.params["embed"])[0][24:]).all()
    assert (numbers(made.params["up"]["kernel"])[0] == numbers(state.params["up"]["kernel"])[0]).all()  # fmt: skip
    assert steps_done(made) == 1
    mu = made.opt_state.inner_state[0].mu
    assert (numbers(mu["embed"])[0][:24] == numbers(state.opt_state.inner_state[0].mu["embed"])[0]).all()  # fmt: skip
    kernel = numbers(made.params["up"]["kernel"])[0].copy()
    made, _ = after.step(made, rows(1))
    assert (numbers(made.params["up"]["kernel"])[0] == kernel).all()  # frozen
    same = program.evaluate(state, rows(5))["loss"]
    back = operate(after, state, resize=("embed.embedding",)).state(seed=1)
    assert float(after.evaluate(back, rows(5))["loss"]) == pytest.approx(float(same), rel=1e-5)
