"""Kernels of attention: the ops that stand for them, and what of their size does not depend on the
mesh.

A fused kernel computes the core of attention block by block and writes no scores:

    forward    reads q, k, v; writes out and one statistic of every row; 2 matmuls
    backward   reads q, k, v, out's gradient and the statistic; writes the three gradients;
               5 matmuls, one of them the scores again

The statistic has one number for each query of each head: of its factors, those that are neither
batch nor sequence are heads, and of these, the one that keys have too is the group.

    query [batch, group, each, seq, width]    key [batch, seq, group, width]
    statistic [batch, group, each, seq]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.axes import LogicalAxes
from shardlib.cost.terms.terms import Heads
from shardlib.graph import Graph, Op
from shardlib.propagation.assignment import TOKENS, Cut
from shardlib.propagation.head_sharding import Shared

#: Kinds of the ops that stand for kernels.
FORWARD, BACKWARD = "fused_attention", "fused_attention_backward"
KERNELS: tuple[str, ...] = (FORWARD, BACKWARD)


def causal_share(keys: int, block: int, window: int = 0) -> float:
    """Share of the blocks of queries and keys that are neither above the diagonal nor before a
    window of so many keys; 0: no window.

    >>> causal_share(512, 128), causal_share(512, 128, 128), causal_share(1 << 20, 128) < 0.501
    (0.625, 0.4375, True)
    """
    n = math.ceil(keys / block)
    if not window:
        return (n + 1) / (2 * n)
    before = [
        min(query, math.ceil((window - 1) / block)) for query in range(n)
    ]  # blocks of keys before that of the diagonal
    return sum(blocks + 1 for blocks in before) / n**2


def head_size(op: Op) -> int:
    """Elements of a head that a kernel of attention contracts, the most of those of queries: values
    of whose dims the last alone must stay whole. 0 for other ops.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0
    unsharded = [
        [
            math.prod(op.rule.sizes[factor] for factor in dim if factor in op.rule.whole)
            for dim in dims
        ]
        for dims in (*op.rule.operands, *op.rule.results)
        if dims
    ]
    return max(
        (sizes[-1] for sizes in unsharded if sizes[-1] > 1 == math.prod(sizes[:-1])), default=0
    )


def head_widths(op: Op) -> tuple[int, int] | None:
    """Elements of a head of queries, all parts of it together, and of a head of values; None where
    a kernel has not the form of the module's docstring.
    """
    if op.kind not in KERNELS:
        return None
    forward, rule = op.kind == FORWARD, op.rule
    rows = [dim for dim in (rule.results if forward else rule.operands)[-1] if dim]
    beside = [  # operands with the rows of queries, but for the statistic
        dims[-1]
        for dims in rule.operands
        if dims and [dim for dim in dims[:-1] if dim] == rows and dims[-1]
    ]
    # Backward the first of them is the gradient of the result, which is as wide as values.
    values, queries = (
        (rule.results[0][-1], beside) if forward else (beside[0] if beside else (), beside[1:])
    )
    if not queries or not values:
        return None

    def width(dim: Sequence[int]) -> int:
        return math.prod(rule.sizes[factor] for factor in dim)

    return sum(map(width, queries)), width(values)


def scores_per_flop(op: Op) -> float:
    """Scores that a kernel of attention computes, over its FLOPs: forward 2 matmuls contract or
    make the elements of a head for each, backward 5. 0 for other ops.

    Of the dims that must stay whole, that of a head's elements is the smallest.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0.0
    width = min(
        (op.rule.sizes[factor] for factor in op.rule.whole if op.rule.sizes[factor] > 1), default=1
    )
    return 1 / (2 * width * (2 if op.kind == FORWARD else 5))


def block_scores(op: Op, block: int) -> float:
    """Scores of one block of queries and one of keys in a kernel of attention of queries to as many
    keys, over the elements of its queries. 0 for other ops.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0.0
    sizes = [op.rule.sizes[factor] for factor in op.rule.whole if op.rule.sizes[factor] > 1]
    keys, width = max(sizes, default=1), min(sizes, default=1)
    return min(keys, block) ** 2 / (keys * width)


