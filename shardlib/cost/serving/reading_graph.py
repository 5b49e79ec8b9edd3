"""A served model, from the graph of its forward pass of one token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardlib.cost.serving.served_model import (
    Attending,
    Dim,
    Lookup,
    Product,
    ServedModel,
    Weight,
)
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.graph.graph import Graph, Op
from shardlib.propagation.ties import Classes, tie_graph

#: Ops that hand a partial sum on as it is.
_THROUGH = frozenset({"convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy"})
_ADDED = frozenset({"add", "add_any", "sub"})


def served_model(
    graph: Graph, attention: Sequence[Attending], *, name: str, vocab: int
) -> ServedModel:
    """What a forward pass reads, computes and keeps of one token."""
    return _Reader(graph).model(attention, name, vocab)


class _Reader:
    """Walks over the ops of a graph once."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.classes = graph, Classes()
        tie_graph(self.classes, "", graph)
        self.counts: dict[object, int] = {}
        #: Values that are made of weights alone, and which weights these are.
        self.of: dict[int, frozenset[int]] = {
            index: frozenset({index})
            for index in graph.inputs
            if graph.values[index].role in ("parameter", "state")
        }
        self.experts: dict[int, int] = {}
        self.multiplied: set[int] = set()
        self.chosen = 0
        #: Values that are partial sums where something is sharded, and the number of the sum.
        self.partial: dict[int, int] = {}
        self.sums: dict[int, int] = {}
        self.products: list[tuple[Op, int, tuple[Dim, ...], int]] = []
        self.lookups: list[Lookup] = []

    def model(self, attention: Sequence[Attending], name: str, vocab: int) -> ServedModel:
        for op in self.graph.ops:
            self._visit(op)
        return ServedModel(
            name=name,
            weights=tuple(self._weight(index) for index in self.graph.inputs if index in self.of),
            products=tuple(self._product(*product) for product in self.products),
            lookups=tuple(self.lookups),
            attention=tuple(attention),
            vocab=vocab,
            chosen=self.chosen,
            dtype=self._dtype(),
        )

    def _dtype(self) -> str:
        """The dtype of what most FLOPs read of the token."""
        flops: dict[str, float] = {}
        for op, activation, *_ in self.products:
            dtype = self.graph.values[activation].dtype
            flops[dtype] = flops.get(dtype, 0.0) + op.flops * self.graph.trips(op.region)
        return max(flops, key=lambda dtype: flops[dtype], default="bfloat16")

    def _visit(self, op: Op) -> None:
        weights = [value for value in op.operands if value in self.of]
        activations = [value for value in op.operands if self._moves(value)]
        if weights and not activations:
            sources = frozenset[int]().union(*(self.of[value] for value in weights))
            self.of.update(dict.fromkeys(op.results, sources))
            return
        kind = op.kind
        if op.category in ("matmul", "convolution") or kind in GROUPED:
            if weights:
                self._multiply(op, weights)
                return
        elif kind == "gather" and op.operands[0] in self.of:
            self.lookups.append(
                Lookup(
                    summed=self._summed(op),
                    written=self._dims(op.results[0]),
                    itemsize=self.graph.values[op.results[0]].itemsize,
                    runs=self.graph.trips(op.region),
                )
            )
            return
        self._hand_on(op)

    def _moves(self, value: int) -> bool:
        """Whether a value depends on the token: it is neither made of weights nor a constant."""
        return value not in self.of and self.graph.values[value].role != "constant"

    def _multiply(self, op: Op, weights: Sequence[int]) -> None:
        behind = frozenset[int]().union(*(self.of[value] for value in weights))
        self.multiplied |= behind
        if op.kind in GROUPED:
            for value in weights:
                shape = self.graph.values[value].shape
                if len(shape) >= 3:
                    self.experts.update(dict.fromkeys(self.of[value], shape[-3]))
            self.chosen = max(self.chosen, self.graph.values[op.results[0]].shape[0])
        number = len(self.sums)
        self.sums[number] = number
        self.partial[op.results[0]] = number
        activation = next(value for value in op.operands if value not in self.of)
        self.products.append((op, activation, self._summed(op), number))

    def _hand_on(self, op: Op) -> None:
        """Sums stay partial through additions of partial sums, which are added up at once."""
        parts = [self.partial[value] for value in op.operands if value in self.partial]
        if op.kind in _ADDED and len(parts) == len(op.operands) == 2:
            first, second = (self._sum(number) for number in parts)
            self.sums[second] = first
            self.partial[op.results[0]] = first
        elif op.kind in _THROUGH and parts:
            self.partial[op.results[0]] = parts[0]

    def _sum(self, number: int) -> int:
        while self.sums[number] != number:
            number = self.sums[number]
        return number

    def _product(self, op: Op, activation: int, summed: tuple[Dim, ...], number: int) -> Product:
        trips, result = self.graph.trips(op.region), op.results[0]
        return Product(
            flops=op.flops * trips,
            dims=(*summed, *self._dims(result)),
            read=self._dims(activation),
            written=self._dims(result),
            itemsize=self.graph.values[result].itemsize,
            runs=trips,
            summed=summed,
            added_to=self._sum(number),
        )

    def _weight(self, index: int) -> Weight:
        value = self.graph.values[index]
        return Weight(
            path=value.path,
            dims=self._dims(index),
            dtype=value.dtype,
            multiplied=index in self.multiplied,
            experts=self.experts.get(index, 0),
        )

    def _summed(self, op: Op) -> tuple[Dim, ...]:
        """Dims of the operands that the op adds up over."""
        rule = op.rule
        dims: dict[str, Dim] = {}
        for (result, position, index), dim in rule.dims():
            factor = rule.major(dim)
            if not result and factor in rule.summed:
                value = op.operands[position]
                summed = self._dims(value)[index]
                dims.setdefault(summed[1], summed)
        return tuple(dims.values())

    def _dims(self, value: int) -> tuple[Dim, ...]:
        shape = self.graph.values[value].shape
        return tuple(
            (size, self._colour(value, index) if size > 1 else "")
            for index, size in enumerate(shape)
        )

    def _colour(self, value: int, index: int) -> str:
        group = self.classes.find(("", value, index))
        return f"c{self.counts.setdefault(group, len(self.counts))}"


def colours(dims: Iterable[Dim]) -> tuple[str, ...]:
    """The colours of some dims, without those of size 1."""
    return tuple(colour for _, colour in dims if colour)
