"""Arrays that are stored on disk, into a checkpoint and out of it: a few at a time, so that memory
holds no more of them than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from shardlib.lowering.host_memory.disk.arrays import DiskArray
from shardlib.lowering.host_memory.offload import HOST
from shardlib.processes.shards import ArrayHandler

#: Bytes of arrays, all processes together, that are read at a time.
PORTION = 1 << 28


class _Handler(ArrayHandler):
    """Writes arrays; those on disk after the others, each read when the one before it is
    written.
    """

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        options = list(args) if args is not None else [ocp.SaveArgs()] * len(values)
        resting = [k for k, leaf in enumerate(values) if not isinstance(leaf, DiskArray)]
        stored = [[k] for k, leaf in enumerate(values) if isinstance(leaf, DiskArray)]
        for portion in ([resting] if resting else []) + stored:
            arrays = [_in_memory(values[k]) for k in portion]
            for written in await super().serialize(
                arrays, [infos[k] for k in portion], [options[k] for k in portion]
            ):
                written.result()
        return []


def _in_memory(leaf: Any) -> jax.Array:
    """What is on disk as an array in memory of the host where the devices read that by themselves:
    theirs is the training's.
    """
    if not isinstance(leaf, DiskArray):
        return leaf
    apart = all(
        device.platform != "cpu"
        and any(memory.kind == HOST for memory in device.addressable_memories())
        for device in leaf.sharding.addressable_devices
    )
    return leaf.array(HOST if apart else None)


def registry(first: int | None) -> ocp.type_handlers.TypeHandlerRegistry:
    """What Orbax writes a state with that is partly on disk, or in some of several processes."""
    handler = _Handler(first)
    found = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    found.add(DiskArray, handler, override=True, ignore_warnings=True)
    return found


def portions(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Abstract arrays in groups of at most `PORTION` bytes, or of one array."""
    group: dict[str, jax.ShapeDtypeStruct] = {}
    size = 0
    for path, leaf in leaves.items():
        own = leaf.size * leaf.dtype.itemsize
        if group and size + own > PORTION:
            yield group
            group, size = {}, 0
        group[path] = leaf
        size += own
    if group:
        yield group
