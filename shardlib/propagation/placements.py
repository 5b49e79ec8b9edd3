"""Where the lowering pins the layout of an activation, and to what.

Constraints stand where the layout could otherwise drift: on the results of matmuls, convolutions
and gathers, and on the carry of every loop; and on what contractions read, in the layouts in which
they run. What a contraction gathers is pinned as it is before, too: left free, XLA's partitioner
makes it gathered from the start, so that a layer which rematerialises nothing would keep it
gathered for its backward pass (a sequence sharded over tensor: as many times the bytes as there are
devices along the axis). Everything between follows by propagation in XLA.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.axes import LogicalAxes, MeshShape
from shardlib.graph import Graph
from shardlib.graph.graph import input_source
from shardlib.layout import Layout
from shardlib.propagation.contractions import CONTRACTIONS, operand_layouts, used
from shardlib.rules import Rules

_ANCHORS: frozenset[str] = frozenset({"matmul", "convolution", "gather"})


def placements(
    graph: Graph,
    names: tuple[LogicalAxes, ...],
    rules: Rules,
    mesh: MeshShape,
    batch: str | None,
    operands: Mapping[tuple[str, int], tuple[str, int]] | None = None,
) -> Mapping[tuple[str, int], Layout]:
    """Layout constraints of a forward graph.

    Args:
        operands: more values that lowering wants to know of, keyed as they shall be in the result
            -> what makes them.

    Returns:
        (path of the equation, index of the result) -> layout; for the carry of a loop, the path of
    """
    layouts: dict[tuple[str, int], Layout] = dict(operand_layouts(graph, names, rules, mesh))
    gathered = _gathered(graph, names, rules, mesh, layouts)
    keys_by_source: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for key, source in (operands or {}).items():
        keys_by_source.setdefault(source, []).append(key)
    for number, value in enumerate(graph.inputs):
        for key in keys_by_source.get(input_source(number), ()):
            layouts[key] = rules.resolve(names[value], graph.values[value].shape, mesh).layout
    for op in graph.ops:
        for position, value in enumerate(op.results):
            for key in keys_by_source.get((op.path, position), ()):
                layouts[key] = rules.resolve(names[value], graph.values[value].shape, mesh).layout
        anchor = op.category in _ANCHORS or op.kind == "carry"
        for position, value in enumerate(op.results):
            if not anchor and value not in gathered:
                continue
            axes = names[value]
            if batch is not None and batch in axes:
                layouts[op.path, position] = rules.resolve(
                    axes, graph.values[value].shape, mesh
                ).layout
    return layouts


def _gathered(
    graph: Graph,
    names: tuple[LogicalAxes, ...],
    rules: Rules,
    mesh: MeshShape,
    operands: Mapping[tuple[str, int], Layout],
) -> frozenset[int]:
    """The values that some mesh axis shards, and of which a contraction reads more than a shard."""
    return frozenset(
        value
        for op in graph.ops
        if op.category in CONTRACTIONS
        for position, value in enumerate(op.operands)
        if (read := operands.get(used(op.path, position))) is not None
        and not rules.resolve(names[value], graph.values[value].shape, mesh).layout.axes
        <= read.axes
    )
