"""One equation is run as it is written, on values in place of its variables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp

from shardlib.errors import TracingError
from shardlib.jax_types import Aval, EqnParam, Value
from shardlib.tracing.program import (
    Call,
    Equation,
    Program,
)
from shardlib.tracing.rewriting.derivatives import by_mesh


def bind(equation: Equation, arguments: Sequence[Value], **changed: EqnParam) -> list[Value]:
    """Runs one equation as it is, or with some of its parameters changed."""
    primitive = equation.eqn.primitive
    try:
        results = primitive.bind(
            *arguments, **primitive.get_bind_params({**by_mesh(equation.params), **changed})
        )
    except Exception as error:
        location = f" in {equation.scope}" if equation.scope else ""
        raise TracingError(
            f"primitive {equation.name!r} at equation {equation.path}{location} cannot be evaluated"
            f" again: {error}\nTry: write the computation with other jax.lax operations, or keep it"
            " out of the loss"
        ) from error
    return list(results) if primitive.multiple_results else [results]


def strong(value: Value, aval: Aval) -> Value:
    """An initial carry as an array of the carry's dtype; literals are Python numbers or NumPy
    scalars.
    """
    return (
        value
        if hasattr(value, "aval") or isinstance(value, jax.Array)
        else jnp.asarray(value, dtype=aval.dtype)
    )


def carried_avals(program: Program, first: int) -> list[Aval]:
    """Abstract values of the carries of a loop's body."""
    return [program.avals[number] for number in program.inputs[first:]]


def as_array(program: Program, number: int, value: Value) -> Value:
    """A value of a program as an array: what is written in it, such as a metric 3.0, is a number of
    Python.
    """
    return (
        value
        if isinstance(value, jax.Array) or number not in program.constants
        else jnp.asarray(value, program.avals[number].dtype)
    )


def scope_of(call: Call | None) -> AbstractContextManager[object]:
    """The name scope of a custom call whose form has one; other scopes are not kept."""
    name = getattr(call.form, "scope", "") if call is not None else ""
    return jax.named_scope(name) if name else nullcontext()


def last_reads(program: Program) -> dict[int, int]:
    """For every value that is read, the position of its last reader; results of the program are
    read at the end.
    """
    last = {
        number: position
        for position, equation in enumerate(program.equations)
        for number in equation.inputs
    }
    return {**last, **dict.fromkeys(program.outputs, len(program.equations))}
