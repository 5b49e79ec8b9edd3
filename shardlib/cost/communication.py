"""The collectives of one candidate, and their exposed seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardlib.collective import Collective
from shardlib.cost.collectives import (
    ALONG,
    SLOTS,
    CollectiveStep,
    Slot,
    along,
    shards,
    slot_cost,
    spans_of,
    steps,
    stored,
)
from shardlib.cost.framework import XLA, FrameworkProfile, Knobs, ends_on_all_stages
from shardlib.cost.stages import (
    Candidates,
    Model,
    Sums,
    dealt,
    in_the_last,
    on_stage,
    once_a_step,
    passes_over_ends,
    passes_over_weights,
    scatters,
    shares_moved,
    turns,
)
from shardlib.cost.tables import Pricer, moves
from shardlib.cost.terms import OUTSIDE_LAYERS, Item, Transfer
from shardlib.layout import STAGE, MeshShape
from shardlib.machines.topology import Placement, Topology
from shardlib.propagation.colours import Choice

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One candidate with its placement.

    Attributes:
        mesh: sizes of the mesh axes.
        placement: the links of the mesh axes.
        candidate: the same for pricing; exactly one.
    """

    mesh: MeshShape
    placement: Placement
    candidate: Candidates


#: Roles of the collectives of parameters and their gradients.
_OF_PARAMETERS = ("gather", "reduce", "scatter")


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The collectives of the fullest stage in a step.

    Attributes:
        shares: share of each segment whose parameters it moves.
        turns: number of times that it computes each microbatch.
        ends: True if it is one of several stages that all compute embedding and head.
        how, candidate, profile: the decisions, the candidate and the framework profile.
    """

    shares: Array
    turns: float
    ends: bool
    how: Knobs
    candidate: Candidates
    profile: FrameworkProfile


def collectives(
    work: Sequence[tuple[Iterable[Item], Array]],
    choice: Choice,
    knobs: Knobs,
    once: Mapping[tuple[Slot, str], float],
    placed: Placed,
    model: Model,
    pricer: Pricer,
    loops: Mapping[Transfer, tuple[float, int, float]] | None = None,
) -> tuple[Collective, ...]:
    """The collectives of one candidate on the fullest stage, equal ones added up, the slowest
    first.

    Args:
        once: bytes per device that are moved once per step, by slot and cause.
        loops: for collectives replaced by collective matmuls: bytes of a message, messages per
            execution, and seconds per message (`shardlib.cost.variants`).
    """
    c, profile, stages = placed.candidate, pricer.profile, placed.mesh["stage"]
    assert len(c) == 1
    stage = _Stage(
        shares=shares_moved(knobs, model, c, profile)[:, 0],
        turns=float(turns(knobs, c, profile)[0]),
        ends=stages > 1 and ends_on_all_stages(profile),
        how=knobs,
        candidate=c,
        profile=profile,
    )
    roles, listing = _roles(knobs, stages, profile), _Found(placed, pricer.topology)
    for item, part in (
        (item, part)
        for items, parts in work
        for item in items
        if (part := float(parts[item.segment]))
    ):
        for term in item.terms(choice):
            if not isinstance(term, Transfer):
                continue
            for slot, size, count in moves(term, item.segment, c.shapes, pricer):
                if slot.role not in roles:
                    continue
                runs = float(count[0]) * part * _runs(term, slot, item.segment, stage)
                if loops and term in loops:
                    message, each, hop = loops[term]
                    key = ("collective-permute", ("tensor",), round(message), term.cause)
                    listing.add(key, each * runs, each * hop * runs)
                else:
                    of_each = float(size[0]) / _parts(slot, item.segment, stage)
                    listing.note(slot, of_each, runs, term.cause)
    for (slot, cause), size in once.items():
        listing.note(slot, size, 1.0 if size else 0.0, cause)
    return listing.listed()


def _roles(knobs: Knobs, stages: int, profile: FrameworkProfile) -> set[str]:
    """The roles of the collectives of a plan."""
    return {
        "block",
        "ends",
        *ALONG[knobs.context],
        "scatter" if scatters(profile, knobs) else "reduce",
        *(("gather",) if knobs.zero >= 3 else ()),
        *(("stage",) if stages > 1 else ()),
    }


#: Key of the collectives of a step: kind, mesh axes, bytes of each, cause.
_Key = tuple[str, tuple[str, ...], int, str]


class _Found:
    """Collectives of a step, equal ones added up.

    Args:
        at: the candidate and its placement.
        topology: the machine.
    """

    def __init__(self, placed: Placed, topology: Topology) -> None:
        self._at, self._topology = placed, topology
        self._sums: dict[_Key, tuple[float, float]] = {}

    def add(self, key: _Key, count: float, seconds: float) -> None:
        """Adds `count` collectives that take `seconds` in total."""
        number, before = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = number + count, before + seconds

    def note(self, slot: Slot, size: float, count: float, cause: str) -> None:
        """Adds the collectives of a slot, by each step that they consist of.

        Args:
            size: bytes of each.
        """
        mesh, placement = self._at.mesh, self._at.placement
        axes = tuple(axis for axis in mesh if axis in slot.group.axes)
        if not axes or not count:
            return
        staged = slot.role in ("gather", "scatter") and slot.kind != "all-reduce"
        spans = spans_of(slot.group, placement)
        parts = (
            steps(slot.kind, spans, self._topology)
            if staged
            else (
                CollectiveStep(
                    spans=spans, share=1.0, cost=slot_cost(slot, placement, self._topology)
                ),
            )
        )
        parted = shards(slot, math.prod(mesh[axis] for axis in axes))
        hops = parted if slot.role == "ring" else 1
        for part in parts:
            of_part = tuple(axis for axis in axes if set(part.spans) & set(placement.get(axis, ())))
            key = (slot.kind, of_part or axes, round(size * part.share / parted), cause)
            seconds = part.cost.seconds(size * part.share) * count
            self.add(key, count * max(1, hops - 1), seconds)

    def listed(self) -> tuple[Collective, ...]:
        """All collectives, the slowest first."""
        listing = [
            Collective(
                kind=kind,
                axes=axes,
                bytes=size,
                count=math.ceil(count - 1e-9),
                seconds=seconds,
                cause=cause,
            )
            for (kind, axes, size, cause), (count, seconds) in self._sums.items()
        ]
        return tuple(sorted(listing, key=lambda x: (-x.seconds, x.kind, x.axes, x.cause, x.bytes)))


def _runs(term: Transfer, slot: Slot, segment: int, stage: _Stage) -> float:
    """Executions per step of a collective that runs once per microbatch."""
    role, micro = slot.role, int(stage.candidate.micro[0])
    if role == "stage":
        return stage.turns * stage.how.virtual
    ends = stage.ends and segment == OUTSIDE_LAYERS
    runs = micro if ends or segment < 0 else stage.turns
    if role not in _OF_PARAMETERS:
        return runs * (float(stage.shares[segment]) if segment >= 0 else 1.0)
    # In a pipeline in one program, nothing depends on gradients of vectors.
    waits = not stage.ends or len(term.shape) > 1
    times = _times(slot, ends, stage) if waits else None
    return (runs if times is None else times) * float(stage.shares[segment])


def _times(slot: Slot, ends: bool, stage: _Stage) -> float | None:
    """The number of times that a stage gathers parameters or reduces gradients per step; None: once
    per microbatch.
    """
    knobs, c, profile = stage.how, stage.candidate, stage.profile
    if ends:
        return None if passes_over_ends(knobs, c, profile)[0] > 1 else 1.0
    if slot.role != "gather" and once_a_step(profile, knobs):
        return 1.0
    if slot.role == "reduce":
        last = in_the_last(profile, knobs) and not slot.group.of_experts
        return 1.0 if int(c.stage[0]) > 1 or last else None
    if knobs.gather == "use":
        return None
    pairs, reductions, _ = passes_over_weights(knobs, c)
    return float((pairs if slot.role == "gather" else reductions)[0])


def _parts(slot: Slot, segment: int, stage: _Stage) -> int:
    """Number of parts of an activation if all stages compute embedding and head, each for a
    part.
    """
    separate = segment == OUTSIDE_LAYERS and slot.role not in ("stage", "ends", *_OF_PARAMETERS)
    return int(stage.candidate.stage[0]) if stage.ends and separate else 1


# --------------------------------------------------------------------------------------------------
# Exposed seconds of gathers, reductions and rings.
#
# XLA for GPUs hides all of them behind all of compute. For TPUs it hides gathers of parameters that
# are stored sharded, and rings; reductions and gathers of updated parameters block (read from
# compiled schedules, `benchmarks/order_by_compiler.py`). A framework profile with overlaps of its
# own hides gathers in the forward pass (a third of compute) or, under ZeRO 3, in both passes, and
# reductions in the backward pass (two thirds), of the last microbatch if it reduces once per step.


def exposed(
    s: Sums, scale: Array, knobs: Knobs, c: Candidates, pricer: Pricer, compute: Array
) -> Array:
    """Exposed seconds per step of gathers of parameters, reductions of gradients and rings of keys
    and values.

    Args:
        scale: share of each segment whose parameters the fullest stage moves, [segments,
            candidates].
        compute: seconds of compute of a microbatch, [candidates].
    """
    profile, micro, constants = pricer.profile, c.micro, pricer.constants
    reduced, gathered = _reduced(s, scale, knobs, c, profile), np.zeros(len(c))
    if knobs.zero:
        times = passes_over_weights(knobs, c)[0]
        gathered = (
            _in_step(s.collectives.gather, scale, times, knobs, c, profile)
            if knobs.zero >= 3
            else _updated_gather(s, scale, c)
        )
    ring = s.collectives.ring.sum(0) / c.stage * micro if knobs.ring else np.zeros(len(c))
    if profile.gather_overlap is None and profile.reduce_overlap is None:
        if profile.name == XLA.name and pricer.topology.chip.vendor == "google":
            return _on_tpus(reduced, gathered, ring, constants.overlap * compute * micro, knobs)
        if in_the_last(
            profile, knobs
        ):  # without stages, during the backward pass of the last microbatch
            late = np.maximum(0.0, reduced - constants.overlap * compute) + np.maximum(
                0.0, gathered + ring - constants.overlap * compute * (micro - 1)
            )
            return np.where(
                (c.stage > 1) | (micro == 1),
                np.maximum(0.0, reduced + gathered + ring - constants.overlap * compute * micro),
                late,
            )
        return np.maximum(0.0, reduced + gathered + ring - constants.overlap * compute * micro)
    gathers, reduces = (
        constants.overlap if share is None else share
        for share in (
            profile.gather_overlap,
            profile.reduce_overlap
            if knobs.zero or profile.replicated_overlap is None
            else profile.replicated_overlap,
        )
    )
    beside = compute * micro if knobs.zero >= 3 else compute / 3
    backward = compute * (1 if once_a_step(profile, knobs) else micro) * 2 / 3
    separate = np.maximum(0.0, gathered - gathers * beside) + np.maximum(
        0.0, reduced - reduces * backward
    )
    together = (
        gathered + reduced - max(gathers, reduces) * compute * micro
    )  # two of them cannot hide at once
    return np.maximum(separate, together) + np.maximum(
        0.0, ring - constants.overlap * compute * micro
    )


def _on_tpus(reduced: Array, gathered: Array, ring: Array, behind: Array, knobs: Knobs) -> Array:
    """Exposed seconds of a program of the TPU compiler: it prefetches parameters that are stored
    sharded, and waits for all reductions and for gathers of updated parameters
    (`benchmarks/order_by_compiler.py`).
    """
    if knobs.zero >= 3:
        return reduced + np.maximum(0.0, gathered + ring - behind)
    return reduced + gathered + np.maximum(0.0, ring - behind)


def saved_by_gathering_once(
    s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates
) -> Array:
    """Seconds per step that a pipeline with ZeRO 3 saves if it gathers weights and reduces
    gradients once for all microbatches, and not at every use.
    """
    scale, compute = (
        shares_moved(knobs, model, c, pricer.profile),
        s.kernels.compute.sum(0) / c.stage,
    )
    use, once = (
        exposed(s, scale, replace(knobs, gather=gather), c, pricer, compute)
        for gather in ("use", "once")
    )
    return use - once


def _reduced(
    s: Sums, scale: Array, knobs: Knobs, c: Candidates, profile: FrameworkProfile
) -> Array:
    """Seconds of reductions of gradients: per microbatch; or once per step in a pipeline without
    ZeRO 2 and 3, or if the framework does so, except for those of experts.
    """
    seconds = s.collectives.scatter if scatters(profile, knobs) else s.collectives.reduce
    once = np.ones(len(c))
    if once_a_step(profile, knobs):
        return _in_step(seconds, scale, once, knobs, c, profile)
    if knobs.zero >= 2:
        return _in_step(seconds, scale, passes_over_weights(knobs, c)[1], knobs, c, profile)
    if in_the_last(profile, knobs):
        return _in_step(seconds, scale, once, knobs, c, profile) + np.where(
            c.stage > 1, 0.0, on_stage(s.collectives.routed, scale) * (c.micro - 1)
        )
    return _in_step(seconds, scale, np.where(c.stage > 1, 1, c.micro), knobs, c, profile)


def _in_step(
    seconds: Array,
    scale: Array,
    times: Array,
    knobs: Knobs,
    c: Candidates,
    profile: FrameworkProfile,
) -> Array:
    """Seconds per step of transfers repeated `times`; outside of the layers of a pipeline in one
    program as often as `passes_over_ends` says.
    """
    moved = seconds * scale
    total = moved.sum(0) * times
    if not ends_on_all_stages(profile):
        return total
    ends = moved[OUTSIDE_LAYERS] * (passes_over_ends(knobs, c, profile) - times)
    return total + np.where(c.stage > 1, ends, 0.0)


def dealt_out(
    s: Sums, knobs: Knobs, model: Model, c: Candidates, profile: FrameworkProfile
) -> Array:
    """Seconds per step in which layers are dealt to stages of several chunks, and their gradients
    dealt back.
    """
    candidates, slots = np.arange(len(c)), _DEALING[np.minimum(knobs.virtual % c.stage, 1)]
    total = np.zeros(len(c))
    for stored_bytes in (
        s.stored.parameters_cut + s.stored.frozen_cut
        if knobs.zero >= 3
        else s.stored.parameters + s.stored.frozen,
        s.stored.kept_cut if knobs.zero >= 2 else s.stored.kept,
    ):
        size = dealt(stored_bytes, knobs, model, c, profile)
        cost = c.links.latency[slots, candidates] + size * c.links.per_byte[slots, candidates]
        total += np.where(size > 0, cost, 0.0)
    return total


#: Indices of the slots that deal layers if their chunks divide, and if not.
_DEALING = np.array(
    [SLOTS.index(Slot("deal", along(STAGE), kind)) for kind in ("all-to-all", "all-gather")]
)


def _updated_gather(s: Sums, scale: Array, c: Candidates) -> Array:
    """Seconds of the gather of updated parameters after the optimizer (ZeRO 1, 2)."""
    experts = on_stage(s.stored.experts, scale)
    dense = on_stage(s.stored.parameters, scale) - experts
    total = np.zeros(len(c))
    for group, size in ((stored(), dense), (stored(experts=True), experts)):
        slot = SLOTS.index(Slot("gather", group, "all-gather"))
        total += np.where(size > 0, c.links.latency[slot] + size * c.links.per_byte[slot], 0.0)
    return total
