"""A marked loss in which rows of the batch meet keeps the batch in one piece, and nothing else is
closed to it.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

import shardlib
from shardlib.errors import PinError
from tests.frontend.marked import in_batch
from tests.frontend.test_equal import plain
from tests.frontend.test_marked import STEPS, require_near

PINS: dict[str, dict[str, Any]] = {
    "fsdp8-zero3": {"mesh": {"fsdp": 8}, "zero": 3},
    "all-zero2-remat": {
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "zero": 2,
        "remat": "full",
    },
    "data2-tensor4": {"mesh": {"data": 2, "tensor": 4}},
}


def compiled(pin: dict[str, Any]) -> Any:
    example = in_batch()
    return shardlib.compile_step(
        example.init, example.step, example.batch, topology="cpu:8", pin=pin
    )


@pytest.mark.matrix
@pytest.mark.parametrize("pin", PINS)
def test_negatives_of_the_whole_batch_are_those_of_one_device(pin: str):
    theirs = in_batch(jax.value_and_grad)
    program = compiled(PINS[pin])
    mine, wanted = program.init(seed=3), jax.jit(theirs.init)(jax.random.key(3))
    step = jax.jit(theirs.step)
    for _ in range(STEPS):
        mine, found = program.step(mine, theirs.batch)
        wanted, metrics = step(wanted, theirs.batch)
        require_near((mine, found), plain((wanted, metrics)))


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_are_refused_where_rows_meet(parts: int):
    said = (
        f"{parts} microbatches would change the numbers.*the loss: rows meet other rows"
        r" \(dot_general at marked.py"
    )
    with pytest.raises(PinError, match=said):
        compiled({"mesh": {"data": 2}, "microbatches": parts})


def test_what_is_planned_freely_has_one_microbatch():
    plan = compiled({}).plan
    assert plan.microbatches == 1
    with pytest.raises(PinError, match="rows meet other rows"):
        plan.why_not(microbatches=2)
