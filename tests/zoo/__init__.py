"""Tiny models of every kind that shardlib must spread correctly; one file a model, `CASES` lists
them all.
"""

from __future__ import annotations

from tests.zoo import (
    decoder,
    decoder_scan,
    encoder_decoder,
    linen_transformer,
    mlp,
    recurrent,
    resnet,
    tree_model,
    vit,
)
from tests.zoo.case import BATCH, SEQ, VOCAB, Case, leaves_by_path

CASES: tuple[Case, ...] = (
    *mlp.CASES,
    *decoder.CASES,
    *decoder_scan.CASES,
    *encoder_decoder.CASES,
    *vit.CASES,
    *resnet.CASES,
    *recurrent.CASES,
    *linen_transformer.CASES,
    *tree_model.CASES,
)

__all__ = ["BATCH", "CASES", "SEQ", "VOCAB", "Case", "leaves_by_path"]
