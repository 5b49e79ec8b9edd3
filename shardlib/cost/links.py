"""What do the collectives of a step cost on the links that each candidate's axes lie on?

Collective costs are linear in bytes: latency + bytes x seconds per byte (`cost/collectives.py`). So the collectives of a step are summed as counts and
bytes by *slot*, which do not depend on links, and multiplied with the links at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.cost.collectives import LinearCost, collective_cost
from shardlib.hardware.placement import Placement, Span, gather_stages, scatter_stages
from shardlib.hardware.topology import Topology

Array = np.ndarray

#: Groups of devices that collectives run over, as mesh axes. Parameters rest on fsdp, expert and context; those of experts on fsdp and context.
GROUPS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",), "context": ("context",), "expert": ("expert",), "stage": ("stage",), "data": ("data",), "data·tensor": ("data", "tensor"),
    "rest": ("fsdp", "expert", "context"), "rest of experts": ("fsdp", "context"),
    "tokens": ("data", "fsdp", "expert", "context"), "tokens of experts": ("data", "fsdp", "context"),
    "tokens·tensor": ("data", "fsdp", "expert", "context", "tensor"), "tokens of experts·tensor": ("data", "fsdp", "context", "tensor"),
}


@dataclass(frozen=True)
class Slot:
    """A kind of collective over a group, in one of the roles that pricing tells apart.

    Attributes:
        role: "block" (compute waits for it), "context" (for keys and values), "stage" (between stages), "gather" (parameters, ZeRO 3),
            "reduce" (gradients, ZeRO 0 and 1) or "scatter" (gradients, ZeRO 2 and 3).
        group: key of `GROUPS`.
        kind: kind of collective.
    """

    role: str
    group: str
    kind: str


_FOUR = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
_WHOLE = ("tokens", "tokens of experts", "tokens·tensor", "tokens of experts·tensor")
SLOTS: tuple[Slot, ...] = (
    *(Slot("block", "tensor", kind) for kind in _FOUR), *(Slot("context", "context", kind) for kind in _FOUR), Slot("block", "expert", "all-to-all"),
    Slot("block", "tokens", "all-reduce"), Slot("stage", "stage", "collective-permute"),
    *(Slot("gather", group, "all-gather") for group in ("rest", "rest of experts")),
    *(Slot("reduce", group, "all-reduce") for group in _WHOLE),
    *(Slot("scatter", group, "reduce-scatter") for group in ("rest", "rest of experts")),
    *(Slot("scatter", group, "all-reduce") for group in ("data", "data·tensor", *_WHOLE)))
INDEX: dict[Slot, int] = {slot: number for number, slot in enumerate(SLOTS)}


def role_slots(*roles: str) -> list[int]:
    """Numbers of the slots in some roles."""
    return [number for number, slot in enumerate(SLOTS) if slot.role in roles]


def spans_of(group: str, placement: Placement) -> tuple[Span, ...]:
    """Where a group of axes lies."""
    return tuple(span for axis in GROUPS[group] for span in placement.get(axis, ()))


def steps(kind: str, spans: tuple[Span, ...], topology: Topology) -> tuple[tuple[float, LinearCost], ...]:
    """The steps of a gather or scatter of parameters: (result of the step over the result of the whole, cost)."""
    groups = (scatter_stages if kind == "reduce-scatter" else gather_stages)(spans, topology)
    ways = [math.prod(span.ways for span in group) for group in groups]
    after = [math.prod(ways[i + 1:]) for i in range(len(ways))]
    shares = [float(n) if kind == "reduce-scatter" else 1.0 / n for n in after]
    return tuple((share, collective_cost(kind, group, topology)) for share, group in zip(shares, groups, strict=True))


def slot_cost(slot: Slot, placement: Placement, topology: Topology) -> LinearCost:
    """The cost of one collective of a slot."""
    spans = spans_of(slot.group, placement)
    if slot.role in ("gather", "scatter") and slot.kind != "all-reduce":
        found = steps(slot.kind, spans, topology)
        return LinearCost(sum(cost.latency_s for _, cost in found), sum(share * cost.seconds_per_byte for share, cost in found))
    return collective_cost(slot.kind, spans, topology)


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
    known: dict[tuple[int, tuple[Span, ...]], LinearCost] = {}
    for at, placement in enumerate(placements):
        spans = {group: spans_of(group, placement) for group in GROUPS}
        for number, slot in enumerate(SLOTS):
            key = number, spans[slot.group]
            if not key[1]:
                continue
            cost = known.get(key)
            if cost is None:
                cost = known[key] = slot_cost(slot, placement, topology)
            latency[number, at], per_byte[number, at] = cost.latency_s, cost.seconds_per_byte
    return Links(latency=latency, per_byte=per_byte)
