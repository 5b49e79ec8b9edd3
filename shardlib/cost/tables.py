"""Tables of the terms of many items for all degrees of parallelism: measures, and tallies of their
coefficients.

A measure is a function of the degrees alone: the seconds of one kernel, or a `LocalFraction`, the
part of an amount that one device has: one over the number of its shards.

>>> LocalFraction(batch=True).times(OverAxis("tensor")).multipliers
(OverAxis(axis='tensor'),)

A `Tally` has coefficients of measures by quantity, for any degrees. Tallies of different items add
up, so tables of partial sums can be combined; only `shardlib.cost.pricing` does anything that is
not a sum.

>>> tally = tallied([tally_entries([(0, 5, 2.0), (0, 5, 1.0), (3, 7, 4.0)])])
>>> tally.rows.tolist(), tally.measures, tally.matrix.tolist()
([0, 3], (5, 7), [[3.0, 0.0], [0.0, 4.0]])

The rows of a tally are the additive quantities of a step. The tally of a program is an array
[segments, `ROWS`, degrees], per microbatch and device: first each `Quantity`, then the counts and
then the bytes of the collectives of every slot.

>>> Quantity.COMPUTE, ROWS == BYTES + len(SLOTS)
(<Quantity.COMPUTE: 0>, True)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np

from shardlib.cost.collectives import (
    SLOT_INDEX,
    SLOTS,
    Slot,
    axis_group,
    on_all_stages,
    replica_group,
    storage_group,
    token_group,
)
from shardlib.cost.framework import XLA, FrameworkProfile
from shardlib.cost.roofline import (
    Efficiency,
    applied,
    busiest,
    efficiency_of,
    kernel_seconds,
    with_reached_rates,
)
from shardlib.cost.terms import (
    OUTSIDE_LAYERS,
    Amount,
    Compute,
    Degrees,
    HeadCondition,
    Item,
    LazyTable,
    Resident,
    RoutedRows,
    Stored,
    Term,
    Transfer,
    distinct_rows,
    local,
)
from shardlib.layout import CONTEXT, EXPERT, STAGE, STORED_AXES, TENSOR, Axis
from shardlib.machines.chips import Chip
from shardlib.machines.topology import Topology
from shardlib.propagation.colours import Choice, Spec, sharded_by

# --------------------------------------------------------------------------------------------------
# The components of `shardlib.cost.stages.StepCosts`: arrays whose last dim is candidates.


@dataclass(frozen=True, kw_only=True)
class MemoryPoint(LazyTable):
    """Bytes by segment at a point where memory may peak, arrays [segments, candidates]; names as in
    `Quantity`.
    """

    saved: Array
    temporary: Array
    gradient: Array
    gradient_sharded: Array
    added: Array
    added_sharded: Array
    copy: Array
    copy_sharded: Array
    cast: Array
    cast_sharded: Array
    gathered: Array
    deferred: Array
    peeled: Array
    undeferred: Array
    recomputed: Array
    zeroed: Array
    zeroed_sharded: Array


@dataclass(frozen=True, kw_only=True)
class KernelTotals(LazyTable):
    """The kernels of a microbatch as arrays.

    Attributes:
        compute: seconds, array [segments, candidates].
        weight_gradients: the part of `compute` that makes weight gradients, all segments, array
            [candidates].
        host: host seconds to launch them, array [segments, candidates].
        flops: of all segments, array [candidates].
    """

    compute: Array
    weight_gradients: Array
    host: Array
    flops: Array


@dataclass(frozen=True, kw_only=True)
class CollectiveSeconds(LazyTable):
    """Seconds of the collectives of a microbatch by role, arrays [segments, candidates].

    Attributes:
        block, context, keys, ring, head_exchange, reduce, scatter, gather: of each role.
        routed: the part of `reduce` for gradients of experts.
        stage_sends: activations to the next stage and cotangents back, per chunk, array
            [candidates].
        ends: collectives of all stages before and after the layers, array [candidates].
    """

    block: Array
    context: Array
    keys: Array
    ring: Array
    head_exchange: Array
    reduce: Array
    scatter: Array
    gather: Array
    routed: Array
    stage_sends: Array
    ends: Array


@dataclass(frozen=True, kw_only=True)
class StoredBytes(LazyTable):
    """Bytes as stored, arrays [segments, candidates]; those in `_sharded` are sharded by ZeRO.
    Names as in `Quantity`.
    """

    parameters: Array
    parameters_sharded: Array
    frozen: Array
    frozen_sharded: Array
    state: Array
    state_sharded: Array
    experts: Array
    accumulated: Array
    accumulated_sharded: Array


@dataclass(frozen=True)
class OverAxis:
    """A factor: one over the size of a mesh axis, "tensor" or "context"."""

    axis: str


@dataclass(frozen=True)
class OverStoredShards:
    """A factor: one over the number of stored shards of a parameter per compute shard; with
    `experts` the expert axis already shards it in compute.
    """

    experts: bool


@dataclass(frozen=True)
class DividesStored:
    """A factor: 1 if an array divides as it is stored (`divides_stored`), else 0; the reverse if
    not `divides`.
    """

    shape: tuple[int, ...]
    spec: Spec
    stack_dims: frozenset[int]
    flat: bool = False
    divides: bool = True


@dataclass(frozen=True)
class BusiestLoad:
    """A factor: load of the busiest device over the mean (`shardlib.cost.roofline`)."""

    routed: RoutedRows


@dataclass(frozen=True)
class LaunchSeconds:
    """A factor: host seconds to launch a kernel."""


@dataclass(frozen=True)
class HeadsHold:
    """A factor: 1 if the condition holds, else 0."""

    heads: HeadCondition


Multiplier = OverAxis | OverStoredShards | DividesStored | BusiestLoad | LaunchSeconds | HeadsHold


@dataclass(frozen=True)
class LocalFraction:
    """The fraction of an amount on one device, by the fields of `Amount`, times multipliers."""

    batch: bool = False
    tensor: bool = False
    context: bool = False
    expert: bool = False
    multipliers: tuple[Multiplier, ...] = ()

    def times(self, *multipliers: Multiplier) -> LocalFraction:
        """The fraction times more multipliers."""
        if not multipliers:
            return self
        return LocalFraction(
            self.batch, self.tensor, self.context, self.expert, (*self.multipliers, *multipliers)
        )


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one execution of a kernel, whose `trips` are 1; `outside` of the layers or in
    one.
    """

    term: Compute
    outside: bool


