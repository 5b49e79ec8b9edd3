"""Kinds of values: the rows of the batch that each element depends on.

Five families, from the least to the most entangled:

    free    depends on no row; along dims of the batch all elements are equal
    row     every element depends on one row, given by `RowPosition`
    sum     a sum over all rows of one function of a row (with coefficients, and with values that
            depend on no row)
    data    several rows in any other way, but no parameter: computed from the batch in advance
    mixed   several rows and parameters, in a way that is not a sum

When the number of rows changes, a value that is free, or the terms of a sum, scale by a power of
it: a mean is a sum with power -1.

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

#: (path of an equation, index of its result): the origin of a value.
Origin = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class RowPosition:
    """Position of the rows of a value: the element at flat position f over dims start..stop depends
    on row (f // inner) % rows.

    Attributes:
        start, stop: the dims.
        inner: consecutive elements of one row.
        scans: scans over rows whose body the value is in, the outermost first: (path, number of its
            dims merged with others, inner).
    """

    start: int
    stop: int
    inner: int = 1
    scans: tuple[tuple[str, int, int], ...] = ()

    @property
    def dims(self) -> range:
        """The dims that contain the rows."""
        return range(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Properties that a value inherits from any operand.

    Attributes:
        learned: whether it depends on parameters.
        weighted: whether it has coefficients from the data of the whole batch.
        scaled: whether it adds terms with different powers of the number of rows.
        notes: see `shardlib.graph.Dependence.notes`.
    """

    learned: bool = False
    weighted: bool = False
    scaled: bool = False
    notes: frozenset[str] = frozenset()


#: Fields of `Descent`, which the constructors below accept like those of `Kind`.
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


#: Role of a value in jax.numpy's indexing, see `Kind`.
Tag: TypeAlias = "str | tuple[Tag, ...] | None"
#: The value of a field of `Kind` or of `Descent`, by its name in `**traits`.
Trait: TypeAlias = Any


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Dependence of a value on the rows of the batch.

    Attributes:
        family: see the module.
        descent: properties inherited from operands.
        position: position of the rows, of a "row".
        power: exponent of the number of rows in its scale; None if it does not scale by a power.
        zero: whether all elements are zero.
        splat: whether all elements are equal, of "free".
        value: the numbers of a scalar in the two traces, if known.
        tag: role in jax.numpy's indexing: "positions" (0, 1, 2, ... along the batch), "false" (the
            test whether such positions are negative), or a tuple of the tags of index components.
        running: whether it is the running sum of a scan over rows.
        origin: the result that makes it, of a value that can be computed from the whole batch in
            advance.
        cause: the operation that mixes rows, of "mixed" and of some "data".
        declared_mean: whether it is a `shardlib.WeightedMean`, a mean as the user declares.
    """

    family: str
    descent: Descent = Descent()
    position: RowPosition | None = None
    power: Fraction | None = Fraction(0)
    zero: bool = False
    splat: bool = False
    value: tuple[Any, Any] | None = None
    tag: Any = None
    running: bool = False
    origin: Origin | None = None
    cause: Cause | None = None
    declared_mean: bool = False

    @property
    def rows(self) -> RowPosition:
        """The position of the rows, of a "row"."""
        assert self.position is not None
        return self.position

    @property
    def precomputable(self) -> bool:
        """True if the value differs between the whole batch and a part of it, and can be computed
        from the batch alone, before the parameters are read.
        """
        return not self.descent.learned and (
            self.family in ("data", "sum") or (self.family == "row" and self.descent.weighted)
        )

    def with_(self, **changed: Trait) -> Kind:
        """The kind with some traits changed: fields of `Kind` or of `Descent`."""
        of_descent = {name: value for name, value in changed.items() if name in _DESCENT}
        others = {name: value for name, value in changed.items() if name not in _DESCENT}
        return replace(self, descent=replace(self.descent, **of_descent), **others)


def free(**traits: Trait) -> Kind:
    """A value that depends on no row."""
    return Kind(family="free").with_(**traits)


def row(rows: RowPosition, **traits: Trait) -> Kind:
    """A value whose elements depend on one row each."""
    return Kind(family="row", position=rows).with_(**traits)


def total(*, power: Fraction | None = Fraction(0), **traits: Trait) -> Kind:
    """A sum over rows.

    Args:
        power: of the number of rows in its terms, see `Kind`.
    """
    return Kind(family="sum", power=power).with_(**traits)


def mixed(why: str, location: str) -> Kind:
    """A learned value in which rows are mixed."""
    return Kind(family="mixed", descent=Descent(learned=True), cause=Cause(why=why, where=location))


def data(*, tag: Tag = None, cause: Cause | None = None) -> Kind:
    """A value of the whole batch that depends on no parameter.

    Args:
        cause: the operation that mixes its rows; None if none does.
    """
    return Kind(family="data", tag=tag, cause=cause)


def sum_powers(powers: list[Fraction | None], signs: list[int] | None = None) -> Fraction | None:
    """The power of a product; None if a factor has none.

    Args:
        signs: 1 for a factor, -1 for a divisor; all 1 by default.
    """
    power_sum = Fraction(0)
    for power, sign in zip(powers, signs or [1] * len(powers), strict=True):
        if power is None:
            return None
        power_sum += sign * power
    return power_sum


def common(kinds: list[Kind]) -> dict[str, Trait]:
    """The properties that a result inherits from any operand."""
    return {
        "learned": any(kind.descent.learned for kind in kinds),
        "weighted": any(kind.descent.weighted for kind in kinds),
        "scaled": any(kind.descent.scaled for kind in kinds),
        "notes": frozenset().union(*(kind.descent.notes for kind in kinds)),
    }


# --------------------------------------------------------------------------------------------------
# One equation in two traces of a loss. Differences between them come from the number of rows alone:
# nothing is guessed from sizes or names.

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class EqnPair:
    """An equation in two traces.

    Attributes:
        sizes: number of rows in each.
        scales: operands that are multiplied by a power of the number of parts when one part of the
            batch is computed, (path, operand) -> exponent; None in loops and custom derivatives,
            which cannot be edited.
        unchanged: whether it is inside a function with a custom derivative, whose equations are not
            edited.
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
            (tuple(first.aval.shape), tuple(second.aval.shape))
            for first, second in zip(self.first.eqn.invars, self.second.eqn.invars, strict=True)
        ]

    @cached_property
    def results(self) -> list[tuple[Shape, Shape]]:
        """Shapes of each result in the two traces."""
        return [
            (tuple(first.aval.shape), tuple(second.aval.shape))
            for first, second in zip(self.first.eqn.outvars, self.second.eqn.outvars, strict=True)
        ]

    def inside(self, key: str = "") -> tuple[Program, Program]:
        """Its inner programs, see `Equation.inside`."""
        return self.first.inside(key), self.second.inside(key)

    def batch_dims(self, operand: int) -> list[int]:
        """Dims of an operand that the number of rows changes."""
        return differing(self.operands[operand])

    def result_dims(self, result: int = 0) -> list[int]:
        """Dims of a result that the number of rows changes."""
        return differing(self.results[result])

    @property
    def is_lossy(self) -> bool:
        """True if it is a lossy conversion: to integers or booleans, or to smaller integers."""
        if self.name != "convert_element_type":
            return False
        old, new = self.first.eqn.invars[0].aval.dtype, self.first.eqn.outvars[0].aval.dtype
        return not jax.dtypes.issubdtype(new, np.inexact) and not np.can_cast(old, new, "safe")

    def mixed(self, why: str, kinds: list[Kind]) -> Kind:
        """A result in which rows are mixed; one that depends on no parameter is a value of the
        whole batch.
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
    return [dim for dim, (size, other) in enumerate(zip(*shapes, strict=True)) if size != other]


def line_of(equation: Equation) -> str:
    """The user's line of an equation, or of the innermost inlined call around it that has one."""
    return next((line for eqn in (equation.eqn, *equation.within) if (line := user_line(eqn))), "")


