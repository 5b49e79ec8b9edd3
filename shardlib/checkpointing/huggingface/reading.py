"""From the tensors of files to sharded parameters: device by device, each the shard it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing.huggingface.files import DTYPES, Files
from shardlib.checkpointing.huggingface.located import Located, Stored, locate, stored
from shardlib.checkpointing.huggingface.names import Names, names
from shardlib.checkpointing.tree import check_target, named_leaves, shortened
from shardlib.errors import CheckpointError, ModelError, raise_all
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.models import huggingface
from shardlib.models.config import TransformerConfig
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig
from shardlib.report import Finding
from shardlib.untrusted import read_json

#: Ends of the paths of model state that files hold beside the parameters.
STATE = ("experts.bias",)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model out of files.

    Attributes:
        state: a training state before its first step: parameters from the files, a new state of the
            optimizer.
        config: what `config.json` says.
        findings: tensors that were passed over, dtypes that were cast to smaller ones.
    """

    state: TrainState
    config: TransformerConfig | EncoderDecoderConfig
    findings: tuple[Finding, ...]


def load(folder: str | Path, program: Program | IslandsProgram, *, seed: int = 0) -> Imported:
    """Reads a model into a program's layout.

    Every process reads what its own devices keep; what is in memory at once is the part of one
    parameter for one device.
    """
    if isinstance(program, IslandsProgram):
        return _of_islands([load(folder, one, seed=seed) for one in program.programs], program)
    root = Path(folder)
    check_target(program.state)
    config, family = read_config(root / "config.json")
    table = names(config, family)
    params, state = named_leaves(program.state.params), held_state(program.state.model_state)
    located = locate(
        config, table, {path: tuple(leaf.shape) for path, leaf in {**params, **state}.items()}
    )
    with Files(folder=root) as files:
        spelling, findings = matched(files, table, stored(located), config, root)
        arrays = {
            one.path: _array(files, one, {**params, **state}[one.path], spelling) for one in located
        }
        findings += _smaller(files, located, {**params, **state}, spelling)
    return Imported(state=_state(program, arrays, seed), config=config, findings=findings)


def _of_islands(parts: Sequence[Imported], program: IslandsProgram) -> Imported:
    """Islands that all start with the same parameters."""
    state = program.begun(tuple(one.state for one in parts))
    return replace(parts[0], state=cast("TrainState", state))


def read_config(path: Path) -> tuple[TransformerConfig | EncoderDecoderConfig, str]:
    """A configuration and its `model_type`."""
    config = huggingface.read(path)
    return (
        config,
        read_json(path, "model configuration", ModelError, limits=huggingface.CONFIG)["model_type"],
    )


def held_state(model_state: Tree) -> dict[str, Tree]:
    """The leaves of a model's state that files hold, by path."""
    return {path: leaf for path, leaf in named_leaves(model_state).items() if path.endswith(STATE)}


def matched(
    files: Files,
    table: Names,
    wanted: Mapping[str, Stored],
    config: TransformerConfig | EncoderDecoderConfig,
    folder: Path,
) -> tuple[dict[str, str], tuple[Finding, ...]]:
    """Our spelling of names -> the files', and what was passed over."""
    spelling = {
        name: spelled
        for name in wanted
        if (spelled := next((s for s in _spellings(table, name) if s in files.tensors), None))
    }
    problems = [
        f"{name} {list(one.shape)} is missing"
        for name, one in wanted.items()
        if name not in spelling
    ]
    for name, spelled in spelling.items():
        shape, dtype = files.tensors[spelled]
        if shape != wanted[name].shape:
            problems.append(
                f"{spelled} is {list(shape)}, the program needs {list(wanted[name].shape)}"
            )
        elif dtype not in DTYPES:
            problems.append(f"{spelled} has dtype {dtype}; known are {', '.join(DTYPES)}")
    over = sorted(set(files.tensors) - set(spelling.values()))
    passed = [name for name in over if _is_passed_over(name, table, config)]
    problems += [
        f"{name} {list(files.tensors[name][0])} is in the files alone"
        for name in over
        if name not in passed
    ]
    if problems:
        shown = (
            problems if len(problems) <= 40 else [*problems[:40], f"and {len(problems) - 40} more"]
        )
        raise_all(
            CheckpointError,
            f"the files in {folder} do not fit the program",
            shown,
            hint="a program of models.build(models.load(folder)), and all files of the folder",
        )
    told = Finding(
        code="tensors-passed-over",
        severity="info",
        where=shortened(passed),
        message=(
            f"{len(passed)} tensors of {folder} are no parameters of the model and were passed"
            " over."
        ),
    )
    return spelling, (told,) if passed else ()


