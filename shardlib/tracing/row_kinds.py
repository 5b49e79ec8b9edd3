"""Kinds of values: the rows of the batch that each element of a value depends on.

Five families, from the least to the most entangled:

    free    no row is looked at; along dims of the batch all elements are equal
    row     every element looks at one row, and `Place` says at which
    sum     a sum over all rows of one function of a row (with coefficients, and with what depends
            on no row)
    mixed   several rows and parameters, in a way that is not a sum

A value that is free or a sum changes by a power of the number of rows when there are more of them
(beside the sum itself): a mean is a sum with power -1.

>>> MEAN = total(power=Fraction(-1), learned=True)
>>> MEAN.family, str(MEAN.power)
('sum', '-1')
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import Any, TypeAlias

import jax
import numpy as np

from shardlib.jax_types import Eqn, EqnParams
from shardlib.tracing.layouts import user_line
from shardlib.tracing.program import CUSTOM, Equation, Program

#: (path of an equation, index of its result): where a value is made.
Origin = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Position of the rows of a value: the element at flat position f over the dims start..stop
    looks at row (f // inner) % rows.

    Attributes:
        start, stop: the dims.
        inner: elements of one row that follow each other.
        scans: scans over rows whose body the value is in, the outermost first: (path, number of its
            dims that it runs over with others, inner).
    """

    start: int
    stop: int
    inner: int = 1
    scans: tuple[tuple[str, int, int], ...] = ()

    @property
    def dims(self) -> range:
        """The dims that hold the rows."""
        return range(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Properties that a value inherits from any operand.

    Attributes:
        learned: whether it depends on parameters.
        weighted: whether it has coefficients from the data of the whole batch.
        scaled: whether terms with different powers have been added up in it.
        notes: see `shardlib.graph.Dependence.notes`.
    """

    learned: bool = False
    weighted: bool = False
    scaled: bool = False
    notes: frozenset[str] = frozenset()


#: Names of the fields of `Descent`, which the makers of kinds below take as they take those of
#: `Kind`.
_DESCENT = frozenset(name.name for name in fields(Descent))


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The operation that mixes rows, for messages.

    Attributes:
        why: a clause.
        where: the operation and the user's line.
    """

    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} ({self.where})"