# --------------------------------------------------------------------------------------------------
# Whole-batch values that a microbatch reads.


@dataclass(frozen=True, kw_only=True)
class WholeBatchValue:
    """A value computed from the whole batch and passed to every part of it.

    Attributes:
        origin: the equation of the whole batch's program that makes it, and the index of the
            result.
        dim: its row dim, which is split like those of the batch; None if it has none.
        inner: consecutive elements of one row along that dim.
    """

    origin: Origin
    dim: int | None = None
    inner: int = 1


def in_microbatch(shapes: tuple[Shape, Shape], kind: Kind, sizes: tuple[int, int]) -> Kind:
    """The kind of a whole-batch value in a part of the batch: a constant, or one value for each
    row.
    """
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
        return row(RowPosition(start=dims[0], stop=dims[0] + 1), weighted=True)
    return kind


class DifferentPrograms(Exception):
    """The two traces are different programs."""


# --------------------------------------------------------------------------------------------------
# Random numbers for the rows of a batch.
#
# Threefry (`jax_threefry_partitionable`, JAX's default) makes every number of a draw from the key
# and the number's position alone. A part of the batch can therefore draw exactly the numbers that
# the whole batch draws for its rows: the same key at the positions of these rows. Generators with
# a hidden state cannot; their draws are values of the whole batch.