def _spellings(table: Names, name: str) -> list[str]:
    """How files may spell a name, the usual way first."""
    usual, *others = table.starts
    if not name.startswith(usual) or not others:
        return [name, name.replace("lm_head.", "language_model.lm_head.")]
    return [name, *(start + name.removeprefix(usual) for start in others)]


def _is_passed_over(
    name: str, table: Names, config: TransformerConfig | EncoderDecoderConfig
) -> bool:
    """Buffers, heads that are the embedding again, towers of other senses, and layers that predict
    further tokens (DeepSeek V3).
    """
    if name.endswith(table.ignored) or any(
        word in name for word in ("vision_tower.", "multi_modal_projector.")
    ):
        return True
    beyond = isinstance(config, TransformerConfig) and name.startswith(
        f"model.layers.{config.layers}."
    )
    return beyond or (config.tied and name.endswith("lm_head.weight"))


def _array(files: Files, located: Located, leaf: Any, spelling: Mapping[str, str]) -> jax.Array:
    """One parameter, put together on its devices; devices with the same part share one reading of
    it.
    """
    by_part: dict[Any, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        part = tuple(one.indices(size)[:2] for one, size in zip(index, leaf.shape, strict=True))
        by_part.setdefault(part, []).append(device)
    shards: dict[jax.Device, jax.Array] = {}
    for part, devices in by_part.items():
        read = read_part(files, located, part, np.dtype(leaf.dtype), spelling)
        shards |= {device: jax.device_put(read, device) for device in devices}
    return jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, list(shards.values()), dtype=leaf.dtype
    )


def read_part(
    files: Files,
    located: Located,
    part: tuple[tuple[int, int], ...],
    dtype: np.dtype,
    spelling: Mapping[str, str],
) -> np.ndarray:
    """A part of one of our parameters.

    Args:
        dtype: of the result.
        spelling: our names -> the files'.
    """
    lead, inner = part[: located.lead], part[located.lead :]
    out = np.empty([stop - start for start, stop in part], dtype)
    for place in np.ndindex(*(stop - start for start, stop in lead)):
        name = located.name(tuple(start + i for (start, _), i in zip(lead, place, strict=True)))
        out[place] = located.form.ours_from(
            files.read(spelling[name], located.form.places(located.inner, inner)), inner
        )
    return out


def _smaller(
    files: Files, located: list[Located], leaves: Mapping[str, Any], spelling: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Says which parameters have a dtype that cannot hold all numbers of the files."""
    cast: list[str] = []
    for one in located:
        found, own = (
            np.dtype(DTYPES[files.tensors[spelling[one.name((0,) * one.lead)]][1]]),
            np.dtype(leaves[one.path].dtype),
        )
        if jnp.promote_types(found, own) != own:
            cast.append(f"{one.path} {found} -> {own}")
    told = Finding(
        code="import-dtype",
        severity="warning",
        where=shortened(cast),
        message=(
            f"{len(cast)} parameters have a dtype that cannot hold all numbers of the files and"
            " were rounded."
        ),
    )
    return (told,) if cast else ()


def _state(program: Program, arrays: Mapping[str, jax.Array], seed: int) -> TrainState:
    """The state around the parameters: what only the optimizer and the model know is made where it
    stays.
    """
    wanted = program.state
    params = jax.tree.structure(wanted.params).unflatten(
        [arrays[path] for path in named_leaves(wanted.params)]
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (wanted.step, wanted.model_state))
    step, fresh = jax.jit(
        lambda: (jnp.int32(0), program.model.init(seed)[1]), out_shardings=shardings
    )()
    own = [
        arrays.get(path, leaf) if path.endswith(STATE) else leaf
        for path, leaf in named_leaves(fresh).items()
    ]
    return program.anew(
        TrainState(
            step=step,
            params=params,
            model_state=jax.tree.structure(fresh).unflatten(own),
            opt_state=(),
        )
    )
