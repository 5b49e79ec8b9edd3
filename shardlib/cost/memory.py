"""Items of memory: parameters gathered for use and as stored, and live buffers at the points where
memory may peak.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from shardlib.cost.activations import LiveRange, ProfileMemory
from shardlib.cost.attention import BACKWARD, FORWARD
from shardlib.cost.experts import GROUPED
from shardlib.cost.facts import (
    Facts,
    Phase,
    PhaseOps,
    accumulators,
    alive_at,
    leaves_loop,
    live_spans,
    phases,
)
from shardlib.cost.framework import XLA, FrameworkProfile
from shardlib.cost.terms import (
    INSIDE_LAYER,
    OUTSIDE_LAYERS,
    Item,
    Resident,
    Stored,
    Term,
    amount,
    colours_in,
)
from shardlib.graph import BLOCK, ITEMSIZE, Graph, Op, Parameter, StepGraph, once
from shardlib.layout import LogicalAxes
from shardlib.propagation.colours import Choice, Spec, axes_of, sharded_by


@dataclass(frozen=True, kw_only=True)
class GatheredParameter:
    """A parameter in use in one region of the program.

    Attributes:
        source: value of the parameter.
        value: the gathered value: the parameter, or the narrowest cast of it.
        region: region of the uses.
        uses: indices of the ops that use it.
    """

    source: int
    value: int
    region: int
    uses: tuple[int, ...]


@once
def gathered(facts: Facts) -> list[GatheredParameter]:
    """Parameters and the ops that combine them with activations: if stored sharded over fsdp, each
    is gathered once per region, in its narrowest dtype.
    """
    uses: dict[tuple[int, int], list[int]] = defaultdict(list)
    values: dict[tuple[int, int], int] = {}
    for index, op in enumerate(facts.graph.ops):
        if (
            all(value in facts.weights for value in op.results)
            or op.category == "boundary"
            or _shardwise(facts, op)
        ):
            continue
        for value in dict.fromkeys(op.operands):
            source = facts.weights.get(value)
            if source is None or len(facts.graph.values[value].shape) < 2:
                continue
            key = source, op.region
            uses[key].append(index)
            narrow = _cast_ratio(facts, op) if op.category == "gather" else 1.0
            size = facts.graph.values[value].bytes * narrow
            if key not in values or size < facts.graph.values[values[key]].bytes:
                values[key] = value
    return [
        GatheredParameter(
            source=source, value=values[source, region], region=region, uses=tuple(ops)
        )
        for (source, region), ops in uses.items()
    ]


def _shardwise(facts: Facts, op: Op) -> bool:
    """True if an op is an element-wise function of parameters alone, and so works on their shards:
    the moving average of one.
    """
    return op.category == "elementwise" and all(
        value in facts.weights for value in op.operands if facts.graph.values[value].shape
    )


def _cast_ratio(facts: Facts, op: Op) -> float:
    """Ratio by which a cast after a lookup shrinks the rows: XLA casts the table instead, before it
    gathers it.
    """
    readers = facts.consumers.get(op.results[0], ())
    if len(readers) != 1 or facts.graph.ops[readers[0]].kind != "convert_element_type":
        return 1.0
    return min(
        1.0,
        facts.graph.values[facts.graph.ops[readers[0]].results[0]].bytes
        / facts.graph.values[op.results[0]].bytes,
    )


def gathered_bytes(facts: Facts, item: GatheredParameter) -> float:
    """Bytes per device of a gathered parameter without further sharding; fewer for tables that are
    looked up in a narrower dtype.
    """
    lookups = [
        facts.graph.ops[use] for use in item.uses if facts.graph.ops[use].category == "gather"
    ]
    narrow = min(
        (_cast_ratio(facts, op) for op in lookups if item.value in op.operands), default=1.0
    )
    return facts.graph.values[item.value].bytes * narrow


def is_exchanged(facts: Facts, index: int, value: int, choice: Choice) -> bool:
    """True if an attention kernel, or an op between it and a projection, gets a value by the
    exchange of parts of the sequence, or of the width of heads, for heads.
    """
    return facts.shards_heads(index, choice) or facts.has_whole_heads(value, choice)


def operand_collective(
    facts: Facts, index: int, value: int, axis: str, choice: Choice
) -> str | None:
    """The collective by which an op gets an operand that an axis shards; None if it uses it as it
    is.
    """
    op, spec = facts.graph.ops[index], facts.op_spec(index, choice)
    dims = op.rule.operands[op.operands.index(value)]
    needed = tuple(
        axes_of(spec[major]) if (major := op.rule.major(dim)) is not None else () for dim in dims
    )
    position = next(
        dim for dim, part in enumerate(facts.value_spec(value, choice)) if axis in axes_of(part)
    )
    if axis in needed[position]:
        return None
    return "all-to-all" if any(axis in parts for parts in needed) else "all-gather"


# --------------------------------------------------------------------------------------------------
# Live buffers: which values occupy memory, from when to when.
#
# Besides the arguments of a step, which live for all of it: values that the forward pass saves;
# gradients, from their computation to the end; parameters gathered for use; partial sums until they
# are reduced; and other results of kernels. A value that a loop slices off a stack is read in
# place, and so is not counted twice.

#: Ops whose result is a partial sum of a gradient, unsharded until it is reduced.
_CONTRACTIONS: frozenset[str] = frozenset({"matmul", "convolution", "scatter"})


def live_ranges(facts: Facts, step: StepGraph, profile: FrameworkProfile = XLA) -> list[LiveRange]:
    """The live range of every value besides the arguments of a step, under a framework profile."""
    graph = facts.graph
    producers = graph.producers()
    spans = live_spans(graph, facts.fusion, frozenset())
    loss = max((producers.get(value, 0) for value in graph.outputs[:1]), default=0)
    carried = {
        value
        for op in graph.ops
        if op.kind == "carry" and not leaves_loop(op)
        for value in op.results
    }
    ranges: list[LiveRange] = []
    for value, (birth, death) in spans.items():
        op = graph.ops[producers[value]] if value in producers else None
        if op is None or value in carried or op.kind == "enter":
            continue
        if value in facts.weights:
            if op.kind == "exit":
                ranges.append(LiveRange(value=value, part="copy", birth=birth, death=death))
        elif value in facts.gradients:
            partial = op.category in _CONTRACTIONS and bool(op.rule.summed)
            at_once = value in step.gradients and op.kind != "exit"
            ranges.append(
                LiveRange(
                    value=value,
                    part="temporary" if partial else "added" if at_once else "gradient",
                    birth=birth,
                    death=min(death, birth + 1) if partial else death,
                )
            )
            if partial and death > birth + 1 and facts.traits.peels and profile.saves == "traced":
                live = LiveRange(value=value, part="undeferred", birth=birth + 2, death=death)
                ranges.append(live)
        else:
            ranges.append(
                LiveRange(
                    value=value,
                    part="saved" if birth <= loss < death else "temporary",
                    birth=birth,
                    death=death,
                )
            )
    if profile.saves == "traced":
        ranges = _written_narrow(facts, ranges)
    ranges = _extend_expert_ranges(facts, ranges)
    if facts.traits.lanes and profile.attention == "fused":
        ranges = _in_lanes(facts, ranges)
    if profile.saves == "traced":
        ranges += _resharded(facts)
        if facts.traits.lanes:
            ranges = _after_input_gradients(facts, ranges)
        if profile.early_remat and facts.traits.peels:
            ranges += _until_weight_gradients(facts, ranges, loss)
    return (
        ranges
        + _accumulated(facts)
        + _in_use(facts, profile)
        + (_blocks(facts) if profile.attention == "blocks" else [])
        + _with_all_heads(facts)
        + _casts(facts, ranges)
    )


def _written_narrow(facts: Facts, ranges: list[LiveRange]) -> list[LiveRange]:
    """Live ranges where a matmul writes its result in the dtype of a cast that is all that reads
    it: XLA fuses the cast into the matmul, so that the wider result never exists.
    """
    if not facts.traits.fuses_output_casts:
        return ranges
    graph, ratios = facts.graph, dict[int, float]()
    for op in graph.ops:
        if op.category != "matmul":
            continue
        value, wide = op.results[0], graph.values[op.results[0]].itemsize
        while len(readers := facts.consumers.get(value, ())) == 1 and (
            graph.ops[readers[0]].kind in ("transpose", "convert_element_type")
        ):
            (value,) = graph.ops[readers[0]].results
            narrow = graph.values[value].itemsize / wide
            ratios[op.results[0]] = min(narrow, ratios.get(op.results[0], 1.0))
    return [
        replace(live, ratio=live.ratio * ratios.get(live.value, 1.0))
        if live.part == "temporary"
        else live
        for live in ranges
    ]


def _in_lanes(facts: Facts, ranges: list[LiveRange]) -> list[LiveRange]:
    """Live ranges where kernels of attention take and make arrays whose minor dim is padded to the
    lanes of a TPU: heads of 64 take twice their bytes, and so do their stacks; the statistic of a
    row of queries takes all lanes until it is read or stacked.

    The backward kernel also reads the result of the forward kernel. Where that is saved, it is in
    the layout of the kernel, and once more in that of the projection, whose operand it is.
    """
    graph, lanes = facts.graph, facts.traits.lanes
    padded, statistics, results = set[int](), set[int](), set[int]()
    for op in graph.ops:
        if op.kind in (FORWARD, BACKWARD):
            for value in op.operands:
                padded.update(facts.fusion.roots[value])
            padded.update((*op.operands, *op.results))
        if op.kind == FORWARD:
            results.add(op.results[0])
            statistics.update(op.results[1:])
    stacks = {op.results[0]: op.operands[0] for op in graph.ops if op.kind == "exit"}
    producers = facts.producers

    def is_result(value: int) -> bool:
        while value not in results and value in producers:
            op = graph.ops[producers[value]]
            if op.category != "movement" and op.kind != "convert_element_type":
                break
            value = op.operands[0]
        return value in results

    def tiled(live: LiveRange) -> LiveRange:
        shape = graph.values[live.value].shape
        if live.value in statistics:
            return replace(live, ratio=live.ratio * lanes)
        if live.value not in padded or len(shape) < 4:
            return live
        return replace(live, ratio=live.ratio * (-(-shape[-1] // lanes) * lanes / shape[-1]))

    copied = {stack for stack, value in stacks.items() if is_result(value)}
    padded |= copied | {
        stack
        for stack, value in stacks.items()
        if value in padded - statistics or facts.reaches_kernel(value)
    }
    copies = [live for live in ranges if live.part == "saved" and live.value in copied]
    return [tiled(live) for live in ranges] + copies


def _resharded(facts: Facts) -> list[LiveRange]:
    """Values that tensor shards along the sequence, in the other form that matmuls have them in:
    operands of which a matmul needs all rows, gathered from the first to the last such matmul of a
    region, and partial sums until they are reduce-scattered.
    """
    graph, ranges = facts.graph, list[LiveRange]()
    for value, consumers in facts.consumers.items():
        if facts.sequence not in facts.colours[value] or value in facts.weights:
            continue
        readers: dict[int, list[int]] = defaultdict(list)
        for index in consumers:
            if graph.ops[index].category == "matmul":
                readers[graph.ops[index].region].append(index)
        ranges += [
            LiveRange(
                value=value,
                part="temporary",
                birth=indices[0],
                death=indices[-1],
                readers=tuple(indices),
            )
            for indices in readers.values()
        ]
    return ranges + [
        LiveRange(value=op.results[0], part="temporary", birth=index, death=index, readers=(index,))
        for index, op in enumerate(graph.ops)
        if op.category == "matmul" and facts.sequence in facts.colours[op.results[0]]
    ]


def _accumulated(facts: Facts) -> list[LiveRange]:
    """Sums that a loop accumulates, live for the whole loop; gradients are counted elsewhere."""
    return [
        LiveRange(
            value=accumulator.carry,
            part="temporary",
            birth=accumulator.first,
            death=accumulator.last,
        )
        for accumulator in accumulators(facts.graph)
        if accumulator.carry not in facts.gradients
    ]


def _extend_expert_ranges(facts: Facts, ranges: list[LiveRange]) -> list[LiveRange]:
    """Extends live ranges in the backward pass of a layer of routed experts: one kernel makes all
    operands of its grouped matmuls, that is, the rematerialised activations and the gradients of
    the values they were made of, so that all of them live as long as any of them.
    """
    if not facts.routes:
        return ranges
    ops, producers = facts.graph.ops, facts.graph.producers()
    grouped = [op for op in ops if op.kind in GROUPED]
    backward = {op.region for op in grouped if facts.gradients.intersection(op.results)}
    read: dict[int, set[int]] = defaultdict(set)
    for op in grouped:
        if op.region in backward:
            read[op.region].update(
                root for value in op.operands for root in facts.fusion.roots[value]
            )
    table = {live.value: live for live in ranges}
    for region, values in read.items():
        results = [
            table[value]
            for value in values
            if value in table
            and value in producers
            and ops[producers[value]].category == "elementwise"
            and ops[producers[value]].region == region
        ]
        if results:
            birth, death = min(live.birth for live in results), max(live.death for live in results)
            table.update({live.value: replace(live, birth=birth, death=death) for live in results})
    return [table[live.value] for live in ranges]


def _until_weight_gradients(facts: Facts, ranges: list[LiveRange], loss: int) -> list[LiveRange]:
    """Live ranges of values from their last other use on, where weight gradients are computed last
    (`shardlib.cost.pricing.defers_weight_gradients`).

    Of the head these are the gradient of the logits, the largest value between the forward pass and
    the backward loop, and gathered operands of its weight gradients: they live until the loop over
    layers has ended. Large logits do so only where tensor shards them: or else the loop is made to
    wait for the weight gradient (`shardlib.lowering.weights.has_large_result`). Inside of a loop
    the operands of weight gradients live until the iteration ends.

    Before the loop, beside the logits, are what its peeled iteration recomputes ("recomputed"; ZeRO
    3), and the stacks of gradients as zeros ("zeroed"; `shardlib.cost.pricing.zeroes_early`).

    Where XLA schedules by memory, the same holds of values that are not gathered, in programs with
    gathers that are pipelined through the loop (ZeRO 3), of which it peels the first iteration. The
    weight gradients of routed experts in that iteration come after the loop, on any chip, so that
    their operands live through it.
    """
    ops = facts.graph.ops
    loops = [i for i, op in enumerate(ops) if facts.trips[op.region] > 1 and i > loss]
    if not loops:
        return []
    region, last = ops[loops[0]].region, loops[-1]
    inside = [i for i in loops if ops[i].region == region]

    def recomputes(op: Op) -> bool:
        return "rematted_computation" in op.scope

    rematerialises = any(recomputes(ops[i]) for i in inside)
    logits = max(
        (
            live
            for live in ranges
            if live.part in ("temporary", "saved") and loss < live.death < inside[0]
        ),
        key=lambda live: (facts.graph.values[live.value].bytes, live.death),
        default=None,
    )
    read = {
        root
        for i in inside
        if _is_weight_gradient(facts, ops[i])
        for operand in ops[i].operands
        for root in facts.fusion.roots[operand]
    }
    grouped = {
        root
        for i in inside
        if facts.routes and ops[i].kind in GROUPED and _is_weight_gradient(facts, ops[i])
        for operand in ops[i].operands
        for root in facts.fusion.roots[operand]
    }
    late: list[LiveRange] = []
    for live in ranges:
        gathered = any(_is_weight_gradient(facts, ops[i]) for i in live.readers)
        in_loop = live.part == "temporary" and live.birth >= inside[0]
        if live.birth >= inside[0] and not live.readers and live.value in facts.producers:
            op = ops[facts.producers[live.value]]
            before = {"birth": loss + 1, "death": inside[0] - 1}
            if live.part == "gradient" and op.kind == "exit":
                late.append(replace(live, part="zeroed", **before))
            elif in_loop and recomputes(op) and not recomputes(ops[live.death]):
                late.append(replace(live, part="recomputed", **before))
        if live is logits or (gathered and loss < live.death < inside[0]):
            end = last
        elif in_loop and (gathered or (live.value in read and not live.readers)):
            end = inside[-1]
        else:
            continue
        if live.value in grouped and live.birth >= inside[0] and not live.readers:
            late.append(replace(live, part="gathered", birth=inside[0], death=inside[-1]))
        if live.death < end:
            extended = replace(live, part="deferred", birth=live.death + 1, death=end)
            if live is logits and _is_large(facts, live):
                extended = replace(extended, over_tensor=True)
            late.append(extended)
            if rematerialises and not gathered:
                late.append(replace(extended, part="peeled"))
    return late


def _after_input_gradients(facts: Facts, ranges: list[LiveRange]) -> list[LiveRange]:
    """Live ranges where the weight gradient of the head is computed after the gradient of its
    input, the last reader of the gathered weight, so that the two never are in memory together: so
    XLA does for TPUs but v5e, for which the weight gradient comes first
    (`shardlib.cost.pricing.defers_weight_gradients`).
    """
    ops, producers, roots = facts.graph.ops, facts.producers, facts.fusion.roots
    for item in gathered(facts):
        last = item.uses[-1]
        if ops[last].category != "matmul" or facts.trips[item.region] > 1:
            continue
        read = {root for value in ops[last].operands for root in roots[value]} - {item.value}
        moved: list[LiveRange] = []
        for live in ranges:
            index = producers.get(live.value, -1)
            op = ops[index]
            if (
                live.part == "temporary"
                and op.region == item.region
                and _is_weight_gradient(facts, op)
                and any(read.intersection(roots[value]) for value in op.operands)
            ):
                moved.append(live)
        for live in moved:
            first, then = min(live.birth, last), max(live.birth, last + 1)
            ranges = [
                replace(other, death=max(other.death, then)) if other.value in read else other
                for other in ranges
                if other is not live
            ] + [
                replace(live, part="deferred", birth=first, death=last),
                replace(live, birth=then, death=then),
            ]
    return ranges


#: Bytes of a head's result over those of its activation from which the gradient of the weight must
#: not wait. Float32 logits of published models are 16 times (Llama 3 405B) to several hundred times
#: their activations; the matmuls of unrolled layers up to 8 times (gate and up in one).
LARGE_RESULT = 10


def _is_large(facts: Facts, logits: LiveRange) -> bool:
    """True if logits are large beside the activations that they are computed from."""
    bytes_of = {
        value: facts.graph.values[value].bytes
        for op in facts.graph.ops
        if _is_weight_gradient(facts, op)
        and any(logits.value in facts.fusion.roots[value] for value in op.operands)
        for value in op.operands
    }
    return bool(bytes_of) and max(bytes_of.values()) >= LARGE_RESULT * min(bytes_of.values())


def _is_weight_gradient(facts: Facts, op: Op) -> bool:
    return op.category == "matmul" and bool(set(op.results) & facts.gradients)


def block_scores(op: Op, block: int) -> float:
    """Scores of one block of queries and keys in a self-attention kernel, over the elements of its
    queries. 0 for other ops.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0.0
    sizes = [op.rule.sizes[factor] for factor in op.rule.whole if op.rule.sizes[factor] > 1]
    keys, width = max(sizes, default=1), min(sizes, default=1)
    return min(keys, block) ** 2 / (keys * width)


