"""The ops that the results of a graph need.

XLA removes what nothing reads, so a cost model must not count it. A loop's carry needs care:
whoever reads the carry inside the body also needs what the body makes of it.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.graph.graph import Graph


def prune(graph: Graph) -> Graph:
    """The graph without the ops that no output depends on; values keep their indices.

    The carry of a loop is two boundary ops, at paths "P/carry/k" (into the body) and "P/final/k"
    (out of it); keeping either keeps both.
    """
    producers = graph.producers()
    position: dict[str | None, int] = {
        op.path: index for index, op in enumerate(graph.ops) if op.kind == "carry"
    }
    reached: set[int] = set()
    waiting = [producers[value] for value in graph.outputs if value in producers]
    while waiting:
        index = waiting.pop()
        if index in reached:
            continue
        reached.add(index)
        op = graph.ops[index]
        waiting += [producers[value] for value in op.operands if value in producers]
        partner = position.get(_final(op.path)) if op.kind == "carry" else None
        waiting += [] if partner is None else [partner]
    return replace(graph, ops=tuple(op for index, op in enumerate(graph.ops) if index in reached))


def _final(path: str) -> str | None:
    """The path of the op that takes a carry out of the loop, given the op that takes it in."""
    *loop, which, number = path.split("/")
    return "/".join([*loop, "final", number]) if which == "carry" else None
