"""Attention whose sequence, or width of heads, is sharded over tensor outside shards its heads
inside: no device computes what another one does, and what moves is what the plan lists.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.models.config import TransformerConfig
from shardlib.verification.traffic import read_traffic

CONFIG = TransformerConfig(
    name="dense",
    vocab_size=64,
    layers=2,
    embed=32,
    heads=8,
    kv_heads=4,
    head_dim=8,
    mlp=64,
    compute_dtype="float32",
)
SEQUENCE = {"batch": ["data", "fsdp"], "seq": ["tensor"]}
WIDTH = {"batch": ["data", "fsdp"], "head_dim": ["tensor"], "seq": ["tensor"]}
#: Heads of queries, heads of keys, what tensor shards, remat policy.
CASES = [
    (8, 4, SEQUENCE, "none"),  # heads of both are shared out
    (8, 4, SEQUENCE, "full"),
    (8, 8, SEQUENCE, "dots"),
    (8, 2, SEQUENCE, "none"),  # twice as many devices as heads of keys
    (6, 3, SEQUENCE, "full"),  # four devices cannot share out six heads
    (8, 2, WIDTH, "none"),
]


def batch(config):
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, config.vocab_size, (8, 32)).astype(np.int32)
        for name in ("inputs", "targets")
    }


def program(heads, groups, topology, pin):
    config = replace(CONFIG, heads=heads, kv_heads=groups)
    init, loss = models.build(config)
    made = shardlib.compile(
        init, loss, optax.sgd(0.5), models.example_batch(config, 8, 32), topology=topology, pin=pin
    )
    return made, batch(config)


def sharded(heads, groups, rules, remat):
    pin = {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 3, "microbatches": 1, "rules": rules}
    return program(heads, groups, "cpu:8", {**pin, "remat": remat, "attention": "blocks"})


def step(made, data):
    state, metrics = made.step(made.init(0), data)
    return float(metrics["loss"]), jax.tree.leaves(state.params)


@functools.cache
def reference(heads, groups):
    return step(*program(heads, groups, "cpu:1", {"remat": "none", "attention": "traced"}))


def bytes_over_tensor(found):
    """Bytes by kind, sums apart: on simulated devices they are all-reduced."""
    sizes = Counter()
    for item in found:
        if item.axes == ("tensor",) and item.kind not in ("all-reduce", "reduce-scatter"):
            sizes[item.kind] += item.bytes * item.count
    return sizes


@pytest.mark.long
@pytest.mark.parametrize(("heads", "groups", "rules", "remat"), CASES)
def test_a_step_is_that_of_one_device(heads, groups, rules, remat):
    loss, params = step(*sharded(heads, groups, rules, remat))
    true, wanted = reference(heads, groups)
    assert loss == pytest.approx(true, rel=1e-5)
    for found, one in zip(params, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(one), rtol=2e-4, atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize(("heads", "groups", "rules", "remat"), CASES[:5])
def test_what_moves_for_heads_is_what_the_plan_lists(heads, groups, rules, remat):
    made, _ = sharded(heads, groups, rules, remat)
    compiled = read_traffic(made.lower().compile().as_text(), made.plan.mesh).found
    assert bytes_over_tensor(compiled) == bytes_over_tensor(made.plan.estimate.collectives)


def test_shared_heads_are_exchanged_and_nothing_is_gathered():
    made, _ = sharded(8, 4, SEQUENCE, "none")
    found = read_traffic(made.lower().compile().as_text(), made.plan.mesh).found
    # Queries and results with their gradients, and keys and values of half as many heads; what the
    # backward pass needs of the results is kept as the plan has it, and not exchanged again.
    part = 4 * 8 * 32 * CONFIG.heads * CONFIG.head_dim // 8
    assert bytes_over_tensor(found) == {"all-to-all": CONFIG.layers * part * (4 + 4 // 2)}


def test_no_product_is_gathered_along_keys_of_sharded_width():
    made, _ = sharded(8, 2, WIDTH, "none")
    found = bytes_over_tensor(read_traffic(made.lower().compile().as_text(), made.plan.mesh).found)
    planned = bytes_over_tensor(made.plan.estimate.collectives)
    assert found["all-to-all"] == planned["all-to-all"]
    assert found["all-gather"] <= planned["all-gather"]
    assert set(found) == {"all-to-all", "all-gather"}  # no halves of heads sent to neighbours


@pytest.mark.long
def test_a_gather_serves_what_is_rematerialised_and_the_gradient_of_the_weight():
    rules = {"batch": ["data", "fsdp"], "mlp": ["tensor"], "kv_heads": ["tensor"]}
    made, _ = sharded(8, 4, {**rules, "seq": ["tensor"]}, "full")
    found = read_traffic(made.lower().compile().as_text(), made.plan.mesh).found
    assert bytes_over_tensor(found) == bytes_over_tensor(made.plan.estimate.collectives)
    # Forward, backward, and the cotangents of what is scattered; two matmuls in each of the layers.
    assert bytes_over_tensor(found) == {"all-gather": 3 * 2 * 2 * 4 * 32 * 4 * CONFIG.embed}


@pytest.mark.long
@pytest.mark.parametrize("rules", [SEQUENCE, WIDTH], ids=["sequence", "width"])
def test_a_step_in_stages_is_that_of_one_device(rules):
    pin = {"mesh": {"stage": 2, "tensor": 4}, "schedule": "1f1b", "microbatches": 2}
    how = {"remat": "full", "attention": "blocks", "rules": rules}
    loss, params = step(*program(8, 2, "cpu:8", {**pin, **how}))
    true, wanted = reference(8, 2)
    assert loss == pytest.approx(true, rel=1e-5)
    for found, one in zip(params, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(one), rtol=2e-4, atol=2e-6)
