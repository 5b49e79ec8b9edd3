"""What a graph says of itself: sizes, how often a region runs, who makes a value; its text."""

from __future__ import annotations

import pytest

from shardlib.graph import Op, Region, Value, text
from tests.graph.graphs import SAME, loop, one_op

LOOP = """\
%0 float32[3, 4] weights (parameter)
%1 float32[4] x (batch)
%2 float32[4] y (batch)
scan x 3
  %3 float32[4] = carry %1 | [a] -> [a] where a=4
  %4 float32[4] = carry %2 | [a] -> [a] where a=4
  %5 float32[4] = enter %0 | [a b] -> [b] where a=3 b=4, whole a
  %6 float32[4] = mul %3 %5 | [a] [a] -> [a] where a=4 | 4 flops
  %7 float32[4] = add %4 %4 | [a] [a] -> [a] where a=4 | 4 flops
  %8 float32[4] = exp %6 | [a] -> [a] where a=4 | 4 flops
  %9 float32[4] = carry %3 %6 | [a] [a] -> [a] where a=4
  %10 float32[4] = carry %4 %7 | [a] [a] -> [a] where a=4
return %9"""


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bool", 1), ("bfloat16", 2), ("float32", 4), ("complex128", 16), ("key", 4)],
)
def test_bytes_of_a_value(dtype: str, size: int) -> None:
    assert (Value(shape=(3, 5), dtype=dtype).bytes, Value(shape=(), dtype=dtype).bytes) == (
        15 * size,
        size,
    )


def test_regions_run_as_often_as_those_around_them() -> None:
    graph = one_op(
        regions=(
            Region(parent=-1, kind="root"),
            Region(parent=0, kind="scan", trips=3),
            Region(parent=1, kind="while", trips=5),
            Region(parent=0, kind="branch", trips=0),
        )
    )
    assert [graph.trips(region) for region in range(4)] == [1, 3, 15, 0]


def test_flops_count_every_run() -> None:
    assert loop().flops == 3 * (4 + 4 + 4) and one_op().flops == 0


def test_who_makes_and_who_brings_a_value() -> None:
    graph = loop()
    assert graph.producers() == {value: value - 3 for value in range(3, 11)}
    assert list(graph.inputs_of("batch")) == [1, 2]
    assert list(graph.inputs_of("parameter")) == [0]
    assert list(graph.inputs_of("state")) == []
    assert (graph.ops[3].value(False, 1), graph.ops[3].value(True, 0)) == (5, 6)


def test_an_operation_has_a_known_category() -> None:
    with pytest.raises(AssertionError, match="magic"):
        Op(kind="exp", operands=(0,), results=(1,), rule=SAME, category="magic")


def test_text() -> None:
    assert text(loop()) == LOOP
