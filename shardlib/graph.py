"""The intermediate representation of a program, with no JAX in it: graphs of ops with factor rules,
their checks, step graphs, and the problem that a plan is made for.

Factor rules describe how the dims of an op's operands and results correspond.

A *factor* is one index of an op, as in an einsum: a matmul [b, i] x [i, j] -> [b, j] has three.
Each dim of each operand and result is a tuple of factors, the major one first (a reshape that
merges heads and head_dim has a dim with two); a dim without a factor is `()`: it has size 1, or
nothing is known about it.

>>> rule = FactorRule(
...     sizes=(8, 4, 16), operands=(((0,), (1,)), ((1,), (2,))), results=(((0,), (2,)),), summed={1}
... )
>>> rule.major(rule.operands[1][0])
1
>>> print(rule)
[a b] [b c] -> [a c] where a=8 b=4 c=16, sum b

There are three kinds of factors. A *parallel* factor is sharded freely: every device computes its
part. A *summed* factor is contracted: sharding it leaves partial sums that a reduction must add up.
A *whole* factor must not be sharded: the op mixes positions along it (sort, cumulative sum, a
window), so a sharded operand is gathered first.

A dim may be several things side by side, as the fused kernel of queries, keys and values is: then
the major factor counts the pieces and is *outer*, and sharding the dim shards the next factor,
which is every piece (`shardlib.propagation.colours`).

Each vendor has a kernel of attention:

>>> OF_VENDOR["google"]
'splash'

`Rows` says how the results of a loss depend on the rows of its batch.

A batch may be worked through in several parts, one after the other, only where that changes no
number. That is known of sums over rows, multiplied or divided by any value; where rows meet before
the end (a contrastive loss, statistics of a batch) no sum over parts gives the result of the whole.

>>> Rows(loss=Dependence(kind="mean")).splits
True
>>> where = "dot_general at loss.py:12"
>>> Rows(loss=Dependence(kind="coupled", why="rows meet other rows", where=where)).reasons
('the loss: rows meet other rows (dot_general at loss.py:12)',)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardlib.compact import compact
from shardlib.findings import Finding
from shardlib.layout import LogicalAxes

#: The factors of one dim, major first.
Dim = tuple[int, ...]
#: The dims of one value.
Dims = tuple[Dim, ...]


#: A dim of an op: whether it is of a result, of which one, and which of its dims.
Place = tuple[bool, int, int]


@dataclass(frozen=True)
class Window:
    """A dim that is a run of consecutive positions of a longer one, as the results of a split are.

    Attributes:
        long: the longer dim.
        short: the shorter one; None where it has one position and the op drops it (`unstack`).
        start: first position of the run in the longer dim.
        size: its length.
    """

    long: Place
    short: Place | None
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class FactorRule:
    """The factors of one op.

    Attributes:
        sizes: size of each factor, elements.
        operands: for each operand, for each dim, its factors.
        results: the same for the results.
        summed: factors whose cut leaves partial results (the reduction may be a sum, a maximum,
            ...).
        whole: factors that must not be sharded.
        outer: those of them that count the pieces of a dim; a cut of the dim cuts the next factor
            instead.
        windows: dims that are runs of positions of others.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    outer: frozenset[int] = frozenset()
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "summed", frozenset(self.summed))
        object.__setattr__(self, "whole", frozenset(self.whole))
        for factor in self.used():
            assert 0 <= factor < len(self.sizes), (factor, self.sizes)
        assert not self.summed & self.whole, (self.summed, self.whole)

    def used(self) -> set[int]:
        """Every factor that some dim mentions."""
        return {
            factor for dims in (*self.operands, *self.results) for dim in dims for factor in dim
        }

    def major(self, dim: Dim) -> int | None:
        """The factor that a cut of this dim cuts: the major one larger than 1 that counts no
        pieces; None where there is none.
        """
        return next(
            (factor for factor in dim if self.sizes[factor] > 1 and factor not in self.outer), None
        )

    def dims(self) -> Iterator[tuple[Place, Dim]]:
        """Every dim of every operand and result."""
        for result, values in ((False, self.operands), (True, self.results)):
            for position, dims in enumerate(values):
                yield from (
                    ((result, position, dim_position), dim) for dim_position, dim in enumerate(dims)
                )

    def __str__(self) -> str:
        def letter(factor: int) -> str:
            return chr(ord("a") + factor) if factor < 26 else f"f{factor}"

        def text(dims: Dims) -> str:
            return "[" + " ".join("*".join(map(letter, dim)) or "1" for dim in dims) + "]"

        def names(label: str, factors: Iterable[int]) -> str:
            listed = " ".join(map(letter, sorted(factors)))
            return f", {label} {listed}" if listed else ""

        sizes = " ".join(f"{letter(i)}={size}" for i, size in enumerate(self.sizes))
        return (
            f"{' '.join(map(text, self.operands))} -> {' '.join(map(text, self.results))} where"
            f" {sizes}" + names("sum", self.summed) + names("whole", self.whole)
        )


