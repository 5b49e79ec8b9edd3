"""Items: the separable parts of a step, each with the terms of its cost: kernels, collectives,
exchanges and reductions of partial sums.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardlib.cost.attention import BACKWARD, FORWARD, KERNELS, KernelHeads
from shardlib.cost.experts import GROUPED, routed_values, row_count
from shardlib.cost.facts import Facts, Kernel, accumulators
from shardlib.cost.memory import (
    GatheredParameter,
    gathered,
    gathered_bytes,
    is_exchanged,
    operand_collective,
)
from shardlib.cost.terms import (
    OUTSIDE_LAYERS,
    Amount,
    AttentionCore,
    Compute,
    Elements,
    Item,
    Matmul,
    RoutedRows,
    Term,
    Transfer,
    TransferOps,
    amount,
    colours_in,
)
from shardlib.formats import bytes_of
from shardlib.graph import Op, Problem
from shardlib.propagation.colours import Choice, Spec, axes_of, dividing_axes, sharded_by
from shardlib.propagation.contractions import DividedHeads

# --------------------------------------------------------------------------------------------------
# Items of exchanges: tokens to experts and back (dispatch and combine), heads around an attention
# kernel, and activations from one pipeline stage to the next.


def context_exchange_item(facts: Facts, index: int) -> Item:
    """The all-to-all of sequence parts for heads around an attention kernel (arXiv:2309.14509):
    forward of queries, keys, values and results, and of the gradient of the results, which the
    backward pass reads; backward of the other gradients.
    """
    op, moved = facts.graph.ops[index], exchanged_values(facts, index)

    def terms(choice: Choice) -> tuple[Term, ...]:
        return tuple(
            Transfer(
                kind="all-to-all",
                purpose="head_exchange",
                bytes=amount(facts.graph.values[value].bytes, spec),
                trips=times * facts.trips[op.region],
                cause=op.scope or op.kind,
            )
            for value, times in moved
            if sharded_by(spec := facts.value_spec(value, choice), "context") and len(spec) > 2
        )

    return Item(
        colours=frozenset[str]().union(*(colours_in(facts.colours[value]) for value, _ in moved)),
        terms=terms,
        segment=facts.layers.segment(op.region),
    )


def exchanged_values(facts: Facts, index: int) -> list[tuple[int, int]]:
    """The operands and results of an attention kernel with their numbers of transfers. Results of
    the forward pass include the transfer of their gradient, unless they are rematerialised.
    """
    op = facts.graph.ops[index]
    if op.kind == BACKWARD:
        return [(value, 1) for value in op.results]
    once = (
        1
        if "rematted_computation" in op.scope
        or not any(later.kind == BACKWARD for later in facts.graph.ops)
        else 2
    )
    return [*((value, 1) for value in op.operands), (op.results[0], once)]


def routed_rows(facts: Facts, op: Op, value: int, choice: Choice) -> RoutedRows:
    """The rows of an array of tokens and the experts of its region, those of the largest stack of
    weights in a grouped matmul.
    """
    capped = facts.capped.get(op.region)
    shapes = [
        facts.graph.values[v].shape
        for matmul in facts.graph.ops
        if matmul.kind in GROUPED and matmul.region == op.region
        for v in (*matmul.operands[:2], *matmul.results)
    ]
    experts = max(shape[0] for shape in shapes if len(shape) == 3)
    shape, spec = facts.graph.values[value].shape, facts.value_spec(value, choice)
    rows = amount(
        float(capped.assignments if capped is not None and len(shape) == 3 else shape[0]),
        spec[: max(1, len(shape) - 1)],
    )
    return RoutedRows(
        assignments=rows,
        experts=Amount(
            total=float(experts), batch=False, tensor=False, expert=choice.expert is not None
        ),
        capacity_factor=capped.factor if capped is not None else None,
    )


def route_items(facts: Facts) -> list[Item]:
    """The all-to-alls that dispatch tokens to their experts and combine the results."""

    def item(index: int, value: int) -> Item:
        op, capped = facts.graph.ops[index], facts.capped.get(facts.graph.ops[index].region)
        size = facts.graph.values[value].bytes * facts.token_exchange.padding
        if capped is not None:  # of the slots, only as many as there are assignments are sent
            size *= capped.assignments / row_count(facts.graph, value)

        def terms(choice: Choice) -> tuple[Term, ...]:
            if choice.expert is None:
                return _gathered_tokens(facts, index, value, choice)
            gathered = (
                _gathered_tokens(facts, index, value, choice)
                if facts.token_exchange.sent == "whole"
                else ()
            )
            tokens = amount(float(size), facts.value_spec(value, choice))
            split_ranks = facts.token_exchange.sent != "whole" and choice.sequence is not None
            sent = Transfer(
                kind="all-to-all",
                purpose="expert",
                bytes=replace(tokens, tensor=tokens.tensor or split_ranks),
                trips=facts.trips[op.region],
                cause=op.scope or op.kind,
                routed=routed_rows(facts, op, value, choice),
            )
            if not split_ranks or tokens.tensor or facts.token_exchange.sent == "ranks":
                return (sent, *gathered)
            # Of the rows of dispatch and combine, forward and backward, half are gathered; the
            # other half are partial sums, which `reductions` scatters.
            arrived = replace(
                sent,
                kind="all-gather",
                purpose="tensor",
                bytes=replace(tokens, total=tokens.total / 2),
                routed=None,
            )
            return (sent, arrived)

        colours = colours_in(facts.colours[value])
        if facts.sequence is not None:
            # the rows sent depend on them
            colours |= {facts.sequence, *facts.grouped_matmul_colours(op.region)}
        return Item(colours=colours, terms=terms, segment=facts.layers.segment(op.region))

    return (
        [
            item(index, value)
            for index, value in routed_values(facts.graph, facts.colours, facts.batch)
        ]
        if facts.routes
        else []
    )


def _gathered_tokens(facts: Facts, index: int, value: int, choice: Choice) -> tuple[Term, ...]:
    """The gathers if tensor shards both the width of experts and the sequence: tokens are
    all-gathered before the dispatch; partial sums are reduce-scattered after the combine
    (`reductions`).
    """
    op = facts.graph.ops[index]
    if choice.sequence is None or not facts.shards_grouped_matmuls(op.region, choice):
        return ()
    tokens = amount(float(facts.graph.values[value].bytes), facts.value_spec(value, choice))
    return (
        Transfer(
            kind="all-gather",
            purpose="tensor",
            bytes=replace(
                tokens, total=tokens.total / 2 / facts.experts_per_token(value), tensor=False
            ),
            trips=facts.trips[op.region],
            cause=op.scope or op.kind,
        ),
    )


def boundary_items(facts: Facts) -> list[Item]:
    """Items of the stage activations: the residual stream that a pipeline stage sends to the next,
    and its cotangent on the way back, per microbatch. If all stages compute embedding and head, a
    device has a part of the sequence there: the input of the first stage (backward: of the last) is
    gathered over the stages, and the output of the last (backward: of the first) is scattered.
    """
    carried = [value for value in facts.layers.carried if value >= 0][:1]

    def item(value: int) -> Item:
        def terms(choice: Choice) -> tuple[Term, ...]:
            size = amount(float(facts.graph.values[value].bytes), facts.value_spec(value, choice))
            return tuple(
                Transfer(kind=kind, purpose=purpose, bytes=size, trips=2, cause=cause)
                for kind, purpose, cause in (
                    ("collective-permute", "stage", "between stages"),
                    ("all-gather", "ends", "into the stages"),
                    ("reduce-scatter", "ends", "out of the stages"),
                )
            )

        return Item(colours=colours_in(facts.colours[value]), terms=terms, segment=OUTSIDE_LAYERS)

    return [item(value) for value in carried]


# --------------------------------------------------------------------------------------------------
# The cost of reordering a fused weight.
#
# A weight is stored in the model's order. If tensor shards a fused dim of it, the program uses it
# in another order (`shardlib.lowering.contractions`): devices exchange columns for rows, change the
# order, and exchange back, two all-to-alls of a device's part of the weight, and two for its
# gradient. A vector is gathered instead. Weights of a loop over layers are reordered in every
# iteration, and again if the layer is rematerialised; others, and those of unrolled layers, once
# per microbatch.

#: Fused dims of parameters, by path.
FusedDims = Mapping[str, frozenset[int]]


def fused_parameters(problem: Problem) -> FusedDims:
    """The fused dims of the parameters that have some."""
    fused: dict[str, frozenset[int]] = {}
    for index in problem.forward.inputs_of("parameter"):
        value = problem.forward.values[index]
        dims = frozenset(dim for dim in range(len(value.shape)) if (index, dim) in problem.pieces)
        fused.update({value.path: dims} if dims else {})
    return fused


def reorder_items(facts: Facts, fused: FusedDims) -> list[Item]:
    """Items of the reordering of fused weights and of their gradients."""
    return [
        item
        for value, source in facts.sources.items()
        if (dims := fused.get(source.paths[0]))
        for item in _reorderings(facts, value, frozenset(dim + source.stacked for dim in dims))
    ]


def _reorderings(facts: Facts, value: int, dims: frozenset[int]) -> list[Item]:
    """One item for each use of a weight, and one for its gradient."""
    graph, stack = facts.graph, facts.stack_dims(value)
    uses = [use for use in gathered(facts) if use.source == value]
    inside = [use.region for use in uses if stack]
    unrolled = value in facts.sources and facts.sources[value].stacked
    others = [] if unrolled else sorted(inside)[1:]
    regions = (
        [min(inside), *(region for region in others if _remats(facts, region))] if inside else [0]
    )
    back = [max(inside)] if inside else [0]
    size = float(
        min(
            [
                graph.values[use.value].bytes
                * (facts.trips[use.region] if use.value != value and stack else 1)
                for use in uses
            ],
            default=graph.values[value].bytes,
        )
    )
    vector = len(graph.values[value].shape) - len(stack) < 2

    def item(region: int) -> Item:
        trips = facts.trips[region] if stack else 1

        def terms(choice: Choice) -> tuple[Term, ...]:
            spec = facts.value_spec(value, choice)
            if facts.head_width_colours.intersection(facts.colours[value][dim] for dim in dims):
                return ()  # an attention kernel reads it, so it stays in order
            if not any(spec[dim] and sharded_by((spec[dim],), "tensor") for dim in dims):
                return ()
            gradient_bytes = amount(size / trips, spec)
            moved = Transfer(
                kind="all-gather" if vector else "all-to-all",
                purpose="tensor",
                bytes=gradient_bytes if not vector else amount(size / trips, (None,) * len(spec)),
                trips=trips,
                cause=graph.values[value].path,
            )
            return (moved,) if vector else (moved, moved)

        return Item(
            colours=colours_in(facts.colours[value]),
            terms=terms,
            segment=facts.layers.segment(region) if stack else OUTSIDE_LAYERS,
        )

    return [item(region) for region in (*regions, *back)]


def _remats(facts: Facts, region: int) -> bool:
    """True if a region rematerialises layers."""
    return any(op.region == region and "rematted_computation" in op.scope for op in facts.graph.ops)


# --------------------------------------------------------------------------------------------------
# Items of gathers: collectives that reshard the operand of an op.
#
# A value that tensor shards along the sequence, and of which a matmul needs all rows, is
# all-gathered; if the matmul uses it sharded along another dim, an all-to-all.


def value_gather_item(facts: Facts, value: int) -> Item | None:
    """The gather of a value that tensor shards (along the sequence), for readers that need it
    unsharded or sharded otherwise: a single one for all of them. None if nothing reads it, nothing
    could shard it, or it is a weight.
    """
    readers = _readers(facts, value)
    if not readers or not any(facts.colours[value]) or value in facts.weights:
        return None
    colours = colours_in(facts.colours[value]).union(
        *(colours_in(facts.factors[i]) for i in readers)
    )
    return Item(
        colours=colours,
        terms=lambda choice: tuple(
            transfer for transfer, _ in _gathers(facts, value, readers, choice)
        ),
        segment=max(facts.layers.segment(facts.graph.ops[i].region) for i in readers),
        key=_gathers_key(facts, value, readers),
    )


def _gathers_key(facts: Facts, value: int, readers: list[int]) -> Hashable:
    """A key of the facts that determine the gathers of a value."""
    ops = [facts.graph.ops[i] for i in readers]
    regions = list(dict.fromkeys(op.region for op in ops))
    rematerialised = _rematerialised(facts, readers)
    return (
        "gathers",
        facts.sharding_of_value(value),
        facts.graph.values[value].bytes,
        *(
            (
                op.rule,
                op.kind if op.kind in KERNELS else "",
                op.operands.index(value),
                facts.sharding_of_op(index),
                facts.trips[op.region],
                regions.index(op.region),
                _own_gather(facts, index, rematerialised),
                _before_casts(facts, index, value),
            )
            for index, op in zip(readers, ops, strict=True)
        ),
    )


def _rematerialised(facts: Facts, readers: list[int]) -> set[int]:
    """Regions in which the backward pass rematerialises a value for some of its readers."""
    return {
        facts.graph.ops[i].region
        for i in readers
        if "rematted_computation" in facts.graph.ops[i].scope
    }


def _own_gather(facts: Facts, index: int, rematerialised: set[int]) -> bool:
    """True if a reader has a gather of its own: the compiler gathers a rematerialised value for
    rematerialisation, and the manual region gathers it for the weight gradient.
    """
    op = facts.graph.ops[index]
    return (
        op.results[0] in facts.gradients
        and not facts.traits.merges_gathers
        and op.region in rematerialised
    )


def _readers(facts: Facts, value: int) -> list[int]:
    """The ops that may need a value in another sharding."""
    return [
        i
        for i in facts.consumers.get(value, ())
        if facts.graph.ops[i].category not in ("elementwise", "boundary")
    ]


def _gathers(facts: Facts, value: int, readers: list[int], choice: Choice) -> list[TransferOps]:
    spec = facts.value_spec(value, choice)
    if value in facts.weights or not any(sharded_by(spec, axis) for axis in ("tensor", "context")):
        return []
    size = facts.graph.values[value].bytes
    rematerialised = _rematerialised(facts, readers)
    transfers: dict[tuple[str, str, int, bool], Transfer] = {}
    needing: dict[tuple[str, str, int, bool], list[int]] = defaultdict(list)

    def need(key: tuple[str, str, int, bool], transfer: Transfer, index: int) -> None:
        transfers.setdefault(key, transfer)
        needing[key].append(index)

    for axis in ("tensor", "context"):
        if not sharded_by(spec, axis):
            continue
        for index in readers:
            if axis == "tensor" and is_exchanged(facts, index, value, choice):
                continue
            kind = operand_collective(facts, index, value, axis, choice)
            op = facts.graph.ops[index]
            if (
                kind and axis == "context" and op.kind in KERNELS
            ):  # around a ring for every kernel, unsharded
                need(
                    (op.kind, "ring", op.region, False),
                    Transfer(
                        kind="collective-permute",
                        purpose="ring",
                        bytes=replace(amount(size, spec), context=False),
                        trips=facts.trips[op.region],
                        cause=op.scope or op.kind,
                    ),
                    index,
                )
            if kind:
                own = _own_gather(facts, index, rematerialised)
                moved = (
                    amount(size, spec)
                    if kind == "all-to-all"
                    else replace(amount(_before_casts(facts, index, value), spec), **{axis: False})
                )
                purpose = "keys" if axis == "context" and op.kind in KERNELS else axis
                need(
                    (purpose, kind, op.region, own),
                    Transfer(
                        kind=kind,
                        purpose=purpose,
                        bytes=moved,
                        trips=facts.trips[op.region],
                        cause=op.scope or op.kind,
                    ),
                    index,
                )
    return [(transfer, tuple(needing[key])) for key, transfer in transfers.items()]


def _before_casts(facts: Facts, index: int, value: int) -> int:
    """Bytes of a value as gathered: for a weight gradient in the narrowest dtype that it was cast
    from, except for scaled casts into 8 bits.
    """
    graph, size = facts.graph, facts.graph.values[value].bytes
    producers = facts.producers
    while (
        graph.ops[index].results[0] in facts.gradients
        and value in producers
        and graph.ops[producers[value]].kind == "convert_element_type"
        and len(graph.ops[producers[value]].operands) == 1
    ):
        (value,) = graph.ops[producers[value]].operands
        size = min(size, graph.values[value].bytes)
    return size


def gathers_of(facts: Facts, choice: Choice) -> list[TransferOps]:
    """The gathers of values under a choice, with the ops that need each."""
    return [
        gather
        for value in facts.consumers
        if any(facts.colours[value])
        for gather in _gathers(facts, value, _readers(facts, value), choice)
    ]


# --------------------------------------------------------------------------------------------------
# Items of exchanges along tensor for the heads of an attention kernel.
#
# If tensor shards the sequence of queries, keys and values, or the width of their heads, it shards
# the heads inside the kernel (`shardlib.lowering.context.dispatch`):
#
#     heads divide                  one all-to-all in, one all-to-all out; reversed for gradients
#     too few heads of keys         keys and values are all-gathered, their gradients
#                                   reduce-scattered, or all-reduced if they are unsharded for a
#                                   rotation by positions
#     too few heads of queries      everything is all-gathered, and devices compute the same


def tensor_exchange_item(facts: Facts, index: int) -> Item:
    """The exchange along tensor for the heads of an attention kernel."""
    op, moved = facts.graph.ops[index], exchanged_values(facts, index)

    def terms(choice: Choice) -> tuple[Term, ...]:
        if not facts.shards_heads(index, choice):
            return ()
        return tuple(
            term
            for value, times in moved
            for term in _head_collectives(facts, index, value, times, choice)
        )

    return Item(
        colours=colours_in(facts.factors[index]).union(
            *(colours_in(facts.colours[value]) for value in (*op.operands, *op.results))
        ),
        terms=terms,
        segment=facts.layers.segment(op.region),
    )


def _head_collectives(
    facts: Facts, index: int, value: int, times: int, choice: Choice
) -> Iterator[Transfer]:
    """The collectives of one operand or result of an attention kernel."""
    op, heads, spec = facts.graph.ops[index], facts.heads[index], facts.value_spec(value, choice)
    if not sharded_by(spec, "tensor"):
        return
    sharded = amount(_exchanged_bytes(facts, index, value), spec)
    gradient, result = op.kind == BACKWARD, value in op.results

    def transfer(kind: str, count: int, *shared: DividedHeads) -> Transfer:
        return Transfer(
            kind=kind,
            purpose="tensor",
            bytes=sharded if kind == "all-to-all" else replace(sharded, tensor=False),
            trips=count * facts.trips[op.region],
            cause=op.scope or op.kind,
            heads=heads.condition(*shared),
        )

    separate = _distinct_heads(facts, index, value, heads)
    if separate:
        yield transfer("all-to-all", times, *separate)
    gathered: tuple[DividedHeads, ...] = tuple(
        shared for shared in _SHARING if shared not in separate
    )
    if gathered:
        scattered = "all-reduce" if facts.pairs_head_dims(value, choice) else "reduce-scatter"
        yield transfer(scattered if gradient else "all-gather", times, *gathered)
    # If every device computes the same, it has all results; only operands are gathered.
    gathers = 0 if gradient else times - 1 if result else times
    if gathers:
        yield transfer("all-gather", gathers, "none")


#: The cases in which at least heads of queries are divided among devices.
_SHARING: tuple[DividedHeads, ...] = ("all", "queries")


def _distinct_heads(
    facts: Facts, index: int, value: int, heads: KernelHeads
) -> tuple[DividedHeads, ...]:
    """The cases in which each device has different heads of a value."""
    rule = facts.graph.ops[index].rule
    values = (*facts.graph.ops[index].operands, *facts.graph.ops[index].results)
    dims = (*rule.operands, *rule.results)[values.index(value)]
    factors = {factor for dim in dims for factor in dim}
    if heads.group_factor not in factors:
        return ()
    return _SHARING if heads.queries_per_group == 1 or factors & heads.query_factors else ("all",)


def _exchanged_bytes(facts: Facts, index: int, value: int) -> float:
    """Bytes of a value as exchanged: gradients in the dtype of queries."""
    op, values = facts.graph.ops[index], facts.graph.values
    itemsize = values[value].itemsize
    if op.kind == BACKWARD:
        itemsize = min(itemsize, values[op.operands[0]].itemsize)
    return float(values[value].bytes / values[value].itemsize * itemsize)


# --------------------------------------------------------------------------------------------------
# Items of computation: one per kernel of a step graph. It yields a `Compute`: FLOPs, bytes moved,
# and the dims of its matmul, each with the axes that divide it.

#: Ops that take many steps on a TPU's vector units, and a unit of their own on a GPU; a TPU has
#: units for tanh, exp2 and square roots.
TRANSCENDENTAL: frozenset[str] = frozenset(
    {
        "exp",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "erf",
        "erf_inv",
        "sin",
        "cos",
        "tan",
        "pow",
        "cbrt",
    }
)


def _compute_item(facts: Facts, kernel: Kernel) -> Item:
    op = facts.graph.ops[kernel.op]
    values = (*kernel.reads, *kernel.writes)
    touched = {
        value
        for i in kernel.fused
        for value in (*facts.graph.ops[i].operands, *facts.graph.ops[i].results)
    }
    colours = colours_in(facts.factors[kernel.op]).union(
        *(colours_in(facts.colours[value]) for value in {*values, *touched})
    )
    is_weight_gradient = op.category == "matmul" and bool(facts.gradients & set(op.results))
    dtype = max(
        (facts.graph.values[v].dtype for v in op.operands[:2]),
        key=bytes_of,
        default="float32",
    )

    bytes_moved = [(value, _traffic_bytes(facts, op, value)) for value in values]
    simple_work, transcendental_work = (
        [
            _largest(facts, i)
            for i in kernel.fused
            if (facts.graph.ops[i].kind in TRANSCENDENTAL) is transcendental
        ]
        for transcendental in (False, True)
    )

    def shares(choice: Choice) -> bool:
        return facts.shards_heads(kernel.op, choice)

    def local(sizes: list[tuple[int, float]], choice: Choice) -> tuple[Amount, ...]:
        totals: dict[_Divisors, float] = defaultdict(float)
        for value, size in sizes:
            totals[dividing_axes(facts.value_spec(value, choice))] += size
        return _amounts(totals)

    def terms(choice: Choice) -> tuple[Term, ...]:
        spec = facts.op_spec(kernel.op, choice)
        compute = Compute(
            flops=amount(op.flops, spec),
            dtype=dtype,
            traffic=local(bytes_moved, choice),
            trips=facts.trips[op.region],
            elements=Elements(
                simple=local(simple_work, choice), transcendental=local(transcendental_work, choice)
            ),
            matmul=_matmul(op, spec),
            kind=op.kind,
            category=op.category,
            is_weight_gradient=is_weight_gradient,
            routed=routed_rows(facts, op, op.operands[0], choice) if op.kind in GROUPED else None,
            core=_core(op),
        )
        return _by_heads(facts, kernel.op, compute) if shares(choice) else (compute,)

    segment = facts.layers.segment(op.region)
    key = (
        (op.kind, op.category, op.flops, op.rule, facts.sharding_of_op(kernel.op), _core(op)),
        (facts.trips[op.region], segment, is_weight_gradient, dtype, len(op.operands)),
        *(
            tuple((facts.sharding_of_value(value), size) for value, size in work)
            for work in (bytes_moved, simple_work, transcendental_work)
        ),
    )
    comparable = op.kind not in GROUPED
    return Item(colours=colours, terms=terms, segment=segment, key=key if comparable else None)


def _by_heads(facts: Facts, index: int, compute: Compute) -> tuple[Term, ...]:
    """The terms of an attention kernel whose heads tensor shards only inside the kernel: sharded if
    the heads divide among the devices, and replicated if not.
    """
    heads = facts.heads[index]

    def replicated(amounts: tuple[Amount, ...]) -> tuple[Amount, ...]:
        return tuple(replace(amount, tensor=False) for amount in amounts)

    return (
        replace(compute, heads=heads.condition("all", "queries")),
        replace(
            compute,
            flops=replace(compute.flops, tensor=False),
            traffic=replicated(compute.traffic),
            elements=Elements(
                simple=replicated(compute.elements.simple),
                transcendental=replicated(compute.elements.transcendental),
            ),
            heads=heads.condition("none"),
        ),
    )


#: Whether batch, tensor, context and expert axes divide an array.
_Divisors = tuple[bool, bool, bool, bool]


def _amounts(totals: Mapping[_Divisors, float]) -> tuple[Amount, ...]:
    return tuple(
        Amount(total=total, batch=b, tensor=t, context=c, expert=e)
        for (b, t, c, e), total in totals.items()
    )


def _largest(facts: Facts, index: int) -> tuple[int, float]:
    """The largest operand or result of an op, and its elements: those that the op processes."""
    op = facts.graph.ops[index]
    sizes = {
        value: float(math.prod(facts.graph.values[value].shape))
        for value in (*op.operands, *op.results)
    }
    value = max(sizes, key=lambda value: sizes[value])
    return value, sizes[value]


def _traffic_bytes(facts: Facts, op: Op, value: int) -> float:
    """Bytes of a value that a kernel moves: gathers, scatters and slices touch only the selected
    part.
    """
    size = facts.graph.values[value].bytes
    if op.category in ("gather", "scatter") and value in op.operands:
        return min(
            size,
            (
                max(
                    (facts.graph.values[v].bytes for v in (*op.results, *op.operands[1:])),
                    default=size,
                )
                if op.category == "gather"
                else size
            ),
        )
    return size


def head_size(op: Op) -> int:
    """Contracted elements of a head in an attention kernel: the largest last dim of the operands
    and results in which only the last dim must stay whole. 0 for other ops.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0
    unsharded = [
        [
            math.prod(op.rule.sizes[factor] for factor in dim if factor in op.rule.whole)
            for dim in dims
        ]
        for dims in (*op.rule.operands, *op.rule.results)
        if dims
    ]
    return max(
        (sizes[-1] for sizes in unsharded if sizes[-1] > 1 == math.prod(sizes[:-1])), default=0
    )


