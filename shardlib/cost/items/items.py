"""The separable pieces of a step's cost.

The cost of a step is a sum over *items*: a kernel computes, a value is gathered, a partial result
is reduced, a value occupies memory at a certain point, a parameter rests. Each item depends only on
the few colours that it touches, so the cost of a choice over all colours is a sum of small table
entries; that is what makes an exact search cheap.

An item, under a `Choice`, yields *terms*: quantities of the whole program with a note of what
divides them. A term is free of mesh sizes; `cost/pricing/step_time.py` turns terms into seconds and
bytes for many meshes at once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from shardlib.axes import LogicalAxes
from shardlib.cost.items.parameter_gathers import gather_item, gathered
from shardlib.cost.step.attention import BACKWARD, FORWARD, head_size, scores_per_flop
from shardlib.cost.step.capacity_experts import slots_of
from shardlib.cost.step.fusion import Kernel
from shardlib.cost.step.routed_experts import GROUPED, routed_values
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    ENDS,
    Amount,
    Compute,
    Item,
    Rest,
    Routed,
    Term,
    Transfer,
    amount,
    named,
)
from shardlib.graph import Op
from shardlib.graph.graph import ITEMSIZE
from shardlib.graph.problem import Parameter
from shardlib.propagation.assignment import Choice, Cut, divisors, has, kinds

#: Ops that only rearrange or cast their operand, so that a sum may be taken on either side of them.
_LINEAR_VIEWS: frozenset[str] = frozenset(
    {"transpose", "reshape", "convert_element_type", "copy", "squeeze", "expand_dims"}
)

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
    colours = named(facts.factors[kernel.op]).union(
        *(named(facts.names[value]) for value in {*values, *touched})
    )
    weight = op.category == "matmul" and bool(facts.gradients & set(op.results))
    dtype = max(
        (facts.graph.values[v].dtype for v in op.operands[:2]),
        key=lambda d: ITEMSIZE.get(d, 4),
        default="float32",
    )

    def terms(choice: Choice) -> tuple[Term, ...]:
        cut = facts.op_cut(kernel.op, choice)
        traffic: dict[_Divisors, float] = defaultdict(float)
        for value in values:
            traffic[divisors(facts.value_cut(value, choice))] += _traffic_bytes(facts, op, value)
        simple, transcendental = (
            _elements(
                facts,
                [i for i in kernel.fused if (facts.graph.ops[i].kind in TRANSCENDENTAL) is hard],
                choice,
            )
            for hard in (False, True)
        )
        return (
            Compute(
                flops=amount(op.flops, cut),
                dtype=dtype,
                traffic=_amounts(traffic),
                trips=facts.trips[op.region],
                simple=simple,
                transcendental=transcendental,
                matmul=_matmul_dims(op, cut),
                batches=_batches(op, cut),
                kind=op.kind,
                category=op.category,
                weight=weight,
                routed=_routed(facts, op, op.operands[0], choice) if op.kind in GROUPED else None,
                head=head_size(op),
                scores=scores_per_flop(op),
            ),
        )

    return Item(colours=colours, terms=terms, segment=facts.layers.segment(op.region))


#: Whether batch, tensor, context and expert axes divide an array.
_Divisors = tuple[bool, bool, bool, bool]


def _amounts(totals: Mapping[_Divisors, float]) -> tuple[Amount, ...]:
    return tuple(
        Amount(total=total, batch=b, tensor=t, context=c, expert=e)
        for (b, t, c, e), total in totals.items()
    )


#: Kinds of kernels of attention.
KERNELS: tuple[str, ...] = (FORWARD, BACKWARD)


def _elements(facts: Facts, ops: list[int], choice: Choice) -> tuple[Amount, ...]:
    """Elements that some ops work on: of their largest operand or result."""
    found: dict[_Divisors, float] = defaultdict(float)
    for index in ops:
        op = facts.graph.ops[index]
        largest = max(
            (*op.operands, *op.results),
            key=lambda value: math.prod(facts.graph.values[value].shape),
        )
        found[divisors(facts.value_cut(largest, choice))] += math.prod(
            facts.graph.values[largest].shape
        )
    return _amounts(found)


def _traffic_bytes(facts: Facts, op: Op, value: int) -> float:
    """Bytes that a kernel moves of a value: gathers, scatters and slices touch only what they
    select.
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


