"""The vocabulary of costs: items, their terms, and the degrees that divide them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from shardlib.layout import LogicalAxes
from shardlib.propagation.colours import Choice, Spec, dividing_axes, sharded_by
from shardlib.propagation.contractions import DividedHeads, divided_heads

# --------------------------------------------------------------------------------------------------
# Items and their terms.
#
# A term is a quantity of the whole program together with the axes that divide it; an item is a
# separable part of the cost, with terms that depend on a choice.


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A number of FLOPs or bytes of the whole program, and the axes that divide it.

    Attributes:
        total: amount of the unsharded arrays.
        batch: True if data, fsdp, expert and microbatches divide it.
        tensor: True if the tensor axis divides it.
        context: True if the context axis divides it.
        expert: True if the expert axis divides it, though the batch does not.
    """

    total: float
    batch: bool
    tensor: bool
    context: bool = False
    expert: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadCondition:
    """The heads of an attention kernel that tensor shards only inside the kernel
    (`shardlib.propagation.contractions`), and the cases in which a term counts.

    Attributes:
        groups: heads of keys and values.
        queries_per_group: heads of queries per head of keys.
        shardings: the cases in which the term counts, by which heads are divided among devices.
    """

    groups: int
    queries_per_group: int
    shardings: tuple[DividedHeads, ...]

    def holds(self, degree: int) -> bool:
        """True if the term counts for this degree of tensor parallelism."""
        return (
            divided_heads(
                heads=self.groups * self.queries_per_group, groups=self.groups, devices=degree
            )
            in self.shardings
        )


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """Rows of tokens that a router distributes over experts.

    Attributes:
        assignments: tokens times experts per token.
        experts: number of experts, with the axes that divide it.
        capacity_factor: capacity of an expert over the mean load; None without a capacity.
    """

    assignments: Amount
    experts: Amount
    capacity_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Elements of the vector work of a kernel, by the axes that divide them.

    Attributes:
        simple: of additions, multiplications and such.
        transcendental: of exponentials and such.
    """

    simple: tuple[Amount, ...] = ()
    transcendental: tuple[Amount, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Matmuls [rows, depth] x [depth, columns] that one kernel computes, each dim with the axes
    that divide it.

    Attributes:
        rows, columns: elements of the result.
        depth: contracted elements.
        batches: number of matmuls of that size; None for one.
    """

    rows: Amount
    columns: Amount
    depth: Amount
    batches: Amount | None = None

    @property
    def dims(self) -> tuple[Amount, Amount, Amount]:
        return self.rows, self.columns, self.depth