#: Primitives that draw an array of a given shape from each key.
SHAPED = frozenset({"random_bits", "random_split"})


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Position of the rows in the shape drawn from a key.

    Attributes:
        inner: consecutive elements of one row along `dim`.
    """

    dim: int
    inner: int


@cache
def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def by_position(dtype: Any) -> bool:
    """True if keys of a dtype make every number from its position alone."""
    return dtype == _threefry() and bool(getattr(jax.config, "jax_threefry_partitionable", True))


def dims_of_draw(first_eqn: Eqn, second_eqn: Eqn) -> list[int]:
    """Dims of the drawn shape that the number of rows changes."""
    pairs = zip(first_eqn.params["shape"], second_eqn.params["shape"], strict=True)
    return [dim for dim, (first, second) in enumerate(pairs) if first != second]


def draw_of(first: Eqn, second: Eqn, sizes: tuple[int, int]) -> Draw | None:
    """The rows of a draw; None if they cannot be drawn by position."""
    keys: Any = (first.invars[0].aval, second.invars[0].aval)
    dims = dims_of_draw(first, second)
    if len(dims) != 1 or keys[0].shape != keys[1].shape or not by_position(keys[0].dtype):
        return None
    shapes = (first.params["shape"], second.params["shape"])
    inner = {divmod(shape[dims[0]], size) for shape, size in zip(shapes, sizes, strict=True)}
    quotient, remainder = next(iter(inner))
    return None if len(inner) > 1 or remainder else Draw(dim=dims[0], inner=quotient)


def draws(left: Program, right: Program, sizes: tuple[int, int]) -> dict[str, Draw | None]:
    """Every draw whose shape the number of rows changes, by path, loops included; None for one
    whose rows cannot be drawn by position.
    """
    if [(e.path, e.name) for e in left.equations] != [(e.path, e.name) for e in right.equations]:
        raise DifferentPrograms
    draw_by_path: dict[str, Draw | None] = {}
    for first, second in zip(left.equations, right.equations, strict=True):
        if first.name in SHAPED:
            if dims_of_draw(first.eqn, second.eqn):
                draw_by_path[first.path] = draw_of(first.eqn, second.eqn, sizes)
        else:
            for pair in zip(first.programs, second.programs, strict=True):
                inside = draws(*pair, sizes)
                draw_by_path.update(dict.fromkeys(inside) if first.name in CUSTOM else inside)
    return draw_by_path
