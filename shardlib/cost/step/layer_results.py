"""Results of a layer, by the names of checkpoint lists.

Frameworks say what the forward pass keeps of a layer by names: MaxText's remat policies
("query_proj", "context", "mlpwi", ...; AI-Hypercomputer/maxtext MaxText/layers/decoders.py),
torchtitan's list of ops (every second matmul and attention; pytorch/torchtitan
torchtitan/models/llama/parallelize_llama.py). Here a name stands for results that are found by the
structure of a layer whose attention is one kernel:

    layer_input             what the loop over layers carries
    query, key, value       matmuls of weights that the kernel of attention starts from
    context                 what that kernel makes
    out                     matmuls of weights that read nothing but the context
    gate                    of several other matmuls of weights, those that a non-linear function
                            reads: the gate of a feed-forward layer
    wide                    the others: into the feed-forward layer
    narrow                  matmuls that read nothing but results of wide ones: out of it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from shardlib.cost.step.attention_kernels import FORWARD
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.cost.terms.framework import RESULTS
from shardlib.graph import Graph, Op

#: Kinds of ops that non-linear functions begin with.
_NONLINEAR: frozenset[str] = frozenset(
    {"logistic", "tanh", "erf", "erfc", "max", "exp", "integer_pow"}
)


def roles(graph: Graph, region: int, weights: Collection[int]) -> Mapping[str, frozenset[int]]:
    """The results of one loop over layers, by name."""
    search = _Search(graph, region, frozenset(weights))
    results: dict[str, set[int]] = {name: set() for name in RESULTS}
    results["layer_input"] = {
        value
        for op in graph.ops
        if op.kind == "carry" and op.region == region
        for value in op.results
        if "float" in graph.values[value].dtype
    }
    kernels = [op for op in graph.ops if op.kind == FORWARD and op.region == region]
    results["context"] = search.views({value for op in kernels for value in op.results})
    for op in kernels:
        for name, operand in zip(("query", "key", "value"), op.operands, strict=False):
            results[name] |= {
                value for value in search.sources(operand) if value in search.products
            }
    attended = results["query"] | results["key"] | results["value"]
    sources = {
        result: search.sources(operand)
        for result, operand in search.products.items()
        if result not in attended
    }
    results["out"] = {
        result for result, read in sources.items() if read and read <= results["context"]
    }
    results["narrow"] = {
        result for result, read in sources.items() if read and read <= set(sources) - results["out"]
    }
    into = set(sources) - results["out"] - results["narrow"]
    results["gate"] = {
        result for result in into if len(into) > 1 and search.read_by(result) & _NONLINEAR
    }
    results["wide"] = into - results["gate"]
    return {name: frozenset(values) for name, values in results.items()}


def products(graph: Graph, region: int, weights: Collection[int]) -> Mapping[int, int]:
    """Results of the matmuls of weights of one loop, with the operand that is no weight."""
    return _Search(graph, region, frozenset(weights)).products


class _Search:
    """Where values of one loop come from.

    Attributes:
        products: results of matmuls of weights, with the operand that is no weight.
    """

    def __init__(self, graph: Graph, region: int, weights: frozenset[int]) -> None:
        self._makers: dict[int, Op] = {
            value: op
            for op in graph.ops
            if op.region == region and op.kind != "enter"
            for value in op.results
        }
        self._readers: dict[int, list[Op]] = defaultdict(list)
        self.products: dict[int, int] = {}
        for op in dict.fromkeys(self._makers.values()):
            for value in op.operands:
                self._readers[value].append(op)
            if op.category == "matmul" or op.kind in GROUPED:
                others = [value for value in op.operands[:2] if value not in weights]
                if len(others) == 1:
                    self.products[op.results[0]] = others[0]

    def read_by(self, value: int) -> set[str]:
        """Kinds of the ops that read a value or a cast of it."""
        readers = [(op.kind, op.results[0]) for op in self._readers.get(value, ())]
        return {kind for kind, _ in readers}.union(
            *(self.read_by(result) for kind, result in readers if kind == "convert_element_type")
        )

    def views(self, values: set[int]) -> set[int]:
        """Some values and what is nothing but a view of one of them."""
        views = set(values)
        for value, op in self._makers.items():
            if op.category == "movement" and views.issuperset(op.operands):
                views.add(value)
        return views

    def sources(self, value: int) -> frozenset[int]:
        """Results of matmuls of weights, contexts and layer inputs that a value is made of through
        other ops.
        """
        pending, seen, sources = [value], set[int](), set[int]()
        while pending:
            current = pending.pop()
            maker = self._makers.get(current)
            if current in seen or maker is None:
                continue
            seen.add(current)
            if current in self.products or maker.kind in (FORWARD, "carry"):
                sources.add(current)
            else:
                pending.extend(maker.operands)
        return frozenset(sources)
