"""Linearity of custom derivatives in the cotangents of their results.

The gradient of a microbatch is that of the whole batch times a factor, and gradients of
microbatches are added up. A derivative that clips, normalises or quantises cotangents, or adds a
term to them, gives other numbers for the factor and for the microbatches. JAX checks linearity of a
`custom_jvp`, which it transposes, but not of a `custom_vjp`.

    fault(program, cotangents)    # "" where the results are linear in these inputs, or the
                                  # operation that is not
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from shardlib._jax_compat import scan_counts
from shardlib.tracing.primitives import ALL, EACH, TABLE
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program
from shardlib.tracing.row_kinds import line_of

#: Dependence of a value on the cotangents: zero, independent of them, or linear.
ZERO, CONSTANT, LINEAR = 0, 1, 2


class NotLinear(Exception):
    """The operation that is not linear."""


def fault(program: Program, positions: Sequence[int]) -> str:
    """The first operation that is not linear in the inputs at `positions`; "" if all are."""
    try:
        results = _run(
            program,
            [
                LINEAR if position in positions else CONSTANT
                for position in range(len(program.inputs))
            ],
        )
    except NotLinear as error:
        return str(error)
    return "a term that does not depend on it" if CONSTANT in results else ""


def _run(program: Program, arguments: Sequence[int]) -> list[int]:
    """The dependences of the results of a program."""
    values = {number: _of(constant) for number, constant in program.constants.items()} | dict(
        zip(program.inputs, arguments, strict=True)
    )
    for equation in program.equations:
        results = _results(equation, [values[number] for number in equation.inputs])
        values.update(zip(equation.outputs, results, strict=True))
    return [values[number] for number in program.outputs]


def _of(constant: Any) -> int:
    concrete = not isinstance(constant, Tracer) and not jax.dtypes.issubdtype(
        jax.numpy.result_type(constant), jax.dtypes.extended
    )
    return ZERO if concrete and not np.any(constant) else CONSTANT


def _results(equation: Equation, kinds: list[int]) -> list[int]:
    name, count = equation.name, len(equation.outputs)
    primitive = TABLE.get(name)
    linear = None if primitive is None else primitive.linear
    if LINEAR not in kinds:
        still = linear == ALL and ZERO in kinds and CONSTANT not in kinds
        return [ZERO if still or (linear == EACH and ZERO in kinds) else CONSTANT] * count
    if name == "optimization_barrier":
        return kinds
    if name in _CALLS:
        return _CALLS[name](equation, kinds)
    if (
        linear is None
        or not _is_linear(linear, kinds)
        or not all(
            jax.dtypes.issubdtype(variable.aval.dtype, np.inexact)
            for variable in equation.eqn.outvars
        )
    ):
        line = line_of(equation)
        raise NotLinear(f"{name}{f' at {line}' if line else ''}")
    return [LINEAR] * count


def _is_linear(linear: slice | str, kinds: list[int]) -> bool:
    """True if the result of an operation is linear; `linear` as in `Primitive`."""
    if isinstance(linear, str):
        return kinds.count(LINEAR) == 1
    together = range(len(kinds))[linear]
    return all(
        kind != CONSTANT if position in together else kind != LINEAR
        for position, kind in enumerate(kinds)
    )


def _called(equation: Equation, kinds: list[int]) -> list[int]:
    return _run(equation.inside(), kinds)


def _settled(turn: Callable[[list[int]], list[int]], carried: list[int]) -> list[int]:
    """The dependences of a loop's carries after any number of iterations; a sum of a linear and a
    constant value is neither.
    """
    while True:
        after = [_joined(equals) for equals in zip(carried, turn(carried), strict=True)]
        if after == carried:
            return carried
        carried = after


def _joined(kinds: Sequence[int]) -> int:
    if CONSTANT in kinds and LINEAR in kinds:
        raise NotLinear("a loop or branch that is linear by turns")
    return max(kinds)


def _scan(equation: Equation, kinds: list[int]) -> list[int]:
    constants, carried = scan_counts(equation.params)
    body, (first, scanned) = (
        equation.inside("body"),
        (
            kinds[:constants],
            kinds[constants + carried :],
        ),
    )
    carry = _settled(
        lambda carry: _run(body, [*first, *carry, *scanned])[:carried],
        kinds[constants : constants + carried],
    )
    return [*carry, *_run(body, [*first, *carry, *scanned])[carried:]]


def _while(equation: Equation, kinds: list[int]) -> list[int]:
    tests, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    body = equation.inside("body")
    test = equation.inside("cond")
    state = _settled(
        lambda state: _run(body, [*kinds[tests : tests + constants], *state]),
        kinds[tests + constants :],
    )
    if LINEAR in _run(test, [*kinds[:tests], *state]):
        raise NotLinear("while")
    return state


def _cond(equation: Equation, kinds: list[int]) -> list[int]:
    if kinds[0] == LINEAR:
        raise NotLinear("cond")
    branches = [_run(branch, kinds[1:]) for branch in equation.programs]
    return [_joined(kinds_of_result) for kinds_of_result in zip(*branches, strict=True)]


_CALLS: Mapping[str, Callable[[Equation, list[int]], list[int]]] = {
    **dict.fromkeys((*REMAT, *CUSTOM), _called),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
