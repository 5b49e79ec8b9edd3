"""Plans for several islands: one island is planned as any machine is, and the exchange between them
is added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from shardlib.cost.pricing import Estimate, collective_seconds
from shardlib.cost.roofline import fitting_bytes, margin
from shardlib.errors import (
    HINT,
    PAGES,
    BatchError,
    InfeasibleError,
    PinError,
    PlanError,
    TopologyError,
    raise_all,
)
from shardlib.exchanges import EXACT
from shardlib.findings import Finding, diagnostic
from shardlib.graph import ITEMSIZE, Parameter, Problem
from shardlib.islands.exchanges import (
    Compressed,
    DiLoCo,
    Exact,
    Gossip,
    Meets,
    PowerSGD,
    Quantised,
    Several,
    Sign,
    TopK,
    padded,
    wire_bytes,
)
from shardlib.layout import ISLAND, MESH_AXES, Collective, Layout, MeshShape
from shardlib.machines.topology import Topology, island_of, place, topology, used_shapes
from shardlib.planner.plan import Link, ParameterLayout, Plan, Ranked
from shardlib.report.elements import bytes_text, percent_text, seconds_text

# --------------------------------------------------------------------------------------------------
# Bytes of compressed gradients.

FLOAT32 = 4
#: (kind, mesh axes, bytes, what for) of a collective.
Moved = tuple[str, tuple[str, ...], int, str]
#: Passes that orthonormalise P, each with the products of its columns.
PASSES = 2


def split(shape: tuple[int, ...], stacked: bool) -> int:
    """Returns the position that separates the row dims of a matrix from its column dims: where rows
    and columns together are fewest.

    >>> split((3, 3, 64, 128), stacked=False), split((12, 12, 64, 768), stacked=True)
    (3, 3)

    Args:
        shape: of the whole.
        stacked: whether the first dim is one of layers.
    """
    places = range(int(stacked) + 1, len(shape))
    return min(
        places,
        key=lambda position: (
            math.prod(shape[int(stacked) : position]) + math.prod(shape[position:])
        ),
        default=len(shape),
    )


def low_rank(shape: tuple[int, ...], stacked: bool, rank: int) -> bool:
    """Returns whether a gradient is smaller as a matrix of some rank."""
    row_dims = split(shape, stacked)
    rows, columns = math.prod(shape[int(stacked) : row_dims]), math.prod(shape[row_dims:])
    return row_dims < len(shape) and rank * (rows + columns) < rows * columns


def stacked(parameter: ParameterLayout) -> bool:
    """Returns whether the first dim of a parameter is one of layers: it has no colour, and others
    follow.
    """
    return len(parameter.shape) > 1 and parameter.colours[0] is None


def moved(
    parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Compressed, stage: int
) -> list[Moved]:
    """Lists the arrays that a device sends in an exchange."""
    trained, by, over = list(parameters), exchange.by, ("island",)
    sizes = [
        math.prod(parameter.state.local_shape(parameter.shape, inner)) for parameter in trained
    ]
    islands = exchange.islands
    if isinstance(by, PowerSGD):
        return list(_low_rank(trained, inner, by.rank))
    if isinstance(by, TopK):
        sent = sum(by.sent(size, stage) for size in sizes)
        return [("all-gather", over, islands * sent * 2 * FLOAT32, "largest numbers and places")]
    if isinstance(by, Quantised):
        size = wire_bytes(by.dtype, padded(by.dtype, sizes, islands, by.block), by.block)
        return [("all-to-all", over, size, "gradients"), ("all-gather", over, size, "gradients")]
    assert isinstance(by, Sign)
    scales: Counter[tuple[str, ...]] = Counter()
    for parameter in trained:
        scales[_over(parameter.state.axes)] += FLOAT32
    inside = [("all-reduce", axes, size, "scales") for axes, size in scales.items() if axes]
    size = islands * (sum(-(-size // 8) for size in sizes) + FLOAT32 * len(sizes))
    return [("all-gather", over, size, "signs"), *inside]


def _low_rank(trained: Iterable[ParameterLayout], inner: MeshShape, rank: int) -> Iterator[Moved]:
    sizes: Counter[tuple[tuple[str, ...], str]] = Counter()
    for parameter in trained:
        local = parameter.state.local_shape(parameter.shape, inner)
        first = int(stacked(parameter))
        if not low_rank(parameter.shape, bool(first), rank):
            sizes[("island",), "gradients"] += math.prod(local) * FLOAT32
            continue
        layers = math.prod(local[:first])
        row_dims = split(parameter.shape, bool(first))
        rows, columns = math.prod(local[first:row_dims]), math.prod(local[row_dims:])
        factors = layers * rank * FLOAT32
        sizes[("island",), "factors of gradients"] += factors * (rows + columns)
        along = _over(axis for dim in parameter.state[row_dims:] for axis in dim)
        across = _over(axis for dim in parameter.state[first:row_dims] for axis in dim)
        sizes[along, "factors of gradients"] += factors * rows
        sizes[across, "factors of gradients"] += factors * (columns + PASSES * rank + 1)
    for (axes, cause), size in sizes.items():
        if axes:
            yield "all-reduce", axes, size, cause


def _over(axes: Iterable[str]) -> tuple[str, ...]:
    names = set(axes)
    return tuple(axis for axis in MESH_AXES if axis in names)


def kept(parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Compressed) -> int:
    """Bytes that a device keeps from step to step, and holds between the halves of a step: the
    residual (two of them under `TopK`), Q of every matrix, and the mean of the gradients.
    """
    by, size = exchange.by, 0
    for parameter in parameters:
        local = parameter.state.local_shape(parameter.shape, inner)
        size += math.prod(local) * FLOAT32 * (3 if isinstance(by, TopK) else 2)
        first = int(stacked(parameter))
        if isinstance(by, PowerSGD) and low_rank(parameter.shape, bool(first), by.rank):
            row_dims = split(parameter.shape, bool(first))
            size += math.prod((*local[:first], *local[row_dims:], by.rank)) * FLOAT32
    return size


# --------------------------------------------------------------------------------------------------
# Fragments: parameters that are exchanged together.
#
# A stack of layers takes part in every fragment, each of which has every so many of its layers;
# other parameters are in one fragment, so that all are about as large. How a device holds a
# parameter says which rows those are: each device takes every so many of its own.


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one parameter that a meeting exchanges.

    Attributes:
        parameter: its layout.
        rows: of the first dim on a device, (first, step between them); None for all.
    """

    parameter: ParameterLayout
    rows: tuple[int, int] | None = None

    def elements(self, layout: Layout, mesh: MeshShape) -> int:
        """Elements on one device."""
        shape = layout.local_shape(self.parameter.shape, mesh)
        if self.rows is None:
            return math.prod(shape)
        return len(range(self.rows[0], shape[0], self.rows[1])) * math.prod(shape[1:])


