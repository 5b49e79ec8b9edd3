"""Questions about a plan, answered by searching the same problem again on a changed machine or
under changed pins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

import numpy as np

from shardlib.cost.framework import FIXED_PINS
from shardlib.cost.items import kernel_items
from shardlib.cost.roofline import fitting_bytes, kernel_seconds, margin
from shardlib.cost.tables import Quantity
from shardlib.cost.terms import OUTSIDE_LAYERS, Amount, Compute, local
from shardlib.decisions.pins import Pins
from shardlib.errors import ArgumentError, InfeasibleError, PinError
from shardlib.graph import Op
from shardlib.layout import BATCH_AXES, Rules
from shardlib.machines.topology import Topology, island_of
from shardlib.planner.answers import (
    Alternative,
    Answers,
    BindingConstraint,
    Constraints,
    Kernels,
    KernelTime,
    Sensitivity,
    ShadowPrice,
    Shock,
    UnfitPlan,
    link_name,
)
from shardlib.planner.assembly import PricedCandidate
from shardlib.planner.plan import Plan, Ranked, source_of
from shardlib.planner.workload import CostProgram, batch_size
from shardlib.report.elements import TIE, bytes_text, percent_text, seconds_text
from shardlib.untrusted.data import shown

# --------------------------------------------------------------------------------------------------
# Searches on a slightly different machine.
#
# A plan carries its source: the prepared problem, the topology and the pins. With it the search can
# run again on another topology, and the plan itself can be priced there with all of its decisions
# pinned. Nothing is traced again.

#: Decimal gigabyte, bytes: one unit more of memory, or per second of a link.
GB = 10**9
#: Device memory in which everything fits, bytes.
UNLIMITED = 1 << 60


def best_on(plan: Plan, topology: Topology, pins: Pins | None = None) -> Plan | None:
    """The best plan for the same problem on another topology, under the same or the given pins;
    None where nothing fits or no mesh is legal.
    """
    source = source_of(plan)
    try:
        return source.search(topology, source.pins if pins is None else pins)
    except (InfeasibleError, PinError):
        return None


def pinned(plan: Plan) -> Pins:
    """Pins under which the plan is the only one; rules that the user pinned stay in the user's
    names, and what a framework decides by itself is not pinned.
    """
    values: dict[str, Any] = {**plan.decisions}
    if plan.source is not None and plan.source.pins.rules is not None:
        values["rules"] = plan.source.pins.rules
    if plan.source is not None and plan.source.workload.framework is not None:
        values = {pin: value for pin, value in values.items() if pin not in FIXED_PINS}
    return Pins.parse(values)


def priced_on(plan: Plan, topology: Topology) -> Plan | None:
    """The same decisions on another topology for the same problem; None where they do not fit."""
    return best_on(plan, topology, pinned(plan))


def with_chip(topology: Topology, **changes: object) -> Topology:
    """The topology with some fields of its chip replaced."""
    return replace(topology, chip=replace(topology.chip, **changes))


def with_unlimited_memory(topology: Topology) -> Topology:
    """The topology with unlimited device memory."""
    return with_chip(topology, hbm_bytes=UNLIMITED)


def with_memory(topology: Topology, more_bytes: int) -> Topology:
    """The topology with `more_bytes` more usable memory per device; fewer if negative."""
    return with_chip(topology, hbm_bytes=topology.chip.hbm_bytes + more_bytes)


def with_link(topology: Topology, tier: int, bytes_per_s: float) -> Topology:
    """The topology with another bandwidth on one link tier.

    Args:
        bytes_per_s: per device, in one direction.
    """
    tiers = tuple(
        replace(each, bytes_per_s=bytes_per_s) if index == tier else each
        for index, each in enumerate(topology.tiers)
    )
    return replace(topology, tiers=tiers)


def faster_without_limit(plan: Plan) -> list[Ranked]:
    """Plans that are faster than this one and do not fit, fastest first; each needs less memory
    than all before it.
    """
    source, fitting = source_of(plan), fitting_bytes(source_of(plan).topology)
    boundless = with_unlimited_memory(source.topology)
    fastest = best_on(plan, boundless)
    if fastest is None or fastest.estimate.step_seconds >= plan.estimate.step_seconds * (1 - TIE):
        return []
    slack = plan.estimate.step_seconds / fastest.estimate.step_seconds
    frontier = source.ranked(boundless, slack=slack, pareto=True)
    quicker = itertools.takewhile(
        lambda entry: entry.seconds < plan.estimate.step_seconds * (1 - TIE), frontier
    )
    return [entry for entry in quicker if entry.peak_bytes > fitting]


def changes(plan: Plan, other: Plan) -> tuple[str, ...]:
    """The decisions in which another plan differs from this one, such as "remat dots -> full"."""
    ours, theirs = plan.decisions, other.decisions
    return tuple(
        f"{key} {_value(key, ours[key])} -> {_value(key, theirs[key])}"
        for key in ours
        if ours[key] != theirs[key]
    )


def _value(key: str, value: Any) -> str:
    """A decision as text: a mesh as "fsdp=4 x tensor=2", rules without the empty ones."""
    if key == "mesh":
        return " x ".join(f"{axis}={size}" for axis, size in value.items()) or "one device"
    if key == "rules":
        sharded = [f"{name}_{'·'.join(axes)}" for name, axes in Rules.parse(value).entries if axes]
        return ", ".join(sharded) or "nothing sharded"
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[object]", value))) or "none"
    return str(value)


# --------------------------------------------------------------------------------------------------
# Alternatives: the next plans by predicted time. Equally fast plans are one entry: the simplest of
# them, with the number of the others.

#: Limits of the ranking, in multiples of the fastest step time, tried in turn, so that a large
#: space is not ranked farther than needed.
SLACKS = (1.02, 1.2, math.inf)
#: Most alternatives per call: each becomes a whole plan, to list its differences, which takes
#: hundredths of a second.
LIMIT = 1000


def alternatives(plan: Plan, count: int = 10) -> tuple[Alternative, ...]:
    """The best plans that differ from this one, and from each other, in more than a tie."""
    _require_count(count)
    plans: tuple[Alternative, ...] = ()
    for slack in SLACKS:
        plans, complete = _up_to_slack(plan, count, slack)
        if complete or len(plans) >= count:
            break
    return plans


def _require_count(count: int) -> None:
    """Raises if `count` is not an integer from 0 to `LIMIT`."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
        raise ArgumentError(
            f"alternatives: count is {shown(count)}; it is an integer of at least 0, how many plans"
            " are wanted\nTry: plan.alternatives(10)"
        )
    if count > LIMIT:
        raise ArgumentError(
            f"alternatives: count is {shown(count)}; it is at most {LIMIT}, as every alternative"
            " becomes a whole plan that is compared with this one, which takes hundredths of a"
            " second\nTry: plan.alternatives(10), and plan.why_not(...) for a plan further down"
        )


