"""The losses that a step marks: where they stand, and which arrays of the state they are given.

An operand of a loss is an array of the state, or made of one element by element, as updated weights
are: that array is its *root*. Params and weights among the rest are planned and laid out as their
roots are. What has rows of the batch has no root.

A loss may close over arrays of the step. It cannot be traced by itself then for another number of
rows: the whole step is, and the loss taken out of that trace. What is as many times as long there
as the batch are rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from shardlib.errors import TracingError, raise_all
from shardlib.functions.losses import MarkedLoss
from shardlib.graph.graph import Graph
from shardlib.jax_types import Value
from shardlib.tracing.jaxpr_to_graph import PlacedCall
from shardlib.tracing.program import Call

#: Categories of operations that make something else of an array.
_OTHERS = frozenset({"matmul", "convolution", "scatter", "reduction", "gather"})
#: How many times as many rows the batch has -> the losses that the step marks then, in order.
Again = Callable[[Fraction], Sequence[MarkedLoss]]


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLoss:
    """A marked loss in a step.

    Attributes:
        call: where it stands.
        form: the loss.
        operands: values of the step's graph, one for each leaf.
        roots: for each leaf the number of the array of the state that it is made of; None for those
            with rows of the batch, and of what is made of no weight.
        number: of the loss among those of the step.
        again: traces the step for other batches.
    """

    call: Call
    form: MarkedLoss
    operands: tuple[int, ...]
    roots: tuple[int | None, ...]
    number: int
    again: Again

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions of the leaves whose gradients are asked for."""
        return tuple(position for position, flag in enumerate(self.form.trained) if flag)

    @property
    def frozen(self) -> tuple[int, ...]:
        """Positions of other leaves that are weights."""
        rooted = {position for position, root in enumerate(self.roots) if root is not None}
        return tuple(sorted(rooted - {*self.trained}))

    @property
    def others(self) -> tuple[int, ...]:
        """Positions of the leaves that are no weights."""
        return tuple(position for position, root in enumerate(self.roots) if root is None)

    @cached_property
    def rows(self) -> Mapping[int, int] | None:
        """Positions of the leaves with rows of the batch -> their dim of rows, by the trace of a
        batch with more rows; None where the step has no such trace.
        """
        ratio = Fraction(2)
        try:
            shapes = [aval.shape for aval in self._other(ratio).shapes]
            pairs = zip([aval.shape for aval in self.form.shapes], shapes, strict=True)
            grown = [
                [
                    dim
                    for dim, (old, new) in enumerate(zip(traced_shape, two, strict=True))
                    if new != old
                ]
                for traced_shape, two in pairs
            ]
        except Exception:  # whatever a user's step raises for another batch
            return None
        return {
            position: dims[0]
            for position, dims in enumerate(grown)
            if dims
            and shapes[position][dims[0]] == ratio * self.form.shapes[position].shape[dims[0]]
        }

    def function(self, leaves: Sequence[Value]) -> tuple[Value, Any]:
        """(value, auxiliary results) of the loss, for any number of rows that it can be traced for."""
        if not self.form.captured:
            return self.form.function(leaves)
        shapes = [jnp.shape(leaf) for leaf in leaves]
        form = self.form
        if shapes != [aval.shape for aval in form.shapes]:
            form = self._other(self._ratio(shapes))
        if shapes != [aval.shape for aval in form.shapes]:
            raise TracingError(
                f"the loss {form.name} closes over arrays whose sizes do not follow the rows of the"
                " batch"
            )
        closed = jex.ClosedJaxpr(form.jaxpr, list(form.arrays))
        value, *aux = jex.jaxpr_as_fun(closed)(*leaves)
        return value, form.results.unflatten(aux)

    def _ratio(self, shapes: Sequence[tuple[int, ...]]) -> Fraction:
        """How many times as many rows arrays have as those that were traced."""
        return next(
            Fraction(new, old)
            for aval, shape in zip(self.form.shapes, shapes, strict=True)
            for old, new in zip(aval.shape, shape, strict=True)
            if old != new
        )

    def _other(self, ratio: Fraction) -> MarkedLoss:
        """The same loss in a trace of the step for other batches."""
        return self.again(ratio)[self.number]


def found_losses(
    calls: Mapping[str, PlacedCall],
    graph: Graph,
    state: int,
    weights: Collection[int],
    step: str,
    rows: Collection[tuple[int, int]],
    again: Again,
) -> tuple[FoundLoss, ...]:
    """The marked losses of a step, in order."""
    marked = [
        (call, values) for call, values in calls.values() if isinstance(call.form, MarkedLoss)
    ]
    numbers = {
        value: number
        for number, value in enumerate(graph.inputs[:state])
        if "float" in graph.values[value].dtype
    }
    of_rows = {value for value, _ in rows}
    forms = list(dict.fromkeys(call.form for call, _ in marked))
    losses: list[FoundLoss] = []
    for call, values in marked:
        form: MarkedLoss = call.form
        operands = values[form.constants :]
        weight_numbers = {value: number for value, number in numbers.items() if number in weights}
        roots = [
            _first(_root(graph, value, weight_numbers), _root(graph, value, numbers))
            if flag
            else None
            if value in of_rows
            else _root(graph, value, weight_numbers)
            for value, flag in zip(operands, form.trained, strict=True)
        ]
        losses.append(
            FoundLoss(
                call=call,
                form=form,
                operands=operands,
                roots=tuple(roots),
                number=forms.index(form),
                again=again,
            )
        )
    rootless = [
        f"{loss.form.name}: {loss.form.paths[leaf]}, {graph.values[loss.operands[leaf]].dtype}"
        f"{list(graph.values[loss.operands[leaf]].shape)}"
        for loss in losses
        for leaf in loss.trained
        if loss.roots[leaf] is None
    ]
    if rootless:
        raise_all(
            TracingError,
            f"params of a loss of the step {step} are no arrays of the state, nor made of one"
            " element by element",
            rootless,
            hint="params from the state; or jax.value_and_grad, which marks nothing",
        )
    return tuple(losses)


def _first(preferred: int | None, fallback: int | None) -> int | None:
    return fallback if preferred is None else preferred


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
        for operand in op.operands:
            if operand not in seen and graph.values[operand].shape == shape:
                seen.add(operand)
                waiting.append(operand)
    return None
