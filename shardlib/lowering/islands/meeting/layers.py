"""Layers of a fragment: of a stack of layers some rows of the first dim, on each device its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.jax_types import Value

#: Rows of the first dim on a device: (first, step between them); None for all.
Rows = tuple[int, int] | None


def taken(
    mesh: Mesh | AbstractMesh,
    arrays: Sequence[jax.Array],
    shardings: Sequence[NamedSharding],
    rows: Sequence[Rows],
) -> list[jax.Array]:
    """The rows of arrays."""
    return [
        array
        if some is None
        else jax.shard_map(
            partial(_rows, some), mesh=mesh, in_specs=own.spec, out_specs=own.spec, check_vma=False
        )(array)
        for array, own, some in zip(arrays, shardings, rows, strict=True)
    ]


def put(
    mesh: Mesh | AbstractMesh,
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    shardings: Sequence[NamedSharding],
    rows: Sequence[Rows],
) -> list[jax.Array]:
    """Arrays with new rows."""
    return [
        after
        if some is None
        else jax.shard_map(
            partial(_with_rows, some),
            mesh=mesh,
            in_specs=(own.spec, own.spec),
            out_specs=own.spec,
            check_vma=False,
        )(array, after)
        for array, after, own, some in zip(arrays, new, shardings, rows, strict=True)
    ]


def rows_of(rows: Sequence[Rows], arrays: Sequence[Value]) -> list[Value]:
    """On one device: the rows of what it holds."""
    return [_rows(some, array) for some, array in zip(rows, arrays, strict=True)]


def with_rows(rows: Sequence[Rows], arrays: Sequence[Value], new: Sequence[Value]) -> list[Value]:
    """On one device: what it holds, with new rows."""
    return [_with_rows(*one) for one in zip(rows, arrays, new, strict=True)]


def _rows(rows: Rows, array: Value) -> Value:
    return array if rows is None else array[rows[0] :: rows[1]]


def _with_rows(rows: Rows, array: Value, some: Value) -> Value:
    return some if rows is None else array.at[rows[0] :: rows[1]].set(some)
