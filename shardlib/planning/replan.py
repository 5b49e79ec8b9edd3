"""What becomes of a plan when hosts are lost, or gained?

The same problem is searched again on the machine that is left: nothing is traced, and the global batch stays as it is, by gradient
accumulation or with fewer data ways, so that the training run goes on with the same numbers. Then the two layouts are compared device by
device, which says how many bytes every device must receive, for every parameter and its optimizer state, and whether something is on no
surviving device and must come from a checkpoint.

Surviving devices keep their order: device 0 of the new machine is the first survivor of the old one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardlib.errors import InfeasibleError, PinError, TopologyError
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.placement import device_order
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.layout import Layout
from shardlib.planning import space
from shardlib.planning.counterfactual import changes, pinned, searched, source_of
from shardlib.planning.moving import Ints, Ranges, Shards, lost_elements, moved_elements
from shardlib.planning.pins import Pins
from shardlib.planning.plan import ParameterLayout, Plan, Source
from shardlib.planning.quantity import bytes_text, clip, count_text, percent_text, ratio_text, seconds_text
from shardlib.planning.tables import aligned, wrapped

#: Decisions that a quick replan keeps, beside dtypes.
KEPT = ("remat", "accumulation", "schedule", "virtual_stages", "gather", "pipeline", "context", "attention", "experts", "collective_matmul", "offload")
#: Parts that the text lists.
_MOST_PARTS = 12


@dataclass(frozen=True, kw_only=True)
class Part:
    """One parameter, or its optimizer state, on its way from one layout to another.

    Attributes:
        path: tree path of the parameter.
        what: "parameter" or "optimizer state".
        bytes: bytes of the whole array.
        old, new: the layouts.
        received_bytes: bytes that all devices receive together.
        most_bytes: bytes that the device receives which receives most.
        lost_bytes: bytes that are on no surviving device.
        before, after: where its parts lie, by device.
    """

    path: str
    what: str
    bytes: int
    old: Layout
    new: Layout
    received_bytes: int
    most_bytes: int
    lost_bytes: int
    before: Shards = field(compare=False, repr=False)
    after: Shards = field(compare=False, repr=False)

    def ranges(self, device: int, survivors: Sequence[int]) -> tuple[Ranges | None, Ranges | None]:
        """The part of the array that a device of the new machine holds before and after, first and end per dim; None where it holds none."""
        return self.before.ranges(survivors[device]) if device < len(survivors) else None, self.after.ranges(device)

    def to_json(self) -> dict[str, Any]:
        """The part as plain data, without the places of its shards."""
        return {"path": self.path, "what": self.what, "bytes": self.bytes, "old": self.old.to_json(), "new": self.new.to_json(),
                "received_bytes": self.received_bytes, "most_bytes": self.most_bytes, "lost_bytes": self.lost_bytes}


@dataclass(frozen=True, kw_only=True)
class Replan:
    """A plan for another machine, and the way there.

    Attributes:
        old: the plan as it was.
        plan: the plan for the new machine.
        survivors: old device number of the new devices 0, 1, ..., as many as were there before.
        moved_bytes_per_device: bytes that each device of the new machine must receive.
        parts: every parameter and its optimizer state.
        changed: decisions that differ, "microbatches 8 -> 16".
        notes: what had to be given up or should be known, a sentence each.
        machine: the new machine.
    """

    old: Plan
    plan: Plan
    survivors: tuple[int, ...]
    moved_bytes_per_device: tuple[int, ...]
    parts: tuple[Part, ...]
    changed: tuple[str, ...]
    notes: tuple[str, ...]
    machine: Topology

    @property
    def slowdown(self) -> float:
        """Predicted time of a step over that of the old plan."""
        return self.plan.estimate.step_seconds / self.old.estimate.step_seconds

    @property
    def lost_bytes(self) -> int:
        """Bytes that are on no surviving device."""
        return sum(part.lost_bytes for part in self.parts)

    @property
    def moving_seconds(self) -> float:
        """Time that the device which receives most needs, if every byte comes over one of the slowest links of the machine."""
        return max(self.moved_bytes_per_device, default=0) / min(tier.reached_bytes_per_s for tier in self.machine.tiers)

    @property
    def text(self) -> str:
        """The change for people."""
        return replan_text(self)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """The change as plain data; the plan is under "plan"."""
        from shardlib.planning.plan import plan_to_data

        return {
            "plan": plan_to_data(self.plan), "old_topology": self.old.topology, "old_mesh": dict(self.old.mesh), "old_step_seconds": self.old.estimate.step_seconds,
            "slowdown": self.slowdown, "changed": list(self.changed), "notes": list(self.notes), "survivors": len(self.survivors),
            "moved_bytes_per_device": list(self.moved_bytes_per_device), "moved_bytes": sum(self.moved_bytes_per_device), "lost_bytes": self.lost_bytes,
            "moving_seconds": self.moving_seconds, "parts": [part.to_json() for part in self.parts], "text": self.text,
        }


def replan(plan: Plan, topology: str | Topology, *, lost: Iterable[int] = (), anew: bool = False) -> Replan:
    """The best plan for the same training run on another machine, and what must move.

    Args:
        plan: a plan with its source.
        topology: the machine that is left; larger ones, and other chips, are allowed.
        lost: numbers of the old devices that are gone; by default the last ones.
        anew: search the whole space. Otherwise the way of running a step stays (`KEPT`) as long as that fits, which is many times as quick;
            mesh, microbatches and what is cut are found anew.

    Raises:
        PlanError: the plan was read from a file.
        TopologyError: the topology does not parse, or `lost` does not fit the old machine.
        InfeasibleError: nothing fits there.
    """
    source, machine = source_of(plan), parse_topology(topology)
    survivors = _survivors(source.topology, machine, lost)
    found, notes = (None, []) if anew else _kept(plan, source, machine)
    if found is None:
        found, notes = _best(source, machine)
    notes += _about(source.topology, machine, plan, found)
    parts, moved = _moves(plan, found, source, machine, np.array(survivors, np.int64))
    found = replace(found, origin=plan.origin)
    return Replan(old=plan, plan=found, survivors=survivors, moved_bytes_per_device=tuple(moved.tolist()), parts=parts,
                  changed=changes(plan, found), notes=tuple(notes), machine=machine)


def _survivors(old: Topology, new: Topology, lost: Iterable[int]) -> tuple[int, ...]:
    gone = set(lost)
    foreign = sorted(number for number in gone if not 0 <= number < old.devices)
    if foreign:
        raise TopologyError(f"the lost devices {', '.join(map(str, foreign))} are none of {old.name}, whose devices are 0 to {old.devices - 1}")
    left = [number for number in range(old.devices) if number not in gone]
    return tuple(left[:new.devices])


def _kept(plan: Plan, source: Source, machine: Topology) -> tuple[Plan | None, list[str]]:
    """The best plan that runs a step as the old one does; None where there is none."""
    own = pinned(plan)
    try:
        found = _with_fewer(source, machine, replace(source.pins, dtypes=own.dtypes, allow=(), **{word: getattr(own, word) for word in KEPT}))
    except (PinError, InfeasibleError):
        return None, []
    assert found.source is not None
    return replace(found, source=replace(found.source, pins=source.pins)), [f"Kept without asking: {', '.join(KEPT)}. Searching anew may find a faster plan."]


def _best(source: Source, machine: Topology) -> tuple[Plan, list[str]]:
    """The best plan for the machine under the user's pins, or without a pinned mesh that it cannot hold."""
    try:
        return _with_fewer(source, machine, source.pins), []
    except PinError as error:
        if source.pins.mesh is None and not source.pins.axes:
            raise
        freed = replace(source.pins, mesh=None, axes=())
        return _with_fewer(source, machine, freed), [f"The pinned mesh was given up: {str(error).splitlines()[0]}."]


