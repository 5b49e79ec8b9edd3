"""The reference encoder-decoder: T5 and Switch in Flax NNX, built from an `EncoderDecoderConfig`.

Layers that repeat, with experts in one of them or in none, are one stacked module, run with
`jax.lax.scan`. Logical axes are those of the decoder-only model, and "buckets". Attention adds a
bias to its scores and is written out, as in T5X: a `context` axis gathers keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.functions.attention import BiasForm
from shardlib.models.blocks import FeedForward, MixtureOfExperts, Norm, Terms, cross_entropy, weight
from shardlib.models.config import EncoderDecoderConfig, TransformerConfig

#: (model, batch) -> (loss, metrics); the batch has "inputs", "decoder_inputs" and "targets", int32
#: [batch, seq] each.
Loss = Callable[["EncoderDecoder", Mapping[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]


class BiasedAttention(nnx.Module):
    """Multi-head attention with a bias on its scores and no scale (arXiv:1910.10683)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        dtype, heads, width, embed = config.param_dtype, config.heads, config.head_dim, config.embed
        self.query = weight(
            rngs,
            (embed, heads, width),
            ("embed", "heads", "head_dim"),
            (embed * width) ** -0.5,
            dtype,
        )
        self.key = weight(
            rngs, (embed, heads, width), ("embed", "heads", "head_dim"), embed**-0.5, dtype
        )
        self.value = weight(
            rngs, (embed, heads, width), ("embed", "heads", "head_dim"), embed**-0.5, dtype
        )
        self.out = weight(
            rngs,
            (heads, width, embed),
            ("heads", "head_dim", "embed"),
            (2 * config.layers * heads * width) ** -0.5,
            dtype,
        )

    def __call__(self, x: jax.Array, source: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Attends from `x` [batch, seq, embed] to `source` [batch, keys, embed]; the bias is
        [heads, seq, keys], minus infinity where a query sees no key.
        """
        query, key, value = (
            jnp.einsum("bsd,dnh->bsnh", array, weight[...].astype(x.dtype))
            for array, weight in ((x, self.query), (source, self.key), (source, self.value))
        )
        scores = jnp.einsum("bsnh,btnh->bnst", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores if bias is None else scores + bias, axis=-1).astype(x.dtype)
        return jnp.einsum(
            "bsnh,nhd->bsd",
            jnp.einsum("bnst,btnh->bsnh", weights, value),
            self.out[...].astype(x.dtype),
        )


class Block(nnx.Module):
    """Self attention, in a decoder attention to the encoder's result, then a feed-forward or
    experts; each on a normalised copy and added back.
    """

    def __init__(self, config: TransformerConfig, sparse: bool, crossed: bool, rngs: nnx.Rngs):
        self.attention_norm, self.attention = (
            Norm(config.embed, "embed", config),
            BiasedAttention(config, rngs),
        )
        if crossed:
            self.cross_norm, self.cross = (
                Norm(config.embed, "embed", config),
                BiasedAttention(config, rngs),
            )
        self.mlp_norm = Norm(config.embed, "embed", config)
        if sparse:
            assert config.experts is not None
            self.experts = MixtureOfExperts(config, config.experts, rngs)
        else:
            self.mlp = FeedForward(config, config.mlp, "mlp", rngs)

    def __call__(
        self, x: jax.Array, bias: jax.Array, memory: jax.Array | None
    ) -> tuple[jax.Array, Terms]:
        """Transforms `x` [batch, seq, embed]; also returns what the experts say of their routing,
        nothing without experts.
        """
        normal = self.attention_norm(x)
        x = x + self.attention(normal, normal, bias)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, None)
        normal = self.mlp_norm(x)
        changed, terms = (
            self.experts(normal) if hasattr(self, "experts") else (self.mlp(normal), Terms())
        )
        return x + changed, terms


class Blocks(nnx.Module):
    """Layers that are repeated as a whole: one, or some of which the second has experts."""

    def __init__(
        self, config: TransformerConfig, pattern: tuple[bool, ...], crossed: bool, rngs: nnx.Rngs
    ):
        self.blocks = nnx.List([Block(config, sparse, crossed, rngs) for sparse in pattern])

    def __call__(
        self, x: jax.Array, bias: jax.Array, memory: jax.Array | None
    ) -> tuple[jax.Array, Terms]:
        """As `Block`."""
        terms = Terms()
        for block in self.blocks:
            x, block_terms = block(x, bias, memory)
            terms = terms | block_terms
        return x, terms


class Stack(nnx.Module):
    """An encoder or a decoder: its layers, a bias for distances, and a norm."""

    def __init__(
        self,
        config: EncoderDecoderConfig,
        layers: int,
        pattern: tuple[bool, ...],
        crossed: bool,
        rngs: nnx.Rngs,
    ):
        self.crossed, self.max_distance = crossed, config.max_distance
        self.bias = weight(
            rngs,
            (config.buckets, config.heads),
            ("buckets", "heads"),
            config.embed**-0.5,
            config.param_dtype,
        )
        block = config.block

        @nnx.split_rngs(splits=layers // len(pattern))
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make(rngs: nnx.Rngs) -> Blocks:
            return Blocks(block, pattern, crossed, rngs)

        self.layers = make(rngs)
        self.norm = Norm(config.embed, "embed", block)

    def __call__(self, x: jax.Array, memory: jax.Array | None) -> tuple[jax.Array, Terms]:
        """Transforms `x` [batch, seq, embed]; terms have a leading dim for the layers that
        repeat.
        """
        seq = x.shape[1]
        bias = position_bias(
            self.bias[...], seq, seq, max_distance=self.max_distance, both=not self.crossed
        )
        if self.crossed:
            bias = jnp.where(jnp.arange(seq)[:, None] >= jnp.arange(seq), bias, -jnp.inf)
        definition, state = nnx.split(self.layers)

        def body(carry: jax.Array, layer: nnx.State) -> tuple[jax.Array, Terms]:
            return nnx.merge(definition, layer)(carry, bias, memory)

        x, terms = jax.lax.scan(body, x, state)
        return self.norm(x), terms


class EncoderDecoder(nnx.Module):
    """An encoder-decoder transformer.

    Args:
        config: what to build.
        rngs: random streams; parameters are drawn from `params`.
    """

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = weight(
            rngs, (config.vocab_size, config.embed), ("vocab", "embed"), 1.0, config.param_dtype
        )
        self.encoder = Stack(
            config, config.encoder_layers, config.pattern(config.encoder_every), False, rngs
        )
        self.decoder = Stack(
            config, config.decoder_layers, config.pattern(config.decoder_every), True, rngs
        )
        if not config.tied:
            self.head = weight(
                rngs,
                (config.embed, config.vocab_size),
                ("embed", "vocab"),
                config.embed**-0.5,
                config.param_dtype,
            )

    def __call__(self, inputs: jax.Array, decoder_inputs: jax.Array) -> jax.Array:
        """Logits [batch, seq, vocab], float32, of the decoder's tokens, int32 [batch, seq] each."""
        return self.forward(inputs, decoder_inputs)[0]

    def forward(
        self, inputs: jax.Array, decoder_inputs: jax.Array
    ) -> tuple[jax.Array, dict[str, Terms]]:
        """Logits, and what the experts of encoder and decoder say of their routing; see
        `MixtureOfExperts`.

        Args:
            inputs: tokens of the encoder, int32 [batch, seq].
            decoder_inputs: tokens of the decoder, int32 [batch, seq].
        """
        memory, first = self.encoder(self._embedded(inputs), None)
        x, second = self.decoder(self._embedded(decoder_inputs), memory)
        if self.config.tied:
            x = x * jnp.asarray(self.config.embed**-0.5, x.dtype)
            logits = jnp.einsum(
                "bsd,vd->bsv",
                x,
                self.embedding[...].astype(x.dtype),
                preferred_element_type=jnp.float32,
            )
        else:
            logits = jnp.einsum(
                "bsd,dv->bsv", x, self.head[...].astype(x.dtype), preferred_element_type=jnp.float32
            )
        return logits, {"encoder": first, "decoder": second}

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip").astype(
            self.config.compute_dtype
        )


