"""A step whose products run in half precision throughout.

JAX's autodiff multiplies a float32 cotangent with a half-precision operand in float32: the
gradients of float32 logits and of float32 scores. Layers that are written by hand hand on gradients
in the dtype of the value that they belong to, so that these products, too, run in half precision
(NVIDIA/Megatron-LM megatron/core/tensor_parallel/layers.py,
LinearWithGradAccumulationAndAsyncCommunication; PyTorch's autograd of a cast).

A product with one operand in half precision gets the other one cast. The router, all of whose
operands are float32, stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardlib.axes import LogicalAxes
from shardlib.graph import Op
from shardlib.graph.check import check
from shardlib.graph.factors import elementwise
from shardlib.graph.problem import StepGraph

_PRODUCTS: frozenset[str] = frozenset({"dot_general", "ragged_dot_general"})
_HALVES: frozenset[str] = frozenset({"bfloat16", "float16"})


def in_halves(
    step: StepGraph, names: tuple[LogicalAxes, ...]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with float32 operands cast wherever the other operand of a product is in half
    precision.
    """
    graph = step.graph
    values, all_names, ops = list(graph.values), list(names), list[Op]()
    casts: dict[tuple[int, int], int] = {}

    def cast(value: int, dtype: str, op: Op) -> int:
        key = value, op.region
        if key not in casts:
            shape = graph.values[value].shape
            casts[key] = len(values)
            values.append(replace(graph.values[value], dtype=dtype, path="", role="internal"))
            all_names.append(names[value])
            ops.append(
                Op(
                    kind="convert_element_type",
                    operands=(value,),
                    results=(casts[key],),
                    category="elementwise",
                    flops=float(math.prod(shape)),
                    region=op.region,
                    path=op.path,
                    scope=op.scope,
                    rule=elementwise([shape], shape),
                )
            )
        return casts[key]

    for op in graph.ops:
        dtypes = [graph.values[value].dtype for value in op.operands[:2]]
        half = next((dtype for dtype in dtypes if dtype in _HALVES), None)
        if op.kind in _PRODUCTS and half and "float32" in dtypes:
            op = replace(
                op,
                operands=(
                    *(
                        cast(value, half, op) if dtype == "float32" else value
                        for value, dtype in zip(op.operands, dtypes, strict=False)
                    ),
                    *op.operands[2:],
                ),
            )
        ops.append(op)
    if not casts:
        return step, names
    changed = replace(graph, values=tuple(values), ops=tuple(ops))
    check(changed)
    return replace(step, graph=changed), tuple(all_names)
