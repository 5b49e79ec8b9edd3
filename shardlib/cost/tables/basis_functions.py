"""What are tallies made of?

Everything that adds up over a step is a coefficient times a *measure*: a function of the shape
alone, such as the seconds of one kernel, or "one over the ways that the batch is cut". A program
has hundreds of items under hundreds of choices, but few distinct measures, because programs repeat
themselves: the layers of a stack, a forward pass that is recomputed, an op that a choice does not
touch. So each measure is evaluated once for all shapes, and a tally is a product of a small matrix
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from shardlib.axes import EXPERT, STORED_AXES
from shardlib.cost.machine.efficiency import Efficiency
from shardlib.cost.machine.roofline import busiest, kernel_seconds
from shardlib.cost.terms.local_sizes import Shapes, distinct_rows, divides_at_rest, local
from shardlib.cost.terms.terms import Amount, Compute, Routed
from shardlib.hardware.chip import Chip
from shardlib.propagation.assignment import Cut

Array = np.ndarray


@dataclass(frozen=True)
class Ways:
    """A factor: one over the size of a mesh axis, "tensor" or "context"."""

    axis: str


@dataclass(frozen=True)
class StoredWays:
    """A factor: one over the ways that a parameter is stored sharded beside its sharding in compute;
    with `experts` the expert axis shards it in compute already.
    """

    experts: bool


@dataclass(frozen=True)
class AtRest:
    """A factor: 1 where an array divides at rest (`divides_at_rest`) and 0 elsewhere, or the other
    way around.
    """

    shape: tuple[int, ...]
    cut: Cut
    frozen: frozenset[int]
    flat: bool = False
    divides: bool = True


@dataclass(frozen=True)
class Load:
    """A factor: load of the busiest device over the mean (`shardlib.cost.machine.expert_load`)."""

    routed: Routed


@dataclass(frozen=True)
class Launch:
    """A factor: seconds that the host takes to launch a kernel."""


Factor = Ways | StoredWays | AtRest | Load | Launch


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
    """Seconds of one execution of a kernel, whose `trips` are 1; `outside` of all layers or in
    one.
    """

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
    found = local(
        Amount(
            total=1.0,
            batch=measure.batch,
            tensor=measure.tensor,
            context=measure.context,
            expert=measure.expert,
        ),
        shapes,
    )
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
            raise AssertionError(f"no measure is by the ways of {axis}")
        case StoredWays(experts):
            return 1.0 / shapes.rest((EXPERT.name,) if experts else ())
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
        sizes: that each depends on, by number.
    """

    def __init__(self) -> None:
        self.measures: list[Measure] = []
        self.sizes: list[frozenset[str]] = []
        self._numbers: dict[Measure, int] = {}

    def number(self, measure: Measure) -> int:
        """The number of a measure."""
        found = self._numbers.setdefault(measure, len(self.measures))
        if found == len(self.measures):
            self.measures.append(measure)
            self.sizes.append(depends(measure))
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


#: Sizes that a measure may depend on, the fields of `Shapes`.
SIZES: tuple[str, ...] = ("batch", "context", "tensor", "expert", "fsdp")


