"""A step whose layers' weights are multiplied in an 8-bit format.

Every operand of such a product is cast: its largest element is found, in a pass of its own with
*current* scaling, or taken from the steps before with *delayed* scaling (NVIDIA/TransformerEngine
user guide, "Using FP8"; pytorch/ao float8 calls the first dynamic), then it is read, scaled and
written in one byte an element. With a scale for every *row*, products that contract different dims
cast the same operand each for itself (torchao/float8/README.md, "rowwise"). The casts are ops like
any other: what comes before them is fused into them, a weight that is stored sharded is gathered as
it is cast.

The products are those of two operands, one of them a weight or the result a gradient of one, inside
a loop over layers and in a 16-bit format: not the head, not the router, which is float32, and not
the core of attention. A cast to a format of 16 or 32 bits is no more than that: there is no largest
element to find, and the products are those in any other format.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardlib.axes import LogicalAxes
from shardlib.cost.step.layers import gradient_like, weights_of
from shardlib.graph import FactorRule, Graph, Op
from shardlib.graph.check import check
from shardlib.graph.factors import elementwise
from shardlib.graph.problem import StepGraph

_PRODUCTS: frozenset[str] = frozenset({"dot_general", "ragged_dot_general"})
_WIDE: frozenset[str] = frozenset({"bfloat16", "float16"})
#: A cast to these needs no scale.
_UNSCALED: frozenset[str] = frozenset({"float32", *_WIDE})


def quantised(
    step: StepGraph,
    names: tuple[LogicalAxes, ...],
    dtype: str,
    *,
    delayed: bool,
    rows: bool = False,
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with products of layers' weights in another dtype.

    Args:
        dtype: of the operands of those products.
    """
    graph, weights, gradients = step.graph, weights_of(step), gradient_like(step)
    scaled = dtype not in _UNSCALED
    inputs = _WIDE if scaled else _UNSCALED - {dtype}
    casts = _Casts(graph=graph, names=names, dtype=dtype, searched=scaled and not delayed)
    for index, op in enumerate(graph.ops):
        wide = all(graph.values[value].dtype in inputs for value in op.operands[:2])
        trained = any(value in weights for value in op.operands[:2]) or any(
            value in gradients for value in op.results
        )
        if op.kind in _PRODUCTS and wide and trained and graph.trips(op.region) > 1:
            factors = (casts.of(value, op, index if rows else 0) for value in op.operands[:2])
            op = replace(op, operands=(*factors, *op.operands[2:]))
        casts.ops.append(op)
    changed = replace(graph, values=tuple(casts.values), ops=tuple(casts.ops))
    check(changed)
    return replace(step, graph=changed), tuple(casts.names)


class _Casts:
    """Ops of a step, among them casts of operands, each made once in its region.

    Args:
        graph: of the step.
        names: colour per dim of its values.
        dtype: that operands are cast to.
        searched: whether the largest element of an operand is looked for before its cast.
    """

    def __init__(
        self, *, graph: Graph, names: tuple[LogicalAxes, ...], dtype: str, searched: bool
    ) -> None:
        self.values, self.names, self.ops = list(graph.values), list(names), list[Op]()
        self._graph, self._dtype, self._searched = graph, dtype, searched
        self._made: dict[tuple[int, int, int], int] = {}

    def of(self, value: int, op: Op, which: int) -> int:
        """The value that is a cast of another, for the op that takes it."""
        key = value, op.region, which
        if key not in self._made:
            self._made[key] = self._cast(value, op)
        return self._made[key]

    def _cast(self, value: int, op: Op) -> int:
        shape = self._graph.values[value].shape
        operands, shapes = (value,), [shape]
        if self._searched:
            largest = self._new((), "float32", ())
            dims = tuple((factor,) for factor in range(len(shape)))
            rule = FactorRule(sizes=shape, operands=(dims,), results=((),))
            self._add(op, "reduce_max", "reduction", operands, largest, rule)
            operands, shapes = (value, largest), [shape, ()]
        result = self._new(shape, self._dtype, self.names[value])
        rule = elementwise(shapes, shape)
        self._add(op, "convert_element_type", "elementwise", operands, result, rule)
        return result

    def _new(self, shape: tuple[int, ...], dtype: str, colours: LogicalAxes) -> int:
        like = self._graph.values[0]
        self.values.append(replace(like, shape=shape, dtype=dtype, path="", role="internal"))
        self.names.append(colours)
        return len(self.values) - 1

    def _add(
        self,
        op: Op,
        kind: str,
        category: str,
        operands: tuple[int, ...],
        result: int,
        rule: FactorRule,
    ) -> None:
        """Adds an op that reads a value once, where another op stands."""
        self.ops.append(
            Op(
                kind=kind,
                operands=operands,
                results=(result,),
                category=category,
                flops=float(math.prod(self._graph.values[operands[0]].shape)),
                region=op.region,
                path=op.path,
                scope=op.scope,
                rule=rule,
            )
        )
