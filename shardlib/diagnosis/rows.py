"""One row per collective of a compiled program: its source line, the two shardings that met, and
whether it is inherent in what the program computes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardlib.diagnosis.edits import LAYOUTS, Spec
from shardlib.diagnosis.overlap import Overlap
from shardlib.diagnosis.program import Argument, TracedFunction
from shardlib.diagnosis.source import (
    NOWHERE,
    Frame,
    FrameTable,
    Source,
    path,
    read_source,
    shown,
    text_of,
    value_name,
)
from shardlib.layout import MeshShape
from shardlib.untrusted.data import JsonObject
from shardlib.verification.hlo import (
    BITS,
    Computation,
    HloError,
    Instruction,
    Module,
    array_bytes,
    arrays,
    elements,
)
from shardlib.verification.traffic import (
    InstructionTraffic,
    Traffic,
    result_shape,
    wire_bytes,
)

# --------------------------------------------------------------------------------------------------
# Meetings: what Shardy says.


@dataclass(frozen=True, kw_only=True)
class ValueOrigin:
    """Where a value comes from.

    Attributes:
        name: what the program calls it; "" where that is not known.
        source: the operation that makes it; `NOWHERE` for an argument.
        argument: its number among the program's arguments; None where it is not one.
        spec: how it is sharded there.
        dims: of the argument, that its dims are; None for one that is of none.
    """

    name: str
    source: Source
    argument: int | None
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    dims: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """An operation whose partial sums are added: a matmul or a reduction.

    Attributes:
        operands: its operands, with their shardings.
        dims: of each operand, those that are summed over.
        chooses: whether it is a reduction of a value and its index at once, as an argmax is.
    """

    source: Source
    operands: tuple[ValueOrigin, ...]
    dims: tuple[tuple[int, ...], ...]
    chooses: bool


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Two shardings of a value that meet, or partial sums of it.

    Attributes:
        value: the value, as it is made.
        produced, needed: its shardings.
        reduced: the mesh axes over which partial sums are added; () for a reshard.
        users: operations that take it.
        contraction: whose partial sums they are.
        count: how often they meet in one call.
        computed: whether they meet in an operation that XLA's partitioner computes: `produced` is
            the sharding of its operand, `needed` the same without the dims that it works along.
        result: the shape of what an operation that takes it makes, where a device may make a part
            of that of a part of the operand: a sort of rows; () for others.
        part: the sharding of the operand with which each does.
        parts: numbers of the arguments of which the value is made element by element.
    """

    value: ValueOrigin
    produced: Spec
    needed: Spec
    reduced: tuple[str, ...]
    source: Source
    users: tuple[Source, ...]
    contraction: Contraction | None
    count: int
    computed: bool
    result: tuple[int, ...]
    part: Spec
    parts: tuple[int, ...]

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes along which devices communicate."""
        if self.reduced:
            return frozenset(self.reduced)
        moved = set[str]()
        for produced, needed in zip(self.produced, self.needed, strict=True):
            moved |= set(produced) ^ set(needed)
        return frozenset(axis.partition(":")[0] for axis in moved)


def read_meetings(shardings: JsonObject, function: TracedFunction) -> tuple[Meeting, ...]:
    """The meetings that `shardings.read_shardings` listed; without those that move nothing."""
    meetings = list[Meeting]()
    for entry in shardings.get("meetings", ()):
        produced, needed = _spec(entry["made"]), _spec(entry["needed"])
        if produced == needed and not entry["reduced"]:
            continue
        contraction = entry["contraction"]
        meetings.append(
            Meeting(
                value=_origin(entry["origin"], function),
                produced=produced,
                needed=needed,
                reduced=tuple(entry["reduced"]),
                source=read_source(entry["location"]),
                count=entry["count"],
                computed=entry["op"] == "computed",
                result=tuple(entry["result"]),
                part=_spec(entry.get("part", entry["needed"])),
                parts=tuple(entry.get("parts", ())),
                users=tuple(
                    user
                    for listed in entry["users"]
                    for user in (read_source(listed["location"]),)
                    if user.user or listed["op"] != "sdy.sharding_constraint"
                ),
                contraction=contraction
                and Contraction(
                    source=read_source(contraction["location"]),
                    operands=tuple(_origin(o, function) for o in contraction["operands"]),
                    dims=tuple(tuple(dims) for dims in contraction["dims"]),
                    chooses=contraction["chooses"],
                ),
            )
        )
    return tuple(meetings)


def uses(argument: int, meetings: Iterable[Meeting]) -> Iterator[Frame]:
    """Frames of the operations that take an argument, where shardings meet.

    Args:
        argument: its number.
    """
    for meeting in meetings:
        of_value = argument in (meeting.value.argument, *meeting.parts)
        contraction = meeting.contraction
        operands = contraction.operands if contraction else ()
        for operand in operands:
            if contraction and operand.argument == argument:
                yield from (*contraction.source.frames, *operand.source.frames)
        for source in (*meeting.users, meeting.source, meeting.value.source) if of_value else ():
            yield from source.frames


def _spec(data: Sequence[Sequence[str]]) -> Spec:
    return tuple(tuple(axes) for axes in data)


def _origin(entry: JsonObject, function: TracedFunction) -> ValueOrigin:
    source = read_source(entry.get("location"))
    argument = entry.get("argument") if entry.get("op") == "argument" else None
    return ValueOrigin(
        name=named(source) if argument is None else function.arguments[argument].name,
        source=source,
        argument=argument,
        dims=tuple(entry["dims"]),
        shape=tuple(entry["shape"]),
        dtype=entry["dtype"],
        spec=_spec(entry["spec"]),
    )


def named(source: Source) -> str:
    """What the program calls the value of an operation."""
    name = value_name(source.user)
    return f"backward of {name}" if name and source.operation.backward else name


# --------------------------------------------------------------------------------------------------
# Collectives of the compiled program.


@dataclass(frozen=True, kw_only=True)
class Row:
    """Collectives of a compiled program that come from one operation of the user's.

    Attributes:
        kind: "all-gather", "all-reduce", ...
        axes: mesh axes of the user's mesh; () where the groups are not a product of axes.
        bytes: that a device sends in all executions.
        count: executions.
        seconds: on the links of the topology, one after the other.
        exposed: seconds that no other work hides in the compiler's schedule; None where the
            compiler estimates no times.
        overlap: what it hides behind, or why it does not: one sentence.
        source: the operation of the user's program.
        meeting: the shardings that met; None where Shardy lists none for it.
        dtypes: of the elements that are sent.
        widened: whether these are float32, and the program's own have 16 bits.
        cause: a word for why it is there, `CAUSES`.
        reason: the same as a sentence.
        inherent: whether what the program computes needs it, given its arguments' shardings; None
            where that is not known.
        warnings: what the compiler said of it.
        instructions: its instructions in the compiled program.
        operand: what the first of them sends, there.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    count: int
    seconds: float
    exposed: float | None
    overlap: str
    source: Source
    meeting: Meeting | None
    dtypes: tuple[str, ...]
    cause: str = ""
    reason: str = ""
    inherent: bool | None = None
    warnings: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    operand: str = ""
    widened: bool = False


