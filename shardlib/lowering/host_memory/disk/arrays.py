"""An array that rests in files: what a step holds in place of a `jax.Array` of optimizer state.

Its values do not change: a step reads it, writes a new one beside it, and deletes it, as it deletes
the buffers that it is given. Every process has the pieces of its own devices, each once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from shardlib.errors import DiskError
from shardlib.lowering.host_memory.disk.files import File, Folder

#: Where a piece of an array begins and ends, for every dim.
Index = tuple[tuple[int, int], ...]


class DiskArray:
    """An array on disk, a leaf of trees.

    Attributes:
        shape, dtype, sharding: of the array, as those of a `jax.Array`.
        sums: uint32 [2], see `shardlib.lowering.runtime.checksums`.
    """

    def __init__(
        self,
        folder: Folder,
        like: jax.Array | DiskArray,
        files: Mapping[Index, File],
        written: Future[None] | None,
        sums: Any,
    ) -> None:
        self.shape, self.dtype, self.sharding, self.sums = (
            tuple(like.shape),
            np.dtype(like.dtype),
            like.sharding,
            sums,
        )
        self._folder, self._files, self._written = folder, dict(files), written
        self._end = weakref.finalize(self, _release, folder, tuple(self._files.values()), written)
        self._end.atexit = False

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Bytes in files of this process."""
        return sum(file.size for file in self._files.values())

    def __repr__(self) -> str:
        return f"DiskArray(shape={self.shape}, dtype={self.dtype}, sharding={self.sharding})"

    def array(self, memory_kind: str | None = None) -> jax.Array:
        """Reads it: an array of the same layout on the devices.

        Args:
            memory_kind: the memory of the devices; by default that of the layout.
        """
        return self.placed(self.read(), memory_kind)

    def read(self) -> dict[Index, np.ndarray]:
        """Reads the pieces of this process into memory of the host; errors as those of `array`."""
        if self.is_deleted():
            raise DiskError(
                f"state on disk was deleted: {self!r}\nTry: the state that the last step returned;"
                " a step deletes the state that it is given"
            )
        if self._written is not None:
            self._written.result()
        return {
            index: file.read(tuple(stop - start for start, stop in index), self.dtype)
            for index, file in self._files.items()
        }

    def placed(self, read: Mapping[Index, np.ndarray], memory_kind: str | None = None) -> jax.Array:
        """What was read as an array on the devices.

        Args:
            memory_kind: memory of the devices; by default that of the sharding.
        """
        sharding = (
            self.sharding if memory_kind is None else self.sharding.with_memory_kind(memory_kind)
        )
        pieces = [
            jax.device_put(
                read[_index(index, self.shape)],
                jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind),
                may_alias=False,
            )
            for device, index in sharding.addressable_devices_indices_map(self.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(
            self.shape, sharding, pieces, dtype=self.dtype
        )

    def held(self) -> DiskArray:
        """The same array once more: its files stay until both are deleted."""
        if self.is_deleted():
            raise DiskError(
                f"state on disk was deleted: {self!r}\nTry: the state that the last step returned"
            )
        for file in self._files.values():
            self._folder.hold(file)
        return DiskArray(self._folder, self, self._files, self._written, self.sums)

    def delete(self) -> None:
        """Lets go of its files, as soon as they are written."""
        self._end()

    def is_deleted(self) -> bool:
        """Whether it was deleted."""
        return not self._end.alive


def _release(folder: Folder, files: tuple[File, ...], written: Future[None] | None) -> None:
    def release(_: Any = None) -> None:
        for file in files:
            folder.release(file)

    if written is None:
        release()
    else:
        written.add_done_callback(release)


def _index(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    assert index is not None  # of devices of this process
    return tuple(
        (start, stop)
        for start, stop, _ in (cut.indices(dim) for cut, dim in zip(index, shape, strict=True))
    )


@dataclass(kw_only=True, eq=False)
class Writer:
    """Writes arrays to files in a thread, some behind the program that makes them.

    Attributes:
        folder: of the files.
        behind: how many arrays may wait to be written; then `put` waits.
    """

    folder: Folder
    behind: int = 4
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="state-on-disk")
    )
    _under_way: deque[Future[None]] = field(default_factory=deque)

    def put(self, array: jax.Array, sums: jax.Array | np.ndarray) -> DiskArray:
        """Copies an array to memory of the host, begins to write it, and returns what stands for
        it; to be called from one thread.
        """
        while len(self._under_way) >= self.behind:
            self._under_way.popleft().result()
        copies: dict[Index, np.ndarray] = {}
        for shard in array.addressable_shards:
            index = _index(shard.index, array.shape)
            if index not in copies:
                copies[index] = np.asarray(shard.data)
        files: dict[Index, File] = {}
        try:
            for index, data in copies.items():
                files[index] = self.folder.file(data.nbytes)
        except DiskError:
            for file in files.values():
                self.folder.release(file)
            raise

        def write() -> None:
            for index, data in copies.items():
                files[index].write(data)

        written = self._pool.submit(write)
        self._under_way.append(written)
        return DiskArray(self.folder, array, files, written, sums)
