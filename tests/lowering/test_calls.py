"""Attention and experts that a model calls as functions run over context and expert axes as they do
on one device.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib import models
from shardlib.errors import PinError, PlanError
from shardlib.models.blocks import mixture_of_experts
from shardlib.models.config import Experts, LatentAttention
from shardlib.verification.traffic import read_traffic
from tests.lowering.steps import DENSE, ROWS, SEQ, equal, token_batch, trained

CONFIGS = {
    "dense": DENSE,
    "windows": replace(DENSE, sliding_window=5, global_every=2, attention_softcap=4.0, layers=2),
    "latent": replace(
        DENSE,
        kv_heads=4,
        latent=LatentAttention(q_lora=8, kv_lora=8, rope_dim=4, nope_dim=8, v_dim=6),
    ),
    "experts": replace(
        DENSE, experts=Experts(count=8, per_token=2, mlp=16, shared=1, balance=0.01)
    ),
    "groups": replace(
        DENSE,
        layers=2,
        experts=Experts(
            count=8,
            per_token=3,
            mlp=16,
            first_dense=1,
            router="sigmoid",
            groups=4,
            groups_per_token=2,
            group_score=2,
            z_loss=0.01,
        ),
    ),
    "capacity": replace(DENSE, experts=Experts(count=8, per_token=2, mlp=16, capacity=0.75)),
    "few": replace(DENSE, experts=Experts(count=4, per_token=2, mlp=16)),
    "few capped": replace(DENSE, experts=Experts(count=4, per_token=2, mlp=16, capacity=1.0)),
}
#: Model, pins.
PLANS = [
    (
        "dense",
        {"mesh": {"context": 2, "tensor": 4}, "context": "ring", "remat": "full"},
    ),  # twice as many devices as groups of heads
    ("dense", {"mesh": {"context": 2, "fsdp": 2, "tensor": 2}, "zero": 3, "context": "ulysses"}),
    ("dense", {"mesh": {"context": 4, "data": 2}, "context": "all-gather"}),
    ("windows", {"mesh": {"context": 4, "fsdp": 2}, "zero": 3, "context": "ring"}),
    ("latent", {"mesh": {"context": 4, "tensor": 2}, "context": "ring"}),
    (
        "windows",
        {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 3, "attention": "blocks", "remat": "dots"},
    ),
    (
        "experts",
        {
            "mesh": {"expert": 2, "fsdp": 2, "tensor": 2},
            "zero": 3,
            "experts": "dropless",
            "sequence_parallel": True,
        },
    ),
    (
        "experts",
        {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 3, "experts": "dropless", "remat": "full"},
    ),  # every device has a part of the width of all experts
    (
        "experts",
        {
            "mesh": {"expert": 2, "context": 2, "data": 2},
            "experts": "dropless",
            "context": "ring",
            "remat": "full",
        },
    ),
    (
        "experts",
        {"mesh": {"expert": 2, "stage": 2, "data": 2}, "experts": "dropless", "microbatches": 2},
    ),
    *(
        (
            "experts",
            {
                "mesh": {"expert": 2, "stage": 2, "context": 2},
                "experts": "dropless",
                "context": context,
                "remat": remat,
                "microbatches": 2,
                "schedule": schedule,
                "pipeline": "lockstep",
            },
        )
        for context, remat, schedule in (
            ("ring", "none", "gpipe"),
            ("ulysses", "full", "1f1b"),
        )
    ),
    ("groups", {"mesh": {"expert": 4, "data": 2}, "experts": "dropless", "zero": 1}),
    (
        "capacity",
        {"mesh": {"expert": 4, "fsdp": 2}, "experts": "capacity", "zero": 3, "remat": "full"},
    ),
    (
        "capacity",
        {
            "mesh": {"expert": 2, "data": 2, "tensor": 2},
            "experts": "capacity",
            "sequence_parallel": True,
        },
    ),
]


@functools.cache
def reference(name: str, microbatches: int):
    """Loss and parameters after a step of the model as it is written, without a plan: experts are
    `jax.lax.ragged_dot`, or slots where they have a capacity.
    """
    init, loss = models.build(CONFIGS[name])
    definition, params = nnx.split(init(nnx.Rngs(0)), nnx.Param)
    pieces = jax.tree.map(
        lambda leaf: leaf.reshape(ROWS // microbatches, microbatches, -1).swapaxes(0, 1),
        token_batch(),
    )

    @jax.jit
    def step(params):
        def mean(params):
            return jnp.mean(
                jax.lax.map(lambda piece: loss(nnx.merge(definition, params), piece)[0], pieces)
            )

        value, gradients = jax.value_and_grad(mean)(params)
        return value, jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients)

    value, params = step(params)
    return [float(value)], jax.tree.leaves(params)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "pin"),
    PLANS,
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value["mesh"].items())
    ),
)
def test_steps_are_those_of_one_device(name, pin):
    init, loss = models.build(CONFIGS[name])
    actual, program = trained(init, loss, token_batch(), "cpu:8", pin)
    assert program.plan.context == pin.get("context", "none") and program.plan.experts == pin.get(
        "experts", "none"
    )
    free = ("blocks",) if program.plan.context in ("ring", "ulysses") else ("traced", "blocks")
    assert program.plan.attention in ((pin["attention"],) if "attention" in pin else free)
    equal(actual, reference(name, program.plan.microbatches))


@pytest.mark.long
def test_no_sequence_and_no_token_is_gathered():
    """What the compiled steps move: keys and values around the ring, tokens to their experts, and
    nothing of the size of all tokens.
    """
    init, loss = models.build(CONFIGS["experts"])
    _, program = trained(
        init,
        loss,
        token_batch(),
        "cpu:8",
        {
            "mesh": {"expert": 4, "context": 2},
            "experts": "dropless",
            "context": "ring",
            "remat": "none",
        },
        steps=0,
    )
    found = read_traffic(program.compiled().as_text(), program.plan.mesh)
    whole = (
        ROWS * SEQ * DENSE.embed * 4 // 4
    )  # tokens of a quarter of the batch, gathered along the sequence
    moved = [one for one in found.collectives if one.kind == "all-gather" and "context" in one.axes]
    assert not found.problems and all(one.bytes < whole // 2 for one in moved), moved
    assert {one.kind for one in found.collectives if "context" in one.axes} >= {
        "collective-permute"
    }
    assert any(one.kind == "all-to-all" and one.axes == ("expert",) for one in found.collectives)


@pytest.mark.long
def test_a_capacity_drops_what_one_device_drops():
    init, loss = models.build(CONFIGS["capacity"])
    counts = []
    for topology, pin in (
        ("cpu:1", {"mesh": {}}),
        ("cpu:8", {"mesh": {"expert": 8}, "experts": "capacity"}),
    ):
        program = shardlib.compile(
            init, loss, optax.sgd(0.1), token_batch(), topology=topology, pin=pin
        )
        counts.append(int(program.step(program.init(0), token_batch())[1]["dropped"]))
    assert counts[0] == counts[1] > 2 * ROWS * SEQ * 2 // 4  # of both layers, a quarter at least
    assert any(
        finding.code == "drops-tokens" and "0.75 times the mean" in finding.message
        for finding in program.findings
    )


@pytest.mark.long
def test_a_capacity_is_routed_without_pins():
    """Of all plans with experts on their devices and without, the search takes one with."""
    init, loss = models.build(CONFIGS["capacity"])
    plan = shardlib.plan(
        init,
        loss,
        optax.sgd(0.1),
        models.example_batch(CONFIGS["capacity"], ROWS, SEQ),
        topology="h100:8",
    )
    assert plan.experts == "capacity"


@pytest.mark.long
def test_tokens_take_the_bytes_that_the_plan_lists():
    """With a capacity; `test_recomputed.py` has the bytes without one."""
    init, loss = models.build(CONFIGS["capacity"])
    pin = {"mesh": {"expert": 8}, "experts": "capacity", "remat": "none"}
    _, program = trained(init, loss, token_batch(4 * ROWS), "cpu:8", pin, steps=0)
    traffic = read_traffic(program.compiled().as_text(), program.plan.mesh)
    listed, compiled = (
        sum(one.total_bytes for one in collectives if one.kind == "all-to-all")
        for collectives in (program.plan.estimate.collectives, traffic.collectives)
    )
    assert not traffic.problems and listed > 0 and abs(compiled - listed) <= 0.02 * listed


class Reader(nnx.Module):
    """A user's model: packed documents, bidirectional attention of grouped heads."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Param(0.5 * jax.random.normal(rngs.params(), (64, 16)))
        self.query, self.key, self.value = (
            nnx.Param(0.3 * jax.random.normal(rngs.params(), (16, heads, 8))) for heads in (4, 2, 2)
        )

    def __call__(self, tokens, documents):
        x = self.embedding[...][tokens]
        query, key, value = (
            jnp.einsum("bsd,dnh->bsnh", x, one[...]) for one in (self.query, self.key, self.value)
        )
        return shardlib.attention(query, key, value, causal=False, segments=documents)