def head_widths(op: Op) -> tuple[int, int] | None:
    """Elements of a head of queries, over all its parts, and of a head of values; None for a kernel
    of a form other than those of `shardlib.cost.attention`.
    """
    if op.kind not in KERNELS:
        return None
    forward, rule = op.kind == FORWARD, op.rule
    rows = [dim for dim in (rule.results if forward else rule.operands)[-1] if dim]
    with_rows = [  # operands with the rows of queries, except for the statistic
        dims[-1]
        for dims in rule.operands
        if dims and [dim for dim in dims[:-1] if dim] == rows and dims[-1]
    ]
    # In the backward pass the first of them is the gradient of the result, as wide as values.
    values, queries = (
        (rule.results[0][-1], with_rows)
        if forward
        else (with_rows[0] if with_rows else (), with_rows[1:])
    )
    if not queries or not values:
        return None

    def width(dim: Sequence[int]) -> int:
        return math.prod(rule.sizes[factor] for factor in dim)

    return sum(map(width, queries)), width(values)


def scores_per_flop(op: Op) -> float:
    """Scores per FLOP of an attention kernel: 2 matmuls forward and 5 backward contract or make the
    elements of a head for each score. 0 for other ops.

    Of the dims that must stay whole, that of a head's elements is the smallest.
    """
    if op.kind not in (FORWARD, BACKWARD):
        return 0.0
    width = min(
        (op.rule.sizes[factor] for factor in op.rule.whole if op.rule.sizes[factor] > 1), default=1
    )
    return 1 / (2 * width * (2 if op.kind == FORWARD else 5))


