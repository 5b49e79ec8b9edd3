"""A loss that a step marks with `shardlib.value_and_grad`: a custom call whose form contains the
loss.

The call computes the same as `jax.value_and_grad`, so it is correct in programs that do not
recognise it. A planner of steps finds the call, takes the loss from its form, and replaces it by
another program of the same value and gradients. Arrays of the step that the loss closes over are
operands of the call, after its arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr
from shardlib.functions.attention import marked
from shardlib.functions.experts import bound_axes, whole_batch
from shardlib.jax_types import Value

_NUMBERS = itertools.count()
#: Leaves of the arguments -> (value, auxiliary results).
FlatLoss = Callable[[Sequence[Value]], tuple[Value, Any]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MarkedLoss:
    """A loss whose value and gradients a step requests.

    Attributes:
        name: name of the user's function.
        function: leaves of the arguments -> (value, auxiliary results); its closure belongs to one
            trace of the step.
        paths: paths of all leaves: of the arguments, then of arrays that the loss closes over.
        trained: for each leaf, whether its gradient is requested.
        captured: number of leaves, the last ones, that the loss closes over.
        arrays: constant arrays of the loss, which belong to no trace.
        jaxpr: open, over all leaves.
        results: structure of the auxiliary results.
        rows: "prove" the dependence on the rows of the batch, or trust that it is their "mean".
        number: distinguishes losses of the same name.
    """

    name: str
    function: FlatLoss
    paths: tuple[str, ...]
    trained: tuple[bool, ...]
    captured: int
    arrays: tuple[Value, ...]
    jaxpr: jex.Jaxpr
    results: jax.tree_util.PyTreeDef
    rows: str = "prove"
    number: int = field(default_factory=lambda: next(_NUMBERS))
    kind: str = "value-and-gradient"

    def __repr__(self) -> str:
        return f"MarkedLoss({self.name}, {self.number})"

    @property
    def constants(self) -> int:
        """Number of operands of a call before the leaves: arrays that belong to no trace."""
        return len(self.jaxpr.constvars)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The abstract leaves."""
        avals: list[Any] = [var.aval for var in self.jaxpr.invars]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    def evaluated(self, operands: Sequence[Value]) -> list[Value]:
        """[value, *auxiliary results] for the operands of a call."""
        closed = jex.ClosedJaxpr(self.jaxpr, list(operands[: self.constants]))
        return jex.jaxpr_as_fun(closed)(*operands[self.constants :])


def marked_loss(
    function: FlatLoss,
    leaves: Sequence[Value],
    paths: Sequence[str],
    trained: Sequence[bool],
    name: str,
    rows: str = "prove",
) -> tuple[Value, Any, list[Value]]:
    """(value, auxiliary results, gradients of the trained leaves) of a loss, by a marked call.

    Args:
        function: leaves of the arguments -> (value, auxiliary results).
    """
    function = whole_batch(function, bound_axes())
    abstract = [jax.eval_shape(lambda leaf: leaf, leaf) for leaf in leaves]
    closed, (_, aux) = jax.make_jaxpr(lambda *leaves: function(list(leaves)), return_shape=True)(
        *abstract
    )
    inner, constants = open_jaxpr(closed)
    captured = [constant for constant in constants if isinstance(constant, Tracer)]
    if captured:

        def whole(*values: Value) -> list[Value]:
            taken = iter(values[len(leaves) :])
            filled = [
                next(taken) if isinstance(constant, Tracer) else constant for constant in constants
            ]
            closed = jex.ClosedJaxpr(inner, filled)
            return jex.jaxpr_as_fun(closed)(*values[: len(leaves)])

        abstract += [jax.eval_shape(lambda leaf: leaf, constant) for constant in captured]
        inner, constants = open_jaxpr(jax.make_jaxpr(whole)(*abstract))
    form = MarkedLoss(
        name=name,
        function=function,
        paths=(*paths, *(f"closure.{index}" for index in range(len(captured)))),
        trained=(*trained, *(False,) * len(captured)),
        captured=len(captured),
        arrays=tuple(constants),
        jaxpr=inner,
        results=jax.tree.structure(aux),
        rows=rows,
    )
    value, *others = marked(form, _computed)(*constants, *leaves, *captured)
    count = form.results.num_leaves
    return value, form.results.unflatten(others[:count]), others[count:]


def remarked(form: MarkedLoss, closed: jex.ClosedJaxpr, operands: Sequence[Value]) -> list[Value]:
    """The results of a marked loss after a rewrite."""
    jaxpr, constants = open_jaxpr(closed)
    count = form.constants
    changed = replace(
        form,
        arrays=(*constants, *form.arrays),
        jaxpr=jaxpr.replace(
            constvars=[*jaxpr.constvars, *jaxpr.invars[:count]], invars=list(jaxpr.invars[count:])
        ),
    )
    return list(marked(changed, _computed)(*constants, *operands))


def _computed(form: MarkedLoss, *operands: Any) -> tuple[Any, ...]:
    first = form.constants
    chosen = [first + index for index, flag in enumerate(form.trained) if flag]

    def loss(trained: list[Any]) -> tuple[Any, list[Any]]:
        arguments = list(operands)
        for position, leaf in zip(chosen, trained, strict=True):
            arguments[position] = leaf
        value, *aux = form.evaluated(arguments)
        return value, aux

    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)([operands[k] for k in chosen])
    return (value, *aux, *gradients)


# --------------------------------------------------------------------------------------------------
# A loss that is a ratio of two sums over the batch.
#
#     def loss(model, batch):
#         each = cross_entropy(model(batch["x"]), batch["y"])
#         total = jnp.sum(each * batch["weight"])
#         return shardlib.WeightedMean(total=total, weight=jnp.sum(batch["weight"]))


@dataclass(frozen=True, kw_only=True)
class WeightedMeanForm:
    """The computation of a weighted mean."""

    kind: str = "weighted-mean"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedMean:
    """A loss or a metric that is a ratio of two sums over the rows of the batch.

    Shardlib proves for most losses how they depend on the rows of the batch. Where the proof fails,
    this declares it: for a part of the batch, `total` and `weight` are those of its rows, and those
    of all parts add up to those of the whole. Then the batch can be split into microbatches; the
    sums are divided once. A term that depends on parameters alone is added as `total + penalty *
    weight`.

    Attributes:
        total: float scalar, a sum over rows.
        weight: scalar, a sum over rows. No gradient flows through it.
    """

    total: jax.Array
    weight: jax.Array

    def value(self) -> jax.Array:
        """`total` / `weight`, the weight without a gradient.

        Returns:
            Float scalar in the dtype of `total`.
        """
        return marked(WeightedMeanForm(), _divided)(self.total, jax.lax.stop_gradient(self.weight))


def _divided(_: WeightedMeanForm, total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / weight.astype(total.dtype)
