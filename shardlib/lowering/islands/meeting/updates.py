"""What one device does at a meeting, with what it holds of each parameter.

Each update takes the device's shards of its island's parameters, float32, and those of what is
outer, and gives both afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax

from shardlib.axes import ISLAND
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.gossip import Gossip
from shardlib.exchanges.values import Meets
from shardlib.jax_types import Value
from shardlib.lowering.islands.meeting.wires import means

#: Shards of one device: of parameters, of outer parameters and of their momentum.
Shards = list[Value]
#: (parameters, outer parameters, momentum) -> the same afterwards; where nothing is outer the
#: latter are empty.
Update = Callable[[Shards, Shards, Shards], tuple[Shards, Shards, Shards]]


def update_of(exchange: Meets, meeting: int) -> Update:
    """What a device does at a meeting."""
    if isinstance(exchange, Gossip):
        return partial(_averaged, exchange, meeting)
    return partial(_outer_step, exchange)


def _outer_step(
    exchange: DiLoCo, mine: Shards, outer: Shards, momentum: Shards
) -> tuple[Shards, Shards, Shards]:
    """The outer update (arXiv:2311.08105, algorithm 1): all islands go on from its parameters."""
    apart = [theta - own for theta, own in zip(outer, mine, strict=True)]
    gradients = means(apart, exchange.wire, exchange.islands)
    outer, momentum = outer_update(exchange, gradients, outer, momentum)
    return outer, outer, momentum


def outer_update(
    exchange: DiLoCo, gradients: Shards, outer: Shards, momentum: Shards
) -> tuple[Shards, Shards]:
    """Outer parameters and momentum after an update, in Nesterov's form."""
    decay, rate = exchange.momentum, exchange.rate
    momentum = [g + decay * v for g, v in zip(gradients, momentum, strict=True)]
    outer = [
        theta - rate * (g + decay * v)
        for theta, g, v in zip(outer, gradients, momentum, strict=True)
    ]
    return outer, momentum


def _averaged(
    exchange: Gossip, meeting: int, mine: Shards, outer: Shards, momentum: Shards
) -> tuple[Shards, Shards, Shards]:
    """The mean of what an island has and of what it hears."""
    distances = exchange.distances(meeting)
    heard = [[_from(one, distance, exchange.islands) for one in mine] for distance in distances]
    return (
        [_mean([own, *others]) for own, *others in zip(mine, *heard, strict=True)],
        outer,
        momentum,
    )


def _from(array: Value, distance: int, islands: int) -> Value:
    """The array of the island so far before this one, flat on the way."""
    pairs = [(k, (k + distance) % islands) for k in range(islands)]
    return jax.lax.ppermute(array.reshape(-1), ISLAND.name, pairs).reshape(array.shape)


def _mean(arrays: Sequence[Value]) -> Value:
    return sum(arrays[1:], arrays[0]) / len(arrays)