def _up_to_slack(plan: Plan, count: int, slack: float) -> tuple[tuple[Alternative, ...], bool]:
    """Alternatives up to `slack` times the fastest plan, and True if there are no others
    (beyond that the ranking is not complete).
    """
    source = source_of(plan)
    listed: list[Alternative] = []
    fastest: float | None = None
    for ties in _by_time(source.ranked(source.topology, slack=slack)):
        fastest = ties[0].seconds if fastest is None else fastest
        if len(listed) >= count or ties[0].seconds > slack * fastest:
            return tuple(listed), False
        first, others = _first_other(plan, ties)
        if first is None:
            continue
        alternative = first.build()
        listed.append(
            Alternative(
                place=len(listed) + 1,
                mesh=alternative.mesh,
                summary=first.candidate.summary,
                step_seconds=first.seconds,
                peak_bytes=int(first.peak_bytes),
                ratio=first.seconds / (plan.estimate.step_seconds or 1.0),
                differs=changes(plan, alternative),
                ties=others,
            )
        )
    return tuple(listed), math.isinf(slack)


def _by_time(plans: Iterable[Ranked]) -> Iterator[list[Ranked]]:
    """Runs of equally fast plans."""
    run: list[Ranked] = []
    for entry in plans:
        if run and entry.seconds > run[0].seconds * (1 + TIE):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _first_other(plan: Plan, ties: list[Ranked]) -> tuple[Ranked | None, int]:
    """The simplest of equally fast plans, and the number of others; (None, 0) where the chosen plan
    is one of them.
    """
    includes_plan = (
        abs(ties[0].seconds - plan.estimate.step_seconds) <= TIE * plan.estimate.step_seconds
    )
    if includes_plan and any(
        entry.candidate.mesh == plan.mesh.of_one_island
        and entry.build().decisions == plan.decisions
        for entry in ties
    ):
        return None, 0
    return ties[0], len(ties) - 1


