"""Measured timelines of pipelines: when each stage really did what.

One step is run under `jax.profiler`, which records on every platform when a device ran which
instruction of the compiled program. A tick of a pipeline ends when a stage has handed over what it
made: at the last of the hops to its neighbours, which the lowering names. So a tick begins where
the one before it ended, and the stage is busy until its last hop begins; what the hop takes,
waiting for the neighbour included, is no work. Ticks in which a stage of a program in lockstep
computes what nobody asks for are idle. No clock is put into the program: what is timed is the
program that runs otherwise.

The first device of every stage is looked at. The profiler makes a step of many small kernels
slower; the sum of the parts is the step as it ran under it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import VerificationError
from shardlib.lowering.pipeline.lockstep.stage import HOPS
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.planning.text.predicted_timeline import title
from shardlib.planning.text.timeline import BOTH, IDLE, Slice, Timeline, work
from shardlib.schedules.orders import BACKWARD, FORWARD
from shardlib.schedules.timetable import Timetable
from shardlib.verification.hlo.hlo import Computation, Module, parse
from shardlib.verification.hlo.profile import Event, read_profile, stage_devices

#: Opcodes at which a message between stages has arrived.
_ARRIVED = frozenset({"collective-permute", "collective-permute-done"})


def measure_timeline(
    program: Program, state: TrainState, batch: Tree
) -> tuple[Timeline, TrainState]:
    """Does two steps, the second under the profiler."""
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
    # Where the last tick is no loop, nobody asks for what it would hand on, and the compiler leaves
    # that out.
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
    """When the first tick begins: with the first instruction of its loop, or, where the compiler
    has taken it out of the loop, of its stage.
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
    """When the work of a last tick is done that hands nothing on: with the last instruction of a
    stage, before the next group of microbatches hands on something.
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
