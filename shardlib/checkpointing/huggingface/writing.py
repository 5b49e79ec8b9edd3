"""From sharded parameters to files: tensor by tensor, each put together on the host, written, and
forgotten.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.checkpointing.huggingface.files import DTYPES, INDEX
from shardlib.checkpointing.huggingface.located import Stored, locate, stored
from shardlib.checkpointing.huggingface.names import names
from shardlib.checkpointing.huggingface.reading import held_state, read_config
from shardlib.checkpointing.tree import named_leaves
from shardlib.errors import CheckpointError, ModelError
from shardlib.lowering.islands.learned import first_of, learned
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.islands.state import IslandsState
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.models.huggingface import CONFIG
from shardlib.untrusted import read_json

_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One file to be written.

    Attributes:
        name: of the file.
        tensors: names of its tensors, in order.
    """

    name: str
    tensors: tuple[str, ...]


def save(
    program: Program | IslandsProgram,
    state: TrainState | IslandsState,
    folder: str | Path,
    *,
    config: str | Path,
    dtype: str | None = None,
    max_bytes: int = 5_000_000_000,
) -> tuple[str, ...]:
    """Writes a model as safetensors files with `config.json` beside them.

    To be called by every process; the first one writes. What is on the host at once is one tensor
    of one layer.

    Args:
        program: of a reference model.
        state: whose parameters to write; of islands the outer ones.
        folder: made where it is not there.
        config: path of the `config.json` that the model was made from: it says how tensors are
            called.
        dtype: "float32", "bfloat16", "float16"; by default what each parameter has.
        max_bytes: size of a file, which only a single tensor may exceed.

    Returns:
        The names of the safetensors files.

    Raises:
        CheckpointError: the folder holds such files already, cannot be written, or the program is
            of another model.
    """
    root, trained = Path(folder), learned(program, state)
    described, family = read_config(Path(config))
    leaves = {**named_leaves(trained.params), **held_state(trained.model_state)}
    if dtype is not None and dtype not in _WORDS:
        raise CheckpointError(f"dtype={dtype!r} is none of files\nTry: one of {', '.join(_WORDS)}")
    tensors = stored(
        locate(
            described,
            names(described, family),
            {path: tuple(leaf.shape) for path, leaf in leaves.items()},
        )
    )
    dtypes = {
        name: dtype or str(leaves[one.parts[0][0].path].dtype) for name, one in tensors.items()
    }
    shards = _shards(
        {
            name: int(np.prod(one.shape)) * np.dtype(dtypes[name]).itemsize
            for name, one in tensors.items()
        },
        max_bytes,
    )
    first = jax.process_index() == 0
    if first:
        _prepare(root)
    gather = _Gather(first_of(program))
    try:
        for shard in shards:
            _write(
                root / shard.name,
                {name: (tensors[name], dtypes[name]) for name in shard.tensors},
                leaves,
                gather,
                first,
            )
        if first:
            _describe(root, Path(config), shards, tensors, dtypes, dtype)
    except OSError as error:
        raise CheckpointError(
            f"the model could not be written to {root} ({error})\nTry: a folder with more room; the"
            " state is as before"
        ) from error
    return tuple(shard.name for shard in shards)


def _prepare(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        there = sorted(
            path.name
            for path in root.iterdir()
            if path.suffix == ".safetensors" or path.name in (INDEX, "config.json")
        )
    except OSError as error:
        raise CheckpointError(
            f"files cannot be written to {root} ({error})\nTry: another folder"
        ) from error
    if there:
        raise CheckpointError(
            f"{root} holds {', '.join(there[:5])} already; nothing is overwritten\nTry: an empty"
            " folder"
        )


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[_Shard]:
    """Fills files in the order of tensors."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return [_Shard(name="model.safetensors", tensors=tuple(groups[0]))]
    return [
        _Shard(name=f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for i, group in enumerate(groups)
    ]


class _Gather:
    """Brings one layer's or one expert's part of a parameter to the host; over several processes by
    way of every device of the mesh.
    """

    def __init__(self, program: Program) -> None:
        whole = NamedSharding(program.mesh, PartitionSpec()) if jax.process_count() > 1 else None
        self._part = jax.jit(_part, static_argnums=2, out_shardings=whole)

    def __call__(self, leaf: jax.Array, place: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self._part(leaf, np.asarray(place, np.int32), len(place)))


def _part(leaf: jax.Array, place: jax.Array, dims: int) -> jax.Array:
    for i in range(dims):
        leaf = jax.lax.dynamic_index_in_dim(leaf, place[i], keepdims=False)
    return leaf


def _write(
    path: Path,
    tensors: Mapping[str, tuple[Stored, str]],
    leaves: Mapping[str, Any],
    gather: _Gather,
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
            "dtype": _WORDS[dtype],
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


def _tensor(one: Stored, dtype: str, leaves: Mapping[str, Any], gather: _Gather) -> np.ndarray:
    tensor = np.empty(one.shape, np.dtype(dtype))
    for located, place in one.parts:
        located.form.into(tensor, gather(leaves[located.path], place).astype(tensor.dtype))
    return tensor


def _describe(
    root: Path,
    config: Path,
    shards: list[_Shard],
    tensors: Mapping[str, Stored],
    dtypes: Mapping[str, str],
    dtype: str | None,
) -> None:
    """Writes `config.json`, and the index where there are several files."""
    data = read_json(config, "model configuration", ModelError, limits=CONFIG)
    (root / "config.json").write_text(
        json.dumps({**data, **({"dtype": dtype, "torch_dtype": dtype} if dtype else {})}, indent=2)
        + "\n",
        encoding="utf-8",
    )
    if len(shards) > 1:
        total = sum(
            int(np.prod(one.shape)) * np.dtype(dtypes[name]).itemsize
            for name, one in tensors.items()
        )
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        (root / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            + "\n",
            encoding="utf-8",
        )