Measure = LocalFraction | KernelSeconds


@lru_cache(maxsize=64)
def _local_fraction(batch: bool, tensor: bool, context: bool, expert: bool) -> LocalFraction:
    return LocalFraction(batch, tensor, context, expert)


def local_fraction(amount: Amount) -> LocalFraction:
    """The measure of an amount, whose total is the coefficient."""
    return _local_fraction(amount.batch, amount.tensor, amount.context, amount.expert)


#: Sizes that a measure may depend on: fields of `Degrees`.
SIZES: tuple[str, ...] = ("batch", "context", "tensor", "expert", "fsdp")


def sizes_of(measure: Measure) -> frozenset[str]:
    """The sizes that a measure depends on."""
    if isinstance(measure, KernelSeconds):
        term, matmul = measure.term, measure.term.matmul
        routed = (term.routed.assignments, term.routed.experts) if term.routed else ()
        amounts = (
            term.flops,
            *term.traffic,
            *term.elements.simple,
            *term.elements.transcendental,
            *(matmul.dims if matmul else ()),
            *((matmul.batches,) if matmul and matmul.batches else ()),
            *routed,
        )
        condition = frozenset({"tensor"} if term.heads else ())
        return condition.union(*map(_dividing_sizes, amounts))
    return _dividing_sizes(measure).union(*map(_sizes_of_multiplier, measure.multipliers))


def _dividing_sizes(amount: Amount | LocalFraction) -> frozenset[str]:
    """The sizes that divide an amount."""
    return frozenset(name for name in SIZES[:-1] if getattr(amount, name))


def _sizes_of_multiplier(multiplier: Multiplier) -> frozenset[str]:
    match multiplier:
        case OverAxis("tensor" | "context" as axis):
            return frozenset({axis})
        case HeadsHold():
            return frozenset({"tensor"})
        case OverAxis() | OverStoredShards():
            return frozenset(STORED_AXES)
        case DividesStored():
            return frozenset(SIZES[1:])
        case BusiestLoad(routed):
            return _dividing_sizes(routed.assignments) | _dividing_sizes(routed.experts)
        case LaunchSeconds():
            return frozenset()


# --------------------------------------------------------------------------------------------------
# Measures evaluated once for all degrees.
#
# A program has hundreds of items under hundreds of choices, but few distinct measures, because
# programs repeat themselves: the layers of a stack, a rematerialised forward pass, an op that a
# choice does not affect. So each measure is evaluated once for all degrees, and a tally is the
# product of a small matrix with them.

Array = np.ndarray


def evaluate(measure: LocalFraction, degrees: Degrees, efficiency: Efficiency) -> Array:
    """A measure other than a kernel, by degrees."""
    values = local(
        Amount(
            total=1.0,
            batch=measure.batch,
            tensor=measure.tensor,
            context=measure.context,
            expert=measure.expert,
        ),
        degrees,
    )
    for multiplier in measure.multipliers:
        values = values * _multiplier(multiplier, degrees, efficiency)
    return values


def divides_stored(
    shape: tuple[int, ...],
    spec: Spec,
    stack_dims: frozenset[int],
    degrees: Degrees,
    *,
    flat: bool = False,
) -> Array:
    """True if some dim, other than a stack of layers, divides over the stored axes besides those
    that shard it in compute; vectors are stored replicated.

    A flat buffer of all parameters, padded at its end, is sharded over any number of devices.
    """
    if flat:
        return degrees.stored_shards(spec) > 1
    divides, expert = np.zeros(len(degrees), dtype=bool), sharded_by(spec, "expert")
    dims = [dim for dim, size in enumerate(shape) if dim not in stack_dims and size > 1]
    for dim in dims if len(dims) > 1 else ():
        part = spec[dim] or ""
        divides |= _divides((shape[dim], expert, "tensor" in part, part == "expert"), degrees)
    return divides


