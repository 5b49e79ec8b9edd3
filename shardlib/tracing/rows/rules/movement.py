"""Operations that move elements: where are the rows afterwards?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from shardlib.tracing.rows.kinds import Kind, Place, common, row
from shardlib.tracing.rows.rules.elementwise import NOT_LINEAR, Rule
from shardlib.tracing.rows.step import Shape, Step


def moved(kind: Kind, target_dim: Callable[[int], int | None]) -> Kind | None:
    """A kind whose dim d is dim where(d) of the result; None where the rows do not stay together,
    in their order.

    Args:
        target_dim: dim of the operand -> dim of the result, None where the dim is gone.
    """
    if kind.family != "row" or not kind.rows.dims:
        return kind
    new = [target_dim(dim) for dim in kind.rows.dims]
    if new[0] is None or new != list(range(new[0], new[0] + len(new))):
        return None
    return kind.with_(place=replace(kind.rows, start=new[0], stop=new[0] + len(new)), tag=None)


def kept(step: Step, kinds: list[Kind], result: Kind | None) -> Kind:
    """A kind, or "mixed" where there is none since the rows lost their order."""
    return step.mixed("the order of the rows is lost", kinds) if result is None else result


def _of_sum(step: Step, kinds: list[Kind]) -> Kind:
    """A sum over rows whose elements are moved."""
    return (
        step.mixed("a sum over rows is handed to every row", kinds)
        if step.result_dims()
        else kinds[0].with_(running=False)
    )


def broadcast_in_dim(step: Step, kinds: list[Kind]) -> Kind:
    """Operand dim i becomes result dim `broadcast_dimensions[i]`."""
    kind, dims = kinds[0], step.params["broadcast_dimensions"]
    if kind.family == "sum":
        return _of_sum(step, kinds)
    result = moved(kind, lambda dim: dims[dim])
    if result is not None and not set(step.result_dims()) <= set(result.rows.dims):
        return step.mixed("rows meet other rows", kinds)
    if (
        result is not None
        and len(result.rows.dims)
        and any(step.operands[0][0][dim] != step.results[0][0][dims[dim]] for dim in kind.rows.dims)
    ):
        return step.mixed("the order of the rows is lost", kinds)
    return kept(step, kinds, result)


def transpose(step: Step, kinds: list[Kind]) -> Kind:
    """Dims change places."""
    order = list(step.params["permutation"])
    return kinds[0] if kinds[0].family == "sum" else kept(step, kinds, moved(kinds[0], order.index))


def squeeze(step: Step, kinds: list[Kind]) -> Kind:
    """Dims of size 1 go."""
    rank = len(step.operands[0][0])
    gone = {dim % rank for dim in step.params["dimensions"]}
    left = [dim for dim in range(rank) if dim not in gone]
    if kinds[0].family == "sum":
        return kinds[0]
    return kept(step, kinds, moved(kinds[0], lambda dim: left.index(dim) if dim in left else None))


def reshape(step: Step, kinds: list[Kind]) -> Kind:
    """Elements stay in order; the place of rows is found again from the number of elements that
    follow each other.
    """
    kind = kinds[0]
    if kind.family == "sum":
        return _of_sum(step, kinds)
    place = kind.rows
    if not place.dims:
        return kind.with_(place=replace(place, start=0, stop=0))
    if place.scans:
        return _in_scan(step, kinds)
    regrouped_place = regrouped_alike(place, step)
    return (
        step.mixed("rows are regrouped in a way that depends on their number", kinds)
        if regrouped_place is None
        else kind.with_(place=regrouped_place, tag=None)
    )


def regrouped_alike(place: Place, step: Step) -> Place | None:
    """Where rows are after a reshape, for both numbers of rows; None where they are elsewhere, or
    nowhere. Of a single row any dim of size 1 could be the one: there the other trace says which.
    """
    places = [
        regrouped(place, step.operands[0][trace], step.results[0][trace], size)
        for trace, size in enumerate(step.sizes)
    ]
    many = step.sizes.index(max(step.sizes))
    if places[0] == places[1] or step.sizes[1 - many] != 1:
        return places[0] if places[0] == places[1] else None
    new, (before, after) = places[many], (step.operands[0][1 - many], step.results[0][1 - many])
    if new is None:
        return None
    repeats = (
        math.prod(after[new.start : new.stop]) * place.inner
        == math.prod(before[place.start : place.stop]) * new.inner
    )
    same = (
        repeats
        and math.prod(after[new.stop :]) * new.inner
        == math.prod(before[place.stop :]) * place.inner
    )
    return new if same else None


def regrouped(place: Place, before: Shape, after: Shape, rows: int) -> Place | None:
    """Where rows are after a reshape.

    Returns:
        None where no dims of the result hold exactly the rows.
    """
    stride = place.inner * math.prod(before[place.stop :])
    stop = next(
        (dim for dim in range(len(after) + 1) if stride % math.prod(after[dim:]) == 0), None
    )
    if stop is None:
        return None
    start = next(
        (dim for dim in range(stop, -1, -1) if math.prod(after[dim:]) % (stride * rows) == 0), None
    )
    return (
        None
        if start is None
        else Place(start=start, stop=stop, inner=stride // math.prod(after[stop:]))
    )


def _in_scan(step: Step, kinds: list[Kind]) -> Kind:
    """In the body of a scan over rows, which of them they are is not known: only a dim that is the
    same one before and after is followed.
    """
    place, before, after = kinds[0].rows, step.operands[0], step.results[0]
    merged = [tuple(math.prod(shape[place.start : place.stop]) for shape in before)]
    same = [
        dim
        for dim in range(len(after[0]))
        if tuple(shape[dim] for shape in after) in merged
        and math.prod(before[0][: place.start]) == math.prod(after[0][:dim])
    ]
    return kept(
        step,
        kinds,
        (
            kinds[0].with_(place=replace(place, start=same[0], stop=same[0] + 1))
            if len(same) == 1
            else None
        ),
    )


def matrixwise(step: Step, kinds: list[Kind]) -> Kind:
    """Decompositions and solutions of matrices, which the last two dims hold."""
    row_kinds = [kind for kind in kinds if kind.family == "row"]
    if (
        len({kind.rows for kind in row_kinds}) != 1
        or any(kind.family == "sum" for kind in kinds)
        or any(kind.power != 0 for kind in kinds)
    ):
        return step.mixed(NOT_LINEAR, kinds)
    place = row_kinds[0].rows
    within = all(place.stop <= len(shapes[0]) - 2 for shapes in step.operands) and all(
        set(step.result_dims(index)) <= set(place.dims) for index in range(len(step.results))
    )
    return (
        row(place, **common(kinds))
        if within
        else step.mixed("rows are mixed along the batch", kinds)
    )


def along(dims_of: Callable[[Step], list[int]], *, linear: bool) -> Rule:
    """The rule of an operation that mixes elements along some dims."""

    def rule(step: Step, kinds: list[Kind]) -> Kind:
        row_kinds = [kind for kind in kinds if kind.family == "row"]
        if not row_kinds and linear and len(kinds) == 1:
            return kinds[0]
        if len({kind.rows for kind in row_kinds}) != 1 or any(
            kind.family == "sum" for kind in kinds
        ):
            return step.mixed(NOT_LINEAR, kinds)
        place, powers = row_kinds[0].rows, {kind.power for kind in kinds if not kind.zero}
        if any(dim in place.dims for dim in dims_of(step)):
            return step.mixed("rows are mixed along the batch", kinds)
        if powers != {row_kinds[0].power} or (not linear and powers != {0}):
            return step.mixed("the number of rows goes into what is made of each row", kinds)
        if any(not set(step.batch_dims(index)) <= set(place.dims) for index in range(len(kinds))):
            return step.mixed("rows meet other rows", kinds)
        return row(place, power=row_kinds[0].power, **common(kinds))

    return rule


def axis(step: Step) -> list[int]:
    return [step.params["axis"]]


def last(step: Step) -> list[int]:
    rank = len(step.operands[0][0])
    return [step.params.get("axis", rank - 1) % rank]


def tile(step: Step, kinds: list[Kind]) -> Kind:
    """An array repeated along its dims."""
    kind = kinds[0]
    if kind.family == "row" and any(step.params["reps"][dim] != 1 for dim in kind.rows.dims):
        return step.mixed("rows are repeated", kinds)
    return kind


TABLE: Mapping[str, Rule] = {
    "tile": tile,
    "broadcast_in_dim": broadcast_in_dim,
    "transpose": transpose,
    "squeeze": squeeze,
    "reshape": reshape,
    "expand_dims": reshape,
    "rev": along(lambda step: list(step.params["dimensions"]), linear=True),
    "cumsum": along(axis, linear=True),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), along(axis, linear=False)),
    "sort": along(lambda step: [step.params["dimension"]], linear=False),
    "top_k": along(last, linear=False),
    "approx_top_k": along(last, linear=False),
    "fft": along(
        lambda step: list(
            range(
                len(step.operands[0][0]) - len(step.params["fft_lengths"]), len(step.operands[0][0])
            )
        ),
        linear=True,
    ),
    **dict.fromkeys(
        (
            "cholesky",
            "eig",
            "eigh",
            "geqrf",
            "householder_product",
            "lu",
            "qr",
            "schur",
            "svd",
            "triangular_solve",
        ),
        matrixwise,
    ),
}
