"""The partial sums of one gradient become the gradient that the optimizer reads.

What a device has summed over its own examples is scattered over the mesh axes that shard the
gradient, and all-reduced over the others that hold partial sums. For a weight A[I, J_T] in use
whose gradient is stored as A[I_F, J_T], with the batch sharded over fsdp and data:

    partial sums [I, J_T] on every device
    reduce-scatter over fsdp along I      [I_F, J_T]
    all-reduce over data                  A[I_F, J_T]

On a TPU torus the compiler makes a reduce-scatter only along one physical dim at a time, and only
of the rows of a matrix. So the sums are laid out as rows, and scattered over the physical parts of
fsdp one after another, the major one first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Cuts, Machine, row_major
from shardlib.lowering.reading.use import Use

#: Columns and rows of a tile in TPU memory, elements (jax-ml/jax docs/pallas/tpu/details.rst).
LANES, SUBLANES = 128, 8


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the partial sums of one gradient become the gradient that the optimizer reads.

    Attributes:
        scattered: dims of the operand that the stored gradient is sharded along, beyond what shards
            them already.
        summed: mesh axes that hold partial sums and shard no dim.
        order: dims of the operand in the order of the parameter's, where it is used transposed:
            sums are all-reduced as the parameter lies, a table that is used both ways once, since
            compilers add what is of one shape before they reduce it. () where nothing is moved.
    """

    scattered: Cuts
    summed: tuple[str, ...]
    order: tuple[int, ...] = ()

    def apply(self, partial: jax.Array, machine: Machine, *, stacked: bool = False) -> jax.Array:
        """Reduces one device's partial sums, inside a manual region."""
        return self.exchanged(partial, machine, stacked=stacked)[0]

    def exchanged(
        self, partial: jax.Array, machine: Machine, *, stacked: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """The same, and what the device keeps for the next step; None where it keeps nothing."""
        return machine.exchange(partial, lambda sums: self.collectives(sums, machine, stacked))

    def collectives(self, partial: jax.Array, machine: Machine, stacked: bool) -> jax.Array:
        """Scatters and sums up what every device gives, in its dtype; arguments as for `apply`."""
        for dim, axes in self.scattered.items():
            partial = (
                _scattered_rows(partial, dim, machine.parts(axes), stacked)
                if machine.torus
                else _scattered(partial, dim, machine.parts(axes))
            )
        if not self.summed:
            return partial
        parts = machine.parts(self.summed)
        if len(self.order) != partial.ndim:
            return jax.lax.psum(partial, parts)
        return jax.lax.psum(partial.transpose(self.order), parts).transpose(np.argsort(self.order))


def _scattered(partial: jax.Array, dim: int, parts: Sequence[str]) -> jax.Array:
    result = jax.lax.psum_scatter(partial, tuple(parts), scatter_dimension=dim, tiled=True)
    return row_major(result) if dim else result


def _scattered_rows(partial: jax.Array, dim: int, parts: Sequence[str], stacked: bool) -> jax.Array:
    """Scatters sums along a dim, one part after another, with that dim outside of the tiles of
    memory.

    Along a dim inside of tiles the TPU compiler has no reduce-scatter, or one with padding and an
    exchange of rows between neighbours; and none of rows that end inside of a tile, which are
    filled up with zeros.
    """
    first = jnp.moveaxis(partial, dim, 0)
    length, size = first.shape[0], first.size // first.shape[0]
    missing = -size % LANES if size > LANES else 0
    flat = jnp.pad(first.reshape(length, size), ((0, 0), (0, missing)))
    devices = math.prod(jax.lax.axis_size(part) for part in parts)
    in_tiles = flat.shape[1] % LANES == 0 and length % (devices * SUBLANES) == 0
    result = (
        _tiles_scattered(flat, parts)
        if in_tiles
        else _rows_scattered(flat, parts, moved=stacked or length > flat.shape[1])
    )
    return jnp.moveaxis(result[:, :size].reshape(-1, *first.shape[1:]), 0, dim)


def _tiles_scattered(flat: jax.Array, parts: Sequence[str]) -> jax.Array:
    """Scatters the rows of a matrix in blocks that are whole tiles, as they lie in memory: nothing
    is padded. Rows as matrices of lanes would be: 10 x 128 columns of a row take 16 x 128.
    """
    length, size = flat.shape
    tiles = flat.reshape(length // SUBLANES, SUBLANES, size // LANES, LANES).swapaxes(1, 2)
    for part in parts:
        tiles = jax.lax.psum_scatter(row_major(tiles), part, scatter_dimension=0, tiled=True)
    return tiles.swapaxes(1, 2).reshape(-1, size)


def _rows_scattered(flat: jax.Array, parts: Sequence[str], *, moved: bool) -> jax.Array:
    """Scatters the rows of a matrix whose shards are no whole tiles, each as a matrix of lanes."""
    length, size = flat.shape
    rows = flat.reshape(length, size // LANES, LANES) if size % LANES == 0 else flat
    for part in parts:
        if moved or rows.ndim == 2:
            rows = row_major(rows)
        rows = jax.lax.psum_scatter(rows, part, scatter_dimension=0, tiled=True)
    return rows.reshape(rows.shape[0], size)


def reduction(
    use: Use,
    gradient: Layout,
    partial: tuple[str, ...],
    machine: Machine,
    weight_cuts: Cuts | None = None,
) -> Reduction:
    """Plans the reduction of the gradient of one operand."""
    scattered: Cuts = {}
    for dim, source in enumerate(use.view.dims):
        axes = () if source is None else gradient[source]
        before = (weight_cuts or {}).get(dim, ())
        further = axes[len(before) :]
        if (
            further
            and axes[: len(before)] == before
            and set(further) <= set(partial)
            and use.shape[dim] % machine.ways(axes) == 0
        ):
            scattered[dim] = further
    done = {axis for axes in scattered.values() for axis in axes}
    return Reduction(
        scattered=scattered,
        summed=tuple(axis for axis in partial if axis not in done),
        order=use.view.order,
    )
