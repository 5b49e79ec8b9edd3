"""Values that live at the peak of a compiled program's memory, by source line.

The text of a compiled program is in the order of its schedule. A value lives from the instruction
that makes it to the last that takes it; views, tuples and loops hand on what they are given, and
an update in place takes no new memory. What a loop's body needs at its own peak is added where the
loop stands. Arguments live for as long as the program runs.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.diagnosis.edits import Spec
from shardlib.diagnosis.program import Argument, TracedFunction
from shardlib.diagnosis.rows import Index, Row, local_shape, without
from shardlib.diagnosis.source import Source, read_source, value_name
from shardlib.untrusted.data import JsonObject
from shardlib.verification.hlo import (
    Computation,
    HloError,
    Instruction,
    array_bytes,
    arrays,
    elements,
)

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
            in_place = "dynamic-update-slice" in instruction.name.replace("_", "-")
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
        # what stands beside the result are its operands; a copy has the result first
        parts = parts[: 1 if instruction.opcode == "copy-start" else 2][-1:]
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
    index: Index,
    function: TracedFunction | None,
    shardings: JsonObject,
    rows: Sequence[Row] = (),
) -> tuple[int, tuple[LiveValue, ...]]:
    """(bytes of temporaries at the peak, values that live there, the largest first).

    Args:
        rows: of the program's collectives, which say how their results are sharded.
    """
    peak = _Reader(index).peak(index.module.entry)
    described = _Described(index, function, shardings, rows)
    groups: dict[object, list[tuple[Instruction, Source]]] = defaultdict(list)
    for instruction in peak.live:
        source = described.source(instruction)
        key = (source.key, source.operation) if source.user else instruction.name
        groups[key, _own_bytes(instruction)].append((instruction, source))
    values = [described.value(members) for members in groups.values()]
    return peak.bytes, tuple(sorted(values, key=lambda value: -value.bytes))


class _Described:
    """What the program calls the values of a compiled one, where they are made, and how sharded."""

    def __init__(
        self,
        index: Index,
        function: TracedFunction | None,
        shardings: JsonObject,
        rows: Sequence[Row],
    ) -> None:
        self.index, self.function = index, function
        self.mesh = dict(function.mesh) if function else {}
        self.rows = {name: row for row in rows for name in row.instructions}
        #: (operation, pass) or (line, pass) -> (sharding, shape) of values there.
        self.specs: dict[object, list[tuple[Spec, tuple[int, ...]]]] = defaultdict(list)
        for value in shardings.get("values", ()):
            source = read_source(value["location"])
            entry = tuple(tuple(axes) for axes in value["spec"]), tuple(value["shape"])
            for key in _keys(source):
                self.specs[key].append(entry)

    def source(self, instruction: Instruction) -> Source:
        """The line that a value is for: where it is made, or what a loop writes there, or, of a
        copy of an argument, where it is used.
        """
        row = self.rows.get(instruction.name)
        if row is not None and row.source.user:
            return row.source
        sources = (find(instruction.name) for find in (self.index.stacked, self.index.made))
        return next((s for s in sources if s.user), self.index.source(instruction))

    def value(self, members: Sequence[tuple[Instruction, Source]]) -> LiveValue:
        """Values of one line and size as one."""
        instruction, source = members[0]
        size, name = _own_bytes(instruction), value_name(source.user)
        name = f"backward of {name}" if name and source.operation.backward else name
        aliased = _aliases(instruction)
        parts = [
            part
            for number, part in enumerate(elements(instruction.shape))
            if number not in aliased and not _ELSEWHERE.search(part)
        ]
        types = re.sub(r"\{[^{}]*\}", "", ", ".join(parts[:4]))
        candidates = [
            *self._of_row(instruction),
            *(e for k in _keys(source) for e in self.specs[k]),
        ]
        argument = self._argument(instruction.name)
        if argument is not None:
            name, candidates = argument.name, [(argument.spec, argument.shape)]
        spec, shape = self._fitting(types, candidates) or (None, ())
        replicated = list[tuple[str, int]]()
        used = {axis.partition(":")[0] for axes in spec or () for axis in axes}
        for axis, degree in self.mesh.items() if spec else ():
            fits = any(not a and n % degree == 0 for n, a in zip(shape, spec or (), strict=True))
            if axis not in used and degree > 1 and fits:
                replicated.append((axis, size * len(members) * (degree - 1) // degree))
        return LiveValue(
            name=name,
            source=source,
            bytes=size * len(members),
            count=len(members),
            shape=types,
            spec=spec,
            replicated=tuple(replicated),
        )

    def _fitting(
        self, types: str, candidates: Sequence[tuple[Spec, tuple[int, ...]]]
    ) -> tuple[Spec, tuple[int, ...]] | None:
        """The sharding with which a value has one of the shapes of a result type, or as many
        elements, which compilers arrange otherwise, or with the turns of a loop before them.
        """
        shapes = [dims for _, dims in arrays(types)]
        for fits in (
            lambda local, dims: local == dims,
            lambda local, dims: math.prod(local) == math.prod(dims),
            lambda local, dims: math.prod(local) == math.prod(dims[1:]),
        ):
            for spec, shape in candidates:
                local = local_shape(shape, spec, self.mesh)
                if any(dims and fits(local, dims) for dims in shapes):
                    return spec, shape
        return None

    def _of_row(self, instruction: Instruction) -> list[tuple[Spec, tuple[int, ...]]]:
        """What a collective makes: the value as it is needed, or a gathered operand."""
        row = self.rows.get(instruction.name)
        if row is None or row.meeting is None:
            return []
        contraction = row.meeting.contraction
        return [
            (row.meeting.needed, row.meeting.value.shape),
            *(
                (without(operand.spec, row.axes), operand.shape)
                for operand in (contraction.operands if contraction else ())
            ),
        ]

    def _argument(self, name: str) -> Argument | None:
        """The argument that a value is a copy of."""
        parameter = self.index.argument(name)
        number = parameter and re.fullmatch(r"args\[(\d+)\]", parameter.op_name)
        return self.function.arguments[int(number[1])] if self.function and number else None


def _keys(source: Source) -> list[object]:
    """What values are found by: the operation, and the line."""
    backward, frame = source.operation.backward, source.user
    return [(source.key, backward), *([(frame.key[:2], backward)] if frame else [])]
