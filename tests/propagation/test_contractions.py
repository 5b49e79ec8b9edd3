"""The layouts in which contractions run: every mesh axis shards one index, in operands and result
alike.
"""

from __future__ import annotations

import itertools

import pytest

from shardlib.graph import FactorRule
from shardlib.layout import Layout, MeshShape, Rules
from shardlib.propagation.contractions import consistent_layouts

#: [a, b] x [b, c] -> [a, c]
MATMUL = FactorRule(
    sizes=(8, 8, 8),
    operands=(((0,), (1,)), ((1,), (2,))),
    results=(((0,), (2,)),),
    summed=frozenset({1}),
)
DIMS = (("a", "b"), ("b", "c"), ("a", "c"))
MESH = MeshShape(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize("first", ["b", "c"])
def test_a_square_weight_keeps_the_dim_that_the_rules_shard(first: str) -> None:
    other = "c" if first == "b" else "b"
    rules = Rules.parse([("a", ("data", "fsdp")), (first, "tensor"), (other, "tensor")])
    layouts = [rules.resolve(names, (8, 8), MESH).layout for names in DIMS]
    found = consistent_layouts(
        MATMUL, layouts, rules.resolve(("a", "b", "c"), (8, 8, 8), MESH).layout
    )
    assert (
        found[1]
        == layouts[1]
        == (Layout("tensor", None) if first == "b" else Layout(None, "tensor"))
    )
    assert found[0] == Layout(("data", "fsdp"), "tensor" if first == "b" else None)
    assert found[2] == Layout(("data", "fsdp"), None if first == "b" else "tensor")


def test_every_axis_shards_one_index_whatever_the_layouts() -> None:
    forms = [
        Layout(*dims)
        for dims in itertools.product([None, "data", "tensor"], repeat=2)
        if not (dims[0] == dims[1] is not None)
    ]
    forms += [Layout(("data", "tensor"), None), Layout(None, ("tensor", "data"))]
    for layouts in itertools.product(forms, repeat=3):
        found = consistent_layouts(MATMUL, layouts)
        for axis in ("data", "tensor"):
            held = {
                index
                for dims, layout in zip(DIMS, found, strict=True)
                for index, axes in zip(dims, layout, strict=True)
                if axis in axes
            }
            asked = {
                index
                for dims, layout in zip(DIMS, layouts, strict=True)
                for index, axes in zip(dims, layout, strict=True)
                if axis in axes
            }
            assert len(held) == bool(asked) and held <= asked, (layouts, found)
            assert all(
                (axis in axes) == (index in held)
                for dims, layout in zip(DIMS, found, strict=True)
                for index, axes in zip(dims, layout, strict=True)
            ), (layouts, found)


def test_indices_that_must_stay_whole_are_never_sharded() -> None:
    rule = FactorRule(
        sizes=(8, 8, 8), operands=MATMUL.operands, results=MATMUL.results, whole=frozenset({1})
    )
    assert consistent_layouts(
        rule, (Layout("data", "tensor"), Layout("tensor", None), Layout("data", None))
    )[:2] == (Layout("data", None), Layout(None, None))
