"""The cost of taking a fused weight with its parts side by side.

A weight is stored in the model's order. Where the tensor axis shards a fused dim of it, the program
takes it in another order (`shardlib.lowering.reading.fused_dims`): devices deal out their columns
by rows, change the order, and deal them back, two all-to-alls of a device's part of the weight, and
as many for its gradient. A vector is gathered instead. Weights of a loop over layers are taken in
every iteration, and again where the layer is rematerialised; others, and those of layers that are
written out one by one, once in a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.cost.items.parameter_gathers import gathered
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import OUTSIDE_LAYERS, Item, Term, Transfer, amount, named
from shardlib.graph.problem import Problem
from shardlib.propagation.assignment import Choice, has

#: Fused dims of parameters, by path.
Fused = Mapping[str, frozenset[int]]


def fused_parameters(problem: Problem) -> Fused:
    """The fused dims of every parameter that has some."""
    fused: dict[str, frozenset[int]] = {}
    for index in problem.forward.inputs_of("parameter"):
        value = problem.forward.values[index]
        dims = frozenset(dim for dim in range(len(value.shape)) if (index, dim) in problem.pieces)
        fused.update({value.path: dims} if dims else {})
    return fused


def order_items(facts: Facts, fused: Fused) -> list[Item]:
    """Items of changes of the order of weights and of their gradients."""
    return [
        item
        for value, source in facts.sources.items()
        if (dims := fused.get(source.paths[0]))
        for item in _items(facts, value, frozenset(dim + source.stacked for dim in dims))
    ]


def _items(facts: Facts, value: int, dims: frozenset[int]) -> list[Item]:
    """One item for each place where a weight is taken, and one for its gradient."""
    graph, stack = facts.graph, facts.frozen_dims(value)
    uses = [use for use in gathered(facts) if use.source == value]
    inside = [use.region for use in uses if stack]
    written_out = value in facts.sources and facts.sources[value].stacked
    again = [] if written_out else sorted(inside)[1:]
    places = (
        [min(inside), *(region for region in again if _again(facts, region))] if inside else [0]
    )
    back = [max(inside)] if inside else [0]
    size = float(
        min(
            [
                graph.values[use.value].bytes
                * (facts.trips[use.region] if use.value != value and stack else 1)
                for use in uses
            ],
            default=graph.values[value].bytes,
        )
    )
    vector = len(graph.values[value].shape) - len(stack) < 2

    def item(region: int) -> Item:
        trips = facts.trips[region] if stack else 1

        def terms(choice: Choice) -> tuple[Term, ...]:
            cut = facts.value_cut(value, choice)
            if facts.widths.intersection(facts.names[value][dim] for dim in dims):
                return ()  # a kernel of attention reads it, so that it stays in order
            if not any(cut[dim] and has((cut[dim],), "tensor") for dim in dims):
                return ()
            gradient_bytes = amount(size / trips, cut)
            moved = Transfer(
                kind="all-gather" if vector else "all-to-all",
                group="tensor",
                bytes=gradient_bytes if not vector else amount(size / trips, (None,) * len(cut)),
                trips=trips,
                cause=graph.values[value].path,
            )
            return (moved,) if vector else (moved, moved)

        return Item(
            colours=named(facts.names[value]),
            terms=terms,
            segment=facts.layers.segment(region) if stack else OUTSIDE_LAYERS,
        )

    return [item(region) for region in (*places, *back)]


def _again(facts: Facts, region: int) -> bool:
    """Whether a region rematerialises layers."""
    return any(op.region == region and "rematted_computation" in op.scope for op in facts.graph.ops)
