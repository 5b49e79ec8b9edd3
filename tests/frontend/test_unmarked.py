"""A step that marks one loss and differentiates another with JAX's own function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardlib
from tests.frontend import examples
from tests.frontend.equality import compiled
from tests.frontend.examples import Batch, Example, State, mlp

MARK = shardlib.value_and_grad
JAX = jax.value_and_grad


def adversaries(judge_grad: Any, make_grad: Any) -> Example:
    """Two models and two losses, whose gradients are asked for in any way."""
    make, judge = optax.adam(1e-3, b1=0.5), optax.rmsprop(1e-3)

    def judged(d: Any, batch: Batch, g: Any) -> jax.Array:
        real, fake = mlp(d, batch["real"])[:, 0], mlp(d, mlp(g, batch["noise"]))[:, 0]
        return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()

    def made(g: Any, noise: jax.Array, d: Any) -> jax.Array:
        return jax.nn.softplus(-mlp(d, mlp(g, noise))[:, 0]).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        d_loss, gradients = judge_grad(judged)(state["d"], batch, state["g"])
        updates, judging = judge.update(gradients, state["judge"], state["d"])
        d = optax.apply_updates(state["d"], updates)
        g_loss, gradients = make_grad(made)(state["g"], batch["noise"], d)
        updates, making = make.update(gradients, state["make"])
        g = optax.apply_updates(state["g"], updates)
        new = {"g": g, "d": d, "make": making, "judge": judging, "steps": state["steps"] + 1}
        return new, {"d": d_loss, "g": g_loss}

    one = examples.gan()
    return Example(one.init, step, one.batch)


def shared(aside: Any, mark: Any = MARK) -> Example:
    """One model with a marked loss and another of the same weights."""

    def fit(params: State, batch: Batch) -> jax.Array:
        return ((mlp(params["g"], batch["noise"]) - batch["real"]) ** 2).mean()

    def small(params: State, batch: Batch) -> jax.Array:
        return (mlp(params["g"], batch["noise"] + 1) ** 2).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        params = {"g": state["g"]}
        value, gradients = mark(fit)(params, batch)
        other, more = aside(small)(params, batch)
        new = jax.tree.map(lambda p, a, b: p - 0.1 * (a + b), params, gradients, more)
        return {**state, **new}, {"loss": value + other}

    one = examples.gan()
    return Example(one.init, step, one.batch)


def planned(example: Example, zero: int = 3, **pin: Any) -> Any:
    return shardlib.compile_step(
        example.init, example.step, example.batch, topology="h100:8",
        pin={"mesh": {"fsdp": 8}, "zero": zero, **pin}, abstract=True,
    )  # fmt: skip


def moved(items: Any) -> dict[str, float]:
    """Bytes of each kind of collective, but for those of single numbers."""
    return {
        kind: sum(one.count * one.bytes for one in items if one.kind == kind and one.bytes > 16)
        for kind in {one.kind for one in items if one.bytes > 16}
    }


def flops(program: Any) -> float:
    return sum(
        op.flops * step.graph.trips(op.region)
        for step in [program.plan.source.workload.problem.steps["none"]]
        for op in step.graph.ops
        if op.category == "matmul"
    )


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDE": 512, "ROWS": 64}.items():
        monkeypatch.setattr(examples, name, value)


@pytest.mark.parametrize(("one", "other"), [(MARK, JAX), (JAX, MARK)], ids=["first", "second"])
def test_other_gradients_are_planned_as_those_of_a_step_without_marks(
    one: Any, other: Any, wide: None
):
    mixed, without = planned(adversaries(one, other)), planned(adversaries(JAX, JAX))
    assert {one.role for one in mixed.plan.parameters} == {"trained"}
    assert "frozen" not in mixed.plan.explain()
    assert moved(mixed.plan.estimate.collectives) == moved(without.plan.estimate.collectives)
    assert flops(mixed) == pytest.approx(flops(without))
    peaks = (program.plan.estimate.device_bytes.peak for program in (mixed, without))
    assert next(peaks) == pytest.approx(next(peaks), rel=0.25)


def test_gradients_of_marked_weights_that_are_taken_otherwise_count_too(wide: None):
    mixed, twice = planned(shared(JAX)), planned(shared(MARK))
    assert flops(mixed) == pytest.approx(flops(twice))
    assert {one.path for one in mixed.plan.parameters if one.trained} == {
        one.path for one in twice.plan.parameters if one.trained
    }


def test_a_loop_with_both_says_what_is_not_counted():
    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        def both(carry: State, _: None) -> tuple[State, jax.Array]:
            value, near = MARK(lambda d, x: (mlp(d, x) ** 2).mean())(carry["d"], batch["real"])
            more = jax.grad(lambda g: (mlp(g, batch["noise"]) ** 2).mean())(carry["g"])
            new = jax.tree.map(lambda p, g: p - 0.1 * g, carry, {"d": near, "g": more})
            return new, value

        new, values = jax.lax.scan(both, {name: state[name] for name in "dg"}, length=2)
        return {**state, **new}, {"loss": jnp.mean(values)}

    one = examples.gan()
    program = compiled(Example(one.init, step, one.batch), {"mesh": {"fsdp": 4}})
    [said] = [one for one in program.plan.findings if one.code == "unmarked-gradient"]
    assert "not counted" in said.message and said.where.startswith("g.0")
    assert {one.role for one in program.plan.parameters} == {"trained"}
