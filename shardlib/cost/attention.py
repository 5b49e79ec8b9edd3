"""Fused attention: step graphs in which each core of attention is one kernel.

`fused` finds the cores, forward, rematerialised and backward, and replaces them by kernels
(arXiv:2205.14135, arXiv:2307.08691; cuDNN; Pallas splash attention). A causal mask skips the blocks
above the diagonal: of n x n blocks, n (n + 1) / 2 are computed; a window skips those before it.
Values keep their indices, so that facts about them stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from shardlib.cost.terms import HeadCondition
from shardlib.graph import Dims, FactorRule, Graph, StepGraph
from shardlib.propagation.colours import UnionFind
from shardlib.propagation.contractions import DividedHeads

# --------------------------------------------------------------------------------------------------
# Attention kernels: the ops that stand for them, and the part of their size that does not depend on
# the mesh.
#
# A fused kernel computes the core of attention block by block and does not write scores:
#
#     forward    reads q, k, v; writes out and one statistic per row; 2 matmuls
#     backward   reads q, k, v, out's gradient and the statistic; writes the three gradients;
#                5 matmuls, one of them the scores again
#
# The statistic has one number per query and head: of its factors, those that are neither batch nor
# sequence are heads, and the one of these that keys also have is the group.
#
#     query [batch, group, each, seq, width]    key [batch, seq, group, width]
#     statistic [batch, group, each, seq]

#: Kinds of the ops that stand for kernels.
FORWARD, BACKWARD = "fused_attention", "fused_attention_backward"
KERNELS: tuple[str, ...] = (FORWARD, BACKWARD)


def causal_share(keys: int, block: int, window: int = 0) -> float:
    """Share of the blocks of queries and keys that are neither above the diagonal nor before a
    window of so many keys; 0: no window.

    >>> causal_share(512, 128), causal_share(512, 128, 128), causal_share(1 << 20, 128) < 0.501
    (0.625, 0.4375, True)
    """
    n = math.ceil(keys / block)
    if not window:
        return (n + 1) / (2 * n)
    before = [
        min(query, math.ceil((window - 1) / block)) for query in range(n)
    ]  # blocks of keys before the diagonal
    return sum(blocks + 1 for blocks in before) / n**2


@dataclass(frozen=True, kw_only=True)
class KernelHeads:
    """The heads of one attention kernel.

    Attributes:
        group_factor: factor of the heads of keys and values.
        query_factors: factors of the heads of queries in a group.
        groups: heads of keys and values.
        queries_per_group: heads of queries per group.
        colour: colour of the groups.
        width_colours: colours of the dims that must stay whole in the kernel.
    """

    group_factor: int
    query_factors: frozenset[int]
    groups: int
    queries_per_group: int
    colour: str | None
    width_colours: frozenset[str]

    @property
    def factors(self) -> frozenset[int]:
        """The factors of all heads."""
        return self.query_factors | {self.group_factor}

    def condition(self, *shardings: DividedHeads) -> HeadCondition:
        """The heads of a term that counts only in these cases."""
        return HeadCondition(
            groups=self.groups, queries_per_group=self.queries_per_group, shardings=shardings
        )


def without_tensor(part: str | None) -> str | None:
    """The sharding of a dim without the tensor axis."""
    remaining = [axis for axis in (part or "").split("+") if axis != "tensor"]
    return "+".join(remaining) or None


# --------------------------------------------------------------------------------------------------
# Cores of attention, identified in a step graph by their structure.
#
# The core is scores = q k^T, their softmax along the rows, and its product with v; backward, the
# gradients of q, k and v. Its structure: *activation matmuls*, of two activations; an exponential
# of element-wise functions and views of them, followed by a sum along rows. All their descendants
# up to the next matmuls, the *sinks*, are the core; one sink mixes values by the softmax, the
# others make gradients, for which the gradient of the softmax is one more activation matmul.
# Nothing outside may read a value that the kernels do not write.

#: Categories of the ops between the matmuls.
_CHAIN: frozenset[str] = frozenset({"elementwise", "reduction", "movement"})
_EXPONENTIALS: frozenset[str] = frozenset({"exp", "exp2"})
_COMPARISONS: frozenset[str] = frozenset({"lt", "le", "gt", "ge"})


@dataclass(frozen=True, kw_only=True)
class Core:
    """A core of attention; ops are indices.

    Attributes:
        scores: matmuls whose sum is the scores.
        activation_matmuls: those and the matmul that makes the gradient of the softmax.
        chain: their descendants before the next matmuls.
        sinks: matmuls that read the chain; the first mixes the values.
        sums: the op that sums the exponentials of a row.
        side_inputs: values that the chain reads from outside, except for constants and functions of
            positions.
        causal: True if a query attends only to earlier keys, by a comparison of positions.
        window: keys that a query attends to, including itself; 0 for all, also if only some layers
            have a window.
    """

    scores: tuple[int, ...]
    activation_matmuls: tuple[int, ...]
    chain: tuple[int, ...]
    sinks: tuple[int, ...]
    sums: int
    side_inputs: tuple[int, ...]
    causal: bool
    window: int


def cores(step: StepGraph) -> list[Core]:
    """The cores of a step, in the order of their exponentials."""
    search = _Search(step.graph, step.weights().keys())
    return [
        core
        for index, op in enumerate(step.graph.ops)
        if op.kind in _EXPONENTIALS and (core := search.core(index))
    ]


class _Search:
    def __init__(self, graph: Graph, weights: Iterable[int]) -> None:
        self._graph, self._weights = graph, frozenset(weights)
        self._producers = graph.producers()

    def core(self, exponential: int) -> Core | None:
        """The core around an exponential; None if there is none."""
        graph, op = self._graph, self._graph.ops[exponential]
        scores, _ = self._origins(op.operands, op.region)
        square = self._elements(op.results[0])
        if not scores or any(
            self._elements(graph.ops[i].results[0]) != square
            or self._weights.intersection(graph.ops[i].operands)
            for i in scores
        ):
            return None
        activation_matmuls, chain, leaves = set(scores), list[int](), set[int]()
        while True:
            chain, tainted = self._descendants(activation_matmuls)
            entering = {value for i in chain for value in graph.ops[i].operands} - tainted
            more, leaves = self._origins(
                (value for value in entering if self._elements(value) == square), None
            )
            leaves |= {value for value in entering if self._elements(value) != square}
            if more <= activation_matmuls:
                break
            activation_matmuls |= more
        sums = next(
            (
                i
                for i in chain
                if graph.ops[i].kind == "reduce_sum"
                and self._elements(graph.ops[i].operands[0]) == square
                and i > exponential
            ),
            None,
        )
        sinks = self._sinks(tainted, activation_matmuls, scores, chain, sums)
        masks = {value for value in leaves if self._of_positions(value)}
        side_inputs = tuple(
            sorted(value for value in leaves - masks if graph.values[value].role != "constant")
        )
        if (
            sums is None
            or not sinks
            or any(self._elements(value) >= square for value in side_inputs)
        ):
            return None
        return Core(
            scores=tuple(sorted(scores)),
            activation_matmuls=tuple(sorted(activation_matmuls)),
            chain=tuple(chain),
            sinks=sinks,
            sums=sums,
            side_inputs=side_inputs,
            causal=any(self._compared(value) for value in masks),
            window=max((self._window(value) for value in masks), default=0),
        )

    def _elements(self, value: int) -> int:
        return math.prod(self._graph.values[value].shape)

    def _origins(self, values: Iterable[int], region: int | None) -> tuple[set[int], set[int]]:
        """The matmuls of which element-wise ops and views make some values, and the other inputs of
        those ops.
        """
        pending, seen, matmuls, leaves = list(values), set[int](), set[int](), set[int]()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            maker = self._producers.get(value)
            op = self._graph.ops[maker] if maker is not None else None
            if (
                op is not None
                and maker is not None
                and op.category == "matmul"
                and region in (None, op.region)
            ):
                matmuls.add(maker)
            elif (
                op is not None
                and op.category in _CHAIN
                and region in (None, op.region)
                and not self._of_positions(value)
            ):
                pending.extend(op.operands)
            else:
                leaves.add(value)
        return matmuls, leaves

    def _descendants(self, activation_matmuls: set[int]) -> tuple[list[int], set[int]]:
        """Ops that depend on some matmuls, before the next ones; and the values that they and
        those matmuls make.
        """
        chain = list[int]()
        tainted = {value for i in activation_matmuls for value in self._graph.ops[i].results}
        for index, op in enumerate(self._graph.ops):
            if (
                index not in activation_matmuls
                and (op.category in _CHAIN or op.kind in ("enter", "exit"))
                and tainted.intersection(op.operands)
            ):
                chain.append(index)
                tainted.update(op.results)
        return chain, tainted

    def _sinks(
        self,
        tainted: set[int],
        activation_matmuls: set[int],
        scores: set[int],
        chain: list[int],
        sums: int | None,
    ) -> tuple[int, ...]:
        """Matmuls that read descendants of those of activations, the one that mixes values
        first; () without that one.
        """
        graph = self._graph
        matmuls = [
            i
            for i, op in enumerate(graph.ops)
            if i not in activation_matmuls and op.category == "matmul" and tainted & {*op.operands}
        ]
        _, gradients = self._descendants(activation_matmuls - scores)
        joined = FactorClasses(graph, {*activation_matmuls, *chain, *matmuls})
        rows = (
            joined.classes(sums, graph.ops[sums].rule.summed)
            if sums is not None
            else frozenset[int]()
        )
        mixing = [
            i
            for i in matmuls
            if not gradients.intersection(graph.ops[i].operands)
            and rows <= joined.classes(i, graph.ops[i].rule.summed)
        ]
        return (
            (mixing[0], *(i for i in matmuls if i != mixing[0]))
            if rows and len(mixing) == 1
            else ()
        )

    def _of_positions(self, value: int) -> bool:
        """True if a value is made only of constants and positions, with at least one position."""
        return self._ancestors(value) is not None and self._graph.values[value].role != "constant"

    def _compared(self, value: int) -> bool:
        return bool(_COMPARISONS & (self._ancestors(value) or set()))

    def _window(self, value: int) -> int:
        """Keys per query that a mask admits: the literal that the distance of two positions is
        compared with; 0 if all layers do not have the same.
        """
        op = self._graph.ops[self._producers[value]] if value in self._producers else None
        if op is None:
            return 0
        if op.kind in _COMPARISONS:
            distance, limit = op.operands if op.kind in ("lt", "le") else reversed(op.operands)
            maker = self._producers.get(distance)
            text = self._graph.values[self._source(limit)].path
            return (
                int(text) + (op.kind in ("le", "ge"))
                if maker is not None and self._graph.ops[maker].kind == "sub" and text.isdigit()
                else 0
            )
        if op.kind == "select_n":
            return (
                0
                if any(self._compared(case) for case in op.operands[1:])
                else self._window(op.operands[0])
            )
        if op.kind == "and" or op.category in ("movement", "boundary") or len(op.operands) == 1:
            return max((self._window(operand) for operand in op.operands), default=0)
        return 0

    def _source(self, value: int) -> int:
        """The value that a value is a view of."""
        while (
            value in self._producers
            and (op := self._graph.ops[self._producers[value]]).category == "movement"
            and op.operands
        ):
            value, *_ = op.operands
        return value

    def _ancestors(self, value: int) -> set[str] | None:
        """Kinds of the ops that make a value of constants and positions; None if other values
        contribute.
        """
        pending, seen, kinds = [value], set[int](), set[str]()
        while pending:
            current = pending.pop()
            if current in seen or self._graph.values[current].role == "constant":
                continue
            seen.add(current)
            op = self._graph.ops[self._producers[current]] if current in self._producers else None
            if op is None or op.category not in (*_CHAIN, "boundary"):
                return None
            kinds.add(op.kind)
            pending.extend(op.operands)
        return kinds


# --------------------------------------------------------------------------------------------------
# Factors of several ops that are the same index.
#
# A group of ops that is replaced by one op has one rule. A dim of a value ties the factors of the
# op that makes it to those of the ops that read it.


class FactorClasses:
    """Equivalence classes of (op, factor) over some ops of a graph; each class is one index."""

    def __init__(self, graph: Graph, ops: Iterable[int]) -> None:
        self._graph = graph
        self._classes = UnionFind()
        self._dims: dict[int, tuple[int, Dims]] = {}
        for index in sorted(ops):
            op = graph.ops[index]
            for values, all_dims in (
                (op.operands, op.rule.operands),
                (op.results, op.rule.results),
            ):
                for value, dims in zip(values, all_dims, strict=True):
                    self._tie(value, index, dims)
        self._number: dict[Hashable, int] = {}
        self._sizes: list[int] = []

    def _tie(self, value: int, index: int, dims: Dims) -> None:
        first, first_dims = self._dims.setdefault(value, (index, dims))
        for factors, theirs in zip(dims, first_dims, strict=True):
            if len(factors) == len(theirs):
                for factor, other in zip(factors, theirs, strict=True):
                    if (
                        self._graph.ops[index].rule.sizes[factor]
                        == self._graph.ops[first].rule.sizes[other]
                    ):
                        self._classes.join([(first, other), (index, factor)])

    def _class(self, index: int, factor: int) -> int:
        number = self._number.setdefault(self._classes.find((index, factor)), len(self._number))
        if number == len(self._sizes):
            self._sizes.append(self._graph.ops[index].rule.sizes[factor])
        return number

    def classes(self, index: int, factors: Iterable[int]) -> frozenset[int]:
        """The classes of some factors of an op."""
        return frozenset(self._class(index, factor) for factor in factors)

    def size(self, label: int) -> int:
        """Elements of a class."""
        return self._sizes[label]

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
