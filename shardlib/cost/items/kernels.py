"""Items of computation: one for each kernel of a step graph.

A kernel's item yields a `Compute`: FLOPs, bytes that it moves, and the dims of its matmul, each
with a note of the axes that divide it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from shardlib.cost.items.exchanges import routed_load
from shardlib.cost.step.attention_kernels import (
    head_size,
    head_widths,
    scores_per_flop,
)
from shardlib.cost.step.fusion import Kernel
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    Amount,
    AttentionCore,
    Compute,
    Elements,
    Item,
    Matmul,
    Term,
    amount,
    named,
)
from shardlib.graph import Op
from shardlib.graph.graph import ITEMSIZE
from shardlib.propagation.assignment import Choice, Cut, divisors

#: Ops that take many steps on a TPU's vector units, and a unit of their own on a GPU; a TPU has
#: units for tanh, exp2 and square roots.
TRANSCENDENTAL: frozenset[str] = frozenset(
    {
        "exp",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "erf",
        "erf_inv",
        "sin",
        "cos",
        "tan",
        "pow",
        "cbrt",
    }
)


def _compute_item(facts: Facts, kernel: Kernel) -> Item:
    op = facts.graph.ops[kernel.op]
    values = (*kernel.reads, *kernel.writes)
    touched = {
        value
        for i in kernel.fused
        for value in (*facts.graph.ops[i].operands, *facts.graph.ops[i].results)
    }
    colours = named(facts.factors[kernel.op]).union(
        *(named(facts.names[value]) for value in {*values, *touched})
    )
    weight = op.category == "matmul" and bool(facts.gradients & set(op.results))
    dtype = max(
        (facts.graph.values[v].dtype for v in op.operands[:2]),
        key=lambda d: ITEMSIZE.get(d, 4),
        default="float32",
    )

    bytes_moved = [(value, _traffic_bytes(facts, op, value)) for value in values]
    simple_work, transcendental_work = (
        [
            _largest(facts, i)
            for i in kernel.fused
            if (facts.graph.ops[i].kind in TRANSCENDENTAL) is hard
        ]
        for hard in (False, True)
    )

    def shares(choice: Choice) -> bool:
        return facts.shares_heads(kernel.op, choice)

    def local(sizes: list[tuple[int, float]], choice: Choice) -> tuple[Amount, ...]:
        totals: dict[_Divisors, float] = defaultdict(float)
        for value, size in sizes:
            totals[divisors(facts.value_cut(value, choice))] += size
        return _amounts(totals)

    def terms(choice: Choice) -> tuple[Term, ...]:
        cut = facts.op_cut(kernel.op, choice)
        compute = Compute(
            flops=amount(op.flops, cut),
            dtype=dtype,
            traffic=local(bytes_moved, choice),
            trips=facts.trips[op.region],
            elements=Elements(
                simple=local(simple_work, choice), transcendental=local(transcendental_work, choice)
            ),
            matmul=_matmul(op, cut),
            kind=op.kind,
            category=op.category,
            weight=weight,
            routed=routed_load(facts, op, op.operands[0], choice) if op.kind in GROUPED else None,
            core=_core(op),
        )
        return _by_heads(facts, kernel.op, compute) if shares(choice) else (compute,)

    segment = facts.layers.segment(op.region)
    alike = op.kind not in GROUPED and facts.plain((kernel.op,), (*values, *touched))
    made_of = (
        (op.kind, op.category, op.flops, op.rule, facts.factors[kernel.op], facts.rows[kernel.op]),
        (facts.trips[op.region], segment, weight, dtype, len(op.operands)),
        *(
            tuple((facts.names[value], size) for value, size in work)
            for work in (bytes_moved, simple_work, transcendental_work)
        ),
    )
    return Item(colours=colours, terms=terms, segment=segment, made_of=made_of if alike else None)


def _by_heads(facts: Facts, index: int, compute: Compute) -> tuple[Term, ...]:
    """A kernel of attention whose heads the tensor axis shards inside of it alone: as it is where
    the devices can share heads out, and whole on each of them where they cannot.
    """
    heads = facts.heads[index]

    def whole(amounts: tuple[Amount, ...]) -> tuple[Amount, ...]:
        return tuple(replace(amount, tensor=False) for amount in amounts)

    return (
        replace(compute, heads=heads.where("all", "queries")),
        replace(
            compute,
            flops=replace(compute.flops, tensor=False),
            traffic=whole(compute.traffic),
            elements=Elements(
                simple=whole(compute.elements.simple),
                transcendental=whole(compute.elements.transcendental),
            ),
            heads=heads.where("none"),
        ),
    )


#: Whether batch, tensor, context and expert axes divide an array.
_Divisors = tuple[bool, bool, bool, bool]


def _amounts(totals: Mapping[_Divisors, float]) -> tuple[Amount, ...]:
    return tuple(
        Amount(total=total, batch=b, tensor=t, context=c, expert=e)
        for (b, t, c, e), total in totals.items()
    )


def _largest(facts: Facts, index: int) -> tuple[int, float]:
    """The largest operand or result of an op, and its elements, on which the op works."""
    op = facts.graph.ops[index]
    sizes = {
        value: float(math.prod(facts.graph.values[value].shape))
        for value in (*op.operands, *op.results)
    }
    value = max(sizes, key=lambda value: sizes[value])
    return value, sizes[value]


def _traffic_bytes(facts: Facts, op: Op, value: int) -> float:
    """Bytes that a kernel moves of a value: gathers, scatters and slices touch only what they
    select.
    """
    size = facts.graph.values[value].bytes
    if op.category in ("gather", "scatter") and value in op.operands:
        return min(
            size,
            (
                max(
                    (facts.graph.values[v].bytes for v in (*op.results, *op.operands[1:])),
                    default=size,
                )
                if op.category == "gather"
                else size
            ),
        )
    return size


def _core(op: Op) -> AttentionCore | None:
    head, scores = head_size(op), scores_per_flop(op)
    if not head and not scores:
        return None
    widths = head_widths(op) or (head, None)
    return AttentionCore(head=widths[0], value=widths[1], scores=scores)


def _matmul(op: Op, cut: Cut) -> Matmul | None:
    """The dims of a matmul; of so many as the factors have elements that both operands and the
    result have.
    """
    if op.category != "matmul" or len(op.operands) != 2:
        return None
    left, right, out = (
        {f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0])
    )
    return Matmul(
        rows=_extent(op, (left & out) - right, cut),
        columns=_extent(op, (right & out) - left, cut),
        depth=_extent(op, (left & right) - out, cut),
        batches=_extent(op, left & right & out, cut),
    )


def _extent(op: Op, group: set[int], cut: Cut) -> Amount:
    return amount(float(math.prod(op.rule.sizes[f] for f in group)), tuple(cut[f] for f in group))


def kernel_items(facts: Facts) -> list[Item]:
    """Items of the kernels of a step graph, in the order of `Facts.fusion`."""
    return [_compute_item(facts, kernel) for kernel in facts.fusion.kernels]
