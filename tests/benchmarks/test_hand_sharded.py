"""Does a planned program communicate as little as one sharded by hand with the same recipe?"""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from benchmarks.hand_transformer import make_mesh, prepared
from benchmarks.hlo_collectives import collectives, summary
from shardlib import models
from shardlib.models.config import TransformerConfig

CONFIG = TransformerConfig(
    name="small",
    vocab_size=64,
    layers=3,
    embed=32,
    heads=8,
    kv_heads=8,
    head_dim=8,
    mlp=64,
    max_seq=16,
    compute_dtype="float32",
)
#: What the hand-sharded program cuts.
RULES = [
    ("batch", ("data", "fsdp")),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
]
BATCH = {
    name: np.random.default_rng(seed).integers(0, 64, (8, 16)).astype(np.int32)
    for seed, name in enumerate(("inputs", "targets"))
}


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh",
    [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 4, 1), (1, 4, 2), (2, 2, 2)],
    ids=lambda mesh: "x".join(map(str, mesh)),
)
def test_no_more_collectives_and_bytes_than_by_hand(mesh: tuple[int, int, int]) -> None:
    init, loss = models.build(CONFIG)
    values = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(init(nnx.Rngs(0)), nnx.Param)))
    hand = prepared(CONFIG, make_mesh(*mesh), optax.adamw(1e-3), values, BATCH)
    by_hand = hand.compiled()
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    program = shardlib.compile(
        init,
        loss,
        optax.adamw(1e-3),
        BATCH,
        topology="cpu:8",
        pin={
            "mesh": sizes,
            "zero": 3 if sizes["fsdp"] > 1 else 0,
            "sequence_parallel": False,
            "microbatches": 1,
            "remat": "none",
            "rules": RULES,
        },
    )
    ours, theirs = (
        summary(collectives(compiled.as_text())) for compiled in (program.compiled(), by_hand)
    )
    for kind in (*theirs, *ours):
        for figure in ("count", "bytes", "wire_bytes"):
            assert ours.get(kind, {}).get(figure, 0) <= theirs.get(kind, {}).get(figure, 0), (
                kind,
                figure,
                ours,
                theirs,
            )
    _, metrics = program.step(program.init(0), BATCH)
    placed = jax.device_put(BATCH, dict.fromkeys(BATCH, hand.batch_sharding))
    assert float(metrics["loss"]) == pytest.approx(
        float(by_hand(hand.params, hand.opt_state, placed)[2]), rel=1e-5
    )
