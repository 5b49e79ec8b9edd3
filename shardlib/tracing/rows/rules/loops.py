"""Loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

from shardlib._jax_compat import scan_counts
from shardlib.tracing.rows.kinds import Kind, data, free, row, total
from shardlib.tracing.rows.step import Step
from shardlib.tracing.rows.walk import Walk

#: Rounds after which kinds of what a loop carries must have settled.
_ROUNDS = 24


def scan(walk: Walk, step: Step, kinds: list[Kind]) -> list[Kind]:
    """A loop over slices: of a stack of layers, of positions in a sequence, or of rows."""
    constants, carried = scan_counts(step.params)
    body = walk.inside_of(step, lambda params: params["jaxpr"], "body/")
    scanned = kinds[constants + carried :]
    over = any(kind.family == "row" and 0 in kind.rows.dims for kind in scanned)
    items = [
        _item(step, constants + carried + index, kind, over=over)
        for index, kind in enumerate(scanned)
    ]
    carry = [_entering(kind, over=over) for kind in kinds[constants : constants + carried]]
    if over:
        entering = body[0].inputs[constants : constants + carried]
        carry = [
            _by_position(step, kind) if before != after else kind
            for kind, before, after in zip(carry, entering, body[0].outputs, strict=False)
        ]
    for _ in range(_ROUNDS):
        results = walk.run(body, [*kinds[:constants], *carry, *items], editable=False)
        after = [
            _after(step, before, result, over=over)
            for before, result in zip(carry, results, strict=False)
        ]
        if after == carry:
            break
        carry = after
    else:
        return [
            step.mixed("a loop in which rows meet more with every turn", [free(learned=True)])
        ] * len(results)
    return [replace(kind, running=False, value=None, tag=None) for kind in carry] + [
        _stacked(step, kind, over=over) for kind in results[carried:]
    ]


def _item(step: Step, index: int, kind: Kind, *, over: bool) -> Kind:
    """A slice of what is scanned over."""
    kind = replace(kind, value=None, tag=None)
    if kind.family == "row":
        place = kind.rows
        if 0 not in place.dims:
            return kind.with_(
                place=replace(place, start=max(0, place.start - 1), stop=max(0, place.stop - 1))
            )
        return kind.with_(
            place=replace(
                place,
                start=0,
                stop=place.stop - 1,
                scans=(*place.scans, (step.one.path, place.stop, place.inner)),
            )
        )
    if kind.family == "data" and 0 in step.batch_dims(index):
        return kind
    uniform = kind.splat or kind.zero or 0 in step.batch_dims(index)
    if over and kind.family == "free" and not uniform:
        return step.mixed("rows are weighted by their position in the batch", [kind])
    return kind


def _entering(kind: Kind, *, over: bool) -> Kind:
    """What is carried into the first turn."""
    kind = replace(kind, value=None, tag=None)
    if over and kind.family == "sum":
        return kind.with_(running=True)
    if over and kind.family == "free" and kind.zero:
        return total(power=kind.power, learned=kind.descent.learned, zero=True, running=True)
    return kind


def _by_position(step: Step, kind: Kind) -> Kind:
    """What a loop over rows carries and changes, without looking at them: another value for each
    row by its position.
    """
    if kind.family == "free" and not kind.descent.learned:
        return step.mixed("a loop over rows carries what changes from row to row", [kind])
    return kind


def _after(step: Step, before: Kind, result: Kind, *, over: bool) -> Kind:
    """What is carried into the next turn."""
    if over and result.family == "sum" and not result.running:
        return step.mixed("a loop over rows carries what is no sum over them", [result])
    joined = meet(step, before, result)
    if (
        over
        and joined.family in ("free", "row")
        and joined != before
        and not (joined.family == "free" and not joined.descent.learned)
    ):
        return step.mixed("a loop over rows carries what is no sum over them", [joined])
    return joined


def _stacked(step: Step, kind: Kind, *, over: bool) -> Kind:
    """The results of all turns."""
    if kind.family == "row":
        place = kind.rows
        if place.scans and place.scans[-1][0] == step.one.path:
            return kind.with_(
                place=replace(place, start=0, stop=place.stop + 1, scans=place.scans[:-1]), tag=None
            )
        return kind.with_(
            place=replace(place, start=place.start + 1, stop=place.stop + 1), tag=None
        )
    if over and kind.family == "sum":
        return step.mixed("sums over a part of the batch", [kind])
    if (
        over
        and kind.family == "free"
        and not (kind.zero or kind.splat)
        and not kind.descent.learned
    ):
        return data()
    if over and kind.family == "free" and kind.descent.learned:
        return kind.with_(value=None, tag=None, splat=False)
    return replace(kind, value=None, tag=None, running=False)


def meet(step: Step, first: Kind, two: Kind) -> Kind:
    """A value that is one or the other."""
    if first == two:
        return first
    kinds = [first, two]
    mixed = next((kind for kind in kinds if kind.family == "mixed"), None)
    if mixed is not None:
        return mixed
    learned = first.descent.learned or two.descent.learned
    power = (
        first.power if first.power == two.power or two.zero else two.power if first.zero else None
    )
    more = {
        "learned": learned,
        "weighted": first.descent.weighted or two.descent.weighted,
        "scaled": first.descent.scaled or two.descent.scaled,
        "notes": first.descent.notes | two.descent.notes,
        "zero": first.zero and two.zero,
    }
    families = {first.family, two.family}
    if power is None and families != {"data"}:
        return step.mixed("the number of rows goes into it differently", kinds)
    if families == {"free"}:
        return free(power=power, splat=first.splat and two.splat, **more)
    if families == {"row"} and first.place == two.place:
        return row(first.rows, power=power, **more)
    if families == {"free", "row"}:
        return row((first if first.family == "row" else two).rows, power=power, **more)
    if families <= {"free", "sum"}:
        constant = next((kind for kind in kinds if kind.family == "free"), None)
        if constant is None or constant.zero or power == Fraction(-1):
            return total(power=power, running=first.running or two.running, **more)
    return step.mixed("a loop or branch gives rows, or sums over them, by turns", kinds)


def while_(walk: Walk, step: Step, kinds: list[Kind]) -> list[Kind]:
    """A loop that ends when its condition says so."""
    tests, constants = step.params["cond_nconsts"], step.params["body_nconsts"]
    body = walk.inside_of(step, lambda params: params["body_jaxpr"], "body/")
    test = walk.inside_of(step, lambda params: params["cond_jaxpr"], "cond/")
    state = [replace(kind, value=None, tag=None) for kind in kinds[tests + constants :]]
    for _ in range(_ROUNDS):
        results = walk.run(body, [*kinds[tests : tests + constants], *state], editable=False)
        after = [
            replace(meet(step, before, result), value=None, tag=None)
            for before, result in zip(state, results, strict=True)
        ]
        if after == state:
            break
        state = after
    else:
        return [
            step.mixed("a loop in which rows meet more with every turn", [free(learned=True)])
        ] * len(state)
    (going,) = walk.run(test, [*kinds[:tests], *state], editable=False)
    if going.family == "free" and going.power == 0:
        return state
    return [step.mixed("a loop runs as long as some row wants", [kind, going]) for kind in state]


def cond(walk: Walk, step: Step, kinds: list[Kind]) -> list[Kind]:
    """Branches, one of which is taken."""
    results: list[Kind] | None = None
    for number in range(len(step.params["branches"])):
        branch = walk.inside_of(
            step, lambda params, number=number: params["branches"][number], f"branch{number}/"
        )
        branch_results = walk.run(branch, kinds[1:], editable=False)
        results = (
            branch_results
            if results is None
            else [meet(step, *pair) for pair in zip(results, branch_results, strict=True)]
        )
    chosen = kinds[0]
    if chosen.family == "free" and chosen.power == 0:
        return list(results or ())
    return [
        step.mixed("a branch that rows choose together", [kind, chosen]) for kind in results or ()
    ]


#: (the walk, equation, kinds of its operands) -> kinds of its results.
LOOPS: Mapping[str, Callable[[Walk, Step, list[Kind]], list[Kind]]] = {
    "scan": scan,
    "while": while_,
    "cond": cond,
}
