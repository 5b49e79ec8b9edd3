"""The losses that a step marks: where they stand, and which arrays of the state they are given.

An operand of a loss is an array of the state, or made of one element by element, as updated weights
are: that array is its *root*. Params and weights among the rest are planned and laid out as their
roots are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

from shardlib.errors import TracingError, raise_all
from shardlib.functions.losses import MarkedLoss
from shardlib.graph.graph import Graph
from shardlib.tracing.graph_parts import PlacedCall
from shardlib.tracing.program import Call

#: Categories of operations that make something else of an array.
_OTHERS = frozenset({"matmul", "convolution", "scatter", "reduction", "gather"})


@dataclass(frozen=True, kw_only=True)
class FoundLoss:
    """A marked loss in a step.

    Attributes:
        call: where it stands.
        form: the loss.
        operands: values of the step's graph, one for each leaf of (params, batch, *rest).
        roots: for each leaf the number of the array of the state that it is made of; None for those
            of the batch, and of what is made of no weight.
    """

    call: Call
    form: MarkedLoss
    operands: tuple[int, ...]
    roots: tuple[int | None, ...]

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions of the leaves whose gradients are asked for."""
        return tuple(at for at, flag in enumerate(self.form.trained) if flag)

    @property
    def frozen(self) -> tuple[int, ...]:
        """Positions of other leaves that are weights."""
        known = {at for at, root in enumerate(self.roots) if root is not None}
        return tuple(sorted(known - {*self.trained}))

    @property
    def others(self) -> tuple[int, ...]:
        """Positions of the leaves that are no weights."""
        return tuple(at for at, root in enumerate(self.roots) if root is None)

    def of_batch(self, position: int) -> bool:
        """Whether a leaf belongs to the batch."""
        _, first, last = parts(self.form)[:3]
        return first <= position < last


def parts(form: MarkedLoss) -> list[int]:
    """[0, leaves of the params, of the batch too, of the rest too ...]."""
    return [
        0,
        *accumulate(one.num_leaves for one in form.inputs.children()),
        form.inputs.num_leaves,
    ]


def found_losses(
    calls: Mapping[str, PlacedCall], graph: Graph, state: int, weights: Collection[int], step: str
) -> tuple[FoundLoss, ...]:
    """The marked losses of a step, in order.

    Args:
        calls: the custom calls of the step, by path.
        graph: of the step; its first inputs are the state.
        state: how many arrays the state has.
        weights: numbers of those that the step computes with.
        step: what to call it in messages.

    Raises:
        TracingError: a loss closes over what the step computes, or params are made of no array of
            the state; all of them are listed.
    """
    marked = [
        (call, values) for call, values in calls.values() if isinstance(call.form, MarkedLoss)
    ]
    captured = [
        f"{call.form.name} closes over {', '.join(aval.str_short() for aval in call.form.captured)}"
        for call, _ in marked
        if call.form.captured
    ]
    if captured:
        raise_all(
            TracingError,
            f"losses of the step {step} get arrays of the step otherwise than as arguments",
            captured,
            hint="shardlib.value_and_grad(loss)(params, batch, rest), and no closure",
        )
    numbers = {
        value: at
        for at, value in enumerate(graph.inputs[:state])
        if "float" in graph.values[value].dtype
    }
    found = [_found(call, values, graph, numbers, weights) for call, values in marked]
    rootless = [
        f"{one.form.name}: leaf {at}, {graph.values[one.operands[at]].dtype}"
        f"{list(graph.values[one.operands[at]].shape)}"
        for one in found
        for at in one.trained
        if one.roots[at] is None
    ]
    if rootless:
        raise_all(
            TracingError,
            f"params of a loss of the step {step} are no arrays of the state, nor made of one"
            " element by element",
            rootless,
            hint="params from the state; or jax.value_and_grad, which marks nothing",
        )
    return tuple(found)


def _found(
    call: Call,
    values: tuple[int, ...],
    graph: Graph,
    numbers: Mapping[int, int],
    weights: Collection[int],
) -> FoundLoss:
    form: MarkedLoss = call.form
    operands = values[form.constants :]
    _, first, last = parts(form)[:3]
    known = {value: at for value, at in numbers.items() if at in weights}
    roots = [
        None
        if first <= at < last
        else _root(graph, value, known)
        if at >= first or not form.trained[at]
        else _first(_root(graph, value, known), _root(graph, value, numbers))
        for at, value in enumerate(operands)
    ]
    return FoundLoss(call=call, form=form, operands=operands, roots=tuple(roots))


def _first(one: int | None, other: int | None) -> int | None:
    return other if one is None else one


def _root(graph: Graph, value: int, state: Mapping[int, int]) -> int | None:
    """The nearest array of the state that a value is made of, element by element."""
    shape = graph.values[value].shape
    makers = {result: op for op in graph.ops for result in op.results}
    seen, waiting = {value}, [value]
    while waiting:
        now = waiting.pop(0)
        if now in state:
            return state[now]
        op = makers.get(now)
        if op is None or op.category in _OTHERS:
            continue
        for one in op.operands:
            if one not in seen and graph.values[one].shape == shape:
                seen.add(one)
                waiting.append(one)
    return None
