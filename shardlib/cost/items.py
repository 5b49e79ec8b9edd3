"""The separable pieces of a step's cost.

The cost of a step is a sum over *items*: a kernel computes, a value is gathered, a partial result is reduced, a value
occupies memory at a certain point, a parameter rests. Each item depends only on the few colours that it touches, so the
cost of a choice over all colours is a sum of small table entries; that is what makes an exact search cheap.

An item, under a `Choice`, yields *terms*: quantities of the whole program with a note of what divides them. A term is
free of mesh sizes; `cost/pricing.py` turns terms into seconds and bytes for many meshes at once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardlib.axes import LogicalAxes
from shardlib.cost.kernels import Fusion, Kernel, Traits, fuse
from shardlib.graph import Op
from shardlib.graph.graph import ITEMSIZE
from shardlib.graph.problem import Parameter, StepGraph
from shardlib.propagation.assignment import Choice, Cut


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A number of FLOPs or bytes of the whole program, and which axes divide it.

    Attributes:
        total: for uncut arrays.
        batch: whether data, fsdp and microbatches divide it.
        tensor: whether the tensor axis divides it.
    """

    total: float
    batch: bool
    tensor: bool


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One kernel: FLOPs and memory traffic of one execution.

    Attributes:
        flops: operations.
        dtype: dtype of the operands, which decides the peak.
        traffic: bytes read and written, by divisor.
        trips: executions per microbatch.
        simple, transcendental: elements of the additions, multiplications and such, and of the exponentials and such, that are fused into it, by divisor.
        matmul: (rows, columns, depth) of a matmul with what divides each; None for other kernels.
    """

    flops: Amount
    dtype: str
    traffic: tuple[Amount, ...]
    trips: int
    simple: tuple[Amount, ...] = ()
    transcendental: tuple[Amount, ...] = ()
    matmul: tuple[Amount, Amount, Amount] | None = None


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective.

    Attributes:
        kind: kind of collective; gradients are decided by the ZeRO stage and say "reduce".
        group: "tensor", "gather" (a parameter over fsdp, ZeRO 3 only), "gradient" or "sum" (over data and fsdp).
        bytes: of the array before it is cut over the group itself.
        trips: executions per microbatch.
        shape: shape of the array, to see whether fsdp divides it.
        cut: cut of the array.
        frozen: dims that fsdp must not cut.
        over_tensor: whether the partial sums of a gradient are spread over tensor, too.
        cause: what needs it.
    """

    kind: str
    group: str
    bytes: Amount
    trips: int
    shape: tuple[int, ...] = ()
    cut: Cut = ()
    frozen: frozenset[int] = frozenset()
    over_tensor: bool = False
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A value that is in memory at a certain point of the program.

    Attributes:
        bytes: its size.
        part: "saved" from the forward for the backward pass, "gradient", "copy" of a parameter (saved, cut as the parameter is), "gathered"
            (a parameter in use, where it rests in pieces), or "temporary".
        shape: elements per dim, to see whether fsdp divides a gradient or a copy.
        cut: compute cut per dim.
    """

    bytes: Amount
    part: str
    shape: tuple[int, ...] = ()
    cut: Cut = ()


@dataclass(frozen=True, kw_only=True)
class Rest:
    """A parameter with its gradient and optimizer state.

    Attributes:
        count: parameters that are alike.
        elements: number of elements of each.
        itemsize: bytes an element of the parameter.
        state: bytes an element of optimizer state.
        shape: elements per dim.
        cut: compute cut per dim.
        frozen: dims that fsdp must not cut (a stack of layers that a scan walks).
    """

    count: int
    elements: int
    itemsize: int
    state: float
    shape: tuple[int, ...]
    cut: Cut
    frozen: frozenset[int]


#: Ops that only rearrange or cast their operand, so that a sum may be taken on either side of them.
_LINEAR_VIEWS: frozenset[str] = frozenset({"transpose", "reshape", "convert_element_type", "copy", "squeeze", "expand_dims"})

#: Ops that take many steps on a TPU's vector units, and a unit of their own on a GPU; a TPU has units for tanh, exp2 and square roots.
TRANSCENDENTAL: frozenset[str] = frozenset({"exp", "expm1", "log", "log1p", "logistic", "erf", "erf_inv", "sin", "cos", "tan", "pow", "cbrt"})

Term = Compute | Transfer | Resident | Rest


@dataclass(frozen=True, kw_only=True)
class Item:
    """A separable piece of the cost.

    Attributes:
        colours: colours that its terms depend on.
        terms: choice -> terms.
    """

    colours: frozenset[str]
    terms: Callable[[Choice], tuple[Term, ...]]


def _amount(total: float, cut: Cut) -> Amount:
    return Amount(total=total, batch="batch" in cut, tensor="tensor" in cut)


def _named(axes: LogicalAxes) -> frozenset[str]:
    return frozenset(name for name in axes if name)


class Facts:
    """What the items of one step graph share: colours of values and factors, fusion, weights, gradients.

    Attributes:
        graph: the step graph.
        names: colour per dim of every value.
        factors: colour per factor of every op.
        fusion: kernels and materialised values.
    """

    def __init__(self, step: StepGraph, names: tuple[LogicalAxes, ...], frozen: frozenset[tuple[str, int]], traits: Traits) -> None:
        self.graph = step.graph
        self.names = names
        self.factors = tuple(factor_colours(op, names) for op in step.graph.ops)
        self.traits = traits
        self.fusion: Fusion = fuse(step.graph, traits)
        self.weights = weights_of(step)
        self.gradients = gradient_like(step)
        self.trips = tuple(step.graph.trips(region) for region in range(len(step.graph.regions)))
        self.sources = dict(zip(step.graph.inputs, step.inputs, strict=True))
        self.frozen = frozen
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(step.graph.ops):
            for value in dict.fromkeys(op.operands):
                self.consumers[value].append(index)

    def op_cut(self, index: int, choice: Choice) -> Cut:
        """Cut of the factors of an op."""
        return choice.cut(self.factors[index], self.graph.ops[index].rule.whole)

    def value_cut(self, value: int, choice: Choice) -> Cut:
        """Cut of the dims of a value."""
        return choice.cut(self.names[value])

    def frozen_dims(self, value: int) -> frozenset[int]:
        """Dims of an input that count layers."""
        source = self.sources.get(value)
        if source is None:
            return frozenset()
        return frozenset({0}) if source.stacked else frozenset(dim for path, dim in self.frozen if path in source.paths)


def factor_colours(op: Op, names: tuple[LogicalAxes, ...]) -> LogicalAxes:
    """Colour of every factor of an op: the colour of a dim of which it is the major factor."""
    found: list[str | None] = [None] * len(op.rule.sizes)
    for values, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
        for value, dims in zip(values, all_dims, strict=True):
            for dim, factors in enumerate(dims):
                major = op.rule.major(factors)
                if major is not None and found[major] is None:
                    found[major] = names[value][dim]
    return tuple(found)


def weights_of(step: StepGraph) -> dict[int, int]:
    """Values that are copies, casts, slices or stacks of one parameter, with the value index of that parameter."""
    found = {value: value for value in step.graph.inputs_of("parameter")}
    for op in step.graph.ops:
        if op.category not in ("elementwise", "movement", "boundary"):
            continue
        sources = {found.get(value) for value in op.operands if step.graph.values[value].shape}
        if len(sources) == 1 and None not in sources:
            source = next(iter(sources))
            assert source is not None
            if op.kind != "carry":
                found.update(dict.fromkeys(op.results, source))
    return found


def gradient_like(step: StepGraph) -> frozenset[int]:
    """Values that end up in a gradient through ops that do not contract anything."""
    producers = step.graph.producers()
    found: set[int] = set()
    pending = list(step.gradients)
    while pending:
        value = pending.pop()
        if value in found:
            continue
        found.add(value)
        maker = producers.get(value)
        if maker is None:
            continue
        op = step.graph.ops[maker]
        if op.category in ("elementwise", "movement", "boundary") and not op.rule.summed:
            pending.extend(op.operands)
    return frozenset(found)


def _compute_item(facts: Facts, kernel: Kernel) -> Item:
    op = facts.graph.ops[kernel.op]
    values = (*kernel.reads, *kernel.writes)
    touched = {value for i in kernel.fused for value in (*facts.graph.ops[i].operands, *facts.graph.ops[i].results)}
    colours = _named(facts.factors[kernel.op]).union(*(_named(facts.names[value]) for value in {*values, *touched}))
    dtype = max((facts.graph.values[v].dtype for v in op.operands[:2]), key=lambda d: ITEMSIZE.get(d, 4), default="float32")

    def terms(choice: Choice) -> tuple[Term, ...]:
        cut = facts.op_cut(kernel.op, choice)
        traffic: dict[tuple[bool, bool], float] = defaultdict(float)
        for value in values:
            where = facts.value_cut(value, choice)
            traffic["batch" in where, "tensor" in where] += _traffic_bytes(facts, op, value)
        simple, transcendental = (_elements(facts, [i for i in kernel.fused if (facts.graph.ops[i].kind in TRANSCENDENTAL) is hard], choice)
                                  for hard in (False, True))
        return (Compute(flops=_amount(op.flops, cut), dtype=dtype, traffic=_amounts(traffic), trips=facts.trips[op.region], simple=simple,
                        transcendental=transcendental, matmul=_matmul_dims(op, cut)),)

    return Item(colours=colours, terms=terms)


def _amounts(totals: Mapping[tuple[bool, bool], float]) -> tuple[Amount, ...]:
    return tuple(Amount(total=total, batch=b, tensor=t) for (b, t), total in totals.items())


def _elements(facts: Facts, ops: list[int], choice: Choice) -> tuple[Amount, ...]:
    """Elements that some ops work on: of their largest operand or result."""
    found: dict[tuple[bool, bool], float] = defaultdict(float)
    for index in ops:
        op = facts.graph.ops[index]
        largest = max((*op.operands, *op.results), key=lambda value: math.prod(facts.graph.values[value].shape))
        where = facts.value_cut(largest, choice)
        found["batch" in where, "tensor" in where] += math.prod(facts.graph.values[largest].shape)
    return _amounts(found)


def _traffic_bytes(facts: Facts, op: Op, value: int) -> float:
    """Bytes that a kernel moves of a value: gathers, scatters and slices touch only what they select."""
    size = facts.graph.values[value].bytes
    if op.category in ("gather", "scatter") and value in op.operands:
        return min(size, max((facts.graph.values[v].bytes for v in (*op.results, *op.operands[1:])), default=size) if op.category == "gather" else size)
    return size


def _matmul_dims(op: Op, cut: Cut) -> tuple[Amount, Amount, Amount] | None:
    if op.category != "matmul" or len(op.operands) != 2:
        return None
    left, right, out = ({f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0]))
    groups = ((left & out) - right, (right & out) - left, (left & right) - out)

    def amount(group: set[int]) -> Amount:
        return Amount(total=float(math.prod(op.rule.sizes[f] for f in group)), batch=any(cut[f] == "batch" for f in group),
                      tensor=any(cut[f] == "tensor" for f in group))

    return amount(groups[0]), amount(groups[1]), amount(groups[2])


def _reduce_item(facts: Facts, group: tuple[int, ...]) -> Item:
    """Reductions of partial results; `group` are ops whose results are added up, which the compiler reduces once."""
    colours = frozenset[str]().union(*(_named(facts.factors[i]) | _named(facts.names[facts.graph.ops[i].results[0]]) for i in group))

    def terms(choice: Choice) -> tuple[Term, ...]:
        found: dict[str, Transfer] = {}
        for index in group:
            for transfer in _reductions(facts, index, choice):
                other = found.setdefault(transfer.group, transfer)
                found[transfer.group] = transfer if transfer.bytes.total > other.bytes.total else other
        return tuple(found.values())

    return Item(colours=colours, terms=terms)


def _reductions(facts: Facts, index: int, choice: Choice) -> tuple[Transfer, ...]:
    op = facts.graph.ops[index]
    cut = facts.op_cut(index, choice)
    partial = {cut[f] for f in op.rule.summed}
    found: list[Transfer] = []
    for value in op.results:
        where = facts.value_cut(value, choice)
        shape, trips = facts.graph.values[value].shape, facts.trips[op.region]
        cause = op.scope or op.kind
        if value in facts.gradients and "batch" in partial:
            found.append(Transfer(kind="reduce", group="gradient", bytes=Amount(total=_reduced_bytes(facts, value), batch=False, tensor="tensor" in where),
                                  trips=trips, shape=shape, cut=where, over_tensor="tensor" in partial, cause=cause))
            continue
        size = facts.graph.values[value].bytes
        if "tensor" in partial:
            found.append(Transfer(kind="reduce-scatter" if "tensor" in where else "all-reduce", group="tensor",
                                  bytes=Amount(total=size, batch="batch" in where, tensor=False), trips=trips, cause=cause))
        if "batch" in partial:
            found.append(Transfer(kind="reduce", group="sum", bytes=Amount(total=size, batch=False, tensor="tensor" in where), trips=trips,
                                  shape=shape, cut=where, cause=cause))
    return tuple(found)


def _reduced_bytes(facts: Facts, value: int) -> int:
    """Bytes of a gradient as it is reduced: in the dtype of the weight in use, to which a contraction's gradient is cast at once."""
    value_, at = facts.graph.values[value], value
    smallest = value_.bytes
    while len(readers := facts.consumers.get(at, ())) == 1 and facts.graph.ops[readers[0]].kind in ("transpose", "convert_element_type"):
        at = facts.graph.ops[readers[0]].results[0]
        smallest = min(smallest, facts.graph.values[at].bytes)
    return smallest


