"""Gathers of parameters that are stored sharded: where, and in which dtype."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import Item, Term, Transfer, amount, named
from shardlib.graph import Op
from shardlib.propagation.assignment import Choice


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A parameter in use in one region of the program.

    Attributes:
        source: value of the parameter.
        value: what is gathered: the parameter, or the narrowest cast of it.
        region: where.
        uses: indices of the ops that use it.
    """

    source: int
    value: int
    region: int
    uses: tuple[int, ...]


def gathered(facts: Facts) -> list[Gathered]:
    """Parameters and the ops that use them with activations: stored sharded over fsdp, each is
    gathered once per region, in its narrowest dtype.
    """
    uses: dict[tuple[int, int], list[int]] = defaultdict(list)
    values: dict[tuple[int, int], int] = {}
    for index, op in enumerate(facts.graph.ops):
        if (
            all(value in facts.weights for value in op.results)
            or op.category == "boundary"
            or _of_pieces(facts, op)
        ):
            continue
        for value in dict.fromkeys(op.operands):
            source = facts.weights.get(value)
            if source is None or len(facts.graph.values[value].shape) < 2:
                continue
            key = source, op.region
            uses[key].append(index)
            narrow = _cast_rows(facts, op) if op.category == "gather" else 1.0
            size = facts.graph.values[value].bytes * narrow
            if key not in values or size < facts.graph.values[values[key]].bytes:
                values[key] = value
    return [
        Gathered(source=source, value=values[source, region], region=region, uses=tuple(ops))
        for (source, region), ops in uses.items()
    ]


def _of_pieces(facts: Facts, op: Op) -> bool:
    """Whether an op makes something of parameters alone, element by element, and so of their
    pieces: the moving average of one.
    """
    return op.category == "elementwise" and all(
        value in facts.weights for value in op.operands if facts.graph.values[value].shape
    )


def _cast_rows(facts: Facts, op: Op) -> float:
    """How much smaller rows become by the cast that follows their lookup: XLA casts the table
    instead, before it gathers it.
    """
    readers = facts.consumers.get(op.results[0], ())
    if len(readers) != 1 or facts.graph.ops[readers[0]].kind != "convert_element_type":
        return 1.0
    return min(
        1.0,
        facts.graph.values[facts.graph.ops[readers[0]].results[0]].bytes
        / facts.graph.values[op.results[0]].bytes,
    )


def gathered_bytes(facts: Facts, item: Gathered) -> float:
    """Bytes of a gathered parameter on a device that nothing shards further; fewer where tables are
    looked up in a narrower dtype.
    """
    lookups = [
        facts.graph.ops[use] for use in item.uses if facts.graph.ops[use].category == "gather"
    ]
    narrow = min(
        (_cast_rows(facts, op) for op in lookups if item.value in op.operands), default=1.0
    )
    return facts.graph.values[item.value].bytes * narrow


def _times(facts: Facts, item: Gathered) -> int:
    """How often a parameter is gathered in a region: in every iteration, but for what those of a
    forward loop have in common (the matrix of a recurrence), which JAX computes before the loop
    (`_scan_partial_eval` of jax-ml/jax `jax/_src/lax/control_flow/loops.py`).
    """
    values, trips = facts.graph.values, facts.trips[item.region]
    if any("transpose(" in facts.graph.ops[use].scope for use in item.uses):
        return trips
    parts = math.prod(values[item.source].shape) // max(1, math.prod(values[item.value].shape))
    return min(trips, max(1, parts))


def gather_item(facts: Facts, item: Gathered) -> Item:
    """The all-gathers of a parameter that is stored sharded, before its uses, and what they hold."""
    parameter = facts.graph.values[item.source]
    trips = _times(facts, item)

    def terms(choice: Choice) -> tuple[Term, ...]:
        cut = facts.value_cut(item.source, choice)
        return (
            Transfer(
                kind="all-gather",
                group="gather",
                bytes=amount(gathered_bytes(facts, item), cut),
                trips=trips,
                shape=parameter.shape,
                cut=cut,
                frozen=facts.frozen_dims(item.source),
                cause=parameter.path,
            ),
        )

    return Item(
        colours=named(facts.names[item.source]),
        terms=terms,
        segment=facts.layers.segment(item.region),
    )
