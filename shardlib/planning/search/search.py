"""Which plan is the fastest that fits?

The search prices every legal plan that no lower bound excludes, so its answer is optimal within the
cost model: gap 0, or the gap that it says. What the space is stands in `planning/space/space.py`,
how it is priced in `planning/search/branch_and_bound.py`. Ties go to the simpler plan.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.machine.collective_tables import Group, stored
from shardlib.cost.pricing.candidates import Candidates, candidates
from shardlib.cost.pricing.estimated import estimate, with_corrections
from shardlib.cost.pricing.step_collectives import collectives
from shardlib.cost.pricing.sums import sums
from shardlib.cost.pricing.totals import Totals, combine
from shardlib.cost.pricing.variants.collective_matmul import Saving, looped, saving
from shardlib.cost.pricing.variants.mixed_remat import Corner, Tallies, between, composed
from shardlib.cost.pricing.variants.offload_and_partial_remat import (
    fullest,
    fullest_by_class,
    mix,
    offloaded,
)
from shardlib.cost.pricing.variants.replicated import replicated
from shardlib.cost.step.fusion import traits
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import Q
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA, framework_profile, gathers
from shardlib.cost.terms.terms import Item
from shardlib.errors import InfeasibleError, PinError
from shardlib.graph.problem import Problem
from shardlib.hardware.placement import Placement, place
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.decisions.candidate import Decision, What, lowered_dtypes
from shardlib.planning.decisions.dtypes import Dtypes, combinations, effective
from shardlib.planning.decisions.pins import Pins, check_rules
from shardlib.planning.decisions.plan_data import Link, Rejected, Search
from shardlib.planning.plan import Plan, Ranked
from shardlib.planning.search import infeasible as relax
from shardlib.planning.search import layouts
from shardlib.planning.search.branch_and_bound import Explorer
from shardlib.planning.search.incumbents import Best, decided
from shardlib.planning.search.ranking import Entry, Ranking
from shardlib.planning.search.replicated import of_replicated
from shardlib.planning.search.stages import stage_seconds
from shardlib.planning.space import space
from shardlib.planning.space.workload import Program, Workload, prepare
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring
from shardlib.rules import Rules

#: Most plans that are priced with loops over tensor, where the planner decides for them.
MOST_LOOPS = 32
#: Largest tensor axis whose best plan is looked for on its own to be priced with loops.
MOST_TENSOR = 32
#: Most plans of other meshes that a certificate lists.
MOST_REJECTED = 200


def capacity(topology: Topology) -> float:
    """Bytes of one device that a program may use."""
    return topology.chip.hbm_bytes - topology.chip.reserved_bytes


def search(
    problem: Problem,
    topology: str | Topology,
    pin: Mapping[str, Any] | Pins | None = None,
    *,
    load: Workload | None = None,
    lowered: bool = False,
    stack: FrameworkProfile | str | None = None,
) -> Plan:
    """Finds the fastest plan that fits.

    Args:
        problem: a traced model.
        topology: where it will run.
        pin: decisions fixed by hand.
        load: the problem already prepared, to search it again.
        lowered: leave out, unless they are pinned, decisions that no program can be made of yet
            (`Decision.waits_for`).
        stack: the software that will run it, or its name; by default that of `load`, or one program
            of JAX ("xla").

    Returns:
        The plan, with its certificate.

    Raises:
        PinError: the pins make no sense, or allow no plan.
        InfeasibleError: no plan fits into memory; the message says what would.
    """
    started = time.perf_counter()
    topology, pins = parse_topology(topology), Pins.parse(pin)
    load = prepared(problem, topology, load, stack, pins)
    found = _find(load, topology, pins, lowered)
    if found.best.decision is None:
        raise _infeasible(load, topology, pins, found)
    decision, step_seconds = with_loops(
        load, topology, found.best.decision, pins, found.best.seconds
    )
    bound = min(found.best.seconds, step_seconds)
    if pins.collective_matmul == "any" and load.stack.name == XLA.name:
        decision, step_seconds, bound = _with_any_loops(load, topology, pins, lowered, found)
    ledger = _ledger(found, decision, step_seconds, time.perf_counter() - started, bound)
    return assemble(
        load, topology, decision, ledger, rules=found.rules, pins=pins, left_out=found.room.left_out
    )


def prepared(
    problem: Problem,
    topology: Topology,
    load: Workload | None,
    stack: FrameworkProfile | str | None,
    pins: Pins,
) -> Workload:
    """The problem prepared for a machine and a stack of software, or `load` itself where that is
    it.
    """
    wanted = (
        framework_profile(stack) if stack is not None else load.stack if load is not None else XLA
    )
    if pins.pipeline == "programs":  # they wait for nothing but their neighbours
        wanted = replace(wanted, pipeline="asynchronous")
    elif (
        pins.pipeline is not None and wanted.name == XLA.name
    ):  # the load may be that of a plan whose stages are such programs
        wanted = replace(wanted, pipeline=XLA.pipeline)
    if (
        load is not None
        and traits(load.vendor) == traits(topology.chip.vendor)
        and load.stack == wanted
    ):
        return load
    return prepare(problem, topology.chip.vendor, wanted)


def ranked(
    problem: Problem,
    topology: str | Topology,
    pin: Mapping[str, Any] | Pins | None = None,
    *,
    load: Workload | None = None,
    lowered: bool = False,
    slack: float = np.inf,
    stack: FrameworkProfile | str | None = None,
    front: bool = False,
) -> Iterator[Ranked]:
    """All plans that fit, the fastest first; none is built before it is asked for.

    Args:
        problem, topology, pin, load, lowered, stack: as `search` takes them; its answer is the
            first.
        slack: leave out candidates of which no plan can be faster than so many times the fastest;
            in a large space, anything else takes long.
        front: only plans that need less memory than every faster one.

    Raises:
        PinError, InfeasibleError: as `search`.
    """
    started = time.perf_counter()
    topology, pins = parse_topology(topology), Pins.parse(pin)
    load = prepared(problem, topology, load, stack, pins)
    ranking = Ranking[What]()
    found = _find(load, topology, pins, lowered, ranking, slack)
    if found.best.decision is None:
        raise _infeasible(load, topology, pins, found)
    seconds = time.perf_counter() - started

    def plan(decision: Decision, entry: Entry[What]) -> Plan:
        chosen, step_seconds = with_loops(load, topology, decision, pins, entry.seconds)
        return assemble(
            load,
            topology,
            chosen,
            _ledger(found, chosen, step_seconds, seconds, min(found.best.seconds, step_seconds)),
            rules=found.rules,
            pins=pins,
            left_out=found.room.left_out,
        )

    def entries() -> Iterator[Ranked]:
        every = (
            ranking.front()
            if front
            else ranking.ordered(lambda what, index: decided(what, found.rows[index]).simplicity())
        )
        for entry in every:
            decision = decided(entry.what, found.rows[entry.index])
            yield Ranked(
                decision=decision,
                seconds=entry.seconds,
                peak_bytes=entry.peak_bytes,
                make=partial(plan, decision, entry),
            )

    return entries()


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A priced space; `rows` are the candidates that a ranking speaks of."""

    room: space.Space
    best: Best
    rules: Rules | None
    rows: list[tuple[MeshShape, int, tuple[str, ...]]]


