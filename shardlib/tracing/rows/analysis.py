"""Two traces of a loss are walked side by side, and every value gets its `Kind`.

Nothing is known of a primitive that has no rule: where it reads rows, its results are mixed. What
the whole batch says beforehand (`Kind.beforehand`) becomes a number like others where something
that is learned reads it: the operand is noted in `Analysis.handed`, for whoever works through the
batch in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from shardlib.jax_types import Eqn, EqnParams, Jaxpr
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten
from shardlib.tracing.rows.handed import Handed, Unlike, as_number
from shardlib.tracing.rows.kinds import Kind, data, mixed
from shardlib.tracing.rows.rules import (
    calls,
    custom,
    elementwise,
    indexing,
    joining,
    linalg,
    loops,
    movement,
    random,
    reduction,
)
from shardlib.tracing.rows.rules.constants import constant, constants
from shardlib.tracing.rows.step import Step

_RULES: Mapping[str, elementwise.Rule] = {
    **elementwise.TABLE,
    **movement.TABLE,
    **joining.TABLE,
    **reduction.TABLE,
    **indexing.TABLE,
    **linalg.TABLE,
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
                    calls.declared(
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
        if first.name not in ("add", "add_any", "convert_element_type", "copy", *loops.LOOPS):
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
            return custom.results(self, step, kinds)
        if name == "custom_linear_solve":
            return linalg.linear_solve(self, step, kinds)
        if name in loops.LOOPS:
            return loops.LOOPS[name](self, step, kinds)
        tagged = indexing.tagged(step, kinds)
        if tagged is not None:
            return tagged
        if name in random.TABLE:
            return random.TABLE[name](step, kinds)
        if name not in indexing.LOOKUPS:
            kinds = [
                (
                    kind.with_(family="data", tag=None, place=None)
                    if indexing.positional(kind) or kind.tag == "false"
                    else kind
                )
                for kind in kinds
            ]
        if not any(kind.descent.learned for kind in kinds):
            return self._unlearned(step, kinds)
        return self._by_rule(step, kinds)

    def _by_rule(self, step: Step, kinds: list[Kind]) -> Kind | list[Kind]:
        if all(kind.family == "free" for kind in kinds) and not (
            step.name in indexing.LOOKUPS and step.name != "gather" and step.result_dims()
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
            or (step.name in indexing.LOOKUPS and indexing.positional(kind))
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
