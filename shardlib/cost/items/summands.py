"""Ops whose results are only added to each other, so that their partial sums are reduced together.

>>> Summands(ops=(3, 7), looped=False).ops
(3, 7)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardlib.cost.step.liveness import accumulators
from shardlib.cost.step.step_facts import Facts
from shardlib.graph import Op

#: Ops that only rearrange or cast their operand, so that a sum may be taken on either side of them.
_LINEAR_VIEWS: frozenset[str] = frozenset(
    {"transpose", "reshape", "convert_element_type", "copy", "squeeze", "expand_dims"}
)


@dataclass(frozen=True, kw_only=True)
class Summands:
    """Ops whose results are only added to each other, so that the compiler reduces them once.

    Attributes:
        ops: their numbers.
        looped: whether a loop adds them to a sum that it carries, of which partial sums over the
            batch are all-reduced once, after the loop (`Traits.reduces_after_loops`).
    """

    ops: tuple[int, ...]
    looped: bool


def sum_groups(facts: Facts) -> list[Summands]:
    """Ops with summed factors, grouped where their results are only added to each other (`add_any`
    of cotangents).

    Partial sums can be added before they are reduced, which XLA's all-reduce reassociation does
    (openxla/xla `xla/service/all_reduce_reassociate.cc`).
    """
    graph, producers = facts.graph, facts.graph.producers()
    leader: dict[int, int] = {}

    def origin(value: int) -> int | None:
        maker = producers.get(value)
        while maker is not None and _is_view(graph.ops[maker]):
            maker = producers.get(graph.ops[maker].operands[0])
        return maker

    for op in graph.ops:
        if op.kind != "add_any":
            continue
        if op.results[0] in facts.gradients and not facts.traits.adds_first:
            continue  # every use of a parameter reduces its part of the gradient where it is made
        makers = [origin(value) for value in op.operands]
        summing = [m for m in makers if m is not None and (graph.ops[m].rule.summed or m in leader)]
        if len(summing) == len(op.operands):
            first = leader.get(summing[0], summing[0])
            for maker in summing:
                leader[maker] = first
            leader[producers[op.results[0]]] = first
    looped = {
        leader.get(maker, maker)
        for accumulator in (accumulators(graph) if facts.traits.reduces_after_loops else ())
        if (maker := origin(accumulator.added)) is not None
    }
    groups: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(graph.ops):
        if op.rule.summed:
            groups[leader.get(index, index)].append(index)
    return [Summands(ops=tuple(ops), looped=first in looped) for first, ops in groups.items()]


def _is_view(op: Op) -> bool:
    """Whether an op only rearranges or casts its operand; so does a sum over dims of size 1."""
    return op.kind in _LINEAR_VIEWS or (op.kind == "reduce_sum" and not op.rule.summed)