def _with_fewer(source: Source, machine: Topology, pins: Pins) -> Plan:
    """The best plan on the machine, on the largest part of it whose devices can all be used, or on its largest even part, whichever is fastest.

    Fifteen hosts divide few batches, and a search that must use them all may end at an odd tensor axis.
    """
    tries: list[Plan] = []
    errors: list[PinError | InfeasibleError] = []
    for part in _parts(source, machine, pins):
        try:
            tries.append(searched(source, part, pins))
        except (PinError, InfeasibleError) as error:
            errors.append(error)
    if not tries:
        raise errors[0]
    best = min(tries, key=lambda one: one.estimate.step_seconds)  # the first of equals: the largest part
    if best.source is not None and best.source.topology == machine:
        return best
    whole = searched(source, machine, pinned(best))
    assert whole.source is not None
    return replace(whole, search=best.search, source=replace(whole.source, pins=pins))


def _parts(source: Source, machine: Topology, pins: Pins) -> list[Topology]:
    """The parts of a machine that are worth a search, the largest first; some of its outermost domains, or all of them."""
    outer, inner = machine.tiers[0], machine.tiers[1:]
    if pins.mesh is not None or len(outer.shape) > 1:
        return [machine]
    count, domain = outer.devices, machine.devices // outer.devices
    usable = _usable_counts(source, machine.devices)
    full = next((number for number in range(count, 0, -1) if number * domain in usable), count)
    numbers = sorted({full, 1 << (count.bit_length() - 1)}, reverse=True)
    return [machine if number == count else replace(machine, tiers=(replace(outer, shape=(number,)), *inner)) for number in numbers]


