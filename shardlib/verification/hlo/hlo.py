"""A reader of optimised HLO, the text of a compiled program, from the CPU, GPU and TPU compilers.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardlib.verification.hlo.shapes import HloError

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
        """How many results of the program take the place of an argument."""
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
        raise HloError("this is no instruction")
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
