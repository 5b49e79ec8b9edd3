"""The whole story: names, trace, plan, program; its errors and findings come out at this door."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import shardlib
from tests.lowering import models

PIN = {"mesh": {"data": 2, "tensor": 2}}


def test_compile_plans_and_trains_and_a_stored_plan_gives_the_same_program():
    batch = models.mlp_batch()
    program = shardlib.compile(
        models.Mlp,
        models.mlp_loss,
        optax.sgd(0.1),
        batch,
        topology="v5e:2x2",
        pin={**PIN, "rules": [("batch", "data"), ("mlp", "tensor")]},
        devices=jax.devices()[:4],
    )
    assert dict(program.plan.mesh) == PIN["mesh"]
    # The hidden layer, of which the model says nothing.
    assert '[{"data"}, {"tensor"}]' in program.lower().as_text()
    state, first = program.step(program.init(0), batch)
    _, second = program.step(state, batch)
    assert float(second["loss"]) < float(first["loss"])
    stored = shardlib.Plan.from_json(program.plan.to_json())
    again = shardlib.compile(
        models.Mlp, models.mlp_loss, optax.sgd(0.1), batch, plan=stored, devices=jax.devices()[:4]
    )
    assert again.plan.digest == program.plan.digest
    assert again.lower().as_text() == program.lower().as_text()


def test_plan_touches_no_array_and_takes_abstract_batches():
    batch = {name: jax.ShapeDtypeStruct((4096, 16), jnp.float32) for name in ("x", "y")}
    plan = shardlib.plan(
        models.Mlp, models.mlp_loss, optax.adam(1e-3), batch, topology="v5p:4x4x4", name="small"
    )
    assert plan.model == "small" and plan.topology == "v5p:4x4x4"


class Logical(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.with_logical_constraint(
            jax.nn.relu(nn.Dense(32, kernel_init=kernel)(x)), ("batch", "mlp")
        )


def linen_program():
    batch = {"x": np.ones((16, 16), np.float32)}
    init = shardlib.linen(Logical(), jax.ShapeDtypeStruct((16, 16), jnp.float32))
    return shardlib.compile(
        init,
        lambda params, batch: (Logical().apply({"params": params}, batch["x"]) ** 2).mean(),
        optax.sgd(0.1),
        batch,
        topology="v5e:2x2",
        pin=PIN,
        devices=jax.devices()[:4],
    )


# traps T1 and T2: elsewhere silently dropped
def test_logical_constraints_are_a_finding_with_rules_and_without():
    program = linen_program()
    assert [f.where for f in program.findings if f.code == "activation-names-ignored"] == [
        "1 of them"
    ]
    with nn.logical_axis_rules((("batch", "tensor"), ("mlp", "data"))):
        ruled = linen_program()
    codes = {finding.code for finding in ruled.findings}
    assert "activation-names-ignored" not in codes and "own-layouts" in codes
    one, other = (
        re.findall(r"sdy\.sharding\S* .*", each.lower().as_text()) for each in (ruled, program)
    )
    assert '[{"tensor"}, {"data"}]' not in str(one) and len(one) == len(other) > 0


@pytest.mark.long
def test_microbatches_keep_the_activation_layouts():
    batch = models.transformer_batch()
    program = shardlib.compile(
        models.Transformer,
        models.transformer_loss,
        optax.sgd(0.1),
        batch,
        topology="v5e:2x2",
        pin={**PIN, "microbatches": 4},
        devices=jax.devices()[:4],
    )
    assert "placements-lost" not in {finding.code for finding in program.findings}


@pytest.mark.long
def test_zero_three_gathers_one_layer_at_a_time_and_never_saves_it():
    program = shardlib.compile(
        models.Transformer,
        models.transformer_loss,
        optax.adam(1e-2),
        models.transformer_batch(),
        topology="v5e:2x4",
        pin={"mesh": {"fsdp": 8}, "zero": 3, "remat": "none"},
    )
    text = program.compiled().as_text()
    assert program.state.params["layers"]["mlp"]["up"].sharding.shard_shape((4, 16, 32)) == (
        4,
        2,
        32,
    )
    assert "f32[16,32]{1,0} all-gather(" in text or "f32[16,32]{0,1} all-gather(" in text
    assert "f32[4,16,32]" not in text and "all-to-all" not in text
