"""What islands move at their meetings, what they keep for them, and how long they take.

Outer parameters and their momentum are float32, and sharded as optimizer state is, so that with
ZeRO an island's devices exchange a shard each. A meeting is, per device:

    crossing      over islands, of the shard: an all-reduce of the outer gradient in float32; an
                  all-to-all and an all-gather of one in a narrower dtype; permutes of parameters
                  between neighbours
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
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.gossip import Gossip
from shardlib.exchanges.values import Meets, Several
from shardlib.exchanges.wires import padded, wire_bytes
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.topology import Topology
from shardlib.planning.decisions.plan_data import ParameterLayout
from shardlib.planning.islands.compression import Moved, kept, moved
from shardlib.planning.islands.fragments import Fragment, fragments

#: Bytes of an element of outer parameters and of their momentum.
FLOAT32 = 4
#: Bytes of device memory that an element of the update moves: its island's parameter is read and
#: written, outer parameter and momentum are read and written, the outer gradient is written before
#: it is reduced and read after it.
UPDATE_BYTES = 8 * FLOAT32
#: The same without anything outer: parameters are read and written, and what is heard as well.
MEAN_BYTES = 4 * FLOAT32
#: The same of compressed gradients: gradient, residual and what is sent are read and written.
RESIDUAL_BYTES = 6 * FLOAT32


@dataclass(frozen=True, kw_only=True)
class Meetings:
    """All meetings that differ, each once.

    Attributes:
        collectives: on one device, with their seconds.
        kept_bytes: outer parameters and momentum on one device.
        seconds: of all of them.
    """

    collectives: tuple[Collective, ...]
    kept_bytes: int
    seconds: float


def meetings(
    parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Several, machine: Topology
) -> Meetings:
    """The meetings of islands that have a plan each.

    Args:
        parameters: layouts of an island's parameters.
        inner: the mesh of an island.
        exchange: how they meet.
        machine: all islands together.

    Raises:
        PinError: there are more fragments than parts of the model.
    """
    trained = [one for one in parameters if one.trained]
    mesh = MeshShape(island=exchange.islands, **inner)
    each = _each(trained, inner, exchange)
    listed = [
        Collective(
            kind=kind,
            axes=axes,
            bytes=size,
            every=exchange.period,
            seconds=group_seconds(kind, axes, mesh.ways(axes), float(size), mesh, machine),
            cause=cause,
        )
        for moved, _ in each
        for kind, axes, size, cause in moved
    ]
    updates = sum(touched for _, touched in each) / machine.chip.hbm_bytes_per_s
    return Meetings(
        collectives=tuple(listed),
        kept_bytes=_kept(trained, inner, exchange),
        seconds=sum(one.seconds for one in listed) + updates + len(each) * machine.chip.launch_s,
    )


def _each(
    trained: list[ParameterLayout], inner: MeshShape, exchange: Several
) -> list[tuple[list[Moved], float]]:
    """What each meeting moves, and bytes of device memory that it reads and writes."""
    if isinstance(exchange, Compressed):
        elements = sum(_elements(one, inner) for one in trained)
        last = exchange.meetings - 1  # the density that stays
        return [(moved(trained, inner, exchange, last), elements * RESIDUAL_BYTES)]
    touched = UPDATE_BYTES if exchange.keeps else MEAN_BYTES
    why = "outer parameters" if exchange.keeps else "parameters"
    return [
        (
            [
                *_crossing(fragment, inner, exchange),
                *(
                    ("all-gather", axes, size, why)
                    for axes, size in sorted(_gathers(fragment, inner).items())
                ),
            ],
            sum(part.elements(part.parameter.state, inner) for part in fragment) * touched,
        )
        for fragment in fragments_of(trained, inner, exchange)
    ]


def _kept(trained: list[ParameterLayout], inner: MeshShape, exchange: Several) -> int:
    if isinstance(exchange, Compressed):
        return kept(trained, inner, exchange)
    outer = 2 * FLOAT32 if exchange.keeps else 0
    return outer * sum(_elements(one, inner) for one in trained)


def _elements(one: ParameterLayout, mesh: MeshShape) -> int:
    """Elements of a parameter on one device, as its optimizer state is sharded."""
    return math.prod(one.state.local_shape(one.shape, mesh))


def fragments_of(
    parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Meets
) -> tuple[Fragment, ...]:
    """What each meeting is about.

    Args:
        parameters: layouts of an island's parameters.
        inner: the mesh of an island.
        exchange: how they meet.

    Raises:
        PinError: there are more fragments than parts of the model.
    """
    if isinstance(exchange, Gossip):
        return fragments(parameters, inner, 1) * exchange.meetings
    return fragments(parameters, inner, exchange.fragments)


def _crossing(fragment: Fragment, inner: MeshShape, exchange: Meets) -> list[Moved]:
    """What crosses between islands at a meeting."""
    over = ("island",)
    if isinstance(exchange, Gossip):
        size = sum(part.elements(part.parameter.state, inner) for part in fragment) * FLOAT32
        return [("collective-permute", over, size, "parameters of neighbours")] * exchange.heard
    sizes = [part.elements(part.parameter.state, inner) for part in fragment]
    size = wire_bytes(exchange.wire, padded(exchange.wire, sizes, exchange.islands))
    if exchange.wire == "float32":
        return [("all-reduce", over, size, "outer gradient")]
    return [(kind, over, size, "outer gradient") for kind in ("all-to-all", "all-gather")]


def _gathers(fragment: Fragment, inner: MeshShape) -> Counter[tuple[str, ...]]:
    """Bytes that are gathered inside of an island after a meeting, by axes."""
    gathers: Counter[tuple[str, ...]] = Counter()
    for part in fragment:
        one = part.parameter
        axes = one.state.axes - one.rest.axes
        if axes:
            over = tuple(axis for axis in MESH_AXES if axis in axes)
            gathers[over] += part.elements(one.rest, inner) * ITEMSIZE.get(one.dtype, FLOAT32)
    return gathers
