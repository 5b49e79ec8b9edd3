"""Two small annotated models with everything that lowering must cope with: stacked layers, remat,
dropout, norms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def dense(rngs, shape, names):
    """A parameter whose numbers depend on its key, by a formula that compiles faster than a random
    distribution.
    """
    phase = jax.random.key_data(rngs.params()).astype(jnp.float32)[0] / 2**30
    return nnx.Param(
        0.25 * jnp.sin(phase + jnp.arange(np.prod(shape)).reshape(shape) % 61 * 1.7),
        out_sharding=names,
    )


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = dense(rngs, (16, 32), ("embed", "mlp"))
        self.down = dense(rngs, (32, 16), ("mlp", "embed"))
        self.scale = dense(rngs, (16,), ("embed",))

    def __call__(self, x):
        return (jax.nn.gelu(x @ self.up[...]) @ self.down[...]) * self.scale[...]


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = dense(rngs, (16,), ("embed",))
        self.qkv = dense(rngs, (16, 3, 4, 4), ("embed", None, "heads", "head_dim"))
        self.out = dense(rngs, (4, 4, 16), ("heads", "head_dim", "embed"))
        self.mlp = Mlp(rngs)

    def __call__(self, x):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * self.norm[...]
        q, k, v = jnp.moveaxis(jnp.einsum("bse,ethd->bsthd", h, self.qkv[...]), 2, 0)
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / 2)
        x = x + jnp.einsum("bhst,bthd,hde->bse", scores, v, self.out[...])
        return x + self.mlp(x)


class Transformer(nnx.Module):
    """A decoder with stacked layers whose stacking dim the transform does not name (trap T6)."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 4):
        self.embedding = dense(rngs, (32, 16), ("vocab", "embed"))
        self.layers = nnx.split_rngs(splits=layers)(nnx.vmap(Layer))(rngs)

    def __call__(self, tokens):
        graph, params = nnx.split(self.layers)
        x, _ = jax.lax.scan(
            lambda x, layer: (nnx.merge(graph, layer)(x), None), self.embedding[...][tokens], params
        )
        return x @ self.embedding[...].T


def cross_entropy(logits, targets):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, 32), -1))


def transformer_loss(model, batch):
    logits = model(batch["inputs"])
    return cross_entropy(logits, batch["targets"]), {
        "accuracy": jnp.mean(logits.argmax(-1) == batch["targets"])
    }


def transformer_batch(rows=16, seq=8):
    tokens = np.random.default_rng(0).integers(0, 32, (rows, seq + 1), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def mlp_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2), {}


def mlp_batch(rows=16):
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(rows, 16)).astype(np.float32),
        "y": random.normal(size=(rows, 16)).astype(np.float32),
    }
