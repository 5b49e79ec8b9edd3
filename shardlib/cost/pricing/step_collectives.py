"""The collectives that one candidate runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.axes import MeshShape
from shardlib.collective import Collective
from shardlib.cost.machine.collective_steps import CollectiveStep, steps
from shardlib.cost.machine.collective_tables import (
    ALONG,
    Slot,
    shards,
    slot_cost,
    spans_of,
)
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.gradient_reduction import in_the_last, once_a_step, scatters
from shardlib.cost.pricing.pipeline_stages import passes_over_ends, passes_over_weights, turns
from shardlib.cost.pricing.stage_shares import shares_moved
from shardlib.cost.pricing.sums import Model
from shardlib.cost.tables.pricer import Pricer, moves
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import ends_on_all_stages
from shardlib.cost.terms.knobs import Knobs
from shardlib.cost.terms.terms import OUTSIDE_LAYERS, Item, Transfer
from shardlib.hardware.placement import Placement
from shardlib.hardware.topology import Topology
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


#: Roles of what moves parameters and their gradients.
_OF_PARAMETERS = ("gather", "reduce", "scatter")


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What the fullest stage does in a step.

    Attributes:
        shares: part of each segment whose parameters it moves.
        turns: how often it does its part for a microbatch.
        ends: whether it is one of several that all compute embedding and head.
        how, candidate, profile: the decisions, the candidate and the software.
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
    """Lists the collectives of one candidate on the fullest stage, equal ones added up, the slowest
    first.

    Args:
        once: bytes on a device of what moves once a step, by slot and cause.
        loops: of collectives in whose place loops run: bytes of a message, how many there are in
            place of one execution, and seconds of one (`cost/pricing/variants`).
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
    """The roles whose collectives a plan has."""
    return {
        "block",
        "ends",
        *ALONG[knobs.context],
        "scatter" if scatters(profile, knobs) else "reduce",
        *(("gather",) if knobs.zero >= 3 else ()),
        *(("stage",) if stages > 1 else ()),
    }


#: What tells collectives of a step apart: kind, mesh axes, bytes of each, cause.
_Key = tuple[str, tuple[str, ...], int, str]


class _Found:
    """Collectives of a step, equal ones added up.

    Args:
        at: the candidate, and where it lies.
        topology: the machine.
    """

    def __init__(self, placed: Placed, topology: Topology) -> None:
        self._at, self._topology = placed, topology
        self._sums: dict[_Key, tuple[float, float]] = {}

    def add(self, key: _Key, count: float, seconds: float) -> None:
        """Takes in so many collectives that take so many seconds together."""
        number, before = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = number + count, before + seconds

    def note(self, slot: Slot, size: float, count: float, cause: str) -> None:
        """Takes in the collectives of a slot, by each step that they are made of.

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
        """All of them, the slowest first."""
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
    """Executions in a step of what happens once in a microbatch."""
    role, micro = slot.role, int(stage.candidate.micro[0])
    if role == "stage":
        return stage.turns * stage.how.virtual
    ends = stage.ends and segment == OUTSIDE_LAYERS
    runs = micro if ends or segment < 0 else stage.turns
    if role not in _OF_PARAMETERS:
        return runs * (float(stage.shares[segment]) if segment >= 0 else 1.0)
    # In a pipeline in one program, gradients of vectors wait for nothing.
    waits = not stage.ends or len(term.shape) > 1
    times = _times(slot, ends, stage) if waits else None
    return (runs if times is None else times) * float(stage.shares[segment])


def _times(slot: Slot, ends: bool, stage: _Stage) -> float | None:
    """How often a stage gathers parameters or reduces gradients in a step; None: in every
    microbatch.
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
    pairs, reductions, _ = passes_over_weights(
        knobs.schedule, knobs.gather, knobs.virtual, c.micro, knobs.accumulation
    )
    return float((pairs if slot.role == "gather" else reductions)[0])


def _parts(slot: Slot, segment: int, stage: _Stage) -> int:
    """Parts of an activation that stages share out where all compute embedding and head."""
    separate = segment == OUTSIDE_LAYERS and slot.role not in ("stage", "ends", *_OF_PARAMETERS)
    return int(stage.candidate.stage[0]) if stage.ends and separate else 1