def _matmul_dims(op: Op, cut: Cut) -> tuple[Amount, Amount, Amount] | None:
    if op.category != "matmul" or len(op.operands) != 2:
        return None
    left, right, out = (
        {f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0])
    )
    groups = ((left & out) - right, (right & out) - left, (left & right) - out)

    return _extent(op, groups[0], cut), _extent(op, groups[1], cut), _extent(op, groups[2], cut)


def _batches(op: Op, cut: Cut) -> Amount | None:
    """Matmuls that one kernel computes: the size of the factors that both operands and the result
    have.
    """
    if op.category != "matmul" or len(op.operands) != 2:
        return None
    left, right, out = (
        {f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0])
    )
    return _extent(op, left & right & out, cut)


def _extent(op: Op, group: set[int], cut: Cut) -> Amount:
    return amount(float(math.prod(op.rule.sizes[f] for f in group)), tuple(cut[f] for f in group))


#: A collective of a step graph, and the ops that need it.
Needed = tuple[Transfer, tuple[int, ...]]


def _reduce_item(facts: Facts, group: tuple[int, ...]) -> Item:
    """Reductions of partial results; `group` are ops whose results are added up, which the compiler
    reduces once.
    """
    colours = frozenset[str]().union(
        *(
            named(facts.factors[i]) | named(facts.names[facts.graph.ops[i].results[0]])
            for i in group
        )
    )
    if (
        facts.routes
        and facts.sequence is not None
        and any(facts.graph.ops[i].kind in GROUPED for i in group)
    ):
        colours |= {facts.sequence}  # how results come home depends on it
    return Item(
        colours=colours,
        terms=lambda choice: tuple(transfer for transfer, _ in _reduced(facts, group, choice)),
        segment=facts.layers.segment(facts.graph.ops[group[0]].region),
    )


def _reduced(facts: Facts, group: tuple[int, ...], choice: Choice) -> list[Needed]:
    found: dict[tuple[str, int], Transfer] = {}
    makers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index in group:
        seen = Counter[str]()  # an op may have several results
        for transfer in _reductions(facts, index, choice):
            seen[transfer.group] += 1
            key = transfer.group, seen[transfer.group]
            other = found.setdefault(key, transfer)
            found[key] = transfer if transfer.bytes.total > other.bytes.total else other
            makers[key].append(index)
    return [(transfer, tuple(makers[key])) for key, transfer in found.items()]


def _reductions(facts: Facts, index: int, choice: Choice) -> tuple[Transfer, ...]:
    op = facts.graph.ops[index]
    cut = facts.op_cut(index, choice)
    partial = {kind for f in op.rule.summed for kind in kinds(cut[f])}
    found: list[Transfer] = []
    for value in op.results:
        where = facts.value_cut(value, choice)
        shape, trips = facts.graph.values[value].shape, facts.trips[op.region]
        cause = op.scope or op.kind
        if value in facts.gradients and partial & {"batch", "context"}:
            found.append(
                Transfer(
                    kind="reduce",
                    group="gradient",
                    bytes=replace(
                        amount(_reduced_bytes(facts, value), where), batch=False, context=False
                    ),
                    trips=trips,
                    shape=shape,
                    cut=where,
                    over_tensor="tensor" in partial,
                    cause=cause,
                )
            )
            continue
        whole = amount(facts.graph.values[value].bytes, where)
        for axis in ("tensor", "context"):
            if (
                axis == "context" and axis in partial and op.kind in KERNELS
            ):  # around a ring in float32, with the keys and values that it is for
                found.append(
                    Transfer(
                        kind="collective-permute",
                        group="ring",
                        bytes=replace(amount(4 * math.prod(shape), where), context=False),
                        trips=trips,
                        cause=cause,
                    )
                )
                found.append(
                    Transfer(
                        kind="reduce-scatter" if has(where, axis) else "all-reduce",
                        group="keys",
                        bytes=replace(whole, context=False),
                        trips=trips,
                        cause=cause,
                    )
                )
            elif axis in partial and not (axis == "context" and "batch" in partial):
                # Results of experts come home before they are added up, and there they are cut
                # along the sequence.
                scattered = has(where, axis) or (
                    axis == "tensor"
                    and facts.routes
                    and op.kind in GROUPED
                    and choice.sequence is not None
                )
                found.append(
                    Transfer(
                        kind="reduce-scatter" if scattered else "all-reduce",
                        group=axis,
                        bytes=replace(whole, **{axis: False}),
                        trips=trips,
                        cause=cause,
                    )
                )
        if "batch" in partial:
            found.append(
                Transfer(
                    kind="reduce",
                    group="sum",
                    bytes=replace(whole, batch=False, context=False),
                    trips=trips,
                    shape=shape,
                    cut=where,
                    cause=cause,
                )
            )
    return tuple(found)