def _blocks(facts: Facts) -> list[LiveRange]:
    """The scores of one block of queries and keys in blockwise attention; of a sequence along a
    context axis, the part of a block per device.
    """
    blocks: list[LiveRange] = []
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
                LiveRange(
                    value=value,
                    part="temporary",
                    birth=index,
                    death=index,
                    ratio=block_scores(op, BLOCK) * size,
                    kernel=index if index in facts.heads else None,
                )
            )
        if op.kind == BACKWARD and max(op.rule.sizes[f] for f in op.rule.whole) > BLOCK:
            blocks += [  # the loop over blocks accumulates gradients in float32
                LiveRange(
                    value=result,
                    part="temporary",
                    birth=index,
                    death=index,
                    ratio=ITEMSIZE["float32"] / facts.graph.values[result].itemsize - 1,
                )
                for result in op.results
                if facts.graph.values[result].itemsize < ITEMSIZE["float32"]
            ]
    return blocks


def _with_all_heads(facts: Facts) -> list[LiveRange]:
    """Live ranges of the operands and results of an attention kernel on devices that compute all
    heads because the heads do not divide among them.
    """
    return [
        LiveRange(
            value=value, part="temporary", birth=kernel, death=kernel, kernel=kernel, all_heads=True
        )
        for kernel in facts.heads
        for value in (*facts.graph.ops[kernel].operands, *facts.graph.ops[kernel].results)
    ]


