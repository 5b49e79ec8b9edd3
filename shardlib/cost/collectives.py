"""Seconds of collectives on the links of their mesh axes: of one, of all of a step by slot, and
lower bounds over all placements of a mesh.

The cost is linear in the bytes: `LinearCost`, a latency and a time per byte. The bytes are those of
the *result* per device: the gathered array (all-gather), the reduced array (all-reduce), the shard
(reduce-scatter), the buffer (all-to-all), the message (collective-permute). A collective over
several mesh axes takes the spans of all of them.

>>> from shardlib.machines.topology import topology
>>> from shardlib.machines.topology import Span
>>> pod = topology("v5e:16x16")
>>> ring = collective_cost("all-gather", (Span(0, 0, 16),), pod)  # of 16 chips
>>> round(ring.seconds(34e6) * 1e6)  # microseconds
440

Formulas (V: bytes of the full array, n: ways, B: bytes/s of a link in one direction, times its
measured efficiency):

- switch, network: gather or scatter takes V (n-1)/n / B; all-reduce is a reduce-scatter and an
  all-gather (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
  MPICH", 2005; scaling book, gpus.md). Latency is the smaller of the ring's n-1 steps and the
  tree's ceil(log2 n) (recursive doubling, Bruck); both move the same bytes. Where a stack's
  latency of a ring between nodes was measured (`Tier.ring`), gathers and scatters take its n-1
  steps, each of which waits for the slowest link: NCCL has no other algorithm for them
  (src/graph/tuning.cc). Between the nodes of some clusters its all-reduces take them, too
  (`Tier.ring_sums`).
- mesh: as a switch, with the n - 1 links of each device that lead to the others of its group, of N
  - 1 in all; a permute takes one of them (NVIDIA DGX-1 with V100, whitepaper WP-08437, "hybrid
  cube-mesh"; AMD Instinct MI300X, seven links to seven devices).
- torus dim: a ring works in both directions, so its rate is 2B; a line is limited by the link at
  its end, so its rate is B (scaling book, sharding.md). If other axes are inside the span, `stride`
  groups share each link: the rate is divided.
- several dims of a torus work at once, each on its share: V (N-1)/N over the sum of the rates
  (scaling book: "increases the available bandwidth by a factor of n_axes"), but not faster than any
  subset S of the dims can move the bytes that must cross it, V (N_S-1)/N, when it gathers first.
- several tiers: the outer tier moves only what the inner one has scattered, V / inner ways. NCCL
  and a fat tree pipeline the tiers, so the slowest counts (scaling book, gpus.md: T = max over
  levels); XLA on TPU runs them one after another. NCCL gathers and scatters by rings through all N
  devices (src/graph/tuning.cc tries no other algorithm for them), so that V (N-1)/N passes every
  device of the ring, and the links between nodes share it: V (N-1)/N / inner ways, for two nodes
  nearly twice the bytes that one node misses. Its all-reduces are priced the same way, though trees
  can be faster between nodes.
- all-to-all: on a switch b (n-1)/n / B for a buffer of b bytes; on a ring of n, b floor(n^2/4)/n /
  2B (scaling book, sharding.md footnote: a quarter of an all-gather), on a line the same with B;
  dims of a torus work at once.
- collective-permute: every device sends its message to its successor in the group.
- memory (simulated devices of one process): one rendezvous of all threads, whatever the kind, and
  copies that share the memory bus; measured by kind and participants (`shardlib.calibration`), or
  else one rate and one latency. With XLA:CPU on 8 devices, JAX 0.10 and 0.12: per byte, a
  reduce-scatter (of its operand), an all-to-all and a permute take the time of an all-reduce within
  a factor 0.8 to 1.6, an all-gather (of its result) half of it.

Times exclude `Chip.launch_s`, which is charged per collective as for any other op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.terms import ArrayTable, distinct_rows
from shardlib.layout import (
    AXES,
    EXPERT,
    KINDS,
    MESH_AXES,
    REPLICA_AXES,
    STAGE,
    STORED_AXES,
    TENSOR,
    TOKEN_AXES,
    Axis,
)
from shardlib.machines.chips import Tier
from shardlib.machines.topology import Placement, Span, Topology

Bytes = TypeVar("Bytes", float, NDArray[np.float64])


@dataclass(frozen=True)
class LinearCost:
    """Seconds as a linear function of bytes; the costs of consecutive steps add up.

    Attributes:
        latency_s: seconds that do not depend on the bytes.
        seconds_per_byte: additional seconds per byte of the result.
    """

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def seconds(self, nbytes: Bytes) -> Bytes:
        """Seconds for a result of `nbytes` per device; elementwise for an array."""
        return self.latency_s + self.seconds_per_byte * nbytes

    def __add__(self, other: LinearCost) -> LinearCost:
        return LinearCost(
            self.latency_s + other.latency_s, self.seconds_per_byte + other.seconds_per_byte
        )

    def __mul__(self, times: float) -> LinearCost:
        return LinearCost(self.latency_s * times, self.seconds_per_byte * times)

    __rmul__ = __mul__


NO_COST = LinearCost()


@dataclass(frozen=True)
class _Line:
    """A group of `ways` positions along one dim.

    `hops` is the distance between neighbours, `ring` is True if the ends are neighbours, `rate` is
    the bytes/s that enter a device.
    """

    ways: int
    hops: int
    ring: bool
    rate: float
    tier: Tier

    @property
    def steps(self) -> int:
        """Steps until every device has received data from every other."""
        if self.tier.kind == "torus":
            return self.hops * (self.ways // 2 if self.ring else self.ways - 1)
        return 1 if self.tier.kind == "memory" else min(self.ways - 1, (self.ways - 1).bit_length())

    @property
    def all_to_all_factor(self) -> float:
        """Bytes over the busiest link, as a multiple of the buffer, times rate over link rate."""
        return (self.ways**2 // 4 if self.tier.kind == "torus" else self.ways - 1) / self.ways


def collective_cost(kind: str, spans: Iterable[Span], topology: Topology) -> LinearCost:
    """The cost of one collective whose group spans `spans`; free for a group of one device."""
    return _cost(kind, spans if isinstance(spans, tuple) else tuple(spans), topology)


@lru_cache(maxsize=1 << 16)
def _cost(kind: str, spans: tuple[Span, ...], topology: Topology) -> LinearCost:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a collective; collectives are {', '.join(KINDS)}")
    tiers = _tiers(spans, topology)
    if not tiers:
        return NO_COST
    if len(tiers) == 1 and tiers[0][0].tier.kind == "memory":
        return _in_memory(kind, tiers[0][0])
    pipelined = all(tier.kind != "torus" for tier in topology.tiers)
    if kind == "all-to-all":
        return _combine([_all_to_all(lines) for lines in tiers], pipelined)
    if kind == "collective-permute":
        return _permute(tiers)
    gather = _ring_gather(tiers) if pipelined and len(tiers) > 1 else _gather(tiers, pipelined)
    used = [line.tier for lines in tiers for line in lines]
    if any(tier.ring_sums if kind == "all-reduce" else tier.ring for tier in used):
        gather = replace(gather, latency_s=_ring_latency(tiers))
    if kind == "all-reduce":
        return 2 * gather
    if kind == "all-gather":
        return gather
    return LinearCost(
        gather.latency_s,
        gather.seconds_per_byte * math.prod(line.ways for lines in tiers for line in lines),
    )


def _tiers(spans: tuple[Span, ...], topology: Topology) -> list[list[_Line]]:
    """The lines of each tier that the group uses, outermost tier first."""
    dims: dict[tuple[int, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.tier, span.dim, span.stride)):
        if span.ways > 1:
            dims.setdefault((span.tier, span.dim), []).append(span)
    tiers: dict[int, list[_Line]] = {}
    for (tier, dim), parts in dims.items():
        tiers.setdefault(tier, []).append(_line(parts, topology.tiers[tier], dim))
    return list(tiers.values())


def _line(parts: list[Span], tier: Tier, dim: int) -> _Line:
    """The line that a group sees along one dim, from its spans, inner first.

    Adjacent spans join without a gap, so that the two halves of a ring are the ring again. Spans
    with another axis between them are priced as one line at the distance of the outer one, which is
    not faster than either.
    """
    joined = [parts[0]]
    for part in parts[1:]:
        last = joined[-1]
        touching = part.stride == last.stride * last.ways
        joined[-1:] = (
            [Span(last.tier, dim, last.ways * part.ways, last.stride)] if touching else [last, part]
        )
    degree = math.prod(span.ways for span in joined)
    if tier.kind == "mesh":
        return _Line(
            degree, 1, False, tier.reached_bytes_per_s * (degree - 1) / (tier.shape[dim] - 1), tier
        )
    if tier.kind != "torus":
        return _Line(degree, 1, False, tier.reached_bytes_per_s, tier)
    ring = tier.wrap[dim] and all(span.stride * span.ways == tier.shape[dim] for span in joined)
    stride = joined[-1].stride
    return _Line(degree, stride, ring, tier.reached_bytes_per_s * (2 if ring else 1) / stride, tier)


def _gather(tiers: list[list[_Line]], pipelined: bool) -> LinearCost:
    """All-gather, per byte of the gathered array; outer tiers move only the shards of the inner
    ones.
    """
    costs: list[LinearCost] = []
    inner = 1
    for lines in reversed(tiers):
        costs.append(
            LinearCost(
                sum(line.steps * line.tier.latency_s for line in lines),
                _gather_per_byte(lines) / inner,
            )
        )
        inner *= math.prod(line.ways for line in lines)
    return _combine(costs, pipelined)


def _ring_gather(tiers: list[list[_Line]]) -> LinearCost:
    """All-gather by rings through all devices of several tiers, per byte of the gathered array."""
    devices, inner, slowest = math.prod(line.ways for lines in tiers for line in lines), 1, 0.0
    for lines in reversed(tiers):
        rate = inner * sum(line.rate for line in lines)
        slowest = max(slowest, (devices - 1) / devices / rate)
        inner *= math.prod(line.ways for line in lines)
    return LinearCost(_gather(tiers, True).latency_s, slowest)


def _ring_latency(tiers: list[list[_Line]]) -> float:
    """Latency of a ring through all devices: each of its steps waits for the slowest link."""
    lines = [line for lines in tiers for line in lines]
    return (math.prod(line.ways for line in lines) - 1) * max(line.tier.latency_s for line in lines)


def _gather_per_byte(lines: list[_Line]) -> float:
    """Seconds per byte of the array that one tier gathers, with all its dims in use."""
    devices = math.prod(line.ways for line in lines)
    return max(
        (math.prod(line.ways for line in subset) - 1) / devices / sum(line.rate for line in subset)
        for size in range(1, len(lines) + 1)
        for subset in itertools.combinations(lines, size)
    )


def _in_memory(kind: str, line: _Line) -> LinearCost:
    """A collective among simulated devices in one memory, interpolated between the measured numbers
    of participants if there are any.
    """
    if measured := sorted(
        (exchange for exchange in line.tier.exchanges if exchange.kind == kind),
        key=lambda exchange: exchange.ways,
    ):
        degrees = [math.log2(exchange.ways) for exchange in measured]
        latency_s, per_byte = (
            float(np.interp(math.log2(line.ways), degrees, values))
            for values in zip(
                *((exchange.latency_s, exchange.seconds_per_byte) for exchange in measured),
                strict=True,
            )
        )
        return LinearCost(latency_s, per_byte * (line.ways if kind == "reduce-scatter" else 1))
    gathered = (line.ways - 1) / line.ways / line.rate
    per_byte = {"all-gather": gathered, "reduce-scatter": 2 * gathered * line.ways}.get(
        kind, 2 * gathered
    )
    return LinearCost(line.tier.latency_s, per_byte)


def _all_to_all(lines: list[_Line]) -> LinearCost:
    return LinearCost(
        sum(line.steps * line.tier.latency_s for line in lines),
        max(line.all_to_all_factor / line.rate for line in lines),
    )


def _combine(costs: list[LinearCost], pipelined: bool) -> LinearCost:
    """The sum of the latencies of the tiers, and of the times per byte, or their maximum if the
    tiers are pipelined.
    """
    latency_s = sum(cost.latency_s for cost in costs)
    return LinearCost(
        latency_s, (max if pipelined else sum)(cost.seconds_per_byte for cost in costs)
    )


def _permute(tiers: list[list[_Line]]) -> LinearCost:
    """A cyclic shift by one position: every device sends in one direction; on a line, the message
    from last to first crosses all of it.
    """
    lines = [
        replace(line, rate=line.rate / (line.ways - 1)) if line.tier.kind == "mesh" else line
        for lines in tiers
        for line in lines
    ]
    latency_s = sum(
        line.tier.latency_s
        * (line.hops * (1 if line.ring else line.ways - 1) if line.tier.kind == "torus" else 1)
        for line in lines
    )
    return LinearCost(latency_s, max((2 if line.ring else 1) / line.rate for line in lines))


# --------------------------------------------------------------------------------------------------
# The steps of gathers and scatters over mesh axes, by the links of the axes.


def scatter_steps(spans: tuple[Span, ...], topology: Topology) -> tuple[tuple[Span, ...], ...]:
    """The steps of a reduce-scatter over an axis, the major one first.

    On a torus one span after another (XLA for TPU has no other reduce-scatter); between slices
    last, on the remaining shard, since XLA makes hierarchical collectives of those that cross the
    network (cloud.google.com/tpu/docs/multislice-introduction). With only switches and networks, a
    single step.
    """
    if len(spans) < 2 or not _on_torus(spans, topology):
        return (spans,) if spans else ()
    between, inside = _by_slice(spans, topology)
    return (*((span,) for span in inside), *([between] if between else []))


def gather_steps(spans: tuple[Span, ...], topology: Topology) -> tuple[tuple[Span, ...], ...]:
    """The steps of an all-gather over an axis, the minor one first.

    On a torus of more than two dims one span after another (XLA for TPU turns a gather along three
    into an all-reduce), else a single step. Between slices first, the reverse of `scatter_steps`.
    """
    if not spans or not _on_torus(spans, topology):
        return (spans,) if spans else ()
    between, inside = _by_slice(spans, topology)
    return (
        *([between] if between else []),
        *(((span,) for span in reversed(inside)) if len(inside) > 2 else (inside,)),
    )


def _by_slice(
    spans: tuple[Span, ...], topology: Topology
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The spans on the network between slices, and those inside a slice."""
    between = tuple(span for span in spans if topology.tiers[span.tier].kind == "network")
    return between, tuple(span for span in spans if span not in between)