def _find(
    load: Workload,
    topology: Topology,
    pins: Pins,
    lowered: bool,
    ranking: Ranking[What] | None = None,
    slack: float = np.inf,
    *,
    any_plan: bool = False,
) -> _Found:
    """Prices the space; with `any_plan` until a plan fits.

    Raises:
        PinError: the pins make no sense, or allow no plan.
    """
    rules = check_rules(pins.rules, load.colouring) if pins.rules is not None else None
    fixed = _fixed_choice(rules, load.colouring, pins) if rules is not None else None
    if pins.mesh is not None and pins.mesh.devices > topology.devices:
        raise PinError(
            f"the mesh {pins.mesh} has {pins.mesh.devices} devices and {topology.name} has"
            f" {topology.devices}"
        )
    hosted = [part for part in pins.offload or () if part != "disk"]
    if hosted and not topology.chip.host_bytes_per_s:
        raise PinError(
            f"offload={hosted} needs the rate between host memory and {topology.chip.name}, which"
            f" {topology.name} does not give\nTry: host_bytes_per_s in the chip of a topology file"
        )
    wanted = pins.mesh.devices if pins.mesh is not None else topology.devices
    explorers: list[Explorer] = []
    rooms: list[space.Space] = []
    every = dict.fromkeys(
        effective(one, load.problem, load.stack, pins.dtypes)
        for one in combinations(pins.dtypes, lowered_dtypes(pins.allow) if lowered else pins.allow)
    )

    def explore(dtypes: Dtypes, context: space.Strategy) -> None:
        one = load.under(dtypes, context.knobs.fused)
        rooms.append(
            space.build(
                one.problem,
                one.colouring,
                one.counts,
                pins,
                fixed,
                expert=one.expert,
                lowered=lowered,
                by_class=one.by_class,
                names=one.class_names,
                gathers=gathers(one.stack),
                context=context,
            )
        )
        explorer = Explorer(
            one,
            rooms[-1],
            topology,
            capacity(topology),
            explorers[0] if explorers else None,
            dtypes,
            any_plan=any_plan,
        )
        explorers.append(explorer)
        for devices in _counts(rooms[-1], one, topology, wanted):
            explorer.run(devices, ranking, slack)

    usual, otherwise = space.strategies(load.problem, pins, load.stack, topology.chip.vendor)
    for dtypes, context in itertools.product(every, usual):
        explore(dtypes, context)
    for dtypes, context in (
        itertools.product(every, otherwise) if explorers[0].best.decision is None else ()
    ):
        explore(dtypes, context)
    explorer = explorers[0]
    for one in explorers if explorer.best.decision is None and not any_plan else ():
        one.lean()
    if explorer.best.lean is None and not any_plan:
        raise space.explain_empty(load.problem, load.colouring, pins, wanted)
    return _Found(room=rooms[-1], best=explorer.best, rules=rules, rows=explorer.rows)


