"""What of a program is known before it runs: what follows from constants alone.

A stack of layers of which some have a window tells each by a boolean that a loop over the layers
hands in. Where that is known, a layer with a window keeps its window and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from shardlib._jax_compat import scan_counts
from shardlib.jax_types import Value
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program
from shardlib.tracing.rewriting.binding import bind

#: Equations with programs inside, which are not run here.
_WITHIN = frozenset({"scan", "while", "cond", *REMAT, *CUSTOM})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constant values of a program, or of one iteration of a loop.

    Attributes:
        program: whose they are.
        given: of its inputs, by number: what computes one; None where it is not known.
    """

    program: Program
    given: Mapping[int, Callable[[], Value | None]] = field(
        default_factory=dict[int, Callable[[], "Value | None"]]
    )
    _made: dict[int, Value | None] = field(default_factory=dict[int, "Value | None"])

    def of(self, number: int) -> Value | None:
        """A value; None where it is not known, or follows from the position of the token."""
        if number in self.program.constants:
            return self.program.constants[number]
        if number not in self._made:
            self._made[number] = None  # of what `given` does not know
            if number in self.given:
                self._made[number] = self.given[number]()
            elif (equation := self._equation(number)) is not None:
                self._run(equation)
        return self._made[number]

    def _equation(self, number: int) -> Equation | None:
        for equation in self.program.equations:
            if number in equation.outputs:
                return equation
        return None

    def _run(self, equation: Equation) -> None:
        counts_tokens = equation.name == "iota" and equation.params["shape"] == (1,)
        if equation.name in _WITHIN or counts_tokens:
            return
        operands = [self.of(number) for number in equation.inputs]
        values = [operand for operand in operands if operand is not None]
        if len(values) < len(operands):
            return
        with jax.ensure_compile_time_eval():
            results = bind(equation, values)
        self._made.update(zip(equation.outputs, results, strict=True))

    def iterations(self, loop: Equation, body: Program) -> Iterator[Constants]:
        """The constants of each iteration of a loop, in the order in which they run."""
        fixed, carried = scan_counts(loop.params)
        length, before = loop.params["length"], None
        for turn in range(length):
            row = length - 1 - turn if loop.params["reverse"] else turn
            inputs: dict[int, Callable[[], Value | None]] = {}
            for index, number in enumerate(body.inputs):
                outer = loop.inputs[index]
                if fixed <= index < fixed + carried and before is not None:
                    inputs[number] = _asked(before, body.outputs[index - fixed])
                elif index < fixed + carried:
                    inputs[number] = _asked(self, outer)
                else:
                    inputs[number] = _row(self, outer, row)
            before = Constants(program=body, given=inputs)
            yield before

    def inside(self, equation: Equation, body: Program) -> Constants:
        """The constants of a program that an equation runs once."""
        pairs = zip(body.inputs, equation.inputs, strict=True)
        return Constants(
            program=body, given={number: _asked(self, outer) for number, outer in pairs}
        )


def _asked(constants: Constants, number: int) -> Callable[[], Value | None]:
    return lambda: constants.of(number)


def _row(constants: Constants, number: int, row: int) -> Callable[[], Value | None]:
    def one() -> Value | None:
        value = constants.of(number)
        return None if value is None else np.asarray(value)[row]

    return one


def kept_windows(window: int, everywhere: Sequence[Value | None]) -> tuple[int, ...]:
    """Tokens that each layer of a call keeps; 0 for all.

    Args:
        everywhere: whether a layer sees all tokens; None where that is not known.
    """
    return tuple(
        window if sees_all is not None and not bool(sees_all) else 0 for sees_all in everywhere
    )
