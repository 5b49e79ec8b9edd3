"""Every rule of the table against real arithmetic.

The laws are those of cutting, checked on whole arrays, so that they need no second spelling of the
op for smaller shapes: a part of the result along a *parallel* factor depends only on the same part
of the operands (everything else may be replaced by noise), and the results of the parts along a
*summed* factor, the rest neutral, combine to the whole result.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.graph import Dims, FactorRule, Op, check
from shardlib.tracing.primitives import TABLE
from shardlib.tracing.trace import graph_from_jaxpr
from tests.tracing.rule_cases import CASES, RuleCase

#: Rules that no case of the table of cases needs: they share their function with one that has a
#: case.
NAMES = [case.name for case in CASES]


def described(case: RuleCase) -> tuple[Op, list[int | None]]:
    """The op of interest, and which argument of the function each operand is."""
    closed = jax.make_jaxpr(case.function)(*case.arguments)
    graph = graph_from_jaxpr(closed, [("", "batch")] * len(case.arguments))
    (op,) = [op for op in graph.ops if op.kind == case.primitive]
    check(graph)
    assert graph.findings == ()
    return op, [
        graph.inputs.index(value) if value in graph.inputs else None for value in op.operands
    ]


def part(
    array: np.ndarray, dims: Dims, rule: FactorRule, factor: int, chunk: int, parts: int
) -> np.ndarray:
    """Boolean mask of the elements in one of `parts` chunks along a factor; all True without it."""
    mask = np.ones([1] * array.ndim, bool)
    for position, dim in enumerate(dims):
        if factor not in dim:
            continue
        sizes = [rule.sizes[f] for f in dim]
        index = np.unravel_index(np.arange(math.prod(sizes)), sizes)[dim.index(factor)]
        shape = [-1 if i == position else 1 for i in range(array.ndim)]
        mask = mask & (index * parts // rule.sizes[factor] == chunk).reshape(shape)
    return np.broadcast_to(mask, array.shape)


def outputs(case: RuleCase, arguments: list[Any]) -> list[np.ndarray]:
    return [
        np.asarray(leaf, np.float64 if leaf.dtype == jnp.bfloat16 else None)
        for leaf in jax.tree.leaves(case.function(*arguments))
    ]


def noise(array: np.ndarray) -> np.ndarray:
    """Other values of the same kind: indices stay in range."""
    if array.dtype == bool:
        return ~array
    if np.issubdtype(array.dtype, np.integer):
        return np.flip(array)
    return array * 1.7 + 0.3


def splits(size: int) -> list[int]:
    return [n for n in range(2, size + 1) if size % n == 0]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_rule_is_as_expected(case: RuleCase) -> None:
    assert re.sub(" where [^,]*", "", str(described(case)[0].rule)) == case.rule


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_parallel_factors_are_independent(case: RuleCase) -> None:
    op, arguments = described(case)
    rule = op.rule
    whole = outputs(case, list(case.arguments))
    for factor in rule.used() - rule.summed - rule.whole:
        for parts in splits(rule.sizes[factor]):
            for chunk in range(parts):
                given = [np.asarray(array) for array in case.arguments]
                for operand, dims in zip(arguments, rule.operands, strict=True):
                    if operand is not None:
                        mask = part(given[operand], dims, rule, factor, chunk, parts)
                        given[operand] = np.where(
                            mask, given[operand], noise(given[operand])
                        ).astype(given[operand].dtype)
                for before, after, dims in zip(
                    whole, outputs(case, list(map(jnp.asarray, given))), rule.results, strict=True
                ):
                    mask = part(before, dims, rule, factor, chunk, parts)
                    np.testing.assert_allclose(
                        after[mask],
                        before[mask],
                        rtol=1e-5,
                        atol=1e-5,
                        err_msg=f"factor {factor} of {rule}",
                    )


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_summed_factors_combine(case: RuleCase) -> None:
    op, arguments = described(case)
    rule = op.rule
    whole, *_ = outputs(case, list(case.arguments))
    for factor in rule.summed:
        for parts in splits(rule.sizes[factor]):
            total: Any = None
            for chunk in range(parts):
                given = [np.asarray(array) for array in case.arguments]
                for operand, dims in zip(arguments, rule.operands, strict=True):
                    if operand is not None and not np.issubdtype(given[operand].dtype, np.integer):
                        mask = part(given[operand], dims, rule, factor, chunk, parts)
                        given[operand] = np.where(
                            mask, given[operand], np.asarray(case.neutral, given[operand].dtype)
                        )
                result, *_ = outputs(case, list(map(jnp.asarray, given)))
                total = result if total is None else case.combine(total, result)
            np.testing.assert_allclose(
                total, whole, rtol=1e-5, atol=1e-5, err_msg=f"factor {factor} of {rule}"
            )


def test_every_rule_function_has_a_case() -> None:
    random = {
        "random_bits",
        "random_split",
        "random_wrap",
        "random_unwrap",
        "random_clone",
        "rng_bit_generator",
        "iota",
        "select_and_gather_add",
    }
    factors = {name: known.factors for name, known in TABLE.items() if known.factors is not None}
    covered = {factors[case.primitive] for case in CASES} | {factors[name] for name in random}
    assert {name for name, entry in factors.items() if entry not in covered} == set()
