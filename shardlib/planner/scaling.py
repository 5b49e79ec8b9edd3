"""Scaling curves of a training run, the number of devices beyond which more do not pay, and plans
for a machine that has lost or gained hosts.

*Strong scaling*: the global batch is fixed, and more devices shorten the step. *Weak scaling*: the
batch grows with the devices. Each point of a curve is the best plan for that many devices; its
efficiency is its tokens per second and device over those of the smallest machine that fits the
model.

More devices *pay* as long as two things hold:

- The efficiency is at least a half. Eager, Zahorjan and Lazowska ("Speedup versus efficiency in
  parallel systems", IEEE Transactions on Computers 38(3), 1989) choose the number of processors at
  the knee, where efficiency per time is largest, and show that the efficiency there is at least one
  half.
- A doubling makes the run at least a tenth faster. This threshold is ours: at a gain of a tenth,
  nine tenths of the added devices are wasted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardlib.decisions.pins import Pins
from shardlib.errors import InfeasibleError, PinError, PlanError, TopologyError
from shardlib.graph import ITEMSIZE
from shardlib.layout import Layout
from shardlib.machines.chips import Tier
from shardlib.machines.topology import Topology, TopologyLike, device_order, divisors
from shardlib.machines.topology import topology as parse_topology
from shardlib.planner.answers import Ints, MovedArray, Replan, Shards, lost_elements, moved_elements
from shardlib.planner.plan import ParameterLayout, Plan, Source, source_of
from shardlib.planner.questions import changes, pinned
from shardlib.planner.workload import batch_size
from shardlib.report.elements import (
    aligned,
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
    wrapped,
)
from shardlib.untrusted.data import JsonObject

#: Least parallel efficiency, and least speed-up of a doubling, at which more devices pay.
MIN_EFFICIENCY, MIN_SPEED_UP = 0.5, 1.1


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """The best plan for a number of devices.

    Attributes:
        devices: number of devices of the machine.
        topology: spelling of the machine.
        plan: the best plan; None where none fits.
        short_bytes: bytes per device that the minimum-memory plan lacks; 0 where a plan fits, or
            where memory is not the reason.
        message: the reason why there is no plan.
        share: share of the machine's peak FLOP/s that the devices of the plan have.
        efficiency: tokens per second and device over those of the first point with a plan.
        speed_up: tokens per second over those of the point before, per doubling of devices; 0 for
            the first.
    """

    devices: int
    topology: str
    plan: Plan | None = field(default=None, repr=False)
    short_bytes: int = 0
    message: str = ""
    share: float = 1.0
    efficiency: float = 0.0
    speed_up: float = 0.0

    @property
    def pays(self) -> bool:
        """True if going from the point before to this one is worth it."""
        return (
            self.plan is not None
            and self.efficiency >= MIN_EFFICIENCY
            and (not self.speed_up or self.speed_up >= MIN_SPEED_UP)
        )

    def to_json(self) -> JsonObject:
        """The point as plain data; "fits" is None where there is no plan for a reason other than
        memory.
        """
        data: dict[str, Any] = {
            "devices": self.devices,
            "topology": self.topology,
            "fits": True if self.plan is not None else False if self.short_bytes else None,
        }
        if self.plan is None:
            return {**data, "short_bytes": self.short_bytes, "message": self.message}
        cost = self.plan.estimate
        return {
            **data,
            "mesh": dict(self.plan.mesh),
            "used_devices": self.plan.mesh.devices,
            "step_seconds": cost.step_seconds,
            "tokens": cost.tokens,
            "tokens_per_second": cost.tokens_per_second,
            "mfu": self.mfu,
            "peak_bytes": cost.device_bytes.peak,
            "efficiency": self.efficiency,
            "speed_up": self.speed_up,
            "pays": self.pays,
            "zero": self.plan.zero,
            "remat": self.plan.remat,
            "microbatches": self.plan.microbatches,
            "digest": self.plan.digest,
        }

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of all devices, used or not."""
        return self.plan.estimate.mfu * self.share if self.plan is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """The best plans of a family of machines.

    Attributes:
        kind: "strong" where the global batch is fixed, "weak" where it grows with the devices.
        points: by number of devices, ascending.
    """

    model: str
    kind: str
    points: tuple[ScalingPoint, ...]

    @property
    def fitting(self) -> tuple[ScalingPoint, ...]:
        """The points that have a plan."""
        return tuple(point for point in self.points if point.plan is not None)

    @property
    def enough(self) -> ScalingPoint | None:
        """The last point up to which every increase pays; None where nothing fits."""
        last: ScalingPoint | None = None
        for point in self.fitting:
            if not point.pays:
                break
            last = point
        return last

    @property
    def reason(self) -> str:
        """The reason why the point after `enough` does not pay, or why no point has a plan; empty
        where all pay.
        """
        if not self.fitting:
            return _no_plan_reason(self.points)
        last = self.enough
        beyond = [
            point for point in self.fitting if last is not None and point.devices > last.devices
        ]
        if not beyond:
            return ""
        point = beyond[0]
        if point.efficiency < MIN_EFFICIENCY:
            return (
                f"{point.devices:,} devices would work at an efficiency of"
                f" {percent_text(point.efficiency)}"
            )
        return (
            f"doubling to {point.devices:,} devices would give {ratio_text(point.speed_up)} the"
            " tokens per second"
        )

    def to_json(self) -> JsonObject:
        """The curve as plain data."""
        return {
            "model": self.model,
            "kind": self.kind,
            "points": [point.to_json() for point in self.points],
            "enough_devices": self.enough.devices if self.enough is not None else None,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        return curve_text(self)


def _no_plan_reason(points: Sequence[ScalingPoint]) -> str:
    """The reason why no point has a plan."""
    short = [f"{point.devices:,}" for point in points if point.short_bytes]
    if len(short) == len(points):
        return "no machine holds the model"
    lacking = f"only {', '.join(short)} for lack of memory" if short else "not for lack of memory"
    return f"no number of devices has a plan, {lacking}"


def curve(
    model: str, kind: str, machines: Iterable[Topology], planned: Callable[[Topology], Plan]
) -> ScalingCurve:
    """Plans for every machine."""
    points: list[ScalingPoint] = []
    first: ScalingPoint | None = None
    before: ScalingPoint | None = None
    for machine in sorted(machines, key=lambda machine: machine.devices):
        try:
            plan = planned(machine)
        except (InfeasibleError, PinError) as error:
            points.append(
                ScalingPoint(
                    devices=machine.devices,
                    topology=machine.name,
                    short_bytes=getattr(error, "short_bytes", 0),
                    message=str(error).splitlines()[0],
                )
            )
            continue
        point = _compared(machine, plan, first, before)
        first, before = first or point, point
        points.append(point)
    return ScalingCurve(model=model, kind=kind, points=tuple(points))


def _compared(
    machine: Topology, plan: Plan, first: ScalingPoint | None, before: ScalingPoint | None
) -> ScalingPoint:
    """The point of a plan, compared with the first one and the one before."""
    rate, devices = plan.estimate.tokens_per_second, machine.devices
    efficiency, speed_up = 1.0, 0.0
    if first is not None and first.plan is not None:
        efficiency = rate / devices / (first.plan.estimate.tokens_per_second / first.devices)
    if before is not None and before.plan is not None and devices > before.devices:
        speed_up = (rate / before.plan.estimate.tokens_per_second) ** (
            1 / math.log2(devices / before.devices)
        )
    return ScalingPoint(
        devices=devices,
        topology=machine.name,
        plan=plan,
        share=_share(machine, plan.mesh.devices),
        efficiency=efficiency,
        speed_up=speed_up,
    )


def _share(machine: Topology, used: int) -> float:
    """Share of a machine's peak FLOP/s that `used` of its devices have while the others are
    idle.
    """
    faster = machine.in_use(used).chip.peak("float32") / machine.chip.peak("float32")
    return used * faster / machine.devices


def curve_text(result: ScalingCurve) -> str:
    """The curve as a text table."""
    kinds = {
        "strong": "Strong scaling: the same global batch on more devices",
        "weak": "Weak scaling: a batch that grows with the devices",
    }
    rows = [
        ("devices", "step", "tokens/s", "efficiency", "MFU", "memory", "mesh"),
        *map(_row, result.points),
    ]
    lines = [f"{result.model}", kinds[result.kind], *aligned(rows, right={0, 1, 2, 3, 4, 5})]
    last = result.enough
    if last is None:
        lines += wrapped("  - ", f"{result.reason[0].upper()}{result.reason[1:]}.")
    elif result.reason:
        lines += wrapped("  - ", f"More than {last.devices:,} devices do not pay: {result.reason}.")
    else:
        lines += wrapped("  - ", f"All of them pay, up to {last.devices:,} devices.")
    lines += wrapped(
        "  - ",
        f"Devices pay while the efficiency is at least {percent_text(MIN_EFFICIENCY)} and a"
        f" doubling gives at least {ratio_text(MIN_SPEED_UP)}.",
    )
    return "\n".join(lines) + "\n"


def _row(point: ScalingPoint) -> tuple[str, ...]:
    if point.plan is None:
        lacking = (
            f"lacks {bytes_text(point.short_bytes)} per device"
            if point.short_bytes
            else "no plan: " + point.message
        )
        return (f"{point.devices:,}", "-", "-", "-", "-", "-", lacking)
    cost = point.plan.estimate
    idle = (
        f" ({point.devices - point.plan.mesh.devices:,} idle)"
        if point.plan.mesh.devices < point.devices
        else ""
    )
    return (
        f"{point.devices:,}",
        seconds_text(cost.step_seconds),
        count_text(cost.tokens_per_second),
        percent_text(point.efficiency),
        percent_text(point.mfu),
        bytes_text(cost.device_bytes.peak),
        f"{point.plan.mesh}{idle}",
    )


# --------------------------------------------------------------------------------------------------
# The machine of a point, with the figures with which the plan was priced, and its parts.


def machine_like(old: Topology, requested: TopologyLike) -> Topology:
    """The requested machine. Simulated devices get the measured figures of the plan's machine, not
    the rough ones of the catalogue.

    >>> from shardlib.machines.catalog import CPU
    >>> measured = replace(parse_topology("cpu:8"), chip=replace(CPU.chip, hbm_bytes_per_s=4e9))
    >>> machine_like(measured, "cpu:8") == measured
    True
    >>> machine_like(measured, "cpu:16").chip.hbm_bytes_per_s
    2000000000.0

    Args:
        old: the machine for which the plan was priced.
        requested: a spelling or a value.

    Raises:
        TopologyError: the spelling does not parse.
        MissingFileError: it is a file that does not exist.
    """
    machine = parse_topology(requested)
    simulated = all(topology.name.startswith("cpu:") for topology in (old, machine))
    return _resized(old, machine) if simulated and isinstance(requested, str) else machine


def same_chips(old: Topology, new: Topology) -> bool:
    """True if two machines have chips of the same name, whatever their figures."""
    return old.chip.name == new.chip.name


def parts_to_search(source: Source, machine: Topology, pins: Pins) -> list[Topology]:
    """The parts of a machine that are worth a search, the largest first: some of its outermost
    domains, or all of them.
    """
    outer, inner = machine.tiers[0], machine.tiers[1:]
    if pins.mesh is not None or len(outer.shape) > 1:
        return [machine]
    count, domain = outer.devices, machine.devices // outer.devices
    usable = _usable_counts(source, machine.devices)
    full = next((number for number in range(count, 0, -1) if number * domain in usable), count)
    numbers = sorted({full, 1 << (count.bit_length() - 1)}, reverse=True)
    return [
        machine
        if number == count
        else replace(
            machine,
            tiers=(replace(outer, shape=(number,)), *inner),
            alone=min(machine.alone, number * domain),
        )
        for number in numbers
    ]


def _usable_counts(source: Source, limit: int) -> set[int]:
    """Numbers of devices that are products of a divisor of the batch, one that two colours share,
    and one of a stack of layers.

    A tensor axis of a size that divides one colour alone, such as an odd factor of the vocabulary,
    leaves most matmuls unsharded.
    """
    workload = source.workload
    shapes = {parameter.path: parameter.shape for parameter in workload.problem.parameters}
    colours = [colour.divisor for colour in workload.colouring.colours.values() if colour.matmuls]
    shared = [math.gcd(a, b) for a, b in itertools.combinations(colours, 2)]
    stacks = [shapes[path][dim] for path, dim in workload.stack_dims]
    counts = {1}
    for group in ([batch_size(workload.problem, workload.colouring)], shared, stacks):
        factors = {1, *(number for size in group for number in divisors(size))}
        counts = {a * b for a in counts for b in factors if a * b <= limit}
    return counts


def _resized(old: Topology, machine: Topology) -> Topology:
    """A machine of simulated devices with another number of them, which share the same cores and
    the same memory.
    """
    if machine.devices == old.devices:
        return old
    share = old.devices / machine.devices
    faster = min(old.alone, share)
    chip = replace(
        old.chip,
        flops_per_s=tuple((dtype, rate * faster) for dtype, rate in old.chip.flops_per_s),
        hbm_bytes=max(1, int(old.chip.hbm_bytes * share)),
        hbm_bytes_per_s=old.chip.hbm_bytes_per_s * faster,
        launch_s=old.chip.launch_s / faster,
    )
    return replace(
        old,
        name=machine.name,
        chip=chip,
        tiers=(_memory(old.tiers[0], machine.devices, max(1.0, 1 / share)),),
        alone=old.alone / faster,
    )


def _memory(tier: Tier, devices: int, slower: float) -> Tier:
    """The memory tier through which simulated devices exchange, for another number of them."""
    return replace(
        tier,
        shape=(devices,),
        exchanges=tuple(
            replace(
                exchange,
                latency_s=exchange.latency_s * slower,
                seconds_per_byte=exchange.seconds_per_byte * slower,
            )
            for exchange in tier.exchanges
            if exchange.ways <= devices
        ),
    )


# --------------------------------------------------------------------------------------------------
# Plans after hosts are lost or gained.
#
# The same problem is searched again on the remaining machine: nothing is traced, and the global
# batch stays the same, by gradient accumulation or with fewer data ways, so that the training run
# continues with the same numbers. Then the old and new layouts are compared device by device, for
# the bytes that every device receives and those that no surviving device has.
#
# Surviving devices keep their order: device 0 of the new machine is the first survivor of the old
# one.

#: Code of the finding of a plan whose estimate was recomputed with other figures.
PRICED_AGAIN = "priced-again"
#: Decisions that a quick replan keeps, besides dtypes.
KEPT_KEYS = (
    "remat",
    "accumulation",
    "schedule",
    "virtual_stages",
    "gather",
    "pipeline",
    "context",
    "attention",
    "experts",
    "collective_matmul",
    "offload",
)
#: Bytes per element of an outer parameter and its momentum together.
OUTER_BYTES = 8.0


def replan(
    plan: Plan, topology: TopologyLike, *, lost: Iterable[int] = (), anew: bool = False
) -> Replan:
    """The best plan for the same training run on another machine, and the data that must move.

    Args:
        lost: numbers of the old devices that are gone; by default the last ones.
    """
    source = source_of(plan)
    machine = machine_like(source.topology, topology)
    survivors = _survivors(source.topology, machine, lost)
    best, notes = (None, []) if anew else _quick_replan(plan, source, machine)
    if best is None:
        best, notes = _full_replan(source, machine)
    notes += _notes(source.topology, machine, plan, best)
    parts, moved = _moves(plan, best, source, machine, np.array(survivors, np.int64))
    best = replace(best, origin=plan.origin)
    return Replan(
        old=plan,
        plan=best,
        survivors=survivors,
        moved_bytes_per_device=tuple(moved.tolist()),
        parts=parts,
        changed=changes(plan, best),
        notes=tuple(notes),
        machine=machine,
        other_chips=not same_chips(source.topology, machine),
    )


def _survivors(old: Topology, new: Topology, lost: Iterable[int]) -> tuple[int, ...]:
    lost_devices = set(lost)
    foreign = sorted(number for number in lost_devices if not 0 <= number < old.devices)
    if foreign:
        raise TopologyError(
            f"the lost devices {', '.join(map(str, foreign))} are none of {old.name}, whose devices"
            f" are 0 to {old.devices - 1}\nTry: the numbers that the lost devices had there"
        )
    remaining = [number for number in range(old.devices) if number not in lost_devices]
    return tuple(remaining[: new.devices])


def _quick_replan(plan: Plan, source: Source, machine: Topology) -> tuple[Plan | None, list[str]]:
    """The best plan that keeps the decisions `KEPT_KEYS` of the old one, with notes; (None,
    []) where there is none.
    """
    own_pins = pinned(plan)
    try:
        quick = _on_best_part(
            source,
            machine,
            source.pins.replace(
                dtypes=own_pins.dtypes, allow=(), **{key: own_pins.get(key) for key in KEPT_KEYS}
            ),
        )
    except (PinError, InfeasibleError):
        return None, []
    assert quick.source is not None
    return replace(quick, source=quick.source.with_pins(source.pins)), [
        f"Kept from the old plan: {', '.join(KEPT_KEYS)}. A new search (anew) may find a faster"
        " plan."
    ]


def _full_replan(source: Source, machine: Topology) -> tuple[Plan, list[str]]:
    """The best plan for the machine under the user's pins, or without a pinned mesh that does not
    fit it; with notes.
    """
    try:
        return _on_best_part(source, machine, source.pins), []
    except PinError as error:
        if source.pins.mesh is None and not source.pins.axes:
            raise
        unpinned = source.pins.replace(mesh=None, axes=())
        return _on_best_part(source, machine, unpinned), [
            f"The pinned mesh was dropped: {str(error).splitlines()[0]}."
        ]


def _on_best_part(source: Source, machine: Topology, pins: Pins) -> Plan:
    """The best plan on the machine, on the largest part of it whose devices can all be used, or on
    its largest power-of-two part, whichever is fastest.

    Fifteen hosts divide few batches, and a search that must use them all may end at an odd tensor
    axis.
    """
    plans: list[Plan] = []
    errors: list[PinError | InfeasibleError] = []
    for part in parts_to_search(source, machine, pins):
        try:
            plans.append(source.search(part, pins))
        except (PinError, InfeasibleError) as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    # the first of equals: the largest part
    best = min(plans, key=lambda candidate: candidate.estimate.step_seconds)
    if best.source is not None and best.source.topology == machine:
        return best
    full = source.search(machine, pinned(best))
    assert full.source is not None
    return replace(full, search=best.search, source=full.source.with_pins(pins))


def _notes(old: Topology, new: Topology, before: Plan, after: Plan) -> list[str]:
    notes = [
        f"{finding.message[:1].upper()}{finding.message[1:]}."
        for finding in before.findings
        if finding.code == PRICED_AGAIN
    ]
    if not same_chips(old, new):
        notes.append(
            f"The chips differ: {old.chip.name} before, {new.chip.name} now. Every byte is sent"
            " from one machine to the other."
        )
    elif new.chip.sources != old.chip.sources:
        notes.append(
            f"The figures of {old.chip.name} have changed, so the times are not comparable:"
            f" {'; '.join(old.chip.sources)} before, {'; '.join(new.chip.sources)} now."
        )
    if new.devices > old.devices:
        notes.append(
            f"The machine has grown from {old.devices:,} to {new.devices:,} devices; the new ones"
            " hold nothing yet."
        )
    if after.mesh.devices < new.devices:
        notes.append(f"The plan uses {after.mesh.devices:,} of the {new.devices:,} devices.")
    if before.exchange.islands > 1:
        notes.append(
            "Islands are counted as replicas of each other, as they are right after they have"
            " synchronised. Between two synchronisations, the progress of a lost island since the"
            " last one is lost; a checkpoint can resume with any number of islands."
        )
    if after.microbatches != before.microbatches:
        notes.append(
            f"The global batch stays the same: {before.microbatches:,} microbatches of gradient"
            f" accumulation become {after.microbatches:,}."
        )
    return notes


def _moves(
    old: Plan, new: Plan, source: Source, machine: Topology, survivors: Ints
) -> tuple[tuple[MovedArray, ...], Ints]:
    """Every part, and the bytes that each device of the new machine receives."""
    before, after = _order(old, source.topology), _order(new, machine)
    # on other chips no device has any data yet
    usable = survivors if same_chips(source.topology, machine) else survivors[:0]
    state = {
        parameter.path: parameter.state_bytes_per_element
        for parameter in source.workload.variant(old.dtypes).problem.parameters
    }
    moved = np.zeros(machine.devices, np.int64)
    parts: list[MovedArray] = []
    counted: dict[tuple[object, ...], tuple[Ints, int]] = {}
    target = {parameter.path: parameter for parameter in new.parameters}
    for parameter in old.parameters:
        outer = _has_outer_state(old) and _has_outer_state(new)
        for what, size, layouts in _arrays(parameter, target[parameter.path], state, outer=outer):
            shards = (
                Shards(parameter.shape, layouts[0], old.mesh, before),
                Shards(parameter.shape, layouts[1], new.mesh, after),
            )
            key = (parameter.shape, *layouts)
            if key not in counted:
                counted[key] = moved_elements(*shards, usable), lost_elements(shards[0], survivors)
            elements, lost = counted[key]
            received = np.round(elements * size).astype(np.int64)
            moved[: len(received)] += received
            parts.append(
                MovedArray(
                    path=parameter.path,
                    what=what,
                    bytes=round(float(math.prod(parameter.shape)) * size),
                    old=layouts[0],
                    new=layouts[1],
                    received_bytes=int(received.sum()),
                    most_bytes=int(received.max(initial=0)),
                    lost_bytes=round(lost * size),
                    before=shards[0],
                    after=shards[1],
                )
            )
    return tuple(parts), moved


def _arrays(
    old: ParameterLayout, new: ParameterLayout, state: Mapping[str, float], *, outer: bool
) -> Iterable[tuple[str, float, tuple[Layout, Layout]]]:
    """(what, bytes per element, layouts before and after) of a parameter, its optimizer state, and
    its outer state.
    """
    yield "parameter", float(ITEMSIZE.get(old.dtype, 4)), (old.rest, new.rest)
    if state.get(old.path):
        yield "optimizer state", state[old.path], (old.state, new.state)
    if outer and old.trained:
        yield "outer state", OUTER_BYTES, (old.state, new.state)


def _has_outer_state(plan: Plan) -> bool:
    """True if islands keep outer parameters and an outer momentum."""
    return plan.exchange.keeps


def _order(plan: Plan, topology: Topology) -> Ints:
    order = device_order(plan.mesh, topology, plan.axis_order)
    if order is None:  # the file of a topology was changed
        raise PlanError(f"the mesh {plan.mesh} has no place on {topology.name}\nTry: plan again")
    return order.reshape(-1)
