"""`shardlib.why`: why there is communication in a function.

function, arguments --trace--> a program of StableHLO with its source lines
                    --Shardy--> shardings that meet        (in a process of its own)
                    --compiler--> collectives, a schedule  (in another)
                    --join--> rows: line, two shardings, bytes, cause
                    --cures--> edits that were compiled and help
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardlib.diagnosis.cures import (
    LEAST,
    LEAST_SAVING,
    Change,
    Cure,
    Worked,
    candidates,
    compiler_options,
    local_work,
    pairs,
    propagated_seconds,
)
from shardlib.diagnosis.edits import Edit, Spec, annotated
from shardlib.diagnosis.overlap import overlaps
from shardlib.diagnosis.peak import LiveValue, live_values
from shardlib.diagnosis.program import AnyMesh, Call, TracedFunction, find_mesh, mesh_of, trace
from shardlib.diagnosis.report import Communication, Diagnosis
from shardlib.diagnosis.rows import (
    MOST_MEMORY,
    Index,
    Row,
    argument_bytes,
    batch_axes,
    explain,
    named,
    read_meetings,
    read_rows,
    spec_text,
    uses,
    with_warnings,
)
from shardlib.diagnosis.source import NOWHERE, FrameTable, text_of
from shardlib.errors import ArgumentError, TopologyError, TracingError, VerificationError
from shardlib.layout import KINDS, MESH_AXES, MeshShape
from shardlib.machines.topology import Topology, TopologyLike
from shardlib.machines.topology import topology as parse_topology
from shardlib.processes.kin import Guard
from shardlib.untrusted.data import JsonObject
from shardlib.verification.hlo import (
    HloError,
    Module,
    array_bytes,
    arrays,
    axes_of_groups,
    parse,
    replica_groups,
)
from shardlib.verification.isolation import (
    PLATFORMS,
    Compiled,
    Failure,
    Limits,
    Target,
    out_of_memory_text,
    require_compiler,
    run_child,
    target,
)
from shardlib.verification.traffic import read_traffic, wire_bytes

if TYPE_CHECKING:
    from shardlib.lowering.program import Program
    from shardlib.planner.plan import Plan

Options = Mapping[str, str | bool | int]
#: A sharding as the text of a compiled program has it: tiles, and the devices that have them.
_TILED = re.compile(r"\{devices=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)")


def target_of(function: TracedFunction, topology: Topology) -> Target:
    """The machine that a function is compiled for.

    Raises:
        TopologyError: the mesh does not fit the topology.
    """
    axes = " x ".join(f"{axis} {size}" for axis, size in function.mesh)
    if function.shape.devices > topology.devices:
        raise TopologyError(
            f"the mesh {axes} has {function.shape.devices} devices, and {topology.name} has"
            f" {topology.devices}\nTry: a larger topology, or mesh= for fewer devices"
        )
    try:
        return target(topology, function.shape, tuple(function.axis_names))
    except TopologyError as error:
        raise TopologyError(
            f"the mesh {axes} does not fit {topology.name}\nTry: axes whose sizes divide the"
            " dims of the topology"
        ) from error


@contextmanager
def _folder() -> Iterator[tuple[Guard, Path]]:
    """A folder for a child process; the guard deletes it where this process is killed."""
    with Guard() as guard, tempfile.TemporaryDirectory(prefix="shardlib-why-") as name:
        guard.clear(Path(name))
        yield guard, Path(name)


def propagate(
    functions: Sequence[TracedFunction], machine: Target, limits: Limits
) -> tuple[JsonObject, ...]:
    """The shardings of functions as Shardy propagates them (`shardings.read_shardings`); with a
    "problem" where it does not.
    """
    if not functions:
        return ()
    with _folder() as (guard, folder):
        for number, function in enumerate(functions):
            (folder / f"module-{number:03}.mlir").write_text(function.module, encoding="utf-8")
        command = [sys.executable, "-m", "shardlib.diagnosis.shardings", str(folder)]
        outcome = run_child(command, folder, machine, limits, guard)
        why = outcome.message if isinstance(outcome, Failure) else "Shardy wrote nothing"
        return tuple(
            json.loads(file.read_text(encoding="utf-8"))
            if (file := folder / f"shardings-{number:03}.json").is_file()
            else {"meetings": [], "values": [], "problem": why}
            for number in range(len(functions))
        )


def compile_function(
    function: TracedFunction, machine: Target, limits: Limits, options: Options
) -> Compiled | Failure:
    """Compiles a function.

    Args:
        options: of the compiler, beside those of this process's flags.
    """
    require_compiler(machine.platform)
    with _folder() as (guard, folder):
        (folder / "program.bin").write_bytes(function.program)
        job = {
            "target": machine.to_json(),
            "mesh": [list(axis) for axis in function.mesh],
            "kinds": list(function.kinds),
            "donated": list(function.donated),
            "options": dict(options),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "shardlib.diagnosis.child", str(folder)]
        return run_child(command, folder, machine, limits, guard)


def why(
    function: Callable[..., Any] | Program,
    *arguments: Any,
    topology: TopologyLike | None = None,
    mesh: AnyMesh | Mapping[str, int] | str | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keywords: Mapping[str, Any] | None = None,
    cures: int = 4,
    cure_seconds: float = 600.0,
    limits: Limits | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Says why there is communication in a function: for every collective of the compiled program
    the line, the two shardings that met, its bytes and seconds, and a cure where one was found.

    Nothing runs. The function is traced here, and compiled for the topology in a process of its
    own. While cures are tried, JAX's caches of traced functions are cleared.

    Args:
        function: plain or jitted, with axes in auto, explicit or manual mode; or a program of
            shardlib's, whose step is diagnosed for the topology of its plan, and whose planned
            collectives are named as such.
        arguments: arrays or shapes (`jax.ShapeDtypeStruct`), with or without shardings, in any
            trees.
        topology: the machine: "v5e:4x4", "2*h100:8", "cpu:8".
        mesh: {axis: size}, "data=4,model=2", or a mesh; by default that of the arrays, of the
            context, or of the function's own layouts.
        in_shardings, out_shardings: as `jax.jit` takes them.
        keywords: keyword arguments of the function.
        cures: how many programs may be compiled to find cures, beside those that say whether both
            edits of a pair are needed; 0 for none.
        cure_seconds: after which nothing more is tried; a compilation that runs is waited for.
        limits: of one compilation.
        options: of the compiler.
        progress: is called with one line before everything that takes long.

    Raises:
        ArgumentError: an argument is of another kind than is asked for.
        TracingError: the function does not trace or lower, or nothing in it is sharded.
        TopologyError: the mesh does not fit the topology.
        MissingPackageError: the compiler of the topology is not installed.
        VerificationError: the compiler made no program; the message says what Shardy found.
    """
    if hasattr(function, "step_function"):
        search = {"cures": cures, "cure_seconds": cure_seconds, "progress": progress}
        settings = {"limits": limits, "options": options, **search}
        return _of_program(cast("Program", function), **settings)
    if topology is None:
        raise ArgumentError("topology is missing\nTry: topology='v5e:4x4', or 'cpu:8'")
    if not callable(function):
        raise ArgumentError(
            f"function is {type(function).__name__}, not a function\nTry:"
            " shardlib.why(step, params, batch, topology='v5e:4x4')"
        )
    if isinstance(cures, bool) or not isinstance(cures, int) or cures < 0:
        raise ArgumentError(f"cures is {cures!r}, not a number of compilations\nTry: cures=4")
    for name, value, what, fits in (
        ("keywords", keywords, "mapping", isinstance(keywords, Mapping)),
        ("options", options, "mapping", isinstance(options, Mapping)),
        ("limits", limits, "Limits", isinstance(limits, Limits)),
        ("progress", progress, "function", callable(progress)),
        ("cure_seconds", cure_seconds, "number", isinstance(cure_seconds, int | float)),
    ):
        if value is not None and not fits:
            raise ArgumentError(
                f"{name} is {type(value).__name__}, not a {what}\nTry: leave {name} out"
            )
    if not cure_seconds >= 0:
        raise ArgumentError(f"cure_seconds is {cure_seconds}, no time\nTry: cure_seconds=600")
    machine = parse_topology(topology)
    platform = PLATFORMS[machine.chip.vendor]
    require_compiler(platform)
    call = Call(
        function=function,
        arguments=arguments,
        keywords=keywords or {},
        mesh=mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
    )
    user_mesh = find_mesh(call)
    say = progress or (lambda _: None)
    work = _Work(
        call=call,
        mesh=user_mesh,
        platform=platform,
        topology=machine,
        limits=limits or Limits(),
        options=options or {},
        cure_seconds=cure_seconds,
        say=say,
    )
    return work.diagnose(cures)


