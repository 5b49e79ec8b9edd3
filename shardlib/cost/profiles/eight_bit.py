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
from shardlib.graph import FactorRule, Op
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
        step: forward and backward ops.
        names: colour per dim of every value.
        dtype: of the operands of those products.
        delayed: whether the largest element of an operand is known from before.
        rows: whether every row along a contraction has a scale of its own, so that each product
            casts its operands anew.

    Returns:
        The step with new values behind the old ones, and the colours of all.
    """
    graph, weights, gradients = step.graph, weights_of(step), gradient_like(step)
    values, all_names, ops = list(graph.values), list(names), list[Op]()
    casts: dict[tuple[int, int, int], int] = {}
    scaled, inputs = (
        dtype not in _UNSCALED,
        (_WIDE if dtype not in _UNSCALED else _UNSCALED - {dtype}),
    )

    def new(shape: tuple[int, ...], kind: str, colours: LogicalAxes) -> int:
        values.append(replace(graph.values[0], shape=shape, dtype=kind, path="", role="internal"))
        all_names.append(colours)
        return len(values) - 1

    def cast(value: int, op: Op, index: int) -> int:
        key = value, op.region, index if rows else 0
        if key not in casts:
            shape = graph.values[value].shape
            operands = (value,)
            if scaled and not delayed:
                largest = new((), "float32", ())
                dims = tuple((factor,) for factor in range(len(shape)))
                ops.append(
                    Op(
                        kind="reduce_max",
                        operands=(value,),
                        results=(largest,),
                        category="reduction",
                        flops=float(math.prod(shape)),
                        region=op.region,
                        path=op.path,
                        scope=op.scope,
                        rule=FactorRule(sizes=shape, operands=(dims,), results=((),)),
                    )
                )
                operands = (value, largest)
            casts[key] = new(shape, dtype, names[value])
            ops.append(
                Op(
                    kind="convert_element_type",
                    operands=operands,
                    results=(casts[key],),
                    category="elementwise",
                    flops=float(math.prod(shape)),
                    region=op.region,
                    path=op.path,
                    scope=op.scope,
                    rule=elementwise(
                        [graph.values[value].shape, *([()] if scaled and not delayed else [])],
                        shape,
                    ),
                )
            )
        return casts[key]

    for index, op in enumerate(graph.ops):
        wide = all(graph.values[value].dtype in inputs for value in op.operands[:2])
        trained = any(value in weights for value in op.operands[:2]) or any(
            value in gradients for value in op.results
        )
        if op.kind in _PRODUCTS and wide and trained and graph.trips(op.region) > 1:
            op = replace(
                op,
                operands=(*(cast(value, op, index) for value in op.operands[:2]), *op.operands[2:]),
            )
        ops.append(op)
    changed = replace(graph, values=tuple(values), ops=tuple(ops))
    check(changed)
    return replace(step, graph=changed), tuple(all_names)
