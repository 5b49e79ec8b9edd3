"""Which part of a program makes some of its results early, and what is left to make the others
later?

The early part runs what the early results need and nothing else. The late part runs the rest: it
reads inputs that are still at hand, and values that the early part passes on. What is cheap to make
again from inputs that are at hand (anything but matrix products) is made again rather than passed
on, and so are other views of a value that is passed on.

Loops are split too: the early loop carries what early results need, and stacks up what its
iterations pass on to those of the late loop. In a backward pass over a stack of layers that leaves
the chain of cotangents in the early loop and the products that make gradients of weights in the
late one (the split of zero-bubble pipelines, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardlib._jax_compat import scan_counts
from shardlib.jax_types import Value
from shardlib.tracing.program import Equation, Program, has_matmul
from shardlib.tracing.rewriting.binding import strong
from shardlib.tracing.rewriting.dependence import dependence
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.parts_of_program import (
    body_of,
    closed,
    positions_of,
    results_wanted,
)
from shardlib.tracing.rewriting.walk import Walk

#: Ops whose result is another view of an operand that is no larger.
_VIEWS = frozenset(
    {
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "sharding_constraint",
        "copy",
    }
)
_PLAIN = Walk(inside=True)

Values = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A scan in two parts.

    Attributes:
        equation: the scan.
        body: its body in two parts.
        early, late: positions of the results that each part makes, carried ones first.
        stacks: numbers of what the iterations of the early part pass on, stacked.
    """

    equation: Equation
    body: Split
    early: tuple[int, ...]
    late: tuple[int, ...]
    stacks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A program in two parts.

    Attributes:
        program: both.
        first: what runs early; of a loop in two parts, its early part.
        second: what runs late.
        early, late: numbers of the results of each.
        passed: numbers of the values that the first part passes on to the second.
    """

    program: Program
    first: tuple[Equation | Loop, ...]
    second: tuple[Equation | Loop, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]
    passed: tuple[int, ...]

    def run_first(self, inputs: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """(early results, what is passed on) for all inputs."""
        env: Values = {
            **self.program.constants,
            **dict(zip(self.program.inputs, inputs, strict=True)),
        }
        for step in self.first:
            if isinstance(step, Loop):
                _early(step, env)
            else:
                evaluate_equations([step], env, _PLAIN)
        return [env[number] for number in self.early], [env[number] for number in self.passed]

    def run_second(self, inputs: Sequence[Value], passed: Sequence[Value]) -> list[Value]:
        """Late results, for the inputs that are at hand (anything in place of the others) and what
        the first part passed on.
        """
        env: Values = {
            **self.program.constants,
            **dict(zip(self.program.inputs, inputs, strict=True)),
            **dict(zip(self.passed, passed, strict=True)),
        }
        for step in self.second:
            if isinstance(step, Loop):
                _late(step, env)
            else:
                evaluate_equations([step], env, _PLAIN)
        return [env[number] for number in self.late]


def split(
    program: Program, early: Sequence[int], late: Sequence[int], at_hand: Collection[int]
) -> Split:
    """Splits a program."""
    needed_early = results_wanted(program.equations, early)
    labels = dependence(
        program,
        [frozenset() if number in at_hand else frozenset({"gone"}) for number in program.inputs],
    )
    fresh = len(program.avals)
    first: dict[int, Equation | Loop] = {
        position: equation
        for position, equation in enumerate(program.equations)
        if needed_early[position]
    }
    second: list[Equation | Loop] = []
    reads, passed = set(late), set[int]()
    for position in reversed(range(len(program.equations))):
        equation = program.equations[position]
        needed = reads.intersection(equation.outputs)
        early_results = needed.intersection(needed_early[position])
        if not needed:
            continue
        if not needed_early[position] or _again(equation, labels):
            second.append(equation)
            reads.update(equation.inputs)
        elif equation.name == "scan" and needed != early_results:
            loop = _loop(equation, needed_early[position], needed - early_results, fresh)
            fresh += len(loop.stacks)
            first[position] = loop
            second.append(loop)
            passed.update(early_results, loop.stacks)
            reads.update(_late_operands(loop))
        else:
            passed.update(needed)
    passed |= {number for number in program.inputs if number in reads and number not in at_hand}
    return Split(
        program=program,
        first=tuple(first[position] for position in sorted(first)),
        second=tuple(reversed(second)),
        early=tuple(early),
        late=tuple(late),
        passed=tuple(sorted(passed)),
    )


def _again(equation: Equation, labels: dict[int, frozenset[str]]) -> bool:
    """Whether the late part makes something again that the early part has made."""
    at_hand = all(not labels[number] for number in equation.inputs)
    return equation.name in _VIEWS or (at_hand and not has_matmul(equation.eqn))


def _loop(equation: Equation, early: set[int], late: set[int], fresh: int) -> Loop:
    """A scan in two parts, for the numbers of the results that each has to make; what is passed on
    is numbered from `fresh`.
    """
    constants, carried = scan_counts(equation.params)
    body = body_of(equation)
    first, _ = closed(equation, body, positions_of(equation, early))
    carries = {body.inputs[constants + k]: k for k in range(carried)}
    at_hand = [number for number in body.inputs if carries.get(number) not in first]
    second = positions_of(equation, late) - first
    while True:
        inner = split(
            body,
            [body.outputs[k] for k in sorted(first)],
            [body.outputs[k] for k in sorted(second)],
            at_hand,
        )
        grown = second | {
            k for number, k in carries.items() if k not in first and number in _second_reads(inner)
        }
        if grown == second:
            break
        second = grown
    stacks = tuple(range(fresh, fresh + len(inner.passed)))
    return Loop(
        equation=equation,
        body=inner,
        early=tuple(sorted(first)),
        late=tuple(sorted(second)),
        stacks=stacks,
    )


def _second_reads(inner: Split) -> set[int]:
    """What the late part reads."""
    reads = set(inner.late)
    for step in inner.second:
        reads.update(_late_operands(step) if isinstance(step, Loop) else step.inputs)
    return reads


def _late_operands(loop: Loop) -> set[int]:
    """The operands of a loop that its late part reads."""
    reads = _second_reads(loop.body)
    constants, carried = scan_counts(loop.equation.params)
    inside = {k for k, number in enumerate(loop.body.program.inputs) if number in reads}
    inside |= {constants + k for k in loop.late if k < carried}
    inside -= {constants + k for k in loop.early if k < carried}
    return {loop.equation.inputs[k] for k in inside}


def _early(loop: Loop, env: Values) -> None:
    """Runs the early part of a loop."""

    def body(inputs: list[Value]) -> tuple[list[Value], list[Value]]:
        return loop.body.run_first(inputs)

    stacks = _scan(loop.equation, loop.early, env, body, ())
    env.update(zip(loop.stacks, stacks, strict=True))


def _late(loop: Loop, env: Values) -> None:
    """Runs the late part of a loop."""

    def body(inputs: list[Value], *passed: Value) -> tuple[list[Value], list[Value]]:
        return loop.body.run_second(inputs, passed), []

    _scan(loop.equation, loop.late, env, body, [env[number] for number in loop.stacks])


def _scan(
    equation: Equation, results: Sequence[int], env: Values, body: Any, more: Sequence[Value]
) -> Sequence[Value]:
    """Runs a scan with some of its results, and gives what the body returns beside them, stacked.
    Operands that `env` lacks are not read; None stands for them.
    """
    constants, carried = scan_counts(equation.params)
    program = body_of(equation)
    carries = [k for k in results if k < carried]
    operands: list[Any] = [env.get(number) for number in equation.inputs]

    def step(
        carry: list[Any], sliced: tuple[list[Any], Sequence[Any]]
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        carries_by_position = dict(zip(carries, carry, strict=True))
        outputs, beside = body(
            [
                *operands[:constants],
                *(carries_by_position.get(k) for k in range(carried)),
                *sliced[0],
            ],
            *sliced[1],
        )
        return outputs[: len(carries)], (outputs[len(carries) :], beside)

    init = [
        strong(operands[constants + k], program.avals[program.inputs[constants + k]])
        for k in carries
    ]
    final, (stacked, beside) = jax.lax.scan(
        step,
        init,
        (operands[constants + carried :], list(more)),
        length=equation.params["length"],
        reverse=equation.params["reverse"],
    )
    env.update(zip((equation.outputs[k] for k in results), [*final, *stacked], strict=True))
    return beside