def _on_torus(spans: tuple[Span, ...], topology: Topology) -> bool:
    return any(topology.tiers[span.tier].kind == "torus" for span in spans)


@dataclass(frozen=True, kw_only=True)
class CollectiveStep:
    """One step of a gather or scatter of parameters.

    Attributes:
        spans: the links of its group.
        share: bytes of its result over those of the whole collective.
        cost: linear in the bytes of its result.
    """

    spans: tuple[Span, ...]
    share: float
    cost: LinearCost


def steps_of(kind: str, spans: tuple[Span, ...], topology: Topology) -> tuple[CollectiveStep, ...]:
    """The steps of a gather or scatter of parameters."""
    groups = (scatter_steps if kind == "reduce-scatter" else gather_steps)(spans, topology)
    degrees = [math.prod(span.ways for span in group) for group in groups]
    after = [math.prod(degrees[i + 1 :]) for i in range(len(degrees))]
    shares = [float(n) if kind == "reduce-scatter" else 1.0 / n for n in after]
    return tuple(
        CollectiveStep(spans=group, share=share, cost=collective_cost(kind, group, topology))
        for share, group in zip(shares, groups, strict=True)
    )


# --------------------------------------------------------------------------------------------------
# Costs of the collectives of a step on the links of each candidate's axes.
#
# Counts and bytes of collectives are summed by *slot*, independently of the links, and multiplied
# by the costs of the links at the end.


