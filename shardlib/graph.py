"""The intermediate representation of a program, without JAX: graphs of ops with factor rules, their
checks, step graphs, and the problem that a plan is made for.

A factor rule says how the dims of an op's operands and results correspond. A *factor* is one index
of an op, as in an einsum: a matmul [b, i] x [i, j] -> [b, j] has three. Each dim of each operand
and result is a tuple of factors, the major one first (a reshape that merges heads and head_dim has
a dim with two). A dim without a factor is `()`: it has size 1, or nothing is known about it.

>>> rule = FactorRule(
...     sizes=(8, 4, 16), operands=(((0,), (1,)), ((1,), (2,))), results=(((0,), (2,)),), summed={1}
... )
>>> rule.major(rule.operands[1][0])
1
>>> print(rule)
[a b] [b c] -> [a c] where a=8 b=4 c=16, sum b

A *parallel* factor can be sharded freely: every device computes its part. A *summed* factor is
contracted: sharding it leaves partial sums that a reduction must add up. A *whole* factor must not
be sharded: the op mixes positions along it (sort, cumulative sum, a window), so a sharded operand
is gathered first. An *outer* factor counts the pieces of a dim that concatenates several tensors,
such as the fused projection of queries, keys and values: sharding the dim shards the next factor,
that is, every piece (`shardlib.propagation.colours`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Literal, NamedTuple, TypeVar

from shardlib.compact import compact
from shardlib.findings import Finding
from shardlib.formats import FORMATS, bytes_of
from shardlib.layout import LogicalAxes

S = TypeVar("S")
T = TypeVar("T")


def once(of: Callable[[S], T]) -> Callable[[S], T]:
    """Caches the result of a function of one object in that object, which must not change."""
    name = f"_once_{of.__module__}.{of.__qualname__}"

    @wraps(of)
    def cached(subject: S) -> T:
        attributes = vars(subject)
        if name not in attributes:
            attributes[name] = of(subject)
        return attributes[name]

    return cached


#: The factors of one dim, major first.
Dim = tuple[int, ...]
#: The dims of one value.
Dims = tuple[Dim, ...]


#: A dim of an op: True if it is of a result, the index of the operand or result, the index of the
#: dim.
OpDim = tuple[bool, int, int]


@dataclass(frozen=True)
class Window:
    """A dim that is a run of consecutive positions of a longer one, such as the result of a split.

    Attributes:
        long: the longer dim.
        short: the shorter one; None if it has size 1 and the op drops it (`unstack`).
        start: first position of the run in the longer dim.
        size: length of the run.
    """

    long: OpDim
    short: OpDim | None
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class FactorRule:
    """The factors of one op.

    Attributes:
        sizes: size of each factor, elements.
        operands: the factors of each dim of each operand.
        results: the same for the results.
        summed: factors that leave partial results when sharded (the reduction may be a sum, a
            maximum, ...).
        whole: factors that must not be sharded.
        outer: whole factors that count the pieces of a dim; sharding the dim shards the next
            factor.
        windows: dims that are runs of positions of other dims.
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
        """The factors that occur in some dim."""
        return {
            factor for dims in (*self.operands, *self.results) for dim in dims for factor in dim
        }

    def major(self, dim: Dim) -> int | None:
        """The factor that is sharded when this dim is: the first one larger than 1 that is not
        outer; None if there is none.
        """
        majors = self._majors
        if dim not in majors:
            majors[dim] = next(
                (factor for factor in dim if self.sizes[factor] > 1 and factor not in self.outer),
                None,
            )
        return majors[dim]

    @cached_property
    def _majors(self) -> dict[Dim, int | None]:
        return {}

    def dims(self) -> Iterator[tuple[OpDim, Dim]]:
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
    """The rule of an elementwise op; operands may have size-1 dims that broadcast, or rank 0."""
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
    """The rule of an unknown op: every dim is a whole factor of its own."""
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
# belongs to a *region*, and a region knows its parent and its number of executions per execution of
# the parent. Values enter and leave a loop through *boundary* ops of zero cost with ordinary factor
# rules:
#
#     enter   [layers, in, out] -> [in, out]   a stacked operand of a scan, one slice per iteration
#     carry   [batch, embed] -> [batch, embed] the initial carry, the body's carry, the final carry
#     exit    [in, out] -> [layers, in, out]   a result that a scan stacks up
#
# so that propagation and cost see one kind of op. Ops called through jit, remat and custom
# derivatives are inlined.
#
# `Op.path` is the position of the op in the traced program, "3/body/12" say; lowering uses it to
# find the equation.

#: Bytes per element of arrays, by dtype name.
ITEMSIZE: Mapping[str, int] = {
    name: int(kind.bytes) for name, kind in FORMATS.items() if kind.bytes == int(kind.bytes)
}

