"""Measures evaluated once for all shapes, of which tallies are products.

Everything that adds up over a step is a coefficient times a *measure*: a function of the shape
alone, such as the seconds of one kernel, or "one over the ways that the batch is sharded". A
program has hundreds of items under hundreds of choices, but few distinct measures, because programs
repeat themselves: the layers of a stack, a forward pass that is rematerialised, an op that a choice
does not touch. So each measure is evaluated once for all shapes, and a tally is a product of a
small matrix with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardlib.axes import EXPERT
from shardlib.cost.machine.efficiency import Efficiency
from shardlib.cost.machine.roofline import busiest, kernel_seconds
from shardlib.cost.tables.measures import (
    SIZES,
    Counts,
    DividesStored,
    Factor,
    Launch,
    Load,
    Measure,
    Part,
    StoredWays,
    Ways,
    depends,
)
from shardlib.cost.terms.local_sizes import Shapes, distinct_rows, divides_stored, local
from shardlib.cost.terms.terms import Amount, Heads
from shardlib.hardware.chip import Chip

Array = np.ndarray


def evaluate(measure: Part, shapes: Shapes, constants: Efficiency) -> Array:
    """A measure that is no kernel, by shape."""
    values = local(
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
        values = values * _factor(factor, shapes, constants)
    return values


def _factor(factor: Factor, shapes: Shapes, constants: Efficiency) -> Array | float:
    match factor:
        case Ways("tensor"):
            return 1.0 / shapes.tensor
        case Ways("context"):
            return 1.0 / shapes.context
        case Ways(axis):
            raise AssertionError(f"no measure is by the ways of {axis}")
        case StoredWays(experts):
            return 1.0 / shapes.stored_ways((EXPERT.name,) if experts else ())
        case DividesStored(shape, cut, frozen, flat, divides):
            return divides_stored(shape, cut, frozen, shapes, flat=flat) == divides
        case Launch():
            return constants.dispatch_s
        case Load(routed):
            return busiest(routed, lambda amount: local(amount, shapes), constants)
        case Counts(heads):
            return _counting(heads, shapes)


def _counting(heads: Heads, shapes: Shapes) -> Array:
    """1.0 for each shape where terms of attention count (`Heads.counts`), and 0.0 elsewhere."""
    degrees, which = np.unique(shapes.tensor, return_inverse=True)
    return np.array([float(heads.counts(int(n))) for n in degrees])[which.reshape(-1)]


#: Sets of shapes whose measures a book keeps.
MOST_KEPT = 8


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
        self._kept: OrderedDict[Hashable, Values] = OrderedDict()

    def on(self, chip: Chip, constants: Efficiency, outside: Efficiency, shapes: Shapes) -> Values:
        """The measures on some shapes, which are kept for the next search that asks for them: a
        topology with other links or more memory has the same kernels.
        """
        key = (
            replace(chip, hbm_bytes=1, reserved_bytes=0),
            constants,
            outside,
            tuple(getattr(shapes, name).tobytes() for name in SIZES),
        )
        values = self._kept.pop(key, None)
        if values is None:
            values = Values(
                book=self, chip=chip, constants=constants, outside=outside, shapes=shapes
            )
        self._kept[key] = values
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return values

    def number(self, measure: Measure) -> int:
        """The number of a measure."""
        number = self._numbers.setdefault(measure, len(self.measures))
        if number == len(self.measures):
            self.measures.append(measure)
            self.sizes.append(depends(measure))
        return number


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
        values = np.empty((len(numbers), len(at)))
        for sizes, positions, rows in self._rows[numbers]:
            table, which = self._tables[sizes]
            values[positions] = table.values[rows[:, None], which[at]]
        return values

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
            (
                sizes,
                np.array(positions),
                self._tables[sizes][0].rows([numbers[i] for i in positions]),
            )
            for sizes, positions in groups.items()
        ]

    def _table(self, sizes: frozenset[str]) -> tuple[Table, Array]:
        shapes, which = _projected(self.shapes, sizes)
        return Table(lambda number: self._made(number, shapes), len(shapes)), which

    def _made(self, number: int, shapes: Shapes) -> Array:
        measure = self.book.measures[number]
        if isinstance(measure, Part):
            return evaluate(measure, shapes, self.constants)
        seconds = kernel_seconds(
            measure.term,
            lambda amount: local(amount, shapes),
            self.chip,
            self.outside if measure.outside else self.constants,
        )
        heads = measure.term.heads
        return seconds if heads is None else seconds * _counting(heads, shapes)


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
