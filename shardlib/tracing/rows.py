"""Dependence of a loss on the rows of its batch.

Two traces of the loss, for different numbers of rows, are walked in parallel; the kind of every
value (`row_kinds.py`) follows from its operands by rules (`primitives.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib._jax_compat import scan_counts
from shardlib.errors import TracingError
from shardlib.graph import Dependence, RowDim, Rows
from shardlib.jax_types import Aval
from shardlib.tracing import primitives
from shardlib.tracing.layouts import raising_line
from shardlib.tracing.primitives import TABLE, constant, constants, linearity_fault
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten
from shardlib.tracing.rewriting import bind
from shardlib.tracing.row_kinds import (
    Cause,
    DifferentPrograms,
    EqnPair,
    Kind,
    RowPosition,
    WholeBatchValue,
    data,
    free,
    in_microbatch,
    mixed,
    row,
    total,
)

# --------------------------------------------------------------------------------------------------
# The walk over two traces.
#
# A primitive without a rule that reads rows has mixed results. A whole-batch value that does not
# depend on parameters (`Kind.precomputable`) acts as a constant where a learned operation reads it:
# the operand is recorded in `Analysis.whole_values`, so that microbatches can be passed the value.


#: Operations that keep the running sum of a scan over rows a running sum.
_RUNNING = frozenset({"add", "add_any", "convert_element_type", "copy", "cond", "scan", "while"})


@dataclass(kw_only=True, eq=False)
class Analysis:
    """The walk, and its records.

    Attributes:
        sizes: number of rows in the two traces.
        scales: see `EqnPair.scales`, for operands of equations.
        whole_values: whole-batch values passed to every microbatch, by (path, operand).
        checked: custom derivatives already checked, with the fault found ("" if none).
        independent: whether microbatches are computed independently, so that none is passed a value
            of the whole batch.
        derivatives_checked: whether the walk is inside a function whose derivative is checked as
            a whole, or inside that derivative (no further one is taken).
    """

    sizes: tuple[int, int]
    scales: dict[tuple[str, int], Fraction] = field(default_factory=dict)
    whole_values: dict[tuple[str, int], WholeBatchValue] = field(default_factory=dict)
    checked: dict[Any, str] = field(default_factory=dict)
    independent: bool = False
    derivatives_checked: bool = False

    def inside_custom(self) -> Analysis:
        """The walk inside a function with a custom derivative."""
        return Analysis(sizes=self.sizes, independent=self.independent, derivatives_checked=True)

    def run(
        self, programs: tuple[Program, Program], arguments: Sequence[Kind], *, editable: bool
    ) -> list[Kind]:
        """The kinds of the results of a program."""
        left, right = programs
        if [(e.path, e.name) for e in left.equations] != [
            (e.path, e.name) for e in right.equations
        ]:
            raise DifferentPrograms
        env = dict(zip(left.inputs, arguments, strict=True))

        def read(first: int, second: int) -> Kind:
            if (first in left.constants) != (second in right.constants):
                raise DifferentPrograms
            return (
                constant(left.constants[first], right.constants[second], self.sizes)
                if first in left.constants
                else env[first]
            )

        done, examined = None, None
        for first, second in zip(left.equations, right.equations, strict=True):
            if first.call is not None and first.call is done:
                continue
            declared = None
            if first.call is not None and second.call is not None and first.call is not examined:
                declared = primitives.declared(
                    first, second, left, right, lambda pairs: [read(*pair) for pair in pairs]
                )
                examined = first.call
            if declared is not None and first.call is not None:
                env.update(zip(first.call.outputs, declared, strict=True))
                done = first.call
                continue
            kinds = [read(*pair) for pair in zip(first.inputs, second.inputs, strict=True)]
            results = self.equation(first, second, kinds, editable=editable)
            env.update(zip(first.outputs, results, strict=True))
        return [read(*pair) for pair in zip(left.outputs, right.outputs, strict=True)]

    def equation(
        self, first: Equation, second: Equation, kinds: list[Kind], *, editable: bool
    ) -> list[Kind]:
        """The kinds of the results of an equation."""
        step = EqnPair(
            first=first,
            second=second,
            sizes=self.sizes,
            scales=self.scales if editable else None,
            unchanged=self.derivatives_checked,
        )
        mixed = next((kind for kind in kinds if kind.family == "mixed"), None)
        if mixed is not None:
            return [mixed] * len(step.results)
        if any(kind.declared_mean for kind in kinds):
            return [
                step.mixed(
                    "shardlib.WeightedMean is computed with; it is what a loss or a metric returns",
                    kinds,
                )
            ] * len(step.results)
        if first.name in REMAT:
            return self.run(step.inside(), kinds, editable=editable)
        if any(kind.descent.learned for kind in kinds):
            kinds = [
                self._whole_batch(step, index, kind, editable=editable)
                for index, kind in enumerate(kinds)
            ]
            coupled = next((kind for kind in kinds if kind.family == "mixed"), None)
            if coupled is not None:
                return [coupled] * len(step.results)
        results_or_kind = self._results(step, kinds)
        results = (
            results_or_kind
            if isinstance(results_or_kind, list)
            else [results_or_kind] * len(step.results)
        )
        if editable:
            results = [
                kind.with_(origin=(first.path, index)) if kind.precomputable else kind
                for index, kind in enumerate(results)
            ]
        if first.name not in _RUNNING:
            results = [kind.with_(running=False) if kind.running else kind for kind in results]
        return results

    def _results(self, step: EqnPair, kinds: list[Kind]) -> Kind | list[Kind]:
        name = step.name
        if name in _CALLS:
            return _CALLS[name](self, step, kinds)
        tagged = primitives.tagged(step, kinds)
        if tagged is not None:
            return tagged
        primitive = TABLE.get(name)
        if primitive is not None and primitive.keys and primitive.rows is not None:
            return primitive.rows(step, kinds)
        if name not in primitives.LOOKUPS:
            kinds = [
                (
                    kind.with_(family="data", tag=None, position=None)
                    if primitives.positional(kind) or kind.tag == "false"
                    else kind
                )
                for kind in kinds
            ]
        if not any(kind.descent.learned for kind in kinds):
            return self._unlearned(step, kinds)
        return self._by_rule(step, kinds)

    def _by_rule(self, step: EqnPair, kinds: list[Kind]) -> Kind | list[Kind]:
        if all(kind.family == "free" for kind in kinds) and not (
            step.name in primitives.LOOKUPS and step.name != "gather" and step.result_dims()
        ):
            return constants(step, kinds, learned=any(kind.descent.learned for kind in kinds))
        primitive = TABLE.get(step.name)
        return (
            step.mixed("nothing is known about its rows", kinds)
            if primitive is None or primitive.rows is None
            else primitive.rows(step, kinds)
        )

    def _unlearned(self, step: EqnPair, kinds: list[Kind]) -> Kind | list[Kind]:
        """Results that do not depend on parameters: where the rules do not apply, they are values
        of the whole batch.
        """
        rows = any(kind.family == "row" for kind in kinds)
        if any(kind.family == "data" for kind in kinds) or (
            rows and any(kind.family == "sum" and not kind.running for kind in kinds)
        ):
            cause = next((kind.cause for kind in kinds if kind.cause), None)
            kinds = [
                in_microbatch(step.operands[index], kind, self.sizes)
                for index, kind in enumerate(kinds)
            ]
            if any(kind.family == "data" for kind in kinds) or not any(
                kind.family == "row" for kind in kinds
            ):
                return data(cause=cause)
        return self._by_rule(step, kinds)

    def _whole_batch(self, step: EqnPair, index: int, kind: Kind, *, editable: bool) -> Kind:
        """The kind of an operand of an equation that has learned operands."""
        if (
            not kind.precomputable
            or (step.name in primitives.LOOKUPS and primitives.positional(kind))
            or kind.running
        ):
            return kind
        in_part = in_microbatch(step.operands[index], kind, self.sizes)
        reason = f": {kind.cause}" if kind.cause else ""
        if in_part.family == "data" or (
            in_part.family == "row" and (len(in_part.rows.dims) != 1 or in_part.rows.scans)
        ):
            return mixed(
                f"what the whole batch says meets rows in another order{reason}", step.where
            )
        if self.independent:
            return mixed(
                f"parts that know nothing of each other need the whole batch{reason}", step.where
            )
        if not editable or kind.origin is None:
            return mixed(
                f"numbers of the whole batch are made inside of a loop{reason}", step.where
            )
        rows = in_part.position
        self.whole_values[step.first.path, index] = WholeBatchValue(
            origin=kind.origin,
            dim=None if rows is None else rows.start,
            inner=1 if rows is None else rows.inner,
        )
        return in_part


# --------------------------------------------------------------------------------------------------
# Functions with custom derivatives.
#
# The function is judged by its equations. Its derivative is taken for both numbers of rows and
# walked as well: the gradient of a row may depend on that row alone, and the gradient of a
# parameter must be a sum over rows. A derivative that is normalised over the batch couples the
# rows although the function does not. And it must be linear in the cotangents
# (`shardlib.tracing.primitives`), whose size depends on the number of rows.


def _custom(walk: Analysis, step: EqnPair, kinds: list[Kind]) -> list[Kind]:
    """The kinds of the results of a call with a custom derivative."""
    inner = step.inside()
    if len(inner[0].inputs) != len(kinds):
        return [step.mixed("nothing is known about its rows", kinds)] * len(step.results)
    inside_custom = walk.inside_custom()
    kinds_inside = inside_custom.run(inner, kinds, editable=False)
    if (
        walk.derivatives_checked
        or not any(kind.descent.learned for kind in kinds)
        or any(kind.family == "mixed" for kind in kinds_inside)
    ):
        return kinds_inside
    rule = step.params.get("bwd", step.params.get("jvp_jaxpr_fun"))
    key = (
        step.name,
        _hashable(rule),
        str(callee(step.first.eqn)),
        tuple((kind.family, kind.position, kind.descent.learned, kind.power) for kind in kinds),
        tuple(map(str, step.operands)),
    )
    if key not in walk.checked:
        walk.checked[key] = _fault(inside_custom, step, kinds, kinds_inside)
    why = walk.checked[key]
    return [step.mixed(why, kinds)] * len(kinds_inside) if why else kinds_inside


def _hashable(rule: Any) -> Any:
    """A hashable key of the rule: itself, or its id if it contains lists."""
    try:
        hash(rule)
    except TypeError:
        return id(rule)
    return rule


def _fault(walk: Analysis, step: EqnPair, kinds: list[Kind], kinds_inside: list[Kind]) -> str:
    """The reason why the derivative cannot be split over microbatches; "" if it can."""
    float_operands = [
        index
        for index, variable in enumerate(step.first.eqn.invars)
        if jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    ]
    float_results = [
        index
        for index, variable in enumerate(step.first.eqn.outvars)
        if jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    ]
    if not float_operands or not float_results:
        return ""
    try:
        first, second = (
            flatten(_vjp_jaxpr(equation, float_operands, float_results))
            for equation in (step.first, step.second)
        )
    except (TracingError, TypeError, ValueError) as error:
        return f"its derivative cannot be taken alone ({type(error).__name__})"
    nonlinear = (
        linearity_fault(first, range(len(kinds), len(first.inputs))) if "vjp" in step.name else ""
    )
    if nonlinear:
        return (
            "its derivative, which was written by hand, is not linear in the gradient that comes"
            f" in: {nonlinear}"
        )
    if not any(kind.family == "row" for kind in kinds):
        return ""
    powers = {
        kind.power
        for index, kind in enumerate(kinds_inside)
        if index in float_results and kind.family == "sum"
    } or {Fraction(0)}
    if len(powers) > 1:
        return "its results are sums that the number of rows scales differently"
    (power,) = powers
    cotangents = [
        row(kinds_inside[index].rows, learned=True)
        if kinds_inside[index].family == "row"
        else free(learned=True)
        for index in float_results
    ]
    gradients = walk.run((first, second), [*kinds, *cotangents], editable=False)
    for index, gradient in zip(float_operands, gradients, strict=True):
        if not _allowed(
            kinds[index],
            gradient,
            power,
            summed=any(kinds_inside[k].family == "sum" for k in float_results),
        ):
            return (
                "its derivative, which was written by hand, mixes"
                f" rows{f': {gradient.cause}' if gradient.cause else ''}"
            )
    return ""


def _allowed(operand: Kind, gradient: Kind, power: Fraction | None, *, summed: bool) -> bool:
    """True if an operand may have such a gradient."""
    if gradient.family == "free":
        return gradient.zero or operand.family == "free"
    if operand.family == "row":
        return (
            gradient.family == "row"
            and gradient.position == operand.position
            and (gradient.power == (power if summed else 0) or gradient.zero)
        )
    return (
        operand.family == "free"
        and gradient.family == "sum"
        and gradient.power == (power if summed else 0)
    )


def _vjp_jaxpr(equation: Equation, float_operands: list[int], float_results: list[int]) -> Any:
    """The jaxpr of (operands, cotangents) -> gradients of the operands."""

    def gradients(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def run(*values: Any) -> list[Any]:
            arguments = list(operands)
            for index, value in zip(float_operands, values, strict=True):
                arguments[index] = value
            outputs = bind(equation, arguments)
            return [outputs[index] for index in float_results]

        _, pull = jax.vjp(run, *(operands[index] for index in float_operands))
        return list(pull(cotangents))

    def abstract(variables: Any) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in variables
        ]

    return jax.make_jaxpr(gradients)(
        abstract(equation.eqn.invars),
        abstract([equation.eqn.outvars[index] for index in float_results]),
    )


def _linear_solve(walk: Analysis, step: EqnPair, kinds: list[Kind]) -> list[Kind]:
    """A solver, and the matrix product that it inverts, by which JAX differentiates it."""
    lengths = step.params["const_lengths"]
    product, transposed, solver, _ = (
        kinds[sum(lengths[:index]) : sum(lengths[: index + 1])] for index in range(4)
    )
    right_sides = kinds[sum(lengths) :]
    solutions = walk.run(step.inside("solve"), [*solver, *right_sides], editable=False)
    for name, captured in (("matvec", product), ("vecmat", transposed)):
        if step.params["jaxprs"]._asdict()[name] is None:
            continue
        products = walk.run(step.inside(name), [*captured, *solutions], editable=False)
        coupled = next((kind for kind in products if kind.family == "mixed"), None)
        if coupled is not None:
            return [coupled] * len(solutions)
    return solutions


# --------------------------------------------------------------------------------------------------
# Loops and branches.

#: Maximum number of walks over a loop body until the kinds of its carry are stable.
_MAX_ITERATIONS = 24
_UNSTABLE = "a loop in which rows meet more with every turn"


def _scan(walk: Analysis, step: EqnPair, kinds: list[Kind]) -> list[Kind]:
    """A loop over slices: of a stack of layers, of positions in a sequence, or of rows."""
    constants, carried = scan_counts(step.params)
    body = step.inside("body")
    scanned = kinds[constants + carried :]
    over_rows = any(kind.family == "row" and 0 in kind.rows.dims for kind in scanned)
    items = [
        _item(step, constants + carried + index, kind, over_rows=over_rows)
        for index, kind in enumerate(scanned)
    ]
    carry = [
        _entering(kind, over_rows=over_rows) for kind in kinds[constants : constants + carried]
    ]
    if over_rows:
        entering = body[0].inputs[constants : constants + carried]
        carry = [
            _of_position(step, kind) if before != after else kind
            for kind, before, after in zip(carry, entering, body[0].outputs, strict=False)
        ]
    for _ in range(_MAX_ITERATIONS):
        results = walk.run(body, [*kinds[:constants], *carry, *items], editable=False)
        after = [
            _next_carry(step, before, result, over_rows=over_rows)
            for before, result in zip(carry, results, strict=False)
        ]
        if after == carry:
            break
        carry = after
    else:
        return [step.mixed(_UNSTABLE, [free(learned=True)])] * len(results)
    return [replace(kind, running=False, value=None, tag=None) for kind in carry] + [
        _stacked(step, kind, over_rows=over_rows) for kind in results[carried:]
    ]


def _item(step: EqnPair, index: int, kind: Kind, *, over_rows: bool) -> Kind:
    """The kind of one slice of a scanned operand."""
    kind = replace(kind, value=None, tag=None)
    if kind.family == "row":
        rows = kind.rows
        if 0 not in rows.dims:
            return kind.with_(
                position=replace(rows, start=max(0, rows.start - 1), stop=max(0, rows.stop - 1))
            )
        return kind.with_(
            position=replace(
                rows,
                start=0,
                stop=rows.stop - 1,
                scans=(*rows.scans, (step.first.path, rows.stop, rows.inner)),
            )
        )
    if kind.family == "data" and 0 in step.batch_dims(index):
        return kind
    uniform = kind.splat or kind.zero or 0 in step.batch_dims(index)
    if over_rows and kind.family == "free" and not uniform:
        return step.mixed("rows are weighted by their position in the batch", [kind])
    return kind


def _entering(kind: Kind, *, over_rows: bool) -> Kind:
    """The kind of a carry in the first iteration."""
    kind = replace(kind, value=None, tag=None)
    if over_rows and kind.family == "sum":
        return kind.with_(running=True)
    if over_rows and kind.family == "free" and kind.zero:
        return total(power=kind.power, learned=kind.descent.learned, zero=True, running=True)
    return kind


def _of_position(step: EqnPair, kind: Kind) -> Kind:
    """The kind of a carry that a loop over rows changes without reading them: it depends on a row's
    position.
    """
    if kind.family == "free" and not kind.descent.learned:
        return step.mixed("a loop over rows carries what changes from row to row", [kind])
    return kind


def _next_carry(step: EqnPair, before: Kind, result: Kind, *, over_rows: bool) -> Kind:
    """The kind of a carry in the next iteration."""
    if over_rows and result.family == "sum" and not result.running:
        return step.mixed("a loop over rows carries what is not a sum over them", [result])
    joined = _join(step, before, result)
    if (
        over_rows
        and joined.family in ("free", "row")
        and joined != before
        and not (joined.family == "free" and not joined.descent.learned)
    ):
        return step.mixed("a loop over rows carries what is not a sum over them", [joined])
    return joined


def _stacked(step: EqnPair, kind: Kind, *, over_rows: bool) -> Kind:
    """The kind of the results of all iterations, stacked."""
    if kind.family == "row":
        rows = kind.rows
        if rows.scans and rows.scans[-1][0] == step.first.path:
            return kind.with_(
                position=replace(rows, start=0, stop=rows.stop + 1, scans=rows.scans[:-1]), tag=None
            )
        return kind.with_(
            position=replace(rows, start=rows.start + 1, stop=rows.stop + 1), tag=None
        )
    if over_rows and kind.family == "sum":
        return step.mixed("sums over a part of the batch", [kind])
    if (
        over_rows
        and kind.family == "free"
        and not (kind.zero or kind.splat)
        and not kind.descent.learned
    ):
        return data()
    if over_rows and kind.family == "free" and kind.descent.learned:
        return kind.with_(value=None, tag=None, splat=False)
    return replace(kind, value=None, tag=None, running=False)


def _join(step: EqnPair, first: Kind, second: Kind) -> Kind:
    """The kind of a value that has either of two kinds."""
    if first == second:
        return first
    kinds = [first, second]
    mixed = next((kind for kind in kinds if kind.family == "mixed"), None)
    if mixed is not None:
        return mixed
    learned = first.descent.learned or second.descent.learned
    power = second.power if first.zero else None
    if first.power == second.power or second.zero:
        power = first.power
    traits = {
        "learned": learned,
        "weighted": first.descent.weighted or second.descent.weighted,
        "scaled": first.descent.scaled or second.descent.scaled,
        "notes": first.descent.notes | second.descent.notes,
        "zero": first.zero and second.zero,
    }
    families = {first.family, second.family}
    if power is None and families != {"data"}:
        return step.mixed("the number of rows goes into it differently", kinds)
    if families == {"free"}:
        return free(power=power, splat=first.splat and second.splat, **traits)
    if families == {"row"} and first.position == second.position:
        return row(first.rows, power=power, **traits)
    if families == {"free", "row"}:
        return row((first if first.family == "row" else second).rows, power=power, **traits)
    if families <= {"free", "sum"}:
        constant = next((kind for kind in kinds if kind.family == "free"), None)
        if constant is None or constant.zero or power == Fraction(-1):
            return total(power=power, running=first.running or second.running, **traits)
    return step.mixed("a loop or branch gives rows, or sums over them, by turns", kinds)


def _while(walk: Analysis, step: EqnPair, kinds: list[Kind]) -> list[Kind]:
    """A while loop, whose condition may depend on the rows."""
    conds, constants = step.params["cond_nconsts"], step.params["body_nconsts"]
    body = step.inside("body")
    test = step.inside("cond")
    state = [replace(kind, value=None, tag=None) for kind in kinds[conds + constants :]]
    for _ in range(_MAX_ITERATIONS):
        results = walk.run(body, [*kinds[conds : conds + constants], *state], editable=False)
        after = [
            replace(_join(step, before, result), value=None, tag=None)
            for before, result in zip(state, results, strict=True)
        ]
        if after == state:
            break
        state = after
    else:
        return [step.mixed(_UNSTABLE, [free(learned=True)])] * len(state)
    (cond,) = walk.run(test, [*kinds[:conds], *state], editable=False)
    if cond.family == "free" and cond.power == 0:
        return state
    return [step.mixed("a loop runs as long as some row wants", [kind, cond]) for kind in state]


def _cond(walk: Analysis, step: EqnPair, kinds: list[Kind]) -> list[Kind]:
    """A conditional: one of several branches is taken."""
    results: list[Kind] | None = None
    for number in range(len(step.params["branches"])):
        branch = step.inside(f"branch{number}")
        branch_results = walk.run(branch, kinds[1:], editable=False)
        results = (
            branch_results
            if results is None
            else [_join(step, *pair) for pair in zip(results, branch_results, strict=True)]
        )
    chosen = kinds[0]
    if chosen.family == "free" and chosen.power == 0:
        return list(results or ())
    return [
        step.mixed("a branch that rows choose together", [kind, chosen]) for kind in results or ()
    ]


#: (the walk, equation, kinds of its operands) -> kinds of its results.
_CALLS: Mapping[str, Callable[[Analysis, EqnPair, list[Kind]], list[Kind]]] = {
    **dict.fromkeys(CUSTOM, _custom),
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


# --------------------------------------------------------------------------------------------------
# The proof for the results of a loss.
#
#     proof = prove(first, second, inputs, names, rows)
#     proof.rows.loss.kind    # "mean"


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The kinds of the inputs of a loss.

    Attributes:
        parameters, states: number of parameters, which come first, and of arrays of model state
            after them.
        dims: the row dim of each array of the batch; None if it has none.
        independent: whether microbatches are computed independently, without values of the whole
            batch; a ratio of sums over rows is then coupled.
    """

    parameters: int
    states: int
    dims: tuple[int | None, ...]
    independent: bool = False

    def kinds(self, program: Program) -> list[Kind]:
        """The kinds of all inputs."""
        batch_kinds = [
            free()
            if dim is None
            else row(RowPosition(start=dim, stop=dim + 1), learned=self.independent)
            for dim in self.dims
        ]
        assert len(program.inputs) == self.parameters + self.states + len(batch_kinds)
        return [free(learned=True)] * self.parameters + [free()] * self.states + batch_kinds


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """Dependence on rows of a loss traced for two numbers of rows.

    Attributes:
        rows: dependence of the results on the rows.
        kinds: kinds of the results.
        analysis: records of the walk; None if the traces could not be compared.
        programs: the two traces.
    """

    rows: Rows
    kinds: tuple[Kind, ...] = ()
    analysis: Analysis | None = None
    programs: tuple[Program, Program] | None = None