#: Categories of ops that cost models treat differently.
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
    """The key of an input of a program, analogous to the (path, index) of results."""
    return "input", number


@dataclass(frozen=True, kw_only=True)
class Value:
    """An array.

    Attributes:
        shape: elements per dim.
        dtype: JAX's name of the dtype; "key" for PRNG keys and "token" for effects.
        path: tree path for inputs ("params.layers.mlp.kernel", "batch.tokens"), else "".
        role: "parameter" (trained), "frozen" (a parameter without a gradient), "state" (other model
            state), "batch", "constant" or "internal".
    """

    shape: tuple[int, ...]
    dtype: str
    path: str = ""
    role: str = "internal"

    @property
    def itemsize(self) -> float:
        """Bytes per element."""
        return bytes_of(self.dtype)

    @cached_property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.ceil(math.prod(self.shape) * self.itemsize)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        kind: JAX's primitive name, or "enter", "carry", "exit" for boundaries.
        operands: indices into `Graph.values`.
        results: indices into `Graph.values`.
        rule: the correspondence of the dims.
        category: one of `CATEGORIES`.
        flops: floating-point operations of one execution on the unsharded arrays.
        region: index into `Graph.regions`.
        path: position of the equation in the traced program.
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
        """The value index of an operand or of a result."""
        return (self.results if result else self.operands)[position]


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of the program that executes as a unit.

    Attributes:
        parent: index of the enclosing region; -1 for the root.
        kind: "root", "scan", "while" or "branch".
        trips: executions per execution of the parent.
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
        findings: findings of tracing.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    regions: tuple[Region, ...] = (Region(parent=-1, kind="root"),)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()

    __repr__ = compact

    def trips(self, region: int) -> int:
        """Executions of a region per run of the program."""
        total = 1
        while region >= 0:
            total *= self.regions[region].trips
            region = self.regions[region].parent
        return total

    @once
    def producers(self) -> Mapping[int, int]:
        """The index of the producing op, by value index."""
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
# Run after tracing and after every rewrite. Four laws: a value is defined once and before it is
# used; a rule has the ranks and sizes of the values it describes; no dim shares a factor with
# another dim of the same value; an op reads only values of its own or an enclosing region. Two
# kinds of boundary op cross regions: the results of an "exit", and of the "carry" at path
# ".../final/k" that leaves a loop, belong to the enclosing region; the "carry" that joins the
# branches of a condition reads from the enclosed regions.


def check(graph: Graph, before: Graph | None = None) -> None:
    """Asserts that a graph is well formed; ops shared with `before`, which passed, are skipped."""
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


#: Kernels of attention: in blocks, by XLA on any machine; splash attention, which comes with JAX,
#: on TPUs; the cuDNN kernel on NVIDIA GPUs.
Kind = Literal["blocks", "splash", "cudnn"]
KINDS: tuple[Kind, ...] = ("blocks", "splash", "cudnn")
#: The most queries, and the most keys, per block.
BLOCK = 1024
#: The attention kernel of a vendor's chips.
OF_VENDOR: dict[str, Kind] = {"google": "splash", "nvidia": "cudnn"}


# --------------------------------------------------------------------------------------------------
# The ops that the results of a graph need.
#
# XLA removes unused ops, so a cost model must not count them. A loop's carry needs care: a reader
# of the carry inside the body also needs the carry's next value, computed by the body.


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
    """The path of the op by which a carry leaves the loop, given that of the op by which it
    enters.
    """
    *loop, which, number = path.split("/")
    return "/".join([*loop, "final", number]) if which == "carry" else None


# --------------------------------------------------------------------------------------------------
# The forward pass of a step graph.
#
# A step graph computes a loss and its gradients. The ops that the loss needs are the forward pass;
# so is every other op of a loop among them, since rematerialisation and the backward pass are loops
# of their own.


def forward_pass(graph: Graph, *, saves: bool) -> Graph:
    """The forward pass of a step graph; values keep their indices. With `saves`, all ops of forward
    loops are included, and the outputs include the values that the backward pass reads.
    """
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


