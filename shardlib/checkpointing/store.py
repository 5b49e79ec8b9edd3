"""Checkpoints of training states in a folder: written asynchronously and atomically, restored under
any plan.

    checkpoints = Checkpoints("runs/one", keep=Keep(newest=3, best="loss", every_seconds=3600))
    checkpoints.save(step, state, plan=program.plan, extra={"position": 1200})  # returns at once
    ...
    # Of this plan or another one, on this mesh or another one:
    restored = checkpoints.restore(program)

Orbax writes and reads the arrays. Added here: a copy of the state that the next step cannot
overwrite (`tree.py`), checksums that detect a flipped bit on any mesh, and recovery: nothing is
overwritten, and the last good checkpoint is used.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import logging
import math
import operator
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from shardlib import wings
from shardlib.annotation.trees import Tree
from shardlib.checkpointing.folder import Folder, Owner
from shardlib.checkpointing.tree import (
    Camera,
    OtherOptimizerError,
    Snapshot,
    Spec,
    State,
    check_target,
    cut,
    fitted,
    form_of,
    is_key,
    is_of_optimizer,
    named_leaves,
    raw_abstract,
    said,
    shortened,
    spec_of,
    without_optimizer,
)
from shardlib.errors import CheckpointError, raise_all
from shardlib.findings import Finding
from shardlib.lowering.disk import DiskArray
from shardlib.lowering.mesh import HOST
from shardlib.lowering.runtime import TrainState, checksums_by_path
from shardlib.lowering.training_program import CompositeState, TrainingProgram, is_program
from shardlib.planner.plan import Plan, plan_from_data, plan_to_data
from shardlib.processes import values
from shardlib.processes.values import ArrayHandler, by_owners, owners_of, whole
from shardlib.untrusted.data import Json, JsonMapping, JsonObject, construct, require_types, shown

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
    own: Any = {"type_handler_registry": registry(options.primary_host)} if extended else {}
    arrays = ocp.handlers.PyTreeCheckpointHandler(
        use_compression=False, multiprocessing_options=options, **own
    )
    text = ocp.handlers.JsonCheckpointHandler(multiprocessing_options=options)
    handlers.add("state", ocp.args.PyTreeSave, arrays)
    handlers.add("about", ocp.args.JsonSave, text)
    return ocp.CompositeCheckpointHandler(
        handler_registry=handlers,
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
    )


#: What reading raises where the description is other data than one.
NOT_A_DESCRIPTION = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def read_about(path: epath.Path, step: int) -> About:
    """Reads the description of the checkpoint of a step; all processes have the same result."""
    failure = ""
    description = None
    try:
        description = _about(path, step)
    except DamagedError as error:
        failure = str(error)
    except (*NOT_A_DESCRIPTION, FileNotFoundError, NotADirectoryError) as error:
        failure = f"its description cannot be read ({said(error)})"
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be opened ({error})\nTry: another folder, or other"
            " permissions"
        ) from error
    if values.anywhere(description is None, needed=True) or description is None:
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
    except (DamagedError, CheckpointError, OSError, *NOT_A_DESCRIPTION):
        return None


def on_disk(program: TrainingProgram | None) -> frozenset[str]:
    """Paths of the arrays of a program's state that are stored on disk."""
    loss_program = None if program is None else program.loss_program
    return frozenset() if loss_program is None else loss_program.disk_paths


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose description has been read.

    Attributes:
        path: its folder.
        about: its description.
        camera: has the programs that compute checksums.
        program: that reads it, where there is one.
    """

    path: epath.Path
    about: About
    camera: Camera
    program: TrainingProgram | None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the checkpoint of step {self.about.step}"

    def read(
        self, paths: Mapping[str, str], target: Mapping[str, Tree], *, at_once: bool = False
    ) -> Iterator[tuple[str, jax.Array]]:
        """Arrays as they are stored, by their paths in the target; flipped bits are detected.

        Args:
            paths: in the checkpoint, by those in the target.
            at_once: reads all of them together; otherwise `PORTION` bytes at a time.
        """
        leaves = {
            path: _stored_leaf(target[path], self.about.arrays[stored])
            for path, stored in paths.items()
        }
        for portion in [leaves] if at_once else portions(leaves):
            named = {paths[path]: leaf for path, leaf in portion.items()}
            with ThreadPoolExecutor(1) as pool:  # compiles while files are read
                compiled = pool.submit(self.camera.sums, named)
                arrays = _read_arrays(self.path, named)
                _verify(arrays, self.about, compiled.result())
            for path in portion:
                yield path, arrays.pop(paths[path])

    def placed(self, path: str, array: jax.Array, leaf: Tree) -> Any:
        """An array as the target has it: in its dtype and sharding, and on disk where the program
        stores it there.
        """
        array = fitted(array, leaf)
        if self.program is None or path not in on_disk(self.program):
            return array
        assert self.program.loss_program is not None
        if self.about.arrays.get(path) == spec_of(array):
            sums = np.asarray(self.about.sums[path], np.uint32)
        else:
            sums = whole(self.camera.sums({path: array})({path: array}))[0]
        return self.program.loss_program.put_on_disk(array, sums)


class Written(Protocol):
    """How a checkpoint was written, as seen by the state that is restored from it."""

    def target(self, like: State) -> Tree:
        """A tree with an abstract array for each one to restore."""
        ...

    def arrays(self, target: Mapping[str, Tree]) -> Mapping[str, Spec]:
        """The stored arrays, by their paths in the target."""
        ...

    def state(self, like: State, target: Tree) -> State:
        """Reads the state."""
        ...

    def findings(self, like: State, *, new_optimizer: bool) -> tuple[Finding, ...]:
        """Findings about what the state starts from."""
        ...


@dataclass(frozen=True, kw_only=True)
class WrittenAlike:
    """A checkpoint of a state with the same arrays."""

    checkpoint: OpenCheckpoint

    def target(self, like: State) -> Tree:
        """See `Written`."""
        return form_of(like)

    def arrays(self, target: Mapping[str, Tree]) -> Mapping[str, Spec]:
        """See `Written`."""
        return self.checkpoint.about.arrays

    def state(self, like: State, target: Tree) -> State:
        """See `Written`. Arrays that go to disk are read a few at a time."""
        named, stored = named_leaves(target), on_disk(self.checkpoint.program)
        arrays: dict[str, Any] = {}
        for to_disk in (False, True):
            paths = {path: path for path in named if (path in stored) == to_disk}
            for path, array in self.checkpoint.read(paths, named, at_once=not to_disk):
                arrays[path] = self.checkpoint.placed(path, array, named[path])
        form = jax.tree.structure(target).unflatten([arrays[path] for path in named])
        return like.of_stored_form(form) if isinstance(like, CompositeState) else form

    def findings(self, like: State, *, new_optimizer: bool) -> tuple[Finding, ...]:
        """See `Written`."""
        if not new_optimizer:
            return ()
        return (
            Finding(
                code="optimizer-anew",
                severity="info",
                message=(f"The optimizer starts anew; {self.checkpoint.name} gave the parameters."),
            ),
        )


def read_state(
    checkpoint: OpenCheckpoint, written: Written, abstract: State, *, new_optimizer: bool
) -> tuple[State, tuple[Finding, ...]]:
    """Restores the state of a checkpoint, whatever wrote it."""
    like = without_optimizer(abstract) if new_optimizer else abstract
    target = written.target(like)
    named = named_leaves(target)
    stored = {
        path: spec
        for path, spec in written.arrays(named).items()
        if not (new_optimizer and is_of_optimizer(path))
    }
    casts = compared(stored, {path: spec_of(leaf) for path, leaf in named.items()}, checkpoint.name)
    state = written.state(like, target)
    if new_optimizer:
        program: Any = checkpoint.program
        state = program.anew(state)
    return state, (*casts, *written.findings(abstract, new_optimizer=new_optimizer))


def compared(
    stored: Mapping[str, Spec], target: Mapping[str, Spec], subject: str
) -> tuple[Finding, ...]:
    """Compares the arrays of a checkpoint with those of the target.

    Returns:
        Findings for floating-point dtypes that differ, which a restore casts.
    """
    differences = {
        path: text
        for path in sorted({*stored, *target})
        if (text := _difference(path, stored.get(path), target.get(path)))
    }
    model = [
        text
        for path, text in differences.items()
        if path.removeprefix("islands.").partition(".")[0] != "opt_state"
    ]
    if model:
        raise_all(
            CheckpointError,
            f"{subject} is of another model",
            cut(model),
            hint="the model that it was saved with, or another folder for this one",
        )
    if differences:
        raise_all(
            OtherOptimizerError,
            f"{subject} is of another optimizer",
            cut(list(differences.values())),
            hint=(
                "the optimizer that it was saved with, or restore(program, parameters_only=True),"
                " which starts the optimizer anew"
            ),
        )
    cast = [
        f"{path} {stored[path].dtype} -> {target[path].dtype}"
        for path in target
        if stored[path].dtype != target[path].dtype
    ]
    if not cast:
        return ()
    return (
        Finding(
            code="checkpoint-dtype",
            severity="warning",
            where=shortened(cast),
            message=f"{len(cast)} arrays of {subject} have another dtype and are cast.",
        ),
    )


def _difference(path: str, stored: Spec | None, target: Spec | None) -> str:
    if stored is None or target is None:
        return (
            f"{path} is {'not in the checkpoint' if stored is None else 'in the checkpoint alone'}"
        )
    castable = all(jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating) for spec in (stored, target))
    same = (
        stored.shape == target.shape
        and stored.key == target.key
        and (stored.dtype == target.dtype or castable)
    )
    return "" if same else f"{path} is {stored} in the checkpoint, {target} here"


def _stored_leaf(leaf: Tree, spec: Spec) -> jax.ShapeDtypeStruct:
    """An abstract array of a checkpoint, sharded along its dims as that of the target is."""
    sharding = raw_abstract(leaf).sharding
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=sharding)


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
    if values.anywhere(bool(failure), needed=True):
        raise DamagedError(failure or "its arrays cannot be read in another process")
    return arrays


def _verify(arrays: dict[str, jax.Array], description: About, sums: Any) -> None:
    sums_by_path = checksums_by_path(arrays, whole(sums(arrays)))
    wrong = [path for path, pair in sums_by_path.items() if tuple(description.sums[path]) != pair]
    if wrong:
        raise DamagedError(f"bits have changed in {shortened(wrong)}")


# --------------------------------------------------------------------------------------------------
# A restored checkpoint, and the handling of damaged ones.


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored checkpoint.

    Attributes:
        step: the step at which it was saved.
        state: the training state in the layout of the target; for islands, their joint state.
        extra, metrics: as saved.
        plan: the plan that it was trained under; None if none was saved, or this version cannot
            read it.
        findings: skipped damaged checkpoints, casts of dtypes.
    """

    step: int
    state: TrainState
    extra: JsonObject
    metrics: dict[str, float]
    plan: Plan | None
    findings: tuple[Finding, ...] = ()


