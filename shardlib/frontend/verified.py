"""Verification of plans and programs with the compiler, and the best plan for every number of
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import optax

from shardlib import wings
from shardlib.annotation.tree import Init
from shardlib.annotation.trees import Filter, Tree
from shardlib.cost.roofline import without_margin
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import InfeasibleError, PinError, TopologyError
from shardlib.frontend.choice import island_batch
from shardlib.frontend.lowered import lower
from shardlib.frontend.model import Loss, TracedModel, problem, require_arguments
from shardlib.graph import Problem
from shardlib.lowering.program import Options
from shardlib.lowering.training_program import TrainingProgram
from shardlib.machines.topology import Topology, TopologyLike, of_size
from shardlib.planner.plan import Plan
from shardlib.planner.questions import pinned, priced_on, roomy
from shardlib.planner.scaling import Curve, curve
from shardlib.planner.search import ranked, search
from shardlib.verification.isolation import PLATFORMS, Limits, require_compiler
from shardlib.verification.refining import refine as refined
from shardlib.verification.report import Verification
from shardlib.verification.verify import verify_program

# --------------------------------------------------------------------------------------------------
# The best plan for every number of devices of a family of machines.


def scale(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree | Callable[[int], Tree],
    *,
    topology: TopologyLike,
    devices: Sequence[int],
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Filter = None,
    rows: str = "prove",
) -> Curve:
    """The best plan for every number of devices of a family of machines.

    Args:
        init: a model, see `shardlib.plan`; so all that says no more here.
        loss: (model, batch) -> scalar or (scalar, metrics).
        optimizer: an optax transformation.
        batch: the global batch, for strong scaling: the model is traced once; or a function from a
            number of devices to the batch, for weak scaling: it is traced once per number.
        topology: a member of the family, "16*h100:8" or "v5e:16x16" (`shardlib.machines.topology`).
        devices: numbers of devices, in any order; one point of the curve each.
        pin: decisions fixed by hand, in the plan of every point.
        batch_axes: logical axes of the batch.
        name: what to call the model.
        wrt: what is trained.
        rows: "prove" or "mean", how the loss depends on the rows of the batch.

    Returns:
        The curve: a point for every number of devices, ascending, with its plan; one where no plan
        fits or the pins allow none says why. `print` shows it as a table.

    Raises:
        ShardlibError: as `shardlib.plan`, `InfeasibleError` apart.
        TopologyError: the topology does not parse, or its family has no machine of that size.
    """
    require_arguments(
        "scale",
        loss=loss,
        optimizer=optimizer,
        batch=batch,
        topology=topology,
        pin=pin,
        name=name,
    )
    machines = [of_size(topology, number) for number in devices]
    weak, exchange = callable(batch), Pins.parse(pin).exchange
    traced: dict[int, Problem] = {}
    fastest: dict[int, Plan] = {}

    def planned(machine: Topology) -> Plan:
        key = machine.devices if weak else 0
        if key not in traced:
            traced[key] = problem(
                init,
                loss,
                optimizer,
                island_batch(batch(key) if callable(batch) else batch, batch_axes, None, pin),
                batch_axes=batch_axes,
                name=name,
                wrt=wrt,
                rows=rows,
            )
        best = fastest.get(key)
        load = best.source.load if best is not None and best.source is not None else None
        try:
            plan = search(traced[key], machine, pin, load=load)
        except TopologyError as error:
            if exchange.islands == 1:
                raise
            raise PinError(str(error)) from error  # islands are not parts of this machine
        if (
            best is not None
            and exchange.islands == 1
            and best.estimate.step_seconds < plan.estimate.step_seconds
        ):
            plan = (
                priced_on(best, machine) or plan
            )  # a part of the machine is faster than all of it
        fastest[key] = plan
        return plan

    found = curve(name or "the model", "weak" if weak else "strong", machines, planned)
    model = next(iter(traced.values())).model if traced else found.model
    return replace(found, model=model)


# --------------------------------------------------------------------------------------------------
# The best of several plans by the compiler's figures, and estimates of a given plan.


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
        listed = search(model.traced.problem, roomy(machine), pins)
    except (InfeasibleError, PinError):
        return plan
    return replace(plan, estimate=listed.estimate)


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


def verified(
    model: TracedModel,
    plan: Plan,
    machine: Topology,
    limits: Limits | None,
    options: Options | None,
) -> Verification:
    """A plan against what the compiler makes of its step, and of the meetings of its islands."""
    if plan.exchange.islands > 1:
        several = wings.islands("verification")
        return several.verified(model, plan, machine, limits, options)
    program = lower(model, priced_as_compiled(model, plan, machine), abstract=True)
    return verify_program(program, machine, limits, options)


def verified_program(
    program: TrainingProgram,
    machine: Topology,
    limits: Limits | None,
    options: Options | None,
) -> Verification:
    """The same of a program."""
    plan, step = program.plan, program.loss_program
    if step is None:
        return program.verify(limits=limits, options=options)
    if plan.exchange.islands > 1:
        several = wings.islands("verification")
        return several.verify_islands(plan, plan.exchange, step, machine, limits, options)
    return verify_program(step, machine, limits, options)