@dataclass(frozen=True, kw_only=True)
class AttentionCore:
    """The sizes of a fused attention kernel.

    Attributes:
        query_width: elements of a head of queries.
        scores_per_flop: attention scores per FLOP.
        value_width: elements of a head of values; None: the same.
    """

    query_width: int
    scores_per_flop: float
    value_width: int | None = None


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One kernel: FLOPs and memory traffic of one execution.

    Attributes:
        flops: operations.
        dtype: dtype of the operands, which decides the peak.
        traffic: bytes read and written, by the axes that divide them.
        trips: executions per microbatch.
        elements: the vector work fused into it.
        matmul: dims of a matmul; None for other kernels.
        is_weight_gradient: True if it computes one, for which only the optimizer waits.
        kind: kind of the op.
        category: category of the op.
        routed: the routed rows that decide the load of the busiest device; None for even loads.
        core: sizes of a fused attention kernel; None for other kernels.
        heads: the condition under which the kernel counts; None for always.
    """

    flops: Amount
    dtype: str
    traffic: tuple[Amount, ...]
    trips: int
    elements: Elements = Elements()
    matmul: Matmul | None = None
    is_weight_gradient: bool = False
    kind: str = ""
    category: str = ""
    routed: RoutedRows | None = None
    core: AttentionCore | None = None
    heads: HeadCondition | None = None


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective.

    Attributes:
        kind: kind of collective; "reduce" for gradients, whose kind the ZeRO stage decides.
        purpose: what the collective is for: to reshard along "tensor" or "context", or "expert"
            (tokens to experts and back); "keys", "ring" or "head_exchange" (along context, for an
            attention kernel: a decision selects which one counts); "stage" (to the next stage);
            "ends" (over stage, before and after the layers); "gather" (a parameter over the axes
            that it is stored over, ZeRO 3 only); "gradient"; "sum" (over all axes that shard
            tokens).
        bytes: bytes of the array before it is sharded over the group itself.
        trips: executions per microbatch.
        shape: elements per dim, which decide whether fsdp divides the array.
        spec: the axes that shard its dims.
        stack_dims: dims that stack layers, which fsdp must not shard.
        over_tensor: True if a gradient is also partial sums over tensor.
        case: restricts a gradient to a case: "reduce-scatter" or "all-reduce", or "repeated" for
            the reduce-scatter of another use of a parameter (an all-reduce includes it in that of
            the first use); "" for all.
        cause: the op or parameter that needs it.
        routed, heads: as in `Compute`.
    """

    kind: str
    purpose: str
    bytes: Amount
    trips: int
    shape: tuple[int, ...] = ()
    spec: Spec = ()
    stack_dims: frozenset[int] = frozenset()
    over_tensor: bool = False
    case: str = ""
    cause: str = ""
    routed: RoutedRows | None = None
    heads: HeadCondition | None = None


