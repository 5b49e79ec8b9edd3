"""Dependence of a loss on the rows of its batch. Two traces of it, for different numbers of rows,
are walked side by side; the kind of every value (`row_kinds.py`) follows from its operands by rules
(`row_rules.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jax.extend import core as jex

from shardlib.graph import Dependence, RowDim, Rows
from shardlib.jax_types import Aval, Eqn, EqnParams, Jaxpr
from shardlib.tracing import row_rules
from shardlib.tracing.layouts import raising_line
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten
from shardlib.tracing.row_kinds import (
    Cause,
    Handed,
    Kind,
    Place,
    Step,
    Unlike,
    as_number,
    data,
    free,
    mixed,
    row,
)
from shardlib.tracing.row_rules import constant, constants

# --------------------------------------------------------------------------------------------------
# Two traces of a loss are walked side by side, and every value gets its `Kind`.
#
# Nothing is known of a primitive that has no rule: where it reads rows, its results are mixed.
# What the whole batch says beforehand (`Kind.beforehand`) becomes a number like others where
# something that is learned reads it: the operand is noted in `Analysis.handed`, for whoever works
# through the batch in parts.

_RULES: Mapping[str, row_rules.Rule] = {
    **row_rules.ELEMENTWISE_TABLE,
    **row_rules.MOVEMENT_TABLE,
    **row_rules.JOINING_TABLE,
    **row_rules.REDUCTION_TABLE,
    **row_rules.INDEXING_TABLE,
    **row_rules.LINALG_TABLE,
}


@dataclass(kw_only=True, eq=False)
class Analysis:
    """The walk, and what it notes.

    Attributes:
        sizes: number of rows in the two traces.
        scales: see `Step.scales`, for operands of equations.
        handed: operands that are handed in, by (path, operand).
        judged: custom derivatives that were judged, with what is wrong with them.
        apart: whether parts of the batch know nothing of each other, so that none is handed what
            the whole batch says.
        derivatives_are_judged: whether the walk is inside of a function whose derivative is judged
            as a whole, or inside of that derivative, of which no further one is taken.
    """

    sizes: tuple[int, int]
    scales: dict[tuple[str, int], Fraction] = field(default_factory=dict)
    handed: dict[tuple[str, int], Handed] = field(default_factory=dict)
    judged: dict[Any, str] = field(default_factory=dict)
    apart: bool = False
    derivatives_are_judged: bool = False

    def beneath(self) -> Analysis:
        """The walk inside of a function whose derivative was written by hand."""
        return Analysis(sizes=self.sizes, apart=self.apart, derivatives_are_judged=True)

    def run(
        self, programs: tuple[Program, Program], arguments: Sequence[Kind], *, editable: bool
    ) -> list[Kind]:
        """Kinds of the results of a program."""
        first_program, two = programs
        if [(e.path, e.name) for e in first_program.equations] != [
            (e.path, e.name) for e in two.equations
        ]:
            raise Unlike
        env = dict(zip(first_program.inputs, arguments, strict=True))

        def read(first: int, second: int) -> Kind:
            if (first in first_program.constants) != (second in two.constants):
                raise Unlike
            return (
                constant(first_program.constants[first], two.constants[second], self.sizes)
                if first in first_program.constants
                else env[first]
            )

        done, examined = None, None
        for e1, e2 in zip(first_program.equations, two.equations, strict=True):
            if e1.call is not None and e1.call is done:
                continue
            declared = None
            if e1.call is not None and e2.call is not None and e1.call is not examined:
                declared, examined = (
                    row_rules.declared(
                        e1, e2, first_program, two, lambda pairs: [read(*pair) for pair in pairs]
                    ),
                    e1.call,
                )
            if declared is not None and e1.call is not None:
                env.update(zip(e1.call.outputs, declared, strict=True))
                done = e1.call
                continue
            kinds = [read(*pair) for pair in zip(e1.inputs, e2.inputs, strict=True)]
            results = self.equation(e1, e2, kinds, editable=editable)
            env.update(zip(e1.outputs, results, strict=True))
        return [read(*pair) for pair in zip(first_program.outputs, two.outputs, strict=True)]

    def equation(
        self, first: Equation, two: Equation, kinds: list[Kind], *, editable: bool
    ) -> list[Kind]:
        """Kinds of the results of an equation."""
        step = Step(
            one=first,
            two=two,
            sizes=self.sizes,
            scales=self.scales if editable else None,
            unchanged=self.derivatives_are_judged,
        )
        mixed = next((kind for kind in kinds if kind.family == "mixed"), None)
        if mixed is not None:
            return [mixed] * len(step.results)
        if any(kind.vouched for kind in kinds):
            return [
                step.mixed(
                    "shardlib.WeightedMean is computed with; it is what a loss or a metric returns",
                    kinds,
                )
            ] * len(step.results)
        if first.name in REMAT:
            return self.run(self.inside(step, callee), kinds, editable=editable)
        if any(kind.descent.learned for kind in kinds):
            kinds = [
                self._handed(step, index, kind, editable=editable)
                for index, kind in enumerate(kinds)
            ]
            bad = next((kind for kind in kinds if kind.family == "mixed"), None)
            if bad is not None:
                return [bad] * len(step.results)
        results_or_kind = self._results(step, kinds)
        results = (
            results_or_kind
            if isinstance(results_or_kind, list)
            else [results_or_kind] * len(step.results)
        )
        if editable:
            results = [
                kind.with_(origin=(first.path, index)) if kind.beforehand else kind
                for index, kind in enumerate(results)
            ]
        if first.name not in ("add", "add_any", "convert_element_type", "copy", *row_rules.LOOPS):
            results = [kind.with_(running=False) if kind.running else kind for kind in results]
        return results

    def inside(self, step: Step, of: Callable[[Eqn], Jaxpr]) -> tuple[Program, Program]:
        """The programs inside of an equation."""
        first, second = (
            flatten(
                of(equation.eqn),
                f"{equation.path}/",
                equation.scope,
                within=(equation.eqn, *equation.within),
            )
            for equation in (step.one, step.two)
        )
        return first, second

    def inside_of(
        self, step: Step, jaxpr: Callable[[EqnParams], Jaxpr], word: str
    ) -> tuple[Program, Program]:
        """The programs of a loop or branch."""
        first, second = (
            flatten(
                jaxpr(equation.params),
                f"{equation.path}/{word}",
                equation.scope,
                within=(equation.eqn, *equation.within),
            )
            for equation in (step.one, step.two)
        )
        return first, second

    def _results(self, step: Step, kinds: list[Kind]) -> Kind | list[Kind]:
        name = step.name
        if name in CUSTOM:
            return row_rules.results(self, step, kinds)
        if name == "custom_linear_solve":
            return row_rules.linear_solve(self, step, kinds)
        if name in row_rules.LOOPS:
            return row_rules.LOOPS[name](self, step, kinds)
        tagged = row_rules.tagged(step, kinds)
        if tagged is not None:
            return tagged
        if name in row_rules.RANDOM_TABLE:
            return row_rules.RANDOM_TABLE[name](step, kinds)
        if name not in row_rules.LOOKUPS:
            kinds = [
                (
                    kind.with_(family="data", tag=None, place=None)
                    if row_rules.positional(kind) or kind.tag == "false"
                    else kind
                )
                for kind in kinds
            ]
        if not any(kind.descent.learned for kind in kinds):
            return self._unlearned(step, kinds)
        return self._by_rule(step, kinds)

    def _by_rule(self, step: Step, kinds: list[Kind]) -> Kind | list[Kind]:
        if all(kind.family == "free" for kind in kinds) and not (
            step.name in row_rules.LOOKUPS and step.name != "gather" and step.result_dims()
        ):
            return constants(step, kinds, learned=any(kind.descent.learned for kind in kinds))
        rule = _RULES.get(step.name)
        return (
            step.mixed("nothing is known about its rows", kinds)
            if rule is None
            else rule(step, kinds)
        )

    def _unlearned(self, step: Step, kinds: list[Kind]) -> Kind | list[Kind]:
        """Results of what is not learned: what the rules do not see through, the whole batch says
        beforehand.
        """
        rows = any(kind.family == "row" for kind in kinds)
        if any(kind.family == "data" for kind in kinds) or (
            rows and any(kind.family == "sum" and not kind.running for kind in kinds)
        ):
            cause = next((kind.cause for kind in kinds if kind.cause), None)
            kinds = [
                as_number(step.operands[index], kind, self.sizes)
                for index, kind in enumerate(kinds)
            ]
            if any(kind.family == "data" for kind in kinds) or not any(
                kind.family == "row" for kind in kinds
            ):
                return data(cause=cause)
        return self._by_rule(step, kinds)

    def _handed(self, step: Step, index: int, kind: Kind, *, editable: bool) -> Kind:
        """An operand beside others that are learned."""
        if (
            not kind.beforehand
            or (step.name in row_rules.LOOKUPS and row_rules.positional(kind))
            or kind.running
        ):
            return kind
        number = as_number(step.operands[index], kind, self.sizes)
        reason = f": {kind.cause}" if kind.cause else ""
        if number.family == "data" or (
            number.family == "row" and (len(number.rows.dims) != 1 or number.rows.scans)
        ):
            return mixed(
                f"what the whole batch says meets rows in another order{reason}", step.where
            )
        if self.apart:
            return mixed(
                f"parts that know nothing of each other need the whole batch{reason}", step.where
            )
        if not editable or kind.origin is None:
            return mixed(
                f"numbers of the whole batch are made inside of a loop{reason}", step.where
            )
        place = number.place
        self.handed[step.one.path, index] = Handed(
            origin=kind.origin,
            dim=None if place is None else place.start,
            inner=1 if place is None else place.inner,
        )
        return number


# --------------------------------------------------------------------------------------------------
# Dependence of every result of a traced loss on the rows of its batch.
#
# proof = prove(trace_at, arguments, sizes=(8, 16), names=...) proof.rows.loss.kind # "mean"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Kinds of the inputs of a loss.

    Attributes:
        parameters, states: how many of the first inputs are parameters, and how many after these
            are model state.
        dims: for each array of the batch its dim of rows; None where it has none.
        apart: whether parts of the batch know nothing of each other, so that nothing can be made of
            the data of the whole batch beforehand: a ratio of sums over rows is coupled then.
    """

    parameters: int
    states: int
    dims: tuple[int | None, ...]
    apart: bool = False

    def kinds(self, program: Program) -> list[Kind]:
        """The kinds of all inputs."""
        batch_kinds = [
            free() if dim is None else row(Place(start=dim, stop=dim + 1), learned=self.apart)
            for dim in self.dims
        ]
        assert len(program.inputs) == self.parameters + self.states + len(batch_kinds)
        return [free(learned=True)] * self.parameters + [free()] * self.states + batch_kinds


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """Dependence on rows of a loss that was traced for two numbers of rows.

    Attributes:
        rows: how its results depend on the rows.
        kinds: of the results.
        analysis: what was noted on the way; None where the traces could not be compared.
        programs: the two traces.
    """

    rows: Rows
    kinds: tuple[Kind, ...] = ()
    analysis: Analysis | None = None
    programs: tuple[Program, Program] | None = None


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of the results of a loss: the loss, then metrics, then model state."""

    metrics: tuple[str, ...]
    states: tuple[str, ...]


def prove(
    first: jex.ClosedJaxpr,
    second: Callable[[int], jex.ClosedJaxpr],
    inputs: Inputs,
    names: Names,
    rows: int,
) -> Proof:
    """Walks the trace of a loss beside one for another number of rows.

    Args:
        second: number of rows -> its closed jaxpr; may raise what tracing raises.
    """
    if rows < 2:
        return Proof(rows=_alike(Dependence(kind="mean"), names))
    fault: Dependence | None = None
    for other_rows in candidates(rows):
        try:
            again = second(other_rows)
        except Exception as error:  # what a user's loss raises for another batch can be anything
            fault = fault or _fixed(error, f"{other_rows} rows in place of {rows}")
            continue
        try:
            return compare(first, again, inputs, names, (rows, other_rows))
        except Unlike:
            fault = fault or Dependence(
                kind="coupled",
                why=f"it computes other operations for {other_rows} rows than for {rows}",
            )
    assert fault is not None
    return Proof(rows=_alike(fault, names))


def prove_parts(
    first: jex.ClosedJaxpr,
    second: Callable[[int], jex.ClosedJaxpr],
    inputs: Inputs,
    names: Names,
    rows: int,
    parts: int,
) -> Rows:
    """Returns how the results depend on the rows, by the trace for one of so many parts of the
    batch; arguments as those of `prove`.
    """
    number = rows // parts
    try:
        return compare(first, second(number), inputs, names, (rows, number)).rows
    except Unlike:
        fault = Dependence(
            kind="coupled",
            why=(
                f"it computes other operations for {number} rows, of one of {parts} microbatches,"
                f" than for {rows}"
            ),
        )
    except Exception as error:  # as above
        fault = _fixed(error, f"{number} rows, those of one of {parts} microbatches,")
    return _alike(fault, names)


def candidates(rows: int) -> tuple[int, ...]:
    """Numbers of rows to compare with, the most telling first."""
    return (2 * rows, 3 * rows, *((rows // 2,) if rows % 2 == 0 and rows > 2 else ()))


def compare(
    first: jex.ClosedJaxpr,
    second: jex.ClosedJaxpr,
    inputs: Inputs,
    names: Names,
    sizes: tuple[int, int],
) -> Proof:
    """Returns what two traces say."""
    first_program, two = flatten(first), flatten(second)
    if len(first_program.inputs) != len(two.inputs) or len(first_program.outputs) != len(
        two.outputs
    ):
        raise Unlike
    analysis = Analysis(sizes=sizes, apart=inputs.apart)
    kinds = analysis.run((first_program, two), inputs.kinds(first_program), editable=True)
    loss, metrics, states = (
        kinds[0],
        kinds[1 : 1 + len(names.metrics)],
        kinds[1 + len(names.metrics) :],
    )
    unchanged = [
        before == after
        for before, after in zip(
            first_program.inputs[inputs.parameters : inputs.parameters + inputs.states],
            first_program.outputs[1 + len(names.metrics) :],
            strict=True,
        )
    ]
    rows = Rows(
        loss=dependence(loss),
        metrics=tuple(
            (name, _by_row(kind, first_program.avals[value], sizes[0]) or dependence(kind))
            for name, kind, value in zip(
                names.metrics, metrics, first_program.outputs[1 : 1 + len(metrics)], strict=True
            )
        ),
        state=tuple(
            (name, _of_state(kind))
            for name, kind, same in zip(names.states, states, unchanged, strict=True)
            if not same
        ),
    )
    return Proof(rows=rows, kinds=tuple(kinds), analysis=analysis, programs=(first_program, two))


def dependence(kind: Kind) -> Dependence:
    """Returns how a result of a kind depends on the rows."""
    notes, cause = tuple(sorted(kind.descent.notes)), kind.cause
    if kind.family == "mixed":
        assert cause is not None
        return Dependence(kind="coupled", why=cause.why, where=cause.where)
    if kind.family == "row":
        return Dependence(kind="coupled", why="it has a value for every row, and no sum over them")
    if kind.family == "data":
        return Dependence(kind="constant")
    if kind.power is None:
        return Dependence(kind="coupled", why="the number of rows goes into it")
    if kind.family == "free":
        return Dependence(
            kind="weighted mean" if kind.descent.weighted else "constant", notes=notes
        )
    if kind.descent.weighted:
        return Dependence(kind="weighted mean", notes=notes)
    return Dependence(
        kind=(
            "additive"
            if kind.descent.scaled or kind.power not in (0, -1)
            else "mean"
            if kind.power == -1
            else "sum"
        ),
        notes=notes,
    )


def _by_row(kind: Kind, aval: Aval, rows: int) -> Dependence | None:
    """An array with a value for every row along one dim; None for all else."""
    place = kind.place
    if kind.family != "row" or kind.power is None or place is None or place.scans:
        return None
    if kind.beforehand or kind.descent.scaled:
        return None
    if len(place.dims) != 1 or aval.shape[place.start] != rows * place.inner:
        return None
    size = math.prod(aval.shape) * aval.dtype.itemsize
    return Dependence(
        kind="rows",
        notes=tuple(sorted(kind.descent.notes)),
        rows=RowDim(dim=place.start, inner=place.inner, bytes=size),
    )


def _of_state(kind: Kind) -> Dependence:
    """Returns how an array of the model's state depends on the rows, that is not what it was. Every
    part of the batch begins with the state before the step, and so makes the same of it.
    """
    if kind.family == "free" and kind.power == 0 and not kind.descent.learned:
        return Dependence(kind="constant")
    cause = kind.cause or Cause(
        why=f"it is updated from the {'parameters' if kind.family == 'free' else 'batch'}", where=""
    )
    return Dependence(kind="coupled", why=cause.why, where=cause.where)


def _alike(dependence_of_all: Dependence, names: Names) -> Rows:
    return Rows(
        loss=dependence_of_all, metrics=tuple((name, dependence_of_all) for name in names.metrics)
    )


def _fixed(error: Exception, what: str) -> Dependence:
    """The loss raises an error for another number of rows."""
    return Dependence(
        kind="coupled",
        why=(
            f"its number of rows is fixed: with {what} it raises {type(error).__name__}:"
            f" {_first_line(error)}"
        ),
        where=raising_line(error),
        fixed=True,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
