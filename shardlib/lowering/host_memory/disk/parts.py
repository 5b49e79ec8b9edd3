"""How does a step fall into pieces, each of which needs a part of the optimizer's state alone?

What the step makes without the state on disk comes first: loss, gradients, norms. The rest falls
apart by itself where the optimizer treats parameters one by one: two arrays of state are of one
piece only where something is made from both. What is shared by all, such as the norm that clips, is
made first and handed on. An optimizer that mixes everything gives one piece, which is right too,
and saves no memory while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shardlib.tracing.program import Equation, Program
from shardlib.tracing.rewriting.dependence import Labels, dependence, needed

#: Name of the gradients that the optimizer is given: made in the first piece, and handed on as they
#: are.
GRADIENT = "shardlib: gradient of a parameter"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a step. Values are numbers of the program.

    Attributes:
        stored: arrays on disk that it reads.
        given: what else it reads: inputs of the step, and results of the first piece.
        made: outputs of the step that it makes.
        equations: what it does.
    """

    stored: tuple[int, ...]
    given: tuple[int, ...]
    made: tuple[int, ...]
    equations: tuple[Equation, ...]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A step in parts.

    Attributes:
        first: what needs nothing from disk: it makes the other outputs, and what the rest reads.
        rest: the others, in the order in which their arrays stand in the state.
    """

    first: Piece
    rest: tuple[Piece, ...]


def pieces(program: Program, stored: Collection[int]) -> Pieces:
    """Cuts a step."""
    labels = dependence(
        program,
        [
            frozenset({str(number)}) if number in stored else frozenset()
            for number in program.inputs
        ],
    )
    available = {*program.inputs, *_handed_on(program, labels)}
    others = tuple(
        _piece(program, group, labels, available)
        for group in _together(
            program.equations,
            labels,
            [str(number) for number in program.inputs if number in stored],
        )
    )
    handed = {number for piece in others for number in piece.given}.difference(program.inputs)
    outputs = tuple(
        dict.fromkeys(
            (*(number for number in program.outputs if not labels[number]), *sorted(handed))
        )
    )
    equations, reads = needed(program.equations, outputs)
    first = Piece(
        stored=(),
        given=tuple(number for number in program.inputs if number in reads),
        made=outputs,
        equations=tuple(equations),
    )
    return Pieces(first=first, rest=others)


def _handed_on(program: Program, labels: Mapping[int, Labels]) -> set[int]:
    """Values that need nothing from disk and are not made again where they are read: gradients, and
    numbers.
    """
    return {
        number
        for equation in program.equations
        for number in equation.outputs
        if not labels[number] and (_is_gradient(equation) or _size(program, number) == 1)
    }


def _is_gradient(equation: Equation) -> bool:
    return equation.name == "name" and equation.params["name"] == GRADIENT


def _size(program: Program, number: int) -> int:
    return math.prod(getattr(program.avals[number], "shape", ()))


def _piece(
    program: Program, group: Labels, labels: Mapping[int, Labels], available: Collection[int]
) -> Piece:
    outputs = tuple(dict.fromkeys(number for number in program.outputs if labels[number] & group))
    equations, _ = needed(
        program.equations, [number for number in outputs if number not in available], available
    )
    reads = {number for equation in equations for number in equation.inputs}.union(
        outputs
    ).intersection(available)
    stored = tuple(number for number in program.inputs if str(number) in group)
    return Piece(
        stored=stored,
        given=tuple(sorted(reads.difference(stored))),
        made=outputs,
        equations=tuple(equations),
    )


def _together(
    equations: Iterable[Equation], labels: Mapping[int, Labels], stored: Iterable[str]
) -> list[Labels]:
    """Arrays on disk that are of one piece, by their labels."""
    groups: dict[str, set[str]] = {label: {label} for label in stored}
    for equation in equations:
        members = frozenset[str]().union(*(labels[number] for number in equation.outputs))
        joined_groups = {id(groups[label]): groups[label] for label in members}
        if len(joined_groups) > 1:
            joined = set[str]().union(*joined_groups.values())
            groups.update(dict.fromkeys(joined, joined))
    return [frozenset(group) for group in {id(group): group for group in groups.values()}.values()]