def why_text(
    text: str,
    *,
    source: str = "the text",
    topology: TopologyLike | None = None,
    mesh: AnyMesh | Mapping[str, int] | str | None = None,
) -> Diagnosis:
    """Says what a compiled program communicates, from its text alone: no shardings meet there, and
    no cure can be tried; lines are there where the text has them.

    Args:
        text: a dump of XLA's, or `compiled.as_text()`.
        source: where it is from, for messages.
        topology: whose links give seconds; without one there are none.
        mesh: names the axes; by default all devices are one axis, "devices".

    Raises:
        VerificationError: the text is not a compiled program, or the mesh is not of its devices.
    """
    module = parse(text)
    if not module.entry or not module.header:
        raise VerificationError(
            f"{source} is not the text of a compiled program: it has no HloModule with an ENTRY"
            " computation\nTry: jax.jit(f).lower(...).compile().as_text()"
        )
    machine = None if topology is None else parse_topology(topology)
    axes = {"devices": module.partitions} if mesh is None else dict(mesh_of(mesh).shape)
    function = TracedFunction(
        name=module.header.split()[1].rstrip(","),
        program=b"",
        module="",
        results=(),
        mesh=tuple((str(axis), int(size)) for axis, size in axes.items()),
        arguments=(),
        donated=(),
        kinds=(),
    )
    if function.shape.devices != module.partitions:
        raise VerificationError(
            f"{source} is a program of {module.partitions} devices, and the mesh"
            f" {axes} has {function.shape.devices}\nTry: a mesh of {module.partitions} devices"
        )
    traffic = read_traffic(module, function.shape)
    if not traffic.collectives and module.partitions > 1 and "is_scheduled=true" not in text:
        raise VerificationError(
            f"{source} is a program before XLA partitions and schedules it: it has no collective"
            " yet\nTry: the dump's *after_optimizations.txt, or"
            " jax.jit(f).lower(...).compile().as_text()"
        )
    index = Index(module, FrameTable(text))
    clock = 0.0 if machine is None else target_of(function, machine).cycles_per_s
    hidden, kernels = overlaps(
        module,
        traffic,
        function.shape,
        axes=tuple(function.axis_names),
        topology=machine,
        cycles_per_s=clock,
    )
    rows = read_rows(
        index, traffic, hidden, mesh=function.shape, names=function.axis_names, meetings=()
    )
    arguments = text_arguments(module, function)
    stored = {value.name: (value.name, value.spec) for value in arguments}
    live_bytes, live = live_values(index, None, {})
    return Diagnosis(
        function=function.name,
        topology="" if machine is None else machine.name,
        mesh=function.mesh,
        communication=Communication(
            rows=tuple(_of_operand(row, index, stored) for row in explain(rows, function)),
            wire_bytes=sum(item.wire_bytes for item in traffic.found),
            kernel_seconds=kernels,
            memory={},
            live=tuple(sorted((*live, *arguments), key=lambda value: -value.bytes)),
            live_bytes=live_bytes + sum(value.bytes for value in arguments),
            compile_seconds=0.0,
            problems=traffic.problems,
            note=_mesh_advice(module, function.shape),
            text=text,
        ),
        cures=(),
        cured={},
        tried=0,
        versions={},
    )


