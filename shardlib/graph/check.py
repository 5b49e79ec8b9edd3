"""Checks that a graph is well formed.

Run after tracing and after every rewrite. It checks four laws: a value is defined once and before
it is used; a rule has the ranks and sizes of the values it describes; no dim shares a factor with
another dim of the same value; an op reads only values of its own region or of a region around it.
Two kinds of boundary op look outwards: the results of an "exit", and of the "carry" at path
".../final/k" that leaves a loop, belong to the region around their own; the "carry" that joins the
branches of a condition reads from the regions just inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardlib.graph.factors import Dims, FactorRule
from shardlib.graph.graph import Graph, Op


def check(graph: Graph, before: Graph | None = None) -> None:
    """Asserts that a graph is well formed."""
    checked = set[int]()
    if before is not None and graph.values is before.values:
        checked = {id(op) for op in before.ops}
    broken = [
        *_regions(graph),
        *_order(graph),
        *(line for op in graph.ops if id(op) not in checked for line in _rule(graph, op)),
    ]
    assert not broken, "the graph is not well formed:\n  - " + "\n  - ".join(broken)


def _regions(graph: Graph) -> Iterator[str]:
    for index, region in enumerate(graph.regions):
        if (region.parent == -1) != (index == 0) or region.parent >= index:
            yield f"region {index} has parent {region.parent}"
        if region.trips < 0:
            yield f"region {index} runs {region.trips} times"


def _order(graph: Graph) -> Iterator[str]:
    home = {index: 0 for index, value in enumerate(graph.values) if value.role == "constant"}
    home.update(dict.fromkeys(graph.inputs, 0))
    for op in graph.ops:
        if not 0 <= op.region < len(graph.regions):
            yield f"{_name(op)} is in region {op.region} of {len(graph.regions)}"
            continue
        visible = {*_ancestors(graph, op.region)}
        for value in op.operands:
            region = home.get(value)
            if region is None:
                yield f"{_name(op)} reads value {value} before it is defined"
            elif region not in visible and not (
                op.category == "boundary" and graph.regions[region].parent == op.region
            ):
                yield f"{_name(op)} of region {op.region} reads value {value} of region {region}"
        for value in op.results:
            if value in home:
                yield f"{_name(op)} defines value {value} a second time"
            home[value] = graph.regions[op.region].parent if _leaves(op) else op.region
    for value in graph.outputs:
        if home.get(value) != 0:
            yield f"output value {value} is not defined in the root region"


def _leaves(op: Op) -> bool:
    return op.kind == "exit" or (op.kind == "carry" and op.path.split("/")[-2:-1] == ["final"])


def _ancestors(graph: Graph, region: int) -> Iterator[int]:
    while region >= 0:
        yield region
        region = graph.regions[region].parent


def _rule(graph: Graph, op: Op) -> Iterator[str]:
    for what, values, described in (
        ("operand", op.operands, op.rule.operands),
        ("result", op.results, op.rule.results),
    ):
        if len(values) != len(described):
            yield f"{_name(op)} has {len(values)} {what}s, its rule {len(described)}"
            continue
        for position, (value, dims) in enumerate(zip(values, described, strict=True)):
            for line in _dims(op.rule, dims, graph.values[value].shape):
                yield f"{_name(op)}, {what} {position}: {line}"


def _dims(rule: FactorRule, dims: Dims, shape: tuple[int, ...]) -> Iterator[str]:
    if len(dims) != len(shape):
        yield f"rank {len(shape)} has {len(dims)} dims in the rule"
        return
    used = [factor for dim in dims for factor in dim]
    if len(set(used)) < len(used):
        yield f"a factor appears twice in {dims}"
    for index, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        product = math.prod(rule.sizes[factor] for factor in dim)
        if dim and product != size:
            yield f"dim {index} has size {size}, its factors make {product}"


def _name(op: Op) -> str:
    return f"{op.kind} at {op.path or '?'}"
