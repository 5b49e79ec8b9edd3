"""Attention whose sequence, or width of heads, is sharded over tensor outside shards its heads
inside: no device computes what another one does, what moves is what the plan lists, and layers that
rematerialise nothing keep what is gathered along the sequence as it was before.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest

from shardlib import models
from shardlib.verification.traffic import read_traffic
from tests.lowering.steps import DENSE, ROWS, SEQ, equal, token_batch, trained

CONFIG = replace(DENSE, embed=32, heads=8, kv_heads=4, mlp=64)
KEPT = replace(DENSE, layers=6, embed=48, kv_heads=4, mlp=64)
SEQUENCE = {"batch": ["data", "fsdp"], "seq": ["tensor"]}
FEATURES = {**SEQUENCE, "mlp": ["tensor"]}
WIDTH = {**SEQUENCE, "head_dim": ["tensor"]}
#: Heads of queries, heads of keys, what tensor shards, remat policy.
CASES = [
    (8, 4, SEQUENCE, "none"),  # heads of both are shared out
    (8, 4, SEQUENCE, "full"),
    (8, 8, SEQUENCE, "dots"),
    (8, 2, SEQUENCE, "none"),  # twice as many devices as heads of keys
    (6, 3, SEQUENCE, "full"),  # four devices cannot share out six heads
    (8, 2, WIDTH, "none"),
]


def step(config, topology, pin):
    """((loss, parameters), program) after a step."""
    return trained(*models.build(config), token_batch(), topology, pin, rate=0.5)


def sharded(config, rules, remat, **more):
    pin = {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 3, "microbatches": 1, "rules": rules}
    return step(config, "cpu:8", {**pin, "remat": remat, "attention": "blocks", **more})


def of_heads(heads, groups):
    return replace(CONFIG, heads=heads, kv_heads=groups)


@functools.cache
def reference(config):
    return step(config, "cpu:1", {"remat": "none", "attention": "traced"})[0]


def bytes_over_tensor(program):
    """(compiled, planned) bytes by kind, without sums: simulated devices all-reduce them."""
    compiled = read_traffic(program.compiled().as_text(), program.plan.mesh).found
    return tuple(map(moved, (compiled, program.plan.estimate.collectives)))


def moved(collectives):
    sizes = Counter()
    for item in collectives:
        if item.axes == ("tensor",) and item.kind not in ("all-reduce", "reduce-scatter"):
            sizes[item.kind] += item.bytes * item.count
    return sizes


@pytest.mark.long
@pytest.mark.parametrize(("heads", "groups", "rules", "remat"), CASES)
def test_a_step_is_that_of_one_device_and_moves_what_the_plan_lists(heads, groups, rules, remat):
    actual, program = sharded(of_heads(heads, groups), rules, remat)
    equal(actual, reference(of_heads(heads, groups)), 2e-4)
    if rules is SEQUENCE:
        compiled, planned = bytes_over_tensor(program)
        assert compiled == planned


@pytest.mark.long
def test_shared_heads_are_exchanged_and_nothing_is_gathered():
    _, program = sharded(of_heads(8, 4), SEQUENCE, "none")
    # Queries and results with their gradients, and keys and values of half as many heads; what the
    # backward pass needs of the results is kept as the plan has it, and not exchanged again.
    part = 4 * ROWS * SEQ * CONFIG.heads * CONFIG.head_dim // 8
    assert bytes_over_tensor(program)[0] == {"all-to-all": CONFIG.layers * part * (4 + 4 // 2)}


@pytest.mark.long
def test_no_product_is_gathered_along_keys_of_sharded_width():
    _, program = sharded(of_heads(8, 2), WIDTH, "none")
    compiled, planned = bytes_over_tensor(program)
    assert compiled["all-to-all"] == planned["all-to-all"]
    assert compiled["all-gather"] <= planned["all-gather"]
    assert set(compiled) == {"all-to-all", "all-gather"}  # no halves of heads sent to neighbours


@pytest.mark.long
def test_a_gather_serves_what_is_rematerialised_and_the_gradient_of_the_weight():
    _, program = sharded(of_heads(8, 4), {**FEATURES, "kv_heads": ["tensor"]}, "full")
    compiled, planned = bytes_over_tensor(program)
    # Forward, backward, and the cotangents of what is scattered; two matmuls in each of the layers.
    assert compiled == planned == {"all-gather": 3 * 2 * 2 * 4 * SEQ * 4 * CONFIG.embed}


@pytest.mark.long
@pytest.mark.parametrize("rules", [SEQUENCE, WIDTH], ids=["sequence", "width"])
def test_a_step_in_stages_is_that_of_one_device(rules):
    pin = {"mesh": {"stage": 2, "tensor": 4}, "schedule": "1f1b", "microbatches": 2, "zero": 0}
    equal(sharded(of_heads(8, 2), rules, "full", **pin)[0], reference(of_heads(8, 2)), 2e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("remat", "some", "keeping"), [("none", 0, 6), ("dots", 2, 4), ("full", 3, 3)]
)
def test_nothing_gathered_along_the_sequence_is_kept(remat, some, keeping):
    """`some` layers follow the policy (0 is all), `keeping` keep everything."""
    actual, program = sharded(KEPT, FEATURES, remat, remat_layers=some)
    equal(actual, reference(KEPT), 2e-4)
    text = program.compiled().as_text()
    assert f"f32[{keeping},{ROWS // 2},{SEQ // 4},{KEPT.embed}]" in text
    assert f"f32[{keeping},{ROWS // 2},{SEQ},{KEPT.embed}]" not in text