def _divides(key: tuple[int, bool, bool, bool], degrees: Degrees) -> Array:
    if key not in degrees.divides:
        size, expert, over_tensor, over_expert = key
        degree = degrees.stored_shards(("expert",) if expert else ())
        inner = (degrees.tensor if over_tensor else 1) * (degrees.expert if over_expert else 1)
        degrees.divides[key] = (size % (degree * inner) == 0) & (degree > 1)
    return degrees.divides[key]


def _multiplier(multiplier: Multiplier, degrees: Degrees, efficiency: Efficiency) -> Array | float:
    match multiplier:
        case OverAxis("tensor"):
            return 1.0 / degrees.tensor
        case OverAxis("context"):
            return 1.0 / degrees.context
        case OverAxis(axis):
            raise AssertionError(f"no measure is by the ways of {axis}")
        case OverStoredShards(experts):
            return 1.0 / degrees.stored_shards((EXPERT.name,) if experts else ())
        case DividesStored(shape, spec, stack_dims, flat, divides):
            return divides_stored(shape, spec, stack_dims, degrees, flat=flat) == divides
        case LaunchSeconds():
            return efficiency.dispatch_s
        case BusiestLoad(routed):
            return busiest(routed, lambda amount: local(amount, degrees), efficiency)
        case HeadsHold(heads):
            return _holds(heads, degrees)


def _holds(heads: HeadCondition, degrees: Degrees) -> Array:
    """1.0 where the condition holds for the tensor degree, else 0.0."""
    sizes, inverse = np.unique(degrees.tensor, return_inverse=True)
    return np.array([float(heads.holds(int(n))) for n in sizes])[inverse.reshape(-1)]


#: Number of tables of degrees whose measures an index caches.
MAX_CACHED = 8


class MeasureIndex:
    """An index of measures; equal measures share an index.

    Attributes:
        measures: by index.
        sizes: sizes that each depends on, by index.
    """

    def __init__(self) -> None:
        self.measures: list[Measure] = []
        self.sizes: list[frozenset[str]] = []
        self._numbers: dict[Measure, int] = {}
        self._cached: OrderedDict[Hashable, MeasureValues] = OrderedDict()

    def evaluated(
        self, chip: Chip, efficiency: Efficiency, outside: Efficiency, degrees: Degrees
    ) -> MeasureValues:
        """The measures on some degrees, cached for later searches: a topology with other links or
        more memory has the same kernels.
        """
        key = (
            replace(chip, hbm_bytes=1, reserved_bytes=0),
            efficiency,
            outside,
            tuple(getattr(degrees, name).tobytes() for name in SIZES),
        )
        values = self._cached.pop(key, None)
        if values is None:
            values = MeasureValues(
                index=self, chip=chip, efficiency=efficiency, outside=outside, degrees=degrees
            )
        self._cached[key] = values
        if len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return values

    def index_of(self, measure: Measure) -> int:
        """The index of a measure."""
        number = self._numbers.setdefault(measure, len(self.measures))
        if number == len(self.measures):
            self.measures.append(measure)
            self.sizes.append(sizes_of(measure))
        return number


class LazyRows:
    """Rows of numbers, computed on demand.

    Args:
        make: computes the row of an index.
        width: length of a row.

    Attributes:
        values: the computed rows, with spare capacity.
    """

    def __init__(self, make: Callable[[int], Array], width: int) -> None:
        self._make, self._row = make, dict[int, int]()
        self.values = np.empty((16, width))

    def rows(self, numbers: Sequence[int]) -> Array:
        """The rows of some indices."""
        for number in numbers:
            if number not in self._row:
                row = self._row[number] = len(self._row)
                if row == len(self.values):
                    self.values = np.concatenate([self.values, np.empty_like(self.values)])
                self.values[row] = self._make(number)
        return np.array([self._row[number] for number in numbers], dtype=np.int64)


