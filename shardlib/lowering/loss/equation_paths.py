"""Paths of the equations of a loss, by what lowering can do with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten


@dataclass(frozen=True, kw_only=True)
class EquationPaths:
    """Paths of equations.

    Attributes:
        run: those that are run one by one.
        closed: those that have results and gradients of their own making: custom gradients and
            custom calls; also what they call.
    """

    run: frozenset[str]
    closed: frozenset[str]

    @staticmethod
    def of(program: Program) -> EquationPaths:
        """Walks a program and the bodies that the interpreter walks."""
        run, closed = set[str](), set[str]()
        for equation in _equations(program):
            if (
                equation.call is not None
                or equation.name == "custom_vjp_call"
                or equation.name == "custom_vjp_call_jaxpr"
            ):
                closed.add(equation.path)
            elif equation.name not in CUSTOM:
                run.add(equation.path)
        return EquationPaths(run=frozenset(run), closed=frozenset(closed))

    def is_closed(self, path: str) -> bool:
        """Whether an op belongs to something closed."""
        parts = path.split("/")
        return any("/".join(parts[:end]) in self.closed for end in range(1, len(parts) + 1))


def _equations(program: Program) -> Iterator[Equation]:
    """The equations of a program and of its loops, branches and rematerialised layers."""
    for equation in program.equations:
        yield equation
        if equation.name == "scan":
            yield from _equations(
                flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope)
            )
        elif equation.name == "while":
            for word in ("cond", "body"):
                yield from _equations(
                    flatten(
                        equation.params[f"{word}_jaxpr"], f"{equation.path}/{word}/", equation.scope
                    )
                )
        elif equation.name == "cond":
            for number, branch in enumerate(equation.params["branches"]):
                yield from _equations(
                    flatten(branch, f"{equation.path}/branch{number}/", equation.scope)
                )
        elif equation.name in REMAT:
            yield from _equations(
                flatten(callee(equation.eqn), f"{equation.path}/", equation.scope)
            )