def _core(op: Op) -> AttentionCore | None:
    head, scores = head_size(op), scores_per_flop(op)
    if not head and not scores:
        return None
    widths = head_widths(op) or (head, None)
    return AttentionCore(query_width=widths[0], value_width=widths[1], scores_per_flop=scores)


def _matmul(op: Op, spec: Spec) -> Matmul | None:
    """The dims of a matmul; the number of matmuls is the size of the factors that both operands and
    the result have.
    """
    if op.category != "matmul" or len(op.operands) != 2:
        return None
    left, right, out = (
        {f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0])
    )
    return Matmul(
        rows=_extent(op, (left & out) - right, spec),
        columns=_extent(op, (right & out) - left, spec),
        depth=_extent(op, (left & right) - out, spec),
        batches=_extent(op, left & right & out, spec),
    )


def _extent(op: Op, group: set[int], spec: Spec) -> Amount:
    return amount(float(math.prod(op.rule.sizes[f] for f in group)), tuple(spec[f] for f in group))


def kernel_items(facts: Facts) -> list[Item]:
    """Items of the kernels of a step graph, in the order of `Facts.fusion`."""
    return [_compute_item(facts, kernel) for kernel in facts.fusion.kernels]


#: Ops that only rearrange or cast their operand, so that a sum commutes with them.
_LINEAR_VIEWS: frozenset[str] = frozenset(
    {"transpose", "reshape", "convert_element_type", "copy", "squeeze", "expand_dims"}
)


