"""Does every model compute the same numbers on eight devices as on one?

Each case of the zoo runs under meshes, ZeRO stages and sequence settings that together cover every
pair of (case, mesh) that matters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.zoo import CASES, Case
from tests.zoo.parity import errors, run_sharded

#: Pins by name; each case gets half of them, its sibling with or without names the other half.
PINS: dict[str, dict[str, Any]] = {
    "data8": {"mesh": {"data": 8}},
    "fsdp4-tensor2": {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
    "data2-fsdp2-tensor2": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    "fsdp8": {"mesh": {"fsdp": 8}, "zero": 2},
    "tensor8": {"mesh": {"tensor": 8}},
    "planner": {},
}


def sample() -> list[Any]:
    """Cases with pins: the even half for one case, the odd half for the next."""
    return [
        pytest.param(case, PINS[pin], id=f"{case.name}-{pin}")
        for index, case in enumerate(CASES)
        for pin in list(PINS)[index % 2 :: 2]
    ]


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("case", "pin"), sample())
def test_sharded_equals_unsharded(case: Case, pin: dict[str, Any]) -> None:
    sharded = run_sharded(case, pin, place=bool(pin))
    # A bias on the keys shifts every score of a query alike, so the softmax does not see it.
    dead = {path for path, one in case.reference(0)[1].items() if np.abs(one).max() < 1e-6}
    assert all(path.endswith("key.bias") for path in dead), dead
    wrong = {
        path: error
        for path, error in errors(sharded.loss, sharded.gradients, case.reference(0)).items()
        if not error <= 1
    }
    assert not wrong, f"{sharded.plan.mesh}: {wrong}"
    for axis, size in pin.get("mesh", {}).items():
        assert sharded.plan.mesh[axis] == size


@pytest.mark.long
@pytest.mark.parametrize("stage", (2, 3))
def test_gradients_of_convolutions_cut_over_three_axes(stage: int) -> None:
    """A kernel gradient in pieces over tensor and fsdp, from a batch that a third axis cuts, once
    came out wrong.
    """
    case = next(case for case in CASES if case.name == "resnet-groupnorm-annotated")
    pin = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": stage, "sequence_parallel": False}
    sharded = run_sharded(case, pin, devices=8, place=True)
    assert max(errors(sharded.loss, sharded.gradients, case.reference(0)).values()) <= 1
