"""A plan for what is left when hosts are lost, or for what is there when they are gained.

The same problem is searched again on the machine that is left: nothing is traced, and the global
batch stays as it is, by gradient accumulation or with fewer data ways, so that the training run
goes on with the same numbers. Then the two layouts are compared device by device, which says how
many bytes every device must receive, for every parameter and its optimizer state, and whether
something is on no surviving device and must come from a checkpoint.

Surviving devices keep their order: device 0 of the new machine is the first survivor of the old
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from shardlib.decisions.pins import Pins
from shardlib.errors import InfeasibleError, PinError, TopologyError
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.placement import device_order
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.layout import Layout
from shardlib.planning.answers.relocation import Part, Replan
from shardlib.planning.answers.resharding import Ints, Shards, lost_elements, moved_elements
from shardlib.planning.plan import ParameterLayout, Plan, Source, source_of
from shardlib.planning.questions.counterfactual import changes, pinned
from shardlib.planning.questions.machines import machine_like, parts_of, same_chips

#: The finding of a plan whose estimate was made again, at other rates than it was written with.
PRICED_AGAIN = "priced-again"
#: Decisions that a quick replan keeps, beside dtypes.
KEPT = (
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
#: Bytes of an outer parameter and of its momentum.
OUTER_BYTES = 8.0


def replan(
    plan: Plan, topology: TopologyLike, *, lost: Iterable[int] = (), anew: bool = False
) -> Replan:
    """The best plan for the same training run on another machine, and what must move.

    Args:
        lost: numbers of the old devices that are gone; by default the last ones.
    """
    source = source_of(plan)
    machine = machine_like(source.topology, topology)
    survivors = _survivors(source.topology, machine, lost)
    best, notes = (None, []) if anew else _kept(plan, source, machine)
    if best is None:
        best, notes = _best(source, machine)
    notes += _about(source.topology, machine, plan, best)
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
        elsewhere=not same_chips(source.topology, machine),
    )


def _survivors(old: Topology, new: Topology, lost: Iterable[int]) -> tuple[int, ...]:
    gone = set(lost)
    foreign = sorted(number for number in gone if not 0 <= number < old.devices)
    if foreign:
        raise TopologyError(
            f"the lost devices {', '.join(map(str, foreign))} are none of {old.name}, whose devices"
            f" are 0 to {old.devices - 1}"
        )
    left = [number for number in range(old.devices) if number not in gone]
    return tuple(left[: new.devices])


def _kept(plan: Plan, source: Source, machine: Topology) -> tuple[Plan | None, list[str]]:
    """The best plan that runs a step as the old one does; None where there is none."""
    own_pins = pinned(plan)
    try:
        fewer = _with_fewer(
            source,
            machine,
            source.pins.but(
                dtypes=own_pins.dtypes, allow=(), **{word: own_pins.get(word) for word in KEPT}
            ),
        )
    except (PinError, InfeasibleError):
        return None, []
    assert fewer.source is not None
    return replace(fewer, source=fewer.source.under(source.pins)), [
        f"Kept without asking: {', '.join(KEPT)}. Searching anew may find a faster plan."
    ]


def _best(source: Source, machine: Topology) -> tuple[Plan, list[str]]:
    """The best plan for the machine under the user's pins, or without a pinned mesh that it cannot
    hold.
    """
    try:
        return _with_fewer(source, machine, source.pins), []
    except PinError as error:
        if source.pins.mesh is None and not source.pins.axes:
            raise
        freed = source.pins.but(mesh=None, axes=())
        return _with_fewer(source, machine, freed), [
            f"The pinned mesh was given up: {str(error).splitlines()[0]}."
        ]


def _with_fewer(source: Source, machine: Topology, pins: Pins) -> Plan:
    """The best plan on the machine, on the largest part of it whose devices can all be used, or on
    its largest even part, whichever is fastest.

    Fifteen hosts divide few batches, and a search that must use them all may end at an odd tensor
    axis.
    """
    tries: list[Plan] = []
    errors: list[PinError | InfeasibleError] = []
    for part in parts_of(source, machine, pins):
        try:
            tries.append(source.search(part, pins))
        except (PinError, InfeasibleError) as error:
            errors.append(error)
    if not tries:
        raise errors[0]
    best = min(
        tries, key=lambda candidate: candidate.estimate.step_seconds
    )  # the first of equals: the largest part
    if best.source is not None and best.source.topology == machine:
        return best
    full = source.search(machine, pinned(best))
    assert full.source is not None
    return replace(full, search=best.search, source=full.source.under(pins))


def _about(old: Topology, new: Topology, before: Plan, after: Plan) -> list[str]:
    notes = [
        f"{finding.message[:1].upper()}{finding.message[1:]}."
        for finding in before.findings
        if finding.code == PRICED_AGAIN
    ]
    if not same_chips(old, new):
        notes.append(
            f"The chips are others: {old.chip.name} before, {new.chip.name} now. Every byte crosses"
            " between the two machines."
        )
    elif new.chip.sources != old.chip.sources:
        notes.append(
            f"The figures of {old.chip.name} are others, so that the times do not compare:"
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
            "Islands are counted as replicas of one another, as they are right after a meeting."
            " Between two, what a lost island has learned since is lost; a checkpoint goes on as"
            " any number of islands."
        )
    if after.microbatches != before.microbatches:
        notes.append(
            f"The global batch stays the same: {before.microbatches:,} microbatches of gradient"
            f" accumulation become {after.microbatches:,}."
        )
    return notes


def _moves(
    old: Plan, new: Plan, source: Source, machine: Topology, survivors: Ints
) -> tuple[tuple[Part, ...], Ints]:
    """Every part, and the bytes that each device of the new machine receives."""
    before, after = _order(old, source.topology), _order(new, machine)
    usable = (
        survivors if same_chips(source.topology, machine) else survivors[:0]
    )  # another machine: nobody holds anything there
    state = {
        parameter.path: parameter.state_bytes_per_element
        for parameter in source.load.under(old.dtypes).problem.parameters
    }
    moved = np.zeros(machine.devices, np.int64)
    parts: list[Part] = []
    counted: dict[tuple[object, ...], tuple[Ints, int]] = {}
    theirs = {parameter.path: parameter for parameter in new.parameters}
    for parameter in old.parameters:
        outer = _keeps_outer(old) and _keeps_outer(new)
        for what, size, layouts in _arrays(parameter, theirs[parameter.path], state, outer=outer):
            shards = (
                Shards(parameter.shape, layouts[0], old.mesh, before),
                Shards(parameter.shape, layouts[1], new.mesh, after),
            )
            key = (parameter.shape, *layouts)
            if key not in counted:
                counted[key] = moved_elements(*shards, usable), lost_elements(shards[0], survivors)
            elements, gone = counted[key]
            received = np.round(elements * size).astype(np.int64)
            moved[: len(received)] += received
            parts.append(
                Part(
                    path=parameter.path,
                    what=what,
                    bytes=round(float(math.prod(parameter.shape)) * size),
                    old=layouts[0],
                    new=layouts[1],
                    received_bytes=int(received.sum()),
                    most_bytes=int(received.max(initial=0)),
                    lost_bytes=round(gone * size),
                    before=shards[0],
                    after=shards[1],
                )
            )
    return tuple(parts), moved


def _arrays(
    old: ParameterLayout, new: ParameterLayout, state: Mapping[str, float], *, outer: bool
) -> Iterable[tuple[str, float, tuple[Layout, Layout]]]:
    """(what, bytes per element, layouts before and after) of a parameter, of its optimizer state,
    and of what is outer of it.
    """
    yield "parameter", float(ITEMSIZE.get(old.dtype, 4)), (old.rest, new.rest)
    if state.get(old.path):
        yield "optimizer state", state[old.path], (old.state, new.state)
    if outer and old.trained:
        yield "outer state", OUTER_BYTES, (old.state, new.state)


def _keeps_outer(plan: Plan) -> bool:
    """Whether parameters are outer, with a momentum."""
    return bool(getattr(plan.exchange, "keeps", False))


def _order(plan: Plan, topology: Topology) -> Ints:
    order = device_order(plan.mesh, topology, plan.axis_order)
    assert order is not None, "plans lie on their topology"
    return order.reshape(-1)
