"""The job of all peers: a decoder of the Llama kind in plain Flax NNX, its loss and its batch; no
names of axes, no shardings, no imports but Flax, JAX, NumPy and Optax.

MaxText and Levanter train models of their own. Theirs are given the same sizes, and `reference`
says which losses these have here, unsharded, from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Batch = dict[str, Any]


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

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.embed // self.heads


#: On simulated devices, where steps are run, and for a TPU, where they are compiled.
JOBS = {
    "cpu": Job(
        vocab=1024, layers=4, embed=256, heads=16, mlp=1024, batch=32, seq=128, dtype="float32"
    ),
    "tpu": Job(
        vocab=8192, layers=2, embed=1024, heads=8, mlp=4096, batch=32, seq=512, dtype="bfloat16"
    ),
}
RATE, EPSILON, THETA = 1e-3, 1e-5, 10_000.0
OPTIMIZER = optax.adamw(RATE)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions for [batch, seq, heads, width], halves of the width as pairs."""
    width = x.shape[-1]
    speeds = THETA ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * speeds
    cos, sin = (part(angles)[None, :, None].astype(x.dtype) for part in (jnp.cos, jnp.sin))
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


class Layer(nnx.Module):
    """Attention and a gated feed-forward, each after a norm."""

    def __init__(self, job: Job, rngs: nnx.Rngs, scale: float | None):
        def linear(inner: int, outer: int) -> nnx.Linear:
            return nnx.Linear(inner, outer, use_bias=False, dtype=job.dtype, rngs=rngs)

        self.heads, self.scale = job.heads, scale
        self.before, self.between = (
            nnx.RMSNorm(job.embed, epsilon=EPSILON, dtype=job.dtype, rngs=rngs) for _ in range(2)
        )
        self.query, self.key, self.value, self.out = (
            linear(job.embed, job.embed) for _ in range(4)
        )
        self.gate, self.up = (linear(job.embed, job.mlp) for _ in range(2))
        self.down = linear(job.mlp, job.embed)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.before(x)
        query, key, value = (
            part(y).reshape(*y.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        mixed = jax.nn.dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, scale=self.scale
        )
        x = x + self.out(mixed.reshape(y.shape))
        y = self.between(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab]; without a `scale` the scores of attention
    are divided by the square root of a head's width.
    """

    def __init__(self, job: Job, rngs: nnx.Rngs, scale: float | None = None):
        self.embed = nnx.Embed(job.vocab, job.embed, dtype=job.dtype, rngs=rngs)
        self.layers = nnx.List([Layer(job, rngs, scale) for _ in range(job.layers)])
        self.norm = nnx.RMSNorm(job.embed, epsilon=EPSILON, dtype=job.dtype, rngs=rngs)
        self.head = nnx.Linear(job.embed, job.vocab, use_bias=False, dtype=job.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(model: Decoder, batch: Batch) -> jax.Array:
    """Mean cross entropy, nats."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return found.mean()


def rows(job: Job) -> dict[str, np.ndarray]:
    """One batch, always the same."""
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, job.vocab, (job.batch, job.seq + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def step_of(
    graph: Any, objective: Callable[[Decoder, Batch], jax.Array] = loss
) -> Callable[[Any, Any, Batch], tuple[Any, Any, jax.Array]]:
    """(parameters, optimizer state, batch) -> the next ones and the loss, as Flax users write it."""

    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda p: objective(nnx.merge(graph, p), batch))(
            params
        )
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def reference(
    job: Job,
    weights: dict[str, np.ndarray],
    scale: float | None = None,
    objective: Callable[[Decoder, Batch], jax.Array] = loss,
) -> list[float]:
    """The first three losses of this model on one device, from weights that a peer began with: path
    -> array for every parameter ("layers.0.query.kernel").
    """
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(job, nnx.Rngs(0), scale)), nnx.Param)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    assert flat.keys() == weights.keys(), flat.keys() ^ weights.keys()
    for name, leaf in flat.items():
        assert leaf.shape == weights[name].shape, (name, leaf.shape, weights[name].shape)
    leaves = [jnp.asarray(weights[name]) for name in flat]
    params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    step, state, losses = jax.jit(step_of(graph, objective)), OPTIMIZER.init(params), list[float]()
    for _ in range(3):
        params, state, value = step(params, state, rows(job))
        losses.append(float(value))
    return losses