#: A collective of a step graph, and the ops that need it.
TransferOps = tuple[Transfer, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A value that is in memory at a certain point of the program.

    Attributes:
        bytes: its size.
        part: "saved" from the forward for the backward pass, "gradient", "copy" of a parameter
            (saved, sharded as the parameter is), "cast" (of all layers of a parameter at once, for
            the whole step), "added" (a gradient that is immediately added to the sum over
            microbatches), "gathered" (a parameter in use, if it is stored sharded), "temporary";
            "deferred" or "peeled" (a temporary that lives on because weight gradients are computed
            last, see `shardlib.cost.pricing.defers_weight_gradients`), "undeferred" (a gradient
            that is added to another one after the backward pass, unless it is computed last), or
            "recomputed" or "zeroed" (a temporary or a stack of gradients of the backward loop that
            is in memory before it).
        stacked: True if it has one slice per layer.
        shape: elements per dim, which decide whether fsdp divides a gradient or a copy.
        spec: the axes that shard each dim in compute.
        heads: as in `Compute`.
    """

    bytes: Amount
    part: str
    stacked: bool = False
    shape: tuple[int, ...] = ()
    spec: Spec = ()
    heads: HeadCondition | None = None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A parameter and, if it is trained, its gradient and optimizer state.

    Attributes:
        count: number of identical parameters.
        elements: number of elements of each.
        itemsize: bytes per element of the parameter.
        state: bytes of optimizer state per element.
        shape: elements per dim.
        spec: the axes that shard each dim in compute.
        stack_dims: dims of a stack of layers that a scan iterates over, which fsdp must not shard.
        trained: True if it has a gradient and optimizer state.
    """

    count: int
    elements: int
    itemsize: int
    state: float
    shape: tuple[int, ...]
    spec: Spec
    stack_dims: frozenset[int]
    trained: bool = True


Term = Compute | Transfer | Resident | Stored


@dataclass(frozen=True, kw_only=True)
class Item:
    """A separable part of the cost.

    Attributes:
        colours: colours that its terms depend on.
        terms: choice -> terms.
        segment: its layer group; `OUTSIDE_LAYERS`, or `INSIDE_LAYER` for values inside one layer.
        key: everything that determines its terms: items with equal values have equal terms
            except for causes. None if unknown.
    """

    colours: frozenset[str]
    terms: Callable[[Choice], tuple[Term, ...]]
    segment: int = -1
    key: Hashable = None


#: Segments of items outside of the layer groups: embedding, head and loss; and values that live
#: within one layer.
OUTSIDE_LAYERS, INSIDE_LAYER = -1, -2


def amount(total: float, spec: Spec) -> Amount:
    """The amount of an array with some sharding."""
    batch, tensor, context, expert = dividing_axes(spec)
    return Amount(total=total, batch=batch, tensor=tensor, context=context, expert=expert)


def colours_in(axes: LogicalAxes) -> frozenset[str]:
    """The colours among the dims of an array."""
    return frozenset(name for name in axes if name)


# --------------------------------------------------------------------------------------------------
# Degrees: numbers of shards; candidates as arrays, and the local part of an amount.
#
# The *degrees* are everything that the amounts of a step depend on: the sizes of the mesh axes, and
# the number of microbatches. They are independent of links and stages; many candidates share them.

Array = np.ndarray
#: Upper limit of the integer keys by which rows of a table are compared.
MAX_ROW_KEY = 2**62
#: Metadata of an array field that all rows of an `ArrayTable` share.
SHARED_BY_ROWS: dict[str, bool] = {"shared": True}


@dataclass(frozen=True, kw_only=True)
class ArrayTable:
    """Arrays of equal length along their last dim, the rows. A field is an array, a list with an
    entry per row, another table, or a mapping or tuple of these; all rows share any other field.
    """

    def copied(self, rows: Array) -> Self:
        """The rows at some positions or of a mask, which refer to no other table."""
        positions = _positions(rows)
        shared = _shared(type(self))
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return type(self)(
            **{
                name: value if name in shared else _rows(value, positions)
                for name, value in values.items()
            }
        )

    def take(self, rows: Array) -> Self:
        """The same as `copied`; a `LazyTable` takes them when they are read."""
        return self.copied(rows)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The concatenated rows of several tables."""
        listed = list(parts)
        return cls(
            **{
                f.name: _joined([getattr(part, f.name) for part in listed])
                for f in fields(cls)
                if f.init
            }
        )


@dataclass(frozen=True, kw_only=True)
class LazyTable(ArrayTable):
    """A table that takes the rows of each field when the field is first read, because most fields
    are read for few rows only. Until then it refers to the table that it was taken from, so that
    tables that live long are `copied`. Its fields have no defaults.
    """

    def take(self, rows: Array) -> Self:
        table = object.__new__(type(self))
        table.__dict__["_sources"] = [(self, _positions(rows))]
        return table

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            sources = self.__dict__.get("_sources", [])
            for number, (table, positions) in enumerate(sources):
                if name in table.__dict__:
                    value = table.__dict__[name]
                    if name not in _shared(type(self)):
                        value = _rows(value, positions)
                    self.__dict__[name] = value
                    return value
                if number + 1 == len(sources) and "_sources" in table.__dict__:
                    further, inner = table.__dict__["_sources"][0]
                    sources.append((further, inner[positions]))
            raise AttributeError(f"{type(self).__name__} has no {name}")


def _positions(rows: Array) -> Array:
    return np.flatnonzero(rows) if rows.dtype == np.bool_ else rows


@cache
def _shared(kind: type[ArrayTable]) -> frozenset[str]:
    """The fields that all rows share though they hold arrays."""
    return frozenset(f.name for f in fields(kind) if "shared" in f.metadata)


def _rows(value: Any, positions: Array) -> Any:
    if isinstance(value, np.ndarray):
        array: Array = value  # pyright: ignore[reportUnknownVariableType]
        return array[positions] if array.ndim == 1 else array.take(positions, axis=-1)
    if isinstance(value, ArrayTable):
        return value.take(positions)
    if isinstance(value, dict):
        return {key: _rows(part, positions) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, tuple):
        return tuple(_rows(part, positions) for part in cast("tuple[Any, ...]", value))
    if isinstance(value, list):
        entries = cast("list[Any]", value)
        return [entries[i] for i in positions]
    return value


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, ArrayTable):
        return type(first).joined(values)
    if isinstance(first, tuple):
        return tuple(_joined(list(parts)) for parts in zip(*values, strict=True))
    return np.concatenate(values, axis=-1)


@dataclass(frozen=True, kw_only=True)
class BoundedTable(ArrayTable):
    """Rows with a lower bound each."""

    bound: Array

    def __len__(self) -> int:
        return len(self.bound)

    def first(self, count: int) -> Self:
        """The first `count` rows."""
        return self.take(np.arange(min(count, len(self))))

    def after(self, count: int) -> Self:
        """All rows but the first `count`."""
        return self.take(np.arange(min(count, len(self)), len(self)))

    def split(self, limit: float) -> tuple[Self, Self]:
        """The rows with a bound below `limit`, and all others."""
        return self.take(self.bound < limit), self.take(self.bound >= limit)

    def below(self, limit: float) -> Self:
        """Rows with a bound below `limit`, in ascending order of the bound."""
        order = np.argsort(self.bound, kind="stable")
        return self.take(order[: int(np.searchsorted(self.bound[order], limit))])


@dataclass(frozen=True, kw_only=True)
class Degrees(ArrayTable):
    """Degrees of parallelism as arrays of equal length.

    Attributes:
        batch: number of parts of the batch: data, fsdp, expert and microbatches.
        context, tensor, expert, fsdp: sizes of these axes.
        inverse_shards: cache of one over the number of parts, by the axes that divide an amount.
        divides: cache: True if a size divides over the stored axes besides those that shard it, by
            (size, whether these are an expert's, whether tensor and expert shard it).
    """

    batch: Array
    context: Array
    tensor: Array
    expert: Array
    fsdp: Array
    inverse_shards: dict[tuple[bool, bool, bool, bool], Array] = field(
        default_factory=dict[tuple[bool, bool, bool, bool], Array],
        init=False,
        compare=False,
        repr=False,
    )
    divides: dict[tuple[int, bool, bool, bool], Array] = field(
        default_factory=dict[tuple[int, bool, bool, bool], Array],
        init=False,
        compare=False,
        repr=False,
    )

    def __len__(self) -> int:
        return len(self.batch)

    def stored_shards(self, spec: Spec) -> Array:
        """Stored shards of a parameter per compute shard: over fsdp, context and expert; parameters
        of experts already use the expert axis.
        """
        return self.fsdp * self.context * (1 if sharded_by(spec, "expert") else self.expert)

    @property
    def ones(self) -> Array:
        """1.0 for each row."""
        return np.ones(len(self))


_ONES = np.ones(1, dtype=np.int64)
#: The degrees of a program on one device.
SINGLE = Degrees(batch=_ONES, context=_ONES, tensor=_ONES, expert=_ONES, fsdp=_ONES)


def distinct_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """The first position of every distinct row of some integer columns, in ascending order of the
    rows, and the index of the row of each position.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    small = math.prod(sizes) < MAX_ROW_KEY and all(column.min(initial=0) >= 0 for column in columns)
    for column, size in zip(columns, sizes, strict=True):
        if small:
            key = key * size + column
        else:
            values, code = np.unique(column, return_inverse=True)
            key = key * len(values) + code.reshape(-1)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def local(amount: Amount, degrees: Degrees) -> Array:
    """The local part of an amount, per device and microbatch."""
    key = amount.batch, amount.tensor, amount.context, amount.expert
    if key not in degrees.inverse_shards:
        shards = (
            degrees.batch if amount.batch else degrees.expert if amount.expert else 1
        ) * degrees.ones
        shards = shards * degrees.context if amount.context else shards
        degrees.inverse_shards[key] = 1.0 / (shards * degrees.tensor if amount.tensor else shards)
    return amount.total * degrees.inverse_shards[key]