def _gather_item(facts: Facts, value: int) -> Item | None:
    """A value cut over tensor (along the sequence) that some readers need whole or cut otherwise: gathered once."""
    readers = [i for i in facts.consumers.get(value, ()) if facts.graph.ops[i].category not in ("elementwise", "boundary")]
    if not readers or not any(facts.names[value]):
        return None
    colours = _named(facts.names[value]).union(*(_named(facts.factors[i]) for i in readers))
    size = facts.graph.values[value].bytes
    # What the backward pass computes again is gathered for that by the compiler, and for the gradient of a weight by the manual region.
    recomputed = {facts.graph.ops[i].region for i in readers if "rematted_computation" in facts.graph.ops[i].scope}

    def needs(index: int, where: Cut, choice: Choice) -> str | None:
        op = facts.graph.ops[index]
        cut = facts.op_cut(index, choice)
        dims = op.rule.operands[op.operands.index(value)]
        wanted = tuple(cut[major] if (major := op.rule.major(dim)) is not None else None for dim in dims)
        at = where.index("tensor")
        if wanted[at] == "tensor":
            return None
        return "all-to-all" if "tensor" in wanted else "all-gather"

    def terms(choice: Choice) -> tuple[Term, ...]:
        where = facts.value_cut(value, choice)
        if "tensor" not in where or value in facts.weights:
            return ()
        found: dict[tuple[str, int, bool], Transfer] = {}
        for index in readers:
            kind = needs(index, where, choice)
            op = facts.graph.ops[index]
            if kind:
                apart = op.results[0] in facts.gradients and not facts.traits.shares_gathers and op.region in recomputed
                amount = Amount(total=size, batch="batch" in where, tensor=kind == "all-to-all")
                found.setdefault((kind, op.region, apart), Transfer(kind=kind, group="tensor", bytes=amount, trips=facts.trips[op.region], cause=op.scope or op.kind))
        return tuple(found.values())

    return Item(colours=colours, terms=terms)


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """A parameter in use in one region of the program.

    Attributes:
        source: value of the parameter.
        value: what is gathered: the parameter, or the narrowest cast of it.
        region: where.
        uses: indices of the ops that use it.
    """

    source: int
    value: int
    region: int
    uses: tuple[int, ...]


