"""Times of the collectives of a compiled program, by the cost model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from shardlib.axes import MeshShape
from shardlib.collective import Collective
from shardlib.cost.pricing.from_compiled import group_seconds
from shardlib.hardware.topology import Topology
from shardlib.verification.hlo.found import Traffic


def timed(
    traffic: Traffic, mesh: MeshShape, topology: Topology, order: tuple[str, ...] = ()
) -> tuple[Collective, ...]:
    """The collectives of a program, alike ones counted together as in `Traffic.collectives`, with
    the seconds of all their executions.

    Args:
        order: of the mesh axes on these links; by default the usual one.
    """
    seconds: defaultdict[Collective, float] = defaultdict(float)
    for item in traffic.found:
        key = Collective(
            kind=item.kind, axes=item.axes, bytes=item.bytes, count=0, cause=item.op_name
        )
        seconds[key] += item.count * group_seconds(  # pyright: ignore[reportArgumentType]
            item.kind, item.axes, item.members, float(item.bytes), mesh, topology, order
        )
    return tuple(
        replace(collective, seconds=seconds[replace(collective, count=0)])
        for collective in traffic.collectives
    )
