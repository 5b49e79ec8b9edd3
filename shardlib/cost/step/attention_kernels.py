"""Kernels of attention: the ops that stand for them, and what of their size does not depend on the
mesh.

A fused kernel computes the core of attention block by block and writes no scores:

    forward    reads q, k, v; writes out and one statistic of every row; 2 matmuls
    backward   reads q, k, v, out's gradient and the statistic; writes the three gradients;
               5 matmuls, one of them the scores again
"""

from __future__ import annotations

import math

from shardlib.graph import Op

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
    return sum(one + 1 for one in before) / n**2


def head_size(op: Op) -> int:
    """Elements of a head that a kernel of attention contracts, the most of those of queries: values
    of whose dims the last alone must stay whole. 0 for other ops.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0
    whole = [
        [
            math.prod(op.rule.sizes[factor] for factor in dim if factor in op.rule.whole)
            for dim in dims
        ]
        for dims in (*op.rule.operands, *op.rule.results)
        if dims
    ]
    return max((sizes[-1] for sizes in whole if sizes[-1] > 1 == math.prod(sizes[:-1])), default=0)


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

    Args:
        op: a kernel of attention.
        block: queries, and keys, of a block.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0.0
    sizes = [op.rule.sizes[factor] for factor in op.rule.whole if op.rule.sizes[factor] > 1]
    keys, width = max(sizes, default=1), min(sizes, default=1)
    return min(keys, block) ** 2 / (keys * width)