@dataclass(frozen=True, kw_only=True)
class KernelHeads:
    """The heads of one kernel of attention.

    Attributes:
        group: factor of the heads of keys and values.
        within: factors of the heads of queries of a group.
        groups: heads of keys and values.
        each: heads of queries of a group.
        colour: colour of the groups.
        width: colours of what must stay whole in the kernel.
    """

    group: int
    within: frozenset[int]
    groups: int
    each: int
    colour: str | None
    width: frozenset[str]

    @property
    def factors(self) -> frozenset[int]:
        """The factors of all heads."""
        return self.within | {self.group}

    def where(self, *shared: Shared) -> Heads:
        """When a term counts: in some of the cases of sharing the heads out."""
        return Heads(groups=self.groups, each=self.each, shared=shared)


def kernel_heads(
    op: Op, colours: LogicalAxes, batch: str | None, sequence: str | None
) -> KernelHeads | None:
    """The heads of an op that is a kernel of attention; None where they cannot be told."""
    if op.kind not in KERNELS or batch is None:
        return None
    rows = op.rule.results[-1] if op.kind == FORWARD else op.rule.operands[-1]
    unsharded = {colours[factor] for factor in op.rule.whole} - {None}
    others = {batch, sequence, TOKENS, *unsharded} - {None}
    heads = {
        factor
        for dim in rows
        for factor in dim
        if factor not in op.rule.whole and colours[factor] not in others
    }
    if not heads:
        return None
    sides = [
        {factor for dim in dims for factor in dim} for dims in (*op.rule.operands, *op.rule.results)
    ]
    group = max(sorted(heads), key=lambda factor: sum(factor in side for side in sides))
    within = frozenset(heads - {group})
    return KernelHeads(
        group=group,
        within=within,
        groups=op.rule.sizes[group],
        each=math.prod(op.rule.sizes[factor] for factor in within),
        colour=colours[group],
        width=frozenset(name for name in unsharded if name is not None and name != sequence),
    )


def over_heads(cut: Cut, heads: KernelHeads) -> Cut:
    """The cut of the factors of a kernel whose heads the tensor axis shards inside of it."""
    parts = [None if part == "tensor" else without_tensor(part) for part in cut]
    parts[heads.group] = "tensor" if parts[heads.group] is None else f"{parts[heads.group]}+tensor"
    return tuple(parts)


def without_tensor(part: str | None) -> str | None:
    """What cuts a dim beside the tensor axis."""
    remaining = [axis for axis in (part or "").split("+") if axis != "tensor"]
    return "+".join(remaining) or None


@dataclass(frozen=True, kw_only=True)
class Between:
    """The values between projections and kernels of attention.

    Attributes:
        heads: of the kernel, by value.
        paired: results of kernels, gradients, that something pairs dims of a head of before a
            contraction reads them, such as a rotation by positions.
    """

    heads: Mapping[int, KernelHeads]
    paired: frozenset[int]


def between(
    graph: Graph, kernels: Mapping[int, KernelHeads], names: Sequence[LogicalAxes]
) -> Between:
    """Finds what ops without a contraction make of results of projections for a kernel, and of its
    results for the products of gradients.
    """
    producers, found_heads, paired = graph.producers(), dict[int, KernelHeads](), set[int]()
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.operands:
            readers.setdefault(value, []).append(index)

    def beyond(value: int, forward: bool) -> list[Op]:
        neighbours = (
            [producers[value]] if forward and value in producers else readers.get(value, [])
        )
        if forward and value not in producers:
            return []
        ops = [graph.ops[index] for index in neighbours]
        return [op for op in ops if op.category in ("elementwise", "movement")]

    for kernel, heads in kernels.items():
        forward = graph.ops[kernel].kind == FORWARD
        for start in graph.ops[kernel].operands if forward else graph.ops[kernel].results:
            pending = [start]
            while pending:
                value = pending.pop()
                if value in found_heads or heads.colour is None or heads.colour not in names[value]:
                    continue
                found_heads[value] = heads
                for op in beyond(value, forward):
                    pending.extend(op.operands if forward else op.results)
                    if op.category == "movement" and op.rule.whole and not forward:
                        paired.add(start)
    return Between(heads=found_heads, paired=frozenset(paired))
