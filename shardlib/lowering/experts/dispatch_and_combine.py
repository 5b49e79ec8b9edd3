"""Rows are dispatched to the devices of their experts and combined, in rounds of limited room.

In the dense exchange every device sends a message of the same size to every other one, and a round
takes the next rows of each. In the ragged one a round takes the next rows of those that arrive at a
device, whoever sent them, and no others are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from shardlib.jax_types import Index
from shardlib.lowering.experts.groups import Where
from shardlib.lowering.experts.queue import Queue


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


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """What goes between a device and every other one in a round: int32 [X] each.

    Attributes:
        first: place of the first row that this device sends to each.
        sent: rows that it sends to each.
        landing: where they arrive there.
        arrival: where what each sends arrives here.
        taken: rows of it.
        origin: where they were dispatched from there.
    """

    first: jax.Array
    sent: jax.Array
    landing: jax.Array
    arrival: jax.Array
    taken: jax.Array
    origin: jax.Array


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Rows that there is room for.

    Attributes:
        there: on the devices of the experts, in a round.
        here: where rows are dispatched from.
    """

    there: int
    here: int


jax.tree_util.register_dataclass(
    _Pieces, data_fields=["first", "sent", "landing", "arrival", "taken", "origin"], meta_fields=[]
)


def _ragged(axes: Where, queue: Queue, number: Index) -> Round:
    assignments, local = queue.order.shape[0], axes.local(queue.counts.shape[1])
    window = axes.window(assignments)
    from_to = queue.counts.reshape(axes.ways, axes.ways, local).sum(2)
    waiting = (
        jnp.cumsum(from_to, axis=1) - from_to
    )  # what a device sends to the first devices waits first
    arrivals = jnp.cumsum(from_to, axis=0) - from_to  # what the first devices send arrives first
    start = jnp.clip(number * window - arrivals, 0, from_to)
    size = jnp.clip((number + 1) * window - arrivals, 0, from_to) - start
    first, landing = waiting + start, arrivals + start - number * window
    me = jax.lax.axis_index(axes.expert)
    pieces = _Pieces(
        first=first[me],
        sent=size[me],
        landing=landing[me],
        arrival=landing[:, me],
        taken=size[:, me],
        origin=first[:, me],
    )
    ends = jnp.cumsum(_for_me(axes, queue).reshape(-1))
    row = number * window + jnp.arange(window)
    piece = jnp.sum(row[:, None] >= ends[None, :], -1, dtype=jnp.int32)
    base, sizes = _without_exchange(queue), _Room(there=window, here=assignments)
    return Round(
        there=base.there,
        back=base.back,
        expert=jnp.where(piece < ends.shape[0], piece % local, local),
        dispatch=lambda rows: _dispatched(axes.expert, sizes, pieces, rows),
        combine=lambda rows: _combined(axes.expert, sizes, pieces, rows),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dispatched(axes: tuple[str, ...], sizes: _Room, pieces: _Pieces, rows: jax.Array) -> jax.Array:
    """Rows to the devices of their experts; zeros in places that no row goes to."""
    out = jnp.zeros((sizes.there, rows.shape[1]), rows.dtype)
    offsets = (pieces.first, pieces.sent, pieces.landing, pieces.taken)
    return jax.lax.ragged_all_to_all(rows, out, *offsets, axis_name=axes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combined(axes: tuple[str, ...], sizes: _Room, pieces: _Pieces, rows: jax.Array) -> jax.Array:
    """Rows back to where they were dispatched from; zeros in places that no row goes to."""
    out = jnp.zeros((sizes.here, rows.shape[1]), rows.dtype)
    offsets = (pieces.arrival, pieces.taken, pieces.origin, pieces.sent)
    return jax.lax.ragged_all_to_all(rows, out, *offsets, axis_name=axes)


_dispatched.defvjp(
    lambda axes, sizes, pieces, rows: (_dispatched(axes, sizes, pieces, rows), pieces),
    lambda axes, sizes, pieces, cotangent: (None, _combined(axes, sizes, pieces, cotangent)),
)
_combined.defvjp(
    lambda axes, sizes, pieces, rows: (_combined(axes, sizes, pieces, rows), pieces),
    lambda axes, sizes, pieces, cotangent: (None, _dispatched(axes, sizes, pieces, cotangent)),
)