def _casts(facts: Facts, ranges: Sequence[LiveRange]) -> list[LiveRange]:
    """Parameters of layers that are cast to a narrower dtype, all layers at once and for the whole
    step, except for those whose casts are saved.
    """
    if not facts.traits.hoists_casts:
        return []
    ops, values = facts.graph.ops, facts.graph.values
    copied = {facts.weights[live.value] for live in ranges if live.part == "copy"}
    casts: dict[int, LiveRange] = {}
    for op in ops:
        if (
            op.kind != "convert_element_type"
            or op.results[0] not in facts.weights
            or facts.trips[op.region] <= 1
            or len(op.operands) != 1  # a scale per layer, so the loop casts it
        ):
            continue
        (source,), (result,) = op.operands, op.results
        if (
            values[result].itemsize < values[source].itemsize
            and facts.weights[result] not in copied
        ):
            casts.setdefault(
                facts.weights[result],
                LiveRange(
                    value=result,
                    part="cast",
                    birth=0,
                    death=len(ops) - 1,
                    ratio=float(facts.trips[op.region]),
                ),
            )
    return list(casts.values())


def _in_use(facts: Facts, profile: FrameworkProfile) -> list[LiveRange]:
    """Live ranges of gathered parameters: in a loop the next one arrives while the current one is
    in use; outside of loops, a framework may keep them gathered for the whole step.
    """
    ranges: list[LiveRange] = []
    last: dict[int, int] = {}
    for item in sorted(gathered(facts), key=lambda item: item.uses[0]):
        if profile.embedding_and_head_gathered and facts.trips[item.region] == 1:
            ranges.append(
                LiveRange(
                    value=item.value,
                    part="gathered",
                    birth=0,
                    death=len(facts.graph.ops) - 1,
                    ratio=gathered_bytes(facts, item) / facts.graph.values[item.value].bytes,
                )
            )
            continue
        repeated = facts.trips[item.region] > 1
        cast = item.value != item.source and not facts.traits.fuses_operands
        for use in item.uses if repeated else item.uses[:1]:
            birth = last.get(item.region, use) if repeated else use
            if birth <= use:  # or else it is in use since its first one
                ranges.append(
                    LiveRange(
                        value=item.value,
                        part="temporary" if cast else "gathered",
                        birth=birth,
                        death=use if repeated else item.uses[-1],
                    )
                )
            last[item.region] = use
    return ranges + (_carried(facts) if facts.traits.peels and profile.saves == "traced" else [])


