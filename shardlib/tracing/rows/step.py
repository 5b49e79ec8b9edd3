"""One equation in two traces of a loss, for two numbers of rows. What differs between them is made
by the number of rows: nothing is guessed from sizes or names.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import jax
import numpy as np

from shardlib.jax_types import EqnParams
from shardlib.tracing.lines import user_line
from shardlib.tracing.program import Equation
from shardlib.tracing.rows.kinds import Cause, Kind, data, mixed

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """An equation, twice.

    Attributes:
        one, two: the equation in the first and in the second trace.
        sizes: number of rows in each.
        scales: operands that are multiplied with a power of the number of parts where a part of the
            batch stands for the whole, (path, operand) -> exponent; None in loops and custom
            derivatives, where nothing can be changed.
        unchanged: whether it is inside of a function whose derivative was written by hand, whose
            equations stay as they are.
    """

    one: Equation
    two: Equation
    sizes: tuple[int, int]
    scales: dict[tuple[str, int], Fraction] | None
    unchanged: bool = False

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.one.name

    @property
    def params(self) -> EqnParams:
        """Parameters in the first trace."""
        return self.one.params

    @cached_property
    def operands(self) -> list[tuple[Shape, Shape]]:
        """Shapes of each operand in the two traces."""
        return [
            (tuple(first.aval.shape), tuple(two.aval.shape))
            for first, two in zip(self.one.eqn.invars, self.two.eqn.invars, strict=True)
        ]

    @cached_property
    def results(self) -> list[tuple[Shape, Shape]]:
        """Shapes of each result in the two traces."""
        return [
            (tuple(first.aval.shape), tuple(two.aval.shape))
            for first, two in zip(self.one.eqn.outvars, self.two.eqn.outvars, strict=True)
        ]

    def batch_dims(self, operand: int) -> list[int]:
        """Dims of an operand that the number of rows changes."""
        return differing(self.operands[operand])

    def result_dims(self, result: int = 0) -> list[int]:
        """Dims of a result that the number of rows changes."""
        return differing(self.results[result])

    @property
    def cuts(self) -> bool:
        """Whether it is a conversion that changes values by more than a rounding: numbers to
        integers or truth values, integers to smaller ones.
        """
        if self.name != "convert_element_type":
            return False
        old, new = self.one.eqn.invars[0].aval.dtype, self.one.eqn.outvars[0].aval.dtype
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
        line = line_of(self.one)
        scope = f" in {self.one.scope}" if self.one.scope else ""
        return f"{self.name}{scope}{f' at {line}' if line else ''}"


def differing(shapes: tuple[Shape, Shape]) -> list[int]:
    """The dims in which two shapes of the same rank differ."""
    return [dim for dim, (size, two) in enumerate(zip(*shapes, strict=True)) if size != two]


def line_of(equation: Equation) -> str:
    """The user's line of an equation, or of the innermost call around it that has one."""
    return next((line for eqn in (equation.eqn, *equation.within) if (line := user_line(eqn))), "")
