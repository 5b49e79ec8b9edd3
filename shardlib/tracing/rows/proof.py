"""How does every result of a traced loss depend on the rows of its batch?

proof = prove(trace_at, arguments, sizes=(8, 16), names=...)
proof.rows.loss.kind        # "mean"
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jax.extend import core as jex

from shardlib.graph.rows import Dependence, RowDim, Rows
from shardlib.jax_types import Aval
from shardlib.tracing.lines import raising_line
from shardlib.tracing.program import Program, flatten
from shardlib.tracing.rows.analysis import Analysis
from shardlib.tracing.rows.handed import Unlike
from shardlib.tracing.rows.kinds import Cause, Kind, Place, free, row


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the inputs of a loss are.

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
    """What is known of a loss that was traced for two numbers of rows.

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
    """What the results of a loss are called: the loss, then metrics, then model state."""

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
    """How the results depend on the rows, by the trace for one of so many parts of the batch;
    arguments as those of `prove`.
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
    """What two traces say."""
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
    """How a result of a kind depends on the rows."""
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
    """How an array of the model's state depends on the rows, that is not what it was. Every part
    of the batch begins with the state before the step, and so makes the same of it.
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
