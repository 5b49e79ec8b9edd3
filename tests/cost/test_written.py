"""What layers save that are written one after the other, against counts by hand and loops."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from shardlib.frontend.model import read_and_trace
from shardlib.graph import Problem
from shardlib.planner.plan import Plan
from shardlib.planner.search import search
from shardlib.planner.workload import prepare
from tests.cost.traced import saved_bytes

ROWS, WIDTH, INNER, LAYERS = 64, 32, 128, 4


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Written(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Looped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        return run(x, self.layers)


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


@lru_cache(maxsize=4)
def traced(model: type[nnx.Module]) -> Problem:
    batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
    return read_and_trace(model, loss, optax.adam(1e-3), batch, None, None).traced.problem


def saved(model: type[nnx.Module], vendor: str, *, staged: bool = False) -> float:
    """Bytes that the loops of a step save for each row and layer."""
    workload = prepare(traced(model), vendor).variant((), staged=staged)
    return saved_bytes(workload.programs["none", False].step) / LAYERS / ROWS


def planned(model: type[nnx.Module], **pins: object) -> Plan:
    return search(traced(model), "h100:4", {"remat": "none", "microbatches": 1, **pins})


@pytest.mark.parametrize(
    ("vendor", "operands"),
    [
        ("google", 0),  # matmuls compute the norm and the activation that they read
        ("nvidia", WIDTH + INNER),
    ],
)
def test_a_written_layer_saves_its_input_the_result_of_a_matmul_and_a_statistic(
    vendor: str, operands: int
) -> None:
    floats = WIDTH + INNER + operands
    assert 4 * floats <= saved(Written, vendor) <= 4 * (floats + 3)


@pytest.mark.parametrize("vendor", ["google", "nvidia"])
def test_stages_run_written_layers_as_a_loop(vendor: str) -> None:
    looped = saved(Looped, vendor)
    assert saved(Written, vendor) < looped / 2
    assert saved(Written, vendor, staged=True) == looped == saved(Looped, vendor, staged=True)


def test_stages_save_what_a_loop_saves_and_each_stores_all_written_layers() -> None:
    written, looped = (
        planned(model, mesh={"stage": 4}, zero=0).estimate.device_bytes
        for model in (Written, Looped)
    )
    assert written.activations == pytest.approx(looped.activations)
    layers = LAYERS * 4 * (WIDTH + 2 * WIDTH * INNER)
    assert looped.parameters == pytest.approx(layers / 4, rel=0.01)
    assert written.optimizer == pytest.approx(4 * looped.optimizer, rel=0.01)
    # all layers as they are stored, and stacked in every step
    assert written.parameters == pytest.approx(2 * layers, rel=0.01)


def test_written_layers_need_less_memory_than_a_loop() -> None:
    written, looped = (planned(model, mesh={"data": 4}) for model in (Written, Looped))
    assert written.estimate.device_bytes.peak < looped.estimate.device_bytes.peak


def test_the_search_covers_plans_with_stages_and_without() -> None:
    plans = [planned(Written, schedule=name) for name in ("none", "1f1b")]
    assert [plan.mesh["stage"] > 1 for plan in plans] == [False, True]
    free = planned(Written)
    assert free.estimate.step_seconds == min(plan.estimate.step_seconds for plan in plans)
    assert free.search.gap == 0
