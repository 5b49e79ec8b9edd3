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

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Cuts, Machine, row_major
from shardlib.lowering.reading.use import Use

#: Columns of a tile in TPU memory, elements (jax-ml/jax docs/pallas/tpu/details.rst).
LANES = 128


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the partial sums of one gradient become the gradient that the optimizer reads.

    Attributes:
        scattered: dims of the operand that the stored gradient is sharded along, beyond what shards
            them already.
        summed: mesh axes that hold partial sums and shard no dim.
    """

    scattered: Cuts
    summed: tuple[str, ...]

    def apply(self, partial: jax.Array, machine: Machine, *, stacked: bool = False) -> jax.Array:
        """Reduces one device's partial sums, inside a manual region.

        Args:
            partial: the sums.
            machine: where it runs.
            stacked: whether they are several matrices, of which no dim can be expected to be
                innermost.
        """
        return self.exchanged(partial, machine, stacked=stacked)[0]

    def exchanged(
        self, partial: jax.Array, machine: Machine, *, stacked: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """The same, and what the device keeps for the next step; None where it keeps nothing.

        Args:
            partial: this device's sums.
            machine: the mesh and its collectives.
            stacked: see `apply`.
        """
        return machine.exchange(partial, lambda sums: self.collectives(sums, machine, stacked))

    def collectives(self, partial: jax.Array, machine: Machine, stacked: bool) -> jax.Array:
        """Scatters and sums up what every device gives, in its dtype; arguments as for `apply`.

        Args:
            partial: this device's sums.
            machine: the mesh and its collectives.
            stacked: see `apply`.
        """
        for dim, axes in self.scattered.items():
            partial = (
                _scattered_rows(partial, dim, machine.parts(axes), stacked)
                if machine.torus
                else _scattered(partial, dim, machine.parts(axes))
            )
        return jax.lax.psum(partial, machine.parts(self.summed)) if self.summed else partial


def _scattered(partial: jax.Array, dim: int, parts: Sequence[str]) -> jax.Array:
    found = jax.lax.psum_scatter(partial, tuple(parts), scatter_dimension=dim, tiled=True)
    return row_major(found) if dim else found


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
    rest = size + missing
    rows = flat.reshape(length, rest // LANES, LANES) if rest % LANES == 0 else flat
    for part in parts:
        if (
            stacked or rows.ndim == 2 or length > rest
        ):  # else the matmul puts the longer dim innermost by itself
            rows = row_major(rows)
        rows = jax.lax.psum_scatter(rows, part, scatter_dimension=0, tiled=True)
    found = rows.reshape(rows.shape[0], rest)[:, :size]
    return jnp.moveaxis(found.reshape(found.shape[0], *first.shape[1:]), 0, dim)


def reduction(
    use: Use, gradient: Layout, partial: tuple[str, ...], machine: Machine, held: Cuts | None = None
) -> Reduction:
    """Plans the reduction of the gradient of one operand.

    Args:
        use: how the operand relates to the parameter.
        gradient: how the optimizer wants the parameter's gradient sharded.
        partial: mesh axes that hold partial sums.
        machine: where it runs.
        held: what shards the operand already, inside the region.
    """
    scattered: Cuts = {}
    for dim, source in enumerate(use.view.dims):
        axes = () if source is None else gradient[source]
        before = (held or {}).get(dim, ())
        wanted = axes[len(before) :]
        if (
            wanted
            and axes[: len(before)] == before
            and set(wanted) <= set(partial)
            and use.shape[dim] % machine.ways(axes) == 0
        ):
            scattered[dim] = wanted
    done = {axis for axes in scattered.values() for axis in axes}
    return Reduction(
        scattered=scattered, summed=tuple(axis for axis in partial if axis not in done)
    )