def _counts(room: space.Space, load: Workload, topology: Topology, wanted: int) -> Iterator[int]:
    """Numbers of devices that a plan may use: all, or where no mesh has all the most that one has;
    then their divisors.
    """

    def some(devices: int) -> bool:
        return (
            place(MeshShape({"data": devices}), topology) is not None
            and len(space.sizes(room, load.colouring, devices)["micro"]) > 0
        )

    if room.pins.mesh is not None:
        yield wanted
        return
    most = next((n for n in range(wanted, 0, -1) if some(n)), None)
    fewer = [n for n in space.divisors(wanted) if n < (most or 0)]
    yield from (
        n
        for n in ([most] if most else []) + fewer[::-1]
        if place(MeshShape({"data": n}), topology) is not None
    )


def _fixed_choice(rules: Rules, colouring: Colouring, pins: Pins) -> Choice:
    batch, sequence = colouring.batch_colour, colouring.sequence_colour
    ways = pins.mesh["tensor"] if pins.mesh is not None else dict(pins.axes).get("tensor", 1)
    optional = {
        name for name, axes in rules.entries if "tensor" not in axes
    }  # MaxText's fallbacks: a second rule for the same name
    cut = tuple(
        name
        for name, axes in rules.entries
        if "tensor" in axes
        and not (name in optional and name != sequence and colouring.colours[name].divisor % ways)
    )
    used = set(pins.mesh or ()) | {axis for axis, size in pins.axes if size > 1}
    lacking = [
        axis for axis in ("data", "fsdp") if axis in used and axis not in rules.axes_of(batch or "")
    ]
    if lacking:
        raise PinError(
            f"the pinned rules cut {batch!r} over {rules.axes_of(batch or '') or 'nothing'}, and"
            f" the pinned mesh also has {', '.join(lacking)}\nTry: the rule ({batch!r}, ('data',"
            " 'fsdp'))"
        )
    return Choice(
        tensor=tuple(dict.fromkeys(name for name in cut if name != sequence)),
        batch=batch,
        sequence=sequence if sequence in cut else None,
    )


