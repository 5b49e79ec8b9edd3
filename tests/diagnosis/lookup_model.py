"""A language model whose activations follow the sharding of its weights: the embedding is sharded
over the axis of the batch, so what is looked up in it loses the batch's sharding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LAYERS, EMBED, MLP, VOCABULARY, BATCH, LENGTH = 3, 64, 128, 256, 16, 32


def layer(x, weights):
    hidden = jax.nn.relu(x @ weights["up"])
    return x + hidden @ weights["down"], None


def loss(params, tokens):
    x = params["embedding"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = x @ params["head"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return -jnp.mean(chosen)


def step(params, tokens):
    value, gradients = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def loss_with_layout(params, tokens):
    x = jax.lax.with_sharding_constraint(params["embedding"][tokens], PartitionSpec("data"))
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = x @ params["head"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return -jnp.mean(chosen)


def step_with_layout(params, tokens):
    value, gradients = jax.value_and_grad(loss_with_layout)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def array(shape, *spec, dtype=jnp.float32, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def arguments(mesh=MESH):
    return (
        {
            "embedding": array((VOCABULARY, EMBED), None, "data", mesh=mesh),
            "head": array((EMBED, VOCABULARY), "data", "model", mesh=mesh),
            "layers": {
                "up": array((LAYERS, EMBED, MLP), None, "data", "model", mesh=mesh),
                "down": array((LAYERS, MLP, EMBED), None, "model", "data", mesh=mesh),
            },
        },
        array((BATCH, LENGTH), "data", dtype=jnp.int32, mesh=mesh),
    )


def case():
    return step, arguments()
