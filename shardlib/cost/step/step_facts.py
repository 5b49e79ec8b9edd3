"""What all items of one step graph ask about: colours, kernels, weights and gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from shardlib.axes import LogicalAxes
from shardlib.cost.step.attention_kernels import (
    between,
    kernel_heads,
    over_heads,
    without_tensor,
)
from shardlib.cost.step.capacity_experts import layers
from shardlib.cost.step.fusion import Fusion, Traits, fuse
from shardlib.cost.step.layers import Layers, find_layers, gradient_like, weights_of
from shardlib.cost.step.routed_experts import EVEN, GROUPED, Exchange
from shardlib.graph import Graph, Op
from shardlib.graph.problem import StepGraph
from shardlib.propagation.assignment import TOKENS, Choice, Cut, has, kinds
from shardlib.propagation.factor_colours import all_factor_colours


class Facts:
    """What the items of one step graph share: colours of values and factors, fusion, weights,
    gradients.

    Attributes:
        graph: the step graph.
        names: colour per dim of every value.
        factors: colour per factor of every op.
        fusion: kernels and materialised values.
        layers: layer groups.
        batch, sequence: colours of the batch and of the sequence.
        routes: whether tokens are routed between devices (`shardlib.cost.step.routed_experts`).
        exchange: how tokens travel to their experts.
        capped: layers of experts with a capacity, by region; only where tokens are routed.
        heads: heads of the kernels of attention, by index of the op.
        widths: colours of the width of these heads.
    """

    def __init__(
        self,
        step: StepGraph,
        names: tuple[LogicalAxes, ...],
        frozen: frozenset[tuple[str, int]],
        traits: Traits,
        *,
        batch: tuple[str | None, int] = (None, 1),
        sequence: tuple[str | None, int] = (None, 1),
        routes: bool = False,
        exchange: Exchange = EVEN,
    ) -> None:
        self.graph = step.graph
        self._sizes = batch, sequence
        self.batch, self.sequence, self.routes = batch[0], sequence[0], routes
        self.exchange = exchange
        self.capped = layers(step.graph) if routes else {}
        self.names = names = merged_names(step.graph, names, batch, sequence)
        self.weights, self.gradients = weights_of(step), gradient_like(step)
        self.factors = all_factor_colours(step.graph, names, {*self.weights, *self.gradients})
        self.rows = tuple(
            _query_factor(step.graph, op, names, colours, sequence[0])
            for op, colours in zip(step.graph.ops, self.factors, strict=True)
        )
        self.traits = traits
        self.fusion: Fusion = fuse(step.graph, traits)
        self.layers: Layers = find_layers(step.graph, self.weights)
        self.heads = {
            index: heads
            for index, op in enumerate(step.graph.ops)
            if (heads := kernel_heads(op, self.factors[index], batch[0], sequence[0])) is not None
        }
        self.widths = frozenset[str]().union(*(kernel.width for kernel in self.heads.values()))
        self._between = between(step.graph, self.heads, names)
        self.trips = tuple(step.graph.trips(region) for region in range(len(step.graph.regions)))
        self.sources = dict(zip(step.graph.inputs, step.inputs, strict=True))
        self.frozen = frozen
        self._cuts: dict[Choice, dict[LogicalAxes, Cut]] = {}
        self._of_last: tuple[Choice | None, dict[LogicalAxes, Cut]] = None, {}
        self._shared: dict[tuple[int, Choice], bool] = {}
        self.producers = step.graph.producers()
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(step.graph.ops):
            for value in dict.fromkeys(op.operands):
                self.consumers[value].append(index)

    def of(self, graph: Graph) -> Facts:
        """The facts of a part of the program that makes no gradients and whose values have the same
        indices.
        """
        batch, sequence = self._sizes
        step = StepGraph(
            graph=graph, inputs=tuple(self.sources[value] for value in graph.inputs), gradients=()
        )
        return Facts(
            step,
            self.names,
            self.frozen,
            self.traits,
            batch=batch,
            sequence=sequence,
            routes=self.routes,
            exchange=self.exchange,
        )

    def op_cut(self, index: int, choice: Choice) -> Cut:
        """Cut of the factors of an op."""
        cut = choice.cut(self.factors[index], self.graph.ops[index].rule.whole, self.rows[index])
        return over_heads(cut, self.heads[index]) if self.shares_heads(index, choice) else cut

    def value_cut(self, value: int, choice: Choice) -> Cut:
        """Cut of the dims of a value."""
        cut = self._plain_cut(value, choice)
        if value not in self._between.heads or not self.turned(value, choice):
            return cut
        position = self.names[value].index(self._between.heads[value].colour)
        return tuple(
            "tensor" if dim == position else without_tensor(part) for dim, part in enumerate(cut)
        )

    def _plain_cut(self, value: int, choice: Choice) -> Cut:
        last, cuts = self._of_last
        if choice is not last:  # one choice is asked about many values, and hashing it takes time
            cuts = self._cuts.setdefault(choice, {})
            self._of_last = choice, cuts
        axes = self.names[value]
        if axes not in cuts:
            cuts[axes] = choice.cut(axes)
        return cuts[axes]

    def shares_heads(self, index: int, choice: Choice) -> bool:
        """Whether an op is a kernel of attention whose heads the tensor axis shards inside of it
        alone, while it shards the sequence or the width of heads of what goes in and comes out.
        """
        if index not in self.heads:
            return False
        key = index, choice
        if key not in self._shared:
            self._shared[key] = self._shares_heads(index, choice)
        return self._shared[key]

    def _shares_heads(self, index: int, choice: Choice) -> bool:
        heads, op = self.heads[index], self.graph.ops[index]
        cut = choice.cut(self.factors[index], op.rule.whole, self.rows[index])
        return not any("tensor" in kinds(cut[factor]) for factor in heads.factors) and any(
            has(self._plain_cut(value, choice), "tensor") for value in (*op.operands, *op.results)
        )

    def plain(self, ops: Iterable[int], values: Iterable[int]) -> bool:
        """Whether ops and values are sharded as their colours say, and heads of attention change
        nothing about it.
        """
        return not (
            any(index in self.heads for index in ops)
            or any(value in self._between.heads for value in values)
        )

    def pairs(self, value: int, choice: Choice) -> bool:
        """Whether a gradient that a kernel of attention makes is such a value, and dims of a head
        are paired before the gradient of the projection is made of it.
        """
        return value in self._between.paired and self.turned(value, choice)

    def turned(self, value: int, choice: Choice) -> bool:
        """Whether a value lies between a projection whose heads the tensor axis shards along their
        width and a kernel of attention, so that it has whole heads already.
        """
        heads = self._between.heads.get(value)
        return heads is not None and any(
            name in heads.width and "tensor" in kinds(part)
            for name, part in zip(self.names[value], self._plain_cut(value, choice), strict=True)
        )

    def widths_of(self, region: int) -> frozenset[str]:
        """The colours of all indices of the grouped matmuls of a region."""
        return frozenset(
            colour
            for number, op in enumerate(self.graph.ops)
            if op.region == region and op.kind in GROUPED
            for colour in self.factors[number]
            if colour is not None
        )

    def shares_width(self, region: int, choice: Choice) -> bool:
        """Whether tensor shards an index of the grouped matmuls of a region."""
        return any(
            has(self.op_cut(number, choice), "tensor")
            for number, op in enumerate(self.graph.ops)
            if op.region == region and op.kind in GROUPED
        )

    def visits(self, value: int) -> float:
        """Rows of an array over the tokens of the batch: how many experts a token visits."""
        rows = math.prod(self.graph.values[value].shape[:-1])
        return max(1.0, rows / (self._sizes[0][1] * self._sizes[1][1]))

    def frozen_dims(self, value: int) -> frozenset[int]:
        """Dims of an input that count layers."""
        source = self.sources.get(value)
        if source is None:
            return frozenset()
        return (
            frozenset({0})
            if source.stacked
            else frozenset(dim for path, dim in self.frozen if path in source.paths)
        )


def merged_names(
    graph: Graph,
    names: tuple[LogicalAxes, ...],
    batch: tuple[str | None, int],
    sequence: tuple[str | None, int],
) -> tuple[LogicalAxes, ...]:
    """The colours of every value, with `TOKENS` for dims that merge batch and sequence."""
    (name, examples), (along, length) = batch, sequence
    if name is None or along is None or length == 1:
        return names

    def merges(colour: str | None, size: int, axes: LogicalAxes) -> bool:
        return colour == name and along not in axes and size % (examples * length) == 0

    return tuple(
        tuple(
            TOKENS if merges(colour, size, axes) else colour
            for colour, size in zip(axes, value.shape, strict=True)
        )
        for axes, value in zip(names, graph.values, strict=True)
    )


def _query_factor(
    graph: Graph, op: Op, names: tuple[LogicalAxes, ...], colours: LogicalAxes, sequence: str | None
) -> int | None:
    """Of several factors along the sequence (queries and keys of attention), the one that the
    largest value has first; None where there is one.
    """
    along = [i for i, colour in enumerate(colours) if colour == sequence and i not in op.rule.whole]
    if sequence is None or len(along) < 2:
        return None
    sides = [
        (value, dims)
        for values, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results))
        for value, dims in zip(values, all_dims, strict=True)
    ]
    value, dims = max(
        sides, key=lambda side: (names[side[0]].count(sequence), graph.values[side[0]].bytes)
    )
    return next(
        (
            major
            for dim, factors in enumerate(dims)
            if names[value][dim] == sequence and (major := op.rule.major(factors)) in along
        ),
        None,
    )
