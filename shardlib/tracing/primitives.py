"""One row per JAX primitive (`TABLE`): its factor rule (`rules.py`), its effect on the rows of the
batch (rules here, by family), and the operands in which it is linear, by which hand-written
derivatives are checked (`linearity_fault`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from shardlib._jax_compat import scan_counts
from shardlib.functions.experts import ExpertForm
from shardlib.functions.losses import WeightedMeanForm
from shardlib.functions.routing import Balance
from shardlib.jax_types import Constant
from shardlib.tracing import rules
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program
from shardlib.tracing.row_kinds import (
    EqnPair,
    Kind,
    RowPosition,
    Shape,
    by_position,
    common,
    data,
    differing,
    dims_of_draw,
    draw_of,
    free,
    line_of,
    mixed,
    row,
    sum_powers,
    total,
)
from shardlib.tracing.rules import ARITHMETIC, COPIES, Describe, unit_rank

# --------------------------------------------------------------------------------------------------
# Element-wise operations.

#: A rule: (equation, kinds of its operands) -> the kind of all its results, or one kind per result.
RowRule = Callable[[EqnPair, list[Kind]], "Kind | list[Kind]"]

#: Reason for a mixed result that is no longer a sum over rows.
NOT_LINEAR = "a function of a sum over rows that is not linear"
_ADDITIONS = frozenset({"add", "add_any", "sub"})
_LINEAR_UNARY = frozenset({*COPIES, "neg", "real", "imag"})


def elementwise(step: EqnPair, kinds: list[Kind]) -> Kind | list[Kind]:
    """Element-wise operations; operands have the shape of the result, or are scalars."""
    if step.name == "bitcast_convert_type" and len(step.operands[0][0]) != len(step.results[0][0]):
        return step.mixed("nothing is known about its rows", kinds)
    if step.name == "optimization_barrier":
        return list(kinds)
    if step.name in COPIES and len(kinds) > 1:
        return step.mixed("nothing is known about its rows", kinds)
    row_kinds = [kind for kind in kinds if kind.family == "row"]
    sums = [kind for kind in kinds if kind.family == "sum"]
    if row_kinds and sums:
        return (
            _running(step, kinds)
            if any(kind.running for kind in sums)
            else step.mixed("a row meets a sum over rows", kinds)
        )
    return _rows(step, kinds, row_kinds) if row_kinds else _sums(step, kinds, sums)


def _rows(step: EqnPair, kinds: list[Kind], row_kinds: list[Kind]) -> Kind:
    positions = {kind.rows for kind in row_kinds}
    if len(positions) > 1:
        return step.mixed("rows meet other rows", kinds)
    (rows,) = positions
    for operand, kind in enumerate(kinds):
        dims, rank = step.batch_dims(operand), len(step.operands[operand][0])
        if not set(dims) <= set(rows.dims):
            return step.mixed("rows meet other rows", kinds)
        if kind.family == "free" and len(rows.dims) > 1 and rank and not kind.splat:
            return step.mixed("rows are weighted by their position in the batch", kinds)
    power = _power(step.name, kinds)
    if power is None or (power != 0 and step.is_lossy):
        return step.mixed("the number of rows goes into what is made of each row", kinds)
    return row(rows, power=power, **common(kinds))


def _power(name: str, kinds: list[Kind]) -> Fraction | None:
    if name == "mul":
        return sum_powers([kind.power for kind in kinds])
    if name == "div":
        return sum_powers([kind.power for kind in kinds], [1, -1])
    chosen = kinds[1:] if name == "select_n" else kinds
    powers = {kind.power for kind in chosen if not kind.zero} or {Fraction(0)}
    if name == "select_n" and kinds[0].power != 0:
        return None
    if name in _ADDITIONS or name in _LINEAR_UNARY or name == "select_n":
        return next(iter(powers)) if len(powers) == 1 else None
    return Fraction(0) if powers == {Fraction(0)} else None


def _sums(step: EqnPair, kinds: list[Kind], sums: list[Kind]) -> Kind:
    name, traits = step.name, common(kinds)
    if step.is_lossy:
        return step.mixed(NOT_LINEAR, kinds)
    if name in _LINEAR_UNARY:
        return kinds[0]
    if name in _ADDITIONS:
        running = name != "sub" and sum(kind.running for kind in sums) == 1
        return joined(step, kinds, list(range(len(kinds)))).with_(running=running)
    if name == "select_n" and kinds[0].family == "free" and kinds[0].power == 0:
        return joined(step, kinds, list(range(1, len(kinds))))
    if name == "mul" and len(sums) == 1:
        return _product(step, kinds, [1, 1], traits)
    if name == "div" and kinds[1].family == "free":
        return _product(step, kinds, [1, -1], traits)
    if name == "div":
        return step.mixed(
            "a sum over rows is divided by one that depends on parameters;"
            " shardlib.WeightedMean(total, weight) says that the weight has no gradient",
            kinds,
        )
    if len(sums) > 1 and name == "mul":
        return step.mixed("two sums over rows that depend on parameters are multiplied", kinds)
    return step.mixed(NOT_LINEAR, kinds)


def _product(step: EqnPair, kinds: list[Kind], signs: list[int], traits: dict[str, Any]) -> Kind:
    power = sum_powers([kind.power for kind in kinds], signs)
    if power is None:
        return step.mixed("the number of rows goes into a factor", kinds)
    return total(power=power, **traits)


def joined(step: EqnPair, kinds: list[Kind], positions: list[int]) -> Kind:
    """The sum or the concatenation of terms, some of which are sums over rows."""
    terms = [(index, kinds[index]) for index in positions if not kinds[index].zero]
    traits = common(kinds)
    powers = {kind.power for _, kind in terms if kind.family == "sum"}
    free_powers = {kind.power for _, kind in terms if kind.family == "free"}
    if None in powers or None in free_powers:
        return step.mixed("the number of rows goes into a term", kinds)
    if len(powers) <= 1 and (
        not free_powers or (free_powers == {Fraction(0)} and powers == {Fraction(-1)})
    ):
        return total(power=next(iter(powers), Fraction(0)), **traits)
    if not traits["learned"] or step.scales is None:
        return step.mixed(
            "terms that the number of rows scales differently are added up in a loop", kinds
        )
    for index, kind in terms:
        exponent = (kind.power or Fraction(0)) + (1 if kind.family == "sum" else 0)
        if exponent:
            step.scales[step.first.path, index] = exponent
    return total(power=Fraction(-1), **{**traits, "scaled": True})


def _running(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A row is added to the running sum of a scan over rows."""
    inside = all(not kind.rows.dims for kind in kinds if kind.family == "row")
    powers = {kind.power for kind in kinds if not kind.zero}
    if (
        step.name in ("add", "add_any")
        and all(kind.family in ("row", "sum") for kind in kinds)
        and inside
        and len(powers) <= 1
        and None not in powers
    ):
        return total(power=next(iter(powers), Fraction(0)), running=True, **common(kinds))
    return step.mixed("a row meets a sum over other rows", kinds)


# --------------------------------------------------------------------------------------------------
# Custom calls (`shardlib.functions`), which declare their treatment of rows.

Read = Callable[[list[tuple[int, int]]], list[Kind]]


