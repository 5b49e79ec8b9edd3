"""What layers written by hand save for the backward pass.

JAX's autodiff keeps whatever a derivative reads, each step of a norm among it. Layers written by
hand keep the operands of their matmuls and the inputs of their non-linear functions, and compute
the rest again inside their backward kernels: for a layer of a GPT that is the list of
arXiv:2205.05198, section 4.1, which adds up to s b h (34 + 5 a s / h) bytes with dropout.

`keep_operands` does that to a step whose layers are loops: a saved result of element-wise ops that
no matmul reads backwards is rematerialised from results of matmuls, from row statistics and from
the layer's input, which are saved in its place where they are not already. Nothing changes where
what is saved in its place would take as much memory. The backward pass of a softmax reads its
result, not the exponentials.

Where no compiler fuses chains (`eager`), the product of two branches keeps both factors, as every
op of PyTorch's autograd does; norms and rotary embeddings are kernels of libraries there, too.
`keep_named` goes further: of a layer it saves what a list names
(`shardlib.cost.step.layer_results`), and rematerialises all else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardlib.axes import LogicalAxes
from shardlib.cost.profiles.loop_saves import CHEAP, Builder, saved_pairs
from shardlib.cost.step.attention_search import cores
from shardlib.cost.step.capacity_experts import is_capped
from shardlib.cost.step.layer_results import roles
from shardlib.cost.step.layers import weights_of
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.graph import Graph
from shardlib.graph.problem import StepGraph


def keep_operands(
    step: StepGraph, names: tuple[LogicalAxes, ...], *, eager: bool = False
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with operands of matmuls and inputs of non-linear functions saved, and no other
    results of element-wise ops.
    """
    again = frozenset[int]()
    for forward, backward in _loops(step.graph):
        step, names = _rebuilt(
            step,
            names,
            Builder(
                step,
                names,
                forward,
                backward,
                again,
                True,
                _factors(step.graph, forward) if eager else frozenset(),
            ),
        )
    return step, names


def keep_named(
    step: StepGraph, names: tuple[LogicalAxes, ...], saved: Collection[str]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with nothing of a layer saved but the results that are named, and its input."""
    for forward, backward in _loops(step.graph):
        results = roles(step.graph, forward, weights_of(step))
        named = frozenset(value for name in saved for value in results[name])
        again = frozenset(
            i
            for i, op in enumerate(step.graph.ops)
            if op.region == forward
            and op.category != "boundary"
            and not named.intersection(op.results)
        )
        step, names = _rebuilt(
            step, names, Builder(step, names, forward, backward, again, False, named)
        )
    return step, names


def keep_rows(
    step: StepGraph, names: tuple[LogicalAxes, ...]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with activations of routed experts rematerialised backwards from what their matmuls
    made, as `shardlib.lowering.experts` does it.
    """
    for forward, backward in _loops(step.graph):
        again = _after_grouped(step.graph, forward)
        if again:
            step, names = _rebuilt(
                step, names, Builder(step, names, forward, backward, again, False, frozenset())
            )
    return step, names


def _after_grouped(graph: Graph, region: int) -> frozenset[int]:
    """Cheap ops of a loop that work on what grouped matmuls make, and those that spread masks of
    slots, as indices.
    """
    indices, descendants = set[int](), set[int]()
    for index, op in enumerate(graph.ops):
        if op.region != region:
            continue
        if op.kind in GROUPED:
            descendants.update(op.results)
        elif op.category in CHEAP and (
            descendants.intersection(op.operands)
            or (is_capped(op) and graph.values[op.results[0]].dtype == "bool")
        ):
            indices.add(index)
            descendants.update(op.results)
    return frozenset(indices)


def rematerialise_attention(
    step: StepGraph, names: tuple[LogicalAxes, ...]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with the scores of attention and their softmax rematerialised backwards: selective
    recomputation (arXiv:2205.05198, section 5).
    """
    for forward, backward in _loops(step.graph):
        again = frozenset(i for core in cores(step) for i in (*core.scores, *core.chain))
        step, names = _rebuilt(
            step, names, Builder(step, names, forward, backward, again, False, frozenset())
        )
    return step, names


def _rebuilt(
    step: StepGraph, names: tuple[LogicalAxes, ...], builder: Builder
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    graph, names = builder.rewritten()
    return replace(step, graph=graph), names


def _loops(graph: Graph) -> list[tuple[int, int]]:
    """Loops of which one saves for the other, as regions."""
    return sorted(
        {(graph.ops[pair.exit].region, graph.ops[pair.enter].region) for pair in saved_pairs(graph)}
    )


def _factors(graph: Graph, region: int) -> frozenset[int]:
    """Factors of the products of two branches in a loop: values made of different matmuls by
    element-wise ops.
    """
    makers = {value: op for op in graph.ops if op.region == region for value in op.results}

    def branch(value: int) -> frozenset[int]:
        pending, seen, sources = [value], set[int](), set[int]()
        while pending:
            current = pending.pop()
            op = makers.get(current)
            if current not in seen and op is not None:
                seen.add(current)
                if op.category in CHEAP:
                    pending.extend(op.operands)
                else:
                    sources.add(current)
        return frozenset(
            value for value in sources if makers[value].category in ("matmul", "opaque")
        )

    factors = set[int]()
    for op in graph.ops:
        if op.kind == "mul" and op.region == region:
            left, right = (branch(value) for value in op.operands)
            if left and right and not left & right:
                factors.update(op.operands)
    return frozenset(factors)
