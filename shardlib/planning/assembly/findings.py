"""What the user should know about a plan, beside its figures."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.cost.machine.expert_load import BALANCED, dropped_share
from shardlib.cost.step import capacity_experts as capped
from shardlib.cost.tables.pricer import Pricer
from shardlib.decisions.pins import Pins
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.topology import Topology
from shardlib.planning.assembly import layouts
from shardlib.planning.assembly.advice import advise
from shardlib.planning.assembly.situation import situation_of
from shardlib.planning.plan import Plan
from shardlib.planning.space.microbatching import coupled
from shardlib.planning.space.workload import Workload
from shardlib.planning.units.quantity import percent_text, seconds_text
from shardlib.report import Finding, diagnostic
from shardlib.schedules.one_f_one_b import ONE_F_ONE_B
from shardlib.schedules.table import named

#: Part of a step that is too little to warn of.
_LITTLE = 0.01


@diagnostic
def notes(
    load: Workload,
    topology: Topology,
    plan: Plan,
    left_out: tuple[str, ...],
    most: int,
    pinned: bool,
) -> tuple[Finding, ...]:
    """Findings about a finished plan."""
    found = [
        *load.problem.forward.findings,
        *load.colouring.findings,
        *layouts.layout_findings(plan.parameters, plan.mesh, plan.zero, ITEMSIZE),
    ]
    found += _idle_devices(plan, topology, most, pinned)
    found += _doubled(load, plan)
    found += coupled(load.problem.rows, plan.microbatches)
    found += _kept(load, plan) + _dropping(load, topology, plan)
    found += advise(situation_of(load, topology, plan))
    found += [
        Finding(
            code="corrected",
            severity="info",
            where=one.quantity,
            message=f"the prediction is corrected: {one}",
        )
        for one in plan.estimate.corrections
        if one.quantity != "margin"
    ]
    found += [
        Finding(
            code="unknown-compiler",
            severity="info",
            where=topology.chip.name,
            message=(
                "nothing was learned of the compiler for this chip: plans leave"
                f" {percent_text(1 - 1 / one.factor)} of its memory to what a program may need"
                " beyond the prediction"
            ),
            hint="[corrections] margin in a topology file, or `shardlib verify`",
        )
        for one in plan.estimate.corrections
        if one.unknown
    ]
    found += _left_out(load, plan, left_out)
    return tuple(found)


@diagnostic
def _left_out(load: Workload, plan: Plan, left_out: tuple[str, ...]) -> list[Finding]:
    """Dimensions that were not tried in all sets with others and that the plan does not shard, and
    how much longer a step takes for it at most.
    """
    ways, colours = plan.mesh["tensor"], load.colouring.colours
    cut = {name for name, axes in plan.rules.entries if ways > 1 and "tensor" in axes}
    names = [name for name in left_out if name not in cut and colours[name].divisor % ways == 0]
    if not names:
        return []
    total = plan.estimate.step_seconds
    most = plan.estimate.seconds.compute * _share_computed_whole(load, plan, cut, names)
    if ways == 1:
        cost = "this plan shards nothing over tensor"
    elif most < _LITTLE * total:
        cost = "hardly anything is computed more often for it"
    else:
        cost = (
            f"their matmuls are computed by each of the {ways} devices of tensor, which is at most"
            f" {seconds_text(most)} of a step of {seconds_text(total)}"
        )
    return [
        Finding(
            code="dimensions-left-out",
            severity="warning" if ways > 1 and most >= _LITTLE * total else "info",
            message=(
                f"of {len(load.colouring.shardable)} dimensions {', '.join(names)} were tried one"
                " after the other in the fastest plans, not in every set with others, and are not"
                f" sharded: {cost}"
            ),
            hint="the same logical axis for dims that may be sharded alike, which are one"
            " dimension then",
        )
    ]


def _share_computed_whole(load: Workload, plan: Plan, cut: set[str], names: Sequence[str]) -> float:
    """Part of a device's FLOPs that would go where some colours were sharded over tensor, too."""
    policy = plan.remat if plan.remat in load.problem.steps else "none"
    graph, colours = load.problem.steps[policy].graph, load.colouring.steps[policy]
    ways, whole, everything = plan.mesh["tensor"], 0.0, 0.0
    for op in graph.ops:
        if op.category in ("matmul", "convolution"):
            mine = {name for value in (*op.operands, *op.results) for name in colours[value]}
            flops = op.flops * graph.trips(op.region)
            everything += flops / ways if mine & cut else flops
            whole += 0.0 if mine & cut or mine.isdisjoint(names) else flops
    return whole / everything * (1 - 1 / ways) if everything else 0.0


