"""The parameters of a model of one's own, read from safetensors files by learned names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from shardlib.annotation.trees.paths import path_text
from shardlib.checkpointing.foreign.forms import Shape, in_form
from shardlib.checkpointing.foreign.learned import LearnedNames, Source
from shardlib.errors import CheckpointError, MissingFileError
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState

del ml_dtypes  # NumPy knows bfloat16 by it


def tensors_of(folder: str | Path) -> dict[str, Shape]:
    """Shapes of all tensors of a folder, by name; no tensor is read."""
    return {
        name: tuple(file.get_slice(name).get_shape())
        for path in _files(folder)
        for file in [_opened(path)]
        for name in file.keys()  # noqa: SIM118
    }


def read_weights(
    folder: str | Path, program: Program, names: LearnedNames, *, seed: int = 0
) -> TrainState:
    """The state before the first step, with parameters from files, each where the plan has it, and
    a new state of the optimizer.

    One parameter at a time is in the memory of the host.
    """
    names.require()
    home = {
        name: file
        for path in _files(folder)
        for file in [_opened(path)]
        for name in file.keys()  # noqa: SIM118
    }
    state = program.init(seed)
    leaves, structure = jax.tree_util.tree_flatten_with_path(state.params)
    params = structure.unflatten(
        [_read(home, names.sources[path_text(path)], leaf) for path, leaf in leaves]
    )
    return program.anew(replace(state, params=params))


def _read(home: Mapping[str, Any], source: Source, leaf: jax.Array) -> jax.Array:
    shape = leaf.shape[1:] if source.stacked else leaf.shape
    parts = [in_form(home[name].get_tensor(name), source.form, shape) for name in source.names]
    whole = np.stack(parts) if source.stacked else parts[0]
    whole = np.ascontiguousarray(whole).astype(leaf.dtype)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: whole[index], dtype=whole.dtype
    )


def _files(folder: str | Path) -> list[Path]:
    path = Path(folder)
    found = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not found:
        raise MissingFileError(f"there are no safetensors files in {path}\nTry: another folder")
    return found


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}\nTry: another copy of it") from error
