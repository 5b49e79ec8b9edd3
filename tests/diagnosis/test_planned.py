"""Every collective of small programs of the planner's own is planned or inherent."""

from __future__ import annotations

from dataclasses import replace

import optax
import pytest

import shardlib
from shardlib import models
from shardlib.diagnosis.diagnose import with_plan
from shardlib.models.config import Experts, TransformerConfig

pytestmark = pytest.mark.long
DENSE = TransformerConfig(
    name="dense", vocab_size=128, layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=192,
    max_seq=32,
)  # fmt: skip
MIXTURE = replace(DENSE, name="mixture", experts=Experts(count=4, per_token=2, mlp=64))
PROGRAMS = {
    "tensor": (DENSE, {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3}),
    "stages": (DENSE, {"mesh": {"stage": 2, "fsdp": 4}, "microbatches": 4}),
    "stages tensor": (
        replace(DENSE, layers=4),
        {
            "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
            "microbatches": 4,
            "zero": 2,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "remat": "dots",
            "sequence_parallel": True,
            "rules": [
                ["batch", ["fsdp"]],
                ["vocab", ["tensor"]],
                ["mlp", ["tensor"]],
                ["kv_heads", ["tensor"]],
                ["seq", ["tensor"]],
            ],
        },
    ),
    "experts": (MIXTURE, {"mesh": {"fsdp": 2, "expert": 4}}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_unexplained(name: str) -> None:
    config, pin = PROGRAMS[name]
    init, loss = models.build(config)
    program = shardlib.compile(
        init, loss, optax.adamw(1e-3), models.example_batch(config, 32, 32), topology="cpu:8",
        pin=pin,
    )  # fmt: skip
    found = shardlib.why(
        program.step_function(), program.state, program.batch, topology="cpu:8", cures=0
    )
    plan, noise = program.plan, 1e-3 * found.communication.wire_bytes
    rows = [row for row in with_plan(found, plan).unexplained if row.bytes > noise]
    assert [f"{row.kind} {row.reason}" for row in rows] == []
    lookups = [row for row in found.rows if row.source.operation.primitive == "scatter-add"]
    assert all(row.source.user for row in lookups) and (lookups or name != "stages tensor")
    number = next(n for n, row in enumerate(with_plan(found, plan).rows) if row.cause == "planned")
    row = with_plan(replace(found, cured={number: 0}), plan).rows[number]
    assert (row.cause, row.inherent) == ("planned", False)
    nothing = replace(plan, estimate=replace(plan.estimate, collectives=()))
    assert with_plan(found, nothing).unexplained
    half = replace(plan.estimate, collectives=plan.estimate.collectives[::2])
    assert with_plan(found, replace(plan, estimate=half)).unexplained