@dataclass(kw_only=True)
class MeasureValues:
    """Measures evaluated on degrees, on demand.

    Few measures depend on all sizes, so each is evaluated only on the distinct combinations of the
    sizes that it depends on.

    Attributes:
        index: the measures.
        chip: the chip.
        efficiency, outside: its efficiencies in layers, and outside of them.
        degrees: the degrees.
        kernel_degrees: the distinct degrees ignoring fsdp, on which kernels do not depend;
            `kernel_index` is the index into them by degrees.
    """

    index: MeasureIndex
    chip: Chip
    efficiency: Efficiency
    outside: Efficiency
    degrees: Degrees
    kernel_degrees: Degrees = field(init=False)
    kernel_index: Array = field(init=False)
    _tables: dict[frozenset[str], tuple[LazyRows, Array]] = field(
        default_factory=dict[frozenset[str], tuple[LazyRows, Array]], init=False, repr=False
    )
    _rows: dict[tuple[int, ...], list[tuple[frozenset[str], Array, Array]]] = field(
        default_factory=dict[tuple[int, ...], list[tuple[frozenset[str], Array, Array]]],
        init=False,
        repr=False,
    )

    def __post_init__(self) -> None:
        self.kernel_degrees, self.kernel_index = _projected(self.degrees, frozenset(SIZES[:-1]))

    def stacked(self, measures: tuple[int, ...], index: Array) -> Array:
        """Some measures on some degrees, array [measures, degrees]."""
        if measures not in self._rows:
            self._rows[measures] = self._by_sizes(measures)
        values = np.empty((len(measures), len(index)))
        for sizes, positions, rows in self._rows[measures]:
            table, which = self._tables[sizes]
            values[positions] = table.values[rows[:, None], which[index]]
        return values

    def _by_sizes(self, measures: tuple[int, ...]) -> list[tuple[frozenset[str], Array, Array]]:
        """(sizes, positions, rows of their table) of some measures, grouped by the sizes they
        depend on.
        """
        groups: dict[frozenset[str], list[int]] = {}
        for position, number in enumerate(measures):
            groups.setdefault(self.index.sizes[number], []).append(position)
        for sizes in groups.keys() - self._tables.keys():
            self._tables[sizes] = self._table(sizes)
        return [
            (
                sizes,
                np.array(positions),
                self._tables[sizes][0].rows([measures[i] for i in positions]),
            )
            for sizes, positions in groups.items()
        ]

    def _table(self, sizes: frozenset[str]) -> tuple[LazyRows, Array]:
        degrees, which = _projected(self.degrees, sizes)
        return LazyRows(lambda number: self._evaluated(number, degrees), len(degrees)), which

    def _evaluated(self, number: int, degrees: Degrees) -> Array:
        measure = self.index.measures[number]
        if isinstance(measure, LocalFraction):
            return evaluate(measure, degrees, self.efficiency)
        seconds = kernel_seconds(
            measure.term,
            lambda amount: local(amount, degrees),
            self.chip,
            self.outside if measure.outside else self.efficiency,
        )
        heads = measure.term.heads
        return seconds if heads is None else seconds * _holds(heads, degrees)