@diagnostic
def _idle_devices(plan: Plan, topology: Topology, most: int, pinned: bool) -> list[Finding]:
    """Devices that the plan leaves idle: because the mesh is pinned, because no mesh could use
    them, or because it is faster so.
    """
    used = plan.mesh.devices
    if used >= topology.devices:
        return []
    larger = [r for r in plan.search.rejected if r.mesh.devices > used and r.reason == "slower"]
    said = f"the plan uses {used} of {topology.devices} devices: "
    if pinned:
        return [
            Finding(
                code="idle-devices",
                severity="info",
                message=f"{said}the mesh is pinned to {plan.mesh}",
                hint="pins of single axes (mesh.tensor=2), which leave the others to the planner",
            )
        ]
    if larger:
        best = min(larger, key=lambda r: r.step_seconds)
        return [
            Finding(
                code="idle-devices",
                severity="info",
                message=(
                    f"{said}with {best.mesh.devices} ({best.mesh}) a step would take"
                    f" {best.step_seconds / plan.estimate.step_seconds:.2f} times as long"
                ),
                hint="a larger batch, or a smaller machine",
            )
        ]
    if most > used:
        return [
            Finding(
                code="idle-devices",
                severity="info",
                message=f"{said}no plan on more that fits is faster",
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


@diagnostic
def _kept(load: Workload, plan: Plan) -> list[Finding]:
    """Zero-bubble stages in lockstep that recompute: what gradients of weights are made from waits
    whatever is recomputed, and the estimate does not know it.
    """
    if (
        not named(plan.schedule).backward_in_two
        or plan.remat == "none"
        or load.profile.pipeline != "lockstep"
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


@diagnostic
def unused_loops(plan: Plan, replaced: int) -> tuple[Finding, ...]:
    """A finding where loops over tensor are pinned and take the place of no collective of the plan."""
    if plan.collective_matmul != "loop" or replaced:
        return ()
    why = (
        "the stages of a pipeline have none"
        if plan.mesh["stage"] > 1
        else (
            "nothing is sharded over tensor"
            if plan.mesh["tensor"] == 1
            else (
                "the residual stream is not sharded along the sequence"
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


@diagnostic
def _dropping(load: Workload, topology: Topology, plan: Plan) -> list[Finding]:
    """What experts with a capacity are expected to drop; the price does not depend on it."""
    known = Pricer(topology, load.profile).constants.skew
    skew = BALANCED if known is None else known

    def dropped(layer: capped.Capped) -> float:
        assignments = layer.assignments / plan.microbatches
        return dropped_share(assignments, layer.experts, layer.factor, skew)

    return [
        Finding(
            code="drops-tokens",
            severity="info",
            where=f"{layer.experts} experts",
            message=(
                f"an expert takes at most {layer.factor:.3g} times the mean load; about"
                f" {dropped(layer):.2g} of the assignments are expected to be dropped, where the"
                f" popularity of experts varies by {skew:.2g} of its mean"
            ),
            hint='a step counts them as "dropped"; a larger capacity drops less',
        )
        for layer in dict.fromkeys(capped.layers(load.problem.forward).values())
    ]


@diagnostic
def without_effect(pins: Pins, plan: Plan) -> tuple[Finding, ...]:
    """Pins that decide nothing in a plan: what they are about is not there."""
    if not pins.axis_order or set(pins.axis_order) & set(plan.mesh):
        return ()
    names = ", ".join(pins.axis_order)
    return (
        Finding(
            code="pin-without-effect",
            severity="warning",
            where="axis_order",
            message=(
                f"axis_order names {names}, of which the mesh {plan.mesh} has none: the pin has no"
                " effect."
            ),
            hint=f"pin the axis, too, e.g. mesh.{pins.axis_order[0]}=2, or leave the pin out",
        ),
    )


@diagnostic
def unpriced(plan: Plan, topology: Topology) -> tuple[Finding, ...]:
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


@diagnostic
def _doubled(load: Workload, plan: Plan) -> list[Finding]:
    """Colours that the plan shards and that occur twice in some value, such as the sequence in
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
                " of the two is sharded there"
            ),
        )
        for name in sorted(twice)
        if name in cut
    ]
