"""What a plan with stages says of arrays at rest is what its program is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib import _jax_compat
from shardlib import models as transformers
from shardlib.models.config import TransformerConfig
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


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner ones among them."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def test_what_chunks_gather_and_sum_up_is_written_layer_by_layer() -> None:
    """Written slot by slot, XLA for GPUs keeps zeros and copies of whole slots beside it."""
    config = TransformerConfig(
        name="twelve",
        vocab_size=64,
        layers=12,
        embed=32,
        heads=2,
        kv_heads=2,
        head_dim=16,
        mlp=48,
        max_seq=16,
    )
    init, loss = transformers.build(config)
    program = shardlib.compile(
        init,
        loss,
        optax.adamw(1e-3),
        transformers.example_batch(config, 8, 16),
        topology="cpu:4",
        pin={
            "mesh": {"stage": 2, "fsdp": 2},
            "zero": 3,
            "microbatches": 4,
            "schedule": "gpipe",
            "virtual_stages": 3,
            "gather": "once",
            "remat": "full",
        },
    )
    with _jax_compat.in_mesh(program.mesh):
        step = jax.make_jaxpr(program.step_function())(program.state, program.batch)
    window, layers, fsdp, matrix = 2, 2, 2, (32, 48)
    rooms = {(window, layers, *matrix), (window, layers, fsdp, *matrix)}
    written = {
        equation.invars[1].aval.shape
        for equation in _equations(step.jaxpr)
        if equation.primitive.name == "dynamic_update_slice"
        and equation.invars[0].aval.shape in rooms
    }
    assert written == {(1, 1, *matrix), (1, 1, fsdp, *matrix)}