def _projected(degrees: Degrees, sizes: frozenset[str]) -> tuple[Degrees, Array]:
    """The distinct degrees after all other sizes are set to 1, and the index into them."""
    first, which = distinct_rows(
        [np.ones_like(degrees.batch), *(getattr(degrees, name) for name in SIZES if name in sizes)]
    )
    batch, context, tensor, expert, fsdp = (
        getattr(degrees, name)[first] if name in sizes else np.ones(len(first), dtype=np.int64)
        for name in SIZES
    )
    return Degrees(batch=batch, context=context, tensor=tensor, expert=expert, fsdp=fsdp), which


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A tally for any degrees: a matrix of coefficients times measures.

    Attributes:
        rows: indices of the non-empty rows, ascending.
        measures: indices of the measures in a `MeasureIndex`.
        matrix: array [rows, measures].
    """

    rows: Array
    measures: tuple[int, ...]
    matrix: Array
    _derived: dict[Hashable, Tally] = field(
        default_factory=dict[Hashable, "Tally"], init=False, repr=False
    )

    def summed(self, key: Hashable, labels: Array) -> Tally:
        """The sums of the rows with the same label, as rows of a tally; without those of a negative
        label. Cached by the key.

        Args:
            labels: label of every possible row.
        """
        if key not in self._derived:
            distinct, inverse = np.unique(labels[self.rows], return_inverse=True)
            matrix = np.zeros((len(distinct), len(self.measures)))
            np.add.at(matrix, inverse.reshape(-1), self.matrix)
            rows = (distinct >= 0) & matrix.any(1)
            used = np.flatnonzero(matrix[rows].any(0))
            self._derived[key] = Tally(
                rows=distinct[rows],
                measures=tuple(self.measures[i] for i in used),
                matrix=matrix[np.ix_(rows, used)],
            )
        return self._derived[key]

    def weighted(self, weights: Array) -> Tally:
        """Weighted sums of the rows, weights [sums, all rows]; every sum is a row of the result."""
        matrix = weights[:, self.rows] @ self.matrix
        used = np.flatnonzero(matrix.any(0))
        return Tally(
            rows=np.arange(len(weights)),
            measures=tuple(self.measures[i] for i in used),
            matrix=matrix[:, used],
        )

    def evaluated(self, values: MeasureValues, index: Array) -> Array:
        """The rows on the degrees at some indices, array [rows, degrees]."""
        return self.matrix @ values.stacked(self.measures, index)


class Joined:
    """The rows of several tallies, those of tally i from row i * width on.

    Attributes:
        rows: their indices.
    """

    def __init__(self, tallies: Sequence[Tally], width: int) -> None:
        self._measures = sorted({number for tally in tallies for number in tally.measures})
        column = {number: position for position, number in enumerate(self._measures)}
        self._parts = [([column[i] for i in tally.measures], tally.matrix) for tally in tallies]
        rows = [tally.rows + number * width for number, tally in enumerate(tallies)]
        self.rows = np.concatenate(rows)

    def evaluated(self, values: MeasureValues, index: Array) -> Array:
        """The rows on the degrees at some indices, array [rows, degrees]; each measure is read
        once.
        """
        stacked = values.stacked(tuple(self._measures), index)
        rows, end = np.empty((len(self.rows), len(index))), 0
        for columns, matrix in self._parts:
            start, end = end, end + len(matrix)
            np.matmul(matrix, stacked[columns], out=rows[start:end])
        return rows


#: Rows of a tally, indices of measures, and coefficients, of equal length.
TallyEntries = tuple[Array, Array, Array]


def tally_entries(listed: Iterable[tuple[int, int, float]]) -> TallyEntries:
    """The entries of (row, index of the measure, coefficient)."""
    rows, measures, amounts = zip(*listed, strict=True)
    return np.array(rows), np.array(measures), np.array(amounts)


def tallied(parts: Iterable[TallyEntries]) -> Tally:
    """The tally of some entries."""
    listed = list(parts)
    if not listed:
        return Tally(rows=np.zeros(0, dtype=np.int64), measures=(), matrix=np.zeros((0, 0)))
    all_rows, numbers, amounts = (
        np.concatenate([part[column] for part in listed]) for column in range(3)
    )
    used = np.flatnonzero(amounts)
    rows, position = np.unique(all_rows[used], return_inverse=True)
    measures, column = np.unique(numbers[used], return_inverse=True)
    shape = len(rows), len(measures)
    place = position * shape[1] + column
    matrix = np.bincount(place, amounts[used], shape[0] * shape[1]).reshape(shape)
    return Tally(rows=rows, measures=tuple(measures.tolist()), matrix=matrix)


class Quantity(IntEnum):
    """Additive quantities, per microbatch and device; those of collectives follow as counts and
    bytes by slot.
    """

    COMPUTE = 0  # seconds of kernels
    WEIGHT_GRADIENTS = 1  # the part of COMPUTE that computes weight gradients
    FLOPS = 2  # executed FLOPs
    GATHERED = 3  # bytes of parameters in use, if they are stored sharded (ZeRO 3)
    PARAMETERS = 4  # bytes of trained parameters, sharded as in compute
    PARAMETERS_SHARDED = 5  # the same, stored sharded where a dim divides
    STATE = 6  # bytes of optimizer state, sharded as in compute
    STATE_SHARDED = 7  # the same, stored sharded where a dim divides
    EXPERTS = 8  # bytes of parameters that the expert axis shards, sharded as in compute
    SAVED = 9  # bytes that the forward pass saves for the backward pass
    TEMPORARY = 10  # bytes of other values alive
    GRADIENT = 11  # bytes of gradients alive, if they are stored replicated (ZeRO 0, 1)
    GRADIENT_SHARDED = 12  # the same, if they are stored sharded (ZeRO 2, 3)
    COPY = 13  # bytes of copies of parameters that are saved, sharded as in compute
    COPY_SHARDED = 14  # the same, stored sharded where a dim divides
    #: bytes of accumulated gradients over the microbatches of a step, sharded as in compute
    ACCUMULATED = 15
    ACCUMULATED_SHARDED = 16  # the same, stored sharded where a dim divides
    HOST = 17  # host seconds to launch kernels
    #: bytes of layer parameters that are cast before the loop, all layers at once, sharded as in
    #: compute (ZeRO 0 to 2)
    CAST = 18
    FROZEN = 19  # bytes of parameters that are not trained, sharded as in compute
    FROZEN_SHARDED = 20  # the same, stored sharded where a dim divides
    CAST_SHARDED = 21  # bytes of the casts of `CAST`, stored sharded where a dim divides (ZeRO 3)
    #: bytes of gradients alive that are immediately added to the sums over microbatches
    ADDED = 22
    ADDED_SHARDED = 23  # the same, if they are stored sharded (ZeRO 2, 3)
    #: bytes of other values alive until weight gradients are computed last
    DEFERRED = 24
    PEELED = 25  # the same in loops whose gathers are pipelined (ZeRO 3)
    UNDEFERRED = 26  # bytes of gradients alive unless they are computed last (ZeRO 0, 1)
    #: bytes of stacks of gradients that are written as zeros before the head's backward pass
    ZEROED = 27
    ZEROED_SHARDED = 28
    #: bytes of what the peeled iteration of the backward loop recomputes (ZeRO 3)
    RECOMPUTED = 29


#: Rows of an array of quantities: `Quantity`, then the counts and then the bytes of every slot.
COUNTS, BYTES = len(Quantity), len(Quantity) + len(SLOTS)
ROWS = len(Quantity) + 2 * len(SLOTS)
#: Quantity of a correction -> rows.
CORRECTED: dict[str, tuple[Quantity, ...]] = {
    "compute": (Quantity.COMPUTE, Quantity.WEIGHT_GRADIENTS),
    "activations": (Quantity.SAVED, Quantity.COPY, Quantity.COPY_SHARDED),
    "temporaries": (
        Quantity.TEMPORARY,
        Quantity.DEFERRED,
        Quantity.PEELED,
        Quantity.UNDEFERRED,
        Quantity.RECOMPUTED,
    ),
    "communication": (Quantity.GATHERED,),
    "margin": (),
}


# --------------------------------------------------------------------------------------------------
# The coefficients of every term of a step: (row, measure, coefficient).
#
# A kernel of three executions adds three times its seconds to `Quantity.COMPUTE`; a gather of
# parameters adds to the count and the bytes of its slot, by `transfer_measures`.

#: Part of a resident value -> its row; those that ZeRO shards have a row for the unsharded and one
#: for the sharded bytes.
_PART_ROWS: dict[str, Quantity] = {
    "saved": Quantity.SAVED,
    "temporary": Quantity.TEMPORARY,
    "gathered": Quantity.GATHERED,
    "deferred": Quantity.DEFERRED,
    "peeled": Quantity.PEELED,
    "undeferred": Quantity.UNDEFERRED,
    "recomputed": Quantity.RECOMPUTED,
}
_SHARDED_PART_ROWS: dict[str, tuple[Quantity, Quantity]] = {
    "gradient": (Quantity.GRADIENT, Quantity.GRADIENT_SHARDED),
    "added": (Quantity.ADDED, Quantity.ADDED_SHARDED),
    "zeroed": (Quantity.ZEROED, Quantity.ZEROED_SHARDED),
    "copy": (Quantity.COPY, Quantity.COPY_SHARDED),
    "cast": (Quantity.CAST, Quantity.CAST_SHARDED),
}
#: Purpose of a transfer -> the role of its collectives, and their axis.
_ROLES: dict[str, tuple[str, Axis]] = {
    "tensor": ("block", TENSOR),
    "context": ("context", CONTEXT),
    "keys": ("keys", CONTEXT),
    "ring": ("ring", CONTEXT),
    "head_exchange": ("head_exchange", CONTEXT),
    "expert": ("block", EXPERT),
    "stage": ("stage", STAGE),
}


def transfer_measures(
    term: Transfer, segment: int, profile: FrameworkProfile
) -> list[tuple[Slot, LocalFraction, LocalFraction]]:
    """(slot, size, count) of the collectives of a transfer per microbatch, over `term.bytes.total`
    and over `term.trips`.
    """
    all_stages = segment == OUTSIDE_LAYERS and profile.outside_on_all_stages
    size, once = local_fraction(term.bytes), LocalFraction().times(*_condition(term))
    if term.purpose in _ROLES:
        role, axis = _ROLES[term.purpose]
        sharded = term.kind == "reduce-scatter"
        moved = size.times(OverAxis(axis.name)) if sharded else size
        return [(Slot(role, axis_group(axis), term.kind), moved, once)]
    if term.purpose == "ends":
        return [(Slot("ends", axis_group(STAGE), term.kind), size, once)] if all_stages else []
    if term.purpose == "sum":
        group = on_all_stages(token_group()) if all_stages else token_group()
        return [(Slot("ends" if all_stages else "block", group, "all-reduce"), size, once)]
    experts, tensor = sharded_by(term.spec, EXPERT.name), term.over_tensor
    sharded, replicated = (
        once.times(DividesStored(term.shape, term.spec, term.stack_dims, profile.flat, divides))
        for divides in (True, False)
    )
    if term.purpose == "gather":
        return [(Slot("gather", storage_group(experts=experts), "all-gather"), size, sharded)]
    all_tokens = token_group(experts=experts, tensor=tensor)
    shard = size.times(OverStoredShards(experts))
    same_shard = replica_group(tensor=tensor)
    if all_stages and not experts:
        all_tokens, same_shard = on_all_stages(all_tokens), on_all_stages(same_shard)
    shards = [
        (Slot("scatter", storage_group(experts=experts), "reduce-scatter"), shard, sharded),
        (Slot("scatter", same_shard, "all-reduce"), shard, sharded),
    ]
    reductions = [
        (Slot("reduce", all_tokens, "all-reduce"), size, once),
        (Slot("scatter", all_tokens, "all-reduce"), size, replicated),
    ]
    by_case = {"reduce-scatter": shards, "all-reduce": reductions, "repeated": shards[:1]}
    return by_case.get(term.case, [*shards, *reductions])


#: The host's launch of one kernel.
_LAUNCH = LocalFraction(multipliers=(LaunchSeconds(),))
#: One entry of a tally: row, measure, coefficient.
Coefficient = tuple[int, Measure, float]


def coefficients(segment: int, term: Term, profile: FrameworkProfile) -> Iterator[Coefficient]:
    """Yields (row of the tally, measure, coefficient) for a term of a segment."""
    match term:
        case Compute():
            return _compute(segment, term)
        case Transfer():
            return _transfer(segment, term, profile)
        case Resident():
            return _resident(term, profile)
        case Stored():
            return _stored(term, profile)


def _compute(segment: int, term: Compute) -> Iterator[Coefficient]:
    kernel = KernelSeconds(
        term if term.trips == 1 else replace(term, trips=1), segment == OUTSIDE_LAYERS
    )
    condition = _condition(term)
    yield Quantity.COMPUTE, kernel, term.trips
    if term.is_weight_gradient:
        yield Quantity.WEIGHT_GRADIENTS, kernel, term.trips
    flops = local_fraction(term.flops).times(*condition)
    yield Quantity.FLOPS, flops, term.flops.total * term.trips
    yield Quantity.HOST, _LAUNCH.times(*condition), term.trips


def _condition(term: Compute | Transfer | Resident) -> tuple[HeadsHold, ...]:
    return () if term.heads is None else (HeadsHold(term.heads),)


def _transfer(segment: int, term: Transfer, profile: FrameworkProfile) -> Iterator[Coefficient]:
    load = (BusiestLoad(term.routed),) if term.routed is not None else ()
    for slot, size, count in transfer_measures(term, segment, profile):
        number, size = SLOT_INDEX[slot], size.times(*count.multipliers, *load)
        yield COUNTS + number, count, term.trips
        yield BYTES + number, size, term.bytes.total * term.trips


def _stored_shares(
    unsharded: LocalFraction,
    shape: tuple[int, ...],
    spec: Spec,
    stack_dims: frozenset[int],
    profile: FrameworkProfile,
) -> tuple[LocalFraction, LocalFraction]:
    """Two measures whose sum is that of a stored array: sharded if it divides, and replicated if
    not.
    """
    sharded, replicated = (
        unsharded.times(DividesStored(shape, spec, stack_dims, profile.flat, divides))
        for divides in (True, False)
    )
    return sharded.times(OverStoredShards(sharded_by(spec, EXPERT.name))), replicated


def _resident(term: Resident, profile: FrameworkProfile) -> Iterator[Coefficient]:
    unsharded, size = local_fraction(term.bytes).times(*_condition(term)), term.bytes.total
    if term.part not in _SHARDED_PART_ROWS:
        yield _PART_ROWS[term.part], unsharded, size
        return
    row, sharded = _SHARDED_PART_ROWS[term.part]
    yield row, unsharded, size
    for shard in _stored_shares(unsharded, term.shape, term.spec, frozenset(), profile):
        yield sharded, shard, size


def _stored(term: Stored, profile: FrameworkProfile) -> Iterator[Coefficient]:
    unsharded = LocalFraction(
        tensor=sharded_by(term.spec, "tensor"), expert=sharded_by(term.spec, "expert")
    )
    shards = _stored_shares(unsharded, term.shape, term.spec, term.stack_dims, profile)
    elements = float(term.elements * term.count)
    if not term.trained:
        yield Quantity.FROZEN, unsharded, elements * term.itemsize
        for shard in shards:
            yield Quantity.FROZEN_SHARDED, shard, elements * term.itemsize
        return
    state = term.state if profile.state_bytes is None else profile.state_bytes
    sizes = (
        (Quantity.PARAMETERS, Quantity.PARAMETERS_SHARDED, term.itemsize),
        (Quantity.STATE, Quantity.STATE_SHARDED, state),
        (Quantity.ACCUMULATED, Quantity.ACCUMULATED_SHARDED, profile.gradient_bytes(term.itemsize)),
    )
    for row, sharded, size in sizes:
        yield row, unsharded, elements * size
        for shard in shards:
            yield sharded, shard, elements * size
    if sharded_by(term.spec, "expert"):
        yield Quantity.EXPERTS, unsharded, elements * term.itemsize


# --------------------------------------------------------------------------------------------------
# The entries of items in a tally under choices.
#
# Programs of a model differ in little: their forward passes are equal, and rematerialisation is the
# forward pass again. So items with equal `key` share their entries.

#: `TallyEntries` as lists.
_Listed = tuple[list[int], list[int], list[float]]


class ItemEntries:
    """Entries of items under choices; items with equal `key` share them.

    Args:
        index: the index of measures.
        profile: framework profile.
        segments: number of segments.
    """

    def __init__(self, index: MeasureIndex, profile: FrameworkProfile, segments: int) -> None:
        self.index, self.segments, self._profile = index, segments, profile
        self._numbers: dict[Hashable, int] = {}
        self._items: list[Item] = []
        self._entries: dict[Choice, dict[int, _Listed]] = {}
        self._of_terms: dict[tuple[bool, Term], _Listed] = {}  # few terms are distinct

    def index_of(self, item: Item) -> int:
        """The index of an item; items of one segment with equal `key` share it."""
        key = id(item) if item.key is None else (item.segment, item.key)
        number = self._numbers.setdefault(key, len(self._items))
        if number == len(self._items):
            self._items.append(item)
        return number

    def entries(self, choice: Choice, items: Iterable[tuple[int, int]]) -> TallyEntries:
        """The entries of some items, each from a segment on, under a choice."""
        cached = self._entries.setdefault(choice, {})
        rows, measures, amounts = list[int](), list[int](), list[float]()
        segments, counts = list[int](), list[int]()
        for segment, number in items:
            if number not in cached:
                cached[number] = self._item_entries(self._items[number], choice)
            own_rows, own_measures, own_amounts = cached[number]
            rows += own_rows
            measures += own_measures
            amounts += own_amounts
            segments.append(segment)
            counts.append(len(own_rows))
        offsets = np.repeat(np.array(segments) * ROWS, counts)
        return (
            np.array(rows, dtype=np.int64) + offsets,
            np.array(measures, dtype=np.int64),
            np.array(amounts),
        )

    def _item_entries(self, item: Item, choice: Choice) -> _Listed:
        rows, measures, amounts = list[int](), list[int](), list[float]()
        offset = item.segment % self.segments * ROWS
        for term in item.terms(choice):
            key = item.segment == OUTSIDE_LAYERS, term
            if key not in self._of_terms:
                self._of_terms[key] = self._term_entries(item.segment, term)
            own_rows, own_measures, own_amounts = self._of_terms[key]
            rows += [offset + row for row in own_rows]
            measures += own_measures
            amounts += own_amounts
        return rows, measures, amounts

    def _term_entries(self, segment: int, term: Term) -> _Listed:
        listed = [*coefficients(segment, term, self._profile)]
        return (
            [row for row, _, _ in listed],
            [self.index.index_of(measure) for _, measure, _ in listed],
            [amount for *_, amount in listed],
        )


# --------------------------------------------------------------------------------------------------
# Tallies of terms on one topology under one framework profile, for many degrees at once.


def transfer_collectives(
    term: Transfer, segment: int, degrees: Degrees, pricer: Pricer
) -> list[tuple[Slot, Array, Array]]:
    """(slot, bytes of each result, count) of the collectives of a transfer per microbatch; the
    count is 0 if it has none in that role.
    """
    return [
        (
            slot,
            term.bytes.total * evaluate(size, degrees, pricer.efficiency),
            term.trips * evaluate(count, degrees, pricer.efficiency),
        )
        for slot, size, count in transfer_measures(term, segment, pricer.profile)
    ]


#: Bytes that blockwise attention moves per score, forward and backward: about 6 and 14 passes over
#: scores in float32, which match the TPU compiler's cycles of a ring over 64 devices
#: (`benchmarks/long_context.py`: 339 s for 8.8e12 scores, forward, again and backward, at 2.76e12
#: bytes/s).
BLOCKWISE_SCORES: dict[str, float] = {"scores": 24.0, "scores_backward": 58.0}


class Pricer:
    """Tallies terms on one topology.

    Attributes:
        topology: the machine, with link rates as the framework's collectives reach them.
        profile: the framework profile.
        efficiency: efficiencies of the chips under the framework profile.
        outside_efficiency: the same for kernels outside of the layers, such as those of the loss.
        correction_factors: learned factor by quantity (`shardlib.cost.roofline`).
    """

    def __init__(self, topology: Topology, profile: FrameworkProfile = XLA) -> None:
        chip = topology.chip
        self.profile = profile
        efficiency = efficiency_of(chip.name, chip.vendor, profile.name, dict(topology.efficiency))
        self.efficiency: Efficiency = (
            replace(efficiency, **BLOCKWISE_SCORES) if profile.attention == "blocks" else efficiency
        )
        if profile.name == XLA.name and topology.chip.vendor == "nvidia":
            # jax.nn.dot_product_attention has one width for all heads
            self.efficiency = replace(self.efficiency, equal_widths=True)
        self.outside_efficiency = replace(
            self.efficiency, unfused=max(self.efficiency.unfused, profile.unfused_loss)
        )
        self.topology = with_reached_rates(topology, self.efficiency)
        self.correction_factors = {
            quantity: correction.factor
            for correction in applied(topology)
            for quantity in CORRECTED[correction.quantity]
        }

    def exposed_share(self, slots: Sequence[int]) -> Array:
        """Exposed share of the seconds of collectives, array [slots, 1]; the rest is hidden under
        adjacent matmuls, as the profile says.
        """
        hidden = {
            axis_group(TENSOR): self.profile.tensor_overlap or 0.0,
            axis_group(EXPERT): self.profile.expert_overlap or 0.0,
        }
        return np.array([[1.0 - hidden.get(SLOTS[slot].group, 0.0)] for slot in slots])

    def corrected(self, quantities: Array) -> Array:
        """Quantities with the factors applied: array [..., at most `ROWS`, degrees]."""
        if not self.correction_factors:
            return quantities
        factors = np.ones((ROWS, 1))
        for quantity, factor in self.correction_factors.items():
            factors[quantity] = factor
        return quantities * factors[: quantities.shape[-2]]

    def values(self, index: MeasureIndex, degrees: Degrees) -> MeasureValues:
        """The measures on some degrees."""
        return index.evaluated(
            self.topology.chip, self.efficiency, self.outside_efficiency, degrees
        )

    def tally_terms(
        self, terms: Iterable[tuple[int, Term]], degrees: Degrees, groups: int
    ) -> Array:
        """Quantities of (segment, term) pairs: array [groups + 2, `ROWS`, degrees]; the last two
        segments are `INSIDE_LAYER` and `OUTSIDE_LAYERS`.
        """
        index, segments = MeasureIndex(), groups + 2
        entries = [
            (segment % segments * ROWS + row, index.index_of(measure), amount)
            for segment, term in terms
            for row, measure, amount in coefficients(segment, term, self.profile)
        ]
        tally = tallied([tally_entries(entries)] if entries else [])
        total = np.zeros((segments * ROWS, len(degrees)))
        total[tally.rows] = tally.evaluated(self.values(index, degrees), np.arange(len(degrees)))
        return total.reshape(segments, ROWS, len(degrees))
