"""Which collectives does a compiled program run in one step, how often, how large, along which mesh
axes, and why?

Follows calls from the entry, weighs the bodies of loops by their trip counts, takes the branch of a
conditional that moves most, and counts an asynchronous pair once. TPU programs hide reduce-scatters
in fusions called `all-reduce-scatter`.

>>> traffic = read_traffic('''HloModule m, num_partitions=8
...
... ENTRY %main (p: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="args[0]"}
... }
... ''', MeshShape(data=2, tensor=4), arguments=["params.w"])
>>> traffic.collectives
(Collective(kind='all-reduce', axes=('tensor',), bytes=128, count=1, seconds=0.0, cause='params.w'),)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardlib.axes import MeshShape
from shardlib.collective import KINDS, Collective
from shardlib.verification.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)
from shardlib.verification.hlo.hlo import (
    Computation,
    HloError,
    Instruction,
    Module,
    array_bytes,
    arrays,
    elements,
    parse,
)
from shardlib.verification.hlo.loops import trip_count

#: Kinds that XLA has beyond those of `KINDS`, and the one that each is counted as.
ALSO = {"ragged-all-to-all": "all-to-all"}
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
#: Scope of loops that run where the routing of tokens is skewed, and are not in the cost of a step
#: (`shardlib.lowering.experts.overflow_rounds`).
OVERFLOW = "shardlib_overflow"
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


def wire_bytes(kind: str, size: int, members: int) -> float:
    """Bytes that a device sends for one collective, by ring algorithms (NVIDIA/nccl-tests
    doc/PERFORMANCE.md).

    Args:
        kind: one of `KINDS`.
        size: bytes that a device holds of the result.
        members: devices of a group.
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
        axes: mesh axes; empty where the groups are no product of axes.
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
    """What a program communicates and how long its compiler thinks it computes.

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


def read_traffic(
    text: str | Module,
    mesh: MeshShape,
    arguments: Sequence[str] = (),
    slices: Sequence[Sequence[int]] = (),
) -> Traffic:
    """Reads a compiled program.

    Args:
        text: `compiled.as_text()`, or what was read of it.
        mesh: the mesh whose devices run it, in order.
        arguments: names of the program's arguments, for the causes of collectives.
        slices: for several TPU slices, the mesh positions of the devices of each, in order.
    """
    return _Reader(parse(text) if isinstance(text, str) else text, mesh, arguments, slices).read()


@dataclass(frozen=True)
class _Cost:
    found: tuple[Found, ...] = ()
    cycles: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.found + other.found, self.cycles + other.cycles)

    def __mul__(self, times: int) -> _Cost:
        return _Cost(
            tuple(replace(item, count=item.count * times) for item in self.found),
            self.cycles * times,
        )

    @property
    def bytes(self) -> int:
        return sum(item.bytes * item.count for item in self.found)


class _Reader:
    """One walk over a program; remembers what it has read of each computation."""

    def __init__(
        self,
        module: Module,
        mesh: MeshShape,
        arguments: Sequence[str],
        slices: Sequence[Sequence[int]],
    ):
        self.module, self.mesh, self.arguments = module, mesh, arguments
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
        self.known: dict[str, _Cost] = {}
        self.carried: dict[str, dict[int, str]] = {}
        self.devices = self.positions.shape[1]

    def read(self) -> Traffic:
        if self.module.partitions not in (1, self.devices):
            self.problems.append(
                f"the program runs on {self.module.partitions} devices, the mesh {self.mesh} has"
                f" {self.mesh.devices}"
            )
        cost = self.computation(self.module.entry) if self.module.entry else _Cost()
        return Traffic(
            found=cost.found,
            cycles=cost.cycles,
            aliased=self.module.aliased,
            problems=tuple(dict.fromkeys(self.problems)),
        )

    def computation(self, name: str) -> _Cost:
        if name not in self.known:
            self.known[name] = (
                _Cost()
            )  # a computation that calls itself is no HLO; this ends the walk
            body = self.module.computations.get(name)
            if body is None:
                self.problems.append(f"the computation {name!r} is called and not there")
            else:
                self.known[name] = self.known[name] + self.total(body)
        return self.known[name]

    def total(self, body: Computation) -> _Cost:
        found: list[Found] = []
        cycles = 0
        for instruction in body.instructions:
            cost = self.instruction(instruction, body)
            found += cost.found
            cycles += cost.cycles
        return _Cost(tuple(found), cycles)

    def instruction(self, instruction: Instruction, body: Computation) -> _Cost:
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in KINDS or kind in ALSO:
            if _continued(instruction, body):
                return _Cost()
            return self.collective(instruction, ALSO.get(kind, kind), instruction, body)
        if kind.startswith("collective-") and not kind.endswith("-done"):
            self.problems.append(f"a collective of the unknown kind {kind!r}: {instruction.name}")
        if opcode == "recv" and "_xla_megascale_transfer_type=" in instruction.rest:
            return self.across_slices(instruction)
        if opcode == "while":
            return self.loop(instruction, body)
        if opcode == "conditional":
            return max(
                (self.computation(branch) for branch in instruction.branches),
                key=lambda cost: (cost.bytes, cost.cycles),
                default=_Cost(),
            )
        own = _Cost((), _cycles(instruction))
        if opcode == "fusion":
            return own + self.fusion(instruction, body)
        if opcode in APPLIED or opcode.endswith(("-done", "-update")):
            return own
        inside = [
            self.computation(called)
            for word, called in instruction.called.items()
            if word in ("calls", "to_apply")
        ]
        return sum(inside, own)

    def loop(self, instruction: Instruction, body: Computation) -> _Cost:
        called = instruction.called
        self.carry(instruction, body)
        inside = self.computation(called["body"]) if "body" in called else _Cost()
        trips = trip_count(instruction, body, self.module)
        if trips is None and OVERFLOW in instruction.op_name:
            return _Cost()
        if trips is None:
            if inside.found or inside.cycles:
                self.problems.append(
                    f"the trip count of the loop {instruction.name} is unknown; it is counted once"
                )
            trips = 1
        return inside * trips

    def fusion(self, instruction: Instruction, body: Computation) -> _Cost:
        """Collectives inside a fusion; an all-reduce inside one that is called all-reduce-scatter
        is a reduce-scatter of the fusion's result.
        """
        name = instruction.called.get("calls", "")
        inner = self.module.computations.get(name)
        if inner is None:
            self.problems.append(
                f"the fusion {instruction.name} calls {name!r}, which is not there"
            )
            return _Cost()
        if name.startswith("all-reduce-scatter"):
            reductions = [i for i in inner.instructions if i.opcode == "all-reduce"]
            if len(reductions) == 1:
                return self.collective(reductions[0], "reduce-scatter", instruction, body)
        return _Cost(self.computation(name).found, 0)

    def collective(
        self, instruction: Instruction, kind: str, result: Instruction, body: Computation
    ) -> _Cost:
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
                return _Cost()
            if axes is None:
                self.problems.append(
                    f"the groups of {instruction.name} are no product of mesh axes:"
                    f" {instruction.attribute('replica_groups')[:80]}"
                )
            found = Found(
                kind=kind,
                bytes=array_bytes(shape),
                dtypes=tuple(sorted({dtype for dtype, _ in arrays(shape)})),
                axes=axes or (),
                members=members,
                count=1,
                op_name=self.cause(instruction, body),
                name=result.name,
            )
        except HloError as error:
            self.problems.append(f"{instruction.name}: {error}")
            return _Cost()
        return _Cost((found,))

    def across_slices(self, instruction: Instruction) -> _Cost:
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
            found = Found(
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
            return _Cost()
        return _Cost((found,))

    def cause(self, instruction: Instruction, body: Computation) -> str:
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
        found = re.fullmatch(r"args\[(\d+)\]", instruction.op_name)
        if found and int(found[1]) < len(self.arguments):
            return self.arguments[int(found[1])]
        return short_name(instruction.op_name)

    def argument(self, instruction: Instruction, body: Computation) -> str:
        """Follows the one array that an instruction moves back to an argument of the program; empty
        where it is none.
        """
        for _ in range(32):
            if instruction.opcode == "parameter":
                number = int(instruction.literal) if instruction.literal.isdigit() else -1
                known = body.name == self.module.entry and 0 <= number < len(self.arguments)
                return self.arguments[number] if known else ""
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


def _continued(instruction: Instruction, body: Computation) -> bool:
    """Whether this is a later piece of a collective that TPU fusions carry along: only the piece
    that starts it counts.

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


#: What the TPU compiler writes where it has no estimate: the largest integer of 64 bits.
NO_ESTIMATE = 2**63 - 1


def _cycles(instruction: Instruction) -> int:
    found = re.search(r'"estimated_cycles":\s*"?(\d+)', instruction.rest)
    return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else 0


def by_kind_and_axes(found: Iterable[Found]) -> dict[tuple[str, tuple[str, ...]], int]:
    """Result bytes of a step by kind and mesh axes."""
    totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for item in found:
        totals[item.kind, item.axes] += item.bytes * item.count
    return dict(totals)
