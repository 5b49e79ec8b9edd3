"""A decoder transformer: grouped-query attention, rotary positions, gated MLP; layers written out
as a Python loop.

`GQADecoder` is written with raw parameters, as large models are; `PlainDecoder` is put together
from Flax's own layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.case import SEQ, VOCAB, Case, cross_entropy, nnx_case, param, tokens

LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 32, 8, 2, 8, 64
BATCH_AXES = {"inputs": ("batch", "seq"), "targets": ("batch", "seq")}


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (arXiv:2104.09864) on [batch, seq, heads, head_dim]."""
    angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** (
        jnp.arange(x.shape[-1] // 2) * 2 / x.shape[-1]
    )
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class GQA(nnx.Module):
    """Causal grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.q = param(
            annotated, rngs, (EMBED, HEADS, HEAD_DIM), ("embed", "heads", "head_dim"), EMBED
        )
        self.k = param(
            annotated, rngs, (EMBED, KV_HEADS, HEAD_DIM), ("embed", "kv_heads", "head_dim"), EMBED
        )
        self.v = param(
            annotated, rngs, (EMBED, KV_HEADS, HEAD_DIM), ("embed", "kv_heads", "head_dim"), EMBED
        )
        self.o = param(
            annotated,
            rngs,
            (HEADS, HEAD_DIM, EMBED),
            ("heads", "head_dim", "embed"),
            HEADS * HEAD_DIM,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, _ = x.shape
        q = rotate(jnp.einsum("bse,ehd->bshd", x, self.q[...]))
        k = rotate(jnp.einsum("bse,ehd->bshd", x, self.k[...]))
        v = jnp.einsum("bse,ehd->bshd", x, self.v[...])
        q = q.reshape(batch, seq, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) * HEAD_DIM**-0.5
        causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(batch, seq, HEADS, HEAD_DIM)
        return jnp.einsum("bshd,hde->bse", mixed, self.o[...])


class GatedMLP(nnx.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.gate = param(annotated, rngs, (EMBED, MLP), ("embed", "mlp"), EMBED)
        self.up = param(annotated, rngs, (EMBED, MLP), ("embed", "mlp"), EMBED)
        self.down = param(annotated, rngs, (MLP, EMBED), ("mlp", "embed"), MLP)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    """One layer, residual stream in and out."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        scale = {"out_sharding": ("embed",)} if annotated else {}
        self.attention_norm = nnx.RMSNorm(EMBED, scale_metadata=scale, rngs=rngs)
        self.attention = GQA(rngs, annotated=annotated)
        self.mlp_norm = nnx.RMSNorm(EMBED, scale_metadata=scale, rngs=rngs)
        self.mlp = GatedMLP(rngs, annotated=annotated)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GQADecoder(nnx.Module):
    """[batch, seq] token ids -> [batch, seq, vocab] logits."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.embedding = param(annotated, rngs, (VOCAB, EMBED), ("vocab", "embed"), EMBED)
        self.blocks = nnx.List([Block(rngs, annotated=annotated) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = param(annotated, rngs, (EMBED, VOCAB), ("embed", "vocab"), EMBED)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding[...][ids]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.head[...]


class PlainBlock(nnx.Module):
    """A layer of `nnx.MultiHeadAttention` and `nnx.Linear`."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, EMBED, qkv_features=HEADS * HEAD_DIM, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.gate = nnx.Linear(EMBED, MLP, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        y = self.mlp_norm(x)
        return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


class PlainDecoder(nnx.Module):
    """[batch, seq] token ids -> [batch, seq, vocab] logits, output tied to the embedding."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.positions = nnx.Embed(SEQ, EMBED, rngs=rngs)
        self.blocks = nnx.List([PlainBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))


def case(name: str, init, *, annotated: bool) -> Case:
    """A language model on random tokens."""
    return nnx_case(
        name,
        init,
        lambda model, batch: model(batch["inputs"]),
        lambda logits, batch: cross_entropy(logits, batch["targets"]),
        {"inputs": tokens(0), "targets": tokens(1)},
        annotated=annotated,
        batch_axes=BATCH_AXES,
    )


CASES = (
    case("decoder", lambda rngs: GQADecoder(rngs, annotated=True), annotated=True),
    case("decoder", PlainDecoder, annotated=False),
    case("decoder-gqa", lambda rngs: GQADecoder(rngs, annotated=False), annotated=False),
)
