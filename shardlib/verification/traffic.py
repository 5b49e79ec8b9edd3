"""Collectives that a compiled program runs in one step: how often, how large, along which mesh
axes and why.

Follows calls from the entry, weighs the bodies of loops by their trip counts and the branches of
conditionals by how often they are taken (where the text does not say, the branch that moves most
always is), and counts an asynchronous pair once. TPU programs hide reduce-scatters
in fusions called `all-reduce-scatter`, and in permutes.

>>> traffic = read_traffic('''HloModule m, num_partitions=8
...
... ENTRY %main (p: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   ROOT %r = f32[8,4] all-reduce(%p), replica_groups=[2,4]<=[8], metadata={op_name="args[0]"}
... }
... ''', MeshShape(data=2, tensor=4), arguments=["params.w"])
>>> found = traffic.collectives[0]
>>> found.kind, found.axes, found.bytes, found.count, found.cause
('all-reduce', ('tensor',), 128, 1, 'params.w')
>>> wire_bytes("all-reduce", 800, members=8)
1400.0
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.pricing import collective_seconds
from shardlib.layout import KINDS, Collective, MeshShape
from shardlib.machines.topology import Topology
from shardlib.verification.hlo import (
    Computation,
    HloError,
    Instruction,
    Module,
    array_bytes,
    arrays,
    axes_of_groups,
    axes_of_pairs,
    elements,
    parse,
    replica_groups,
    source_target_pairs,
)


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
class InstructionTraffic:
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

    found: tuple[InstructionTraffic, ...]
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

    found: tuple[InstructionTraffic, ...] = ()
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


def as_reduce_scatters(
    collectives: tuple[InstructionTraffic, ...], mesh: MeshShape
) -> tuple[InstructionTraffic, ...]:
    """Collectives, with the permutes of windowed matmuls as reduce-scatters.

    Permutes of a matmul that are of one size, over one axis, and no multiple of those of one
    reduce-scatter are left as they are.
    """
    alike: dict[tuple[tuple[str, ...], int, tuple[str, ...], str], list[InstructionTraffic]] = (
        defaultdict(list)
    )
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
    windows, scatters = set[int](), list[InstructionTraffic]()
    for (axes, *_), permutes in alike.items():
        members = mesh[axes[0]]
        times, left = divmod(sum(permute.count for permute in permutes), members + 1)
        if not left:
            windows |= {id(permute) for permute in permutes}
            scatters.append(
                replace(permutes[0], kind="reduce-scatter", members=members, count=times)
            )
    return (*(collective for collective in collectives if id(collective) not in windows), *scatters)


def once(
    traffic: Traffic, mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> dict[str, float]:
    """Seconds of one execution of each collective on the links, by the name of its instruction.

    Args:
        order: of the mesh axes on these links; by default the usual one.
    """
    return {
        item.name: collective_seconds(
            item.kind, item.axes, item.members, float(item.bytes), mesh, topology, order
        )
        for item in traffic.found
    }


def timed(
    traffic: Traffic, mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> tuple[Collective, ...]:
    """The collectives of a program, alike ones counted together as in `Traffic.collectives`, with
    the seconds of all their executions.

    Args:
        order: of the mesh axes on these links; by default the usual one.
    """
    seconds, each = defaultdict[Collective, float](float), once(traffic, mesh, topology, order)
    for item in traffic.found:
        key = Collective(
            kind=item.kind, axes=item.axes, bytes=item.bytes, count=0, cause=item.op_name
        )
        seconds[key] += item.count * each[item.name]
    return tuple(
        replace(collective, seconds=seconds[replace(collective, count=0)])
        for collective in traffic.collectives
    )


# --------------------------------------------------------------------------------------------------
# Collectives of a compiled program that overlap with matrix products.
#
# A compiler that hides a collective splits it in two, a start and a done, and schedules work
# between them. The text of a compiled program is in the order of its schedule, so what stands
# between is what the collective hides behind. A collective that is not split is waited for.

_CALLED = re.compile(r"gemm|matmul|cublas|conv", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """One collective of a schedule, as often as it stands in the text: loops are not counted out.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes that its groups span; () where they are not product of axes.
        bytes: that a device holds of the result.
        split: whether it has a start and a done.
        matmuls: kernels with matmuls between the two.
        cycles: that the compiler estimates for all between the two; 0 where it estimates nothing.
        operation: what of the user's program it comes from.
        name: of its instruction.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    split: bool
    matmuls: int
    cycles: int
    operation: str
    name: str = ""


