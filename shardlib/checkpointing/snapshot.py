"""A copy of the training state that the next step cannot overwrite, taken without waiting for
anything.

A step donates the buffers of its state. The copy is queued behind the step that makes the state and
before the step that overwrites it, by the devices' own order of work, so that the training loop
goes on at once. On TPUs and GPUs the copy goes to pinned memory of the host and takes none of the
device's; on a CPU, where host and device are one, it is a plain copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import CheckpointError
from shardlib.lowering.host_memory.disk.arrays import DiskArray
from shardlib.lowering.runtime.checksums import by_path, sums
from shardlib.processes.values import in_every_process

#: Where a copy can be: "host", "device", or "auto" for the host where it has memory of its own.
PLACES = ("auto", "host", "device")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy under way.

    Attributes:
        arrays: by path, each with the layout of the original.
        stored: arrays on disk by path, whose files stay until they are deleted here.
        copied: uint32 [arrays, 2], see `shardlib.lowering.runtime.checksums`.
        kept: uint32 [2] of each of `stored`, by path.
    """

    arrays: dict[str, jax.Array]
    stored: dict[str, DiskArray]
    copied: jax.Array
    kept: dict[str, jax.Array | np.ndarray]

    def sums(self) -> dict[str, tuple[int, int]]:
        """The sums of all arrays; waits for them."""
        known = {path: np.asarray(pair) for path, pair in self.kept.items()}
        return {
            **by_path(self.arrays, np.asarray(self.copied)),
            **{path: (int(pair[0]), int(pair[1])) for path, pair in known.items()},
        }

    def delete(self) -> None:
        """Lets go of what is on disk."""
        for leaf in self.stored.values():
            leaf.delete()


@dataclass(kw_only=True)
class Camera:
    """Takes snapshots; its programs are compiled once for each layout of the state.

    Attributes:
        place: see `PLACES`.
    """

    place: str = "auto"
    _programs: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise CheckpointError(
                f"snapshot={self.place!r} is no place for copies\nTry: one of {', '.join(PLACES)}"
            )

    def take(self, state: Mapping[str, jax.Array | DiskArray]) -> Snapshot:
        """Queues the copies and the sums of some arrays and returns at once; of those on disk, the
        files are kept.
        """
        arrays = {path: leaf for path, leaf in state.items() if not isinstance(leaf, DiskArray)}
        stored = {path: leaf.held() for path, leaf in state.items() if isinstance(leaf, DiskArray)}
        if self._place(arrays) == "device":
            copies, found = self._program(arrays, copies=True)(arrays)
        else:
            found = self._program(arrays, copies=False)(arrays)
            copies = {
                path: jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
                for path, array in arrays.items()
            }
        copied, kept = in_every_process((found, {path: leaf.sums for path, leaf in stored.items()}))
        return Snapshot(arrays=copies, stored=stored, copied=copied, kept=kept)

    def prepare(self, arrays: Mapping[str, Tree]) -> None:
        """Compiles for arrays, concrete or abstract with shardings, so that the first `take` need
        not.
        """
        self._program(arrays, copies=self._place(arrays) == "device")

    def sums(self, arrays: Mapping[str, Tree]) -> Tree:
        """`shardlib.lowering.runtime.checksums.sums` compiled for arrays, concrete or abstract with
        shardings.
        """
        return self._program(arrays, copies=False)

    def _place(self, arrays: Mapping[str, Tree]) -> str:
        if self.place != "auto":
            return self.place
        devices = {device for array in arrays.values() for device in array.sharding.device_set}
        separate = all(
            device.platform != "cpu"
            and any(memory.kind == "pinned_host" for memory in device.addressable_memories())
            for device in devices
            if device.process_index == jax.process_index()
        )
        return "host" if separate else "device"

    def _program(self, arrays: Mapping[str, Tree], *, copies: bool) -> Tree:
        key = (
            copies,
            *(
                (path, array.shape, str(array.dtype), array.sharding)
                for path, array in arrays.items()
            ),
        )
        if key not in self._programs:
            shapes = {
                path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
                for path, array in arrays.items()
            }
            self._programs[key] = _compiled(shapes, copies=copies)
        return self._programs[key]


def _compiled(shapes: dict[str, jax.ShapeDtypeStruct], *, copies: bool) -> Tree:
    """One program for the sums, and where asked for also the copies: the state is read once."""

    def run(arrays: dict[str, jax.Array]) -> Tree:
        return (
            ({path: jnp.copy(array) for path, array in arrays.items()}, sums(arrays, kept))
            if copies
            else sums(arrays, kept)
        )

    run.__name__ = "snapshot" if copies else "sums"
    kept = {path: shape.sharding for path, shape in shapes.items()}
    meshes = [sharding.mesh for sharding in kept.values() if isinstance(sharding, NamedSharding)]
    whole = (
        NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    )  # every process reads the sums
    return jax.jit(run, out_shardings=(kept, whole) if copies else whole).lower(shapes).compile()