def reading(model, data):
    return jnp.mean(model(data["tokens"], data["documents"]) ** 2) * 100


def documents() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "tokens": rng.integers(0, 64, (ROWS, SEQ)).astype(np.int32),
        "documents": np.sort(rng.integers(0, 3, (ROWS, SEQ)), axis=1).astype(np.int32),
    }


@functools.cache
def read(topology: str, context: str = ""):
    """Loss and parameters after a step of the user's model."""
    axes = dict.fromkeys(("tokens", "documents"), ("batch", "seq"))
    pin = {"mesh": {"context": 2, "data": 4}, "context": context} if context else {"mesh": {}}
    return trained(Reader, reading, documents(), topology, pin, batch_axes=axes)[0]


@pytest.mark.long
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_a_users_model_with_documents_and_no_causal_mask(context):
    equal(read("cpu:8", context), read("cpu:1"))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(ROWS, SEQ, 16), (ROWS * SEQ, 16)], ids=["sequences", "tokens"])
def test_experts_of_what_the_batch_has(shape):
    """Nothing makes the tokens, which are the batch itself: they are sent to their experts all the
    same.
    """

    def init(rngs: nnx.Rngs):
        return mixture_of_experts(Experts(count=8, per_token=2, mlp=16), 16, rngs)

    axes, data = (
        {"x": ("batch", "seq", None) if len(shape) == 3 else ("batch", None)},
        {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)},
    )

    def loss(model, data):
        return jnp.mean(jnp.square(model(data["x"])[0])) * 100

    shared = {"mesh": {"expert": 4, "data": 2}, "experts": "dropless"}
    actual, program = trained(init, loss, data, "cpu:8", shared, batch_axes=axes)
    equal(actual, trained(init, loss, data, "cpu:1", {"mesh": {}}, batch_axes=axes)[0])
    found = read_traffic(program.compiled().as_text(), program.plan.mesh)
    assert (
        sum(one.count for one in found.collectives if one.kind == "all-to-all") == 3
    )  # the batch has no gradient that would come home


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "pin", "message"),
    [
        ("experts", {"mesh": {"expert": 3}}, "expert=3"),
        ("few", {"mesh": {"expert": 8}}, "has 4 of them, which 8 parts do not divide"),
        (
            "few capped",
            {"mesh": {"expert": 8}, "experts": "capacity"},
            "has 4 of them, which 8 parts do not divide",
        ),
        ("capacity", {"mesh": {"expert": 2}, "experts": "dropless"}, "'capacity'"),
        ("dense", {"mesh": {"context": 5}}, "context=5"),
        (
            "dense",
            {"mesh": {"context": 5}, "context": "ring"},
            "has sequences of 32, which 5 parts do not divide",
        ),
        ("dense", {"mesh": {"context": 2}, "context": "spiral"}, "ulysses"),
        ("dense", {"mesh": {"expert": 2}, "experts": "dropless"}, "no grouped matmul"),
        ("experts", {"mesh": {"expert": 2}, "experts": "capacity"}, "'dropless'"),
    ],
)
def test_what_cannot_be_cut_is_an_error(name, pin, message):
    init, loss = models.build(CONFIGS[name])
    with pytest.raises(PinError, match=message):
        shardlib.compile(
            init,
            loss,
            optax.sgd(0.1),
            models.example_batch(CONFIGS[name], ROWS, SEQ),
            topology="cpu:8",
            pin=pin,
        )


class Written(nnx.Module):
    """Four equal layers, unrolled."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Reader(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            query, key, value = (
                jnp.einsum("bsd,dnh->bsnh", x, one[...])
                for one in (layer.query, layer.key, layer.value)
            )
            x = x + shardlib.attention(query, key, value)[:, :, :2].reshape(*x.shape)
        return x


def test_a_ring_in_a_pipeline_needs_layers_under_a_scan():
    shapes, pin = (
        {"x": jax.ShapeDtypeStruct((ROWS, SEQ, 16), jnp.float32)},
        {
            "mesh": {"stage": 2, "context": 4},
            "context": "ring",
        },
    )
    with pytest.raises(PlanError, match="are unrolled"):
        shardlib.compile(
            Written,
            lambda model, data: jnp.mean(model(data["x"]) ** 2),
            optax.sgd(0.1),
            shapes,
            topology="cpu:8",
            pin=pin,
            batch_axes={"x": ("batch", "seq", "embed")},
        )
