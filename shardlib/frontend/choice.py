"""A plan for a traced model: the fastest by the cost model, or the best of several that the
compiler made programs of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from shardlib.cost.machine.corrections import without_margin
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import InfeasibleError, PinError, PlanError
from shardlib.frontend.lowered import lower
from shardlib.frontend.machines import machine_of
from shardlib.frontend.traced_model import TracedModel
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.planner import prepared_for, ranked, search
from shardlib.planning.questions.counterfactual import pinned, roomy
from shardlib.verification.isolation import Limits
from shardlib.verification.refine import refine as refined
from shardlib.verification.refine import wanted_plans
from shardlib.verification.report import Verification
from shardlib.verification.verify import verify_program


def with_allowed(
    pin: PinMapping | Pins | None, allow: Mapping[str, str | Sequence[str]] | None
) -> PinMapping | None:
    """Pins with dtypes that the planner may choose.

    Args:
        pin: decisions fixed by hand.
        allow: dtypes, one or several, by what has one; None allows no others.
    """
    if isinstance(pin, Pins):  # functions that take pins take them read, too
        return cast("PinMapping", pin.changed(Pins.parse({"allow": allow or {}})))
    return {**(pin or {}), "allow": allow} if allow else pin


def wanted(refine: int | None, framework: str | None) -> int:
    """How many plans to compile; none of a framework, which runs its own programs.

    Args:
        refine: as the user says.
        framework: the training framework; None for programs of shardlib.

    Raises:
        PlanError: `refine` is no integer of at least 0, or what is asked for is about programs of
            shardlib, and a framework is named.
    """
    count = wanted_plans(refine)
    if framework is not None and count:
        raise PlanError(
            f"refine is about programs that shardlib makes, and {framework} runs its"
            " own\nTry: leave out one of the two"
        )
    return count


def searched(
    model: TracedModel,
    topology: str | Topology | None,
    pin: PinMapping | None,
    *,
    framework: str | None = None,
) -> tuple[TracedModel, Plan]:
    """The plan, and what it was made for: a loss that is another one for a microbatch of the plan
    than for the batch is taken for one whose rows meet.

    Args:
        model: the traced model.
        topology: the machine; None for the devices of this host.
        pin: decisions fixed by hand.
        framework: the training framework that runs the plan; None for programs of shardlib.

    Returns:
        The model, with what the search taught of its rows, and its plan.

    Raises:
        ShardlibError: topology, pin or nothing fits.
    """
    machine = machine_of(topology)
    if framework is not None:
        load = prepared_for(framework, model.traced.problem, machine)
        found = search(load.problem, machine, pin, load=load)
        return model, found.with_findings(*model.model.findings)
    found = search(model.traced.problem, machine, pin)
    rows = model.traced.rows_in(found.microbatches) if found.microbatches > 1 else None
    if rows is not None and not rows.splits:
        problem = replace(model.traced.problem, rows=rows)
        model = replace(model, traced=replace(model.traced, problem=problem))
        found = search(problem, machine, pin)
    return model, found.with_findings(*model.model.findings)


def runnable(plan: Plan) -> Plan:
    """The plan, if a program can be made of it.

    Raises:
        PlanError: it is made for another framework.
    """
    if plan.framework is not None:
        raise PlanError(
            f"the plan is made for {plan.framework.name}, which runs it itself\nTry: plan.emit(),"
            " or a plan without framework="
        )
    return plan


def given_or_searched(
    model: TracedModel,
    plan: Plan | None,
    topology: str | Topology | None,
    pin: PinMapping | None,
) -> tuple[TracedModel, Plan]:
    """The plan that is given, or else the one that is searched for, with the model.

    Args:
        model: the traced model.
        plan: what is given, if anything.
        topology, pin: see `searched`.

    Raises:
        ShardlibError: as `searched`; `PlanError` where the plan is another framework's.
    """
    return searched(model, topology, pin) if plan is None else (model, runnable(plan))


def priced_as_compiled(model: TracedModel, plan: Plan, machine: Topology) -> Plan:
    """The plan with the estimate of what the compiler is given: where there is no GPU, attention in
    blocks stands in the place of the kernel of cuDNN, and needs the memory of its scores.

    Args:
        model: the traced model.
        plan: what is compiled ahead of time.
        machine: what it is compiled for.

    Returns:
        The same decisions; the estimate is that of the plan where all of it is compiled.
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
        model: the traced model.
        machine: what to compile for.
        pin: decisions fixed by hand.
        wanted: how many plans must survive their compilation, at least 1.
        limits: seconds and bytes that the compiler may take for each.

    Raises:
        ShardlibError: see `shardlib.verification.refine.refine`.
    """

    def compiled(candidate: Plan) -> Verification:
        priced = priced_as_compiled(model, candidate, machine)
        return verify_program(lower(model, priced, abstract=True), machine, limits)

    machine = without_margin(machine)
    return refined(
        ranked(model.traced.problem, machine, pin), wanted, machine, compiled
    ).with_findings(*model.model.findings)
