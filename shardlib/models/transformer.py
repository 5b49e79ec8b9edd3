"""The reference models in Flax NNX: a decoder transformer, built from a `TransformerConfig`, and an
encoder-decoder.

Layers of one kind are one stacked module, made with `nnx.vmap` and run with `jax.lax.scan`, so that
tracing takes the same time for 2 layers and for 126. The logical axes of the parameters are
"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "layers", and where they occur "expert",
"expert_mlp", "q_lora", "kv_lora", "rope_dim", "value_dim", "positions".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.functions.attention import BiasForm
from shardlib.functions.routing import stepped
from shardlib.models.blocks import (
    Block,
    FeedForward,
    Group,
    MixtureOfExperts,
    Norm,
    Rotary,
    Terms,
    View,
    cross_entropy,
    weight,
)
from shardlib.models.config import EncoderDecoderConfig, RopeScaling, TransformerConfig

#: (model, batch) -> (loss, metrics); the batch has "inputs" and "targets", int32 [batch, seq] each,
#: and where documents share rows "segments" (int32, numbers of documents; a token sees its own
#: alone), "positions" (int32, within the document; only learned positions look at them, since
#: rotary ones are relative) and "weights" (float32, of each target in the mean).
Loss = Callable[["Transformer", Mapping[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]


class Transformer(nnx.Module):
    """A decoder transformer.

    Args:
        config: what to build.
        rngs: random streams; parameters are drawn from `params`.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        dtype, std = config.param_dtype, config.embed**-0.5
        self.embedding = weight(
            rngs, (config.vocab_size, config.embed), ("vocab", "embed"), std, dtype
        )
        if config.learned_positions:
            self.positions = weight(
                rngs, (config.max_seq, config.embed), ("positions", "embed"), std, dtype
            )
        first = config.experts.first_dense if config.experts else 0
        if first:
            self.dense_layers = _stack(config, first, False, rngs)
        self.layers = _stack(config, config.layers - first, config.experts is not None, rngs)
        self.norm = Norm(config.embed, "embed", config)
        if not config.tied:
            self.head = weight(
                rngs, (config.embed, config.vocab_size), ("embed", "vocab"), std, dtype
            )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, seq, vocab], float32, for int32 tokens [batch, seq]."""
        return self.forward(tokens)[0]

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Normalised states [batch, seq, embed] before the logits, for int32 tokens [batch,
        seq].
        """
        return self._states(tokens, None, None)[0]

    def forward(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Terms]:
        """Logits, and what the experts say of their routing, by layer with experts; see
        `MixtureOfExperts`.

        Args:
            tokens: int32 [batch, seq].
            segments: number of the document of every token, int32 [batch, seq]; None where a row is
                one document.
            positions: of every token in its document, int32 [batch, seq]; by default in its row.
        """
        x, terms = self._states(tokens, segments, positions)
        return self._logits(x), terms

    def _states(
        self, tokens: jax.Array, segments: jax.Array | None, positions: jax.Array | None
    ) -> tuple[jax.Array, Terms]:
        config, seq = self.config, tokens.shape[1]
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="clip").astype(config.compute_dtype)
        if config.embed_scale:
            x = x * jnp.asarray(config.embed**0.5, x.dtype)
        if config.learned_positions:
            learned = (
                self.positions[:seq]
                if positions is None
                else jnp.take(self.positions[...], positions, axis=0, mode="clip")
            )
            x = x + learned.astype(x.dtype)
        terms, first = Terms(), 0
        for stack, count in self._stacks():
            x, stack_terms = _run(stack, x, config, range(first, first + count), segments)
            terms, first = terms | stack_terms, first + count
        return self.norm(x), terms

    def rebalance(self, loads: jax.Array) -> None:
        """Moves the biases of routers towards the mean load, from loads [layers, experts]."""
        assert self.config.experts is not None
        last = self.layers.blocks[-1] if isinstance(self.layers, Group) else self.layers
        bias = last.experts.bias
        bias[...] = stepped(bias[...], loads, self.config.experts.bias_rate)

    def _stacks(self) -> list[tuple[Block | Group, int]]:
        first = self.config.experts.first_dense if self.config.experts else 0
        return [
            *([(self.dense_layers, first)] if first else []),
            (self.layers, self.config.layers - first),
        ]

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.config.tied:
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
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


