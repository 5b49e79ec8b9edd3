"""Verification of a plan with the real compiler, ahead of time, without the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from shardlib.layout import MeshShape
from shardlib.lowering.program import Program
from shardlib.machines.topology import Topology
from shardlib.planner.compiler_flags import require_profile
from shardlib.planner.plan import Plan
from shardlib.verification.hlo import parse
from shardlib.verification.isolation import (
    Compiled,
    ExportedStep,
    Failure,
    Limits,
    Target,
    compile_apart,
    exported,
    failed,
    require_compiler,
    target,
)
from shardlib.verification.report import CompiledStep, Verification, compare, other_compiler
from shardlib.verification.schedule import Rates, schedule
from shardlib.verification.traffic import Traffic, once, read_traffic, scheduled, timed


def verify_program(
    program: Program,
    topology: Topology,
    limits: Limits | None = None,
    options: Mapping[str, str | bool | int] | None = None,
) -> Verification:
    """Compiles the step of a program for a topology in a process of its own and compares it with
    its plan.

    Args:
        options: of the compiler; by default those of the plan.
    """
    compile_target = target(topology, program.plan.mesh, program.plan.axis_order)
    require_compiler(compile_target.platform)
    options = program.plan.compiler_options if options is None else options
    require_profile(options)
    step = export_step(program, compile_target.platform)
    outcome = compile_apart(step, compile_target, limits, options)
    return judge(program.plan, topology, compile_target, step, outcome)


def judge(
    plan: Plan,
    topology: Topology,
    compile_target: Target,
    step: ExportedStep,
    outcome: Compiled | Failure,
) -> Verification:
    """Compares what a compiler made with what a plan promised."""
    if isinstance(outcome, Failure):
        return Verification(
            plan=plan,
            compiled=None,
            compile_seconds=outcome.seconds,
            versions={},
            findings=(failed(outcome, plan),),
        )
    compiled, traffic = read_compiled(
        plan.mesh, plan.axis_order, topology, compile_target, step, outcome
    )
    findings = compare(
        plan, topology, compiled, traffic.found, outcome.log, step.donated, traffic.aliased
    )
    return Verification(
        plan=plan,
        compiled=compiled,
        compile_seconds=outcome.seconds,
        versions=outcome.versions,
        findings=(*findings, *other_compiler(plan, outcome.versions)),
    )


def read_compiled(
    mesh: MeshShape,
    axes: tuple[str, ...],
    topology: Topology,
    compile_target: Target,
    step: ExportedStep,
    program: Compiled,
) -> tuple[CompiledStep, Traffic]:
    """Reads a compiled program, and the collectives that it runs."""
    module = parse(program.text)
    traffic = read_traffic(module, mesh, step.arguments, compile_target.positions)
    whole, clock = len(compile_target.positions) == 1, compile_target.cycles_per_s
    run = None
    if whole and compile_target.platform != "cpu":
        run = schedule(module, Rates.of(topology, clock), once(traffic, mesh, topology, axes))
    compiled = CompiledStep(
        device_bytes=program.memory,
        collectives=timed(traffic, mesh, topology, axes),
        wire_bytes=sum(item.wire_bytes for item in traffic.found),
        compute_seconds=traffic.cycles / clock if clock else 0.0,
        device_kind=program.device_kind,
        unread=traffic.problems,
        reductions=traffic.reductions,
        scheduled=scheduled(module, mesh) if whole else (),
        schedule=run,
    )
    return compiled, traffic


def export_step(program: Program, platform: str) -> ExportedStep:
    """Lowers the step of a program for a platform that need not be here."""
    state = jax.tree.leaves(program.state)
    step = program.step_function()

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        return step(state, batch)

    run.__name__ = run.__qualname__ = step.__name__
    return exported(
        run,
        (program.state, program.batch),
        results=state,
        mesh=program.mesh,
        platform=platform,
        what="the training step",
    )
