"""Fused attention: a step graph whose cores of attention are one kernel each.

`fused` finds the cores (`shardlib.cost.step.attention_search`), forward, rematerialised and
backward, and puts kernels (arXiv:2205.14135, arXiv:2307.08691; cuDNN; Pallas splash attention) in
their place. A causal mask leaves out the blocks above the diagonal: of n x n blocks, n (n + 1) / 2
are computed; a window leaves out those before it. Values keep their numbers, so that whatever is
known of them stays true.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from shardlib.cost.step.attention_kernels import BACKWARD, FORWARD, causal_share
from shardlib.cost.step.attention_search import Core, cores
from shardlib.cost.step.shared_indices import Joined
from shardlib.graph import Graph, Op
from shardlib.graph.check import check
from shardlib.graph.problem import StepGraph
from shardlib.graph.prune import prune


def fused(step: StepGraph, block: int = 128) -> StepGraph:
    """The step with every core of attention as one kernel forward, and backward one for each set of
    dims that gradients are summed over.
    """
    tried: set[int] = set()
    while True:
        graph = step.graph
        core = next(
            (core for core in cores(step) if graph.ops[core.sinks[0]].results[0] not in tried), None
        )
        if core is None:
            return step
        tried.add(graph.ops[core.sinks[0]].results[0])
        step = _without(step, core, block) or step


def _without(step: StepGraph, core: Core, block: int) -> StepGraph | None:
    """The step with one core as kernels; None where something else needs what they do not write."""
    graph = step.graph
    kernels = _kernels(graph, core, block)
    if kernels is None:
        return None
    results = {value for ops in kernels.values() for op in ops for value in op.results}
    carried = {operand for ops in kernels.values() for op in ops for operand in op.operands}
    producers = graph.producers()
    gone = {*core.products, *core.chain, *core.sinks}
    for value in carried:  # the way of the statistic out of one loop and into another stays
        while (maker := producers.get(value)) in core.chain and value not in results:
            gone.discard(maker)
            (value,) = graph.ops[maker].operands
    ops = [
        op
        for index, old in enumerate(graph.ops)
        for op in kernels.get(index, () if index in gone else (old,))
    ]
    rewritten = prune(replace(graph, ops=tuple(ops)))
    try:
        check(rewritten, before=graph)
    except AssertionError:
        return None
    return replace(step, graph=rewritten)


def _kernels(graph: Graph, core: Core, block: int) -> dict[int, tuple[Op, ...]] | None:
    """The kernels of a core, by the index of the op that they stand at; None where the statistic
    does not reach the gradients.
    """
    joined = Joined(graph, {*core.products, *core.chain, *core.sinks})
    rows = joined.classes(core.sums, graph.ops[core.sums].rule.summed)
    keys = math.prod(joined.size(index) for index in rows)
    share = causal_share(keys, block, core.window) if core.causal else 1.0
    inner = {value for i in (*core.products, *core.chain) for value in graph.ops[i].results}
    mixing, gradients = core.sinks[0], core.sinks[1:]
    statistic, arrived = _statistic(graph, core, {graph.ops[i].region for i in gradients})
    if arrived is None and gradients:
        return None
    contracted = rows.union(*(joined.classes(i, graph.ops[i].rule.summed) for i in core.products))

    def kernel(
        kind: str,
        position: int,
        reading: Iterable[int],
        counted: Iterable[int],
        results: tuple[int, ...],
        extra: tuple[int, ...],
        summed: frozenset[int],
    ) -> Op:
        operands = dict.fromkeys(
            [value for i in reading for value in graph.ops[i].operands if value not in inner]
        )
        operands |= dict.fromkeys((*extra, *(core.beside if kind == FORWARD else ())))
        return replace(
            graph.ops[position],
            kind=kind,
            category="opaque",
            operands=tuple(operands),
            results=results,
            rule=joined.rule(tuple(operands), results, summed=summed, unsharded=contracted),
            flops=share * sum(graph.ops[i].flops for i in counted),
        )

    forward = kernel(
        FORWARD,
        mixing,
        (*core.scores, mixing),
        (*core.scores, mixing),
        (graph.ops[mixing].results[0], statistic),
        (),
        frozenset(),
    )
    kernels: dict[int, tuple[Op, ...]] = {mixing: (forward,)}
    groups: dict[frozenset[int], list[int]] = {}
    for sink in gradients:
        groups.setdefault(joined.classes(sink, graph.ops[sink].rule.summed), []).append(sink)
    for number, (summed, sinks) in enumerate(groups.items()):
        assert arrived is not None
        results = tuple(graph.ops[i].results[0] for i in sinks)
        op = kernel(
            BACKWARD,
            sinks[0],
            (*(i for i in core.products if i not in core.scores), *gradients),
            (*sinks, *(core.products if number == 0 else ())),
            results,
            (arrived,),
            summed,
        )
        kernels[gradients[0]] = (*kernels.get(gradients[0], ()), op)
    return kernels


def _statistic(graph: Graph, core: Core, regions: set[int]) -> tuple[int, int | None]:
    """The value that holds the sum of a row where it is made, and the value that the gradients
    read.
    """
    (row_sum,) = graph.ops[core.sums].results
    home = graph.ops[core.sums].region
    if not regions or regions == {home}:
        return row_sum, row_sum
    for index in core.chain:
        op = graph.ops[index]
        if op.kind == "exit" and _descends(graph, core, op.operands[0], row_sum):
            for entry in core.chain:
                if (
                    graph.ops[entry].kind == "enter"
                    and graph.ops[entry].operands == op.results
                    and graph.ops[entry].region in regions
                ):
                    return op.operands[0], graph.ops[entry].results[0]
    return row_sum, None


def _descends(graph: Graph, core: Core, value: int, source: int) -> bool:
    """Whether a value is a view of another."""
    producers = graph.producers()
    while value != source:
        maker = producers.get(value)
        if maker not in core.chain or graph.ops[maker].category != "movement":
            return False
        value = graph.ops[maker].operands[0]
    return True
