"""Copies of what islands send, on their way to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


def delivered(rows: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """What every island has of all: each device sends what it holds to the device in its place on
    every other island. Nothing waits for the copies but what uses them.
    """
    places = [_sharding(one) for one in rows]
    return [[_copied(one, place) for one in rows] for place in places]


def _sharding(array: jax.Array) -> NamedSharding:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding


def _copied(array: jax.Array, place: NamedSharding) -> jax.Array:
    """The array on the devices of another island, shard by shard."""
    own = _sharding(array)
    if own == place:
        return array
    here, there = own.mesh, place.mesh
    assert isinstance(here, Mesh) and isinstance(there, Mesh)
    target = dict(zip(here.devices.flat, there.devices.flat, strict=True))
    shards = list(array.addressable_shards)
    copies = jax.device_put(
        [shard.data for shard in shards], [target[shard.device] for shard in shards]
    )
    return jax.make_array_from_single_device_arrays(array.shape, place, copies)


@dataclass(kw_only=True)
class Flights:
    """The copies that are on the way; of a state that comes from elsewhere, none are.

    Attributes:
        sent: an array of the state that they were made for.
        rows: for each island the rows of all.
    """

    sent: Any = None
    rows: list[list[jax.Array]] = field(default_factory=list)

    def start(self, sent: jax.Array, rows: Sequence[jax.Array]) -> None:
        """Starts copies."""
        self.sent, self.rows = sent, delivered(rows)

    def land(self, sent: jax.Array) -> list[list[jax.Array]]:
        """For each island the rows of all; empty where there are no copies for this state."""
        rows = self.rows if self.sent is sent else []
        self.sent, self.rows = None, []
        return rows
