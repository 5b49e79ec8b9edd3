"""Schedules as text, a column a tick.

>>> print(text(Timetable(schedule="1f1b", stages=2, microbatches=3)))
tick         0 1 2 3 4
stage 0  >   0 1 2 · ·
         <   · · 0 1 2
stage 1  >   · 0 1 2 ·
         <   · 0 1 2 ·
>>> from shardlib.schedules.table import orders
>>> print(orders_text(orders("zero-bubble", stages=2, microbatches=2)))
stage 0  F0 F1 ·· B0 W0 B1 W1
stage 1  ·· F0 B0 F1 B1 W0 W1
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.schedules.orders import Order
from shardlib.schedules.simulation import Durations, simulate
from shardlib.schedules.timetable import Timetable

IDLE = "·"


def text(table: Timetable) -> str:
    """Two rows a stage, forward (>) and backward (<) work, a column a tick: numbers of
    microbatches, after a letter for the chunk of layers where a stage has several.
    """
    rows = [("tick", "", [str(tick) for tick in range(table.ticks)])]
    for stage in range(table.stages):
        rows.append(
            (
                f"stage {stage}",
                ">",
                [
                    _cell(table, table.forward(tick, stage), tick < table.forward_ticks)
                    for tick in range(table.ticks)
                ],
            )
        )
        rows.append(
            (
                "",
                "<",
                [
                    _cell(table, table.backward(tick, stage), tick >= table.turn)
                    for tick in range(table.ticks)
                ],
            )
        )
    label = max(len(name) for name, _, _ in rows) + 2
    width = max(len(cell) for _, _, cells in rows for cell in cells)
    return "\n".join(
        f"{name:{label}}{direction:4}{' '.join(f'{cell:>{width}}' for cell in cells)}"
        for name, direction, cells in rows
    )


def orders_text(schedule: Sequence[Order]) -> str:
    """A row a stage, what it does one after the other (`shardlib.schedules.orders`), where it waits
    for nothing but its neighbours and all work takes equally long.
    """
    spans = simulate(schedule, Durations(forward=1.0, backward=1.0, weights=1.0))
    each = min(span.seconds for span in spans)
    cells = {(span.stage, round(span.start / each)): str(span.task) for span in spans}
    width, columns = max(map(len, cells.values())), range(1 + max(column for _, column in cells))
    rows = [
        (f"stage {stage}", [cells.get((stage, column), IDLE * width) for column in columns])
        for stage in range(len(schedule))
    ]
    label = max(len(name) for name, _ in rows) + 2
    return "\n".join(
        f"{name:{label}}{' '.join(f'{cell:>{width}}' for cell in row)}".rstrip(f" {IDLE}")
        for name, row in rows
    )


def _cell(table: Timetable, work: tuple[int, int, bool], within: bool) -> str:
    micro, chunk, works = work
    if not (works and within):
        return IDLE
    return str(micro) if table.virtual == 1 else f"{chr(ord('a') + chunk)}{micro}"
