"""Numbers that are known in both traces, and scalars that are computed from such."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from shardlib.jax_types import Constant
from shardlib.tracing.rows.kinds import Kind, added, common, free
from shardlib.tracing.rows.step import Step
from shardlib.tracing.rules.elementwise import COPIES


def exponent(pair: tuple[Constant, Constant] | None, sizes: tuple[int, int]) -> Fraction | None:
    """The power of the number of rows that two numbers differ by; None where it is none.

    Args:
        pair: the number in the two traces; None counts as the same.
    """
    if pair is None:
        return Fraction(0)
    first, two = (
        (
            complex(np.asarray(number).item())
            if np.iscomplexobj(number)
            else float(np.asarray(number).astype(np.float64))
        )
        for number in pair
    )
    if first == two or (first != first and two != two):
        return Fraction(0)
    if (
        isinstance(first, complex)
        or isinstance(two, complex)
        or first == 0
        or two == 0
        or first * two < 0
        or not (math.isfinite(first) and math.isfinite(two))
    ):
        return None
    power = math.log(first / two) / math.log(sizes[0] / sizes[1])
    near = Fraction(power).limit_denominator(4)
    return near if abs(float(near) - power) < 1e-5 else None


def folded_scalar(step: Step, kinds: list[Kind]) -> Kind | None:
    """A scalar that is computed from scalars whose numbers are known."""
    if (
        not kinds
        or any(kind.value is None for kind in kinds)
        or len(step.results) != 1
        or step.results[0][0] != ()
    ):
        return None
    dtype = step.one.eqn.outvars[0].aval.dtype
    if step.name == "convert_element_type":
        pair = tuple(np.asarray(number).astype(dtype) for number in kinds[0].value or ())
    elif step.name == "div" and np.issubdtype(dtype, np.floating):
        pair = tuple(
            (np.asarray(dividend / divisor).astype(dtype) if divisor else np.asarray(np.nan, dtype))
            for dividend, divisor in zip(kinds[0].value or (), kinds[1].value or (), strict=True)
        )
    elif step.name in _NUMBERS:
        extra = (step.params["y"],) if step.name == "integer_pow" else ()
        with np.errstate(all="ignore"):
            pair = tuple(
                np.asarray(
                    _NUMBERS[step.name](*((kind.value or ())[trace] for kind in kinds), *extra)
                ).astype(dtype)
                for trace in (0, 1)
            )
    else:
        return None
    return free(
        value=(pair[0], pair[1]),
        power=exponent((pair[0], pair[1]), step.sizes),
        zero=not pair[0] and not pair[1],
        splat=True,
        **_kept(kinds),
    )


_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "integer_pow": np.power,
    "pow": np.power,
    "sqrt": np.sqrt,
    "square": np.square,
}


def result_power(step: Step, kinds: list[Kind]) -> Fraction | None:
    name = step.name
    if name == "mul":
        return added([kind.power for kind in kinds])
    if name == "div":
        return added([kind.power for kind in kinds], [1, -1])
    chosen = kinds[1:] if name == "select_n" else kinds
    powers = {kind.power for kind in chosen if not kind.zero} or {Fraction(0)}
    if step.cuts:
        return Fraction(0) if powers == {Fraction(0)} else None
    if len(powers) == 1 and name in (
        *COPIES,
        "neg",
        "abs",
        "add",
        "sub",
        "add_any",
        "max",
        "min",
        "select_n",
        "transpose",
        "squeeze",
        "slice",
        "split",
        "expand_dims",
        "reduce_max",
        "reduce_min",
    ):
        return next(iter(powers))
    return Fraction(0) if all(kind.power == 0 for kind in kinds) else None


def _kept(kinds: list[Kind]) -> dict[str, Any]:
    return {name: value for name, value in common(kinds).items() if name == "learned"}
