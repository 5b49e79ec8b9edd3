"""Reductions, windows, products and convolutions: are rows added up, all of them, or do they meet
otherwise?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardlib.tracing.rows.kinds import Kind, Place, added, common, row, total
from shardlib.tracing.rows.rules.elementwise import NOT_LINEAR, Rule
from shardlib.tracing.rows.rules.movement import moved
from shardlib.tracing.rows.step import Step


def reduce_sum(step: Step, kinds: list[Kind]) -> Kind:
    """Adds up along dims."""
    kind, axes = kinds[0], set(step.params["axes"])
    if kind.family == "sum":
        return kind
    if kind.rows.dims and set(kind.rows.dims) <= axes:
        return total(power=kind.power, **common(kinds))
    return _beside(step, kinds, axes, "parts of the batch are added up")


def reduce_other(step: Step, kinds: list[Kind]) -> Kind:
    """Reduces along dims, not by adding."""
    kind, axes = kinds[0], set(step.params["axes"])
    if kind.family == "sum":
        return step.mixed(NOT_LINEAR, kinds)
    if kind.power != 0:
        return step.mixed("the number of rows goes into what is made of each row", kinds)
    return _beside(step, kinds, axes, "a reduction over the batch that is no sum")


def _beside(step: Step, kinds: list[Kind], axes: set[int], why: str) -> Kind:
    """A reduction along other dims than those of the rows."""
    place = kinds[0].rows
    if axes & set(place.dims):
        return step.mixed(why, kinds)
    left = [dim for dim in range(len(step.operands[0][0])) if dim not in axes]
    result = moved(kinds[0], lambda dim: left.index(dim))
    assert result is not None
    return result


def window(step: Step, kinds: list[Kind]) -> Kind:
    """Reduces over windows."""
    row_kinds = [kind for kind in kinds if kind.family == "row"]
    if (
        len({kind.rows for kind in row_kinds}) != 1
        or any(kind.family == "sum" for kind in kinds)
        or any(kind.power != 0 for kind in row_kinds)
    ):
        return step.mixed("windows over sums of rows", kinds)
    place = row_kinds[0].rows
    still = all(step.params["window_dimensions"][dim] == 1 for dim in place.dims)
    still = still and all(
        tuple(step.params.get("padding", ((0, 0),) * (dim + 1))[dim]) == (0, 0)
        and step.params.get("window_strides", (1,) * (dim + 1))[dim] == 1
        for dim in place.dims
    )
    return row(place, **common(kinds)) if still else step.mixed("windows over rows", kinds)


def dot_general(step: Step, kinds: list[Kind]) -> Kind:
    """Multiplies and contracts."""
    power = added([kind.power for kind in kinds])
    if power is None:
        return step.mixed("the number of rows goes into a factor", kinds)
    if any(kind.family == "sum" for kind in kinds):
        return _with_sum(step, kinds)
    more, row_operands = (
        common(kinds),
        [row_operands for row_operands in (0, 1) if kinds[row_operands].family == "row"],
    )
    if len(row_operands) == 2:
        return _rows_by_rows(step, kinds)
    row_operand, other_operand, (contracted, _, place) = (
        row_operands[0],
        1 - row_operands[0],
        _dims(step),
    )
    rows, batch = kinds[row_operand].rows, set(step.batch_dims(other_operand))
    if rows.dims and set(rows.dims) <= contracted[row_operand].keys():
        partners = {contracted[row_operand][dim] for dim in rows.dims}
        uniform = len(rows.dims) == 1 or kinds[other_operand].splat
        return (
            total(power=power, **more)
            if batch <= partners and uniform
            else step.mixed("rows are weighted by their position in the batch", kinds)
        )
    if contracted[row_operand].keys() & set(rows.dims):
        return step.mixed("parts of the batch are added up", kinds)
    result = moved(kinds[row_operand], place[row_operand].get)
    if result is None or not set(step.result_dims()) <= set(result.rows.dims):
        return step.mixed("rows meet other rows", kinds)
    if batch and not batch <= _paired(step, other_operand, rows):
        return step.mixed("rows meet other rows", kinds)
    if (
        len(rows.dims) > 1
        and not kinds[other_operand].splat
        and set(rows.dims) & set(step.params["dimension_numbers"][1][row_operand])
    ):
        return step.mixed("rows are weighted by their position in the batch", kinds)
    return row(result.rows, power=power, **more)


def _paired(step: Step, operand: int, rows: Place) -> set[int]:
    """The dims of one operand that run along the rows of the other."""
    pairs = step.params["dimension_numbers"][1]
    return {
        theirs
        for theirs, dim in zip(pairs[operand], pairs[1 - operand], strict=True)
        if dim in rows.dims
    }


def _with_sum(step: Step, kinds: list[Kind]) -> Kind:
    if len([kind for kind in kinds if kind.family == "sum"]) == 2 or any(
        kind.family == "row" for kind in kinds
    ):
        return step.mixed("a sum over rows is multiplied with what depends on rows", kinds)
    if step.result_dims():
        return step.mixed("a sum over rows is handed to every row", kinds)
    return total(power=added([kind.power for kind in kinds]), **common(kinds))


def _rows_by_rows(step: Step, kinds: list[Kind]) -> Kind:
    """Rows times rows: each with itself, added up or not."""
    contracted, batched, place = _dims(step)
    first, second = (kind.rows for kind in kinds)
    power, more = added([kind.power for kind in kinds]), common(kinds)
    if replace(first, start=0, stop=0) != replace(second, start=0, stop=0):
        return step.mixed("rows meet other rows", kinds)
    if not first.dims and not second.dims:
        return row(first, power=power, **more)
    together = [contracted[0].get(dim) for dim in first.dims] == list(second.dims) and bool(
        first.dims
    )
    if together:
        return total(power=power, **more)
    if [batched[0].get(dim) for dim in first.dims] == list(second.dims):
        result = moved(kinds[0], place[0].get)
        if result is not None and set(step.result_dims()) <= set(result.rows.dims):
            return row(result.rows, power=power, **more)
    return step.mixed("rows meet other rows", kinds)


def _dims(step: Step) -> tuple[list[dict[int, int]], list[dict[int, int]], list[dict[int, int]]]:
    """For each operand: contracted dim -> the other's, batch dim -> the other's, dim -> dim of the
    result.
    """
    (lc, rc), (lb, rb) = step.params["dimension_numbers"]
    free = [
        [dim for dim in range(len(step.operands[operand][0])) if dim not in (*c, *b)]
        for operand, (c, b) in enumerate(((lc, lb), (rc, rb)))
    ]
    shared = len(lb)
    left = {
        **{dim: i for i, dim in enumerate(lb)},
        **{dim: shared + i for i, dim in enumerate(free[0])},
    }
    right = {
        **{dim: i for i, dim in enumerate(rb)},
        **{dim: shared + len(free[0]) + i for i, dim in enumerate(free[1])},
    }
    pairs = (
        [dict(zip(lc, rc, strict=True)), dict(zip(rc, lc, strict=True))],
        [
            dict(zip(lb, rb, strict=True)),
            dict(zip(rb, lb, strict=True)),
        ],
    )
    return *pairs, [left, right]


def convolution(step: Step, kinds: list[Kind]) -> Kind:
    """Convolves images with kernels."""
    numbers, (images, kernels) = step.params["dimension_numbers"], kinds
    power, more = added([kind.power for kind in kinds]), common(kinds)
    if (
        power is None
        or step.params["batch_group_count"] != 1
        or any(kind.family == "sum" for kind in kinds)
    ):
        return step.mixed("rows meet in a convolution", kinds)
    if images.family == "row" and kernels.family == "free" and not step.batch_dims(1):
        if not images.rows.dims:
            return row(images.rows, power=power, **more)
        if list(images.rows.dims) == [numbers.lhs_spec[0]]:
            return row(
                replace(images.rows, start=numbers.out_spec[0], stop=numbers.out_spec[0] + 1),
                power=power,
                **more,
            )
    if (
        images.family == "row"
        and kernels.family == "row"
        and step.params["feature_group_count"] == 1
        and not images.rows.scans
        and (
            list(images.rows.dims) == [numbers.lhs_spec[1]]
            and list(kernels.rows.dims) == [numbers.rhs_spec[1]]
            and images.rows.inner == kernels.rows.inner == 1
        )
    ):
        return total(power=power, **more)  # the gradient of a kernel
    return step.mixed("rows meet in a convolution", kinds)


TABLE: Mapping[str, Rule] = {
    "reduce_sum": reduce_sum,
    **dict.fromkeys(
        (
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "reduce_xor",
            "argmax",
            "argmin",
        ),
        reduce_other,
    ),
    **dict.fromkeys(
        (
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "reduce_window",
            "select_and_gather_add",
            "select_and_scatter_add",
        ),
        window,
    ),
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
}
