"""The forward pass of a step graph.

A step graph computes a loss and its gradients. What the loss needs is the forward pass; in a loop,
everything beside it is, too, since a loop that rematerialises or goes back is another one.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.graph.graph import Graph
from shardlib.graph.prune import prune


def forward_pass(graph: Graph, *, saves: bool) -> Graph:
    """The forward pass of a step graph; values keep their indices."""
    results = graph.outputs[: len(graph.outputs) - sum(1 for _ in graph.inputs_of("parameter"))]
    lean = prune(replace(graph, outputs=results))
    if not saves:
        return lean
    needed, loops = {op.path for op in lean.ops}, {op.region for op in lean.ops} - {0}

    def inside(region: int) -> bool:
        while region > 0:
            if region in loops:
                return True
            region = graph.regions[region].parent
        return False

    in_forward = [inside(op.region) or op.path in needed for op in graph.ops]
    produced = {
        value
        for op, keep in zip(graph.ops, in_forward, strict=True)
        if keep
        for value in op.results
    }
    read = {
        value
        for op, keep in zip(graph.ops, in_forward, strict=True)
        if not keep
        for value in op.operands
    }
    saved = sorted((produced & read) - set(results))
    return replace(
        graph,
        ops=tuple(op for op, keep in zip(graph.ops, in_forward, strict=True) if keep),
        outputs=(*results, *saved),
    )
