"""What a plan with stages says of arrays at rest is what its program is given."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from tests.lowering import models


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"stage": 2, "fsdp": 2}, "zero": 3, "microbatches": 4},
        {"mesh": {"stage": 2, "data": 2}, "microbatches": 4},
        {"mesh": {"stage": 2, "fsdp": 2}, "zero": 2, "microbatches": 4},
    ],
    ids=str,
)
def test_every_stage_has_all_of_embedding_and_head(pin: dict[str, Any]) -> None:
    program = shardlib.compile(
        models.Transformer,
        models.transformer_loss,
        optax.adamw(1e-3),
        models.transformer_batch(16),
        topology="cpu:4",
        pin={**pin, "schedule": "1f1b", "gather": "use"},
    )
    held = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.state)
    )
    predicted = program.plan.estimate.device_bytes
    assert predicted.parameters + predicted.optimizer == pytest.approx(held, rel=0.01)