@dataclass(frozen=True)
class DeviceGroup:
    """A process group: the devices along some mesh axes.

    Attributes:
        axes: the axes, the major one first.
        of_experts: True for parameters of experts, which the expert axis already shards in compute.
    """

    axes: tuple[str, ...]
    of_experts: bool = False


def axis_group(axis: Axis) -> DeviceGroup:
    """The devices along one mesh axis."""
    return DeviceGroup((axis.name,))


def storage_group(*, experts: bool = False, tensor: bool = False) -> DeviceGroup:
    """The devices over which parameters, or those of experts, are stored sharded; with `tensor`,
    including those along tensor.
    """
    axes = _without_expert(STORED_AXES) if experts else STORED_AXES
    return DeviceGroup((*axes, *((TENSOR.name,) if tensor else ())), experts)


def replica_group(*, tensor: bool = False) -> DeviceGroup:
    """The devices with replicas of the same stored shard; with `tensor`, including those along
    tensor.
    """
    return DeviceGroup((*REPLICA_AXES, *((TENSOR.name,) if tensor else ())))


def token_group(*, experts: bool = False, tensor: bool = False) -> DeviceGroup:
    """The devices that process different tokens, over which gradients (of parameters of experts,
    with `experts`) are partial sums; with `tensor`, including those along tensor.
    """
    axes = _without_expert(TOKEN_AXES) if experts else TOKEN_AXES
    return DeviceGroup((*axes, *((TENSOR.name,) if tensor else ())), experts)