def _usable_counts(source: Source, most: int) -> set[int]:
    """Numbers of devices that are products of a divisor of the batch, one that two colours share, and one of a stack of layers.

    A tensor axis of a size that divides one colour alone, such as an odd factor of the vocabulary, leaves most matmuls uncut.
    """
    load = source.load
    shapes = {parameter.path: parameter.shape for parameter in load.problem.parameters}
    colours = [colour.divisor for colour in load.colouring.colours.values() if colour.matmuls]
    shared = [math.gcd(a, b) for a, b in itertools.combinations(colours, 2)]
    stacks = [shapes[path][dim] for path, dim in load.frozen]
    counts = {1}
    for group in ([space.batch_size(load.problem, load.colouring)], shared, stacks):
        factors = {1, *(number for size in group for number in space.divisors(size))}
        counts = {a * b for a in counts for b in factors if a * b <= most}
    return counts


def _about(old: Topology, new: Topology, before: Plan, after: Plan) -> list[str]:
    notes: list[str] = []
    if new.chip != old.chip:
        notes.append(f"The chips are others: {old.chip.name} before, {new.chip.name} now. Every byte crosses between the two machines.")
    if new.devices > old.devices:
        notes.append(f"The machine has grown from {old.devices:,} to {new.devices:,} devices; the new ones hold nothing yet.")
    if after.mesh.devices < new.devices:
        notes.append(f"The plan uses {after.mesh.devices:,} of the {new.devices:,} devices.")
    if after.microbatches != before.microbatches:
        notes.append(f"The global batch stays the same: {before.microbatches:,} microbatches of gradient accumulation become {after.microbatches:,}.")
    return notes


def _moves(old: Plan, new: Plan, source: Source, machine: Topology, survivors: Ints) -> tuple[tuple[Part, ...], Ints]:
    """Every part, and the bytes that each device of the new machine receives."""
    before, after = _order(old, source.topology), _order(new, machine)
    known = survivors if machine.chip == source.topology.chip else survivors[:0]  # another machine: nobody holds anything there
    state = {parameter.path: parameter.state_bytes_per_element for parameter in source.load.under(old.dtypes).problem.parameters}
    moved = np.zeros(machine.devices, np.int64)
    parts: list[Part] = []
    counted: dict[tuple[object, ...], tuple[Ints, int]] = {}
    theirs = {parameter.path: parameter for parameter in new.parameters}
    for one in old.parameters:
        for what, size, layouts in _arrays(one, theirs[one.path], state):
            shards = Shards(one.shape, layouts[0], old.mesh, before), Shards(one.shape, layouts[1], new.mesh, after)
            key = (one.shape, *layouts)
            if key not in counted:
                counted[key] = moved_elements(*shards, known), lost_elements(shards[0], survivors)
            elements, gone = counted[key]
            received = np.round(elements * size).astype(np.int64)
            moved[:len(received)] += received
            parts.append(Part(path=one.path, what=what, bytes=round(float(math.prod(one.shape)) * size), old=layouts[0], new=layouts[1], received_bytes=int(received.sum()),
                              most_bytes=int(received.max(initial=0)), lost_bytes=round(gone * size), before=shards[0], after=shards[1]))
    return tuple(parts), moved


