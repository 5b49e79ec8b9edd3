"""What other islands go on with of gradients that were not sent, or have not arrived.

All islands update by the mean of what they send, so each goes on with the mean of what the islands
did not send, or what is on the way: what is still to come is as much as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.axes import ISLAND
from shardlib.checkpointing.elastic.origins import combined
from shardlib.checkpointing.elastic.source import Source
from shardlib.lowering.islands.start import zeros
from shardlib.lowering.islands.state import FlyingState, IslandsState, ResidualState


def residuals(
    source: Source, names: Sequence[str], islands: int, first: ResidualState, step: int
) -> ResidualState:
    """What is kept of gradients: that of the checkpoint where it has some, and what there is before
    the first step where not.
    """
    return ResidualState(
        step=np.int32(step),
        residual=_means(source, "residual", names, first.residual, islands),
        momentum=_means(source, "momentum", names, first.momentum, islands),
        factors=_factors(source, names, first.factors),
    )


def on_the_way(source: Source, names: Sequence[str], like: IslandsState) -> dict[str, Tree]:
    """What is on the way between islands, by the fields that have it; nothing where islands do not
    meet with a delay.
    """
    flying = like.exchange
    if not isinstance(flying, FlyingState):
        return {}
    first = [zeros(one) for one in flying.sent]
    sent, at, place = _means(source, "sent", names, first, len(like.islands)), 0, "outer.sent_at"
    if sent is not first and place in source.about.arrays:
        at = dict(source.read({place: place}, {place: flying.sent_at}))[place]
    return {"sent": sent, "sent_at": np.int32(int(at))}


def _means(
    source: Source, field: str, names: Sequence[str], first: list[jax.Array], islands: int
) -> list[jax.Array]:
    """An array for each parameter: of all islands the mean of those that were saved."""
    paths = _paths(source, field, names) if first else {}
    if not first or len(paths) < len(first):
        return first
    ones = {name: _one(array, islands) for name, array in zip(names, first, strict=True)}
    found = {
        name: combined(field, array, ones[name], source.islands)
        for name, array in source.read(paths, ones)
    }
    return [_repeated(found[name], array) for name, array in zip(names, first, strict=True)]


def _factors(source: Source, names: Sequence[str], first: list[jax.Array]) -> list[jax.Array]:
    """Q of each parameter, that of the checkpoint where the rank is the same."""
    paths = _paths(source, "factors", names) if first else {}
    fit = {
        name: path
        for (name, path), one in zip(paths.items(), first, strict=False)
        if tuple(source.about.arrays[path].shape) == one.shape
    }
    if not first or len(fit) < len(first):
        return first
    found = dict(source.read(fit, dict(zip(names, first, strict=True))))
    return [found[name] for name in names]


def _paths(source: Source, field: str, names: Sequence[str]) -> dict[str, str]:
    paths = {name: f"outer.{field}.{name}" for name in names}
    return {name: path for name, path in paths.items() if path in source.about.arrays}


def _one(array: jax.Array, islands: int) -> Tree:
    """What one island has of an array of all, abstract, and alike on all."""
    assert isinstance(array.sharding, NamedSharding)
    first, *others = array.sharding.spec
    inner = tuple(axis for axis in first if axis != ISLAND.name) if isinstance(first, tuple) else ()
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec(inner or None, *others))
    shape = (array.shape[0] // islands, *array.shape[1:])
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)


def _repeated(one: jax.Array, like: jax.Array) -> jax.Array:
    """The same array for every island."""
    count = like.shape[0] // one.shape[0]
    repeat = jax.jit(lambda x: jnp.concatenate([x] * count), out_shardings=like.sharding)
    return repeat(one)
