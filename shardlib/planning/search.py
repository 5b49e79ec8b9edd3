"""Which plan is the fastest that fits?

The search prices every legal plan, so its answer is optimal within the cost model (gap 0). That is affordable because the
cost is a sum over items that each depend on few colours (`cost/items.py`): items with the same colours form a group, each
group is tallied once per restricted choice for all meshes at once, and a plan's cost is a sum of group tallies. Ties go
to the simpler plan.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.corrections import applied
from shardlib.cost.facts import Facts
from shardlib.cost.items import rest_items, work_items
from shardlib.cost.kernels import traits
from shardlib.cost.pricing import Candidates, Pricer, Q, Totals, candidates, collectives, combine, estimate
from shardlib.cost.residents import peaks
from shardlib.cost.terms import Item
from shardlib.errors import InfeasibleError, PinError
from shardlib.graph.graph import ITEMSIZE
from shardlib.graph.problem import Problem
from shardlib.hardware.placement import place
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning import layouts, relax, space
from shardlib.planning.pins import Pins, check_rules
from shardlib.planning.plan import Link, Plan, Rejected, Search, Source
from shardlib.planning.ranking import Entry, Ranking
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring, colour, stack_dims
from shardlib.rules import Rules


class Table:
    """Sums of items, kept by the part of the choice that they depend on."""

    def __init__(self, items: list[Item], relevant: frozenset[str], pricer: Pricer, c: Candidates) -> None:
        groups: dict[frozenset[str], list[Item]] = defaultdict(list)
        for item in items:
            groups[item.colours & relevant].append(item)
        self._groups = tuple(groups.items())
        self._pricer, self._c = pricer, c
        self._known: dict[tuple[frozenset[str], Choice], np.ndarray] = {}

    def total(self, choice: Choice) -> np.ndarray:
        """Quantities of all items under a choice, by candidate."""
        total = np.zeros((len(Q), len(self._c)))
        for colours, items in self._groups:
            key = colours, choice.restrict(colours)
            if key not in self._known:
                self._known[key] = self._pricer.tally(items, key[1], self._c)
            total += self._known[key]
        return total


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A problem prepared for pricing, shared by all searches of it.

    Attributes:
        problem: the model.
        vendor: of the chips that the kernels are for.
        colouring: its colours.
        frozen: (path, dim) that count layers.
        facts: by remat policy.
        work: work items by remat policy.
        points: memory items by remat policy and point.
        rest: items of parameters at rest.
    """

    problem: Problem
    vendor: str
    colouring: Colouring
    frozen: frozenset[tuple[str, int]]
    facts: Mapping[str, Facts]
    work: Mapping[str, list[Item]]
    points: Mapping[str, tuple[list[Item], ...]]
    rest: list[Item]