def on_all_stages(group: DeviceGroup) -> DeviceGroup:
    """The group extended over all stages: pipelines in one program compute embedding and head on
    all.
    """
    return DeviceGroup((STAGE.name, *group.axes), group.of_experts)


def _without_expert(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != EXPERT.name)


@dataclass(frozen=True)
class Slot:
    """A class of collectives: of one kind, over one group of devices, in one role.

    Attributes:
        role: a role of `shardlib.layout.Axis.collectives`; "block" also over the axes that split
            tokens, and "ends" over those and the stages; or "gather" (parameters, ZeRO 3), "reduce"
            (gradients, ZeRO 0 and 1), "scatter" (gradients, ZeRO 2 and 3) or "update" (matrices of
            the optimizer).
        group: the devices.
        kind: kind of collective.
    """

    role: str
    group: DeviceGroup
    kind: str


_FLAGS = (False, True)
_TOKENS = tuple(token_group(experts=experts, tensor=t) for t in _FLAGS for experts in _FLAGS)
_REPLICAS = tuple(replica_group(tensor=tensor) for tensor in _FLAGS)
_STORED = (storage_group(), storage_group(experts=True))
_OUTSIDE = tuple(on_all_stages(token_group(tensor=tensor)) for tensor in _FLAGS)
_REPLICAS_OUTSIDE = tuple(map(on_all_stages, _REPLICAS))
SLOTS: tuple[Slot, ...] = (
    *(
        Slot(role, axis_group(AXES[name]), kind)
        for name in reversed(MESH_AXES)
        for role, kinds in AXES[name].collectives.items()
        for kind in kinds
    ),
    Slot("block", token_group(), "all-reduce"),
    Slot("ends", on_all_stages(token_group()), "all-reduce"),
    *(Slot("gather", group, "all-gather") for group in _STORED),
    *(
        Slot("update", group, kind)
        for group in (axis_group(TENSOR), storage_group(tensor=True))
        for kind in ("all-to-all", "all-gather")
    ),
    *(
        Slot("update", group, "all-gather")
        for group in (replica_group(), *(token_group(tensor=t) for t in _FLAGS), axis_group(STAGE))
    ),
    *(Slot("reduce", group, "all-reduce") for group in (*_TOKENS, *_OUTSIDE)),
    *(Slot("scatter", group, "reduce-scatter") for group in _STORED),
    *(
        Slot("scatter", group, "all-reduce")
        for group in (*_REPLICAS, *_TOKENS, *_REPLICAS_OUTSIDE, *_OUTSIDE)
    ),
)
#: Groups of devices that collectives of a step run over.
GROUPS: tuple[DeviceGroup, ...] = tuple(dict.fromkeys(slot.group for slot in SLOTS))
#: Roles of the collectives along the sequence, by the way of context parallelism
#: (`shardlib.decisions.table.Decisions`).
CONTEXT_ROLES: dict[str, tuple[str, ...]] = {
    "none": ("context",),
    "all-gather": ("context", "keys"),
    "ring": ("context", "ring"),
    "ulysses": ("context", "head_exchange"),
}
SLOT_INDEX: dict[Slot, int] = {slot: number for number, slot in enumerate(SLOTS)}


