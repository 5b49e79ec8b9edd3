"""Costs of the collectives of a step on the links that each candidate's axes lie on.

Collective costs are linear in bytes: latency + bytes x seconds per byte
(`cost/machine/collectives.py`). So the collectives of a step are summed as counts and bytes by
*slot*, which do not depend on links, and multiplied with the links at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardlib.axes import (
    AXES,
    EXPERT,
    MESH_AXES,
    REPLICA_AXES,
    STAGE,
    STORED_AXES,
    TENSOR,
    TOKEN_AXES,
    Axis,
)
from shardlib.cost.machine.collectives import LinearCost, collective_cost
from shardlib.hardware.placement import Placement, Span, gather_stages, scatter_stages
from shardlib.hardware.topology import Topology

Array = np.ndarray


@dataclass(frozen=True)
class Group:
    """A process group: the devices that lie along some mesh axes.

    Attributes:
        axes: the axes, the major one first.
        of_experts: whether it is that of parameters of experts, which the expert axis shards in
            compute already.
    """

    axes: tuple[str, ...]
    of_experts: bool = False


def along(axis: Axis) -> Group:
    """The devices along one mesh axis."""
    return Group((axis.name,))


def stored(*, experts: bool = False) -> Group:
    """The devices that parameters are stored sharded over; those of experts, with `experts`."""
    return Group(_but_expert(STORED_AXES) if experts else STORED_AXES, experts)


def replicas(*, tensor: bool = False) -> Group:
    """The devices that hold equal stored shards; those along tensor too, with `tensor`."""
    return Group((*REPLICA_AXES, *((TENSOR.name,) if tensor else ())))


def tokens(*, experts: bool = False, tensor: bool = False) -> Group:
    """The devices that work on different tokens, over which gradients are partial sums; those of
    parameters of experts, with `experts`; those along tensor too, with `tensor`.
    """
    axes = _but_expert(TOKEN_AXES) if experts else TOKEN_AXES
    return Group((*axes, *((TENSOR.name,) if tensor else ())), experts)


def _but_expert(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != EXPERT.name)


@dataclass(frozen=True)
class Slot:
    """A kind of collective over a group, in one of the roles that pricing tells apart.

    Attributes:
        role: of `shardlib.axes.Axis.collectives`; "block" over the axes that split tokens, too; or
            "gather" (parameters, ZeRO 3), "reduce" (gradients, ZeRO 0 and 1) or "scatter"
            (gradients, ZeRO 2 and 3).
        group: the devices.
        kind: kind of collective.
    """

    role: str
    group: Group
    kind: str


_TOKENS = tuple(
    tokens(experts=experts, tensor=tensor) for tensor in (False, True) for experts in (False, True)
)
_STORED = (stored(), stored(experts=True))
SLOTS: tuple[Slot, ...] = (
    *(
        Slot(role, along(AXES[name]), kind)
        for name in reversed(MESH_AXES)
        for role, kinds in AXES[name].collectives.items()
        for kind in kinds
    ),
    Slot("block", tokens(), "all-reduce"),
    *(Slot("gather", group, "all-gather") for group in _STORED),
    *(Slot("reduce", group, "all-reduce") for group in _TOKENS),
    *(Slot("scatter", group, "reduce-scatter") for group in _STORED),
    *(
        Slot("scatter", group, "all-reduce")
        for group in (replicas(), replicas(tensor=True), *_TOKENS)
    ),
)
#: Groups of devices that collectives of a step run over.
GROUPS: tuple[Group, ...] = tuple(dict.fromkeys(slot.group for slot in SLOTS))
#: Roles that count along the sequence, by how keys and values meet queries
#: (`shardlib.cost.terms.knobs.Knobs`).
ALONG: dict[str, tuple[str, ...]] = {
    "none": ("context",),
    "all-gather": ("context", "keys"),
    "ring": ("context", "ring"),
    "ulysses": ("context", "exchange"),
}
INDEX: dict[Slot, int] = {slot: number for number, slot in enumerate(SLOTS)}


def role_slots(*roles: str) -> list[int]:
    """Numbers of the slots in some roles."""
    return [number for number, slot in enumerate(SLOTS) if slot.role in roles]


def spans_of(group: Group, placement: Placement) -> tuple[Span, ...]:
    """Where a group of axes lies."""
    return tuple(span for axis in group.axes for span in placement.get(axis, ()))


def steps(
    kind: str, spans: tuple[Span, ...], topology: Topology
) -> tuple[tuple[float, LinearCost], ...]:
    """The steps of a gather or scatter of parameters: (result of the step over the result of the
    whole, cost).
    """
    groups = (scatter_stages if kind == "reduce-scatter" else gather_stages)(spans, topology)
    ways = [math.prod(span.ways for span in group) for group in groups]
    after = [math.prod(ways[i + 1 :]) for i in range(len(ways))]
    shares = [float(n) if kind == "reduce-scatter" else 1.0 / n for n in after]
    return tuple(
        (share, collective_cost(kind, group, topology))
        for share, group in zip(shares, groups, strict=True)
    )


def slot_cost(slot: Slot, placement: Placement, topology: Topology) -> LinearCost:
    """The cost of one collective of a slot."""
    spans = spans_of(slot.group, placement)
    if slot.role in ("gather", "scatter") and slot.kind != "all-reduce":
        found = steps(slot.kind, spans, topology)
        return LinearCost(
            sum(cost.latency_s for _, cost in found),
            sum(share * cost.seconds_per_byte for share, cost in found),
        )
    found = collective_cost(slot.kind, spans, topology)
    if slot.role != "ring":
        return found
    ways = math.prod(span.ways for span in spans)
    return LinearCost((ways - 1) * found.latency_s, (ways - 1) / ways * found.seconds_per_byte)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Costs of every slot for some placements.

    Attributes:
        latency: seconds of one collective, array [slots, placements].
        per_byte: seconds a byte, array [slots, placements].
    """

    latency: Array
    per_byte: Array

    def take(self, which: Array) -> Links:
        """The costs of some placements, by number."""
        return Links(latency=self.latency[:, which], per_byte=self.per_byte[:, which])


