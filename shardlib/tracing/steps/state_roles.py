"""What is each array of a step's state, by what the step does with it?

    weight     a matmul, a convolution or a lookup uses it beside values that depend on the batch,
               or it is added to or multiplied with something that has the rows of the batch
    follower   a float array that only element-wise updates see: moments, averages
    other      counters, keys, scalars

A weight's *gradient* is what the step makes its new value of: the sum over all contractions, of as
many elements as the weight, that reach the new value through element-wise operations; where loops
or branches make it, their result. A weight
whose new value depends on none is frozen, as a teacher is. One whose new value is made of another
weight, which is made without it, follows that, as an average that is also used does: it has no
gradient of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.graph.graph import Graph, Op

#: Operations that show the same array in another form.
_VIEWS = frozenset(
    {
        "convert_element_type",
        "transpose",
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "copy",
        "slice",
        "dynamic_slice",
        "rev",
        "enter",
        "carry",
        "reduce_precision",
        "optimization_barrier",
    }
)
_USES = frozenset({"matmul", "convolution", "gather"})
#: Where gradients come from.
_SOURCES = frozenset({"matmul", "convolution", "scatter", "reduction"})
_SUMS = frozenset(
    {"add", "add_any", "convert_element_type", "transpose", "reshape", "exit", "carry"}
)


@dataclass(frozen=True, kw_only=True)
class StateRoles:
    """What the arrays of a state are, as numbers of the graph's inputs.

    Attributes:
        weights: that the step computes with.
        gradients: of these, those that have one, and its value in the graph.
        followers: of the other float arrays with a dim.
    """

    weights: tuple[int, ...]
    gradients: Mapping[int, int]
    followers: tuple[int, ...]


def state_roles(graph: Graph, count: int, batch: frozenset[tuple[int, int]]) -> StateRoles:
    """What each array of the state is."""
    state = graph.inputs[:count]
    used = _used(graph, state, batch)
    floats = [
        number
        for number, value in enumerate(state)
        if graph.values[value].shape and "float" in graph.values[value].dtype
    ]
    weights = [number for number in floats if state[number] in used]
    gradients = {
        number: _gradient(graph, state[number], graph.outputs[number]) for number in weights
    }
    numbers = {state[number]: number for number in weights}
    read = {
        number: {numbers[value] for value in values if value in numbers} - {number}
        for number, (_, values) in gradients.items()
    }
    followed = {
        number
        for number in weights
        for other_number in read[number]
        if number not in read[other_number]
    }
    return StateRoles(
        weights=tuple(weights),
        gradients={
            number: value
            for number, (value, _) in gradients.items()
            if value is not None and number not in followed
        },
        followers=tuple(number for number in floats if state[number] not in used),
    )


def _used(
    graph: Graph, state: tuple[int, ...], batch: frozenset[tuple[int, int]]
) -> frozenset[int]:
    """The arrays of the state that the step computes with."""
    views: dict[int, int] = {value: value for value in state}
    rows = {value for value, _ in batch}
    moving = {value for value in graph.inputs if value not in views}
    used: set[int] = set()
    for op in graph.ops:
        shown = [views[value] for value in op.operands if value in views]
        others = [value for value in op.operands if value not in views]
        if op.kind in _VIEWS and shown and not others:
            views.update(dict.fromkeys(op.results, shown[0]))
            continue
        if any(value in moving for value in others):
            moving.update(op.results)
            if (op.category in _USES) or any(value in rows for value in others):
                used.update(shown)
        elif shown:  # of the state alone, such as a key that becomes random numbers
            moving.update(value for value in op.results if op.category in _USES)
    return frozenset(used)


def _gradient(graph: Graph, weight: int, new: int) -> tuple[int | None, set[int]]:
    """The value that is the gradient of a weight, None where its new value depends on none; and the
    values that the new one is made of, element by element.
    """
    if new == weight:
        return None, set()
    size = math.prod(graph.values[weight].shape)
    producers = {value: op for op in graph.ops for value in op.results}
    order = {value: position for position, op in enumerate(graph.ops) for value in op.results}

    def like(value: int) -> bool:
        return math.prod(graph.values[value].shape) == size

    sources: set[int] = set()
    seen, waiting = {new}, [new]
    while waiting:
        value = waiting.pop()
        op = producers.get(value)
        if op is None:
            continue
        if op.category in _SOURCES or op.region != 0 or "/join/" in op.path:
            sources.add(value)
            continue
        for operand in op.operands:
            if operand not in seen and like(operand):
                seen.add(operand)
                waiting.append(operand)
    if not sources:
        return None, seen
    summed = set(sources)
    for op in graph.ops:
        if (
            op.region == 0
            and _adds(op)
            and all(value in summed for value in op.operands if like(value))
        ):
            summed.update(
                value
                for value in op.results
                if value in seen
                and like(value)
                and any(operand in summed for operand in op.operands)
            )
    return max(summed, key=lambda value: order[value]), seen


def _adds(op: Op) -> bool:
    return op.kind in _SUMS
