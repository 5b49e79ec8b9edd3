"""Which hosts of a job stay idle under a plan, and what a plan for all of them would take."""

from __future__ import annotations

import socket
from collections import defaultdict

import jax
from jax.sharding import Mesh

from shardlib.errors import InfeasibleError, PinError
from shardlib.frontend.steps.step_program import StepProgram
from shardlib.lowering.program.program import Program
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import seconds_text
from shardlib.processes.agreement import all_say, of_first, processes_text
from shardlib.processes.values import idle_processes


def is_idle(program: object) -> bool:
    """Whether this process owns no device of a program's mesh."""
    mesh = None if jax.process_count() == 1 else getattr(program, "mesh", None)
    return isinstance(mesh, Mesh) and jax.process_index() in idle_processes(mesh.devices.flat)


def idle_text(program: Program | StepProgram) -> str:
    """Which processes own no device of a program's mesh, on which hosts, and the fastest plan that
    leaves none idle; empty where all own one. To be called by all processes.
    """
    plan, mesh = program.plan, program.mesh
    idle = idle_processes(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
    if not idle:
        return ""
    hosts = all_say("host", socket.gethostname())
    on: defaultdict[str, list[int]] = defaultdict(list)
    for process in idle:
        on[hosts[process]].append(process)
    places = ", ".join(f"{processes_text(numbers)} on {host}" for host, numbers in on.items())
    return (
        f"{len(idle)} of {len(hosts)} processes own none of the {plan.mesh.devices} devices of the"
        f" plan {plan.mesh} and only wait with the others ({places}); "
        + of_first(f"plan for all devices, {plan.digest}", lambda: _on_all(plan))
    )


def _on_all(plan: Plan) -> str:
    """The fastest plan that leaves no device idle, beside a plan that does."""
    if plan.source is None:
        return "the plan was given, so that none for all devices is known"
    devices = plan.source.topology.devices
    try:
        other = plan.source.on_all_devices()
    except (InfeasibleError, PinError) as error:
        return f"there is no plan for all {devices} devices ({str(error).partition(chr(10))[0]})"
    return (
        f"the fastest plan for all {devices} devices, {other.mesh}, is predicted to take"
        f" {seconds_text(other.estimate.step_seconds)} a step in place of"
        f" {seconds_text(plan.estimate.step_seconds)}"
    )
