"""Functions whose derivative was written by hand.

What they compute is judged by their equations, and so is their derivative: it is taken, for both
numbers of rows, and walked as well. A row's gradient may look at its own row alone, and that of a
parameter must be a sum over rows; a derivative that does otherwise (one that is normalised over the
batch) couples the rows, although the function does not. And it must be linear in the cotangents
(`linearity.py`), whose size depends on the number of rows.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.errors import TracingError
from shardlib.tracing.program import Equation, callee, flatten
from shardlib.tracing.rewriting.binding import bind
from shardlib.tracing.rows import linearity
from shardlib.tracing.rows.kinds import Kind, free, row
from shardlib.tracing.rows.step import Step
from shardlib.tracing.rows.walk import Walk


def results(walk: Walk, step: Step, kinds: list[Kind]) -> list[Kind]:
    """Kinds of the results of a call with a derivative of its own."""
    inner = walk.inside(step, callee)
    if len(inner[0].inputs) != len(kinds):
        return [step.mixed("nothing is known about its rows", kinds)] * len(step.results)
    beneath = walk.beneath()
    kinds_inside = beneath.run(inner, kinds, editable=False)
    if (
        walk.derivatives_are_judged
        or not any(kind.descent.learned for kind in kinds)
        or any(kind.family == "mixed" for kind in kinds_inside)
    ):
        return kinds_inside
    rule = step.params.get("bwd", step.params.get("jvp_jaxpr_fun"))
    key = (
        step.name,
        _told_apart(rule),
        str(callee(step.one.eqn)),
        tuple((kind.family, kind.place, kind.descent.learned, kind.power) for kind in kinds),
        tuple(map(str, step.operands)),
    )
    if key not in walk.judged:
        walk.judged[key] = _fault(beneath, step, kinds, kinds_inside)
    why = walk.judged[key]
    return [step.mixed(why, kinds)] * len(kinds_inside) if why else kinds_inside


def _told_apart(rule: Any) -> Any:
    """The rule, or its identity: one that was bound again holds lists, which have no hash."""
    try:
        hash(rule)
    except TypeError:
        return id(rule)
    return rule


def _fault(walk: Walk, step: Step, kinds: list[Kind], kinds_inside: list[Kind]) -> str:
    """What is wrong with the derivative; empty where nothing is."""
    moving = [
        index
        for index, variable in enumerate(step.one.eqn.invars)
        if jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    ]
    leaving = [
        index
        for index, variable in enumerate(step.one.eqn.outvars)
        if jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    ]
    if not moving or not leaving:
        return ""
    try:
        first, second = (
            flatten(_pulled(equation, moving, leaving)) for equation in (step.one, step.two)
        )
    except (TracingError, TypeError, ValueError) as error:
        return f"its derivative cannot be taken alone ({type(error).__name__})"
    bent = (
        linearity.fault(first, range(len(kinds), len(first.inputs))) if "vjp" in step.name else ""
    )
    if bent:
        return (
            "its derivative, which was written by hand, is not linear in the gradient that comes"
            f" in: {bent}"
        )
    if not any(kind.family == "row" for kind in kinds):
        return ""
    powers = {
        kind.power
        for index, kind in enumerate(kinds_inside)
        if index in leaving and kind.family == "sum"
    } or {Fraction(0)}
    if len(powers) > 1:
        return "its results are sums that the number of rows scales differently"
    (power,) = powers
    cotangents = [
        row(kinds_inside[index].rows, learned=True)
        if kinds_inside[index].family == "row"
        else free(learned=True)
        for index in leaving
    ]
    gradients = walk.run((first, second), [*kinds, *cotangents], editable=False)
    for index, gradient in zip(moving, gradients, strict=True):
        if not _allowed(
            kinds[index],
            gradient,
            power,
            summed=any(kinds_inside[k].family == "sum" for k in leaving),
        ):
            return (
                "its derivative, which was written by hand, mixes"
                f" rows{f': {gradient.cause}' if gradient.cause else ''}"
            )
    return ""


def _allowed(operand: Kind, gradient: Kind, power: Fraction | None, *, summed: bool) -> bool:
    """Whether an operand may have such a gradient."""
    if gradient.family == "free":
        return gradient.zero or operand.family == "free"
    if operand.family == "row":
        return (
            gradient.family == "row"
            and gradient.place == operand.place
            and (gradient.power == (power if summed else 0) or gradient.zero)
        )
    return (
        operand.family == "free"
        and gradient.family == "sum"
        and gradient.power == (power if summed else 0)
    )


def _pulled(equation: Equation, moving: list[int], leaving: list[int]) -> Any:
    """The jaxpr of (operands, cotangents) -> gradients of the operands."""

    def gradients(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def run(*values: Any) -> list[Any]:
            arguments = list(operands)
            for index, value in zip(moving, values, strict=True):
                arguments[index] = value
            outputs = bind(equation, arguments)
            return [outputs[index] for index in leaving]

        _, pull = jax.vjp(run, *(operands[index] for index in moving))
        return list(pull(cotangents))

    def abstract(variables: Any) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in variables
        ]

    return jax.make_jaxpr(gradients)(
        abstract(equation.eqn.invars), abstract([equation.eqn.outvars[index] for index in leaving])
    )
