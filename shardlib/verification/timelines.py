"""Timelines: measured executions and collectives of compiled programs and pipeline stages.

One step is run under `jax.profiler`, which records on every platform when a device ran which
instruction of the compiled program. A tick of a pipeline ends when a stage has handed over what it
made: at the last of the hops to its neighbours, which the lowering names. So a tick begins where
the one before it ended, and the stage is busy until its last hop begins; what the hop takes,
waiting for the neighbour included, is not work. Ticks in which a stage of a program in lockstep
computes what nobody asks for are idle. No clock is put into the program: what is timed is the
program that runs otherwise.

The first device of every stage is looked at. The profiler makes a step of many small kernels
slower; the sum of the parts is the step as it ran under it.

Causes of collectives: the arguments of the program that they move, or the operation of the
user's program that they come from.

An array is followed through what only moves or recasts it, and through the values that a loop
carries, back to an argument.

>>> short_name("jit(shardlib_step)/jit(call)/while/body/layers/mlp/dot_general")
'layers/mlp/dot_general'

Collectives that a compiled program runs in one step: how often, how large, along which mesh
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
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from shardlib import _jax_compat
from shardlib.annotation.trees import Tree
from shardlib.collective import KINDS, Collective
from shardlib.cost.pricing import group_seconds
from shardlib.errors import VerificationError
from shardlib.layout import MeshShape
from shardlib.lowering.mesh import parts_of
from shardlib.lowering.pipeline.stage import HOPS
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState
from shardlib.machines.topology import Topology
from shardlib.report.timelines import BOTH, IDLE, Slice, Timeline, title, work
from shardlib.schedules import BACKWARD, FORWARD, Timetable
from shardlib.verification.hlo import (
    AnyTurn,
    Computation,
    Entry,
    Executions,
    Found,
    HloError,
    Instruction,
    Module,
    Scope,
    Traffic,
    array_bytes,
    arrays,
    as_reduce_scatters,
    axes_of_groups,
    axes_of_pairs,
    continued,
    elements,
    parse,
    replica_groups,
    result_shape,
    source_target_pairs,
    taken,
    trip_count,
    turns,
)

# --------------------------------------------------------------------------------------------------
# Times of the collectives of a compiled program, by the cost model.


def timed(
    traffic: Traffic, mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> tuple[Collective, ...]:
    """The collectives of a program, alike ones counted together as in `Traffic.collectives`, with
    the seconds of all their executions.

    Args:
        order: of the mesh axes on these links; by default the usual one.
    """
    seconds: defaultdict[Collective, float] = defaultdict(float)
    for item in traffic.found:
        key = Collective(
            kind=item.kind, axes=item.axes, bytes=item.bytes, count=0, cause=item.op_name
        )
        seconds[key] += item.count * group_seconds(  # pyright: ignore[reportArgumentType]
            item.kind, item.axes, item.members, float(item.bytes), mesh, topology, order
        )
    return tuple(
        replace(collective, seconds=seconds[replace(collective, count=0)])
        for collective in traffic.collectives
    )


# --------------------------------------------------------------------------------------------------
# Executions of instructions on devices, as the profiler of JAX recorded them (XSpace).


@dataclass(frozen=True, kw_only=True)
class Event:
    """One execution of an instruction on a device, seconds."""

    name: str
    start: float
    end: float


def stage_devices(mesh: Mesh) -> list[int]:
    """Number of the first device of every stage."""
    parts = parts_of(mesh, ("stage",))
    order = [mesh.axis_names.index(part) for part in parts] + [
        k for k, name in enumerate(mesh.axis_names) if name not in parts
    ]
    stages = int(np.prod([mesh.shape[part] for part in parts]))
    first = np.transpose(mesh.devices, order).reshape(stages, -1)[:, 0]
    if any(device.process_index != jax.process_index() for device in first):
        raise VerificationError(
            "the stages are on devices of several processes, and a profile shows those of one\nTry:"
            " a mesh with stages inside of a process"
        )
    return [
        int(device.local_hardware_id if device.platform != "cpu" else device.id) for device in first
    ]


def read_profile(profile: bytes, module: str) -> dict[int, list[Event]]:
    """Executions of the instructions of a module, by number of the device, in order of time."""
    events_by_device: dict[int, list[Event]] = defaultdict(list)
    for plane, line, event, begin, duration, stats in _jax_compat.profile_events(profile):
        match = re.fullmatch(r"/device:[A-Z]+:(\d+)", plane)
        name = str(stats.get("hlo_op") or (event if match and line == "XLA Ops" else ""))
        device = int(match[1]) if match else stats.get("device_ordinal")
        if name and device is not None and str(stats.get("hlo_module", module)) == module:
            events_by_device[int(device)].append(
                Event(
                    name=re.split(r"[ =]", name.lstrip("%"))[0],
                    start=begin * 1e-9,
                    end=(begin + duration) * 1e-9,
                )
            )
    return {
        device: sorted(events, key=lambda event: (event.start, event.end))
        for device, events in events_by_device.items()
    }


#: Opcodes at which a message between stages has arrived.
_ARRIVED = frozenset({"collective-permute", "collective-permute-done"})


def measure_timeline(
    program: Program, state: TrainState, batch: Tree
) -> tuple[Timeline, TrainState]:
    """Runs two steps, the second under the profiler."""
    table, groups = program.parts.run.table, program.plan.accumulation
    if table is None:
        raise VerificationError(
            "the program has no pipeline stages to measure\nTry: pin them, mesh.stage=4"
        )
    if program.programs is not None:
        raise VerificationError(
            "the timeline of stages that are programs of their own (pipeline='programs') cannot be"
            " measured yet\nTry: pipeline='lockstep'"
        )
    assert isinstance(program.mesh, Mesh), "a program that runs has devices"
    devices = stage_devices(program.mesh)
    batch = program.put(batch)
    state = jax.block_until_ready(program.step(state, batch)[0])
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            state = jax.block_until_ready(program.step(state, batch)[0])
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise VerificationError("the profiler wrote nothing; another profile may be running")
        module = parse(program.compiled().as_text() or "")
        events = read_profile(
            files[0].read_bytes(), re.findall(r"HloModule (\S+?),", module.header + ",")[0]
        )
    return (
        timeline(
            table,
            module,
            [events.get(device, []) for device in devices],
            title=title(program.plan, lockstep=True),
            groups=groups,
        ),
        state,
    )


def timeline(
    table: Timetable, module: Module, events: list[list[Event]], *, title: str, groups: int = 1
) -> Timeline:
    """The timeline of a step."""
    hops = {kind: _hops(module, scope) for kind, scope in HOPS.items()}
    ticks = [
        list(_ticks(table, groups, module, hops, stage_events, stage))
        for stage, stage_events in enumerate(events)
    ]
    start, stop = (
        min(stage_ticks[0][0] for stage_ticks in ticks),
        max(stage_ticks[-1][2] for stage_ticks in ticks),
    )
    first, last = (
        min(stage_events[0].start for stage_events in events),
        max(event.end for stage_events in events for event in stage_events),
    )
    kinds = [kinds for begin, end, kinds in table.phases for _ in range(begin, end)]

    def slice_of(number: int, stage: int, begin: float, end: float) -> Slice:
        group, tick = divmod(number, table.ticks)
        done = list(work(table, tick, stage, kinds[tick], group * table.microbatches))
        return _slice(done, stage, begin - start, end - begin)

    slices = tuple(
        slice_of(number, stage, begin, end)
        for stage, stage_ticks in enumerate(ticks)
        for number, (begin, end, _) in enumerate(stage_ticks)
    )
    return Timeline(
        name="measured",
        title=title,
        stages=table.stages,
        slices=slices,
        seconds=stop - start,
        beside=(("before the ticks", start - first), ("after the ticks", last - stop)),
    )


def _hops(module: Module, scope: str) -> dict[str, Computation]:
    """Instructions at which a message in one direction arrives, with the computation that each is
    in.
    """
    return {
        instruction.name: computation
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode in _ARRIVED and scope in instruction.op_name
    }


def _ticks(
    table: Timetable,
    groups: int,
    module: Module,
    hops: Mapping[str, Mapping[str, Computation]],
    events: list[Event],
    stage: int,
) -> Iterator[tuple[float, float, float]]:
    """(start, end of the work, end) of every tick of a stage."""
    queues = {
        kind: [event for event in events if event.name in names] for kind, names in hops.items()
    }
    each = {
        kind: max(
            (sum(name in names for name in computation.by_name) for computation in names.values()),
            default=0,
        )
        for kind, names in hops.items()
    }
    counts = dict.fromkeys(hops, table.forward_ticks * groups)
    # Where the last tick is not a loop, nobody asks for what it would hand on, and the compiler
    # leaves that out.
    missing = {kind: counts[kind] * each[kind] - len(queues[kind]) for kind in hops}
    if any(not each[kind] or missing[kind] not in (0, each[kind] * groups) for kind in hops):
        counted = ", ".join(
            f"{len(queues[kind])} messages {kind} for {counts[kind]} ticks" for kind in hops
        )
        raise VerificationError(f"the profile of stage {stage} does not show its ticks: {counted}")
    time, left = (
        _start(module, hops, events),
        {kind: table.forward_ticks * each[kind] - missing[kind] // groups for kind in hops},
    )
    for _ in range(groups):
        arrivals = {kind: [queues[kind].pop(0) for _ in range(left[kind])] for kind in hops}
        for begin, end, kinds in table.phases:
            for _ in range(begin, end):
                arrived = [
                    arrivals[kind].pop(0)
                    for kind in kinds
                    if kind in arrivals
                    for _ in range(each[kind])
                    if arrivals[kind]
                ]
                if not arrived:
                    following = min(
                        (queue[0].start for queue in queues.values() if queue), default=float("inf")
                    )
                    arrived = [
                        Event(
                            name="",
                            start=(last := _last(module, events, time, following)),
                            end=last,
                        )
                    ]
                stop = max(event.end for event in arrived)
                yield time, max(time, max(event.start for event in arrived)), max(time, stop)
                time = max(time, stop)


def _start(
    module: Module, hops: Mapping[str, Mapping[str, Computation]], events: list[Event]
) -> float:
    """Returns when the first tick begins: with the first instruction of its loop, or, where the
    compiler has taken it out of the loop, of its stage.
    """
    first = next(event for event in events if any(event.name in names for names in hops.values()))
    around = next(names[first.name] for names in hops.values() if first.name in names)
    inside = (
        around.by_name
        if around.name != module.entry
        else {
            instruction.name
            for instruction in around.instructions
            if "shard_map" in instruction.op_name
        }
    )
    return next(event.start for event in events if event.name in inside)


def _last(module: Module, events: list[Event], after: float, before: float) -> float:
    """Returns when the work of a last tick is done that hands nothing on: with the last instruction
    of a stage, before the next group of microbatches hands on something.
    """
    inside = {
        instruction.name
        for computation in module.computations.values()
        for instruction in computation.instructions
        if "shard_map" in instruction.op_name
    }
    return max(
        (event.end for event in events if event.name in inside and event.end <= before),
        default=after,
    )


def _slice(done: list[tuple[str, str]], stage: int, start: float, seconds: float) -> Slice:
    """A tick of a stage, for the (kind, label) of what it was asked for."""
    kinds = {kind for kind, _ in done}
    kind = (
        IDLE
        if not done
        else (
            BOTH
            if FORWARD in kinds and len(kinds) > 1
            else done[0][0]
            if len(kinds) == 1
            else BACKWARD
        )
    )
    return Slice(
        stage=stage,
        kind=kind,
        label="·".join(label for _, label in done),
        start=start,
        seconds=seconds,
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
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    split: bool
    matmuls: int
    cycles: int
    operation: str


def scheduled(text: str | Module, mesh: MeshShape) -> tuple[Scheduled, ...]:
    """The collectives of a compiled program, in the order of its text."""
    reader = _OverlapReader(module=parse(text) if isinstance(text, str) else text, mesh=mesh)
    return tuple(
        collective
        for body in reader.module.computations.values()
        for collective in reader.collectives(body)
    )


@dataclass
class _OverlapReader:
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
                matmuls=sum(map(self._multiplies, between)),
                cycles=sum(map(_overlap_cycles, between)),
                operation=inner.op_name,
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

    def _multiplies(self, instruction: Instruction) -> bool:
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
                map(self._multiplies, self.module.computations[name].instructions)
            )
        return self.known[name]


def _bytes(instruction: Instruction) -> int:
    try:
        return array_bytes(result_shape(instruction))
    except HloError:
        return 0


def _overlap_cycles(instruction: Instruction) -> int:
    match = re.search(r'"estimated_cycles":\s*"?(\d+)', instruction.rest)
    return int(match[1]) if match and int(match[1]) < 2**63 - 1 else 0


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
            collective = Found(
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
            collective = Found(
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
        collectives: list[Found] = []
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
        executions = Executions((), _traffic_cycles(instruction))
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


def _traffic_cycles(instruction: Instruction) -> int:
    match = re.search(r'"estimated_cycles":\s*"?(\d+)', instruction.rest)
    return int(match[1]) if match and int(match[1]) < NO_ESTIMATE else 0
