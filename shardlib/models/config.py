"""Configurations of transformers, each as one value: decoders and encoder-decoders.

`TransformerConfig` describes every family that `huggingface.py` reads, from GPT-2 to DeepSeek V3;
`transformer.py` builds it. It holds no JAX, so listing presets and counting parameters is instant:

>>> config = TransformerConfig(
...     name="toy", vocab_size=256, layers=2, embed=8, heads=2, kv_heads=1, head_dim=4, mlp=16
... )
>>> config.parameter_count()
5288

An encoder-decoder transformer as one value.

`EncoderDecoderConfig` describes T5 (arXiv:1910.10683) and Switch (arXiv:2101.03961);
`transformer.py` builds it. Layers have no biases and RMS norms before them, and attention has
no positions but a bias of every head for the distance of key and query. It holds no JAX.

>>> config = EncoderDecoderConfig(
...     name="toy", vocab_size=64, encoder_layers=2, decoder_layers=2, embed=8, heads=2, head_dim=4,
...     mlp=16, buckets=4,
... )
>>> config.layers, config.parameter_count()
(4, 3184)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardlib.errors import ModelError, raise_all

# --------------------------------------------------------------------------------------------------
# Parts of a model's configuration: stretched rotary positions, latent attention, a mixture of
# experts.

#: Layers, and any other size, are at most this.
LAYERS, SIZE = 100_000, 10**12


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the training length.

    Attributes:
        kind: "linear" (arXiv:2306.15595), "llama3" (Llama 3.1 model card) or "yarn"
            (arXiv:2309.00071).
        factor: how many times longer the context becomes.
        original_seq: context length before stretching, tokens; unused by "linear".
        low_frequency: "llama3" `low_freq_factor`; "yarn" `beta_slow`.
        high_frequency: "llama3" `high_freq_factor`; "yarn" `beta_fast`.
        scores_factor: "yarn" `mscale_all_dim`, which sharpens the attention scores; 0 leaves them.
    """

    kind: str
    factor: float
    original_seq: int = 8192
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    scores_factor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek V2 and V3 (arXiv:2405.04434, section 2.1).

    Attributes:
        q_lora: width of the compressed queries; 0 when queries are not compressed.
        kv_lora: width of the compressed keys and values.
        rope_dim: part of a head that carries the position.
        nope_dim: part of a head that does not.
        v_dim: width of a value head.
    """

    q_lora: int
    kv_lora: int
    rope_dim: int
    nope_dim: int
    v_dim: int

    def parameter_count(self, embed: int, heads: int) -> int:
        """Number of trained parameters of one layer's attention."""
        head = self.nope_dim + self.rope_dim
        queries = self.q_lora * (embed + 1 + heads * head) if self.q_lora else embed * heads * head
        keys = embed * (self.kv_lora + self.rope_dim) + self.kv_lora * (
            1 + heads * (self.nope_dim + self.v_dim)
        )
        return queries + keys + heads * self.v_dim * embed


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer.

    Attributes:
        count: routed experts of a layer.
        per_token: experts that each token visits.
        mlp: hidden width of one expert.
        shared: experts that every token visits, each of width `mlp`.
        shared_gate: whether a sigmoid gate scales the shared experts (Qwen 2 MoE).
        first_dense: leading layers that keep a dense feed-forward.
        every: of so many layers after these, the last has experts, and the others a dense
            feed-forward.
        router: "softmax" or "sigmoid" scores.
        normalise: whether the chosen weights are divided by their sum.
        scaling: factor on the weights of the routed experts.
        groups: groups that experts are divided into; 1 without groups.
        groups_per_token: groups whose experts a token may visit.
        group_score: how many of a group's best experts are summed to rank the groups.
        balance: coefficient of the load-balancing loss (Switch Transformer, arXiv:2101.03961,
            equation 4).
        z_loss: coefficient of the router z-loss (ST-MoE, arXiv:2202.08906, equation 5).
        capacity: factor over the mean load that an expert takes at most, the rest is dropped; 0
            drops nothing.
        sequence_capacity: the same as tokens of a sequence on average over the batch; 0 where
            `capacity` says it.
        bias: whether a bias is added to the scores for choosing alone (DeepSeek-V3,
            arXiv:2412.19437, section 2.1.2).
        bias_rate: how far a step of training moves the bias of an expert towards the mean load
            (arXiv:2408.15664); 0 leaves it.
    """

    count: int
    per_token: int
    mlp: int
    shared: int = 0
    shared_gate: bool = False
    first_dense: int = 0
    every: int = 1
    router: str = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: int = 1
    balance: float = 0.001
    z_loss: float = 0.0
    capacity: float = 0.0
    sequence_capacity: int = 0
    bias: bool = False
    bias_rate: float = 0.0

    def load_limit(self, seq: int) -> float | None:
        """Factor over the mean load that an expert takes at most of sequences of `seq` tokens; None
        where nothing is dropped.
        """
        return (
            min(self.sequence_capacity / seq, 1.0) * self.count / self.per_token
            or self.capacity
            or None
        )

    def parameter_count(self, embed: int, gated: bool, *, active: bool = False) -> int:
        """Parameters of one layer's router and experts; with `active`, those that one token
        uses.
        """
        matrices = 3 if gated else 2
        routed = self.per_token if active else self.count
        return (
            embed * self.count
            + matrices * embed * self.mlp * (routed + self.shared)
            + embed * self.shared_gate
        )


NORMS: tuple[str, ...] = ("rms", "layer")
ACTIVATIONS: tuple[str, ...] = ("silu", "gelu", "gelu_tanh", "relu")
ROPE_SCALINGS: tuple[str, ...] = ("linear", "llama3", "yarn")
ROUTERS: tuple[str, ...] = ("softmax", "sigmoid")
DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer, as a table of its settings.

    Attributes:
        name: for people.
        vocab_size: tokens of the vocabulary.
        layers: blocks.
        embed: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: width of a head; with `latent` it is not used.
        mlp: hidden width of the dense feed-forward.
        max_seq: longest sequence, tokens; also the number of learned positions.
        norm: "rms" or "layer" (with bias).
        norm_epsilon: added under the square root.
        norm_offset: whether norms scale by 1 + weight (Gemma).
        post_norms: whether the output of attention and feed-forward is normalised too (Gemma 2 and
            3).
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        gated: whether the feed-forward is gated (SwiGLU, GeGLU).
        tied: whether the head is the transposed embedding.
        embed_scale: whether embeddings are multiplied by sqrt(embed) (Gemma).
        learned_positions: absolute learned positions in place of rotary ones (GPT-2).
        rope_theta: base of the rotary frequencies.
        rope_local_theta: base in layers with a sliding window, where it differs; 0 where not.
        rope_scaling: how rotary frequencies are stretched.
        qkv_bias: biases on queries, keys and values.
        out_bias: bias on the attention output.
        mlp_bias: biases in the feed-forward.
        qk_norm: RMS norm on every query and key head.
        query_scale: queries are multiplied by query_scale ** -0.5; 0 means the width of a head.
        sliding_window: tokens that a token sees, itself included; 0 sees all.
        global_every: every n-th layer sees all in spite of the window; 0 means none does.
        attention_softcap: scores become cap * tanh(scores / cap); 0 leaves them.
        attention_block: queries that attend at a time; 0 means all at once. With blocks, only the
            scores of one block are in memory, and they are rematerialised in the backward pass
            (arXiv:2112.05682). Longer sequences must be multiples of it.
        logit_softcap: the same for the logits.
        experts: mixture of experts; None for a dense model.
        latent: multi-head latent attention; None for grouped-query attention.
        param_dtype: dtype that the optimizer keeps.
        compute_dtype: dtype of the matrix products; norms, softmax, router and loss are float32.

    Raises:
        ModelError: fields that contradict each other, all of them listed.
    """

    name: str
    vocab_size: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_seq: int = 2048
    norm: str = "rms"
    norm_epsilon: float = 1e-5
    norm_offset: bool = False
    post_norms: bool = False
    activation: str = "silu"
    gated: bool = True
    tied: bool = False
    embed_scale: bool = False
    learned_positions: bool = False
    rope_theta: float = 10000.0
    rope_local_theta: float = 0.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    query_scale: float = 0.0
    sliding_window: int = 0
    global_every: int = 0
    attention_softcap: float = 0.0
    attention_block: int = 0
    logit_softcap: float = 0.0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        failures = [*_not_positive(self), *_unknown_words(self), *_contradictions(self)]
        if failures:
            raise_all(ModelError, f"the model {self.name!r} is not usable", failures)

    @property
    def dense_layers(self) -> int:
        """Blocks with a dense feed-forward."""
        return (
            self.layers
            if self.experts is None
            else self.layers - (self.layers - self.experts.first_dense) // self.experts.every
        )

    @property
    def rope_dim(self) -> int:
        """Width of the part of a head that rotary positions turn."""
        return self.latent.rope_dim if self.latent else self.head_dim

    def is_global(self, layer: int) -> bool:
        """Returns whether a layer sees the whole sequence."""
        return not self.sliding_window or bool(
            self.global_every and (layer + 1) % self.global_every == 0
        )

    def check_seq(self, seq: int) -> None:
        """Raises a `ModelError` unless sequences of `seq` tokens fit."""
        if not 1 <= seq <= self.max_seq:
            raise ModelError(
                f"the model {self.name!r} takes sequences of 1 to {self.max_seq} tokens, not {seq}"
            )

    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return self._count(active=False)

    def active_parameter_count(self) -> int:
        """Number of trained parameters that one token uses."""
        return self._count(active=True)

    def _count(self, *, active: bool) -> int:
        norm = self.embed * (2 if self.norm == "layer" else 1)
        matrices = 3 if self.gated else 2
        dense = matrices * self.embed * self.mlp + self.mlp_bias * (
            (matrices - 1) * self.mlp + self.embed
        )
        sparse = (
            self.experts.parameter_count(self.embed, self.gated, active=active)
            if self.experts
            else 0
        )
        block = self._attention_count() + norm * (4 if self.post_norms else 2)
        ends = (
            self.vocab_size * self.embed * (1 if self.tied else 2)
            + norm
            + self.learned_positions * self.max_seq * self.embed
        )
        return (
            ends
            + self.layers * block
            + self.dense_layers * dense
            + (self.layers - self.dense_layers) * sparse
        )

    def _attention_count(self) -> int:
        if self.latent:
            return self.latent.parameter_count(self.embed, self.heads)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = self.qkv_bias * (queries + 2 * keys) + self.out_bias * self.embed
        return self.embed * (2 * queries + 2 * keys) + biases + self.qk_norm * 2 * self.head_dim


