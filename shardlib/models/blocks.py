"""The parts of the reference models: attention, feed-forward, position encodings, parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.errors import ModelError
from shardlib.functions.attention import attention
from shardlib.functions.experts import ACTIVATIONS, visit
from shardlib.functions.routing import balance_loss, loads, route, z_loss
from shardlib.layout import LogicalAxes
from shardlib.models.config import Experts, LatentAttention, RopeScaling, TransformerConfig


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Mean cross entropy in nats of float32 logits [batch, seq, vocab], by weights [batch, seq]
    where there are some.

    The target's logit is a masked sum over the vocabulary, which XLA fuses and which may be sharded
    over devices; a gather (`take_along_axis`) there would bring the logits together on every
    device.

    Args:
        logits: [batch, seq, vocab].
        targets: numbers of tokens, int [batch, seq].
        weights: float [batch, seq]; None where all positions count alike.
    """
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    vocabulary = jax.lax.broadcasted_iota(targets.dtype, shifted.shape, 2)
    target = jnp.where(vocabulary == targets[..., None], shifted, 0.0).sum(-1)
    entropy = jnp.log(jnp.exp(shifted).sum(-1)) - target
    return (
        entropy.mean()
        if weights is None
        else (entropy * weights).sum() / jnp.maximum(weights.sum(), 1.0)
    )


# --------------------------------------------------------------------------------------------------
# Low-rank adapters of a transformer: (x A) B, added to the products with its matrices (Hu et al.,
# LoRA, arXiv:2106.09685).

#: Matrices that adapters change, by module; the dims of each that it multiplies.
MATRICES = {
    "attention": {"query": 1, "key": 1, "value": 1, "out": 2},
    "mlp": {"gate": 1, "up": 1, "down": 1},
}


