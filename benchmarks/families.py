"""Models of families that nothing in shardlib was tuned to, small in depth and with real widths.

Each is a function of (batch size, sequence length) that returns what `shardlib.verify` takes:
projections that are fused and split again, convolution into patches, a recurrence, and presets with
few layers. Every preset stands there whole, too, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.compiling import inputs
from benchmarks.environment import card
from shardlib import models
from shardlib.models.config import EncoderDecoderConfig, Experts, TransformerConfig

Given = dict[str, Any]
DTYPE = jnp.bfloat16
LAYERS = 2


def _weight(rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str, ...]) -> nnx.Param[Any]:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02, out_sharding=names)


def _used(weight: nnx.Param[Any]) -> jax.Array:
    return weight[...].astype(DTYPE)


def _normed(x: jax.Array, scale: nnx.Param[Any]) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale[...]).astype(DTYPE)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions by halves (arXiv:2104.09864) on [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 1e4 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None].astype(DTYPE), jnp.cos(angles)[:, None].astype(DTYPE)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attended(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


def _language_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), targets
    ).mean()


class FusedBlock(nnx.Module):
    """One kernel for queries, keys and values, one for gate and up; both are split by columns."""

    def __init__(self, rngs: nnx.Rngs, embed: int, heads: int, kv_heads: int, mlp: int):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, embed // heads
        columns = (heads + 2 * kv_heads) * self.head_dim
        self.before = nnx.Param(jnp.ones(embed), out_sharding=("embed",))
        self.qkv = _weight(rngs, (embed, columns), ("embed", "heads"))
        self.out = _weight(rngs, (heads * self.head_dim, embed), ("heads", "embed"))
        self.between = nnx.Param(jnp.ones(embed), out_sharding=("embed",))
        self.gate_up = _weight(rngs, (embed, 2 * mlp), ("embed", "mlp"))
        self.down = _weight(rngs, (mlp, embed), ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = jnp.split(_normed(x, self.before) @ _used(self.qkv), (wide, wide + narrow), -1)
        q, k, v = (one.reshape(*one.shape[:2], -1, self.head_dim) for one in (q, k, v))
        mixed = _attended(_rotated(q), _rotated(k), v, causal=True)
        x = x + mixed.reshape(*x.shape[:2], -1) @ _used(self.out)
        gate, up = jnp.split(_normed(x, self.between) @ _used(self.gate_up), 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ _used(self.down)


class FusedDecoder(nnx.Module):
    """Token ids to logits."""

    def __init__(
        self, rngs: nnx.Rngs, *, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int
    ):
        self.embedding = _weight(rngs, (vocab, embed), ("vocab", "embed"))
        self.blocks = nnx.List(
            [FusedBlock(rngs, embed, heads, kv_heads, mlp) for _ in range(LAYERS)]
        )
        self.norm = nnx.Param(jnp.ones(embed), out_sharding=("embed",))
        self.head = _weight(rngs, (embed, vocab), ("embed", "vocab"))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = _used(self.embedding)[ids]
        for block in self.blocks:
            x = block(x)
        return _normed(x, self.norm) @ _used(self.head)


class ImageBlock(nnx.Module):
    """Attention without a mask, then GELU."""

    def __init__(self, rngs: nnx.Rngs, embed: int, heads: int, mlp: int):
        self.before = nnx.Param(jnp.ones(embed), out_sharding=("embed",))
        names = ("embed", "heads", "head_dim")
        self.q, self.k, self.v = (
            _weight(rngs, (embed, heads, embed // heads), names) for _ in range(3)
        )
        self.out = _weight(rngs, (heads, embed // heads, embed), ("heads", "head_dim", "embed"))
        self.between = nnx.Param(jnp.ones(embed), out_sharding=("embed",))
        self.up = _weight(rngs, (embed, mlp), ("embed", "mlp"))
        self.down = _weight(rngs, (mlp, embed), ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = _normed(x, self.before)
        q, k, v = (jnp.einsum("bse,ehd->bshd", y, _used(one)) for one in (self.q, self.k, self.v))
        x = x + jnp.einsum("bshd,hde->bse", _attended(q, k, v, causal=False), _used(self.out))
        return x + jax.nn.gelu(_normed(x, self.between) @ _used(self.up)) @ _used(self.down)


class VisionTransformer(nnx.Module):
    """Images to classes by patches (arXiv:2010.11929), pooled by the mean."""

    def __init__(self, rngs: nnx.Rngs, *, embed: int, heads: int, mlp: int, patch: int, side: int):
        self.patch = patch
        self.kernel = _weight(
            rngs, (patch, patch, 3, embed), ("height", "width", "channel", "embed")
        )
        self.positions = _weight(rngs, (side * side, embed), ("seq", "embed"))
        self.blocks = nnx.List([ImageBlock(rngs, embed, heads, mlp) for _ in range(LAYERS)])
        self.norm = nnx.Param(jnp.ones(embed), out_sharding=("embed",))
        self.head = _weight(rngs, (embed, 1000), ("embed", "classes"))

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            images.astype(DTYPE),
            _used(self.kernel),
            (self.patch, self.patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + _used(self.positions)
        for block in self.blocks:
            x = block(x)
        return _normed(x, self.norm).mean(axis=1) @ _used(self.head)


class Recurrent(nnx.Module):
    """Two layers of LSTM (Hochreiter and Schmidhuber 1997), whose four gates are one kernel."""

    def __init__(self, rngs: nnx.Rngs, *, embed: int, state: int, vocab: int):
        self.embedding = _weight(rngs, (vocab, embed), ("vocab", "embed"))
        self.inputs = nnx.List(
            [_weight(rngs, (wide, 4 * state), ("embed", "state")) for wide in (embed, state)]
        )
        self.recurrent = nnx.List(
            [_weight(rngs, (state, 4 * state), ("state_in", "state")) for _ in range(2)]
        )
        self.head = _weight(rngs, (state, vocab), ("embed", "vocab"))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = _used(self.embedding)[ids]
        for kernel, recurrent in zip(self.inputs, self.recurrent, strict=True):
            x = _layer(x @ _used(kernel), _used(recurrent))
        return x @ _used(self.head)


def _layer(drive: jax.Array, recurrent: jax.Array) -> jax.Array:
    def step(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> Any:
        hidden, cell = carry
        i, f, g, o = jnp.split(now + hidden @ recurrent, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((drive.shape[0], recurrent.shape[0]), DTYPE)
    _, states = jax.lax.scan(step, (zeros, zeros), jnp.swapaxes(drive, 0, 1))
    return jnp.swapaxes(states, 0, 1)


def _ids(batch: int, seq: int) -> dict[str, Any]:
    ids = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return {"inputs": ids, "targets": ids}


def _module(build: Callable[[nnx.Rngs], nnx.Module], name: str) -> Callable[[int, int], Given]:
    return lambda batch, seq: {
        "init": build,
        "loss": lambda model, given: _language_loss(model(given["inputs"]), given["targets"]),
        "optimizer": optax.adamw(1e-3),
        "batch": _ids(batch, seq),
        "name": name,
    }


def _vision(batch: int, seq: int) -> Given:
    side = int(seq**0.5)
    image = jax.ShapeDtypeStruct((batch, side * 16, side * 16, 3), jnp.float32)
    return {
        "init": lambda rngs: VisionTransformer(
            rngs, embed=1024, heads=16, mlp=4096, patch=16, side=side
        ),
        "loss": lambda model, given: _language_loss(model(given["images"]), given["labels"]),
        "optimizer": optax.adamw(1e-3),
        "batch": {"images": image, "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)},
        "batch_axes": {"images": ("batch", "height", "width", "channel"), "labels": ("batch",)},
        "name": "vision",
    }


def _config(config: TransformerConfig | EncoderDecoderConfig) -> Callable[[int, int], Given]:
    return lambda batch, seq: inputs(config, batch, seq, optax.adamw(1e-3))


_DENSE = card("dense")
_GPT = card("gpt")
_GEMMA = card("gemma")
_T5 = EncoderDecoderConfig(
    name="t5",
    vocab_size=32128,
    encoder_layers=2 * LAYERS,
    decoder_layers=2 * LAYERS,
    embed=1024,
    heads=16,
    head_dim=64,
    mlp=4096,
    gated=True,
    activation="gelu_tanh",
    tied=False,
    max_seq=4096,
)
_MIXTRAL = replace(
    _DENSE, name="mixtral", experts=Experts(count=8, per_token=2, mlp=3584, balance=0.02)
)
_DEEPSEEK = card("deepseek")

#: Name -> (batch, sequence) -> what `shardlib.verify` takes.
FAMILIES: Mapping[str, Callable[[int, int], Given]] = {
    **{name: _config(config) for name, config in models.PRESETS.items()},
    **{config.name: _config(config) for config in (_DENSE, _GPT, _GEMMA, _T5, _MIXTRAL, _DEEPSEEK)},
    "fused": _module(
        lambda rngs: FusedDecoder(rngs, embed=2048, heads=16, kv_heads=4, mlp=5632, vocab=32000),
        "fused",
    ),
    "lstm": _module(lambda rngs: Recurrent(rngs, embed=1024, state=2048, vocab=32000), "lstm"),
    "vision": _vision,
}