Fragment = tuple[Part, ...]


def fragments(
    parameters: Iterable[ParameterLayout], mesh: MeshShape, count: int
) -> tuple[Fragment, ...]:
    """The parts of each fragment, in the order of the parameters."""
    trained = [parameter for parameter in parameters if parameter.trained]
    listed: list[dict[str, Part]] = [{} for _ in range(count)]
    sizes, undivided = [0] * count, list[ParameterLayout]()
    for parameter in trained:
        if count == 1 or not _stacked(parameter, mesh, count):
            undivided.append(parameter)
            continue
        for number, fragment in enumerate(listed):
            fragment[parameter.path] = part = Part(parameter=parameter, rows=(number, count))
            sizes[number] += part.elements(parameter.state, mesh)
    parts = [Part(parameter=parameter) for parameter in undivided]
    for part in sorted(parts, key=lambda part: -part.elements(part.parameter.state, mesh)):
        smallest = sizes.index(min(sizes))
        listed[smallest][part.parameter.path] = part
        sizes[smallest] += part.elements(part.parameter.state, mesh)
    empty = sum(not fragment for fragment in listed)
    if empty:
        raise PinError(
            f"fragments={count}, and what is trained has {count - empty} parts: layers of a stack,"
            f" and other parameters\nTry: fragments={count - empty} at most"
        )
    return tuple(
        tuple(fragment[parameter.path] for parameter in trained if parameter.path in fragment)
        for fragment in listed
    )


