"""A value that the whole batch says beforehand, where a part of the batch reads it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from shardlib.tracing.rows.kinds import Kind, Origin, Place, free, row
from shardlib.tracing.rows.step import Shape, differing


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
    """What the whole batch says, as parts of it find it: a number, or one for each row."""
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