@dataclass(kw_only=True)
class Values:
    """Measures evaluated on shapes, as they are asked for.

    Few measures depend on all sizes, so each is evaluated on the fewer shapes that differ in those
    that it does depend on.

    Attributes:
        book: the measures.
        chip, constants, outside: what kernels run on, in layers and outside of them.
        shapes: the shapes.
        work: distinct shapes but for fsdp, on which kernels do not depend, and `which` of them each
            shape is.
    """

    book: Book
    chip: Chip
    constants: Efficiency
    outside: Efficiency
    shapes: Shapes
    work: Shapes = field(init=False)
    which: Array = field(init=False)
    _tables: dict[frozenset[str], tuple[Table, Array]] = field(
        default_factory=dict[frozenset[str], tuple[Table, Array]], init=False, repr=False
    )
    _rows: dict[tuple[int, ...], list[tuple[frozenset[str], Array, Array]]] = field(
        default_factory=dict[tuple[int, ...], list[tuple[frozenset[str], Array, Array]]],
        init=False,
        repr=False,
    )

    def __post_init__(self) -> None:
        self.work, self.which = _projected(self.shapes, frozenset(SIZES[:-1]))

    def stacked(self, numbers: tuple[int, ...], at: Array) -> Array:
        """Some measures on some shapes, array [measures, shapes]."""
        if numbers not in self._rows:
            self._rows[numbers] = self._found(numbers)
        found = np.empty((len(numbers), len(at)))
        for sizes, where, rows in self._rows[numbers]:
            table, which = self._tables[sizes]
            found[where] = table.values[rows[:, None], which[at]]
        return found

    def _found(self, numbers: tuple[int, ...]) -> list[tuple[frozenset[str], Array, Array]]:
        """(sizes, positions, rows of their table) of some measures, by the sizes that they depend
        on.
        """
        groups: dict[frozenset[str], list[int]] = {}
        for position, number in enumerate(numbers):
            groups.setdefault(self.book.sizes[number], []).append(position)
        for sizes in groups.keys() - self._tables.keys():
            self._tables[sizes] = self._table(sizes)
        return [
            (sizes, np.array(where), self._tables[sizes][0].rows([numbers[i] for i in where]))
            for sizes, where in groups.items()
        ]

    def _table(self, sizes: frozenset[str]) -> tuple[Table, Array]:
        shapes, which = _projected(self.shapes, sizes)
        return Table(lambda number: self._made(number, shapes), len(shapes)), which

    def _made(self, number: int, shapes: Shapes) -> Array:
        measure = self.book.measures[number]
        if isinstance(measure, Part):
            return evaluate(measure, shapes, self.constants)
        return kernel_seconds(
            measure.term,
            lambda amount: local(amount, shapes),
            self.chip,
            self.outside if measure.outside else self.constants,
        )


def _projected(shapes: Shapes, sizes: frozenset[str]) -> tuple[Shapes, Array]:
    """The distinct shapes when all but some sizes are 1, and which of them each shape is."""
    first, which = distinct_rows(
        [np.ones_like(shapes.batch), *(getattr(shapes, name) for name in SIZES if name in sizes)]
    )
    batch, context, tensor, expert, fsdp = (
        getattr(shapes, name)[first] if name in sizes else np.ones(len(first), dtype=np.int64)
        for name in SIZES
    )
    return Shapes(batch=batch, context=context, tensor=tensor, expert=expert, fsdp=fsdp), which


def depends(measure: Measure) -> frozenset[str]:
    """The sizes that a measure depends on."""
    if isinstance(measure, Kernel):
        term = measure.term
        routed = (term.routed.rows, term.routed.experts) if term.routed else ()
        amounts = (
            term.flops,
            *term.traffic,
            *term.simple,
            *term.transcendental,
            *(term.matmul or ()),
            *((term.batches,) if term.batches else ()),
            *routed,
        )
        return frozenset[str]().union(*map(_cutting, amounts))
    return frozenset[str]().union(_cutting(measure), *map(_in_factor, measure.factors))


def _cutting(amount: Amount | Part) -> frozenset[str]:
    """The sizes that cut an amount."""
    return frozenset(name for name in SIZES[:-1] if getattr(amount, name))


def _in_factor(factor: Factor) -> frozenset[str]:
    match factor:
        case Ways("tensor" | "context" as axis):
            return frozenset({axis})
        case Ways() | StoredWays():
            return frozenset(STORED_AXES)
        case AtRest():
            return frozenset(SIZES[1:])
        case Load(routed):
            return _cutting(routed.rows) | _cutting(routed.experts)
        case Launch():
            return frozenset()