def read_checkpoint(
    folder: Folder,
    step: int,
    target: State | TrainingProgram,
    camera: Camera,
    *,
    parameters_only: bool,
) -> Restored:
    """One checkpoint, restored directly into the target's shardings."""
    program = target if is_program(target) and target.loss_program is not None else None
    abstract = target.state if is_program(target) else target
    path = folder.checkpoint(step)
    description = read_about(path, step)
    checkpoint = OpenCheckpoint(path=path, about=description, camera=camera, program=program)
    written: Written = WrittenAlike(checkpoint=checkpoint)
    if not is_alike(description.arrays, abstract):
        several = wings.islands("checkpoints", f"{checkpoint.name}, of islands,")
        written = several.WrittenByOthers(checkpoint=checkpoint)
    state, findings = read_state(checkpoint, written, abstract, new_optimizer=parameters_only)
    plan, more = description.read_plan()
    return Restored(
        step=step,
        state=cast("TrainState", state),
        extra=dict(description.extra),
        metrics=dict(description.metrics),
        plan=plan,
        findings=(*findings, *more),
    )


def set_aside(
    folder: Folder, damaged: Mapping[int, str], *, read_only: bool
) -> tuple[Finding, ...]:
    """Renames damaged checkpoints and reports their faults; called once a good one is restored."""
    findings: list[Finding] = []
    for step, text in damaged.items():
        name = folder.set_aside(step) if values.is_process_zero() and not read_only else str(step)
        findings.append(
            Finding(
                code="checkpoint-damaged",
                severity="warning",
                where=str(folder.path / name),
                hint="look at the disk; the checkpoint before it was used",
                message=f"The checkpoint of step {step} is damaged: {text}.",
            )
        )
    return tuple(findings)