def role_slots(*roles: str) -> list[int]:
    """Indices of the slots in some roles."""
    return [number for number, slot in enumerate(SLOTS) if slot.role in roles]


def spans_of(group: DeviceGroup, placement: Placement) -> tuple[Span, ...]:
    """The spans of a group of axes."""
    return tuple(span for axis in group.axes for span in placement.get(axis, ()))


def result_ratio(slot: Slot, degree: int) -> int:
    """Ratio of the results of a collective to the local part of the array, for a group of `degree`
    devices: a ring has one message per device; the reduce-scatter out of the stages has one shard
    per device, since no measure divides by the number of stages.
    """
    scattered = slot.role == "ends" and slot.kind == "reduce-scatter"
    return degree if scattered or slot.role == "ring" else 1


def slot_cost(slot: Slot, placement: Placement, topology: Topology) -> LinearCost:
    """The cost of one collective of a slot."""
    spans = spans_of(slot.group, placement)
    if stepwise(slot):
        cost = steps_of(slot.kind, spans, topology)
        return LinearCost(
            sum(step.cost.latency_s for step in cost),
            sum(step.share * step.cost.seconds_per_byte for step in cost),
        )
    cost = collective_cost(slot.kind, spans, topology)
    degree = result_ratio(slot, math.prod(span.ways for span in spans))
    if slot.role != "ring":
        return LinearCost(cost.latency_s, cost.seconds_per_byte / degree)
    return LinearCost((degree - 1) * cost.latency_s, (degree - 1) / degree * cost.seconds_per_byte)


