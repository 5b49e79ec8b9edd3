"""Whole numbers and truth values of a compiled program that follow from its text alone: counters of
loops, what is made of them, and what conditionals ask.

A *scope* is one execution of a computation: `Entry` of the program, `Turn` one turn of a loop, and
`AnyTurn` all that is the same in every turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardlib.verification.hlo.hlo import Computation, Instruction, Module

Numbers = NDArray[np.int64]
#: Elements of an array that are looked at; longer ones are no counters.
LONGEST = 1 << 12
_VIEWS = frozenset({"copy", "bitcast", "reshape", "broadcast", "copy-start", "copy-done"})
_BINARY: Mapping[str, Callable[[Numbers, Numbers], Numbers]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "shift-right-arithmetic": np.right_shift,
    "divide": lambda a, b: np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)),
    "remainder": np.fmod,
}
_COMPARED: Mapping[str, Callable[[Numbers, Numbers], NDArray[np.bool_]]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_UNARY: Mapping[str, Callable[[Numbers], Numbers]] = {
    "negate": np.negative,
    "abs": np.abs,
    "sign": np.sign,
}


class UnknownError(Exception):
    """A number does not follow from the text."""


class Scope(Protocol):
    """One execution of a computation; it keeps what is known of it."""

    @property
    def computation(self) -> Computation: ...
    @property
    def known(self) -> dict[tuple[str, int | None], Numbers]: ...

    def parameter(self, number: int, index: int | None) -> Numbers:
        """A parameter, or one of the elements of a tuple; raises `UnknownError`."""
        ...


@dataclass(frozen=True, eq=False)
class _Kept:
    module: Module
    computation: Computation
    known: dict[tuple[str, int | None], Numbers] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, eq=False)
class Entry(_Kept):
    """The execution of a program."""

    def parameter(self, number: int, index: int | None) -> Numbers:
        """Nothing is known of arguments."""
        raise UnknownError


@dataclass(frozen=True, eq=False)
class Inside(_Kept):
    """The execution of a computation that an instruction calls with its operands."""

    caller: Instruction
    outside: Scope

    def parameter(self, number: int, index: int | None) -> Numbers:
        """The operand of that number."""
        return value(self.module, self.caller.operands[number], self.outside, index)


@dataclass(frozen=True, eq=False)
class Turn(_Kept):
    """One turn of a loop.

    Attributes:
        loop: the while instruction, which stands in `outside`.
        before: the turn before; None for the first.
    """

    loop: Instruction
    outside: Scope
    before: Turn | None = None

    def parameter(self, number: int, index: int | None) -> Numbers:
        """What the loop begins with, or what the turn before handed on."""
        if self.before is None:
            return value(self.module, self.loop.operands[0], self.outside, index)
        root = self.computation.root
        if root is None:
            raise UnknownError
        return value(self.module, root.name, self.before, index)


@dataclass(frozen=True, eq=False)
class AnyTurn(_Kept):
    """All turns of a loop, where they agree."""

    loop: Instruction
    outside: Scope

    def parameter(self, number: int, index: int | None) -> Numbers:
        """What the loop begins with, where every turn hands it on as it is."""
        if index is None or not _handed_on(self.computation, index):
            raise UnknownError
        return value(self.module, self.loop.operands[0], self.outside, index)


def _handed_on(body: Computation, index: int) -> bool:
    """Whether a loop hands on an element of what it carries as it is."""
    root = body.root
    if root is None or root.opcode != "tuple" or index >= len(root.operands):
        return False
    source = body.by_name.get(root.operands[index])
    while source is not None and source.opcode in _VIEWS and source.operands:
        source = body.by_name.get(source.operands[0])
    return (
        source is not None
        and source.opcode == "get-tuple-element"
        and source.attribute("index") == str(index)
        and (carried := body.by_name.get(source.operands[0])) is not None
        and carried.opcode == "parameter"
    )


def value(module: Module, name: str, scope: Scope, index: int | None = None) -> Numbers:
    """The whole numbers that an instruction makes; truth values are 0 and 1.

    Args:
        index: element of the tuple that it makes; None where it makes an array.
    """
    key = name, index
    if key not in scope.known:
        instruction = scope.computation.by_name.get(name)
        if instruction is None:
            raise UnknownError
        scope.known[key] = _made(module, instruction, scope, index)
    return scope.known[key]


def _made(module: Module, instruction: Instruction, scope: Scope, index: int | None) -> Numbers:
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "parameter":
        if not instruction.literal.isdigit():
            raise UnknownError
        return scope.parameter(int(instruction.literal), index)
    if opcode == "get-tuple-element" and instruction.attribute("index").isdigit():
        if index is not None:
            raise UnknownError
        return value(module, operands[0], scope, int(instruction.attribute("index")))
    if opcode == "tuple" and index is not None and index < len(operands):
        return value(module, operands[index], scope)
    if opcode in ("fusion", "call"):
        called = module.computations.get(next(iter(instruction.called.values()), ""))
        if called is None or called.root is None:
            raise UnknownError
        return value(module, called.root.name, Inside(module, called, instruction, scope), index)
    if opcode == "while" and index is not None:
        body = module.computations.get(instruction.called.get("body", ""))
        if body is None or not _handed_on(body, index):
            raise UnknownError
        return value(module, operands[0], scope, index)
    if index is not None or not re.match(r"(pred|[su]\d+)\[", instruction.shape):
        raise UnknownError
    if opcode == "constant":
        return _constant(instruction)
    if opcode == "iota":
        return np.arange(_length(instruction))
    return _computed(instruction, [value(module, name, scope) for name in operands])


def _computed(instruction: Instruction, operands: list[Numbers]) -> Numbers:
    """The result of an operation on whole numbers."""
    opcode, count = instruction.opcode, len(operands)
    if opcode in _VIEWS and count == 1:
        return (
            np.resize(operands[0], _length(instruction)) if operands[0].size == 1 else operands[0]
        )
    if opcode == "convert" and count == 1:
        return (
            (operands[0] != 0).astype(np.int64)
            if instruction.shape.startswith("pred")
            else operands[0]
        )
    if opcode == "not" and count == 1:
        return 1 - operands[0] if instruction.shape.startswith("pred") else ~operands[0]
    if opcode in _UNARY and count == 1:
        return _UNARY[opcode](operands[0])
    if opcode in _BINARY and count == 2:
        if opcode in ("divide", "remainder") and not operands[1].all():
            raise UnknownError
        return _BINARY[opcode](*operands)
    if opcode == "compare" and (direction := instruction.attribute("direction")) in _COMPARED:
        return _COMPARED[direction](*operands).astype(np.int64)
    if opcode == "select" and count == 3:
        return np.where(operands[0] != 0, operands[1], operands[2])
    if opcode == "clamp" and count == 3:
        return np.minimum(np.maximum(operands[1], operands[0]), operands[2])
    if opcode == "dynamic-slice" and count == 2:
        length = _length(instruction)
        start = int(np.clip(operands[1].reshape(-1)[0], 0, max(0, operands[0].size - length)))
        return operands[0].reshape(-1)[start : start + length]
    raise UnknownError


def _length(instruction: Instruction) -> int:
    """Elements of an array of at most one dim that is longer than 1."""
    match = re.match(r"\w+\[([\d,]*)\]", instruction.shape)
    sizes = [int(size) for size in match[1].split(",") if size] if match else []
    long = [size for size in sizes if size != 1]
    if match is None or len(long) > 1 or (long and not 0 < long[0] <= LONGEST):
        raise UnknownError
    return long[0] if long else 1


def _constant(instruction: Instruction) -> Numbers:
    """The elements of a constant; long ones are not in the text."""
    words = re.findall(r"-?\d+|true|false", instruction.literal)
    if len(words) != _length(instruction) or "..." in instruction.literal:
        raise UnknownError
    return np.array(
        [{"true": 1, "false": 0}.get(w) if w in ("true", "false") else int(w) for w in words]
    )
