"""Layers of a decoder: blocks of attention and feed-forward, and groups of blocks that repeat."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from shardlib.models.blocks.attention import View, make_attention
from shardlib.models.blocks.feedforward import FeedForward, MixtureOfExperts, Terms
from shardlib.models.blocks.parameters import Norm
from shardlib.models.config import TransformerConfig


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