def _stacked(parameter: ParameterLayout, mesh: MeshShape, count: int) -> bool:
    """Returns whether a parameter is a stack whose rows can be told apart: its first dim has no
    colour, is sharded alike as it rests and as optimizer state, and has on every device a row for
    each fragment.
    """
    if (
        not parameter.shape
        or parameter.colours[0] is not None
        or parameter.rest[0] != parameter.state[0]
    ):
        return False
    return parameter.state.local_shape(parameter.shape, mesh)[0] >= count


# --------------------------------------------------------------------------------------------------
# Meetings: their traffic, their memory, and their time.
#
# Outer parameters and their momentum are float32, and sharded as optimizer state is, so that with
# ZeRO an island's devices exchange a shard each. A meeting is, per device:
#
#     crossing      over islands, of the shard: an all-reduce of the outer gradient in float32; an
#                   all-to-all and an all-gather of one in a narrower dtype; permutes of parameters
#                   between neighbours
#     all-gather    inside of the island, where parameters rest less sharded than that
#     update        of the shard: reads and writes of the device's memory
#
# All of it is exposed: steps wait for the parameters. With a delay each device sends its shard to
# those in its place on all other islands, in the time of an all-gather, beside as many steps; what
# takes longer than these is exposed.

#: Bytes of an element of outer parameters and of their momentum.
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
        """Seconds that a step, which takes `step` without them, waits for meetings on average."""
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
        seconds = collective_seconds(kind, axes, mesh.ways(axes), float(size), mesh, machine)
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
    """Returns whether something crosses beside steps."""
    return isinstance(exchange, DiLoCo) and exchange.delay > 0


def _each(
    trained: list[ParameterLayout], inner: MeshShape, exchange: Several
) -> list[tuple[list[Moved], float]]:
    """Returns the arrays that each meeting moves, and the bytes of device memory that it reads and
    writes.
    """
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
    """Returns the fragment of each meeting."""
    if isinstance(exchange, Gossip):
        return fragments(parameters, inner, 1) * exchange.meetings
    return fragments(parameters, inner, exchange.fragments)


def _crossing(fragment: Fragment, inner: MeshShape, exchange: Meets) -> list[Moved]:
    """Lists the arrays that cross between islands at a meeting."""
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


# --------------------------------------------------------------------------------------------------
# Findings: islands in place of a plan that waits for the network.
#
# An exact exchange that is exposed is a matter of the optimizer as much as of the machine: with
# another one less crosses, or nothing has to wait. That changes what is computed, so it is advice
# and never chosen.

#: Share of a step from which on waiting for the network is spoken of.
TOLD = 0.05
#: Islands that are spoken of at most.
MOST_ISLANDS = 64
#: Steps between meetings that are spoken of at most: more were not published (arXiv:2311.08105).
MOST_EVERY = 500
#: Axes that islands take the place of.
EXACT_AXES = ("data", "fsdp")


