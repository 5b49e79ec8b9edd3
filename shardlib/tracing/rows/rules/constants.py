"""Operations on values that look at no row: along dims of the batch all their elements are equal,
and the results know how the number of rows scales them.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from shardlib.jax_types import Constant
from shardlib.tracing.rows.kinds import Kind, Place, added, common, data, free, row
from shardlib.tracing.rows.rules.movement import regrouped_alike
from shardlib.tracing.rows.rules.numbers import exponent, folded_scalar, result_power
from shardlib.tracing.rows.step import Step
from shardlib.tracing.rules.elementwise import ARITHMETIC, COPIES

#: Of values that are equal along a dim, this makes values that are.
_UNIFORM = frozenset(
    {
        "sort",
        "rev",
        "reduce_max",
        "reduce_min",
        "reduce_and",
        "reduce_or",
        "slice",
        "dynamic_slice",
        "gather",
        "squeeze",
        "transpose",
        "expand_dims",
        "stack",
        "unstack",
        "stop_gradient",
        "bitcast_convert_type",
        *ARITHMETIC,
        *COPIES,
    }
)

#: So does this, along dims of its own.
_ALONG = frozenset({"split", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


def constant(left: Constant, two: Constant, sizes: tuple[int, int]) -> Kind:
    """A literal or a captured array, as it is in the two traces."""
    if _opaque(left) or _opaque(two):
        return free()
    first, second = np.asarray(left), np.asarray(two)
    if (
        first.dtype.kind not in "fiubc"
        and first.dtype.name not in ("bfloat16",)
        and not first.dtype.name.startswith("float8")
    ):
        return free() if first.shape == second.shape else data()
    if first.ndim == second.ndim == 0:
        return free(
            value=(first, second),
            power=exponent((first, second), sizes),
            zero=not first and not second,
            splat=True,
        )
    if first.shape != second.shape:
        if (
            first.size
            and second.size
            and (first == first.flat[0]).all()
            and (second == second.flat[0]).all()
        ):
            return free(
                power=exponent((first.flat[0], second.flat[0]), sizes),
                splat=True,
                zero=not first.any() and not second.any(),
            )
        return data()
    same = np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    return free(
        power=Fraction(0) if same else None,
        splat=bool(first.size) and bool((first == first.flat[0]).all()),
        zero=same and not first.any(),
    )


def _opaque(array: Any) -> bool:
    return "key<" in str(getattr(array, "dtype", ""))


def constants(step: Step, kinds: list[Kind], *, learned: bool) -> Kind | list[Kind]:
    """The results of an operation on values that are all free."""
    name = step.name
    if name == "iota":
        return (
            data(tag="positions")
            if step.result_dims() == [step.params["dimension"]]
            and step.results[0][0][step.params["dimension"]] == step.sizes[0]
            else (data() if step.params["dimension"] in step.result_dims() else free())
        )
    folded = folded_scalar(step, kinds)
    if folded is not None:
        return folded
    more: dict[str, Any] = common(kinds)
    if name == "reduce_sum":
        lost = len(set(step.params["axes"]) & set(step.batch_dims(0)))
        return free(
            power=None if kinds[0].power is None else kinds[0].power + lost,
            zero=kinds[0].zero,
            splat=kinds[0].splat,
            **more,
        )
    if name == "dot_general":
        (contracted, _), _ = step.params["dimension_numbers"]
        power = added([kind.power for kind in kinds])
        return free(
            power=None if power is None else power + len(set(contracted) & set(step.batch_dims(0))),
            **more,
        )
    if name in ("reshape", "broadcast_in_dim"):
        return _reshaped(step, kinds)
    if name in ("concatenate", "pad"):
        return _joined(step, kinds)
    power, batch = (
        result_power(step, kinds),
        any(step.batch_dims(index) for index in range(len(kinds)))
        or any(step.result_dims(index) for index in range(len(step.results))),
    )
    if batch and name not in _UNIFORM and not _along_others(step):
        return step.mixed("positions in the batch", kinds)
    splat = all(kind.splat for kind in kinds) and name in (
        *ARITHMETIC,
        *COPIES,
        "squeeze",
        "transpose",
        "slice",
        "expand_dims",
    )
    zero = (
        kinds[0].zero
        if name in (*COPIES, "neg", "transpose", "squeeze", "slice", "abs")
        else (
            any(kind.zero for kind in kinds)
            if name == "mul"
            else bool(kinds)
            and all(kind.zero for kind in kinds)
            and name in ("add", "sub", "add_any", "max", "min", "select_n")
        )
    )
    return [free(power=power, splat=splat, zero=zero, **more) for _ in step.results]


def _along_others(step: Step) -> bool:
    """Whether an operation works along one dim, and that is none of the batch."""
    axis = step.params.get("axis", step.params.get("dimension"))
    return step.name in _ALONG and axis not in step.batch_dims(0)


def _reshaped(step: Step, kinds: list[Kind]) -> Kind:
    """Equal elements stay equal; others along dims of the batch are as rows are: every one the
    same.
    """
    kind, more = kinds[0], common(kinds)
    before, after = step.batch_dims(0), step.result_dims()
    if step.name == "broadcast_in_dim" or kind.splat or not (before or after):
        return free(
            power=kind.power, zero=kind.zero, splat=kind.splat or step.operands[0][0] == (), **more
        )
    if len(before) == 1:
        (dim,) = before
        inner = [
            shape[dim] / size for shape, size in zip(step.operands[0], step.sizes, strict=True)
        ]
        if inner[0] == inner[1] == int(inner[0]):
            place = Place(start=dim, stop=dim + 1, inner=int(inner[0]))
            regrouped = regrouped_alike(place, step)
            if regrouped is not None:
                return row(regrouped, power=kind.power, **more)
    return step.mixed("rows are regrouped in a way that depends on their number", kinds)


def _joined(step: Step, kinds: list[Kind]) -> Kind:
    powers = {kind.power for kind in kinds if not kind.zero} or {Fraction(0)}
    power = next(iter(powers)) if len(powers) == 1 else None
    more, zero = common(kinds), all(kind.zero for kind in kinds)
    if step.name == "concatenate":
        along = step.params["dimension"] in {
            dim for index in range(len(kinds)) for dim in step.batch_dims(index)
        }
    else:
        along = any(
            tuple(step.params["padding_config"][dim]) != (0, 0, 0)
            for dim in {*step.batch_dims(0), *step.result_dims()}
        )
    if along and not zero:
        return step.mixed("positions in the batch", kinds)
    return free(power=power, zero=zero, splat=zero, **more)
