"""Costs of the collectives of a step on the links that each candidate's axes lie on.

Collective costs are linear in bytes: latency + bytes x seconds per byte
(`cost/machine/collectives.py`). So the collectives of a step are summed as counts and bytes by
*slot*, which do not depend on links, and multiplied with the links at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
from shardlib.cost.machine.collective_steps import steps
from shardlib.cost.machine.collectives import LinearCost, collective_cost
from shardlib.cost.terms.local_sizes import distinct_rows
from shardlib.hardware.placement import Placement, Span
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


def on_all_stages(group: Group) -> Group:
    """The devices of a group, of all stages: embedding and head of a pipeline in one program are
    computed by all of them.
    """
    return Group((STAGE.name, *group.axes), group.of_experts)


def _but_expert(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != EXPERT.name)


@dataclass(frozen=True)
class Slot:
    """A kind of collective over a group, in one of the roles that pricing tells apart.

    Attributes:
        role: of `shardlib.axes.Axis.collectives`; "block" over the axes that split tokens, and
            "ends" over those and the stages, too; or
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
_OF_ENDS = tuple(on_all_stages(tokens(tensor=tensor)) for tensor in (False, True))
_REPLICAS_OF_ENDS = tuple(on_all_stages(replicas(tensor=tensor)) for tensor in (False, True))
SLOTS: tuple[Slot, ...] = (
    *(
        Slot(role, along(AXES[name]), kind)
        for name in reversed(MESH_AXES)
        for role, kinds in AXES[name].collectives.items()
        for kind in kinds
    ),
    Slot("block", tokens(), "all-reduce"),
    Slot("ends", on_all_stages(tokens()), "all-reduce"),
    *(Slot("gather", group, "all-gather") for group in _STORED),
    *(Slot("reduce", group, "all-reduce") for group in (*_TOKENS, *_OF_ENDS)),
    *(Slot("scatter", group, "reduce-scatter") for group in _STORED),
    *(
        Slot("scatter", group, "all-reduce")
        for group in (replicas(), replicas(tensor=True), *_TOKENS, *_REPLICAS_OF_ENDS, *_OF_ENDS)
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


def shards(slot: Slot, degree: int) -> int:
    """Results of a collective of a slot in what a device has of the array, for a group of so many
    devices: of a ring as many as messages; of what leaves the stages, which no measure divides by
    their number, a shard for each.
    """
    scattered = slot.role == "ends" and slot.kind == "reduce-scatter"
    return degree if scattered or slot.role == "ring" else 1


def slot_cost(slot: Slot, placement: Placement, topology: Topology) -> LinearCost:
    """The cost of one collective of a slot."""
    spans = spans_of(slot.group, placement)
    if _stepwise(slot):
        cost = steps(slot.kind, spans, topology)
        return LinearCost(
            sum(step.cost.latency_s for step in cost),
            sum(step.share * step.cost.seconds_per_byte for step in cost),
        )
    cost = collective_cost(slot.kind, spans, topology)
    degree = shards(slot, math.prod(span.ways for span in spans))
    if slot.role != "ring":
        return LinearCost(cost.latency_s, cost.seconds_per_byte / degree)
    return LinearCost((degree - 1) * cost.latency_s, (degree - 1) / degree * cost.seconds_per_byte)


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
    numbers, costs_by_way = _known_costs(topology)
    lies: dict[str, NDArray[np.int64]] = {
        axis: np.array([numbers.setdefault(p.get(axis, ()), len(numbers)) for p in placements])
        for axis in MESH_AXES
    }
    spans, torus = _by_dim(numbers, topology), any(tier.kind == "torus" for tier in topology.tiers)
    for group in GROUPS:
        axes = [lies[axis] for axis in group.axes]
        # groups that lie alike cost the same, whatever their axes are
        joined = [
            column for degrees, strides in spans for column in _joined(degrees, strides, axes)
        ]
        for slots in _apart(OF_GROUP[group]) if torus else (OF_GROUP[group],):
            stepwise = torus and _stepwise(SLOTS[slots[0]])
            alike = axes if stepwise else joined
            first, which = distinct_rows(alike)
            rows = np.stack(alike)[:, first].T.tolist()
            keys = [(stepwise, *(filter(None, row) if stepwise else row)) for row in rows]
            for slot in slots:
                costs = np.zeros((2, len(first)))
                for position, lie in enumerate(keys):
                    key = _way(SLOTS[slot]), lie
                    if key not in costs_by_way:
                        costs_by_way[key] = slot_cost(
                            SLOTS[slot], placements[int(first[position])], topology
                        )
                    costs[:, position] = (
                        costs_by_way[key].latency_s,
                        costs_by_way[key].seconds_per_byte,
                    )
                latency[slot], per_byte[slot] = costs[:, which]
    return Links(latency=latency, per_byte=per_byte)


def _by_dim(numbers: Mapping[tuple[Span, ...], int], topology: Topology) -> Array:
    """Ways and strides of what an axis takes of each dim of each tier, by the number of where it
    lies: array [dims, 2, numbers]. Distances count on a torus alone; elsewhere strides are 0.
    """
    dims = [(i, dim) for i, tier in enumerate(topology.tiers) for dim in range(len(tier.shape))]
    table = np.ones((len(dims), 2, len(numbers)), dtype=np.int64)
    for spans, number in numbers.items():
        for span in spans:
            torus = topology.tiers[span.tier].kind == "torus"
            table[dims.index((span.tier, span.dim)), :, number] = span.ways, span.stride * torus
    return table


def _joined(degrees: Array, strides: Array, axes: Sequence[Array]) -> tuple[Array, Array, Array]:
    """What the cost of a collective that is not done in steps depends on in a dim, by placement:
    the ways of its group, and those and the stride of the outermost of its lines, to which parts
    join that touch.
    """
    spans, starts = np.stack([[degrees[lie], strides[lie]] for lie in axes], axis=1)
    order = np.argsort(starts, axis=0, kind="stable")
    lines = np.ones((2, spans.shape[1]), dtype=np.int64)  # the ways of the outermost, its stride
    for axis in order[:, None]:
        more, start = (np.take_along_axis(values, axis, axis=0)[0] for values in (spans, starts))
        separate = (more > 1) & (start != lines[0] * lines[1])
        lines[1, separate] = start[separate]
        lines[0] = np.where(separate, more, lines[0] * more)
    return spans.prod(0), lines[0], lines[1]


def _stepwise(slot: Slot) -> bool:
    """Whether a collective is done in steps along the dims of a torus, in the order of its axes."""
    return slot.role in ("gather", "scatter") and slot.kind != "all-reduce"


def _apart(slots: Sequence[int]) -> tuple[list[int], ...]:
    """Numbers of slots that are done in steps, and of others."""
    parts = ([slot for slot in slots if _stepwise(SLOTS[slot]) == flag] for flag in (True, False))
    return tuple(part for part in parts if part)


def _way(slot: Slot) -> tuple[str, str]:
    """All of a slot that its cost depends on, beside where its group lies."""
    return slot.kind, "steps" if _stepwise(slot) else slot.role if slot.role in (
        "ring",
        "ends",
    ) else ""


#: The first slot that costs what each slot costs, where their groups lie alike.
ALIKE: tuple[int, ...] = tuple(
    next(first for first, earlier in enumerate(SLOTS) if _way(earlier) == _way(slot))
    for slot in SLOTS
)


@lru_cache(maxsize=16)
def _known_costs(
    topology: Topology,
) -> tuple[
    dict[tuple[Span, ...], int],
    dict[tuple[tuple[str, str], tuple[int, ...]], LinearCost],
]:
    """Numbers of where axes lie, and costs of ways to move data over groups of axes by those, or
    by what they take of each dim: filled as they are asked for, and kept for the next search on
    the same links.
    """
    return {(): 0}, {}


#: Numbers of the slots of every group.
OF_GROUP: dict[Group, list[int]] = {
    group: [number for number, slot in enumerate(SLOTS) if slot.group == group] for group in GROUPS
}
