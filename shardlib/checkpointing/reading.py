"""Reading of checkpoints: the description first, then the arrays, directly into their shardings,
then their checksums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from shardlib.checkpointing.tree import (
    Camera,
    Spec,
    State,
    compared,
    fitted,
    form_of,
    is_of_optimizer,
    named_leaves,
    raw_abstract,
    said,
    shortened,
    spec_of,
    state_of,
    without_optimizer,
)
from shardlib.errors import CheckpointError
from shardlib.findings import Finding
from shardlib.lowering.disk import DiskArray
from shardlib.lowering.mesh import HOST
from shardlib.lowering.runtime import by_path
from shardlib.lowering.training_program import TrainingProgram
from shardlib.planner.plan import Plan, plan_from_data
from shardlib.processes import values
from shardlib.processes import values as processes
from shardlib.processes.values import ArrayHandler, whole
from shardlib.untrusted.data import Json, JsonMapping, JsonObject, construct, shown

# --------------------------------------------------------------------------------------------------
# The description of a checkpoint: a JSON document with a digest.
#
# It contains everything but the arrays: the plan, the position in the data, metrics, and the shape,
# dtype and checksums of every array.

#: Version of the JSON form; readers reject others.
FORMAT = 1


class DamagedError(Exception):
    """A checkpoint whose bytes have changed since it was written."""


@dataclass(frozen=True, kw_only=True)
class About:
    """The document of one checkpoint.

    Attributes:
        step: number of steps done.
        time: seconds since 1970 when it was written.
        arrays: the stored arrays, by path.
        sums: two checksums of each array, see `shardlib.lowering.runtime`.
        plan: the plan it was trained under as plain data; None if it was saved without.
        extra: plain data of the training loop.
        metrics: numbers by name.
    """

    step: int
    time: float
    arrays: Mapping[str, Spec]
    sums: Mapping[str, tuple[int, int]]
    plan: JsonMapping | None
    extra: JsonMapping
    metrics: Mapping[str, float]

    def to_json(self) -> JsonObject:
        """The document as plain data, with its digest."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "time": self.time,
            "jax": jax.__version__,
            "arrays": {
                path: {
                    "shape": list(spec.shape),
                    "dtype": spec.dtype,
                    "key": spec.key,
                    "sums": list(self.sums[path]),
                }
                for path, spec in self.arrays.items()
            },
            "plan": self.plan,
            "extra": dict(self.extra),
            "metrics": dict(self.metrics),
        }
        return {"digest": digest(content), "content": content}

    def read_plan(self) -> tuple[Plan | None, tuple[Finding, ...]]:
        """The plan, or a finding if another version wrote it in an unknown form."""
        if self.plan is None:
            return None, ()
        try:
            return plan_from_data(self.plan), ()
        except (ValueError, TypeError) as error:
            return None, (
                Finding(
                    code="checkpoint-plan",
                    severity="info",
                    where=f"step {self.step}",
                    message=f"The plan of the checkpoint is not read: {error}",
                ),
            )


@dataclass(frozen=True, kw_only=True)
class _Array:
    """The entry of one array in a document."""

    shape: tuple[int, ...]
    dtype: str
    key: str
    sums: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Written:
    """The content of a document; metrics may be non-finite numbers."""

    step: int
    time: float
    arrays: Mapping[str, _Array]
    plan: JsonMapping | None
    extra: JsonMapping
    metrics: JsonMapping


