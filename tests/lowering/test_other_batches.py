"""Batches of other arrays than those that a program was compiled for."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from shardlib.errors import BatchError
from shardlib.lowering.program import Program
from tests.lowering.test_traps import mlp_program

ARRAY = np.zeros((16, 16), np.float32)


@pytest.fixture(scope="module")
def program() -> Program:
    return mlp_program({"data": 2})


def test_what_is_missing_and_what_is_too_much_is_named(program: Program):
    state = program.init(0)
    with pytest.raises(BatchError) as caught:
        program.step(state, {"x": ARRAY, "labels": ARRAY, "more": [ARRAY]})
    assert (
        str(caught.value) == "the batch is not the one that the program was compiled for:\n"
        "  - batch.y is missing, float32[16, 16]\n"
        "  - batch.labels is too much\n"
        "  - batch.more.0 is too much\n"
        "Try: give the step the arrays that the program was compiled for, or compile again for"
        " these"
    )


def test_an_array_alone_and_nothing_are_other_batches(program: Program):
    with pytest.raises(BatchError, match=r"batch.x is missing.*\n.*batch.y is missing"):
        program.put({"x": None})
    with pytest.raises(BatchError, match="batch is too much"):
        program.put(ARRAY)


def test_other_containers_of_the_same_names_are_shown(program: Program):
    with pytest.raises(
        BatchError, match=r"it is CustomNode\(.*\), compiled for \{'x': \*, 'y': \*\}"
    ):
        program.put(collections.OrderedDict(x=ARRAY, y=ARRAY))


def test_of_many_arrays_some_are_named(program: Program):
    with pytest.raises(BatchError, match=r"more\.9 is too much") as caught:
        program.put({"more": [ARRAY] * 1000})
    assert str(caught.value).count("too much") == 18 and "  - 982 more" in str(caught.value)
