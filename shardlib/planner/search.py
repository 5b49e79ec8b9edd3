"""The search: best-first branch and bound over the space, and its results: the fastest plan that
fits, a ranking, or the error where nothing fits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from shardlib import wings
from shardlib.cost.facts import traits
from shardlib.cost.framework import XLA, FrameworkProfile, framework_profile
from shardlib.cost.roofline import fitting_bytes
from shardlib.decisions.lowerings import along, facts, lowered
from shardlib.decisions.pins import PinMapping, Pins, require_obeyed
from shardlib.errors import InfeasibleError, PinError
from shardlib.graph import Problem
from shardlib.machines.topology import Topology, TopologyLike, island_of
from shardlib.machines.topology import topology as parse_topology
from shardlib.planner.assembly import assemble, price
from shardlib.planner.findings import without_effect
from shardlib.planner.incumbents import Best, Entry, Ranking
from shardlib.planner.plan import Plan, Ranked, Rejected, Search
from shardlib.planner.priced import (
    PricedSpace,
    fastest_form,
    forms_in_order,
    left_open,
    priced_space,
    with_any_loops,
    with_loops,
)
from shardlib.planner.stored import Candidate
from shardlib.planner.workload import Workload, most_specific_first, prepare
from shardlib.report.elements import TIE

# --------------------------------------------------------------------------------------------------
# Dimensions beyond those of which every set is tried, one after the other in the fastest plans.

#: How much faster a plan is at least for another dimension to be sharded.
GAIN = 1e-3
#: Meshes whose fastest plans are tried beside the fastest of all, and how many times its seconds
#: they may take.
MESHES, REACH = 3, 1.25


def fastest_with_left_out(
    load: Workload, topology: Topology, space: PricedSpace, candidate: Candidate, seconds: float
) -> tuple[Candidate, float]:
    """The fastest of the best plans of a search, in each of which the dimensions are sharded, too,
    that it left out, where that is faster and fits; and its seconds of a step.

    Args:
        seconds: of a step of that.
    """
    if not space.space.left_out:
        return candidate, seconds
    others = sorted(
        (
            (its, rival)
            for its, _, rival in space.best.by_mesh.values()
            if rival.mesh["tensor"] > 1 and its <= REACH * seconds and rival.mesh != candidate.mesh
        ),
        key=lambda pair: (pair[0], str(pair[1].mesh)),
    )
    best = candidate, seconds
    for its, start in [(seconds, candidate), *others[:MESHES]]:
        improved = with_left_out(load, topology, space, start, its)
        best = improved if improved[1] < best[1] else best
    return best


def with_left_out(
    load: Workload, topology: Topology, space: PricedSpace, candidate: Candidate, seconds: float
) -> tuple[Candidate, float]:
    """A plan with the dimensions sharded, too, that the search left out, where that is faster and
    fits; see `fastest_with_left_out`.
    """
    degree, colours = candidate.mesh["tensor"], load.colouring.colours
    for name in space.space.left_out if degree > 1 else ():
        if colours[name].divisor % degree:
            continue
        tensor = most_specific_first({*candidate.choice.tensor, name}, load.colouring)
        alternative = replace(candidate, choice=replace(candidate.choice, tensor=tensor))
        totals = price(load, topology, alternative)
        its = float(totals.step_seconds[0])
        if its < seconds * (1 - GAIN) and totals.peak_bytes[0] <= fitting_bytes(topology):
            candidate, seconds = alternative, its
    return candidate, seconds


# --------------------------------------------------------------------------------------------------
# Equally fast plans: where memory is nearly full, the one with more room.

#: Part of the memory that a plan may take from which on room is worth more than simplicity.
NEARLY = 0.9


def with_more_room(
    load: Workload,
    topology: Topology,
    pins: Pins,
    space: PricedSpace,
    candidate: Candidate,
    seconds: float,
) -> Candidate:
    """A plan that nearly fills the memory, with the ZeRO stage that leaves the most room among
    those that are as fast, the lowest of these.

    Args:
        seconds: of a step of it.
    """
    decisions = candidate.decisions
    if pins.zero is not None or not (1 <= decisions.zero < 3):
        return candidate
    fewest_bytes = float(price(load, topology, candidate).peak_bytes[0])
    if fewest_bytes < NEARLY * fitting_bytes(topology):
        return candidate
    stages = along({"stage": np.array([decisions.mesh["stage"]])})
    for zero in (zero for zero in space.space.limits.able.zero if zero > decisions.zero):
        alternative = candidate.but(zero=zero)
        if not lowered(facts(alternative.decisions), stages, space.space.gaps).all():
            continue
        totals = price(load, topology, alternative)
        peak, its = float(totals.peak_bytes[0]), float(totals.step_seconds[0])
        if its <= seconds * (1 + TIE) and peak < fewest_bytes * (1 - TIE):
            candidate, fewest_bytes = alternative, peak
    return candidate


# --------------------------------------------------------------------------------------------------
# The fastest plan that fits.
#
# The search prices every legal plan that no lower bound excludes, so its answer is optimal within
# the cost model: gap 0, or the gap that it says. The space is defined in `planner/space.py`, its
# prices in `planner/priced.py`. Of a model with more dimensions to shard over tensor than it tries
# all sets of, the others are tried one after the other in the fastest plans. Ties go to the simpler
# plan, and where memory is nearly full to the ZeRO stage with more room.

#: Most plans of other meshes that a certificate lists.
MOST_REJECTED = 200
#: Most points of the landscape that it holds.
MOST_POINTS = 240


def search(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None = None,
    *,
    load: Workload | None = None,
    profile: FrameworkProfile | str | None = None,
    all_devices: bool = False,
) -> Plan:
    """Finds the fastest plan that fits.

    Args:
        profile: framework profile, or its name: the software that will run it; by default that of
            `load`, or one program of JAX ("xla").
    """
    started = time.perf_counter()
    topology, pins = parse_topology(topology), Pins.parse(pin)
    if pins.exchange.islands > 1:
        inner = partial(search, problem, pin=pins.of_one_island, load=load, profile=profile)
        return wings.islands("planning").planned_on_islands(
            pins.exchange, topology, partial(inner, all_devices=all_devices)
        )
    load = prepared(problem, topology, load, profile, pins)
    if left_open(load, pins):
        return fastest_form(
            pins,
            lambda form: search(
                problem, topology, form, load=load, profile=profile, all_devices=all_devices
            ),
        )
    space = priced_space(load, topology, pins, all_devices=all_devices)
    if space.best.fastest is None:
        raise _infeasible(load, topology, pins, space)
    fastest, priced_seconds = fastest_with_left_out(
        load, topology, space, space.best.fastest, space.best.seconds
    )
    fastest = with_more_room(load, topology, pins, space, fastest, priced_seconds)
    candidate, step_seconds = with_loops(load, topology, fastest, pins, priced_seconds)
    bound = min(priced_seconds, step_seconds)
    if pins.collective_matmul == "any" and load.profile.name == XLA.name:
        candidate, step_seconds, bound = with_any_loops(load, topology, pins, space)
    seconds = time.perf_counter() - started
    return _plan(
        load,
        topology,
        pins,
        space,
        candidate,
        _certificate(space, candidate, step_seconds, seconds, bound),
    )


def prepared(
    problem: Problem,
    topology: Topology,
    load: Workload | None,
    profile: FrameworkProfile | str | None,
    pins: Pins,
) -> Workload:
    """The problem prepared for a machine and a framework profile, or `load` itself where that is
    it.

    Args:
        load: prepared before; None for nothing.
        profile: framework profile or its name; None for JAX and XLA.
    """
    chosen_profile = (
        framework_profile(profile)
        if profile is not None
        else load.profile
        if load is not None
        else XLA
    )
    if pins.pipeline == "programs":  # they wait for nothing but their neighbours
        chosen_profile = replace(chosen_profile, pipeline="asynchronous")
    elif (
        pins.pipeline is not None and chosen_profile.name == XLA.name
    ):  # the load may be that of a plan whose stages are such programs
        chosen_profile = replace(chosen_profile, pipeline=XLA.pipeline)
    if (
        load is not None
        and traits(load.vendor) == traits(topology.chip.vendor)
        and load.profile == chosen_profile
    ):
        return load
    framework = load.framework if load is not None else None
    return prepare(problem, topology.chip.vendor, chosen_profile, framework)


def ranked(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None = None,
    *,
    load: Workload | None = None,
    slack: float = np.inf,
    profile: FrameworkProfile | str | None = None,
    front: bool = False,
) -> Iterator[Ranked]:
    """All plans that fit, the fastest first; none is built before it is asked for."""
    started = time.perf_counter()
    topology, pins = parse_topology(topology), Pins.parse(pin)
    if pins.exchange.islands > 1:
        inner = ranked(
            problem,
            island_of(topology, pins.exchange.islands),
            pins.of_one_island,
            load=load,
            slack=slack,
            profile=profile,
            front=front,
        )
        return wings.islands("planning").met_in_order(inner, pins.exchange, topology)
    load = prepared(problem, topology, load, profile, pins)
    if left_open(load, pins):
        return forms_in_order(
            pins,
            lambda form: ranked(
                problem, topology, form, load=load, slack=slack, profile=profile, front=front
            ),
            slack=slack,
            front=front,
        )
    ranking = Ranking[Candidate]()
    space = priced_space(load, topology, pins, ranking, slack)
    if space.best.fastest is None:
        raise _infeasible(load, topology, pins, space)
    seconds = time.perf_counter() - started

    def plan(candidate: Candidate, entry: Entry[Candidate]) -> Plan:
        alternative, priced_seconds = with_left_out(load, topology, space, candidate, entry.seconds)
        alternative = with_more_room(load, topology, pins, space, alternative, priced_seconds)
        chosen, step_seconds = with_loops(load, topology, alternative, pins, priced_seconds)
        bound = min(space.best.seconds, step_seconds)
        certificate = _certificate(space, chosen, step_seconds, seconds, bound)
        return _plan(load, topology, pins, space, chosen, certificate)

    def entries() -> Iterator[Ranked]:
        for entry in ranking.front() if front else ranking.ordered(space.simplicity):
            candidate = space.candidate(entry)
            yield Ranked(
                candidate=candidate,
                seconds=entry.seconds,
                peak_bytes=entry.peak_bytes,
                make=partial(plan, candidate, entry),
            )

    return entries()


def _plan(
    load: Workload,
    topology: Topology,
    pins: Pins,
    space: PricedSpace,
    candidate: Candidate,
    certificate: Search,
) -> Plan:
    plan = assemble(
        load,
        topology,
        candidate,
        certificate,
        rules=space.rules,
        left_out=space.space.left_out,
        most=space.devices,
        pinned=pins.mesh is not None,
    )
    require_obeyed(pins, plan)
    return plan.with_findings(*without_effect(space.space.pins, plan))


def _certificate(
    space: PricedSpace, candidate: Candidate, step_seconds: float, seconds: float, bound: float
) -> Search:
    """The certificate of a search for one of its plans, with the seconds that none can beat; the
    gap of the fastest is 0.
    """
    best = space.best
    candidates = best.counts["priced"] + best.counts["bound"]
    return Search(
        evaluations=best.counts["priced"],
        candidates=candidates,
        lower_bound=min(bound, step_seconds),  # sums round differently
        gap=max(0.0, 1 - bound / step_seconds),
        seconds=seconds,
        rejected=_rejected(best, candidate),
        counts=tuple(sorted(best.counts.items())),
        landscape=space.landscape(MOST_POINTS),
    )


def _rejected(best: Best, chosen: Candidate) -> tuple[Rejected, ...]:
    """The best plan of each other mesh that was priced, and meshes for which nothing fits; the
    fastest and those of the least memory.
    """
    rejected = [
        Rejected(
            mesh=mesh,
            summary=candidate.summary,
            reason="slower" if np.isfinite(seconds) else "memory",
            step_seconds=seconds if np.isfinite(seconds) else 0.0,
            peak_bytes=int(size),
        )
        for mesh, (seconds, size, candidate) in best.by_mesh.items()
        if mesh != chosen.mesh
    ]
    return tuple(
        sorted(
            rejected,
            key=lambda r: (r.reason != "slower", r.step_seconds, r.peak_bytes, str(r.mesh)),
        )
    )[:MOST_REJECTED]


def _infeasible(
    load: Workload, topology: Topology, pins: Pins, space: PricedSpace
) -> InfeasibleError:
    from shardlib.planner.no_plan import infeasible

    assert space.best.minimum_memory is not None

    def fits(machine: Topology, others: Pins) -> bool:
        try:
            priced = priced_space(load, machine, others, any_plan=True)
        except PinError:
            return False
        return priced.best.fastest is not None

    candidate = space.best.minimum_memory
    return infeasible(load, topology, pins, candidate, price(load, topology, candidate), fits)
