"""The plan of one island as the plan of all of them, and back."""

from __future__ import annotations

from dataclasses import replace

from shardlib.axes import ISLAND, MeshShape
from shardlib.decisions.pins import Pins
from shardlib.errors import PlanError
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.values import EXACT, DiLoCo, Meets, Several
from shardlib.hardware.islands import island_of, used_by
from shardlib.hardware.placement import place
from shardlib.hardware.topology import Topology, topology
from shardlib.planning.islands.meeting import Meetings, meetings
from shardlib.planning.plan import Link, Plan
from shardlib.planning.units.quantity import bytes_text, seconds_text
from shardlib.report import Finding


def on_islands(plan: Plan, exchange: Several, machine: Topology) -> Plan:
    """The plan of all islands: the same for each of them, and their meetings."""
    mesh = MeshShape(island=exchange.islands, **plan.mesh)
    joined = used_by(machine, exchange.islands, plan.mesh.devices)
    met, island_estimate = meetings(plan.parameters, plan.mesh, exchange, joined), plan.estimate
    share = met.share(exchange, island_estimate.step_seconds)
    estimate = replace(
        island_estimate,
        seconds=replace(island_estimate.seconds, exchange=share),
        device_bytes=replace(island_estimate.device_bytes, exchange=met.kept_bytes),
        collectives=(*island_estimate.collectives, *met.collectives),
        tokens=island_estimate.tokens * exchange.islands,
        model_flops=island_estimate.model_flops * exchange.islands,
        hardware_flops=island_estimate.hardware_flops * exchange.islands,
        peak_flops_per_s=island_estimate.peak_flops_per_s * exchange.islands,
    )
    search = replace(
        plan.search,
        lower_bound=plan.search.lower_bound + share,
        rejected=tuple(
            replace(
                rejected,
                step_seconds=rejected.step_seconds + met.share(exchange, rejected.step_seconds),
            )
            for rejected in plan.search.rejected
        ),
        landscape=tuple(
            replace(
                point,
                step_seconds=point.step_seconds + met.share(exchange, point.step_seconds),
            )
            for point in plan.search.landscape
        ),
    )
    placed = place(mesh, joined) or {}
    links = tuple(
        Link(kind=joined.tiers[span.tier].kind, ways=span.ways)
        for span in placed.get(ISLAND.name, ())
    )
    joined_plan = replace(
        plan,
        mesh=mesh,
        exchange=exchange,
        topology=machine.name,
        placement=((ISLAND.name, links), *plan.placement),
        estimate=estimate,
        search=search,
    )
    crossing = sum(c.total_bytes for c in met.collectives if ISLAND.name in c.axes)
    return joined_plan.with_findings(
        Finding(
            code="other-mathematics",
            severity="info",
            where=str(exchange),
            message=_told(exchange, crossing, met, share),
            hint="compare the loss with exchange='exact' over some thousand steps of your own data",
        )
    )


def _told(exchange: Several, crossing: int, met: Meetings, share: float) -> str:
    """How islands train, in words."""
    number, of = exchange.meetings, f"{exchange.islands} islands"
    each = " on average" if number > 1 else ""
    if isinstance(exchange, Compressed):
        return (
            f"{of} exchange their gradients in every step as {exchange.by.kind}, and keep what they"
            " did not send for the next: another optimizer than one of the exact gradients."
            f" An exchange moves {bytes_text(crossing)} a device between islands and takes"
            f" {seconds_text(met.seconds)}."
        )
    waits = share * exchange.period / number
    return (
        f"{of} train apart, each on its part of the batch, and {_meet(exchange)}: another optimizer"
        " than one of the whole batch. The loss of an island is that of its own rows; metrics are"
        f" means over islands. A meeting moves {bytes_text(crossing // number)} a device between"
        f" islands and takes {seconds_text(met.seconds / number)}{each}"
        f"{f', of which steps wait for {seconds_text(waits)}' if met.beside else ''}."
    )


def _meet(exchange: Meets) -> str:
    """How islands that train apart meet, in words."""
    if isinstance(exchange, DiLoCo):
        fragment_text = (
            f", a fragment of {exchange.fragments} at a time" if exchange.fragments > 1 else ""
        )
        late = f"; what they send arrives {exchange.delay} steps later" if exchange.delay else ""
        return f"meet every {exchange.every} steps{fragment_text}{late}"
    when = f"every {exchange.every} steps" if exchange.every > 1 else "after every step"
    whom = "one other" if exchange.graph == "exponential" else "two neighbours"
    return f"average their parameters with {whom} {when}"


def of_one_island(plan: Plan) -> Plan:
    """The plan that each island carries out; the plan itself where there is one."""
    islands = plan.exchange.islands
    if plan.mesh[ISLAND.name] != islands:
        raise PlanError(
            f"the mesh {plan.mesh} has {plan.mesh[ISLAND.name]} islands, and the exchange"
            f" {plan.exchange} {islands}\nTry: make the plan again"
        )
    if islands == 1:
        return plan
    all_islands = plan.estimate
    estimate = replace(
        all_islands,
        seconds=replace(all_islands.seconds, exchange=0.0),
        device_bytes=replace(all_islands.device_bytes, exchange=0),
        collectives=tuple(c for c in all_islands.collectives if not c.every),
        tokens=all_islands.tokens // islands,
        model_flops=all_islands.model_flops / islands,
        hardware_flops=all_islands.hardware_flops / islands,
        peak_flops_per_s=all_islands.peak_flops_per_s / islands,
    )
    return replace(
        plan,
        estimate=estimate,
        mesh=inner_mesh(plan.mesh),
        axis_order=tuple(axis for axis in plan.axis_order if axis != ISLAND.name),
        exchange=EXACT,
        topology=island_of(topology(plan.topology), islands).name,
        placement=tuple(
            axis_place for axis_place in plan.placement if axis_place[0] != ISLAND.name
        ),
        source=None,
    )


def inner_mesh(mesh: MeshShape) -> MeshShape:
    """The mesh of one island."""
    return MeshShape({axis: size for axis, size in mesh.items() if axis != ISLAND.name})


def inside(pins: Pins) -> Pins:
    """The pins of the plan of one island."""
    return pins.but(
        exchange=None,
        axes=tuple((axis, size) for axis, size in pins.axes if axis != ISLAND.name),
        mesh=None if pins.mesh is None else inner_mesh(pins.mesh),
        axis_order=(
            None
            if pins.axis_order is None
            else tuple(axis for axis in pins.axis_order if axis != ISLAND.name)
        ),
    )
