"""Shards of arrays in folders of Orbax, written and read by the processes that own them.

Orbax refuses arrays of which a process has no shard, and of a job of several processes those of a
mesh inside of one. So owners alone write and read; idle processes wait for them, and get arrays
without shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from shardlib.processes.values import by_owners, owners_of


def options(owners: frozenset[int]) -> ocp.options.MultiprocessingOptions:
    """How Orbax waits for other processes: by JAX's coordination service.

    Its default are collectives on the devices, which must not run in a thread beside those of the
    training loop.
    """
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=min(owners), active_processes=set(owners)
    )


class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Writes arrays, also those of a mesh inside of one of several processes.

    Args:
        first: number of the first process that writes.
    """

    def __init__(self, first: int | None) -> None:
        super().__init__(
            primary_host=first, array_metadata_store=None, enable_write_sharding_file=False
        )

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """See Orbax."""
        return await super().serialize([_of_job(value) for value in values], infos, args)


class _OfJob:
    """An array of a mesh inside of one process, as Orbax takes it: it refuses a `jax.Array` that is
    in one of several processes, since each could have one of its own.
    """

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


def _of_job(array: Any) -> Any:
    inside = isinstance(array, jax.Array) and array.is_fully_addressable
    return _OfJob(array) if jax.process_count() > 1 and inside else array


def save(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes arrays to a folder that is not there yet; to be called by all processes."""
    owners = owners_of(arrays.values())

    def write() -> None:
        handler = ocp.PyTreeCheckpointHandler(
            multiprocessing_options=options(owners),
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (jax.Array, ArrayHandler(min(owners)))
            ),
        )
        with ocp.Checkpointer(handler, multiprocessing_options=options(owners)) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))

    by_owners(f"arrays in {folder}", owners, write)


def read(
    folder: str | Path | epath.Path, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads arrays, every device's part alone; no process waits for another.

    The handler is used without a `Checkpointer`, which would wait at a barrier for processes that
    have failed.
    """
    if jax.process_index() not in owners_of(leaves.values()):
        return {name: without_shards(leaf) for name, leaf in leaves.items()}
    return ocp.handlers.PyTreeCheckpointHandler().restore(
        epath.Path(folder),
        args=ocp.args.PyTreeRestore(
            item=dict(leaves),
            restore_args={
                name: ocp.ArrayRestoreArgs(
                    sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
                )
                for name, leaf in leaves.items()
            },
            partial_restore=True,
        ),
    )


def without_shards(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array as a process has it that owns none of its devices."""
    sharding = leaf.sharding
    assert isinstance(sharding, jax.sharding.Sharding)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [], dtype=leaf.dtype)