@diagnostic
def islands_instead(plan: Plan, machine: Topology, rows: Collection[int]) -> tuple[Finding, ...]:
    """A finding where more than a twentieth of a step waits for what data and fsdp move over the
    slowest links, or where a plan leaves parts of the machine out because of them: with islands
    neither has to be.
    """
    inner = _inside(plan, machine)
    if inner is None or not isinstance(plan.exchange, Exact):
        return ()
    left_out = inner.devices == plan.mesh.devices
    islands = machine.tiers[0].devices if left_out else plan.mesh.devices // inner.devices
    waits, moved = _waits(plan, machine)
    step = plan.estimate.step_seconds
    if not 2 <= islands <= MOST_ISLANDS or not (left_out or waits > TOLD * step):
        return ()
    try:
        on = used_by(machine, islands, inner.devices)
    except TopologyError:  # there are no islands on a machine that a file describes
        return ()
    remaining = step / islands if left_out else step - waits
    odd = [size for size in rows if size % islands]
    exchanges = [] if odd else list(_ways(plan, inner, on, islands, remaining))
    if not exchanges and not odd:
        return ()
    why = (
        f"{islands - 1} of {islands} parts of the machine are left out, since a step over the"
        " network between them would take longer"
        if left_out
        else f"{percent_text(waits / step)} of a step ({seconds_text(waits)}) waits for what data"
        f" and fsdp move over the network, {bytes_text(moved)} per device"
    )
    return (
        Finding(
            code="exact-exchange-exposed",
            severity="info",
            where=f"{islands} islands",
            message=(
                f"{why}. {islands} islands would not wait for it, but {odd[0]} rows do not divide"
                " among them"
                if odd
                else f"{why}. Between {islands} islands, which change what is computed, a step with"
                f" {'; with '.join(exchanges)}"
            ),
            hint=(
                f"a number of rows that {islands} divides"
                if odd
                else "plan.why_not(exchange=...) plans one;"
                f" {PAGES}/islands.html says what it computes"
            ),
        ),
    )


def _outside(plan: Plan, machine: Topology) -> dict[str, int]:
    """Number of shards of each mesh axis that lie on the slowest links of the machine."""
    spans = place(plan.mesh, machine, plan.axis_order) or {}
    return {
        axis: math.prod(span.ways for span in parts if span.tier == 0)
        for axis, parts in spans.items()
        if any(span.tier == 0 for span in parts)
    }


