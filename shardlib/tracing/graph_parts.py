"""The parts of one graph, collected while a program is walked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.graph import Graph, Op, Region, Value
from shardlib.jax_types import Aval
from shardlib.report import Finding
from shardlib.tracing.layouts import OwnLayout
from shardlib.tracing.program import Call, Equation
from shardlib.tracing.trip_counts import counted_trips, dtype_name

#: A custom call, and the values of a graph that are its operands.
PlacedCall = tuple[Call, tuple[int, ...]]
#: A layout that a program brings along, and the value of a graph that has it.
PlacedLayout = tuple[OwnLayout, int]


@dataclass(frozen=True, kw_only=True)
class Translated:
    """A program as a graph.

    Attributes:
        graph: checked.
        calls: the custom calls by path, those of loops and branches too, with the values that are
            their operands.
        values: number of a value of the program, outside of loops and branches -> value of the
            graph.
        layouts: those that the program brings along, with the values of the graph that have them.
    """

    graph: Graph
    calls: Mapping[str, PlacedCall]
    values: Mapping[int, int]
    layouts: tuple[PlacedLayout, ...] = ()


class GraphParts:
    """Values, ops, regions and findings of one graph."""

    def __init__(self) -> None:
        self.calls: dict[str, PlacedCall] = {}
        self.numbers: dict[int, int] = {}
        self.layouts: list[PlacedLayout] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = [Region(parent=-1, kind="root")]
        self.findings: dict[tuple[str, str, str], Finding] = {}

    def value(self, aval: Aval, path: str = "", role: str = "internal") -> int:
        """Adds a value to the graph.

        Args:
            aval: abstract value, with shape and dtype.
            path: tree path of an input; empty for others.
            role: "parameter", "frozen", "state", "batch" or "internal".

        Returns:
            Its number.
        """
        self.values.append(
            Value(
                shape=tuple(getattr(aval, "shape", ())),
                dtype=dtype_name(aval),
                path=path,
                role=role,
            )
        )
        return len(self.values) - 1

    def shapes(self, values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.values[value].shape for value in values)

    def region(self, parent: int, kind: str, trips: int) -> int:
        """Adds a region.

        Args:
            parent: number of the region that it stands in.
            kind: "scan", "while" or another word of `shardlib.graph`.
            trips: how often it runs for one run of its parent.

        Returns:
            Its number.
        """
        self.regions.append(Region(parent=parent, kind=kind, trips=trips))
        return len(self.regions) - 1

    def note(self, code: str, severity: str, message: str, location: str, hint: str = "") -> None:
        """Adds a finding, unless the same has been said of the same place.

        Args:
            code: kebab-case name of the kind of finding.
            severity: "info", "warning" or "error".
            message: one or two sentences.
            location: scope or path of an equation.
            hint: what to try.
        """
        finding = Finding(code=code, severity=severity, message=message, where=location, hint=hint)
        self.findings.setdefault((code, message, location), finding)

    def trips(self, equation: Equation, first: int) -> int:
        """How often a while loop runs; 1 with a finding where that is not known.

        Args:
            equation: the loop.
            first: position of its first carry among its operands.
        """
        count = counted_trips(equation, first)
        if count is None:
            self.note(
                "unknown-trip-count",
                "warning",
                "a while loop runs an unknown number of times; its cost is counted once",
                equation.scope or f"equation {equation.path}",
                "use jax.lax.scan or jax.lax.fori_loop with constant bounds",
            )
        return 1 if count is None else count

    def cost(self, region: int, above: int) -> float:
        """FLOPs of a region and everything inside it, for one run of the region `above`.

        Args:
            region: number of a region.
            above: number of a region around it.

        Returns:
            FLOPs, trips of the regions between them included.
        """
        total = 0.0
        for op in self.ops:
            trips, ancestor = 1.0, op.region
            while ancestor not in (above, -1) and ancestor != region:
                trips *= self.regions[ancestor].trips
                ancestor = self.regions[ancestor].parent
            total += op.flops * trips if ancestor == region else 0.0
        return total