#: What indexing does with positions, see `Kind`.
Tag: TypeAlias = "str | tuple[Tag, ...] | None"
#: The value of a field of `Kind` or of `Descent`.
Trait: TypeAlias = Any


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Dependence of a value on the rows of the batch.

    Attributes:
        family: see the module.
        descent: what it has of any of its operands.
        place: where the rows are, of a "row".
        power: exponent of the number of rows that it changes by; None where it changes in another
            way.
        zero: whether all elements are zero.
        splat: whether all elements are equal, of "free".
        value: a scalar's numbers for the two numbers of rows, where they are known.
        tag: what jax.numpy's indexing does with positions: "positions" (0, 1, 2, ... along the
            batch), "false" (such positions are not negative), or a tuple of the tags of index
            components.
        running: whether a scan over rows is adding it up.
        origin: where it is made, of what the whole batch can say beforehand.
        cause: what mixes the rows, of "mixed" and of "data" that an operation has mixed.
        vouched: whether it is a `shardlib.WeightedMean`, which the user says is one.
    """

    family: str
    descent: Descent = Descent()
    place: Place | None = None
    power: Fraction | None = Fraction(0)
    zero: bool = False
    splat: bool = False
    value: tuple[Any, Any] | None = None
    tag: Any = None
    running: bool = False
    origin: Origin | None = None
    cause: Cause | None = None
    vouched: bool = False

    @property
    def rows(self) -> Place:
        """Returns where the rows are, of a "row"."""
        assert self.place is not None
        return self.place

    @property
    def beforehand(self) -> bool:
        """True if the value for the whole batch differs from that for a part of it, and can be had
        before anything is learned from.
        """
        return not self.descent.learned and (
            self.family in ("data", "sum") or (self.family == "row" and self.descent.weighted)
        )

    def with_(self, **changed: Trait) -> Kind:
        """The kind with some attributes changed, those of `Descent` included."""
        of_descent = {name: value for name, value in changed.items() if name in _DESCENT}
        others = {name: value for name, value in changed.items() if name not in _DESCENT}
        return replace(self, descent=replace(self.descent, **of_descent), **others)


def free(**more: Trait) -> Kind:
    """A value that looks at no row."""
    return Kind(family="free").with_(**more)


def row(place: Place, **more: Trait) -> Kind:
    """A value whose elements look at one row each."""
    return Kind(family="row", place=place).with_(**more)


def total(*, power: Fraction | None = Fraction(0), **more: Trait) -> Kind:
    """A sum over rows.

    Args:
        power: of the number of rows in its terms, see `Kind`; None where it has none.
    """
    return Kind(family="sum", power=power).with_(**more)


def mixed(why: str, location: str) -> Kind:
    """Rows that meet in what is learned."""
    return Kind(
        family="mixed",
        descent=Descent(learned=True),
        cause=Cause(why=why, where=location),
    )


def data(*, tag: Tag = None, cause: Cause | None = None) -> Kind:
    """Returns what the whole batch says beforehand.

    Args:
        cause: what mixes its rows; None where no operation does.
    """
    return Kind(family="data", tag=tag, cause=cause)


def added(powers: list[Fraction | None], signs: list[int] | None = None) -> Fraction | None:
    """The power of a product.

    Args:
        powers: of the factors; None where one has no power.
        signs: 1 for a factor, -1 for a divisor; all 1 by default.

    Returns:
        The sum of the powers; None where one of them is None.
    """
    power_sum = Fraction(0)
    for power, sign in zip(powers, signs or [1] * len(powers), strict=True):
        if power is None:
            return None
        power_sum += sign * power
    return power_sum


def common(kinds: list[Kind]) -> dict[str, Trait]:
    """Returns what a result has of any of its operands."""
    return {
        "learned": any(kind.descent.learned for kind in kinds),
        "weighted": any(kind.descent.weighted for kind in kinds),
        "scaled": any(kind.descent.scaled for kind in kinds),
        "notes": frozenset().union(*(kind.descent.notes for kind in kinds)),
    }


# --------------------------------------------------------------------------------------------------
# One equation in two traces of a loss, for two numbers of rows. What differs between them is made
# by the number of rows: nothing is guessed from sizes or names.

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """An equation, twice.

    Attributes:
        first, second: the equation in the first and in the second trace.
        sizes: number of rows in each.
        scales: operands that are multiplied with a power of the number of parts where a part of the
            batch stands for the whole, (path, operand) -> exponent; None in loops and custom
            derivatives, where nothing can be changed.
        unchanged: whether it is inside of a function whose derivative was written by hand, whose
            equations stay as they are.
    """

    first: Equation
    second: Equation
    sizes: tuple[int, int]
    scales: dict[tuple[str, int], Fraction] | None
    unchanged: bool = False

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.first.name

    @property
    def params(self) -> EqnParams:
        """Parameters in the first trace."""
        return self.first.params

    @cached_property
    def operands(self) -> list[tuple[Shape, Shape]]:
        """Shapes of each operand in the two traces."""
        return [
            (tuple(first.aval.shape), tuple(two.aval.shape))
            for first, two in zip(self.first.eqn.invars, self.second.eqn.invars, strict=True)
        ]

    @cached_property
    def results(self) -> list[tuple[Shape, Shape]]:
        """Shapes of each result in the two traces."""
        return [
            (tuple(first.aval.shape), tuple(two.aval.shape))
            for first, two in zip(self.first.eqn.outvars, self.second.eqn.outvars, strict=True)
        ]

    def inside(self, word: str = "") -> tuple[Program, Program]:
        """The programs inside of it, see `Equation.inside`."""
        return self.first.inside(word), self.second.inside(word)

    def batch_dims(self, operand: int) -> list[int]:
        """Dims of an operand that the number of rows changes."""
        return differing(self.operands[operand])

    def result_dims(self, result: int = 0) -> list[int]:
        """Dims of a result that the number of rows changes."""
        return differing(self.results[result])

    @property
    def cuts(self) -> bool:
        """True if it is a conversion that changes values by more than a rounding: numbers to
        integers or truth values, integers to smaller ones.
        """
        if self.name != "convert_element_type":
            return False
        old, new = self.first.eqn.invars[0].aval.dtype, self.first.eqn.outvars[0].aval.dtype
        return not jax.dtypes.issubdtype(new, np.inexact) and not np.can_cast(old, new, "safe")

    def mixed(self, why: str, kinds: list[Kind]) -> Kind:
        """A result in which rows meet; where nothing is learned, the whole batch can say it
        beforehand.
        """
        if not any(kind.descent.learned for kind in kinds):
            return data(cause=Cause(why=why, where=self.where))
        return mixed(why, self.where)

    @property
    def where(self) -> str:
        """The operation and the user's line."""
        line = line_of(self.first)
        scope = f" in {self.first.scope}" if self.first.scope else ""
        return f"{self.name}{scope}{f' at {line}' if line else ''}"


