"""The fastest plan that fits.

The search prices every legal plan that no lower bound excludes, so its answer is optimal within the
cost model: gap 0, or the gap that it says. What the space is stands in `planning/space/space.py`,
how it is priced in `planning/search/branch_and_bound.py`. Of a model with more dimensions to shard
over tensor than it tries all sets of, the others are tried one after the other in the fastest
plans. Ties go to the simpler plan, and where memory is nearly full to the ZeRO stage with more
room (`planning/search/more_room.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from shardlib.cost.step.fusion import traits
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA, framework_profile
from shardlib.decisions.obeyed import require_obeyed
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import InfeasibleError, PinError
from shardlib.exchanges.values import Exact
from shardlib.graph.problem import Problem
from shardlib.hardware.islands import island_of
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.assembly.assemble import assemble
from shardlib.planning.assembly.findings import without_effect
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.islands.room import met_in_order, planned_on_islands
from shardlib.planning.islands.spread import inside
from shardlib.planning.offers.incumbents import Best
from shardlib.planning.offers.ranking import Entry, Ranking
from shardlib.planning.plan import Plan, Ranked, Rejected, Search
from shardlib.planning.search.collective_matmul import with_any_loops, with_loops
from shardlib.planning.search.infeasible import infeasible
from shardlib.planning.search.left_out import fastest_with_left_out, with_left_out
from shardlib.planning.search.more_room import with_more_room
from shardlib.planning.search.pipeline_forms import fastest_form, forms_in_order, left_open
from shardlib.planning.search.priced_space import PricedSpace, priced_space
from shardlib.planning.space.workload import Workload, prepare

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
    if not isinstance(pins.exchange, Exact):
        return planned_on_islands(
            pins.exchange,
            topology,
            lambda island: search(
                problem, island, inside(pins), load=load, profile=profile, all_devices=all_devices
            ),
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
    if not isinstance(pins.exchange, Exact):
        exchange, island = pins.exchange, island_of(topology, pins.exchange.islands)
        inner = ranked(
            problem, island, inside(pins), load=load, slack=slack, profile=profile, front=front
        )
        return met_in_order(inner, exchange, topology)
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
    assert space.best.minimum_memory is not None

    def fits(machine: Topology, others: Pins) -> bool:
        try:
            priced = priced_space(load, machine, others, any_plan=True)
        except PinError:
            return False
        return priced.best.fastest is not None

    return infeasible(load, topology, pins, space.best.minimum_memory, fits)
