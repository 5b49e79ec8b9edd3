"""Graphs: laws of well-formed ones, what they say of themselves, what pruning drops, and rules of
how dims hang together.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlib.graph import (
    Dependence,
    FactorRule,
    Graph,
    Op,
    Region,
    Rows,
    Value,
    check,
    opaque,
    prune,
)
from tests.graph.graphs import SAME, array, loop, one_op, op

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


@pytest.mark.parametrize(
    ("outputs", "kept"),
    [
        ((9,), ["0/carry/0", "0/enter/0", "0/body/0", "0/final/0"]),
        ((10,), ["0/carry/1", "0/body/1", "0/final/1"]),
        (
            (9, 10),
            [
                "0/carry/0",
                "0/carry/1",
                "0/enter/0",
                "0/body/0",
                "0/body/1",
                "0/final/0",
                "0/final/1",
            ],
        ),
        ((1,), []),
    ],
)
def test_a_carry_stays_with_what_the_body_makes_of_it(
    outputs: tuple[int, ...], kept: list[str]
) -> None:
    pruned = prune(loop(outputs))
    check(pruned)
    assert [op.path for op in pruned.ops] == kept and pruned.values == loop().values


#: A reshape that merges two dims, beside a dim of size 1 and one whose major factor counts pieces.
MERGE = FactorRule(
    sizes=(1, 8, 4, 3),
    operands=(((0,), (1,), (2,)), ((3, 2), ())),
    results=(((0, 1, 2),),),
    outer=frozenset({3}),
)


def test_a_cut_of_a_dim_cuts_its_major_factor_that_is_larger_than_1_and_counts_no_pieces() -> None:
    assert [MERGE.major(dim) for _, dim in MERGE.dims()] == [None, 1, 2, 2, None, 1]
    assert str(MERGE) == "[a b c] [d*c 1] -> [a*b*c] where a=1 b=8 c=4 d=3"
    assert str(opaque([(8, 1)], [(8,)])) == "[a 1] -> [c] where a=8 b=1 c=8, whole a b c"


@pytest.mark.parametrize(
    ("sizes", "summed", "whole"),
    [((4,), {0}, {0}), ((), (), ())],
    ids=["both summed and whole", "no such factor"],
)
def test_rules_that_contradict_themselves(sizes, summed, whole) -> None:
    with pytest.raises(AssertionError):
        FactorRule(
            sizes=sizes,
            operands=(((0,),),),
            results=((),),
            summed=frozenset(summed),
            whole=frozenset(whole),
        )


COUPLED = Dependence(kind="coupled", why="rows meet other rows", where="dot_general at loss.py:12")


def test_every_reason_names_its_result() -> None:
    rows = Rows(
        loss=COUPLED,
        metrics=(
            ("share", Dependence(kind="coupled", why="a median")),
            ("plain", Dependence(kind="sum")),
        ),
        state=(("norm.mean", COUPLED),),
    )
    assert rows.reasons == (
        "the loss: rows meet other rows (dot_general at loss.py:12)",
        "metric 'share': a median",
        "model state 'norm.mean': rows meet other rows (dot_general at loss.py:12)",
    )