def prepare(problem: Problem, vendor: str = "nvidia") -> Workload:
    """Colours a problem and splits its cost into items, as the compiler for a vendor's chips makes kernels of it."""
    colouring = colour(problem)
    frozen = frozenset(stack_dims(problem))
    tensor, _ = space.tensor_colours(colouring)
    batch, sequence = colouring.batch_colour, colouring.sequence_colour
    narrow = tuple(name for name in tensor if colouring.colours[name].matmuls <= min((colouring.colours[t].matmuls for t in tensor), default=0) * 2)
    guesses = [Choice(batch=batch), *(Choice(batch=batch, tensor=names, sequence=s) for names in (tensor, narrow) for s in (None, sequence))]
    facts = {policy: Facts(step, colouring.steps[policy], frozen, traits(vendor)) for policy, step in problem.steps.items()}
    return Workload(
        problem=problem, vendor=vendor, colouring=colouring, frozen=frozen, facts=facts, work={policy: work_items(f) for policy, f in facts.items()},
        points={policy: peaks(f, problem.steps[policy], guesses) for policy, f in facts.items()},
        rest=rest_items(problem.parameters, colouring.parameters, frozen))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A point of the space: everything that distinguishes one plan from another."""

    mesh: MeshShape
    micro: int
    policy: str
    choice: Choice
    zero: int

    @property
    def summary(self) -> str:
        """The decisions other than the mesh, in a few words."""
        tensor = f"tensor cuts {'+'.join(self.choice.tensor)}" if self.choice.tensor else ""
        parts = [tensor, "sequence parallel" if self.choice.sequence else "", f"ZeRO {self.zero}" if self.zero else "",
                 f"remat {self.policy}" if self.policy != "none" else "", f"{self.micro} microbatches" if self.micro > 1 else ""]
        return ", ".join(part for part in parts if part)


#: The decisions that a whole row of candidates shares: remat policy, choice, ZeRO stage.
What = tuple[str, Choice, int]


class _Best:
    """The fastest plan that fits and the leanest plan, by candidate; every price too, where a ranking is wanted."""

    def __init__(self, size: int, ranking: Ranking[What] | None = None) -> None:
        self.ranking = ranking
        self.seconds = np.full(size, np.inf)
        self.fits: list[What | None] = [None] * size
        self.bytes = np.full(size, np.inf)
        self.lean: list[What | None] = [None] * size
        self.peak = np.zeros(size)
        self.outcomes = {"priced": 0, "memory": 0, "indivisible": 0}

    def offer(self, what: What, totals: Totals, legal: np.ndarray, capacity: float) -> None:
        seconds, peak = totals.step_seconds, totals.peak_bytes
        fits = legal & (peak <= capacity)
        self.outcomes["priced"] += int(legal.sum())
        self.outcomes["memory"] += int((legal & ~fits).sum())
        self.outcomes["indivisible"] += int((~legal).sum())
        if self.ranking is not None:
            self.ranking.offer(what, fits, seconds, peak)
        for index in np.flatnonzero(fits & (seconds < self.seconds * (1 - 1e-9))):
            self.seconds[index], self.peak[index], self.fits[index] = seconds[index], peak[index], what
        for index in np.flatnonzero(legal & (peak < self.bytes * (1 - 1e-9))):
            self.bytes[index], self.lean[index] = peak[index], what


def capacity(topology: Topology) -> float:
    """Bytes of one device that a program may use."""
    return topology.chip.hbm_bytes - topology.chip.reserved_bytes


def _zeros(pins: Pins) -> list[int]:
    return [stage for stage in (0, 1, 2, 3) if pins.zero in (None, stage)]


def _explore(load: Workload, room: space.Space, c: Candidates, pricer: Pricer, pins: Pins, ranking: Ranking[What] | None = None) -> _Best:
    best = _Best(len(c), ranking)
    colouring, problem = load.colouring, load.problem
    relevant = frozenset({*room.tensor, *(name for choice in room.choices for name in choice.tensor), colouring.batch_colour or "", colouring.sequence_colour or ""})
    sequence = space.sequence_size(problem, colouring)
    batch_bytes = float(sum(np.prod(shape) * ITEMSIZE.get(dtype, 4) for _, shape, dtype, _ in problem.batch))
    rest = Table(load.rest, relevant, pricer, c)
    masks = [(choice, space.legal(room, choice, colouring, sequence, c)) for choice in room.choices]
    for policy in room.policies:
        work = Table(load.work[policy], relevant, pricer, c)
        points = [Table(items, relevant, pricer, c) for items in load.points[policy]]
        for choice, mask in masks:
            if not mask.any():
                best.outcomes["indivisible"] += len(c)
                continue
            w, r, m = work.total(choice), rest.total(choice), [point.total(choice) for point in points]
            for zero in _zeros(pins):
                legal = mask & ((c.fsdp > 1) == (zero > 0))
                totals = combine(w, r, m, zero, batch_bytes, problem.state_bytes, pricer, c)
                best.offer((policy, choice, zero), totals, legal, capacity(pricer.topology))
    return best


def search(problem: Problem, topology: str | Topology, pin: Mapping[str, Any] | Pins | None = None, *, load: Workload | None = None) -> Plan:
    """Finds the fastest plan that fits.

    Args:
        problem: a traced model.
        topology: where it will run.
        pin: decisions fixed by hand.
        load: the problem already prepared, to search it again.

    Returns:
        The plan, with its certificate.

    Raises:
        PinError: the pins make no sense, or allow no plan.
        InfeasibleError: no plan fits into memory; the message says what would.
    """
    started = time.perf_counter()
    topology, pins = parse_topology(topology), Pins.parse(pin)
    load = load if load is not None and traits(load.vendor) == traits(topology.chip.vendor) else prepare(problem, topology.chip.vendor)
    found = _find(load, topology, pins)
    if found.index is None:
        raise _infeasible(load, topology, pins, found)
    decision = _decision(found.room, found.best.fits[found.index], found.index)
    ledger = _ledger(found, decision, found.fastest, time.perf_counter() - started)
    return assemble(load, topology, decision, ledger, rules=found.rules, pins=pins, left_out=found.room.left_out)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A plan that fits, in its place among all that do.

    Attributes:
        decision: what it decides.
        seconds: predicted time of a step.
        peak_bytes: predicted bytes per device.
        make: builds the plan, with the certificate of the search; its gap is how much slower than the fastest it is predicted to be.
    """

    decision: Decision
    seconds: float
    peak_bytes: float
    make: Callable[[], Plan]


