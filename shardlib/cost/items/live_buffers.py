"""Live buffers: which values occupy memory, from when to when.

Beside the arguments of a step, which stay for all of it, there are: what the forward pass saves;
gradients, from where they are made to the end; parameters that are gathered for use; partial sums
until they are reduced; and whatever else kernels write. A value that a loop slices off a stack is
read in place, and so is not counted twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from shardlib.cost.items.parameter_gathers import gathered, gathered_bytes
from shardlib.cost.profiles.retained_buffers import Life
from shardlib.cost.step.attention_kernels import BACKWARD, FORWARD, block_scores
from shardlib.cost.step.liveness import accumulators, intervals, leaves_loop
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA
from shardlib.graph.kernels import BLOCK
from shardlib.graph.problem import StepGraph

#: Ops whose result is a partial sum of a gradient, whole until it is reduced.
_CONTRACTIONS: frozenset[str] = frozenset({"matmul", "convolution", "scatter"})


def lives(facts: Facts, step: StepGraph, profile: FrameworkProfile = XLA) -> list[Life]:
    """Every value that takes memory beside the arguments of a step, under a framework profile."""
    graph = facts.graph
    producers = graph.producers()
    when = intervals(graph, facts.fusion, frozenset())
    turn = max((producers.get(value, 0) for value in graph.outputs[:1]), default=0)
    carried = {
        value
        for op in graph.ops
        if op.kind == "carry" and not leaves_loop(op)
        for value in op.results
    }
    lives: list[Life] = []
    for value, (birth, death) in when.items():
        op = graph.ops[producers[value]] if value in producers else None
        if op is None or value in carried or op.kind == "enter":
            continue
        if value in facts.weights:
            if op.kind == "exit":
                lives.append(Life(value=value, part="copy", birth=birth, death=death))
        elif value in facts.gradients:
            partial = op.category in _CONTRACTIONS and bool(op.rule.summed)
            lives.append(
                Life(
                    value=value,
                    part="temporary" if partial else "gradient",
                    birth=birth,
                    death=min(death, birth + 1) if partial else death,
                )
            )
        else:
            lives.append(
                Life(
                    value=value,
                    part="saved" if birth <= turn < death else "temporary",
                    birth=birth,
                    death=death,
                )
            )
    lives = _together(facts, lives)
    return (
        (_overlapped(facts, lives, turn) if profile.early_remat else lives)
        + _accumulated(facts)
        + _in_use(facts, profile)
        + (_blocks(facts) if profile.attention == "blocks" else [])
        + _with_all_heads(facts)
        + _casts(facts, lives)
    )


def _accumulated(facts: Facts) -> list[Life]:
    """Sums that a loop adds to, for as long as it runs; gradients are counted elsewhere."""
    return [
        Life(
            value=accumulator.carry,
            part="temporary",
            birth=accumulator.first,
            death=accumulator.last,
        )
        for accumulator in accumulators(facts.graph)
        if accumulator.carry not in facts.gradients
    ]


def _together(facts: Facts, all_lives: list[Life]) -> list[Life]:
    """Of a layer of routed experts backwards, one kernel makes all that its grouped matmuls read:
    the activations again, and the gradients of what they were made of. All of it is there for as
    long as one of it.
    """
    if not facts.routes:
        return all_lives
    ops, producers = facts.graph.ops, facts.graph.producers()
    grouped = [op for op in ops if op.kind in GROUPED]
    backward = {op.region for op in grouped if facts.gradients.intersection(op.results)}
    read: dict[int, set[int]] = defaultdict(set)
    for op in grouped:
        if op.region in backward:
            read[op.region].update(
                root for value in op.operands for root in facts.fusion.roots[value]
            )
    lives = {life.value: life for life in all_lives}
    for region, values in read.items():
        results = [
            lives[value]
            for value in values
            if value in lives
            and value in producers
            and ops[producers[value]].category == "elementwise"
            and ops[producers[value]].region == region
        ]
        if results:
            birth, death = min(life.birth for life in results), max(life.death for life in results)
            lives.update({life.value: replace(life, birth=birth, death=death) for life in results})
    return [lives[life.value] for life in all_lives]


def _overlapped(facts: Facts, all_lives: list[Life], turn: int) -> list[Life]:
    """Where gathers are pipelined through the loop over layers (ZeRO 3), compilers take its first
    iteration out of the loop.

    What rematerialises a layer waits for no cotangent, so they start on it while the head's
    backward pass still holds the logits: the largest value between the forward pass and the loop
    backwards is there until the layer has been rematerialised. On GPUs it is there for the whole
    iteration, at the end of which the gradients of weights are computed: what they read lives as
    long.
    """
    ops = facts.graph.ops
    again = [
        i
        for i, op in enumerate(ops)
        if "rematted_computation" in op.scope and facts.trips[op.region] > 1 and i > turn
    ]
    if not again:
        return all_lives
    region = ops[again[0]].region
    inside = [i for i, op in enumerate(ops) if op.region == region]
    head = [
        life
        for life in all_lives
        if life.part in ("temporary", "saved") and turn < life.death < inside[0]
    ]
    if not head:
        return all_lives
    last = inside[-1] if facts.traits.peels else max(i for i in again if ops[i].region == region)
    extended = [max(head, key=lambda life: (facts.graph.values[life.value].bytes, life.death))]
    if facts.traits.peels:
        read = {
            root
            for i in inside
            if ops[i].category == "matmul" and set(ops[i].results) & facts.gradients
            for operand in ops[i].operands
            for root in facts.fusion.roots[operand]
        }
        extended += [
            life
            for life in all_lives
            if life.value in read
            and life.part == "temporary"
            and inside[0] <= life.birth
            and life.death < last
        ]
    return [
        *all_lives,
        *(
            Life(value=life.value, part="gathered", birth=life.death + 1, death=last)
            for life in extended
        ),
    ]


def _blocks(facts: Facts) -> list[Life]:
    """The scores of one block of queries and one of keys, while attention in blocks works on them;
    of a sequence along a context axis, the part that falls to a device's share of a block.
    """
    blocks: list[Life] = []
    for index, op in enumerate(facts.graph.ops):
        if op.kind in (FORWARD, BACKWARD):
            value = max(
                (*op.operands, *op.results),
                key=lambda value: math.prod(facts.graph.values[value].shape),
            )
            size = (
                facts.traits.score_bytes[op.kind == BACKWARD] / facts.graph.values[value].itemsize
            )
            blocks.append(
                Life(
                    value=value,
                    part="temporary",
                    birth=index,
                    death=index,
                    share=block_scores(op, BLOCK) * size,
                    kernel=index if index in facts.heads else None,
                )
            )
    return blocks


def _with_all_heads(facts: Facts) -> list[Life]:
    """What goes into a kernel of attention and comes out of it, as devices have it that compute all
    heads of what is sharded outside, because they cannot share them out.
    """
    return [
        Life(value=value, part="temporary", birth=kernel, death=kernel, kernel=kernel, whole=True)
        for kernel in facts.heads
        for value in (*facts.graph.ops[kernel].operands, *facts.graph.ops[kernel].results)
    ]


def _casts(facts: Facts, all_lives: Sequence[Life]) -> list[Life]:
    """Parameters of layers that are cast to a narrower dtype, all layers at once and for the whole
    step, but for those whose casts are saved.
    """
    if not facts.traits.casts_stacks:
        return []
    ops, values = facts.graph.ops, facts.graph.values
    copied = {facts.weights[life.value] for life in all_lives if life.part == "copy"}
    casts: dict[int, Life] = {}
    for op in ops:
        if (
            op.kind != "convert_element_type"
            or op.results[0] not in facts.weights
            or facts.trips[op.region] <= 1
            or len(op.operands) != 1  # a scale of the layer's own, so that the loop casts it
        ):
            continue
        (source,), (result,) = op.operands, op.results
        if (
            values[result].itemsize < values[source].itemsize
            and facts.weights[result] not in copied
        ):
            casts.setdefault(
                facts.weights[result],
                Life(
                    value=result,
                    part="cast",
                    birth=0,
                    death=len(ops) - 1,
                    share=float(facts.trips[op.region]),
                ),
            )
    return list(casts.values())


def _in_use(facts: Facts, profile: FrameworkProfile) -> list[Life]:
    """Parameters while they are used: in a loop the next one arrives while the one before is worked
    with; outside, a framework may keep them for all of the step.
    """
    lives: list[Life] = []
    last: dict[int, int] = {}
    for item in sorted(gathered(facts), key=lambda item: item.uses[0]):
        if profile.embedding_and_head_gathered and facts.trips[item.region] == 1:
            lives.append(
                Life(
                    value=item.value,
                    part="gathered",
                    birth=0,
                    death=len(facts.graph.ops) - 1,
                    share=gathered_bytes(facts, item) / facts.graph.values[item.value].bytes,
                )
            )
            continue
        for use in item.uses if facts.trips[item.region] > 1 else (item.uses[0],):
            cast = item.value != item.source and not facts.traits.fuses_operands
            end = use if facts.trips[item.region] > 1 else item.uses[-1]
            lives.append(
                Life(
                    value=item.value,
                    part="temporary" if cast else "gathered",
                    birth=last.get(item.region, use) if facts.trips[item.region] > 1 else use,
                    death=end,
                )
            )
            last[item.region] = use
    return lives