def _carried(facts: Facts) -> list[LiveRange]:
    """Gathered parameters of a loop whose gathers are pipelined, from which they are carried to
    the next iteration, so that they live for a whole one.
    """
    spans: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(facts.graph.ops):
        spans[op.region].append(index)
    return [
        LiveRange(
            value=item.value,
            part="gathered",
            birth=spans[item.region][0],
            death=spans[item.region][-1],
        )
        for item in gathered(facts)
        if facts.trips[item.region] > 1
    ]


# --------------------------------------------------------------------------------------------------
# Live buffers at the points of a step where memory may peak.

_OF_GRADIENTS = dict.fromkeys(("gradient", "added", "zeroed"), 1 / 64)
#: Assumed factor by which ZeRO 2 and 3 with a large fsdp axis shrink a part, and parts that a
#: schedule does not have, in the search for the points where memory may peak.
_ZERO_SHARES: tuple[dict[str, float], ...] = tuple(
    {**parts, **absent}
    for parts, schedules in (
        ({"gathered": 0.0}, ("deferred", "undeferred")),
        ({"gathered": 0.0, **_OF_GRADIENTS}, ("deferred", "")),
        ({**_OF_GRADIENTS, "copy": 1 / 64}, ("deferred", "peeled")),
    )
    for schedule in schedules
    for absent in [
        {
            part: 0.0
            for part in ("deferred", "zeroed", "recomputed", "undeferred", "peeled")
            if part != schedule and (part in ("undeferred", "peeled") or schedule != "deferred")
        }
    ]
)


