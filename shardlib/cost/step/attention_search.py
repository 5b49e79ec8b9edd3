"""Cores of attention, found in a step graph by their structure.

The core is scores = q k^T, a softmax of them along their rows, and its product with v; backwards,
the gradients of q, k and v. Its structure: an exponential of what element-wise ops and views make
of *products*, matmuls of two activations, with a sum along rows after it. What descends from the
products up to the next matmuls, the *sinks*, is the core; a sink of it mixes values by the softmax,
the others make gradients, for which the gradient of the softmax is one more product. Nothing else
may read what the kernels do not write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.cost.step.layers import weights_of
from shardlib.cost.step.shared_indices import Joined
from shardlib.graph import Graph
from shardlib.graph.problem import StepGraph

#: Categories of the ops between the matmuls.
_CHAIN: frozenset[str] = frozenset({"elementwise", "reduction", "movement"})
_EXPONENTIALS: frozenset[str] = frozenset({"exp", "exp2"})
_COMPARISONS: frozenset[str] = frozenset({"lt", "le", "gt", "ge"})


@dataclass(frozen=True, kw_only=True)
class Core:
    """A core of attention; ops are indices.

    Attributes:
        scores: matmuls whose sum is the scores.
        products: those and the matmul that makes the gradient of the softmax.
        chain: ops that descend from the products, before the next matmuls.
        sinks: matmuls that read what they make; the first mixes the values.
        sums: the op that adds up the exponentials of a row.
        beside: values that the chain reads from outside and that are no constants or functions of
            positions.
        causal: whether positions are compared: a query sees the keys before it.
        window: keys that a query sees, itself included; 0 for all, also where only some layers have
            a window.
    """

    scores: tuple[int, ...]
    products: tuple[int, ...]
    chain: tuple[int, ...]
    sinks: tuple[int, ...]
    sums: int
    beside: tuple[int, ...]
    causal: bool
    window: int


def cores(step: StepGraph) -> list[Core]:
    """The cores of a step, in the order of their exponentials."""
    search = _Search(step.graph, weights_of(step).keys())
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
        """The core around an exponential; None where it is none."""
        graph, op = self._graph, self._graph.ops[exponential]
        scores, _ = self._origins(op.operands, op.region)
        square = self._elements(op.results[0])
        if not scores or any(
            self._elements(graph.ops[i].results[0]) != square
            or self._weights.intersection(graph.ops[i].operands)
            for i in scores
        ):
            return None
        products, chain, leaves = set(scores), list[int](), set[int]()
        while True:
            chain, tainted = self._descendants(products)
            entering = {value for i in chain for value in graph.ops[i].operands} - tainted
            more, leaves = self._origins(
                (value for value in entering if self._elements(value) == square), None
            )
            leaves |= {value for value in entering if self._elements(value) != square}
            if more <= products:
                break
            products |= more
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
        sinks = self._sinks(tainted, products, scores, chain, sums)
        masks = {value for value in leaves if self._of_positions(value)}
        beside = tuple(
            sorted(value for value in leaves - masks if graph.values[value].role != "constant")
        )
        if sums is None or not sinks or any(self._elements(value) >= square for value in beside):
            return None
        return Core(
            scores=tuple(sorted(scores)),
            products=tuple(sorted(products)),
            chain=tuple(chain),
            sinks=sinks,
            sums=sums,
            beside=beside,
            causal=any(self._compared(value) for value in masks),
            window=max((self._window(value) for value in masks), default=0),
        )

    def _elements(self, value: int) -> int:
        return math.prod(self._graph.values[value].shape)

    def _origins(self, values: Iterable[int], region: int | None) -> tuple[set[int], set[int]]:
        """The matmuls that element-wise ops and views make values of, and the other values that
        they start from.
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

    def _descendants(self, products: set[int]) -> tuple[list[int], set[int]]:
        """Ops that read, directly or not, what the products make, before the next matmuls; and the
        values that they and the products make.
        """
        chain, tainted = (
            list[int](),
            {value for i in products for value in self._graph.ops[i].results},
        )
        for index, op in enumerate(self._graph.ops):
            if (
                index not in products
                and (op.category in _CHAIN or op.kind in ("enter", "exit"))
                and tainted.intersection(op.operands)
            ):
                chain.append(index)
                tainted.update(op.results)
        return chain, tainted

    def _sinks(
        self,
        tainted: set[int],
        products: set[int],
        scores: set[int],
        chain: list[int],
        sums: int | None,
    ) -> tuple[int, ...]:
        """Matmuls that read what descends from the products, the one that mixes values first; none
        where that one is not there.
        """
        graph = self._graph
        matmuls = [
            i
            for i, op in enumerate(graph.ops)
            if i not in products and op.category == "matmul" and tainted.intersection(op.operands)
        ]
        _, gradients = self._descendants(products - scores)
        joined = Joined(graph, {*products, *chain, *matmuls})
        rows = (
            joined.classes(sums, graph.ops[sums].rule.summed)
            if sums is not None
            else frozenset[int]()
        )
        mixing = [
            i
            for i in matmuls
            if not (gradients if products - scores else set()).intersection(graph.ops[i].operands)
            and rows <= joined.classes(i, graph.ops[i].rule.summed)
        ]
        return (
            (mixing[0], *(i for i in matmuls if i != mixing[0]))
            if rows and len(mixing) == 1
            else ()
        )

    def _of_positions(self, value: int) -> bool:
        """Whether a value is made of nothing but constants and positions, and there are some."""
        return self._ancestors(value) is not None and self._graph.values[value].role != "constant"

    def _compared(self, value: int) -> bool:
        return bool(_COMPARISONS & (self._ancestors(value) or set()))

    def _window(self, value: int) -> int:
        """Keys that a mask shows to a query: the literal that the distance of two positions is
        compared with; 0 where there is none for all layers.
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
        """What a value is a view of."""
        while (
            value in self._producers
            and (op := self._graph.ops[self._producers[value]]).category == "movement"
            and op.operands
        ):
            value, *_ = op.operands
        return value

    def _ancestors(self, value: int) -> set[str] | None:
        """Kinds of the ops that make a value of constants and positions; None where it is made of
        something else, too.
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
