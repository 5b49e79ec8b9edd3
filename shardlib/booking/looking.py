"""Which sizes of a family are planned, in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardlib.booking.offers import Offer, Offers, device_hours
from shardlib.booking.target import Target
from shardlib.errors import ArgumentError, InfeasibleError, PinError
from shardlib.hardware.topology import Topology
from shardlib.planning.answers.run_cost import run_cost
from shardlib.planning.plan import Plan

#: A gap of the cheapest size, to the bound, at which no other is looked for.
ENOUGH = 0.01


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step that can be planned on any machine of a family.

    Attributes:
        tokens: of a step.
        planned: the best plan on a machine; `InfeasibleError` and `PinError` where there is none.
        least: seconds times devices that no plan of the step on a machine beats.
    """

    tokens: int
    planned: Callable[[Topology], Plan]
    least: Callable[[Topology], float]


def offers(family: str, sizes: Sequence[Topology], step: Step, target: Target) -> Offers:
    """Looks for the smallest and the cheapest size of a family that meet a deadline.

    All sizes that a bound does not exclude are planned, from the smallest to the first in time.
    From there on doublings are planned, until two in a row cost more than the best; then the
    neighbours of the best.

    Args:
        family: its name.
        sizes: its machines, ascending.
        step: what is planned.
        target: tokens and deadline.
    """
    steps = target.tokens / step.tokens
    bounds = [step.least(machine) * steps for machine in sizes]
    least = min(bounds) / 3600
    tried: dict[int, Offer] = {}
    excluded: list[str] = []

    def look(at: int) -> Offer:
        if at not in tried:
            tried[at] = offer(sizes[at], step, target)
        return tried[at]

    first: int | None = None
    for at, machine in enumerate(sizes):
        if bounds[at] / machine.devices > target.deadline:
            excluded.append(machine.name)
        elif look(at).meets:
            first = at
            break
    if first is not None:
        _cheaper(first, sizes, look, least)
    done = {sizes[at].name for at in tried} | set(excluded)
    return Offers(
        family=family,
        tried=tuple(tried[at] for at in sorted(tried)),
        excluded=tuple(excluded),
        unseen=tuple(one.name for one in sizes if one.name not in done),
        least_device_hours=least,
    )


def _cheaper(
    first: int, sizes: Sequence[Topology], look: Callable[[int], Offer], least: float
) -> None:
    """Plans larger machines than the smallest in time, as long as they may be cheaper."""
    best, worse = first, 0

    def price(at: int) -> float:
        found = look(at)
        return device_hours(found) if found.meets else math.inf

    def near() -> bool:
        return price(best) <= least * (1 + ENOUGH)

    for at in _doublings(first, sizes):
        if near() or worse == 2:
            break
        worse = worse + 1 if price(at) >= price(best) else 0
        best = min(best, at, key=price)
    for at in (best - 1, best + 1):
        if first < at < len(sizes) and not near():
            price(at)


def _doublings(first: int, sizes: Sequence[Topology]) -> list[int]:
    found, devices = list[int](), sizes[first].devices
    for at in range(first + 1, len(sizes)):
        if sizes[at].devices >= 2 * devices:
            found.append(at)
            devices = sizes[at].devices
    return found


def offer(machine: Topology, step: Step, target: Target) -> Offer:
    """What a machine takes for the run.

    Args:
        machine: of any size.
        step: what is planned.
        target: tokens, prices and failures.
    """
    empty = Offer(topology=machine.name, devices=machine.devices, deadline=target.deadline)
    try:
        plan = step.planned(machine)
    except (InfeasibleError, PinError) as error:
        return replace(empty, message=str(error).splitlines()[0])
    try:
        cost = run_cost(
            plan,
            machine,
            tokens=target.tokens,
            price=target.price(machine.chip.name, machine.chip.devices_per_chip),
            mtbf=target.mtbf(machine.devices),
            restart=target.restart,
        )
    except ArgumentError as error:  # the target is sound: failures let no run end
        return replace(empty, plan=plan, message=str(error).splitlines()[0])
    return replace(empty, plan=plan, cost=replace(cost, devices=machine.devices))