def gathered(facts: Facts) -> list[_Gathered]:
    """Parameters and the ops that use them with activations: cut over fsdp at rest, each is gathered once per region, in its narrowest dtype."""
    uses: dict[tuple[int, int], list[int]] = defaultdict(list)
    values: dict[tuple[int, int], int] = {}
    for index, op in enumerate(facts.graph.ops):
        if all(value in facts.weights for value in op.results) or op.category == "boundary":
            continue
        for value in dict.fromkeys(op.operands):
            source = facts.weights.get(value)
            if source is None or len(facts.graph.values[value].shape) < 2:
                continue
            key = source, op.region
            uses[key].append(index)
            narrow = _cast_rows(facts, op) if op.category == "gather" else 1.0
            size = facts.graph.values[value].bytes * narrow
            if key not in values or size < facts.graph.values[values[key]].bytes:
                values[key] = value
    return [_Gathered(source=source, value=values[source, region], region=region, uses=tuple(ops)) for (source, region), ops in uses.items()]


def _cast_rows(facts: Facts, op: Op) -> float:
    """How much smaller rows become by the cast that follows their lookup: XLA casts the table instead, before it gathers it."""
    readers = facts.consumers.get(op.results[0], ())
    if len(readers) != 1 or facts.graph.ops[readers[0]].kind != "convert_element_type":
        return 1.0
    return min(1.0, facts.graph.values[facts.graph.ops[readers[0]].results[0]].bytes / facts.graph.values[op.results[0]].bytes)


