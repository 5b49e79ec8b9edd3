"""A reference transformer with low-rank adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flax import nnx

from shardlib.models.blocks.layers import Block
from shardlib.models.blocks.low_rank import MATRICES, LowRank
from shardlib.models.transformer import Transformer


def add_low_rank(
    model: Transformer, rank: int, matrices: Collection[str], rngs: nnx.Rngs
) -> Transformer:
    """Gives some matrices of a transformer an adapter, in all layers that have them."""
    for block in blocks(model):
        for place, matrix_dims in MATRICES.items():
            module = getattr(block, place, None)
            for name, dims in matrix_dims.items():
                if name in matrices and hasattr(module, name):
                    low = LowRank(getattr(module, name), dims, rank, rngs)
                    setattr(module, f"{name}_lora", low)
    return model


def blocks(model: Transformer) -> Iterator[Block]:
    """The stacked blocks of a transformer."""
    for stack in (getattr(model, "dense_layers", None), model.layers):
        if stack is not None:
            yield from getattr(stack, "blocks", [stack])