@dataclass(frozen=True, kw_only=True)
class ResultNames:
    """Names of the results of a loss: the loss, then metrics, then model state."""

    metrics: tuple[str, ...]
    states: tuple[str, ...]


def prove(
    first: jex.ClosedJaxpr,
    second: Callable[[int], jex.ClosedJaxpr],
    inputs: LossInputs,
    names: ResultNames,
    rows: int,
) -> Proof:
    """Compares the trace of a loss with one for another number of rows.

    Args:
        second: number of rows -> its closed jaxpr; may raise any error of tracing.
    """
    if rows < 2:
        return Proof(rows=_for_all_results(Dependence(kind="mean"), names))
    fault: Dependence | None = None
    for other_rows in candidates(rows):
        try:
            again = second(other_rows)
        except Exception as error:  # the user's loss can raise any error for another batch size
            fault = fault or _fixed_size(error, f"{other_rows} rows in place of {rows}")
            continue
        try:
            return compare(first, again, inputs, names, (rows, other_rows))
        except DifferentPrograms:
            fault = fault or Dependence(
                kind="coupled",
                why=f"it computes other operations for {other_rows} rows than for {rows}",
            )
    assert fault is not None
    return Proof(rows=_for_all_results(fault, names))


def prove_parts(
    first: jex.ClosedJaxpr,
    second: Callable[[int], jex.ClosedJaxpr],
    inputs: LossInputs,
    names: ResultNames,
    rows: int,
    parts: int,
) -> Rows:
    """Dependence of the results on the rows, from a trace for one of `parts` equal parts of the
    batch; other arguments as in `prove`.
    """
    number = rows // parts
    try:
        return compare(first, second(number), inputs, names, (rows, number)).rows
    except DifferentPrograms:
        fault = Dependence(
            kind="coupled",
            why=(
                f"it computes other operations for {number} rows, of one of {parts} microbatches,"
                f" than for {rows}"
            ),
        )
    except Exception as error:  # as above
        fault = _fixed_size(error, f"{number} rows, those of one of {parts} microbatches,")
    return _for_all_results(fault, names)