def missing(folder: Folder, step: int | None, candidates: Sequence[int]) -> CheckpointError:
    """The error if there is no checkpoint, or none of the requested step."""
    return CheckpointError(
        f"there is no checkpoint{'' if step is None else f' of step {step}'} in"
        f" {folder.path}\nTry: {f'one of {list(candidates)}' if candidates else 'another folder'}"
    )


def none_good(
    folder: Folder, damaged: Mapping[int, str], candidates: Sequence[int]
) -> CheckpointError:
    """The error if all checkpoints that were read are damaged."""
    lines = "".join(f"\n  - step {number}: {text}" for number, text in damaged.items())
    others = [candidate for candidate in candidates if candidate not in damaged]
    return CheckpointError(
        f"no checkpoint in {folder.path} is good:{lines}\nTry:"
        f" {f'one of {others}' if others else 'a copy of them'}; nothing was changed"
    )


# --------------------------------------------------------------------------------------------------
# Retention of checkpoints: the newest, the best, and one per time interval.

_managers = ocp.checkpoint_managers


@dataclass(kw_only=True)
class _Info:
    """The facts about a checkpoint that Orbax's policies read."""

    step: int
    time: datetime.datetime
    metrics: Any


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Rules for keeping checkpoints; one that applies is enough.

    Attributes:
        newest: number of newest checkpoints; None keeps all.
        best: name of a metric by which the best are kept too.
        best_count: number of best checkpoints.
        best_mode: "min" if smaller is better, or "max".
        every_seconds: keeps the first one, and each that is so much later than the last one kept;
            None for no such rule.

    Raises:
        CheckpointError: values of another kind or out of range, all of them listed.
    """

    newest: int | None = 3
    best: str | None = None
    best_count: int = 1
    best_mode: str = "min"
    every_seconds: float | None = None

    def __post_init__(self) -> None:
        require_types(self, "shardlib.checkpointing.store.Keep", CheckpointError)
        wrong = [
            f"{name} is {value!r}; it must be at least 1"
            for name, value in (("newest", self.newest), ("best_count", self.best_count))
            if value is not None and value < 1
        ]
        wrong += [f"every_seconds is {self.every_seconds!r}; it must be positive"] * (
            self.every_seconds is not None and self.every_seconds <= 0
        )
        wrong += [f"best_mode is {self.best_mode!r}; known are min, max"] * (
            self.best_mode not in ("min", "max")
        )
        if wrong:
            raise_all(CheckpointError, "no checkpoints can be kept like this", wrong)

    def superfluous(self, checkpoints: Sequence[About]) -> list[int]:
        """Steps of the checkpoints that no rule keeps; never the latest."""
        ordered = sorted(checkpoints, key=lambda description: description.step)
        infos = [
            _Info(
                step=description.step,
                time=datetime.datetime.fromtimestamp(description.time, datetime.UTC),
                metrics=self._metric(description),
            )
            for description in ordered
        ]
        stays = (
            _managers.AnyPreservationPolicy(self._policies()).should_preserve(
                infos, context=_managers.PreservationContext()
            )
            if infos
            else []
        )
        return [
            description.step
            for description, reason in zip(ordered[:-1], stays[:-1], strict=True)
            if not reason
        ]

    def _policies(self) -> list[_managers.PreservationPolicy]:
        policies: list[_managers.PreservationPolicy] = [_managers.LatestN(self.newest)]
        if self.best:
            policies.append(
                _managers.BestN(
                    get_metric_fn=lambda metric: metric,
                    reverse=self.best_mode == "min",
                    n=self.best_count,
                    keep_checkpoints_without_metrics=False,
                )
            )
        if self.every_seconds:
            seconds: Any = self.every_seconds  # floats are accepted, too
            policies.append(_managers.EveryNSeconds(seconds))
        return policies

    def _metric(self, description: About) -> float | None:
        """The metric to compare; None if it is missing or not finite."""
        value = description.metrics.get(self.best) if self.best else None
        return value if value is not None and math.isfinite(value) else None


# --------------------------------------------------------------------------------------------------
# Writing of a checkpoint with Orbax, and deletion of older ones that no rule keeps.


def write_checkpoint(folder: Folder, step: int, snapshot: Snapshot, description: About) -> None:
    """Writes a checkpoint; remnants of a failure are deleted."""
    arrays = {**snapshot.arrays, **snapshot.stored}
    owners = owners_of(arrays.values())
    options = values.options(owners)

    def write() -> None:
        with (
            _said_once(),
            ocp.Checkpointer(
                handler(
                    options, extended=bool(snapshot.stored) or len(owners) < jax.process_count()
                ),
                multiprocessing_options=options,
            ) as checkpointer,
        ):
            checkpointer.save(
                folder.checkpoint(step),
                ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays),
                    about=ocp.args.JsonSave(description.to_json()),
                ),
            )

    try:
        by_owners(f"checkpoints in {folder.path}", owners, write)
    except Exception as error:
        raise _not_written(folder, step, error) from error


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Suppresses the logs of Orbax and asyncio, which report a failure in each of their threads; it
    is raised here, too.

    Orbax raises the first failure while its other threads may still be about to log theirs.
    """

    def without_errors(record: logging.LogRecord) -> bool:
        return record.exc_info is None and "raised an exception" not in record.getMessage()

    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    earlier = set(threading.enumerate())
    for logger in loggers:
        logger.addFilter(without_errors)
    try:
        yield
    except Exception:
        deadline = time.monotonic() + 10
        for thread in set(threading.enumerate()) - earlier:
            if type(thread).__module__.startswith("orbax."):
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(without_errors)


