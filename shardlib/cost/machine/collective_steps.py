"""The steps in which gathers and scatters over mesh axes are done, by the links of the axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.cost.machine.collectives import LinearCost, collective_cost
from shardlib.hardware.placement import Span
from shardlib.hardware.topology import Topology


def scatter_stages(spans: tuple[Span, ...], topology: Topology) -> tuple[tuple[Span, ...], ...]:
    """The steps in which a reduce-scatter over an axis is done, the major one first.

    On a torus one span after another (XLA for TPU has no other reduce-scatter), and between slices
    last, what is then left: XLA makes hierarchical collectives of those that cross the network
    (cloud.google.com/tpu/docs/multislice-introduction). On switches and networks alone all at once.
    """
    if len(spans) < 2 or not _on_torus(spans, topology):
        return (spans,) if spans else ()
    between, inside = _by_slice(spans, topology)
    return (*((span,) for span in inside), *([between] if between else []))


def gather_stages(spans: tuple[Span, ...], topology: Topology) -> tuple[tuple[Span, ...], ...]:
    """The steps in which an all-gather over an axis is done, the minor one first.

    On a torus of more than two dims one span after another (XLA for TPU makes an all-reduce of a
    gather along three); else all at once. Between slices comes first, as in `scatter_stages` the
    other way around.
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
    """Spans on the network between slices, and those inside of one."""
    between = tuple(span for span in spans if topology.tiers[span.tier].kind == "network")
    return between, tuple(span for span in spans if span not in between)


def _on_torus(spans: tuple[Span, ...], topology: Topology) -> bool:
    return any(topology.tiers[span.tier].kind == "torus" for span in spans)


@dataclass(frozen=True, kw_only=True)
class CollectiveStep:
    """One step of a gather or scatter of parameters.

    Attributes:
        spans: over which it is done.
        share: its result over the result of the whole.
        cost: seconds of a result.
    """

    spans: tuple[Span, ...]
    share: float
    cost: LinearCost


def steps(kind: str, spans: tuple[Span, ...], topology: Topology) -> tuple[CollectiveStep, ...]:
    """The steps of a gather or scatter of parameters."""
    groups = (scatter_stages if kind == "reduce-scatter" else gather_stages)(spans, topology)
    degrees = [math.prod(span.ways for span in group) for group in groups]
    after = [math.prod(degrees[i + 1 :]) for i in range(len(degrees))]
    shares = [float(n) if kind == "reduce-scatter" else 1.0 / n for n in after]
    return tuple(
        CollectiveStep(spans=group, share=share, cost=collective_cost(kind, group, topology))
        for share, group in zip(shares, groups, strict=True)
    )
