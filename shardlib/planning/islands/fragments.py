"""Which parameters meet together.

A stack of layers takes part in every fragment, each of which has every so many of its layers; other
parameters are in one fragment, so that all are about as large. How a device holds a parameter says
which rows those are: each device takes every so many of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.axes import MeshShape
from shardlib.errors import PinError
from shardlib.layout import Layout
from shardlib.planning.plan import ParameterLayout


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a meeting is about of one parameter.

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
    """Whether a parameter is a stack whose rows can be told apart: its first dim has no colour, is
    sharded alike as it rests and as optimizer state, and has on every device a row for each
    fragment.
    """
    if (
        not parameter.shape
        or parameter.colours[0] is not None
        or parameter.rest[0] != parameter.state[0]
    ):
        return False
    return parameter.state.local_shape(parameter.shape, mesh)[0] >= count
