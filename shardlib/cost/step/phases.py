"""Moments of a step that are the same in programs of different remat policies.

Programs of one model under different remat policies run the same loops over layers in the same
order. So the step falls into *moments*, a loop or a gap between two, that all of them have. What
other layer groups have saved at a moment does not depend on the policy of the class whose loop
runs, and that is how the memory of a step whose classes follow different policies is put together
(`shardlib.cost.pricing.variants.mixed_remat`).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.cost.step.layers import Layers
from shardlib.cost.terms.terms import OUTSIDE_LAYERS, Item
from shardlib.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Memory of one program at one moment.

    Attributes:
        segment: class of the loop, or `OUTSIDE_LAYERS` in a gap.
        points: items of memory at each op of the moment where memory may peak.
        stacks: items of what loops over layers have saved, and of their gradients, that is there
            for the whole moment.
    """

    segment: int
    points: tuple[list[Item], ...]
    stacks: list[Item]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a moment lies.

    Attributes:
        segment: class of the loop, or `OUTSIDE_LAYERS` in a gap.
        first, last: ops of the moment; a gap may have none.
        before, after: a value that is there from `before` or earlier to `after` or later is there
            for the whole moment.
    """

    segment: int
    first: int
    last: int
    before: int
    after: int


def spans(graph: Graph, layers: Layers) -> tuple[Span, ...]:
    """The moments of a step from the end of the forward loops on, in order: a gap, a loop, a gap
    and so on; before, there is less of everything.
    """
    loops: list[tuple[int, int, int, int]] = []
    for index, op in enumerate(graph.ops):
        segment = layers.segment(op.region)
        if segment == OUTSIDE_LAYERS:
            continue
        top = _top(graph, op.region)
        if loops and loops[-1][1] == top:
            loops[-1] = (*loops[-1][:3], index)
        else:
            loops.append((segment, top, index, index))
    seen = [segment for segment, *_ in loops]
    start = next((i for i, segment in enumerate(seen) if segment in seen[:i]), 0)
    listed: list[Span] = []
    for i in range(start, len(loops) + 1):
        before, after = (
            loops[i - 1][3] if i else 0,
            (loops[i][2] if i < len(loops) else len(graph.ops) - 1),
        )
        listed.append(
            Span(
                segment=OUTSIDE_LAYERS,
                first=before + bool(i),
                last=after - (i < len(loops)),
                before=before,
                after=after,
            )
        )
        if i < len(loops):
            segment, _, first, last = loops[i]
            listed.append(Span(segment=segment, first=first, last=last, before=first, after=last))
    return tuple(listed)


def _top(graph: Graph, region: int) -> int:
    """The region below the root that a region lies in."""
    while graph.regions[region].parent > 0:
        region = graph.regions[region].parent
    return region
