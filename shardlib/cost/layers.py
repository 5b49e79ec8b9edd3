"""Layer groups: the loops of a step that run over the same layers.

The forward loop over a stack of layers and the backward loop over it read the same parameters; both
belong to one *layer group*. Pipeline stages, and rematerialisation of only some of the layers,
divide a group by its number of layers. Everything else is the *ends* of the model: embedding, head
and loss.

`weights_of` finds the parameters that a loop reads, `gradient_like` the gradients that it makes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardlib.cost.terms import OUTSIDE_LAYERS
from shardlib.graph import Dims, FactorRule, Graph, Op, StepGraph


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layer groups of one step graph.

    Attributes:
        counts: number of layers of each class, in the order of the forward pass.
        regions: class of each region; `OUTSIDE_LAYERS` outside of all.
        carried: value that each class carries from layer to layer: the residual stream; -1 if there
            is none.
    """

    counts: tuple[int, ...]
    regions: tuple[int, ...]
    carried: tuple[int, ...]

    def segment(self, region: int) -> int:
        """Class of a region, or `OUTSIDE_LAYERS`."""
        return self.regions[region]


def find_layers(graph: Graph, weights: Mapping[int, int]) -> Layers:
    """Finds the layer groups.

    Args:
        weights: value -> the parameter that it is a copy, cast or slice of.
    """
    top = _top_regions(graph)
    reads: dict[int, set[int]] = {}
    for op in graph.ops:
        if (
            op.kind == "enter"
            and op.results[0] in weights
            and top[op.region] > 0
            and graph.regions[top[op.region]].parent == 0
            and op.region == top[op.region]
            and graph.regions[op.region].trips > 0
        ):
            reads.setdefault(op.region, set()).add(weights[op.results[0]])
    classes: list[tuple[set[int], list[int]]] = []
    for region, sources in reads.items():
        alike = [
            entry
            for entry in classes
            if entry[0] & sources
            and graph.regions[entry[1][0]].trips == graph.regions[region].trips
        ]
        if alike:
            alike[0][0].update(sources)
            alike[0][1].append(region)
        else:
            classes.append((set(sources), [region]))
    owner = {region: number for number, (_, regions) in enumerate(classes) for region in regions}
    return Layers(
        counts=tuple(graph.regions[regions[0]].trips for _, regions in classes),
        regions=tuple(
            owner.get(top[region], OUTSIDE_LAYERS) for region in range(len(graph.regions))
        ),
        carried=tuple(_carried(graph, regions[0]) for _, regions in classes),
    )


def repeated_calls(graph: Graph, layers: Layers, weights: Mapping[int, int]) -> int:
    """The number of uses of the same parameters outside of all layer groups, for example if a loss
    calls its model several times: the calls become one loop, or the parameters are stacked several
    times. 1 without repetition.

    Args:
        weights: value -> the parameter that it is a copy, cast or slice of.
    """
    top, repeats = _top_regions(graph), 1
    for op in graph.ops:
        read = [value for value in op.operands if value in weights]
        outside = layers.segment(op.region) == OUTSIDE_LAYERS
        if op.category == "matmul" and read and outside and top[op.region] > 0:
            repeats = max(repeats, graph.regions[top[op.region]].trips)
        elif op.kind == "stack" and read:
            repeats = max(repeats, *Counter(read).values())
    return repeats


def _top_regions(graph: Graph) -> list[int]:
    """For every region, its enclosing region directly below the root; 0 for the root."""
    outermost: list[int] = []
    for region in range(len(graph.regions)):
        current = region
        while current > 0 and graph.regions[current].parent > 0:
            current = graph.regions[current].parent
        outermost.append(current)
    return outermost


def _carried(graph: Graph, region: int) -> int:
    """The largest floating-point array that a loop carries."""
    carried = [
        value
        for op in graph.ops
        if op.kind == "carry" and op.region == region
        for value in op.results
        if "float" in graph.values[value].dtype
    ]
    return max(carried, key=lambda value: graph.values[value].bytes, default=-1)


def _repeats(graph: Graph, op: Op) -> bool:
    """True if an op writes its operand several times, so that its result is not a copy of it."""
    return op.kind == "broadcast_in_dim" and math.prod(
        graph.values[op.results[0]].shape
    ) > math.prod(graph.values[op.operands[0]].shape)


