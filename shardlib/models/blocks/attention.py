"""Attention of a token to the tokens before it: grouped-query attention and multi-head latent
attention.

Dims: B batch, S position, D embed. Scores and softmax are float32; the products run in the compute
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.errors import ModelError
from shardlib.functions.attention import attention
from shardlib.models.blocks.low_rank import adapted
from shardlib.models.blocks.parameters import Norm, constant, weight
from shardlib.models.blocks.rotary import Rotary, scores_scale
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import LatentAttention


@dataclass(frozen=True, kw_only=True)
class View:
    """What a layer sees.

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
            f"a sequence of {value.shape[1]} is no multiple of"
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
