"""The collectives that one candidate runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.axes import MeshShape
from shardlib.collective import Collective
from shardlib.cost.machine.collective_tables import ALONG, Group, Slot, slot_cost, spans_of, steps
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.gradient_reduction import in_the_last, once_a_step, scatters
from shardlib.cost.pricing.pipeline_stages import passes_over_weights
from shardlib.cost.pricing.stage_shares import shares_of
from shardlib.cost.pricing.sums import Model
from shardlib.cost.tables.pricer import Pricer, moves
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import OUTSIDE_LAYERS, Item, Transfer
from shardlib.hardware.placement import Placement
from shardlib.propagation.assignment import Choice

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One candidate with its place.

    Attributes:
        mesh: sizes of the mesh axes.
        placement: where they lie on the links.
        candidate: the same for pricing; exactly one.
    """

    mesh: MeshShape
    placement: Placement
    candidate: Candidates


def collectives(
    work: Sequence[tuple[Iterable[Item], Array]],
    choice: Choice,
    how: Knobs,
    updated: Mapping[Group, float],
    at: Placed,
    model: Model,
    pricer: Pricer,
    loops: Mapping[Transfer, tuple[float, int, float]] | None = None,
) -> tuple[Collective, ...]:
    """Lists the collectives of one candidate on the fullest stage, equal ones added up, the slowest
    first.

    Args:
        work: work items of the step graph under each remat policy that layers follow, with the part
            of each segment that does.
        choice: the chosen colours.
        how: the other decisions.
        updated: bytes of parameters on a device by process group, gathered
            after the update by ZeRO 1 and 2.
        at: the candidate, and where it lies.
        model: layers.
        pricer: the machine and the software.
        loops: of collectives in whose place loops run: bytes of a message, how many there are in
            place of one execution, and seconds of one (`cost/pricing/variants`).
    """
    mesh, placement, c = at.mesh, at.placement, at.candidate
    assert len(c) == 1
    found: dict[tuple[str, tuple[str, ...], int, str], tuple[float, float]] = {}
    profile, topology = pricer.profile, pricer.topology
    shares = shares_of(how, model, c, profile)[:, 0]
    roles = {
        "block",
        *ALONG[how.context],
        "scatter" if scatters(profile, how) else "reduce",
        *(("gather",) if how.zero >= 3 else ()),
        *(("stage",) if mesh["stage"] > 1 else ()),
    }

    def note(slot: Slot, size: float, count: float, cause: str) -> None:
        axes = tuple(axis for axis in mesh if axis in slot.group.axes)
        if not axes or not count:
            return
        staged = slot.role in ("gather", "scatter") and slot.kind != "all-reduce"
        parts = (
            steps(slot.kind, spans_of(slot.group, placement), topology)
            if staged
            else ((1.0, slot_cost(slot, placement, topology)),)
        )
        hops = math.prod(mesh[axis] for axis in axes) if slot.role == "ring" else 1
        for share, cost in parts:
            key = (slot.kind, axes, round(size * share / hops), cause)
            number, before = found.get(key, (0.0, 0.0))
            found[key] = (
                number + count * max(1, hops - 1),
                before + cost.seconds(size * share) * count,
            )

    for item, part in (
        (item, part)
        for items, parts in work
        for item in items
        if (part := float(parts[item.segment]))
    ):
        for term in item.terms(choice):
            if isinstance(term, Transfer):
                for slot, size, count in moves(term, c.shapes, pricer):
                    runs = (
                        float(count[0]) * part * _runs(slot, item.segment, shares, how, c, profile)
                    )
                    if slot.role in roles and loops and term in loops:
                        message, each, hop = loops[term]
                        key = ("collective-permute", ("tensor",), round(message), term.cause)
                        number, before = found.get(key, (0.0, 0.0))
                        found[key] = number + each * runs, before + each * hop * runs
                    elif slot.role in roles:
                        note(slot, float(size[0]), runs, term.cause)
    if how.zero in (1, 2):
        for group, size in updated.items():
            note(
                Slot("gather", group, "all-gather"),
                size,
                1.0 if size else 0.0,
                "updated parameters",
            )
    listed = [
        Collective(
            kind=kind,
            axes=axes,
            bytes=size,
            count=math.ceil(count - 1e-9),
            seconds=seconds,
            cause=cause,
        )
        for (kind, axes, size, cause), (count, seconds) in found.items()
    ]
    return tuple(sorted(listed, key=lambda x: (-x.seconds, x.kind, x.axes, x.cause, x.bytes)))


def _runs(
    slot: Slot, segment: int, shares: Array, how: Knobs, c: Candidates, profile: FrameworkProfile
) -> float:
    """Executions in a step of what happens once in a microbatch."""
    micro, stages = int(c.micro[0]), int(c.stage[0])
    if slot.role == "stage":
        return micro * how.virtual
    once = slot.role in ("reduce", "scatter") and (
        once_a_step(profile, how)
        or (
            slot.role == "reduce"
            and (stages > 1 or (in_the_last(profile, how) and not slot.group.of_experts))
        )
    )
    pairs, reductions, _ = passes_over_weights(
        how.schedule, how.gather, how.virtual, c.micro, how.accumulation
    )
    times = (
        1
        if once
        else (
            float(pairs[0])
            if slot.role == "gather"
            else float(reductions[0])
            if slot.role == "scatter"
            else micro
        )
    )
    return times * (
        float(shares[segment])
        if segment >= 0
        or (segment == OUTSIDE_LAYERS and slot.role in ("gather", "reduce", "scatter"))
        else 1.0
    )