def links(placements: Sequence[Placement], topology: Topology) -> Links:
    """Prices every slot on every placement; groups that lie alike are priced once."""
    latency, per_byte = (np.zeros((len(SLOTS), len(placements))) for _ in range(2))
    numbers: dict[tuple[Span, ...], int] = {(): 0}
    known: dict[tuple[Group, tuple[int, ...]], list[tuple[int, LinearCost]]] = {}
    for at, placement in enumerate(placements):
        lies = {axis: numbers.setdefault(spans, len(numbers)) for axis, spans in placement.items()}
        for group in GROUPS:
            key = group, tuple(lies.get(axis, 0) for axis in group.axes)
            if not any(key[1]):
                continue
            costs = known.get(key)
            if costs is None:
                costs = known[key] = [
                    (number, slot_cost(SLOTS[number], placement, topology))
                    for number in _OF_GROUP[group]
                ]
            for number, cost in costs:
                latency[number, at], per_byte[number, at] = cost.latency_s, cost.seconds_per_byte
    return Links(latency=latency, per_byte=per_byte)


_OF_GROUP: dict[Group, list[int]] = {
    group: [number for number, slot in enumerate(SLOTS) if slot.group == group] for group in GROUPS
}


def best_links(sizes: Mapping[str, Array], topology: Topology) -> Links:
    """Costs of every slot that no place of a mesh undercuts: the least latency and the least time
    per byte of all ways to lay a group of that size on adjacent devices.

    Devices of other groups in between share the links and only add hops, so adjacent devices are
    best.

    Args:
        sizes: size of every mesh axis by candidate.
        topology: the machine.
    """
    count = len(next(iter(sizes.values())))
    latency, per_byte = (np.zeros((len(SLOTS), count)) for _ in range(2))
    for group in GROUPS:
        ways, which = np.unique(
            np.prod([sizes[axis] for axis in group.axes], axis=0), return_inverse=True
        )
        for number in _OF_GROUP[group]:
            found = [_least(number, int(n), topology) for n in ways]
            latency[number], per_byte[number] = (
                np.array(values)[which.reshape(-1)] for values in zip(*found, strict=True)
            )
    return Links(latency=latency, per_byte=per_byte)


def least_hops(stages: Array, topology: Topology) -> tuple[Array, Array]:
    """Latency and seconds per byte of a message from stage to stage that no place undercuts, by
    numbers of stages.
    """
    number = INDEX[Slot("stage", along(STAGE), "collective-permute")]
    latency, per_byte = np.zeros((2, int(stages.max(initial=1)) + 1))
    for ways in np.flatnonzero(np.bincount(stages)):
        latency[ways], per_byte[ways] = _least(number, int(ways), topology)
    return latency[stages], per_byte[stages]


@lru_cache(maxsize=1 << 14)
def _least(number: int, ways: int, topology: Topology) -> tuple[float, float]:
    """The least latency and the least seconds per byte of a slot over a group of some size."""
    slot = SLOTS[number]
    axis = slot.group.axes[0]
    staged = (
        slot.role in ("gather", "scatter") and slot.kind != "all-reduce"
    )  # steps along the dims, in the order of the axes of the group
    laid = (
        order
        for spans in _adjacent(ways, topology)
        for order in (itertools.permutations(spans) if staged else (spans,))
    )
    costs = [slot_cost(slot, {axis: spans}, topology) for spans in laid] if ways > 1 else []
    if not costs:
        return 0.0, 0.0
    hop = min(tier.latency_s for tier in topology.tiers)
    latency = (
        hop * (ways - 1 if slot.role == "ring" else 1)
        if slot.kind == "collective-permute"
        else min(cost.latency_s for cost in costs)
    )  # a ring of every second device closes in two hops
    return latency, min(cost.seconds_per_byte for cost in costs)


@lru_cache(maxsize=1 << 12)
def _adjacent(ways: int, topology: Topology) -> tuple[tuple[Span, ...], ...]:
    """Every way to lay so many adjacent devices on the tiers."""
    found: list[tuple[Span, ...]] = []

    def extend(tier: int, left: int, inner: tuple[Span, ...]) -> None:
        if tier < 0:
            if left == 1:
                found.append(inner)
            return
        shape = topology.tiers[tier].shape
        for parts in itertools.product(
            *([n for n in range(1, min(left, size) + 1) if left % n == 0] for size in shape)
        ):
            here = math.prod(parts)
            if left % here == 0:
                extend(
                    tier - 1,
                    left // here,
                    (
                        *(Span(tier, dim, part) for dim, part in enumerate(parts) if part > 1),
                        *inner,
                    ),
                )

    extend(len(topology.tiers) - 1, ways, ())
    return tuple(found)
