"""Layers that rematerialise nothing keep what matmuls gather along the sequence as it was before,
sharded; the numbers stay those of one device.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.models.config import TransformerConfig

CONFIG = TransformerConfig(
    name="dense",
    vocab_size=64,
    layers=6,
    embed=48,
    heads=4,
    kv_heads=4,
    head_dim=8,
    mlp=64,
    compute_dtype="float32",
)
BATCH, SEQ = 8, 32
RULES = {"batch": ["data", "fsdp"], "mlp": ["tensor"], "seq": ["tensor"]}
#: Policy, how many layers follow it (0 is all), layers that keep everything.
CASES = [("none", 0, 6), ("dots", 2, 4), ("full", 3, 3)]


def program(topology, pin):
    init, loss = models.build(CONFIG)
    batch = models.example_batch(CONFIG, BATCH, SEQ)
    return shardlib.compile(init, loss, optax.sgd(0.5), batch, topology=topology, pin=pin)


def step(made):
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(0, CONFIG.vocab_size, (BATCH, SEQ)).astype(np.int32)
        for name in ("inputs", "targets")
    }
    state, metrics = made.step(made.init(0), batch)
    return float(metrics["loss"]), jax.tree.leaves(state.params)


@pytest.fixture(scope="module")
def reference():
    return step(program("cpu:1", {"remat": "none", "attention": "traced"}))


@pytest.mark.long
@pytest.mark.parametrize(("remat", "some", "keeping"), CASES)
def test_nothing_gathered_along_the_sequence_is_kept(reference, remat, some, keeping):
    mesh = {"fsdp": 2, "tensor": 4}
    pin = {"mesh": mesh, "zero": 3, "microbatches": 1, "rules": RULES, "attention": "blocks"}
    made = program("cpu:8", {**pin, "remat": remat, "remat_layers": some})
    loss, params = step(made)
    assert loss == pytest.approx(reference[0], rel=1e-5)
    for one, wanted in zip(params, reference[1], strict=True):
        np.testing.assert_allclose(one, wanted, rtol=2e-4, atol=2e-5)
    text = made.lower().compile().as_text()
    assert f"f32[{keeping},{BATCH // 2},{SEQ // 4},{CONFIG.embed}]" in text
    assert f"f32[{keeping},{BATCH // 2},{SEQ},{CONFIG.embed}]" not in text