@dataclass(frozen=True, kw_only=True)
class Summands:
    """Ops whose results are only added to each other, so that the compiler reduces the sum once.

    Attributes:
        ops: indices of the ops.
        looped: True if a loop accumulates them in a carry, whose partial sums over the batch are
            all-reduced once, after the loop (`CompilerTraits.reduces_after_loops`).
    """

    ops: tuple[int, ...]
    looped: bool


def sum_groups(facts: Facts) -> list[Summands]:
    """Ops with summed factors, grouped if their results are only added to each other (`add_any` of
    cotangents).

    Partial sums can be added before they are reduced, as XLA's all-reduce reassociation does
    (openxla/xla `xla/service/all_reduce_reassociate.cc`).
    """
    graph, producers = facts.graph, facts.graph.producers()
    leader: dict[int, int] = {}

    def origin(value: int) -> int | None:
        maker = producers.get(value)
        while maker is not None and _is_view(graph.ops[maker]):
            maker = producers.get(graph.ops[maker].operands[0])
        return maker

    for op in graph.ops if facts.traits.adds_partial_sums else ():
        if op.kind != "add_any":
            continue
        if op.results[0] in facts.gradients and not facts.traits.reassociates_all_reduces:
            continue  # every use of a parameter reduces its own part of the gradient
        makers = [origin(value) for value in op.operands]
        summing = [m for m in makers if m is not None and (graph.ops[m].rule.summed or m in leader)]
        if len(summing) == len(op.operands):
            first = leader.get(summing[0], summing[0])
            for maker in summing:
                leader[maker] = first
            leader[producers[op.results[0]]] = first
    looped = {
        leader.get(maker, maker)
        for accumulator in (accumulators(graph) if facts.traits.reduces_after_loops else ())
        if (maker := origin(accumulator.added)) is not None
    }
    groups: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(graph.ops):
        if op.rule.summed:
            groups[leader.get(index, index)].append(index)
    return [Summands(ops=tuple(ops), looped=first in looped) for first, ops in groups.items()]