def differing(shapes: tuple[Shape, Shape]) -> list[int]:
    """The dims in which two shapes of the same rank differ."""
    return [dim for dim, (size, two) in enumerate(zip(*shapes, strict=True)) if size != two]


def line_of(equation: Equation) -> str:
    """The user's line of an equation, or of the innermost call around it that has one."""
    return next((line for eqn in (equation.eqn, *equation.within) if (line := user_line(eqn))), "")


# --------------------------------------------------------------------------------------------------
# Whole-batch values that a part of the batch reads.


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A value that the whole batch says beforehand, where a part of it reads it.

    Attributes:
        origin: the equation of the whole batch's program that makes it, and the index of the
            result.
        dim: its dim of rows, which are dealt out like those of the batch; None where it has none.
        inner: elements of one row that follow each other along that dim.
    """

    origin: Origin
    dim: int | None = None
    inner: int = 1


def as_number(shapes: tuple[Shape, Shape], kind: Kind, sizes: tuple[int, int]) -> Kind:
    """Returns what the whole batch says, as parts of it find it: a number, or one for each row."""
    if kind.family == "row":
        return kind.with_(power=Fraction(0), weighted=True) if kind.descent.weighted else kind
    if kind.family not in ("data", "sum"):
        return kind
    dims = differing(shapes)
    if not dims:
        return free(weighted=True)
    if (
        kind.family == "data"
        and len(dims) == 1
        and (shapes[0][dims[0]], shapes[1][dims[0]]) == sizes
    ):
        return row(Place(start=dims[0], stop=dims[0] + 1), weighted=True)
    return kind


class Unlike(Exception):
    """The two traces are different programs."""


# --------------------------------------------------------------------------------------------------
# Draws of random numbers for the rows of a batch.
#
# Threefry (`jax_threefry_partitionable`, JAX's default) makes every number of a draw from the key
# and the number's position alone. A part of the batch can therefore draw exactly the numbers that
# the whole batch draws for its rows: the same key at the positions of these rows. Generators with
# a hidden state cannot; what they draw is a value of the whole batch.

#: Primitives that draw an array of a shape of their own from each key.
SHAPED = frozenset({"random_bits", "random_split"})


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Position of the rows in the shape that is drawn from a key.

    Attributes:
        dim: of that shape.
        inner: elements of one row that follow each other along it.
    """

    dim: int
    inner: int


@cache
def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def by_position(dtype: Any) -> bool:
    """Returns whether keys of a dtype make every number from its position alone."""
    return dtype == _threefry() and bool(getattr(jax.config, "jax_threefry_partitionable", True))


def own_dims(first_eqn: Eqn, two: Eqn) -> list[int]:
    """Dims of the drawn shape that the number of rows changes, in two traces of one draw."""
    pairs = zip(first_eqn.params["shape"], two.params["shape"], strict=True)
    return [dim for dim, (first, second) in enumerate(pairs) if first != second]


def draw_of(first: Eqn, two: Eqn, sizes: tuple[int, int]) -> Draw | None:
    """The rows of a draw; None where they cannot be drawn by their positions."""
    keys: Any = (first.invars[0].aval, two.invars[0].aval)
    dims = own_dims(first, two)
    if len(dims) != 1 or keys[0].shape != keys[1].shape or not by_position(keys[0].dtype):
        return None
    shapes = (first.params["shape"], two.params["shape"])
    inner = {divmod(shape[dims[0]], size) for shape, size in zip(shapes, sizes, strict=True)}
    quotient, remainder = next(iter(inner))
    return None if len(inner) > 1 or remainder else Draw(dim=dims[0], inner=quotient)


def draws(first_program: Program, two: Program, sizes: tuple[int, int]) -> dict[str, Draw | None]:
    """Every draw whose shape the number of rows changes, by its path, those of loops included; None
    for one whose rows cannot be drawn by their positions.
    """
    if [(e.path, e.name) for e in first_program.equations] != [
        (e.path, e.name) for e in two.equations
    ]:
        raise Unlike
    draw_by_path: dict[str, Draw | None] = {}
    for first, second in zip(first_program.equations, two.equations, strict=True):
        if first.name in SHAPED:
            if own_dims(first.eqn, second.eqn):
                draw_by_path[first.path] = draw_of(first.eqn, second.eqn, sizes)
        else:
            for pair in zip(first.programs, second.programs, strict=True):
                inside = draws(*pair, sizes)
                draw_by_path.update(dict.fromkeys(inside) if first.name in CUSTOM else inside)
    return draw_by_path