def scheduled(text: str | Module, mesh: MeshShape) -> tuple[Scheduled, ...]:
    """The collectives of a compiled program, in the order of its text."""
    reader = ScheduleReader(module=parse(text) if isinstance(text, str) else text, mesh=mesh)
    return tuple(
        collective
        for body in reader.module.computations.values()
        for collective in reader.collectives(body)
    )


@dataclass
class ScheduleReader:
    """Reads what overlaps in a program."""

    module: Module
    mesh: MeshShape
    known: dict[str, bool] = field(default_factory=dict[str, bool])

    def collectives(self, body: Computation) -> Iterator[Scheduled]:
        """The collectives that stand in one computation."""
        for start, instruction in enumerate(body.instructions):
            inner = self._collective(instruction)
            if inner is None:
                continue
            between: list[Instruction] = []
            split = instruction.opcode.endswith("-start")
            if split:
                done = next(
                    (
                        i
                        for i in range(start + 1, len(body.instructions))
                        if instruction.name in body.instructions[i].operands
                        and body.instructions[i].opcode.endswith("-done")
                    ),
                    start,
                )
                between = list(body.instructions[start + 1 : done])
            kind = inner.opcode.removesuffix("-start")
            yield Scheduled(
                kind=kind,
                axes=self._axes(inner, kind),
                bytes=_bytes(inner),
                split=split,
                matmuls=sum(map(self.multiplies, between)),
                cycles=sum(map(estimated_cycles, between)),
                operation=inner.op_name,
                name=inner.name,
            )

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """The collective that an instruction is, or that it starts."""
        if instruction.opcode.removesuffix("-start") in KINDS:
            return instruction
        if instruction.opcode == "async-start":
            body = self.module.computations.get(instruction.called.get("calls", ""))
            return next((i for i in body.instructions if i.opcode in KINDS), None) if body else None
        return None

    def _axes(self, instruction: Instruction, kind: str) -> tuple[str, ...]:
        try:
            if kind == "collective-permute":
                return (
                    axes_of_pairs(
                        source_target_pairs(
                            instruction.attribute("source_target_pairs"), self.mesh.devices
                        ),
                        self.mesh,
                    )
                    or ()
                )
            return (
                axes_of_groups(
                    np.asarray(
                        replica_groups(instruction.attribute("replica_groups"), self.mesh.devices)
                    ),
                    self.mesh,
                )
                or ()
            )
        except HloError:
            return ()

    def multiplies(self, instruction: Instruction) -> bool:
        """Returns whether an instruction computes a matmul."""
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call":
            return bool(_CALLED.search(instruction.attribute("custom_call_target")))
        name = instruction.called.get("calls", "")
        if not name or name not in self.module.computations:
            return False
        if name not in self.known:
            self.known[name] = False
            self.known[name] = any(
                map(self.multiplies, self.module.computations[name].instructions)
            )
        return self.known[name]


def _bytes(instruction: Instruction) -> int:
    try:
        return array_bytes(result_shape(instruction))
    except HloError:
        return 0


# --------------------------------------------------------------------------------------------------
# Causes of collectives: the arguments of the program that they move, or the operation of the user's
# program that they come from. An array is followed through what only moves or recasts it, and
# through the values that a loop carries, back to an argument.

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


# --------------------------------------------------------------------------------------------------
# The walk over a compiled program.

#: What the runtime that joins TPU slices calls its transfers. A program for several slices is that
#: of one slice: it numbers the devices of the slice, and what crosses to other slices is a pair of
#: send and receive.
ACROSS_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


#: Kinds that XLA has beyond those of `KINDS`, and the one that each is counted as.
ALSO = {"ragged-all-to-all": "all-to-all"}


#: Scope of loops that run where the routing of tokens is skewed, and are not in the cost of a step
#: (`shardlib.lowering.experts`).
OVERFLOW = "shardlib_overflow"


#: Opcodes whose called computation is applied to single elements.
APPLIED = frozenset(
    {
        "reduce",
        "reduce-window",
        "scatter",
        "select-and-scatter",
        "sort",
        "map",
        *KINDS,
        "all-reduce-start",
        "reduce-scatter-start",
    }
)


def read_traffic(
    text: str | Module,
    mesh: MeshShape,
    arguments: Sequence[str] = (),
    slices: Sequence[Sequence[int]] = (),
) -> Traffic:
    """Reads a compiled program."""
    return _TrafficReader(
        parse(text) if isinstance(text, str) else text, mesh, arguments, slices
    ).read()