def _not_positive(config: TransformerConfig) -> list[str]:
    must = ("vocab_size", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "max_seq")
    named = [(name, getattr(config, name)) for name in must]
    if config.experts:
        named += [
            (f"experts.{f.name}", getattr(config.experts, f.name))
            for f in fields(config.experts)
            if f.name
            in (
                "count",
                "per_token",
                "mlp",
                "every",
                "groups",
                "groups_per_token",
                "group_score",
            )
        ]
    if config.latent:
        named += [
            (f"latent.{name}", getattr(config.latent, name))
            for name in ("kv_lora", "rope_dim", "nope_dim", "v_dim")
        ]
    failures = [
        f"{name} is {value!r}; it must be a positive integer"
        for name, value in named
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    return failures or [
        f"{name} is {value:,}; no model has more than {limit:,}"
        for name, value in named
        if value > (limit := LAYERS if name == "layers" else SIZE)
    ]


def _unknown_words(config: TransformerConfig) -> list[str]:
    words = [
        ("norm", config.norm, NORMS),
        ("activation", config.activation, ACTIVATIONS),
        ("param_dtype", config.param_dtype, DTYPES),
        ("compute_dtype", config.compute_dtype, DTYPES),
    ]
    if config.rope_scaling:
        words.append(("rope_scaling.kind", config.rope_scaling.kind, ROPE_SCALINGS))
    if config.experts:
        words.append(("experts.router", config.experts.router, ROUTERS))
    return [
        f"{name} is {value!r}; known are {', '.join(options)}"
        for name, value, options in words
        if value not in options
    ]


def _contradictions(config: TransformerConfig) -> list[str]:
    experts, failures = config.experts, list[str]()
    if _not_positive(config):
        return failures
    if config.heads % config.kv_heads:
        failures.append(f"kv_heads {config.kv_heads} does not divide heads {config.heads}")
    if config.rope_dim % 2 and not config.learned_positions:
        failures.append(
            f"rotary positions turn pairs, and {config.rope_dim} dims of a head are not pairs"
        )
    if config.sliding_window < 0 or config.global_every < 0:
        failures.append(
            f"sliding_window {config.sliding_window} and global_every {config.global_every} cannot"
            " be negative; 0 is for none"
        )
    if config.attention_block < 0:
        failures.append(
            f"attention_block is {config.attention_block}; it is a number of queries, 0 for all at"
            " once"
        )
    if config.latent and config.learned_positions:
        failures.append(
            "latent attention carries rotary positions; learned_positions must be false"
        )
    return failures + (_contradicted_experts(config, experts) if experts else [])


def _contradicted_experts(config: TransformerConfig, experts: Experts) -> list[str]:
    failures: list[str] = []
    if experts.per_token > experts.count:
        failures.append(f"a token cannot visit {experts.per_token} of {experts.count} experts")
    if experts.first_dense >= config.layers:
        failures.append(
            f"experts.first_dense {experts.first_dense} leaves no layer of {config.layers} for"
            " experts"
        )
    elif (config.layers - experts.first_dense) % experts.every:
        failures.append(
            f"experts.every {experts.every} does not divide the"
            f" {config.layers - experts.first_dense} layers after the first dense ones"
        )
    if experts.count % experts.groups or experts.groups_per_token > experts.groups:
        failures.append(
            f"{experts.count} experts in {experts.groups} groups, {experts.groups_per_token} of"
            " them for a token, do not fit"
        )
    if experts.per_token > experts.groups_per_token * (experts.count // experts.groups):
        failures.append(
            f"{experts.groups_per_token} groups of {experts.count // experts.groups} experts have"
            f" no {experts.per_token} experts for a token"
        )
    if min(experts.balance, experts.z_loss, experts.capacity, experts.bias_rate) < 0:
        failures.append("experts.balance, z_loss, capacity and bias_rate cannot be negative")
    if experts.sequence_capacity < 0 or (experts.sequence_capacity and experts.capacity):
        failures.append(
            f"experts.sequence_capacity is {experts.sequence_capacity}; it is a number of tokens,"
            " and 0 where experts.capacity says it"
        )
    if experts.bias_rate and not experts.bias:
        failures.append(
            f"experts.bias_rate {experts.bias_rate} moves a bias; experts.bias must be true"
        )
    if config.mlp_bias:
        failures.append("experts have no biases; mlp_bias must be false")
    return failures


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """An encoder-decoder transformer.

    Attributes:
        name: for people.
        vocab_size: tokens of the vocabulary.
        encoder_layers: blocks of the encoder.
        decoder_layers: blocks of the decoder, which also attend to the encoder's result.
        embed: width of the residual stream.
        heads: heads of every attention.
        head_dim: width of a head.
        mlp: hidden width of the dense feed-forward.
        max_seq: longest sequence, tokens.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        gated: whether feed-forward layers are gated (GeGLU).
        tied: whether the head is the transposed embedding, times embed ** -0.5 (arXiv:1910.10683).
        norm_epsilon: added under the square root.
        buckets: of distances, each with a bias for every head; encoder and decoder have their own.
        max_distance: all longer distances have one bias.
        experts: mixture of experts in some layers; None for a dense model.
        encoder_every: the second of every n layers of the encoder has experts, all of them for 1,
            none for 0.
        decoder_every: the same of the decoder.
        param_dtype: dtype that the optimizer keeps.
        compute_dtype: dtype of the matrix products; norms, softmax, router and loss are float32.

    Raises:
        ModelError: fields that contradict each other, all of them listed.
    """

    name: str
    vocab_size: int
    encoder_layers: int
    decoder_layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    max_seq: int = 512
    activation: str = "relu"
    gated: bool = False
    tied: bool = True
    norm_epsilon: float = 1e-6
    buckets: int = 32
    max_distance: int = 128
    experts: Experts | None = None
    encoder_every: int = 2
    decoder_every: int = 2
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {getattr(self, name)!r}; it must be a positive integer"
            for name in ("encoder_layers", "decoder_layers", "max_distance")
            if not _positive(getattr(self, name))
        ]
        failures += [
            f"buckets is {self.buckets!r}; it is a multiple of 4"
            for _ in [0]
            if not _positive(self.buckets) or self.buckets % 4
        ]
        if not failures and self.max_distance <= self.buckets // 2:
            failures.append(
                f"max_distance {self.max_distance} must be more than half of the {self.buckets}"
                " buckets"
            )
        for name in ("encoder", "decoder"):
            layers, interval = getattr(self, f"{name}_layers"), getattr(self, f"{name}_every")
            if self.experts and not failures and (interval < 0 or (interval and layers % interval)):
                failures.append(
                    f"{name}_every {interval} puts experts in one of so many layers, and the"
                    f" {layers} layers of the {name} are not a multiple of it"
                )
        if self.experts and (self.experts.first_dense or self.experts.every != 1):
            failures.append(
                f"experts.first_dense is {self.experts.first_dense} and experts.every"
                f" {self.experts.every}; which layers have experts is said by encoder_every and"
                " decoder_every"
            )
        if failures:
            raise_all(ModelError, f"the model {self.name!r} is not usable", failures)
        _ = self.block

    @property
    def layers(self) -> int:
        """Blocks of encoder and decoder."""
        return self.encoder_layers + self.decoder_layers

    @property
    def block(self) -> TransformerConfig:
        """Returns what norms, feed-forward layers and experts of a block look at."""
        return TransformerConfig(
            name=self.name,
            vocab_size=self.vocab_size,
            layers=self.layers,
            embed=self.embed,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            mlp=self.mlp,
            max_seq=self.max_seq,
            norm_epsilon=self.norm_epsilon,
            activation=self.activation,
            gated=self.gated,
            tied=self.tied,
            learned_positions=True,
            experts=self.experts,
            param_dtype=self.param_dtype,
            compute_dtype=self.compute_dtype,
        )

    def pattern(self, interval: int) -> tuple[bool, ...]:
        """Returns which of the layers that are repeated have experts."""
        if self.experts is None or interval == 0:
            return (False,)
        return (True,) if interval == 1 else tuple(layer == 1 for layer in range(interval))

    def check_seq(self, seq: int) -> None:
        """Raises a `ModelError` unless sequences of `seq` tokens fit."""
        if not 1 <= seq <= self.max_seq:
            raise ModelError(
                f"the model {self.name!r} takes sequences of 1 to {self.max_seq} tokens, not {seq}"
            )

    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return self._count(active=False)

    def active_parameter_count(self) -> int:
        """Number of trained parameters that one token uses, if it went through encoder and
        decoder.
        """
        return self._count(active=True)

    def _count(self, *, active: bool) -> int:
        ends = (
            self.vocab_size * self.embed * (1 if self.tied else 2)
            + 2 * self.embed
            + 2 * self.buckets * self.heads
        )
        return (
            ends
            + self._stack(self.encoder_layers, self.encoder_every, 1, active)
            + self._stack(self.decoder_layers, self.decoder_every, 2, active)
        )

    def _stack(self, layers: int, interval: int, attentions: int, active: bool) -> int:
        pattern = self.pattern(interval)
        sparse = layers // len(pattern) * sum(pattern)
        dense = (3 if self.gated else 2) * self.embed * self.mlp
        routed = (
            self.experts.parameter_count(self.embed, self.gated, active=active)
            if self.experts
            else 0
        )
        attention = 4 * self.embed * self.heads * self.head_dim + self.embed
        return (
            layers * (attentions * attention + self.embed)
            + (layers - sparse) * dense
            + sparse * routed
        )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
