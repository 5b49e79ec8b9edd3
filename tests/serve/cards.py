"""Model cards of the tests."""

from __future__ import annotations


def card(*, vocab: int, layers: int, most: int = 64) -> str:
    """The card of a tiny transformer in float32.

    Args:
        vocab: tokens of its vocabulary.
        layers: of it.
        most: tokens that it looks at.
    """
    return f"""
name = "tiny"
vocab_size = {vocab}
layers = {layers}
embed = 16
heads = 2
kv_heads = 1
head_dim = 8
mlp = 32
max_seq = {most}
compute_dtype = "float32"
"""