class LowRank(nnx.Module):
    """The term that an adapter adds to the products with the matrices of a stack of layers; zero as
    long as B is.

    Args:
        matrix: of the layers, [layers, in..., out...].
        dims: how many are in.
        rank: of the product.
        rngs: A is drawn from `params`.
    """

    def __init__(self, matrix: nnx.Param[jax.Array], dims: int, rank: int, rngs: nnx.Rngs):
        array = matrix[...]
        layers, into, out = array.shape[0], array.shape[1 : 1 + dims], array.shape[1 + dims :]
        names = matrix.get_metadata("out_sharding") or (None,) * array.ndim
        drawn = jax.random.normal(rngs.params(), (layers, *into, rank), array.dtype)
        self.a = nnx.LoRAParam(
            drawn / rank, out_sharding=(*names[: 1 + dims], None), eager_sharding=False
        )
        self.b = nnx.LoRAParam(
            jnp.zeros((layers, rank, *out), array.dtype),
            out_sharding=(names[0], None, *names[1 + dims :]),
            eager_sharding=False,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """(x A) B of one layer, [..., out...] for x [..., in...]."""
        a, b = self.a[...].astype(x.dtype), self.b[...].astype(x.dtype)
        return jnp.tensordot(jnp.tensordot(x, a, axes=a.ndim - 1), b, axes=1)


def adapted(module: nnx.Module, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product with a matrix, and what an adapter adds to it."""
    low = getattr(module, f"{name}_lora", None)
    return y if low is None else y + low(x)


# --------------------------------------------------------------------------------------------------
# Parameters: drawn, named and counted.
#
# Every parameter carries the logical axes of its dims in the `out_sharding` metadata of Flax.
# `eager_sharding=False` lets the model be built outside any mesh: where parameters live is the
# plan's business, not the constructor's.


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: LogicalAxes, std: float, dtype: str
) -> nnx.Param[jax.Array]:
    """Draws a normal weight with standard deviation `std`.

    Args:
        dtype: name of it.
    """
    return nnx.Param(
        std * jax.random.normal(rngs.params(), shape, jnp.dtype(dtype)),
        out_sharding=axes,
        eager_sharding=False,
    )


def constant(
    value: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: str
) -> nnx.Param[jax.Array]:
    """Makes a parameter that starts as `value` everywhere: a bias, or the scale of a norm.

    Args:
        dtype: name of it.
    """
    return nnx.Param(
        jnp.full(shape, value, jnp.dtype(dtype)), out_sharding=axes, eager_sharding=False
    )


class Norm(nnx.Module):
    """RMS norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450) over the last dim, computed in
    float32.

    Args:
        width: elements of the last dim.
        axis: logical axis of that dim.
        config: says which norm, its epsilon, and whether it scales by 1 + weight.
        rms: makes an RMS norm whatever `config.norm` says.
    """

    def __init__(
        self, width: int, axis: str | None, config: TransformerConfig, *, rms: bool = False
    ):
        self.epsilon = config.norm_epsilon
        self.offset = 1.0 if config.norm_offset else 0.0
        self.scale = constant(1.0 - self.offset, (width,), (axis,), config.param_dtype)
        if config.norm == "layer" and not rms:
            self.bias = constant(0.0, (width,), (axis,), config.param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        if hasattr(self, "bias"):
            centred = wide - wide.mean(-1, keepdims=True)
            normal = centred * jax.lax.rsqrt(
                jnp.square(centred).mean(-1, keepdims=True) + self.epsilon
            )
            return (normal * scale + self.bias[...].astype(jnp.float32)).astype(x.dtype)
        return (
            wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon) * scale
        ).astype(x.dtype)


# --------------------------------------------------------------------------------------------------
# The feed-forward of a token: dense, or a mixture of experts.
#
# Routing and experts are `shardlib.functions`: without a capacity every token visits all the
# experts that it chose, and the FLOPs are those of the chosen experts, no more.

#: What training wants to know of a layer, by name; empty for a layer without experts.
Terms = dict[str, jax.Array]


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, config: TransformerConfig, width: int, axis: str, rngs: nnx.Rngs):
        self.activation, self.gated, self.biased = config.activation, config.gated, config.mlp_bias
        dtype, embed = config.param_dtype, config.embed
        if config.gated:
            self.gate = weight(rngs, (embed, width), ("embed", axis), embed**-0.5, dtype)
        self.up = weight(rngs, (embed, width), ("embed", axis), embed**-0.5, dtype)
        self.down = weight(
            rngs, (width, embed), (axis, "embed"), (2 * config.layers * width) ** -0.5, dtype
        )
        if config.mlp_bias:
            if config.gated:
                self.gate_bias = constant(0.0, (width,), (axis,), dtype)
            self.up_bias = constant(0.0, (width,), (axis,), dtype)
            self.down_bias = constant(0.0, (embed,), ("embed",), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Transforms `x` [batch, seq, embed]."""
        act = ACTIVATIONS[self.activation]
        hidden = self._linear(x, "up")
        hidden = act(self._linear(x, "gate")) * hidden if self.gated else act(hidden)
        return self._linear(hidden, "down")

    def _linear(self, x: jax.Array, name: str) -> jax.Array:
        y = adapted(self, name, x, x @ getattr(self, name)[...].astype(x.dtype))
        return y + getattr(self, f"{name}_bias")[...].astype(x.dtype) if self.biased else y


class RouterBias(nnx.Variable[jax.Array]):
    """The bias that is added to the scores of experts for choosing alone: not a parameter, for it
    has no gradient (arXiv:2408.15664).
    """


class MixtureOfExperts(nnx.Module):
    """Routed experts, and the experts that every token visits.

    It needs no more of a configuration than its activation, its widths and its dtypes;
    `mixture_of_experts` makes one from these.
    """

    def __init__(self, config: TransformerConfig, experts: Experts, rngs: nnx.Rngs):
        self.experts, self.activation, self.gated = experts, config.activation, config.gated
        dtype, embed, count, width = config.param_dtype, config.embed, experts.count, experts.mlp
        self.router = weight(rngs, (embed, count), ("embed", "expert"), embed**-0.5, dtype)
        inner, outer = ("expert", "embed", "expert_mlp"), ("expert", "expert_mlp", "embed")
        if config.gated:
            self.gate = weight(rngs, (count, embed, width), inner, embed**-0.5, dtype)
        self.up = weight(rngs, (count, embed, width), inner, embed**-0.5, dtype)
        self.down = weight(
            rngs, (count, width, embed), outer, (2 * config.layers * width) ** -0.5, dtype
        )
        if experts.bias:
            self.bias = RouterBias(
                jnp.zeros((count,), jnp.float32), out_sharding=("expert",), eager_sharding=False
            )
        if experts.shared:
            self.shared = FeedForward(config, experts.shared * width, "mlp", rngs)
        if experts.shared_gate:
            self.shared_gate = weight(rngs, (embed,), ("embed",), embed**-0.5, dtype)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Terms]:
        """Transforms `x` [batch, seq, embed]."""
        experts = self.experts
        limit = experts.load_limit(x.shape[-2])
        logits = x.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        routing = route(
            logits,
            experts.per_token,
            scores=experts.router,
            bias=self.bias[...] if experts.bias else None,
            normalise=experts.normalise,
            scaling=experts.scaling,
            groups=experts.groups,
            groups_per_token=experts.groups_per_token,
            group_score=experts.group_score,
        )
        out, dropped = visit(
            x,
            routing.weights,
            routing.chosen,
            self.up[...],
            self.down[...],
            self.gate[...] if self.gated else None,
            activation=self.activation,
            capacity=limit,
        )
        if experts.shared:
            shared = self.shared(x)
            if experts.shared_gate:
                shared = (
                    jax.nn.sigmoid(x @ self.shared_gate[...].astype(x.dtype))[..., None] * shared
                )
            out = out + shared
        terms = {"balance": balance_loss(routing.shares, routing.chosen)}
        if experts.z_loss:
            terms["router_z"] = z_loss(logits)
        if limit is not None:
            terms["dropped"] = dropped
        if experts.bias_rate:
            terms["loads"] = loads(routing.chosen, experts.count)
        return out, terms


