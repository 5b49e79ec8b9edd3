"""Tokens visit experts on other devices."""

from __future__ import annotations

import jax

from shardlib.functions.experts import ExpertForm
from shardlib.lowering.experts.groups import Where
from shardlib.lowering.experts.overflow_rounds import Work, kept
from shardlib.lowering.experts.queue import queue_of


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
    """What `shardlib.functions.experts.visit` computes, inside of a region that is manual over the
    axes of `axes`.

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
