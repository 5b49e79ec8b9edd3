"""A reader of optimised HLO, the text of a compiled program, from the CPU, GPU and TPU compilers:
types, groups of devices, instructions.

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

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardlib.layout import MESH_AXES, MeshShape

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []


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
        match = re.search(rf"(?:^|[,\s]){re.escape(name)}=", self._blank)
        return _value(self.rest, match.end()) if match else ""

    @functools.cached_property
    def _blank(self) -> str:
        return _blank_strings(self.rest)

    @functools.cached_property
    def called(self) -> Mapping[str, str]:
        """Attribute -> computation that it names."""
        return {
            word: match[1]
            for word in _CALLS
            if f"{word}=" in self._blank
            and (match := re.search(rf"\b{word}=%?([\w.\-]+)", self._blank))
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
