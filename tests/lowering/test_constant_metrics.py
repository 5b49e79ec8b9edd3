"""Metrics that are numbers of Python are those numbers, however the batch is worked through."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from tests.lowering import small

NUMBERS = {"lr": 3.0, "on": True, "off": False, "count": 2, "half": np.float32(0.5)}
STAGES = {"mesh": {"stage": 2, "data": 2}, "microbatches": 4}


def loss(params, batch):
    return small.loss(params, batch), {**NUMBERS, "rows": batch["weight"].shape[0]}


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"data": 2}, "microbatches": 4},
        {"mesh": {"fsdp": 2}, "microbatches": 4, "zero": 3},
        STAGES,
        {**STAGES, "pipeline": "programs", "schedule": "1f1b"},
        {**STAGES, "pipeline": "programs", "schedule": "zero-bubble"},
    ],
    ids=["reduced once", "accumulated", "lockstep", "a program a stage", "zero bubble"],
)
def test_they_are_what_they_are(pin):
    program = small.program(optax.sgd(0.01), pin, loss)
    state = program.init(0)
    evaluated = program.evaluate(state, small.batch())
    _, stepped = program.step(state, small.batch())
    for metrics in (evaluated, stepped):
        assert {name: float(value) for name, value in metrics.items() if name != "loss"} == {
            **NUMBERS,
            "rows": 16,
        }
        assert [metrics[name].dtype.name for name in ("lr", "on", "count", "rows")] == [
            "float32",
            "bool",
            "int32",
            "int32",
        ]