def _reduced_bytes(facts: Facts, value: int) -> int:
    """Bytes of a gradient as it is reduced: in the dtype of the weight in use, to which a
    contraction's gradient is cast at once.
    """
    value_, at = facts.graph.values[value], value
    smallest = value_.bytes
    while len(readers := facts.consumers.get(at, ())) == 1 and facts.graph.ops[readers[0]].kind in (
        "transpose",
        "convert_element_type",
    ):
        at = facts.graph.ops[readers[0]].results[0]
        smallest = min(smallest, facts.graph.values[at].bytes)
    return smallest


def _gather_item(facts: Facts, value: int) -> Item | None:
    """A value cut over tensor (along the sequence) that some readers need whole or cut otherwise:
    gathered once.
    """
    readers = _readers(facts, value)
    if not readers or not any(facts.names[value]):
        return None
    colours = named(facts.names[value]).union(*(named(facts.factors[i]) for i in readers))
    return Item(
        colours=colours,
        terms=lambda choice: tuple(
            transfer for transfer, _ in _gathers(facts, value, readers, choice)
        ),
        segment=max(facts.layers.segment(facts.graph.ops[i].region) for i in readers),
    )


def _readers(facts: Facts, value: int) -> list[int]:
    """The ops that may need a value otherwise than it is cut."""
    return [
        i
        for i in facts.consumers.get(value, ())
        if facts.graph.ops[i].category not in ("elementwise", "boundary")
    ]


def _gathers(facts: Facts, value: int, readers: list[int], choice: Choice) -> list[Needed]:
    where = facts.value_cut(value, choice)
    if value in facts.weights:
        return []
    size = facts.graph.values[value].bytes
    # What the backward pass computes again is gathered for that by the compiler, and for the
    # gradient of a weight by the manual region.
    recomputed = {
        facts.graph.ops[i].region
        for i in readers
        if "rematted_computation" in facts.graph.ops[i].scope
    }
    found: dict[tuple[str, str, int, bool], Transfer] = {}
    needing: dict[tuple[str, str, int, bool], list[int]] = defaultdict(list)

    def need(key: tuple[str, str, int, bool], transfer: Transfer, index: int) -> None:
        found.setdefault(key, transfer)
        needing[key].append(index)

    for axis in ("tensor", "context"):
        if not has(where, axis):
            continue
        for index in readers:
            kind = _needs(facts, index, value, axis, choice)
            op = facts.graph.ops[index]
            if (
                kind and axis == "context" and op.kind in KERNELS
            ):  # around a ring for every kernel, in whole
                need(
                    (op.kind, "ring", op.region, False),
                    Transfer(
                        kind="collective-permute",
                        group="ring",
                        bytes=replace(amount(size, where), context=False),
                        trips=facts.trips[op.region],
                        cause=op.scope or op.kind,
                    ),
                    index,
                )
            if kind:
                apart = (
                    op.results[0] in facts.gradients
                    and not facts.traits.shares_gathers
                    and op.region in recomputed
                )
                moved = (
                    amount(size, where)
                    if kind == "all-to-all"
                    else replace(amount(size, where), **{axis: False})
                )
                group = "keys" if axis == "context" and op.kind in KERNELS else axis
                need(
                    (group, kind, op.region, apart),
                    Transfer(
                        kind=kind,
                        group=group,
                        bytes=moved,
                        trips=facts.trips[op.region],
                        cause=op.scope or op.kind,
                    ),
                    index,
                )
    return [(transfer, tuple(needing[key])) for key, transfer in found.items()]


def _needs(facts: Facts, index: int, value: int, axis: str, choice: Choice) -> str | None:
    """The collective by which an op gets an operand that an axis cuts; None where it takes it as it
    is.
    """
    op, cut = facts.graph.ops[index], facts.op_cut(index, choice)
    dims = op.rule.operands[op.operands.index(value)]
    wanted = tuple(
        kinds(cut[major]) if (major := op.rule.major(dim)) is not None else () for dim in dims
    )
    at = next(dim for dim, part in enumerate(facts.value_cut(value, choice)) if axis in kinds(part))
    if axis in wanted[at]:
        return None
    return "all-to-all" if any(axis in parts for parts in wanted) else "all-gather"