# --------------------------------------------------------------------------------------------------
# Constraints.
#
# Three things limit a plan: memory (faster plans do not fit), pins, and sizes that do not divide (a
# mesh axis cannot grow). For memory the faster plans are ranked without the limit, for a pin the
# search is repeated without it, and for a size the mesh is compared with the largest number of
# parts that divides.


def constraints(plan: Plan) -> Constraints:
    """The limits that keep a plan from being faster."""
    unfit_plans = staircase(plan)
    bindings = [*_memory(plan, unfit_plans), *_pins(plan), *_sizes(plan)]
    bindings.sort(
        key=lambda binding: (
            binding.step_seconds or plan.estimate.step_seconds,
            binding.kind,
            binding.what,
        )
    )
    return Constraints(
        step_seconds=plan.estimate.step_seconds, binding=tuple(bindings), staircase=unfit_plans
    )


def staircase(plan: Plan) -> tuple[UnfitPlan, ...]:
    """Faster plans that do not fit, the one that lacks least memory first."""
    topology = source_of(plan).topology
    usable, memory_margin = topology.chip.usable_bytes, margin(topology)
    unfit_plans: list[UnfitPlan] = []
    for entry in faster_without_limit(plan):
        if unfit_plans and entry.seconds <= unfit_plans[-1].step_seconds * (1 + TIE):
            unfit_plans.pop()  # as fast, and needs more memory
        unfit_plans.append(
            UnfitPlan(
                mesh=entry.candidate.mesh,
                summary=entry.candidate.summary,
                step_seconds=entry.seconds,
                peak_bytes=int(entry.peak_bytes),
                short_bytes=int(entry.peak_bytes * memory_margin - usable),
            )
        )
    return tuple(reversed(unfit_plans))


def _memory(plan: Plan, unfit_plans: tuple[UnfitPlan, ...]) -> Iterable[BindingConstraint]:
    if not unfit_plans:
        return
    nearest, fastest, before = unfit_plans[0], unfit_plans[-1], plan.estimate.step_seconds
    message = (
        f"Memory: {bytes_text(nearest.short_bytes)} more on every device would allow {nearest.mesh}"
        f" and save {seconds_text(before - nearest.step_seconds)} per step"
    )
    if fastest is not nearest:
        message += (
            f"; with memory to spare a step would take {seconds_text(fastest.step_seconds)}"
            f" ({percent_text(1 - fastest.step_seconds / before)} less)"
        )
    yield BindingConstraint(
        kind="memory",
        what=source_of(plan).topology.chip.name,
        message=message + ".",
        step_seconds=fastest.step_seconds,
    )


def _pins(plan: Plan) -> Iterable[BindingConstraint]:
    source, before = source_of(plan), plan.estimate.step_seconds
    for name, others in source.pins.without().items():
        try:
            free = source.search(source.topology, others)
        except (InfeasibleError, PinError):
            continue
        gain = before - free.estimate.step_seconds
        if gain > TIE * before:
            yield BindingConstraint(
                kind="pin",
                what=name,
                step_seconds=free.estimate.step_seconds,
                message=(
                    f"The pin on {name} costs {seconds_text(gain)} per step: left to the planner,"
                    f" {free.mesh} takes {seconds_text(free.estimate.step_seconds)}."
                ),
            )


def _sizes(plan: Plan) -> Iterable[BindingConstraint]:
    """Sizes that the mesh has used up: the batch, and colours that the tensor axis shards."""
    source, colouring = source_of(plan), source_of(plan).workload.colouring
    problem, mesh = source.workload.problem, plan.mesh
    batch, degree = batch_size(problem, colouring), mesh.ways(BATCH_AXES)
    for idle in (finding for finding in plan.findings if finding.code == "idle-devices"):
        yield BindingConstraint(
            kind="size", what="devices", message=f"{idle.message[:1].upper()}{idle.message[1:]}."
        )
    if mesh.devices > 1 and batch > 1 and degree >= batch:
        yield BindingConstraint(
            kind="size",
            what=colouring.batch_colour or "batch",
            message=(
                f"Every one of the {batch:,} examples of the batch has a device of its own: the"
                " batch can be sharded no further."
            ),
        )
    if (tensor := mesh["tensor"]) > 1:
        sharded = [
            name
            for name, axes in plan.rules.entries
            if "tensor" in axes and name in colouring.colours
        ]
        indivisible = [
            f"{name} ({colouring.colours[name].divisor:,})"
            for name in sharded
            if colouring.colours[name].divisor % (2 * tensor)
        ]
        if indivisible:
            yield BindingConstraint(
                kind="size",
                what="tensor",
                message=(
                    f"A tensor axis of {2 * tensor} does not divide {', '.join(indivisible)}, which"
                    f" {tensor} parts divide now."
                ),
            )


