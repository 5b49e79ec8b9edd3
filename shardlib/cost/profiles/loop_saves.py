"""What one loop saves for another: pairs of ops, and a builder that rewrites them.

A loop over layers in the forward pass saves a value (`exit`), and the loop of the backward pass
reads it (`enter`). `Builder` drops some of these and clones the ops that make them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardlib.axes import LogicalAxes
from shardlib.cost.step.layers import weights_of
from shardlib.cost.step.liveness import leaves_loop
from shardlib.graph import FactorRule, Graph, Op, Value
from shardlib.graph.check import check
from shardlib.graph.problem import StepGraph
from shardlib.graph.prune import prune

#: Categories whose results are rematerialised.
CHEAP: frozenset[str] = frozenset({"elementwise", "movement"})
#: A saved value smaller than this share of all that a loop saves is not worth a thought: row
#: statistics.
_SMALL = 0.005


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A value that one loop saves and another reads; ops are indices."""

    value: int
    exit: int
    enter: int


def saved_pairs(graph: Graph) -> list[Pair]:
    exits = {op.results[0]: index for index, op in enumerate(graph.ops) if op.kind == "exit"}
    return [
        Pair(
            value=graph.ops[exits[op.operands[0]]].operands[0],
            exit=exits[op.operands[0]],
            enter=index,
        )
        for index, op in enumerate(graph.ops)
        if op.kind == "enter" and op.operands[0] in exits
    ]


