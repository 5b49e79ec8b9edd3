"""The chain of a model, read from its forward pass: which ops, kernels, weights and values belong
to each piece, and what pieces hand on.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from shardlib.cost.items.kernels import kernel_items
from shardlib.cost.step.fusion import traits
from shardlib.cost.step.liveness import intervals, leaves_loop
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import OUTSIDE_LAYERS, Compute
from shardlib.errors import TracingError
from shardlib.graph import Op
from shardlib.graph.forward import forward_pass
from shardlib.graph.problem import Problem
from shardlib.planning.edge.chain import Chain, Group
from shardlib.propagation.assignment import Choice

Array = np.ndarray


def chain_of(problem: Problem, vendor: str) -> Chain:
    """The chain of a model, with kernels as a vendor's compiler makes them."""
    step = problem.steps["none"]
    graph = forward_pass(step.graph, saves=False)
    facts = Facts(
        replace(step, graph=graph, gradients=()),
        tuple((None,) * len(value.shape) for value in graph.values),
        frozenset(),
        traits(vendor),
    )
    groups = _groups(facts)
    if not any(group.layers >= 0 for group in groups):
        raise TracingError(
            f"{problem.model} has no layers that repeat, so it is no chain that devices could take"
            " parts of\nTry: layers of one shape, in a loop or a scan"
        )
    owner = np.full(len(graph.ops), -1)
    for number, group in enumerate(groups):
        owner[group.first : group.last + 1] = number
    kernels, shared, live = (
        _kernels(facts, groups, owner),
        _shared(facts, groups, owner),
        _live(facts),
    )
    sized_groups = tuple(
        replace(
            group,
            kernels=tuple(kernels[k]),
            weights=_sliced(facts, group),
            shared=frozenset(shared[k]),
            working=float(live[group.first : group.last + 1].max()),
            inner=_handed(facts, group, group.first) if group.layers >= 0 else 0.0,
            outer=_handed(facts, None, group.last + 1),
        )
        for k, group in enumerate(groups)
    )
    return Chain(
        groups=sized_groups,
        sizes={
            value: float(graph.values[value].bytes) for reads in shared.values() for value in reads
        },
    )


def _groups(facts: Facts) -> list[Group]:
    """The groups of a program, with their ops."""
    layers, total = facts.layers, len(facts.graph.ops)
    spans: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(facts.graph.ops):
        number = layers.segment(op.region)
        if number != OUTSIDE_LAYERS:
            spans[number] = (spans.get(number, (index, index))[0], index)
    listed: list[Group] = []
    start = 0
    for number, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first > start:
            listed.append(
                Group(
                    name="between layers" if listed else "before the layers",
                    count=1,
                    layers=OUTSIDE_LAYERS,
                    first=start,
                    last=first - 1,
                )
            )
        listed.append(
            Group(name="layer", count=layers.counts[number], layers=number, first=first, last=last)
        )
        start = last + 1
    return (
        [
            *listed,
            Group(
                name="after the layers", count=1, layers=OUTSIDE_LAYERS, first=start, last=total - 1
            ),
        ]
        if start < total
        else listed
    )


def _kernels(facts: Facts, groups: list[Group], owner: Array) -> dict[int, list[Compute]]:
    """Kernels of one piece of each group."""
    by_group: dict[int, list[Compute]] = defaultdict(list)
    for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True):
        number = int(owner[kernel.op])
        for term in item.terms(Choice()):
            assert isinstance(term, Compute)
            by_group[number].append(replace(term, trips=term.trips // groups[number].count))
    return by_group


def _sliced(facts: Facts, group: Group) -> float:
    """Bytes of parameters of which every piece of a group has a slice."""
    values = facts.graph.values
    sliced = {
        facts.weights[op.operands[0]]
        for op in facts.graph.ops[group.first : group.last + 1]
        if op.kind == "enter"
        and op.operands[0] in facts.weights
        and facts.layers.segment(op.region) == group.layers
    }
    return sum(values[value].bytes for value in sliced) / group.count if group.layers >= 0 else 0.0


def _shared(facts: Facts, groups: list[Group], owner: Array) -> dict[int, set[int]]:
    """Parameters that the pieces of a group read whole."""
    read_whole: dict[int, set[int]] = defaultdict(set)
    slices: set[int] = set()
    for index, op in enumerate(facts.graph.ops):
        if (
            op.results and op.results[0] in facts.weights
        ):  # slices, casts and views of parameters are no uses
            if op.kind == "enter" or slices.intersection(op.operands):
                slices.update(op.results)
            continue
        read_whole[int(owner[index])].update(
            facts.weights[value]
            for value in op.operands
            if value in facts.weights and value not in slices
        )
    return read_whole


def _live(facts: Facts) -> Array:
    """Bytes of values alive while each op runs, weights left out."""
    graph = facts.graph
    change = np.zeros(len(graph.ops) + 1)
    for value, (birth, death) in intervals(graph, facts.fusion, frozenset(facts.weights)).items():
        change[birth] += graph.values[value].bytes
        change[death + 1] -= graph.values[value].bytes
    return np.cumsum(change)[:-1]


def _handed(facts: Facts, group: Group | None, position: int) -> float:
    """Bytes that are handed on where the program is cut: before op `position`, or, with a
    group, between two of its pieces.
    """
    graph = facts.graph
    of_batch = _of_batch(facts)

    def enters(op: Op) -> bool:
        return (
            op.kind == "carry"
            and not leaves_loop(op)
            and group is not None
            and facts.layers.segment(op.region) == group.layers
            and graph.regions[op.region].parent == 0
        )

    before = {value for op in graph.ops[:position] for value in op.results} | set(graph.inputs)
    entering = {op.operands[0] for op in graph.ops if enters(op)}
    crossing = {
        value
        for op in graph.ops[position:]
        for value in op.operands
        if value in before and value in of_batch
    } | (set(graph.outputs) & before & of_batch)
    if group is None:
        return float(sum(graph.values[value].bytes for value in crossing))
    carried = {op.results[0] for op in graph.ops if enters(op)}
    read = {value for op in graph.ops[position:] if not enters(op) for value in op.operands}
    return float(
        sum(
            graph.values[value].bytes
            for value in (carried & of_batch)
            | {value for value in crossing if value not in entering or value in read}
        )
    )


def _of_batch(facts: Facts) -> set[int]:
    """Values that depend on the batch."""
    graph = facts.graph
    dependent = set(graph.inputs_of("batch"))
    for _ in range(2):  # what goes around a loop is found the second time
        for op in graph.ops:
            if dependent.intersection(op.operands):
                dependent.update(op.results)
    return dependent
