"""A pipeline computes what the unsharded model computes, under every schedule."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from shardlib.annotation.read import read
from shardlib.errors import PlanError
from shardlib.lowering.program import build_program
from tests.lowering import models
from tests.lowering.hand_plan import RULES, hand_plan
from tests.lowering.test_step import close, flat, gradients_as_state, unsharded

CASES = [
    ({"stage": 2}, 2, "1f1b", 1, "none"), ({"stage": 2, "data": 2}, 8, "gpipe", 1, "none"), ({"stage": 2, "data": 2}, 4, "interleaved", 2, "full"),
    ({"stage": 4, "fsdp": 2}, 8, "1f1b", 1, "full"), ({"stage": 4, "tensor": 2}, 4, "1f1b", 1, "dots"), ({"stage": 2, "fsdp": 2, "tensor": 2}, 4, "1f1b", 1, "none"),
    ({"stage": 3}, 8, "1f1b", 1, "full"), ({"stage": 3, "data": 2}, 4, "gpipe", 1, "full"),
]


def program(mesh, microbatches, schedule, virtual=1, remat="none", optimizer=None, **options):
    model, batch = read(models.Transformer), models.transformer_batch(16)
    plan = hand_plan(model, batch, mesh, rules=[*RULES, ("layers", "stage")], microbatches=microbatches, schedule=schedule, virtual_stages=virtual, remat=remat, **options)
    axes = {"batch.inputs": ("batch", "seq"), "batch.targets": ("batch", "seq")}
    return build_program(plan, model, model.bind(models.transformer_loss), optimizer or gradients_as_state(), batch, batch_axes=axes)


@pytest.mark.parametrize(("mesh", "microbatches", "schedule", "virtual", "remat"), CASES, ids=str)
def test_loss_metrics_and_gradients_equal_the_unsharded_model(mesh, microbatches, schedule, virtual, remat):
    p = program(mesh, microbatches, schedule, virtual, remat, zero=3 if "fsdp" in mesh else 0)
    loss, accuracy, gradients, _ = unsharded(3, 16)
    state = p.init(3)
    assert float(p.evaluate(state, models.transformer_batch())["loss"]) == pytest.approx(loss, rel=1e-5)
    state, metrics = p.step(state, models.transformer_batch())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-6)
    close(flat(state.opt_state), gradients)


def test_layers_rest_on_their_stages():
    p = program({"stage": 2, "fsdp": 2}, 4, "1f1b", zero=3, optimizer=optax.adamw(1e-2))
    state = p.init(0)
    for _ in range(2):
        state, _ = p.step(state, models.transformer_batch())
    for leaf in (state.params["layers"]["mlp"]["up"], state.opt_state[0].mu["layers"]["mlp"]["up"]):
        assert leaf.shape == (4, 16, 32)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 8, 32)}


def test_memory_does_not_grow_with_the_microbatches_of_1f1b():
    def temporaries(schedule, microbatches):
        model, batch = read(models.Transformer), models.transformer_batch(2 * microbatches, 64)
        plan = hand_plan(model, batch, {"stage": 2}, rules=[*RULES, ("layers", "stage")], microbatches=microbatches, schedule=schedule, remat="full")
        axes = {"batch.inputs": ("batch", "seq"), "batch.targets": ("batch", "seq")}
        built = build_program(plan, model, model.bind(models.transformer_loss), optax.sgd(1e-2), batch, batch_axes=axes)
        return built.memory()["temporaries"] - sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(batch))

    assert temporaries("1f1b", 32) <= 1.02 * temporaries("1f1b", 8)
    assert temporaries("gpipe", 32) > 1.5 * temporaries("gpipe", 8)


def test_one_hop_a_tick_and_direction():
    p = program({"stage": 4}, 8, "1f1b", remat="full")
    text = p.compiled().as_text()
    hops = [line for line in text.splitlines() if " collective-permute(" in line or " collective-permute-start(" in line]
    assert len(hops) == 4  # forward in the first scan, both ways in the second, backward in the third


@pytest.mark.parametrize(("mesh", "options", "said"), [
    ({"stage": 8}, {"microbatches": 8, "schedule": "1f1b"}, "8 stages of 1 chunk need 8 layers, and the loop over layers at"),
    ({"stage": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual": 4}, "2 stages of 4 chunks need 8 layers"),
    ({"stage": 4}, {"microbatches": 2, "schedule": "interleaved", "virtual": 1}, None),
])
def test_too_few_layers(mesh, options, said):
    if said is None:
        program(mesh, **options)
        return
    with pytest.raises(PlanError, match=said):
        program(mesh, **options)
