"""From a candidate to a `Plan` (`assemble`): its exact price, layouts, stages and findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.cost.collectives import DeviceGroup, Slot, axis_group, storage_group
from shardlib.cost.facts import Facts
from shardlib.cost.framework import XLA, interval
from shardlib.cost.items import kernel_items
from shardlib.cost.pricing import (
    Offloaded,
    StageSeconds,
    Totals,
    collectives,
    combine,
    estimate,
    microbatch_seconds,
)
from shardlib.cost.roofline import applied, kernel_seconds
from shardlib.cost.stages import Meshes, Plans, step_costs
from shardlib.cost.tables import ROWS, Pricer, Quantity
from shardlib.cost.terms import Amount, Compute, Item, Term, local
from shardlib.cost.variants import (
    Corner,
    PolicyTallies,
    Saving,
    corner_tallies,
    interpolated,
    offloaded,
    partly_rematerialised,
    rematerialised_share,
    saving,
)
from shardlib.decisions.table import Decisions, values_of
from shardlib.findings import Finding, diagnostic
from shardlib.graph import Graph, Op, Problem
from shardlib.layout import BATCH_AXES, CONTEXT, EXPERT, STAGE, TENSOR, MeshShape, Rules
from shardlib.machines.topology import Placement, Topology, place
from shardlib.matrix_updates import CAUSE, UpdateGroup, exchanges, update_groups
from shardlib.planner import findings, layouts
from shardlib.planner.layouts import activation_layouts
from shardlib.planner.parts import Candidate, decisions_of
from shardlib.planner.plan import FrameworkJob, Link, ParameterLayout, Plan, Search
from shardlib.planner.workload import (
    CostProgram,
    Workload,
    batch_size,
    experts_form,
    prepare,
    sequence_size,
)
from shardlib.report.elements import percent_text, seconds_text
from shardlib.schedules import Pipelines, named

# --------------------------------------------------------------------------------------------------
# The exact price of one candidate, without cost tables.

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class PricedCandidate:
    """One candidate on a machine.

    Attributes:
        workload: the model with the candidate's dtypes and attention kernel, in stages or not.
        placement: placement of its mesh axes on the links.
        meshes: the candidate as an array of one.
    """

    workload: Workload
    candidate: Candidate
    pricer: Pricer
    placement: Placement
    meshes: Meshes

    @classmethod
    def of(cls, workload: Workload, topology: Topology, candidate: Candidate) -> PricedCandidate:
        """A candidate of a model on a topology."""
        decisions, mesh = candidate.decisions, candidate.mesh
        workload = workload.variant(
            decisions.dtypes, decisions.attention_kernel, staged=mesh["stage"] > 1
        )
        pricer = Pricer(topology.in_use(mesh.devices), workload.profile)
        placement = place(mesh, topology, decisions.axis_order)
        assert placement is not None, f"{mesh} does not fit {topology.name}"
        meshes = Meshes.placed([(mesh, placement)], [decisions.microbatches], pricer.topology)
        return cls(
            workload=workload,
            candidate=candidate,
            pricer=pricer,
            placement=placement,
            meshes=meshes,
        )

    @cached_property
    def plans(self) -> Plans:
        """The candidate under its decisions."""
        decisions = self.candidate.decisions
        return Plans(
            decisions=decisions, model=self.workload.model, pricer=self.pricer, meshes=self.meshes
        )

    def totals(self) -> Totals:
        """The price."""
        totals, overlap_saving = self._totals_without_collective_matmuls(), self.saving()
        if overlap_saving is None:
            return totals
        seconds = {
            **totals.seconds,
            "exposed": totals.seconds["exposed"] - overlap_saving.exposed_s,
            "compute": totals.seconds["compute"] + overlap_saving.compute_s,
        }
        return replace(totals, seconds=seconds)

    def saving(self) -> Saving | None:
        """The saving of collective matmuls over tensor; None without any."""
        candidate, workload = self.candidate, self.workload
        if candidate.decisions.collective_matmul != "loop" or candidate.mesh["stage"] > 1:
            return None
        return saving(
            workload.programs[candidate.decisions.remat, candidate.routes].facts,
            candidate.choice,
            self.placement,
            self.meshes,
            self.pricer,
            len(workload.layer_counts),
        )

    def tally(self, items: list[Item]) -> Array:
        """Quantities of items: array [groups + 2, `ROWS`, 1]; the last two segments are
        `INSIDE_LAYER` and `OUTSIDE_LAYERS`.
        """
        tallies, segments = self.workload.tallies, len(self.workload.layer_counts) + 2
        values = self.pricer.values(tallies.index, self.meshes.degrees)
        tally, total = tallies.of_items(items, self.candidate.choice), np.zeros(segments * ROWS)
        total[tally.rows] = tally.evaluated(values, np.zeros(1, dtype=np.int64))[:, 0]
        return total.reshape(segments, ROWS, 1)

    def programs(self) -> list[tuple[CostProgram, Array]]:
        """The program of every remat policy in use, with the share of each segment that runs it:
        layer groups, then values inside one layer, then embedding and head.
        """
        decisions, groups = self.candidate.decisions, self.candidate.group_policies
        layers = [float(counts[0]) for counts in self.plans.layers]
        if groups:
            shares = [
                (policy, number / count)
                for (policy, number), count in zip(groups, layers, strict=True)
            ]
        else:
            share = float(self.share()[0]) if decisions.remat_layers else 1.0
            shares = [(decisions.remat, share)] * len(layers)
        shares_by_policy = {
            policy: np.zeros(len(layers) + 2)
            for policy in dict.fromkeys(
                (decisions.remat, *(policy for policy, _ in shares), "none")
            )
        }
        shares_by_policy[decisions.remat][len(layers) :] = 1.0
        for k, (policy, share) in enumerate(shares):
            shares_by_policy[policy][k] += share
            shares_by_policy["none"][k] += 1 - share
        return [
            (self.workload.programs[policy, self.candidate.routes], segment_shares)
            for policy, segment_shares in shares_by_policy.items()
            if segment_shares.any()
        ]

    def bytes_once_per_step(self) -> dict[tuple[Slot, str], float]:
        """Bytes per device that move once per step, by slot and cause: updated parameters, and
        layers that are redistributed to stages.
        """
        stored_tally = self.tally(self.workload.stored)[..., self.meshes.degrees_index]
        decisions, shares = self.candidate.decisions, self.plans.shares_moved
        sizes_by_slot: dict[tuple[Slot, str], float] = {}
        if decisions.zero in (1, 2):
            experts = float((stored_tally[:, Quantity.EXPERTS] * shares).sum())
            sizes = float((stored_tally[:, Quantity.PARAMETERS] * shares).sum()) - experts, experts
            for flag, size in zip((False, True), sizes, strict=True):
                slot = Slot("gather", storage_group(experts=flag), "all-gather")
                sizes_by_slot[slot, "updated parameters"] = size
        parameters = (
            (Quantity.PARAMETERS_SHARDED, Quantity.FROZEN_SHARDED)
            if decisions.zero >= 3
            else (Quantity.PARAMETERS, Quantity.FROZEN)
        )
        gradients = (Quantity.ACCUMULATED_SHARDED if decisions.zero >= 2 else Quantity.ACCUMULATED,)
        kind = "all-gather" if decisions.virtual_stages % decisions.mesh["stage"] else "all-to-all"
        for rows, cause in ((parameters, "layers to stages"), (gradients, "gradients of layers")):
            size = self.plans.interleaved_bytes(stored_tally[:, rows].sum(1))
            sizes_by_slot[Slot("regroup", axis_group(STAGE), kind), cause] = float(size[0])
        return sizes_by_slot

    def _totals_without_collective_matmuls(self) -> Totals:
        candidate, workload, meshes = self.candidate, self.workload, self.meshes
        decisions = candidate.decisions

        def priced(work: Array, points: Sequence[Array]) -> Totals:
            quantities = step_costs(
                work, self.tally(workload.stored), points, workload.model, self.pricer, meshes
            )
            totals = combine(quantities, self.plans)
            return (
                offloaded(totals, decisions.offload, self.pricer, meshes)
                if decisions.offload
                else totals
            )

        def corner(policies: Corner) -> Totals:
            programs = {policy: workload.programs[policy, candidate.routes] for policy in policies}
            first = programs[policies[0]]
            if len(programs) == 1:
                return priced(self.tally(first.work), [self.tally(items) for items in first.points])
            parts = {
                policy: PolicyTallies(
                    work=self.tally(program.work),
                    stacks=tuple(self.tally(phase.stacks) for phase in program.phases),
                    points=tuple(tuple(map(self.tally, phase.points)) for phase in program.phases),
                )
                for policy, program in programs.items()
            }
            segments = [phase.segment for phase in first.phases]
            return priced(*corner_tallies(policies, parts, segments, workload.layer_counts))

        if candidate.group_policies:
            return partly_rematerialised(candidate.group_policies, self.plans.layers, corner)
        rematerialised = corner((decisions.remat,))
        if not decisions.remat_layers:
            return rematerialised
        return interpolated(corner(("none",)), rematerialised, self.share())

    def share(self) -> Array:
        """Share of the layers that rematerialise, where only a number of them does."""
        return rematerialised_share(self.candidate.decisions.remat_layers, self.plans)


def price(workload: Workload, topology: Topology, candidate: Candidate) -> Totals:
    """Prices one candidate on its own.

    Returns:
        Seconds and bytes, arrays of one candidate.
    """
    return PricedCandidate.of(workload, topology, candidate).totals()


# --------------------------------------------------------------------------------------------------
# Replicated compute: matmuls and convolutions that every device along a mesh axis computes in full.
#
# An axis that divides none of the FLOPs of an op does not make it faster: all devices along it
# compute the same. Derived from the items that a step is priced by, so it holds for any op and any
# reason: a dim that the axis does not divide, a dim without a colour, a rule that leaves it out.

#: Share of a step from which they are reported.
MIN_REPLICATED_SHARE = 0.01
#: Most ops that are named.
MAX_NAMED_OPS = 4


def replicated(
    priced: PricedCandidate, programs: Sequence[tuple[CostProgram, Array]]
) -> Mapping[tuple[str, ...], Mapping[str, float]]:
    """Seconds per step and device of matmuls and convolutions, by the mesh axes that do not divide
    them and by name.
    """
    meshes, pricer, shares = priced.meshes, priced.pricer, priced.plans.shares[:, 0]
    mesh, choice = priced.candidate.mesh, priced.candidate.choice
    by_axes: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for program, segment_shares in programs:
        facts = program.facts
        names = _parameters(facts)
        for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True):
            op = facts.graph.ops[kernel.op]
            share = float(segment_shares[item.segment]) * float(shares[item.segment])
            if op.category not in ("matmul", "convolution") or not share:
                continue
            for term in item.terms(choice):
                axes = _undivided(term, mesh)
                if axes and isinstance(term, Compute):
                    seconds = kernel_seconds(
                        term,
                        lambda amount: local(amount, meshes.degrees),
                        pricer.topology.chip,
                        pricer.efficiency,
                    )
                    by_axes[axes][_name(op, facts, names)] += (
                        float(seconds[0]) * term.trips * share * int(meshes.micro[0])
                    )
    return by_axes


def _undivided(term: Term, mesh: MeshShape) -> tuple[str, ...]:
    """Mesh axes larger than 1 that divide none of a kernel's FLOPs; stages divide layers, not
    ops.
    """
    if not isinstance(term, Compute):
        return ()
    flops: Amount = term.flops
    divides = {
        **dict.fromkeys(BATCH_AXES, flops.batch),
        EXPERT.name: flops.batch or flops.expert,
        CONTEXT.name: flops.context,
        TENSOR.name: flops.tensor,
    }
    return tuple(axis for axis, divided in divides.items() if mesh[axis] > 1 and not divided)


def _parameters(facts: Facts) -> dict[int, str]:
    """Value -> path of the parameter that it is a view of."""
    return {value: facts.graph.values[source].path for value, source in facts.weights.items()}


def _name(op: Op, facts: Facts, parameters: Mapping[int, str]) -> str:
    """The name of an op in output: the parameter that it uses, or else its place in the model."""
    if facts.gradients & set(op.results):
        return "gradients of weights"
    return (
        next((parameters[value] for value in op.operands if value in parameters), "")
        or op.scope
        or f"{op.kind} at equation {op.path}"
    )


@diagnostic
def replicated_findings(
    seconds_by_axes: Mapping[tuple[str, ...], Mapping[str, float]],
    mesh: MeshShape,
    step_seconds: float,
) -> tuple[Finding, ...]:
    """Findings about replicated compute: for each set of mesh axes the seconds per step, and the
    ops that take most of them.

    Args:
        seconds_by_axes: seconds by axes and op, see `replicated`.
    """
    reported = {
        axes: ops
        for axes, ops in sorted(seconds_by_axes.items())
        if sum(ops.values()) > MIN_REPLICATED_SHARE * step_seconds
    }
    return tuple(_finding(axes, ops, mesh, step_seconds) for axes, ops in reported.items())


def _finding(
    axes: tuple[str, ...], ops: Mapping[str, float], mesh: MeshShape, step_seconds: float
) -> Finding:
    total, sorted_ops = sum(ops.values()), sorted(ops.items(), key=lambda op: (-op[1], op[0]))
    listed = ", ".join(
        f"{name} {seconds_text(seconds)}" for name, seconds in sorted_ops[:MAX_NAMED_OPS]
    ) + (f" and {len(sorted_ops) - MAX_NAMED_OPS} more" if len(sorted_ops) > MAX_NAMED_OPS else "")
    over = " x ".join(f"{axis}={mesh[axis]}" for axis in axes)
    return Finding(
        code="replicated-compute",
        severity="warning",
        where="·".join(axes),
        hint="an axis of a size that divides their dims, or devices on another axis",
        message=(
            f"matmuls and convolutions that take {seconds_text(total)} of a step"
            f" ({percent_text(total / step_seconds)}) are replicated over {over}, and each of its"
            f" {mesh.ways(axes)} devices computes all of them: {listed}."
        ),
    )


# --------------------------------------------------------------------------------------------------
# Cost of a pipeline in one program as per-stage programs, on simulated devices.
#
# Stages in lockstep compute in every tick, even without a microbatch. On separate devices that time
# is idle anyway; simulated devices share the cores of one machine and lose it (docs/pipelines.md
# has measured ratios). Per-stage programs need one process, so the planner does not choose them
# unasked: a finding reports what they would save.

#: Share of a step below which a difference of predictions is not reported.
MIN_REPORTED_GAIN = 0.05


@diagnostic
def faster_as_programs(
    workload: Workload, topology: Topology, candidate: Candidate, plan: Plan
) -> tuple[Finding, ...]:
    """A finding where per-stage programs would be faster than stages in one program, on simulated
    devices.
    """
    if (
        workload.profile.name != XLA.name
        or any(tier.kind != "memory" for tier in topology.tiers)
        or not _can_be_programs(plan)
    ):
        return ()
    alternative = replace(
        candidate, decisions=replace(candidate.decisions, pipeline="programs", gather="use")
    )
    profile = replace(workload.profile, pipeline="asynchronous")
    asynchronous = prepare(workload.problem, workload.vendor, profile, workload.framework)
    seconds = float(price(asynchronous, topology, alternative).step_seconds[0])
    if seconds > (1 - MIN_REPORTED_GAIN) * plan.estimate.step_seconds:
        return ()
    return (
        Finding(
            code="faster-as-programs",
            severity="info",
            where=f"stage={plan.mesh['stage']}",
            message=(
                f"as per-stage programs a step is predicted to take {seconds_text(seconds)} instead"
                f" of {seconds_text(plan.estimate.step_seconds)}: in one program stages also"
                " compute where they have no microbatch, and simulated devices share their cores"
            ),
            hint="pipeline=programs, where one process has all devices",
        ),
    )


def _can_be_programs(plan: Plan) -> bool:
    """True if the stages of a plan are one program, and could be per-stage programs."""
    if plan.mesh["stage"] == 1 or plan.pipeline != "lockstep":
        return False
    pipeline = Pipelines.one(
        stages=plan.mesh["stage"],
        chunks=plan.virtual_stages,
        microbatches=plan.microbatches // plan.accumulation,
        lockstep=False,
    )
    return bool(named(plan.schedule).fits(pipeline)[0])


# --------------------------------------------------------------------------------------------------
# Time of a pipeline stage for one microbatch.
#
# The step graph has the forward and the backward pass; the forward pass is priced on its own, as a
# program that ends where the backward pass begins. The rest is backward.


def stage_seconds(priced: PricedCandidate) -> StageSeconds | None:
    """Seconds of one microbatch on the slowest stage; None without stages, and where layer groups
    follow different policies.
    """
    candidate, workload = priced.candidate, priced.workload
    decisions = candidate.decisions
    if candidate.mesh["stage"] == 1 or candidate.group_policies:
        return None
    rematerialised = _seconds(priced, workload.programs[decisions.remat, candidate.routes])
    if not decisions.remat_layers:
        return rematerialised
    fast = _seconds(priced, workload.programs["none", candidate.routes])
    share = float(priced.share()[0])
    return replace(
        rematerialised,
        **{
            name: getattr(fast, name) * (1 - share) + getattr(rematerialised, name) * share
            for name in ("forward", "backward", "weights")
        },
    )


def _seconds(priced: PricedCandidate, program: CostProgram) -> StageSeconds:
    stored = priced.tally(priced.workload.stored)
    step, forward = (
        step_costs(
            priced.tally(items), stored, [], priced.workload.model, priced.pricer, priced.meshes
        )
        for items in (program.work, program.forward)
    )
    # of the two messages of a microbatch, one goes forward
    roles = replace(forward.collectives, stage_sends=forward.collectives.stage_sends / 2)
    forward = replace(forward, collectives=roles)
    seconds = [float(microbatch_seconds(part, priced.plans)[0]) for part in (step, forward)]
    step_s, forward_s = seconds
    weights = float(step.kernels.weight_gradients[0]) / priced.candidate.mesh["stage"]
    return StageSeconds(
        forward=forward_s,
        backward=step_s - forward_s - weights,
        weights=weights,
        lockstep=priced.pricer.profile.pipeline == "lockstep",
    )


# --------------------------------------------------------------------------------------------------
# Builds the plan of one candidate: layouts, estimate, findings.


def assemble(
    workload: Workload,
    topology: Topology,
    candidate: Candidate,
    certificate: Search,
    *,
    rules: Rules | None = None,
    left_out: tuple[str, ...] = (),
    devices: int = 0,
    pinned: bool = False,
) -> Plan:
    """Builds the plan of a candidate."""
    priced = PricedCandidate.of(workload, topology, candidate)
    original = workload
    workload = priced.workload
    decisions = candidate.decisions
    overlap = priced.saving()
    problem, colouring = workload.problem, workload.colouring
    compute, stored_rules = (
        (candidate.choice.rules(), None)
        if rules is None
        else layouts.split_rules(rules, colouring.batch_colour)
    )
    programs = priced.programs()
    parameters = layouts.parameter_layouts(
        problem,
        colouring.parameters,
        workload.stack_dims,
        decisions.mesh,
        compute,
        decisions.zero,
        stored_rules,
    )
    matrix_updates = _matrix_groups(workload, decisions, parameters)
    collective_list = collectives(
        [(program.work, part) for program, part in programs],
        candidate.choice,
        priced.plans,
        {**priced.bytes_once_per_step(), **_exchanges(matrix_updates)},
        decisions.mesh,
        priced.placement,
        overlap.messages if overlap else {},
    )
    cost = estimate(
        priced.totals(),
        0,
        listed=collective_list,
        tokens=problem.tokens,
        model_flops=model_flops(problem),
        mesh=decisions.mesh,
        peak_flops_per_s=topology.in_use(decisions.mesh.devices).chip.peak(problem.compute_dtype),
    )
    plan_decisions = decisions_of(
        candidate, experts_form(problem), workload.group_names, rules=compute
    )
    plan = Plan(
        **values_of(plan_decisions),
        model=problem.model,
        topology=topology.name,
        placement=_placement(priced.placement, topology),
        parameters=parameters,
        activations=activation_layouts(
            programs[0][0].facts,
            candidate.choice,
            decisions.mesh,
            decisions.context if decisions.mesh["context"] > 1 else "none",
            workload.group_names,
        ),
        batch_layouts=layouts.batch_layouts(problem, colouring.batch, decisions.mesh, compute),
        estimate=replace(
            cost,
            corrections=applied(topology),
            stage=stage_seconds(priced),
            offloaded=_offloaded(original, topology, priced),
            interval=interval(workload.profile.name, topology.chip.vendor),
        ),
        search=certificate,
        framework=_framework(workload),
    )
    return plan.with_findings(
        *findings.notes(workload, topology, plan, left_out, devices, pinned),
        *findings.unused_collective_matmuls(plan, len(overlap.messages) if overlap else 0),
        *findings.unpriced(plan, topology),
        *_partitioned_products(matrix_updates, pinned=decisions.matrix_layout == "sharded"),
        *faster_as_programs(original, topology, candidate, plan),
        *replicated_findings(
            replicated(priced, programs), decisions.mesh, plan.estimate.step_seconds
        ),
    )


def _matrix_groups(
    workload: Workload, decisions: Decisions, parameters: Sequence[ParameterLayout]
) -> tuple[UpdateGroup, ...]:
    """The matrix updates of the optimizer in the layouts of a plan."""
    if workload.framework is not None:
        return ()
    return update_groups(
        workload.problem.updates,
        {parameter.path: list(parameter.state) for parameter in parameters},
        decisions.mesh,
        decisions.matrix_layout,
    )


def _exchanges(groups: Sequence[UpdateGroup]) -> dict[tuple[Slot, str], float]:
    """Bytes per device of the collectives of matrix updates, by slot and cause."""
    sizes: dict[tuple[Slot, str], float] = defaultdict(float)
    for kind, axes, size in exchanges(groups):
        sizes[Slot("update", DeviceGroup(axes), kind), CAUSE] += size
    return sizes


@diagnostic
def _partitioned_products(groups: Sequence[UpdateGroup], *, pinned: bool) -> tuple[Finding, ...]:
    """A finding about the matrices of the optimizer whose products the partitioner shards.

    Args:
        pinned: whether it shards all of them.
    """
    updates = [u for group in groups if group.layout == "sharded" for u in group.updates]
    if not updates:
        return ()
    flops = sum(update.flops for update in updates)
    return (
        Finding(
            code="optimizer-products",
            severity="warning",
            where="optimizer",
            message=(
                f"the partitioner shards the optimizer's products of {len(updates)} parameters"
                f" ({', '.join(update.path for update in updates[:4])}"
                f"{', ...' if len(updates) > 4 else ''}), {flops / 1e9:,.3g} GFLOP per update over"
                " all devices; the predicted step time includes neither them nor their collectives"
            ),
            hint=(
                "optimizer_layout='owned'"
                if pinned
                else "an elementwise optimizer for them, such as AdamW for embeddings; shardlib"
                " verify compiles the step and lists its collectives"
            ),
        ),
    )


def _framework(workload: Workload) -> FrameworkJob | None:
    """The framework that runs the plan, with the sizes of the job."""
    if workload.framework is None:
        return None
    experts = workload.colouring.colours[workload.expert].divisor if workload.expert else 1
    return FrameworkJob(
        name=workload.framework.name,
        profile=workload.profile.name,
        vendor=workload.vendor,
        batch=batch_size(workload.problem, workload.colouring),
        sequence=sequence_size(workload.problem, workload.colouring),
        layers=max(workload.layer_counts, default=0),
        compute_dtype=workload.problem.compute_dtype,
        experts=experts,
    )


def _offloaded(workload: Workload, topology: Topology, priced: PricedCandidate) -> Offloaded | None:
    """Device memory that offloading saves and seconds that it adds, against the same plan without
    it.
    """
    if not priced.candidate.decisions.offload:
        return None
    offloaded = priced.totals()
    resident = price(workload, topology, priced.candidate.replace(offload=()))
    return Offloaded(
        device_bytes=float(resident.peak_bytes[0] - offloaded.peak_bytes[0]),
        seconds=max(0.0, float(offloaded.step_seconds[0] - resident.step_seconds[0])),
    )


def _placement(
    placement: Placement, topology: Topology
) -> tuple[tuple[str, tuple[Link, ...]], ...]:
    return tuple(
        (axis, tuple(Link(kind=topology.tiers[span.tier].kind, ways=span.ways) for span in parts))
        for axis, parts in placement.items()
    )


def model_flops(problem: Problem) -> float:
    """FLOPs per step without rematerialisation: three times the matmuls and convolutions of the
    forward pass, or those of the step, where these are fewer.

    A matmul's backward pass is two matmuls of the same size (Kaplan et al., arXiv:2001.08361,
    section 2.1). There are fewer where parameters are frozen, and where an operand, such as the
    batch, needs no gradient.
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
