"""Live ranges: which arrays are in memory at the same time.

A value lives from the op that makes it to the last op that reads it, directly or through fused ops.
What a loop reads from outside, and the stacks that it fills (XLA allocates a scan's stacked results
before the first iteration), live for the whole loop; what the body makes lives within one
iteration. The peak is the largest sum over all points of the program. Which point that is depends
on the layout, so `points` returns a handful of candidates: the peak under several hypothetical
weightings; pricing takes the largest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardlib.cost.step.fusion import Fusion
from shardlib.graph import Graph, Op

_LOOPS: frozenset[str] = frozenset({"scan", "while"})


def _chains(graph: Graph) -> list[tuple[int, ...]]:
    """For every region, itself and the regions around it, innermost first."""
    chains: list[tuple[int, ...]] = []
    for region in range(len(graph.regions)):
        chain: list[int] = []
        current = region
        while current >= 0:
            chain.append(current)
            current = graph.regions[current].parent
        chains.append(tuple(chain))
    return chains


def _extents(graph: Graph, chains: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """First and last op index of every region, with the regions inside it."""
    extents = [(len(graph.ops), -1)] * len(graph.regions)
    for index, op in enumerate(graph.ops):
        for region in chains[op.region]:
            extents[region] = (min(extents[region][0], index), max(extents[region][1], index))
    return extents


def _outermost(graph: Graph, chain: Iterable[int], home: frozenset[int]) -> int | None:
    """The outermost loop of `chain` that does not contain the value's home region."""
    outermost = None
    for region in chain:
        if region in home:
            break
        if graph.regions[region].kind in _LOOPS:
            outermost = region
    return outermost


def leaves_loop(op: Op) -> bool:
    """Whether a boundary op carries a value out of a loop: a stack, or the final carry, which also
    reads the first one.
    """
    return op.kind == "exit" or (op.kind == "carry" and len(op.operands) > 1)


@dataclass(frozen=True, kw_only=True)
class Accumulator:
    """A carry of a loop that every iteration only adds to: the cotangent of what all layers read,
    such as a bias of positions.

    Attributes:
        carry: value of the sum so far, in the body.
        added: value that an iteration adds.
        first, last: ops from which to which the sum is in memory: all of the loop.
    """

    carry: int
    added: int
    first: int
    last: int


def accumulators(graph: Graph) -> tuple[Accumulator, ...]:
    """The sums that loops of a program carry."""
    producers, readers = graph.producers(), Counter[int]()
    for op in graph.ops:
        readers.update(set(op.operands))
    extents = _extents(graph, _chains(graph))
    sums: list[Accumulator] = []
    for op in graph.ops:
        if op.kind != "carry" or len(op.operands) != 2:
            continue
        carry, total = op.operands
        maker = graph.ops[producers[total]] if total in producers else None
        if (
            maker is not None
            and maker.kind == "add_any"
            and carry in maker.operands
            and readers[carry] == 2  # the addition, and the op that takes it out of the loop
        ):
            added = maker.operands[maker.operands[0] == carry]
            first, last = extents[op.region]
            sums.append(Accumulator(carry=carry, added=added, first=first, last=last))
    return tuple(sums)


def intervals(graph: Graph, fusion: Fusion, ignore: frozenset[int]) -> dict[int, tuple[int, int]]:
    """First and last op index at which each materialised value is in memory."""
    chains = _chains(graph)
    extents = _extents(graph, chains)
    producers = graph.producers()
    home: dict[int, frozenset[int]] = {}
    births: dict[int, int] = {}
    for value in fusion.materialised:
        maker = producers.get(value)
        region = graph.ops[maker].region if maker is not None else 0
        births[value] = maker if maker is not None else 0
        if (
            maker is not None
            and leaves_loop(graph.ops[maker])
            and graph.regions[region].kind in _LOOPS
        ):
            births[value] = extents[region][0] if graph.ops[maker].kind == "exit" else maker
            region = graph.regions[region].parent
        home[value] = frozenset(chains[max(region, 0)])
    deaths = dict(births)
    for index, op in enumerate(graph.ops):
        for value in {root for operand in op.operands for root in fusion.roots[operand]}:
            if value not in deaths:
                continue
            loop = _outermost(graph, chains[op.region], home[value])
            deaths[value] = max(deaths[value], extents[loop][1] if loop is not None else index)
    for value in graph.outputs:
        if value in deaths:
            deaths[value] = len(graph.ops) - 1
    _in_place(graph, fusion, births, deaths)
    return {
        value: (births[value], deaths[value])
        for value in fusion.materialised
        if value not in ignore and graph.values[value].role == "internal"
    }


def _in_place(graph: Graph, fusion: Fusion, births: dict[int, int], deaths: dict[int, int]) -> None:
    """An element-wise kernel writes over an operand of the same size that nothing reads later: that
    operand ends one op earlier.
    """
    for index, op in enumerate(graph.ops):
        if op.category != "elementwise":
            continue
        for value in op.results:
            if value not in births or value in fusion.apart:
                continue
            dying = [
                root
                for operand in op.operands
                for root in fusion.roots[operand]
                if deaths.get(root) == index
                and births[root] < index
                and graph.values[root].bytes == graph.values[value].bytes
                and graph.values[root].role == "internal"
            ]
            if dying:
                deaths[dying[0]] = index - 1


def levels(
    graph: Graph, spans: dict[int, tuple[int, int]], weightings: Iterable[np.ndarray]
) -> list[np.ndarray]:
    """Bytes that are alive at every op, one array per hypothesis about the layout.

    Args:
        spans: key -> first and last op index.
        weightings: arrays of bytes per key, one per hypothesis.
    """
    profiles: list[np.ndarray] = []
    for weights in weightings:
        change = np.zeros(len(graph.ops) + 1)
        for key, (birth, death) in spans.items():
            change[birth] += weights[key]
            change[death + 1] -= weights[key]
        profiles.append(np.cumsum(change))
    return profiles


def points(spans: dict[int, tuple[int, int]], alive: Iterable[np.ndarray]) -> list[frozenset[int]]:
    """Sets of values that are alive together where memory may peak.

    Args:
        spans: key -> first and last op index.
        alive: bytes at every op by hypothesis, see `levels`.
    """
    return [
        alive_at(spans, peak, peak)
        for peak in dict.fromkeys(int(np.argmax(level)) for level in alive)
    ]


def alive_at(spans: dict[int, tuple[int, int]], first: int, last: int) -> frozenset[int]:
    """Values that are alive from one op to another."""
    return frozenset(
        key for key, (birth, death) in spans.items() if birth <= first and last <= death
    )