def build(config: EncoderDecoderConfig) -> tuple[Callable[[nnx.Rngs], EncoderDecoder], Loss]:
    """Returns the constructor and the loss of a configuration, as `shardlib.compile` takes them."""

    def init(rngs: nnx.Rngs) -> EncoderDecoder:
        return EncoderDecoder(config, rngs)

    def loss(
        model: EncoderDecoder, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, terms_by_stack = model.forward(batch["inputs"], batch["decoder_inputs"])
        entropy, experts = cross_entropy(logits, batch["targets"]), config.experts
        names = dict.fromkeys(name for terms in terms_by_stack.values() for name in terms)
        sums = {
            name: sum(
                (terms[name].sum() for terms in terms_by_stack.values() if name in terms),
                jnp.zeros(()),
            )
            for name in names
        }
        total = entropy
        if experts is not None and "balance" in sums:
            total = total + experts.balance * sums["balance"]
        if experts is not None and "router_z" in sums:
            total = total + experts.z_loss * sums["router_z"]
        return total, {"cross_entropy": entropy, **sums}

    return init, loss


def example_batch(
    config: EncoderDecoderConfig, batch: int, seq: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract batch of a training step.

    Returns:
        "inputs", "decoder_inputs" and "targets", int32 [batch, seq] each.
    """
    config.check_seq(seq)
    return {
        name: jax.ShapeDtypeStruct((batch, seq), jnp.int32)
        for name in ("inputs", "decoder_inputs", "targets")
    }


# --------------------------------------------------------------------------------------------------
# Relative position biases: the term that a head adds to the score of a key for its distance from
# the query (T5, arXiv:1910.10683, section 2.1).


def position_bias(
    table: jax.Array, queries: int, keys: int, *, max_distance: int, both: bool
) -> jax.Array:
    """Bias [heads, queries, keys] of scores, float32, from a table [buckets, heads]; see
    `shardlib.functions.attention`.

    Args:
        table: float [buckets, heads].
    """
    shape = queries, keys
    ahead = jax.lax.broadcasted_iota(jnp.int32, shape, 1) - jax.lax.broadcasted_iota(
        jnp.int32, shape, 0
    )
    return BiasForm(kind="relative", max_distance=max_distance, both=both).of(table, ahead)
