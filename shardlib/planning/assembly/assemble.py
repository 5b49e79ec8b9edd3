"""Builds the plan of one candidate: layouts, estimate, findings."""

from __future__ import annotations

from dataclasses import replace

from shardlib.cost.estimate import Offloaded
from shardlib.cost.pricing.estimated import estimate, with_corrections
from shardlib.cost.pricing.step_collectives import Placed, collectives
from shardlib.cost.pricing.variants.replicated import replicated
from shardlib.decisions.plain_data import values_of
from shardlib.graph.graph import Graph
from shardlib.graph.problem import Problem
from shardlib.hardware.placement import Placement
from shardlib.hardware.topology import Topology
from shardlib.planning.assembly import findings, layouts
from shardlib.planning.assembly.activations.listing import activation_layouts
from shardlib.planning.assembly.candidate_price import OnMachine, price
from shardlib.planning.assembly.replicated import of_replicated
from shardlib.planning.assembly.staged_programs import faster_as_programs
from shardlib.planning.assembly.stages import stage_seconds
from shardlib.planning.decisions.candidate import Candidate, completed
from shardlib.planning.plan import FrameworkJob, Link, Plan, Search
from shardlib.planning.space.limits import batch_size, experts_form, sequence_size
from shardlib.planning.space.workload import Workload
from shardlib.rules import Rules


def assemble(
    load: Workload,
    topology: Topology,
    candidate: Candidate,
    certificate: Search,
    *,
    rules: Rules | None = None,
    left_out: tuple[str, ...] = (),
    most: int = 0,
    pinned: bool = False,
) -> Plan:
    """Builds the plan of a candidate."""
    one = OnMachine.of(load, topology, candidate)
    given, load, how, saved = load, one.load, candidate.decisions, one.saving()
    problem, colouring = load.problem, load.colouring
    compute, stored = (
        (candidate.choice.rules(), None)
        if rules is None
        else layouts.split_rules(rules, colouring.batch_colour)
    )
    programs = one.programs()
    listed = collectives(
        [(program.work, part) for program, part in programs],
        candidate.choice,
        how,
        one.once_a_step(),
        Placed(mesh=how.mesh, placement=one.placed, candidate=one.c),
        load.model,
        one.pricer,
        saved.messages if saved else {},
    )
    cost = estimate(
        one.totals(),
        0,
        listed=listed,
        tokens=problem.tokens,
        model_flops=model_flops(problem),
        mesh=how.mesh,
        peak_flops_per_s=topology.in_use(how.mesh.devices).chip.peak(problem.compute_dtype),
    )
    decisions = completed(candidate, experts_form(problem), load.class_names, rules=compute)
    plan = Plan(
        **values_of(decisions),
        model=problem.model,
        topology=topology.name,
        placement=_placement(one.placed, topology),
        parameters=layouts.parameter_layouts(
            problem, colouring.parameters, load.frozen, how.mesh, compute, how.zero, stored
        ),
        activations=activation_layouts(
            programs[0][0].facts,
            candidate.choice,
            how.mesh,
            how.context if how.mesh["context"] > 1 else "none",
            load.class_names,
        ),
        batch_layouts=layouts.batch_layouts(problem, colouring.batch, how.mesh, compute),
        estimate=replace(
            with_corrections(cost, topology),
            stage=stage_seconds(one),
            offloaded=_offloaded(given, topology, one),
        ),
        search=certificate,
        framework=_framework(load),
    )
    alike = replicated(
        [(program.facts, part) for program, part in programs],
        candidate.choice,
        how,
        how.mesh,
        one.c,
        load.model,
        one.pricer,
    )
    return plan.with_findings(
        *findings.notes(load, topology, plan, left_out, most, pinned),
        *findings.unused_loops(plan, len(saved.messages) if saved else 0),
        *findings.unpriced(plan, topology),
        *faster_as_programs(given, topology, candidate, plan),
        *of_replicated(alike, how.mesh, plan.estimate.step_seconds),
    )


def _framework(load: Workload) -> FrameworkJob | None:
    """The framework that runs the plan, with the sizes of the job."""
    if load.framework is None:
        return None
    experts = load.colouring.colours[load.expert].divisor if load.expert else 1
    return FrameworkJob(
        name=load.framework.name,
        profile=load.profile.name,
        vendor=load.vendor,
        batch=batch_size(load.problem, load.colouring),
        sequence=sequence_size(load.problem, load.colouring),
        layers=max(load.counts, default=0),
        compute_dtype=load.problem.compute_dtype,
        experts=experts,
    )


def _offloaded(load: Workload, topology: Topology, one: OnMachine) -> Offloaded | None:
    """What the same plan would need and take with nothing offloaded, over what it does."""
    if not one.candidate.decisions.offload:
        return None
    less, more = one.totals(), price(load, topology, one.candidate.but(offload=()))
    return Offloaded(
        device_bytes=float(more.peak_bytes[0] - less.peak_bytes[0]),
        seconds=max(0.0, float(less.step_seconds[0] - more.step_seconds[0])),
    )


def _placement(placed: Placement, topology: Topology) -> tuple[tuple[str, tuple[Link, ...]], ...]:
    return tuple(
        (axis, tuple(Link(kind=topology.tiers[span.tier].kind, ways=span.ways) for span in parts))
        for axis, parts in placed.items()
    )


def model_flops(problem: Problem) -> float:
    """FLOPs that a step needs with no recomputation: three times the matmuls and convolutions of
    the forward pass, or those of the step, where these are fewer.

    A matmul's backward pass is two matmuls of the same size (Kaplan et al., arXiv:2001.08361,
    section 2.1). There are fewer where parameters are frozen, and where nobody asks for the
    gradient of an operand, such as that of the batch.
    """
    usual, plain = 3 * _matmul_flops(problem.forward), problem.steps.get("none")
    return usual if plain is None else min(usual, _matmul_flops(plain.graph))


def _matmul_flops(graph: Graph) -> float:
    """FLOPs of the matmuls and convolutions of a graph."""
    return sum(
        op.flops * graph.trips(op.region)
        for op in graph.ops
        if op.category in ("matmul", "convolution")
    )
