"""What kernels of attention read and make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlib.cost.step.attention_kernels import FORWARD
from shardlib.graph import Op
from shardlib.planning.assembly.activations.step_layouts import Listed, StepLayouts, arriving
from shardlib.planning.decisions.activation_layout import Move

#: What moves of a kernel of attention are of.
ATTENTION = "attention"


def of_kernel(at: StepLayouts, index: int, op: Op) -> Iterator[Listed]:
    """What a kernel of attention reads and makes."""
    for number, value in enumerate(op.operands if op.kind == FORWARD else ()):
        role = _role(number, len(op.operands))
        held, read = at.held(value), at.inside(index, value)
        moves = list(arriving(held, read, ATTENTION))
        if at.context == "ring" and "queries" not in role and "context" in held.axes:
            hop = Move(kind="collective-permute", axes=("context",), of=(ATTENTION,), layout=held)
            moves = [hop, *(move for move in moves if move.axes != ("context",))]
        yield at.described(f"{role} of attention", value, moves, index)
    if op.kind == FORWARD:
        value = op.results[0]
        yield at.described("result of attention", value, _leaving(at, index, value), index)
        return
    for value, dims in zip(op.results, op.rule.results, strict=True):
        role = _gradient_role(at, index, {factor for dim in dims for factor in dim})
        moves = _leaving(at, index, value)
        if (
            role == "keys or values"
            and at.context == "all-gather"
            and "context" in at.held(value).axes
        ):
            made = at.inside(index, value)
            axes, of = ("context",), (ATTENTION,)
            moves.append(Move(kind="reduce-scatter", axes=axes, of=of, layout=made, before=True))
        if moves:
            yield at.described(f"gradient of the {role} of attention", value, moves, index)


def _role(number: int, operands: int) -> str:
    """What an operand of a kernel of attention is: queries, keys, other parts of both that are
    rotated by positions, and values.
    """
    if number == operands - 1:
        return "values"
    name = ("queries", "keys")[number % 2]
    return name if number < 2 else f"rotated part of the {name}"


def _gradient_role(at: StepLayouts, index: int, factors: set[int]) -> str:
    """What a result of a backward kernel is the gradient of; keys have no heads of one group."""
    heads = at.facts.heads.get(index)
    if heads is None or heads.each == 1:
        return "operands"
    return "queries" if heads.within & factors else "keys or values"


def _leaving(at: StepLayouts, index: int, value: int) -> list[Move]:
    """The collectives by which a result of a kernel gets to where it is held."""
    held, made = at.held(value), at.inside(index, value)
    return [replace(move, layout=made, before=True) for move in arriving(made, held, ATTENTION)]
