"""One file after the other: each tensor is put together on the host, written, and forgotten."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpointing.huggingface.files import DTYPES
from shardlib.checkpointing.huggingface.located import Stored
from shardlib.processes.values import in_first_process

#: Our dtypes -> the files'.
WORDS = {dtype: word for word, dtype in DTYPES.items()}


class Gather:
    """Brings one layer's or one expert's part of a parameter to the host; over several processes by
    way of every device of the mesh.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None) -> None:
        whole = None
        if mesh is not None and jax.process_count() > 1:
            whole = NamedSharding(mesh, PartitionSpec())
        self._part = jax.jit(_part, static_argnums=2, out_shardings=whole)

    def __call__(self, leaf: jax.Array, place: tuple[int, ...]) -> np.ndarray | None:
        return in_first_process(self._part(leaf, np.asarray(place, np.int32), len(place)))


def _part(leaf: jax.Array, place: jax.Array, dims: int) -> jax.Array:
    for i in range(dims):
        leaf = jax.lax.dynamic_index_in_dim(leaf, place[i], keepdims=False)
    return leaf


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[Stored, str]],
    leaves: Mapping[str, jax.Array],
    gather: Gather,
    first: bool,
) -> None:
    """Writes one file: the length of the header, the header, the tensors one after another; renamed
    when it is whole.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (one, dtype) in tensors.items():
        start, end = end, end + int(np.prod(one.shape)) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": WORDS[dtype],
            "shape": list(one.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8 bytes
    if not first:
        for one, dtype in tensors.values():
            _tensor(one, dtype, leaves, gather)
        return
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one, dtype in tensors.values():
            _append(file, _tensor(one, dtype, leaves, gather))
    os.replace(partial, path)


def _append(file: BinaryIO, tensor: np.ndarray) -> None:
    file.write(np.ascontiguousarray(tensor).view(np.uint8).data)


def _tensor(one: Stored, dtype: str, leaves: Mapping[str, jax.Array], gather: Gather) -> np.ndarray:
    tensor = np.empty(one.shape, np.dtype(dtype))
    for located, place in one.parts:
        part = gather(leaves[located.path], place)
        if part is not None:
            located.form.into(tensor, part.astype(tensor.dtype))
    return tensor