def _is_view(op: Op) -> bool:
    """True if an op only rearranges or casts its operand, or sums over dims of size 1."""
    return op.kind in _LINEAR_VIEWS or (op.kind == "reduce_sum" and not op.rule.summed)


# --------------------------------------------------------------------------------------------------
# Items of reductions: collectives of partial sums, of values and of gradients.
#
# The result of a matmul with a sharded contraction is a partial sum. It is all-reduced, or
# reduce-scattered if the result is sharded over the same axis.


def reduce_item(facts: Facts, summands: Summands) -> Item:
    """The reductions of partial results."""
    group = summands.ops
    colours = frozenset[str]().union(
        *(
            colours_in(facts.factors[i]) | colours_in(facts.colours[facts.graph.ops[i].results[0]])
            for i in group
        )
    )
    if (
        facts.routes
        and facts.sequence is not None
        and any(facts.graph.ops[i].kind in GROUPED for i in group)
    ):
        colours |= {facts.sequence}  # the combine depends on it
    return Item(
        colours=colours,
        terms=lambda choice: tuple(transfer for transfer, _ in _reduced(facts, summands, choice)),
        segment=facts.layers.segment(facts.graph.ops[group[0]].region),
        key=_reductions_key(facts, summands),
    )


def _reductions_key(facts: Facts, summands: Summands) -> Hashable:
    """A key of the facts that determine the reductions of some ops; None for products of
    experts.
    """
    group, ops = summands.ops, [facts.graph.ops[index] for index in summands.ops]
    if any(op.kind in GROUPED for op in ops):
        return None
    values = facts.graph.values
    return (
        "reductions",
        summands.looped,
        *(
            (
                (op.rule, op.category == "gather", op.kind in KERNELS),
                (facts.trips[op.region], summands.looped and _outer_trips(facts, op)),
                facts.sharding_of_op(index),
                *(
                    (
                        (facts.sharding_of_value(value), value in facts.gradients),
                        (values[value].shape, values[value].bytes, _reduced_bytes(facts, value)),
                    )
                    for value in op.results
                ),
            )
            for index, op in zip(group, ops, strict=True)
        ),
    )