def weights_of(step: StepGraph) -> dict[int, int]:
    """Values that are copies, casts, slices or stacks of one parameter, trained or frozen -> the
    value index of that parameter.
    """
    parameters = {
        value: value for role in ("parameter", "frozen") for value in step.graph.inputs_of(role)
    }
    for op in step.graph.ops:
        if op.category not in ("elementwise", "movement", "boundary") or _repeats(step.graph, op):
            continue
        sources = {parameters.get(value) for value in op.operands if step.graph.values[value].shape}
        if len(sources) == 1 and None not in sources:
            source = next(iter(sources))
            assert source is not None
            if op.kind != "carry":
                parameters.update(dict.fromkeys(op.results, source))
    return parameters


def gradient_like(step: StepGraph) -> frozenset[int]:
    """Values that reach a gradient through ops that contract nothing (sums over dims of size 1
    included).
    """
    producers = step.graph.producers()
    values: set[int] = set()
    pending = list(step.gradients)
    while pending:
        value = pending.pop()
        if value in values:
            continue
        values.add(value)
        maker = producers.get(value)
        if maker is None:
            continue
        op = step.graph.ops[maker]
        if op.category in ("elementwise", "movement", "boundary", "reduction") and all(
            op.rule.sizes[factor] == 1 for factor in op.rule.summed
        ):
            pending.extend(op.operands)
    return frozenset(values)


# --------------------------------------------------------------------------------------------------
# Factors of several ops that are the same index.
#
# A group of ops that is replaced by one op has one rule. A dim of a value ties the factors of the
# op that makes it to those of the ops that read it.


class Joined:
    """Equivalence classes of (op, factor) over some ops of a graph; each class is one index."""

    def __init__(self, graph: Graph, ops: Iterable[int]) -> None:
        self._graph = graph
        self._parent: dict[tuple[int, int], tuple[int, int]] = {}
        self._dims: dict[int, tuple[int, Dims]] = {}
        for index in sorted(ops):
            op = graph.ops[index]
            for values, all_dims in (
                (op.operands, op.rule.operands),
                (op.results, op.rule.results),
            ):
                for value, dims in zip(values, all_dims, strict=True):
                    self._tie(value, index, dims)
        self._number: dict[tuple[int, int], int] = {}

    def _tie(self, value: int, index: int, dims: Dims) -> None:
        first, first_dims = self._dims.setdefault(value, (index, dims))
        for factors, theirs in zip(dims, first_dims, strict=True):
            if len(factors) == len(theirs):
                for left, two in zip(factors, theirs, strict=True):
                    if (
                        self._graph.ops[index].rule.sizes[left]
                        == self._graph.ops[first].rule.sizes[two]
                    ):
                        self._parent[self._find((index, left))] = self._find((first, two))

    def _find(self, key: tuple[int, int]) -> tuple[int, int]:
        while (above := self._parent.get(key, key)) != key:
            key = above
        return key

    def _class(self, index: int, factor: int) -> int:
        return self._number.setdefault(self._find((index, factor)), len(self._number))

    def classes(self, index: int, factors: Iterable[int]) -> frozenset[int]:
        """The classes of some factors of an op."""
        return frozenset(self._class(index, factor) for factor in factors)

    def size(self, label: int) -> int:
        """Elements of a class."""
        index, factor = next(key for key, number in self._number.items() if number == label)
        return self._graph.ops[index].rule.sizes[factor]

    def rule(
        self,
        operands: tuple[int, ...],
        results: tuple[int, ...],
        *,
        summed: frozenset[int],
        unsharded: frozenset[int],
    ) -> FactorRule:
        """The rule of one op that replaces all: from operands to results, with summed and whole
        classes.

        A class that occurs twice in a value keeps its first dim; dims of a value that the ops do
        not mention have no factors.
        """
        order: dict[int, int] = {}

        def dims(value: int) -> Dims:
            if value not in self._dims:
                return tuple(() for _ in self._graph.values[value].shape)
            index, value_dims = self._dims[value]
            return tuple(
                tuple(order.setdefault(self._class(index, factor), len(order)) for factor in dim)
                for dim in value_dims
            )

        left, right = tuple(map(dims, operands)), tuple(map(dims, results))
        return FactorRule(
            sizes=tuple(self.size(label) for label in order),
            operands=left,
            results=right,
            summed=frozenset(order[label] for label in summed - unsharded if label in order),
            whole=frozenset(order[label] for label in unsharded if label in order),
        )
