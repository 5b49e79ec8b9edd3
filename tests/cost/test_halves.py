"""Products in half precision throughout: which are cast, and that nothing else changes."""

from __future__ import annotations

from collections import Counter

import pytest

from shardlib.cost.activations import in_halves, quantised
from shardlib.graph import Graph, check
from shardlib.propagation.colours import colour
from tests.cost.traced import CONFIGS, plain


def products(graph: Graph) -> Counter[frozenset[str]]:
    """Products by the dtypes of their two operands."""
    return Counter(
        frozenset(graph.values[value].dtype for value in op.operands[:2])
        for op in graph.ops
        if op.kind in ("dot_general", "ragged_dot_general")
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_no_product_mixes_half_and_single_precision(name: str) -> None:
    step, names = plain(name).steps["none"], colour(plain(name)).steps["none"]
    changed, new = in_halves(step, names)
    check(changed.graph)
    assert new[: len(names)] == names and [len(one) for one in new] == [
        len(value.shape) for value in changed.graph.values
    ]
    before, after = products(step.graph), products(changed.graph)
    mixed = frozenset({"bfloat16", "float32"})
    assert before[mixed] > 0 and after[mixed] == 0, (
        "the gradients of logits and of scores are float32 where autodiff makes them"
    )
    assert after[frozenset({"bfloat16"})] == before[frozenset({"bfloat16"})] + before[mixed]
    assert after[frozenset({"float32"})] == before[frozenset({"float32"})], (
        "the router stays in float32"
    )
    assert (before[frozenset({"float32"})] > 0) == (name == "mixture")
    assert sum(op.flops for op in step.graph.ops if op.category == "matmul") == sum(
        op.flops for op in changed.graph.ops if op.category == "matmul"
    )


def test_a_step_without_mixed_products_is_left_alone() -> None:
    step, names = in_halves(plain("llama").steps["none"], colour(plain("llama")).steps["none"])
    again, same = in_halves(step, names)
    assert again is step and same is names
    eight, _ = quantised(step, names, "float8_e4m3fn", delayed=True)
    assert products(eight.graph)[frozenset({"float8_e4m3fn"})] > 0, (
        "weights of layers go on to eight bits"
    )
