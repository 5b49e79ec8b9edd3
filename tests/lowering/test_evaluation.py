"""An evaluation is the loss of plain Flax in eval mode, of exactly the rows given, whatever their
number and the mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib
from shardlib.errors import BatchError

ROWS = 8
SIZES = (3, 8, 13)
MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8})


class Nnx(nnx.Module):
    """Dropout and a batch norm between two matrices with names."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


class Linen(linen.Module):
    """The same."""

    @linen.compact
    def __call__(self, x, train):
        up = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        down = linen.with_partitioning(linen.initializers.lecun_normal(), ("mlp", "embed"))
        x = linen.relu(
            linen.BatchNorm(use_running_average=not train, momentum=0.8)(
                linen.Dense(16, kernel_init=up)(x)
            )
        )
        return linen.Dense(8, kernel_init=down)(linen.Dropout(0.5, deterministic=not train)(x))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)
        self.down = nnx.Linear(
            32, 16, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.relu(self.up(x))))


class Stacked(nnx.Module):
    """Four layers under a scan, with dropout in each."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(Layer))(rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(
            nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                self.first(x), self.layers
            )
        )


def batch(rows=ROWS, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": (random.normal(size=(rows, 8)) + 1).astype(np.float32),
        "y": random.normal(size=(rows, 8)).astype(np.float32),
        "weight": random.uniform(0.5, 2, rows).astype(np.float32),
    }


def errors(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2, -1)


def reduced(each, batch):
    return jnp.mean(each), {
        "sum": jnp.sum(each),
        "weighted": jnp.sum(each * batch["weight"]) / jnp.sum(batch["weight"]),
        "largest": jnp.max(each),
    }


def nnx_loss(model, batch):
    return reduced(errors(model(batch["x"]), batch), batch)


def linen_training(variables, batch):
    outputs, updates = Linen().apply(
        variables,
        batch["x"],
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": jax.random.key(3)},
    )
    return jnp.mean(errors(outputs, batch)), updates


def linen_evaluation(variables, batch):
    return reduced(errors(Linen().apply(variables, batch["x"], train=False), batch), batch)


def agree(program, state, wanted):
    """Requires evaluations of batches of several sizes to be what a function gives of them."""
    for count in SIZES:
        rows = batch(count, seed=count)
        loss, metrics = wanted(rows)
        actual = program.evaluate(state, rows)
        assert set(actual) == {"loss", *metrics}
        for name, value in {"loss": loss, **metrics}.items():
            np.testing.assert_allclose(float(actual[name]), float(value), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_nnx_models_are_evaluated_in_eval_mode(mesh):
    program = shardlib.compile(
        Nnx,
        nnx_loss,
        optax.sgd(0.1),
        batch(),
        topology="cpu:8",
        pin={"mesh": mesh, "zero": 3, "microbatches": 1},
    )
    state, _ = program.step(program.init(0), batch())
    before = jax.tree.map(jnp.copy, (state.params, state.model_state))
    plain = program.module(jax.device_put(state, jax.devices()[0]))
    training, _ = nnx_loss(nnx.clone(plain), batch())
    plain.eval()
    agree(program, state, lambda rows: nnx_loss(plain, rows))
    assert (
        abs(float(training) - float(program.evaluate(state, batch())["loss"])) > 0.01
    )  # dropout and the batch's own statistics
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool(jnp.all(a == b)), before, (state.params, state.model_state))
    )
    assert {finding.code for finding in program.evaluated.findings} == {"evaluation-replicated"}
    assert any(
        "13 rows do not divide" in finding.message and "replicated" in finding.message
        for finding in program.evaluated.findings
    )
    program.step(state, batch())  # the state can still be used


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_linen_models_have_a_loss_for_it(mesh):
    program = shardlib.compile(
        shardlib.linen(Linen(), batch()["x"], train=False),
        linen_training,
        optax.sgd(0.1),
        batch(),
        topology="cpu:8",
        pin={"mesh": mesh, "zero": 3, "microbatches": 1},
        evaluation=linen_evaluation,
    )
    state, _ = program.step(program.init(0), batch())
    variables = jax.device_put({"params": state.params, **state.model_state}, jax.devices()[0])
    agree(program, state, lambda rows: linen_evaluation(variables, rows))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [({"stage": 2, "data": 2}, "1f1b"), ({"stage": 2, "data": 2}, "interleaved")],
    ids=str,
)
def test_stages(mesh, schedule):
    pin = {
        "mesh": mesh,
        "microbatches": 4,
        "schedule": schedule,
        **({"virtual_stages": 2} if schedule == "interleaved" else {}),
    }
    program = shardlib.compile(
        Stacked,
        lambda model, batch: nnx_loss(model, batch)[0],
        optax.sgd(0.1),
        batch(),
        topology="cpu:4",
        pin=pin,
        evaluation=nnx_loss,
    )  # no microbatch knows the largest
    state, _ = program.step(program.init(0), batch())
    plain = program.module(jax.device_put(state, jax.devices()[0]))
    plain.eval()
    agree(program, state, lambda rows: nnx_loss(plain, rows))
    assert "evaluation-without-stages" not in {
        finding.code for finding in program.evaluated.findings
    }


def test_another_loss_is_exact_too_and_compiled_once_for_each_number_of_rows():
    program = shardlib.compile(
        Nnx,
        nnx_loss,
        optax.sgd(0.1),
        batch(),
        topology="cpu:4",
        pin={"mesh": {"fsdp": 4}, "microbatches": 1},
    )
    state = program.init(0)
    evaluation = program.evaluation(
        lambda model, batch: (
            jnp.sum(model(batch["x"])),
            {"training": jnp.float32(not model.dropout.deterministic)},
        )
    )
    plain = program.module(jax.device_put(state, jax.devices()[0]))
    plain.eval()
    for rows in (3, 4, 3):
        found = evaluation.evaluate(state, {"x": batch(rows)["x"]})
        np.testing.assert_allclose(
            float(found["loss"]), float(jnp.sum(plain(batch(rows)["x"]))), rtol=1e-5, atol=1e-5
        )
        assert float(found["training"]) == 0
    assert len(evaluation.programs) == 2
    trained = program.evaluation(
        lambda model, batch: (model.train(), jnp.sum(model(batch["x"])))[1]
    )
    assert (
        abs(float(trained.evaluate(state, batch())["loss"]) - float(jnp.sum(plain(batch()["x"]))))
        > 0.1
    )  # the loss has the last word on the mode


def test_a_batch_without_rows_is_refused():
    program = shardlib.compile(Nnx, nnx_loss, optax.sgd(0.1), batch(), topology="cpu:1")
    with pytest.raises(BatchError, match="has no rows"):
        program.evaluate(program.init(0), batch(0))


def test_evaluating_a_linen_model_with_the_loss_that_trains_is_a_finding():
    def codes(init, loss, **given):
        return {
            finding.code
            for finding in shardlib.compile(
                init, loss, optax.sgd(0.1), batch(), topology="cpu:1", **given
            ).findings
        }

    described = shardlib.linen(Linen(), batch()["x"], train=False)
    assert "evaluation-as-trained" in codes(described, linen_training)
    assert "evaluation-as-trained" not in codes(
        described, linen_training, evaluation=linen_evaluation
    )
    assert "evaluation-as-trained" not in codes(Nnx, nnx_loss)