def _reduced(facts: Facts, summands: Summands, choice: Choice) -> list[TransferOps]:
    transfers: dict[tuple[str, int, int], Transfer] = {}
    makers: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index in summands.ops:
        seen = Counter[str]()  # an op may have several results
        for transfer in _reductions(facts, index, choice, looped=summands.looped):
            purpose = transfer.purpose
            seen[purpose] += 1
            key = purpose, seen[purpose], 0
            small, large = sorted(
                (transfers.get(key, transfer), transfer), key=lambda pair: pair.bytes.total
            )
            if purpose == "gradient" and transfer.case != "all-reduce" and key in transfers:
                own = (*key[:2], index)  # each use scatters its own gradient
                transfers[own], makers[own] = replace(small, case="repeated"), [index]
            transfers[key] = large
            makers[key].append(index)
    return [(transfer, tuple(makers[key])) for key, transfer in transfers.items()]


def _reductions(facts: Facts, index: int, choice: Choice, *, looped: bool) -> tuple[Transfer, ...]:
    op = facts.graph.ops[index]
    spec = facts.op_spec(index, choice)
    partial = {kind for f in op.rule.summed for kind in axes_of(spec[f])}
    transfers: list[Transfer] = []
    for value in op.results:
        value_spec = facts.value_spec(value, choice)
        if value in facts.gradients and partial & {"batch", "context"}:
            transfers += _gradient(facts, op, value, value_spec, "tensor" in partial, looped)
            continue
        size = _summed_bytes(facts, op, value)
        if size is None:
            continue
        unreduced = amount(size, value_spec)
        for axis in ("tensor", "context"):
            if axis not in partial or _complete_sums(facts, index, axis, choice):
                continue
            if axis == "context" and op.kind in KERNELS:
                transfers += _around_ring(facts, op, value, value_spec, unreduced)
            elif axis == "tensor" or "batch" not in partial:
                transfers.append(_over_axis(facts, op, axis, unreduced, value_spec, choice))
        if "batch" in partial:
            transfers.append(
                Transfer(
                    kind="reduce",
                    purpose="sum",
                    bytes=replace(unreduced, batch=False, context=False),
                    trips=_outer_trips(facts, op) if looped else facts.trips[op.region],
                    shape=facts.graph.values[value].shape,
                    spec=value_spec,
                    cause=_cause(op),
                )
            )
    return tuple(transfers)