# --------------------------------------------------------------------------------------------------
# The kernels of a step on the roofline.

Array = np.ndarray


def kernels(plan: Plan) -> Kernels:
    """The kernels of a step of a plan, equal ones summed, slowest first. Their seconds add up to
    the plan's `estimate.seconds.compute`.
    """
    priced = _priced_candidate(plan)
    sums: dict[tuple[str, ...], KernelTime] = {}
    for program, shares in priced.programs():
        for kernel in _kernels_of(program, shares, priced):
            key = kernel.name, kernel.kind, kernel.phase, kernel.dtype, f"{kernel.intensity:.4g}"
            sums[key] = _added(sums[key], kernel) if key in sums else kernel
    chip = priced.pricer.topology.chip
    dtypes = dict.fromkeys(kernel.dtype for kernel in sums.values())
    return Kernels(
        chip=chip.name,
        peak_flops_per_s=tuple((dtype, chip.peak(dtype)) for dtype in dtypes),
        bytes_per_s=chip.hbm_bytes_per_s,
        kernels=tuple(sorted(sums.values(), key=lambda kernel: (-kernel.seconds, kernel.name))),
    )


def _priced_candidate(plan: Plan) -> PricedCandidate:
    """The plan as a priced candidate of the search."""
    source = source_of(plan)
    topology, pins = source.topology, pinned(plan)
    if pins.exchange.islands > 1:
        topology, pins = island_of(topology, pins.exchange.islands), pins.of_one_island
    first = next(source.with_pins(pins).ranked(with_unlimited_memory(topology), slack=1.0), None)
    if first is None:  # it was priced before
        raise InfeasibleError("the plan cannot be priced again")
    return PricedCandidate.of(source.workload, topology, first.candidate)


@dataclass(frozen=True, kw_only=True)
class _PerDevice:
    """Amounts per device."""

    candidate: PricedCandidate

    def __call__(self, amount: Amount) -> Array:
        return local(amount, self.candidate.meshes.degrees)


def _kernels_of(
    program: CostProgram, shares: Array, priced: PricedCandidate
) -> Iterator[KernelTime]:
    """The kernels of a program, scaled to the share of the layers that run it."""
    facts, pricer, decisions = program.facts, priced.pricer, priced.candidate.decisions
    per_device = _PerDevice(candidate=priced)
    factor = pricer.correction_factors.get(Quantity.COMPUTE, 1.0)
    for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True):
        part = float(shares[item.segment])
        if not part:
            continue
        outside = item.segment in (OUTSIDE_LAYERS, len(shares) + OUTSIDE_LAYERS)
        efficiency = pricer.outside_efficiency if outside else pricer.efficiency
        for term in item.terms(priced.candidate.choice):
            if not isinstance(term, Compute):
                continue
            if term.heads is not None and not term.heads.holds(decisions.mesh["tensor"]):
                continue
            once = replace(term, trips=1)
            times = term.trips * part * decisions.microbatches / decisions.mesh["stage"]
            seconds = kernel_seconds(once, per_device, pricer.topology.chip, efficiency)
            yield KernelTime(
                name=_name(facts.graph.ops[kernel.op], term, per_device),
                kind=term.kind,
                phase=_phase(facts.graph.ops[kernel.op]),
                dtype=term.dtype,
                count=times,
                flops=float(per_device(term.flops)[0]) * times,
                bytes=sum(float(per_device(amount)[0]) for amount in term.traffic) * times,
                seconds=float(seconds[0]) * factor * times,
            )


def _added(first: KernelTime, second: KernelTime) -> KernelTime:
    return replace(
        first,
        count=first.count + second.count,
        flops=first.flops + second.flops,
        bytes=first.bytes + second.bytes,
        seconds=first.seconds + second.seconds,
    )


def _phase(op: Op) -> str:
    if "rematted" in op.scope or "checkpoint" in op.scope:
        return "rematerialised"
    return "backward" if "transpose(" in op.scope else "forward"


def _name(op: Op, term: Compute, per_device: _PerDevice) -> str:
    """The op's place in the model, without the scopes that differentiation adds, and what it
    computes.
    """
    words = op.scope.replace("transpose(", "").replace("jvp(", "").replace(")", "")
    location = "/".join(
        part for part in words.split("/") if part and part not in ("rematted_computation", "remat")
    )
    what = op.kind
    if term.matmul is not None:
        rows, columns, depth = (round(float(per_device(amount)[0])) for amount in term.matmul.dims)
        what = f"matmul {rows:,} x {depth:,} x {columns:,}"
    return f"{location}/{what}" if location else what


