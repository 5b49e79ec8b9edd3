"""Rows go to the devices of their experts and come home, as many in a round as there is room for.

In the dense exchange every device sends a message of the same size to every other one, and a round
takes the next rows of each. In the ragged one a round takes the next rows of those that arrive at a
device, whoever sent them, and no others are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.lowering.experts.groups import Where
from shardlib.lowering.experts.queue import Queue


@dataclass(frozen=True, kw_only=True)
class Trip:
    """One round.

    Attributes:
        there: assignment in every place at home, int32 [H]; -1 for none.
        back: place of every assignment, int32 [A]; -1 where it does not travel.
        expert: which expert of the device a row that arrives is for, int32 [M]; the number of its
            experts for none.
        go: rows at home [H, D] -> rows that arrive [M, D].
        come: rows that arrived [M, D] -> rows at home [H, D].
        ordered: whether what arrives is in the order of the experts.
    """

    there: Any
    back: Any
    expert: Any
    go: Callable[[Any], Any]
    come: Callable[[Any], Any]
    ordered: bool = False


def trip(where: Where, queue: Queue, number: Any) -> Trip:
    """The round of a number, from 0."""
    if where.ways == 1:
        return _at_home(queue)
    return (_dense if where.exchange == "dense" else _ragged)(where, queue, number)


def _at_home(queue: Queue) -> Trip:
    count, waiting = queue.counts.shape[1], jnp.take(queue.expert, queue.order)
    there = jnp.where(waiting < count, queue.order, -1)
    return Trip(
        there=there,
        back=jnp.where(queue.expert < count, queue.rank, -1),
        expert=waiting,
        go=lambda rows: rows,
        come=lambda rows: rows,
        ordered=True,
    )


def _dense(where: Where, queue: Queue, number: Any) -> Trip:
    count, assignments, ways = queue.counts.shape[1], queue.order.shape[0], where.ways
    local, room = where.local(count), where.room(assignments)
    passed = number * room
    first = queue.starts[:-1:local]
    place = first[:, None] + passed + jnp.arange(room)
    there = jnp.where(
        place < queue.starts[local::local, None], jnp.take(queue.order, place, mode="clip"), -1
    ).reshape(-1)
    device = queue.expert // local  # as many as there are devices, for what is dropped
    slot = queue.rank - jnp.take(first, device, mode="clip") - passed
    back = jnp.where((slot >= 0) & (slot < room) & (device < ways), device * room + slot, -1)
    ends = jnp.cumsum(_for_me(where, queue), axis=1)
    expert = jnp.sum(
        (passed + jnp.arange(room))[None, :, None] >= ends[:, None, :], -1, dtype=jnp.int32
    ).reshape(-1)

    def travel(rows: Any) -> Any:
        return jax.lax.all_to_all(
            rows.reshape(ways, room, -1), where.expert, split_axis=0, concat_axis=0, tiled=True
        ).reshape(ways * room, -1)

    return Trip(there=there, back=back, expert=expert, go=travel, come=travel)


def _for_me(where: Where, queue: Queue) -> Any:
    """Assignments of every device for every expert of this one, [X, L]."""
    local = where.local(queue.counts.shape[1])
    return jax.lax.dynamic_slice_in_dim(
        queue.counts, jax.lax.axis_index(where.expert) * local, local, axis=1
    )


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """What goes between a device and every other one in a round: int32 [X] each.

    Attributes:
        home: place at home of the first row that this device sends to each.
        sent: rows that it sends to each.
        landing: where they arrive there.
        arrival: where what each sends arrives here.
        taken: rows of it.
        origin: where they were at home there.
    """

    home: Any
    sent: Any
    landing: Any
    arrival: Any
    taken: Any
    origin: Any


jax.tree_util.register_dataclass(
    _Pieces, data_fields=["home", "sent", "landing", "arrival", "taken", "origin"], meta_fields=[]
)


def _ragged(where: Where, queue: Queue, number: Any) -> Trip:
    assignments, local = queue.order.shape[0], where.local(queue.counts.shape[1])
    window = where.window(assignments)
    from_to = queue.counts.reshape(where.ways, where.ways, local).sum(2)
    homes = (
        jnp.cumsum(from_to, axis=1) - from_to
    )  # what a device sends to the first devices waits first
    arrivals = jnp.cumsum(from_to, axis=0) - from_to  # what the first devices send arrives first
    start = jnp.clip(number * window - arrivals, 0, from_to)
    size = jnp.clip((number + 1) * window - arrivals, 0, from_to) - start
    home, landing = homes + start, arrivals + start - number * window
    me = jax.lax.axis_index(where.expert)
    pieces = _Pieces(
        home=home[me],
        sent=size[me],
        landing=landing[me],
        arrival=landing[:, me],
        taken=size[:, me],
        origin=home[:, me],
    )
    ends = jnp.cumsum(_for_me(where, queue).reshape(-1))
    row = number * window + jnp.arange(window)
    piece = jnp.sum(row[:, None] >= ends[None, :], -1, dtype=jnp.int32)
    base = _at_home(queue)
    return Trip(
        there=base.there,
        back=base.back,
        expert=jnp.where(piece < ends.shape[0], piece % local, local),
        go=lambda rows: _travel(where.expert, (window, assignments), False, pieces, rows),
        come=lambda rows: _travel(where.expert, (window, assignments), True, pieces, rows),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _travel(
    axes: tuple[str, ...], sizes: tuple[int, int], homewards: bool, pieces: _Pieces, rows: Any
) -> Any:
    """Rows at home to where they arrive, or homewards; zeros in places that no row goes to. The
    sizes are those of the places there and at home.
    """
    p = pieces
    out = jnp.zeros((sizes[homewards], rows.shape[1]), rows.dtype)
    offsets = (
        (p.arrival, p.taken, p.origin, p.sent)
        if homewards
        else (p.home, p.sent, p.landing, p.taken)
    )
    return jax.lax.ragged_all_to_all(rows, out, *offsets, axis_name=axes)


def _travel_forward(
    axes: tuple[str, ...], sizes: tuple[int, int], homewards: bool, pieces: _Pieces, rows: Any
) -> tuple[Any, _Pieces]:
    return _travel(axes, sizes, homewards, pieces, rows), pieces


def _travel_backward(
    axes: tuple[str, ...], sizes: tuple[int, int], homewards: bool, pieces: _Pieces, cotangent: Any
) -> tuple[None, Any]:
    return None, _travel(axes, sizes, not homewards, pieces, cotangent)


_travel.defvjp(_travel_forward, _travel_backward)