def _gradient(
    facts: Facts, op: Op, value: int, spec: Spec, over_tensor: bool, looped: bool
) -> list[Transfer]:
    """The reduction of a parameter's gradient over the devices that share the batch; after the loop
    if a loop accumulates it and it is all-reduced.
    """
    module = op.scope.removeprefix("transpose(jvp(").replace(")", "").strip("/")
    reduced = Transfer(
        kind="reduce",
        purpose="gradient",
        bytes=replace(amount(_reduced_bytes(facts, value), spec), batch=False, context=False),
        trips=facts.trips[op.region],
        shape=facts.graph.values[value].shape,
        spec=spec,
        over_tensor=over_tensor,
        cause=f"gradients of {module or 'weights'}",
    )
    if not looped:
        return [reduced]
    return [
        replace(reduced, case="reduce-scatter"),
        replace(reduced, case="all-reduce", trips=_outer_trips(facts, op)),
    ]


def _summed_bytes(facts: Facts, op: Op, value: int) -> float | None:
    """Bytes of an activation's partial sums; None if nothing reads the sums."""
    if op.category == "gather":  # a lookup is one in the dtype in which its results are used
        return _reduced_bytes(facts, value)
    size = facts.graph.values[value].bytes
    if facts.routes and op.kind in GROUPED and facts.token_exchange.sent == "whole":
        if "rematted_computation" in op.scope:
            return None  # the backward pass needs no sums
        return size / facts.experts_per_token(value)  # the results of a token are summed before
    return size


