"""What is known of a value: which rows of the batch does each of its elements look at?

Five families, from the least to the most entangled:

    free    no row is looked at; along dims of the batch all elements are equal
    row     every element looks at one row, and `Place` says at which
    sum     a sum over all rows of one function of a row (with coefficients, and with what depends
            on no row)
    data    looks at several rows in any way, but at nothing that is learned: the whole batch can
            say it beforehand
    mixed   several rows and parameters, in a way that is no sum

A value that is free or a sum changes by a power of the number of rows when there are more of them
(beside the sum itself): a mean is a sum with power -1.

>>> MEAN = total(power=Fraction(-1), learned=True)
>>> MEAN.family, str(MEAN.power)
('sum', '-1')
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, TypeAlias

#: (path of an equation, index of its result): where a value is made.
Origin = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the rows of a value are: the element at flat position f over the dims start..stop looks
    at row (f // inner) % rows.

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
    """What a value has of any of its operands.

    Attributes:
        learned: whether it depends on parameters.
        weighted: whether it has coefficients from the data of the whole batch.
        scaled: whether terms with different powers have been added up in it.
        notes: see `shardlib.graph.rows.Dependence.notes`.
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
    """What mixes rows, for messages.

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
    """What is known of a value.

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
        """Where the rows are, of a "row"."""
        assert self.place is not None
        return self.place

    @property
    def beforehand(self) -> bool:
        """Whether the value for the whole batch differs from that for a part of it, and can be had
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
    """What the whole batch says beforehand.

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
    """What a result has of any of its operands."""
    return {
        "learned": any(kind.descent.learned for kind in kinds),
        "weighted": any(kind.descent.weighted for kind in kinds),
        "scaled": any(kind.descent.scaled for kind in kinds),
        "notes": frozenset().union(*(kind.descent.notes for kind in kinds)),
    }
