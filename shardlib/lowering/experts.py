"""Expert parallelism: tokens are dispatched to experts on other devices, and the results combined.

All functions are manual over the axes (`jax.shard_map`): arrays are one device's shards. Every form
is exact: results, gradients and drops are those of `shardlib.functions.experts` on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardlib import _moved
from shardlib.cost.framework import EXCHANGE_ROOM
from shardlib.errors import LayoutError, PlanError, ShardlibError
from shardlib.functions.experts import ExpertForm
from shardlib.jax_types import Function, Index
from shardlib.layout import Layout
from shardlib.lowering.collectives import DimAxes, Regions
from shardlib.lowering.contractions import ValueLayouts
from shardlib.lowering.uses import CallSite
from shardlib.lowering.weights import OperandReduction
from shardlib.machines.topology import topology
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.tracing.rewriting import recomputes

#: Earlier names of its parts are resolved by `shardlib._moved`.
__path__: list[str] = []

# --------------------------------------------------------------------------------------------------
# A grouped matmul: rows times the matrix of their group.
#
# `jax.lax.ragged_dot` has a kernel on TPU. On CPU and GPU it is expanded to a product of all rows
# with all matrices, with a copy of the rows for every group (JAX 0.10 and 0.12 with default
# settings; compiled for H100 ahead of time). Blocks of rows avoid this: every group's rows are
# divided into blocks, which are multiplied by its matrix one after another (the order of work of
# MegaBlocks, arXiv:2211.15841). The FLOPs are those of the rows plus less than a block per group,
# whatever the number of groups.

_Carry = TypeVar("_Carry")
#: Gradients of all groups, [G, D, F]; the sums of the current group, [D, F]; its index.
_Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The form of a grouped matmul.

    Attributes:
        kind: "ragged" for `jax.lax.ragged_dot`, "blocks" for blocks of rows.
        block: rows per block.
    """

    kind: str = "ragged"
    block: int = 128

    def __post_init__(self) -> None:
        if self.kind not in ("ragged", "blocks") or self.block < 1:
            raise LayoutError(
                f"rows cannot be grouped as {self.kind!r} in blocks of {self.block}\nTry: ragged,"
                " or blocks of 128"
            )

    def matmul(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """Products of rows with the matrix of their group.

        Args:
            rows: [M, D], in the order of the groups; rows beyond the last group are ignored.
            weights: [G, D, F].
            sizes: rows of every group, int32 [G].

        Returns:
            [M, F], zeros beyond the last group; the same holds for the gradient of the rows.
        """
        if self.kind == "blocks":
            return _in_blocks(self.block, rows, weights, sizes)
        # The kernel's output beyond the last group is undefined.
        in_group = (jnp.arange(rows.shape[0]) < sizes.sum())[:, None]
        grouped_rows = jnp.where(in_group, rows, 0)
        if weights.shape[0] == 1:  # libtpu 0.0.42 cannot compile the kernel for one group
            return grouped_rows @ weights[0]
        return jnp.where(in_group, jax.lax.ragged_dot(grouped_rows, weights, sizes), 0)


@dataclass(frozen=True, kw_only=True)
class _RowBlocks:
    """Blocks of the rows of every group, in order; a block starts where its group starts or the
    block before ends, and the last one of a group may be short.

    Attributes:
        count: number of blocks.
        block_ends: number of blocks up to and including each group, [G].
        starts, ends: first row and end of each group, [G].
        rows: number of rows, including those beyond the last group.
        block: rows per block.
    """

    count: jax.Array
    block_ends: jax.Array
    starts: jax.Array
    ends: jax.Array
    rows: int
    block: int

    @staticmethod
    def of(sizes: jax.Array, rows: int, block: int) -> _RowBlocks:
        block, ends = min(block, rows), jnp.cumsum(sizes)
        last = jnp.cumsum(-(-sizes // block))
        return _RowBlocks(
            count=last[-1], block_ends=last, starts=ends - sizes, ends=ends, rows=rows, block=block
        )

    def block_at(self, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(group, first row that is read, mask of the rows read that belong to the block
        [block, 1]).
        """
        group = jnp.sum(self.block_ends <= step)
        before = jnp.where(group > 0, self.block_ends[group - 1], 0)
        begin = self.starts[group] + (step - before) * self.block
        # The last blocks could extend beyond the rows.
        first = jnp.minimum(begin, self.rows - self.block)
        row = first + jnp.arange(self.block)
        return group, first, ((row >= begin) & (row < self.ends[group]))[:, None]

    def run(
        self, work: Callable[[_Carry, jax.Array, jax.Array, jax.Array], _Carry], start: _Carry
    ) -> _Carry:
        """Runs work(result so far, group, first row, rows of the block) for every block."""
        return jax.lax.fori_loop(
            0, self.count, lambda step, result: work(result, *self.block_at(step)), start
        )

    def read(self, array: jax.Array, first: jax.Array) -> jax.Array:
        """The rows of a block of an array [M, ...], from a first one on."""
        return jax.lax.dynamic_slice_in_dim(array, first, self.block)


def _grouped_matmul(
    block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Products [M, F] of rows [M, D] with weights [G, D, F]; transposed, [M, D] of rows [M, F]."""
    blocks = _RowBlocks.of(sizes, rows.shape[0], block)

    def work(
        result: jax.Array, group: jax.Array, first: jax.Array, in_block: jax.Array
    ) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)
        product = jax.lax.dot_general(
            blocks.read(rows, first),
            matrix,
            (((1,), (int(transposed),)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return jax.lax.dynamic_update_slice_in_dim(
            result,
            jnp.where(in_block, product.astype(result.dtype), blocks.read(result, first)),
            first,
            0,
        )

    return blocks.run(
        work, jnp.zeros((rows.shape[0], weights.shape[1 if transposed else 2]), rows.dtype)
    )


def _weight_gradient(
    block: int, rows: jax.Array, cotangent: jax.Array, weights: jax.Array, sizes: jax.Array
) -> jax.Array:
    """The gradient of the weights: sums over the rows of each group.

    The sums of one group are float32, and the stored sums have the dtype of the weights: blocks of
    a group are consecutive, and the last one stores the whole sum.
    """
    blocks = _RowBlocks.of(sizes, rows.shape[0], block)

    def work(carry: _Sums, group: jax.Array, first: jax.Array, in_block: jax.Array) -> _Sums:
        result, sums, last = carry
        a = jnp.where(in_block, blocks.read(rows, first), 0)
        b = jnp.where(in_block, blocks.read(cotangent, first), 0)
        product = jnp.dot(a.T, b, preferred_element_type=jnp.float32)
        sums = jnp.where(last == group, sums, 0) + product
        gradients = jax.lax.dynamic_update_index_in_dim(result, sums.astype(result.dtype), group, 0)
        return gradients, sums, group

    start = (
        jnp.zeros(weights.shape, weights.dtype),
        jnp.zeros(weights.shape[1:], jnp.float32),
        jnp.full((), -1, sizes.dtype),
    )
    return blocks.run(work, start)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _grouped_matmul(block, rows, weights, sizes)


def _grouped_forward(
    block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array
) -> tuple[Any, Any]:
    return _grouped_matmul(block, rows, weights, sizes), (rows, weights, sizes)


def _grouped_backward(
    block: int, saved: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, sizes = saved
    return (
        _grouped_matmul(block, cotangent, weights, sizes, transposed=True),
        _weight_gradient(block, rows, cotangent, weights, sizes),
        None,
    )


_in_blocks.defvjp(_grouped_forward, _grouped_backward)


#: The matrices of a device's experts: up, down, and gate if there is one.
Matrices = tuple[jax.Array, ...]
#: Rows of a message are a multiple of this number.
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class ExpertSharding:
    """Experts on a mesh.

    Attributes:
        expert: mesh axes that shard the experts, the major one first; empty if experts are
            replicated.
        ways: number of shards of the experts: the product of the sizes of these axes.
        tensor: mesh axes that shard the hidden width of an expert.
        every: the tokens' axes: every mesh axis that shards them, the major one first. It must
            include `expert`, or tokens would be multiplied twice.
        exchange: "dense" exchanges messages of equal size (`jax.lax.all_to_all`, on every
            platform), "ragged" only the rows there are (`jax.lax.ragged_all_to_all`, on TPU and
            GPU).
        grouped: the form of the grouped matmul.
        slack: message room: the rows that fit in a round, relative to even routing. Rows beyond
            it take another round.

    Raises:
        LayoutError: values that do not fit.
    """

    expert: tuple[str, ...]
    ways: int
    tensor: tuple[str, ...] = ()
    every: tuple[str, ...] = ()
    exchange: str = "dense"
    grouped: Grouped = field(default_factory=Grouped)
    slack: float = EXCHANGE_ROOM

    def __post_init__(self) -> None:
        if self.ways < 1 or (self.ways > 1) != bool(self.expert):
            raise LayoutError(
                f"experts on the axes {self.expert} are not sharded {self.ways} ways\n"
                "Try: the product of the sizes of the axes, 1 without axes"
            )
        if self.exchange not in ("dense", "ragged"):
            raise LayoutError(f"exchange {self.exchange!r} is not known\nTry: dense or ragged")
        if not (self.slack > 0 and math.isfinite(self.slack)):
            raise LayoutError(f"slack {self.slack} leaves no room for rows\nTry: 1.25")

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes, each once."""
        return tuple(dict.fromkeys((*self.every, *self.expert, *self.tensor)))

    def local(self, count: int) -> int:
        """Experts per device, of `count` in all."""
        if count % self.ways:
            raise LayoutError(
                f"{count} experts cannot be sharded over {'x'.join(self.expert)}={self.ways}"
                f" devices\nTry: an expert axis whose size divides {count}"
            )
        return count // self.ways

    def message_rows(self, assignments: int) -> int:
        """Rows of the message to one device in a round, given the number of assignments of a
        device's tokens.
        """
        if self.ways == 1:
            return assignments
        return min(assignments, -(-math.ceil(self.slack * assignments / self.ways) // ROWS) * ROWS)

    def receive_rows(self, assignments: int) -> int:
        """Rows that a device receives in a round of the ragged exchange, given the number of
        assignments of each device's tokens.
        """
        return min(assignments * self.ways, -(-math.ceil(self.slack * assignments) // ROWS) * ROWS)


#: Earlier name of `ExpertSharding`.
Where = ExpertSharding


# --------------------------------------------------------------------------------------------------
# Permutation of rows, with gathers alone in both directions.
#
# The gradient of a gather is a scatter-add, which is slow for wide rows. Since the permutation is
# known in both directions, the gradient is written as a gather as well.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def permuted(copies: int, rows: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Copies of rows, permuted.

    Args:
        rows: [N, D].
        sources: index of the copy in each of M result rows, int [M]; -1 for none.
        targets: result row of every copy, int [N copies]; -1 for none. The inverse of `sources`.

    Returns:
        [M, D], zeros where there is no copy.
    """
    return take_rows(rows, sources, copies)


def take_rows(rows: jax.Array, numbers: jax.Array, copies: int = 1) -> jax.Array:
    """Rows by the indices of their copies, zeros for -1.

    Args:
        rows: [N, D].
        numbers: indices of copies, int [M]; -1 for none.

    Returns:
        [M, D].
    """
    return jnp.where(
        (numbers >= 0)[:, None],
        jnp.take(rows, jnp.maximum(numbers, 0) // copies, axis=0, mode="clip"),
        0,
    )


def _permute_forward(
    copies: int, rows: jax.Array, sources: jax.Array, targets: jax.Array
) -> tuple[Any, Any]:
    return take_rows(rows, sources, copies), targets


def _permute_backward(
    copies: int, targets: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    returned = take_rows(cotangent, targets)
    if copies > 1:
        returned = (
            returned.reshape(-1, copies, returned.shape[1])
            .sum(1, dtype=jnp.float32)
            .astype(cotangent.dtype)
        )
    return returned, None, None


permuted.defvjp(_permute_forward, _permute_backward)


# --------------------------------------------------------------------------------------------------
# Routing of tokens to experts: their order, their destinations, and those that are dropped.
#
# Assignment i K + j is the j-th choice of the i-th token of the device. Assignments are sorted by
# expert, which is also the order of the devices that hold the experts; dropped ones come last.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routing:
    """The assignments of a device's tokens to experts, sorted.

    Attributes:
        expert: expert of each assignment, int32 [A]; E if dropped.
        order: assignments in sorted order, int32 [A].
        rank: position of each assignment in that order, int32 [A].
        starts: position of the first assignment of each expert, and the end, int32 [E + 1].
        counts: assignments of each device of the expert axes for each expert, int32 [X, E].
        rounds: number of exchange rounds for all assignments; the same on all devices.
    """

    expert: jax.Array
    order: jax.Array
    rank: jax.Array
    starts: jax.Array
    counts: jax.Array
    rounds: jax.Array


def routing_of(
    form: ExpertForm, sharding: ExpertSharding, chosen: jax.Array, count: int
) -> tuple[Routing, jax.Array]:
    """The sorted assignments of a device, and the number that all devices drop.

    Args:
        chosen: experts of the tokens of the device, int [N, K].
    """
    expert, dropped = chosen.reshape(-1).astype(jnp.int32), jnp.zeros((), jnp.int32)
    if form.capacity is not None:
        accepted = _accepted(form, sharding, chosen.astype(jnp.int32), count).reshape(-1)
        expert, dropped = jnp.where(accepted, expert, count), jnp.sum(~accepted, dtype=jnp.int32)
        dropped = jax.lax.psum(dropped, sharding.every) if sharding.every else dropped
    order, rank, starts = _sorted(expert, count)
    local_counts = jnp.diff(starts)[None]
    counts = (
        jax.lax.all_gather(local_counts, sharding.expert, axis=0, tiled=True)
        if sharding.expert
        else local_counts
    )
    return (
        Routing(
            expert=expert,
            order=order,
            rank=rank,
            starts=starts,
            counts=counts,
            rounds=_rounds(sharding, counts, expert.shape[0]),
        ),
        dropped,
    )


def _sorted(keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(order, rank, start of each key and the end of all [count + 1]) of a stable sort of keys."""
    order = jnp.argsort(keys).astype(jnp.int32)
    starts = jnp.searchsorted(jnp.take(keys, order), jnp.arange(count + 1, dtype=keys.dtype))
    return order, jnp.argsort(order).astype(jnp.int32), starts.astype(jnp.int32)


def _rounds(sharding: ExpertSharding, counts: jax.Array, assignments: int) -> jax.Array:
    """Number of rounds for the longest message between two devices (dense), or for the most rows
    that a device receives (ragged).
    """
    message_rows = sharding.message_rows(assignments)
    if sharding.ways == 1 or (sharding.exchange == "dense" and message_rows >= assignments):
        return jnp.ones((), jnp.int32)
    between = counts.reshape(sharding.ways, sharding.ways, -1).sum(2)  # from, to
    longest = between.max() if sharding.exchange == "dense" else between.sum(0).max()
    capacity = message_rows if sharding.exchange == "dense" else sharding.receive_rows(assignments)
    return jax.lax.pmax(jnp.maximum(-(-longest // capacity), 1).astype(jnp.int32), sharding.axes)


def _accepted(
    form: ExpertForm, sharding: ExpertSharding, chosen: jax.Array, count: int
) -> jax.Array:
    """Mask of the assignments [N, K] within the experts' capacity: first come, first served over
    the tokens of all devices in order; all first choices precede all second ones.
    """
    tokens, per_token = chosen.shape
    keys = (chosen + count * jnp.arange(per_token, dtype=jnp.int32)).T.reshape(-1)
    _, rank, starts = _sorted(keys, count * per_token)
    local_counts = jnp.diff(starts)[None]
    counts = (
        jax.lax.all_gather(local_counts, sharding.every, axis=0, tiled=True)
        if sharding.every
        else local_counts
    )
    device = jax.lax.axis_index(sharding.every) if sharding.every else 0
    totals = counts.sum(0).reshape(per_token, count)
    in_earlier_choices = (jnp.cumsum(totals, axis=0) - totals).reshape(-1)
    earlier = jnp.arange(counts.shape[0]) < device
    on_earlier_devices = jnp.where(earlier[:, None], counts, 0).sum(0)
    index = rank + jnp.take(in_earlier_choices + on_earlier_devices - starts[:-1], keys)
    return (
        (index < form.slots(tokens=tokens * counts.shape[0], per_token=per_token, experts=count))
        .reshape(per_token, tokens)
        .T
    )


# --------------------------------------------------------------------------------------------------
# Dispatch of rows to the devices of their experts and combine, in rounds of limited room.
#
# In a round of the dense exchange every device sends messages of the same size to all devices. In a
# round of the ragged exchange every device receives its next rows, from whichever devices have
# them.


@dataclass(frozen=True, kw_only=True)
class ExchangeRound:
    """One round.

    Attributes:
        sources: assignment in each row of the send buffer, int32 [H]; -1 for none.
        targets: row of each assignment there, int32 [A]; -1 if it is not sent.
        expert: local expert of each received row, int32 [M]; the number of local experts for none.
        dispatch: rows in the send buffer [H, D] -> received rows [M, D].
        combine: received rows [M, D] -> rows in the send buffer [H, D].
        ordered: whether received rows are in the order of the experts.
    """

    sources: jax.Array
    targets: jax.Array
    expert: jax.Array
    dispatch: Callable[[jax.Array], jax.Array]
    combine: Callable[[jax.Array], jax.Array]
    ordered: bool = False


def exchange_round(sharding: ExpertSharding, routing: Routing, number: Index) -> ExchangeRound:
    """The round with an index, from 0."""
    if sharding.ways == 1:
        return _without_exchange(routing)
    return (_dense if sharding.exchange == "dense" else _ragged)(sharding, routing, number)


def _without_exchange(routing: Routing) -> ExchangeRound:
    count, sorted_experts = routing.counts.shape[1], jnp.take(routing.expert, routing.order)
    sources = jnp.where(sorted_experts < count, routing.order, -1)
    return ExchangeRound(
        sources=sources,
        targets=jnp.where(routing.expert < count, routing.rank, -1),
        expert=sorted_experts,
        dispatch=lambda rows: rows,
        combine=lambda rows: rows,
        ordered=True,
    )


def _dense(sharding: ExpertSharding, routing: Routing, number: Index) -> ExchangeRound:
    count, assignments, size = routing.counts.shape[1], routing.order.shape[0], sharding.ways
    local, message_rows = sharding.local(count), sharding.message_rows(assignments)
    offset = number * message_rows
    first = routing.starts[:-1:local]
    index = first[:, None] + offset + jnp.arange(message_rows)
    sources = jnp.where(
        index < routing.starts[local::local, None], jnp.take(routing.order, index, mode="clip"), -1
    ).reshape(-1)
    device = routing.expert // local  # the number of devices for dropped assignments
    slot = routing.rank - jnp.take(first, device, mode="clip") - offset
    targets = jnp.where(
        (slot >= 0) & (slot < message_rows) & (device < size), device * message_rows + slot, -1
    )
    ends = jnp.cumsum(_local_counts(sharding, routing), axis=1)
    expert = jnp.sum(
        (offset + jnp.arange(message_rows))[None, :, None] >= ends[:, None, :], -1, dtype=jnp.int32
    ).reshape(-1)

    def exchanged(rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(
            rows.reshape(size, message_rows, -1),
            sharding.expert,
            split_axis=0,
            concat_axis=0,
            tiled=True,
        ).reshape(size * message_rows, -1)

    return ExchangeRound(
        sources=sources, targets=targets, expert=expert, dispatch=exchanged, combine=exchanged
    )


def _local_counts(sharding: ExpertSharding, routing: Routing) -> jax.Array:
    """Assignments of every device for every local expert, [X, L]."""
    local = sharding.local(routing.counts.shape[1])
    return jax.lax.dynamic_slice_in_dim(
        routing.counts, jax.lax.axis_index(sharding.expert) * local, local, axis=1
    )


def _ragged(sharding: ExpertSharding, routing: Routing, number: Index) -> ExchangeRound:
    assignments, local = routing.order.shape[0], sharding.local(routing.counts.shape[1])
    capacity = sharding.receive_rows(assignments)
    from_to = routing.counts.reshape(sharding.ways, sharding.ways, local).sum(2)
    # Rows for the first devices are sent first.
    send_starts = jnp.cumsum(from_to, axis=1) - from_to
    recv_starts = jnp.cumsum(from_to, axis=0) - from_to  # in the order of the senders
    start = jnp.clip(number * capacity - recv_starts, 0, from_to)
    size = jnp.clip((number + 1) * capacity - recv_starts, 0, from_to) - start
    input_offsets, output_offsets = send_starts + start, recv_starts + start - number * capacity
    axes = sharding.expert
    device = jax.lax.axis_index(axes)
    sends = input_offsets[device], size[device], output_offsets[device], size[:, device]
    reverse = output_offsets[:, device], size[:, device], input_offsets[:, device], size[device]
    ends = jnp.cumsum(_local_counts(sharding, routing).reshape(-1))
    row = number * capacity + jnp.arange(capacity)
    piece = jnp.sum(row[:, None] >= ends[None, :], -1, dtype=jnp.int32)
    base = _without_exchange(routing)
    return ExchangeRound(
        sources=base.sources,
        targets=base.targets,
        expert=jnp.where(piece < ends.shape[0], piece % local, local),
        dispatch=partial(_exchange, axes, (capacity, assignments), sends, reverse),
        combine=partial(_exchange, axes, (assignments, capacity), reverse, sends),
    )


#: One direction of an exchange, int32 [X] each: offset of the rows sent to each device, their
#: number, their offset on the receiver, and the number of rows received from each device.
_Sizes = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(
    axes: tuple[str, ...], buffers: tuple[int, int], sizes: _Sizes, reverse: _Sizes, rows: jax.Array
) -> jax.Array:
    """Rows after an exchange; zeros in rows of the buffer that receive none.

    Args:
        buffers: sizes of the receive buffer and of the send buffer, rows.
        reverse: the sizes of the reverse exchange.
    """
    out = jnp.zeros((buffers[0], rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(rows, out, *sizes, axis_name=axes)


_exchange.defvjp(
    lambda axes, buffers, sizes, reverse, rows: (
        _exchange(axes, buffers, sizes, reverse, rows),
        (reverse, sizes),
    ),
    lambda axes, buffers, reverse, cotangent: (
        None,
        None,
        _exchange(axes, buffers[::-1], *reverse, cotangent),
    ),
)


# --------------------------------------------------------------------------------------------------
# Tokens visit experts in rounds: one if routing is roughly even, more if it is skewed.
#
# The first round is differentiated by JAX. Further ones are a loop, usually with zero iterations:
# its backward pass is a loop of its own that recomputes every round, so that only one round of them
# is in memory. Skewed routing costs time, but no memory, and does not change results.
#
# The backward pass of the first round saves what it cannot recompute without another matmul or
# message (`KEPT`): rows as they are multiplied, inputs of activation functions, combined results,
# and the permutations. Activations, and rows in the send buffers, are recomputed.

#: Prefix in the names of operations of further rounds.
OVERFLOW = "shardlib_overflow"
#: Name of the values that the first round saves for the backward pass
#: (`jax.ad_checkpoint.checkpoint_name`).
KEPT = "shardlib_expert_rows"


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The dispatch, expert computation and combine of one call."""

    form: ExpertForm
    sharding: ExpertSharding

    def all(
        self, routing: Routing, x: jax.Array, weights: jax.Array, parameters: Matrices
    ) -> jax.Array:
        """Weighted results [N, D] of the assignments of all rounds; partial sums if the hidden
        width is sharded.

        Args:
            x: tokens [N, D].
            weights: of the chosen experts, [N, K].
        """
        if self.sharding.ways == 1 or (
            self.sharding.exchange == "dense"
            and self.sharding.message_rows(weights.size) >= weights.size
        ):
            return self.round(routing, 0, x, weights, parameters)
        overflow, *arguments = cast(
            tuple[Any, ...], _overflow(self, routing, x, weights, parameters)
        )
        return self.round(routing, 0, *arguments) + overflow

    def round(
        self,
        routing: Routing,
        number: Index,
        x: jax.Array,
        weights: jax.Array,
        parameters: Matrices,
    ) -> jax.Array:
        """`all`, for the assignments of one round."""
        per_token = weights.shape[1]
        exchange = exchange_round(self.sharding, routing, number)
        sources, targets, expert = map(save, (exchange.sources, exchange.targets, exchange.expert))
        rows = exchange.dispatch(permuted(per_token, x, sources, targets))
        returned = save(
            permuted(
                1,
                exchange.combine(self._experts(rows, expert, parameters, ordered=exchange.ordered)),
                targets,
                sources,
            )
        )
        return jnp.einsum(
            "nk,nkd->nd", weights.astype(returned.dtype), returned.reshape(*weights.shape, -1)
        )

    def _experts(
        self, rows: jax.Array, expert: jax.Array, parameters: Matrices, *, ordered: bool
    ) -> jax.Array:
        """Results [M, D] of rows [M, D] for the local experts [M]."""
        if ordered:
            return self._multiplied(rows, expert, parameters)
        order = save(jnp.argsort(expert))
        rank = save(jnp.argsort(order))
        return permuted(
            1,
            self._multiplied(permuted(1, rows, order, rank), jnp.take(expert, order), parameters),
            rank,
            order,
        )

    def _multiplied(self, rows: jax.Array, expert: jax.Array, parameters: Matrices) -> jax.Array:
        """`_experts`, for rows in the order of their experts."""
        up, down, *gate = (array.astype(rows.dtype) for array in parameters)
        sizes = jnp.diff(
            jnp.searchsorted(expert, jnp.arange(up.shape[0] + 1, dtype=expert.dtype))
        ).astype(jnp.int32)
        grouped, rows = self.sharding.grouped, save(rows)
        hidden = save(grouped.matmul(rows, up, sizes))
        gates = save(grouped.matmul(rows, gate[0], sizes)) if gate else None
        return grouped.matmul(self.form.activated(hidden, gates), down, sizes)


def save(array: jax.Array) -> jax.Array:
    """An array that is saved for the backward pass."""
    return checkpoint_name(array, KEPT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _overflow(
    work: Rounds, routing: Routing, x: jax.Array, weights: jax.Array, parameters: Matrices
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Results of all rounds but the first, and the other arguments unchanged.

    The first round reads the arguments returned here, so that its gradients come back through this
    function, which adds those of further rounds to them in place.
    """

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, result = state
        return number + 1, result + work.round(routing, number, x, weights, parameters)

    with jax.named_scope(OVERFLOW):
        return (
            jax.lax.while_loop(
                lambda state: state[0] < routing.rounds,
                step,
                (jnp.ones((), jnp.int32), jnp.zeros_like(x)),
            )[1],
            x,
            weights,
            parameters,
        )


def _overflow_forward(
    work: Rounds, routing: Routing, x: jax.Array, weights: jax.Array, parameters: Matrices
) -> tuple[Any, Any]:
    return _overflow(work, routing, x, weights, parameters), (routing, x, weights, parameters)


def _overflow_backward(
    work: Rounds, saved: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    routing, *leaves = saved
    overflow, *gradients = cotangents

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        number, sums = state
        pull = jax.vjp(lambda *leaves: work.round(routing, number, *leaves), *leaves)[1]
        return number + 1, jax.tree.map(jnp.add, sums, list(pull(overflow)))

    with jax.named_scope(OVERFLOW):
        summed = jax.lax.while_loop(
            lambda state: state[0] < routing.rounds, step, (jnp.ones((), jnp.int32), gradients)
        )[1]
    return None, *summed


_overflow.defvjp(_overflow_forward, _overflow_backward)


def with_saved_names(run: Function, *names: str) -> Function:
    """A function that saves its arguments and the values with one of the names
    (`jax.ad_checkpoint.checkpoint_name`), and nothing else, under any policy of a `jax.checkpoint`
    around it.

    With `jax.checkpoint` alone, an outer policy that saves everything would save the rest as well.
    """
    saver = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))
    call = jax.custom_vjp(run)
    call.defvjp(lambda *arrays: jax.vjp(saver, *arrays), lambda pull, cotangents: pull(cotangents))
    return call


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Parts of a region's result, added over axes that replicate it.

    `jax.shard_map` without `check_vma` divides the result's gradient among those axes, and that of
    `jax.lax.psum` adds it up again: an all-reduce of what all devices have.
    """
    return jax.lax.psum(parts, axes)


_summed.defvjp(
    lambda parts, axes: (jax.lax.psum(parts, axes), None),
    lambda axes, _, gradient: (gradient * jax.lax.psum(1, axes),),
)


def routed(
    form: ExpertForm,
    sharding: ExpertSharding,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`shardlib.functions.experts.visit`, inside a region that is manual over `sharding.axes`.

    Rows of tokens are sent to their experts and back; weights of experts are not moved. It is
    differentiated from outside the region, by `jax.shard_map`, which sums gradients of replicated
    arguments.

    Args:
        up, down, gate: matrices of the experts of this device, [E / X, ...] with hidden dims of
            F / T: the i-th of the X devices that share experts has the i-th part.
    """
    per_token = chosen.shape[-1]
    routing, dropped = routing_of(
        form, sharding, chosen.reshape(-1, per_token), up.shape[0] * sharding.ways
    )
    routing = jax.tree.map(save, routing)
    parameters = (up, down) if gate is None else (up, down, gate)
    result = (
        Rounds(form=form, sharding=sharding)
        .all(routing, x.reshape(-1, x.shape[-1]), weights.reshape(-1, per_token), parameters)
        .reshape(x.shape)
    )
    return (_summed(result, sharding.tensor) if sharding.tensor else result), dropped


# --------------------------------------------------------------------------------------------------
# A call of `shardlib.functions.experts.visit` with tokens and experts sharded.

#: Names of the gathered matrices of experts, and of gathered tokens that tensor shards.
GATHERED = "shardlib_gathered"
#: Hidden dim of an expert's matrices [E, D, F] (up, gate) and [E, F, D] (down).
_HIDDEN = {"up": 2, "down": 1, "gate": 2}


@dataclass(frozen=True, kw_only=True)
class ExpertMatrix:
    """Layout of one operand of experts.

    Attributes:
        stored: its sharding on entry.
        gathered: by dim, the (minor) mesh axes that it is gathered over before use.
    """

    stored: DimAxes
    gathered: DimAxes

    @staticmethod
    def of(
        parameter: ParameterLayout | None,
        dims: Sequence[int | None],
        shape: Sequence[int],
        compute: DimAxes,
        regions: Regions,
    ) -> ExpertMatrix:
        """An operand that is a parameter, or a layer of it, enters in its stored sharding; another
        operand in the compute sharding.

        Args:
            parameter: its layouts; None for an operand that is not a parameter.
            dims: for each dim of the operand, the dim of the parameter, or None.
        """
        stored: DimAxes = (
            {}
            if parameter is None
            else {
                dim: parameter.rest[origin] for dim, origin in enumerate(dims) if origin is not None
            }
        )
        fits = parameter is not None and all(
            stored.get(dim, ())[: len(compute.get(dim, ()))] == compute.get(dim, ())
            and shape[dim] % regions.ways(stored.get(dim, ())) == 0
            for dim in range(3)
        )
        if not fits or (
            parameter is not None
            and {axis for axes in stored.values() for axis in axes}
            != set(parameter.rest.axes) - {"stage"}
        ):
            stored = compute
        return ExpertMatrix(
            stored=stored,
            gathered={dim: axes[len(compute.get(dim, ())) :] for dim, axes in stored.items()},
        )

    def gather(self, array: jax.Array, regions: Regions) -> jax.Array:
        """The operand in its compute sharding; inside the region. Its gradient is reduce-scattered
        as others are (`shardlib.lowering.weights`).
        """
        reduction = OperandReduction(
            scattered={dim: axes for dim, axes in self.gathered.items() if axes}, all_reduced=()
        )

        def forward(array: jax.Array) -> jax.Array:
            for dim, axes in self.gathered.items():
                array = regions.all_gather(array, dim, axes)
            return array

        run = jax.custom_vjp(forward)
        run.defvjp(
            lambda array: (forward(array), None),
            lambda _, cotangent: (reduction.apply(cotangent, regions, stacked=True),),
        )
        return run(array)


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """The shardings of a call.

    Attributes:
        tokens: mesh axes that shard batch and sequence of the tokens.
        hidden: mesh axes that shard the hidden width, over which results are summed.
        scattered: whether these shard the sequence of tokens and results outside.
        matrices: up, down, and gate if there is one.
    """

    form: ExpertForm
    sharding: ExpertSharding
    tokens: tuple[tuple[str, ...], ...]
    hidden: tuple[str, ...]
    scattered: bool
    matrices: tuple[ExpertMatrix, ...]

    def local(
        self,
        regions: Regions,
        x: jax.Array,
        weights: jax.Array,
        chosen: jax.Array,
        *parameters: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The computation of one device, inside the manual region."""

        def run(
            x: jax.Array, weights: jax.Array, chosen: jax.Array, *parameters: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            used = [
                checkpoint_name(matrices.gather(array, regions), GATHERED)
                for matrices, array in zip(self.matrices, parameters, strict=True)
            ]
            # Gathered here, and not on entry, tokens are gathered in their own dtype, the backward
            # pass saves shards of them, and their gradient is reduce-scattered.
            if self.scattered:
                x = checkpoint_name(
                    jax.lax.all_gather(x, self.hidden, axis=1, tiled=True), GATHERED
                )
            return routed(self.form, self.sharding, x, weights, chosen, *used)

        # The backward pass gathers matrices and tokens again, since those of all layers are the
        # whole model; except in a rematerialised layer, where those gathered by the recomputed
        # forward pass are reused.
        result, dropped = with_saved_names(run, KEPT, *([GATHERED] if recomputes() else []))(
            x, weights, chosen, *parameters
        )
        if not self.hidden:
            return result, dropped
        return (
            jax.lax.psum_scatter(result, self.hidden, scatter_dimension=1, tiled=True)
            if self.scattered
            else _summed(result, self.hidden)
        ), dropped


def lower_experts(
    site: CallSite,
    plan: Plan,
    parameters: Sequence[ParameterLayout | None],
    layouts: ValueLayouts,
    regions: Regions,
) -> Callable[..., Sequence[jax.Array]] | None:
    """The replacement of a call of experts; None if it is left to automatic partitioning, which
    gathers all tokens.

    Args:
        parameters: layouts of the operands that are parameters; None for others.
    """
    layout, grouped = layouts.get(site.layout_key(0)), _grouped_form(plan, regions)
    if (
        plan.mesh.devices == plan.mesh["stage"] and grouped.kind == "blocks"
        # one device has all of a layer; as it is written, the call would multiply all rows by all
        # matrices
    ):
        return lambda *arrays: list(
            routed(site.call.form, ExpertSharding(expert=(), ways=1, grouped=grouped), *arrays)
        )
    if plan.experts == "none":
        return None
    if layout is None or len(layout) < 2:
        raise PlanError(
            f"experts={plan.experts!r} needs to know how the tokens of {site.call.path} are"
            " sharded, and the plan has no layout of them\nTry: tokens [batch, sequence, features],"
            " or experts='none'"
        )
    lowered = _expert_call(site, parameters, layout, grouped, regions)
    batch, sequence = lowered.tokens
    rows, x_spec = (
        PartitionSpec(*(axes or None for axes in (batch, seq)[: len(layout) - 1]))
        for seq in (sequence, (*sequence, *lowered.hidden) if lowered.scattered else sequence)
    )
    specs = (x_spec, rows, rows, *(regions.spec(matrix.stored, 3) for matrix in lowered.matrices))
    run = regions.manual(
        lambda *local: lowered.local(regions, *local), specs, (x_spec, PartitionSpec())
    )

    def call(*arrays: jax.Array) -> list[jax.Array]:
        # Matrices are gathered, and their gradients summed, in the compute dtype, as for other
        # weights.
        return list(run(*arrays[:3], *(array.astype(arrays[0].dtype) for array in arrays[3:])))

    return call


def _expert_call(
    site: CallSite,
    parameters: Sequence[ParameterLayout | None],
    tokens: Layout,
    grouped: Grouped,
    regions: Regions,
) -> ExpertCall:
    """The shardings of a call, see `lower_experts`; `tokens` is the layout of its tokens."""
    form = site.call.form
    expert_axes, hidden_axes = _matrix_axes(site, parameters[3], regions)
    # Capacities count tokens in the order of the whole sequence.
    seq = (
        ()
        if form.capacity is not None or len(tokens) < 3
        else tuple(axis for axis in tokens[1] if axis not in hidden_axes and axis != "tensor")
    )
    batch, sequence = regions.physical_axes(tokens[0]), regions.physical_axes(seq)
    sharding = ExpertSharding(
        expert=regions.physical_axes(expert_axes),
        ways=regions.ways(expert_axes),
        every=(*batch, *sequence),
        grouped=grouped,
    )
    return ExpertCall(
        form=form,
        sharding=sharding,
        tokens=(batch, sequence),
        hidden=regions.physical_axes(hidden_axes),
        scattered=bool(hidden_axes) and len(tokens) > 2 and tokens[1] == (*seq, *hidden_axes),
        matrices=tuple(
            ExpertMatrix.of(
                parameters[3 + k],
                () if (view := site.views[3 + k]) is None else view.dims,
                site.avals[3 + k].shape,
                {0: expert_axes, _HIDDEN[name]: hidden_axes},
                regions,
            )
            for k, name in enumerate(("up", "down", "gate")[: len(site.avals) - 3])
        ),
    )


def _matrix_axes(
    site: CallSite, up: ParameterLayout | None, regions: Regions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that shard the experts, and those that shard their hidden width."""
    view, shape = site.views[3], site.avals[3].shape
    if up is None or view is None:
        return (), ()
    experts, _, width = (() if origin is None else up.compute[origin] for origin in view.dims)
    experts_size, tensor = regions.ways(("expert",)), regions.ways(("tensor",))
    return (
        tuple(
            axis
            for axis in experts
            if axis == "expert" and experts_size > 1 and shape[0] % experts_size == 0
        ),
        tuple(axis for axis in width if axis == "tensor" and shape[2] % tensor == 0),
    )


def _grouped_form(plan: Plan, regions: Regions) -> Grouped:
    """The form of the grouped matmul: TPUs have a kernel for it."""
    try:
        tpu = topology(plan.topology).chip.vendor == "google"
    except ShardlibError:  # a user-defined topology
        tpu = regions.torus
    return Grouped(kind="ragged" if tpu else "blocks")


_moved.keep_name(__name__, "routed")
