"""What do the devices of one stage hold of a global array?

A stage's mesh is the program's mesh at one place along the stage axis, which it keeps with size 1.
An array that is sharded over the stages along its leading dim, or not sharded over them, consists
of arrays over these meshes, each over the buffers that its devices have anyway; and such arrays
make up a global one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.lowering.mesh.device_mesh import parts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """The devices of every stage.

    Attributes:
        mesh: the mesh of the program.
        stages: the mesh of each stage.
    """

    mesh: Mesh
    stages: tuple[Mesh, ...]

    @staticmethod
    def of(mesh: Mesh) -> Places:
        """The stages of a mesh."""
        axes = parts_of(mesh, ("stage",))
        sizes, ones = [mesh.shape[axis] for axis in axes], (1,) * len(axes)
        parts = mesh.devices.reshape(
            int(np.prod(sizes)), *ones, *mesh.devices.shape[len(axes) :]
        )  # the stage axis is the first one
        return Places(
            mesh=mesh,
            stages=tuple(Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in parts),
        )

    @property
    def axis(self) -> tuple[str, ...]:
        """Names of the stage axis."""
        return parts_of(self.mesh, ("stage",))

    def cut(self, tail: Sequence[object] = ()) -> NamedSharding:
        """The sharding of an array whose leading dim the stages cut, the others as given."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis, *tail))

    def cuts(self, sharding: NamedSharding) -> bool:
        """Whether the stages cut the leading dim, and they alone."""
        lead = sharding.spec[0] if len(sharding.spec) else None
        return (lead if isinstance(lead, tuple) else (lead,)) == self.axis

    def at(self, sharding: NamedSharding, stage: int) -> NamedSharding:
        """A sharding over all devices as one over those of a stage."""
        return NamedSharding(self.stages[stage], sharding.spec)

    def shape(self, leaf: jax.ShapeDtypeStruct | jax.Array) -> tuple[int, ...]:
        """Shape of what one stage has of an array."""
        sharding = leaf.sharding
        assert isinstance(sharding, NamedSharding)
        return (
            (leaf.shape[0] // len(self.stages), *leaf.shape[1:])
            if self.cuts(sharding)
            else tuple(leaf.shape)
        )

    def like(self, leaf: jax.ShapeDtypeStruct, stage: int) -> jax.ShapeDtypeStruct:
        """What one stage has of an abstract array."""
        assert isinstance(leaf.sharding, NamedSharding)
        return jax.ShapeDtypeStruct(
            self.shape(leaf), leaf.dtype, sharding=self.at(leaf.sharding, stage)
        )

    def split(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """What each stage has of an array."""
        assert isinstance(array.sharding, NamedSharding)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        shape = self.shape(array)
        return tuple(
            jax.make_array_from_single_device_arrays(
                shape,
                self.at(array.sharding, stage),
                [shards[device] for device in mesh.devices.flat],
            )
            for stage, mesh in enumerate(self.stages)
        )

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The array whose leading dim consists of what each stage has."""
        first = arrays[0].sharding
        assert isinstance(first, NamedSharding)
        shape = (arrays[0].shape[0] * len(arrays), *arrays[0].shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape,
            self.cut(first.spec[1:]),
            [shard.data for array in arrays for shard in array.addressable_shards],
        )
