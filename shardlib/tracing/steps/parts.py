"""Rows of the batch that are put side by side, and taken apart again.

`jnp.concatenate([real, fake])` has twice the rows. By its general rule such a dim stays whole; here
it becomes a dim of equal parts, of which a cut cuts each (`FactorRule.outer`), so that what is
computed of it keeps the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardlib.axes import LogicalAxes
from shardlib.graph.factors import Dim, Dims, FactorRule
from shardlib.graph.graph import Graph, Op
from shardlib.graph.problem import Problem
from shardlib.propagation.ties import Classes, tie_graph


def tied_rows(problem: Problem) -> Problem:
    """A problem in whose graphs rows side by side are tied to those of its batch."""
    names = {path: axes for path, _, _, axes in problem.batch}

    def tied(graph: Graph) -> Graph:
        input_axes = [(value, names.get(graph.values[value].path, ())) for value in graph.inputs]
        return tied_parts(graph, rows_of(graph, input_axes))

    return replace(
        problem,
        forward=tied(problem.forward),
        steps={name: replace(step, graph=tied(step.graph)) for name, step in problem.steps.items()},
    )


def rows_of(
    graph: Graph, input_axes: Iterable[tuple[int, LogicalAxes]]
) -> frozenset[tuple[int, int]]:
    """(value, dim) of dims that some operations tie to the rows of the batch."""
    classes = Classes()
    tie_graph(classes, "", graph)
    roots = {
        classes.find(("", value, dim))
        for value, axes in input_axes
        for dim, axis in enumerate(axes)
        if axis == "batch"
    }
    return frozenset(
        (value, dim)
        for value, aval in enumerate(graph.values)
        for dim in range(len(aval.shape))
        if classes.find(("", value, dim)) in roots
    )


def tied_parts(graph: Graph, rows: frozenset[tuple[int, int]]) -> Graph:
    """The graph with rows side by side tied to those of the batch."""
    parts_by_dim = dict.fromkeys(rows, 1)
    ops: list[Op] = []
    for op in graph.ops:
        divided = _joined(graph, op, parts_by_dim) or _taken(graph, op, parts_by_dim)
        ops.append(op if divided is None else divided)
        _spread(graph, ops[-1], parts_by_dim)
    return replace(graph, ops=tuple(ops))


def _joined(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> Op | None:
    """A concatenation of equal parts along rows."""
    if op.kind != "concatenate":
        return None
    shapes = [graph.values[value].shape for value in op.operands]
    result = graph.values[op.results[0]].shape
    axis = next(dim for dim in range(len(result)) if shapes[0][dim] != result[dim])
    if len({shape[axis] for shape in shapes}) > 1 or not any(
        (value, axis) in parts_by_dim for value in op.operands
    ):
        return None
    return _in_parts(op, axis, len(shapes), shapes[0], joined=True)


def _taken(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> Op | None:
    """A slice, or a split, of one part of rows that are side by side."""
    if op.kind not in ("slice", "split") or len(op.operands) != 1:
        return None
    full_shape = graph.values[op.operands[0]].shape
    part = graph.values[op.results[0]].shape
    cut = [dim for dim in range(len(full_shape)) if full_shape[dim] != part[dim]]
    parts = parts_by_dim.get((op.operands[0], cut[0]), 1) if len(cut) == 1 else 1
    if parts == 1 or any(
        graph.values[value].shape[cut[0]] * parts != full_shape[cut[0]] for value in op.results
    ):
        return None
    return _in_parts(op, cut[0], parts, part, joined=False)


def _in_parts(op: Op, axis: int, parts: int, shape: tuple[int, ...], *, joined: bool) -> Op:
    counter = len(shape)
    plain: Dims = tuple((dim,) if size > 1 else () for dim, size in enumerate(shape))
    side: Dim = (counter, axis)
    long: Dims = (*plain[:axis], side, *plain[axis + 1 :])
    rule = FactorRule(
        sizes=(*shape, parts),
        operands=(plain,) * len(op.operands) if joined else (long,),
        results=(long,) if joined else (plain,) * len(op.results),
        whole=frozenset({counter}),
        outer=frozenset({counter}),
    )
    return replace(op, rule=rule)


def _spread(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> None:
    """Dims of the results that are the rows of the operands, and of how many parts."""
    factors: dict[int, int] = {}
    for value, dims in zip(op.operands, op.rule.operands, strict=True):
        for position, dim in enumerate(dims):
            major = op.rule.major(dim)
            if major is not None and (value, position) in parts_by_dim:
                factors[major] = max(
                    factors.get(major, 1), _parts(op, dim, parts_by_dim[value, position])
                )
    for value, dims in zip(op.results, op.rule.results, strict=True):
        for position, dim in enumerate(dims):
            major = op.rule.major(dim)
            if major in factors and graph.values[value].shape[position] > 1:
                outer = [factor for factor in dim if factor in op.rule.outer]
                parts_by_dim[value, position] = op.rule.sizes[outer[0]] if outer else factors[major]


def _parts(op: Op, dim: Dim, parts: int) -> int:
    return 1 if any(factor in op.rule.outer for factor in dim) else parts
