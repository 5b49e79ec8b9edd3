"""Lookups: a row looks something up, or is looked up by its own position."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from shardlib.tracing.rows.kinds import Kind, Place, common, data, row, total
from shardlib.tracing.rows.rules.elementwise import Rule
from shardlib.tracing.rows.rules.movement import moved
from shardlib.tracing.rows.step import Step

#: Operations that jax.numpy's indexing makes positions with; they keep their tag.
_KEEPING = frozenset(
    {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy", "expand_dims"}
)
LOOKUPS: frozenset[str] = frozenset(
    {
        "gather",
        "scatter",
        "scatter-add",
        "scatter-mul",
        "scatter-max",
        "scatter-min",
        "scatter_add",
        "scatter_mul",
    }
)


def positional(kind: Kind) -> bool:
    """Whether a value holds positions in the batch, which in a part of it are other numbers."""
    return kind.tag is not None and "positions" in (
        kind.tag if isinstance(kind.tag, tuple) else (kind.tag,)
    )


def tagged(step: Step, kinds: list[Kind]) -> Kind | None:
    """The result of an operation of indexing with positions in the batch; None where it is another
    operation.
    """
    tags = [kind.tag for kind in kinds]
    if (
        step.name in _KEEPING
        and tags[0] in ("positions", "false")
        and step.one.eqn.outvars[0].aval.dtype.kind in "iub"
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


def _components(step: Step, kinds: list[Kind]) -> Kind | None:
    """Positions beside other components of an index."""
    others = [kind for kind in kinds if kind.tag != "positions"]
    batch = {
        tuple(step.batch_dims(index)) for index, kind in enumerate(kinds) if kind.tag == "positions"
    }
    if len(batch) != 1 or len(dims := batch.pop()) != 1 or step.params["dimension"] in dims:
        return None
    place = Place(start=dims[0], stop=dims[0] + 1)
    if any(
        not (
            kind.family == "free"
            or (kind.family == "row" and kind.place == place and not kind.descent.weighted)
        )
        for kind in others
    ):
        return None
    return row(place, tag=tuple(kind.tag for kind in kinds), **common(others))


def gather(step: Step, kinds: list[Kind]) -> Kind:
    """Slices of an array at computed positions."""
    numbers, (source, index) = step.params["dimension_numbers"], kinds
    more = {**common(kinds), "learned": source.descent.learned or index.descent.learned}
    places = [dim for dim in range(len(step.results[0][0])) if dim not in numbers.offset_dims]
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
            moved(index, lambda dim: places[dim] if dim < len(places) else None)
            if index.family == "row" and not positional(index) and _alongside(step, index)
            else None
        )
        return (
            step.mixed("rows are looked up by position", kinds)
            if moved_rows is None or not set(step.result_dims()) <= set(moved_rows.rows.dims)
            else row(moved_rows.rows, power=source.power, **more)
        )
    if source.family != "row":
        return step.mixed("rows are looked up by position", kinds)
    return _of_rows(step, kinds, places, more)


def _alongside(step: Step, index: Kind) -> bool:
    """Whether an array that is alike for all rows has none, or one for each of the index."""
    numbers = step.params["dimension_numbers"]
    along = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    return all(along.get(dim) in index.rows.dims for dim in step.batch_dims(0))


def _of_rows(step: Step, kinds: list[Kind], places: list[int], more: dict[str, object]) -> Kind:
    numbers, (source, index) = step.params["dimension_numbers"], kinds
    rows, batching = source.rows, list(numbers.operand_batching_dims)
    if not rows.dims:
        same = index.family == "free" or index.place == rows
        return (
            row(rows, power=source.power, **more)  # pyright: ignore[reportArgumentType]
            if same
            else step.mixed("rows are looked up by other rows", kinds)
        )
    if all(dim in batching for dim in rows.dims):
        along = [numbers.start_indices_batching_dims[batching.index(dim)] for dim in rows.dims]
        if index.family == "row" and (
            positional(index)
            or list(index.rows.dims) != along
            or (index.rows.inner, index.rows.scans) != (rows.inner, rows.scans)
        ):
            return step.mixed("rows are looked up by other rows", kinds)
        return _placed(step, kinds, rows, [places[dim] for dim in along], more)
    window = [
        dim
        for dim in range(len(step.operands[0][0]))
        if dim not in (*numbers.collapsed_slice_dims, *batching)
    ]
    to = dict(zip(window, numbers.offset_dims, strict=True))
    if all(
        dim in to
        and step.params["slice_sizes"][dim] == step.operands[0][0][dim]
        and step.two.params["slice_sizes"][dim] == step.operands[0][1][dim]
        for dim in rows.dims
    ):
        if index.family != "free":
            return step.mixed("rows meet other rows", kinds)
        return _placed(step, kinds, rows, [to[dim] for dim in rows.dims], more)
    if (
        len(rows.dims) == 1
        and rows.start in numbers.collapsed_slice_dims
        and _by_position(step, index, list(numbers.start_index_map), rows)
    ):
        dims = step.batch_dims(1)
        if len(dims) == 1 and dims[0] < len(places):
            return _placed(step, kinds, rows, [places[dims[0]]], more)
    return step.mixed("rows are looked up by position or content", kinds)


def _by_position(step: Step, index: Kind, mapped: list[int], rows: Place) -> bool:
    """Whether a row looks itself up."""
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
    step: Step, kinds: list[Kind], rows: Place, dims: list[int], more: dict[str, object]
) -> Kind:
    if dims != list(range(dims[0], dims[0] + len(dims))) or not set(step.result_dims()) <= set(
        dims
    ):
        return step.mixed("the order of the rows is lost", kinds)
    place = Place(start=dims[0], stop=dims[0] + len(dims), inner=rows.inner, scans=rows.scans)
    return row(place, power=kinds[0].power, **more)  # pyright: ignore[reportArgumentType]


def scatter(step: Step, kinds: list[Kind]) -> Kind:
    """Updates are written, or added, at computed positions."""
    numbers, (target, index, updates) = step.params["dimension_numbers"], kinds
    if any(kind.family == "sum" for kind in kinds) or (index.power != 0 and index.family != "data"):
        return step.mixed("sums over rows are written at computed positions", kinds)
    powers = {kind.power for kind in (target, updates) if not kind.zero} or {Fraction(0)}
    if len(powers) > 1 or None in powers:
        return step.mixed("the number of rows goes into what is written", kinds)
    (power,), more = powers, common(kinds)
    if not step.result_dims() and not _in_rows(step, kinds):
        if (
            step.name in ("scatter-add", "scatter_add")
            and target.family == "free"
            and (target.zero or power == -1)
            and not positional(index)
        ):
            return total(power=power, **more)
        return step.mixed("rows are written over each other", kinds)
    place = _written(step, kinds)
    if place is None:
        return step.mixed("rows are written by position or content", kinds)
    inner = {
        (kind.rows.inner, kind.rows.scans)
        for kind in kinds
        if kind.family == "row" and not positional(kind)
    } or {(1, ())}
    if len(inner) > 1:
        return step.mixed("rows meet other rows", kinds)
    ((elements, scans),) = inner
    return (
        row(Place(start=place, stop=place + 1, inner=elements, scans=scans), power=power, **more)
        if numbers is not None
        else step.mixed("", kinds)
    )


def _in_rows(step: Step, kinds: list[Kind]) -> bool:
    """Whether the target has rows, in a scan over them."""
    return kinds[0].family == "row" and bool(kinds[0].rows.dims)


def _written(step: Step, kinds: list[Kind]) -> int | None:
    """The dim of the result that holds the rows; None where they are not each their own."""
    numbers, (target, index, updates) = step.params["dimension_numbers"], kinds
    dims = step.result_dims() or list(target.rows.dims)
    if len(dims) != 1:
        return None
    (dim,) = dims
    batching = list(numbers.operand_batching_dims)
    scattered = [
        at for at in range(len(step.operands[2][0])) if at not in numbers.update_window_dims
    ]

    def at(kind: Kind, row_dim: int) -> bool:
        return kind.family == "free" or (
            kind.family == "row" and not positional(kind) and list(kind.rows.dims) == [row_dim]
        )

    if dim in batching:
        batching_dim = numbers.scatter_indices_batching_dims[batching.index(dim)]
        return (
            dim
            if at(target, dim) and at(index, batching_dim) and at(updates, scattered[batching_dim])
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
            if at(target, dim)
            and at(updates, to[dim])
            and step.operands[2][0][to[dim]] == step.operands[0][0][dim]
            else None
        )
    if dim in numbers.inserted_window_dims and dim in numbers.scatter_dims_to_operand_dims:
        rows = Place(start=dim, stop=dim + 1)
        along = step.batch_dims(1)
        in_place = (
            _by_position(step, index, list(numbers.scatter_dims_to_operand_dims), rows)
            and len(along) == 1
            and at(updates, scattered[along[0]])
            and at(target, dim)
        )
        return dim if in_place else None
    return None


TABLE: Mapping[str, Rule] = {
    "gather": gather,
    **{name: scatter for name in LOOKUPS if name.startswith("scatter")},
}