@dataclass(frozen=True, kw_only=True)
class LinkCosts(ArrayTable):
    """Costs of every slot on some placements.

    Attributes:
        latency: seconds of one collective, array [slots, placements].
        per_byte: seconds per byte, array [slots, placements].
    """

    latency: Array
    per_byte: Array


def link_costs(placements: Sequence[Placement], topology: Topology) -> LinkCosts:
    """The costs of every slot on every placement; groups on equivalent links are priced once."""
    latency, per_byte = (np.zeros((len(SLOTS), len(placements))) for _ in range(2))
    numbers, costs_by_way = _cached_costs(topology)
    span_index: dict[str, NDArray[np.int64]] = {
        axis: np.array([numbers.setdefault(p.get(axis, ()), len(numbers)) for p in placements])
        for axis in MESH_AXES
    }
    spans, torus = _by_dim(numbers, topology), any(tier.kind == "torus" for tier in topology.tiers)
    for group in GROUPS:
        axes = [span_index[axis] for axis in group.axes]
        # groups on equivalent links cost the same, whatever their axes are
        joined = [
            column for degrees, strides in spans for column in _joined(degrees, strides, axes)
        ]
        for slots in _by_steps(GROUP_SLOTS[group]) if torus else (GROUP_SLOTS[group],):
            in_steps = torus and stepwise(SLOTS[slots[0]])
            columns = axes if in_steps else joined
            first, inverse = distinct_rows(columns)
            rows = np.stack(columns)[:, first].T.tolist()
            keys = [(in_steps, *(filter(None, row) if in_steps else row)) for row in rows]
            for slot in slots:
                costs = np.zeros((2, len(first)))
                for position, row_key in enumerate(keys):
                    key = _cost_key(SLOTS[slot]), row_key
                    if key not in costs_by_way:
                        costs_by_way[key] = slot_cost(
                            SLOTS[slot], placements[int(first[position])], topology
                        )
                    costs[:, position] = (
                        costs_by_way[key].latency_s,
                        costs_by_way[key].seconds_per_byte,
                    )
                latency[slot], per_byte[slot] = costs[:, inverse]
    return LinkCosts(latency=latency, per_byte=per_byte)


def _by_dim(numbers: Mapping[tuple[Span, ...], int], topology: Topology) -> Array:
    """Ways and strides that an axis takes of each dim of each tier, by the index of its spans:
    array [dims, 2, indices]. Distances matter on a torus alone; elsewhere strides are 0.
    """
    dims = [(i, dim) for i, tier in enumerate(topology.tiers) for dim in range(len(tier.shape))]
    table = np.ones((len(dims), 2, len(numbers)), dtype=np.int64)
    for spans, number in numbers.items():
        for span in spans:
            torus = topology.tiers[span.tier].kind == "torus"
            table[dims.index((span.tier, span.dim)), :, number] = span.ways, span.stride * torus
    return table


def _joined(degrees: Array, strides: Array, axes: Sequence[Array]) -> tuple[Array, Array, Array]:
    """The facts of a dim that determine the cost of a collective in a single step, by placement:
    the ways of its group, and the ways and the stride of its outermost line after adjacent parts
    are joined.
    """
    spans, starts = np.stack([[degrees[index], strides[index]] for index in axes], axis=1)
    order = np.argsort(starts, axis=0, kind="stable")
    lines = np.ones((2, spans.shape[1]), dtype=np.int64)  # ways and stride of the outermost line
    for axis in order[:, None]:
        more, start = (np.take_along_axis(values, axis, axis=0)[0] for values in (spans, starts))
        separate = (more > 1) & (start != lines[0] * lines[1])
        lines[1, separate] = start[separate]
        lines[0] = np.where(separate, more, lines[0] * more)
    return spans.prod(0), lines[0], lines[1]


