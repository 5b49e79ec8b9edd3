"""What are tallies made of?

Everything that adds up over a step is a coefficient times a *measure*: a function of the shape alone, such as the seconds of one kernel, or "one over the ways that the
batch is cut". A program has hundreds of items under hundreds of choices, but few distinct measures, because programs repeat themselves: the layers of a stack, a forward
pass that is recomputed, an op that a choice does not touch. So each measure is evaluated once for all shapes, and a tally is a product of a small matrix with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from shardlib.cost.efficiency import Efficiency
from shardlib.cost.roofline import busiest, kernel_seconds
from shardlib.cost.shapes import Shapes, divides_at_rest, local
from shardlib.cost.terms import Amount, Compute, Routed
from shardlib.hardware.chip import Chip
from shardlib.propagation.assignment import Cut

Array = np.ndarray


@dataclass(frozen=True)
class Ways:
    """A factor: one over the size of a mesh axis, or of the axes at "rest" ("rest of experts" for values that the expert axis cuts in compute)."""

    axis: str


@dataclass(frozen=True)
class AtRest:
    """A factor: 1 where an array divides at rest (`divides_at_rest`) and 0 elsewhere, or the other way around."""

    shape: tuple[int, ...]
    cut: Cut
    frozen: frozenset[int]
    flat: bool = False
    divides: bool = True


@dataclass(frozen=True)
class Load:
    """A factor: load of the busiest device over the mean (`shardlib.cost.imbalance`)."""

    routed: Routed


@dataclass(frozen=True)
class Launch:
    """A factor: seconds that the host takes to launch a kernel."""


Factor = Ways | AtRest | Load | Launch


@dataclass(frozen=True)
class Part:
    """What one device has of an amount of 1, as the fields of `Amount` say, times some factors."""

    batch: bool = False
    tensor: bool = False
    context: bool = False
    expert: bool = False
    factors: tuple[Factor, ...] = ()

    def by(self, *factors: Factor) -> Part:
        """The part times more factors."""
        return replace(self, factors=(*self.factors, *factors)) if factors else self


@dataclass(frozen=True)
class Kernel:
    """Seconds of one execution of a kernel, whose `trips` are 1; `outside` of all layers or in one."""

    term: Compute
    outside: bool


Measure = Part | Kernel


@lru_cache(maxsize=64)
def _part(batch: bool, tensor: bool, context: bool, expert: bool) -> Part:
    return Part(batch, tensor, context, expert)


def part(amount: Amount) -> Part:
    """The measure of an amount; its total is the coefficient."""
    return _part(amount.batch, amount.tensor, amount.context, amount.expert)


def evaluate(measure: Part, shapes: Shapes, constants: Efficiency) -> Array:
    """A measure that is no kernel, by shape."""
    found = local(Amount(total=1.0, batch=measure.batch, tensor=measure.tensor, context=measure.context, expert=measure.expert), shapes)
    for factor in measure.factors:
        found = found * _factor(factor, shapes, constants)
    return found


def _factor(factor: Factor, shapes: Shapes, constants: Efficiency) -> Array | float:
    match factor:
        case Ways("tensor"):
            return 1.0 / shapes.tensor
        case Ways("context"):
            return 1.0 / shapes.context
        case Ways(axis):
            return 1.0 / shapes.rest(("expert",) if axis == "rest of experts" else ())
        case AtRest(shape, cut, frozen, flat, divides):
            return divides_at_rest(shape, cut, frozen, shapes, flat=flat) == divides
        case Launch():
            return constants.dispatch_s
        case Load(routed):
            return busiest(routed, lambda amount: local(amount, shapes), constants)


class Book:
    """Numbers measures; equal ones have one number.

    Attributes:
        measures: by number.
    """

    def __init__(self) -> None:
        self.measures: list[Measure] = []
        self._numbers: dict[Measure, int] = {}

    def number(self, measure: Measure) -> int:
        """The number of a measure."""
        found = self._numbers.setdefault(measure, len(self.measures))
        if found == len(self.measures):
            self.measures.append(measure)
        return found


class Table:
    """Rows of numbers, made as they are asked for.

    Args:
        make: makes the row of a number.
        width: of a row.

    Attributes:
        values: the rows, and room for more.
    """

    def __init__(self, make: Callable[[int], Array], width: int) -> None:
        self._make, self._row = make, dict[int, int]()
        self.values = np.empty((16, width))

    def rows(self, numbers: Sequence[int]) -> Array:
        """The rows of some numbers."""
        for number in numbers:
            if number not in self._row:
                row = self._row[number] = len(self._row)
                if row == len(self.values):
                    self.values = np.concatenate([self.values, np.empty_like(self.values)])
                self.values[row] = self._make(number)
        return np.array([self._row[number] for number in numbers], dtype=np.int64)


@dataclass(kw_only=True)
class Values:
    """Measures evaluated on shapes, as they are asked for.

    Kernels depend on everything but the size of the fsdp axis, so they are evaluated on the fewer shapes that differ in the rest.

    Attributes:
        book: the measures.
        chip, constants, outside: what kernels run on, in layers and outside of them.
        shapes: the shapes.
        work: distinct shapes but for fsdp, and `which` of them each shape is.
    """

    book: Book
    chip: Chip
    constants: Efficiency
    outside: Efficiency
    shapes: Shapes
    work: Shapes = field(init=False)
    which: Array = field(init=False)
    _tables: tuple[Table, Table] = field(init=False, repr=False)
    _rows: dict[tuple[int, ...], tuple[tuple[Array, Array], ...]] = field(default_factory=dict[tuple[int, ...], tuple[tuple[Array, Array], ...]], init=False, repr=False)

    def __post_init__(self) -> None:
        one = self.shapes
        table, which = np.unique(np.stack([one.batch, one.context, one.tensor, one.expert], axis=1), axis=0, return_inverse=True)
        batch, context, tensor, expert = table.T
        self.work, self.which = Shapes(batch=batch, context=context, tensor=tensor, expert=expert, fsdp=np.ones_like(batch)), which.reshape(-1)

        self._tables = Table(self._kernel, len(self.work)), Table(self._part, len(self.shapes))

    def stacked(self, numbers: tuple[int, ...], at: Array) -> Array:
        """Some measures on some shapes, array [measures, shapes]."""
        if numbers not in self._rows:
            kernels = np.array([isinstance(self.book.measures[number], Kernel) for number in numbers], dtype=bool)
            self._rows[numbers] = tuple((where, table.rows([numbers[i] for i in where])) for table, where in zip(self._tables, map(np.flatnonzero, (kernels, ~kernels)), strict=True))
        found = np.empty((len(numbers), len(at)))
        for table, (where, rows), columns in zip(self._tables, self._rows[numbers], (self.which[at], at), strict=True):
            found[where] = table.values[rows[:, None], columns]
        return found

    def _part(self, number: int) -> Array:
        measure = self.book.measures[number]
        assert isinstance(measure, Part)
        return evaluate(measure, self.shapes, self.constants)

    def _kernel(self, number: int) -> Array:
        kernel = self.book.measures[number]
        assert isinstance(kernel, Kernel)
        return kernel_seconds(kernel.term, lambda amount: local(amount, self.work), self.chip, self.outside if kernel.outside else self.constants)
