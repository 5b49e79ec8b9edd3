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
    """
    steps = target.tokens / step.tokens
    bounds = [step.least(machine) * steps for machine in sizes]
    lowest = min(bounds) / 3600
    tried: dict[int, Offer] = {}
    excluded: list[str] = []

    def look(index: int) -> Offer:
        if index not in tried:
            tried[index] = offer(sizes[index], step, target)
        return tried[index]

    first: int | None = None
    for index, machine in enumerate(sizes):
        if bounds[index] / machine.devices > target.deadline:
            excluded.append(machine.name)
        elif look(index).meets:
            first = index
            break
    if first is not None:
        _cheaper(first, sizes, look, lowest)
    done = {sizes[index].name for index in tried} | set(excluded)
    return Offers(
        family=family,
        tried=tuple(tried[index] for index in sorted(tried)),
        excluded=tuple(excluded),
        unseen=tuple(machine.name for machine in sizes if machine.name not in done),
        least_device_hours=lowest,
    )


def _cheaper(
    first: int, sizes: Sequence[Topology], look: Callable[[int], Offer], lowest: float
) -> None:
    """Plans larger machines than the smallest in time, as long as they may be cheaper."""
    best, worse = first, 0

    def price(index: int) -> float:
        candidate = look(index)
        return device_hours(candidate) if candidate.meets else math.inf

    def near() -> bool:
        return price(best) <= lowest * (1 + ENOUGH)

    for index in _doublings(first, sizes):
        if near() or worse == 2:
            break
        worse = worse + 1 if price(index) >= price(best) else 0
        best = min(best, index, key=price)
    for index in (best - 1, best + 1):
        if first < index < len(sizes) and not near():
            price(index)


def _doublings(first: int, sizes: Sequence[Topology]) -> list[int]:
    indices, devices = list[int](), sizes[first].devices
    for index in range(first + 1, len(sizes)):
        if sizes[index].devices >= 2 * devices:
            indices.append(index)
            devices = sizes[index].devices
    return indices


def offer(machine: Topology, step: Step, target: Target) -> Offer:
    """What a machine takes for the run."""
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
