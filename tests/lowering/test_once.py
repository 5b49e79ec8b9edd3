"""Gradients of several microbatches are those of the whole batch on one device, and are reduced
once per step.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardlib.verification.traffic import read_traffic
from tests.lowering import small
from tests.zoo import CASES
from tests.zoo.parity import capture, errors, relative_errors, run_sharded

MESHES = ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2})
KINDS = [
    case
    for case in CASES
    if case.name
    in (
        "decoder-annotated",
        "decoder-scan-annotated",
        "vit-unannotated",
        "encoder-decoder-annotated",
    )
]


@pytest.mark.parametrize("remat", ("none", "full", "dots"))
@pytest.mark.parametrize(("mesh", "zero"), [(MESHES[0], 0), (MESHES[1], 1)], ids=str)
def test_gradients_are_those_of_one_device(mesh, zero, remat):
    program = small.program(
        capture(), {"mesh": mesh, "zero": zero, "microbatches": 2, "remat": remat}
    )
    assert max(relative_errors(program, small.loss, small.batch()).values()) <= 1e-5


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_every_kind_of_model_has_the_gradients_of_one_device(case):
    found = run_sharded(case, {"mesh": MESHES[1], "zero": 1, "microbatches": 2}, place=True)
    assert max(errors(found.loss, found.gradients, case.reference(0)).values()) <= 1


def test_several_microbatches_send_no_more_than_one():
    """The compiler's own listing of what crosses between devices in a step; only the small arrays
    that no matmul uses may go every time.
    """
    sent = []
    for microbatches in (1, 2):
        program = small.program(
            capture(), {"mesh": {"data": 8}, "zero": 0, "microbatches": microbatches}
        )
        sent.append(
            sum(
                one.total_bytes
                for one in read_traffic(program.compiled().as_text(), program.plan.mesh).collectives
                if one.kind == "all-reduce"
            )
        )
    weights, others = (
        sum(np.prod(small.values()[name].shape) * 4 for name in names)
        for names in (("table", "up", "down"), ("scale", "parts"))
    )
    assert (
        weights <= sent[0] <= 2 * weights + others + 64
    )  # the tied table is reduced for each of its uses
    assert sent[1] <= sent[0] + small.values()["table"].size * 4 + others + 64, sent
