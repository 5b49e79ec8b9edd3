"""Linear algebra on stacks of matrices: each of the stack is worked on by itself."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.tracing.rows.kinds import Kind, common, row
from shardlib.tracing.rows.rules.elementwise import Rule
from shardlib.tracing.rows.step import Step
from shardlib.tracing.rows.walk import Walk
from shardlib.tracing.rules.linalg import whole_dims


def stacked(step: Step, kinds: list[Kind]) -> Kind:
    """Rows that are dims of the stack stay apart."""
    places = {kind.rows for kind in kinds if kind.family == "row"}
    if len(places) != 1 or any(kind.family not in ("free", "row") for kind in kinds):
        return step.mixed("rows meet other rows", kinds)
    (place,) = places
    if step.name == "triangular_solve" and kinds[0].family == "free" and not step.batch_dims(0):
        column = len(step.operands[1][0]) - (1 if step.params["left_side"] else 2)
        if list(place.dims) == [column] and kinds[0].power == kinds[1].power == 0:
            return row(place, **common(kinds))  # the columns of the right side are rows
    stack = len(step.operands[0][0]) - whole_dims(step.name, step.params)
    dims = {
        dim
        for shapes in (
            *map(step.batch_dims, range(len(step.operands))),
            *map(step.result_dims, range(len(step.results))),
        )
        for dim in shapes
    }
    if place.stop > stack or not dims <= set(place.dims):
        return step.mixed("rows meet other rows", kinds)
    if any(kind.power != 0 for kind in kinds):
        return step.mixed("the number of rows goes into what is made of each row", kinds)
    if len(place.dims) > 1 and any(
        kind.family == "free" and not kind.splat and shape
        for kind, (shape, _) in zip(kinds, step.operands, strict=True)
    ):
        return step.mixed("rows are weighted by their position in the batch", kinds)
    return row(place, **common(kinds))


def linear_solve(walk: Walk, step: Step, kinds: list[Kind]) -> list[Kind]:
    """A solver and the product that it inverts, by which it is differentiated."""
    lengths = step.params["const_lengths"]
    product, transposed, solver, _ = (
        kinds[sum(lengths[:index]) : sum(lengths[: index + 1])] for index in range(4)
    )
    right_sides = kinds[sum(lengths) :]
    solutions = walk.run(
        walk.inside_of(step, lambda params: params["jaxprs"].solve, "solve/"),
        [*solver, *right_sides],
        editable=False,
    )
    for name, constants in (("matvec", product), ("vecmat", transposed)):
        if step.params["jaxprs"]._asdict()[name] is None:
            continue
        products = walk.run(
            walk.inside_of(
                step, lambda params, name=name: getattr(params["jaxprs"], name), f"{name}/"
            ),
            [*constants, *solutions],
            editable=False,
        )
        coupled = next((kind for kind in products if kind.family == "mixed"), None)
        if coupled is not None:
            return [coupled] * len(solutions)
    return solutions


TABLE: Mapping[str, Rule] = dict.fromkeys(
    (
        "cholesky",
        "cholesky_update",
        "eig",
        "eigh",
        "geqp3",
        "geqrf",
        "hessenberg",
        "householder_product",
        "lu",
        "lu_pivots_to_permutation",
        "qr",
        "schur",
        "svd",
        "symmetric_product",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    ),
    stacked,
)