def _stack(config: TransformerConfig, count: int, sparse: bool, rngs: nnx.Rngs) -> Block | Group:
    """Makes `count` blocks as one, or as one group of those that repeat, whose parameters have a
    leading "layers" dim.
    """
    interval = config.experts.every if config.experts and sparse else 1

    @nnx.split_rngs(splits=count // interval)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: nnx.Rngs) -> Block | Group:
        return Block(config, sparse, rngs) if interval == 1 else Group(config, interval, rngs)

    return make(rngs)


def _run(
    stack: Block | Group,
    x: jax.Array,
    config: TransformerConfig,
    layers: range,
    segments: jax.Array | None,
) -> tuple[jax.Array, Terms]:
    """Runs the stacked blocks or groups one after another; terms have a leading dim for them."""
    definition, state = nnx.split(stack)
    view_of = _views(config, x.shape[1], layers, segments)
    count = len(stack.blocks) if isinstance(stack, Group) else 1
    flags = np.array([config.is_global(layer) for layer in layers]).reshape(-1, count)

    def body(
        carry: jax.Array, layer: tuple[nnx.State, jax.Array | None]
    ) -> tuple[jax.Array, Terms]:
        views = [view_of(None if layer[1] is None else layer[1][k]) for k in range(count)]
        block = nnx.merge(definition, layer[0])
        return block(carry, views) if isinstance(block, Group) else block(carry, views[0])

    mixed = flags.any() and not flags.all()
    return jax.lax.scan(body, x, (state, jnp.asarray(flags) if mixed else None))


def _views(
    config: TransformerConfig, seq: int, layers: range, segments: jax.Array | None
) -> Callable[[jax.Array | None], View]:
    """Returns what a layer sees, given whether it sees all; None where all layers of the stack are
    alike.
    """

    def view(seen_all: bool) -> View:
        theta = (
            config.rope_theta
            if seen_all or not config.rope_local_theta
            else config.rope_local_theta
        )
        scaling = config.rope_scaling if seen_all or not config.rope_local_theta else None
        table = None if config.learned_positions else rotary(seq, config.rope_dim, theta, scaling)
        return View(
            window=0 if seen_all else config.sliding_window,
            global_layer=None,
            rotary=table,
            segments=segments,
        )

    if len({config.is_global(layer) for layer in layers}) == 1:
        only = view(config.is_global(layers[0]))
        return lambda _: only
    global_view, local = view(True), view(False)

    def chosen(flag: jax.Array | None) -> View:
        assert flag is not None
        return View(
            window=config.sliding_window,
            global_layer=flag,
            rotary=_choose(flag, global_view.rotary, local.rotary),
            segments=segments,
        )

    return chosen


def _choose(flag: jax.Array | None, first: Rotary | None, second: Rotary | None) -> Rotary | None:
    if flag is None or first is None or second is None:
        return first
    return Rotary(
        cos=jnp.where(flag, first.cos, second.cos), sin=jnp.where(flag, first.sin, second.sin)
    )


def build(config: TransformerConfig) -> tuple[Callable[[nnx.Rngs], Transformer], Loss]:
    """Returns the constructor and the loss of a configuration, as `shardlib.compile` takes them."""

    def init(rngs: nnx.Rngs) -> Transformer:
        return Transformer(config, rngs)

    def loss(
        model: Transformer, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, terms = model.forward(
            batch["inputs"], batch.get("segments"), batch.get("positions")
        )
        entropy, experts = (
            cross_entropy(logits, batch["targets"], batch.get("weights")),
            config.experts,
        )
        if experts is None:
            return entropy, {"cross_entropy": entropy}
        if experts.bias_rate:
            model.rebalance(terms.pop("loads"))
        sums = {name: term.sum() for name, term in terms.items()}
        total = entropy + experts.balance * sums["balance"]
        return total + experts.z_loss * sums["router_z"] if experts.z_loss else total, {
            "cross_entropy": entropy,
            **sums,
        }

    return init, loss


def example_batch(
    config: TransformerConfig, batch: int, seq: int, *, packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract batch of a training step; `packed` where documents share rows, see `Loss`."""
    config.check_seq(seq)
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32} | (
        {"segments": jnp.int32, "positions": jnp.int32, "weights": jnp.float32} if packed else {}
    )
    return {name: jax.ShapeDtypeStruct((batch, seq), dtype) for name, dtype in dtypes.items()}


def frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position for each pair, [dim / 2], stretched as `scaling` says.

    Args:
        scaling: how wavelengths are stretched; None for not at all.
    """
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    unscaled_share = (
        _kept_llama3(plain, scaling)
        if scaling.kind == "llama3"
        else _kept_yarn(dim, theta, scaling)
    )
    return plain * unscaled_share + plain / scaling.factor * (1 - unscaled_share)


def _kept_llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Share of each frequency that stays as it is: 1 for short waves, 0 for long ones (Llama 3.1
    reference code).
    """
    turns = scaling.original_seq * plain / (2 * math.pi)
    return np.clip(
        (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0.0, 1.0
    )


def _kept_yarn(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The same for YaRN: a ramp over the pairs, between those that turn `high_frequency` and
    `low_frequency` times.
    """

    def pair(turns: float) -> float:
        return dim * math.log(scaling.original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.high_frequency)), 0)
    high = min(math.ceil(pair(scaling.low_frequency)), dim - 1)
    return 1 - np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)


def rotary(seq: int, dim: int, theta: float, scaling: RopeScaling | None) -> Rotary:
    """Tables for positions 0 to seq - 1 and heads whose turned part has `dim` dims.

    Args:
        scaling: how wavelengths are stretched; None for not at all.

    Returns:
        Cosines and sines, float32 [seq, dim / 2] each.
    """
    positions = jax.lax.broadcasted_iota(jnp.float32, (seq, dim // 2), 0)
    angles = positions * jnp.asarray(frequencies(dim, theta, scaling), jnp.float32)
    return Rotary(cos=jnp.cos(angles), sin=jnp.sin(angles))


# --------------------------------------------------------------------------------------------------
# The reference encoder-decoder: T5 and Switch, built from an `EncoderDecoderConfig`.
#
# Layers that repeat, with experts in one of them or in none, are one stacked module, run with
# `jax.lax.scan`. Logical axes are those of the decoder, and "buckets". Attention adds a bias to
# its scores and is written out, as in T5X: a `context` axis gathers keys and values.

#: (model, batch) -> (loss, metrics); the batch has "inputs", "decoder_inputs" and "targets", int32
#: [batch, seq] each.
EncoderDecoderLoss = Callable[
    ["EncoderDecoder", Mapping[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]
]


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


class BiasedBlock(nnx.Module):
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
        self.blocks = nnx.List([BiasedBlock(config, sparse, crossed, rngs) for sparse in pattern])

    def __call__(
        self, x: jax.Array, bias: jax.Array, memory: jax.Array | None
    ) -> tuple[jax.Array, Terms]:
        """As `BiasedBlock`."""
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


def build_encoder_decoder(
    config: EncoderDecoderConfig,
) -> tuple[Callable[[nnx.Rngs], EncoderDecoder], EncoderDecoderLoss]:
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


def encoder_decoder_batch(
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