class Builder:
    """Rewrites what one loop saves for another."""

    def __init__(
        self,
        step: StepGraph,
        names: tuple[LogicalAxes, ...],
        forward: int,
        backward: int,
        again: frozenset[int],
        cheap: bool,
        named: frozenset[int],
    ) -> None:
        graph = step.graph
        self._graph, self._weights, self._forward, self._backward = (
            graph,
            frozenset(weights_of(step)),
            forward,
            backward,
        )
        self._rematerialised, self._cheap, self._named = again, cheap, named
        self._values, self._names = list(graph.values), list(names)
        self._producers = graph.producers()
        pairs = [
            pair
            for pair in saved_pairs(graph)
            if (graph.ops[pair.exit].region, graph.ops[pair.enter].region) == (forward, backward)
        ]
        self._saved = {pair.value: graph.ops[pair.enter].results[0] for pair in pairs}
        total = sum(graph.values[pair.value].bytes for pair in pairs)
        dropped = [pair for pair in pairs if self._replaceable(pair, total * _SMALL)]
        self._kept = {
            value: inside
            for value, inside in self._saved.items()
            if value not in {pair.value for pair in dropped}
        }
        self._dropped = dropped
        self._exits: list[Op] = []
        self._clones: list[Op] = []
        self._copies: dict[int, int] = {}

    def _replaceable(self, pair: Pair, small: float) -> bool:
        """Whether a saved value is the result of element-wise ops that no matmul reads in the other
        loop.
        """
        maker = self._producers.get(pair.value)
        if (
            maker is None
            or pair.value in self._named
            or self._graph.values[pair.value].bytes < small
        ):
            return False
        op = self._graph.ops[maker]
        if maker in self._rematerialised:
            return True
        if pair.value in self._weights:
            return False
        return (
            self._cheap
            and op.category in CHEAP
            and op.region == self._forward
            and not self._feeds_matmul(self._graph.ops[pair.enter].results[0])
        )

    def _feeds_matmul(self, value: int) -> bool:
        """Whether a matmul or a kernel of several ops reads a value, as it is or through views and
        casts.
        """
        views = {value}
        for op in self._graph.ops:
            if op.region == self._backward and views.intersection(op.operands):
                if op.category in ("matmul", "opaque", "convolution"):
                    return True
                if op.category == "movement" or op.kind == "convert_element_type":
                    views.update(op.results)
        return False

    def rewritten(self) -> tuple[Graph, tuple[LogicalAxes, ...]]:
        """The graph and the names of its values; as they were where nothing is gained or something
        does not fit.
        """
        before = self._graph, tuple(self._names)
        swapped = {
            self._graph.ops[pair.enter].results[0]: self._again(pair.value)
            for pair in self._dropped
        }
        removed = sum(self._graph.values[pair.value].bytes for pair in self._dropped)
        if not swapped or sum(self._values[op.operands[0]].bytes for op in self._exits) >= removed:
            return before
        gone = {index for pair in self._dropped for index in (pair.exit, pair.enter)}
        last_exit = max(pair.exit for pair in self._dropped)
        first_enter = min(pair.enter for pair in self._dropped)
        ops: list[Op] = []
        for index, op in enumerate(self._graph.ops):
            if index == first_enter:
                entering = [clone for clone in self._clones if clone.kind == "enter"]
                ops += entering
            if index not in gone:
                ops.append(
                    replace(op, operands=tuple(swapped.get(value, value) for value in op.operands))
                )
            if index == last_exit:
                ops += self._exits
        computed = [clone for clone in self._clones if clone.kind != "enter"]
        position = (
            max(
                index
                for index, op in enumerate(ops)
                if op.kind == "enter" and op.region == self._backward
            )
            + 1
        )
        graph = prune(
            replace(
                self._graph,
                values=tuple(self._values),
                ops=(*ops[:position], *computed, *ops[position:]),
            )
        )
        check(graph)
        return graph, tuple(self._names)

    def _again(self, value: int) -> int:
        """The number of a value in the other loop, saved or rematerialised."""
        if value in self._kept:
            return self._kept[value]
        maker = self._producers.get(value)
        if maker is None or self._home(self._graph.ops[maker]) != self._forward:
            return value
        if value not in self._copies:
            op = self._graph.ops[maker]
            if op.region != self._forward:  # of a loop inside
                self._save(value, op)
            elif (
                maker not in self._rematerialised
                and (quotient := self._quotient(value)) is not None
            ):
                self._multiply(value, quotient)
            elif op.category in CHEAP or maker in self._rematerialised:
                self._compute(op)
            elif op.kind == "enter":
                self._copies[value] = self._new(value)
                self._clones.append(
                    replace(op, results=(self._copies[value],), region=self._backward)
                )
            else:
                self._save(value, op)
        return self._copies[value]

    def _home(self, op: Op) -> int:
        """The region that the results of an op belong to."""
        return self._graph.regions[op.region].parent if leaves_loop(op) else op.region

    def _compute(self, op: Op) -> None:
        operands = tuple(self._again(operand) for operand in op.operands)
        results = tuple(self._new(result) for result in op.results)
        self._copies.update(zip(op.results, results, strict=True))
        self._clones.append(replace(op, operands=operands, results=results, region=self._backward))

    def _quotient(self, value: int) -> tuple[Op, int] | None:
        """A division of a value whose result, or a cast of it, is saved: a softmax, of which the
        backward kernel reads the result.
        """
        for op in self._graph.ops:
            if op.kind == "div" and op.region == self._forward and op.operands[0] == value:
                casts = [
                    cast.results[0]
                    for cast in self._graph.ops
                    if cast.kind == "convert_element_type" and cast.operands == op.results
                ]
                saved = next(
                    (result for result in (*op.results, *casts) if result in self._kept), None
                )
                if saved is not None:
                    return op, saved
        return None

    def _multiply(self, value: int, quotient: tuple[Op, int]) -> None:
        """Computes a value from its quotient and what it was divided by."""
        division, saved = quotient
        divisor = self._again(division.operands[1])
        self._copies[value] = self._new(value)
        self._clones.append(
            replace(
                division,
                kind="mul",
                operands=(self._kept[saved], divisor),
                results=(self._copies[value],),
                region=self._backward,
            )
        )

    def _save(self, value: int, op: Op) -> None:
        """Saves a value: a new stack that the first loop fills and the other reads."""
        shape = self._graph.values[value].shape
        trips = self._graph.regions[self._forward].trips
        stacked = len(self._values)
        self._values.append(replace(self._graph.values[value], shape=(trips, *shape)))
        self._names.append((None, *self._names[value]))
        inside = self._copies[value] = self._new(value)
        slices = tuple((factor,) for factor in range(1, len(shape) + 1))
        stack = ((0,), *slices)
        sizes = (trips, *shape)
        self._exits.append(
            Op(
                kind="exit",
                operands=(value,),
                results=(stacked,),
                category="boundary",
                region=self._forward,
                path=op.path,
                scope=op.scope,
                rule=FactorRule(
                    sizes=sizes, operands=(slices,), results=(stack,), whole=frozenset({0})
                ),
            )
        )
        self._clones.append(
            Op(
                kind="enter",
                operands=(stacked,),
                results=(inside,),
                category="boundary",
                region=self._backward,
                path=op.path,
                scope=op.scope,
                rule=FactorRule(
                    sizes=sizes, operands=(stack,), results=(slices,), whole=frozenset({0})
                ),
            )
        )

    def _new(self, value: int) -> int:
        self._values.append(replace(self._graph.values[value], role="internal", path=""))
        self._names.append(self._names[value])
        return len(self._values) - 1


def saved_bytes(step: StepGraph) -> int:
    """Bytes that loops save for other loops, but for copies of weights."""
    weights = weights_of(step)
    graph = step.graph
    values = {graph.ops[pair.exit].results[0]: pair.value for pair in saved_pairs(graph)}
    return sum(
        _bytes(graph.values[stacked]) for stacked, value in values.items() if value not in weights
    )


def _bytes(value: Value) -> int:
    return math.prod(value.shape) * value.itemsize