def _exchange_item(facts: Facts, index: int) -> Item:
    """What devices exchange for heads around a kernel of attention (arXiv:2309.14509): forward
    queries, keys, values and results, and before the gradients that of the results; backward the
    other gradients.
    """
    op = facts.graph.ops[index]
    once = (
        1
        if "rematted_computation" in op.scope
        or not any(other.kind == BACKWARD for other in facts.graph.ops)
        else 2
    )
    moved = [(value, 1) for value in (op.operands if op.kind == FORWARD else op.results)] + (
        [(op.results[0], once)] if op.kind == FORWARD else []
    )

    def terms(choice: Choice) -> tuple[Term, ...]:
        return tuple(
            Transfer(
                kind="all-to-all",
                group="exchange",
                bytes=amount(facts.graph.values[value].bytes, where),
                trips=times * facts.trips[op.region],
                cause=op.scope or op.kind,
            )
            for value, times in moved
            if has(where := facts.value_cut(value, choice), "context") and len(where) > 2
        )

    return Item(
        colours=frozenset[str]().union(*(named(facts.names[value]) for value, _ in moved)),
        terms=terms,
        segment=facts.layers.segment(op.region),
    )


def _routed(facts: Facts, op: Op, value: int, choice: Choice) -> Routed:
    """The rows of an array of tokens and the experts of its region, that of the largest stack of
    matrices in a grouped matmul.
    """
    capped = facts.capped.get(op.region)
    shapes = [
        facts.graph.values[v].shape
        for other in facts.graph.ops
        if other.kind in GROUPED and other.region == op.region
        for v in (*other.operands[:2], *other.results)
    ]
    experts = max(shape[0] for shape in shapes if len(shape) == 3)
    shape, cut = facts.graph.values[value].shape, facts.value_cut(value, choice)
    rows = amount(
        float(capped.assignments if capped is not None and len(shape) == 3 else shape[0]),
        cut[: max(1, len(shape) - 1)],
    )
    return Routed(
        rows=rows,
        experts=Amount(
            total=float(experts), batch=False, tensor=False, expert=choice.expert is not None
        ),
        most=capped.factor if capped is not None else None,
    )


def _route_items(facts: Facts) -> list[Item]:
    """All-to-alls that send tokens to their experts and bring them home."""

    def item(index: int, value: int) -> Item:
        op, capped = facts.graph.ops[index], facts.capped.get(facts.graph.ops[index].region)
        size = facts.graph.values[value].bytes * facts.room
        if capped is not None:  # of the rows of slots, as many as there are assignments travel
            size *= capped.assignments / slots_of(facts.graph, value)

        def terms(choice: Choice) -> tuple[Term, ...]:
            if choice.expert is None:
                return ()
            return (
                Transfer(
                    kind="all-to-all",
                    group="expert",
                    bytes=amount(float(size), facts.value_cut(value, choice)),
                    trips=facts.trips[op.region],
                    cause=op.scope or op.kind,
                    routed=_routed(facts, op, value, choice),
                ),
            )

        return Item(
            colours=named(facts.names[value]), terms=terms, segment=facts.layers.segment(op.region)
        )

    return (
        [
            item(index, value)
            for index, value in routed_values(facts.graph, facts.names, facts.batch)
        ]
        if facts.routes
        else []
    )


def _boundary_items(facts: Facts) -> list[Item]:
    """What a pipeline stage hands to the next, and its cotangent on the way back: the residual
    stream, once for each microbatch.
    """
    carried = [value for value in facts.layers.carried if value >= 0][:1]

    def item(value: int) -> Item:
        def terms(choice: Choice) -> tuple[Term, ...]:
            return (
                Transfer(
                    kind="collective-permute",
                    group="stage",
                    bytes=amount(
                        float(facts.graph.values[value].bytes), facts.value_cut(value, choice)
                    ),
                    trips=2,
                    cause="between stages",
                ),
            )

        return Item(colours=named(facts.names[value]), terms=terms, segment=ENDS)

    return [item(value) for value in carried]


