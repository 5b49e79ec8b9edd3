"""The price of training a part of a model of the size of Llama 2 7B, traced abstractly."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.frontend.model import problem as traced_problem
from shardlib.graph import ITEMSIZE
from shardlib.planner.assembly import model_flops

LAYERS, EMBED, MLP, HEADS, VOCAB, RANK = 32, 4096, 11008, 32, 32000, 16


def adapted(inside, outside, names, rngs):
    return nnx.LoRALinear(
        inside,
        outside,
        lora_rank=RANK,
        use_bias=False,
        param_dtype=jnp.bfloat16,
        dtype=jnp.bfloat16,
        lora_param_dtype=jnp.float32,
        lora_dtype=jnp.bfloat16,
        kernel_metadata={"out_sharding": names},
        rngs=rngs,
    )


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.query, self.key, self.value = (
            adapted(EMBED, EMBED, ("embed", "heads"), rngs) for _ in range(3)
        )
        self.out = adapted(EMBED, EMBED, ("heads", "embed"), rngs)
        self.up = adapted(EMBED, MLP, ("embed", "mlp"), rngs)
        self.down = adapted(MLP, EMBED, ("mlp", "embed"), rngs)

    def __call__(self, x):
        heads = (*x.shape[:2], HEADS, EMBED // HEADS)
        query, key, value = (
            layer(x).reshape(heads) for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(shardlib.attention(query, key, value, causal=True).reshape(x.shape))
        return x + self.down(nnx.silu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(
            jnp.zeros((VOCAB, EMBED), jnp.bfloat16), out_sharding=("vocab", "embed")
        )
        self.layers = nnx.split_rngs(splits=LAYERS)(
            nnx.vmap(Layer, transform_metadata={nnx.PARTITION_NAME: "layers"})
        )(rngs)

    def __call__(self, tokens):
        graph, params = nnx.split(self.layers)
        x, _ = jax.lax.scan(
            lambda x, layer: (nnx.merge(graph, layer)(x), None), self.table[...][tokens], params
        )
        return x @ self.table[...].T


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]).astype(jnp.float32), batch["tokens"]
    ).mean()


BATCH = {"tokens": jax.ShapeDtypeStruct((64, 2048), jnp.int32)}


@functools.cache
def plan(wrt):
    return shardlib.plan(
        Model,
        loss,
        optax.adamw(1e-4),
        BATCH,
        topology="h100:8",
        pin={"mesh": {"fsdp": 8}, "zero": 3},
        wrt=wrt,
        name="adapted",
    )


def elements(some, *, trained):
    return sum(
        math.prod(parameter.shape) for parameter in some.parameters if parameter.trained == trained
    )


@pytest.mark.long
def test_only_adapters_have_optimizer_state_and_the_base_is_sharded():
    found = plan(nnx.LoRAParam)
    parts = found.estimate.device_bytes
    base = sum(
        math.prod(parameter.shape) * ITEMSIZE[parameter.dtype]
        for parameter in found.parameters
        if not parameter.trained
    )
    adapters = elements(found, trained=True)
    assert adapters == LAYERS * RANK * (4 * 2 * EMBED + 2 * (EMBED + MLP)) and base == 2 * (
        VOCAB * EMBED + LAYERS * (4 * EMBED**2 + 2 * EMBED * MLP)
    )
    assert parts.frozen == base / 8
    assert parts.parameters == 4 * adapters / 8 and parts.optimizer == 2 * parts.parameters
    assert parts.peak == sum(
        getattr(parts, name)
        for name in (
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "temporaries",
            "communication",
            "batch",
            "frozen",
        )
    )


@pytest.mark.long
def test_there_are_no_matmuls_and_reductions_for_gradients_of_the_base():
    some, every = plan(nnx.LoRAParam), plan(nnx.Param)
    assert every.estimate.device_bytes.frozen == 0
    # Of three matmuls of every weight one is left out, those of the table apart, which is looked up
    # and is the head: 2 x tokens x elements.
    tokens = 64 * 2048
    saved = 2 * tokens * (VOCAB * EMBED + LAYERS * (4 * EMBED**2 + 2 * EMBED * MLP))
    assert every.estimate.model_flops - some.estimate.model_flops == pytest.approx(saved, rel=1e-3)
    reduced = {
        which: sum(
            one.bytes * one.count
            for one in found.estimate.collectives
            if one.kind in ("reduce-scatter", "all-reduce")
        )
        for which, found in (("some", some), ("every", every))
    }
    assert reduced["some"] < 0.2 * reduced["every"]
    assert some.estimate.step_seconds < 0.85 * every.estimate.step_seconds


@pytest.mark.long
def test_the_step_graph_has_gradients_of_the_adapters_alone():
    problem = traced_problem(Model, loss, optax.adamw(1e-4), BATCH, wrt=nnx.LoRAParam)
    for step in problem.steps.values():
        values = step.graph.values
        paths = {values[index].path for index in step.graph.inputs_of("parameter")}
        assert len(step.gradients) == len(paths) == 12 and all("lora" in path for path in paths)
        assert {values[index].path for index in step.graph.inputs_of("frozen")} == {
            "table",
            *(f"layers.{name}.kernel" for name in ("query", "key", "value", "out", "up", "down")),
        }


def test_of_layers_that_are_written_out_the_trained_ones_alone_go_back():
    """The last two of eight layers are trained: nothing goes back through the others."""

    def init(key):
        return {"layers": [{"w": jnp.zeros((64, 64))} for _ in range(8)]}

    def total(params, batch):
        x = batch
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    found = traced_problem(
        shardlib.tree(init),
        total,
        optax.sgd(1.0),
        batch,
        wrt=lambda path, leaf: path[1] in ("6", "7"),
    )
    matmul = 2 * 32 * 64 * 64
    assert model_flops(found) == matmul * (
        8 + 2 + 2
    )  # all forward, and of the loop of two both gradients