def digest(content: Json) -> str:
    """SHA-256 of plain data, independent of the order of keys."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def from_json(data: Json) -> About:
    """Reads a document."""
    try:
        same = isinstance(data, Mapping) and digest(data.get("content")) == data.get("digest")
    except (TypeError, ValueError, RecursionError):  # not plain data
        same = False
    if not same:
        raise DamagedError("its description does not have the digest that it was saved with")
    content = data["content"]
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        written_as = (
            content.get("format") if isinstance(content, Mapping) else type(content).__name__
        )
        raise CheckpointError(
            f"the checkpoint has format {shown(written_as)}, this version reads {FORMAT}\nTry: the"
            " version of shardlib that wrote it"
        )
    written = construct(_Written, content, "the description of the checkpoint", CheckpointError)
    arrays = written.arrays
    return About(
        step=written.step,
        time=written.time,
        plan=written.plan,
        extra=written.extra,
        metrics=content["metrics"],
        arrays={path: Spec(shape=a.shape, dtype=a.dtype, key=a.key) for path, a in arrays.items()},
        sums={path: a.sums for path, a in arrays.items()},
    )


def of_step(description: About, step: int) -> About:
    """The document, if it belongs to the step that names the folder."""
    if description.step != step:
        raise DamagedError(
            f"it is the checkpoint of step {description.step} under another name; what was saved at"
            f" step {step} is not in it"
        )
    return description


def checked_extra(extra: JsonMapping) -> JsonObject:
    """A JSON copy of `extra`, unaffected by later changes to it."""
    try:
        return dict(json.loads(json.dumps(dict(extra))))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra is not plain data ({error})\nTry: dicts, lists, strings, numbers, booleans and"
            " None; arrays belong in the state"
        ) from error


# --------------------------------------------------------------------------------------------------
# Arrays that are stored on disk, read and written a few at a time to limit memory.

#: Bytes of arrays, over all processes, that are read at a time.
PORTION = 1 << 28


class _Handler(ArrayHandler):
    """Writes arrays; those on disk last, each read when the previous one is written."""

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
    """An array on disk as an array in memory: in host memory if that is separate, since device
    memory belongs to the training.
    """
    if not isinstance(leaf, DiskArray):
        return leaf
    separate = all(
        device.platform != "cpu"
        and any(memory.kind == HOST for memory in device.addressable_memories())
        for device in leaf.sharding.addressable_devices
    )
    return leaf.array(HOST if separate else None)


def registry(first: int | None) -> ocp.type_handlers.TypeHandlerRegistry:
    """The Orbax handlers for a state that is partly on disk, or only in some of several
    processes.
    """
    handler = _Handler(first)
    handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    handlers.add(DiskArray, handler, override=True, ignore_warnings=True)
    return handlers


def portions(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Abstract arrays in groups of at most `PORTION` bytes, or of one array."""
    group: dict[str, jax.ShapeDtypeStruct] = {}
    size = 0
    for path, leaf in leaves.items():
        nbytes = leaf.size * leaf.dtype.itemsize
        if group and size + nbytes > PORTION:
            yield group
            group, size = {}, 0
        group[path] = leaf
        size += nbytes
    if group:
        yield group


