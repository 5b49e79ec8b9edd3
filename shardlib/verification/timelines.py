"""Timelines of pipeline stages as a profile measured them, and the steps of a plan in a recorded
profile.

One step is run under `jax.profiler`, which records on every platform when a device ran which
instruction of the compiled program. A tick of a pipeline ends when a stage has handed over what it
made: at the last of the hops to its neighbours, which the lowering names. So a tick begins where
the one before it ended, and the stage is busy until its last hop begins; what the hop takes,
waiting for the neighbour included, is not work. Ticks in which a stage of a program in lockstep
computes what nobody asks for are idle. No clock is put into the program: what is timed is the
program that runs otherwise.

The first device of every stage is looked at. The profiler makes a step of many small kernels
slower; the sum of the parts is the step as it ran under it.
"""

from __future__ import annotations

import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from shardlib import _jax_compat
from shardlib.annotation.trees import Tree
from shardlib.errors import MissingFileError, VerificationError
from shardlib.lowering.mesh import physical_axes
from shardlib.lowering.pipeline.stage import HOPS
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState
from shardlib.report.timelines import (
    BOTH,
    IDLE,
    MeasuredStep,
    Operation,
    Slice,
    Timeline,
    title,
    work,
)
from shardlib.schedules import BACKWARD, FORWARD, Timetable
from shardlib.verification.hlo import Computation, Module, parse

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
    parts = physical_axes(mesh, ("stage",))
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
    table, groups = program.parts.run.timetable, program.plan.accumulation
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
# Steps of a plan in a profile that JAX has recorded.
#
# Every program that shardlib makes of a plan is named after it, "shardlib_step_e4b19c16919f", so
# that a profile says which plan it is of. On every platform the profiler says when which device ran
# which instruction of it. Where it numbers the executions of a program, a step is one of them;
# where it does not, a step begins with the first of the instructions that run once in each.

#: What the compiled modules of steps are called.
_STEP = re.compile(r"jit_shardlib_step_(\w+?)(?:\(\d+\))?$")
#: Share of the operations of the longest step that a step has which was recorded from its start to
#: its end; profilers lose some.
_WHOLE = 0.9
#: Folders of a run's profiles, "step-6".
_FIRST = re.compile(r"step-(\d+)$")


def newest_profile(run: Path) -> Path:
    """The newest profile of a run."""
    if run.is_file():
        return run
    paths = sorted(run.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise MissingFileError(
            f"{run} has no profile (*.xplane.pb)\nTry: --profile 100:3 at training; or `touch"
            f" {run / 'profiles' / 'profile'}` while the run goes on"
        )
    return paths[-1]


def recorded_steps(profile: Path, digest: str) -> tuple[MeasuredStep, ...]:
    """The steps of a plan in a profile, in order of time."""
    executed, others = _executions(profile, digest)
    longest = max((len(step) for step in executed), default=0)
    complete = [step for step in executed if len(step) > _WHOLE * longest]
    if not complete:
        seen = ", ".join(sorted(others)) or "none"
        raise VerificationError(
            f"{profile} shows no step of plan {digest}; plans whose steps it shows: {seen}\nTry:"
            " the plan.json of the run's own folder"
        )
    first = next((int(m[1]) for part in profile.parts if (m := _FIRST.fullmatch(part))), 1)
    return tuple(
        MeasuredStep(
            name=f"step {first + number}",
            start=min(operation.start for operation in step),
            seconds=max(operation.start + operation.seconds for operation in step)
            - min(operation.start for operation in step),
            operations=tuple(step),
        )
        for number, step in enumerate(complete)
    )


def _executions(profile: Path, digest: str) -> tuple[list[list[Operation]], set[str]]:
    """The operations of every step of a plan, and the plans whose steps are in a profile."""
    runs: dict[object, list[Operation]] = defaultdict(list)
    seen = set[str]()
    try:
        events = _jax_compat.profile_events(profile.read_bytes())
    except OSError as error:
        raise MissingFileError(f"{profile} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise VerificationError(f"{profile} is not a profile of JAX: {error}") from error
    modules = [
        (plane, begin, begin + duration, event)
        for plane, line, event, begin, duration, _ in events
        if line == "XLA Modules"
    ]
    for plane, line, event, begin, duration, stats in events:
        match = re.fullmatch(r"/device:[A-Z]+:(\d+)", plane)
        name = str(stats.get("hlo_op") or (event if match and line == "XLA Ops" else ""))
        device = int(match[1]) if match else stats.get("device_ordinal")
        if not name or device is None:
            continue
        module = stats.get("hlo_module") or next(
            (
                module_name
                for module_plane, first, last, module_name in modules
                if module_plane == plane and first <= begin < last
            ),
            "",
        )
        plan = _STEP.match(str(module))
        if plan is None:
            continue
        seen.add(plan[1])
        if plan[1] == digest:
            runs[stats.get("run_id")].append(
                Operation(
                    device=int(device),
                    name=re.split(r"[ =]", name.lstrip("%"))[0],
                    start=begin * 1e-9,
                    seconds=duration * 1e-9,
                )
            )
    steps = [step for key, run in runs.items() for step in ([run] if key else _parted(run))]
    return sorted(steps, key=lambda step: min(operation.start for operation in step)), seen


def _parted(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations of several executions whose numbers are not known. On every device one begins with
    the first of the instructions that run the least often.
    """
    steps: dict[int, list[Operation]] = defaultdict(list)
    for device in {operation.device for operation in operations}:
        on_device = sorted(
            (o for o in operations if o.device == device), key=lambda operation: operation.start
        )
        starts: dict[str, list[float]] = defaultdict(list)
        for operation in on_device:
            starts[operation.name].append(operation.start)
        fewest = min(len(times) for times in starts.values())
        rare = [times for times in starts.values() if len(times) == fewest]
        begins = [min(each) for each in zip(*rare, strict=True)]
        for operation in on_device:
            steps[max(0, bisect_right(begins, operation.start) - 1)].append(operation)
    return [steps[number] for number in sorted(steps)]