def _ledger(
    found: _Found, decision: Decision, step_seconds: float, seconds: float, bound: float
) -> Search:
    """The certificate of a search for one of its plans, with the seconds that none can beat; the
    gap of the fastest is 0.
    """
    best = found.best
    candidates = best.counts["priced"] + best.counts["bound"]
    return Search(
        evaluations=best.counts["priced"],
        candidates=candidates,
        lower_bound=bound,
        gap=max(0.0, 1 - bound / step_seconds),
        seconds=seconds,
        rejected=_rejected(best, decision),
        counts=tuple(sorted(best.counts.items())),
    )


def _rejected(best: Best, chosen: Decision) -> tuple[Rejected, ...]:
    """The best plan of each other mesh that was priced, and meshes for which nothing fits; the
    fastest and the leanest of them.
    """
    found = [
        Rejected(
            mesh=mesh,
            summary=decision.summary,
            reason="slower" if np.isfinite(seconds) else "memory",
            step_seconds=seconds if np.isfinite(seconds) else 0.0,
            peak_bytes=int(size),
        )
        for mesh, (seconds, size, decision) in best.by_mesh.items()
        if mesh != chosen.mesh
    ]
    return tuple(
        sorted(
            found, key=lambda r: (r.reason != "slower", r.step_seconds, r.peak_bytes, str(r.mesh))
        )
    )[:MOST_REJECTED]


def assemble(
    load: Workload,
    topology: Topology,
    decision: Decision,
    ledger: Search,
    *,
    rules: Rules | None = None,
    pins: Pins | None = None,
    left_out: tuple[str, ...] = (),
) -> Plan:
    """Builds the plan value of one decision."""
    load = load.under(decision.what.dtypes, decision.what.how.fused)
    problem, colouring, mesh, what = load.problem, load.colouring, decision.mesh, decision.what
    how = what.how
    placed = _placed(decision, topology)
    pricer = Pricer(topology, load.stack)
    c = _candidate(decision, topology, pricer)
    saved = _saving(load, decision, pricer, c)
    totals = looped(_price(load, decision, pricer, c), saved)
    compute, rest = (
        (what.choice.rules(), None)
        if rules is None
        else layouts.split_rules(rules, colouring.batch_colour)
    )
    parameters = layouts.parameter_layouts(
        problem, colouring.parameters, load.frozen, mesh, compute, how.zero, rest
    )
    listed = collectives(
        _followed(load, what, c),
        what.choice,
        how,
        _updated(load, decision, pricer, c),
        mesh,
        placed,
        c,
        load.model,
        pricer,
        saved.messages if saved else {},
    )
    cost = estimate(
        totals,
        0,
        listed=listed,
        tokens=problem.tokens,
        model_flops=model_flops(problem),
        mesh=mesh,
        peak_flops_per_s=topology.chip.peak(problem.compute_dtype),
    )
    plan = Plan(
        model=problem.model,
        topology=topology.name,
        mesh=mesh,
        placement=_placement(placed, topology),
        axis_order=decision.order,
        rules=compute,
        sequence_parallel=what.choice.sequence is not None,
        zero=how.zero,
        remat=what.policy,
        remat_layers=what.recomputed,
        remat_classes=tuple(
            (name, *each) for name, each in zip(load.class_names, what.classes, strict=False)
        ),
        microbatches=decision.micro,
        schedule=how.schedule,
        virtual_stages=how.virtual,
        gather=how.gather,
        accumulation=how.accumulation,
        pipeline=(pins.pipeline if pins else None) or "lockstep",
        context=how.context if "context" in mesh else "none",
        attention=how.attention,
        experts=space.experts_form(problem) if what.routes else "none",
        collective_matmul=what.collective_matmul,
        offload=how.offload,
        dtypes=what.dtypes,
        parameters=parameters,
        batch_layouts=layouts.batch_layouts(problem, colouring.batch, mesh, compute),
        estimate=replace(
            with_corrections(cost, topology), stage=stage_seconds(load, decision, pricer, c)
        ),
        search=ledger,
    )
    whole = replicated(
        [(program.facts, part) for program, part in _programs(load, what, c)],
        what.choice,
        how,
        mesh,
        c,
        load.model,
        pricer,
    )
    return plan.with_findings(
        *relax.notes(load, topology, plan, left_out),
        *relax.waiting(decision),
        *relax.unused_loops(plan, len(saved.messages) if saved else 0),
        *relax.unpriced(plan, topology),
        *of_replicated(whole, mesh, plan.estimate.step_seconds),
    )


