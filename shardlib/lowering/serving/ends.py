"""What of a forward pass is for the next token alone?

Of a chunk of a prompt only the last token has a next one. What comes after the last call of
attention, the logits above all, is computed for such tokens and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from shardlib.functions.attention import Attention
from shardlib.tracing.program import Equation, Program


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A forward pass in two.

    Attributes:
        every: what all tokens need; its results are the last inputs of `last`.
        last: what gives the results, from the inputs of the whole and those results.
    """

    every: Program
    last: Program


def ends(program: Program, calls: Collection[str], varies: Callable[[Equation], bool]) -> Ends:
    """Cuts a forward pass of one token after its last call of attention."""
    before = _before(program, calls)
    moving = {program.inputs[-1]}
    for equation in program.equations:
        if varies(equation) or moving & {*equation.inputs}:
            moving.update(equation.outputs)
    produced = {number for equation in before for number in equation.outputs}
    paths = {equation.path for equation in before}
    after = [equation for equation in program.equations if equation.path not in paths]
    # what depends on weights alone is rematerialised: it has no row for each token
    needed = {*program.outputs, *(n for equation in after for n in equation.inputs)}
    for equation in reversed(before):
        if needed & {*equation.outputs} and not moving & {*equation.outputs}:
            after.append(equation)
            needed.update(equation.inputs)
    live = tuple(sorted(needed & produced & moving))
    order = {equation.path: index for index, equation in enumerate(program.equations)}
    return Ends(
        every=replace(program, equations=tuple(before), outputs=live),
        last=replace(
            program,
            inputs=(*program.inputs, *live),
            equations=tuple(sorted(after, key=lambda equation: order[equation.path])),
        ),
    )


def _before(program: Program, calls: Collection[str]) -> list[Equation]:
    """The equations that calls of attention need, and these themselves, in order."""
    needed, equations = set[int](), list[Equation]()
    for group in reversed(list(_groups(program))):
        call = group[0].call
        results = group[0].outputs if call is None else call.outputs
        attends = (
            any(path.startswith(f"{group[0].path}/") for path in calls)
            if call is None
            else isinstance(call.form, Attention)
        )
        if attends or needed & {*results}:
            equations[:0] = group
            needed.update(group[0].inputs if call is None else call.inputs)
            needed.update(number for equation in group for number in equation.inputs)
    return equations


def _groups(program: Program) -> Iterator[list[Equation]]:
    """Equations, those of one custom call together."""
    group: list[Equation] = []
    for equation in program.equations:
        if group and (equation.call is None or equation.call is not group[0].call):
            yield group
            group = []
        group.append(equation)
    if group:
        yield group