def declared(
    first_equation: Equation, second_equation: Equation, first: Program, second: Program, read: Read
) -> list[Kind] | None:
    """The kinds of the results of a custom call, as the function declares them; None if it declares
    none for such operands.
    """
    assert first_equation.call is not None and second_equation.call is not None
    form = first_equation.call.form
    pairs = list(zip(first_equation.call.inputs, second_equation.call.inputs, strict=True))
    if isinstance(form, WeightedMeanForm):
        kinds = read(pairs)
        why = _no_sums(kinds)
        return (
            [mixed(why, f"shardlib.WeightedMean at {line_of(first_equation)}")]
            if why
            else [total(weighted=True, declared_mean=True, **_traits(kinds))]
        )
    if isinstance(form, Balance):
        kinds = read(pairs)
        if (
            all(kind.family == "row" and kind.power == 0 for kind in kinds)
            and len({kind.rows for kind in kinds}) == 1
        ):
            return [
                total(power=Fraction(-1), **{**_traits(kinds), "notes": frozenset({"balance"})})
            ]
    if isinstance(form, ExpertForm) and form.capacity is None:
        kinds = read(pairs)
        shapes = [(tuple(first.avals[a].shape), tuple(second.avals[b].shape)) for a, b in pairs]
        return _dropless(kinds, shapes)
    return None


def _no_sums(kinds: list[Kind]) -> str:
    """The reason why a total and a weight are not sums over rows, as the user declares; "" if none
    is known.
    """
    for name, kind in zip(("total", "weight"), kinds, strict=True):
        if kind.cause is not None and kind.cause.why == NOT_LINEAR:
            return f"the {name} is not a sum over rows, but {kind.cause}"
    growths = [_growth(kind) for kind in kinds]
    if None not in growths and growths[0] != growths[1]:
        return (
            "the total and the weight do not grow alike with the number of rows: one of them is no"
            " sum over them"
        )
    return ""


def _growth(kind: Kind) -> Fraction | None:
    """The power of the number of rows by which a value grows; None if unknown."""
    if kind.power is None or kind.family not in ("free", "sum") or kind.descent.scaled or kind.zero:
        return None
    return kind.power + (1 if kind.family == "sum" else 0)


def _traits(kinds: list[Kind]) -> dict[str, Any]:
    return {name: value for name, value in common(kinds).items() if name in ("learned", "notes")}


def _dropless(kinds: list[Kind], shapes: list[tuple[Shape, Shape]]) -> list[Kind] | None:
    """Dropless experts: the result for a token does not depend on other tokens."""
    tokens, parameters = kinds[:3], kinds[3:]
    row_kinds = [kind for kind in tokens if kind.family == "row"]
    if (
        not row_kinds
        or len({kind.rows for kind in row_kinds}) > 1
        or any(kind.power != 0 for kind in kinds)
        or any(kind.family != "free" for kind in parameters)
    ):
        return None
    rows = row_kinds[0].rows
    if (
        any(kind.family not in ("free", "row") for kind in tokens)
        or rows.stop >= len(shapes[0][0])
        or any(not set(differing(shape)) <= set(rows.dims) for shape in shapes[:3])
    ):
        return None
    traits = common(kinds)
    return [row(rows, **traits), free(zero=True, splat=True)]


