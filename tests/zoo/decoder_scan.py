"""The decoder with its layers stacked by `nnx.vmap` and run by `nnx.scan`, with recomputation of
each layer.
"""

from __future__ import annotations

import jax
from flax import nnx

from tests.zoo.case import VOCAB, param
from tests.zoo.decoder import EMBED, Block, case

LAYERS = 4


class ScannedDecoder(nnx.Module):
    """[batch, seq] token ids -> [batch, seq, vocab] logits."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.stacked_axis = "layers" if annotated else None
        stack = nnx.vmap(
            lambda rngs: Block(rngs, annotated=annotated),
            in_axes=0,
            out_axes=0,
            transform_metadata=self.metadata,
        )
        self.embedding = param(annotated, rngs, (VOCAB, EMBED), ("vocab", "embed"), EMBED)
        self.blocks = stack(rngs.split(LAYERS))
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = param(annotated, rngs, (EMBED, VOCAB), ("embed", "vocab"), EMBED)

    @property
    def metadata(self) -> dict[str, str]:
        """How Flax names the stacked dim."""
        return {nnx.PARTITION_NAME: self.stacked_axis} if self.stacked_axis else {}

    def __call__(self, ids: jax.Array) -> jax.Array:
        run = nnx.scan(
            nnx.remat(lambda block, x: block(x)),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata=self.metadata,
        )
        return self.norm(run(self.blocks, self.embedding[...][ids])) @ self.head[...]


CASES = (
    case("decoder-scan", lambda rngs: ScannedDecoder(rngs, annotated=True), annotated=True),
    case("decoder-scan", lambda rngs: ScannedDecoder(rngs, annotated=False), annotated=False),
)
