"""An encoder-decoder transformer with cross attention (arXiv:1706.03762), of Flax's own layers."""

from __future__ import annotations

import jax
from flax import nnx

from tests.zoo.case import SEQ, VOCAB, Case, cross_entropy, named, nnx_case, tokens

LAYERS, EMBED, HEADS, MLP = 2, 32, 8, 64
SOURCE = 24


def attention(rngs: nnx.Rngs, annotated: bool) -> nnx.MultiHeadAttention:
    """Flax's attention; names on the kernels and biases when annotated."""
    return nnx.MultiHeadAttention(
        HEADS,
        EMBED,
        qkv_features=2 * EMBED,
        decode=False,
        kernel_metadata=named(annotated, "embed", "heads", "head_dim"),
        out_kernel_metadata=named(annotated, "heads", "head_dim", "embed"),
        bias_metadata=named(annotated, "heads", "head_dim"),
        out_bias_metadata=named(annotated, "embed"),
        rngs=rngs,
    )


class FeedForward(nnx.Module):
    """Two linear layers."""

    def __init__(self, rngs: nnx.Rngs, annotated: bool):
        self.up = nnx.Linear(
            EMBED,
            MLP,
            kernel_metadata=named(annotated, "embed", "mlp"),
            bias_metadata=named(annotated, "mlp"),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            MLP,
            EMBED,
            kernel_metadata=named(annotated, "mlp", "embed"),
            bias_metadata=named(annotated, "embed"),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


class EncoderBlock(nnx.Module):
    """Self attention without a mask."""

    def __init__(self, rngs: nnx.Rngs, annotated: bool):
        self.norm1, self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs), nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = attention(rngs, annotated)
        self.mlp = FeedForward(rngs, annotated)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DecoderBlock(nnx.Module):
    """Causal self attention, then attention over the encoder's output."""

    def __init__(self, rngs: nnx.Rngs, annotated: bool):
        self.norm1, self.norm2, self.norm3 = (nnx.LayerNorm(EMBED, rngs=rngs) for _ in range(3))
        self.attention = attention(rngs, annotated)
        self.cross = attention(rngs, annotated)
        self.mlp = FeedForward(rngs, annotated)

    def __call__(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        x = x + self.cross(self.norm2(x), memory)
        return x + self.mlp(self.norm3(x))


class EncoderDecoder(nnx.Module):
    """[batch, source] and [batch, seq] token ids -> [batch, seq, vocab] logits."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool, layers: int = LAYERS):
        table = named(annotated, "vocab", "embed")
        self.embedding = nnx.Embed(VOCAB, EMBED, embedding_metadata=table, rngs=rngs)
        self.source_positions = nnx.Param(
            0.1 * jax.random.normal(rngs.params(), (SOURCE, EMBED)),
            **named(annotated, "source", "embed"),
        )
        self.positions = nnx.Param(
            0.1 * jax.random.normal(rngs.params(), (SEQ, EMBED)), **named(annotated, "seq", "embed")
        )
        self.encoder = nnx.List([EncoderBlock(rngs, annotated) for _ in range(LAYERS)])
        self.decoder = nnx.List([DecoderBlock(rngs, annotated) for _ in range(layers)])
        self.head = nnx.Linear(
            EMBED,
            VOCAB,
            use_bias=False,
            kernel_metadata=named(annotated, "embed", "vocab"),
            rngs=rngs,
        )

    def __call__(self, source: jax.Array, ids: jax.Array) -> jax.Array:
        memory = self.embedding(source) + self.source_positions[...]
        for block in self.encoder:
            memory = block(memory)
        x = self.embedding(ids) + self.positions[...]
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


def case(*, annotated: bool, layers: int = LAYERS) -> Case:
    """Translation of random tokens; `layers` are those of the decoder."""
    return nnx_case(
        "encoder-decoder",
        lambda rngs: EncoderDecoder(rngs, annotated=annotated, layers=layers),
        lambda model, batch: model(batch["source"], batch["inputs"]),
        lambda logits, batch: cross_entropy(logits, batch["targets"]),
        {"source": tokens(2, SOURCE), "inputs": tokens(3), "targets": tokens(4)},
        annotated=annotated,
        batch_axes={
            "source": ("batch", "source"),
            "inputs": ("batch", "seq"),
            "targets": ("batch", "seq"),
        },
    )


CASES = (case(annotated=True), case(annotated=False))