def _followed(load: Workload, what: What, c: Candidates) -> list[tuple[list[Item], np.ndarray]]:
    """The work of every remat policy that layers of one candidate follow, with the part of each
    segment that does.
    """
    return [(program.work, part) for program, part in _programs(load, what, c)]


def _programs(load: Workload, what: What, c: Candidates) -> list[tuple[Program, np.ndarray]]:
    """The program of every remat policy that layers of one candidate follow, with the part of each
    segment that does: those of classes of layers, what has none, and the ends.
    """
    layers = [float(each[0]) for each in fullest_by_class(what.how, load.model, c)]
    if what.classes:
        classes = [
            (policy, number / count)
            for (policy, number), count in zip(what.classes, layers, strict=True)
        ]
    else:
        classes = [(what.policy, what.recomputed / sum(layers) if what.recomputed else 1.0)] * len(
            layers
        )
    parts = {
        policy: np.zeros(len(layers) + 2)
        for policy in dict.fromkeys((what.policy, *(policy for policy, _ in classes), "none"))
    }
    parts[what.policy][len(layers) :] = 1.0
    for k, (policy, share) in enumerate(classes):
        parts[policy][k] += share
        parts["none"][k] += 1 - share
    return [
        (load.programs[policy, what.routes], part) for policy, part in parts.items() if part.any()
    ]


def with_loops(
    load: Workload, topology: Topology, decision: Decision, pins: Pins, step_seconds: float
) -> tuple[Decision, float]:
    """The decision with matmuls over tensor in loops, where that is pinned, or left to the planner
    and predicted to be faster; and its seconds of a step.

    Args:
        load: the problem.
        topology: where it runs.
        decision: without loops.
        pins: the user's decisions.
        step_seconds: predicted for the decision.
    """
    if pins.collective_matmul not in ("loop", "any") or (
        pins.collective_matmul == "any" and not hides(load, topology, decision.mesh)
    ):
        return decision, step_seconds
    loop = replace(decision, what=replace(decision.what, collective_matmul="loop"))
    load, pricer = (
        load.under(decision.what.dtypes, decision.what.how.fused),
        Pricer(topology, load.stack),
    )
    saved = _saving(load, loop, pricer, _candidate(loop, topology, pricer))
    found = step_seconds - (saved.seconds if saved else 0.0)
    return (
        (loop, found)
        if pins.collective_matmul == "loop" or found < step_seconds
        else (decision, step_seconds)
    )


def hides(load: Workload, topology: Topology, mesh: MeshShape) -> bool:
    """Whether loops over tensor can be faster on a mesh: in a program of JAX without stages, and
    where links work beside compute, which those of simulated devices do not.
    """
    return (
        load.stack.name == XLA.name
        and mesh["tensor"] > 1
        and mesh["stage"] == 1
        and all(tier.kind != "memory" for tier in topology.tiers)
    )


