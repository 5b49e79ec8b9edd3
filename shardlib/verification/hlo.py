"""Readers of optimised HLO: instructions, collectives with their groups, trip counts, and the
compiler's own schedule.

Collective instructions of a compiled program with their executions, and what they come to.

>>> wire_bytes("all-reduce", 800, members=8)
1400.0

Result types of HLO as text: the parts of a tuple, dtypes and dims of arrays, their bytes.

>>> elements("(f32[8,4]{1,0}, bf16[2])")
('f32[8,4]{1,0}', 'bf16[2]')
>>> arrays("(f32[8,4]{1,0}, bf16[2])"), array_bytes("(f32[8,4]{1,0}, bf16[2])")
([('f32', (8, 4)), ('bf16', (2,))], 132)

Replica groups and permutation pairs of collectives, and the mesh axes that they lie along.

XLA writes groups of devices in three forms; numbers are positions on the mesh, the first axis
major:

>>> replica_groups("{{0,1},{2,3}}", 4).tolist()
[[0, 1], [2, 3]]
>>> replica_groups("[2,2]<=[2,2]T(1,0)", 4).tolist()
[[0, 2], [1, 3]]
>>> replica_groups("mesh['a'=2,'b'=2] {'a'}", 4).tolist()
[[0, 2], [1, 3]]
>>> axes_of_groups(replica_groups("[2,2]<=[2,2]T(1,0)", 4), MeshShape(data=2, tensor=2))
('data',)

A reader of optimised HLO, the text of a compiled program, from the CPU, GPU and TPU compilers.

The text is read into computations and instructions; nothing is interpreted here. Strings with raw
braces and line breaks (the configuration of TPU kernels) belong to their instruction. What does not
parse is listed in `problems`, never guessed.

>>> module = parse('''HloModule m, num_partitions=8
...
... ENTRY %main (p: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
... }
... ''')
>>> root = module.computations["main"].root
>>> root.opcode, root.operands, root.attribute("replica_groups"), root.shape
('all-reduce', ('p',), '[2,4]<=[8]', 'f32[8,4]{1,0}')
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardlib.collective import Collective
from shardlib.layout import MESH_AXES, MeshShape

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []


def wire_bytes(kind: str, size: int, members: int) -> float:
    """Bytes that a device sends for one collective, by ring algorithms (NVIDIA/nccl-tests
    doc/PERFORMANCE.md).

    Args:
        size: bytes that a device holds of the result.
    """
    share = (members - 1) / members
    return size * {
        "all-reduce": 2 * share,
        "reduce-scatter": members - 1.0,
        "collective-permute": 1.0,
    }.get(kind, share)


#: Collectives that add up.
REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Collectives of one instruction.

    Attributes:
        kind: one of `KINDS`.
        bytes: bytes that a device holds of the result.
        dtypes: element types of the result.
        axes: mesh axes; empty where the groups are not product of axes.
        members: devices of a group; 2 for a permute.
        count: executions in one step.
        op_name: the operation of the user's program.
        name: the instruction.
    """

    kind: str
    bytes: int
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    members: int
    count: int
    op_name: str
    name: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in all executions."""
        return wire_bytes(self.kind, self.bytes, self.members) * self.count


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The communication of a program, and the computing time that its compiler estimates.

    Attributes:
        found: every collective instruction with its executions.
        cycles: the compiler's own estimate of a step, `estimated_cycles` weighted by trip counts; 0
            where it gives none.
        aliased: results that take the place of an argument.
        problems: what could not be read.
    """

    found: tuple[Found, ...]
    cycles: int
    aliased: int
    problems: tuple[str, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Alike ones counted together, the most bytes first."""
        counts: Counter[Collective] = Counter()
        for item in self.found:
            counts[
                Collective(
                    kind=item.kind, axes=item.axes, bytes=item.bytes, count=0, cause=item.op_name
                )
            ] += item.count
        merged = [replace(collective, count=count) for collective, count in counts.items()]
        return tuple(sorted(merged, key=lambda c: (-c.total_bytes, c.kind, c.axes, c.cause)))

    @property
    def reductions(self) -> tuple[tuple[str, tuple[str, ...], str, int], ...]:
        """(kind, axes, dtype, bytes of the results of a step) of every kind of reduction; of
        reductions of several dtypes at once, all of them.
        """
        sizes = Counter[tuple[str, tuple[str, ...], str]]()
        for item in self.found:
            if item.kind in REDUCTIONS:
                sizes[item.kind, item.axes, "+".join(item.dtypes)] += item.bytes * item.count
        return tuple((*key, size) for key, size in sorted(sizes.items()))


@dataclass(frozen=True)
class Executions:
    """Collectives and cycles of a part of a program, which add up and multiply by trip counts."""

    found: tuple[Found, ...] = ()
    cycles: int = 0

    def __add__(self, other: Executions) -> Executions:
        return Executions(self.found + other.found, self.cycles + other.cycles)

    def __mul__(self, times: int) -> Executions:
        return Executions(
            tuple(replace(item, count=item.count * times) for item in self.found),
            self.cycles * times,
        )

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return sum(item.bytes * item.count for item in self.found)


#: Bits of an element; tokens and opaque values have none.
BITS: Mapping[str, int] = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3fn": 8,
    "f8e4m3fnuz": 8,
    "f8e4m3b11fnuz": 8,
    "f8e5m2": 8,
    "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
    "token": 0,
    "opaque": 0,
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\]")


class HloError(ValueError):
    """A piece of text that is not HLO, or that uses a word this reader does not know."""


def elements(shape: str) -> tuple[str, ...]:
    """The parts of a tuple type, or the type itself."""
    if not shape.startswith("("):
        return (shape,)
    parts: list[str] = []
    inside = shape[1:-1] + ","
    start = depth = 0
    for position, letter in enumerate(inside):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            part = re.sub(r"/\*.*?\*/", "", inside[start:position]).strip()
            parts += [part] if part else []
            start = position + 1
    return tuple(parts)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dims) of every array of a type."""
    typed_dims: list[tuple[str, tuple[int, ...]]] = []
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", shape)):
        if dtype not in BITS:
            raise HloError(f"unknown element type {dtype!r}")
        if "<" in dims:
            raise HloError(f"a dim of {dtype}[{dims}] is not static")
        typed_dims.append((dtype, tuple(int(size) for size in dims.split(",") if size.strip())))
    return typed_dims


def array_bytes(shape: str) -> int:
    """Bytes of all arrays of a type, without padding."""
    return sum(-(-BITS[dtype] * math.prod(dims) // 8) for dtype, dims in arrays(shape))


Groups = NDArray[np.int64]

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, ?device_ids=\(((?:[^()]|\([^()]*\))*)\))? ?\{([^}]*)\}$")
_IDS = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_AXIS = re.compile(r"^'?(.*?)'?(?::\((\d+)\)(\d+))?$")


def replica_groups(text: str, devices: int) -> Groups:
    """Groups as integers [groups, members]; an empty list means everyone."""
    compact = text.strip()
    if compact in ("", "{}"):
        groups = np.arange(devices, dtype=np.int64)[None]
    elif compact.startswith("{{"):
        groups = _explicit(compact)
    elif compact.startswith("["):
        groups = _iota(compact)
    elif compact.startswith("mesh["):
        groups = _mesh(compact)
    else:
        raise HloError(f"unknown form of replica groups {text[:80]!r}")
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < devices:
        raise HloError(
            f"replica groups {text[:80]!r} name devices beyond the {devices} of the program"
        )
    return groups


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()]


