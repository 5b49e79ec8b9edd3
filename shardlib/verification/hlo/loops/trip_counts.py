"""Trip counts of the loops of a compiled program.

The CPU and GPU compilers say so (`known_trip_count`). The TPU compiler does not: there the
counter's bound is read off the condition (`counter < constant`), its start off the loop's operand,
and its step off the body; a counter that is not stepped by a constant is left unknown.
"""

from __future__ import annotations

import re

from shardlib.verification.hlo.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_PASSED = frozenset({"copy", "bitcast", "convert", "copy-start", "copy-done", "reshape"})


def trip_count(loop: Instruction, around: Computation, module: Module) -> int | None:
    """Executions of a loop's body; None where the text does not say."""
    match = _KNOWN.search(loop.rest)
    if match:
        return int(match[1])
    condition = module.computations.get(loop.called.get("condition", ""))
    bound = _bound(condition, module) if condition else None
    if bound is None:
        return None
    limit, index = bound
    if index is None:
        return None
    start = _start(loop, around, module, index)
    step = _step(module.computations.get(loop.called.get("body", "")), index, module)
    if start is None or step is None:
        return None
    return max(0, -(-(limit - start) // step))


def _bound(condition: Computation, module: Module) -> tuple[int, int | None] | None:
    """(limit, position of the counter in the carried tuple) of a condition `counter < limit`."""
    root = condition.root
    if root is None:
        return None
    operands: list[Instruction | None] = [condition.by_name.get(name) for name in root.operands]
    compare = root
    if root.opcode == "fusion":
        inner = module.computations.get(root.called.get("calls", ""))
        if inner is None or inner.root is None:
            return None
        compare = inner.root
        operands = [_outside(inner.by_name.get(name), operands) for name in compare.operands]
    if (
        compare.opcode != "compare"
        or len(operands) != 2
        or compare.attribute("direction") not in ("LT", "GT")
    ):
        return None
    low, high = operands if compare.attribute("direction") == "LT" else operands[::-1]
    limit = _constant(high)
    return None if limit is None else (limit, _position(low))


def _outside(inner: Instruction | None, operands: list[Instruction | None]) -> Instruction | None:
    """What a value inside a fusion is outside of it, when it is a parameter."""
    if (
        inner is not None
        and inner.opcode == "parameter"
        and inner.literal.isdigit()
        and int(inner.literal) < len(operands)
    ):
        return operands[int(inner.literal)]
    return inner


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal.strip()) else None


def _position(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    index = instruction.attribute("index")
    return int(index) if index.isdigit() else None


def _start(loop: Instruction, around: Computation, module: Module, index: int) -> int | None:
    """The constant that the counter starts from."""
    carried = around.by_name.get(loop.operands[0]) if loop.operands else None
    if carried is None or carried.opcode != "tuple" or index >= len(carried.operands):
        return None
    return _constant(_source(around.by_name.get(carried.operands[index]), around))


def _source(value: Instruction | None, around: Computation) -> Instruction | None:
    """What a value is a copy of."""
    while value is not None and value.opcode in _PASSED and value.operands:
        value = around.by_name.get(value.operands[0])
    return value


def _step(body: Computation | None, index: int, module: Module) -> int | None:
    """The positive constant that the body adds to the counter."""
    if (
        body is None
        or body.root is None
        or body.root.opcode != "tuple"
        or index >= len(body.root.operands)
    ):
        return None
    after = _source(body.by_name.get(body.root.operands[index]), body)
    if after is None:
        return None
    scope, operands = body, [body.by_name.get(name) for name in after.operands]
    if after.opcode == "fusion":
        inner = module.computations.get(after.called.get("calls", ""))
        if inner is None or inner.root is None:
            return None
        scope, after = inner, inner.root
        operands = [_outside(scope.by_name.get(name), operands) for name in after.operands]
    if after.opcode != "add":
        return None
    added = [_constant(_source(operand, scope)) for operand in operands]
    return next((step for step in added if step is not None and step > 0), None)