def _gathered_bytes(facts: Facts, item: _Gathered) -> float:
    lookups = [facts.graph.ops[use] for use in item.uses if facts.graph.ops[use].category == "gather"]
    narrow = min((_cast_rows(facts, op) for op in lookups if item.value in op.operands), default=1.0)
    return facts.graph.values[item.value].bytes * narrow


def _parameter_gather_item(facts: Facts, item: _Gathered) -> Item:
    parameter = facts.graph.values[item.source]
    trips = facts.trips[item.region]

    def terms(choice: Choice) -> tuple[Term, ...]:
        cut = facts.value_cut(item.source, choice)
        return (Transfer(kind="all-gather", group="gather", bytes=_amount(_gathered_bytes(facts, item), cut), trips=trips, shape=parameter.shape, cut=cut,
                         frozen=facts.frozen_dims(item.source), cause=parameter.path),)

    return Item(colours=_named(facts.names[item.source]), terms=terms)


def _sum_groups(facts: Facts) -> list[tuple[int, ...]]:
    """Ops with summed factors, grouped where their results are only added to each other (`add_any` of cotangents).

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
        summing = [m for m in makers if m is not None and (facts.graph.ops[m].rule.summed or m in leader)]
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


def work_items(facts: Facts) -> list[Item]:
    """Items of computation and communication of a step graph."""
    items = [_compute_item(facts, kernel) for kernel in facts.fusion.kernels]
    items += [_reduce_item(facts, group) for group in _sum_groups(facts)]
    items += [item for value in facts.consumers if (item := _gather_item(facts, value)) is not None]
    return items + [_parameter_gather_item(facts, item) for item in gathered(facts)]


def rest_items(parameters: tuple[Parameter, ...], names: Mapping[str, LogicalAxes], frozen: frozenset[tuple[str, int]]) -> list[Item]:
    """Items of parameters at rest; parameters that are alike share one."""
    alike: Counter[tuple[LogicalAxes, tuple[int, ...], str, float, frozenset[int]]] = Counter(
        (names[p.path], p.shape, p.dtype, p.state_bytes_per_element, frozenset(dim for path, dim in frozen if path == p.path)) for p in parameters)

    def item(axes: LogicalAxes, shape: tuple[int, ...], dtype: str, state: float, stack: frozenset[int], count: int) -> Item:
        return Item(colours=_named(axes), terms=lambda choice: (Rest(
            count=count, elements=math.prod(shape), itemsize=ITEMSIZE.get(dtype, 4), state=state, shape=shape, cut=choice.cut(axes), frozen=stack),))

    return [item(*key, count) for key, count in alike.items()]
