"""Expert parallelism: tokens are dispatched to experts on other devices, and their results
combined.

All of it is for functions that are manual over the axes (`jax.shard_map`): arrays are what one
device holds. Every form is exact: results, gradients and drops are those of
`shardlib.functions.experts` on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardlib.cost.framework import EXCHANGE_ROOM
from shardlib.errors import LayoutError, PlanError, ShardlibError
from shardlib.functions.experts import ExpertForm
from shardlib.jax_types import Function, Index
from shardlib.layout import Layout
from shardlib.lowering.collectives import Cuts, Machine
from shardlib.lowering.uses import Site
from shardlib.lowering.weights import Reduction
from shardlib.machines.topology import topology
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.tracing.rewriting import recomputes

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []

# --------------------------------------------------------------------------------------------------
# A matmul of rows with the matrix of their group.
#
# `jax.lax.ragged_dot` is a kernel of its own on TPU. On CPU and GPU it is expanded to a product of
# all rows with all matrices, with a copy of the rows for every group (JAX 0.10 and 0.12 as they
# are set by default; compiled for H100 ahead of time). Blocks of rows do without it: every group's
# rows are cut into blocks, which are multiplied with its matrix one after another (the order of
# work of MegaBlocks, arXiv:2211.15841), so that the FLOPs are those of the rows and of less than a
# block a group, whatever the number of groups.

_Carry = TypeVar("_Carry")
#: Gradients of all groups, [G, D, F]; the sums of one, [D, F]; which one.
_Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The form of a grouped matmul.

    Attributes:
        kind: "ragged" for `jax.lax.ragged_dot`, "blocks" for blocks of rows.
        block: rows of a block.
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
            rows: [M, D], in the order of the groups; what is beyond the last group is not read.
            weights: [G, D, F].
            sizes: rows of every group, int32 [G].

        Returns:
            [M, F], zeros beyond the last group; the same holds for the gradient of the rows.
        """
        if self.kind == "blocks":
            return _in_blocks(self.block, rows, weights, sizes)
        # What a kernel leaves beyond the last group is not defined.
        real = (jnp.arange(rows.shape[0]) < sizes.sum())[:, None]
        grouped_rows = jnp.where(real, rows, 0)
        if weights.shape[0] == 1:  # libtpu 0.0.42 makes no program of a kernel for one group
            return grouped_rows @ weights[0]
        return jnp.where(real, jax.lax.ragged_dot(grouped_rows, weights, sizes), 0)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Blocks of the rows of every group, in order; a block begins where its group does or where the
    block before ends, and the last one of a group may be short.

    Attributes:
        count: number of blocks.
        last: number of blocks up to each group, [G].
        starts, ends: rows of each group, [G].
        rows: rows of all groups, and those beyond.
        block: rows of a block.
    """

    count: jax.Array
    last: jax.Array
    starts: jax.Array
    ends: jax.Array
    rows: int
    block: int

    @staticmethod
    def of(sizes: jax.Array, rows: int, block: int) -> _Steps:
        block, ends = min(block, rows), jnp.cumsum(sizes)
        last = jnp.cumsum(-(-sizes // block))
        return _Steps(
            count=last[-1], last=last, starts=ends - sizes, ends=ends, rows=rows, block=block
        )

    def at(self, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(group, first row that is read, which of the rows read are of the block [block, 1])."""
        group = jnp.sum(self.last <= step)
        before = jnp.where(group > 0, self.last[group - 1], 0)
        begin = self.starts[group] + (step - before) * self.block
        # The last blocks would end beyond the rows.
        first = jnp.minimum(begin, self.rows - self.block)
        row = first + jnp.arange(self.block)
        return group, first, ((row >= begin) & (row < self.ends[group]))[:, None]

    def run(
        self, work: Callable[[_Carry, jax.Array, jax.Array, jax.Array], _Carry], start: _Carry
    ) -> _Carry:
        """Runs work(result so far, group, first row, rows of the block) for every block."""
        return jax.lax.fori_loop(
            0, self.count, lambda step, result: work(result, *self.at(step)), start
        )

    def read(self, array: jax.Array, first: jax.Array) -> jax.Array:
        """Rows of an array [M, ...] from a first one on."""
        return jax.lax.dynamic_slice_in_dim(array, first, self.block)


