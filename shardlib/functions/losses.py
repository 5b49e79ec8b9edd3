"""A loss that a step marks with `shardlib.value_and_grad`: a custom call, with the loss beside it.

The call computes what `jax.value_and_grad` computes, so that a program that knows nothing of it is
right. Who plans a step finds the call, takes the loss from its form, and puts another program of
the same value and gradients in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr
from shardlib.functions.marks import marked
from shardlib.jax_types import Aval, Function, Value

_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MarkedLoss:
    """A loss whose value and gradients a step asks for.

    Attributes:
        name: of the user's function.
        function: (params, batch, *rest) -> (value, auxiliary results).
        inputs: structure of (params, batch, *rest).
        trained: for each leaf of the params, whether its gradient is asked for.
        jaxpr: open, over the leaves of the inputs.
        results: structure of the auxiliary results.
        captured: of what the function closes over, the arrays of the step; with some, it cannot be
            traced again.
        rows: whether to "prove" how it depends on the rows of the batch, or to take the user's word
            that it is their "mean".
        number: tells losses of the same name apart.
    """

    name: str
    function: Function
    inputs: jax.tree_util.PyTreeDef
    trained: tuple[bool, ...]
    jaxpr: jex.Jaxpr
    results: jax.tree_util.PyTreeDef
    captured: tuple[Aval, ...] = ()
    rows: str = "prove"
    number: int = field(default_factory=lambda: next(_NUMBERS))
    kind: str = "value-and-gradient"

    def __repr__(self) -> str:
        return f"MarkedLoss({self.name}, {self.number})"

    @property
    def constants(self) -> int:
        """How many operands of a call come before the leaves: what the function closes over."""
        return len(self.jaxpr.constvars)

    def evaluated(self, operands: Sequence[Value]) -> list[Value]:
        """[value, *auxiliary results] for the operands of a call.

        Args:
            operands: what the function closes over, then the leaves of (params, batch, *rest).
        """
        closed = jex.ClosedJaxpr(self.jaxpr, list(operands[: self.constants]))
        return jex.jaxpr_as_fun(closed)(*operands[self.constants :])


def marked_loss(
    function: Function,
    leaves: Sequence[Value],
    inputs: jax.tree_util.PyTreeDef,
    trained: Sequence[bool],
    name: str,
    rows: str = "prove",
) -> tuple[MarkedLoss, list[Value]]:
    """A loss, and by a marked call its value, its auxiliary results, and the gradients of the
    trained leaves of the params.

    Args:
        function: (params, batch, *rest) -> (value, auxiliary results).
        leaves: of (params, batch, *rest); some are tracers.
        inputs: structure of these.
        trained: for each leaf of the params, whether its gradient is asked for.
        name: of the user's function.
        rows: see `MarkedLoss`.

    Raises:
        TypeError: the value is no float scalar, as of `jax.value_and_grad`.
    """

    def flat(*leaves: Any) -> tuple[Value, Any]:
        return function(*inputs.unflatten(leaves))

    abstract = [jax.eval_shape(lambda leaf: leaf, leaf) for leaf in leaves]
    closed, (_, aux) = jax.make_jaxpr(flat, return_shape=True)(*abstract)
    jaxpr, _ = open_jaxpr(closed)
    captured = tuple(
        var.aval
        for var, one in zip(jaxpr.constvars, closed.consts, strict=True)
        if isinstance(one, Tracer)
    )
    form = MarkedLoss(
        name=name,
        function=_of_this_trace if captured else function,
        inputs=inputs,
        trained=tuple(trained),
        jaxpr=jaxpr,
        results=jax.tree.structure(aux),
        captured=captured,
        rows=rows,
    )
    return form, list(marked(form, _computed)(*closed.consts, *leaves))


def _of_this_trace(*_: Any) -> tuple[Value, Any]:
    raise AssertionError("a loss that closes over arrays of a trace is not traced again")


def _computed(form: MarkedLoss, *operands: Any) -> tuple[Any, ...]:
    first = form.constants
    chosen = [first + at for at, flag in enumerate(form.trained) if flag]

    def loss(trained: list[Any]) -> tuple[Any, list[Any]]:
        given = list(operands)
        for at, leaf in zip(chosen, trained, strict=True):
            given[at] = leaf
        value, *aux = form.evaluated(given)
        return value, aux

    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)([operands[k] for k in chosen])
    return (value, *aux, *gradients)
