"""Every plan of a small world, by plain loops over the definition of the space, priced one at a
time without tables or bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardlib.cost.roofline import fitting_bytes
from shardlib.decisions.lowerings import facts_of_decisions, matching_rows
from shardlib.decisions.table import Decisions
from shardlib.errors import InfeasibleError
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, placements
from shardlib.planner import search as planner
from shardlib.planner.assembly import price
from shardlib.planner.parts import Candidate, decisions_of
from shardlib.planner.plan import Plan
from shardlib.planner.space import unsupported_for
from shardlib.planner.workload import Workload
from shardlib.propagation.colours import Choice
from tests.planner.worlds import with_memory


def every_mesh(load: Workload, where: Topology) -> Iterator[tuple[MeshShape, int]]:
    """(mesh, microbatches) on every number of devices that has a place on the links."""
    for used in range(1, where.devices + 1):
        yield from _meshes(load, used)


def _meshes(load: Workload, used: int) -> Iterator[tuple[MeshShape, int]]:
    """(mesh, microbatches) on so many devices, where the batch divides."""
    (_, shape, _, _), *_ = load.problem.batch
    batch, seq = shape[0], shape[1] if load.colouring.sequence_colour else 1
    experts = load.colouring.colours[load.expert].divisor if load.expert else 1
    for sizes in itertools.product(range(1, used + 1), repeat=5):
        stage, data, fsdp, expert, context = sizes
        tensor, left = divmod(used, stage * data * fsdp * expert * context)
        if (
            left
            or not tensor
            or stage > max(load.layer_counts, default=1)
            or experts % expert
            or seq % context
        ):
            continue
        for micro in range(1, batch + 1):
            if batch % (data * fsdp * expert * micro) == 0:
                yield (
                    MeshShape(
                        stage=stage,
                        data=data,
                        fsdp=fsdp,
                        expert=expert,
                        context=context,
                        tensor=tensor,
                    ),
                    micro,
                )


def every_choice(load: Workload, mesh: MeshShape) -> Iterator[Choice]:
    """Every set of colours for the tensor axis, with and without sequence parallelism."""
    colouring = load.colouring
    (_, shape, _, _), *_ = load.problem.batch
    seq, tensor = shape[1] if colouring.sequence_colour else 1, mesh["tensor"]
    residual = (
        {c.name for c in colouring.colours.values() if c.carried}
        if colouring.sequence_colour
        else set[str]()
    )
    names = [
        c.name
        for c in colouring.colours.values()
        if c.matmuls
        and c.divisor > 1
        and c.name not in {colouring.batch_colour, colouring.sequence_colour, *residual}
    ]
    order = sorted(names, key=lambda name: (colouring.colours[name].matmuls, name))
    for count in range(len(order) + 1):
        for subset in itertools.combinations(order, count):
            for sequence in (False, True):
                if (tensor > 1) != bool(subset) or any(
                    colouring.colours[n].divisor % tensor for n in subset
                ):
                    continue
                if sequence and (
                    not subset or not colouring.sequence_colour or seq % (tensor * mesh["context"])
                ):
                    continue
                yield Choice(
                    tensor=subset,
                    batch=colouring.batch_colour,
                    sequence=colouring.sequence_colour if sequence else None,
                    context=colouring.sequence_colour if mesh["context"] > 1 else None,
                )


def every_gather(
    load: Workload, mesh: MeshShape, micro: int, zero: int, policy: str, groups: int, once: bool
) -> Iterator[tuple[str, int, str]]:
    """(schedule, chunks per stage, when weights are gathered)."""
    once = once and zero == 3 and mesh["stage"] > 1 and load.profile.pipeline == "lockstep"
    for schedule, virtual in every_schedule(load, mesh, micro, policy, groups):
        yield schedule, virtual, "use"
        if once:
            yield schedule, virtual, "once"
    each = math.ceil(max(load.layer_counts, default=1) / mesh["stage"])
    for virtual in range(3, each + 1):
        if (
            once
            and each % virtual == 0
            and mesh["stage"] * virtual <= max(load.layer_counts)
            and micro // groups >= mesh["stage"]
        ):
            yield "gpipe", virtual, "once"


def every_schedule(
    load: Workload, mesh: MeshShape, micro: int, policy: str, groups: int
) -> Iterator[tuple[str, int]]:
    """(schedule, chunks per stage) of those that any software has."""
    if mesh["stage"] == 1:
        yield "none", 1
        return
    yield "1f1b", 1
    if policy == "none":
        yield "zero-bubble", 1
    for virtual in range(2, 9):
        if mesh["stage"] * virtual <= max(load.layer_counts) and micro // groups >= mesh["stage"]:
            yield "interleaved", virtual


def every_candidate(
    load: Workload, where: Topology, *, groups: int = 1, once: bool = True
) -> Iterator[Candidate]:
    """All legal decisions with nothing in host memory and all layers alike; more than one group of
    microbatches asks for stages; without `once` stages gather weights for every operation.
    """
    around = load.profile.attention == "fused"  # then that is never worse
    for mesh, micro in every_mesh(load, where):
        if groups > 1 and (mesh["stage"] == 1 or micro % groups):
            continue
        for (order, _), choice, routes in itertools.product(
            placements(mesh, where), every_choice(load, mesh), (False, True)
        ):
            if (routes and load.expert is None) or (mesh["expert"] > 1 and not routes):
                continue
            for policy, zero in itertools.product(load.problem.steps, range(4)):
                rest = mesh["fsdp"] * mesh["expert"] * mesh["context"]
                if (zero == 0 and mesh["fsdp"] > 1) or (zero > 0 and rest == 1):
                    continue
                for schedule, virtual, gather in every_gather(
                    load, mesh, micro, zero, policy, groups, once
                ):
                    decisions = Decisions(
                        mesh=mesh,
                        microbatches=micro,
                        axis_order=order,
                        remat=policy,
                        zero=zero,
                        schedule=schedule,
                        virtual_stages=virtual,
                        gather=gather,
                        accumulation=groups,
                        context="ring" if around and mesh["context"] > 1 else "all-gather",
                    )
                    candidate = Candidate(
                        decisions=decisions,
                        choice=replace(choice, expert=load.expert if routes else None),
                        routes=routes,
                    )
                    if lowered(load, candidate):
                        yield candidate


def lowered(load: Workload, candidate: Candidate) -> bool:
    """Whether a program can be made of a candidate."""
    whole = decisions_of(candidate, "dropless", load.group_names)
    return not matching_rows(facts_of_decisions(whole), unsupported_for(load))


def variants(
    load: Workload, where: Topology, candidate: Candidate, by_class: bool = False
) -> Iterator[Candidate]:
    """The decision with something in host memory, with fewer layers recomputed, or with both."""
    if by_class and candidate.decisions.schedule != "zero-bubble":
        yield from _unlike(load, where, candidate)
        return
    offloads = (
        [(), ("optimizer",), ("activations",), ("optimizer", "activations")]
        if where.chip.host_bytes_per_s > 0
        else [()]
    )
    stages, virtual = candidate.mesh["stage"], candidate.decisions.virtual_stages
    layers = sum(virtual * math.ceil(count / (stages * virtual)) for count in load.layer_counts)
    for offload in offloads:
        for recomputed in range(layers if candidate.decisions.remat != "none" else 1):
            if offload or recomputed:
                yield candidate.replace(remat_layers=recomputed, offload=offload)


def _unlike(load: Workload, where: Topology, candidate: Candidate) -> Iterator[Candidate]:
    """The decision under every policy of each class and every number of its layers, once, for the
    policy that recomputes nothing; and with something in host memory.
    """
    if candidate.decisions.remat != "none":
        yield from _moved(where, candidate)
        return
    stages, virtual = candidate.mesh["stage"], candidate.decisions.virtual_stages
    options = [
        [
            ("none", 0),
            *(
                (policy, number)
                for policy in load.problem.steps
                if policy != "none"
                for number in range(1, virtual * math.ceil(count / (stages * virtual)) + 1)
            ),
        ]
        for count in load.layer_counts
    ]
    for each in itertools.product(*options):
        policy, number = max(each, key=lambda one: one[1])[0], sum(layers for _, layers in each)
        one = (
            replace(candidate.replace(remat=policy, remat_layers=number), group_policies=each)
            if number
            else candidate
        )
        yield one
        yield from _moved(where, one)


def _moved(where: Topology, candidate: Candidate) -> Iterator[Candidate]:
    """The decision with something in host memory."""
    for offload in (
        [("optimizer",), ("activations",), ("optimizer", "activations")]
        if where.chip.host_bytes_per_s > 0
        else []
    ):
        yield candidate.replace(offload=offload)


def fastest(
    load: Workload,
    where: Topology,
    *,
    all_variants: bool = False,
    by_class: bool = False,
    groups: int = 1,
    once: bool = True,
    mesh: MeshShape | None = None,
) -> tuple[float, int]:
    """Seconds of the fastest plan that fits, and the number of plans; variants are slower than what
    they vary, so they matter where memory binds.
    """
    best, count = float("inf"), 0
    for decision in every_candidate(load, where, groups=groups, once=once):
        if mesh not in (None, decision.mesh):
            continue
        count += 1
        every = variants(load, where, decision, by_class) if all_variants else ()
        for one in (decision, *(one for one in every if lowered(load, one))):
            totals = price(load, where, one)
            if float(totals.peak_bytes[0]) <= fitting_bytes(where):
                best = min(best, float(totals.step_seconds[0]))
    return best, count


def agreed(
    load: Workload,
    where: Topology,
    pin: dict[str, Any] | None = None,
    *,
    share: float | None = None,
    **space: Any,
) -> Plan | None:
    """The plan of the search, after a check that no plan of the space is faster; None where none
    fits, which the search must say.

    Args:
        share: of the memory that the plan would take, what a device has.
        space: arguments of `fastest`.
    """
    if share is not None:
        roomy = planner.search(load.problem, where, pin, workload=load)
        where = with_memory(where, roomy.estimate.device_bytes.peak * share)
    best, count = fastest(load, where, **{"all_variants": share is not None, **space})
    assert count > 0
    if best == float("inf"):
        with pytest.raises(InfeasibleError, match="more than the"):
            planner.search(load.problem, where, pin, workload=load)
        return None
    plan = planner.search(load.problem, where, pin, workload=load)
    assert plan.estimate.step_seconds == pytest.approx(best, rel=1e-9)
    assert plan.search.lower_bound == pytest.approx(best, rel=1e-9)
    assert plan.search.gap == 0
    assert plan.estimate.device_bytes.peak <= fitting_bytes(where)
    return plan
