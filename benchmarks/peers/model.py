"""The job of all peers: a decoder in plain Flax NNX, its loss and its batch; no names of axes, no
shardings, no imports but Flax, JAX, NumPy and Optax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclass(frozen=True, kw_only=True)
class Job:
    """Sizes of model and batch, and the dtype of the products."""

    vocab: int
    layers: int
    embed: int
    heads: int
    mlp: int
    batch: int
    seq: int
    dtype: str


#: On simulated devices, where steps are run, and for a TPU, where they are compiled.
JOBS = {
    "cpu": Job(
        vocab=1024, layers=4, embed=256, heads=16, mlp=1024, batch=32, seq=128, dtype="float32"
    ),
    "tpu": Job(
        vocab=8192, layers=2, embed=1024, heads=8, mlp=4096, batch=32, seq=512, dtype="bfloat16"
    ),
}
OPTIMIZER = optax.adamw(1e-3)


class Layer(nnx.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, job: Job, rngs: nnx.Rngs):
        def linear(inner: int, outer: int) -> nnx.Linear:
            return nnx.Linear(inner, outer, use_bias=False, dtype=job.dtype, rngs=rngs)

        self.heads = job.heads
        self.before, self.between = (nnx.RMSNorm(job.embed, rngs=rngs) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            linear(job.embed, job.embed) for _ in range(4)
        )
        self.up, self.down = linear(job.embed, job.mlp), linear(job.mlp, job.embed)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.before(x)
        query, key, value = (
            part(y).reshape(*y.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.reshape(y.shape))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class Decoder(nnx.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, job: Job, rngs: nnx.Rngs):
        self.embed = nnx.Embed(job.vocab, job.embed, dtype=job.dtype, rngs=rngs)
        self.layers = nnx.List([Layer(job, rngs) for _ in range(job.layers)])
        self.norm = nnx.RMSNorm(job.embed, rngs=rngs)
        self.head = nnx.Linear(job.embed, job.vocab, use_bias=False, dtype=job.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(model: Decoder, batch: dict[str, Any]) -> jax.Array:
    """Mean cross entropy, nats."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return found.mean()


def rows(job: Job) -> dict[str, np.ndarray]:
    """One batch, always the same."""
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, job.vocab, (job.batch, job.seq + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