def stepwise(slot: Slot) -> bool:
    """True if a collective is done in steps along the dims of a torus, in the order of its axes."""
    return slot.role in ("gather", "scatter") and slot.kind != "all-reduce"


def _by_steps(slots: Sequence[int]) -> tuple[list[int], ...]:
    """Indices of the slots that are done in steps, and of the others."""
    parts = ([slot for slot in slots if stepwise(SLOTS[slot]) == flag] for flag in (True, False))
    return tuple(part for part in parts if part)


def _cost_key(slot: Slot) -> tuple[str, str]:
    """The properties of a slot that its cost depends on, besides the links of its group."""
    return slot.kind, "steps" if stepwise(slot) else slot.role if slot.role in (
        "ring",
        "ends",
    ) else ""


#: The first slot with the same cost as each slot on equivalent links.
SAME_COST: tuple[int, ...] = tuple(
    next(first for first, earlier in enumerate(SLOTS) if _cost_key(earlier) == _cost_key(slot))
    for slot in SLOTS
)


@lru_cache(maxsize=16)
def _cached_costs(
    topology: Topology,
) -> tuple[dict[tuple[Span, ...], int], dict[tuple[tuple[str, str], tuple[int, ...]], LinearCost]]:
    """Caches for searches on the same links: the index of each tuple of spans, and the costs of
    slots by those indices or by the parts of each dim.
    """
    return {(): 0}, {}


#: Indices of the slots of every group.
GROUP_SLOTS: dict[DeviceGroup, list[int]] = {
    group: [number for number, slot in enumerate(SLOTS) if slot.group == group] for group in GROUPS
}


# --------------------------------------------------------------------------------------------------
# Lower bounds on the costs of collectives over all placements of a mesh.

Array = np.ndarray


def least_link_costs(sizes: Mapping[str, Array], topology: Topology) -> LinkCosts:
    """Lower bounds on the costs of every slot: the least latency and the least time per byte over
    all placements of a group of that size on adjacent devices.

    Devices of other groups in between share the links and only add hops, so adjacent devices are
    best.
    """
    count = len(next(iter(sizes.values())))
    latency, per_byte = (np.zeros((len(SLOTS), count)) for _ in range(2))
    for group in GROUPS:
        degrees, inverse = np.unique(
            np.prod([sizes[axis] for axis in group.axes], axis=0), return_inverse=True
        )
        for number in GROUP_SLOTS[group]:
            costs = [_least(SAME_COST[number], int(n), topology) for n in degrees]
            latency[number], per_byte[number] = (
                np.array(values)[inverse.reshape(-1)] for values in zip(*costs, strict=True)
            )
    return LinkCosts(latency=latency, per_byte=per_byte)


def least_stage_send(stages: Array, topology: Topology) -> tuple[Array, Array]:
    """Lower bounds on latency and seconds per byte of a message between stages, by number of
    stages.
    """
    number = SLOT_INDEX[Slot("stage", axis_group(STAGE), "collective-permute")]
    latency, per_byte = np.zeros((2, int(stages.max(initial=1)) + 1))
    for degree in np.flatnonzero(np.bincount(stages)):
        latency[degree], per_byte[degree] = _least(SAME_COST[number], int(degree), topology)
    return latency[stages], per_byte[stages]


@lru_cache(maxsize=1 << 14)
def _least(number: int, degree: int, topology: Topology) -> tuple[float, float]:
    """The least latency and the least seconds per byte of a slot over a group of some size."""
    slot = SLOTS[number]
    axis = slot.group.axes[0]
    placements = (
        order
        for spans in _adjacent(degree, topology)
        for order in (itertools.permutations(spans) if stepwise(slot) else (spans,))
    )
    costs = [slot_cost(slot, {axis: spans}, topology) for spans in placements] if degree > 1 else []
    if not costs:
        return 0.0, 0.0
    hop = min(tier.latency_s for tier in topology.tiers)
    latency = (
        hop * (degree - 1 if slot.role == "ring" else 1)
        if slot.kind == "collective-permute"
        else min(cost.latency_s for cost in costs)
    )  # a ring over every second device closes in two hops
    return latency, min(cost.seconds_per_byte for cost in costs)


@lru_cache(maxsize=1 << 12)
def _adjacent(degree: int, topology: Topology) -> tuple[tuple[Span, ...], ...]:
    """Every placement of `degree` adjacent devices on the tiers."""
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