def _product(
    block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, turned: bool = False
) -> jax.Array:
    """Products [M, F] of rows [M, D] with weights [G, D, F]; or, turned, [M, D] of rows [M, F]."""
    steps = _Steps.of(sizes, rows.shape[0], block)

    def work(
        result: jax.Array, group: jax.Array, first: jax.Array, in_block: jax.Array
    ) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)
        product = jax.lax.dot_general(
            steps.read(rows, first),
            matrix,
            (((1,), (int(turned),)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return jax.lax.dynamic_update_slice_in_dim(
            result,
            jnp.where(in_block, product.astype(result.dtype), steps.read(result, first)),
            first,
            0,
        )

    return steps.run(
        work, jnp.zeros((rows.shape[0], weights.shape[1 if turned else 2]), rows.dtype)
    )


def _outer(
    block: int, rows: jax.Array, cotangent: jax.Array, weights: jax.Array, sizes: jax.Array
) -> jax.Array:
    """The gradient of the weights: sums over the rows of each group.

    The sums of one group are float32, and what is kept of all has the dtype of the weights: blocks
    of a group follow each other, and the last one leaves the whole sum.
    """
    steps = _Steps.of(sizes, rows.shape[0], block)

    def work(carry: _Sums, group: jax.Array, first: jax.Array, in_block: jax.Array) -> _Sums:
        result, sums, last = carry
        a = jnp.where(in_block, steps.read(rows, first), 0)
        b = jnp.where(in_block, steps.read(cotangent, first), 0)
        product = jnp.dot(a.T, b, preferred_element_type=jnp.float32)
        sums = jnp.where(last == group, sums, 0) + product
        weights_so_far = jax.lax.dynamic_update_index_in_dim(
            result, sums.astype(result.dtype), group, 0
        )
        return weights_so_far, sums, group

    start = (
        jnp.zeros(weights.shape, weights.dtype),
        jnp.zeros(weights.shape[1:], jnp.float32),
        jnp.full((), -1, sizes.dtype),
    )
    return steps.run(work, start)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _product(block, rows, weights, sizes)


def _grouped_forward(
    block: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array
) -> tuple[Any, Any]:
    return _product(block, rows, weights, sizes), (rows, weights, sizes)


def _grouped_backward(
    block: int, saved: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, sizes = saved
    return (
        _product(block, cotangent, weights, sizes, turned=True),
        _outer(block, rows, cotangent, weights, sizes),
        None,
    )


_in_blocks.defvjp(_grouped_forward, _grouped_backward)


# --------------------------------------------------------------------------------------------------
# Mesh axes of experts and tokens, and the forms of exchange and matmul.

#: Rows of a message are a multiple of it.
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Where:
    """Experts on a mesh.

    Attributes:
        expert: mesh axes that share the experts, the major one first; empty where every device has
            all of them.
        ways: devices that share the experts: the product of the sizes of these axes.
        tensor: mesh axes that shard the hidden width of an expert.
        every: mesh axes that shard the tokens, the major one first; those of `expert` are among
            them, if tokens are not to be multiplied twice.
        exchange: "dense" exchanges messages of equal size (`jax.lax.all_to_all`, on every
            platform), "ragged" what is to be sent and no more (`jax.lax.ragged_all_to_all`, on TPU
            and GPU).
        grouped: how rows are multiplied with the matrix of their expert.
        slack: rows that there is room for in a round over those of an even routing; what does not
            fit takes another round.

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
                f"experts on the axes {self.expert} are not shared in {self.ways} ways\nTry: the"
                " product of the sizes of the axes, 1 without axes"
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
        """Experts of one device, of `count` in all."""
        if count % self.ways:
            raise LayoutError(
                f"{count} experts cannot be shared by {'x'.join(self.expert)}={self.ways}"
                f" devices\nTry: an expert axis whose size divides {count}"
            )
        return count // self.ways

    def room(self, assignments: int) -> int:
        """Rows of the message to one device in a round, for so many assignments of the tokens of a
        device.
        """
        if self.ways == 1:
            return assignments
        return min(assignments, -(-math.ceil(self.slack * assignments / self.ways) // ROWS) * ROWS)

    def window(self, assignments: int) -> int:
        """Rows that arrive at a device in a round of the ragged exchange, for so many assignments
        of the tokens of each.
        """
        return min(assignments * self.ways, -(-math.ceil(self.slack * assignments) // ROWS) * ROWS)


# --------------------------------------------------------------------------------------------------
# Rows from place to place, with gathers alone in both directions.
#
# The gradient of a gather is a scatter that adds, which is slow where rows are wide. Where it is
# known which row every place takes and which places every row goes to, the gradient is a gather as
# well.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def moved(copies: int, rows: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """Copies of rows in their places.

    Args:
        rows: [N, D].
        there: number of the copy that is in each of M places, int [M]; -1 for none.
        back: place of every copy, int [N copies]; -1 where it has none. The reverse of `there`.

    Returns:
        [M, D], zeros where there is no copy.
    """
    return taken(rows, there, copies)


def taken(rows: jax.Array, numbers: jax.Array, copies: int = 1) -> jax.Array:
    """Rows by the numbers of their copies, zeros for -1.

    Args:
        rows: [N, D].
        numbers: of copies, int [M]; -1 for none.

    Returns:
        [M, D].
    """
    return jnp.where(
        (numbers >= 0)[:, None],
        jnp.take(rows, jnp.maximum(numbers, 0) // copies, axis=0, mode="clip"),
        0,
    )


def _permute_forward(
    copies: int, rows: jax.Array, there: jax.Array, back: jax.Array
) -> tuple[Any, Any]:
    return taken(rows, there, copies), back


def _permute_backward(
    copies: int, back: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    home = taken(cotangent, back)
    if copies > 1:
        home = (
            home.reshape(-1, copies, home.shape[1])
            .sum(1, dtype=jnp.float32)
            .astype(cotangent.dtype)
        )
    return home, None, None


moved.defvjp(_permute_forward, _permute_backward)


# --------------------------------------------------------------------------------------------------
# Assignments of tokens to experts: their order, their destinations, and those that are dropped.
#
# Assignment i K + j is the j-th choice of the i-th token of the device. Assignments wait in the
# order of their experts, which is that of the devices that hold them; those that are dropped come
# last.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Queue:
    """The assignments of a device.

    Attributes:
        expert: of every assignment, int32 [A]; E where it is dropped.
        order: assignments as they wait, int32 [A].
        rank: place of every assignment among them, int32 [A].
        starts: place of the first assignment of every expert, and their end, int32 [E + 1].
        counts: assignments of every device of the expert axes for every expert, int32 [X, E].
        rounds: how often devices exchange rows until all have been everywhere; the same number on
            all devices.
    """

    expert: jax.Array
    order: jax.Array
    rank: jax.Array
    starts: jax.Array
    counts: jax.Array
    rounds: jax.Array


def queue_of(
    form: ExpertForm, axes: Where, chosen: jax.Array, count: int
) -> tuple[Queue, jax.Array]:
    """The queue of a device, and the number of assignments that all devices drop.

    Args:
        chosen: experts of the tokens of the device, int [N, K].
    """
    expert, dropped = chosen.reshape(-1).astype(jnp.int32), jnp.zeros((), jnp.int32)
    if form.capacity is not None:
        accepted = _kept(form, axes, chosen.astype(jnp.int32), count).reshape(-1)
        expert, dropped = jnp.where(accepted, expert, count), jnp.sum(~accepted, dtype=jnp.int32)
        dropped = jax.lax.psum(dropped, axes.every) if axes.every else dropped
    order, rank, starts = _sorted(expert, count)
    local_counts = jnp.diff(starts)[None]
    counts = (
        jax.lax.all_gather(local_counts, axes.expert, axis=0, tiled=True)
        if axes.expert
        else local_counts
    )
    return (
        Queue(
            expert=expert,
            order=order,
            rank=rank,
            starts=starts,
            counts=counts,
            rounds=_rounds(axes, counts, expert.shape[0]),
        ),
        dropped,
    )


def _sorted(keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(order, rank, start of each key and the end of all [count + 1]) of keys, those that are equal
    in the order that they have.
    """
    order = jnp.argsort(keys).astype(jnp.int32)
    starts = jnp.searchsorted(jnp.take(keys, order), jnp.arange(count + 1, dtype=keys.dtype))
    return order, jnp.argsort(order).astype(jnp.int32), starts.astype(jnp.int32)


def _rounds(axes: Where, counts: jax.Array, assignments: int) -> jax.Array:
    """Rounds until the longest message between two devices, or all that arrives at one, has
    passed.
    """
    rows_per_message = axes.room(assignments)
    if axes.ways == 1 or (axes.exchange == "dense" and rows_per_message >= assignments):
        return jnp.ones((), jnp.int32)
    between = counts.reshape(axes.ways, axes.ways, -1).sum(2)  # from, to
    longest = between.max() if axes.exchange == "dense" else between.sum(0).max()
    capacity = rows_per_message if axes.exchange == "dense" else axes.window(assignments)
    return jax.lax.pmax(jnp.maximum(-(-longest // capacity), 1).astype(jnp.int32), axes.axes)


def _kept(form: ExpertForm, axes: Where, chosen: jax.Array, count: int) -> jax.Array:
    """Returns which assignments [N, K] an expert takes: the first of all devices' tokens, which are
    in the order of the devices; all first choices are before all second ones.
    """
    tokens, per_token = chosen.shape
    keys = (chosen + count * jnp.arange(per_token, dtype=jnp.int32)).T.reshape(-1)
    _, rank, starts = _sorted(keys, count * per_token)
    local_counts = jnp.diff(starts)[None]
    all_ = (
        jax.lax.all_gather(local_counts, axes.every, axis=0, tiled=True)
        if axes.every
        else local_counts
    )
    device = jax.lax.axis_index(axes.every) if axes.every else 0
    totals = all_.sum(0).reshape(per_token, count)
    choices = (jnp.cumsum(totals, axis=0) - totals).reshape(-1)
    devices = jnp.where((jnp.arange(all_.shape[0]) < device)[:, None], all_, 0).sum(0)
    place = rank + jnp.take(choices + devices - starts[:-1], keys)
    return (
        (place < form.slots(tokens=tokens * all_.shape[0], per_token=per_token, experts=count))
        .reshape(per_token, tokens)
        .T
    )


# --------------------------------------------------------------------------------------------------
# Rows are dispatched to the devices of their experts and combined, in rounds of limited room.
#
# In the dense exchange every device sends a message of the same size to every other one, and a
# round takes the next rows of each. In the ragged one a round takes the next rows of those that
# arrive at a device, whoever sent them, and no others are sent.


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round.

    Attributes:
        there: assignment in every place where tokens are, int32 [H]; -1 for none.
        back: place of every assignment, int32 [A]; -1 where it is not sent.
        expert: which expert of the device a row that arrives is for, int32 [M]; the number of its
            experts for none.
        dispatch: rows where their tokens are [H, D] -> rows that arrive [M, D].
        combine: rows that arrived [M, D] -> rows where their tokens are [H, D].
        ordered: whether what arrives is in the order of the experts.
    """

    there: jax.Array
    back: jax.Array
    expert: jax.Array
    dispatch: Callable[[jax.Array], jax.Array]
    combine: Callable[[jax.Array], jax.Array]
    ordered: bool = False


def round_of(axes: Where, queue: Queue, number: Index) -> Round:
    """The round of a number, from 0."""
    if axes.ways == 1:
        return _without_exchange(queue)
    return (_dense if axes.exchange == "dense" else _ragged)(axes, queue, number)


def _without_exchange(queue: Queue) -> Round:
    count, waiting = queue.counts.shape[1], jnp.take(queue.expert, queue.order)
    there = jnp.where(waiting < count, queue.order, -1)
    return Round(
        there=there,
        back=jnp.where(queue.expert < count, queue.rank, -1),
        expert=waiting,
        dispatch=lambda rows: rows,
        combine=lambda rows: rows,
        ordered=True,
    )


def _dense(axes: Where, queue: Queue, number: Index) -> Round:
    count, assignments, size = queue.counts.shape[1], queue.order.shape[0], axes.ways
    local, rows_per_message = axes.local(count), axes.room(assignments)
    passed = number * rows_per_message
    first = queue.starts[:-1:local]
    place = first[:, None] + passed + jnp.arange(rows_per_message)
    there = jnp.where(
        place < queue.starts[local::local, None], jnp.take(queue.order, place, mode="clip"), -1
    ).reshape(-1)
    device = queue.expert // local  # as many as there are devices, for what is dropped
    slot = queue.rank - jnp.take(first, device, mode="clip") - passed
    back = jnp.where(
        (slot >= 0) & (slot < rows_per_message) & (device < size),
        device * rows_per_message + slot,
        -1,
    )
    ends = jnp.cumsum(_for_me(axes, queue), axis=1)
    expert = jnp.sum(
        (passed + jnp.arange(rows_per_message))[None, :, None] >= ends[:, None, :],
        -1,
        dtype=jnp.int32,
    ).reshape(-1)

    def exchanged(rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(
            rows.reshape(size, rows_per_message, -1),
            axes.expert,
            split_axis=0,
            concat_axis=0,
            tiled=True,
        ).reshape(size * rows_per_message, -1)

    return Round(there=there, back=back, expert=expert, dispatch=exchanged, combine=exchanged)


def _for_me(axes: Where, queue: Queue) -> jax.Array:
    """Assignments of every device for every expert of this one, [X, L]."""
    local = axes.local(queue.counts.shape[1])
    return jax.lax.dynamic_slice_in_dim(
        queue.counts, jax.lax.axis_index(axes.expert) * local, local, axis=1
    )


def _ragged(axes: Where, queue: Queue, number: Index) -> Round:
    assignments, local = queue.order.shape[0], axes.local(queue.counts.shape[1])
    window = axes.window(assignments)
    from_to = queue.counts.reshape(axes.ways, axes.ways, local).sum(2)
    # What a device sends to the first devices waits first.
    waiting = jnp.cumsum(from_to, axis=1) - from_to
    arrivals = jnp.cumsum(from_to, axis=0) - from_to  # what the first devices send arrives first
    start = jnp.clip(number * window - arrivals, 0, from_to)
    size = jnp.clip((number + 1) * window - arrivals, 0, from_to) - start
    first, landing = waiting + start, arrivals + start - number * window
    me = jax.lax.axis_index(axes.expert)
    there = first[me], size[me], landing[me], size[:, me]
    back = landing[:, me], size[:, me], first[:, me], size[me]
    ends = jnp.cumsum(_for_me(axes, queue).reshape(-1))
    row = number * window + jnp.arange(window)
    piece = jnp.sum(row[:, None] >= ends[None, :], -1, dtype=jnp.int32)
    base = _without_exchange(queue)
    return Round(
        there=base.there,
        back=base.back,
        expert=jnp.where(piece < ends.shape[0], piece % local, local),
        dispatch=lambda rows: _sent(axes.expert, (window, assignments), there, back, rows),
        combine=lambda rows: _sent(axes.expert, (assignments, window), back, there, rows),
    )


#: One direction of an exchange, int32 [X] each: place of the first row that is sent to each device,
#: rows sent, where they arrive there, and rows that each sends here.
_Pieces = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sent(
    axes: tuple[str, ...], room: tuple[int, int], there: _Pieces, back: _Pieces, rows: jax.Array
) -> jax.Array:
    """Rows where they are sent; zeros in places that no row goes to.

    Args:
        room: rows that there is room for where they arrive, and where they come from.
        back: the exchange that sends them back.
    """
    out = jnp.zeros((room[0], rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(rows, out, *there, axis_name=axes)


_sent.defvjp(
    lambda axes, room, there, back, rows: (_sent(axes, room, there, back, rows), (back, there)),
    lambda axes, room, reverse, cotangent: (
        None,
        None,
        _sent(axes, room[::-1], *reverse, cotangent),
    ),
)


# --------------------------------------------------------------------------------------------------
# Tokens visit experts in rounds: one where routing is about even, more where it is skewed.
#
# The first round is differentiated as it is written. The further ones are a loop, which usually
# has no turn: its backward pass is a loop of its own that does every round again, so that nothing
# of them is in memory but one round. Skewed routing costs time and neither memory nor results.
#
# Of the first round the backward pass finds what it cannot make from its neighbours without
# another matmul or message (`KEPT`): rows as they are multiplied, the products that activations
# read, results that have come home, and where everything went. Activations, and rows on their way,
# are made again.

#: Operations of further rounds have it in their names.
OVERFLOW = "shardlib_overflow"
#: What the first round keeps for the backward pass is called so
#: (`jax.ad_checkpoint.checkpoint_name`).
KEPT = "shardlib_expert_rows"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of devices in a round.

    Attributes:
        form: what experts compute.
        where: on which axes.
    """

    form: ExpertForm
    where: Where

    def all(
        self, queue: Queue, x: jax.Array, weights: jax.Array, parameters: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Weighted results [N, D] of the assignments of all rounds; partial sums where the hidden
        width is sharded.

        Args:
            x: tokens [N, D].
            weights: of the chosen experts, [N, K].
        """
        if self.where.ways == 1 or (
            self.where.exchange == "dense" and self.where.room(weights.size) >= weights.size
        ):
            return self.round(queue, 0, x, weights, parameters)
        further, *entered = cast(tuple[Any, ...], _further(self, queue, x, weights, parameters))
        return self.round(queue, 0, *entered) + further

    def round(
        self,
        queue: Queue,
        number: Index,
        x: jax.Array,
        weights: jax.Array,
        parameters: tuple[jax.Array, ...],
    ) -> jax.Array:
        """The same of the assignments of one round.

        Args:
            x: this device's tokens [N, D].
            weights: of the chosen experts, [N, K].
        """
        per_token = weights.shape[1]
        now = round_of(self.where, queue, number)
        there, back, expert = (kept(places) for places in (now.there, now.back, now.expert))
        rows = now.dispatch(moved(per_token, x, there, back))
        home = kept(
            moved(
                1,
                now.combine(self._experts(rows, expert, parameters, ordered=now.ordered)),
                back,
                there,
            )
        )
        return jnp.einsum(
            "nk,nkd->nd", weights.astype(home.dtype), home.reshape(*weights.shape, -1)
        )

    def _experts(
        self,
        rows: jax.Array,
        expert: jax.Array,
        parameters: tuple[jax.Array, ...],
        *,
        ordered: bool,
    ) -> jax.Array:
        """Results [M, D] of rows [M, D] for the experts [M] of this device."""
        if ordered:
            return self._multiplied(rows, expert, parameters)
        order = kept(jnp.argsort(expert))
        rank = kept(jnp.argsort(order))
        return moved(
            1,
            self._multiplied(moved(1, rows, order, rank), jnp.take(expert, order), parameters),
            rank,
            order,
        )

    def _multiplied(
        self, rows: jax.Array, expert: jax.Array, parameters: tuple[jax.Array, ...]
    ) -> jax.Array:
        """The same, for rows in the order of their experts."""
        up, down, *gate = (array.astype(rows.dtype) for array in parameters)
        sizes = jnp.diff(
            jnp.searchsorted(expert, jnp.arange(up.shape[0] + 1, dtype=expert.dtype))
        ).astype(jnp.int32)
        grouped, rows = self.where.grouped, kept(rows)
        hidden = kept(grouped.matmul(rows, up, sizes))
        gates = kept(grouped.matmul(rows, gate[0], sizes)) if gate else None
        return grouped.matmul(self.form.activated(hidden, gates), down, sizes)


def kept(array: jax.Array) -> jax.Array:
    """An array that the backward pass finds."""
    return checkpoint_name(array, KEPT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further(
    work: Work, queue: Queue, x: jax.Array, weights: jax.Array, parameters: tuple[jax.Array, ...]
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Results of all rounds but the first, and the other arguments as they are.

    The first round takes them from here, so that its gradients come back through here and those of
    further rounds are added where they are.
    """

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, result = state
        return number + 1, result + work.round(queue, number, x, weights, parameters)

    with jax.named_scope(OVERFLOW):
        return (
            jax.lax.while_loop(
                lambda state: state[0] < queue.rounds,
                turn,
                (jnp.ones((), jnp.int32), jnp.zeros_like(x)),
            )[1],
            x,
            weights,
            parameters,
        )


def _further_forward(
    work: Work, queue: Queue, x: jax.Array, weights: jax.Array, parameters: tuple[jax.Array, ...]
) -> tuple[Any, Any]:
    return _further(work, queue, x, weights, parameters), (queue, x, weights, parameters)


def _further_backward(
    work: Work, saved: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    queue, *leaves = saved
    further, *gradients = cotangents

    def turn(state: tuple[Any, Any]) -> tuple[Any, Any]:
        number, so_far = state
        pull = jax.vjp(lambda *leaves: work.round(queue, number, *leaves), *leaves)[1]
        return number + 1, jax.tree.map(jnp.add, so_far, list(pull(further)))

    with jax.named_scope(OVERFLOW):
        summed = jax.lax.while_loop(
            lambda state: state[0] < queue.rounds, turn, (jnp.ones((), jnp.int32), gradients)
        )[1]
    return None, *summed


_further.defvjp(_further_forward, _further_backward)


# --------------------------------------------------------------------------------------------------
# Names of the values that the backward pass of a function keeps.


def saving(run: Function, *names: str) -> Function:
    """A function of which the backward pass finds the arguments and what has one of the names
    (`jax.ad_checkpoint.checkpoint_name`), and nothing else, under any policy of a `jax.checkpoint`
    around it.

    Left to `jax.checkpoint` alone, a policy around it that saves everything would save the rest as
    well.
    """
    lean = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))
    call = jax.custom_vjp(run)
    call.defvjp(lambda *arrays: jax.vjp(lean, *arrays), lambda pull, cotangents: pull(cotangents))
    return call


# --------------------------------------------------------------------------------------------------
# Dispatch, computation and combination of tokens on the devices of their experts.


def routed(
    form: ExpertForm,
    axes: Where,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `shardlib.functions.experts.visit` computes, inside of a region that is manual
    over the axes of `axes`.

    Rows of features travel to their experts and home, weights of experts and tokens do not. It is
    differentiated from outside of the region, as `jax.shard_map` does it: gradients of what devices
    hold copies of are summed there.

    Args:
        up, down, gate: the same for the experts of this device, [E / X, ...] with hidden dims of
            F / T: device i of the X that share them has the i-th part.
    """
    per_token = chosen.shape[-1]
    queue, dropped = queue_of(form, axes, chosen.reshape(-1, per_token), up.shape[0] * axes.ways)
    queue = jax.tree.map(kept, queue)
    parameters = (up, down) if gate is None else (up, down, gate)
    result = (
        Work(form=form, where=axes)
        .all(queue, x.reshape(-1, x.shape[-1]), weights.reshape(-1, per_token), parameters)
        .reshape(x.shape)
    )
    return (jax.lax.psum(result, axes.tensor) if axes.tensor else result), dropped


# --------------------------------------------------------------------------------------------------
# A call of `shardlib.functions.experts.visit`, over devices that have parts of the tokens and of
# the experts each.

#: What the matrices of experts, and tokens that tensor shards, are called where they are whole.
GATHERED = "shardlib_gathered"
#: Which dim of an expert's matrices [E, D, F] (up, gate) or [E, F, D] (down) is the hidden one.
_HIDDEN = {"up": 2, "down": 1, "gate": 2}


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """Layout and use of one operand of experts.

    Attributes:
        rest: how it is sharded as it comes.
        gathered: mesh axes by dim that it is gathered over before use, the minor ones.
    """

    rest: Cuts
    gathered: Cuts

    @staticmethod
    def of(
        parameter: ParameterLayout | None,
        dims: Sequence[int | None],
        shape: Sequence[int],
        compute: Cuts,
        machine: Machine,
    ) -> Matrices:
        """An operand that is a parameter, or a layer of it, comes as that rests; another one as it
        is wanted.

        Args:
            parameter: layouts of it; None for an operand that is none.
            dims: dim of the parameter that each dim of the operand is; None where it is none.
        """
        stored: Cuts = (
            {}
            if parameter is None
            else {
                dim: parameter.rest[source] for dim, source in enumerate(dims) if source is not None
            }
        )
        fits = parameter is not None and all(
            stored.get(dim, ())[: len(compute.get(dim, ()))] == compute.get(dim, ())
            and shape[dim] % machine.ways(stored.get(dim, ())) == 0
            for dim in range(3)
        )
        if not fits or (
            parameter is not None
            and {axis for axes in stored.values() for axis in axes}
            != set(parameter.rest.axes) - {"stage"}
        ):
            stored = compute
        return Matrices(
            rest=stored,
            gathered={dim: axes[len(compute.get(dim, ())) :] for dim, axes in stored.items()},
        )

    def whole(self, array: jax.Array, machine: Machine) -> jax.Array:
        """The operand as it is used; inside of the region. Its gradient is scattered as other
        gradients are (`shardlib.lowering.weights`).
        """
        back = Reduction(
            scattered={dim: axes for dim, axes in self.gathered.items() if axes}, summed=()
        )

        def forward(array: jax.Array) -> jax.Array:
            for dim, axes in self.gathered.items():
                array = machine.gathered(array, dim, axes)
            return array

        run = jax.custom_vjp(forward)
        run.defvjp(
            lambda array: (forward(array), None),
            lambda _, cotangent: (back.apply(cotangent, machine, stacked=True),),
        )
        return run(array)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The sharding of a call.

    Attributes:
        form: what experts compute.
        where: on which axes.
        tokens: mesh axes that shard batch and sequence of the tokens.
        over: mesh axes that shard the hidden width, over which results are added up.
        scattered: whether they shard the sequence of tokens and results outside.
        matrices: up, down, and gate where there is one.
    """

    form: ExpertForm
    where: Where
    tokens: tuple[tuple[str, ...], ...]
    over: tuple[str, ...]
    scattered: bool
    matrices: tuple[Matrices, ...]

    def local(
        self,
        machine: Machine,
        x: jax.Array,
        weights: jax.Array,
        chosen: jax.Array,
        *parameters: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what one device does, inside of the manual region."""

        def run(
            x: jax.Array, weights: jax.Array, chosen: jax.Array, *parameters: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            used = [
                checkpoint_name(matrices.whole(array, machine), GATHERED)
                for matrices, array in zip(self.matrices, parameters, strict=True)
            ]
            # Gathered here, and not on the way in, tokens are gathered in their own dtype, the
            # backward pass keeps shards of them, and their gradient is scattered.
            if self.scattered:
                x = checkpoint_name(jax.lax.all_gather(x, self.over, axis=1, tiled=True), GATHERED)
            return routed(self.form, self.where, x, weights, chosen, *used)

        # The backward pass gathers matrices and tokens again, since those of all layers are the
        # whole model; but for a layer that is rematerialised, of which it finds what that has
        # gathered.
        result, dropped = saving(run, KEPT, *([GATHERED] if recomputes() else []))(
            x, weights, chosen, *parameters
        )
        if not self.over:
            return result, dropped
        return (
            jax.lax.psum_scatter(result, self.over, scatter_dimension=1, tiled=True)
            if self.scattered
            else jax.lax.psum(result, self.over)
        ), dropped


def on_their_devices(
    site: Site,
    plan: Plan,
    parameters: Sequence[ParameterLayout | None],
    placements: Mapping[tuple[str, int], Layout],
    machine: Machine,
) -> Callable[..., Sequence[jax.Array]] | None:
    """Returns what takes the place of a call of experts; None where that is left to automatic
    partitioning, which gathers all tokens.

    Args:
        parameters: layouts of the parameters that the operands are; None for others.
    """
    layout, grouped = placements.get(site.key(0)), _grouped(plan, machine)
    if (
        plan.mesh.devices == plan.mesh["stage"] and grouped.kind == "blocks"
        # one device has all of a layer; as it is written, the call would multiply all rows with all
        # matrices
    ):
        return lambda *arrays: list(
            routed(site.call.form, Where(expert=(), ways=1, grouped=grouped), *arrays)
        )
    if plan.experts == "none":
        return None
    if layout is None or len(layout) < 2:
        raise PlanError(
            f"experts={plan.experts!r} needs to know how the tokens of {site.call.path} are"
            " sharded, and the plan has no layout of them\nTry: tokens [batch, sequence, features],"
            " or experts='none'"
        )
    placed = _placed(site, parameters, layout, grouped, machine)
    batch, sequence = placed.tokens
    rows, after = (
        PartitionSpec(*(axes or None for axes in (batch, along)[: len(layout) - 1]))
        for along in (sequence, (*sequence, *placed.over) if placed.scattered else sequence)
    )
    specs = (after, rows, rows, *(machine.spec(matrices.rest, 3) for matrices in placed.matrices))
    run = machine.manual(
        lambda *local: placed.local(machine, *local), specs, (after, PartitionSpec())
    )

    def call(*arrays: jax.Array) -> list[jax.Array]:
        # In the dtype of use matrices are gathered, and their gradients added up, as those of other
        # weights are.
        return list(run(*arrays[:3], *(array.astype(arrays[0].dtype) for array in arrays[3:])))

    return call


def _placed(
    site: Site,
    parameters: Sequence[ParameterLayout | None],
    tokens: Layout,
    grouped: Grouped,
    machine: Machine,
) -> Placed:
    """Returns how a call is sharded, see `on_their_devices`; `tokens` is the layout of its
    tokens.
    """
    form = site.call.form
    shared, hidden = _axes_of_matrices(site, parameters[3], machine)
    # Capacities count tokens in the order of the whole sequence.
    along = (
        ()
        if form.capacity is not None or len(tokens) < 3
        else tuple(axis for axis in tokens[1] if axis not in hidden and axis != "tensor")
    )
    batch, sequence = machine.parts(tokens[0]), machine.parts(along)
    expert_axes = Where(
        expert=machine.parts(shared),
        ways=machine.ways(shared),
        every=(*batch, *sequence),
        grouped=grouped,
    )
    return Placed(
        form=form,
        where=expert_axes,
        tokens=(batch, sequence),
        over=machine.parts(hidden),
        scattered=bool(hidden) and len(tokens) > 2 and tokens[1] == (*along, *hidden),
        matrices=tuple(
            Matrices.of(
                parameters[3 + k],
                () if (view := site.views[3 + k]) is None else view.dims,
                site.avals[3 + k].shape,
                {0: shared, _HIDDEN[name]: hidden},
                machine,
            )
            for k, name in enumerate(("up", "down", "gate")[: len(site.avals) - 3])
        ),
    )


def _axes_of_matrices(
    site: Site, up: ParameterLayout | None, machine: Machine
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that experts are shared out over, and those that shard their hidden width."""
    view, shape = site.views[3], site.avals[3].shape
    if up is None or view is None:
        return (), ()
    experts, _, width = (() if source is None else up.compute[source] for source in view.dims)
    experts_size, tensor = machine.ways(("expert",)), machine.ways(("tensor",))
    return (
        tuple(
            axis
            for axis in experts
            if axis == "expert" and experts_size > 1 and shape[0] % experts_size == 0
        ),
        tuple(axis for axis in width if axis == "tensor" and shape[2] % tensor == 0),
    )


def _grouped(plan: Plan, machine: Machine) -> Grouped:
    """Returns how rows are multiplied with the matrices of their groups: TPUs have a kernel for
    it.
    """
    try:
        tpu = topology(plan.topology).chip.vendor == "google"
    except ShardlibError:  # a topology of the user's
        tpu = machine.torus
    return Grouped(kind="ragged" if tpu else "blocks")