def stacked(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Rows along stack dims stay independent."""
    positions = {kind.rows for kind in kinds if kind.family == "row"}
    if len(positions) != 1 or any(kind.family not in ("free", "row") for kind in kinds):
        return step.mixed("rows meet other rows", kinds)
    (rows,) = positions
    if step.name == "triangular_solve" and kinds[0].family == "free" and not step.batch_dims(0):
        column = len(step.operands[1][0]) - (1 if step.params["left_side"] else 2)
        if list(rows.dims) == [column] and kinds[0].power == kinds[1].power == 0:
            return row(rows, **common(kinds))  # the columns of the right side are rows
    stack = len(step.operands[0][0]) - unit_rank(step.name, step.params)
    dims = {
        dim
        for shapes in (
            *map(step.batch_dims, range(len(step.operands))),
            *map(step.result_dims, range(len(step.results))),
        )
        for dim in shapes
    }
    if rows.stop > stack or not dims <= set(rows.dims):
        return step.mixed("rows meet other rows", kinds)
    if any(kind.power != 0 for kind in kinds):
        return step.mixed("the number of rows goes into what is made of each row", kinds)
    if len(rows.dims) > 1 and any(
        kind.family == "free" and not kind.splat and shape
        for kind, (shape, _) in zip(kinds, step.operands, strict=True)
    ):
        return step.mixed("rows are weighted by their position in the batch", kinds)
    return row(rows, **common(kinds))


# --------------------------------------------------------------------------------------------------
# Operations that move elements, and the position of the rows afterwards.


def moved(kind: Kind, target_dim: Callable[[int], int | None]) -> Kind | None:
    """The kind after dim d of the operand becomes dim `target_dim(d)` of the result; None if the
    rows do not stay contiguous and in order.

    Args:
        target_dim: dim of the operand -> dim of the result, None for a removed dim.
    """
    if kind.family != "row" or not kind.rows.dims:
        return kind
    new = [target_dim(dim) for dim in kind.rows.dims]
    if new[0] is None or new != list(range(new[0], new[0] + len(new))):
        return None
    return kind.with_(position=replace(kind.rows, start=new[0], stop=new[0] + len(new)), tag=None)


def or_mixed(step: EqnPair, kinds: list[Kind], result: Kind | None) -> Kind:
    """The kind, or "mixed" if it is None because the rows lost their order."""
    return step.mixed("the order of the rows is lost", kinds) if result is None else result


def _of_sum(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A sum over rows whose elements are moved."""
    return (
        step.mixed("a sum over rows is handed to every row", kinds)
        if step.result_dims()
        else kinds[0].with_(running=False)
    )


def broadcast_in_dim(step: EqnPair, kinds: list[Kind]) -> Kind:
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
    return or_mixed(step, kinds, result)


def transpose(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Permutes dims."""
    order = list(step.params["permutation"])
    if kinds[0].family == "sum":
        return kinds[0]
    return or_mixed(step, kinds, moved(kinds[0], order.index))


def squeeze(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Removes dims of size 1."""
    rank = len(step.operands[0][0])
    removed = {dim % rank for dim in step.params["dimensions"]}
    remaining = [dim for dim in range(rank) if dim not in removed]
    if kinds[0].family == "sum":
        return kinds[0]
    return or_mixed(
        step, kinds, moved(kinds[0], lambda dim: remaining.index(dim) if dim in remaining else None)
    )


def reshape(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Elements keep their order; the place of the rows follows from the number of consecutive
    elements of a row.
    """
    kind = kinds[0]
    if kind.family == "sum":
        return _of_sum(step, kinds)
    rows = kind.rows
    if not rows.dims:
        return kind.with_(position=replace(rows, start=0, stop=0))
    if rows.scans:
        return _in_scan(step, kinds)
    regrouped_position = regrouped_alike(rows, step)
    return (
        step.mixed("rows are regrouped in a way that depends on their number", kinds)
        if regrouped_position is None
        else kind.with_(position=regrouped_position, tag=None)
    )


def regrouped_alike(rows: RowPosition, step: EqnPair) -> RowPosition | None:
    """The place of rows after a reshape, for both numbers of rows; None if the two differ or there
    is none. With a single row any dim of size 1 could be the place: the other trace decides.
    """
    positions = [
        regrouped(rows, step.operands[0][trace], step.results[0][trace], size)
        for trace, size in enumerate(step.sizes)
    ]
    many = step.sizes.index(max(step.sizes))
    if positions[0] == positions[1] or step.sizes[1 - many] != 1:
        return positions[0] if positions[0] == positions[1] else None
    new, (before, after) = positions[many], (step.operands[0][1 - many], step.results[0][1 - many])
    if new is None:
        return None
    repeats = (
        math.prod(after[new.start : new.stop]) * rows.inner
        == math.prod(before[rows.start : rows.stop]) * new.inner
    )
    same = (
        repeats
        and math.prod(after[new.stop :]) * new.inner == math.prod(before[rows.stop :]) * rows.inner
    )
    return new if same else None


def regrouped(position: RowPosition, before: Shape, after: Shape, rows: int) -> RowPosition | None:
    """The place of rows after a reshape; None if no dims of the result contain exactly the rows."""
    stride = position.inner * math.prod(before[position.stop :])
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
        else RowPosition(start=start, stop=stop, inner=stride // math.prod(after[stop:]))
    )


def _in_scan(step: EqnPair, kinds: list[Kind]) -> Kind:
    """In the body of a scan over rows, which rows they are is unknown: only a dim of the same size
    before and after is followed.
    """
    rows, before, after = kinds[0].rows, step.operands[0], step.results[0]
    merged = [tuple(math.prod(shape[rows.start : rows.stop]) for shape in before)]
    same = [
        dim
        for dim in range(len(after[0]))
        if tuple(shape[dim] for shape in after) in merged
        and math.prod(before[0][: rows.start]) == math.prod(after[0][:dim])
    ]
    return or_mixed(
        step,
        kinds,
        (
            kinds[0].with_(position=replace(rows, start=same[0], stop=same[0] + 1))
            if len(same) == 1
            else None
        ),
    )


def mixing(dims_of: Callable[[EqnPair], list[int]], *, linear: bool) -> RowRule:
    """The rule of an operation that mixes elements along some dims."""

    def rule(step: EqnPair, kinds: list[Kind]) -> Kind:
        row_kinds = [kind for kind in kinds if kind.family == "row"]
        if not row_kinds and linear and len(kinds) == 1:
            return kinds[0]
        if len({kind.rows for kind in row_kinds}) != 1 or any(
            kind.family == "sum" for kind in kinds
        ):
            return step.mixed(NOT_LINEAR, kinds)
        rows, powers = row_kinds[0].rows, {kind.power for kind in kinds if not kind.zero}
        if any(dim in rows.dims for dim in dims_of(step)):
            return step.mixed("rows are mixed along the batch", kinds)
        if powers != {row_kinds[0].power} or (not linear and powers != {0}):
            return step.mixed("the number of rows goes into what is made of each row", kinds)
        if any(not set(step.batch_dims(index)) <= set(rows.dims) for index in range(len(kinds))):
            return step.mixed("rows meet other rows", kinds)
        return row(rows, power=row_kinds[0].power, **common(kinds))

    return rule


def axis(step: EqnPair) -> list[int]:
    return [step.params["axis"]]


def last(step: EqnPair) -> list[int]:
    rank = len(step.operands[0][0])
    return [step.params.get("axis", rank - 1) % rank]


def tile(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Repeats an array along its dims."""
    kind = kinds[0]
    if kind.family == "row" and any(step.params["reps"][dim] != 1 for dim in kind.rows.dims):
        return step.mixed("rows are repeated", kinds)
    return kind


# --------------------------------------------------------------------------------------------------
# Lookups of a row, or by the position of a row.

#: Operations by which jax.numpy's indexing prepares positions; they keep the tag.
_KEEPS_TAG = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy"})
LOOKUPS: frozenset[str] = frozenset(
    {"gather", "scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"}
)


def positional(kind: Kind) -> bool:
    """True if a value contains positions in the batch, which are different numbers in a part of
    it.
    """
    return kind.tag is not None and "positions" in (
        kind.tag if isinstance(kind.tag, tuple) else (kind.tag,)
    )


def tagged(step: EqnPair, kinds: list[Kind]) -> Kind | None:
    """The result of an indexing operation on positions in the batch; None for any other
    operation.
    """
    tags = [kind.tag for kind in kinds]
    if (
        step.name in _KEEPS_TAG
        and tags[0] in ("positions", "false")
        and step.first.eqn.outvars[0].aval.dtype.kind in "iub"
        and len(step.result_dims()) == 1
    ):
        return kinds[0].with_(origin=None)
    if step.name in ("lt", "lt_to") and tags[0] == "positions" and kinds[1].zero:
        return data(tag="false")
    if step.name == "select_n" and tags[0] == "false":
        return kinds[1].with_(origin=None)
    if step.name == "concatenate" and "positions" in tags:
        return _components(step, kinds)
    return None


def _components(step: EqnPair, kinds: list[Kind]) -> Kind | None:
    """Positions concatenated with other components of an index."""
    others = [kind for kind in kinds if kind.tag != "positions"]
    batch = {
        tuple(step.batch_dims(index)) for index, kind in enumerate(kinds) if kind.tag == "positions"
    }
    if len(batch) != 1 or len(dims := batch.pop()) != 1 or step.params["dimension"] in dims:
        return None
    rows = RowPosition(start=dims[0], stop=dims[0] + 1)
    if any(
        not (
            kind.family == "free"
            or (kind.family == "row" and kind.position == rows and not kind.descent.weighted)
        )
        for kind in others
    ):
        return None
    return row(rows, tag=tuple(kind.tag for kind in kinds), **common(others))


def gather(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Slices of an array at computed positions."""
    numbers, (source, index) = step.params["dimension_numbers"], kinds
    traits = {**common(kinds), "learned": source.descent.learned or index.descent.learned}
    to_dim = [dim for dim in range(len(step.results[0][0])) if dim not in numbers.offset_dims]
    if index.power != 0 and index.family != "data":
        return step.mixed("the number of rows goes into a position", kinds)
    if source.family == "sum":
        return (
            source
            if index.family == "free" and not step.result_dims()
            else step.mixed("a row looks up a sum over rows", kinds)
        )
    if source.family == "free":
        moved_rows = (
            moved(index, lambda dim: to_dim[dim] if dim < len(to_dim) else None)
            if index.family == "row" and not positional(index) and _alongside(step, index)
            else None
        )
        return (
            step.mixed("rows are looked up by position", kinds)
            if moved_rows is None or not set(step.result_dims()) <= set(moved_rows.rows.dims)
            else row(moved_rows.rows, power=source.power, **traits)
        )
    if source.family != "row":
        return step.mixed("rows are looked up by position", kinds)
    return _of_rows(step, kinds, to_dim, traits)


def _alongside(step: EqnPair, index: Kind) -> bool:
    """True if an array that is the same for all rows has no dim of rows, or one that is batched
    with the index.
    """
    numbers = step.params["dimension_numbers"]
    partner = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    return all(partner.get(dim) in index.rows.dims for dim in step.batch_dims(0))


def _of_rows(step: EqnPair, kinds: list[Kind], to_dim: list[int], traits: dict[str, Any]) -> Kind:
    numbers, (source, index) = step.params["dimension_numbers"], kinds
    rows, batching = source.rows, list(numbers.operand_batching_dims)
    if not rows.dims:
        same = index.family == "free" or index.position == rows
        return (
            row(rows, power=source.power, **traits)
            if same
            else step.mixed("rows are looked up by other rows", kinds)
        )
    if all(dim in batching for dim in rows.dims):
        index_dims = [numbers.start_indices_batching_dims[batching.index(dim)] for dim in rows.dims]
        if index.family == "row" and (
            positional(index)
            or list(index.rows.dims) != index_dims
            or (index.rows.inner, index.rows.scans) != (rows.inner, rows.scans)
        ):
            return step.mixed("rows are looked up by other rows", kinds)
        return _placed(step, kinds, rows, [to_dim[dim] for dim in index_dims], traits)
    window = [
        dim
        for dim in range(len(step.operands[0][0]))
        if dim not in (*numbers.collapsed_slice_dims, *batching)
    ]
    to = dict(zip(window, numbers.offset_dims, strict=True))
    if all(
        dim in to
        and step.params["slice_sizes"][dim] == step.operands[0][0][dim]
        and step.second.params["slice_sizes"][dim] == step.operands[0][1][dim]
        for dim in rows.dims
    ):
        if index.family != "free":
            return step.mixed("rows meet other rows", kinds)
        return _placed(step, kinds, rows, [to[dim] for dim in rows.dims], traits)
    if (
        len(rows.dims) == 1
        and rows.start in numbers.collapsed_slice_dims
        and _indexing_by_position(step, index, list(numbers.start_index_map), rows)
    ):
        dims = step.batch_dims(1)
        if len(dims) == 1 and dims[0] < len(to_dim):
            return _placed(step, kinds, rows, [to_dim[dims[0]]], traits)
    return step.mixed("rows are looked up by position or content", kinds)


def _indexing_by_position(step: EqnPair, index: Kind, mapped: list[int], rows: RowPosition) -> bool:
    """True if every row looks itself up."""
    component = mapped.index(rows.start) if rows.start in mapped else -1
    tags = index.tag if isinstance(index.tag, tuple) else (index.tag,)
    return (
        0 <= component < len(tags)
        and tags[component] == "positions"
        and rows.inner == 1
        and not rows.scans
        and step.operands[0][0][rows.start] == step.sizes[0]
    )


def _placed(
    step: EqnPair, kinds: list[Kind], rows: RowPosition, dims: list[int], traits: dict[str, Any]
) -> Kind:
    if dims != list(range(dims[0], dims[0] + len(dims))) or not set(step.result_dims()) <= set(
        dims
    ):
        return step.mixed("the order of the rows is lost", kinds)
    position = replace(rows, start=dims[0], stop=dims[0] + len(dims))
    return row(position, power=kinds[0].power, **traits)


def scatter(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Writes, or adds, updates at computed positions."""
    numbers, (target, index, updates) = step.params["dimension_numbers"], kinds
    if any(kind.family == "sum" for kind in kinds) or (index.power != 0 and index.family != "data"):
        return step.mixed("sums over rows are written at computed positions", kinds)
    powers = {kind.power for kind in (target, updates) if not kind.zero} or {Fraction(0)}
    if len(powers) > 1 or None in powers:
        return step.mixed("the number of rows goes into what is written", kinds)
    (power,), traits = powers, common(kinds)
    if not step.result_dims() and not _in_rows(step, kinds):
        if (
            step.name == "scatter-add"
            and target.family == "free"
            and (target.zero or power == -1)
            and not positional(index)
        ):
            return total(power=power, **traits)
        return step.mixed("rows are written over each other", kinds)
    dim = _written(step, kinds)
    if dim is None:
        return step.mixed("rows are written by position or content", kinds)
    inner = {
        (kind.rows.inner, kind.rows.scans)
        for kind in kinds
        if kind.family == "row" and not positional(kind)
    } or {(1, ())}
    if len(inner) > 1:
        return step.mixed("rows meet other rows", kinds)
    ((elements, scans),) = inner
    position = RowPosition(start=dim, stop=dim + 1, inner=elements, scans=scans)
    return row(position, power=power, **traits) if numbers is not None else step.mixed("", kinds)


def _in_rows(step: EqnPair, kinds: list[Kind]) -> bool:
    """True if the target has rows, in a scan over them."""
    return kinds[0].family == "row" and bool(kinds[0].rows.dims)


def _written(step: EqnPair, kinds: list[Kind]) -> int | None:
    """The dim of the result that contains the rows; None if updates of different rows can meet."""
    numbers, (target, index, updates) = step.params["dimension_numbers"], kinds
    dims = step.result_dims() or list(target.rows.dims)
    if len(dims) != 1:
        return None
    (dim,) = dims
    batching = list(numbers.operand_batching_dims)
    scattered = [i for i in range(len(step.operands[2][0])) if i not in numbers.update_window_dims]

    def fits(kind: Kind, row_dim: int) -> bool:
        return kind.family == "free" or (
            kind.family == "row" and not positional(kind) and list(kind.rows.dims) == [row_dim]
        )

    if dim in batching:
        batching_dim = numbers.scatter_indices_batching_dims[batching.index(dim)]
        return (
            dim
            if fits(target, dim)
            and fits(index, batching_dim)
            and fits(updates, scattered[batching_dim])
            else None
        )
    window = [
        axis
        for axis in range(len(step.operands[0][0]))
        if axis not in (*numbers.inserted_window_dims, *batching)
    ]
    to = dict(zip(window, numbers.update_window_dims, strict=True))
    if dim in to and index.family == "free":
        return (
            dim
            if fits(target, dim)
            and fits(updates, to[dim])
            and step.operands[2][0][to[dim]] == step.operands[0][0][dim]
            else None
        )
    if dim in numbers.inserted_window_dims and dim in numbers.scatter_dims_to_operand_dims:
        rows = RowPosition(start=dim, stop=dim + 1)
        index_dims = step.batch_dims(1)
        looks_up_itself = (
            _indexing_by_position(step, index, list(numbers.scatter_dims_to_operand_dims), rows)
            and len(index_dims) == 1
            and fits(updates, scattered[index_dims[0]])
            and fits(target, dim)
        )
        return dim if looks_up_itself else None
    return None


# --------------------------------------------------------------------------------------------------
# Rows through operations that split and join arrays.


def slice_(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A slice of each dim."""
    kind = kinds[0]
    if kind.family == "sum":
        return kind
    rows, (before, after) = kind.rows, (step.operands[0], step.results[0])
    if all(before[trace][dim] == after[trace][dim] for trace in (0, 1) for dim in rows.dims):
        return kind
    if len(rows.dims) == 1 and not rows.scans and step.params["strides"] is None:
        (dim,) = rows.dims
        bounds = [
            (
                equation.params["start_indices"][dim],
                equation.params["limit_indices"][dim],
                size * rows.inner,
            )
            for equation, size in ((step.first, step.sizes[0]), (step.second, step.sizes[1]))
        ]
        if (
            all(low % unit == 0 and high % unit == 0 for low, high, unit in bounds)
            and len({(low // unit, high // unit) for low, high, unit in bounds}) == 1
        ):
            return kind  # whole batches, of several that were concatenated
    return step.mixed("rows are picked by their position", kinds)


def split(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Splits along one dim."""
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


def concatenate(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Concatenates along one dim."""
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
    rows = row_kinds[0].rows
    if any(not set(step.batch_dims(index)) <= set(rows.dims) for index in range(len(kinds))):
        return step.mixed("rows meet other rows", kinds)
    result = row(rows, power=next(iter(powers), row_kinds[0].power), **common(kinds))
    if dim not in rows.dims:
        uniform = len(rows.dims) == 1 or all(kind.family == "row" or kind.splat for kind in kinds)
        return (
            result.with_(tag=tuple(kind.tag for kind in kinds))
            if uniform
            else step.mixed("rows are weighted by their position in the batch", kinds)
        )
    if len(rows.dims) == 1 and len(row_kinds) == len(kinds) and not rows.scans:
        return result
    return step.mixed("rows are joined with others that are none", kinds)


def unstack(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Slices along one dim, which is removed."""
    kind, axis = kinds[0], step.params["axis"]
    if kind.family == "sum":
        return kind
    return or_mixed(
        step, kinds, moved(kind, lambda dim: None if dim == axis else dim - (dim > axis))
    )


def stack(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Joins arrays along a new dim."""
    axis, row_kinds = step.params["axis"], [kind for kind in kinds if kind.family == "row"]
    if not row_kinds:
        return joined(step, kinds, list(range(len(kinds))))
    rows, powers = row_kinds[0].rows, {kind.power for kind in kinds if not kind.zero}
    splat = len(rows.dims) <= 1 or all(kind.family == "row" or kind.splat for kind in kinds)
    aligned = all(set(step.batch_dims(index)) <= set(rows.dims) for index in range(len(kinds)))
    if (
        len({kind.rows for kind in row_kinds}) > 1
        or any(kind.family == "sum" for kind in kinds)
        or len(powers) > 1
        or not splat
        or not aligned
    ):
        return step.mixed("rows of two orders are joined", kinds)
    result = row(rows, power=next(iter(powers), row_kinds[0].power), **common(kinds))
    return or_mixed(step, kinds, moved(result, lambda dim: dim + (dim >= axis)))


def pad(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Pads dims."""
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


def dynamic_slice(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A slice of each dim at a computed position."""
    kind = kinds[0]
    if any(position.family != "free" or position.power != 0 for position in kinds[1:]):
        return step.mixed("a position that depends on rows", kinds)
    complete = kind.family == "sum" or all(
        step.operands[0][trace][dim] == step.results[0][trace][dim]
        for trace in (0, 1)
        for dim in kind.rows.dims
    )
    return (
        kind.with_(learned=any(kind.descent.learned for kind in kinds))
        if complete
        else step.mixed("rows are picked by their position", kinds)
    )


def dynamic_update_slice(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Writes an update into an array at a computed position."""
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
    rows = row_kinds[0].rows
    same = all(
        step.operands[0][trace][dim] == step.operands[1][trace][dim]
        for trace in (0, 1)
        for dim in rows.dims
    )
    return (
        row(rows, power=next(iter(powers), row_kinds[0].power), **common(kinds))
        if same and len(rows.dims) <= 1
        else step.mixed("rows are written by their position", kinds)
    )


# --------------------------------------------------------------------------------------------------
# Numbers known in both traces, and scalars computed from them.


def exponent(pair: tuple[Constant, Constant] | None, sizes: tuple[int, int]) -> Fraction | None:
    """The power of the number of rows by which two numbers differ; None if they do not differ by a
    power.

    Args:
        pair: the number in the two traces; None counts as the same.
    """
    if pair is None:
        return Fraction(0)
    first, second = (
        (
            complex(np.asarray(number).item())
            if np.iscomplexobj(number)
            else float(np.asarray(number).astype(np.float64))
        )
        for number in pair
    )
    if first == second or (first != first and second != second):
        return Fraction(0)
    if (
        isinstance(first, complex)
        or isinstance(second, complex)
        or first == 0
        or second == 0
        or first * second < 0
        or not (math.isfinite(first) and math.isfinite(second))
    ):
        return None
    power = math.log(first / second) / math.log(sizes[0] / sizes[1])
    near = Fraction(power).limit_denominator(4)
    return near if abs(float(near) - power) < 1e-5 else None


def folded_scalar(step: EqnPair, kinds: list[Kind]) -> Kind | None:
    """A scalar computed from known scalars; None if it cannot be folded."""
    if (
        not kinds
        or any(kind.value is None for kind in kinds)
        or len(step.results) != 1
        or step.results[0][0] != ()
    ):
        return None
    dtype = step.first.eqn.outvars[0].aval.dtype
    if step.name == "convert_element_type":
        pair = tuple(np.asarray(number).astype(dtype) for number in kinds[0].value or ())
    elif step.name == "div" and np.issubdtype(dtype, np.floating):
        pair = tuple(
            (np.asarray(dividend / divisor).astype(dtype) if divisor else np.asarray(np.nan, dtype))
            for dividend, divisor in zip(kinds[0].value or (), kinds[1].value or (), strict=True)
        )
    elif step.name in _SCALAR_OPS:
        extra = (step.params["y"],) if step.name == "integer_pow" else ()
        with np.errstate(all="ignore"):
            pair = tuple(
                np.asarray(
                    _SCALAR_OPS[step.name](*((kind.value or ())[trace] for kind in kinds), *extra)
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
        learned=any(kind.descent.learned for kind in kinds),
    )


_SCALAR_OPS: Mapping[str, Callable[..., Any]] = {
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


def result_power(step: EqnPair, kinds: list[Kind]) -> Fraction | None:
    name = step.name
    if name == "mul":
        return sum_powers([kind.power for kind in kinds])
    if name == "div":
        return sum_powers([kind.power for kind in kinds], [1, -1])
    chosen = kinds[1:] if name == "select_n" else kinds
    powers = {kind.power for kind in chosen if not kind.zero} or {Fraction(0)}
    if step.is_lossy:
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
        "reduce_max",
        "reduce_min",
    ):
        return next(iter(powers))
    return Fraction(0) if all(kind.power == 0 for kind in kinds) else None


# --------------------------------------------------------------------------------------------------
# Operations on values that depend on no row: along dims of the batch all their elements are equal;
# only the power of the number of rows in their scale is tracked.

#: Operations that map values equal along a dim to values equal along it.
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
        "stack",
        "unstack",
        "stop_gradient",
        "bitcast_convert_type",
        *ARITHMETIC,
        *COPIES,
    }
)

#: The same for operations along one dim, if that is another dim.
_OVER_ONE_DIM = frozenset({"split", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


def constant(left: Constant, right: Constant, sizes: tuple[int, int]) -> Kind:
    """The kind of a literal or a captured array, from its two traces."""
    if _opaque(left) or _opaque(right):
        return free()
    first, second = np.asarray(left), np.asarray(right)
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


def constants(step: EqnPair, kinds: list[Kind], *, learned: bool) -> Kind | list[Kind]:
    """The kinds of the results of an operation on free values."""
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
    traits: dict[str, Any] = common(kinds)
    if name == "reduce_sum":
        lost = len(set(step.params["axes"]) & set(step.batch_dims(0)))
        return free(
            power=None if kinds[0].power is None else kinds[0].power + lost,
            zero=kinds[0].zero,
            splat=kinds[0].splat,
            **traits,
        )
    if name == "dot_general":
        (contracted, _), _ = step.params["dimension_numbers"]
        power = sum_powers([kind.power for kind in kinds])
        return free(
            power=None if power is None else power + len(set(contracted) & set(step.batch_dims(0))),
            **traits,
        )
    if name in ("reshape", "broadcast_in_dim"):
        return _reshaped(step, kinds)
    if name in ("concatenate", "pad"):
        return _joined(step, kinds)
    if name == "tile" and all(
        step.operands[0][0][dim] == 1 for dim in {*step.result_dims()} - {*step.batch_dims(0)}
    ):
        return kinds[0]  # its copies are equal
    power = result_power(step, kinds)
    batch = any(step.batch_dims(index) for index in range(len(kinds))) or any(
        step.result_dims(index) for index in range(len(step.results))
    )
    if batch and name not in _UNIFORM and not _over_other_dim(step):
        return step.mixed("positions in the batch", kinds)
    splat = all(kind.splat for kind in kinds) and name in (
        *ARITHMETIC,
        *COPIES,
        "squeeze",
        "transpose",
        "slice",
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
    return [free(power=power, splat=splat, zero=zero, **traits) for _ in step.results]


def _over_other_dim(step: EqnPair) -> bool:
    """True if an operation works along one dim that is not a dim of the batch."""
    axis = step.params.get("axis", step.params.get("dimension"))
    return step.name in _OVER_ONE_DIM and axis not in step.batch_dims(0)


def _reshaped(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Equal elements stay equal; values with a batch dim are followed like rows that are all
    equal.
    """
    kind, traits = kinds[0], common(kinds)
    before, after = step.batch_dims(0), step.result_dims()
    if step.name == "broadcast_in_dim" or kind.splat or not (before or after):
        splat = kind.splat or step.operands[0][0] == ()
        return free(power=kind.power, zero=kind.zero, splat=splat, **traits)
    if len(before) == 1:
        (dim,) = before
        inner = [
            shape[dim] / size for shape, size in zip(step.operands[0], step.sizes, strict=True)
        ]
        if inner[0] == inner[1] == int(inner[0]):
            rows = RowPosition(start=dim, stop=dim + 1, inner=int(inner[0]))
            regrouped = regrouped_alike(rows, step)
            if regrouped is not None:
                return row(regrouped, power=kind.power, **traits)
    return step.mixed("rows are regrouped in a way that depends on their number", kinds)


def _joined(step: EqnPair, kinds: list[Kind]) -> Kind:
    powers = {kind.power for kind in kinds if not kind.zero} or {Fraction(0)}
    power = next(iter(powers)) if len(powers) == 1 else None
    traits, zero = common(kinds), all(kind.zero for kind in kinds)
    if step.name == "concatenate":
        over_batch = step.params["dimension"] in {
            dim for index in range(len(kinds)) for dim in step.batch_dims(index)
        }
    else:
        over_batch = any(
            tuple(step.params["padding_config"][dim]) != (0, 0, 0)
            for dim in {*step.batch_dims(0), *step.result_dims()}
        )
    if over_batch and not zero:
        return step.mixed("positions in the batch", kinds)
    return free(power=power, zero=zero, splat=zero, **traits)


# --------------------------------------------------------------------------------------------------
# Random numbers and their keys.

_DRAWN_JOINTLY = "random numbers of all rows are drawn together"


def shaped(step: EqnPair, kinds: list[Kind]) -> Kind:
    """An array drawn from each key: the numbers at a row's positions belong to that row."""
    (keys,), dims, rank = kinds, step.result_dims(), len(step.operands[0][0])
    drawn_dims, traits = dims_of_draw(step.first.eqn, step.second.eqn), common(kinds)
    if keys.family == "free" and not drawn_dims:
        return free(**traits)
    if keys.family == "row" and not drawn_dims:
        exact = by_position(step.first.eqn.invars[0].aval.dtype) and set(dims) <= set(
            keys.rows.dims
        )
        return row(keys.rows, **traits) if exact else step.mixed(_DRAWN_JOINTLY, kinds)
    draw = draw_of(step.first.eqn, step.second.eqn, step.sizes) if keys.family == "free" else None
    if draw is None:
        return step.mixed(_DRAWN_JOINTLY, kinds)
    if step.unchanged:
        return step.mixed(
            "random numbers are drawn inside of a function with a derivative of its own", kinds
        )
    dim = rank + draw.dim
    return row(RowPosition(start=dim, stop=dim + 1, inner=draw.inner), **traits)


def by_key(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Element-wise operations on keys, and draws with one key per sample."""
    if any(kind.power != 0 for kind in kinds):
        return step.mixed("the number of rows goes into a random key", kinds)
    positions = {kind.rows for kind in kinds if kind.family == "row"}
    if any(kind.family not in ("free", "row") for kind in kinds) or len(positions) > 1:
        return step.mixed(_DRAWN_JOINTLY, kinds)
    if not positions:
        return free(**common(kinds))
    (rows,), (shape, _) = positions, step.results[0]
    if rows.stop <= len(shape) and set(step.result_dims()) <= set(rows.dims):
        return row(rows, **common(kinds))
    return step.mixed(_DRAWN_JOINTLY, kinds)


def gamma(step: EqnPair, kinds: list[Kind]) -> Kind:
    """Rejection sampling: the number of tries varies, and a key for all rows is split by their
    number.
    """
    keys, dtype = kinds[0], step.first.eqn.invars[0].aval.dtype
    exact = keys.family == "row" and by_position(dtype)
    rank = len(step.operands[0][0])
    if step.result_dims() and not (exact and keys.rows.stop <= rank):
        return step.mixed(_DRAWN_JOINTLY, kinds)
    return by_key(step, kinds)


# --------------------------------------------------------------------------------------------------
# Reductions, windows, products and convolutions.


def reduce_sum(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A sum along dims."""
    kind, axes = kinds[0], set(step.params["axes"])
    if kind.family == "sum":
        return kind
    if kind.rows.dims and set(kind.rows.dims) <= axes:
        return total(power=kind.power, **common(kinds))
    return _over_other_dims(step, kinds, axes, "parts of the batch are added up")


def reduce_other(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A reduction along dims that is not a sum."""
    kind, axes = kinds[0], set(step.params["axes"])
    if kind.family == "sum":
        return step.mixed(NOT_LINEAR, kinds)
    if kind.power != 0:
        return step.mixed("the number of rows goes into what is made of each row", kinds)
    return _over_other_dims(step, kinds, axes, "a reduction over the batch that is not a sum")


def _over_other_dims(step: EqnPair, kinds: list[Kind], axes: set[int], why: str) -> Kind:
    """A reduction along dims other than those of the rows."""
    rows = kinds[0].rows
    if axes & set(rows.dims):
        return step.mixed(why, kinds)
    remaining = [dim for dim in range(len(step.operands[0][0])) if dim not in axes]
    result = moved(kinds[0], lambda dim: remaining.index(dim))
    assert result is not None
    return result


def window(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A reduction over windows."""
    row_kinds = [kind for kind in kinds if kind.family == "row"]
    if (
        len({kind.rows for kind in row_kinds}) != 1
        or any(kind.family == "sum" for kind in kinds)
        or any(kind.power != 0 for kind in row_kinds)
    ):
        return step.mixed("windows over sums of rows", kinds)
    rows = row_kinds[0].rows
    still = all(step.params["window_dimensions"][dim] == 1 for dim in rows.dims)
    still = still and all(
        tuple(step.params.get("padding", ((0, 0),) * (dim + 1))[dim]) == (0, 0)
        and step.params.get("window_strides", (1,) * (dim + 1))[dim] == 1
        for dim in rows.dims
    )
    return row(rows, **common(kinds)) if still else step.mixed("windows over rows", kinds)


def dot_general(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A product with contracted and batch dims."""
    power = sum_powers([kind.power for kind in kinds])
    if power is None:
        return step.mixed("the number of rows goes into a factor", kinds)
    if any(kind.family == "sum" for kind in kinds):
        return _with_sum(step, kinds)
    traits = common(kinds)
    row_operands = [row_operands for row_operands in (0, 1) if kinds[row_operands].family == "row"]
    if len(row_operands) == 2:
        return _rows_by_rows(step, kinds)
    row_operand, other_operand, (contracted, _, result_dim) = (
        row_operands[0],
        1 - row_operands[0],
        _dims(step),
    )
    rows, batch = kinds[row_operand].rows, set(step.batch_dims(other_operand))
    if rows.dims and set(rows.dims) <= contracted[row_operand].keys():
        partners = {contracted[row_operand][dim] for dim in rows.dims}
        uniform = len(rows.dims) == 1 or kinds[other_operand].splat
        return (
            total(power=power, **traits)
            if batch <= partners and uniform
            else step.mixed("rows are weighted by their position in the batch", kinds)
        )
    if contracted[row_operand].keys() & set(rows.dims):
        return step.mixed("parts of the batch are added up", kinds)
    result = moved(kinds[row_operand], result_dim[row_operand].get)
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
    return row(result.rows, power=power, **traits)


def _paired(step: EqnPair, operand: int, rows: RowPosition) -> set[int]:
    """The dims of one operand that are paired with the rows of the other."""
    pairs = step.params["dimension_numbers"][1]
    return {
        theirs
        for theirs, dim in zip(pairs[operand], pairs[1 - operand], strict=True)
        if dim in rows.dims
    }


def _with_sum(step: EqnPair, kinds: list[Kind]) -> Kind:
    if len([kind for kind in kinds if kind.family == "sum"]) == 2 or any(
        kind.family == "row" for kind in kinds
    ):
        return step.mixed("a sum over rows is multiplied with what depends on rows", kinds)
    if step.result_dims():
        return step.mixed("a sum over rows is handed to every row", kinds)
    return total(power=sum_powers([kind.power for kind in kinds]), **common(kinds))


def _rows_by_rows(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A product of rows with rows, each with itself, summed or not."""
    contracted, batched, result_dim = _dims(step)
    first, second = (kind.rows for kind in kinds)
    power, traits = sum_powers([kind.power for kind in kinds]), common(kinds)
    if replace(first, start=0, stop=0) != replace(second, start=0, stop=0):
        return step.mixed("rows meet other rows", kinds)
    if not first.dims and not second.dims:
        return row(first, power=power, **traits)
    contracts_rows = [contracted[0].get(dim) for dim in first.dims] == list(second.dims) and bool(
        first.dims
    )
    if contracts_rows:
        return total(power=power, **traits)
    if [batched[0].get(dim) for dim in first.dims] == list(second.dims):
        result = moved(kinds[0], result_dim[0].get)
        if result is not None and set(step.result_dims()) <= set(result.rows.dims):
            return row(result.rows, power=power, **traits)
    return step.mixed("rows meet other rows", kinds)


def _dims(step: EqnPair) -> tuple[list[dict[int, int]], list[dict[int, int]], list[dict[int, int]]]:
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
        [dict(zip(lb, rb, strict=True)), dict(zip(rb, lb, strict=True))],
    )
    return *pairs, [left, right]


def convolution(step: EqnPair, kinds: list[Kind]) -> Kind:
    """A convolution."""
    numbers, (images, kernels) = step.params["dimension_numbers"], kinds
    power, traits = sum_powers([kind.power for kind in kinds]), common(kinds)
    if (
        power is None
        or step.params["batch_group_count"] != 1
        or any(kind.family == "sum" for kind in kinds)
    ):
        return step.mixed("rows meet in a convolution", kinds)
    if images.family == "row" and kernels.family == "free" and not step.batch_dims(1):
        if not images.rows.dims:
            return row(images.rows, power=power, **traits)
        if list(images.rows.dims) == [numbers.lhs_spec[0]]:
            return row(
                replace(images.rows, start=numbers.out_spec[0], stop=numbers.out_spec[0] + 1),
                power=power,
                **traits,
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
        return total(power=power, **traits)  # the gradient of a kernel
    return step.mixed("rows meet in a convolution", kinds)


#: Jointly linear in all operands.
ALL = slice(None)
#: A product: linear in each operand, the others constant.
EACH = "each"


@dataclass(frozen=True, kw_only=True)
class Primitive:
    """A primitive of JAX.

    Attributes:
        factors: its factor rule; None if it has none: its equations are opaque, and a Finding says
            so.
        rows: the rule for the kinds of its results (`shardlib.tracing.row_kinds`); None if it has
            none: results that read rows are mixed.
        keys: whether it reads random keys; `rows` is then applied before whole-batch values are
            passed in as constants.
        linear: the operands in which it is jointly linear, the others constant, or `EACH`; None if
            it is not linear.
    """

    factors: Describe | None = None
    rows: RowRule | None = None
    keys: bool = False
    linear: slice | str | None = None


def _each(names: tuple[str, ...], primitive: Primitive) -> Mapping[str, Primitive]:
    return dict.fromkeys(names, primitive)


_FIRST, _FIRST_TWO = slice(0, 1), slice(0, 2)

#: Of (array, positions, updates): the array and the updates.
_WRITTEN = slice(0, 3, 2)

_REDUCED = rules.reduction("axes", partial=True)
_CUMULATIVE = rules.unsharded_along("axis", "reduction")

TABLE: Mapping[str, Primitive] = {
    # element-wise
    **_each(rules.ARITHMETIC, Primitive(factors=rules.arithmetic, rows=elementwise)),
    **_each(
        ("add", "add_any", "complex", "conj", "imag", "neg", "real", "sub"),
        Primitive(factors=rules.arithmetic, rows=elementwise, linear=ALL),
    ),
    "mul": Primitive(factors=rules.arithmetic, rows=elementwise, linear=EACH),
    "div": Primitive(factors=rules.arithmetic, rows=elementwise, linear=_FIRST),
    "select_n": Primitive(factors=rules.arithmetic, rows=elementwise, linear=slice(1, None)),
    **_each(rules.COPIES, Primitive(factors=rules.identity, rows=elementwise, linear=ALL)),
    "bitcast_convert_type": Primitive(factors=rules.same_bits, rows=elementwise),
    "psum": Primitive(linear=ALL),
    # contractions
    "dot_general": Primitive(factors=rules.dot_general, rows=dot_general, linear=EACH),
    "ragged_dot_general": Primitive(factors=rules.ragged_dot_general, linear=EACH),
    "conv_general_dilated": Primitive(
        factors=rules.conv_general_dilated, rows=convolution, linear=EACH
    ),
    # reductions, windows and sorts
    "reduce_sum": Primitive(factors=_REDUCED, rows=reduce_sum, linear=ALL),
    **_each(
        ("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_xor"),
        Primitive(factors=_REDUCED, rows=reduce_other),
    ),
    **_each(
        ("argmax", "argmin"),
        Primitive(factors=rules.reduction("axes", partial=False), rows=reduce_other),
    ),
    "reduce": Primitive(factors=rules.reduction("dimensions", partial=False)),
    "cumsum": Primitive(factors=_CUMULATIVE, rows=mixing(axis, linear=True), linear=ALL),
    **_each(
        ("cumlogsumexp", "cummax", "cummin", "cumprod"),
        Primitive(factors=_CUMULATIVE, rows=mixing(axis, linear=False)),
    ),
    "reduce_window_sum": Primitive(factors=rules.window_reduction, rows=window, linear=ALL),
    **_each(
        ("reduce_window", "reduce_window_max", "reduce_window_min"),
        Primitive(factors=rules.window_reduction, rows=window),
    ),
    "select_and_gather_add": Primitive(factors=rules.window_reduction, rows=window, linear=_FIRST),
    "select_and_scatter_add": Primitive(
        factors=rules.select_and_scatter_add, rows=window, linear=_FIRST
    ),
    "select_and_scatter": Primitive(factors=rules.select_and_scatter_add),
    "sort": Primitive(
        factors=rules.unsharded_along("dimension", "sort"),
        rows=mixing(lambda step: [step.params["dimension"]], linear=False),
    ),
    **_each(
        ("approx_top_k", "top_k"), Primitive(factors=rules.top_k, rows=mixing(last, linear=False))
    ),
    # movement
    "broadcast_in_dim": Primitive(
        factors=rules.broadcast_in_dim, rows=broadcast_in_dim, linear=ALL
    ),
    "reshape": Primitive(factors=rules.reshape, rows=reshape, linear=ALL),
    "squeeze": Primitive(factors=rules.squeeze, rows=squeeze, linear=ALL),
    "transpose": Primitive(factors=rules.transpose, rows=transpose, linear=ALL),
    "rev": Primitive(
        factors=rules.unsharded_along("dimensions", "movement"),
        rows=mixing(lambda step: list(step.params["dimensions"]), linear=True),
        linear=ALL,
    ),
    "slice": Primitive(factors=rules.slice_, rows=slice_, linear=ALL),
    "pad": Primitive(factors=rules.pad, rows=pad, linear=ALL),
    "concatenate": Primitive(
        factors=rules.in_parts("dimension", joins=True), rows=concatenate, linear=ALL
    ),
    "split": Primitive(factors=rules.in_parts("axis", joins=False), rows=split, linear=ALL),
    "stack": Primitive(
        factors=rules.in_parts("axis", joins=True, stacks=True), rows=stack, linear=ALL
    ),
    "unstack": Primitive(
        factors=rules.in_parts("axis", joins=False, stacks=True), rows=unstack, linear=ALL
    ),
    "tile": Primitive(factors=rules.tile, rows=tile),
    **_each(
        ("empty2", "iota", "iota_2x32_shape", "platform_index"), Primitive(factors=rules.generated)
    ),
    # lookups
    "gather": Primitive(factors=rules.gather, rows=gather, linear=_FIRST),
    **_each(
        ("scatter", "scatter-add"), Primitive(factors=rules.scatter, rows=scatter, linear=_WRITTEN)
    ),
    **_each(
        ("scatter-max", "scatter-min", "scatter-mul"),
        Primitive(factors=rules.scatter, rows=scatter),
    ),
    "scatter-sub": Primitive(factors=rules.scatter),
    "dynamic_slice": Primitive(factors=rules.dynamic_slice, rows=dynamic_slice, linear=_FIRST),
    "dynamic_update_slice": Primitive(
        factors=rules.dynamic_update_slice, rows=dynamic_update_slice, linear=_FIRST_TWO
    ),
    # random numbers
    **_each(
        ("random_bits", "random_split"), Primitive(factors=rules.drawn, rows=shaped, keys=True)
    ),
    **_each(
        ("random_unwrap", "random_wrap"), Primitive(factors=rules.same_bits, rows=by_key, keys=True)
    ),
    **_each(
        ("random_fold_in", "random_seed", "threefry2x32"),
        Primitive(factors=rules.arithmetic, rows=by_key, keys=True),
    ),
    "random_gamma": Primitive(factors=rules.arithmetic, rows=gamma, keys=True),
    "random_clone": Primitive(factors=rules.identity, rows=by_key, keys=True),
    **_each(("rng_bit_generator", "rng_uniform"), Primitive(factors=rules.sequential)),
    # linear algebra
    **_each(
        (
            "cholesky",
            "eig",
            "eigh",
            "geqrf",
            "householder_product",
            "lu",
            "lu_pivots_to_permutation",
            "qr",
            "schur",
            "svd",
            "tridiagonal_solve",
        ),
        Primitive(factors=rules.matrices, rows=stacked),
    ),
    **_each(
        ("cholesky_update", "geqp3", "hessenberg", "symmetric_product", "tridiagonal"),
        Primitive(rows=stacked),
    ),
    "triangular_solve": Primitive(factors=rules.matrices, rows=stacked, linear=slice(1, 2)),
    "custom_linear_solve": Primitive(factors=rules.matrices),
    "fft": Primitive(
        factors=rules.matrices,
        rows=mixing(
            lambda step: list(
                range(
                    len(step.operands[0][0]) - len(step.params["fft_lengths"]),
                    len(step.operands[0][0]),
                )
            ),
            linear=True,
        ),
        linear=ALL,
    ),
}


# --------------------------------------------------------------------------------------------------
# Linearity of custom derivatives in the cotangents of their results.
#
# The gradient of a microbatch is that of the whole batch times a factor, and gradients of
# microbatches are added up. A derivative that clips, normalises or quantises cotangents, or adds a
# term to them, gives other numbers for the factor and for the microbatches. JAX checks linearity of
# a `custom_jvp`, which it transposes, but not of a `custom_vjp`.

#: Dependence of a value on the cotangents: zero, independent of them, or linear.
ZERO, CONSTANT, LINEAR = 0, 1, 2


class NotLinear(Exception):
    """The operation that is not linear."""


def linearity_fault(program: Program, positions: Sequence[int]) -> str:
    """The first operation that is not linear in the inputs at `positions`; "" if all are."""
    try:
        results = _dependences(
            program,
            [
                LINEAR if position in positions else CONSTANT
                for position in range(len(program.inputs))
            ],
        )
    except NotLinear as error:
        return str(error)
    return "a term that does not depend on it" if CONSTANT in results else ""


def _dependences(program: Program, arguments: Sequence[int]) -> list[int]:
    """The dependences of the results of a program."""
    values = {
        number: _of_constant(constant) for number, constant in program.constants.items()
    } | dict(zip(program.inputs, arguments, strict=True))
    for equation in program.equations:
        results = _linear_results(equation, [values[number] for number in equation.inputs])
        values.update(zip(equation.outputs, results, strict=True))
    return [values[number] for number in program.outputs]


def _of_constant(constant: Any) -> int:
    concrete = not isinstance(constant, Tracer) and not jax.dtypes.issubdtype(
        jax.numpy.result_type(constant), jax.dtypes.extended
    )
    return ZERO if concrete and not np.any(constant) else CONSTANT


def _linear_results(equation: Equation, kinds: list[int]) -> list[int]:
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
    joint = range(len(kinds))[linear]
    return all(
        kind != CONSTANT if position in joint else kind != LINEAR
        for position, kind in enumerate(kinds)
    )


def _called(equation: Equation, kinds: list[int]) -> list[int]:
    return _dependences(equation.inside(), kinds)


def _fixed_point(iteration: Callable[[list[int]], list[int]], carried: list[int]) -> list[int]:
    """The dependences of a loop's carries after any number of iterations; a sum of a linear and a
    constant value is neither.
    """
    while True:
        after = [_agreed(equals) for equals in zip(carried, iteration(carried), strict=True)]
        if after == carried:
            return carried
        carried = after


def _agreed(kinds: Sequence[int]) -> int:
    if CONSTANT in kinds and LINEAR in kinds:
        raise NotLinear("a loop or branch that is linear by turns")
    return max(kinds)


def _scan(equation: Equation, kinds: list[int]) -> list[int]:
    constants, carried = scan_counts(equation.params)
    body, (first, scanned) = (
        equation.inside("body"),
        (kinds[:constants], kinds[constants + carried :]),
    )
    carry = _fixed_point(
        lambda carry: _dependences(body, [*first, *carry, *scanned])[:carried],
        kinds[constants : constants + carried],
    )
    return [*carry, *_dependences(body, [*first, *carry, *scanned])[carried:]]


def _while(equation: Equation, kinds: list[int]) -> list[int]:
    tests, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    body = equation.inside("body")
    test = equation.inside("cond")
    state = _fixed_point(
        lambda state: _dependences(body, [*kinds[tests : tests + constants], *state]),
        kinds[tests + constants :],
    )
    if LINEAR in _dependences(test, [*kinds[:tests], *state]):
        raise NotLinear("while")
    return state


def _cond(equation: Equation, kinds: list[int]) -> list[int]:
    if kinds[0] == LINEAR:
        raise NotLinear("cond")
    branches = [_dependences(branch, kinds[1:]) for branch in equation.programs]
    return [_agreed(kinds_of_result) for kinds_of_result in zip(*branches, strict=True)]


_CALLS: Mapping[str, Callable[[Equation, list[int]], list[int]]] = {
    **dict.fromkeys((*REMAT, *CUSTOM), _called),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