def elementwise(
    shapes: Iterable[tuple[int, ...]], result: tuple[int, ...], results: int = 1
) -> FactorRule:
    """The rule of an op that works position by position; operands may have size-1 dims that
    broadcast, or rank 0.
    """
    return FactorRule(
        sizes=result,
        operands=tuple(
            (
                tuple(
                    (i,) if size == result[i] and size > 1 else () for i, size in enumerate(shape)
                )
                if len(shape) == len(result)
                else ((),) * len(shape)
            )
            for shape in shapes
        ),
        results=(tuple((i,) if size > 1 else () for i, size in enumerate(result)),) * results,
    )


def opaque(operands: Iterable[tuple[int, ...]], results: Iterable[tuple[int, ...]]) -> FactorRule:
    """The rule of an op about which nothing is known: every dim is a factor of its own that must
    stay whole.
    """
    sizes: list[int] = []

    def fresh(shape: tuple[int, ...]) -> Dims:
        start = len(sizes)
        sizes.extend(shape)
        return tuple((start + i,) if size > 1 else () for i, size in enumerate(shape))

    operand_dims, result_dims = tuple(map(fresh, operands)), tuple(map(fresh, results))
    return FactorRule(
        sizes=tuple(sizes),
        operands=operand_dims,
        results=result_dims,
        whole=frozenset(range(len(sizes))),
    )


# --------------------------------------------------------------------------------------------------
# Programs as graphs.
#
# A `Graph` is a flat list of ops in execution order. Loops and branches do not nest: every op
# belongs to a *region*, and a region knows its parent and how often it runs for one run of its
# parent. Values enter and leave a loop through *boundary* ops of no cost that carry ordinary
# factor rules:
#
#     enter   [layers, in, out] -> [in, out]   a stacked operand of a scan, one slice per iteration
#     carry   [batch, embed] -> [batch, embed] the initial carry, the body's carry, the final carry
#     exit    [in, out] -> [layers, in, out]   a result that a scan stacks up
#
# so that propagation and cost see one kind of op. Ops called through jit, remat and custom
# derivatives are inlined.
#
# `Op.path` locates the op in the program it was traced from, "3/body/12" say; lowering uses it to
# find the equation again.

#: Bytes of an element for each dtype name that JAX uses; sub-byte types count whole bytes as stored
#: unpacked on CPU.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    **dict.fromkeys(("int1", "uint1", "int2", "uint2", "int4", "uint4"), 1),
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e4m3": 1,
    "float8_e3m4": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

#: What an op does to the machine; cost models treat each differently.
CATEGORIES: tuple[str, ...] = (
    "matmul",
    "convolution",
    "elementwise",
    "reduction",
    "gather",
    "scatter",
    "movement",
    "sort",
    "boundary",
    "opaque",
)


def input_source(number: int) -> tuple[str, int]:
    """Returns the key of an input of a program, as results of operations have (path, index)."""
    return "input", number


