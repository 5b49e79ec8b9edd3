"""The graph of shardings of a diagnosis: values as they are made, in the order of the program, and
the collectives that take them to the shardings in which they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardlib.diagnosis.rows import Meeting, Row, spec_text
from shardlib.diagnosis.source import Source, shown, text_of
from shardlib.report.elements import bytes_text
from shardlib.report.markup import BLUE, GREEN, ORANGE, WIDTH, Picture, render

#: Rows that are drawn, the most bytes first; and user units between them.
MOST, STEP = 16, 46


class Node(NamedTuple):
    """A value in one sharding; `at` is its vertical place."""

    name: str
    spec: str
    place: str
    at: float


class Edge(NamedTuple):
    """A collective, from the value that is made to what needs it."""

    made: Node
    needed: Node
    text: str
    width: float
    colour: str


def sharding_graph(rows: Sequence[Row], cured: Mapping[int, int], label: str) -> Picture | None:
    """The graph as a picture; None where no two shardings meet.

    Args:
        cured: rows that a cure removes.
        label: what the picture is of.
    """
    met = [(number, row, row.meeting) for number, row in enumerate(rows) if row.meeting]
    if not met:
        return None
    if len(met) > MOST:
        label = f"{label}: the {MOST} of {len(met)} collectives with the most bytes"
    met = met[:MOST]
    met.sort(key=lambda entry: _order(entry[2].value.source) or _order(entry[1].source))
    largest = max(row.bytes for _, row, _ in met)
    nodes, edges = dict[tuple[str, str, str], Node](), list[Edge]()
    for lane, (number, row, meeting) in enumerate(met):
        at = STEP * (lane + 1)
        made, needed = _made(meeting), _needed(meeting, row)
        node = nodes.setdefault(made, Node(*made, at))
        colour = BLUE if number in cured else GREEN if row.inherent else ORANGE
        edges.append(
            Edge(
                made=node,
                needed=Node(*needed, at),
                text=f"{bytes_text(row.bytes)} {row.kind} over {', '.join(row.axes) or '?'}",
                width=1 + 5 * row.bytes / largest,
                colour=colour,
            )
        )
    shapes = render("diagnosis/templates/shardings.svg", nodes=nodes.values(), edges=edges)
    return Picture(label, STEP * (len(met) + 1), shapes, WIDTH)


def _order(source: Source) -> tuple[str, int]:
    frame = source.user
    return (frame.file, frame.line) if frame else ("", 0)


def _made(meeting: Meeting) -> tuple[str, str, str]:
    value = meeting.value
    sums = f", partial over {'·'.join(meeting.reduced)}" if meeting.reduced else ""
    frame = value.source.user
    place = "argument" if value.argument is not None else frame.place if frame else ""
    return value.name or "a value", spec_text(meeting.produced) + sums, place


def _needed(meeting: Meeting, row: Row) -> tuple[str, str, str]:
    user = next((source for source in meeting.users if source.user), row.source)
    name = text_of(user.user) if user.user else ""
    return name or "its user", spec_text(meeting.needed), shown(user)
