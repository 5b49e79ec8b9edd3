"""A checkpoint read: its description first, then its arrays, straight to where they are to live,
then their sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from shardlib.checkpointing import from_disk
from shardlib.checkpointing.about import About, DamagedError, from_json, of_step
from shardlib.checkpointing.islands.form import (
    AnyProgram,
    State,
    anew,
    form_of,
    is_of_optimizer,
    state_of,
    without_optimizer,
)
from shardlib.checkpointing.snapshot import Camera
from shardlib.checkpointing.tree import (
    compared,
    fitted,
    named_leaves,
    raw_abstract,
    said,
    shortened,
    spec_of,
)
from shardlib.errors import CheckpointError
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.checksums import by_path
from shardlib.processes import shards
from shardlib.processes import together as processes
from shardlib.processes.values import whole
from shardlib.report import Finding


def handler(
    options: ocp.options.MultiprocessingOptions, *, own: bool = False
) -> ocp.CompositeCheckpointHandler:
    """Orbax's handlers of the two items of a checkpoint: "state", the arrays by path, and "about",
    the description.
    """
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    if own:
        arrays = ocp.handlers.PyTreeCheckpointHandler(
            use_compression=False,
            multiprocessing_options=options,
            type_handler_registry=from_disk.registry(options.primary_host),
        )
    else:
        arrays = ocp.handlers.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=options
        )
    text = ocp.handlers.JsonCheckpointHandler(multiprocessing_options=options)
    handlers.add("state", ocp.args.PyTreeSave, arrays)
    handlers.add("about", ocp.args.JsonSave, text)
    return ocp.CompositeCheckpointHandler(
        handler_registry=handlers,
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
    )


def read_about(path: epath.Path, step: int) -> About:
    """Reads the description of the checkpoint of a step; all processes have the same answer."""
    failure = ""
    about = None
    try:
        about = _about(path, step)
    except DamagedError as error:
        failure = str(error)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        FileNotFoundError,
        NotADirectoryError,
        RecursionError,
    ) as error:
        failure = f"its description cannot be read ({said(error)})"
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be opened ({error})\nTry: another folder, or other"
            " permissions"
        ) from error
    if not processes.all_well(about is not None) or about is None:
        raise DamagedError(failure or "its description cannot be read in another process")
    return about


def _about(path: epath.Path, step: int) -> About:
    """Reads the description; of what is no file, a pipe perhaps, nothing is read."""
    others = [
        one.name
        for one in (path / "about").iterdir()
        if "://" not in str(one) and not Path(one).is_file()
    ]  # to etils, whatever is no folder is a file
    if others:
        raise DamagedError(
            f"its description has {', '.join(sorted(others)[:4])}, which is no file that can be"
            " read"
        )
    return of_step(from_json(ocp.handlers.JsonCheckpointHandler().restore(path / "about")), step)


def try_about(path: epath.Path, step: int) -> About | None:
    """The description of the checkpoint of a step, None where it cannot be read or is another's;
    for one process alone.
    """
    try:
        return _about(path, step)
    except (
        DamagedError,
        CheckpointError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        RecursionError,
    ):
        return None


def read_state(
    path: epath.Path,
    about: About,
    wanted: State,
    camera: Camera,
    program: AnyProgram | None = None,
    *,
    new_optimizer: bool = False,
) -> tuple[State, tuple[Finding, ...]]:
    """Restores the arrays of a checkpoint."""
    like = without_optimizer(wanted) if new_optimizer else wanted
    target = form_of(like)
    named = named_leaves(target)
    stored = {
        p: spec for p, spec in about.arrays.items() if not (new_optimizer and is_of_optimizer(p))
    }
    findings = compared(
        stored,
        {p: spec_of(leaf) for p, leaf in named.items()},
        f"the checkpoint of step {about.step}",
    )
    raw = {p: raw_abstract(leaf) for p, leaf in named.items()}
    leaves = {
        p: jax.ShapeDtypeStruct(leaf.shape, np.dtype(stored[p].dtype), sharding=leaf.sharding)
        for p, leaf in raw.items()
    }
    disk = program.stored if isinstance(program, Program) else frozenset[str]()

    def read(some: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        return fitted({p: named[p] for p in some}, read_arrays(path, about, some, camera))

    arrays: dict[str, Any] = read({p: leaf for p, leaf in leaves.items() if p not in disk})
    for portion in from_disk.portions({p: leaf for p, leaf in leaves.items() if p in disk}):
        assert isinstance(program, Program)
        arrays.update(
            {
                p: program.stow(array, _sums(array, p, about, camera))
                for p, array in read(portion).items()
            }
        )
    form = jax.tree.structure(target).unflatten([arrays[p] for p in named])
    state = state_of(form, like)
    if not new_optimizer:
        return state, findings
    assert program is not None
    told = Finding(
        code="optimizer-anew",
        severity="info",
        message=(
            f"The optimizer starts anew; the checkpoint of step {about.step} gave the parameters."
        ),
    )
    return anew(program, state), (*findings, told)


def read_arrays(
    path: epath.Path, about: About, leaves: Mapping[str, jax.ShapeDtypeStruct], camera: Camera
) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, and finds flipped bits."""
    with ThreadPoolExecutor(1) as pool:  # compiles while files are read
        compiled = pool.submit(camera.sums, leaves)
        return _verified(_read_arrays(path, leaves), about, compiled.result())


def _sums(array: jax.Array, path: str, about: About, camera: Camera) -> np.ndarray:
    """Sums of an array that was restored; those of the checkpoint, unless it was cast."""
    if str(array.dtype) == about.arrays[path].dtype:
        return np.asarray(about.sums[path], np.uint32)
    return whole(camera.sums({path: array})({path: array}))[0]


def _read_arrays(
    path: epath.Path, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, every device's part alone; that it fails is known to all."""
    failure, arrays = "", {}
    try:
        arrays = shards.read(path / "state", leaves)
    except PermissionError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be opened ({error})\nTry: other permissions"
        ) from error
    # tensorstore says "not found", "data loss" and the like by ValueError, and other kinds of files
    # by others
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):  # memory, not the checkpoint
            raise
        failure = f"its arrays cannot be read ({said(error)})"
    if not processes.all_well(not failure):
        raise DamagedError(failure or "its arrays cannot be read in another process")
    return arrays


def _verified(arrays: dict[str, jax.Array], about: About, sums: Any) -> dict[str, jax.Array]:
    found = by_path(arrays, whole(sums(arrays)))
    wrong = [path for path, pair in found.items() if tuple(about.sums[path]) != pair]
    if wrong:
        raise DamagedError(f"bits have changed in {shortened(wrong)}")
    return arrays
