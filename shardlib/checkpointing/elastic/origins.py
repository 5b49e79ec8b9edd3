"""Where the arrays of one island come from in a checkpoint of another number of islands, and how
those of several become one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing.islands.form import OF_ISLANDS, is_of_optimizer
from shardlib.checkpointing.tree import Spec, raw_abstract
from shardlib.errors import CheckpointError
from shardlib.lowering.runtime.random_keys import is_key

#: What goes before the paths of outer parameters, and of parameters that are not trained.
OUTER, FROZEN = "outer.params.", "frozen."


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where an array comes from.

    Attributes:
        path: in the checkpoint.
        islands: whose arrays are stacked there; 1 where it is the array itself.
    """

    path: str
    islands: int = 1


def origin(path: str, arrays: Mapping[str, Spec], islands: int) -> Origin:
    """Where an array of one island comes from; of parameters, the outer ones where there are some."""
    if islands == 1:
        return Origin(path=path)
    kind, _, name = path.partition(".")
    if kind != "params":
        return Origin(path=f"{OF_ISLANDS}{path}", islands=islands)
    for known in (f"{OUTER}{name}", f"{FROZEN}{name}"):
        if known in arrays:
            return Origin(path=known)
    return Origin(path=f"{OF_ISLANDS}params.{name}", islands=islands)


def as_one_island(
    arrays: Mapping[str, Spec], target: Mapping[str, Tree], islands: int
) -> dict[str, Spec]:
    """What a checkpoint would hold of one of its islands alone."""
    if islands == 1:
        return dict(arrays)
    found = {
        f"params.{path.removeprefix(FROZEN)}".rstrip("."): spec
        for path, spec in arrays.items()
        if path.startswith(FROZEN)
    }
    for path, spec in arrays.items():
        if path.startswith(OF_ISLANDS):
            name = path.removeprefix(OF_ISLANDS).rstrip(".")
            found[name] = _divided(spec, islands, target.get(name))
    return found


def _divided(spec: Spec, islands: int, like: Tree | None) -> Spec:
    first, *others = spec.shape
    scalar = first == islands and (like is None or np.ndim(like) == 0)
    return replace(spec, shape=(*others,) if scalar else (first // islands, *others))


def stored_leaf(leaf: Tree, spec: Spec) -> jax.ShapeDtypeStruct:
    """An array as it is read: of several islands, sharded along its dims as one of them is."""
    sharding = raw_abstract(leaf).sharding
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=sharding)


def of_island(array: jax.Array, leaf: Tree, number: int, islands: int) -> jax.Array:
    """The array of one island, as it is stored."""
    raw = raw_abstract(leaf)
    return jax.jit(
        lambda x: jnp.copy(x.reshape(islands, *raw.shape)[number]), out_shardings=raw.sharding
    )(array)


def combined(path: str, array: jax.Array, leaf: Tree, islands: int) -> jax.Array:
    """One array of those of all islands: of numbers the mean, of counts the largest, of what guards
    carry the smallest, of all else that of the first island.
    """
    raw = raw_abstract(leaf)

    def made(x: Any) -> Any:
        x = x.reshape(islands, *raw.shape)
        if path.startswith("guard."):
            return x.min(0)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return x.astype(wide).mean(0).astype(x.dtype)
        return x.max(0) if np.ndim(leaf) == 0 and not is_key(leaf) else x[0]

    numbers = jnp.issubdtype(array.dtype, jnp.inexact) or np.ndim(leaf) == 0
    if is_of_optimizer(path) and not numbers and not is_key(leaf) and not _alike(array, islands):
        raise CheckpointError(
            f"{path} has other integers on each of the {islands} islands of the checkpoint, and"
            " nothing says what their mean is\nTry: the same number of islands, or"
            " restore(program, parameters_only=True), which starts the optimizer anew"
        )
    return jax.jit(made, out_shardings=raw.sharding)(array)


def _alike(array: jax.Array, islands: int) -> bool:
    def same(x: Any) -> Any:
        parts = x.reshape(islands, -1)
        return (parts == parts[:1]).all()

    return bool(jax.jit(same)(array))
