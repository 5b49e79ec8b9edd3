"""How much is a gigabyte worth, and how much does the plan rest on a figure being right?

The *shadow price* of a resource is the time of a step that one more unit of it saves, found by searching again with that unit added.
Memory acts in steps: as long as no faster plan fits, one more gigabyte is worth nothing, and the *break point* says how much more it
takes. A link acts smoothly until another plan becomes the best one; there is its break point, found by the parametric method: price the
plan and its rival as functions of the rate, go to where they meet, search there for a better rival, and repeat until there is none.

The *regret* of a plan, if a figure turns out otherwise, is its time minus that of the plan that would then have been best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardlib.axes import MeshShape
from shardlib.hardware.topology import Topology
from shardlib.planning import counterfactual as other
from shardlib.planning.constraints import staircase
from shardlib.planning.counterfactual import GB, changes, source_of
from shardlib.planning.plan import Plan
from shardlib.planning.quantity import bytes_text, count_text, percent_text, seconds_text
from shardlib.planning.ranking import TIE
from shardlib.planning.tables import aligned, wrapped

#: How far a link is sped up in search of its break point, times its rate.
FARTHEST = 8.0
#: Relative width to which a break point is narrowed.
NARROW = 1e-4
#: Part of the memory to which its break point is narrowed, and how many searches that may take.
NARROW_MEMORY, MOST_HALVES = 0.01, 6
#: What a shock leaves of a figure.
SHOCK = 0.9


@dataclass(frozen=True, kw_only=True)
class Price:
    """What more of a resource is worth.

    Attributes:
        resource: "memory", or the name of a link tier.
        kind: of the tier; "hbm" for the memory of a device.
        unit: what one more of it is: bytes of memory, or bytes per second.
        amount: how much of it there is now: usable bytes of a device, or peak bytes per second.
        saved_seconds: seconds of a step that one unit more saves; the best plan is chosen anew.
        break_amount: amount from which on another plan is the best; 0 where there is none.
        break_mesh: mesh of that plan.
        break_changes: what it decides differently.
        break_seconds: its time of a step at the break point.
        limit: of a link, the largest rate that was looked at; of memory, an amount at which no other plan is faster yet.
    """

    resource: str
    kind: str
    unit: int
    amount: float
    saved_seconds: float
    break_amount: float = 0.0
    break_mesh: MeshShape | None = None
    break_changes: tuple[str, ...] = ()
    break_seconds: float = 0.0
    limit: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The price as plain data."""
        return {**self.__dict__, "break_mesh": dict(self.break_mesh) if self.break_mesh is not None else None, "break_changes": list(self.break_changes)}


