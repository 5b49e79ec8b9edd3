"""When nothing fits: what is the smallest thing to change? And what else should the user know about
a plan?
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardlib.axes import MeshShape
from shardlib.cost.machine.expert_load import BALANCED, dropped_share
from shardlib.cost.pricing.totals import Totals
from shardlib.cost.step import capacity_experts as capped
from shardlib.cost.tables.pricer import Pricer
from shardlib.errors import InfeasibleError, TopologyError
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.decisions.candidate import Decision
from shardlib.planning.decisions.pins import Pins
from shardlib.planning.decisions.plan_data import PlanData
from shardlib.planning.search import layouts
from shardlib.planning.search.advice import Situation, advise
from shardlib.planning.space.microbatching import coupled
from shardlib.planning.units.quantity import bytes_text
from shardlib.report import Finding
from shardlib.schedules.one_f_one_b import ONE_F_ONE_B
from shardlib.schedules.table import named

if TYPE_CHECKING:
    from shardlib.planning.space.workload import Workload


def infeasible(
    load: Workload,
    topology: Topology,
    pins: Pins,
    mesh: MeshShape,
    summary: str,
    totals: Totals,
    capacity: float,
    fits: Callable[[Topology, Pins], bool],
) -> InfeasibleError:
    """The error for a problem that does not fit: how much is missing, and which single change would
    do.

    Args:
        load: the problem.
        topology: where it should run.
        pins: the user's decisions.
        mesh: mesh of the leanest plan.
        summary: its other decisions.
        totals: its price, one candidate.
        capacity: usable bytes of a device.
        fits: whether a search with another topology or other pins succeeds.
    """
    peak = float(totals.peak_bytes[0])
    parts = sorted(
        ((float(values[0]), name) for name, values in totals.device_bytes.items()), reverse=True
    )
    shares = ", ".join(f"{name} {bytes_text(size)}" for size, name in parts if size > 0.01 * peak)
    ways = [
        f"leaving {name} to the planner"
        for name, others in pins.without().items()
        if fits(topology, others)
    ]
    ways += _larger(topology, lambda other: fits(other, pins))
    smaller = _smaller_batch(totals, capacity)
    ways += [smaller] if smaller else []
    return InfeasibleError(
        f"{load.problem.model} does not fit on {topology.name}: the leanest plan"
        f" ({mesh}{', ' + summary if summary else ''}) needs {bytes_text(peak)} on each device,"
        f" {bytes_text(peak - capacity)} more than the {bytes_text(capacity)} it has"
        f" ({shares})\nTry:"
        f" {'; or '.join(ways) if ways else 'a larger topology and a smaller batch together'}",
        short_bytes=math.ceil(peak - capacity),
    )


def _larger(topology: Topology, fits: Callable[[Topology], bool]) -> list[str]:
    """The smallest doubling of the number of fast domains that fits, if one up to 64 times the size
    does.
    """
    count, star, domain = topology.name.partition("*")
    number, domain = (int(count), domain) if star else (1, topology.name)
    for factor in (2, 4, 8, 16, 32, 64):
        try:
            other = replace(parse_topology(f"{number * factor}*{domain}"), chip=topology.chip)
        except TopologyError:
            return []
        if fits(other):
            return [f"the topology {other.name} ({other.devices} devices)"]
    return []


def _smaller_batch(totals: Totals, capacity: float) -> str:
    """How much smaller the batch must be, if everything that grows with it shrinks in
    proportion.
    """
    scaling = sum(
        float(totals.device_bytes[name][0]) for name in ("activations", "temporaries", "batch")
    )
    fixed = float(totals.peak_bytes[0]) - scaling
    if fixed >= capacity or scaling <= 0:
        return ""
    share = (capacity - fixed) / scaling
    return (
        f"a batch or sequence at most {f'{share:.0%}' if share >= 0.01 else f'{share:.1g}'} of"
        " this one"
    )


def notes(
    load: Workload, topology: Topology, plan: PlanData, left_out: tuple[str, ...]
) -> tuple[Finding, ...]:
    """Findings about a finished plan."""
    found = [
        *load.problem.forward.findings,
        *load.colouring.findings,
        *layouts.layout_findings(plan.parameters, plan.mesh, plan.zero, ITEMSIZE),
    ]
    found += _idle(plan, topology)
    found += _doubled(load, plan)
    found += coupled(load.problem.rows, plan.microbatches)
    found += _kept(load, plan) + _dropping(load, topology, plan)
    found += advise(_situation(load, topology, plan))
    found += [
        Finding(
            code="corrected",
            severity="info",
            where=one.quantity,
            message=f"the prediction is corrected: {one}",
        )
        for one in plan.estimate.corrections
    ]
    if left_out:
        found.append(
            Finding(
                code="colours-left-out",
                severity="info",
                message="the search left these colours uncut because there are too many: "
                + ", ".join(left_out),
                hint="name dims alike to merge their colours",
            )
        )
    return tuple(found)


def _idle(plan: PlanData, topology: Topology) -> list[Finding]:
    """Devices that the plan leaves idle: because no mesh could use them, or because it is faster
    so.
    """
    used = plan.mesh.devices
    if used >= topology.devices:
        return []
    larger = [r for r in plan.search.rejected if r.mesh.devices > used and r.reason == "slower"]
    said = f"the plan uses {used} of {topology.devices} devices: "
    if larger:
        best = min(larger, key=lambda r: r.step_seconds)
        return [
            Finding(
                code="idle-devices",
                severity="info",
                message=(
                    f"{said}with {best.mesh.devices} a step would take"
                    f" {best.step_seconds / plan.estimate.step_seconds:.2f} times as long"
                ),
                hint="a larger batch, or a smaller machine",
            )
        ]
    return [
        Finding(
            code="idle-devices",
            severity="warning",
            message=f"{said}no mesh of more devices divides the batch and the model",
            hint="a batch that is a multiple of the number of devices",
        )
    ]


def _kept(load: Workload, plan: PlanData) -> list[Finding]:
    """Zero-bubble stages in lockstep that recompute: what gradients of weights are made from waits
    whatever is recomputed, and the estimate does not know it.
    """
    if (
        not named(plan.schedule).backward_in_two
        or plan.remat == "none"
        or load.stack.pipeline != "lockstep"
    ):
        return []
    return [
        Finding(
            code="zero-bubble-keeps",
            severity="warning",
            where=f"remat={plan.remat}",
            message=(
                f"a {plan.schedule} pipeline keeps what the gradients of weights are made from, for"
                f" {plan.mesh['stage']} microbatches and whatever is recomputed; the predicted"
                " memory does not have it: programs of Llama 2 7B were compiled to twice what was"
                " predicted"
            ),
            hint=f"shardlib.verify before such a plan is run, or schedule={ONE_F_ONE_B.name!r}",
        )
    ]


def unused_loops(plan: PlanData, replaced: int) -> tuple[Finding, ...]:
    """A finding where loops over tensor are pinned and take the place of no collective of the plan.

    Args:
        plan: the plan.
        replaced: collectives in whose place loops run.
    """
    if plan.collective_matmul != "loop" or replaced:
        return ()
    why = (
        "the stages of a pipeline have none"
        if plan.mesh["stage"] > 1
        else (
            "nothing is cut over tensor"
            if plan.mesh["tensor"] == 1
            else (
                "the residual stream is not cut along the sequence"
                if not plan.sequence_parallel
                else "no matmul of a weight gathers or scatters the sequence"
            )
        )
    )
    return (
        Finding(
            code="collective-matmul-unused",
            severity="warning",
            where=str(plan.mesh),
            message=f"collective_matmul='loop' changes nothing: {why}",
            hint="a mesh with tensor and without stages, and sequence_parallel=True",
        ),
    )


def _dropping(load: Workload, topology: Topology, plan: PlanData) -> list[Finding]:
    """What experts with a capacity are expected to drop; the price does not depend on it."""
    known = Pricer(topology, load.stack).constants.skew
    skew = BALANCED if known is None else known
    return [
        Finding(
            code="drops-tokens",
            severity="info",
            where=f"{layer.experts} experts",
            message=(
                f"an expert takes at most {layer.factor:.3g} times the mean load; about"
                f" {dropped_share(layer.assignments / plan.microbatches, layer.experts, layer.factor, skew):.2g}"
                " of the assignments are expected to be dropped, where the popularity of experts"
                f" varies by {skew:.2g} of its mean"
            ),
            hint='a step counts them as "dropped"; a larger capacity drops less',
        )
        for layer in dict.fromkeys(capped.layers(load.problem.forward).values())
    ]


def waiting(decision: Decision) -> tuple[Finding, ...]:
    """A finding where a plan decides what no program can be made of yet."""
    parts = decision.waits_for
    if not parts:
        return ()
    return (
        Finding(
            code="not-lowered",
            severity="warning",
            where=", ".join(parts),
            message=(
                f"planned and priced, but not lowered yet: {', '.join(parts)}. `shardlib.compile`"
                " and `shardlib.verify` leave these out"
            ),
            hint=(
                "the fastest plan that can be run today: shardlib.plan(..., lowered=True), or"
                " --lowered"
            ),
        ),
    )


def unpriced(plan: PlanData, topology: Topology) -> tuple[Finding, ...]:
    """A finding where a plan puts state on disks whose rate is not known."""
    if "disk" not in plan.offload or topology.chip.disk_bytes_per_s:
        return ()
    return (
        Finding(
            code="disk-rate",
            severity="warning",
            where="offload=disk",
            message=(
                "optimizer state is read from disk and written back in every step, and"
                f" {topology.name} does not give the rate: the step will take longer than predicted"
            ),
            hint="disk_bytes_per_s in the chip of a topology file",
        ),
    )


def _situation(load: Workload, topology: Topology, plan: PlanData) -> Situation:
    """What the rules of thumb need to know about a plan."""
    vocabulary = load.colouring.canonical("vocab")
    weights = sum(
        math.prod(p.shape)
        for p in plan.parameters
        if vocabulary is None or vocabulary not in p.colours
    )
    dtype = load.problem.compute_dtype
    return Situation(
        plan=plan,
        topology=topology,
        compute_dtype=dtype,
        itemsize=ITEMSIZE.get(dtype, 4),
        weights=weights,
        language=load.colouring.sequence_colour is not None,
    )


def _doubled(load: Workload, plan: PlanData) -> list[Finding]:
    """Colours that the plan cuts and that occur twice in some value, such as the sequence in
    attention scores.
    """
    colouring, forward = load.colouring, load.problem.forward
    cut = {name for name, axes in plan.rules.entries if any(axis in plan.mesh for axis in axes)}
    twice: dict[str, int] = {}
    for value, name in colouring.conflicts(forward, colouring.forward):
        twice.setdefault(name, value)
    return [
        Finding(
            code="colour-twice",
            severity="info",
            where=f"value of shape {forward.values[twice[name]].shape}",
            message=(
                f"{name!r} occurs twice in one value"
                f" ({', '.join(axis or '-' for axis in colouring.forward[twice[name]])}); the first"
                " of the two is cut there"
            ),
        )
        for name in sorted(twice)
        if name in cut
    ]
