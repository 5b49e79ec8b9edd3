"""Guards: the norm and clipping of one device on every mesh, steps that are skipped, a scale of the
loss that finds its way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardlib
from shardlib.errors import PlanError
from shardlib.lowering.step import global_norm, limited
from tests.frontend.equality import plain
from tests.lowering import small
from tests.zoo.parity import capture

SGD = functools.partial(optax.sgd, 0.1, momentum=0.9)
MESHES = [
    {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3, "microbatches": 2},
    {
        "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
        "zero": 3,
        "schedule": "1f1b",
        "microbatches": 4,
    },
    {
        "mesh": {"stage": 2, "data": 2, "fsdp": 2},
        "zero": 1,
        "schedule": "1f1b",
        "microbatches": 4,
        "pipeline": "programs",
    },
]


@functools.cache
def clipped(clip):
    """Loss, norm, and parameters after a step of optax on one device."""
    params = small.values()
    value, gradients = jax.value_and_grad(small.loss)(params, small.batch())
    optimizer = optax.chain(optax.clip_by_global_norm(clip), SGD())
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return (
        float(value),
        float(optax.tree.norm(gradients)),
        jax.tree.map(np.asarray, optax.apply_updates(params, updates)),
    )


def same(a, b):
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("pin", MESHES, ids=lambda pin: str(pin["mesh"]))
def test_norm_clipping_scale_and_skips_on_every_mesh(pin):
    program = small.program(
        SGD(), pin, guards=shardlib.Guards(clip=0.2, scale=1024.0, growth=1, spike=True)
    )
    value, norm, params = clipped(0.2)
    assert norm > 0.4  # clipping has something to do
    state, metrics = program.step(program.init(0), small.batch())
    assert float(metrics["loss"]) == pytest.approx(value, rel=1e-5) and float(
        metrics["gradient_norm"]
    ) == pytest.approx(norm, rel=1e-4)
    assert (int(metrics["skipped"]), float(metrics["loss_scale"]), float(state.guard.scale)) == (
        0,
        1024.0,
        2048.0,
    )
    assert small.farthest(state.params, params) < 1e-5
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    bad = {**small.batch(), "weight": np.where(np.arange(16) == 11, np.nan, 1).astype(np.float32)}
    state, metrics = program.step(state, bad)
    assert (
        int(metrics["skipped"]) == 1
        and same((state.params, state.opt_state), before)
        and float(state.guard.scale) == 1024.0
        and int(state.step) == 2
    )
    state, metrics = program.step(limited(state, value / 2), small.batch())
    assert (
        int(metrics["skipped"]) == 1
        and same((state.params, state.opt_state), before)
        and float(state.guard.scale) == 2048.0
    )  # nothing was wrong with the gradients
    state, metrics = program.step(limited(state, 2 * value), small.batch())
    assert int(metrics["skipped"]) == 0 and not same(state.params, before[0])
    assert float(program.evaluate(state, small.batch())["loss"]) == pytest.approx(
        float(small.loss(jax.tree.map(np.asarray, state.params), small.batch())), rel=1e-5
    )


def test_the_norm_counts_every_element_once_however_arrays_are_cut():
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    arrays = [np.random.default_rng(i).normal(size=(4, 4, 8)).astype(np.float32) for i in range(4)]
    cuts = [
        PartitionSpec(),
        PartitionSpec("expert"),
        PartitionSpec(("expert", "fsdp"), "tensor"),
        PartitionSpec(None, "fsdp", ("tensor", "expert")),
    ]
    shardings = [NamedSharding(mesh, cut) for cut in cuts]
    found = jax.jit(lambda *leaves: global_norm(leaves, shardings))(
        *map(jax.device_put, arrays, shardings)
    )
    assert float(found) == pytest.approx(
        np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in arrays)), rel=1e-6
    )


class Half(nnx.Module):
    """One product in float16, with a random stream as model state."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.sin(jnp.arange(64.0)).reshape(8, 8), out_sharding=("embed", "mlp"))
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.dropout(
            (x.astype(jnp.float16) @ self.w[...].astype(jnp.float16)).astype(jnp.float32)
        )


def tree_half(params, batch):
    return (batch["x"].astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32)


def tiny(output):
    return 1e-7 * jnp.mean(
        output
    )  # gradients of the result are under the smallest number of float16


FRONT_ENDS = {
    "nnx": (Half, lambda model, batch: tiny(model(batch["x"]))),
    "tree": (
        lambda: shardlib.tree(
            lambda key: {"w": jnp.sin(jnp.arange(64.0)).reshape(8, 8)}, {"w": ("embed", "mlp")}
        ),
        lambda params, batch: tiny(tree_half(params, batch)),
    ),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_gradients_in_float16_live_by_the_scale(front_end):
    init, loss = FRONT_ENDS[front_end]
    init = init if front_end == "nnx" else init()
    batch = {"x": np.ones((16, 8), np.float32)}
    found = {}
    for scale in (1.0, 2.0**24):
        program = shardlib.compile(
            init,
            loss,
            capture(),
            batch,
            topology="cpu:8",
            pin={"mesh": {"data": 8}},
            batch_axes={"x": ("batch", None)},
            guards=shardlib.Guards(scale=scale),
        )
        state, metrics = program.step(program.init(0), batch)
        assert int(metrics["skipped"]) == 0
        found[scale] = np.asarray(jax.tree.leaves(state.opt_state)[0])
    assert not found[1.0].any()
    if front_end == "nnx":  # with dropout
        assert found[2.0**24].mean() == pytest.approx(1e-7 / 8, rel=0.3)
    else:
        np.testing.assert_allclose(found[2.0**24], 1e-7 / 8, rtol=2e-3)


def test_a_skipped_step_keeps_model_state_and_overflows_are_survived():
    program = shardlib.compile(
        Half,
        lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optax.adam(0.01),
        {"x": np.ones((16, 8), np.float32)},
        topology="cpu:8",
        pin={"mesh": {"data": 8}},
        batch_axes={"x": ("batch", None)},
        guards=shardlib.Guards(scale=2.0**30, growth=3),
    )
    batch, state = {"x": np.ones((16, 8), np.float32)}, program.init(0)
    kept = plain(state.model_state)
    state, metrics = program.step(state, batch)
    assert int(metrics["skipped"]) == 1
    assert kept and all(map(np.array_equal, kept, plain(state.model_state)))
    skipped, losses = 1, []
    for _ in range(40):
        state, metrics = program.step(state, batch)
        skipped += int(metrics["skipped"])
        losses.append(float(metrics["loss"]))
    assert 5 < skipped < 25 and np.isfinite(losses).all() and np.mean(losses[-5:]) < 0.8 * losses[0]


def test_programs_without_guards_carry_nothing_and_bad_numbers_are_refused():
    program = small.program(SGD(), {"mesh": {"data": 8}})
    assert program.state.guard is None
    with pytest.raises(PlanError, match=r"(?s)clip.*scale.*growth"):
        shardlib.Guards(clip=-1.0, scale=float("nan"), growth=0)
    with pytest.raises(PlanError, match="no limit"):
        limited(program.state, 1.0)
