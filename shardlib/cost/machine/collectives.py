"""Seconds of a collective on the links that its mesh axes lie on.

The answer is linear in the bytes: `LinearCost`, a latency and a time per byte, where the bytes are
what a device holds of the *result*: the gathered array (all-gather), the reduced array
(all-reduce), the shard (reduce-scatter), the buffer (all-to-all), the message (collective-permute).
A collective over several mesh axes takes the spans of all of them.

>>> from shardlib.hardware.topology import topology
>>> from shardlib.hardware.placement import Span
>>> pod = topology("v5e:16x16")
>>> ring = collective_cost("all-gather", (Span(0, 0, 16),), pod)  # of 16 chips
>>> round(ring.seconds(34e6) * 1e6)  # microseconds
440

Formulas (V: bytes of the full array, n: ways, B: bytes/s of a link in one direction, times its
measured efficiency):

- switch, network: gather or scatter takes V (n-1)/n / B; all-reduce is a reduce-scatter and an
  all-gather (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
  MPICH", 2005; scaling book, gpus.md). Latency is the smaller of the ring's n-1 steps and the
  tree's ceil(log2 n) (recursive doubling, Bruck); both move the same bytes.
- mesh: as a switch, with the n - 1 links of each device that lead to the others of its group, of N
  - 1 in all; a permute takes one of them (NVIDIA DGX-1 with V100, whitepaper WP-08437, "hybrid
  cube-mesh"; AMD Instinct MI300X, seven links to seven devices).
- torus dim: a ring works in both directions, so its rate is 2B; a line is limited by the link at
  its end, so its rate is B (scaling book, sharding.md). Where other axes lie inside the span,
  `stride` groups share each link: the rate is divided.
- several dims of a torus work at once, each on its share: V (N-1)/N over the sum of the rates
  (scaling book: "increases the available bandwidth by a factor of n_axes"), but not faster than any
  subset S of the dims can move the bytes that must cross it, V (N_S-1)/N, when it gathers first.
- several tiers: the outer tier moves what the inner one has scattered, V / inner ways. NCCL and a
  fat tree pipeline the tiers, so the slowest counts (scaling book, gpus.md: T = max over levels);
  XLA on TPU runs them one after another. NCCL gathers and scatters by rings through all N devices
  (src/graph/tuning.cc tries no other algorithm for them), so that V (N-1)/N passes every place of
  the ring, and the links between nodes share it: V (N-1)/N / inner ways, for two nodes nearly twice
  what one node lacks. Its all-reduces are priced alike, though trees can be faster between nodes.
- all-to-all: on a switch b (n-1)/n / B for a buffer of b bytes; on a ring of n, b floor(n^2/4)/n /
  2B (scaling book, sharding.md footnote: a quarter of an all-gather), on a line the same with B;
  dims of a torus work at once.
- collective-permute: every device passes its message on to the next place of the group.
- memory (simulated devices of one process): one meeting of all threads, whatever the kind, and
  copies that share the memory bus; by kind and participants as measured
  (`shardlib.calibration.exchanges`), and without that by one rate and one latency. With XLA:CPU on
  8 devices, JAX 0.10 and 0.12: per byte, a reduce-scatter (of its operand), an all-to-all and a
  permute take the time of an all-reduce within a factor 0.8 to 1.6, a gathered byte half of it.

Times leave out `Chip.launch_s`: a collective is one op like any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardlib.collective import KINDS
from shardlib.hardware.placement import Span
from shardlib.hardware.tier import Tier
from shardlib.hardware.topology import Topology

Bytes = TypeVar("Bytes", float, NDArray[np.float64])


@dataclass(frozen=True)
class LinearCost:
    """Seconds as a linear function of bytes; costs of steps in sequence add up.

    Attributes:
        latency_s: seconds that do not depend on the bytes.
        seconds_per_byte: seconds that each byte of the result adds.
    """

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def seconds(self, nbytes: Bytes) -> Bytes:
        """Time for a result of `nbytes` per device; elementwise for an array."""
        return self.latency_s + self.seconds_per_byte * nbytes

    def __add__(self, other: LinearCost) -> LinearCost:
        return LinearCost(
            self.latency_s + other.latency_s, self.seconds_per_byte + other.seconds_per_byte
        )

    def __mul__(self, times: float) -> LinearCost:
        return LinearCost(self.latency_s * times, self.seconds_per_byte * times)

    __rmul__ = __mul__


FREE = LinearCost()


@dataclass(frozen=True)
class _Line:
    """What a collective sees of one dim: a group of `ways` along it.

    `hops` is the distance between neighbours, `ring` whether the ends meet, `rate` the bytes/s that
    enter a device.
    """

    ways: int
    hops: int
    ring: bool
    rate: float
    tier: Tier

    @property
    def steps(self) -> int:
        """Steps until everyone has heard of everyone."""
        if self.tier.kind == "torus":
            return self.hops * (self.ways // 2 if self.ring else self.ways - 1)
        return 1 if self.tier.kind == "memory" else min(self.ways - 1, (self.ways - 1).bit_length())

    @property
    def all_to_all_factor(self) -> float:
        """Bytes over the busiest link, as a multiple of the buffer, times rate over link rate."""
        return (self.ways**2 // 4 if self.tier.kind == "torus" else self.ways - 1) / self.ways


def collective_cost(kind: str, spans: Iterable[Span], topology: Topology) -> LinearCost:
    """The cost of one collective whose group lies on `spans`; free for a group of one device."""
    return _cost(kind, spans if isinstance(spans, tuple) else tuple(spans), topology)


@lru_cache(maxsize=1 << 16)
def _cost(kind: str, spans: tuple[Span, ...], topology: Topology) -> LinearCost:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no collective; collectives are {', '.join(KINDS)}")
    tiers = _tiers(spans, topology)
    if not tiers:
        return FREE
    if len(tiers) == 1 and tiers[0][0].tier.kind == "memory":
        return _in_memory(kind, tiers[0][0])
    pipelined = all(tier.kind != "torus" for tier in topology.tiers)
    if kind == "all-to-all":
        return _combine([_all_to_all(lines) for lines in tiers], pipelined)
    if kind == "collective-permute":
        return _permute(tiers)
    gather = _through_all(tiers) if pipelined and len(tiers) > 1 else _gather(tiers, pipelined)
    if kind == "all-gather":
        return gather
    if kind == "all-reduce":
        return 2 * gather
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
    """Joins the spans on one dim, inner first, to the line that the group sees.

    Spans that follow each other join without a gap, so that the two halves of a ring are the ring
    again. Spans with another axis between them are priced as one line at the distance of the outer
    one, which is not faster than either.
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
    """All-gather, per byte of the gathered array: the outer tiers move what the inner ones hold a
    part of.
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


def _through_all(tiers: list[list[_Line]]) -> LinearCost:
    """All-gather by rings through all devices of several tiers, per byte of the gathered array."""
    devices, inner, slowest = math.prod(line.ways for lines in tiers for line in lines), 1, 0.0
    for lines in reversed(tiers):
        rate = inner * sum(line.rate for line in lines)
        slowest = max(slowest, (devices - 1) / devices / rate)
        inner *= math.prod(line.ways for line in lines)
    return LinearCost(_gather(tiers, True).latency_s, slowest)


def _gather_per_byte(lines: list[_Line]) -> float:
    """Seconds per byte of the array that one tier gathers, all its dims at work."""
    devices = math.prod(line.ways for line in lines)
    return max(
        (math.prod(line.ways for line in subset) - 1) / devices / sum(line.rate for line in subset)
        for size in range(1, len(lines) + 1)
        for subset in itertools.combinations(lines, size)
    )


def _in_memory(kind: str, line: _Line) -> LinearCost:
    """A collective among simulated devices that share one memory: between the measured ones with
    fewer and with more participants, where there are any.
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
    """Latencies of the tiers add up; the times per byte too, unless the tiers work on different
    chunks at once.
    """
    latency_s = sum(cost.latency_s for cost in costs)
    return LinearCost(
        latency_s, (max if pipelined else sum)(cost.seconds_per_byte for cost in costs)
    )


def _permute(tiers: list[list[_Line]]) -> LinearCost:
    """A cyclic shift by one place: every device sends in one direction; the message from last to
    first crosses a line.
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
