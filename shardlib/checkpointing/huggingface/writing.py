"""From sharded parameters to files: tensor by tensor, each put together on the host, written, and
forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing.huggingface.files import INDEX
from shardlib.checkpointing.huggingface.located import Stored, locate, stored
from shardlib.checkpointing.huggingface.names import names
from shardlib.checkpointing.huggingface.reading import held_state, read_config
from shardlib.checkpointing.huggingface.tensors import WORDS, Gather, write_file
from shardlib.checkpointing.tree import named_leaves
from shardlib.errors import CheckpointError, ModelError
from shardlib.lowering.islands.learned import first_of, learned
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.islands.state import IslandsState
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.models import huggingface
from shardlib.models.huggingface import CONFIG
from shardlib.untrusted import read_json
from shardlib.untrusted.json_types import JsonMapping


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
        dtype: "float32", "bfloat16", "float16"; by default what each parameter has.
        max_bytes: size of a file, which only a single tensor may exceed.
    """
    trained = learned(program, state)
    read_config(Path(config))
    return _save(
        (trained.params, trained.model_state),
        Path(folder),
        read_json(Path(config), "model configuration", ModelError, limits=CONFIG),
        gather=Gather(first_of(program).mesh),
        dtype=dtype,
        max_bytes=max_bytes,
    )


def save_weights(
    weights: tuple[Tree, Tree],
    folder: str | Path,
    config: JsonMapping,
    *,
    dtype: str | None = None,
    max_bytes: int = 5_000_000_000,
) -> tuple[str, ...]:
    """Writes the weights of a model that is served, as `save` does.

    Args:
        dtype: "float32", "bfloat16", "float16"; by default what each parameter has.
        max_bytes: size of a file, which only a single tensor may exceed.
    """
    return _save(
        weights, Path(folder), config, gather=Gather(None), dtype=dtype, max_bytes=max_bytes
    )


def _save(
    weights: tuple[Tree, Tree],
    root: Path,
    config: JsonMapping,
    *,
    gather: Gather,
    dtype: str | None,
    max_bytes: int,
) -> tuple[str, ...]:
    described, family = huggingface.read(config), config["model_type"]
    leaves = {**named_leaves(weights[0]), **held_state(weights[1])}
    if dtype is not None and dtype not in WORDS:
        raise CheckpointError(f"dtype={dtype!r} is none of files\nTry: one of {', '.join(WORDS)}")
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
    try:
        for shard in shards:
            write_file(
                root / shard.name,
                {name: (tensors[name], dtypes[name]) for name in shard.tensors},
                leaves,
                gather,
                first,
            )
        if first:
            _describe(root, config, shards, tensors, dtypes, dtype)
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


def _describe(
    root: Path,
    data: JsonMapping,
    shards: list[_Shard],
    tensors: Mapping[str, Stored],
    dtypes: Mapping[str, str],
    dtype: str | None,
) -> None:
    """Writes `config.json`, and the index where there are several files."""
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