def handler(
    options: ocp.options.MultiprocessingOptions, *, extended: bool = False
) -> ocp.CompositeCheckpointHandler:
    """Orbax's handlers of the two items of a checkpoint: "state", the arrays by path, and "about",
    the description.
    """
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    if extended:
        arrays = ocp.handlers.PyTreeCheckpointHandler(
            use_compression=False,
            multiprocessing_options=options,
            type_handler_registry=registry(options.primary_host),
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
    """Reads the description of the checkpoint of a step; all processes have the same result."""
    failure = ""
    description = None
    try:
        description = _about(path, step)
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
    if not processes.all_well(description is not None) or description is None:
        raise DamagedError(failure or "its description cannot be read in another process")
    return description


def _about(path: epath.Path, step: int) -> About:
    """Reads the description; anything but a regular file (such as a pipe) is not read."""
    others = [
        entry.name
        for entry in (path / "about").iterdir()
        if "://" not in str(entry) and not Path(entry).is_file()
    ]  # etils considers everything but a folder a file
    if others:
        raise DamagedError(
            f"its description has {', '.join(sorted(others)[:4])}, which is not a file that can be"
            " read"
        )
    return of_step(from_json(ocp.handlers.JsonCheckpointHandler().restore(path / "about")), step)


def try_about(path: epath.Path, step: int) -> About | None:
    """The description of the checkpoint of a step, None if it cannot be read or belongs to another
    step; for one process.
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


def on_disk(program: TrainingProgram | None) -> frozenset[str]:
    """Paths of the arrays of a program's state that are stored on disk."""
    loss_program = None if program is None else program.loss_program
    return frozenset() if loss_program is None else loss_program.stored


def read_state(
    path: epath.Path,
    description: About,
    abstract: State,
    camera: Camera,
    program: Any = None,
    *,
    new_optimizer: bool = False,
) -> tuple[State, tuple[Finding, ...]]:
    """Restores the arrays of a checkpoint."""
    like = without_optimizer(abstract) if new_optimizer else abstract
    target = form_of(like)
    named = named_leaves(target)
    stored = {
        p: spec
        for p, spec in description.arrays.items()
        if not (new_optimizer and is_of_optimizer(p))
    }
    findings = compared(
        stored,
        {p: spec_of(leaf) for p, leaf in named.items()},
        f"the checkpoint of step {description.step}",
    )
    raw = {p: raw_abstract(leaf) for p, leaf in named.items()}
    leaves = {
        p: jax.ShapeDtypeStruct(leaf.shape, np.dtype(stored[p].dtype), sharding=leaf.sharding)
        for p, leaf in raw.items()
    }
    disk = on_disk(program)

    def read(portion: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        return fitted(
            {p: named[p] for p in portion}, read_arrays(path, description, portion, camera)
        )

    arrays: dict[str, Any] = read({p: leaf for p, leaf in leaves.items() if p not in disk})
    for portion in portions({p: leaf for p, leaf in leaves.items() if p in disk}):
        arrays.update(
            {
                p: program.stow(array, _sums(array, p, description, camera))
                for p, array in read(portion).items()
            }
        )
    form = jax.tree.structure(target).unflatten([arrays[p] for p in named])
    state = state_of(form, like)
    if not new_optimizer:
        return state, findings
    assert program is not None
    optimizer_finding = Finding(
        code="optimizer-anew",
        severity="info",
        message=(
            f"The optimizer starts anew; the checkpoint of step {description.step} gave the"
            " parameters."
        ),
    )
    return program.anew(state), (*findings, optimizer_finding)


def read_arrays(
    path: epath.Path, description: About, leaves: Mapping[str, jax.ShapeDtypeStruct], camera: Camera
) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, and detects flipped bits."""
    with ThreadPoolExecutor(1) as pool:  # compiles while files are read
        compiled = pool.submit(camera.sums, leaves)
        return _verified(_read_arrays(path, leaves), description, compiled.result())


def _sums(array: jax.Array, path: str, description: About, camera: Camera) -> np.ndarray:
    """Checksums of a restored array; those of the checkpoint, or if it was cast, those of the
    result.
    """
    if str(array.dtype) == description.arrays[path].dtype:
        return np.asarray(description.sums[path], np.uint32)
    return whole(camera.sums({path: array})({path: array}))[0]


def _read_arrays(
    path: epath.Path, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, each device's shard only; all processes learn of a failure."""
    failure, arrays = "", {}
    try:
        arrays = values.read(path / "state", leaves)
    except PermissionError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be opened ({error})\nTry: other permissions"
        ) from error
    # tensorstore reports "not found", "data loss" and the like by ValueError, and other kinds of
    # files by other errors
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):  # out of memory, not a damaged checkpoint
            raise
        failure = f"its arrays cannot be read ({said(error)})"
    if not processes.all_well(not failure):
        raise DamagedError(failure or "its arrays cannot be read in another process")
    return arrays


def _verified(arrays: dict[str, jax.Array], description: About, sums: Any) -> dict[str, jax.Array]:
    sums_by_path = by_path(arrays, whole(sums(arrays)))
    wrong = [path for path, pair in sums_by_path.items() if tuple(description.sums[path]) != pair]
    if wrong:
        raise DamagedError(f"bits have changed in {shortened(wrong)}")
    return arrays