def _sum_groups(facts: Facts) -> list[tuple[int, ...]]:
    """Ops with summed factors, grouped where their results are only added to each other (`add_any`
    of cotangents).

    Partial sums can be added before they are reduced, which XLA's all-reduce reassociation does
    (openxla/xla `xla/service/all_reduce_reassociate.cc`).
    """
    producers = facts.graph.producers()
    leader: dict[int, int] = {}

    def origin(value: int) -> int | None:
        maker = producers.get(value)
        while maker is not None and facts.graph.ops[maker].kind in _LINEAR_VIEWS:
            maker = producers.get(facts.graph.ops[maker].operands[0])
        return maker

    for op in facts.graph.ops:
        if op.kind != "add_any":
            continue
        if op.results[0] in facts.gradients and not facts.traits.adds_first:
            continue  # every use of a parameter reduces its part of the gradient where it is made
        makers = [origin(value) for value in op.operands]
        summing = [
            m for m in makers if m is not None and (facts.graph.ops[m].rule.summed or m in leader)
        ]
        if len(summing) == len(op.operands):
            first = leader.get(summing[0], summing[0])
            for maker in summing:
                leader[maker] = first
            leader[producers[op.results[0]]] = first
    groups: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(facts.graph.ops):
        if op.rule.summed:
            groups[leader.get(index, index)].append(index)
    return [tuple(group) for group in groups.values()]


def kernel_items(facts: Facts) -> list[Item]:
    """Items of the kernels of a step graph, in the order of `Facts.fusion`."""
    return [_compute_item(facts, kernel) for kernel in facts.fusion.kernels]


def work_items(facts: Facts) -> list[Item]:
    """Items of computation and communication of a step graph."""
    items = kernel_items(facts)
    items += [_reduce_item(facts, group) for group in _sum_groups(facts)]
    items += [item for value in facts.consumers if (item := _gather_item(facts, value)) is not None]
    items += [gather_item(facts, item) for item in gathered(facts)]
    items += [
        _exchange_item(facts, index)
        for index, op in enumerate(facts.graph.ops)
        if op.kind in KERNELS
    ]
    return [*items, *_route_items(facts), *_boundary_items(facts)]


def gathers_of(facts: Facts, choice: Choice) -> list[Needed]:
    """The gathers of values under a choice, with the ops that need each."""
    return [
        one
        for value in facts.consumers
        if any(facts.names[value])
        for one in _gathers(facts, value, _readers(facts, value), choice)
    ]


def reductions_of(facts: Facts, choice: Choice) -> list[Needed]:
    """The reductions of partial results under a choice, with the ops that make each."""
    return [one for group in _sum_groups(facts) for one in _reduced(facts, group, choice)]


def rest_items(
    parameters: tuple[Parameter, ...],
    names: Mapping[str, LogicalAxes],
    frozen: frozenset[tuple[str, int]],
    segments: Mapping[str, int],
) -> list[Item]:
    """Items of parameters at rest; parameters that are alike share one.

    Args:
        parameters: every array that rests.
        names: colour per dim by path.
        frozen: (path, dim) that count layers.
        segments: class of layers by path; others belong to the ends.
    """
    alike: Counter[tuple[LogicalAxes, tuple[int, ...], str, float, frozenset[int], int, bool]] = (
        Counter(
            (
                names[p.path],
                p.shape,
                p.dtype,
                p.state_bytes_per_element,
                frozenset(dim for path, dim in frozen if path == p.path),
                segments.get(p.path, ENDS),
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
            colours=named(axes),
            segment=segment,
            terms=lambda choice: (
                Rest(
                    count=count,
                    elements=math.prod(shape),
                    itemsize=ITEMSIZE.get(dtype, 4),
                    state=state,
                    shape=shape,
                    cut=choice.cut(axes),
                    frozen=stack,
                    trained=trained,
                ),
            ),
        )

    return [item(*key, count) for key, count in alike.items()]


def parameter_segments(facts: Facts) -> dict[str, int]:
    """Class of layers of every parameter that a loop over layers reads."""
    found: dict[str, int] = {}
    for op in facts.graph.ops:
        source = facts.weights.get(op.results[0]) if op.kind == "enter" else None
        if source is not None and facts.layers.segment(op.region) >= 0:
            found.update(
                dict.fromkeys(facts.sources[source].paths, facts.layers.segment(op.region))
            )
    return found