@dataclass(frozen=True, kw_only=True)
class Shock:
    """What happens if a figure of the machine is a tenth lower than was thought.

    Attributes:
        what: the figure.
        factor: what is left of it.
        plan_seconds: time of a step of this plan.
        best_seconds: time of a step of the plan that is then the best.
        best_mesh: its mesh.
        changes: what it decides differently; empty where this plan is still the best.
    """

    what: str
    factor: float
    plan_seconds: float
    best_seconds: float
    best_mesh: MeshShape
    changes: tuple[str, ...]

    @property
    def regret_seconds(self) -> float:
        """Seconds of a step lost by having chosen this plan."""
        return max(0.0, self.plan_seconds - self.best_seconds)

    def to_json(self) -> dict[str, Any]:
        """The shock as plain data, with the regret."""
        return {**self.__dict__, "best_mesh": dict(self.best_mesh), "changes": list(self.changes), "regret_seconds": self.regret_seconds}


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How a plan answers to changes of its machine.

    Attributes:
        step_seconds: time of a step of the plan as it is.
        best_seconds: time of the best plan of the search; the same unless the plan was made in another way.
        prices: shadow prices, memory first, then link tiers from the outermost inwards.
        shocks: every figure lowered by a tenth, one at a time.
    """

    step_seconds: float
    best_seconds: float
    prices: tuple[Price, ...]
    shocks: tuple[Shock, ...]

    def to_json(self) -> dict[str, Any]:
        """The sensitivity as plain data."""
        return {"step_seconds": self.step_seconds, "best_seconds": self.best_seconds, "prices": [one.to_json() for one in self.prices],
                "shocks": [one.to_json() for one in self.shocks]}

    def __str__(self) -> str:
        return sensitivity_text(self)


def sensitivity(plan: Plan) -> Sensitivity:
    """Shadow prices of memory and links, and the regret of the plan if a figure is a tenth lower.

    Raises:
        PlanError: the plan was read from a file.
    """
    topology = source_of(plan).topology
    best = other.best_on(plan, topology) or plan
    used = [index for index, tier in enumerate(topology.tiers) if tier.devices > 1]
    prices = [_price_of_memory(plan, best), *(_price_of_link(plan, best, index) for index in used)]
    lowered: list[tuple[str, Topology]] = [(f"{topology.tiers[index].name} bandwidth", other.with_link(topology, index, topology.tiers[index].bytes_per_s * SHOCK)) for index in used]
    lowered += [("compute", other.with_compute(topology, SHOCK)), ("memory bandwidth", other.with_hbm(topology, SHOCK))]
    shocks = [_shock(plan, what, changed) for what, changed in lowered]
    return Sensitivity(step_seconds=plan.estimate.step_seconds, best_seconds=best.estimate.step_seconds, prices=tuple(prices), shocks=tuple(shocks))


def _price_of_memory(plan: Plan, best: Plan) -> Price:
    topology = source_of(plan).topology
    more = other.best_on(plan, other.with_memory(topology, GB)) or best
    price = Price(resource="memory", kind="hbm", unit=GB, amount=topology.chip.usable_bytes, saved_seconds=_saved(best.estimate.step_seconds, more.estimate.step_seconds))
    steps = staircase(best)
    if not steps:
        return price
    at, low, high = _first_larger(plan, best, steps[0].short_bytes + 1)
    return replace(price, break_amount=float(topology.chip.usable_bytes + high), break_mesh=at.mesh, break_changes=changes(best, at), break_seconds=at.estimate.step_seconds,
                   limit=float(topology.chip.usable_bytes + low))


def _first_larger(plan: Plan, best: Plan, high: int) -> tuple[Plan, int, int]:
    """The first plan that more memory allows: the plan, bytes that are too few for a faster one, and bytes that allow it.

    Recomputing a part of the layers fits itself to the memory there is, so faster plans come by small steps; the first is narrowed down by halves.
    """
    topology = source_of(plan).topology
    low, usable = 0, topology.chip.usable_bytes
    found = other.best_on(plan, other.with_memory(topology, high)) or best
    for _ in range(MOST_HALVES):
        if high - low <= NARROW_MEMORY * usable:
            break
        middle = (low + high) // 2
        between = other.best_on(plan, other.with_memory(topology, middle)) or best
        if between.estimate.step_seconds < best.estimate.step_seconds * (1 - TIE):
            found, high = between, min(middle, max(low + 1, between.estimate.device_bytes.peak - usable))
        else:
            low = middle
    return found, low, high


def _price_of_link(plan: Plan, best: Plan, tier: int) -> Price:
    topology = source_of(plan).topology
    rate = topology.tiers[tier].bytes_per_s

    def at(bytes_per_s: float) -> Topology:
        return other.with_link(topology, tier, bytes_per_s)

    more = other.best_on(plan, at(rate + GB)) or best
    price = Price(resource=topology.tiers[tier].name, kind=topology.tiers[tier].kind, unit=GB, amount=rate, limit=rate * FARTHEST,
                  saved_seconds=_saved(best.estimate.step_seconds, more.estimate.step_seconds))
    rival, meeting = _first_rival(plan, best, at, rate)
    if rival is None:
        return price
    return replace(price, break_amount=meeting, break_mesh=rival.mesh, break_changes=changes(best, rival), break_seconds=rival.estimate.step_seconds)


def _saved(before: float, after: float) -> float:
    """Seconds saved; 0 where the difference is rounding."""
    return before - after if before - after > TIE * before else 0.0


def _first_rival(plan: Plan, best: Plan, at: Callable[[float], Topology], rate: float) -> tuple[Plan | None, float]:
    """The first plan that overtakes the best one as a link gets faster, and the rate at which it does."""
    high, rival = rate * FARTHEST, None
    while True:
        found = other.best_on(plan, at(high))
        leader = other.priced_on(rival or best, at(high))
        if found is None or leader is None or found.estimate.step_seconds >= leader.estimate.step_seconds * (1 - TIE):
            return rival, high
        rival, high = found, _meeting(best, found, at, rate, high)


def _meeting(best: Plan, rival: Plan, at: Callable[[float], Topology], low: float, high: float) -> float:
    """The rate, between one where `best` leads and one where `rival` does, from which on `rival` leads.

    Times are nearly linear in seconds per byte, so the secant through both ends is taken there (false position, Illinois variant).
    """
    def lead(rate: float) -> float:
        mine, theirs = other.priced_on(best, at(rate)), other.priced_on(rival, at(rate))
        assert mine is not None and theirs is not None, "memory does not depend on links"
        return theirs.estimate.step_seconds - mine.estimate.step_seconds

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
    mine, best = other.priced_on(plan, topology), other.best_on(plan, topology)
    assert mine is not None, "slower figures leave memory as it is"
    best = best if best is not None and best.estimate.step_seconds < mine.estimate.step_seconds * (1 - TIE) else plan
    seconds = mine.estimate.step_seconds if best is plan else best.estimate.step_seconds
    return Shock(what=what, factor=SHOCK, plan_seconds=mine.estimate.step_seconds, best_seconds=seconds, best_mesh=best.mesh, changes=changes(plan, best))


def sensitivity_text(found: Sensitivity) -> str:
    """Prices and shocks for people."""
    lines = ["What more would buy", *aligned([("", "now", "one more", "saves a step"), *(price_row(price) for price in found.prices)], right={1, 2, 3})]
    lines += [line for price in found.prices for line in wrapped("  - ", break_text(price))]
    if found.best_seconds < found.step_seconds * (1 - TIE):
        lines += wrapped("  - ", f"This plan takes {seconds_text(found.step_seconds)}; the search's best takes {seconds_text(found.best_seconds)}, and prices are for that one.")
    rows = [SHOCK_HEAD, *map(shock_row, found.shocks)]
    return "\n".join([*lines, "", "If a figure is lower than thought", *aligned(rows, right={1, 2, 3})]) + "\n"


SHOCK_HEAD = ("", "this plan", "best plan then", "regret", "which would be")


def shock_row(shock: Shock) -> tuple[str, ...]:
    """A shock under `SHOCK_HEAD`."""
    return (f"{shock.what} -{percent_text(1 - shock.factor)}", seconds_text(shock.plan_seconds), seconds_text(shock.best_seconds), seconds_text(shock.regret_seconds),
            "the same" if not shock.changes else str(shock.best_mesh))


def price_row(price: Price) -> tuple[str, str, str, str]:
    """Resource, how much there is, one more of it, and what that saves."""
    if price.kind == "hbm":
        return "memory of a device", bytes_text(price.amount), "1 GB", seconds_text(price.saved_seconds)
    return f"{price.resource} of a device", count_text(price.amount, "B/s"), "1 GB/s", seconds_text(price.saved_seconds)


def break_text(price: Price) -> str:
    """Where another plan becomes the best, as a sentence."""
    def amount(value: float) -> str:
        return bytes_text(value) if price.kind == "hbm" else count_text(value, "B/s")

    if not price.break_amount:
        reach = f" up to {amount(price.limit)}" if price.limit and price.kind != "hbm" else ""
        return f"{price.resource}: no amount{reach} changes the plan."
    same_mesh = "" if price.break_mesh is None else f"{price.break_mesh}, "
    return f"{price.resource}: from {amount(price.break_amount)} on another plan is the best, {same_mesh}{seconds_text(price.break_seconds)} a step ({'; '.join(price.break_changes)})."
