"""Items of reductions: collectives of partial sums, of values and of gradients.

Results of a matmul whose contraction is sharded are partial sums. They are all-reduced, or
reduce-scattered where the result is sharded over the same axis; those that are only added to each
other are reduced once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import replace

from shardlib.cost.items.summands import Summands, sum_groups
from shardlib.cost.step.attention_kernels import KERNELS
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    Amount,
    Item,
    Needed,
    Transfer,
    amount,
    named,
)
from shardlib.graph import Op
from shardlib.propagation.assignment import Choice, Cut, has, kinds


def reduce_item(facts: Facts, summands: Summands) -> Item:
    """Reductions of partial results."""
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
    transfers: dict[tuple[str, int, int], Transfer] = {}
    makers: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index in summands.ops:
        seen = Counter[str]()  # an op may have several results
        for transfer in _reductions(facts, index, choice, looped=summands.looped):
            seen[transfer.group] += 1
            key = transfer.group, seen[transfer.group], 0
            small, large = sorted(
                (transfers.get(key, transfer), transfer), key=lambda pair: pair.bytes.total
            )
            if transfer.group == "gradient" and transfer.only != "whole" and key in transfers:
                again = (*key[:2], index)  # each use scatters its own
                transfers[again], makers[again] = replace(small, only="again"), [index]
            transfers[key] = large
            makers[key].append(index)
    return [(transfer, tuple(makers[key])) for key, transfer in transfers.items()]


def _reductions(facts: Facts, index: int, choice: Choice, *, looped: bool) -> tuple[Transfer, ...]:
    op = facts.graph.ops[index]
    cut = facts.op_cut(index, choice)
    partial = {kind for f in op.rule.summed for kind in kinds(cut[f])}
    transfers: list[Transfer] = []
    for value in op.results:
        value_cut = facts.value_cut(value, choice)
        if value in facts.gradients and partial & {"batch", "context"}:
            transfers += _gradient(facts, op, value, value_cut, "tensor" in partial, looped)
            continue
        size = _summed_bytes(facts, op, value)
        if size is None:
            continue
        unreduced = amount(size, value_cut)
        for axis in ("tensor", "context"):
            if axis not in partial or _whole_experts(facts, index, axis, choice):
                continue
            if axis == "context" and op.kind in KERNELS:
                transfers += _around_ring(facts, op, value, value_cut, unreduced)
            elif axis == "tensor" or "batch" not in partial:
                transfers.append(_over_axis(facts, op, axis, unreduced, value_cut, choice))
        if "batch" in partial:
            transfers.append(
                Transfer(
                    kind="reduce",
                    group="sum",
                    bytes=replace(unreduced, batch=False, context=False),
                    trips=_around(facts, op) if looped else facts.trips[op.region],
                    shape=facts.graph.values[value].shape,
                    cut=value_cut,
                    cause=_cause(op),
                )
            )
    return tuple(transfers)


def _gradient(
    facts: Facts, op: Op, value: int, cut: Cut, over_tensor: bool, looped: bool
) -> list[Transfer]:
    """The reduction of a parameter's gradient over the devices that share the batch: of one that a
    loop accumulates, whole ones are reduced after it.
    """
    reduced = Transfer(
        kind="reduce",
        group="gradient",
        bytes=replace(amount(_reduced_bytes(facts, value), cut), batch=False, context=False),
        trips=facts.trips[op.region],
        shape=facts.graph.values[value].shape,
        cut=cut,
        over_tensor=over_tensor,
        cause=_cause(op),
    )
    if not looped:
        return [reduced]
    return [
        replace(reduced, only="shards"),
        replace(reduced, only="whole", trips=_around(facts, op)),
    ]


def _summed_bytes(facts: Facts, op: Op, value: int) -> float | None:
    """Bytes of an activation's partial sums; None where nobody needs the sums."""
    if op.category == "gather":  # a lookup is one in the dtype in which its results are used
        return _reduced_bytes(facts, value)
    size = facts.graph.values[value].bytes
    if facts.routes and op.kind in GROUPED and facts.exchange.sent == "whole":
        if "rematted_computation" in op.scope:
            return None  # the backward pass needs no sums
        return size / facts.visits(value)  # a token's results are added up before
    return size


def _around_ring(
    facts: Facts, op: Op, value: int, cut: Cut, unreduced: Amount
) -> tuple[Transfer, Transfer]:
    """Gradients of keys and values: around the ring in float32, with the keys and values that they
    are of, or reduced, where keys are gathered.
    """
    size = 4 * math.prod(facts.graph.values[value].shape)
    ring = Transfer(
        kind="collective-permute",
        group="ring",
        bytes=replace(amount(size, cut), context=False),
        trips=facts.trips[op.region],
        cause=_cause(op),
    )
    reduced = Transfer(
        kind="reduce-scatter" if has(cut, "context") else "all-reduce",
        group="keys",
        bytes=replace(unreduced, context=False),
        trips=facts.trips[op.region],
        cause=_cause(op),
    )
    return ring, reduced


def _over_axis(
    facts: Facts, op: Op, axis: str, unreduced: Amount, cut: Cut, choice: Choice
) -> Transfer:
    """The reduction over tensor or context of what is not a gradient. Results of experts come home
    before they are added up, and there they are sharded along the sequence.
    """
    at_home = (
        axis == "tensor" and facts.routes and op.kind in GROUPED and choice.sequence is not None
    )
    return Transfer(
        kind="reduce-scatter" if has(cut, axis) or at_home else "all-reduce",
        group=axis,
        bytes=replace(unreduced, **{axis: False}),
        trips=facts.trips[op.region],
        cause=_cause(op),
    )


def _cause(op: Op) -> str:
    return op.scope or op.kind


def _around(facts: Facts, op: Op) -> int:
    """How often the loop runs that an op is in."""
    return facts.trips[facts.graph.regions[op.region].parent]


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
    value_, current = facts.graph.values[value], value
    smallest = value_.bytes
    while len(readers := facts.consumers.get(current, ())) == 1 and facts.graph.ops[
        readers[0]
    ].kind in (
        "transpose",
        "convert_element_type",
    ):
        current = facts.graph.ops[readers[0]].results[0]
        smallest = min(smallest, facts.graph.values[current].bytes)
    return smallest


def reductions_of(facts: Facts, choice: Choice) -> list[Needed]:
    """The reductions of partial results under a choice, with the ops that make each."""
    return [
        reduction
        for summands in sum_groups(facts)
        for reduction in _reduced(facts, summands, choice)
    ]