def ranked(problem: Problem, topology: str | Topology, pin: Mapping[str, Any] | Pins | None = None, *, load: Workload | None = None) -> Iterator[Ranked]:
    """All plans that fit, the fastest first; none is built before it is asked for.

    Args and errors are those of `search`, whose answer is the first.
    """
    started = time.perf_counter()
    topology, pins = parse_topology(topology), Pins.parse(pin)
    load = load if load is not None and traits(load.vendor) == traits(topology.chip.vendor) else prepare(problem, topology.chip.vendor)
    ranking = Ranking[What]()
    found = _find(load, topology, pins, ranking)
    if found.index is None:
        raise _infeasible(load, topology, pins, found)
    room, seconds = found.room, time.perf_counter() - started

    def plan(decision: Decision, entry: Entry[What]) -> Plan:
        return assemble(load, topology, decision, _ledger(found, decision, entry.seconds, seconds), rules=found.rules, pins=pins, left_out=room.left_out)

    def entries() -> Iterator[Ranked]:
        for entry in ranking.ordered(lambda what, index: _simplicity(room.pairs[index], what)):
            decision = _decision(room, entry.what, entry.index)
            yield Ranked(decision=decision, seconds=entry.seconds, peak_bytes=entry.peak_bytes, make=partial(plan, decision, entry))

    return entries()


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A priced space; `index` is the candidate of the best plan, None where none fits."""

    room: space.Space
    best: _Best
    rules: Rules | None
    index: int | None

    @property
    def fastest(self) -> float:
        """Seconds of the fastest plan that fits."""
        return float(self.best.seconds[np.isfinite(self.best.seconds)].min())


def _ledger(found: _Found, decision: Decision, step_seconds: float, seconds: float) -> Search:
    """The certificate of a search for one of its plans; the gap of the fastest is 0."""
    priced, bound = found.best.outcomes["priced"], found.fastest
    return Search(
        evaluations=priced, candidates=priced, lower_bound=bound, gap=max(0.0, 1 - bound / step_seconds), seconds=seconds,
        rejected=_rejected(found.room, found.best, decision), counts=tuple(sorted(found.best.outcomes.items())))


def _find(load: Workload, topology: Topology, pins: Pins, ranking: Ranking[What] | None = None) -> _Found:
    """Prices the whole space.

    Raises:
        PinError: the pins make no sense, or allow no plan.
    """
    rules = check_rules(pins.rules, load.colouring) if pins.rules is not None else None
    fixed = _fixed_choice(rules, load.colouring, pins) if rules is not None else None
    room, devices = _room(load, topology, pins, fixed)
    c, pricer = candidates(room.pairs, topology), Pricer(topology)
    best = _explore(load, room, c, pricer, pins, ranking)
    if not np.isfinite(best.bytes).any():
        raise space.explain_empty(load.problem, load.colouring, pins, devices)
    fitting = np.flatnonzero(np.isfinite(best.seconds))
    if not len(fitting):
        return _Found(room=room, best=best, rules=rules, index=None)
    ties = fitting[best.seconds[fitting] <= best.seconds[fitting].min() * (1 + 1e-9)]
    index = min((int(i) for i in ties), key=lambda i: _simplicity(room.pairs[i], best.fits[i]))
    return _Found(room=room, best=best, rules=rules, index=index)


def _fixed_choice(rules: Rules, colouring: Colouring, pins: Pins) -> Choice:
    batch, sequence = colouring.batch_colour, colouring.sequence_colour
    ways = pins.mesh["tensor"] if pins.mesh is not None else dict(pins.axes).get("tensor", 1)
    optional = {name for name, axes in rules.entries if "tensor" not in axes}  # MaxText's fallbacks: a second rule for the same name
    cut = tuple(name for name, axes in rules.entries if "tensor" in axes and not (name in optional and colouring.colours[name].divisor % ways))
    used = set(pins.mesh or ()) | {axis for axis, size in pins.axes if size > 1}
    lacking = [axis for axis in ("data", "fsdp") if axis in used and axis not in rules.axes_of(batch or "")]
    if lacking:
        raise PinError(f"the pinned rules cut {batch!r} over {rules.axes_of(batch or '') or 'nothing'}, and the pinned mesh also has {', '.join(lacking)}\n"
                       f"Try: the rule ({batch!r}, ('data', 'fsdp'))")
    return Choice(tensor=tuple(dict.fromkeys(name for name in cut if name != sequence)), batch=batch, sequence=sequence if sequence in cut else None)


def _room(load: Workload, topology: Topology, pins: Pins, fixed: Choice | None) -> tuple[space.Space, int]:
    """The space that uses all devices, or the most devices for which there is one."""
    problem, colouring = load.problem, load.colouring
    if pins.mesh is not None and pins.mesh.devices > topology.devices:
        raise PinError(f"the mesh {pins.mesh} has {pins.mesh.devices} devices and {topology.name} has {topology.devices}")
    wanted = pins.mesh.devices if pins.mesh is not None else topology.devices
    for devices in range(wanted, 0, -1):
        room = space.build(problem, colouring, devices, pins, fixed)
        room = replace(room, pairs=tuple(pair for pair in room.pairs if place(pair[0], topology) is not None))
        sequence = space.sequence_size(problem, colouring)
        tensors = {mesh["tensor"] for mesh, _ in room.pairs}
        if any(n == 1 or any(colouring.colours[name].divisor % n == 0 for name in room.tensor) or (fixed and fixed.sequence and sequence % n == 0) for n in tensors):
            return room, devices
        if pins.mesh is not None:
            break
    raise space.explain_empty(problem, colouring, pins, wanted)


def _simplicity(pair: tuple[MeshShape, int], what: What | None) -> tuple[Any, ...]:
    assert what is not None
    policy, choice, zero = what
    mesh, micro = pair
    return len(mesh), micro, policy != "none", zero, choice.sequence is not None, len(choice.tensor), tuple(dict(mesh).items()), policy, choice.tensor


def _decision(room: space.Space, what: What | None, index: int) -> Decision:
    assert what is not None
    policy, choice, zero = what
    mesh, micro = room.pairs[index]
    return Decision(mesh=mesh, micro=micro, policy=policy, choice=choice, zero=zero)


def _rejected(room: space.Space, best: _Best, chosen: Decision) -> tuple[Rejected, ...]:
    """The best plan of each other mesh, and meshes for which nothing fits."""
    by_mesh: dict[MeshShape, int] = {}
    for index, (mesh, _) in enumerate(room.pairs):
        if best.lean[index] is None:
            continue
        other = by_mesh.get(mesh)
        key = (best.seconds[index], best.bytes[index])
        if other is None or key < (best.seconds[other], best.bytes[other]):
            by_mesh[mesh] = index
    found: list[Rejected] = []
    for mesh, index in by_mesh.items():
        if mesh == chosen.mesh:
            continue
        fits = best.fits[index] is not None
        decision = _decision(room, best.fits[index] if fits else best.lean[index], index)
        found.append(Rejected(mesh=mesh, summary=decision.summary, reason="slower" if fits else "memory",
                              step_seconds=float(best.seconds[index]) if fits else 0.0, peak_bytes=int(best.peak[index] if fits else best.bytes[index])))
    return tuple(sorted(found, key=lambda r: (r.reason != "slower", r.step_seconds, r.peak_bytes, str(r.mesh))))


def assemble(
    load: Workload, topology: Topology, decision: Decision, ledger: Search, *, rules: Rules | None = None, pins: Pins | None = None, left_out: tuple[str, ...] = ()
) -> Plan:
    """Builds the plan value of one decision."""
    problem, colouring, mesh = load.problem, load.colouring, decision.mesh
    pricer, c = Pricer(topology), candidates([(mesh, decision.micro)], topology)
    totals = _price(load, decision, pricer, c)
    compute, rest = (decision.choice.rules(), None) if rules is None else layouts.split_rules(rules, colouring.batch_colour)
    parameters = layouts.parameter_layouts(problem, colouring.parameters, load.frozen, mesh, compute, decision.zero, rest)
    cost = estimate(
        totals, 0, listed=collectives(load.work[decision.policy], decision.choice, decision.zero,
                                float(totals.device_bytes["parameters"][0]), c, pricer), tokens=problem.tokens,
        model_flops=model_flops(problem), mesh=mesh, peak_flops_per_s=topology.chip.peak(problem.compute_dtype))
    cost = replace(cost, corrections=applied(topology))
    plan = Plan(
        model=problem.model, topology=topology.name, mesh=mesh, placement=_placement(mesh, topology), rules=compute, sequence_parallel=decision.choice.sequence is not None, zero=decision.zero,
        remat=decision.policy, microbatches=decision.micro, parameters=parameters,
        batch_layouts=layouts.batch_layouts(problem, colouring.batch, mesh, compute), estimate=cost, search=ledger,
        source=Source(load=load, topology=topology, pins=pins or Pins()))
    return plan.with_findings(*relax.notes(load, topology, plan, left_out))


def _placement(mesh: MeshShape, topology: Topology) -> tuple[tuple[str, tuple[Link, ...]], ...]:
    spans = place(mesh, topology) or {}
    return tuple((axis, tuple(Link(kind=topology.tiers[span.tier].kind, ways=span.ways) for span in parts)) for axis, parts in spans.items())


def _price(load: Workload, decision: Decision, pricer: Pricer, c: Candidates) -> Totals:
    problem = load.problem
    batch_bytes = float(sum(np.prod(shape) * ITEMSIZE.get(dtype, 4) for _, shape, dtype, _ in problem.batch))
    return combine(
        pricer.tally(load.work[decision.policy], decision.choice, c), pricer.tally(load.rest, decision.choice, c),
        [pricer.tally(items, decision.choice, c) for items in load.points[decision.policy]], decision.zero, batch_bytes, problem.state_bytes, pricer, c)


def price(load: Workload, topology: Topology, decision: Decision) -> Totals:
    """Prices one decision on its own, without any table."""
    return _price(load, decision, Pricer(topology), candidates([(decision.mesh, decision.micro)], topology))


def model_flops(problem: Problem) -> float:
    """FLOPs that a step needs with no recomputation: three times the matmuls and convolutions of the forward pass.

    A matmul's backward pass is two matmuls of the same size (Kaplan et al., arXiv:2001.08361, section 2.1).
    """
    graph = problem.forward
    return 3 * sum(op.flops * graph.trips(op.region) for op in graph.ops if op.category in ("matmul", "convolution"))


def _infeasible(load: Workload, topology: Topology, pins: Pins, found: _Found) -> InfeasibleError:
    index = int(np.argmin(found.best.bytes))
    decision = _decision(found.room, found.best.lean[index], index)

    def fits(other: Topology, others: Pins) -> bool:
        try:
            return _find(load, other, others).index is not None
        except PinError:
            return False

    totals = price(load, topology, decision)
    return relax.infeasible(load, topology, pins, decision.mesh, decision.summary, totals, capacity(topology), fits)


def why_not(plan: Plan, pin: Mapping[str, Any]) -> Plan:
    """The best plan under different pins, for the same model and topology.

    Raises:
        PinError: the pins make no sense, or allow no plan.
        InfeasibleError: nothing fits under them.
    """
    source = plan.source
    if source is None:
        raise PinError("this plan was read from a file and does not carry its model\nTry: `shardlib explain plan.json --why-not ...`, or plan again")
    pins = Pins.parse(pin)
    merged = {name: getattr(source.pins, name) for name in pins.__dataclass_fields__}
    given = {name: getattr(pins, name) for name in pins.__dataclass_fields__ if getattr(pins, name) not in (None, ())}
    if "mesh" in given or "axes" in given:
        merged |= {"mesh": None, "axes": ()}
    return search(source.load.problem, source.topology, replace(Pins(), **{**merged, **given}), load=source.load)
