"""What would the planner have said of a slightly different machine?

A plan that was searched for carries its source: the prepared problem, the topology and the pins.
With them the search can be asked again about another topology, and the plan itself can be priced
there, with all of its decisions pinned. Nothing is traced again.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

from shardlib.cost.machine.corrections import fitting_bytes
from shardlib.decisions.pins import Pins
from shardlib.errors import InfeasibleError, PinError
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan, Ranked, source_of
from shardlib.planning.units.quantity import TIE
from shardlib.rules import Rules

#: Decimal gigabyte, bytes: the unit of rates and of what one more of them is worth.
GB = 10**9
#: Memory of a device on which everything fits, bytes.
UNLIMITED = 1 << 60


def best_on(plan: Plan, topology: Topology) -> Plan | None:
    """The best plan for the same problem under the same pins on another topology; None where
    nothing fits or no mesh is legal.
    """
    source = source_of(plan)
    try:
        return source.search(topology, source.pins)
    except (InfeasibleError, PinError):
        return None


def pinned(plan: Plan) -> Pins:
    """Pins under which the plan is the only one; rules that the user pinned stay in the user's
    words.
    """
    words: dict[str, Any] = {**plan.decisions}
    if plan.source is not None and plan.source.pins.rules is not None:
        words["rules"] = plan.source.pins.rules
    return Pins.parse(words)


def priced_on(plan: Plan, topology: Topology) -> Plan | None:
    """The same decisions on another topology of the same problem; None where they do not fit."""
    try:
        return source_of(plan).search(topology, pinned(plan))
    except (InfeasibleError, PinError):
        return None


def roomy(topology: Topology) -> Topology:
    """The topology with devices on which everything fits."""
    return replace(topology, chip=replace(topology.chip, hbm_bytes=UNLIMITED))


def with_memory(topology: Topology, more_bytes: int) -> Topology:
    """The topology with so much more usable memory on every device; less where it is negative."""
    return replace(
        topology, chip=replace(topology.chip, hbm_bytes=topology.chip.hbm_bytes + more_bytes)
    )


def with_link(topology: Topology, tier: int, bytes_per_s: float) -> Topology:
    """The topology with another rate on one link tier.

    Args:
        bytes_per_s: of one device, one direction.
    """
    tiers = tuple(
        replace(each, bytes_per_s=bytes_per_s) if index == tier else each
        for index, each in enumerate(topology.tiers)
    )
    return replace(topology, tiers=tiers)


def with_compute(topology: Topology, factor: float) -> Topology:
    """The topology with every peak rate of its chips times a factor; memory and links stay."""
    rates = tuple((dtype, rate * factor) for dtype, rate in topology.chip.flops_per_s)
    return replace(topology, chip=replace(topology.chip, flops_per_s=rates))


def with_hbm(topology: Topology, factor: float) -> Topology:
    """The topology with the rate of its memory times a factor."""
    return replace(
        topology,
        chip=replace(topology.chip, hbm_bytes_per_s=topology.chip.hbm_bytes_per_s * factor),
    )


def faster_without_limit(plan: Plan) -> list[Ranked]:
    """Plans that are faster than this one and do not fit, each needing less memory than all before
    it; the fastest first.
    """
    source, fitting = source_of(plan), fitting_bytes(source_of(plan).topology)
    boundless = roomy(source.topology)
    fastest = best_on(plan, boundless)
    if fastest is None or fastest.estimate.step_seconds >= plan.estimate.step_seconds * (1 - TIE):
        return []
    slack = plan.estimate.step_seconds / fastest.estimate.step_seconds
    front = source.ranked(boundless, slack=slack, front=True)
    quicker = itertools.takewhile(
        lambda entry: entry.seconds < plan.estimate.step_seconds * (1 - TIE), front
    )
    return [entry for entry in quicker if entry.peak_bytes > fitting]


def changes(plan: Plan, other: Plan) -> tuple[str, ...]:
    """The decisions of another plan that differ from this one's, "remat dots -> full"."""
    ours, theirs = plan.decisions, other.decisions
    return tuple(
        f"{word} {_value(word, ours[word])} -> {_value(word, theirs[word])}"
        for word in ours
        if ours[word] != theirs[word]
    )


def _value(word: str, value: Any) -> str:
    """A decision in words: a mesh as "fsdp=4 x tensor=2", rules without the empty ones."""
    if word == "mesh":
        return " x ".join(f"{axis}={size}" for axis, size in value.items()) or "one device"
    if word == "rules":
        cut = [f"{name}_{'·'.join(axes)}" for name, axes in Rules.parse(value).entries if axes]
        return ", ".join(cut) or "nothing sharded"
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[object]", value))) or "none"
    return str(value)
