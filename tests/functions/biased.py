"""A small model whose attention has a bias by distances, and the same attention by JAX's own."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import shardlib
from shardlib.functions.attention import Alibi, RelativeBias
from shardlib.models.blocks import weight as annotated

VOCAB, EMBED, HEADS, GROUPS, WIDTH, BUCKETS, FAR = 61, 32, 4, 2, 8, 8, 20


def written_bias(kind: str, array: Any, queries: int, keys: int, *, causal: bool) -> jax.Array:
    """[1, N, queries, keys], pair by pair as the papers say."""

    def bucket(distance: int) -> int:  # of arXiv:1910.10683, as T5's own code has it
        count, first = BUCKETS, 0
        if not causal:
            count, first = BUCKETS // 2, BUCKETS // 2 if distance > 0 else 0
        far = max(-distance, 0) if causal else abs(distance)
        exact = count // 2
        if far < exact:
            return first + far
        wide = math.log(far / exact) / math.log(FAR / exact) * (count - exact)
        return first + min(exact + int(wide), count - 1)

    pairs = np.arange(keys)[None] - np.arange(queries)[:, None]
    if kind == "alibi":
        return -jnp.asarray(array)[None, :, None, None] * np.abs(pairs)
    numbers = np.vectorize(bucket)(pairs)
    return jnp.moveaxis(jnp.asarray(array)[numbers], -1, 0)[None]


class Biased(nnx.Module):
    """Two layers of attention and a head."""

    def __init__(self, kind: str, rngs: nnx.Rngs, window: int = 0):
        def weight(shape: tuple[int, ...], names: tuple[str | None, ...]) -> nnx.Param:
            return annotated(rngs, shape, names, 0.3, "float32")

        self.kind, self.window = kind, window
        self.embed = weight((VOCAB, EMBED), ("vocab", "embed"))
        self.query = weight((2, EMBED, HEADS, WIDTH), ("layers", "embed", "heads", None))
        self.key = weight((2, EMBED, GROUPS, WIDTH), ("layers", "embed", "kv_heads", None))
        self.value = weight((2, EMBED, GROUPS, WIDTH), ("layers", "embed", "kv_heads", None))
        self.out = weight((2, HEADS, WIDTH, EMBED), ("layers", "heads", None, "embed"))
        if kind == "relative":
            self.table = weight((BUCKETS, HEADS), (None, "heads"))

    def bias(self) -> Alibi | RelativeBias:
        """Of every layer."""
        if self.kind == "alibi":
            return Alibi.of(HEADS)
        return RelativeBias(self.table[...], max_distance=FAR)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, seq, vocab]."""
        bias = self.bias()

        def layer(x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, None]:
            query, key, value = (jnp.einsum("bsd,dnh->bsnh", x, one) for one in weights[:3])
            mixed = shardlib.attention(query, key, value, bias=bias, window=self.window)
            return x + jnp.einsum("bsnh,nhd->bsd", mixed, weights[3]), None

        stacks = [one[...] for one in (self.query, self.key, self.value, self.out)]
        x, _ = jax.lax.scan(layer, self.embed[...][tokens], stacks)
        return x @ self.embed[...].T


def loss(model: Biased, batch: dict[str, jax.Array]) -> jax.Array:
    """Of next tokens."""
    logits = jax.nn.log_softmax(model(batch["inputs"]))
    return -(logits * jax.nn.one_hot(batch["targets"], VOCAB)).sum(-1).mean()
