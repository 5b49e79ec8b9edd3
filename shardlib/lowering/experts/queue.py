"""Which assignments of tokens to experts go where, and which are dropped?

Assignment i K + j is the j-th choice of the i-th token of the device. Assignments wait in the order
of their experts, which is that of the devices that hold them; those that are dropped come last.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.functions.experts import ExpertForm
from shardlib.lowering.experts.groups import Where


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


jax.tree_util.register_dataclass(
    Queue, data_fields=["expert", "order", "rank", "starts", "counts", "rounds"], meta_fields=[]
)


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
    """Which assignments [N, K] an expert takes: the first of all devices' tokens, which are in the
    order of the devices; all first choices are before all second ones.
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
