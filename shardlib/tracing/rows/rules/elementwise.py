"""Operations that work position by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from shardlib.tracing.rows.kinds import Kind, added, common, row, total
from shardlib.tracing.rows.step import Step
from shardlib.tracing.rules.elementwise import ARITHMETIC, COPIES

#: What rules are: (equation, kinds of its operands) -> the kind of all its results, or of each.
Rule = Callable[[Step, list[Kind]], "Kind | list[Kind]"]

#: Why a result is mixed: no sum over rows is left of it.
NOT_LINEAR = "a function of a sum over rows that is not linear"
_ADDING = frozenset({"add", "add_any", "sub"})
_PASSING = frozenset({*COPIES, "neg", "real", "imag"})


def elementwise(step: Step, kinds: list[Kind]) -> Kind | list[Kind]:
    """Position by position; the operands have the shape of the result, or none."""
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


def _rows(step: Step, kinds: list[Kind], row_kinds: list[Kind]) -> Kind:
    places = {kind.rows for kind in row_kinds}
    if len(places) > 1:
        return step.mixed("rows meet other rows", kinds)
    (place,) = places
    for operand, kind in enumerate(kinds):
        dims, rank = step.batch_dims(operand), len(step.operands[operand][0])
        if not set(dims) <= set(place.dims):
            return step.mixed("rows meet other rows", kinds)
        if kind.family == "free" and len(place.dims) > 1 and rank and not kind.splat:
            return step.mixed("rows are weighted by their position in the batch", kinds)
    power = _power(step.name, kinds)
    if power is None or (power != 0 and step.cuts):
        return step.mixed("the number of rows goes into what is made of each row", kinds)
    return row(place, power=power, **common(kinds))


def _power(name: str, kinds: list[Kind]) -> Fraction | None:
    if name == "mul":
        return added([kind.power for kind in kinds])
    if name == "div":
        return added([kind.power for kind in kinds], [1, -1])
    chosen = kinds[1:] if name == "select_n" else kinds
    powers = {kind.power for kind in chosen if not kind.zero} or {Fraction(0)}
    if name == "select_n" and kinds[0].power != 0:
        return None
    if name in _ADDING or name in _PASSING or name == "select_n":
        return next(iter(powers)) if len(powers) == 1 else None
    return Fraction(0) if powers == {Fraction(0)} else None


def _sums(step: Step, kinds: list[Kind], sums: list[Kind]) -> Kind:
    name, more = step.name, common(kinds)
    if step.cuts:
        return step.mixed(NOT_LINEAR, kinds)
    if name in _PASSING:
        return kinds[0]
    if name in _ADDING:
        running = name != "sub" and sum(kind.running for kind in sums) == 1
        return joined(step, kinds, list(range(len(kinds)))).with_(running=running)
    if name == "select_n" and kinds[0].family == "free" and kinds[0].power == 0:
        return joined(step, kinds, list(range(1, len(kinds))))
    if name == "mul" and len(sums) == 1:
        return _product(step, kinds, [1, 1], more)
    if name == "div" and kinds[1].family == "free":
        return _product(step, kinds, [1, -1], more)
    if name == "div":
        return step.mixed(
            "a sum over rows is divided by one that depends on parameters;"
            " shardlib.WeightedMean(total, weight) says that the weight has no gradient",
            kinds,
        )
    if len(sums) > 1 and name == "mul":
        return step.mixed("two sums over rows that depend on parameters are multiplied", kinds)
    return step.mixed(NOT_LINEAR, kinds)


def _product(step: Step, kinds: list[Kind], signs: list[int], more: dict[str, object]) -> Kind:
    power = added([kind.power for kind in kinds], signs)
    if power is None:
        return step.mixed("the number of rows goes into a factor", kinds)
    return total(power=power, **more)  # pyright: ignore[reportArgumentType]


def joined(step: Step, kinds: list[Kind], positions: list[int]) -> Kind:
    """Terms, some of them sums over rows, that are added up or stand beside each other in one
    array.
    """
    terms = [(index, kinds[index]) for index in positions if not kinds[index].zero]
    more = common(kinds)
    powers = {kind.power for _, kind in terms if kind.family == "sum"}
    free_powers = {kind.power for _, kind in terms if kind.family == "free"}
    if None in powers or None in free_powers:
        return step.mixed("the number of rows goes into a term", kinds)
    if len(powers) <= 1 and (
        not free_powers or (free_powers == {Fraction(0)} and powers == {Fraction(-1)})
    ):
        return total(power=next(iter(powers), Fraction(0)), **more)
    if not more["learned"] or step.scales is None:
        return step.mixed(
            "terms that the number of rows scales differently are added up in a loop", kinds
        )
    for index, kind in terms:
        exponent = (kind.power or Fraction(0)) + (1 if kind.family == "sum" else 0)
        if exponent:
            step.scales[step.one.path, index] = exponent
    return total(power=Fraction(-1), **{**more, "scaled": True})


def _running(step: Step, kinds: list[Kind]) -> Kind:
    """A row is added to what a scan over rows has added up."""
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


TABLE: Mapping[str, Rule] = dict.fromkeys(
    (*ARITHMETIC, *COPIES, "bitcast_convert_type"), elementwise
)