class _TrafficReader:
    """One walk over a program; remembers what it has read of each computation."""

    def __init__(
        self,
        module: Module,
        mesh: MeshShape,
        arguments: Sequence[str],
        slices: Sequence[Sequence[int]],
    ):
        self.module, self.mesh = module, mesh
        #: Mesh positions [slices, devices that the program numbers].
        self.positions = np.array(
            (
                slices
                if len(slices) > 1 and module.partitions == len(slices[0])
                else [range(mesh.devices)]
            ),
            np.int64,
        )
        self.problems: list[str] = list(module.problems)
        self.causes = Causes(module, arguments)
        self.devices = self.positions.shape[1]
        self.known: dict[str, Executions] = {}
        #: The computation that is read, where more is known of it; and its conditionals whose
        #: branches were counted for all turns of their loop.
        self.scope: Scope | None = None
        self.counted: dict[str, tuple[int, ...]] = {}

    def collective(
        self, instruction: Instruction, kind: str, result: Instruction, body: Computation
    ) -> Executions:
        try:
            shape = result_shape(result)
            if kind == "collective-permute":
                pairs = source_target_pairs(
                    instruction.attribute("source_target_pairs"), self.devices
                )
                axes, members = (
                    axes_of_pairs(self.positions[0][pairs], self.mesh),
                    (2 if len(pairs) else 1),
                )
            else:
                groups = replica_groups(instruction.attribute("replica_groups"), self.devices)
                axes, members = (
                    axes_of_groups(self.positions[0][groups], self.mesh),
                    groups.shape[1],
                )
            if members < 2:
                return Executions()
            if axes is None:
                self.problems.append(
                    f"the groups of {instruction.name} are not a product of mesh axes:"
                    f" {instruction.attribute('replica_groups')[:80]}"
                )
            collective = InstructionTraffic(
                kind=kind,
                bytes=array_bytes(shape),
                dtypes=tuple(sorted({dtype for dtype, _ in arrays(shape)})),
                axes=axes or (),
                members=members,
                count=1,
                op_name=self.causes.of(instruction, body),
                name=result.name,
            )
        except HloError as error:
            self.problems.append(f"{instruction.name}: {error}")
            return Executions()
        return Executions((collective,))

    def across_slices(self, instruction: Instruction) -> Executions:
        """A collective between the devices that have the same number in every slice."""
        word = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
        kind = ACROSS_SLICES.get(word[1]) if word else None
        axes = axes_of_groups(self.positions.T, self.mesh)
        try:
            if kind is None or axes is None or len(self.positions) < 2:
                raise HloError(
                    "an unknown transfer between slices,"
                    f" {instruction.attribute('frontend_attributes')[:120]}"
                )
            shape = elements(instruction.shape)[0]
            collective = InstructionTraffic(
                kind=kind,
                bytes=array_bytes(shape),
                dtypes=tuple(sorted({dtype for dtype, _ in arrays(shape)})),
                axes=axes,
                members=len(self.positions),
                count=1,
                op_name=short_name(instruction.op_name),
                name=instruction.name,
            )
        except HloError as error:
            self.problems.append(f"{instruction.name}: {error}")
            return Executions()
        return Executions((collective,))

    def read(self) -> Traffic:
        if self.module.partitions not in (1, self.devices):
            self.problems.append(
                f"the program runs on {self.module.partitions} devices, the mesh {self.mesh} has"
                f" {self.mesh.devices}"
            )
        if (entry := self.module.computations.get(self.module.entry)) is not None:
            self.scope = Entry(self.module, entry)
        cost = self.computation(self.module.entry) if self.module.entry else Executions()
        return Traffic(
            found=as_reduce_scatters(cost.found, self.mesh),
            cycles=cost.cycles,
            aliased=self.module.aliased,
            problems=tuple(dict.fromkeys(self.problems)),
        )

    def computation(self, name: str) -> Executions:
        if name not in self.known:
            self.known[name] = (
                Executions()
            )  # a computation that calls itself is not HLO; this ends the walk
            body = self.module.computations.get(name)
            if body is None:
                self.problems.append(f"the computation {name!r} is called and not there")
            else:
                self.known[name] = self.known[name] + self.total(body)
        return self.known[name]

    def total(self, body: Computation) -> Executions:
        collectives: list[InstructionTraffic] = []
        cycles = 0
        for instruction in body.instructions:
            cost = self.instruction(instruction, body)
            collectives += cost.found
            cycles += cost.cycles
        return Executions(tuple(collectives), cycles)

    def instruction(self, instruction: Instruction, body: Computation) -> Executions:
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in KINDS or kind in ALSO:
            if continued(instruction, body):
                return Executions()
            return self.collective(instruction, ALSO.get(kind, kind), instruction, body)
        if kind.startswith("collective-") and not kind.endswith("-done"):
            self.problems.append(f"a collective of the unknown kind {kind!r}: {instruction.name}")
        if opcode == "recv" and "_xla_megascale_transfer_type=" in instruction.rest:
            return self.across_slices(instruction)
        if opcode == "while":
            return self.loop(instruction, body)
        if opcode == "conditional":
            return self.conditional(instruction, body)
        executions = Executions((), estimated_cycles(instruction))
        if opcode == "fusion":
            return executions + self.fusion(instruction, body)
        if opcode in APPLIED or opcode.endswith(("-done", "-update")):
            return executions
        inside = [
            self.computation(called)
            for word, called in instruction.called.items()
            if word in ("calls", "to_apply")
        ]
        return sum(inside, executions)

    def conditional(self, instruction: Instruction, body: Computation) -> Executions:
        if instruction.name in self.counted:
            return Executions()
        in_scope = self.scope is not None and self.scope.computation is body
        counts = taken(instruction, [self.scope] if in_scope and self.scope else (), self.module)
        if counts is not None:
            return self.branches(instruction, counts)
        return max(
            (self.computation(branch) for branch in instruction.branches),
            key=lambda cost: (cost.bytes, cost.cycles),
            default=Executions(),
        )

    def branches(self, conditional: Instruction, counts: Sequence[int]) -> Executions:
        """The branches of a conditional, each as often as it is taken."""
        return sum(
            (
                self.computation(branch) * count
                for branch, count in zip(conditional.branches, counts, strict=True)
                if count
            ),
            Executions(),
        )

    def turns(self, loop: Instruction, around: Computation, trips: int) -> Executions:
        """The body of a loop, as often as it runs."""
        name, outside = loop.called.get("body", ""), self.scope
        body, conditional_cost = self.module.computations.get(name), Executions()
        if name in self.known or body is None or outside is None:
            return self.computation(name) * trips if name else Executions()
        if outside.computation is around:
            asking = [
                instruction
                for instruction in body.instructions
                if instruction.opcode == "conditional"
            ]
            scopes = turns(loop, body, outside, trips, self.module) if asking else ()
            for conditional in asking:
                if (counts := taken(conditional, scopes, self.module)) is not None:
                    self.counted[conditional.name] = counts
                    conditional_cost += self.branches(conditional, counts)
            self.scope = AnyTurn(self.module, body, loop, outside)
        cost = self.computation(name) * trips + conditional_cost
        self.scope = outside
        return cost

    def loop(self, instruction: Instruction, body: Computation) -> Executions:
        self.causes.carry(instruction, body)
        trips = trip_count(instruction, body, self.module)
        inside = self.turns(instruction, body, 1 if trips is None else trips)
        if trips is None and OVERFLOW in instruction.op_name:
            return Executions()
        if trips is None and (inside.found or inside.cycles):
            self.problems.append(
                f"the trip count of the loop {instruction.name} is unknown; it is counted once"
            )
        return inside

    def fusion(self, instruction: Instruction, body: Computation) -> Executions:
        """Collectives inside a fusion; an all-reduce inside one that is called all-reduce-scatter
        is a reduce-scatter of the fusion's result.
        """
        name = instruction.called.get("calls", "")
        inner = self.module.computations.get(name)
        if inner is None:
            self.problems.append(
                f"the fusion {instruction.name} calls {name!r}, which is not there"
            )
            return Executions()
        if name.startswith("all-reduce-scatter"):
            reductions = [i for i in inner.instructions if i.opcode == "all-reduce"]
            if len(reductions) == 1:
                return self.collective(reductions[0], "reduce-scatter", instruction, body)
        return Executions(self.computation(name).found, 0)


#: What the TPU compiler writes where it has no estimate: the largest integer of 64 bits.
NO_ESTIMATE = 2**63 - 1


def estimated_cycles(instruction: Instruction) -> int:
    match = re.search(r'"estimated_cycles":\s*"?(\d+)', instruction.rest)
    return int(match[1]) if match and int(match[1]) < NO_ESTIMATE else 0