def mixture_of_experts(
    experts: Experts,
    embed: int,
    rngs: nnx.Rngs,
    *,
    activation: str = "silu",
    gated: bool = True,
    layers: int = 1,
    param_dtype: str = "float32",
) -> MixtureOfExperts:
    """Makes a mixture of experts for a model of one's own.

    Args:
        param_dtype: dtype of the parameters.
    """
    config = TransformerConfig(
        name="mixture of experts",
        vocab_size=1,
        heads=1,
        kv_heads=1,
        head_dim=2,  # which experts do not look at
        layers=layers,
        embed=embed,
        mlp=experts.mlp,
        activation=activation,
        gated=gated,
        experts=replace(experts, first_dense=0, every=1),
        param_dtype=param_dtype,
    )
    return MixtureOfExperts(config, experts, rngs)


# --------------------------------------------------------------------------------------------------
# Rotary positions: the angle that turns each pair of a head at each position.
#
# Rotary position embedding (arXiv:2104.09864) in the half-split form of Llama: dim i is paired
# with dim i + half. DeepSeek's published checkpoints interleave the pairs; that is the same model
# with the rows of its projections permuted.


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosine and sine of every angle, [seq, half] each, float32."""

    cos: jax.Array
    sin: jax.Array

    def turn(self, x: jax.Array) -> jax.Array:
        """Turns the pairs of `x` [batch, seq, ..., 2 * half]."""
        shape = (self.cos.shape[0], *(1,) * (x.ndim - 3), self.cos.shape[1])
        cos, sin = self.cos.reshape(shape), self.sin.reshape(shape)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        ).astype(x.dtype)


def scores_scale(scaling: RopeScaling | None) -> float:
    """Factor on the attention scores that YaRN asks for (arXiv:2309.00071, section 3.4, as DeepSeek
    V3 applies it).
    """
    if scaling is None or scaling.kind != "yarn" or not scaling.scores_factor:
        return 1.0
    return (0.1 * scaling.scores_factor * math.log(scaling.factor) + 1.0) ** 2


# --------------------------------------------------------------------------------------------------
# Attention of a token to the tokens before it: grouped-query attention and multi-head latent
# attention.
#
# Dims: B batch, S position, D embed. Scores and softmax are float32; the products run in the
# compute dtype.


@dataclass(frozen=True, kw_only=True)
class View:
    """Positions and masks that a layer sees.

    Attributes:
        window: keys that a query sees, itself included; 0 for all before it.
        global_layer: whether it sees all in spite of the window, a boolean array; None where all
            layers of a stack are alike.
        rotary: None with learned positions.
        segments: number of the document of every position, int [B, S]; None where a row is one
            document.
    """

    window: int
    global_layer: jax.Array | None
    rotary: Rotary | None
    segments: jax.Array | None = None


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245); multi-head and multi-query are its two ends."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        dtype, heads, keys, width = (
            config.param_dtype,
            config.heads,
            config.kv_heads,
            config.head_dim,
        )
        std = config.embed**-0.5
        self.query = weight(
            rngs, (config.embed, heads, width), ("embed", "heads", "head_dim"), std, dtype
        )
        self.key = weight(
            rngs, (config.embed, keys, width), ("embed", "kv_heads", "head_dim"), std, dtype
        )
        self.value = weight(
            rngs, (config.embed, keys, width), ("embed", "kv_heads", "head_dim"), std, dtype
        )
        out_std = (2 * config.layers * heads * width) ** -0.5
        self.out = weight(
            rngs, (heads, width, config.embed), ("heads", "head_dim", "embed"), out_std, dtype
        )
        if config.qkv_bias:
            self.query_bias = constant(0.0, (heads, width), ("heads", "head_dim"), dtype)
            self.key_bias = constant(0.0, (keys, width), ("kv_heads", "head_dim"), dtype)
            self.value_bias = constant(0.0, (keys, width), ("kv_heads", "head_dim"), dtype)
        if config.out_bias:
            self.out_bias = constant(0.0, (config.embed,), ("embed",), dtype)
        if config.qk_norm:
            self.query_norm = Norm(width, "head_dim", config, rms=True)
            self.key_norm = Norm(width, "head_dim", config, rms=True)

    def __call__(self, x: jax.Array, view: View) -> jax.Array:
        """Attends over `x` [B, S, D]."""
        config = self.config
        query, key, value = self._project(x)
        if view.rotary:
            query, key = view.rotary.turn(query), view.rotary.turn(key)
        scale = (config.query_scale or config.head_dim) ** -0.5 * scores_scale(config.rope_scaling)
        mixed = _attend(config, view, query, key, value, scale)
        out = jnp.einsum("bsnh,nhd->bsd", mixed, self.out[...].astype(x.dtype))
        out = adapted(self, "out", mixed, out)
        return out + self.out_bias[...].astype(x.dtype) if config.out_bias else out

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = (
            adapted(self, name, x, _heads(x, w))
            for name, w in (("query", self.query), ("key", self.key), ("value", self.value))
        )
        if self.config.qkv_bias:
            query = query + self.query_bias[...].astype(x.dtype)
            key = key + self.key_bias[...].astype(x.dtype)
            value = value + self.value_bias[...].astype(x.dtype)
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value


class MultiHeadLatentAttention(nnx.Module):
    """Latent attention of DeepSeek V2 and V3 (arXiv:2405.04434, section 2.1), in its training form.

    Queries and keys have a part without position, made from the compressed vector, and a part with
    rotary position; the rotary key is one for all heads. The two parts are kept in separate
    parameters, so that their score is a sum of two products and no head is cut and joined.
    """

    def __init__(self, config: TransformerConfig, latent: LatentAttention, rngs: nnx.Rngs):
        self.config, self.latent = config, latent
        dtype, heads, embed = config.param_dtype, config.heads, config.embed
        source, axis = (latent.q_lora, "q_lora") if latent.q_lora else (embed, "embed")
        if latent.q_lora:
            self.query_down = weight(
                rngs, (embed, latent.q_lora), ("embed", "q_lora"), embed**-0.5, dtype
            )
            self.query_norm = Norm(latent.q_lora, "q_lora", config, rms=True)
        self.query = weight(
            rngs, (source, heads, latent.nope_dim), (axis, "heads", "head_dim"), source**-0.5, dtype
        )
        self.query_rope = weight(
            rngs, (source, heads, latent.rope_dim), (axis, "heads", "rope_dim"), source**-0.5, dtype
        )
        self.down = weight(rngs, (embed, latent.kv_lora), ("embed", "kv_lora"), embed**-0.5, dtype)
        self.key_rope = weight(
            rngs, (embed, latent.rope_dim), ("embed", "rope_dim"), embed**-0.5, dtype
        )
        self.norm = Norm(latent.kv_lora, "kv_lora", config, rms=True)
        std = latent.kv_lora**-0.5
        self.key = weight(
            rngs,
            (latent.kv_lora, heads, latent.nope_dim),
            ("kv_lora", "heads", "head_dim"),
            std,
            dtype,
        )
        self.value = weight(
            rngs,
            (latent.kv_lora, heads, latent.v_dim),
            ("kv_lora", "heads", "value_dim"),
            std,
            dtype,
        )
        out_std = (2 * config.layers * heads * latent.v_dim) ** -0.5
        self.out = weight(
            rngs, (heads, latent.v_dim, embed), ("heads", "value_dim", "embed"), out_std, dtype
        )

    def __call__(self, x: jax.Array, view: View) -> jax.Array:
        """Attends over `x` [B, S, D]."""
        assert view.rotary is not None
        source = (
            self.query_norm(x @ self.query_down[...].astype(x.dtype)) if self.latent.q_lora else x
        )
        compressed = self.norm(x @ self.down[...].astype(x.dtype))
        query, key, value = (
            _heads(source, self.query),
            _heads(compressed, self.key),
            _heads(compressed, self.value),
        )
        query_rope = view.rotary.turn(_heads(source, self.query_rope))
        key_rope = view.rotary.turn(x @ self.key_rope[...].astype(x.dtype))
        scale = (self.latent.nope_dim + self.latent.rope_dim) ** -0.5 * scores_scale(
            self.config.rope_scaling
        )
        mixed = _attend(self.config, view, (query, query_rope), (key, key_rope), value, scale)
        return jnp.einsum("bsnh,nhd->bsd", mixed, self.out[...].astype(x.dtype))


def _attend(
    config: TransformerConfig, view: View, query: Any, key: Any, value: jax.Array, scale: float
) -> jax.Array:
    if (
        config.attention_block
        and value.shape[1] > config.attention_block
        and value.shape[1] % config.attention_block
    ):
        raise ModelError(
            f"a sequence of {value.shape[1]} is not a multiple of"
            f" attention_block={config.attention_block}\nTry: a sequence that is, or"
            " attention_block=0"
        )
    return attention(
        query,
        key,
        value,
        scale=scale,
        window=view.window,
        global_layer=view.global_layer,
        segments=view.segments,
        softcap=config.attention_softcap,
        block=config.attention_block,
    )


def _heads(x: jax.Array, w: nnx.Param[jax.Array]) -> jax.Array:
    return jnp.einsum("bsd,dnh->bsnh", x, w[...].astype(x.dtype))


def make_attention(
    config: TransformerConfig, rngs: nnx.Rngs
) -> Attention | MultiHeadLatentAttention:
    """Makes the attention that the configuration asks for."""
    return (
        MultiHeadLatentAttention(config, config.latent, rngs)
        if config.latent
        else Attention(config, rngs)
    )


# --------------------------------------------------------------------------------------------------
# Layers of a decoder: blocks of attention and feed-forward, and groups of blocks that repeat.


class Block(nnx.Module):
    """One layer: attention, then a feed-forward or experts, each on a normalised copy and added
    back.
    """

    def __init__(self, config: TransformerConfig, sparse: bool, rngs: nnx.Rngs):
        self.post_norms = config.post_norms
        self.attention_norm = Norm(config.embed, "embed", config)
        self.attention = make_attention(config, rngs)
        self.mlp_norm = Norm(config.embed, "embed", config)
        if sparse:
            assert config.experts is not None
            self.experts = MixtureOfExperts(config, config.experts, rngs)
        else:
            self.mlp = FeedForward(config, config.mlp, "mlp", rngs)
        if config.post_norms:
            self.attention_post_norm = Norm(config.embed, "embed", config)
            self.mlp_post_norm = Norm(config.embed, "embed", config)

    def __call__(self, x: jax.Array, view: View) -> tuple[jax.Array, Terms]:
        """Transforms `x` [batch, seq, embed]; also returns what the experts say of their routing,
        nothing without experts.
        """
        attended = self.attention(self.attention_norm(x), view)
        x = x + (self.attention_post_norm(attended) if self.post_norms else attended)
        normal = self.mlp_norm(x)
        changed, terms = (
            self.experts(normal) if hasattr(self, "experts") else (self.mlp(normal), Terms())
        )
        return x + (self.mlp_post_norm(changed) if self.post_norms else changed), terms


class Group(nnx.Module):
    """Layers of which the last has experts."""

    def __init__(self, config: TransformerConfig, count: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(config, k == count - 1, rngs) for k in range(count)])

    def __call__(self, x: jax.Array, views: Sequence[View]) -> tuple[jax.Array, Terms]:
        """As `Block`, with what each of the layers sees."""
        terms = Terms()
        for block, view in zip(self.blocks, views, strict=True):
            x, block_terms = block(x, view)
            terms = terms | block_terms
        return x, terms