def _inside(plan: Plan, machine: Topology) -> MeshShape | None:
    """The mesh within a part of the machine, of those that its slowest links join; None where these
    are not a network, or other axes than data and fsdp lie on them.
    """
    outside = _outside(plan, machine)
    if machine.tiers[0].kind != "network" or len(machine.tiers) == 1:
        return None
    if not {*outside} <= {*EXACT_AXES}:
        return None
    return MeshShape({axis: size // outside.get(axis, 1) for axis, size in plan.mesh.items()})


def _waits(plan: Plan, machine: Topology) -> tuple[float, int]:
    """Seconds that a step waits for the slowest links, and bytes that cross them."""
    slow = {*_outside(plan, machine)}
    crossing = [c for c in plan.estimate.collectives if slow & {*c.axes}]
    seconds = sum(c.seconds for c in crossing)
    return min(seconds, plan.estimate.seconds.exposed), sum(c.total_bytes for c in crossing)


def _ways(
    plan: Plan, inner: MeshShape, machine: Topology, islands: int, step: float
) -> Iterator[str]:
    """Exchanges whose plan would fit, in words."""
    late = _that_hides(plan, inner, machine, islands, step)
    options: tuple[Several, ...] = (
        Compressed(islands=islands, by=PowerSGD(rank=4)),
        Compressed(islands=islands, by=Quantised("int8")),
    )
    for exchange in (*((late,) if late else ()), *options):
        met = _instead_met(plan, inner, machine, exchange)
        if _peak(plan, inner, met) > fitting_bytes(machine):
            continue
        share = met.share(exchange, step)
        crossing = sum(c.total_bytes for c in met.collectives if "island" in c.axes)
        yield (
            f"exchange={exchange} waits for {seconds_text(share)} and moves"
            f" {bytes_text(crossing // exchange.period)}"
        )


def _that_hides(
    plan: Plan, inner: MeshShape, machine: Topology, islands: int, step: float
) -> DiLoCo | None:
    """Islands that meet as often as they can without waiting for what crosses; None where that is
    too seldom.
    """
    exchange = DiLoCo(islands=islands, every=1, delay=1)
    longest = max(_instead_met(plan, inner, machine, exchange).beside, default=0.0)
    interval = math.ceil(longest / step)
    return replace(exchange, every=interval, delay=interval) if 0 < interval <= MOST_EVERY else None


def _instead_met(plan: Plan, inner: MeshShape, machine: Topology, exchange: Several) -> Meetings:
    return meetings(plan.parameters, inner, exchange, machine)


def _peak(plan: Plan, inner: MeshShape, met: Meetings) -> float:
    """Bytes of a device whose island shards over fewer devices what the plan shards over all."""
    parts, more = plan.estimate.device_bytes, plan.mesh["fsdp"] // inner["fsdp"]
    return (
        parts.peak
        + (more - 1) * (parts.parameters + parts.gradients + parts.optimizer)
        + (met.kept_bytes)
    )


# --------------------------------------------------------------------------------------------------
# The plan of one island as the plan of all of them, and back.


def on_islands(plan: Plan, exchange: Several, machine: Topology) -> Plan:
    """The plan of all islands: the same for each of them, and their meetings."""
    mesh = MeshShape(island=exchange.islands, **plan.mesh)
    joined = used_by(machine, exchange.islands, plan.mesh.devices)
    met, island_estimate = meetings(plan.parameters, plan.mesh, exchange, joined), plan.estimate
    share = met.share(exchange, island_estimate.step_seconds)
    estimate = replace(
        island_estimate,
        seconds=replace(island_estimate.seconds, exchange=share),
        device_bytes=replace(island_estimate.device_bytes, exchange=met.kept_bytes),
        collectives=(*island_estimate.collectives, *met.collectives),
        tokens=island_estimate.tokens * exchange.islands,
        model_flops=island_estimate.model_flops * exchange.islands,
        hardware_flops=island_estimate.hardware_flops * exchange.islands,
        peak_flops_per_s=island_estimate.peak_flops_per_s * exchange.islands,
    )
    search = replace(
        plan.search,
        lower_bound=plan.search.lower_bound + share,
        rejected=tuple(
            replace(
                rejected,
                step_seconds=rejected.step_seconds + met.share(exchange, rejected.step_seconds),
            )
            for rejected in plan.search.rejected
        ),
        landscape=tuple(
            replace(
                point, step_seconds=point.step_seconds + met.share(exchange, point.step_seconds)
            )
            for point in plan.search.landscape
        ),
    )
    placed = place(mesh, joined) or {}
    links = tuple(
        Link(kind=joined.tiers[span.tier].kind, ways=span.ways)
        for span in placed.get(ISLAND.name, ())
    )
    joined_plan = replace(
        plan,
        mesh=mesh,
        exchange=exchange,
        topology=machine.name,
        placement=((ISLAND.name, links), *plan.placement),
        estimate=estimate,
        search=search,
    )
    crossing = sum(c.total_bytes for c in met.collectives if ISLAND.name in c.axes)
    return joined_plan.with_findings(
        Finding(
            code="other-mathematics",
            severity="info",
            where=str(exchange),
            message=_told(exchange, crossing, met, share),
            hint="compare the loss with exchange='exact' over some thousand steps of your own data",
        )
    )


def _told(exchange: Several, crossing: int, met: Meetings, share: float) -> str:
    """Describes how islands train, in words."""
    number, of = exchange.meetings, f"{exchange.islands} islands"
    each = " on average" if number > 1 else ""
    if isinstance(exchange, Compressed):
        return (
            f"{of} exchange their gradients in every step as {exchange.by.kind}, and keep what they"
            " did not send for the next: another optimizer than one of the exact gradients."
            f" An exchange moves {bytes_text(crossing)} per device between islands and takes"
            f" {seconds_text(met.seconds)}."
        )
    waits = share * exchange.period / number
    return (
        f"{of} train apart, each on its part of the batch, and {_meet(exchange)}: another optimizer"
        " than one of the whole batch. The loss of an island is that of its own rows; metrics are"
        f" means over islands. A meeting moves {bytes_text(crossing // number)} per device between"
        f" islands and takes {seconds_text(met.seconds / number)}{each}"
        f"{f', of which steps wait for {seconds_text(waits)}' if met.beside else ''}."
    )


def _meet(exchange: Meets) -> str:
    """Describes how islands that train apart meet, in words."""
    if isinstance(exchange, DiLoCo):
        fragment_text = (
            f", a fragment of {exchange.fragments} at a time" if exchange.fragments > 1 else ""
        )
        late = f"; what they send arrives {exchange.delay} steps later" if exchange.delay else ""
        return f"meet every {exchange.every} steps{fragment_text}{late}"
    when = f"every {exchange.every} steps" if exchange.every > 1 else "after every step"
    whom = "one other" if exchange.graph == "exponential" else "two neighbours"
    return f"average their parameters with {whom} {when}"


def of_one_island(plan: Plan) -> Plan:
    """The plan that each island carries out; the plan itself where there is one."""
    islands = plan.exchange.islands
    if plan.mesh[ISLAND.name] != islands:
        raise PlanError(
            f"the mesh {plan.mesh} has {plan.mesh[ISLAND.name]} islands, and the exchange"
            f" {plan.exchange} {islands}\nTry: make the plan again"
        )
    if islands == 1:
        return plan
    all_islands = plan.estimate
    estimate = replace(
        all_islands,
        seconds=replace(all_islands.seconds, exchange=0.0),
        device_bytes=replace(all_islands.device_bytes, exchange=0),
        collectives=tuple(c for c in all_islands.collectives if not c.every),
        tokens=all_islands.tokens // islands,
        model_flops=all_islands.model_flops / islands,
        hardware_flops=all_islands.hardware_flops / islands,
        peak_flops_per_s=all_islands.peak_flops_per_s / islands,
    )
    return replace(
        plan,
        estimate=estimate,
        mesh=plan.mesh.of_one_island,
        axis_order=tuple(axis for axis in plan.axis_order if axis != ISLAND.name),
        exchange=EXACT,
        topology=island_of(topology(plan.topology), islands).name,
        placement=tuple(
            axis_place for axis_place in plan.placement if axis_place[0] != ISLAND.name
        ),
        source=None,
    )


# --------------------------------------------------------------------------------------------------
# Plans for islands, from a search for one: the fastest that leaves room for what is kept for
# meetings, and all in order.

#: Searches, each but the first with more memory held back, at most.
ROUNDS = 5


def planned_on_islands(
    exchange: Several, machine: Topology, search: Callable[[Topology], Plan]
) -> Plan:
    """The fastest plan of an island that fits with what is kept for meetings, for all islands.

    What is kept follows from the plan: it is held back from the island's memory, and the search
    repeated, until plan and meetings fit together.
    """
    island, held_bytes, rounds = island_of(machine, exchange.islands), 0, 0
    while True:
        rounds += 1
        try:
            island_plan = search(_holding(island, held_bytes))
        except (PinError, BatchError) as error:
            raise _of_an_island(error, exchange, machine, island) from error
        plan = on_islands(island_plan, exchange, machine)
        parts, limit = plan.estimate.device_bytes, fitting_bytes(island)
        if parts.peak <= limit:
            return plan
        held_bytes = max(held_bytes + 1, math.ceil(parts.exchange * margin(island)))
        if rounds == ROUNDS or held_bytes >= island.chip.usable_bytes:
            raise InfeasibleError(
                f"{plan.model} does not fit on the islands of {machine.name}: what {exchange} keeps"
                f" for meetings is {bytes_text(parts.exchange)} per device, and with it"
                f" {bytes_text(parts.peak)} are needed of {bytes_text(limit)}\nTry: zero=3, which"
                " shards it; or fewer islands",
                short_bytes=int(parts.peak - limit),
            )


def _of_an_island(
    error: PinError | BatchError, exchange: Several, machine: Topology, island: Topology
) -> PinError | BatchError:
    """The error of a search for one island, which says that it is of one."""
    text, hint, remainder = str(error).partition(HINT)
    each = f"{island.devices} device{'s'[: island.devices != 1]}"
    return type(error)(
        f"{text}\nThat is of one island: each of {exchange.islands} on {machine.name} has"
        f" {each} ({island.name}) and its part of the rows{hint}{remainder}"
    )


def met_in_order(inner: Iterator[Ranked], exchange: Several, machine: Topology) -> Iterator[Ranked]:
    """Plans for an island, the fastest first, as plans for all islands; meetings take each as long
    as the fastest.
    """
    met: Estimate | None = None
    for entry in inner:
        if met is None:
            met = on_islands(entry.build(), exchange, machine).estimate
        yield replace(
            entry,
            seconds=entry.seconds + met.seconds.exchange,
            peak_bytes=entry.peak_bytes + met.device_bytes.exchange,
            build=partial(_room_met, entry, exchange, machine),
        )


def _room_met(entry: Ranked, exchange: Several, machine: Topology) -> Plan:
    return on_islands(entry.build(), exchange, machine)


def _holding(island: Topology, held_bytes: int) -> Topology:
    """An island with so much less memory."""
    chip = replace(island.chip, reserved_bytes=island.chip.reserved_bytes + held_bytes)
    return replace(island, chip=chip)


def updated_by_steps(parameters: Iterable[Parameter | ParameterLayout]) -> str:
    """Names the arrays that steps update beside the trained parameters, such as statistics of
    batches; "" where there are none.
    """
    paths = [parameter.path for parameter in parameters if parameter.role == "updated"]
    return f"{', '.join(paths[:4])}{' and others' if len(paths) > 4 else ''}"


def require_carried(problem: Problem, plan: Plan, exchange: Several) -> None:
    """Refuses what islands cannot carry."""
    failures: list[str] = []
    if updated := updated_by_steps(problem.parameters):
        failures.append(
            f"steps update {updated}, which are not parameters: each island would have its own, and"
            " nothing says which is right"
        )
    if plan.pipeline == "programs" and isinstance(exchange, Compressed):
        failures.append(
            "pipeline='programs' makes a program of every stage, whose gradients do not leave it"
        )
    if "disk" in plan.offload:
        failures.append("offload=['disk'] keeps optimizer state in files, which islands share")
    if failures:
        raise_all(
            PinError,
            f"exchange={exchange} cannot be carried out",
            failures,
            hint="exchange='exact'",
        )


def used_by(machine: Topology, islands: int, devices: int) -> Topology:
    """The machine without the devices that islands leave idle; the links between islands stay."""
    island = island_of(machine, islands)
    if devices == island.devices:
        return machine
    used = used_shapes(devices, island)
    assert used is not None, f"{devices} devices are not part of {island.name}"
    outer = machine.tiers[0]
    if len(used) == len(machine.tiers):
        shapes = ((islands * used[0][0],), *used[1:])
    else:  # islands do not contain the links between them
        shapes = ((islands,), *used)
    tiers = tuple(
        replace(tier, shape=shape, wrap=()) if tier.kind != "torus" or shape != tier.shape else tier
        for tier, shape in zip((outer, *machine.tiers[1:]), shapes, strict=True)
    )
    return replace(machine, tiers=tiers, alone=min(machine.alone, float(islands * devices)))
