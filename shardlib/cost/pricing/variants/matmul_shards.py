"""The kernel of one shard of a matmul whose operand comes shard by shard: it reads its weight anew,
or reads and writes the sums of a gradient, and has fewer rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from shardlib.axes import TENSOR
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import Amount, Compute, Elements
from shardlib.propagation.assignment import Choice, has


def matmul_shard(facts: Facts, index: int, term: Compute, choice: Choice, shards: int) -> Compute:
    """The kernel of one of the shards that a matmul of a weight, or of the gradient of one, is made
    in: it reads the weight, or reads and writes sums in float32.
    """
    op = facts.graph.ops[index]
    side = next((i for i, value in enumerate(op.operands) if value in facts.weights), 2)
    value = (*op.operands, *op.results)[side]
    again_bytes = (
        facts.graph.values[value].bytes
        if side < 2
        else 8.0 * math.prod(facts.graph.values[value].shape)
    )
    again = Amount(
        total=again_bytes * (1 - 1 / shards),
        batch=False,
        tensor=has(facts.value_cut(value, choice), TENSOR.name),
        context=False,
        expert=False,
    )
    matmul = term.matmul
    if matmul is not None:  # rows of the activation, or what is summed over
        sharded = "depth" if side == 2 else ("columns", "rows")[side]
        matmul = replace(matmul, **{sharded: _part(getattr(matmul, sharded), shards)})
    return replace(
        term,
        flops=_part(term.flops, shards),
        traffic=(*_parts(term.traffic, shards), again),
        elements=Elements(
            simple=_parts(term.elements.simple, shards),
            transcendental=_parts(term.elements.transcendental, shards),
        ),
        matmul=matmul,
    )


def _part(amount: Amount, shards: int) -> Amount:
    return replace(amount, total=amount.total / shards)


def _parts(amounts: Iterable[Amount], shards: int) -> tuple[Amount, ...]:
    return tuple(_part(amount, shards) for amount in amounts)