def delete_superfluous(folder: Folder, keep: Keep, step: int) -> None:
    """Deletes checkpoints that no rule keeps; in the first process."""
    try:
        descriptions = [
            description
            for saved in folder.steps()
            if (description := try_about(folder.checkpoint(saved), saved))
        ]
        for superfluous in keep.superfluous(descriptions):
            folder.discard(superfluous)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} is written, and older ones in"
            f" {folder.path} could not be deleted ({said(error)})\nTry: delete them"
            ' by hand; those that have "discarded" in their names are not used any more'
        ) from error


def _not_written(folder: Folder, step: int, error: Exception) -> CheckpointError:
    """Deletes the remnants of a failed save, since they may fill the disk, and returns the
    error.
    """
    if values.is_process_zero():
        with contextlib.suppress(OSError):  # the next run deletes it
            folder.clear(step)
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
        text in str(error) for text in ("No space left", "Disk quota", "File too large")
    )
    why = "the disk is full, or files may not be so large" if full else said(error)
    hint = (
        "make room, or keep fewer checkpoints; the state is as before"
        if full
        else "another folder; the state is as before"
    )
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder.path}"
        f" ({why}); earlier ones are as before\nTry: {hint}"
    )


class Checkpoints:
    """The checkpoints of one run.

    Every process of a run makes one and calls the same methods at the same steps. Methods may be
    called from one thread.

    Args:
        folder: path visible to all processes; created if it does not exist.
        keep: rules for the checkpoints to keep.
        snapshot: memory for the copy that is being written: "host" (pinned memory), "device", or
            "auto" for the host if it has separate memory.
        read_only: for restoring only: nothing is created, renamed or deleted in the folder.
        owner: an existing right to write to the folder; by default the folder is claimed here, and
            released by `close`.

    Raises:
        CheckpointError: the folder cannot be written, or is that of a run.
        OwnedError: another process writes to it.
    """

    def __init__(
        self,
        folder: str | epath.PathLike,
        keep: Keep | None = None,
        *,
        snapshot: str = "auto",
        read_only: bool = False,
        owner: Owner | None = None,
    ) -> None:
        self.keep = keep or Keep()
        self.read_only = read_only
        self._folder = Folder(
            path=epath.Path(folder).absolute() if "://" not in str(folder) else epath.Path(folder)
        )
        self._folder.refuse_run()
        self._camera = Camera(place=snapshot)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self._lent, self._owner = owner is not None, owner
        if not read_only:
            values.first_decides("folder of checkpoints", self._open)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open(self) -> None:
        """Claims the folder, and deletes remnants of interrupted saves; in the first process."""
        self._owner = self._owner or self._folder.claimed()
        try:
            self._folder.prepare()
        except CheckpointError:
            if self._owner is not None and not self._lent:
                self._owner.release()
            raise

    def prepare(self, target: State | TrainingProgram) -> None:
        """Compiles the device programs of `save` in advance, for a program, or for a state
        (concrete, or abstract with shardings).
        """
        program = target if is_program(target) else None
        state = target if program is None else program.state
        stored = on_disk(program)
        self._camera.prepare(
            {
                path: raw_abstract(leaf)
                for path, leaf in named_leaves(form_of(state)).items()
                if path not in stored and not isinstance(leaf, DiskArray)
            }
        )

    def save(
        self,
        step: int,
        state: State,
        *,
        plan: Plan | None,
        extra: JsonMapping | None = None,
        metrics: JsonMapping | None = None,
        wait: bool = False,
    ) -> None:
        """Saves a state.

        Returns when copies of the arrays are queued; the state may be donated then. Writing
        continues in a thread. Waits only for a previous save that is still being written.
        """
        if self.read_only:
            raise CheckpointError(
                f"the checkpoints in {self._folder.path} are open for reading alone\nTry:"
                " Checkpoints(folder) without read_only"
            )
        self.wait()
        self._require()
        step = operator.index(step)
        if values.is_process_zero() and (taken := self._folder.taken(step)):
            raise CheckpointError(taken)
        plain = checked_extra(extra or {})
        named = named_leaves(form_of(state))
        snapshot = self._camera.take(raw_arrays(named))

        def write() -> None:
            specs = {
                path: spec_of(leaf) for path, leaf in named.items()
            }  # the next step deletes the arrays, but not their shapes
            try:
                description = About(
                    step=step,
                    time=time.time(),
                    arrays=specs,
                    sums=snapshot.sums(),
                    plan=plan_to_data(plan) if plan else None,
                    extra=plain,
                    metrics={name: float(value) for name, value in (metrics or {}).items()},
                )
                self._write(step, snapshot, description)
            finally:
                snapshot.delete()

        self._under_way = self._writer.submit(write)
        if wait:
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, the oldest first."""
        return self._folder.steps()

    def wait(self) -> None:
        """Waits for the save in progress."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Waits for the save in progress, ends the thread and releases the folder."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._owner is not None and not self._lent:
                self._owner.release()

    def restore(
        self,
        target: State | TrainingProgram,
        step: int | None = None,
        *,
        parameters_only: bool = False,
    ) -> Restored:
        """Restores a checkpoint directly into the target's shardings.

        Args:
            step: by default the newest good one. Newer damaged ones are renamed once a good one is
                restored, and reported.
        """
        self.wait()
        program = target if is_program(target) else None
        check_target(target if program is None else program.state)
        if parameters_only and (program is None or program.loss_program is None):
            raise CheckpointError(
                "parameters_only=True makes a new state of the optimizer, and the target does not"
                " say which\nTry: restore(program, parameters_only=True)"
            )
        candidates = steps_of_first(self.steps())
        if not candidates or (step is not None and step not in candidates):
            raise missing(self._folder, step, candidates)
        damaged: dict[int, str] = {}
        for candidate in reversed(candidates) if step is None else (step,):
            try:
                restored = read_checkpoint(
                    self._folder, candidate, target, self._camera, parameters_only=parameters_only
                )
            except DamagedError as error:
                damaged[candidate] = str(error)
            else:
                findings = set_aside(self._folder, damaged, read_only=self.read_only)
                return replace(restored, findings=(*findings, *restored.findings))
        raise none_good(self._folder, damaged, candidates)

    def _write(self, step: int, snapshot: Snapshot, description: About) -> None:
        """Writes a checkpoint and deletes those that no rule keeps; runs in the thread."""
        self._require()
        write_checkpoint(self._folder, step, snapshot, description)
        if values.is_process_zero():
            delete_superfluous(self._folder, self.keep, step)

    def _require(self) -> None:
        """Raises an error if the folder is closed, or no longer owned by this job."""
        if self._owner is None:
            return
        if not self._owner.held:
            raise CheckpointError(
                f"the checkpoints in {self._folder.path} are closed\nTry: open them again"
            )
        self._owner.require()


def is_alike(arrays: Mapping[str, Spec], state: State) -> bool:
    """True if a checkpoint has the same number of islands as a state, and the same exchange."""
    if isinstance(state, CompositeState):
        return state.is_stored_in(arrays)
    several = any(path.startswith(("islands.", "outer.")) for path in arrays)
    return not (several and isinstance(state, TrainState))


def raw_arrays(named: Mapping[str, Tree]) -> dict[str, Tree]:
    """Arrays by path, keys as integers; nothing is copied."""
    return {
        path: jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in named.items()
    }


def steps_of_first(steps: Sequence[int]) -> tuple[int, ...]:
    """The steps that the first process sees; to be called by all."""
    if jax.process_count() == 1:
        return tuple(steps)
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    numbers = np.zeros(count, np.int32)
    numbers[: min(count, len(steps))] = steps[:count]
    return tuple(int(step) for step in multihost_utils.broadcast_one_to_all(numbers))
