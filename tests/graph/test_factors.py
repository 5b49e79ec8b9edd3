"""Rules of how dims hang together: their text, what a cut of a dim cuts, rules by formula."""

from __future__ import annotations

import pytest

from shardlib.graph import FactorRule, elementwise, opaque

#: A reshape that merges two dims, beside a dim of size 1 and one whose major factor counts pieces.
MERGE = FactorRule(
    sizes=(1, 8, 4, 3),
    operands=(((0,), (1,), (2,)), ((3, 2), ())),
    results=(((0, 1, 2),),),
    outer=frozenset({3}),
)


def test_a_cut_of_a_dim_cuts_its_major_factor_that_is_larger_than_1_and_counts_no_pieces() -> None:
    assert [MERGE.major(dim) for _, dim in MERGE.dims()] == [None, 1, 2, 2, None, 1]


def test_every_dim_has_a_place() -> None:
    assert [place for place, _ in MERGE.dims()] == [
        (False, 0, 0),
        (False, 0, 1),
        (False, 0, 2),
        (False, 1, 0),
        (False, 1, 1),
        (True, 0, 0),
    ]
    assert MERGE.used() == {0, 1, 2, 3}


def test_text() -> None:
    assert str(MERGE) == "[a b c] [d*c 1] -> [a*b*c] where a=1 b=8 c=4 d=3"
    many = FactorRule(
        sizes=(2,) * 27,
        operands=(((26,),),),
        results=((),),
        summed=frozenset({26}),
        whole=frozenset({0, 1}),
    )
    assert str(many).startswith("[f26] -> [] where a=2 b=2") and str(many).endswith(
        "f26=2, sum f26, whole a b"
    )


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


def test_elementwise_rules_broadcast() -> None:
    rule = elementwise([(8, 4), (1, 4), ()], (8, 4), results=2)
    assert str(rule) == "[a b] [1 b] [] -> [a b] [a b] where a=8 b=4"


def test_nothing_is_known_of_an_opaque_operation() -> None:
    rule = opaque([(8, 1)], [(8,)])
    assert str(rule) == "[a 1] -> [c] where a=8 b=1 c=8, whole a b c"
