"""Factors of several ops that are the same index.

Ops that are put together to one have one rule. A dim of a value ties the factors of the op that
makes it to those of the ops that read it.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardlib.graph import FactorRule, Graph
from shardlib.graph.factors import Dims


class Joined:
    """Classes of (op, factor) that are one index, over some ops of a graph; a class is a number."""

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
        """The rule of one op in place of all: from operands to results, with classes that are
        summed and classes that must stay whole.

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