@dataclass(frozen=True, kw_only=True)
class Value:
    """An array.

    Attributes:
        shape: elements per dim.
        dtype: JAX's name of the dtype; "key" for PRNG keys and "token" for effects.
        path: tree path for inputs ("params.layers.mlp.kernel", "batch.tokens"), else "".
        role: "parameter" (trained), "frozen" (used as a parameter is, without a gradient), "state"
            (other model state), "batch", "constant" or "internal".
    """

    shape: tuple[int, ...]
    dtype: str
    path: str = ""
    role: str = "internal"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE.get(self.dtype, 4)

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        kind: JAX's primitive name, or "enter", "carry", "exit" for boundaries.
        operands: indices into `Graph.values`.
        results: indices into `Graph.values`.
        rule: how the dims hang together.
        category: one of `CATEGORIES`.
        flops: floating-point operations of one execution on the whole, uncut arrays.
        region: index into `Graph.regions`.
        path: where the equation stands in the traced program.
        scope: the model's name scope, for messages.
    """

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: FactorRule
    category: str
    flops: float = 0.0
    region: int = 0
    path: str = ""
    scope: str = ""

    def __post_init__(self) -> None:
        assert self.category in CATEGORIES, self.category

    def value(self, result: bool, position: int) -> int:
        """The index of an operand, or of a result."""
        return (self.results if result else self.operands)[position]


@dataclass(frozen=True, kw_only=True)
class Region:
    """A piece of the program that runs as a whole.

    Attributes:
        parent: index of the region around it; -1 for the root.
        kind: "root", "scan", "while" or "branch".
        trips: executions for one execution of the parent.
    """

    parent: int
    kind: str
    trips: int = 1


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A program as a flat list of ops.

    Attributes:
        values: every array; ops and inputs refer to them by index.
        ops: in execution order.
        regions: region 0 is the root.
        inputs: value indices of the program's inputs, in order.
        outputs: value indices of its results, in order.
        findings: what tracing noticed.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    regions: tuple[Region, ...] = (Region(parent=-1, kind="root"),)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()

    __repr__ = compact

    def trips(self, region: int) -> int:
        """Executions of a region in one run of the program."""
        total = 1
        while region >= 0:
            total *= self.regions[region].trips
            region = self.regions[region].parent
        return total

    def producers(self) -> dict[int, int]:
        """For each value that an op makes, the index of that op."""
        return {value: index for index, op in enumerate(self.ops) for value in op.results}

    def inputs_of(self, role: str) -> Iterator[int]:
        """Value indices of the inputs with a role."""
        return (index for index in self.inputs if self.values[index].role == role)

    @property
    def flops(self) -> float:
        """Floating-point operations of one run of the whole program."""
        return sum(op.flops * self.trips(op.region) for op in self.ops)


# --------------------------------------------------------------------------------------------------
# Checks that a graph is well formed.
#
# Run after tracing and after every rewrite. It checks four laws: a value is defined once and
# before it is used; a rule has the ranks and sizes of the values it describes; no dim shares a
# factor with another dim of the same value; an op reads only values of its own region or of a
# region around it. Two kinds of boundary op look outwards: the results of an "exit", and of the
# "carry" at path ".../final/k" that leaves a loop, belong to the region around their own; the
# "carry" that joins the branches of a condition reads from the regions just inside.


def check(graph: Graph, before: Graph | None = None) -> None:
    """Asserts that a graph is well formed."""
    checked = set[int]()
    if before is not None and graph.values is before.values:
        checked = {id(op) for op in before.ops}
    broken = [
        *_regions(graph),
        *_order(graph),
        *(line for op in graph.ops if id(op) not in checked for line in _rule(graph, op)),
    ]
    assert not broken, "the graph is not well formed:\n  - " + "\n  - ".join(broken)


def _regions(graph: Graph) -> Iterator[str]:
    for index, region in enumerate(graph.regions):
        if (region.parent == -1) != (index == 0) or region.parent >= index:
            yield f"region {index} has parent {region.parent}"
        if region.trips < 0:
            yield f"region {index} runs {region.trips} times"


def _order(graph: Graph) -> Iterator[str]:
    home = {index: 0 for index, value in enumerate(graph.values) if value.role == "constant"}
    home.update(dict.fromkeys(graph.inputs, 0))
    for op in graph.ops:
        if not 0 <= op.region < len(graph.regions):
            yield f"{_name(op)} is in region {op.region} of {len(graph.regions)}"
            continue
        visible = {*_ancestors(graph, op.region)}
        for value in op.operands:
            region = home.get(value)
            if region is None:
                yield f"{_name(op)} reads value {value} before it is defined"
            elif region not in visible and not (
                op.category == "boundary" and graph.regions[region].parent == op.region
            ):
                yield f"{_name(op)} of region {op.region} reads value {value} of region {region}"
        for value in op.results:
            if value in home:
                yield f"{_name(op)} defines value {value} a second time"
            home[value] = graph.regions[op.region].parent if _leaves(op) else op.region
    for value in graph.outputs:
        if home.get(value) != 0:
            yield f"output value {value} is not defined in the root region"


def _leaves(op: Op) -> bool:
    return op.kind == "exit" or (op.kind == "carry" and op.path.split("/")[-2:-1] == ["final"])


def _ancestors(graph: Graph, region: int) -> Iterator[int]:
    while region >= 0:
        yield region
        region = graph.regions[region].parent


def _rule(graph: Graph, op: Op) -> Iterator[str]:
    for what, values, described in (
        ("operand", op.operands, op.rule.operands),
        ("result", op.results, op.rule.results),
    ):
        if len(values) != len(described):
            yield f"{_name(op)} has {len(values)} {what}s, its rule {len(described)}"
            continue
        for position, (value, dims) in enumerate(zip(values, described, strict=True)):
            for line in _dims(op.rule, dims, graph.values[value].shape):
                yield f"{_name(op)}, {what} {position}: {line}"


def _dims(rule: FactorRule, dims: Dims, shape: tuple[int, ...]) -> Iterator[str]:
    if len(dims) != len(shape):
        yield f"rank {len(shape)} has {len(dims)} dims in the rule"
        return
    used = [factor for dim in dims for factor in dim]
    if len(set(used)) < len(used):
        yield f"a factor appears twice in {dims}"
    for index, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        product = math.prod(rule.sizes[factor] for factor in dim)
        if dim and product != size:
            yield f"dim {index} has size {size}, its factors make {product}"


def _name(op: Op) -> str:
    return f"{op.kind} at {op.path or '?'}"


#: In blocks, by XLA on any machine; by splash attention, which comes with JAX, on TPUs; by the
#: kernel of cuDNN on NVIDIA GPUs.
Kind = Literal["blocks", "splash", "cudnn"]
KINDS: tuple[Kind, ...] = ("blocks", "splash", "cudnn")
#: The most queries, and the most keys, of a block.
BLOCK = 1024
#: The kernel of a vendor's chips.
OF_VENDOR: dict[str, Kind] = {"google": "splash", "nvidia": "cudnn"}


# --------------------------------------------------------------------------------------------------
# The ops that the results of a graph need.
#
# XLA removes what nothing reads, so a cost model must not count it. A loop's carry needs care:
# whoever reads the carry inside the body also needs what the body makes of it.


def prune(graph: Graph) -> Graph:
    """The graph without the ops that no output depends on; values keep their indices.

    The carry of a loop is two boundary ops, at paths "P/carry/k" (into the body) and "P/final/k"
    (out of it); keeping either keeps both.
    """
    producers = graph.producers()
    position: dict[str | None, int] = {
        op.path: index for index, op in enumerate(graph.ops) if op.kind == "carry"
    }
    reached: set[int] = set()
    waiting = [producers[value] for value in graph.outputs if value in producers]
    while waiting:
        index = waiting.pop()
        if index in reached:
            continue
        reached.add(index)
        op = graph.ops[index]
        waiting += [producers[value] for value in op.operands if value in producers]
        partner = position.get(_final(op.path)) if op.kind == "carry" else None
        waiting += [] if partner is None else [partner]
    return replace(graph, ops=tuple(op for index, op in enumerate(graph.ops) if index in reached))


def _final(path: str) -> str | None:
    """The path of the op that takes a carry out of the loop, given the op that takes it in."""
    *loop, which, number = path.split("/")
    return "/".join([*loop, "final", number]) if which == "carry" else None


# --------------------------------------------------------------------------------------------------
# The forward pass of a step graph.
#
# A step graph computes a loss and its gradients. What the loss needs is the forward pass; in a
# loop, everything beside it is, too, since a loop that rematerialises or goes back is another one.


def forward_pass(graph: Graph, *, saves: bool) -> Graph:
    """The forward pass of a step graph; values keep their indices."""
    results = graph.outputs[: len(graph.outputs) - sum(1 for _ in graph.inputs_of("parameter"))]
    lean = prune(replace(graph, outputs=results))
    if not saves:
        return lean
    needed, loops = {op.path for op in lean.ops}, {op.region for op in lean.ops} - {0}

    def inside(region: int) -> bool:
        while region > 0:
            if region in loops:
                return True
            region = graph.regions[region].parent
        return False

    in_forward = [inside(op.region) or op.path in needed for op in graph.ops]
    produced = {
        value
        for op, keep in zip(graph.ops, in_forward, strict=True)
        if keep
        for value in op.results
    }
    read = {
        value
        for op, keep in zip(graph.ops, in_forward, strict=True)
        if not keep
        for value in op.operands
    }
    saved = sorted((produced & read) - set(results))
    return replace(
        graph,
        ops=tuple(op for op, keep in zip(graph.ops, in_forward, strict=True) if keep),
        outputs=(*results, *saved),
    )


#: What a result can be, by what happens to it when the batch is worked through in parts.
ROWS_KINDS: tuple[str, ...] = (
    "mean",
    "sum",
    "additive",
    "weighted mean",
    "constant",
    "rows",
    "coupled",
)


@dataclass(frozen=True, kw_only=True)
class RowDim:
    """The dim of an array that holds its rows.

    Attributes:
        dim: its dim of rows.
        inner: elements along that dim that belong to one row, side by side.
        bytes: of the array.
    """

    dim: int
    inner: int = 1
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """The dependence of one result on the rows of the batch.

    Attributes:
        kind: "mean" of a function of each row; "sum" of it; "additive": several such sums that are
            scaled differently by the number of rows; "weighted mean": a sum over rows with
            coefficients that are made from the data of the whole batch; "constant": no row is
            looked at; "rows": an array with a value for every row, which looks at that row alone;
            "coupled": rows meet before the end.
        why: what couples the rows.
        where: the operation and the line of the source where they meet.
        notes: what is computed in every part by itself although the rows meet in it, by the
            function's own declaration: "balance".
        fixed: whether the rows are coupled since the loss computes for their number alone.
        rows: where the rows are, of "rows".
    """

    kind: str
    why: str = ""
    where: str = ""
    notes: tuple[str, ...] = ()
    fixed: bool = False
    rows: RowDim | None = None

    def __post_init__(self) -> None:
        assert self.kind in ROWS_KINDS, self.kind
        assert self.rows is None or self.kind == "rows"

    def __str__(self) -> str:
        return f"{self.why} ({self.where})" if self.where else self.why or f"a {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The dependence of all results of a loss on the rows of the batch.

    Attributes:
        loss: the loss.
        metrics: every metric, by path.
        state: every array of the model's state that is not what it was, by path.
        asserted: whether the user vouched for it (`rows="mean"`), so that nothing was proven.
    """

    loss: Dependence
    metrics: tuple[tuple[str, Dependence], ...] = ()
    state: tuple[tuple[str, Dependence], ...] = ()
    asserted: bool = False

    @property
    def all(self) -> tuple[tuple[str, Dependence], ...]:
        """Every result with what to call it."""
        return (
            ("the loss", self.loss),
            *((f"metric {path!r}", dependence) for path, dependence in self.metrics),
            *((f"model state {path!r}", dependence) for path, dependence in self.state),
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why the batch cannot be worked through in parts; empty where it can."""
        if self.loss.fixed:
            return (f"the loss: {self.loss}",)
        return tuple(
            f"{name}: {dependence}" for name, dependence in self.all if dependence.kind == "coupled"
        )

    @property
    def splits(self) -> bool:
        """True if the batch can be worked through in parts with the numbers of the whole."""
        return not self.reasons

    @property
    def by_row(self) -> tuple[tuple[str, RowDim], ...]:
        """The results that have a value for every row, with what to call them; microbatches are put
        together to the rows of the whole batch, which are kept until the last.
        """
        return tuple(
            (name, dependence.rows) for name, dependence in self.all if dependence.rows is not None
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The values that every part computes by itself, see `Dependence.notes`."""
        return tuple(dict.fromkeys(note for _, dependence in self.all for note in dependence.notes))


# --------------------------------------------------------------------------------------------------
# The problem of a plan: everything the search needs to know about a model.
#
# Tracing makes a `Problem` once; searching, pricing and explaining read it. The costs come from
# *step graphs*: what one call of value-and-gradient computes, forward and backward, one graph per
# remat policy, with repeated layers folded into loops. The names and layouts come from the
# *forward graph*, which is the user's loss as written.

#: What paths of model state begin with.
STATE = "state"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An array of the model: trained, or frozen, or state that the loss updates.

    Attributes:
        path: tree path, "layers.mlp.up.kernel"; that of state begins with `STATE`.
        shape: elements per dim.
        dtype: stored dtype.
        axes: the user's logical axis per dim; None where unnamed.
        state_bytes_per_element: bytes of optimizer state per element that have the parameter's
            shape (8 for Adam in float32).
        state_arrays: how many arrays of optimizer state have the parameter's shape; 0 where nobody
            counted them.
        role: "trained"; "frozen" for what no step changes; "updated" for model state that the loss
            itself changes. Only what is trained has a gradient and optimizer state.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: LogicalAxes
    state_bytes_per_element: float = 0.0
    state_arrays: int = 0
    role: str = "trained"

    @property
    def trained(self) -> bool:
        """True if it has a gradient and optimizer state."""
        return self.role == "trained"


@dataclass(frozen=True, kw_only=True)
class InputDim:
    """Ties an input of a step graph to the parameters or batch arrays it was made of.

    Attributes:
        paths: tree paths of the arrays behind this input; several when layers written out one by
            one were stacked.
        stacked: whether the input has an extra leading dim over `paths`.
    """

    paths: tuple[str, ...]
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The graph of one value-and-gradient of the loss under one remat policy.

    Attributes:
        graph: forward and backward ops; its inputs follow `inputs`. Its outputs are the loss and
            other results first, then one gradient for each parameter input, in the order of the
            parameter inputs.
        inputs: for each input of the graph, which arrays it stands for.
        gradients: value index of the gradient for each input that is a parameter, in order of the
            inputs.
    """

    graph: Graph
    inputs: tuple[InputDim, ...]
    gradients: tuple[int, ...]

    __repr__ = compact


@dataclass(frozen=True, kw_only=True)
class AttentionCalls:
    """The demands of a loss's calls of attention on kernels.

    Attributes:
        without: for each kernel (`shardlib.graph`) that cannot compute some call, why not.
        width: of the widest head, elements; 0 without any call.
    """

    without: tuple[tuple[str, str], ...] = ()
    width: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its loss and its batch, ready to be planned.

    Attributes:
        model: a name for people.
        forward: the loss as written; its inputs are parameters, then model state, then batch.
        steps: step graph per remat policy name ("none", "full", ...).
        parameters: every array that is trained or frozen, in tree order; then floating-point state
            that the loss updates.
        batch: (path, shape, dtype, logical axes) of every batch array; sizes are global.
        state_bytes: bytes of other model state (replicated).
        tokens: tokens in the global batch.
        compute_dtype: dtype of the matmuls that dominate.
        functions: kinds of custom calls that the loss calls (`shardlib.functions`):
            "attention", "dropless", "capacity".
        rows: how the loss depends on the rows of the batch.
        attention: what kernels of attention must do for it.
        pieces: (value, dim) of the forward graph that are several things side by side
            (`shardlib.propagation.colours`) -> the size of each.
    """

    model: str
    forward: Graph
    steps: Mapping[str, StepGraph]
    parameters: tuple[Parameter, ...]
    batch: tuple[tuple[str, tuple[int, ...], str, LogicalAxes], ...]
    state_bytes: int = 0
    tokens: int = 0
    compute_dtype: str = "float32"
    functions: frozenset[str] = frozenset()
    attention: AttentionCalls = AttentionCalls()
    rows: Rows = field(default_factory=lambda: Rows(loss=Dependence(kind="mean"), asserted=True))
    pieces: Mapping[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[int, ...]]
    )

    __repr__ = compact


