"""A lowered step computes what the unsharded model computes, on every mesh and at every ZeRO
stage.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from shardlib._jax_compat import unsharded_variables
from shardlib.annotation.model import read
from shardlib.lowering.program import build_program
from tests.lowering import models
from tests.lowering.hand_plan import hand_plan
from tests.zoo.case import leaves_by_path
from tests.zoo.parity import capture

MESHES = [
    {},
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 4},
    {"data": 2, "tensor": 4},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


@functools.cache
def unsharded(seed, rows):
    """Loss and gradients of the user's own module, on one device, with none of our code."""
    with unsharded_variables():
        module = models.Transformer(nnx.Rngs(seed))
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        batch = jax.device_put(models.transformer_batch(rows), jax.devices()[0])
        run = jax.jit(
            jax.value_and_grad(
                lambda params: models.transformer_loss(nnx.merge(graph, params, rest), batch),
                has_aux=True,
            )
        )
        (loss, metrics), gradients = run(params)
    return (
        float(loss),
        float(metrics["accuracy"]),
        leaves_by_path(nnx.to_pure_dict(gradients)),
        leaves_by_path(nnx.to_pure_dict(params)),
    )


def program(mesh, optimizer=None, batch=None, **options):
    """A program of a plan written by hand; its optimizer keeps the gradients unless one is given."""
    model, batch = read(models.Transformer), models.transformer_batch() if batch is None else batch
    axes = {"batch.inputs": ("batch", "seq"), "batch.targets": ("batch", "seq")}
    return build_program(
        hand_plan(model, batch, mesh, **options),
        model,
        model.bind(models.transformer_loss),
        optimizer or capture(),
        batch,
        batch_axes=axes,
    )


def close(found, wanted, relative=1e-5):
    assert found.keys() == wanted.keys()
    for path in wanted:
        worst = np.abs(found[path] - wanted[path]).max()
        assert worst <= relative * np.abs(wanted[path]).max(), (path, worst)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loss_metrics_and_gradients_equal_the_unsharded_model(mesh):
    p = program(mesh, zero=3 if "fsdp" in mesh else 0)
    loss, accuracy, gradients, params = unsharded(3, 16)
    state, metrics = p.step(p.init(3), models.transformer_batch())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-6)
    close(leaves_by_path(state.opt_state), gradients)
    close(leaves_by_path(state.params), params, 0)  # bit for bit those of the user's constructor
    assert int(state.step) == 1


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_stages_compute_the_same_and_hold_less(zero):
    mesh = {"fsdp": 8}
    p = program(mesh, optax.adamw(1e-2), zero=zero)
    state = p.init(0)
    for _ in range(3):
        state, metrics = p.step(state, models.transformer_batch())
    assert float(metrics["loss"]) == pytest.approx(trained_loss(), rel=1e-5)
    up = state.params["layers"]["mlp"]["up"]
    mu = state.opt_state[0].mu["layers"]["mlp"]["up"]
    assert up.shape == mu.shape == (4, 16, 32)
    assert {shard.data.shape for shard in up.addressable_shards} == {
        (4, 2, 32) if zero >= 3 else (4, 16, 32)
    }
    assert {shard.data.shape for shard in mu.addressable_shards} == {
        (4, 2, 32) if zero >= 1 else (4, 16, 32)
    }


@functools.cache
def trained_loss():
    p = program({}, optax.adamw(1e-2))
    state = p.init(0)
    for _ in range(3):
        state, metrics = p.step(state, models.transformer_batch())
    return float(metrics["loss"])


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_four_microbatches_equal_one(mesh):
    p = program(mesh, microbatches=4, zero=2)
    loss, accuracy, gradients, _ = unsharded(3, 16)
    state, metrics = p.step(p.init(3), models.transformer_batch())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-5)
    close(leaves_by_path(state.opt_state), gradients)
    assert float(p.evaluate(state, models.transformer_batch())["loss"]) == pytest.approx(
        loss, rel=1e-5
    )


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_memory_and_no_numbers(remat):
    p = program({"data": 2, "fsdp": 2}, remat=remat, zero=3)
    _, _, gradients, _ = unsharded(3, 16)
    state, _ = p.step(p.init(3), models.transformer_batch())
    close(leaves_by_path(state.opt_state), gradients)
    assert (
        p.memory()["temporaries"] < program({"data": 2, "fsdp": 2}, zero=3).memory()["temporaries"]
    )


def test_the_state_is_donated():
    p = program({"fsdp": 4, "tensor": 2}, optax.adamw(1e-2), zero=3)
    state = p.init(0)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert p.memory()["aliased"] == held
    before = jax.tree.leaves(state)
    after, _ = p.step(state, models.transformer_batch())
    assert all(leaf.is_deleted() for leaf in before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mlp, self.drop, self.norm = (
            models.Mlp(rngs),
            nnx.Dropout(0.5, rngs=rngs),
            nnx.BatchNorm(16, rngs=rngs),
        )

    def __call__(self, x):
        return self.norm(self.drop(self.mlp(x)))


def test_model_state_is_carried_through_steps_and_microbatches():
    model, batch = read(Noisy), models.mlp_batch()
    axes = {"batch.x": ("batch", None), "batch.y": ("batch", None)}
    reference = jax.jit(model.bind(models.mlp_loss))
    params, wanted = model.init(5)
    losses = []
    for _ in range(2):
        loss, (_, wanted) = reference(params, wanted, batch)
        losses.append(float(loss))
    for parts in (1, 2):
        p = build_program(
            hand_plan(model, batch, {"data": 2, "fsdp": 2}, microbatches=parts),
            model,
            model.bind(models.mlp_loss),
            optax.sgd(0.0),
            batch,
            batch_axes=axes,
        )
        state, found = p.init(5), []
        for _ in range(2 // parts):
            state, metrics = p.step(state, batch)
            found.append(float(metrics["loss"]))
        if parts == 1:
            assert found == pytest.approx(losses, rel=1e-5)
            close(leaves_by_path(state.model_state["norm"]), leaves_by_path(wanted["norm"]))
        assert int(state.model_state["drop"]["rngs"]["count"]) == 2  # one draw a microbatch
        assert isinstance(p.module(state), Noisy)
