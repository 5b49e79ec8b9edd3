"""Programs of one process know nothing of each other: whichever came before, each computes what
plain JAX computes.

Functions that JAX jits and that have derivatives of their own are the same objects in all programs,
and keep what was made of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib
from tests.zoo.parity import capture, relative_errors

LAYERS, EMBED, HEADS, WIDTH, MLP, EXPERTS, VOCAB = 2, 16, 2, 8, 32, 4, 32
AXES = {
    "table": ("vocab", "embed"),
    "qkv": ("layers", "embed", None, "heads", None),
    "out": ("layers", "heads", None, "embed"),
    "router": ("layers", "embed", "expert"),
    "into": ("layers", "expert", "embed", "mlp"),
    "outof": ("layers", "expert", "mlp", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
}
SHAPES = {
    "table": (VOCAB, EMBED),
    "qkv": (LAYERS, EMBED, 3, HEADS, WIDTH),
    "out": (LAYERS, HEADS, WIDTH, EMBED),
    "router": (LAYERS, EMBED, EXPERTS),
    "into": (LAYERS, EXPERTS, EMBED, MLP),
    "outof": (LAYERS, EXPERTS, MLP, EMBED),
    "up": (LAYERS, EMBED, MLP),
    "down": (LAYERS, MLP, EMBED),
}
#: What is pinned of each kind of program.
KINDS = {
    "no stages": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    "stages": {"mesh": {"stage": 2, "fsdp": 2, "tensor": 2}, "microbatches": 2, "schedule": "1f1b"},
    "experts": {"mesh": {"data": 2, "expert": 4}},
    "context": {"mesh": {"data": 2, "context": 2}, "context": "ring"},
    "programs": {
        "mesh": {"stage": 2, "data": 2},
        "microbatches": 2,
        "schedule": "1f1b",
        "pipeline": "programs",
    },
}


@jax.jit
@jax.custom_vjp
def halved(x):
    return x / 2


def _halved_back(positive, cotangent):
    return (jnp.where(positive, cotangent, cotangent) / 2,)


halved.__wrapped__.defvjp(lambda x: (x / 2, jnp.full_like(x, 1) > 0), _halved_back)


def values(key=None):
    return {
        name: 0.3 * jnp.sin(1.3 * k + 1.7 * (jnp.arange(np.prod(shape)).reshape(shape) % 61))
        for k, (name, shape) in enumerate(SHAPES.items())
    }


def loss(params, batch):
    """Of a decoder with attention, a dense layer and experts in every layer; softplus and relu have
    derivatives of their own.
    """
    x = params["table"][batch["tokens"]]

    def layer(x, p):
        q, k, v = jnp.unstack(jnp.einsum("bse,ecnh->cbsnh", x, p["qkv"]))
        x = x + jnp.einsum("bsnh,nhe->bse", shardlib.attention(q, k, v), p["out"])
        x = x + jax.nn.softplus(x @ p["up"]) @ p["down"]
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(y @ p["router"]), 2)
        visited, _ = shardlib.visit(y, weights, chosen, p["into"], p["outof"], activation="relu")
        return x + halved(visited), None

    x, _ = jax.lax.scan(layer, x, {name: leaf for name, leaf in params.items() if name != "table"})
    scores = jax.nn.log_softmax(x @ params["table"].T)
    return -jnp.mean(jnp.sum(scores * jax.nn.one_hot((batch["tokens"] * 7 + 3) % VOCAB, VOCAB), -1))


def batch():
    return {"tokens": np.random.default_rng(0).integers(0, VOCAB, (8, 8)).astype(np.int32)}


def compiled(kind):
    model = shardlib.tree(values, AXES)
    return shardlib.compile(
        model,
        loss,
        capture(),
        batch(),
        topology="cpu:8",
        pin={"remat": "none", **KINDS[kind]},
        batch_axes={"tokens": ("batch", "seq")},
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "order", [list(KINDS), list(KINDS)[::-1]], ids=["one way", "the other way"]
)
def test_each_kind_of_program_after_each_other_one(order):
    """Of any two kinds, each comes before the other in one of the orders. What JAX keeps is
    forgotten first, as in a process that begins.
    """
    jax.clear_caches()
    for kind in order:
        assert max(relative_errors(compiled(kind), loss, batch()).values()) <= 1e-5, kind