# --------------------------------------------------------------------------------------------------
# Graphs as text.
#
# One line per value that comes in and per op, indented by loop:
#
#   %0 float32[4, 8] params.w (parameter)
#   ...
#   scan x 3
#   %7 float32[2, 8] = dot_general %5 %6 | [a b] [b c] -> [a c] where a=2 b=4 c=8, sum b | 128 flops


def text(graph: Graph) -> str:
    """The graph as readable lines, the same for equal graphs."""
    lines = [f"%{index} {_value(graph.values[index])}" for index in graph.inputs]
    lines += [
        f"%{index} {_value(value)}"
        for index, value in enumerate(graph.values)
        if value.role == "constant"
    ]
    region = 0
    for op in graph.ops:
        if (
            op.region != region
            and op.region > 0
            and _depth(graph, op.region) >= _depth(graph, region)
        ):
            inside = graph.regions[op.region]
            lines.append(f"{'  ' * (_depth(graph, op.region) - 1)}{inside.kind} x {inside.trips}")
        region = op.region
        lines.append("  " * _depth(graph, region) + _op(graph, op))
    lines.append("return " + " ".join(f"%{index}" for index in graph.outputs))
    return "\n".join([*lines, *map(str, graph.findings)])


def _value(value: Value) -> str:
    location = f" {value.path}" if value.path else ""
    return f"{_type(value)}{location} ({value.role})"


def _type(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _op(graph: Graph, op: Op) -> str:
    results = ", ".join(f"%{index} {_type(graph.values[index])}" for index in op.results)
    operands = "".join(f" %{index}" for index in op.operands)
    flops = f" | {op.flops:g} flops" if op.flops else ""
    return f"{results} = {op.kind}{operands} | {op.rule}{flops}"


def _depth(graph: Graph, region: int) -> int:
    depth = 0
    while region > 0:
        region, depth = graph.regions[region].parent, depth + 1
    return depth
