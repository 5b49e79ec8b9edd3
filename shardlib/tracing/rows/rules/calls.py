"""Marked functions say themselves how they treat rows (`shardlib.functions`)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from shardlib.functions.experts import ExpertForm
from shardlib.functions.mean import WeightedMeanForm
from shardlib.functions.routing import Balance
from shardlib.tracing.program import Equation, Program
from shardlib.tracing.rows.kinds import Kind, common, free, mixed, row, total
from shardlib.tracing.rows.rules.elementwise import NOT_LINEAR
from shardlib.tracing.rows.step import Shape, differing, line_of

Read = Callable[[list[tuple[int, int]]], list[Kind]]


def declared(
    first_equation: Equation, two: Equation, first: Program, second: Program, read: Read
) -> list[Kind] | None:
    """Kinds of the results of a call, by what the function says of itself; None where it says
    nothing, or not of such operands.
    """
    assert first_equation.call is not None and two.call is not None
    form, pairs = (
        first_equation.call.form,
        list(zip(first_equation.call.inputs, two.call.inputs, strict=True)),
    )
    if isinstance(form, WeightedMeanForm):
        kinds = read(pairs)
        why = _no_sums(kinds)
        return (
            [mixed(why, f"shardlib.WeightedMean at {line_of(first_equation)}")]
            if why
            else [total(weighted=True, vouched=True, **_of(kinds))]
        )
    if isinstance(form, Balance):
        kinds = read(pairs)
        if (
            all(kind.family == "row" and kind.power == 0 for kind in kinds)
            and len({kind.rows for kind in kinds}) == 1
        ):
            return [total(power=Fraction(-1), **{**_of(kinds), "notes": frozenset({"balance"})})]
    if isinstance(form, ExpertForm) and form.capacity is None:
        kinds = read(pairs)
        shapes = [(tuple(first.avals[a].shape), tuple(second.avals[b].shape)) for a, b in pairs]
        return _visit(kinds, shapes)
    return None


def _no_sums(kinds: list[Kind]) -> str:
    """What is known to be wrong with a total and a weight, of which the user says that they are
    sums over rows; empty where nothing is.
    """
    for name, kind in zip(("total", "weight"), kinds, strict=True):
        if kind.cause is not None and kind.cause.why == NOT_LINEAR:
            return f"the {name} is no sum over rows, but {kind.cause}"
    growths = [_growth(kind) for kind in kinds]
    if None not in growths and growths[0] != growths[1]:
        return (
            "the total and the weight do not grow alike with the number of rows: one of them is no"
            " sum over them"
        )
    return ""


def _growth(kind: Kind) -> Fraction | None:
    """The power of the number of rows that a value grows with; None where that is not known."""
    if kind.power is None or kind.family not in ("free", "sum") or kind.descent.scaled or kind.zero:
        return None
    return kind.power + (1 if kind.family == "sum" else 0)


def _of(kinds: list[Kind]) -> dict[str, Any]:
    return {name: value for name, value in common(kinds).items() if name in ("learned", "notes")}


def _visit(kinds: list[Kind], shapes: list[tuple[Shape, Shape]]) -> list[Kind] | None:
    """Tokens that visit experts without being dropped do so one by one, whoever else does."""
    tokens, parameters = kinds[:3], kinds[3:]
    row_kinds = [kind for kind in tokens if kind.family == "row"]
    if (
        not row_kinds
        or len({kind.rows for kind in row_kinds}) > 1
        or any(kind.power != 0 for kind in kinds)
        or any(kind.family != "free" for kind in parameters)
    ):
        return None
    place = row_kinds[0].rows
    if (
        any(kind.family not in ("free", "row") for kind in tokens)
        or place.stop >= len(shapes[0][0])
        or any(not set(differing(shape)) <= set(place.dims) for shape in shapes[:3])
    ):
        return None
    more = common(kinds)
    return [row(place, **more), free(zero=True, splat=True)]
