"""Items of exchanges: tokens to experts and back (dispatch and combine), heads around a kernel of
attention, and activations from one pipeline stage to the next.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.cost.step.attention_kernels import (
    BACKWARD,
)
from shardlib.cost.step.capacity_experts import slots_of
from shardlib.cost.step.routed_experts import GROUPED, routed_values
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    OUTSIDE_LAYERS,
    Amount,
    Item,
    Routed,
    Term,
    Transfer,
    amount,
    named,
)
from shardlib.graph import Op
from shardlib.propagation.assignment import Choice, has


def exchange_item(facts: Facts, index: int) -> Item:
    """What devices exchange for heads around a kernel of attention (arXiv:2309.14509): forward
    queries, keys, values and results, and before the gradients that of the results; backward the
    other gradients.
    """
    op, moved = facts.graph.ops[index], moved_values(facts, index)

    def terms(choice: Choice) -> tuple[Term, ...]:
        return tuple(
            Transfer(
                kind="all-to-all",
                group="exchange",
                bytes=amount(facts.graph.values[value].bytes, cut),
                trips=times * facts.trips[op.region],
                cause=op.scope or op.kind,
            )
            for value, times in moved
            if has(cut := facts.value_cut(value, choice), "context") and len(cut) > 2
        )

    return Item(
        colours=frozenset[str]().union(*(named(facts.names[value]) for value, _ in moved)),
        terms=terms,
        segment=facts.layers.segment(op.region),
    )


def moved_values(facts: Facts, index: int) -> list[tuple[int, int]]:
    """What goes into a kernel of attention and comes out of it, with how often in all: the results
    of a forward pass and, unless it is rematerialised, their gradient, which comes in backward.
    """
    op = facts.graph.ops[index]
    if op.kind == BACKWARD:
        return [(value, 1) for value in op.results]
    once = (
        1
        if "rematted_computation" in op.scope
        or not any(later.kind == BACKWARD for later in facts.graph.ops)
        else 2
    )
    return [*((value, 1) for value in op.operands), (op.results[0], once)]


def routed_load(facts: Facts, op: Op, value: int, choice: Choice) -> Routed:
    """The rows of an array of tokens and the experts of its region, that of the largest stack of
    matrices in a grouped matmul.
    """
    capped = facts.capped.get(op.region)
    shapes = [
        facts.graph.values[v].shape
        for matmul in facts.graph.ops
        if matmul.kind in GROUPED and matmul.region == op.region
        for v in (*matmul.operands[:2], *matmul.results)
    ]
    experts = max(shape[0] for shape in shapes if len(shape) == 3)
    shape, cut = facts.graph.values[value].shape, facts.value_cut(value, choice)
    rows = amount(
        float(capped.assignments if capped is not None and len(shape) == 3 else shape[0]),
        cut[: max(1, len(shape) - 1)],
    )
    return Routed(
        rows=rows,
        experts=Amount(
            total=float(experts), batch=False, tensor=False, expert=choice.expert is not None
        ),
        most=capped.factor if capped is not None else None,
    )


def route_items(facts: Facts) -> list[Item]:
    """All-to-alls that send tokens to their experts and bring them home."""

    def item(index: int, value: int) -> Item:
        op, capped = facts.graph.ops[index], facts.capped.get(facts.graph.ops[index].region)
        size = facts.graph.values[value].bytes * facts.exchange.room
        if capped is not None:  # of the rows of slots, as many as there are assignments are sent
            size *= capped.assignments / slots_of(facts.graph, value)

        def terms(choice: Choice) -> tuple[Term, ...]:
            if choice.expert is None:
                return _gathered_tokens(facts, index, value, choice)
            gathered = (
                _gathered_tokens(facts, index, value, choice)
                if facts.exchange.sent == "whole"
                else ()
            )
            tokens = amount(float(size), facts.value_cut(value, choice))
            split_ranks = facts.exchange.sent != "whole" and choice.sequence is not None
            sent = Transfer(
                kind="all-to-all",
                group="expert",
                bytes=replace(tokens, tensor=tokens.tensor or split_ranks),
                trips=facts.trips[op.region],
                cause=op.scope or op.kind,
                routed=routed_load(facts, op, value, choice),
            )
            if not split_ranks or tokens.tensor or facts.exchange.sent == "ranks":
                return (sent, *gathered)
            # Of rows that go out and come home, forward and backward, half are gathered; the other
            # half are partial sums, which `reductions` scatters.
            arrived = replace(
                sent,
                kind="all-gather",
                group="tensor",
                bytes=replace(tokens, total=tokens.total / 2),
                routed=None,
            )
            return (sent, arrived)

        colours = named(facts.names[value])
        if facts.sequence is not None:
            colours |= {facts.sequence, *facts.widths_of(op.region)}  # what is sent depends on them
        return Item(colours=colours, terms=terms, segment=facts.layers.segment(op.region))

    return (
        [
            item(index, value)
            for index, value in routed_values(facts.graph, facts.names, facts.batch)
        ]
        if facts.routes
        else []
    )


def _gathered_tokens(facts: Facts, index: int, value: int, choice: Choice) -> tuple[Term, ...]:
    """What is gathered where every device along tensor has a part of the width of its experts, and
    a part of the sequence: of rows that go out and come home, tokens are gathered before they go
    out; sums are scattered when they are home (`reductions`).
    """
    op = facts.graph.ops[index]
    if choice.sequence is None or not facts.shares_width(op.region, choice):
        return ()
    tokens = amount(float(facts.graph.values[value].bytes), facts.value_cut(value, choice))
    return (
        Transfer(
            kind="all-gather",
            group="tensor",
            bytes=replace(tokens, total=tokens.total / 2 / facts.visits(value), tensor=False),
            trips=facts.trips[op.region],
            cause=op.scope or op.kind,
        ),
    )


def boundary_items(facts: Facts) -> list[Item]:
    """What a pipeline stage hands to the next, and its cotangent on the way back: the residual
    stream, once for each microbatch. Where all stages compute embedding and head, a device has a
    part of it there: what enters the first stage, or goes back to the last, is gathered over the
    stages, and what leaves is scattered.
    """
    carried = [value for value in facts.layers.carried if value >= 0][:1]

    def item(value: int) -> Item:
        def terms(choice: Choice) -> tuple[Term, ...]:
            size = amount(float(facts.graph.values[value].bytes), facts.value_cut(value, choice))
            return tuple(
                Transfer(kind=kind, group=group, bytes=size, trips=2, cause=cause)
                for kind, group, cause in (
                    ("collective-permute", "stage", "between stages"),
                    ("all-gather", "ends", "into the stages"),
                    ("reduce-scatter", "ends", "out of the stages"),
                )
            )

        return Item(colours=named(facts.names[value]), terms=terms, segment=OUTSIDE_LAYERS)

    return [item(value) for value in carried]
