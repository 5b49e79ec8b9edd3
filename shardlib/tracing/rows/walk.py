"""What rules of loops, branches and calls need of the walk that they are part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shardlib.jax_types import Eqn, EqnParams, Jaxpr
from shardlib.tracing.program import Program
from shardlib.tracing.rows.kinds import Kind
from shardlib.tracing.rows.step import Step


class Walk(Protocol):
    """The walk through two traces.

    Attributes:
        judged: custom derivatives that were judged, with what is wrong with them.
        derivatives_are_judged: whether the walk is inside of a function whose derivative is judged
            as a whole, or inside of that derivative, of which no further one is taken.
    """

    judged: dict[Any, str]
    derivatives_are_judged: bool

    def beneath(self) -> Walk:
        """The walk inside of a function whose derivative was written by hand."""
        ...

    def run(
        self, programs: tuple[Program, Program], arguments: Sequence[Kind], *, editable: bool
    ) -> list[Kind]:
        """Kinds of the results of a program."""
        ...

    def inside(self, step: Step, of: Callable[[Eqn], Jaxpr]) -> tuple[Program, Program]:
        """The programs inside of an equation."""
        ...

    def inside_of(
        self, step: Step, jaxpr: Callable[[EqnParams], Jaxpr], word: str
    ) -> tuple[Program, Program]:
        """The programs of a loop or branch."""
        ...