def _explicit(text: str) -> Groups:
    rows = [_numbers(row) for row in re.findall(r"\{([\d,\s]+)\}", text)]
    if not rows or len({len(row) for row in rows}) != 1:
        raise HloError(f"replica groups {text[:80]!r} differ in size")
    return np.array(rows, np.int64)


def _iota(text: str) -> Groups:
    match = _IOTA.match(text.replace(" ", ""))
    if not match:
        raise HloError(f"unknown form of replica groups {text[:80]!r}")
    dims, shape, order = _numbers(match[1]), _numbers(match[2]), _numbers(match[3] or "")
    if (
        len(dims) != 2
        or math.prod(dims) != math.prod(shape)
        or (order and sorted(order) != list(range(len(shape))))
    ):
        raise HloError(f"replica groups {text[:80]!r} do not fit together")
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return (numbers.transpose(order) if order else numbers).reshape(dims)


def _mesh(text: str) -> Groups:
    """Groups along axes of a mesh; an axis may be a part of one, `'x':(2)4` is the part of size 4
    with 2 outside of it.
    """
    match = _MESH.match(text)
    if not match:
        raise HloError(f"unknown form of replica groups {text[:80]!r}")
    sizes = {
        name.strip().strip("'"): int(size)
        for name, _, size in (part.rpartition("=") for part in match[1].split(",") if part)
    }
    ids = _device_ids(match[2], math.prod(sizes.values()))
    cuts: dict[str, list[tuple[int, int]]] = {}
    named: list[tuple[str, int]] = []
    for word in (part.strip() for part in match[3].split(",") if part.strip()):
        axis = _AXIS.match(word)
        if not axis or axis[1] not in sizes:
            raise HloError(f"replica groups {text[:80]!r} name the unknown axis {word}")
        outside, size = (int(axis[2]), int(axis[3])) if axis[2] else (1, sizes[axis[1]])
        cuts.setdefault(axis[1], []).append((outside, size))
        named.append((axis[1], outside))
    shape, place = [], {}
    for name, size in sizes.items():
        done = 1
        for outside, part_size in sorted(cuts.get(name, [])):
            shape += [outside // done, part_size]
            place[name, outside] = len(shape) - 1
            done = outside * part_size
        shape.append(size // done)
    if math.prod(shape) != ids.size:
        raise HloError(f"replica groups {text[:80]!r} do not fit together")
    inner = [place[key] for key in named]
    outer = [i for i in range(len(shape)) if i not in inner]
    return (
        ids.reshape(shape).transpose(*outer, *inner).reshape(-1, math.prod(shape[i] for i in inner))
    )


def _device_ids(text: str | None, devices: int) -> Groups:
    """The device at each place of a mesh: counted, counted through transposed dims `[4,2]T(1,0)`,
    or listed.
    """
    if not text:
        return np.arange(devices, dtype=np.int64)
    counted = _IDS.match(text.replace(" ", ""))
    if not counted:
        return np.array(_numbers(text.strip("[]{}")), np.int64)
    shape, order = _numbers(counted[1]), _numbers(counted[2] or "")
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return (numbers.transpose(order) if order else numbers).reshape(-1)


def source_target_pairs(text: str, devices: int) -> Groups:
    """Pairs as integers [pairs, 2], those to oneself left out."""
    rows = [_numbers(row) for row in re.findall(r"\{([\d,\s]+)\}", text)]
    if not rows or any(len(row) != 2 or max(row) >= devices for row in rows):
        raise HloError(f"source-target pairs {text[:80]!r} are not pairs of the {devices} devices")
    pairs = np.array(rows, np.int64)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def axes_of_groups(groups: Groups, mesh: MeshShape) -> tuple[str, ...] | None:
    """The mesh axes that groups span; None where they are not product of axes.

    A group that spans a part of one axis (one physical sub-axis of fsdp) belongs to that axis.

    Args:
        groups: numbers of devices, int [groups, members].
    """
    varying = _varying(groups, mesh)
    covered = groups.shape[1] == mesh.ways(varying)
    return varying if covered or len(varying) == 1 else None


def axes_of_pairs(pairs: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """The mesh axes along which pairs of devices differ.

    Args:
        pairs: numbers of devices, int [pairs, 2].
    """
    return _varying(pairs, mesh) if pairs.size else ()


def _varying(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """Axes whose coordinate differs inside some group."""
    sizes = tuple(mesh[axis] for axis in MESH_AXES)
    places = np.unravel_index(groups, sizes)
    return tuple(
        axis for axis, place in zip(MESH_AXES, places, strict=True) if (place != place[:, :1]).any()
    )


_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_START = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}]', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAMED_MESH = re.compile(r"mesh\[[^\]]*\](?:, ?device_ids=\((?:[^()]|\([^()]*\))*\))? ?\{[^}]*\}")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: its name, without the percent sign.
        shape: its result type, as text.
        opcode: "all-gather-start", "fusion", "while", ...
        operands: names of its operands.
        literal: the text between the parentheses, which is the value of a constant and the number
            of a parameter.
        rest: its attributes, as text.
        root: whether its value is that of the computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    rest: str
    root: bool = False

    def attribute(self, name: str) -> str:
        """The text of an attribute; empty where there is none."""
        match = re.search(rf"(?:^|[,\s]){re.escape(name)}=", _blank_strings(self.rest))
        return _value(self.rest, match.end()) if match else ""

    @property
    def called(self) -> Mapping[str, str]:
        """Attribute -> computation that it names."""
        blank = _blank_strings(self.rest)
        return {
            word: match[1]
            for word in _CALLS
            if (match := re.search(rf"\b{word}=%?([\w.\-]+)", blank))
        }

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional."""
        listed = self.attribute("branch_computations")
        names = [name.strip().lstrip("%") for name in listed.strip("{}").split(",") if name.strip()]
        return tuple(names) or tuple(
            self.called[word]
            for word in ("true_computation", "false_computation")
            if word in self.called
        )

    @property
    def op_name(self) -> str:
        """The operation of the user's program that it comes from."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1].replace("\\'", "'").replace('\\"', '"') if match else ""


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value is the computation's."""
        return next(
            (i for i in self.instructions if i.root),
            self.instructions[-1] if self.instructions else None,
        )


@dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        header: the first line.
        computations: by name.
        entry: name of the first computation to run; empty where the text has none.
        problems: what did not parse, one line each.
    """

    header: str
    computations: Mapping[str, Computation]
    entry: str
    problems: tuple[str, ...]

    @property
    def partitions(self) -> int:
        """Devices that run the program."""
        counts = [
            int(match[1])
            for word in ("num_partitions", "replica_count")
            if (match := re.search(rf"\b{word}=(\d+)", self.header))
        ]
        return math.prod(counts)

    @property
    def aliased(self) -> int:
        """Returns how many results of the program take the place of an argument."""
        start = self.header.find("input_output_alias=")
        return (
            len(
                re.findall(
                    r"\{[\d, ]*\}: \(", _value(self.header, start + len("input_output_alias="))
                )
            )
            if start >= 0
            else 0
        )


def parse(text: str) -> Module:
    """Reads the text of a compiled program; never fails, see `Module.problems`."""
    computations: dict[str, Computation] = {}
    problems: list[str] = []
    entry, name, header = "", "", ""
    instructions: list[Instruction] = []
    for line in _logical_lines(text, problems):
        if line.startswith("HloModule"):
            header = line
        elif match := _HEADER.match(line):
            if name:
                problems.append(f"the computation {name} does not end")
                computations[name] = Computation(name, tuple(instructions))
            name, instructions = match[2], []
            entry = name if match[1] else entry
        elif name and line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions))
            name = ""
        elif name and line.strip():
            try:
                instructions.append(_instruction(line))
            except HloError as error:
                problems.append(f"{error}: {line.strip()[:120]}")
    if name:
        problems.append(f"the text ends inside the computation {name}")
        computations[name] = Computation(name, tuple(instructions))
    if not entry:
        problems.append("the text has no ENTRY computation")
    return Module(header, computations, entry, tuple(problems))


def _logical_lines(text: str, problems: list[str]) -> Iterator[str]:
    """Lines, with those joined that a string or a brace spans."""
    lines = iter(text.splitlines())
    for line in lines:
        if not _START.match(line) or _balanced(line):
            yield line
            continue
        joined = [line]
        for more in lines:
            joined.append(more)
            if more.rstrip().endswith(("}", ")", '"')) and _balanced("\n".join(joined)):
                break
            if len(joined) > 20_000:
                break
        logical = "\n".join(joined)
        if _balanced(logical):
            yield logical
        else:  # cut off or damaged: the line alone is lost, those after it may still be read
            problems.append(f"an instruction does not end: {line.strip()[:120]}")
            yield from (more for more in joined[1:] if _balanced(more))


def _balanced(text: str) -> bool:
    if text.count('"') % 2 == 0 and "\n" not in text and '"' not in text:
        return text.count("{") == text.count("}") and text.count("(") == text.count(")")
    bare = _STRING.sub("", text)
    return (
        '"' not in bare
        and bare.count("{") == bare.count("}")
        and bare.count("(") == bare.count(")")
    )


def _blank_strings(text: str) -> str:
    """The same text with the inside of its strings blanked, so that positions stay."""
    return (
        _STRING.sub(lambda match: '"' + " " * (len(match[0]) - 2) + '"', text)
        if '"' in text
        else text
    )


def _close(text: str, start: int) -> int:
    """Position after the bracket that closes the one at `start`."""
    depth = 0
    for mark in _MARKS.finditer(text, start):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    raise HloError("a bracket does not close")


def _value(text: str, start: int) -> str:
    """The value of an attribute: up to the next comma outside of brackets and strings; the device
    numbers of a mesh belong to it.
    """
    if named := _NAMED_MESH.match(text, start):
        return named[0]
    depth, position = 0, start
    while position < len(text):
        letter = text[position]
        if letter == '"':
            match = _STRING.match(text, position)
            position = match.end() if match else len(text)
            continue
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0 or (depth == 0 and letter == ","):
            break
        position += 1
    return text[start:position].strip()


def _instruction(line: str) -> Instruction:
    match = _START.match(line)
    if not match:
        raise HloError("this is not an instruction")
    start = match.end()
    end = _close(line, start) if line.startswith("(", start) else line.find(" ", start)
    shape = line[start:end] if end > 0 else ""
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if not opcode:
        raise HloError("there is no operation after the type")
    closed = _close(line, opcode.end() - 1)
    literal = line[opcode.end() : closed - 1]
    operands = (
        tuple(_OPERAND.findall(literal)) if "%" in literal else _bare_operands(literal, opcode[1])
    )
    return Instruction(
        name=match[2],
        shape=shape,
        opcode=opcode[1],
        operands=operands,
        literal=literal,
        rest=line[closed:].lstrip(", "),
        root=bool(match[1]),
    )


def _bare_operands(literal: str, opcode: str) -> tuple[str, ...]:
    """Operands of text that was printed without percent signs."""
    if opcode in ("constant", "parameter", "iota"):
        return ()
    return tuple(
        part.split()[-1]
        for part in re.sub(r"/\*.*?\*/|\{[^}]*\}", "", literal).split(",")
        if part.split() and not part.strip()[0].isdigit()
    )


# --------------------------------------------------------------------------------------------------
# Asynchronous collectives: what a start produces, and which part of a chain counts.


def result_shape(instruction: Instruction) -> str:
    """The type of what a collective produces; a start holds its operands beside it."""
    parts = elements(instruction.shape)
    kind = instruction.opcode.removesuffix("-start")
    if kind == instruction.opcode or not instruction.shape.startswith("("):
        return instruction.shape
    if parts and parts[0].startswith("(") and len(parts) > 1:
        return parts[1]
    if kind == "all-reduce":
        return instruction.shape
    if len(parts) < 2:
        raise HloError(
            f"the type of {instruction.opcode} holds no result: {instruction.shape[:80]}"
        )
    return parts[1]


def continued(instruction: Instruction, body: Computation) -> bool:
    """Returns whether this is a later piece of a collective that TPU fusions carry along: only the
    piece that starts it counts.

    The pieces share a `chain_id`; the first feeds a custom call AsyncCollectiveStart, the last one
    AsyncCollectiveDone.
    """
    if "chain_id=" not in instruction.attribute("frontend_attributes"):
        return False
    return not any(
        i.opcode == "custom-call"
        and instruction.name in i.operands
        and i.attribute("custom_call_target") == '"AsyncCollectiveStart"'
        for i in body.instructions
    )


# --------------------------------------------------------------------------------------------------
# Trip counts of the loops of a compiled program.
#
# The CPU and GPU compilers say so (`known_trip_count`). The TPU compiler does not: there the
# counter's bound is read off the condition (`counter < constant`), its start off the loop's
# operand, and its step off the body; a counter that is not stepped by a constant is left unknown.

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
    limit = _trip_counts_constant(high)
    return None if limit is None else (limit, _position(low))


def _outside(inner: Instruction | None, operands: list[Instruction | None]) -> Instruction | None:
    """Returns what a value inside a fusion is outside of it, when it is a parameter."""
    if (
        inner is not None
        and inner.opcode == "parameter"
        and inner.literal.isdigit()
        and int(inner.literal) < len(operands)
    ):
        return operands[int(inner.literal)]
    return inner


def _trip_counts_constant(instruction: Instruction | None) -> int | None:
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
    return _trip_counts_constant(_source(around.by_name.get(carried.operands[index]), around))


def _source(value: Instruction | None, around: Computation) -> Instruction | None:
    """Returns what a value is a copy of."""
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
    added = [_trip_counts_constant(_source(operand, scope)) for operand in operands]
    return next((step for step in added if step is not None and step > 0), None)


# --------------------------------------------------------------------------------------------------
# Whole numbers and truth values of a compiled program that follow from its text alone: counters of
# loops, what is made of them, and what conditionals ask.
#
# A *scope* is one execution of a computation: `Entry` of the program, `Turn` one turn of a loop,
# and `AnyTurn` all that is the same in every turn.

Numbers = NDArray[np.int64]
#: Elements of an array that are looked at; longer ones are not counters.
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
        """Returns what the loop begins with, or what the turn before handed on."""
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
        """Returns what the loop begins with, where every turn hands it on as it is."""
        if index is None or not _handed_on(self.computation, index):
            raise UnknownError
        return value(self.module, self.loop.operands[0], self.outside, index)


def _handed_on(body: Computation, index: int) -> bool:
    """Returns whether a loop hands on an element of what it carries as it is."""
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
        return _whole_numbers_constant(instruction)
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


def _whole_numbers_constant(instruction: Instruction) -> Numbers:
    """The elements of a constant; long ones are not in the text."""
    words = re.findall(r"-?\d+|true|false", instruction.literal)
    if len(words) != _length(instruction) or "..." in instruction.literal:
        raise UnknownError
    return np.array(
        [{"true": 1, "false": 0}.get(w) if w in ("true", "false") else int(w) for w in words]
    )


# --------------------------------------------------------------------------------------------------
# How often the branches of a conditional are taken: once, or in some of the turns of a loop.
#
# In a pipeline in one program, microbatches enter and leave in some of its ticks.

#: Turns that are followed one by one; pipelines have fewer ticks.
MOST_TURNS = 1 << 11


def turns(
    loop: Instruction, body: Computation, outside: Scope, trips: int, module: Module
) -> tuple[Turn, ...]:
    """The turns of a loop; none where there are too many to follow."""
    listed: list[Turn] = []
    for _ in range(trips if trips <= MOST_TURNS else 0):
        listed.append(Turn(module, body, loop, outside, listed[-1] if listed else None))
    return tuple(listed)


def taken(
    conditional: Instruction, scopes: Sequence[Scope], module: Module
) -> tuple[int, ...] | None:
    """Returns how often each branch of a conditional is taken; None where the text does not say."""
    branches, counts = conditional.branches, [0] * len(conditional.branches)
    if not scopes or not branches or not conditional.operands:
        return None
    try:
        for scope in scopes:
            selector = scope.computation.by_name[conditional.operands[0]]
            number = int(value(module, selector.name, scope).reshape(-1)[0])
            if selector.shape.startswith("pred"):
                number = 0 if number else 1
            counts[number if 0 <= number < len(branches) else -1] += 1
    except (UnknownError, KeyError, ValueError, TypeError, IndexError, RecursionError):
        return None
    return tuple(counts)


# --------------------------------------------------------------------------------------------------
# Reduce-scatters that the TPU compiler carries out inside of the matmul before them.
#
# Where the partial sums of a matmul are scattered, the partitioner may compute them window by
# window and pass them on in both directions of a ring meanwhile (its windowed einsum, openxla/xla
# `xla/service/spmd/dot_handler.cc`). Over n devices, n a multiple of 4, these are n permutes of a
# shard, half of them each way, and one that brings the two halves together. They do what one
# reduce-scatter does, which is what they are counted as.

#: How the operation is called that these permutes are of.
_MATMUL = "dot_general"


def as_reduce_scatters(collectives: tuple[Found, ...], mesh: MeshShape) -> tuple[Found, ...]:
    """Collectives, with the permutes of windowed matmuls as reduce-scatters.

    Permutes of a matmul that are of one size, over one axis, and no multiple of those of one
    reduce-scatter are left as they are.
    """
    alike: dict[tuple[tuple[str, ...], int, tuple[str, ...], str], list[Found]] = defaultdict(list)
    for collective in collectives:
        if (
            collective.kind == "collective-permute"
            and len(collective.axes) == 1
            and mesh[collective.axes[0]] % 4 == 0
            and collective.op_name.endswith(_MATMUL)
        ):
            alike[collective.axes, collective.bytes, collective.dtypes, collective.op_name].append(
                collective
            )
    windows, scatters = set[int](), list[Found]()
    for (axes, *_), permutes in alike.items():
        members = mesh[axes[0]]
        times, left = divmod(sum(permute.count for permute in permutes), members + 1)
        if not left:
            windows |= {id(permute) for permute in permutes}
            scatters.append(
                replace(permutes[0], kind="reduce-scatter", members=members, count=times)
            )
    return (*(collective for collective in collectives if id(collective) not in windows), *scatters)