def _around_ring(
    facts: Facts, op: Op, value: int, spec: Spec, unreduced: Amount
) -> tuple[Transfer, Transfer]:
    """Gradients of keys and values: in float32 around the ring gathered with their keys and values,
    or reduced if keys are gathered.
    """
    size = 4 * math.prod(facts.graph.values[value].shape)
    ring = Transfer(
        kind="collective-permute",
        purpose="ring",
        bytes=replace(amount(size, spec), context=False),
        trips=facts.trips[op.region],
        cause=_cause(op),
    )
    reduced = Transfer(
        kind="reduce-scatter" if sharded_by(spec, "context") else "all-reduce",
        purpose="keys",
        bytes=replace(unreduced, context=False),
        trips=facts.trips[op.region],
        cause=_cause(op),
    )
    return ring, reduced


def _over_axis(
    facts: Facts, op: Op, axis: str, unreduced: Amount, spec: Spec, choice: Choice
) -> Transfer:
    """The reduction over tensor or context of a value that is not a gradient. Results of experts
    are combined before they are summed, and are then sharded along the sequence.
    """
    scattered = (
        axis == "tensor" and facts.routes and op.kind in GROUPED and choice.sequence is not None
    )
    return Transfer(
        kind="reduce-scatter" if sharded_by(spec, axis) or scattered else "all-reduce",
        purpose=axis,
        bytes=replace(unreduced, **{axis: False}),
        trips=facts.trips[op.region],
        cause=_cause(op),
    )


def _cause(op: Op) -> str:
    return op.scope or op.kind


def _outer_trips(facts: Facts, op: Op) -> int:
    """Number of iterations of the enclosing loop of an op."""
    return facts.trips[facts.graph.regions[op.region].parent]


def _complete_sums(facts: Facts, index: int, axis: str, choice: Choice) -> bool:
    """True if apparent partial sums over an axis are complete sums of experts, since tensor ranks
    have different ones.
    """
    return (
        axis == "tensor"
        and facts.token_exchange.sent == "ranks"
        and facts.routes
        and choice.sequence is not None
        and facts.graph.ops[index].kind in GROUPED
    )


def _reduced_bytes(facts: Facts, value: int) -> int:
    """Bytes of partial sums as reduced: in the dtype of the weight in use, to which the gradient of
    a contraction, or of a row of a table, is cast immediately.
    """
    reduced, current = facts.graph.values[value], value
    smallest = reduced.bytes
    while len(readers := facts.consumers.get(current, ())) == 1 and facts.graph.ops[
        readers[0]
    ].kind in ("transpose", "convert_element_type"):
        current = facts.graph.ops[readers[0]].results[0]
        smallest = min(smallest, facts.graph.values[current].bytes)
    return smallest


def reductions_of(facts: Facts, choice: Choice) -> list[TransferOps]:
    """The reductions of partial results under a choice, with the ops that make each."""
    return [
        reduction
        for summands in sum_groups(facts)
        for reduction in _reduced(facts, summands, choice)
    ]


# --------------------------------------------------------------------------------------------------
# Items: the separable parts of a step's cost.
#
# The cost of a step is a sum over *items*: a kernel, a gather, a reduction, a value in memory at a
# certain point, a stored parameter. Each item depends on only a few colours, so the cost of a
# choice over all colours is a sum of small table entries; that makes an exact search cheap.
#
# Under a `Choice`, an item yields *terms*: quantities of the whole program with the axes that
# divide them, independent of mesh sizes; `shardlib.cost.pricing` converts terms into seconds and
# bytes for many meshes at once.


def _gather_count(facts: Facts, item: GatheredParameter) -> int:
    """The number of times that a parameter is gathered in a region: once per iteration, except for
    loop-invariant computations of a forward loop (the matrix of a recurrence), which JAX moves
    before the loop (`_scan_partial_eval` of jax-ml/jax `jax/_src/lax/control_flow/loops.py`).
    """
    values, trips = facts.graph.values, facts.trips[item.region]
    if any("transpose(" in facts.graph.ops[use].scope for use in item.uses):
        return trips
    parts = math.prod(values[item.source].shape) // max(1, math.prod(values[item.value].shape))
    return min(trips, max(1, parts))


def gather_item(facts: Facts, item: GatheredParameter) -> Item:
    """The all-gathers of a stored sharded parameter before its uses, and the memory of the
    result.
    """
    parameter, stack_dims = facts.graph.values[item.source], facts.stack_dims(item.source)
    trips, size = _gather_count(facts, item), gathered_bytes(facts, item)

    def terms(choice: Choice) -> tuple[Term, ...]:
        spec = facts.value_spec(item.source, choice)
        return (
            Transfer(
                kind="all-gather",
                purpose="gather",
                bytes=amount(size, spec),
                trips=trips,
                shape=parameter.shape,
                spec=spec,
                stack_dims=stack_dims,
                cause=parameter.path,
            ),
        )

    return Item(
        colours=colours_in(facts.colours[item.source]),
        terms=terms,
        segment=facts.layers.segment(item.region),
        key=(
            ("gather", facts.sharding_of_value(item.source)),
            (size, trips, parameter.shape, stack_dims),
        ),
    )


def work_items(facts: Facts) -> list[Item]:
    """Items of computation and communication of a step graph."""
    items = kernel_items(facts)
    items += [reduce_item(facts, group) for group in sum_groups(facts)]
    items += [
        item for value in facts.consumers if (item := value_gather_item(facts, value)) is not None
    ]
    items += [gather_item(facts, item) for item in gathered(facts)]
    items += [
        context_exchange_item(facts, index)
        for index, op in enumerate(facts.graph.ops)
        if op.kind in KERNELS
    ]
    items += [tensor_exchange_item(facts, index) for index in facts.heads]
    return [*items, *route_items(facts), *boundary_items(facts)]