@dataclass
class Index:
    """The instructions of a compiled program: the computation that each is in, who uses it, and
    where it comes from.
    """

    module: Module
    table: FrameTable
    where: dict[str, tuple[Instruction, Computation]] = field(default_factory=dict)
    users: dict[str, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    callers: dict[str, Instruction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for computation in self.module.computations.values():
            for instruction in computation.instructions:
                self.where[instruction.name] = (instruction, computation)
                if "calls" in instruction.called:
                    self.callers.setdefault(instruction.called["calls"], instruction)
                for operand in instruction.operands:
                    self.users[operand].append(instruction)

    def own(self, instruction: Instruction) -> Source:
        return self.table.source(instruction.rest, instruction.op_name)

    def source(self, instruction: Instruction, element: int | None = None) -> Source:
        """The source of a collective: its own, that of the result or the operand of one element
        where several were combined, or of what its operands are made of.
        """
        own = self.own(instruction)
        if element is not None:
            ends = (user for user in self.users[instruction.name] if user.opcode.endswith("-done"))
            taken = next(
                (
                    user
                    for end in (instruction, *ends)
                    for user in self.users[end.name]
                    if user.opcode == "get-tuple-element"
                    and user.attribute("index") == str(element)
                ),
                None,
            )
            origins = [
                *([self.own(taken)] if taken else []),
                *(self.made(name) for name in instruction.operands[element : element + 1]),
                *([self.needed(taken.name)] if taken else []),
            ]
            source = next((origin for origin in origins if origin.user), None)
            if source is not None:
                return source
        if own.user:
            return own
        around = (*map(self.made, instruction.operands), self.needed(instruction.name))
        return next((source for source in around if source.user), own)

    def needed(self, name: str) -> Source:
        """The source of the nearest reader of a value that has one, other than the value's own."""
        key, waiting, seen = self.own(self.where[name][0]).key, [name], set[str]()
        while waiting and len(seen) < 24:
            for user in self.users[waiting.pop(0)]:
                source = self._source_of(user)
                if source.user and source.key != key:
                    return source
                if user.name not in seen:
                    seen.add(user.name)
                    waiting.append(user.name)
        return NOWHERE

    def _readers(self, instruction: Instruction) -> Iterator[Instruction]:
        waiting, seen = [instruction.name], set[str]()
        while waiting and len(seen) < 24:
            name = waiting.pop(0)
            for user in self.users[name]:
                if user.name not in seen:
                    seen.add(user.name)
                    yield user
                    if user.opcode.endswith("-done") or user.opcode in _VIEWS:
                        waiting.append(user.name)

    def made(self, name: str, loop: Frame | None = None) -> Source:
        """The source of a value, or of the nearest of its operands that has one.

        Args:
            loop: whose own operations, that slice what it goes over and stack what it makes, are
                passed over.
        """
        waiting, seen = [name], set[str]()
        while waiting and len(seen) < 24:
            current = waiting.pop(0)
            if current in seen or current not in self.where:
                continue
            seen.add(current)
            instruction, body = self.where[current]
            source = self._source_of(instruction)
            if source.user and source.user != loop:
                return source
            waiting += instruction.operands
            if instruction.opcode == "parameter" and body.name in self.callers:
                waiting.append(self.callers[body.name].operands[int(instruction.literal)])
        return NOWHERE

    def argument(self, name: str) -> Instruction | None:
        """The program's argument that a value is a copy of, made by a fusion or not."""
        while name in self.where:
            instruction, body = self.where[name]
            called = self.module.computations.get(instruction.called.get("calls", ""))
            if instruction.opcode == "parameter":
                if body.name == self.module.entry:
                    return instruction
                caller = self.callers.get(body.name)
                name = caller.operands[int(instruction.literal)] if caller else ""
            elif called and called.root:
                name = called.root.name
            elif instruction.opcode.removesuffix("-start").removesuffix("-done") in _COPIES:
                name = instruction.operands[0]
            else:
                return None
        return None

    def stacked(self, name: str) -> Source:
        """The source of what a loop writes, turn by turn, into a buffer that it is given."""
        readers = self._readers(self.where[name][0])
        aliases = [name, *(reader.name for reader in readers if reader.opcode in _VIEWS)]
        for tuple_ in (user for alias in aliases for user in self.users[alias]):
            for loop in (user for user in self.users[tuple_.name] if user.opcode == "while"):
                body = self.module.computations.get(loop.called.get("body", ""))
                element = next(n for n, o in enumerate(tuple_.operands) if o in aliases)
                for user in body.instructions if body else ():
                    if user.attribute("index") != str(element) or user.opcode != _ELEMENT:
                        continue
                    for value in self._written(user):
                        source = self.made(value, self.own(loop).user)
                        return source if source.user else self.own(loop)
        return NOWHERE

    def _written(self, buffer: Instruction) -> Iterator[str]:
        """What is written into a buffer."""
        for user in self._readers(buffer):
            called = self.module.computations.get(user.called.get("calls", ""))
            for inner in called.instructions if called else (user,):
                shapes = [i.shape.partition("{")[0] for i in (inner, buffer)]
                if inner.opcode == "dynamic-update-slice" and shapes[0] == shapes[1]:
                    yield inner.operands[1]

    def packed(self, instruction: Instruction) -> tuple[str, ...]:
        """The arrays that a collective moves end to end as one, as XLA for GPUs combines them."""
        if len(instruction.operands) != 1 or instruction.operands[0] not in self.where:
            return ()
        producer, _ = self.where[instruction.operands[0]]
        called = self.module.computations.get(producer.called.get("calls", ""))
        root = called.root if called else producer
        if root is None or root.opcode != "concatenate":
            return ()
        matching = len(producer.operands) == len(root.operands)
        present = all(name in self.where for name in producer.operands)
        return producer.operands if matching and present else ()

    def is_widened(self, name: str) -> bool:
        """Whether a value is one of 16 bits that is converted to float32."""
        if name not in self.where:
            return False
        instruction, computation = self.where[name]
        while instruction.opcode in ("bitcast", "copy", "fusion", "reshape", "transpose"):
            called = self.module.computations.get(instruction.called.get("calls", ""))
            operand = computation.by_name.get(instruction.operands[0])
            inner = called.root if called else operand
            if inner is None:
                return False
            instruction, computation = inner, called or computation
        operand = computation.by_name.get((*instruction.operands, "")[0])
        return (
            instruction.opcode == "convert"
            and operand is not None
            and instruction.shape.startswith("f32")
            and operand.shape.startswith(("bf16", "f16"))
        )

    def _source_of(self, instruction: Instruction) -> Source:
        own = self.own(instruction)
        if own.user or instruction.opcode != "fusion":
            return own
        called = self.module.computations.get(instruction.called.get("calls", ""))
        inside = [self.own(i) for i in called.instructions[::-1]] if called else []
        return next((source for source in inside if source.user), own)


_ELEMENT = "get-tuple-element"
#: Opcodes whose result has what they were given.
_COPIES = frozenset({"bitcast", "copy", "convert", "reshape", "transpose"})
_VIEWS = frozenset({"bitcast", "copy", "get-tuple-element", "reshape", "convert", "transpose"})


def read_rows(
    index: Index,
    traffic: Traffic,
    overlaps: Mapping[str, Overlap],
    *,
    mesh: MeshShape,
    names: Mapping[str, str],
    meetings: Sequence[Meeting],
) -> tuple[Row, ...]:
    """The rows of a compiled program, the most bytes first; their bytes are those of the program.

    Args:
        mesh: in shardlib's axes, `names` are the user's for them.
    """
    taken = Counter[int]()
    parts: dict[Any, list[Row]] = defaultdict(list)
    by_line: dict[tuple[str, int], list[Meeting]] = defaultdict(list)
    for meeting in meetings:
        operands = meeting.contraction.operands if meeting.contraction else ()
        sources = (operand.source for operand in operands)
        places = (meeting.source, meeting.value.source, *meeting.users, *sources)
        for place in {source.key[1][:2] for source in places if source.key}:
            by_line[place].append(meeting)
    for item in traffic.found:
        instruction, _ = index.where[item.name]
        hidden = overlaps[item.name]
        parts_sent = _elements(index, instruction, item)
        for element, (source, size, share, dtype, operand) in enumerate(parts_sent):
            row = Row(
                kind=item.kind,
                axes=tuple(names[axis] for axis in item.axes),
                bytes=wire_bytes(item.kind, size, item.members) * item.count,
                count=item.count,
                seconds=hidden.seconds * share,
                exposed=None if hidden.exposed is None else hidden.exposed * share,
                overlap=hidden.sentence,
                source=source,
                meeting=None,
                dtypes=(dtype,) if dtype else item.dtypes,
                instructions=(item.name,),
                operand=operand,
            )
            key, lines, sizes = source.key, index.own(instruction).key, dict(_sizes(mesh, names))
            nearby = by_line[key[1][:2]] if key is not None and source.user else meetings
            meeting = None
            if lines is not None and not index.own(instruction).user:  # a library's own line
                row = replace(row, source=index.own(instruction))
                meeting = _match(row, size, by_line[lines[1][:2]], sizes, taken)
            if meeting is None:
                row = replace(row, source=source)
                meeting = _match(row, size, nearby, sizes, taken)
            if meeting is None and source.user is None:
                meeting = _at_a_line(row, meetings)
            taken[id(meeting)] += 1
            source = row.source
            if meeting is not None:
                source = _place(source, meeting, row.kind)
            elif row.kind == "all-gather" and _moved_only(index, instruction, operand):
                reader = index.needed(item.name)
                source = reader if reader.user else source
            widened = row.dtypes == ("f32",) and (
                any(map(index.is_widened, instruction.operands[element : element + 1]))
                or (meeting is not None and BITS.get(hlo_dtype(meeting.value.dtype)) == 16)
            )
            key = (
                row.kind,
                row.axes,
                source.key or operand,
                source.operation,
                id(meeting) if meeting else None,
                widened,
            )
            parts[key].append(replace(row, source=source, meeting=meeting, widened=widened))
    return tuple(sorted(map(_joined, parts.values()), key=lambda row: -row.bytes))


def _sizes(mesh: MeshShape, names: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    return ((name, mesh[axis]) for axis, name in names.items())


def _joined(rows: Sequence[Row]) -> Row:
    first = rows[0]
    estimated = [row.exposed for row in rows if row.exposed is not None]
    return replace(
        first,
        bytes=sum(row.bytes for row in rows),
        count=sum(row.count for row in rows),
        seconds=sum(row.seconds for row in rows),
        exposed=sum(estimated) if len(estimated) == len(rows) else None,
        dtypes=tuple(sorted({dtype for row in rows for dtype in row.dtypes})),
        instructions=tuple(name for row in rows for name in row.instructions),
        overlap=max(rows, key=lambda row: row.exposed or 0.0).overlap,
    )


def _moved_only(index: Index, instruction: Instruction, operand: str) -> bool:
    """Whether a collective has the name of what makes its operand, and computes nothing of it."""
    source = index.own(instruction)
    computed = _COMPUTED.search(source.operation.primitive)
    return source.user is not None and not computed and index.made(operand).key == source.key


def _elements(
    index: Index, instruction: Instruction, item: InstructionTraffic
) -> Iterator[tuple[Source, int, float, str, str]]:
    """(source, bytes, share, dtype, operand) of each array that a collective moves."""
    try:
        parts = [part for part in elements(result_shape(instruction)) if array_bytes(part)]
    except HloError:
        parts = []
    sizes = [array_bytes(part) for part in parts]
    cut = item.kind == "all-to-all" and len(parts) == item.members  # one array, cut up
    if len(parts) < 2 or sum(sizes) != item.bytes or cut:
        packed = {
            name: array_bytes(index.where[name][0].shape) for name in index.packed(instruction)
        }
        if sum(packed.values()) != item.bytes:
            yield index.source(instruction), item.bytes, 1.0, "", (*instruction.operands, "")[0]
            return
        for name, size in packed.items():
            yield index.made(name), size, size / item.bytes, "", name
        return
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        dtype = arrays(part)[0][0]
        operand = instruction.operands[min(number, len(instruction.operands) - 1)]
        yield index.source(instruction, number), size, size / item.bytes, dtype, operand


# --------------------------------------------------------------------------------------------------
# Rows and meetings.

_KINDS_OF_REDUCTIONS = ("all-reduce", "reduce-scatter")


#: Operations that XLA's partitioner computes with collectives of its own choice.
_COMPUTED = re.compile(r"gather|scatter|sort|slice|pad|top_k|fft|window|concatenate|rev")


def _match(
    row: Row,
    size: int,
    meetings: Sequence[Meeting],
    sizes: Mapping[str, int],
    taken: Mapping[int, int],
) -> Meeting | None:
    """The meeting that a collective carries out: of the same operation, axes and size.

    Args:
        taken: by id, how many collectives were matched with each.
    """
    key, is_sum = row.source.key, row.kind in _KINDS_OF_REDUCTIONS

    def fitting(value: ValueOrigin, *specs: Spec) -> bool:
        dtypes = value.dtype, *row.dtypes  # compilers gather what a matmul takes in its own
        return any(size in _device_sizes(value.shape, dtype, specs, sizes) for dtype in dtypes)

    def score(meeting: Meeting) -> float:
        produced = {axis.partition(":")[0] for dim in meeting.produced for axis in dim}
        gathered = row.kind == "all-gather" and any(
            fitting(operand, without(operand.spec, row.axes))
            for operand in (meeting.contraction.operands if meeting.contraction else ())
            if set(row.axes) <= {axis for dim in operand.spec for axis in dim}
        )
        gets = not (meeting.reduced or produced & set(row.axes))
        if row.kind == "all-gather" and gets and not gathered:  # which gathers nothing
            return 0.0
        specs = meeting.produced, meeting.needed
        if row.kind == "all-gather":  # of which each device may take a part
            specs = *specs, without(meeting.produced, row.axes)
        fits = gathered or fitting(meeting.value, *specs)
        sums = is_sum == bool(meeting.reduced) or gathered
        if row.source.user is None:  # the compiler lost the line
            points = 8.0 - 0.5 * bool(taken[id(meeting)])
            return points * (set(row.axes) == meeting.axes and fits and sums)
        places = [meeting.source, meeting.value.source, *meeting.users]
        if meeting.contraction:
            places += [operand.source for operand in meeting.contraction.operands]
        call = row.source.operation.primitive.startswith("jit(")  # stands for all that is in it
        same = key is not None and any(
            source.key == key or (call and source.key and source.key[1] == key[1])
            for source in places
        )
        line = key is not None and any(
            source.key is not None and source.key[1][:2] == key[1][:2] for source in places
        )
        if set(row.axes) - meeting.axes and meeting.axes - set(row.axes):
            own = any(source.key == key for source in (meeting.source, *meeting.users))
            computed = own and _COMPUTED.search(row.source.operation.primitive)
            return 4.0 + fits - 0.5 * bool(taken[id(meeting)]) if computed else 0.0
        if not same and not line:
            return 0.0
        points = 4.0 * same + 1.0 * line + 2.0 * (set(row.axes) == meeting.axes) + 2.0 * sums
        origin = meeting.contraction.source if meeting.contraction else meeting.source
        if is_sum and origin.operation.recomputed and not row.source.operation.recomputed:
            return 0.0
        points += 3.0 * (row.source.operation.backward == origin.operation.backward)
        # partial sums of what XLA computes come from the operand of that
        points += is_sum and bool(meeting.result)
        return points + 3.0 * fits - 0.5 * bool(taken[id(meeting)])

    best = max(meetings, key=score, default=None)
    return best if best is not None and score(best) >= 3.5 else None


def _at_a_line(row: Row, meetings: Sequence[Meeting]) -> Meeting | None:
    """The meeting that a collective without a line carries out, where those of its axes and of its
    elements are at one line.
    """
    is_sum = row.kind in _KINDS_OF_REDUCTIONS
    alike = [m for m in meetings if set(row.axes) <= m.axes and (is_sum or not m.reduced)]
    alike = [m for m in alike if hlo_dtype(m.value.dtype) in row.dtypes] or alike
    lines = {shown(_place(row.source, meeting, row.kind)) for meeting in alike}
    return alike[0] if len(lines) == 1 else None


def without(spec: Spec, axes: Sequence[str]) -> Spec:
    """A sharding without mesh axes and parts of them."""
    return tuple(tuple(a for a in dim if a.partition(":")[0] not in axes) for dim in spec)


def _place(source: Source, meeting: Meeting, kind: str) -> Source:
    """The source of a collective: where a value is needed in another sharding than it has, or,
    where the compiler lost the line, where the shardings meet.
    """
    contraction = meeting.contraction
    if contraction is not None and meeting.reduced and kind == "all-gather":
        return contraction.source if contraction.source.user else source
    is_layout = meeting.source.operation.primitive in LAYOUTS
    needing = (meeting.source,) if is_layout else meeting.users
    place = next((place for place in needing if place.user), NOWHERE)
    moved = not meeting.reduced and not meeting.computed and kind not in _KINDS_OF_REDUCTIONS
    if moved and place.user:  # the compiler may name what makes the value
        lines = {frame.key[:2] for frame in place.frames}
        is_layout = place.operation.primitive in LAYOUTS  # maybe in a function of the user's
        return source if is_layout and source.user and source.user.key[:2] in lines else place
    if source.user is not None:
        return source
    places = (*meeting.users, meeting.source, meeting.value.source)
    return next((place for place in places if place.user), source)


def _device_sizes(
    shape: Sequence[int], dtype: str, specs: Iterable[Spec], sizes: Mapping[str, int]
) -> set[int]:
    """Bytes per device of a value, in any of its shardings."""
    size = math.prod(shape) * BITS.get(hlo_dtype(dtype), 32) // 8

    return {size // shards_of(spec, sizes) for spec in specs}


def local_shape(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """What a device has of a value."""
    return tuple(n // shards_of((axes,), sizes) for n, axes in zip(shape, spec, strict=True))


def shards_of(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Into how many shards a sharding cuts a value; an axis may be a part of one, "data:(1)2"."""
    parts = (axis.partition(":") for axes in spec for axis in axes)
    return math.prod(
        int(piece.partition(")")[2]) if piece else sizes.get(name, 1) for name, _, piece in parts
    )


def hlo_dtype(dtype: str) -> str:
    """XLA's name of an element type of MLIR."""
    if dtype.startswith("complex"):
        return "c128" if "64" in dtype else "c64"
    if match := re.match(r"(u?)int(\d+)|b?float(\d+)|bool", dtype):  # NumPy's
        kind = "u" if match[1] else "s" if match[2] else "bf" if dtype[0] == "b" else "f"
        return "pred" if dtype == "bool" else kind + (match[2] or match[3])
    return "pred" if dtype == "i1" else re.sub(r"^i(\d+)$", r"s\1", dtype).replace("ui", "u")


# --------------------------------------------------------------------------------------------------
# Warnings of the compiler.

_LOG_LINE = re.compile(
    r"^[WE]\d{4} \S+\s+\d+ \S*(?:spmd|shard|collective)\w*\.cc:\d+\] (.*)$", re.MULTILINE
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_REMATERIALIZED = re.compile(
    r"[Ii]nvoluntary full rematerialization.* from sharding (\{.*?\}) to (\{.*?\})"
    r" (?:efficiently|without).*?(?:HLO operation:? %\S+ = (\w+\[[\d,]*\])|$)"
)


def with_warnings(
    rows: Iterable[Row], log: str, index: Index, mesh: Mapping[str, int]
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Rows with what the compiler said of their operations, and what it said of no row's.

    Args:
        log: the compiler's streams.
    """
    said: dict[str, list[str]] = defaultdict(list)
    for message in dict.fromkeys(_LOG_LINE.findall(log)):
        name = match[1] if (match := _OP_NAME.search(message)) else ""
        if remat := _REMATERIALIZED.search(message):
            made, needed, shape = remat.groups()
            said[path(name) or shape].append(
                f"involuntary full rematerialization: {shape or 'a value'} is replicated on its way"
                f" from {made} to {needed}"
            )
        elif name:
            said[path(name)].append(message[:300])
    joined = list[Row]()
    for row in rows:
        operations = (index.where[name][0].op_name for name in row.instructions)
        names = {row.source.name, *map(path, operations)}
        if (met := row.meeting) is not None:  # a loop's value has no name in a warning
            shapes = (local_shape(met.value.shape, s, mesh) for s in (met.produced, met.needed))
            names |= {f"{hlo_dtype(met.value.dtype)}[{','.join(map(str, s))}]" for s in shapes}
        joined.append(replace(row, warnings=tuple(t for n in said if n in names for t in said[n])))
    texts = {text for row in joined for text in row.warnings}
    others = [text for entries in said.values() for text in entries if text not in texts]
    return tuple(joined), tuple(text for text in others if "rematerialization" in text)


# --------------------------------------------------------------------------------------------------
# Causes.

#: More memory than so many times what the program takes without it is no cure.
MOST_MEMORY = 1.05
#: Word -> what it means.
CAUSES: Mapping[str, str] = {
    "gradient": "a gradient is summed over the batch",
    "weights": "a parameter that is stored sharded is used whole",
    "partial-sums": "a contraction runs over a dim that is sharded",
    "scalar": "a number is computed from a sharded array",
    "written": "the program asks for it itself",
    "planned": "the plan of the program has it",
    "constraint": "a sharding constraint of the program asks for another sharding",
    "operation": "an operation needs its operand in another sharding",
    "result": "a result of the program is needed in another sharding",
    "partitioner": "the partitioner computes the operation with it",
}
#: What partial sums are of, by a word of the operation's name.
_SUMS = (("dot", "contraction of"), ("scatter", "sum by index of"), ("gather", "lookup in"))
#: Collectives that a program writes itself, in a manual region.
_WRITTEN = (
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "psum_scatter", "reduce_scatter"),
    *("all_gather", "all_gather_invariant", "all_to_all", "ragged_all_to_all", "ppermute"),
)


def explain(rows: Iterable[Row], function: TracedFunction) -> tuple[Row, ...]:
    """Rows with their causes."""
    batch = batch_axes(function)
    return tuple(
        replace(row, cause=cause, reason=reason, inherent=inherent)
        for row in rows
        for cause, reason, inherent in (_cause(row, function, batch),)
    )


def batch_dim(argument: Argument) -> int:
    """The dim of data that is the batch's: the first, or of whole numbers the first that is
    sharded, as the first may be of microbatches.
    """
    of_tokens = argument.dtype.startswith(("int", "uint"))
    return next((dim for dim, axes in enumerate(argument.spec) if axes and of_tokens), 0)


def batch_axes(function: TracedFunction) -> frozenset[str]:
    """The mesh axes that shard the batch. Arguments that come back as results with the same shape
    are state and not data; of the others those of whole numbers say it, or, where there are none,
    those that are not parts of a tree, and of them those with the first dim of a result.
    """
    arguments = function.arguments
    shapes = {(result.shape, result.dtype) for result in function.results}
    first_dims = {result.shape[0] for result in function.results if result.shape}
    data = [a for a in arguments if a.shape and (a.shape, a.dtype) not in shapes]
    for chosen in (
        [a for a in data if a.dtype.startswith(("int", "uint"))],
        [a for a in data if "[" not in a.name and "." not in a.name and a.shape[0] in first_dims],
        [a for a in data if "[" not in a.name and "." not in a.name],
        data,
        [a for a in arguments if a.shape],
    ):
        if chosen:
            return frozenset(axis for a in chosen for axis in a.spec[batch_dim(a)])
    return frozenset()


def _cause(
    row: Row, function: TracedFunction, batch: frozenset[str]
) -> tuple[str, str, bool | None]:
    meeting, operation = row.meeting, row.source.operation
    over = _listed(row.axes)
    if meeting is not None and not set(row.axes) & meeting.axes:  # of the partitioner's choice
        meeting = replace(meeting, computed=True)
    if operation.primitive in _WRITTEN:
        return "written", f"the program writes {operation.primitive} over {over}", True
    if row.kind in _KINDS_OF_REDUCTIONS and meeting is not None and not meeting.value.shape:
        number, frame = _quoted(meeting.value.name) or "a value", meeting.value.source.user
        if ", " in number and frame and "=" in text_of(frame):
            number = f"a number of `{text_of(frame).partition('=')[2].strip()}`"  # not all names
        return "scalar", f"{number} is one number, summed over {over}", True
    is_sum = row.kind in _KINDS_OF_REDUCTIONS and operation.backward
    stated = meeting is not None and (
        meeting.computed or (meeting.reduced and meeting.source.operation.backward)
    )
    if is_sum and not stated and set(row.axes) <= batch and (summed := _summed(row, function)):
        gradient = f"the gradient of {_names(summed, row.source.user)}"
        return "gradient", f"{gradient} is summed over the batch, which {over} shards", True
    if meeting is None:
        return (
            "partitioner",
            f"XLA computes {operation.primitive or 'an operation'} with"
            f" {_with_article(row.kind)} over {over}",
            None,
        )
    # partial sums may be added where a layout asks for a part of them, and not where they are made
    if meeting.reduced or (is_sum and not meeting.computed and _alike(meeting, function)):
        return _reduction(row, meeting, function, batch)
    if meeting.computed:
        return _computation(row, meeting, function, batch)
    return _reshard(meeting, function, batch)


def _reduction(
    row: Row, meeting: Meeting, function: TracedFunction, batch: frozenset[str]
) -> tuple[str, str, bool | None]:
    over = _listed(meeting.reduced or row.axes)
    contraction = meeting.contraction
    multiplied = not set(row.axes) <= batch and _multiplies(meeting, function)
    parameters = [] if multiplied else _alike(meeting, function)
    source = contraction.source if contraction else meeting.source
    is_backward = row.source.operation.backward or source.operation.backward
    gathered = _gathered(row, meeting, function)
    gathers = f"`{gathered.name}` {spec_text(gathered.spec)} is gathered" if gathered else ""
    if gathered is not None and gathered.argument is not None:
        inherent = set(row.axes) <= batch and _is_large(gathered.argument, function)
        return "weights", f"{gathers} over {over} for a product with it", True if inherent else None
    if is_backward and parameters:
        of_batch = "the batch, which" if set(row.axes) <= batch else "what"
        gradient = f"the gradient of {_names(parameters, row.source.user or meeting.source.user)}"
        reason = f"{gradient} is summed over {of_batch} {over} shards"
        # rows that are added by index may be sent in the place of what they are added to
        few = (
            contraction is not None
            and "scatter" in source.operation.primitive
            and math.prod(contraction.operands[0].shape) <= math.prod(meeting.value.shape)
        )
        if row.kind != "all-gather":
            return "gradient", reason + ", for fewer rows than it has" * few, None if few else True
        gathers = gathers or "an operand of the products backward of this line is gathered"
        reason = f"{gathers} over {over}, in the place of partial sums of {gradient}"
        inherent = not few and row.bytes <= _sum_bytes(row, meeting, function)
        return "gradient", reason, True if inherent else None
    if contraction is None:
        return "partial-sums", f"partial sums of {_quoted(meeting.value.name)} are added", None
    summed = [
        (operand, [operand.spec[d] for d in dims])
        for operand, dims in zip(contraction.operands, contraction.dims, strict=True)
    ]
    operands = " and ".join(
        f"{_quoted(operand.name) or 'an operand'} {spec_text(operand.spec)}"
        for operand, _ in summed
    )
    primitive = contraction.source.operation.primitive
    what = next((text for word, text in _SUMS if word in primitive), "reduction of")
    reason = f"the {what} {operands} runs over a dim that {over} shards"
    reason += f": `{gathered.name}` is gathered" if gathered else ""
    stored = any(
        operand.argument is not None and set(meeting.reduced) <= {a for d in dims for a in d}
        for operand, dims in summed
    )
    # a table may be sharded along its other dim as well, and rows of which the largest is chosen
    stored &= "gather" not in primitive and not contraction.chooses
    few = _sends_little(row, contraction.operands, function)
    inherent = True if (stored or few) and not set(meeting.reduced) & batch else None
    return "partial-sums", reason, inherent


def _sends_little(row: Row, operands: Sequence[ValueOrigin], function: TracedFunction) -> bool:
    """Whether a device sends less than half of what it has of each operand, of which one at least
    is computed: sums of the rows of sharded logits, and not the logits.
    """
    sizes = dict(function.mesh)
    local = [max(_device_sizes(o.shape, o.dtype, (o.spec,), sizes)) for o in operands]
    return 2 * row.bytes < min(local) * row.count and any(o.argument is None for o in operands)


def _sum_bytes(row: Row, meeting: Meeting, function: TracedFunction) -> float:
    """Bytes that a device would send to add partial sums of a value, and a tenth."""
    value, sizes = meeting.value, dict(function.mesh)
    (size,) = _device_sizes(value.shape, value.dtype, (meeting.needed,), sizes)
    parts = math.prod(sizes.get(axis, 1) for axis in row.axes)
    return 1.1 * 2 * (1 - 1 / parts) * size * row.count


def _computation(
    row: Row, meeting: Meeting, function: TracedFunction, batch: frozenset[str]
) -> tuple[str, str, bool | None]:
    value, user = meeting.value, next(iter(meeting.users), meeting.source)
    primitive = user.operation.primitive
    dims = [dim for dim, axes in enumerate(meeting.produced) if axes and not meeting.needed[dim]]
    across = f"dim {dims[0]}" if len(dims) == 1 else f"dims {', '.join(map(str, dims))}"
    by = _listed(dict.fromkeys(a.partition(":")[0] for dim in dims for a in meeting.produced[dim]))
    return (
        "partitioner",
        f"XLA computes {primitive} across {across} of {_quoted(value.name) or 'a value'}"
        f" {spec_text(meeting.produced)}, which {by} shards, with {_with_article(row.kind)} over"
        f" {_listed(row.axes)}",
        True if _sends_little(row, [value], function) and not set(row.axes) & batch else None,
    )


def _reshard(
    meeting: Meeting, function: TracedFunction, batch: frozenset[str]
) -> tuple[str, str, bool | None]:
    value = meeting.value
    produced, needed = spec_text(meeting.produced), spec_text(meeting.needed)
    is_layout = meeting.source.operation.primitive in LAYOUTS
    user = meeting.source if is_layout else next(iter(meeting.users), NOWHERE)
    place, primitive = shown(user), user.operation.primitive
    gathered = {a for d in meeting.produced for a in d} - {a for d in meeting.needed for a in d}
    name = _quoted(value.name) or "a value"
    if value.argument is not None and (primitive not in LAYOUTS or gathered & batch):
        shown_as, shape = _quoted(named(value.source)), function.arguments[value.argument].shape
        if value.shape == shape[1:]:
            stored = f"a layer of the argument {name} is {produced}, and is needed as {needed}"
        elif shown_as and value.shape != shape:
            stored = (
                f"{shown_as}, a form of the argument {name}, is {produced} and needed as {needed}"
            )
        else:
            stored = f"{name} is an argument sharded {produced}, and is needed as {needed}"
        reason = f"{stored} at {place}" if place else stored
        inherent = bool(gathered) and gathered <= batch and _is_large(value.argument, function)
        return "weights", reason, True if inherent else None
    origin = shown(value.source)
    made_at = f" where it is made at {origin}" if origin else ""
    if primitive in LAYOUTS:
        stored = "an argument sharded " if value.argument is not None else ""
        reason = (
            f"{name} is {stored}{produced}{made_at}, and the layout at {place} asks for {needed}"
        )
        return "constraint", reason, None
    if user.user is None and not is_layout:
        return "result", f"{name} is {produced}{made_at}, and is a result in {needed}", None
    reason = f"{name} is {produced}{made_at}, and {primitive} at {place} needs it as {needed}"
    return "operation", reason, None


def argument_bytes(function: TracedFunction) -> list[int]:
    """Bytes per device of each argument."""
    sizes = dict(function.mesh)
    return [
        next(iter(_device_sizes(a.shape, a.dtype, (a.spec,), sizes))) for a in function.arguments
    ]


def _is_large(number: int, function: TracedFunction) -> bool:
    """Whether an argument is a part of a tree, as parameters are, or so large that it costs more of
    the arguments' memory than a cure may to store it whole.
    """
    sizes, argument = dict(function.mesh), function.arguments[number]
    local = argument_bytes(function)
    (whole,) = _device_sizes(argument.shape, argument.dtype, ((),), sizes)
    is_leaf = "[" in argument.name or "." in argument.name
    return is_leaf or whole - local[number] > (MOST_MEMORY - 1) * sum(local)


#: Parameters that may be meant are named if they are no more.
MOST_NAMES = 3
#: Words in names of what an optimizer keeps, which has the shapes of parameters.
_MOMENTS = {"opt_state", "mu", "nu", "trace", "optimizer", "opt"}


def _alike(meeting: Meeting, function: TracedFunction) -> list[Argument]:
    """Arguments of which a value of the backward pass may be the gradient: of its shape in any
    order of dims, without the layer's dim or not.
    """
    shape = sorted(n for n in meeting.value.shape if n > 1)
    return [
        argument
        for argument in function.arguments
        if argument.dtype.startswith(("float", "bfloat"))
        and shape in (sorted(n for n in argument.shape if n > 1), sorted(argument.shape[1:]))
    ]


def _multiplies(meeting: Meeting, function: TracedFunction) -> bool:
    """Whether partial sums are of a product with a parameter, which comes back as a result: those
    of the gradient of an activation, where a parameter's are of a product of two activations.
    """
    contraction, state = meeting.contraction, {(r.shape, r.dtype) for r in function.results}
    if contraction is None or "dot" not in contraction.source.operation.primitive:
        return False
    for operand, dims in zip(contraction.operands, contraction.dims, strict=True):
        if operand.argument is not None:
            argument = function.arguments[operand.argument]
            summed = [operand.dims[dim] for dim in dims]
            if (argument.shape, argument.dtype) in state and summed != [batch_dim(argument)]:
                return True
    return False


def _size(row: Row, function: TracedFunction) -> float:
    """Bytes that a device has of what one execution makes; not a number where axes are unknown."""
    members = math.prod(dict(function.mesh)[axis] for axis in row.axes)
    return row.bytes / row.count / wire_bytes(row.kind, 1, members) if row.axes else math.nan


def _summed(row: Row, function: TracedFunction) -> list[Argument]:
    """Arguments of the size of what a collective sums, in any of the types that it sends."""
    sizes, size = dict(function.mesh), _size(row, function)
    return [
        argument
        for argument in function.arguments
        if argument.dtype.startswith(("float", "bfloat"))
        and any(
            size in _device_sizes(argument.shape[n:], dtype, (spec, without(spec, row.axes)), sizes)
            for n in (0, 1)  # without the layer's dim
            for dtype in (argument.dtype, *row.dtypes)
            for spec in (argument.spec[n:],)
        )
    ]


def _gathered(row: Row, meeting: Meeting, function: TracedFunction) -> ValueOrigin | None:
    """The operand of a contraction that an all-gather gathers, by its size; None where unclear."""
    if row.kind != "all-gather" or meeting.contraction is None:
        return None
    sizes, size = dict(function.mesh), _size(row, function)
    fitting = [
        operand
        for operand in meeting.contraction.operands
        for spec in (without(operand.spec, row.axes),)
        for dtypes in ((operand.dtype, *row.dtypes),)
        if any(size in _device_sizes(operand.shape, dtype, (spec,), sizes) for dtype in dtypes)
    ]
    return fitting[0] if len(fitting) == 1 and fitting[0].name else None


def _names(arguments: Sequence[Argument], frame: Frame | None) -> str:
    """What a line is likely to mean of arguments: those that it names, without the state of an
    optimizer; layers of a list as one, "`params['layers'][*]['up']`".
    """
    words = set(re.findall(r"\w+", text_of(frame))) if frame else set[str]()
    keys = {a.name: {*re.findall(r"\w+", a.name)} for a in arguments}
    names = [name for name in keys if not _MOMENTS & keys[name]] or [*keys]
    names = [name for name in names if "[" in name or "." in name] or names
    best = max(len(keys[name] & words) for name in names)
    names = [name for name in names if len(keys[name] & words) == best]
    layers = defaultdict[str, list[str]](list)
    for name in names:
        layers[re.sub(r"\[\d+\]", "[*]", name)].append(name)
    texts = [layer if len(members) > 1 else members[0] for layer, members in layers.items()]
    return " or ".join(map(_quoted, texts)) if len(texts) <= MOST_NAMES else "a parameter"


def spec_text(spec: Spec) -> str:
    """A sharding as text.

    >>> spec_text((("data",), (), ("model", "expert")))
    '[data, -, model·expert]'
    """
    return "[" + ", ".join("·".join(axes) or "-" for axes in spec) + "]"


def _with_article(kind: str) -> str:
    """
    >>> _with_article("all-reduce")
    'an all-reduce'
    """
    return f"an {kind}" if kind.startswith("all") else f"a {kind}"


def _listed(axes: Iterable[str]) -> str:
    return ", ".join(axes) or "groups that are no axes of the mesh"


def _quoted(name: str) -> str:
    return f"`{name}`" if name else ""
