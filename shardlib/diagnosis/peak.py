"""Values that live at the peak of a compiled program's memory, by source line.

The text of a compiled program is in the order of its schedule. A value lives from the instruction
that makes it to the last that takes it; views, tuples and loops hand on what they are given, and
an update in place takes no new memory. What a loop's body needs at its own peak is added where the
loop stands. Arguments live for as long as the program runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.diagnosis.edits import Spec
from shardlib.diagnosis.program import TracedFunction
from shardlib.diagnosis.rows import Index
from shardlib.diagnosis.source import NOWHERE, Source, read_source, value_name
from shardlib.untrusted.data import JsonObject
from shardlib.verification.hlo import Computation, HloError, Instruction, array_bytes, elements

#: Opcodes whose result is memory that they were given.
_HANDED_ON = frozenset(
    {"bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier", "parameter"}
)
#: Of a value that is not in the memory of the device but nearer to its units, or on the host.
_ELSEWHERE = re.compile(r"S\([1-9]\)")


@dataclass(frozen=True, kw_only=True)
class LiveValue:
    """Values of one line that live at the peak.

    Attributes:
        name: what the program calls it.
        bytes: per device.
        count: how many of them live.
        shape: the result type of one, per device, as HLO has it.
        spec: how it is sharded; None where that is not known.
        replicated: (axis, bytes that sharding over it would save) of each mesh axis that does not
            shard it and divides one of its unsharded dims.
    """

    name: str
    source: Source
    bytes: int
    count: int
    shape: str
    spec: Spec | None
    replicated: tuple[tuple[str, int], ...]


@dataclass
class _Peak:
    """The peak of one computation: its bytes, and the instructions whose values live there."""

    bytes: int
    live: list[Instruction]


class _Reader:
    def __init__(self, index: Index) -> None:
        self.index = index
        self.known: dict[str, _Peak] = {}

    def peak(self, name: str) -> _Peak:
        """The peak of a computation, without its parameters."""
        if name not in self.known:
            self.known[name] = _Peak(0, [])  # a computation does not call itself
            body = self.index.module.computations.get(name)
            if body is not None:
                self.known[name] = self._peak(body)
        return self.known[name]

    def _peak(self, body: Computation) -> _Peak:
        buffers: dict[str, frozenset[str]] = {}
        last: dict[str, int] = {}
        size: dict[str, int] = {}
        for position, instruction in enumerate(body.instructions):
            operands = frozenset().union(
                *(buffers.get(o, frozenset()) for o in instruction.operands)
            )
            for buffer in operands:
                last[buffer] = position
            size_bytes = _own_bytes(instruction)
            in_place = "dynamic-update-slice" in instruction.name or (
                instruction.opcode == "dynamic-update-slice"
            )
            if size_bytes == 0 or instruction.opcode in _HANDED_ON or in_place:
                buffers[instruction.name] = operands
                continue
            shared = [instruction.operands[n] for n in _aliases(instruction).values()]
            buffers[instruction.name] = frozenset({instruction.name}).union(
                *(buffers.get(name, frozenset()) for name in shared)
            )
            size[instruction.name], last[instruction.name] = size_bytes, position
        if body.root is not None:
            for buffer in buffers.get(body.root.name, frozenset()):
                last[buffer] = len(body.instructions)
        ends: dict[int, list[str]] = defaultdict(list)
        for buffer, position in last.items():
            if buffer in size:
                ends[position].append(buffer)
        live, total, best = dict[str, None](), 0, _Peak(0, [])
        for position, instruction in enumerate(body.instructions):
            if instruction.name in size:
                live[instruction.name] = None
                total += size[instruction.name]
            inner = self._inner(instruction)
            if total + inner.bytes > best.bytes:
                listed = [body.by_name[name] for name in live] + inner.live
                best = _Peak(total + inner.bytes, listed)
            for buffer in ends[position]:
                live.pop(buffer, None)
                total -= size[buffer]
        return best

    def _inner(self, instruction: Instruction) -> _Peak:
        if instruction.opcode == "while":
            return self.peak(instruction.called.get("body", ""))
        if instruction.opcode in ("conditional", "call"):
            names = (*instruction.branches, instruction.called.get("to_apply", ""))
            return max((self.peak(name) for name in names if name), key=lambda peak: peak.bytes)
        return _Peak(0, [])


def _own_bytes(instruction: Instruction) -> int:
    """Bytes of device memory that the result of an instruction takes."""
    if instruction.opcode.endswith(("-done", "-update")):
        return 0
    aliased = _aliases(instruction)
    parts = [p for n, p in enumerate(elements(instruction.shape)) if n not in aliased]
    if instruction.opcode.endswith("-start") and len(parts) > 1:
        parts = parts[1:2]  # what stands beside the result are its operands
    try:
        return sum(array_bytes(part) for part in parts if not _ELSEWHERE.search(part))
    except HloError:
        return 0


def _aliases(instruction: Instruction) -> dict[int, int]:
    """Element of the result -> the operand whose memory it takes."""
    text = instruction.attribute("output_to_operand_aliasing")
    pairs = re.findall(r"\{(\d*)\}: \((\d+)", text)
    return {int(element or 0): int(operand) for element, operand in pairs}


def live_values(
    index: Index, function: TracedFunction | None, shardings: JsonObject
) -> tuple[int, tuple[LiveValue, ...]]:
    """(bytes of temporaries at the peak, values that live there, the largest first)."""
    peak = _Reader(index).peak(index.module.entry)
    mesh = dict(function.mesh) if function else {}
    specs: dict[object, list[tuple[Spec, tuple[int, ...]]]] = defaultdict(list)
    for value in shardings.get("values", ()):
        source = read_source(value["location"])
        specs[source.key, source.operation.backward].append(
            (tuple(tuple(axes) for axes in value["spec"]), tuple(value["shape"]))
        )
    groups: dict[object, list[tuple[Instruction, Source]]] = defaultdict(list)
    for instruction in peak.live:
        source = index.made(instruction.name)
        key = (source.key, source.operation) if source is not NOWHERE else instruction.name
        groups[key, _own_bytes(instruction)].append((instruction, source))
    values = [_value(members, specs, mesh) for members in groups.values()]
    return peak.bytes, tuple(sorted(values, key=lambda value: -value.bytes))


def _value(
    members: Sequence[tuple[Instruction, Source]],
    specs: Mapping[object, Sequence[tuple[Spec, tuple[int, ...]]]],
    mesh: Mapping[str, int],
) -> LiveValue:
    instruction, source = members[0]
    size = _own_bytes(instruction)
    name = value_name(source.user)
    aliased = _aliases(instruction)
    parts = [p for n, p in enumerate(elements(instruction.shape)) if n not in aliased]
    types = re.sub(r"\{[^{}]*\}", "", ", ".join(parts[:4]))
    spec, replicated = None, list[tuple[str, int]]()
    for candidate, shape in specs.get((source.key, source.operation.backward), ()):
        local = [n // _degree(axes, mesh) for n, axes in zip(shape, candidate, strict=True)]
        if f"[{','.join(map(str, local))}]" in types:
            spec = candidate
            used = {axis.partition(":")[0] for axes in candidate for axis in axes}
            for axis, degree in mesh.items():
                fits = any(
                    not axes and n % degree == 0 for n, axes in zip(shape, candidate, strict=True)
                )
                if axis not in used and degree > 1 and fits:
                    replicated.append((axis, size * len(members) * (degree - 1) // degree))
            break
    return LiveValue(
        name=f"backward of {name}" if name and source.operation.backward else name,
        source=source,
        bytes=size * len(members),
        count=len(members),
        shape=types,
        spec=spec,
        replicated=tuple(replicated),
    )


def _degree(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    degree = 1
    for axis in axes:
        name, _, piece = axis.partition(":")
        degree *= int(piece.partition(")")[2]) if piece else mesh.get(name, 1)
    return degree
