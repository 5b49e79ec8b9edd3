"""The choice of a plan for a traced model: the given one, or the fastest by the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import jax

from shardlib import wings
from shardlib.annotation.trees import Tree
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import PinError, PlanError, VerificationError
from shardlib.findings import Finding, diagnostic
from shardlib.frontend.model import TracedModel, layout_findings, layout_pins
from shardlib.graph import Problem
from shardlib.machines.topology import Topology, TopologyLike
from shardlib.machines.topology import topology as parse_topology
from shardlib.planner.plan import Plan
from shardlib.planner.search import PlanSource, search, workload_for_framework
from shardlib.processes.machine import let_collectives_wait
from shardlib.processes.timing import in_words

# --------------------------------------------------------------------------------------------------
# The machine to plan for: named by the user, of a plan, or this host.


def machine_of_plan(topology: TopologyLike | None, plan: Plan | None) -> Topology:
    """The machine that is asked for; it must be the plan's own.

    Args:
        topology: what the user names; None for that of the plan.
        plan: None where there is none yet.
    """
    machine = machine_of(topology if topology is not None or plan is None else plan.topology)
    if plan is not None and machine.name != plan.topology:
        raise VerificationError(
            f"the plan was made for {plan.topology} and cannot be verified on {machine.name}\nTry:"
            f" plan for {machine.name}, or leave out `topology`"
        )
    return machine


def machine_of(spec: TopologyLike | None) -> Topology:
    """The machine of a spelling; simulated CPU devices have the rates that are measured here.

    Args:
        spec: a spelling, a topology, a mesh or a list of devices, or None for all devices that JAX
            sees, those of the other processes of a job included.
    """
    if spec is None:
        let_collectives_wait()
        if jax.default_backend() == "cpu":
            return _measured(jax.device_count())
        spec = jax.devices()
    parsed = parse_topology(spec)
    simulated = not isinstance(spec, Topology) and parsed.name.startswith("cpu:")
    return _measured(parsed.devices) if simulated else parsed


def _measured(devices: int) -> Topology:
    from shardlib.calibration import measured_cpu  # no other machine needs what measures it

    return measured_cpu(devices)


def island_batch(
    batch: Tree, batch_axes: Tree, plan: Plan | None, pin: PinMapping | Pins | None
) -> Tree:
    """The batch of one of the islands of a plan, or else of pins; the batch itself where there is
    one.
    """
    exchange = plan.exchange if plan is not None else Pins.parse(pin).exchange
    if exchange.islands == 1:
        return batch
    return wings.islands("lowering").rows_of_one(batch, batch_axes, exchange)


def searched(
    model: TracedModel,
    topology: TopologyLike | None,
    pin: PinMapping | None,
    *,
    framework: str | None = None,
) -> tuple[TracedModel, Plan]:
    """The plan, and what it was made for: a loss that is another one for a microbatch of the plan
    than for the batch is taken for one whose rows meet.

    Args:
        topology: the machine; None for the devices of this host.
        framework: the training framework that runs the plan; None for programs of shardlib.
    """
    machine = machine_of(topology)
    if framework is not None:
        pin = honoured(model, machine, pin)
        if Pins.parse(pin).exchange.islands > 1:
            raise PinError(
                f"an exchange is about programs that shardlib makes, and {framework} runs its"
                " own\nTry: leave out one of the two"
            )
        load = workload_for_framework(framework, model.traced.problem, machine)
        plan = search(load.problem, machine, pin, workload=load)
        return model, plan.with_findings(*model.model.findings)
    unhonoured, pin = pin, honoured(model, machine, pin)
    plan = search(model.traced.problem, machine, pin)
    rows = model.traced.rows_in(plan.microbatches) if plan.microbatches > 1 else None
    if rows is not None and not rows.splits:
        problem = replace(model.traced.problem, rows=rows)
        model = replace(model, traced=replace(model.traced, problem=problem))
        plan = search(problem, machine, pin)
    if plan.exchange.islands > 1:
        wings.islands("planning").require_carried(model.traced.problem, plan, plan.exchange)
    plan = with_model(plan, model)
    instead = (*_islands_instead(model, plan, machine), *measured_under_load(machine))
    layouts = layout_findings(
        model.traced.layouts,
        model.traced.problem,
        plan,
        unhonoured,
        model.honour,
        _searcher(model, machine, plan),
    )
    return model, plan.with_findings(*instead, *model.model.findings, *layouts)


@diagnostic
def measured_under_load(machine: Topology) -> tuple[Finding, ...]:
    """A warning where other programs slowed the measurement of the prices."""
    measured = machine.measured
    if measured is None or not (why := in_words(measured.load or 0.0)):
        return ()
    return (
        Finding(
            code="measured-under-load",
            severity="info",
            where=machine.name,
            message=f"the prices were {measured}, while {why}; the times are uncertain.",
            hint="plan again when the machine is quieter, which measures it again",
        ),
    )


@diagnostic
def _islands_instead(model: TracedModel, plan: Plan, machine: Topology) -> tuple[Finding, ...]:
    """Advice where steps wait for a network, whose parts could be islands."""
    if len(machine.tiers) == 1 or machine.tiers[0].kind != "network":
        return ()
    planning = wings.wing_module("shardlib.islands.planning")
    rows = [
        shape[axes.index("batch")]
        for _, shape, _, axes in model.traced.problem.batch
        if "batch" in axes
    ]
    return () if planning is None else planning.islands_instead(plan, machine, rows)


def honoured(
    model: TracedModel, machine: Topology, pin: PinMapping | Pins | None
) -> PinMapping | None:
    """The pins, with layouts that the model brings along where these are pins."""
    if model.honour != "pins":
        return cast("PinMapping | None", pin)
    pins = layout_pins(model.traced.layouts, model.traced.problem, pin, _searcher(model, machine))
    return cast("PinMapping | None", pins)


def _searcher(
    model: TracedModel, machine: Topology, plan: Plan | None = None
) -> Callable[[Pins], Plan]:
    """The planner for a model on a machine, which searches nothing twice that a plan has."""
    if plan is not None and isinstance(plan.source, PlanSource):
        return partial(plan.source.search, machine)
    return lambda pins: search(model.traced.problem, machine, pins)


def with_model(plan: Plan, model: TracedModel) -> Plan:
    """The plan, which also answers what other numbers of islands would take, and writes itself as
    plain JAX.
    """
    if not isinstance(plan.source, PlanSource):
        return plan

    def written(plan: Plan, mode: str) -> str:
        from shardlib.frontend.plain_jax import plain_text  # planning does without the lowering

        return plain_text(model, plan, mode)

    def island_problem(islands: int) -> Problem:
        before = plan.exchange.islands
        return wings.islands("lowering").problem_on_islands(model, before, islands)

    return replace(
        plan, source=replace(plan.source, island_problem=island_problem, plain_jax=written)
    )


def runnable(plan: Plan) -> Plan:
    """The plan, if a program can be made of it."""
    if plan.framework is not None:
        raise PlanError(
            f"the plan is made for {plan.framework.name}, which runs it itself\nTry: plan.emit(),"
            " or a plan without framework="
        )
    return plan


def given_or_searched(
    model: TracedModel, plan: Plan | None, topology: TopologyLike | None, pin: PinMapping | None
) -> tuple[TracedModel, Plan]:
    """The plan that is given, or else the one that is searched for, with the model."""
    return searched(model, topology, pin) if plan is None else (model, runnable(plan))