# --------------------------------------------------------------------------------------------------
# A lower bound on the device-seconds of a step, on any number of devices.


# --------------------------------------------------------------------------------------------------
# Further answers of `shardlib explain`.


def answers(
    plan: Plan, *, alternatives: bool = False, sensitivity: bool = False, kernels: bool = False
) -> Answers:
    """Answers to the selected questions about a plan with a source."""
    return Answers(
        alternatives=plan.alternatives() if alternatives else None,
        constraints=plan.constraints() if alternatives else None,
        sensitivity=plan.sensitivity() if sensitivity else None,
        kernels=plan.kernels() if kernels else None,
    )


# --------------------------------------------------------------------------------------------------
# Shadow prices and sensitivity: the value of a gigabyte, and the regret of a wrong figure.
#
# The *shadow price* of a resource is the step time that one more unit of it saves, found by
# searching again with that unit added. Memory acts in steps: as long as no faster plan fits, one
# more gigabyte is worth nothing, and the *break point* is the amount that is needed. A link acts
# smoothly until another plan becomes the best, at its break point. That is found by the parametric
# method: price the plan and its rival as functions of the rate, go to where they meet, search there
# for a better rival, and repeat until there is none.
#
# The *regret* of a plan, if a figure turns out different, is its step time minus that of the plan
# that would then have been best.

#: Largest speedup of a link in the search for its break point.
MAX_LINK_SPEEDUP = 8.0
#: Relative width to which a break point is narrowed.
RATE_TOLERANCE = 1e-4
#: Precision of the break point of memory, as a share of memory, and the most searches for it.
MEMORY_TOLERANCE, MAX_BISECTIONS = 0.01, 6
#: Factor by which a shock scales a figure.
SHOCK = 0.9


def sensitivity(plan: Plan) -> Sensitivity:
    """Shadow prices of memory and links, and the regret of the plan if a figure is a tenth
    lower.
    """
    topology = source_of(plan).topology
    best = best_on(plan, topology) or plan
    used = [index for index, tier in enumerate(topology.tiers) if tier.devices > 1]
    prices = [_price_of_memory(plan, best), *(_price_of_link(plan, best, index) for index in used)]
    lowered: list[tuple[str, Topology]] = [
        (
            f"{link_name(topology.tiers[index].name, topology.tiers[index].kind)} bandwidth",
            with_link(topology, index, topology.tiers[index].bytes_per_s * SHOCK),
        )
        for index in used
    ]
    chip = topology.chip
    peaks = tuple((dtype, rate * SHOCK) for dtype, rate in chip.flops_per_s)
    lowered += [
        ("compute", with_chip(topology, flops_per_s=peaks)),
        ("memory bandwidth", with_chip(topology, hbm_bytes_per_s=chip.hbm_bytes_per_s * SHOCK)),
    ]
    shocks = [_shock(plan, what, changed) for what, changed in lowered]
    return Sensitivity(
        step_seconds=plan.estimate.step_seconds,
        best_seconds=best.estimate.step_seconds,
        prices=tuple(prices),
        shocks=tuple(shocks),
    )


def _price_of_memory(plan: Plan, best: Plan) -> ShadowPrice:
    topology = source_of(plan).topology
    more = best_on(plan, with_memory(topology, GB)) or best
    price = ShadowPrice(
        resource="memory",
        kind="hbm",
        unit=GB,
        amount=topology.chip.usable_bytes,
        saved_seconds=_saved(best.estimate.step_seconds, more.estimate.step_seconds),
    )
    unfit_plans = staircase(best)
    if not unfit_plans:
        return price
    larger, low, high = _first_larger(plan, best, unfit_plans[0].short_bytes + 1)
    return replace(
        price,
        break_amount=float(topology.chip.usable_bytes + high),
        break_mesh=larger.mesh,
        break_changes=changes(best, larger),
        break_seconds=larger.estimate.step_seconds,
        limit=float(topology.chip.usable_bytes + low),
    )


