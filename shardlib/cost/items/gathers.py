"""Items of gathers: collectives by which an op gets an operand that is sharded otherwise.

A value that is sharded over tensor along the sequence, and of which a matmul needs all rows, is
all-gathered; where the matmul takes another dim sharded, an all-to-all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace

from shardlib.cost.step.attention_kernels import (
    KERNELS,
)
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    Item,
    Needed,
    Transfer,
    amount,
    named,
)
from shardlib.propagation.assignment import Choice, has, kinds


def value_gather_item(facts: Facts, value: int) -> Item | None:
    """A value sharded over tensor (along the sequence) that some readers need whole or sharded
    otherwise: gathered once.

    Returns:
        None where nothing reads it, nothing could shard it, or it is a weight.
    """
    readers = _readers(facts, value)
    if not readers or not any(facts.names[value]) or value in facts.weights:
        return None
    colours = named(facts.names[value]).union(*(named(facts.factors[i]) for i in readers))
    return Item(
        colours=colours,
        terms=lambda choice: tuple(
            transfer for transfer, _ in _gathers(facts, value, readers, choice)
        ),
        segment=max(facts.layers.segment(facts.graph.ops[i].region) for i in readers),
        made_of=_made_of(facts, value, readers),
    )


def _made_of(facts: Facts, value: int, readers: list[int]) -> Hashable:
    """What the gathers of a value follow from; None where kernels of attention read it."""
    ops = [facts.graph.ops[i] for i in readers]
    if not facts.plain(readers, (value,)) or any(op.kind in KERNELS for op in ops):
        return None
    regions = list(dict.fromkeys(op.region for op in ops))
    rematerialised = _rematerialised(facts, readers)
    return (
        "gathers",
        facts.names[value],
        facts.graph.values[value].bytes,
        *(
            (
                op.rule,
                op.operands.index(value),
                facts.factors[index],
                facts.rows[index],
                facts.trips[op.region],
                regions.index(op.region),
                _apart(facts, index, rematerialised),
                _before_casts(facts, index, value),
            )
            for index, op in zip(readers, ops, strict=True)
        ),
    )


def _rematerialised(facts: Facts, readers: list[int]) -> set[int]:
    """Regions in which the backward pass rematerialises a value for some of its readers."""
    return {
        facts.graph.ops[i].region
        for i in readers
        if "rematted_computation" in facts.graph.ops[i].scope
    }


def _apart(facts: Facts, index: int, rematerialised: set[int]) -> bool:
    """Whether a reader gets a gather of its own: what the backward pass rematerialises is gathered
    for that by the compiler, and for the gradient of a weight by the manual region.
    """
    op = facts.graph.ops[index]
    return (
        op.results[0] in facts.gradients
        and not facts.traits.shares_gathers
        and op.region in rematerialised
    )


def _readers(facts: Facts, value: int) -> list[int]:
    """The ops that may need a value otherwise than it is sharded."""
    return [
        i
        for i in facts.consumers.get(value, ())
        if facts.graph.ops[i].category not in ("elementwise", "boundary")
    ]


def _gathers(facts: Facts, value: int, readers: list[int], choice: Choice) -> list[Needed]:
    cut = facts.value_cut(value, choice)
    if value in facts.weights:
        return []
    size = facts.graph.values[value].bytes
    rematerialised = _rematerialised(facts, readers)
    transfers: dict[tuple[str, str, int, bool], Transfer] = {}
    needing: dict[tuple[str, str, int, bool], list[int]] = defaultdict(list)

    def need(key: tuple[str, str, int, bool], transfer: Transfer, index: int) -> None:
        transfers.setdefault(key, transfer)
        needing[key].append(index)

    for axis in ("tensor", "context"):
        if not has(cut, axis):
            continue
        for index in readers:
            if axis == "tensor" and _exchanged(facts, index, value, choice):
                continue
            kind = _needs(facts, index, value, axis, choice)
            op = facts.graph.ops[index]
            if (
                kind and axis == "context" and op.kind in KERNELS
            ):  # around a ring for every kernel, in whole
                need(
                    (op.kind, "ring", op.region, False),
                    Transfer(
                        kind="collective-permute",
                        group="ring",
                        bytes=replace(amount(size, cut), context=False),
                        trips=facts.trips[op.region],
                        cause=op.scope or op.kind,
                    ),
                    index,
                )
            if kind:
                phase = _apart(facts, index, rematerialised)
                moved = (
                    amount(size, cut)
                    if kind == "all-to-all"
                    else replace(amount(_before_casts(facts, index, value), cut), **{axis: False})
                )
                group = "keys" if axis == "context" and op.kind in KERNELS else axis
                need(
                    (group, kind, op.region, phase),
                    Transfer(
                        kind=kind,
                        group=group,
                        bytes=moved,
                        trips=facts.trips[op.region],
                        cause=op.scope or op.kind,
                    ),
                    index,
                )
    return [(transfer, tuple(needing[key])) for key, transfer in transfers.items()]


def _before_casts(facts: Facts, index: int, value: int) -> int:
    """Bytes of a value as it is gathered: for the gradient of a weight in the narrowest dtype that
    it was cast from. Casts that take a scale, into 8 bits, are none of these.
    """
    graph, size = facts.graph, facts.graph.values[value].bytes
    producers = facts.producers
    while (
        graph.ops[index].results[0] in facts.gradients
        and value in producers
        and graph.ops[producers[value]].kind == "convert_element_type"
        and len(graph.ops[producers[value]].operands) == 1
    ):
        (value,) = graph.ops[producers[value]].operands
        size = min(size, graph.values[value].bytes)
    return size


def _exchanged(facts: Facts, index: int, value: int, choice: Choice) -> bool:
    """Whether a kernel of attention, or what lies between it and a projection, gets a value by the
    exchange of parts of the sequence, or of the width of heads, for heads (`exchanges.py`).
    """
    return facts.shares_heads(index, choice) or facts.turned(value, choice)


def _needs(facts: Facts, index: int, value: int, axis: str, choice: Choice) -> str | None:
    """The collective by which an op gets an operand that an axis shards; None where it takes it as
    it is.
    """
    op, cut = facts.graph.ops[index], facts.op_cut(index, choice)
    dims = op.rule.operands[op.operands.index(value)]
    needed = tuple(
        kinds(cut[major]) if (major := op.rule.major(dim)) is not None else () for dim in dims
    )
    position = next(
        dim for dim, part in enumerate(facts.value_cut(value, choice)) if axis in kinds(part)
    )
    if axis in needed[position]:
        return None
    return "all-to-all" if any(axis in parts for parts in needed) else "all-gather"


def gathers_of(facts: Facts, choice: Choice) -> list[Needed]:
    """The gathers of values under a choice, with the ops that need each."""
    return [
        gather
        for value in facts.consumers
        if any(facts.names[value])
        for gather in _gathers(facts, value, _readers(facts, value), choice)
    ]
