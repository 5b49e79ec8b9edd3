"""What islands would give where a plan waits for the network.

An exact exchange that is exposed is a matter of the optimizer as much as of the machine: with
another one less crosses, or nothing has to wait. That changes what is computed, so it is advice and
never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from shardlib.axes import MeshShape
from shardlib.cost.machine.corrections import fitting_bytes
from shardlib.errors import TopologyError
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.compressors import PowerSGD, Quantised
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.values import Exact, Several
from shardlib.hardware.islands import used_by
from shardlib.hardware.placement import place
from shardlib.hardware.topology import Topology
from shardlib.planning.islands.meeting import Meetings, meetings
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import bytes_text, percent_text, seconds_text
from shardlib.report import Finding, diagnostic

#: Share of a step from which on waiting for the network is spoken of.
TOLD = 0.05
#: Islands that are spoken of at most.
MOST_ISLANDS = 64
#: Steps between meetings that are spoken of at most: more were not published (arXiv:2311.08105).
MOST_EVERY = 500
#: Axes that islands take the place of.
EXACT_AXES = ("data", "fsdp")


@diagnostic
def islands_instead(plan: Plan, machine: Topology, rows: Collection[int]) -> tuple[Finding, ...]:
    """A finding where more than a twentieth of a step waits for what data and fsdp move over the
    slowest links, or where a plan leaves parts of the machine out because of them: with islands
    neither has to be.
    """
    inner = _inside(plan, machine)
    if inner is None or not isinstance(plan.exchange, Exact):
        return ()
    left_out = inner.devices == plan.mesh.devices
    islands = machine.tiers[0].devices if left_out else plan.mesh.devices // inner.devices
    waits, moved = _waits(plan, machine)
    step = plan.estimate.step_seconds
    if not 2 <= islands <= MOST_ISLANDS or not (left_out or waits > TOLD * step):
        return ()
    try:
        on = used_by(machine, islands, inner.devices)
    except TopologyError:  # there are no islands on a machine that a file describes
        return ()
    remaining = step / islands if left_out else step - waits
    odd = [size for size in rows if size % islands]
    exchanges = [] if odd else list(_ways(plan, inner, on, islands, remaining))
    if not exchanges and not odd:
        return ()
    why = (
        f"{islands - 1} of {islands} parts of the machine are left out, since a step over the"
        " network between them would take longer"
        if left_out
        else f"{percent_text(waits / step)} of a step ({seconds_text(waits)}) waits for what data"
        f" and fsdp move over the network, {bytes_text(moved)} a device"
    )
    return (
        Finding(
            code="exact-exchange-exposed",
            severity="info",
            where=f"{islands} islands",
            message=(
                f"{why}. {islands} islands would not wait for it, but {odd[0]} rows do not divide"
                " among them"
                if odd
                else f"{why}. Between {islands} islands, which change what is computed, a step with"
                f" {'; with '.join(exchanges)}"
            ),
            hint=(
                f"a number of rows that {islands} divides"
                if odd
                else "plan.why_not(exchange=...) plans one; docs/islands.md says what it computes"
            ),
        ),
    )


def _outside(plan: Plan, machine: Topology) -> dict[str, int]:
    """How many ways of each mesh axis lie on the slowest links of the machine."""
    spans = place(plan.mesh, machine, plan.axis_order) or {}
    return {
        axis: math.prod(span.ways for span in parts if span.tier == 0)
        for axis, parts in spans.items()
        if any(span.tier == 0 for span in parts)
    }


def _inside(plan: Plan, machine: Topology) -> MeshShape | None:
    """The mesh within a part of the machine, of those that its slowest links join; None where these
    are no network, or other axes than data and fsdp lie on them.
    """
    outside = _outside(plan, machine)
    if machine.tiers[0].kind != "network" or len(machine.tiers) == 1:
        return None
    if not {*outside} <= {*EXACT_AXES}:
        return None
    return MeshShape({axis: size // outside.get(axis, 1) for axis, size in plan.mesh.items()})


def _waits(plan: Plan, machine: Topology) -> tuple[float, int]:
    """Seconds that a step waits for the slowest links, and bytes that cross them."""
    slow = {*_outside(plan, machine)}
    crossing = [c for c in plan.estimate.collectives if slow & {*c.axes}]
    seconds = sum(c.seconds for c in crossing)
    return min(seconds, plan.estimate.seconds.exposed), sum(c.total_bytes for c in crossing)


def _ways(
    plan: Plan, inner: MeshShape, machine: Topology, islands: int, step: float
) -> Iterator[str]:
    """Exchanges whose plan would fit, in words."""
    late = _that_hides(plan, inner, machine, islands, step)
    options: tuple[Several, ...] = (
        Compressed(islands=islands, by=PowerSGD(rank=4)),
        Compressed(islands=islands, by=Quantised("int8")),
    )
    for exchange in (*((late,) if late else ()), *options):
        met = _met(plan, inner, machine, exchange)
        if _peak(plan, inner, met) > fitting_bytes(machine):
            continue
        share = met.share(exchange, step)
        crossing = sum(c.total_bytes for c in met.collectives if "island" in c.axes)
        yield (
            f"exchange={exchange} waits for {seconds_text(share)} and moves"
            f" {bytes_text(crossing // exchange.period)}"
        )


def _that_hides(
    plan: Plan, inner: MeshShape, machine: Topology, islands: int, step: float
) -> DiLoCo | None:
    """Islands that meet as often as they can without waiting for what crosses; None where that is
    too seldom.
    """
    exchange = DiLoCo(islands=islands, every=1, delay=1)
    longest = max(_met(plan, inner, machine, exchange).beside, default=0.0)
    interval = math.ceil(longest / step)
    return replace(exchange, every=interval, delay=interval) if 0 < interval <= MOST_EVERY else None


def _met(plan: Plan, inner: MeshShape, machine: Topology, exchange: Several) -> Meetings:
    return meetings(plan.parameters, inner, exchange, machine)


def _peak(plan: Plan, inner: MeshShape, met: Meetings) -> float:
    """Bytes of a device whose island shards over fewer devices what the plan shards over all."""
    parts, more = plan.estimate.device_bytes, plan.mesh["fsdp"] // inner["fsdp"]
    return (
        parts.peak
        + (more - 1) * (parts.parameters + parts.gradients + parts.optimizer)
        + (met.kept_bytes)
    )