def _first_larger(plan: Plan, best: Plan, high: int) -> tuple[Plan, int, int]:
    """The first plan that more memory allows, with a number of extra bytes that is too small for it
    and one that is enough.

    The number of rematerialised layers adapts to the memory, so faster plans come in small steps;
    the first one is found by bisection.
    """
    topology = source_of(plan).topology
    low, usable, memory_margin = 0, topology.chip.usable_bytes, margin(topology)
    first = best_on(plan, with_memory(topology, high)) or best
    for _ in range(MAX_BISECTIONS):
        if high - low <= MEMORY_TOLERANCE * usable:
            break
        middle = (low + high) // 2
        between = best_on(plan, with_memory(topology, middle)) or best
        if between.estimate.step_seconds < best.estimate.step_seconds * (1 - TIE):
            first = between
            high = min(
                middle,
                max(
                    low + 1, math.ceil(between.estimate.device_bytes.peak * memory_margin) - usable
                ),
            )
        else:
            low = middle
    return first, low, high


def _price_of_link(plan: Plan, best: Plan, tier: int) -> ShadowPrice:
    topology = source_of(plan).topology
    rate = topology.tiers[tier].bytes_per_s

    def with_rate(bytes_per_s: float) -> Topology:
        return with_link(topology, tier, bytes_per_s)

    more = best_on(plan, with_rate(rate + GB)) or best
    price = ShadowPrice(
        resource=topology.tiers[tier].name,
        kind=topology.tiers[tier].kind,
        unit=GB,
        amount=rate,
        limit=rate * MAX_LINK_SPEEDUP,
        saved_seconds=_saved(best.estimate.step_seconds, more.estimate.step_seconds),
    )
    rival, crossing = _first_rival(plan, best, with_rate, rate)
    if rival is None:
        return price
    return replace(
        price,
        break_amount=crossing,
        break_mesh=rival.mesh,
        break_changes=changes(best, rival),
        break_seconds=rival.estimate.step_seconds,
    )


def _saved(before: float, after: float) -> float:
    """Seconds saved; 0 where the difference is rounding."""
    return before - after if before - after > TIE * before else 0.0


def _first_rival(
    plan: Plan, best: Plan, with_rate: Callable[[float], Topology], rate: float
) -> tuple[Plan | None, float]:
    """The first plan that overtakes the best one as a link gets faster, and the rate at which it
    does.
    """
    high, rival = rate * MAX_LINK_SPEEDUP, None
    while True:
        candidate = best_on(plan, with_rate(high))
        leader = priced_on(rival or best, with_rate(high))
        if (
            candidate is None
            or leader is None
            or candidate.estimate.step_seconds >= leader.estimate.step_seconds * (1 - TIE)
        ):
            return rival, high
        rival, high = candidate, _crossing_rate(best, candidate, with_rate, rate, high)


def _crossing_rate(
    best: Plan, rival: Plan, with_rate: Callable[[float], Topology], low: float, high: float
) -> float:
    """The rate from which on `rival` leads, between `low` (`best` leads) and `high` (`rival`
    leads).

    Times are nearly linear in seconds per byte, so the secant is taken in that variable (false
    position, Illinois variant).
    """

    def lead(rate: float) -> float:
        ours = priced_on(best, with_rate(rate))
        theirs = priced_on(rival, with_rate(rate))
        assert ours is not None and theirs is not None, "memory does not depend on links"
        return theirs.estimate.step_seconds - ours.estimate.step_seconds

    low_lead, high_lead = lead(low), lead(high)
    while high - low > RATE_TOLERANCE * low and low_lead > 0:
        middle = 1 / (1 / low + (1 / high - 1 / low) * low_lead / (low_lead - high_lead))
        middle = min(max(middle, low * (1 + RATE_TOLERANCE / 4)), high * (1 - RATE_TOLERANCE / 4))
        if (middle_lead := lead(middle)) <= 0:  # where both meet, the rival leads
            high, high_lead, low_lead = middle, middle_lead, low_lead / 2
        else:
            low, low_lead, high_lead = middle, middle_lead, high_lead / 2
    return high


def _shock(plan: Plan, what: str, topology: Topology) -> Shock:
    repriced, best = priced_on(plan, topology), best_on(plan, topology)
    assert repriced is not None, "slower figures leave memory as it is"
    best = (
        best
        if best is not None
        and best.estimate.step_seconds < repriced.estimate.step_seconds * (1 - TIE)
        else plan
    )
    seconds = repriced.estimate.step_seconds if best is plan else best.estimate.step_seconds
    return Shock(
        what=what,
        factor=SHOCK,
        plan_seconds=repriced.estimate.step_seconds,
        best_seconds=seconds,
        best_mesh=best.mesh,
        changes=changes(plan, best),
    )