def text_arguments(module: Module, function: TracedFunction) -> list[LiveValue]:
    """The arguments of a compiled program, with their shardings where its text has them."""
    body = module.computations[module.entry]
    arguments = list[LiveValue]()
    for instruction in body.instructions if module.partitions > 1 else ():
        if instruction.opcode != "parameter":
            continue
        try:
            ((_, dims),) = arrays(instruction.shape)
        except ValueError:  # a tuple, or elements that are not known
            continue
        spec, tiled = None, _TILED.match(sharding := instruction.attribute("sharding"))
        if tiled is not None:
            tiles = [int(n) for n in tiled[1].split(",")]
            devices = replica_groups(f"[{math.prod(tiles)},1]{tiled[2]}", module.partitions)
            groups = [
                np.moveaxis(devices.reshape(tiles), n, -1).reshape(-1, tiles[n])
                for n in range(len(dims))
            ]
            axes = (axes_of_groups(group, function.shape) or () for group in groups)
            spec = tuple(tuple(function.axis_names[axis] for axis in dim) for dim in axes)
        elif sharding == "{replicated}":
            spec = ((),) * len(dims)
        arguments.append(
            LiveValue(
                name=instruction.op_name or instruction.name,
                source=NOWHERE,
                bytes=array_bytes(instruction.shape),
                count=1,
                shape=instruction.shape,
                spec=spec,
                replicated=(),
            )
        )
    return arguments


