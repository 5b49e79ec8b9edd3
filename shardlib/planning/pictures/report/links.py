"""Which parameters and activations cause a collective, and which collectives these have.

A gather names the parameter that it is for. A reduction of gradients does not: it belongs to the
parameters whose gradient on a device, of one layer or of all, has as many bytes as its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardlib.collective import Collective
from shardlib.layout import Layout
from shardlib.planning.plan import Plan
from shardlib.planning.text.figures import CollectiveRow, collective_rows, in_every_step
from shardlib.planning.text.parameters import ParameterRow

#: Bytes of an element of a gradient.
_ITEMS = (4, 2, 1)


def causes(plan: Plan, rows: Sequence[ParameterRow]) -> list[tuple[CollectiveRow, list[int]]]:
    """The kinds of collectives of a step, each with the numbers of the parameters that cause it."""
    collectives = in_every_step(plan.estimate.collectives)
    return [
        (
            row,
            sorted(
                {
                    number
                    for collective in collectives
                    if (collective.kind, collective.axes) == (row.kind, row.axes)
                    for number in _of(collective, plan, rows)
                }
            ),
        )
        for row in collective_rows(collectives)
    ]


def moved(plan: Plan, row: CollectiveRow) -> list[int]:
    """The numbers of the activations that a kind of collective moves."""
    return [
        number
        for number, activation in enumerate(plan.activations)
        if any((move.kind, move.axes) == (row.kind, row.axes) for move in activation.moves)
    ]


def _of(collective: Collective, plan: Plan, rows: Sequence[ParameterRow]) -> Iterator[int]:
    """The numbers of the parameters that a collective is for."""
    for number, row in enumerate(rows):
        if (collective.cause and _same(collective.cause, row)) or (
            collective.kind in ("reduce-scatter", "all-reduce")
            and collective.cause.startswith("transpose(")
            and row.example.trained
            and len(row.example.shape) > 1
            and collective.bytes in _gradient_bytes(plan, row, collective.kind)
            and _meets(collective, row)
        ):
            yield number


def _same(cause: str, row: ParameterRow) -> bool:
    """Whether a cause is the path of a parameter, or of the module that has it."""
    pattern = [part for part in row.pattern.split(".") if part != "*"]
    parts = [part for part in cause.split(".") if part != "*" and not part.isdigit()]
    return bool(parts) and pattern[: len(parts)] == parts and len(pattern) - len(parts) <= 1


def _meets(collective: Collective, row: ParameterRow) -> bool:
    """Whether a collective runs along axes that its gradient is a partial sum over."""
    return not set(collective.axes) & row.example.compute.axes


def _gradient_bytes(plan: Plan, row: ParameterRow, kind: str) -> set[int]:
    """Bytes that a device may have of a gradient: of one layer or all, sharded or not."""
    shape = row.example.shape
    layouts = [row.example.gradient, row.example.rest, row.example.state]
    if kind == "all-reduce":
        layouts.append(row.example.compute)
    sizes: set[int] = set()
    for layout in layouts:
        elements = _local(shape, layout, plan)
        for layers in {1, shape[0]}:
            for stages in {1, plan.mesh["stage"]}:
                sizes |= {round(elements * item * stages / layers) for item in _ITEMS}
    return sizes


def _local(shape: Sequence[int], layout: Layout, plan: Plan) -> float:
    degree = math.prod(plan.mesh.ways(axes) for axes in layout)
    return math.prod(shape) / degree