def _with_any_loops(
    load: Workload, topology: Topology, pins: Pins, lowered: bool, found: _Found
) -> tuple[Decision, float, float]:
    """The fastest decision with or without loops over tensor, its seconds of a step, and seconds
    that none can beat.

    The fastest plan for each size of the tensor axis is priced with loops. With all collectives
    over tensor hidden, every plan is at least as fast as with loops: others are priced in the order
    of that bound, until it is no less than the seconds of the best plan, or `MOST_LOOPS` have been.
    """
    assert found.best.decision is not None
    best = with_loops(load, topology, found.best.decision, pins, found.best.seconds)
    for one in _by_tensor(load, topology, pins, lowered):
        assert one.best.decision is not None
        best = min(
            best,
            with_loops(load, topology, one.best.decision, pins, one.best.seconds),
            key=lambda pair: pair[1],
        )
    hidden = prepare(load.problem, topology.chip.vendor, replace(load.stack, tensor_overlap=1.0))
    fastest, ranking, priced = (
        _find(hidden, topology, pins, lowered).best.seconds,
        Ranking[What](),
        0,
    )
    rows = _find(hidden, topology, pins, lowered, ranking, max(1.0, best[1] / fastest)).rows
    for entry in ranking.ordered(lambda what, index: decided(what, rows[index]).simplicity()):
        if entry.seconds >= best[1] or priced == MOST_LOOPS:
            return *best, min(best[1], entry.seconds)
        decision = decided(entry.what, rows[entry.index])
        if hides(load, topology, decision.mesh):
            other = with_loops(
                load,
                topology,
                decision,
                pins,
                float(price(load, topology, decision).step_seconds[0]),
            )
            best, priced = min(best, other, key=lambda pair: pair[1]), priced + 1
    return *best, best[1]


def _by_tensor(load: Workload, topology: Topology, pins: Pins, lowered: bool) -> Iterator[_Found]:
    """The priced spaces of every size of the tensor axis and no stages in which a plan fits, where
    pins leave that open.
    """
    fixed = dict(pins.axes)
    if pins.mesh is not None or "tensor" in fixed or pins.staged:
        return
    for ways in (n for n in space.divisors(topology.devices) if 1 < n <= MOST_TENSOR):
        try:
            found = _find(
                load,
                topology,
                replace(pins, axes=tuple(sorted({**fixed, "tensor": ways, "stage": 1}.items()))),
                lowered,
            )
        except PinError:
            continue
        if found.best.decision is not None:
            yield found


def _saving(load: Workload, decision: Decision, pricer: Pricer, c: Candidates) -> Saving | None:
    """What loops over tensor save; None without any. `load` is under the dtypes of the decision."""
    if decision.what.collective_matmul != "loop" or decision.mesh["stage"] > 1:
        return None
    return saving(
        load.programs[decision.what.policy, decision.what.routes].facts,
        decision.what.choice,
        _placed(decision, pricer.topology),
        c,
        pricer,
        len(load.counts),
    )


def _placed(decision: Decision, topology: Topology) -> Placement:
    found = place(decision.mesh, topology, decision.order)
    assert found is not None, f"{decision.mesh} does not fit {topology.name}"
    return found


def _placement(placed: Placement, topology: Topology) -> tuple[tuple[str, tuple[Link, ...]], ...]:
    return tuple(
        (axis, tuple(Link(kind=topology.tiers[span.tier].kind, ways=span.ways) for span in parts))
        for axis, parts in placed.items()
    )


