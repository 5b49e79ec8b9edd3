"""Random numbers and the keys that they are drawn from."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.tracing.rows.draws import SHAPED, by_position, draw_of, own_dims
from shardlib.tracing.rows.kinds import Kind, Place, common, free, row
from shardlib.tracing.rows.rules.elementwise import Rule
from shardlib.tracing.rows.step import Step

_TOGETHER = "random numbers of all rows are drawn together"


def shaped(step: Step, kinds: list[Kind]) -> Kind:
    """An array drawn from each key: what is drawn for a position of the batch is that row's."""
    (keys,), dims, rank = kinds, step.result_dims(), len(step.operands[0][0])
    drawn_dims, more = own_dims(step.one.eqn, step.two.eqn), common(kinds)
    if keys.family == "free" and not drawn_dims:
        return free(**more)
    if keys.family == "row" and not drawn_dims:
        exact = by_position(step.one.eqn.invars[0].aval.dtype) and set(dims) <= set(keys.rows.dims)
        return row(keys.rows, **more) if exact else step.mixed(_TOGETHER, kinds)
    draw = draw_of(step.one.eqn, step.two.eqn, step.sizes) if keys.family == "free" else None
    if draw is None:
        return step.mixed(_TOGETHER, kinds)
    if step.unchanged:
        return step.mixed(
            "random numbers are drawn inside of a function with a derivative of its own", kinds
        )
    dim = rank + draw.dim
    return row(Place(start=dim, stop=dim + 1, inner=draw.inner), **more)


def alike(step: Step, kinds: list[Kind]) -> Kind:
    """Keys from keys and numbers, one by one; draws from a key for each sample."""
    if any(kind.power != 0 for kind in kinds):
        return step.mixed("the number of rows goes into a random key", kinds)
    places = {kind.rows for kind in kinds if kind.family == "row"}
    if any(kind.family not in ("free", "row") for kind in kinds) or len(places) > 1:
        return step.mixed(_TOGETHER, kinds)
    if not places:
        return free(**common(kinds))
    (place,), (shape, _) = places, step.results[0]
    if place.stop <= len(shape) and set(step.result_dims()) <= set(place.dims):
        return row(place, **common(kinds))
    return step.mixed(_TOGETHER, kinds)


def gamma(step: Step, kinds: list[Kind]) -> Kind:
    """Samples with a number of tries that differs; a key for all rows splits by their number."""
    keys, dtype = kinds[0], step.one.eqn.invars[0].aval.dtype
    exact = keys.family == "row" and by_position(dtype)
    rank = len(step.operands[0][0])
    if step.result_dims() and not (exact and keys.rows.stop <= rank):
        return step.mixed(_TOGETHER, kinds)
    return alike(step, kinds)


TABLE: Mapping[str, Rule] = {
    **dict.fromkeys(SHAPED, shaped),
    **dict.fromkeys(
        (
            "random_fold_in",
            "random_wrap",
            "random_unwrap",
            "random_seed",
            "random_clone",
            "threefry2x32",
        ),
        alike,
    ),
    "random_gamma": gamma,
}
