"""Laws of well-formed graphs: each is broken once, and said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlib.graph import Graph, Region, check
from tests.graph.graphs import array, loop, one_op, op

ROOT = Region(parent=-1, kind="root")


def test_well_formed_graphs() -> None:
    check(one_op())
    check(loop())


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (one_op(inputs=()), "exp at 0 reads value 0 before it is defined"),
        (one_op(ops=()), "output value 1 is not defined"),
        (one_op(ops=one_op().ops * 2), "exp at 0 defines value 1 a second time"),
        (
            one_op(values=(*one_op().values[:1], array(8))),
            "exp at 0, result 0: dim 0 has size 8, its factors make 4",
        ),
        (
            one_op(values=(*one_op().values[:1], array(4, 1))),
            "exp at 0, result 0: rank 2 has 1 dims in the rule",
        ),
        (one_op(regions=(ROOT, Region(parent=3, kind="scan"))), "region 1 has parent 3"),
        (one_op(regions=(ROOT, Region(parent=0, kind="scan", trips=-1))), "region 1 runs -1 times"),
        (one_op(ops=(replace(one_op().ops[0], region=2),)), "exp at 0 is in region 2 of 1"),
        (
            one_op(ops=(replace(one_op().ops[0], operands=(0, 0)),)),
            "exp at 0 has 2 operands, its rule 1",
        ),
        (loop(outputs=(6,)), "output value 6 is not defined in the root region"),
    ],
)
def test_check_finds_what_is_wrong(graph: Graph, message: str) -> None:
    with pytest.raises(AssertionError, match="the graph is not well formed") as error:
        check(graph)
    assert message in str(error.value)


def test_what_a_loop_makes_is_read_outside_through_a_boundary_only() -> None:
    graph = loop()
    with pytest.raises(AssertionError, match="tanh at 1 of region 0 reads value 8 of region 1"):
        check(
            replace(
                graph,
                values=(*graph.values, array(4)),
                ops=(*graph.ops, op("tanh", (8,), 11, "1", region=0)),
            )
        )


def test_every_broken_law_is_listed() -> None:
    with pytest.raises(AssertionError) as error:
        check(one_op(inputs=(), regions=(ROOT, Region(parent=3, kind="scan"))))
    assert len(str(error.value).split("\n  - ")) == 3