def bytes_alive(
    graph: Graph, spans: dict[int, tuple[int, int]], weightings: Iterable[np.ndarray]
) -> list[np.ndarray]:
    """Bytes alive at every op, one array per hypothesis about the layout.

    Args:
        spans: key -> first and last op index.
        weightings: arrays of bytes per key, one per hypothesis.
    """
    keys, count = list(spans), len(graph.ops) + 1
    births, deaths = np.array([*spans.values()], dtype=np.int64).reshape(-1, 2).T
    sizes = (np.asarray(weights, dtype=float)[keys] for weights in weightings)
    return [
        np.cumsum(np.bincount(births, size, count) - np.bincount(deaths + 1, size, count))
        for size in sizes
    ]


#: Ops outside of loops over layers are a point of their own if they have this share of the peak of
#: a hypothesis: the head with its logits may have more than the loops for other sizes of the mesh.
_NEAR_PEAK = 0.5


def points(
    spans: dict[int, tuple[int, int]], alive: Iterable[np.ndarray], outside: np.ndarray
) -> list[frozenset[int]]:
    """Sets of values alive together where memory may peak.

    Args:
        spans: key -> first and last op index.
        alive: bytes at every op by hypothesis, see `bytes_alive`.
        outside: True for the ops outside of loops over layers, array [ops].
    """
    if not outside.size:
        return [frozenset()]
    peaks: dict[int, None] = {}
    for level in alive:
        outside_bytes = np.where(outside, level[:-1], -np.inf)
        peak, head = int(np.argmax(level)), int(np.argmax(outside_bytes))
        peaks[peak] = None
        if outside_bytes[head] >= _NEAR_PEAK * level[peak]:
            peaks[head] = None
    return [alive_at(spans, peak, peak) for peak in peaks]


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Memory of a program.

    Attributes:
        points: items of memory for each point where memory may peak.
        phases: the same for each phase from the end of the forward pass on, if requested.
    """

    points: tuple[list[Item], ...]
    phases: tuple[Phase, ...]


def peaks(
    facts: Facts,
    step: StepGraph,
    choices: Iterable[Choice],
    profile: FrameworkProfile = XLA,
    *,
    with_phases: bool = False,
) -> Peaks:
    """Items of memory for each point of the program where memory may peak, under several
    hypothetical choices.
    """
    memory = ProfileMemory(facts, profile)
    ranges = memory.live_ranges(live_ranges(facts, step, profile))
    producers = facts.graph.producers()
    spans = {number: (live.birth, live.death) for number, live in enumerate(ranges)}
    shares = [np.array([parts.get(live.part, 1.0) for live in ranges]) for parts in _ZERO_SHARES]
    unsharded = np.array([facts.graph.values[live.value].bytes * live.ratio for live in ranges])
    sizes = [unsharded * _shares(facts, ranges, choice) for choice in choices]
    alive = bytes_alive(facts.graph, spans, [size * share for size in sizes for share in shares])
    outside = np.array([facts.trips[op.region] <= 1 for op in facts.graph.ops])

    @cache
    def item(number: int) -> Item:
        return _item(facts, producers, ranges[number], memory)

    def items(numbers: Iterable[int]) -> list[Item]:
        return [item(number) for number in sorted(numbers)]

    def phase(span: PhaseOps) -> Phase:
        peak_points = (
            dict.fromkeys(
                span.first + int(np.argmax(level[span.first : span.last + 1])) for level in alive
            )
            if span.first <= span.last
            else {}
        )
        return Phase(
            segment=span.segment,
            points=tuple(items(alive_at(spans, peak, peak)) for peak in peak_points),
            stacks=[
                stacked
                for stacked in items(alive_at(spans, span.before, span.after))
                if stacked.segment >= 0
            ],
        )

    return Peaks(
        points=tuple(map(items, points(spans, alive, outside))),
        phases=tuple(map(phase, phases(facts.graph, facts.layers))) if with_phases else (),
    )


def _shares(facts: Facts, ranges: list[LiveRange], choice: Choice) -> np.ndarray:
    """Share of every live range on one device if each kind of sharding divides by 64."""
    shares: dict[Spec | None, float] = {None: 0.0}

    def share(live: LiveRange) -> float:
        spec = (
            _resharded_spec(facts, live, choice)
            if live.readers
            else facts.value_spec(live.value, choice)
        )
        if not _exists(live, spec):
            return 0.0
        if spec not in shares:
            shares[spec] = 64.0 ** -sum(part is not None for part in spec or ())
        return shares[spec]

    return np.array([share(live) for live in ranges])


def _exists(live: LiveRange, spec: Spec | None) -> bool:
    """True if a value exists in this sharding (`LiveRange.over_tensor`)."""
    if spec is None or live.over_tensor is None:
        return spec is not None
    return live.over_tensor == ("tensor" in axes_of(spec[-1]))


def _resharded_spec(facts: Facts, live: LiveRange, choice: Choice) -> Spec | None:
    """The sharding of a value of which tensor does not shard the sequence, as `LiveRange.readers`
    have it; None if they have it in its own sharding.
    """
    spec, ops = facts.value_spec(live.value, choice), facts.graph.ops
    if not sharded_by(spec, "tensor"):
        return None

    def gathers(index: int) -> bool:
        if live.value in ops[index].results:  # partial sums, before they are reduce-scattered
            factors = facts.op_spec(index, choice)
            return any("tensor" in axes_of(factors[f]) for f in ops[index].rule.summed)
        return (
            not is_exchanged(facts, index, live.value, choice)
            and operand_collective(facts, index, live.value, "tensor", choice) == "all-gather"
        )

    if not any(map(gathers, live.readers)):
        return None
    whole = facts.value_spec(live.value, replace(choice, sequence=None))
    return None if whole == spec else whole


def _item(
    facts: Facts, producers: Mapping[int, int], live: LiveRange, memory: ProfileMemory
) -> Item:
    value = facts.graph.values[live.value]
    op = facts.graph.ops[producers[live.value]] if live.value in producers else None
    segment = facts.layers.segment(op.region) if op else OUTSIDE_LAYERS
    stacked = op is not None and (op.kind == "exit" or live.part == "cast") and segment >= 0

    def terms(choice: Choice) -> tuple[Term, ...]:
        spec = memory.spec(live.value, choice)
        if live.readers:
            spec = _resharded_spec(facts, live, choice)
        if spec is None or not _exists(live, spec):
            return ()
        resident = Resident(
            bytes=amount(value.bytes * live.ratio * memory.padding(live.value, choice), spec),
            part=live.part,
            stacked=stacked,
            shape=value.shape,
            spec=spec,
        )
        return (resident,) if live.kernel is None else _by_heads(facts, live, resident, choice)

    counted_in = segment if stacked or segment == OUTSIDE_LAYERS else INSIDE_LAYER
    colours, size = facts.colours[live.value], value.bytes * live.ratio
    kernels = () if live.kernel is None else (live.kernel,)
    ops = [(facts.graph.ops[i], facts.sharding_of_op(i)) for i in (*live.readers, *kernels)]
    read = tuple(
        (tuple(value == live.value for value in (*op.operands, *op.results)), op.rule, sharding)
        for op, sharding in ops
    )
    return Item(
        colours=colours_in(colours).union(*(colours_in(facts.factors[i]) for i in live.readers)),
        terms=terms,
        segment=counted_in,
        key=(
            (live.part, stacked, facts.sharding_of_value(live.value), value.shape, size),
            (counted_in, read, len(kernels), live.all_heads, live.over_tensor),
        )
        if memory.is_unchanged(live.value)
        else None,
    )


def _by_heads(
    facts: Facts, live: LiveRange, resident: Resident, choice: Choice
) -> tuple[Term, ...]:
    """Terms of a value inside an attention kernel: of a device's own heads if tensor shards them
    only inside the kernel, and of all heads if they do not divide among the devices.
    """
    assert live.kernel is not None
    if not facts.shards_heads(live.kernel, choice):
        return () if live.all_heads else (resident,)
    heads = facts.heads[live.kernel]
    replicated = replace(
        resident, bytes=replace(resident.bytes, tensor=False), heads=heads.condition("none")
    )
    return (
        (replicated,)
        if live.all_heads
        else (replace(resident, heads=heads.condition("all", "queries")), replicated)
    )


# --------------------------------------------------------------------------------------------------
# Items of parameters as they are stored between steps.


def stored_items(
    parameters: tuple[Parameter, ...],
    colours: Mapping[str, LogicalAxes],
    stack_dims: frozenset[tuple[str, int]],
    segments: Mapping[str, int],
) -> list[Item]:
    """Items of stored parameters; identical parameters share one."""
    counts: Counter[tuple[LogicalAxes, tuple[int, ...], str, float, frozenset[int], int, bool]] = (
        Counter(
            (
                colours[p.path],
                p.shape,
                p.dtype,
                p.state_bytes_per_element,
                frozenset(dim for path, dim in stack_dims if path == p.path),
                segments.get(p.path, OUTSIDE_LAYERS),
                p.trained,
            )
            for p in parameters
        )
    )

    def item(
        axes: LogicalAxes,
        shape: tuple[int, ...],
        dtype: str,
        state: float,
        stack: frozenset[int],
        segment: int,
        trained: bool,
        count: int,
    ) -> Item:
        return Item(
            colours=colours_in(axes),
            segment=segment,
            terms=lambda choice: (
                Stored(
                    count=count,
                    elements=math.prod(shape),
                    itemsize=ITEMSIZE.get(dtype, 4),
                    state=state,
                    shape=shape,
                    spec=choice.spec(axes),
                    stack_dims=stack,
                    trained=trained,
                ),
            ),
        )

    return [item(*key, count) for key, count in counts.items()]


def parameter_segments(facts: Facts) -> dict[str, int]:
    """Layer group of every parameter that a loop over layers reads."""
    segments: dict[str, int] = {}
    for op in facts.graph.ops:
        source = facts.weights.get(op.results[0]) if op.kind == "enter" else None
        if source is not None and facts.layers.segment(op.region) >= 0:
            segments.update(
                dict.fromkeys(facts.sources[source].paths, facts.layers.segment(op.region))
            )
    return segments
