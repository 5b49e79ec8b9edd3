"""A Flax Linen decoder: `nn.scan` over recomputed layers, logical names on parameters and on
activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import shardlib
from tests.zoo.case import VOCAB, Case, cross_entropy, tokens

LAYERS, EMBED, HEADS, HEAD_DIM, MLP = 4, 32, 8, 8, 64


class Named(nn.Module):
    """What the modules below share: initialisers and activation constraints that carry names only
    when annotated.
    """

    annotated: bool

    def weight(
        self, name: str, shape: tuple[int, ...], names: tuple[str, ...], fan_in: int
    ) -> jax.Array:
        """A normally distributed parameter of variance 1 / fan_in."""
        init: Callable[..., Any] = nn.initializers.normal(fan_in**-0.5)
        return self.param(
            name, nn.with_logical_partitioning(init, names) if self.annotated else init, shape
        )

    def pinned(self, x: jax.Array, *names: str) -> jax.Array:
        """The activation with its names; Linen ignores them where no rules are in force."""
        return nn.with_logical_constraint(x, names) if self.annotated else x


class Layer(Named):
    """Attention and MLP with pre-norm, in the form that `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        q, k, v = (
            jnp.einsum(
                "bse,ehd->bshd",
                y,
                self.weight(name, (EMBED, HEADS, HEAD_DIM), ("embed", "heads", "head_dim"), EMBED),
            )
            for name in "qkv"
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
        weights = nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30))
        mixed = self.pinned(
            jnp.einsum("bhqk,bkhd->bqhd", weights, v), "batch", "seq", "heads", "head_dim"
        )
        x = x + jnp.einsum(
            "bshd,hde->bse",
            mixed,
            self.weight(
                "o", (HEADS, HEAD_DIM, EMBED), ("heads", "head_dim", "embed"), HEADS * HEAD_DIM
            ),
        )
        y = nn.gelu(nn.LayerNorm()(x) @ self.weight("up", (EMBED, MLP), ("embed", "mlp"), EMBED))
        x = x + self.pinned(y, "batch", "seq", "mlp") @ self.weight(
            "down", (MLP, EMBED), ("mlp", "embed"), MLP
        )
        return self.pinned(x, "batch", "seq", "embed"), None


class LinenDecoder(Named):
    """[batch, seq] token ids -> [batch, seq, vocab] logits."""

    layers: int = LAYERS

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.weight("embedding", (VOCAB, EMBED), ("vocab", "embed"), EMBED)[ids]
        stack = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = stack(annotated=self.annotated, name="layers")(x, None)
        return nn.LayerNorm()(x) @ self.weight("head", (EMBED, VOCAB), ("embed", "vocab"), EMBED)


def case(*, annotated: bool, layers: int = LAYERS) -> Case:
    """A language model on random tokens."""
    module, batch = (
        LinenDecoder(annotated=annotated, layers=layers),
        {
            "inputs": tokens(5),
            "targets": tokens(6),
        },
    )

    def apply(params: Any, batch: Any) -> jax.Array:
        return module.apply({"params": params}, batch["inputs"])  # type: ignore[return-value]

    def error(logits: jax.Array, batch: Any) -> jax.Array:
        return cross_entropy(logits, batch["targets"])

    def build(seed: int) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
        return nn.meta.unbox(module.init(jax.random.key(seed), batch["inputs"]))["params"], apply

    return Case(
        name=f"linen-decoder-{'annotated' if annotated else 'unannotated'}",
        init=shardlib.linen(module, batch["inputs"]),
        loss=lambda params, batch: error(apply(params, batch), batch),
        batch=batch,
        batch_axes={"inputs": ("batch", "seq"), "targets": ("batch", "seq")} if annotated else None,
        annotated=annotated,
        build=build,
        error=error,
    )


CASES = (case(annotated=True), case(annotated=False))
