"""Causes of collectives: the arguments of the program that they move, or the operation of the
user's program that they come from.

An array is followed through what only moves or recasts it, and through the values that a loop
carries, back to an argument.

>>> short_name("jit(shardlib_step)/jit(call)/while/body/layers/mlp/dot_general")
'layers/mlp/dot_general'
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardlib.verification.hlo.hlo import Computation, Instruction, Module

#: Operations that move or recast the one array that they are given.
MOVES = frozenset(
    {
        "bitcast",
        "convert",
        "copy",
        "copy-start",
        "copy-done",
        "dynamic-slice",
        "fusion",
        "reshape",
        "slice",
        "transpose",
    }
)


class Causes:
    """Remembers which arguments of the program each loop carries.

    Args:
        module: the program.
        arguments: names of its arguments, in order.
    """

    def __init__(self, module: Module, arguments: Sequence[str]) -> None:
        self.module, self.arguments = module, arguments
        #: Body of a loop -> place in the tuple that it carries -> argument.
        self.carried: dict[str, dict[int, str]] = {}

    def of(self, instruction: Instruction, body: Computation) -> str:
        """The arguments that the collective moves, where it moves such; else the operation of the
        user's program.
        """
        moved = [
            self.argument(body.by_name[name], body)
            for name in instruction.operands
            if name in body.by_name
        ]
        if moved and all(moved):
            return ", ".join(sorted(set(moved)))
        match = re.fullmatch(r"args\[(\d+)\]", instruction.op_name)
        if match and int(match[1]) < len(self.arguments):
            return self.arguments[int(match[1])]
        return short_name(instruction.op_name)

    def argument(self, instruction: Instruction, body: Computation) -> str:
        """Follows the one array that an instruction moves back to an argument of the program; empty
        where it is none.
        """
        for _ in range(32):
            if instruction.opcode == "parameter":
                number = int(instruction.literal) if instruction.literal.isdigit() else -1
                is_argument = body.name == self.module.entry and 0 <= number < len(self.arguments)
                return self.arguments[number] if is_argument else ""
            if instruction.opcode == "get-tuple-element":
                source, index = (
                    body.by_name.get(instruction.operands[0]),
                    instruction.attribute("index"),
                )
                if source is not None and source.opcode == "parameter":
                    return self.carried.get(body.name, {}).get(int(index), "")
                following = (
                    [source.operands[int(index)]]
                    if source is not None and source.opcode == "tuple"
                    else []
                )
            elif instruction.opcode in MOVES:
                following = [
                    name
                    for name in instruction.operands
                    if name in body.by_name and "[]" not in body.by_name[name].shape
                ]
            else:
                return ""
            if len(following) != 1 or following[0] not in body.by_name:
                return ""
            instruction = body.by_name[following[0]]
        return ""

    def carry(self, loop: Instruction, around: Computation) -> None:
        """Remembers which arguments of the program a loop carries, before its body is read."""
        carried = around.by_name.get(loop.operands[0]) if loop.operands else None
        if carried is not None and carried.opcode == "tuple" and "body" in loop.called:
            names = {
                i: self.argument(around.by_name[name], around)
                for i, name in enumerate(carried.operands)
                if name in around.by_name
            }
            self.carried[loop.called["body"]] = {i: name for i, name in names.items() if name}


def short_name(op_name: str) -> str:
    """An op_name without the frames that every op of a step has."""
    words = [
        word
        for word in op_name.split("/")
        if not re.fullmatch(
            r"jit\((call|shardlib_.*)\)|call_exported|eval_jaxpr|closed_call|while|body|checkpoint",
            word,
        )
    ]
    return "/".join(words)