def _of_operand(row: Row, index: Index, stored: Mapping[str, tuple[str, Spec | None]]) -> Row:
    """A row, which names what it gathers where Shardy leaves an operation as it is, or where there
    is no more than a text.

    Args:
        stored: name and sharding of each argument, by its name in the compiled program.
    """
    if row.cause != "partitioner" or row.kind not in ("all-gather", "all-to-all") or row.meeting:
        return row
    over = ", ".join(row.axes)
    argument, value = index.argument(row.operand), index.made(row.operand)
    moved = "gathered" if row.kind == "all-gather" else "sharded along another dim"
    if argument is not None and argument.op_name in stored:
        name, spec = stored[argument.op_name]
        shown = "" if spec is None else f" {spec_text(spec)}"
        reason = f"`{name}`, an argument{shown}, is {moved} over {over}"
        return replace(row, cause="weights", reason=reason)
    if value.user and value.key != row.source.key and row.source.operation.primitive:
        taker = row.source.operation.primitive
        reason = f"`{named(value)}` is {moved} over {over} for {taker}"
        return replace(row, cause="operation", reason=reason)
    return row


def _mesh_advice(module: Module, mesh: MeshShape) -> str:
    """The mesh with the fewest axes whose axes are the groups of a program's collectives, as a
    sentence; "" where that is the case for those of `mesh`, or for none.
    """
    texts = {
        i.attribute("replica_groups")
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode.removesuffix("-start") in KINDS
    }
    try:
        groups = [replica_groups(text, mesh.devices) for text in texts]
    except HloError:
        return ""

    def fits(shape: MeshShape) -> bool:
        return all(
            axes is not None and shape.ways(axes) == group.shape[1]
            for group in groups
            for axes in (axes_of_groups(group, shape),)
        )

    sizes = [n for n in range(2, mesh.devices + 1) if mesh.devices % n == 0]
    for axes in () if fits(mesh) else ("x", "xy", "xyz"):
        for chosen in itertools.product(sizes, repeat=len(axes)):
            shape = MeshShape(dict(zip(MESH_AXES, chosen, strict=False)))
            if shape.devices == mesh.devices and fits(shape):
                words = ",".join(f"{axis}={size}" for axis, size in zip(axes, chosen, strict=True))
                return (
                    f"some collectives run over parts of the mesh's axes: --mesh {words} names them"
                )
    return ""


def _of_program(program: Program, **settings: Any) -> Diagnosis:
    """The diagnosis of a program's step; settings are those of `why`."""
    step, plan = program.step_function(), program.plan
    diagnosis = why(step, program.state, program.batch, topology=plan.topology, **settings)
    return with_plan(diagnosis, plan)


def _planned_as(row: Row, on_cpu: bool) -> list[tuple[str, str]]:
    """(kind, words) of what a plan may have in the place of a row, the likeliest first."""
    users = row.meeting.users if row.meeting else ()
    if row.kind == "all-gather" and "gather" in {user.operation.primitive for user in users}:
        words = " as a sum of the rows that are looked up; this compiler gathers their table"
        return [("", ""), ("reduce-scatter", words), ("all-reduce", words), (row.kind, "")]
    if on_cpu and row.kind == "all-reduce":
        words = " as a reduce-scatter, for which this compiler slices an all-reduce"
        return [(row.kind, ""), ("reduce-scatter", words)]
    return [(row.kind, "")]


