"""How much is a gigabyte worth, and how much does the plan rest on a figure being right?

The *shadow price* of a resource is the time of a step that one more unit of it saves, found by
searching again with that unit added. Memory acts in steps: as long as no faster plan fits, one more
gigabyte is worth nothing, and the *break point* says how much more it takes. A link acts smoothly
until another plan becomes the best one; there is its break point, found by the parametric method:
price the plan and its rival as functions of the rate, go to where they meet, search there for a
better rival, and repeat until there is none.

The *regret* of a plan, if a figure turns out otherwise, is its time minus that of the plan that
would then have been best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardlib.cost.machine.corrections import margin
from shardlib.hardware.topology import Topology
from shardlib.planning.answers.shadow_prices import Price, Sensitivity, Shock, link_name
from shardlib.planning.plan import Plan, source_of
from shardlib.planning.questions import counterfactual as other
from shardlib.planning.questions.constraints import staircase
from shardlib.planning.questions.counterfactual import GB, changes
from shardlib.planning.units.quantity import TIE

#: How far a link is sped up in search of its break point, times its rate.
FARTHEST = 8.0
#: Relative width to which a break point is narrowed.
NARROW = 1e-4
#: Part of the memory to which its break point is narrowed, and how many searches that may take.
NARROW_MEMORY, MOST_HALVES = 0.01, 6
#: What a shock leaves of a figure.
SHOCK = 0.9


def sensitivity(plan: Plan) -> Sensitivity:
    """Shadow prices of memory and links, and the regret of the plan if a figure is a tenth lower."""
    topology = source_of(plan).topology
    best = other.best_on(plan, topology) or plan
    used = [index for index, tier in enumerate(topology.tiers) if tier.devices > 1]
    prices = [_price_of_memory(plan, best), *(_price_of_link(plan, best, index) for index in used)]
    lowered: list[tuple[str, Topology]] = [
        (
            f"{link_name(topology.tiers[index].name, topology.tiers[index].kind)} bandwidth",
            other.with_link(topology, index, topology.tiers[index].bytes_per_s * SHOCK),
        )
        for index in used
    ]
    lowered += [
        ("compute", other.with_compute(topology, SHOCK)),
        ("memory bandwidth", other.with_hbm(topology, SHOCK)),
    ]
    shocks = [_shock(plan, what, changed) for what, changed in lowered]
    return Sensitivity(
        step_seconds=plan.estimate.step_seconds,
        best_seconds=best.estimate.step_seconds,
        prices=tuple(prices),
        shocks=tuple(shocks),
    )


def _price_of_memory(plan: Plan, best: Plan) -> Price:
    topology = source_of(plan).topology
    more = other.best_on(plan, other.with_memory(topology, GB)) or best
    price = Price(
        resource="memory",
        kind="hbm",
        unit=GB,
        amount=topology.chip.usable_bytes,
        saved_seconds=_saved(best.estimate.step_seconds, more.estimate.step_seconds),
    )
    steps = staircase(best)
    if not steps:
        return price
    larger, low, high = _first_larger(plan, best, steps[0].short_bytes + 1)
    return replace(
        price,
        break_amount=float(topology.chip.usable_bytes + high),
        break_mesh=larger.mesh,
        break_changes=changes(best, larger),
        break_seconds=larger.estimate.step_seconds,
        limit=float(topology.chip.usable_bytes + low),
    )


def _first_larger(plan: Plan, best: Plan, high: int) -> tuple[Plan, int, int]:
    """The first plan that more memory allows: the plan, bytes that are too few for a faster one,
    and bytes that allow it.

    Recomputing a part of the layers fits itself to the memory there is, so faster plans come by
    small steps; the first is narrowed down by halves.
    """
    topology = source_of(plan).topology
    low, usable, memory_margin = 0, topology.chip.usable_bytes, margin(topology)
    first = other.best_on(plan, other.with_memory(topology, high)) or best
    for _ in range(MOST_HALVES):
        if high - low <= NARROW_MEMORY * usable:
            break
        middle = (low + high) // 2
        between = other.best_on(plan, other.with_memory(topology, middle)) or best
        if between.estimate.step_seconds < best.estimate.step_seconds * (1 - TIE):
            first, high = (
                between,
                min(
                    middle,
                    max(
                        low + 1,
                        math.ceil(between.estimate.device_bytes.peak * memory_margin) - usable,
                    ),
                ),
            )
        else:
            low = middle
    return first, low, high


def _price_of_link(plan: Plan, best: Plan, tier: int) -> Price:
    topology = source_of(plan).topology
    rate = topology.tiers[tier].bytes_per_s

    def at(bytes_per_s: float) -> Topology:
        return other.with_link(topology, tier, bytes_per_s)

    more = other.best_on(plan, at(rate + GB)) or best
    price = Price(
        resource=topology.tiers[tier].name,
        kind=topology.tiers[tier].kind,
        unit=GB,
        amount=rate,
        limit=rate * FARTHEST,
        saved_seconds=_saved(best.estimate.step_seconds, more.estimate.step_seconds),
    )
    rival, meeting = _first_rival(plan, best, at, rate)
    if rival is None:
        return price
    return replace(
        price,
        break_amount=meeting,
        break_mesh=rival.mesh,
        break_changes=changes(best, rival),
        break_seconds=rival.estimate.step_seconds,
    )


def _saved(before: float, after: float) -> float:
    """Seconds saved; 0 where the difference is rounding."""
    return before - after if before - after > TIE * before else 0.0


def _first_rival(
    plan: Plan, best: Plan, machine_at: Callable[[float], Topology], rate: float
) -> tuple[Plan | None, float]:
    """The first plan that overtakes the best one as a link gets faster, and the rate at which it
    does.
    """
    high, rival = rate * FARTHEST, None
    while True:
        candidate = other.best_on(plan, machine_at(high))
        leader = other.priced_on(rival or best, machine_at(high))
        if (
            candidate is None
            or leader is None
            or candidate.estimate.step_seconds >= leader.estimate.step_seconds * (1 - TIE)
        ):
            return rival, high
        rival, high = candidate, _meeting(best, candidate, machine_at, rate, high)


def _meeting(
    best: Plan, rival: Plan, machine_at: Callable[[float], Topology], low: float, high: float
) -> float:
    """The rate, between one where `best` leads and one where `rival` does, from which on `rival`
    leads.

    Times are nearly linear in seconds per byte, so the secant through both ends is taken there
    (false position, Illinois variant).
    """

    def lead(rate: float) -> float:
        ours, theirs = (
            other.priced_on(best, machine_at(rate)),
            other.priced_on(rival, machine_at(rate)),
        )
        assert ours is not None and theirs is not None, "memory does not depend on links"
        return theirs.estimate.step_seconds - ours.estimate.step_seconds

    ahead, behind = lead(low), lead(high)
    while high - low > NARROW * low and ahead > 0:
        middle = 1 / (1 / low + (1 / high - 1 / low) * ahead / (ahead - behind))
        middle = min(max(middle, low * (1 + NARROW / 4)), high * (1 - NARROW / 4))
        if (now := lead(middle)) <= 0:  # where both meet, the rival leads
            high, behind, ahead = middle, now, ahead / 2
        else:
            low, ahead, behind = middle, now, behind / 2
    return high


def _shock(plan: Plan, what: str, topology: Topology) -> Shock:
    repriced, best = other.priced_on(plan, topology), other.best_on(plan, topology)
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
