"""Costs of collectives that no place of a mesh undercuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from shardlib.axes import STAGE
from shardlib.cost.machine.collective_tables import (
    ALIKE,
    GROUPS,
    INDEX,
    OF_GROUP,
    SLOTS,
    Links,
    Slot,
    along,
    slot_cost,
)
from shardlib.hardware.placement import Span
from shardlib.hardware.topology import Topology

Array = np.ndarray


def best_links(sizes: Mapping[str, Array], topology: Topology) -> Links:
    """Costs of every slot that no place of a mesh undercuts: the least latency and the least time
    per byte of all ways to lay a group of that size on adjacent devices.

    Devices of other groups in between share the links and only add hops, so adjacent devices are
    best.
    """
    count = len(next(iter(sizes.values())))
    latency, per_byte = (np.zeros((len(SLOTS), count)) for _ in range(2))
    for group in GROUPS:
        degrees, which = np.unique(
            np.prod([sizes[axis] for axis in group.axes], axis=0), return_inverse=True
        )
        for number in OF_GROUP[group]:
            costs = [_least(ALIKE[number], int(n), topology) for n in degrees]
            latency[number], per_byte[number] = (
                np.array(values)[which.reshape(-1)] for values in zip(*costs, strict=True)
            )
    return Links(latency=latency, per_byte=per_byte)


def least_hops(stages: Array, topology: Topology) -> tuple[Array, Array]:
    """Latency and seconds per byte of a message from stage to stage that no place undercuts, by
    numbers of stages.
    """
    number = INDEX[Slot("stage", along(STAGE), "collective-permute")]
    latency, per_byte = np.zeros((2, int(stages.max(initial=1)) + 1))
    for degree in np.flatnonzero(np.bincount(stages)):
        latency[degree], per_byte[degree] = _least(ALIKE[number], int(degree), topology)
    return latency[stages], per_byte[stages]


@lru_cache(maxsize=1 << 14)
def _least(number: int, degree: int, topology: Topology) -> tuple[float, float]:
    """The least latency and the least seconds per byte of a slot over a group of some size."""
    slot = SLOTS[number]
    axis = slot.group.axes[0]
    staged = (
        slot.role in ("gather", "scatter") and slot.kind != "all-reduce"
    )  # steps along the dims, in the order of the axes of the group
    placements = (
        order
        for spans in _adjacent(degree, topology)
        for order in (itertools.permutations(spans) if staged else (spans,))
    )
    costs = [slot_cost(slot, {axis: spans}, topology) for spans in placements] if degree > 1 else []
    if not costs:
        return 0.0, 0.0
    hop = min(tier.latency_s for tier in topology.tiers)
    latency = (
        hop * (degree - 1 if slot.role == "ring" else 1)
        if slot.kind == "collective-permute"
        else min(cost.latency_s for cost in costs)
    )  # a ring of every second device closes in two hops
    return latency, min(cost.seconds_per_byte for cost in costs)


@lru_cache(maxsize=1 << 12)
def _adjacent(degree: int, topology: Topology) -> tuple[tuple[Span, ...], ...]:
    """Every way to lay so many adjacent devices on the tiers."""
    placements: list[tuple[Span, ...]] = []

    def extend(tier: int, left: int, inner: tuple[Span, ...]) -> None:
        if tier < 0:
            if left == 1:
                placements.append(inner)
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

    extend(len(topology.tiers) - 1, degree, ())
    return tuple(placements)