def with_plan(diagnosis: Diagnosis, plan: Plan) -> Diagnosis:
    """A diagnosis whose rows say which of them the plan has; one with a cure stays avoidable.

    What a plan has is counted in bytes along each axis of its mesh, so that a planned collective
    over two axes may be one over each of them; rows over most axes are counted first, and what
    another kind stands for last, first of that what nothing else explains. The compiler of CPUs
    sends 16-bit numbers as float32, and writes a reduce-scatter as an all-reduce and a slice.
    """
    on_cpu = parse_topology(plan.topology).chip.vendor == "cpu"
    sizes, left = dict(diagnosis.mesh), defaultdict[tuple[str, str], float](float)
    for planned in plan.estimate.collectives:
        degree = plan.mesh.ways(planned.axes)
        scattered = degree if planned.kind == "reduce-scatter" else 1
        for axis in planned.axes:
            left[planned.kind, axis] += planned.total_bytes * scattered
    rows = list(diagnosis.rows)
    for rank in range(4):
        order = sorted(range(len(rows)), key=lambda n: len(rows[n].axes), reverse=not rank)
        if rank:
            order.sort(key=lambda n: bool(rows[n].inherent))
        for number in order:
            row = rows[number]
            kinds = _planned_as(row, on_cpu)[rank : rank + 1]
            if row.cause == "planned" or not (row.axes and kinds):
                continue
            ((kind, words),) = kinds
            members = math.prod(sizes[axis] for axis in row.axes)
            unit = wire_bytes(row.kind, 1, members)
            size = row.bytes / (unit / members if row.kind == "reduce-scatter" else unit)
            widened = on_cpu and row.widened
            keys = {(kind, axis.partition("_")[0]) for axis in row.axes}  # "data_1": part of data
            if any(size / (1 + widened) > 1.05 * left[key] for key in keys):
                continue
            for key in keys:
                left[key] -= size / (1 + widened)
            note = f"planned{words}" + ", in 16 bits; this compiler sends 32" * widened
            reason, inherent = f"{row.reason} ({note})", number not in diagnosis.cured
            rows[number] = replace(row, cause="planned", inherent=inherent, reason=reason)
    return replace(diagnosis, communication=replace(diagnosis.communication, rows=tuple(rows)))


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The inputs of a diagnosis.

    Attributes:
        until: when nothing more is tried, in seconds of the monotonic clock.
    """

    call: Call
    mesh: AnyMesh
    platform: str
    topology: Topology
    limits: Limits
    options: Options
    cure_seconds: float
    say: Callable[[str], None]
    until: float = math.inf

    def trace(self, edits: Sequence[Edit] = ()) -> TracedFunction:
        return trace(self.call, self.platform, self.mesh, edits)

    def diagnose(self, limit: int) -> Diagnosis:
        function = self.trace()
        machine = target_of(function, self.topology)
        self.say(f"compiling {function.name} for {self.topology.name}")
        with ThreadPoolExecutor(1) as pool:  # both wait for processes of their own
            propagated = pool.submit(propagate, [function], machine, self.limits)
            outcome = compile_function(function, machine, self.limits, self.options)
            (shardings,) = propagated.result()
        if isinstance(outcome, Failure):
            raise _not_compiled(outcome, function, shardings)
        before = self.read(function, machine, outcome, shardings)
        search = replace(self, until=time.monotonic() + self.cure_seconds)
        cures, tried = search.find_cures(function, machine, before, shardings, limit)
        if limit and time.monotonic() > search.until:
            words = f"cures were looked for during {self.cure_seconds:g} s, and not to the end"
            before = replace(before, note=f"incomplete: {words} (cure_seconds)")
        cured = _removed(before.rows, cures)
        rows = tuple(
            replace(row, inherent=False) if number in cured and row.inherent else row
            for number, row in enumerate(before.rows)
        )
        return Diagnosis(
            function=function.name,
            topology=self.topology.name,
            mesh=function.mesh,
            communication=replace(before, rows=rows),
            cures=tuple(cure for cure, _ in cures),
            cured=cured,
            tried=tried,
            versions=outcome.versions,
            searched=limit > 0,
            after=cures[-1][1] if cures else None,
        )

    def read(
        self, function: TracedFunction, machine: Target, outcome: Compiled, shardings: JsonObject
    ) -> Communication:
        """The communication of a compiled function."""
        module, mesh = parse(outcome.text), function.shape
        names = [argument.name for argument in function.arguments]
        traffic = read_traffic(module, mesh, names, machine.positions)
        index = Index(module, FrameTable(outcome.text))
        hidden, kernels = overlaps(
            module,
            traffic,
            mesh,
            axes=tuple(function.axis_names),
            topology=self.topology,
            cycles_per_s=machine.cycles_per_s,
            slices=len(machine.positions),
        )
        rows = read_rows(
            index,
            traffic,
            hidden,
            mesh=mesh,
            names=function.axis_names,
            meetings=read_meetings(shardings, function),
        )
        stored = {f"args[{n}]": (a.name, a.spec) for n, a in enumerate(function.arguments)}
        rows, unjoined = with_warnings(rows, outcome.log, index, dict(function.mesh))
        temporaries, live = live_values(index, function, shardings, rows)
        problem = shardings["problem"]
        return Communication(
            rows=tuple(_of_operand(row, index, stored) for row in explain(rows, function)),
            wire_bytes=sum(item.wire_bytes for item in traffic.found),
            kernel_seconds=kernels,
            memory=outcome.memory,
            live=live,
            live_bytes=temporaries,
            compile_seconds=outcome.seconds,
            problems=(*traffic.problems, *((problem,) if problem else ()), *unjoined),
            text=outcome.text,
        )

    def find_cures(
        self,
        function: TracedFunction,
        machine: Target,
        before: Communication,
        shardings: JsonObject,
        limit: int,
    ) -> tuple[list[tuple[Cure, Communication]], int]:
        """Cures with the communication that each leaves, and how many programs were compiled."""
        cures: list[tuple[Cure, Communication]] = []
        accepted: tuple[Edit, ...] = ()
        refused, tried = set[Edit](), 0
        batch = batch_axes(function)
        reserved = limit > 1 and bool(self.flags(before))  # a program for options of the compiler
        state = Trial(edits=(), function=function, shardings=shardings, seconds=0.0)

        def measured(trial: Trial) -> Communication | None:
            nonlocal tried
            tried += 1
            places = " and ".join(edit.place for edit in trial.edits)
            self.say(f"compiling an edit of {places} ({tried} of {max(tried, limit)})")
            outcome = compile_function(trial.function, machine, self.limits, self.options)
            refused.update(trial.edits if len(trial.edits) == 1 else ())
            if isinstance(outcome, Failure):
                return None
            after = self.read(trial.function, machine, outcome, trial.shardings)
            return after if _helps(before, after) else None

        while before.rows and tried < limit - reserved and time.monotonic() < self.until:
            listed = [
                edit
                for edit in candidates(before.rows, state.shardings, state.function, batch)
                if edit not in accepted
            ]
            best: tuple[Trial, Communication] | None = None
            left = limit - reserved - tried
            memory_limit = before.peak_bytes * MOST_MEMORY
            local = local_work(before.rows, read_meetings(state.shardings, state.function))
            base = propagated_seconds(state.shardings, state.function, self.topology, local)
            propagated = functools.partial(self.propagated, accepted, machine, memory_limit, local)
            for trial in self.trials(listed, refused, left, base, propagated):
                if after := measured(trial):
                    best = trial, after
                if best or tried >= limit - reserved or time.monotonic() > self.until:
                    break
            if best is None:
                break
            if len(best[0].edits) > 1:  # is one of them enough?
                for trial in propagated([(e,) for e in best[0].edits if e not in refused]):
                    alone = measured(trial)
                    if alone and alone.wire_bytes <= best[1].wire_bytes * (1 + LEAST):
                        best = trial, alone
            trial, after = best
            changes = tuple(change for e in trial.edits for change in _changes(state, trial, e))
            cure = _cure(trial.edits, changes, before, after)
            types = _other_types(state.function, trial.function)
            cures.append((replace(cure, types=types), after))
            accepted, before, state = (*accepted, *trial.edits), after, trial
        left = max(limit - tried, reserved) if time.monotonic() < self.until else 0
        cure, compiled = self.with_options(state, machine, before, left)
        return [*cures, *cure], tried + compiled

    def with_options(
        self, state: Trial, machine: Target, before: Communication, left: int
    ) -> tuple[list[tuple[Cure, Communication]], int]:
        """The first options of the compiler that help, if any, and how many were tried.

        Args:
            left: how many may be.
        """
        tried = 0
        for tried, options in enumerate(self.flags(before)[:left], 1):
            self.say(f"compiling with {', '.join(options)}")
            chosen = {**self.options, **options}
            outcome = compile_function(state.function, machine, self.limits, chosen)
            if isinstance(outcome, Failure):
                continue
            after = self.read(state.function, machine, outcome, state.shardings)
            saved = after.step_seconds < (1 - LEAST_SAVING) * before.step_seconds
            if saved and after.peak_bytes <= before.peak_bytes * MOST_MEMORY:
                text = f"compiler_options={dict(options)}"
                change = Change(place="the compiler's options", before="", text=text)
                return [(_cure((), (change,), before, after, options), after)], tried
        return [], tried

    def flags(self, before: Communication) -> list[Mapping[str, str | bool | int]]:
        """Options of the compiler to try, without those that are given."""
        sets = compiler_options(before.rows, self.topology.chip.vendor, before.step_seconds)
        return [options for options in sets if not options.keys() & self.options.keys()]

    def trials(
        self,
        listed: Sequence[Edit],
        refused: set[Edit],
        left: int,
        base: float,
        propagated: Callable[[Sequence[tuple[Edit, ...]]], list[Trial]],
    ) -> Iterator[Trial]:
        """Edits in the order in which they are to be compiled: single ones, and pairs of which
        Shardy's shardings ask for less than those of either edit.

        Args:
            refused: edits that do not help; those that Shardy refuses are added.
            left: programs that may be compiled; the last is for a pair, where there is one.
            base: seconds of the shardings without them.
            propagated: gives edits their shardings.
        """
        fresh = [edit for edit in listed if edit not in refused]
        self.say(f"propagating the shardings of {len(fresh)} edits")
        singles = propagated([(edit,) for edit in fresh])
        # what it is worth, the compiler says
        better = _ranked([trial for trial in singles if trial.seconds < base])
        refused.update(edit for edit in fresh if edit not in {t.edits[0] for t in better})
        first = max(left - 1, 1)
        yield from better[:first]
        seen = {trial.edits[0] for trial in singles}
        singles += propagated([(edit,) for edit in listed if edit not in seen])
        alone = {trial.edits[0]: trial.seconds for trial in singles}
        two = pairs(
            [(trial.edits[0], trial.function, trial.shardings) for trial in _ranked(singles)],
            self.topology,
        )
        self.say(f"propagating the shardings of {len(two)} pairs of edits")
        yield from _ranked(
            [
                trial
                for trial in propagated(two)
                if trial.seconds
                < (1 - LEAST) * min(base, *(alone.get(edit, base) for edit in trial.edits))
            ]
        )
        yield from better[first:]

    def propagated(
        self,
        accepted: tuple[Edit, ...],
        machine: Target,
        memory_limit: float,
        local: frozenset[Worked],
        choices: Sequence[tuple[Edit, ...]],
    ) -> list[Trial]:
        """Edits on top of those that are accepted, without those that the program does not trace
        with, those with which its arguments take more than `memory_limit` bytes of a device, and
        those that are not reached until a time.
        """
        traced: list[tuple[tuple[Edit, ...], TracedFunction]] = []
        for edits in choices:
            if time.monotonic() > self.until:
                break
            try:
                function = self.trace((*accepted, *edits))
            except TracingError:
                continue
            if sum(argument_bytes(function)) <= memory_limit:
                traced.append((edits, function))
        seconds = min(self.limits.seconds, max(self.until - time.monotonic(), 1.0))
        limits = replace(self.limits, seconds=seconds)
        layouts = propagate([function for _, function in traced], machine, limits)
        return [
            Trial(
                edits=edits,
                function=function,
                shardings=layout,
                seconds=propagated_seconds(layout, function, self.topology, local),
            )
            for (edits, function), layout in zip(traced, layouts, strict=True)
            if not layout["problem"]
        ]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Edits on top of those that are accepted, with the program that they make.

    Attributes:
        shardings: `shardings.read_shardings` of it.
        seconds: `cures.propagated_seconds` of these.
    """

    edits: tuple[Edit, ...]
    function: TracedFunction
    shardings: JsonObject
    seconds: float


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Trials, the best first. Seconds before any compiler are rough: of those that are near the
    best, the first.
    """
    near = 1.05 * min((trial.seconds for trial in trials), default=0.0)
    return sorted(trials, key=lambda trial: max(near, trial.seconds))


def _peaks(before: Communication, after: Communication) -> tuple[int, int]:
    """Bytes at the peak, without the programs' code or with it, where that says less of the second:
    TPUs have temporaries of small arrays in a memory that is not counted.
    """
    without, total = (
        (before.peak_bytes, after.peak_bytes),
        (before.memory["peak"], after.memory["peak"]),
    )
    return min(without, total, key=lambda peaks: peaks[1] / peaks[0])


def _helps(before: Communication, after: Communication) -> bool:
    peak_before, peak_after = _peaks(before, after)
    return (
        after.wire_bytes < before.wire_bytes * (1 - LEAST)
        and after.step_seconds < before.step_seconds
        and peak_after <= peak_before * MOST_MEMORY
        # what arguments take stays, where temporaries of a larger model would not shrink with it
        and after.memory["arguments"] - before.memory["arguments"]
        <= before.peak_bytes * (MOST_MEMORY - 1)
    )


def _cure(
    edits: tuple[Edit, ...],
    changes: tuple[Change, ...],
    before: Communication,
    after: Communication,
    options: Options | None = None,
) -> Cure:
    return Cure(
        edits=edits,
        changes=changes,
        bytes=(before.wire_bytes, after.wire_bytes),
        seconds=(before.step_seconds, after.step_seconds),
        memory=_peaks(before, after),
        options=options or {},
    )


def _other_types(before: TracedFunction, after: TracedFunction) -> str:
    """Results whose type has another sharding than before, as a sentence; "" for none."""
    others = [
        f"{old.name or 'it'} {spec_text(new.spec)} ({spec_text(old.spec)} before)"
        for old, new in zip(before.results, after.results, strict=True)
        if old.spec != new.spec
    ]
    return f"the result has another type: {', '.join(others)}" if others else ""


def _changes(state: Trial, trial: Trial, edit: Edit) -> Iterator[Change]:
    """What a user writes for an edit: for an argument the line that annotates it, where the program
    has one.
    """
    function = trial.function
    if edit.frame:
        text = edit.text(function.explicit, function.mapped.get(edit, 0))
        yield Change(place=edit.place, before=text_of(edit.frame), text=text)
        return
    flax = sys.modules.get("flax.linen")
    rules = flax.get_logical_axis_rules() if flax else ()
    left = list[str]()
    for number in edit.arguments:
        argument = state.function.arguments[number]
        frames = uses(number, read_meetings(state.shardings, state.function))
        axes = [name for name, _ in function.mesh]
        annotation = annotated(argument.name, argument.spec, edit.spec, frames, axes, rules)
        if annotation is None:
            left.append(argument.name)
            continue
        frame, line = annotation
        text = f"{line}  # {replace(edit, name=argument.name).text(False)}"
        yield Change(place=frame.place, before=text_of(frame), text=text)
    if left:
        of_them = replace(edit, name=", ".join(left))
        yield Change(place=of_them.place, before="", text=of_them.text(False))


def _removed(rows: Sequence[Row], cures: Sequence[tuple[Cure, Communication]]) -> dict[int, int]:
    """Row -> the first cure that takes at least half of its bytes away, whatever it edits: what is
    left of it has its kind and axes, and its line, or its size at another line. Rows of a line are
    told apart by pass and cause, as a gradient and partial sums of an activation.
    """

    def place(row: Row) -> tuple[object, ...]:
        user, backward = row.source.user, row.source.operation.backward
        return row.kind, row.axes, user and (user.file, user.line), backward, row.cause

    def sizes(listed: Sequence[Row]) -> dict[tuple[object, ...], float]:
        size = defaultdict[tuple[object, ...], float](float)
        for row in listed:
            size[place(row)] += row.bytes
        return size

    before = sizes(rows)

    def left(row: Row, communication: Communication) -> float:
        after, key = sizes(communication.rows), place(row)
        more = {entry: size - before.get(entry, 0.0) for entry, size in after.items()}
        return after.get(key, 0.0) + sum(
            size
            for entry, size in more.items()
            if entry != key
            and entry[:2] == key[:2]
            and (abs(size - row.bytes) <= 0.02 * row.bytes or (entry[2] == key[2] and size > 0))
        )

    removed: dict[int, int] = {}
    for number, row in enumerate(rows):
        for cure, (applied, communication) in enumerate(cures):
            # options of the compiler change the schedule
            if applied.edits and left(row, communication) <= before[place(row)] / 2:
                removed[number] = cure
                break
    return removed


def _not_compiled(
    failure: Failure, function: TracedFunction, shardings: JsonObject
) -> VerificationError:
    """The error of a function that the compiler made no program of, with what is known of it."""
    meetings = read_meetings(shardings, function)
    lines = sorted({frame.place for m in meetings if (frame := m.source.user)})
    meet = f"\nShardings meet at {len(lines)} lines: {', '.join(lines[:8])}" if lines else ""
    message = (
        out_of_memory_text(failure.message) if failure.kind == "out-of-memory" else failure.message
    )
    remedy = (
        "the compiler's own names of options, or none"
        if "compile option" in message
        else {
            "out-of-memory": "a larger topology, or smaller shapes",
            "compile-timeout": "limits=Limits(seconds=...) with more of them",
            "compiler-memory": "limits=Limits(memory_bytes=...), or smaller shapes",
        }.get(failure.kind, "compile it here first: jax.jit(f).lower(...).compile()")
    )
    return VerificationError(
        f"{function.name} was not compiled: {failure.kind}: {message}{meet}\nTry: {remedy}"
    )
