"""Items of parameters as they are stored between steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from shardlib.axes import LogicalAxes
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    OUTSIDE_LAYERS,
    Item,
    Stored,
    named,
)
from shardlib.graph.graph import ITEMSIZE
from shardlib.graph.problem import Parameter


def stored_items(
    parameters: tuple[Parameter, ...],
    names: Mapping[str, LogicalAxes],
    frozen: frozenset[tuple[str, int]],
    segments: Mapping[str, int],
) -> list[Item]:
    """Items of stored parameters; parameters that are alike share one."""
    alike: Counter[tuple[LogicalAxes, tuple[int, ...], str, float, frozenset[int], int, bool]] = (
        Counter(
            (
                names[p.path],
                p.shape,
                p.dtype,
                p.state_bytes_per_element,
                frozenset(dim for path, dim in frozen if path == p.path),
                segments.get(p.path, OUTSIDE_LAYERS),
                p.trained,
            )
            for p in parameters
        )
    )

    def item(
        axes: LogicalAxes,
        shape: tuple[int, ...],
        dtype: str,
        state: float,
        stack: frozenset[int],
        segment: int,
        trained: bool,
        count: int,
    ) -> Item:
        return Item(
            colours=named(axes),
            segment=segment,
            terms=lambda choice: (
                Stored(
                    count=count,
                    elements=math.prod(shape),
                    itemsize=ITEMSIZE.get(dtype, 4),
                    state=state,
                    shape=shape,
                    cut=choice.cut(axes),
                    frozen=stack,
                    trained=trained,
                ),
            ),
        )

    return [item(*key, count) for key, count in alike.items()]


def parameter_segments(facts: Facts) -> dict[str, int]:
    """Layer group of every parameter that a loop over layers reads."""
    segments: dict[str, int] = {}
    for op in facts.graph.ops:
        source = facts.weights.get(op.results[0]) if op.kind == "enter" else None
        if source is not None and facts.layers.segment(op.region) >= 0:
            segments.update(
                dict.fromkeys(facts.sources[source].paths, facts.layers.segment(op.region))
            )
    return segments
