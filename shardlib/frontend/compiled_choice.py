"""A plan for a traced model by what the compiler makes of plans: the best of several that it made
programs of, and the estimate of what it is given.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.cost.machine.corrections import without_margin
from shardlib.decisions.pins import PinMapping
from shardlib.errors import InfeasibleError, PinError
from shardlib.frontend.lowered import lower
from shardlib.frontend.traced_model import TracedModel
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.planner import ranked, search
from shardlib.planning.questions.counterfactual import pinned, roomy
from shardlib.verification.isolation import Limits
from shardlib.verification.refining.refine import refine as refined
from shardlib.verification.report import Verification
from shardlib.verification.targets import PLATFORMS, require_compiler
from shardlib.verification.verify import verify_program


def with_compiler(machine: Topology) -> Topology:
    """The machine, if its compiler is installed."""
    require_compiler(PLATFORMS[machine.chip.vendor])
    return machine


def priced_as_compiled(model: TracedModel, plan: Plan, machine: Topology) -> Plan:
    """The plan with the estimate of what the compiler is given: where there is no GPU, attention in
    blocks stands in the place of the kernel of cuDNN, and needs the memory of its scores.
    """
    if plan.attention != "cudnn":
        return plan
    pins = pinned(plan).but(attention="blocks")
    try:
        found = search(model.traced.problem, roomy(machine), pins)
    except (InfeasibleError, PinError):
        return plan
    return replace(plan, estimate=found.estimate)


def refined_by_compiler(
    model: TracedModel,
    machine: Topology,
    pin: PinMapping | None,
    wanted: int,
    limits: Limits | None,
) -> Plan:
    """The best of the first `wanted` plans that the compiler of the machine confirms; no margin of
    memory is held back, as the compiler says what is needed.

    Args:
        limits: seconds and bytes that the compiler may take for each.
    """

    def compiled(candidate: Plan) -> Verification:
        priced = priced_as_compiled(model, candidate, machine)
        return verify_program(lower(model, priced, abstract=True), machine, limits)

    machine = without_margin(machine)
    return refined(
        ranked(model.traced.problem, machine, pin), wanted, machine, compiled
    ).with_findings(*model.model.findings)
