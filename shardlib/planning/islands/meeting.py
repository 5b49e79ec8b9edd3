"""What islands move at a meeting, what they keep for it, and how long it takes.

Outer parameters and their momentum are float32, and sharded as optimizer state is, so that with
ZeRO an island's devices reduce a shard each. A meeting is, per device:

    all-reduce    over islands, of the shard of the outer gradient
    all-gather    inside of the island, where parameters rest less sharded than that
    update        of the shard: reads and writes of the device's memory

All of it is exposed: steps wait for the parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.collective import Collective
from shardlib.cost.pricing.from_compiled import group_seconds
from shardlib.exchanges.values import DiLoCo
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.topology import Topology
from shardlib.layout import Layout
from shardlib.planning.decisions.plan_data import ParameterLayout

#: Bytes of an element of outer parameters, of their momentum, and of what crosses.
FLOAT32 = 4
#: Bytes of device memory that an element of the update moves: its island's parameter is read and
#: written, outer parameter and momentum are read and written, the outer gradient is written before
#: it is reduced and read after it.
UPDATE_BYTES = 8 * FLOAT32


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A meeting of islands.

    Attributes:
        collectives: on one device, with their seconds.
        kept_bytes: outer parameters and momentum on one device.
        seconds: of the whole meeting.
    """

    collectives: tuple[Collective, ...]
    kept_bytes: int
    seconds: float


def meeting(
    parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: DiLoCo, machine: Topology
) -> Meeting:
    """The meeting of islands that have a plan each.

    Args:
        parameters: layouts of an island's parameters.
        inner: the mesh of an island.
        exchange: how they meet.
        machine: all islands together.
    """
    trained = [one for one in parameters if one.trained]
    elements = sum(_elements(one.state, one, inner) for one in trained)
    gathers: Counter[tuple[str, ...]] = Counter()
    for one in trained:
        axes = one.state.axes - one.rest.axes
        if axes:
            over = tuple(axis for axis in MESH_AXES if axis in axes)
            gathers[over] += _elements(one.rest, one, inner) * ITEMSIZE.get(one.dtype, FLOAT32)
    mesh = MeshShape(island=exchange.islands, **inner)

    def collective(kind: str, axes: tuple[str, ...], size: int, cause: str) -> Collective:
        return Collective(
            kind=kind,
            axes=axes,
            bytes=size,
            every=exchange.every,
            seconds=group_seconds(kind, axes, mesh.ways(axes), float(size), mesh, machine),
            cause=cause,
        )

    listed = (
        collective("all-reduce", ("island",), elements * FLOAT32, "outer gradient"),
        *(
            collective("all-gather", axes, size, "outer parameters")
            for axes, size in sorted(gathers.items())
        ),
    )
    update = elements * UPDATE_BYTES / machine.chip.hbm_bytes_per_s + machine.chip.launch_s
    return Meeting(
        collectives=listed,
        kept_bytes=2 * elements * FLOAT32,
        seconds=sum(one.seconds for one in listed) + update,
    )


def _elements(layout: Layout, one: ParameterLayout, mesh: MeshShape) -> int:
    """Elements of a parameter on one device."""
    return math.prod(layout.local_shape(one.shape, mesh))
