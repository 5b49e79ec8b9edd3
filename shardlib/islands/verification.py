"""Verification of islands: the step of one, and the outer step of all, each compiled for the
machine that it runs on.

A step is compiled for the devices of its island and for no others, so that nothing of it can cross.
A meeting may move between islands what was planned, and nothing else (`hidden-exchange`), in the
dtype that was promised (`wide-exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.findings import Finding, diagnostic
from shardlib.frontend.lowered import lower
from shardlib.frontend.model import TracedModel
from shardlib.frontend.verified import priced_as_compiled
from shardlib.islands.compression import exchanges_of
from shardlib.islands.delayed import IslandCall, calls_of
from shardlib.islands.exchanges import Compressed, DiLoCo, Several
from shardlib.islands.meeting import BetweenSteps, meetings_of
from shardlib.islands.planning import of_one_island, on_islands, require_carried, used_by
from shardlib.layout import ISLAND
from shardlib.lowering.program import Options, Program
from shardlib.machines.topology import Topology, island_of
from shardlib.planner.plan import Plan
from shardlib.report.elements import bytes_text
from shardlib.verification import report
from shardlib.verification.isolation import (
    ExportedStep,
    Failure,
    Limits,
    compile_apart,
    exported,
    failed,
    target,
)
from shardlib.verification.report import CompiledStep, Verification
from shardlib.verification.traffic import InstructionTraffic
from shardlib.verification.verify import read_compiled, verify_program

#: Dtypes by which compilers know what crosses; narrow numbers cross as integers of their bits.
WIRES = {"float32": {"f32"}, "bfloat16": {"u16"}, "int8": {"u8"}, "int4": {"u8"}}
#: What a meeting may move more than planned, as a part of it.
SLACK = 0.01
#: Bytes by which a TPU pads a flat float32 array at most: tiles of 1,024 numbers.
PADDING = 4096


def verify_islands(
    plan: Plan,
    exchange: Several,
    program: Program,
    topology: Topology,
    limits: Limits | None = None,
    options: Mapping[str, str | bool | int] | None = None,
) -> Verification:
    """Compiles the step of one island and the meeting of all, and compares both with the plan."""
    island = island_of(topology, exchange.islands)
    step = verify_program(program, island, limits, options)
    joined = used_by(topology, exchange.islands, program.plan.mesh.devices)
    of_one = isinstance(exchange, DiLoCo) and exchange.delay > 0
    mesh, machine = (program.plan.mesh, island) if of_one else (plan.mesh, joined)
    compile_target = target(machine, mesh)
    collectives, met, seconds = list[InstructionTraffic](), list[CompiledStep](), 0.0
    for meeting in abstract_meetings(exchange, program):
        exported = export_meeting(meeting, compile_target.platform)
        outcome = compile_apart(exported, compile_target, limits, options)
        if isinstance(outcome, Failure) or step.compiled is None:
            findings = (failed(outcome, plan),) if isinstance(outcome, Failure) else ()
            return replace(step, plan=plan, compiled=None, findings=(*step.findings, *findings))
        compiled, traffic = read_compiled(mesh, (), machine, compile_target, exported, outcome)
        met.append(compiled)
        collectives += traffic.found
        seconds += outcome.seconds
    assert step.compiled is not None
    exchange_bytes, memory = plan.estimate.device_bytes.exchange, step.compiled.device_bytes
    together = {**memory, "exchange": exchange_bytes, "peak": memory["peak"] + exchange_bytes}
    compiled = replace(step.compiled, device_bytes=together, meeting=_together(met))
    others = [
        finding
        for finding in step.findings
        if finding.code not in ("memory-differs", "out-of-memory")
    ]
    return replace(
        step,
        plan=plan,
        compiled=compiled,
        compile_seconds=step.compile_seconds + seconds,
        findings=(
            *crossings(plan, exchange, collectives),
            *report.memory(plan, topology, compiled),
            *others,
        ),
    )


def checked_calls(exchange: DiLoCo, program: Program) -> tuple[IslandCall, ...]:
    """Returns what an island runs beside steps and what its devices could communicate in,
    abstract.
    """
    calls = calls_of(exchange, program, program.mesh)
    return tuple(call for sending, _, arriving in calls for call in (sending, arriving))


def abstract_mesh_of_all(mesh: Mesh | AbstractMesh, islands: int) -> AbstractMesh:
    """The mesh of all islands, one after another, without devices."""
    sizes = (islands, *mesh.shape.values())
    names = (ISLAND.name, *mesh.axis_names)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto, *mesh.axis_types))


def abstract_meetings(exchange: Several, program: Program) -> tuple[BetweenSteps, ...]:
    """Returns what islands run beside steps, whose devices need not be here: of compressed
    gradients the exchange of most steps; with a delay what each island runs alone, as copies cross.
    """
    mesh = abstract_mesh_of_all(program.mesh, exchange.islands)
    if isinstance(exchange, Compressed):
        return exchanges_of(exchange, program, mesh)[-1:]
    if isinstance(exchange, DiLoCo) and exchange.delay:
        return checked_calls(exchange, program)
    return meetings_of(exchange, program, mesh)


def _together(met: Sequence[CompiledStep]) -> CompiledStep:
    """Several meetings as one: what all of them move, and the memory of the largest."""
    first = max(met, key=lambda step: step.device_bytes.get("peak", 0))
    return replace(
        first,
        collectives=tuple(collective for step in met for collective in step.collectives),
        wire_bytes=sum(step.wire_bytes for step in met),
        compute_seconds=sum(step.compute_seconds for step in met),
        unread=tuple(problem for step in met for problem in step.unread),
        reductions=tuple(reduction for step in met for reduction in step.reductions),
        scheduled=(),
    )


@diagnostic
def crossings(
    plan: Plan, exchange: Several, found: Sequence[InstructionTraffic]
) -> Iterator[Finding]:
    """Returns what crosses between islands, and was not planned, or is wider than promised."""
    crossing = [
        collective for collective in found if ISLAND.name in collective.axes or not collective.axes
    ]
    by_copies = isinstance(exchange, DiLoCo) and exchange.delay > 0
    planned = () if by_copies else plan.estimate.collectives
    due = sum(c.total_bytes for c in planned if ISLAND.name in c.axes)
    moved = sum(collective.bytes * collective.count for collective in crossing)
    if moved > due * (1 + SLACK) + PADDING * sum(
        parameter.trained for parameter in plan.parameters
    ):
        worst = max(crossing, key=lambda collective: collective.bytes * collective.count)
        yield Finding(
            code="hidden-exchange",
            severity="error",
            where=worst.op_name or worst.name,
            message=(
                f"a meeting moves {bytes_text(moved)} per device between islands,"
                f" {bytes_text(due)} were planned."
            ),
            hint="tell us: the meeting is the same program for every model",
        )
    allowed = WIRES[exchange.wire] if isinstance(exchange, DiLoCo) else None
    dtypes = {dtype for collective in crossing for dtype in collective.dtypes}
    if allowed is not None and dtypes - allowed:
        yield Finding(
            code="wide-exchange",
            severity="error",
            where="outer gradient",
            message=(
                f"outer gradients cross as {', '.join(sorted(dtypes))}, and not as"
                f" {', '.join(sorted(allowed))}."
            ),
        )


def export_meeting(meeting: BetweenSteps, platform: str) -> ExportedStep:
    """Lowers a meeting of islands for a platform that need not be here."""
    arguments = meeting.arguments()

    def meet(*arguments: Any) -> tuple[Any, Any]:
        return meeting.function(*arguments), ()

    return exported(
        meet,
        arguments,
        results=jax.tree.leaves(meeting.results()),
        mesh=meeting.mesh,
        platform=platform,
        what="the meeting of islands",
    )


def verified(
    model: TracedModel,
    plan: Plan,
    machine: Topology,
    limits: Limits | None,
    options: Options | None,
) -> Verification:
    """A plan of several islands against what the compiler makes of a step and of the meetings."""
    exchange = cast("Several", plan.exchange)
    require_carried(model.traced.problem, plan, exchange)
    island = island_of(machine, exchange.islands)
    inner = priced_as_compiled(model, of_one_island(plan), island)
    priced = replace(plan, estimate=on_islands(inner, exchange, machine).estimate)
    step = lower(model, inner, abstract=True)
    return verify_islands(priced, exchange, step, machine, limits, options)
