"""Linearity of derivatives that were written by hand in what they are given: the cotangents of
their results.

The gradient of a batch's part is that of the whole times a factor, and gradients of parts are added
up. A derivative that clips, normalises or quantises cotangents, or adds a term to them, gives other
numbers for the factor and for the parts. JAX checks this of a `custom_jvp`, which it transposes; of
a `custom_vjp` nobody does.

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

#: What a value is: zero, anything that does not depend on the cotangents, or linear in them.
ZERO, CONSTANT, LINEAR = 0, 1, 2


class NotLinear(Exception):
    """The operation that is not linear."""


def fault(program: Program, positions: Sequence[int]) -> str:
    """Returns what is not linear in some inputs of a program, by position; empty where all of it
    is.
    """
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
    """Returns what the results of a program are."""
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
    """Returns whether the result of an operation is linear; `linear` as in `Primitive`."""
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
    """Returns what a loop carries after any number of turns; a sum of what is linear and what is
    not is neither.
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