def candidates(rows: int) -> tuple[int, ...]:
    """Numbers of rows to compare with, the most informative first."""
    return (2 * rows, 3 * rows, *((rows // 2,) if rows % 2 == 0 and rows > 2 else ()))


def compare(
    first: jex.ClosedJaxpr,
    second: jex.ClosedJaxpr,
    inputs: LossInputs,
    names: ResultNames,
    sizes: tuple[int, int],
) -> Proof:
    """The proof from two traces."""
    left, right = flatten(first), flatten(second)
    if len(left.inputs) != len(right.inputs) or len(left.outputs) != len(right.outputs):
        raise DifferentPrograms
    analysis = Analysis(sizes=sizes, independent=inputs.independent)
    kinds = analysis.run((left, right), inputs.kinds(left), editable=True)
    loss = kinds[0]
    metrics = kinds[1 : 1 + len(names.metrics)]
    states = kinds[1 + len(names.metrics) :]
    unchanged = [
        before == after
        for before, after in zip(
            left.inputs[inputs.parameters : inputs.parameters + inputs.states],
            left.outputs[1 + len(names.metrics) :],
            strict=True,
        )
    ]
    rows = Rows(
        loss=dependence(loss),
        metrics=tuple(
            (name, _by_row(kind, left.avals[value], sizes[0]) or dependence(kind))
            for name, kind, value in zip(
                names.metrics, metrics, left.outputs[1 : 1 + len(metrics)], strict=True
            )
        ),
        state=tuple(
            (name, _of_state(kind))
            for name, kind, same in zip(names.states, states, unchanged, strict=True)
            if not same
        ),
    )
    return Proof(rows=rows, kinds=tuple(kinds), analysis=analysis, programs=(left, right))


def dependence(kind: Kind) -> Dependence:
    """The dependence on rows of a result of a kind."""
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
    """The dependence of an array with one value for every row along one dim; None for all
    others.
    """
    position = kind.position
    if kind.family != "row" or kind.power is None or position is None or position.scans:
        return None
    if kind.precomputable or kind.descent.scaled:
        return None
    if len(position.dims) != 1 or aval.shape[position.start] != rows * position.inner:
        return None
    size = math.prod(aval.shape) * aval.dtype.itemsize
    return Dependence(
        kind="rows",
        notes=tuple(sorted(kind.descent.notes)),
        rows=RowDim(dim=position.start, inner=position.inner, bytes=size),
    )


def _of_state(kind: Kind) -> Dependence:
    """The dependence of a changed array of model state. Every microbatch starts from the state
    before the step, so a value that depends on neither rows nor parameters is the same in all.
    """
    if kind.family == "free" and kind.power == 0 and not kind.descent.learned:
        return Dependence(kind="constant")
    cause = kind.cause or Cause(
        why=f"it is updated from the {'parameters' if kind.family == 'free' else 'batch'}", where=""
    )
    return Dependence(kind="coupled", why=cause.why, where=cause.where)


def _for_all_results(dependence_of_all: Dependence, names: ResultNames) -> Rows:
    return Rows(
        loss=dependence_of_all, metrics=tuple((name, dependence_of_all) for name in names.metrics)
    )


def _fixed_size(error: Exception, what: str) -> Dependence:
    """The dependence of a loss that raises an error for another number of rows."""
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