def _arrays(old: ParameterLayout, new: ParameterLayout, state: Mapping[str, float]) -> Iterable[tuple[str, float, tuple[Layout, Layout]]]:
    """(what, bytes per element, layouts before and after) of a parameter and of its optimizer state."""
    yield "parameter", float(ITEMSIZE.get(old.dtype, 4)), (old.rest, new.rest)
    if state.get(old.path):
        yield "optimizer state", state[old.path], (old.state, new.state)


def _order(plan: Plan, topology: Topology) -> Ints:
    order = device_order(plan.mesh, topology, plan.axis_order)
    assert order is not None, "plans lie on their topology"
    return order.reshape(-1)


def replan_text(change: Replan) -> str:
    """A change of machine for people."""
    old, new = change.old, change.plan
    moved = np.array(change.moved_bytes_per_device, np.int64)
    lines = [f"{new.model}: {old.topology} ({old.mesh}) -> {new.topology} ({new.mesh})",
             f"{seconds_text(old.estimate.step_seconds)} -> {seconds_text(new.estimate.step_seconds)} a step, {ratio_text(change.slowdown)} the time · "
             f"{count_text(new.estimate.tokens_per_second)} tokens/s · {bytes_text(new.estimate.device_bytes.peak)} a device", "", "What changes"]
    lines += [line for text in (*(change.changed or ("nothing is decided differently",)), *change.notes) for line in wrapped("  - ", text)]
    held = sum(part.bytes for part in change.parts)
    lines += ["", "What moves"]
    lines += wrapped("  - ", f"{bytes_text(int(moved.sum()))} in all, at most {bytes_text(int(moved.max(initial=0)))} to one device: "
                             f"{seconds_text(change.moving_seconds)} if all of it comes over the slowest links.")
    lost = change.lost_bytes
    lines += wrapped("  - ", f"{bytes_text(lost)} ({percent_text(lost / held)} of {bytes_text(held)}) are on no surviving device and must come from a checkpoint." if lost
                     else f"Every one of {bytes_text(held)} is on some surviving device: no checkpoint is needed.")
    return "\n".join([*lines, *_part_lines(change.parts)]) + "\n"


def _part_lines(parts: Sequence[Part]) -> list[str]:
    """The parts that move most, equal ones folded."""
    def pattern(path: str) -> str:
        return ".".join("*" if word.isdigit() else word for word in path.split("."))

    groups: dict[tuple[object, ...], list[Part]] = {}
    for part in parts:
        if part.received_bytes:
            groups.setdefault((pattern(part.path), part.what, part.old, part.new), []).append(part)
    if not groups:
        return []
    size: Callable[[list[Part]], int] = lambda group: sum(part.received_bytes for part in group)  # noqa: E731  (a key for two uses)
    ranked = sorted(groups.values(), key=lambda group: -size(group))
    rows = [("part", "", "received", "a device", "layout")]
    rows += [(clip(pattern(group[0].path) if len(group) > 1 else group[0].path, 30), group[0].what + (f" x{len(group)}" if len(group) > 1 else ""), bytes_text(size(group)),
              bytes_text(sum(part.most_bytes for part in group)), str(group[0].old) + (f" -> {group[0].new}" if group[0].new != group[0].old else "")) for group in ranked[:_MOST_PARTS]]
    more = len(ranked) - _MOST_PARTS
    return ["", *aligned(rows, right={2, 3}), *([f"  and {more} kinds that receive less"] if more > 0 else [])]
