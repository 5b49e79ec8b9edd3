"""What islands move at their meetings, what they keep for them, and how long they take.

Outer parameters and their momentum are float32, and sharded as optimizer state is, so that with
ZeRO an island's devices exchange a shard each. A meeting is, per device:

    crossing      over islands, of the shard: an all-reduce of the outer gradient in float32; an
                  all-to-all and an all-gather of one in a narrower dtype; permutes of parameters
                  between neighbours
    all-gather    inside of the island, where parameters rest less sharded than that
    update        of the shard: reads and writes of the device's memory

All of it is exposed: steps wait for the parameters. With a delay each device sends its shard to
those in its place on all other islands, in the time of an all-gather, beside as many steps; what
takes longer than these is exposed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardlib.axes import ISLAND, MESH_AXES, MeshShape
from shardlib.collective import Collective
from shardlib.cost.pricing.from_compiled import group_seconds
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.gossip import Gossip
from shardlib.exchanges.values import Meets, Several
from shardlib.exchanges.wires import padded, wire_bytes
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.topology import Topology
from shardlib.planning.islands.compression import Moved, kept, moved
from shardlib.planning.islands.fragments import Fragment, fragments
from shardlib.planning.plan import ParameterLayout

#: Bytes of an element of outer parameters and of their momentum.
FLOAT32 = 4
#: Bytes of device memory that an element of the update moves: its island's parameter is read and
#: written, outer parameter and momentum are read and written, the outer gradient is written before
#: it is reduced and read after it.
UPDATE_BYTES = 8 * FLOAT32
#: What crosses, in words.
OUTER = "outer gradient"
#: Programs that a device runs for what crosses beside steps.
PROGRAMS = 3
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
        beside: of each what crosses beside steps, seconds; empty where steps wait.
    """

    collectives: tuple[Collective, ...]
    kept_bytes: int
    seconds: float
    beside: tuple[float, ...] = ()

    def share(self, exchange: Several, step: float) -> float:
        """Seconds of a step that it waits for meetings, on average.

        Args:
            step: seconds of a step without them.
        """
        while_crossing = exchange.delay * step if isinstance(exchange, DiLoCo) else 0.0
        hidden = sum(min(seconds, while_crossing) for seconds in self.beside)
        return (self.seconds - hidden) / exchange.period


def meetings(
    parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Several, machine: Topology
) -> Meetings:
    """The meetings of islands that have a plan each."""
    trained = [parameter for parameter in parameters if parameter.trained]
    mesh = MeshShape(island=exchange.islands, **inner)
    each = _each(trained, inner, exchange)

    def one(kind: str, axes: tuple[str, ...], size: int, cause: str) -> Collective:
        collective = Collective(
            kind=kind, axes=axes, bytes=size, every=exchange.period, cause=cause
        )
        if _delayed(exchange) and ISLAND.name in axes:  # copies to all others at once
            kind, size = "all-gather", size * exchange.islands
            collective = replace(collective, count=exchange.islands - 1)
        seconds = group_seconds(kind, axes, mesh.ways(axes), float(size), mesh, machine)
        return replace(collective, seconds=seconds)

    listed = [one(*moved) for collectives, _ in each for moved in collectives]
    updates = sum(touched for _, touched in each) / machine.chip.hbm_bytes_per_s
    delayed = _delayed(exchange)
    launches = len(each) * (PROGRAMS if delayed else 1) * machine.chip.launch_s
    return Meetings(
        collectives=tuple(listed),
        kept_bytes=_kept(trained, inner, exchange),
        seconds=sum(collective.seconds for collective in listed) + updates + launches,
        beside=tuple(collective.seconds for collective in listed if ISLAND.name in collective.axes)
        if delayed
        else (),
    )


def _delayed(exchange: Several) -> bool:
    """Whether something crosses beside steps."""
    return isinstance(exchange, DiLoCo) and exchange.delay > 0


def _each(
    trained: list[ParameterLayout], inner: MeshShape, exchange: Several
) -> list[tuple[list[Moved], float]]:
    """What each meeting moves, and bytes of device memory that it reads and writes."""
    if isinstance(exchange, Compressed):
        elements = sum(_elements(parameter, inner) for parameter in trained)
        last = exchange.meetings - 1  # the density that stays
        return [(moved(trained, inner, exchange, last), elements * RESIDUAL_BYTES)]
    touched = UPDATE_BYTES if exchange.keeps else MEAN_BYTES
    if _delayed(exchange):
        touched += (2 + exchange.islands) * FLOAT32
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
    if isinstance(exchange, DiLoCo) and exchange.delay:
        largest = max(
            _sent(fragment, inner, exchange) for fragment in fragments_of(trained, inner, exchange)
        )
        in_flight_bytes = exchange.islands * largest
        return in_flight_bytes + (outer + FLOAT32) * sum(
            _elements(parameter, inner) for parameter in trained
        )
    return outer * sum(_elements(parameter, inner) for parameter in trained)


def _sent(fragment: Fragment, inner: MeshShape, exchange: DiLoCo) -> int:
    """Bytes that a device sends of a fragment that crosses beside steps."""
    sizes = [part.elements(part.parameter.state, inner) for part in fragment]
    return wire_bytes(exchange.wire, padded(exchange.wire, sizes, 1))


def _elements(parameter: ParameterLayout, mesh: MeshShape) -> int:
    """Elements of a parameter on one device, as its optimizer state is sharded."""
    return math.prod(parameter.state.local_shape(parameter.shape, mesh))


def fragments_of(
    parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Meets
) -> tuple[Fragment, ...]:
    """What each meeting is about."""
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
    if exchange.delay:
        return [("collective-permute", over, _sent(fragment, inner, exchange), OUTER)]
    size = wire_bytes(exchange.wire, padded(exchange.wire, sizes, exchange.islands))
    if exchange.wire == "float32":
        return [("all-reduce", over, size, OUTER)]
    return [(kind, over, size, OUTER) for kind in ("all-to-all", "all-gather")]


def _gathers(fragment: Fragment, inner: MeshShape) -> Counter[tuple[str, ...]]:
    """Bytes that are gathered inside of an island after a meeting, by axes."""
    gathers: Counter[tuple[str, ...]] = Counter()
    for part in fragment:
        parameter = part.parameter
        axes = parameter.state.axes - parameter.rest.axes
        if axes:
            over = tuple(axis for axis in MESH_AXES if axis in axes)
            gathers[over] += part.elements(parameter.rest, inner) * ITEMSIZE.get(
                parameter.dtype, FLOAT32
            )
    return gathers