def _updated(
    load: Workload, decision: Decision, pricer: Pricer, c: Candidates
) -> dict[Group, float]:
    """Bytes of parameters on a device that are gathered after the update, by group."""
    rest = pricer.tally(load.rest, decision.what.choice, c.shapes, len(load.counts))[..., c.shape]
    how, stages = decision.what.how, decision.mesh["stage"]
    shares = np.array(
        [how.virtual * np.ceil(n / (stages * how.virtual)) / n for n in load.counts]
        + [1.0, 1 / stages]
    )
    experts = float((rest[:, Q.EXPERTS, 0] * shares).sum())
    return {
        stored(): float((rest[:, Q.PARAMETERS, 0] * shares).sum()) - experts,
        stored(experts=True): experts,
    }


def _price(load: Workload, decision: Decision, pricer: Pricer, c: Candidates) -> Totals:
    """The price of one decision without loops over tensor; `load` and `pricer` are under its
    dtypes.
    """
    what = decision.what

    def tally(items: list[Item]) -> np.ndarray:
        return pricer.tally(items, what.choice, c.shapes, len(load.counts))

    def priced(work: np.ndarray, points: Sequence[np.ndarray]) -> Totals:
        found = combine(
            sums(work, tally(load.rest), points, load.model, pricer, c),
            what.how,
            load.model,
            pricer,
            c,
        )
        return offloaded(found, what.how.offload, pricer, c.micro) if what.how.offload else found

    def corner(policies: Corner) -> Totals:
        programs = {policy: load.programs[policy, what.routes] for policy in policies}
        first = programs[policies[0]]
        if len(programs) == 1:
            return priced(tally(first.work), [tally(items) for items in first.points])
        parts = {
            policy: Tallies(
                work=tally(program.work),
                stacks=tuple(tally(moment.stacks) for moment in program.moments),
                points=tuple(tuple(map(tally, moment.points)) for moment in program.moments),
            )
            for policy, program in programs.items()
        }
        return priced(
            *composed(policies, parts, [moment.segment for moment in first.moments], load.counts)
        )

    if what.classes:
        return between(what.classes, fullest_by_class(what.how, load.model, c), corner)
    lean = corner((what.policy,))
    return (
        mix(corner(("none",)), lean, what.recomputed / fullest(what.how, load.model, c))
        if what.recomputed
        else lean
    )


def price(load: Workload, topology: Topology, decision: Decision) -> Totals:
    """Prices one decision on its own, without any table."""
    load = load.under(decision.what.dtypes, decision.what.how.fused)
    pricer = Pricer(topology, load.stack)
    c = _candidate(decision, topology, pricer)
    return looped(_price(load, decision, pricer, c), _saving(load, decision, pricer, c))


def _candidate(decision: Decision, topology: Topology, pricer: Pricer) -> Candidates:
    return candidates(
        [(decision.mesh, _placed(decision, topology))], [decision.micro], pricer.topology
    )


def model_flops(problem: Problem) -> float:
    """FLOPs that a step needs with no recomputation: three times the matmuls and convolutions of
    the forward pass.

    A matmul's backward pass is two matmuls of the same size (Kaplan et al., arXiv:2001.08361,
    section 2.1). Where parameters are frozen there are fewer, and those of the step without
    recomputation are counted.
    """
    graph, times = (
        (problem.forward, 3)
        if all(parameter.trained for parameter in problem.parameters) or "none" not in problem.steps
        else (problem.steps["none"].graph, 1)
    )
    return times * sum(
        op.flops * graph.trips(op.region)
        for op in graph.ops
        if op.category in ("matmul", "convolution")
    )


def _infeasible(load: Workload, topology: Topology, pins: Pins, found: _Found) -> InfeasibleError:
    decision = found.best.lean
    assert decision is not None

    def fits(other: Topology, others: Pins) -> bool:
        try:
            return (
                _find(load, other, others, found.room.lowered, any_plan=True).best.decision
                is not None
            )
        except PinError:
            return False

    totals = price(load, topology, decision)
    return relax.infeasible(
        load, topology, pins, decision.mesh, decision.summary, totals, capacity(topology), fits
    )
