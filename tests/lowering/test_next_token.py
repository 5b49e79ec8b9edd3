"""A loss that slices inputs and targets from one array of tokens is sharded along its sequence like
one whose batch brings both, and computes the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardlib import Program
from shardlib.verification.traffic import read_traffic
from tests.lowering import models
from tests.lowering.steps import equal, trained

TOKENS = np.random.default_rng(0).integers(0, 32, (16, 9), dtype=np.int32)
WHOLE = {"tokens": TOKENS}
SPLIT = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def sliced_loss(model: models.Transformer, batch: dict[str, Any]) -> Any:
    tokens = batch["tokens"]
    return models.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def split_loss(model: models.Transformer, batch: dict[str, Any]) -> Any:
    return models.cross_entropy(model(batch["inputs"]), batch["targets"])


def sent(program: Program) -> Counter[tuple[str, tuple[str, ...]]]:
    """Bytes of the results of collectives by (kind, axes)."""
    compiled = read_traffic(program.compiled().as_text() or "", program.plan.mesh)
    result: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in compiled.collectives:
        result[collective.kind, collective.axes] += collective.bytes * collective.count
    return result


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"context": 2, "data": 2, "tensor": 2}},
        {"mesh": {"data": 2, "tensor": 4}, "sequence_parallel": True},
        {"mesh": {"stage": 4, "data": 2}, "microbatches": 4},
    ],
    ids=["context", "tensor", "stage"],
)
def test_tokens_that_the_loss_slices_are_sharded_like_those_of_a_batch(
    pin: dict[str, Any],
) -> None:
    actual, sliced = trained(models.Transformer, sliced_loss, WHOLE, "cpu:8", pin, rate=0.5)
    wanted, _ = trained(models.Transformer, sliced_loss, WHOLE, "cpu:1", {"mesh": {}}, rate=0.5)
    equal(actual, wanted)
    _, split = trained(models.Transformer, split_loss, SPLIT, "cpu:8", pin, steps=0)
    assert sliced.plan.rules == split.plan.rules
    more = sent(sliced) - sent(split)
    assert {kind for kind, _ in more} <= {"collective-permute"} and not sent(split) - sent(sliced)
    assert more.total() <= 2 * TOKENS.nbytes
