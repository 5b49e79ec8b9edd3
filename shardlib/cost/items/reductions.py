"""Items of reductions: collectives of partial sums, of values and of gradients.

Results of a matmul whose contraction is sharded are partial sums. They are all-reduced, or
reduce-scattered where the result is sharded over the same axis; those that are only added to each
other are reduced once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

from shardlib.cost.step.attention_kernels import KERNELS
from shardlib.cost.step.liveness import accumulators
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    Item,
    Needed,
    Transfer,
    amount,
    named,
)
from shardlib.graph import Op
from shardlib.propagation.assignment import Choice, has, kinds

#: Ops that only rearrange or cast their operand, so that a sum may be taken on either side of them.
_LINEAR_VIEWS: frozenset[str] = frozenset(
    {"transpose", "reshape", "convert_element_type", "copy", "squeeze", "expand_dims"}
)


@dataclass(frozen=True, kw_only=True)
class Summands:
    """Ops whose results are only added to each other, so that the compiler reduces them once.

    Attributes:
        ops: their numbers.
        looped: whether a loop adds them to a sum that it carries. Partial sums over the batch are
            then reduced once, after the loop (openxla/xla
            `xla/service/while_loop_all_reduce_code_motion.cc`).
    """

    ops: tuple[int, ...]
    looped: bool


def reduce_item(facts: Facts, summands: Summands) -> Item:
    """Reductions of partial results.

    Args:
        facts: of the step.
        summands: ops whose results are reduced together.
    """
    group = summands.ops
    colours = frozenset[str]().union(
        *(
            named(facts.factors[i]) | named(facts.names[facts.graph.ops[i].results[0]])
            for i in group
        )
    )
    if (
        facts.routes
        and facts.sequence is not None
        and any(facts.graph.ops[i].kind in GROUPED for i in group)
    ):
        colours |= {facts.sequence}  # how results come home depends on it
    return Item(
        colours=colours,
        terms=lambda choice: tuple(transfer for transfer, _ in _reduced(facts, summands, choice)),
        segment=facts.layers.segment(facts.graph.ops[group[0]].region),
        made_of=_made_of(facts, summands),
    )


def _made_of(facts: Facts, summands: Summands) -> Hashable:
    """What the reductions of some ops follow from; None where these are kernels of attention or
    products of experts.
    """
    group, ops = summands.ops, [facts.graph.ops[index] for index in summands.ops]
    if not facts.plain(group, [value for op in ops for value in op.results]) or any(
        op.kind in KERNELS or op.kind in GROUPED for op in ops
    ):
        return None
    values = facts.graph.values
    return (
        "reductions",
        summands.looped,
        *(
            (
                (op.rule, op.category == "gather", facts.trips[op.region]),
                (facts.factors[index], facts.rows[index]),
                *(
                    (
                        (facts.names[value], value in facts.gradients),
                        (values[value].shape, values[value].bytes, _reduced_bytes(facts, value)),
                    )
                    for value in op.results
                ),
            )
            for index, op in zip(group, ops, strict=True)
        ),
    )


def _reduced(facts: Facts, summands: Summands, choice: Choice) -> list[Needed]:
    found: dict[tuple[str, int, int], Transfer] = {}
    makers: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index in summands.ops:
        seen = Counter[str]()  # an op may have several results
        for transfer in _reductions(facts, index, choice, looped=summands.looped):
            seen[transfer.group] += 1
            key = transfer.group, seen[transfer.group], 0
            small, large = sorted(
                (found.get(key, transfer), transfer), key=lambda one: one.bytes.total
            )
            if transfer.group == "gradient" and key in found:  # each use scatters its own
                again = (*key[:2], index)
                found[again], makers[again] = replace(small, again=True), [index]
            found[key] = large
            makers[key].append(index)
    return [(transfer, tuple(makers[key])) for key, transfer in found.items()]


def _reductions(facts: Facts, index: int, choice: Choice, *, looped: bool) -> tuple[Transfer, ...]:
    op = facts.graph.ops[index]
    cut = facts.op_cut(index, choice)
    partial = {kind for f in op.rule.summed for kind in kinds(cut[f])}
    found: list[Transfer] = []
    for value in op.results:
        where = facts.value_cut(value, choice)
        shape, trips = facts.graph.values[value].shape, facts.trips[op.region]
        cause = op.scope or op.kind
        if value in facts.gradients and partial & {"batch", "context"}:
            found.append(
                Transfer(
                    kind="reduce",
                    group="gradient",
                    bytes=replace(
                        amount(_reduced_bytes(facts, value), where), batch=False, context=False
                    ),
                    trips=trips,
                    shape=shape,
                    cut=where,
                    over_tensor="tensor" in partial,
                    cause=cause,
                )
            )
            continue
        # A lookup is one in the dtype in which its results are used.
        size = (
            _reduced_bytes(facts, value)
            if op.category == "gather"
            else facts.graph.values[value].bytes
        )
        if facts.routes and op.kind in GROUPED and facts.exchange.sent == "whole":
            if "rematted_computation" in op.scope:
                continue  # the backward pass needs no sums
            size /= facts.visits(value)  # a token's results are added up before
        whole = amount(size, where)
        for axis in ("tensor", "context"):
            if (
                axis == "context" and axis in partial and op.kind in KERNELS
            ):  # around a ring in float32, with the keys and values that it is for
                found.append(
                    Transfer(
                        kind="collective-permute",
                        group="ring",
                        bytes=replace(amount(4 * math.prod(shape), where), context=False),
                        trips=trips,
                        cause=cause,
                    )
                )
                found.append(
                    Transfer(
                        kind="reduce-scatter" if has(where, axis) else "all-reduce",
                        group="keys",
                        bytes=replace(whole, context=False),
                        trips=trips,
                        cause=cause,
                    )
                )
            elif _whole_experts(facts, index, axis, choice):
                continue
            elif axis in partial and not (axis == "context" and "batch" in partial):
                # Results of experts come home before they are added up, and there they are sharded
                # along the sequence.
                scattered = has(where, axis) or (
                    axis == "tensor"
                    and facts.routes
                    and op.kind in GROUPED
                    and choice.sequence is not None
                )
                found.append(
                    Transfer(
                        kind="reduce-scatter" if scattered else "all-reduce",
                        group=axis,
                        bytes=replace(whole, **{axis: False}),
                        trips=trips,
                        cause=cause,
                    )
                )
        if "batch" in partial:
            found.append(
                Transfer(
                    kind="reduce",
                    group="sum",
                    bytes=replace(whole, batch=False, context=False),
                    trips=facts.trips[facts.graph.regions[op.region].parent] if looped else trips,
                    shape=shape,
                    cut=where,
                    cause=cause,
                )
            )
    return tuple(found)


def _whole_experts(facts: Facts, index: int, axis: str, choice: Choice) -> bool:
    """Whether what looks like partial sums over an axis are sums of whole experts, of which ranks
    of tensor have different ones.
    """
    return (
        axis == "tensor"
        and facts.exchange.sent == "ranks"
        and facts.routes
        and choice.sequence is not None
        and facts.graph.ops[index].kind in GROUPED
    )


def _reduced_bytes(facts: Facts, value: int) -> int:
    """Bytes of partial sums as they are reduced: in the dtype of the weight in use, to which a
    contraction's gradient, or a row of a table, is cast at once.
    """
    value_, at = facts.graph.values[value], value
    smallest = value_.bytes
    while len(readers := facts.consumers.get(at, ())) == 1 and facts.graph.ops[readers[0]].kind in (
        "transpose",
        "convert_element_type",
    ):
        at = facts.graph.ops[readers[0]].results[0]
        smallest = min(smallest, facts.graph.values[at].bytes)
    return smallest


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
        for one in accumulators(graph)
        if (maker := origin(one.added)) is not None
    }
    groups: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(graph.ops):
        if op.rule.summed:
            groups[leader.get(index, index)].append(index)
    return [Summands(ops=tuple(ops), looped=first in looped) for first, ops in groups.items()]


def _is_view(op: Op) -> bool:
    """Whether an op only rearranges or casts its operand; so does a sum over dims of size 1."""
    return op.kind in _LINEAR_VIEWS or (op.kind == "reduce_sum" and not op.rule.summed)


def reductions_of(facts: Facts, choice: Choice) -> list[Needed]:
    """The reductions of partial results under a choice, with the ops that make each.

    Args:
        facts: of the step.
        choice: what shards colours.
    """
    return [one for summands in sum_groups(facts) for one in _reduced(facts, summands, choice)]
