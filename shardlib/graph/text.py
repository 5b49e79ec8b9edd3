"""Graphs as text.

One line per value that comes in and per op, indented by loop:

  %0 float32[4, 8] params.w (parameter)
  ...
  scan x 3
    %7 float32[2, 8] = dot_general %5 %6 | [a b] [b c] -> [a c] where a=2 b=4 c=8, sum b | 128 flops
"""

from __future__ import annotations

from shardlib.graph.graph import Graph, Op, Value


def text(graph: Graph) -> str:
    """The graph as readable lines, the same for equal graphs."""
    lines = [f"%{index} {_value(graph.values[index])}" for index in graph.inputs]
    lines += [
        f"%{index} {_value(value)}"
        for index, value in enumerate(graph.values)
        if value.role == "constant"
    ]
    region = 0
    for op in graph.ops:
        if (
            op.region != region
            and op.region > 0
            and _depth(graph, op.region) >= _depth(graph, region)
        ):
            inside = graph.regions[op.region]
            lines.append(f"{'  ' * (_depth(graph, op.region) - 1)}{inside.kind} x {inside.trips}")
        region = op.region
        lines.append("  " * _depth(graph, region) + _op(graph, op))
    lines.append("return " + " ".join(f"%{index}" for index in graph.outputs))
    return "\n".join([*lines, *map(str, graph.findings)])


def _value(value: Value) -> str:
    location = f" {value.path}" if value.path else ""
    return f"{_type(value)}{location} ({value.role})"


def _type(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _op(graph: Graph, op: Op) -> str:
    results = ", ".join(f"%{index} {_type(graph.values[index])}" for index in op.results)
    operands = "".join(f" %{index}" for index in op.operands)
    flops = f" | {op.flops:g} flops" if op.flops else ""
    return f"{results} = {op.kind}{operands} | {op.rule}{flops}"


def _depth(graph: Graph, region: int) -> int:
    depth = 0
    while region > 0:
        region, depth = graph.regions[region].parent, depth + 1
    return depth
