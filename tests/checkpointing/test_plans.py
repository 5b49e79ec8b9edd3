"""A run goes on under another plan: real programs, with stages and every kind of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import CheckpointError
from tests.checkpointing.states import assert_same, numbers


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Param(
            0.3 * jax.random.normal(rngs.params(), (16, 32)), out_sharding=("embed", "mlp")
        )
        self.down = nnx.Param(
            0.3 * jax.random.normal(rngs.params(), (32, 16)), out_sharding=("mlp", "embed")
        )

    def __call__(self, x):
        return x + jax.nn.gelu(x @ self.up[...]) @ self.down[...]


class Model(nnx.Module):
    """Stacked layers, which stages can cut, and a stream of random keys that is state of the
    model.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(Layer))(rngs)
        self.streams = rngs

    def __call__(self, x):
        graph, params = nnx.split(self.layers)
        return jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, params)[0]


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


BATCH = {
    name: np.random.default_rng(i).normal(size=(16, 16)).astype(np.float32)
    for i, name in enumerate("xy")
}
PLANS: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": {"fsdp": 8}, "zero": 3},
    "tensor": {"mesh": {"tensor": 4, "data": 2}, "zero": 0},
    "zero-2": {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 2},
    "stages": {"mesh": {"stage": 4, "data": 2}, "microbatches": 4},
}


def program(name: str, optimizer: optax.GradientTransformation | None = None) -> shardlib.Program:
    return shardlib.compile(
        Model,
        loss,
        optimizer or optax.adam(1e-2),
        BATCH,
        topology="cpu:8",
        pin=PLANS[name],
        batch_axes={"x": ("batch", None), "y": ("batch", None)},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, float]:
    """A folder with the checkpoint of step 1 under ZeRO 3, its state, and the loss of the step
    after it.
    """
    folder, first = tmp_path_factory.mktemp("plans"), program("fsdp")
    state, _ = first.step(first.init(0), BATCH)
    with Checkpoints(folder) as checkpoints:
        checkpoints.prepare(first)
        checkpoints.save(1, state, plan=first.plan, wait=True)
        assert len(checkpoints._camera._programs) == 1  # what was prepared was what was needed
    kept = numbers(state)
    return folder, kept, float(first.step(state, BATCH)[1]["loss"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensor", "zero-2", "stages"])
def test_goes_on_under_another_plan(name: str, saved):
    folder, kept, expected = saved
    other = program(name)
    restored = Checkpoints(folder, read_only=True).restore(other)
    assert_same(numbers(restored.state), kept)
    assert restored.plan is not None and restored.plan.mesh["fsdp"] == 8 and restored.findings == ()
    assert all(
        leaf.sharding.is_equivalent_to(asked.sharding, asked.ndim)
        for leaf, asked in zip(*map(jax.tree.leaves, (restored.state, other.state)), strict=True)
    )
    if name != "zero-2":
        return  # steps take long to compile
    state, metrics = other.step(restored.state, BATCH)
    np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-5)
    assert int(state.step) == 2


def test_the_optimizer_starts_anew_where_asked(saved):
    folder, kept, _ = saved
    other = program("tensor", optax.sgd(0.1, momentum=0.9))
    checkpoints = Checkpoints(folder, read_only=True)
    with pytest.raises(CheckpointError, match="of another optimizer"):
        checkpoints.restore(other)
    restored = checkpoints.restore(other, parameters_only=True)
    assert_same(numbers(restored.state.params), kept.params)
    assert_same(numbers(restored.state.model_state), kept.model_state)
    assert_same(numbers(restored.state.opt_state), numbers(other.init(3).opt_state))
    assert [finding.code for finding in restored.findings] == ["optimizer-anew"] and int(
        restored.state.step
    ) == 1
    other.step(restored.state, BATCH)
    with pytest.raises(CheckpointError, match=r"restore\(program, parameters_only=True\)"):
        checkpoints.restore(other.state, parameters_only=True)
