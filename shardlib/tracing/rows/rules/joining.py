"""Rows through operations that take arrays apart and put them together."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.tracing.rows.kinds import Kind, common, row
from shardlib.tracing.rows.rules.elementwise import Rule, joined
from shardlib.tracing.rows.rules.movement import kept, moved
from shardlib.tracing.rows.step import Step


def slice_(step: Step, kinds: list[Kind]) -> Kind:
    """A part of each dim."""
    kind = kinds[0]
    if kind.family == "sum":
        return kind
    place, (before, after) = kind.rows, (step.operands[0], step.results[0])
    if all(before[trace][dim] == after[trace][dim] for trace in (0, 1) for dim in place.dims):
        return kind
    if len(place.dims) == 1 and not place.scans and step.params["strides"] is None:
        (dim,) = place.dims
        bounds = [
            (
                equation.params["start_indices"][dim],
                equation.params["limit_indices"][dim],
                size * place.inner,
            )
            for equation, size in ((step.one, step.sizes[0]), (step.two, step.sizes[1]))
        ]
        if (
            all(low % unit == 0 and high % unit == 0 for low, high, unit in bounds)
            and len({(low // unit, high // unit) for low, high, unit in bounds}) == 1
        ):
            return kind  # whole batches, of several that were joined
    return step.mixed("rows are picked by their position", kinds)


def split(step: Step, kinds: list[Kind]) -> Kind:
    """Parts along one dim."""
    kind, dim = kinds[0], step.params["axis"]
    if kind.family == "sum" or dim not in kind.rows.dims:
        return kind
    unit = [size * kind.rows.inner for size in step.sizes]
    undivided = all(
        shapes[trace][dim] % unit[trace] == 0 for shapes in step.results for trace in (0, 1)
    )
    return (
        kind
        if len(kind.rows.dims) == 1 and not kind.rows.scans and undivided
        else step.mixed("rows are picked by their position", kinds)
    )


def concatenate(step: Step, kinds: list[Kind]) -> Kind:
    """Arrays, one after the other along one dim."""
    dim, row_kinds = step.params["dimension"], [kind for kind in kinds if kind.family == "row"]
    if not row_kinds:
        return joined(step, kinds, list(range(len(kinds))))
    powers = {kind.power for kind in kinds if not kind.zero}
    if (
        len({kind.rows for kind in row_kinds}) > 1
        or any(kind.family == "sum" for kind in kinds)
        or len(powers) > 1
    ):
        return step.mixed("rows of two orders are joined", kinds)
    place = row_kinds[0].rows
    if any(not set(step.batch_dims(index)) <= set(place.dims) for index in range(len(kinds))):
        return step.mixed("rows meet other rows", kinds)
    result = row(place, power=next(iter(powers), row_kinds[0].power), **common(kinds))
    if dim not in place.dims:
        uniform = len(place.dims) == 1 or all(kind.family == "row" or kind.splat for kind in kinds)
        return (
            result.with_(tag=tuple(kind.tag for kind in kinds))
            if uniform
            else step.mixed("rows are weighted by their position in the batch", kinds)
        )
    if len(place.dims) == 1 and len(row_kinds) == len(kinds) and not place.scans:
        return result
    return step.mixed("rows are joined with others that are none", kinds)


def unstack(step: Step, kinds: list[Kind]) -> Kind:
    """Slices along one dim, which goes."""
    kind, axis = kinds[0], step.params["axis"]
    if kind.family == "sum":
        return kind
    return kept(step, kinds, moved(kind, lambda dim: None if dim == axis else dim - (dim > axis)))


def stack(step: Step, kinds: list[Kind]) -> Kind:
    """Arrays side by side along a dim of their own."""
    axis, row_kinds = step.params["axis"], [kind for kind in kinds if kind.family == "row"]
    if not row_kinds:
        return joined(step, kinds, list(range(len(kinds))))
    place, powers = row_kinds[0].rows, {kind.power for kind in kinds if not kind.zero}
    splat = len(place.dims) <= 1 or all(kind.family == "row" or kind.splat for kind in kinds)
    aligned = all(set(step.batch_dims(index)) <= set(place.dims) for index in range(len(kinds)))
    if (
        len({kind.rows for kind in row_kinds}) > 1
        or any(kind.family == "sum" for kind in kinds)
        or len(powers) > 1
        or not splat
        or not aligned
    ):
        return step.mixed("rows of two orders are joined", kinds)
    result = row(place, power=next(iter(powers), row_kinds[0].power), **common(kinds))
    return kept(step, kinds, moved(result, lambda dim: dim + (dim >= axis)))


def pad(step: Step, kinds: list[Kind]) -> Kind:
    """Elements are added around."""
    kind = kinds[0]
    if kinds[1].family != "free" or (kind.family == "sum" and not kinds[1].zero):
        return step.mixed("what is added depends on rows", kinds)
    if kind.family == "sum":
        return kind
    if kind.family != "row" or not (kinds[1].zero or kinds[1].power == kind.power):
        return step.mixed("what is added depends on rows", kinds)
    return (
        kind
        if all(tuple(step.params["padding_config"][dim]) == (0, 0, 0) for dim in kind.rows.dims)
        else step.mixed("rows are added", kinds)
    )


def dynamic_slice(step: Step, kinds: list[Kind]) -> Kind:
    """A part of each dim, at a position that the program computes."""
    kind = kinds[0]
    if any(position.family != "free" or position.power != 0 for position in kinds[1:]):
        return step.mixed("a position that depends on rows", kinds)
    complete = kind.family == "sum" or all(
        step.operands[0][trace][dim] == step.results[0][trace][dim]
        for trace in (0, 1)
        for dim in kind.rows.dims
    )
    return (
        kind.with_(**_shared(kinds))
        if complete
        else step.mixed("rows are picked by their position", kinds)
    )


def _shared(kinds: list[Kind]) -> dict[str, bool]:
    return {
        "learned": any(kind.descent.learned for kind in kinds),
    }


def dynamic_update_slice(step: Step, kinds: list[Kind]) -> Kind:
    """A part is written into an array."""
    row_kinds = [kind for kind in kinds[:2] if kind.family == "row"]
    powers = {kind.power for kind in kinds[:2] if not kind.zero}
    if (
        not row_kinds
        or len({kind.rows for kind in row_kinds}) > 1
        or any(
            kind.family != "free"
            for kind in (*kinds[2:], *(k for k in kinds[:2] if k.family != "row"))
        )
        or len(powers) > 1
    ):
        return step.mixed("rows are written by their position", kinds)
    place = row_kinds[0].rows
    same = all(
        step.operands[0][trace][dim] == step.operands[1][trace][dim]
        for trace in (0, 1)
        for dim in place.dims
    )
    return (
        row(place, power=next(iter(powers), row_kinds[0].power), **common(kinds))
        if same and len(place.dims) <= 1
        else step.mixed("rows are written by their position", kinds)
    )


TABLE: Mapping[str, Rule] = {
    "slice": slice_,
    "split": split,
    "concatenate": concatenate,
    "pad": pad,
    "unstack": unstack,
    "stack": stack,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