#: Kinds of results, by how they combine over parts of the batch.
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
        dim: index of the dim.
        inner: adjacent elements along that dim that belong to one row.
        bytes: size of the array.
    """

    dim: int
    inner: int = 1
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """The dependence of one result on the rows of the batch.

    Attributes:
        kind: "mean" of a function of each row; "sum" of it; "additive": several such sums that
            scale differently with the number of rows; "weighted mean": a sum over rows with
            coefficients computed from the whole batch; "constant": independent of the rows; "rows":
            an array with a value per row that depends on that row alone; "coupled": rows are
            combined before the end.
        why: reason for the coupling.
        where: operation and source line of the coupling.
        notes: values that couple rows but are computed per part, as their function declares:
            "balance".
        fixed: True if the only reason for the coupling is a fixed number of rows in the loss.
        rows: the dim of the rows, of kind "rows".
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
    """The dependence of all results of a loss on the rows of its batch.

    A batch may be split into parts that are computed one after the other only if no number changes.
    That is proven for sums over rows, multiplied or divided by any value; if rows are combined
    before the end (a contrastive loss, batch statistics), no sum over parts equals the result of
    the whole.

    >>> Rows(loss=Dependence(kind="mean")).splits
    True
    >>> where = "dot_general at loss.py:12"
    >>> Rows(loss=Dependence(kind="coupled", why="rows meet other rows", where=where)).reasons
    ('the loss: rows meet other rows (dot_general at loss.py:12)',)

    Attributes:
        loss: that of the loss.
        metrics: that of every metric, by path.
        state: that of every array of model state that the loss changes, by path.
        asserted: True if the user vouched for it (`rows="mean"`), so that nothing was proven.
    """

    loss: Dependence
    metrics: tuple[tuple[str, Dependence], ...] = ()
    state: tuple[tuple[str, Dependence], ...] = ()
    asserted: bool = False

    @property
    def all(self) -> tuple[tuple[str, Dependence], ...]:
        """Every result with its name in messages."""
        return (
            ("the loss", self.loss),
            *((f"metric {path!r}", dependence) for path, dependence in self.metrics),
            *((f"model state {path!r}", dependence) for path, dependence in self.state),
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the batch cannot be split into parts; empty if it can."""
        if self.loss.fixed:
            return (f"the loss: {self.loss}",)
        return tuple(
            f"{name}: {dependence}" for name, dependence in self.all if dependence.kind == "coupled"
        )

    @property
    def splits(self) -> bool:
        """True if computing the batch in parts gives the same numbers."""
        return not self.reasons

    @property
    def by_row(self) -> tuple[tuple[str, RowDim], ...]:
        """Results with a value per row, with their names; those of the microbatches are
        concatenated and kept until the last microbatch.
        """
        return tuple(
            (name, dependence.rows) for name, dependence in self.all if dependence.rows is not None
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The values that every part computes separately, see `Dependence.notes`."""
        return tuple(dict.fromkeys(note for _, dependence in self.all for note in dependence.notes))


# --------------------------------------------------------------------------------------------------
# The problem of a plan: the input of the search.
#
# Tracing makes a `Problem` once; search, pricing and reports read it. Costs come from *step
# graphs*: one call of value-and-gradient, forward and backward, one graph per remat policy, with
# repeated layers folded into loops. Names and layouts come from the *forward graph*, the user's
# loss as written.

#: Prefix of the paths of model state.
STATE = "state"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An array of the model: trained, frozen, or state that the loss updates.

    Attributes:
        path: tree path, "layers.mlp.up.kernel"; that of state begins with `STATE`.
        shape: elements per dim.
        dtype: stored dtype.
        axes: the user's logical axis per dim; None for unnamed dims.
        state_bytes_per_element: bytes per element of the optimizer state that has the parameter's
            shape (8 for Adam in float32).
        state_arrays: number of arrays of optimizer state with the parameter's shape; 0 if unknown.
        role: "trained"; "frozen" if no step changes it; "updated" for model state that the loss
            changes. Only trained parameters have a gradient and optimizer state.
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
    """The parameters or batch arrays that an input of a step graph was made of.

    Attributes:
        paths: tree paths of the arrays behind this input; several if unrolled layers were stacked.
        stacked: True if the input has an extra leading dim over `paths`.
    """

    paths: tuple[str, ...]
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The graph of one value-and-gradient of the loss under one remat policy.

    Attributes:
        graph: forward and backward ops; its inputs follow `inputs`. Its outputs are the loss and
            other results first, then one gradient per parameter input, in the order of the inputs.
        inputs: the arrays behind each input of the graph.
        gradients: value index of the gradient of each parameter input, in the order of the inputs.
    """

    graph: Graph
    inputs: tuple[InputDim, ...]
    gradients: tuple[int, ...]

    __repr__ = compact

    def weights(self) -> dict[int, int]:
        """Values that are copies, casts, slices or stacks of one parameter, trained or frozen, with
        the value index of that parameter.
        """
        graph = self.graph
        parameters = {
            value: value for role in ("parameter", "frozen") for value in graph.inputs_of(role)
        }
        for op in graph.ops:
            if op.category not in ("elementwise", "movement", "boundary") or _repeats(graph, op):
                continue
            sources = {parameters.get(value) for value in op.operands if graph.values[value].shape}
            if len(sources) == 1 and None not in sources:
                source = next(iter(sources))
                assert source is not None
                if op.kind != "carry":
                    parameters.update(dict.fromkeys(op.results, source))
        return parameters

    def gradient_like(self) -> frozenset[int]:
        """Values that reach a gradient through ops that contract nothing (sums over dims of size 1
        included).
        """
        producers = self.graph.producers()
        values: set[int] = set()
        pending = list(self.gradients)
        while pending:
            value = pending.pop()
            if value in values:
                continue
            values.add(value)
            maker = producers.get(value)
            if maker is None:
                continue
            op = self.graph.ops[maker]
            if op.category in ("elementwise", "movement", "boundary", "reduction") and all(
                op.rule.sizes[factor] == 1 for factor in op.rule.summed
            ):
                pending.extend(op.operands)
        return frozenset(values)


def _repeats(graph: Graph, op: Op) -> bool:
    """True if an op writes its operand several times, so that its result is not a copy of it."""
    return op.kind == "broadcast_in_dim" and math.prod(
        graph.values[op.results[0]].shape
    ) > math.prod(graph.values[op.operands[0]].shape)


@dataclass(frozen=True, kw_only=True)
class AttentionCalls:
    """The requirements of a loss's attention calls on kernels.

    Attributes:
        without: for each kernel that cannot compute some call, the reason.
        width: elements of the widest head; 0 without any call.
    """

    without: tuple[tuple[str, str], ...] = ()
    width: int = 0


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """A product of matrices, or a decomposition, in an optimizer's update.

    Attributes:
        flops: of one execution, all stacked matrices together.
        dtype: dtype of the operands.
        trips: executions per update.
        sides: rows, columns and depth of each product; () for a decomposition.
    """

    flops: float
    dtype: str
    trips: int = 1
    sides: tuple[int, ...] = ()


class UpdateArray(NamedTuple):
    """An array that a matrix update reads or leaves.

    Attributes:
        shape: of one matrix.
        replicated: True if its shape is not that of the parameter.
    """

    dtype: str
    shape: tuple[int, ...]
    replicated: bool

    @property
    def bytes(self) -> int:
        """Bytes of one matrix."""
        return math.prod(self.shape) * ITEMSIZE.get(self.dtype, 4)


@dataclass(frozen=True, kw_only=True)
class MatrixUpdate:
    """The part of an optimizer's update that multiplies the matrices of one parameter.

    Attributes:
        path: the parameter.
        shape: its elements per dim.
        stack: its dims along which every matrix is updated alone.
        reads, writes: the arrays that it reads and leaves.
        contractions: its products.
        alike: equal for parameters whose matrices have the same update.
    """

    path: str
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    reads: tuple[UpdateArray, ...]
    writes: tuple[UpdateArray, ...]
    contractions: tuple[Contraction, ...]
    alike: str = ""

    @property
    def matrices(self) -> int:
        """Number of matrices that are updated alone."""
        return math.prod(self.shape[dim] for dim in self.stack)

    @property
    def flops(self) -> float:
        """Floating-point operations of an update."""
        return sum(c.flops * c.trips for c in self.contractions)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its loss and its batch, ready to be planned.

    Attributes:
        model: name for output.
        forward: the loss as written; its inputs are parameters, then model state, then batch.
        steps: step graph per remat policy name ("none", "full", ...).
        parameters: trained and frozen arrays in tree order, then floating-point state that the loss
            updates.
        batch: (path, shape, dtype, logical axes) of every batch array; sizes are global.
        state_bytes: bytes of other model state (replicated).
        tokens: tokens in the global batch.
        compute_dtype: dtype of the dominant matmuls.
        functions: kinds of custom calls of the loss (`shardlib.functions`): "attention",
            "dropless", "capacity".
        rows: dependence of the loss on the rows of the batch.
        attention: requirements on attention kernels.
        pieces: (value, dim) of the forward graph that concatenate several tensors
            (`shardlib.propagation.colours`) -> the size of each.
        updates: the parameters whose matrices the optimizer multiplies.
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
    updates: tuple[MatrixUpdate, ...] = ()

    __repr__ = compact


# --------------------------------------------------------------------------------------------------
# Graphs as text.
#
# One line per input and per op, indented by loop:
#
#   %0 float32[4, 8] params.w (parameter)
#   ...
#   scan x 3
#   %7 float32[2, 8] = dot_general %5 %6 | [a b] [b c] -> [a c] where a=2 b=4 c=8, sum b | 128 flops


def text(graph: Graph) -> str:
    """The graph as text; equal graphs have equal text."""
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
