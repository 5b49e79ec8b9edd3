"""Optimizer state stored on disk: a step divided into pieces, each of which reads a part of the
state, updates it, and writes it back.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from shardlib import _jax_compat
from shardlib.annotation.model import no_mesh
from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import DiskError
from shardlib.findings import Finding
from shardlib.jax_types import Function, Value
from shardlib.lowering.mesh import owner_of, shapes_of
from shardlib.lowering.runtime import Executable, TracedFunction, TrainState, checksums
from shardlib.tracing.program import Equation, Program, flatten
from shardlib.tracing.rewriting import Labels, dependence, needed

# --------------------------------------------------------------------------------------------------
# A function of arrays as compiled programs that are called one after the other.


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceProgram:
    """A compiled piece of a function. Values are numbers of the traced program.

    Attributes:
        program: from the values of `reads` to those of `results`.
        reads, results: values.
        stored: those of `reads` that are on disk.
        last_reads: those of `reads` that no later piece reads.
        other_bytes: bytes per device of arrays that are live while it runs and not read.
    """

    program: Executable
    reads: tuple[int, ...]
    results: tuple[int, ...]
    stored: tuple[int, ...] = ()
    last_reads: tuple[int, ...] = ()
    other_bytes: int = 0

    def __call__(self, values: Mapping[int, Value]) -> dict[int, Value]:
        """The results of the piece, by value."""
        return dict(
            zip(self.results, self.program([values[number] for number in self.reads]), strict=True)
        )

    def memory(self) -> dict[str, int]:
        """Bytes per device, see `Program.memory`; the peak includes the other live arrays."""
        sizes = _jax_compat.compiled_memory(self.program.compiled)
        return {**sizes, "peak": sizes["peak"] + self.other_bytes}


@dataclass(frozen=True, kw_only=True, eq=False)
class PiecePrograms:
    """A function of arrays, divided into pieces.

    Attributes:
        inputs, outputs: values.
        treedef: tree structure of the outputs, without the checksums at their end.
        programs: of the pieces, in order; the others read results of the first.
        checksums: for each output that goes to disk, the value of its checksums; None if the
            function computes none.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    treedef: jax.tree_util.PyTreeDef
    programs: tuple[PieceProgram, ...]
    checksums: Mapping[int, int | None]

    def tree(self, values: Mapping[int, Value]) -> Tree:
        """The outputs as the function returns them, without aliases, since a step deletes arrays
        one by one.
        """
        seen: set[int] = set()
        leaves: list[Any] = []
        for number in self.outputs[: self.treedef.num_leaves]:
            leaf = values[number]
            leaves.append(leaf.copy() if number in seen else leaf)
            seen.add(number)
        return jax.tree.unflatten(self.treedef, leaves)


# --------------------------------------------------------------------------------------------------
# Storage: files in a folder of this process, deleted when the process ends.
#
# Like memory, the files are worthless after a crash: a run resumes from checkpoints. Space is
# allocated before anything is written, and files are reused: a step writes as many bytes as it
# frees.

#: Environment variable that names the folder for state on disk.
DISK_VARIABLE = "SHARDLIB_DISK_DIR"
PREFIX = "shardlib-state-"
#: File systems that are in memory (Linux, /proc/mounts).
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(kw_only=True, eq=False)
class StateFile:
    """A file of a fixed size.

    Attributes:
        size: in bytes.
        crc: CRC-32 of the last data written.
        references: reference count.
    """

    path: Path
    size: int
    crc: int = 0
    references: int = 1

    def write(self, data: np.ndarray) -> None:
        """Writes all of the file."""
        raw = _raw(data)
        try:
            with self.path.open("r+b") as file:
                file.write(raw)
        except OSError as error:
            raise DiskError(
                f"state on disk could not be written to {self.path} ({error})\nTry: another disk;"
                " the newest checkpoint is as before"
            ) from error
        self.crc = zlib.crc32(raw)

    def read(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Reads all of the file as an array."""
        try:
            raw = np.fromfile(self.path, np.uint8)
        except OSError as error:
            raise DiskError(
                f"state on disk could not be read from {self.path} ({error})\nTry: another disk;"
                " the newest checkpoint is as before"
            ) from error
        if raw.nbytes != self.size or zlib.crc32(raw.data) != self.crc:
            raise DiskError(
                f"state on disk is not what was written: {self.path} has changed\nTry: another"
                " disk; the newest checkpoint is as before"
            )
        return raw.view(dtype).reshape(shape)


def _raw(data: np.ndarray) -> memoryview:
    """The bytes of an array, in the order of its elements."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


@dataclass(kw_only=True, eq=False)
class StateFolder:
    """A folder of reusable files for arrays."""

    path: Path
    _free: dict[int, list[StateFile]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: int = 0

    def file(self, size: int) -> StateFile:
        """A file of a given size that is not in use: a released one, or a new one."""
        with self._lock:
            if self._free.get(size):
                free = self._free[size].pop()
                free.references = 1
                return free
            self._count += 1
            path = self.path / f"{self._count}.bin"
        try:
            with path.open("xb") as file:
                if size:
                    _allocate(file.fileno(), size)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise DiskError(
                f"there is no room for {size / 2**20:.1f} MiB of state in {self.path}"
                f" ({error})\nTry: make room, or another disk: {DISK_VARIABLE}=/path or"
                " compile(..., disk='/path'); the newest checkpoint is as before"
            ) from error
        return StateFile(path=path, size=size)

    def add_reference(self, file: StateFile) -> None:
        """Increments the reference count of a file."""
        with self._lock:
            file.references += 1

    def release(self, file: StateFile) -> None:
        """Decrements the reference count of a file; at zero, it can be reused."""
        with self._lock:
            file.references -= 1
            if not file.references:
                self._free.setdefault(file.size, []).append(file)


def folder(parent: str | os.PathLike[str] | None = None) -> StateFolder:
    """A new folder for this process inside another one; folders that killed processes left there
    are deleted.

    Args:
        parent: a folder on a disk of this host; by default that of the environment variable
            `DISK_VARIABLE`, or else the system's folder for temporary files.
    """
    root = Path(parent or os.environ.get(DISK_VARIABLE) or tempfile.gettempdir())
    try:
        root.mkdir(parents=True, exist_ok=True)
        _delete_orphans(root)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
        lock = os.open(unlocked / "lock", os.O_CREAT | os.O_RDWR)  # locked until the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Other processes delete folders of this name whose lock is free.
        path = unlocked.rename(root / unlocked.name[1:])
    except OSError as error:
        raise DiskError(
            f"the folder for state on disk cannot be used: {root} ({error})\nTry: another one:"
            f" {DISK_VARIABLE}=/path or compile(..., disk='/path')"
        ) from error
    created = StateFolder(path=path)
    weakref.finalize(created, _delete_folder, path, lock)
    return created


def _allocate(file: int, size: int) -> None:
    """Allocates the space of a file, if the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def in_memory(path: Path) -> str:
    """The kind of the file system of a path if that is in memory; "" if it is on a disk, or
    unknown.
    """
    with contextlib.suppress(OSError):
        mounts = [
            line.split()[1:3]
            for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        ]
        containing = [mount for mount in mounts if path.resolve().is_relative_to(mount[0])]
        kind = max(containing, key=lambda mount: len(mount[0]), default=("", ""))[1]
        return kind if kind in IN_MEMORY else ""
    return ""


def _delete_folder(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _delete_orphans(root: Path) -> None:
    """Deletes folders whose process has ended, which are those whose lock is free."""
    for orphan in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (orphan / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(orphan, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# An array stored in files: the leaf that replaces a `jax.Array` in the optimizer state.
#
# It is immutable: a step reads it, writes a new one, and deletes it, as it deletes donated buffers.
# Each process stores the distinct shards of its own devices.

#: Start and end of a shard, by dim.
ShardIndex = tuple[tuple[int, int], ...]


class DiskArray:
    """An array on disk, a leaf of trees.

    Attributes:
        shape, dtype, sharding: as those of a `jax.Array`.
        checksums: uint32 [2], see `shardlib.lowering.runtime`.
    """

    def __init__(
        self,
        folder: StateFolder,
        like: jax.Array | DiskArray,
        files: Mapping[ShardIndex, StateFile],
        written: Future[None] | None,
        checksums: Any,
    ) -> None:
        self.shape = tuple(like.shape)
        self.dtype = np.dtype(like.dtype)
        self.sharding = like.sharding
        self.checksums = checksums
        self._folder, self._files, self._written = folder, dict(files), written
        self._finalizer = weakref.finalize(
            self, _release, folder, tuple(self._files.values()), written
        )
        self._finalizer.atexit = False

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Bytes in files of this process."""
        return sum(file.size for file in self._files.values())

    def __repr__(self) -> str:
        return f"DiskArray(shape={self.shape}, dtype={self.dtype}, sharding={self.sharding})"

    def array(self, memory_kind: str | None = None) -> jax.Array:
        """Reads it as an array of the same sharding on the devices.

        Args:
            memory_kind: memory kind on the devices; by default that of the sharding.
        """
        return self.on_devices(self.read(), memory_kind)

    def read(self) -> dict[ShardIndex, np.ndarray]:
        """Reads the shards of this process into host memory; errors as those of `array`."""
        if self.is_deleted():
            raise DiskError(
                f"state on disk was deleted: {self!r}\nTry: the state that the last step returned;"
                " a step deletes the state that it is given"
            )
        if self._written is not None:
            self._written.result()
        return {
            index: file.read(tuple(stop - start for start, stop in index), self.dtype)
            for index, file in self._files.items()
        }

    def on_devices(
        self, read: Mapping[ShardIndex, np.ndarray], memory_kind: str | None = None
    ) -> jax.Array:
        """The array on the devices, from the result of `read`.

        Args:
            memory_kind: memory kind on the devices; by default that of the sharding.
        """
        sharding = (
            self.sharding if memory_kind is None else self.sharding.with_memory_kind(memory_kind)
        )
        shards = [
            jax.device_put(
                read[_index(index, self.shape)],
                jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind),
                may_alias=False,
            )
            for device, index in sharding.addressable_devices_indices_map(self.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(
            self.shape, sharding, shards, dtype=self.dtype
        )

    def second_reference(self) -> DiskArray:
        """A second reference to the array: its files stay until both are deleted."""
        if self.is_deleted():
            raise DiskError(
                f"state on disk was deleted: {self!r}\nTry: the state that the last step returned"
            )
        for file in self._files.values():
            self._folder.add_reference(file)
        return DiskArray(self._folder, self, self._files, self._written, self.checksums)

    def delete(self) -> None:
        """Releases its files, once they are written."""
        self._finalizer()

    def is_deleted(self) -> bool:
        """True if it was deleted."""
        return not self._finalizer.alive


def _release(
    folder: StateFolder, files: tuple[StateFile, ...], written: Future[None] | None
) -> None:
    def release(_: Any = None) -> None:
        for file in files:
            folder.release(file)

    if written is None:
        release()
    else:
        written.add_done_callback(release)


def _index(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> ShardIndex:
    assert index is not None  # of devices of this process
    return tuple(
        (start, stop)
        for start, stop, _ in (part.indices(dim) for part, dim in zip(index, shape, strict=True))
    )


@dataclass(kw_only=True, eq=False)
class DiskWriter:
    """Writes arrays to files in a thread, behind the program that makes them.

    Attributes:
        max_pending: number of arrays that may be waiting to be written; beyond it, `put` blocks.
    """

    folder: StateFolder
    max_pending: int = 4
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="state-on-disk")
    )
    _pending: deque[Future[None]] = field(default_factory=deque)

    def put(self, array: jax.Array, checksums: jax.Array | np.ndarray) -> DiskArray:
        """Copies an array to host memory, starts to write it, and returns its leaf; to be called
        from one thread.
        """
        while len(self._pending) >= self.max_pending:
            self._pending.popleft().result()
        copies: dict[ShardIndex, np.ndarray] = {}
        for shard in array.addressable_shards:
            index = _index(shard.index, array.shape)
            if index not in copies:
                copies[index] = np.asarray(shard.data)
        files: dict[ShardIndex, StateFile] = {}
        try:
            for index, data in copies.items():
                files[index] = self.folder.file(data.nbytes)
        except DiskError:
            for file in files.values():
                self.folder.release(file)
            raise

        def write() -> None:
            for index, data in copies.items():
                files[index].write(data)

        written = self._pool.submit(write)
        self._pending.append(written)
        return DiskArray(self.folder, array, files, written, checksums)


# --------------------------------------------------------------------------------------------------
# Division of a step into pieces, each of which needs only a part of the optimizer's state.
#
# The first piece is everything that does not depend on the state on disk: loss, gradients, norms.
# The rest divides by itself if the optimizer treats parameters one by one: two arrays of state
# belong to one piece only if some value depends on both. Values that several pieces read, such as
# the norm for clipping, are computed first and passed on. An optimizer that mixes all parameters
# gives one piece, which is correct too, but saves no memory while it runs.

#: Name of the gradients that enter the optimizer: computed in the first piece, and passed on.
GRADIENT = "shardlib: gradient of a parameter"


@dataclass(frozen=True, kw_only=True)
class StepPiece:
    """A piece of a step. Values are numbers of the program.

    Attributes:
        stored: arrays on disk that it reads.
        inputs: other values that it reads: inputs of the step, and results of the first piece.
        results: outputs of the step that it computes.
    """

    stored: tuple[int, ...]
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    equations: tuple[Equation, ...]


@dataclass(frozen=True, kw_only=True)
class DividedStep:
    """A step divided into pieces.

    Attributes:
        first: the piece that needs nothing from disk: it computes the outputs that do not depend
            on the state there, and values that the rest reads.
        updates: the other pieces, in the order of their arrays in the state.
    """

    first: StepPiece
    updates: tuple[StepPiece, ...]


def divide_step(program: Program, stored: Collection[int]) -> DividedStep:
    """Divides a step into pieces."""
    labels = dependence(
        program,
        [
            frozenset({str(number)}) if number in stored else frozenset()
            for number in program.inputs
        ],
    )
    available = {*program.inputs, *_passed_values(program, labels)}
    others = tuple(
        _piece(program, group, labels, available)
        for group in _joint_groups(
            program.equations,
            labels,
            [str(number) for number in program.inputs if number in stored],
        )
    )
    passed = {number for piece in others for number in piece.inputs}.difference(program.inputs)
    outputs = tuple(
        dict.fromkeys(
            (*(number for number in program.outputs if not labels[number]), *sorted(passed))
        )
    )
    equations, reads = needed(program.equations, outputs)
    first = StepPiece(
        stored=(),
        inputs=tuple(number for number in program.inputs if number in reads),
        results=outputs,
        equations=tuple(equations),
    )
    return DividedStep(first=first, updates=others)


def _passed_values(program: Program, labels: Mapping[int, Labels]) -> set[int]:
    """Values that need nothing from disk and are passed on rather than recomputed by their readers:
    gradients, and scalars.
    """
    return {
        number
        for equation in program.equations
        for number in equation.outputs
        if not labels[number] and (_is_gradient(equation) or _size(program, number) == 1)
    }


def _is_gradient(equation: Equation) -> bool:
    return equation.name == "name" and equation.params["name"] == GRADIENT


def _size(program: Program, number: int) -> int:
    return math.prod(getattr(program.avals[number], "shape", ()))


def _piece(
    program: Program, group: Labels, labels: Mapping[int, Labels], available: Collection[int]
) -> StepPiece:
    outputs = tuple(dict.fromkeys(number for number in program.outputs if labels[number] & group))
    equations, _ = needed(
        program.equations, [number for number in outputs if number not in available], available
    )
    reads = {number for equation in equations for number in equation.inputs}.union(
        outputs
    ).intersection(available)
    stored = tuple(number for number in program.inputs if str(number) in group)
    return StepPiece(
        stored=stored,
        inputs=tuple(sorted(reads.difference(stored))),
        results=outputs,
        equations=tuple(equations),
    )


def _joint_groups(
    equations: Iterable[Equation], labels: Mapping[int, Labels], stored: Iterable[str]
) -> list[Labels]:
    """Groups of arrays on disk, by label, that belong to one piece."""
    groups: dict[str, set[str]] = {label: {label} for label in stored}
    for equation in equations:
        members = frozenset[str]().union(*(labels[number] for number in equation.outputs))
        joined_groups = {id(groups[label]): groups[label] for label in members}
        if len(joined_groups) > 1:
            joined = set[str]().union(*joined_groups.values())
            groups.update(dict.fromkeys(joined, joined))
    return [frozenset(group) for group in {id(group): group for group in groups.values()}.values()]


# --------------------------------------------------------------------------------------------------
# The programs of a step whose optimizer state is on disk, and those of its initial state.

#: Label of values that go to disk.
ON_DISK = "shardlib: stored on disk"


def disk_leaves(state: TrainState) -> dict[int, str]:
    """The arrays of a state that are stored on disk (those of the optimizer that have a parameter's
    shape): positions among its leaves -> paths.
    """
    shapes = shapes_of(state.params)
    has_owner = jax.tree_util.tree_map_with_path(
        lambda path, leaf: owner_of(path, leaf, shapes) is not None, state.opt_state
    )
    marked = replace(jax.tree.map(lambda _: False, state), opt_state=has_owner)
    return {
        position: path_text(path)
        for position, (path, is_on_disk) in enumerate(jax.tree_util.tree_leaves_with_path(marked))
        if is_on_disk
    }


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """The target of the compiled programs.

    Attributes:
        state: abstract, with shardings.
        replicated: the replicated sharding.
        digest: of the plan, for the names of the programs.
    """

    mesh: Mesh
    state: TrainState
    replicated: NamedSharding
    digest: str

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """Positions of the leaves of the state that are stored on disk."""
        return tuple(disk_leaves(self.state))

    def traced(
        self,
        context: AbstractContextManager[object],
        function: Function,
        *inputs: Tree,
        with_checksums: bool,
    ) -> tuple[Program, jax.tree_util.PyTreeDef]:
        """Traces a function whose result is a state, or a tuple that starts with one, over the
        leaves of its inputs; also gives the tree structure of its results.

        Values that go to disk are not aliases of other results. With `with_checksums`, their
        checksums follow the results.
        """
        leaves, structure = jax.tree.flatten(inputs)
        treedefs: list[Any] = []
        shardings = [leaf.sharding for leaf in jax.tree.leaves(self.state)]

        def flat(*arguments: Any) -> list[Any]:
            results, treedef = jax.tree.flatten(function(*jax.tree.unflatten(structure, arguments)))
            treedefs.append(treedef)
            for k in self.stored:
                results[k] = checkpoint_name(results[k], ON_DISK)
            return [
                *results,
                *(
                    checksums({"": results[k]}, {"": shardings[k]})[0]
                    for k in self.stored
                    if with_checksums
                ),
            ]

        with context:
            program = flatten(jax.make_jaxpr(flat)(*leaves))
        return program, treedefs[0]

    def shardings(self, program: Program) -> dict[int, NamedSharding]:
        """Shardings of all outputs, the leaves of the state first."""
        of_state = [leaf.sharding for leaf in jax.tree.leaves(self.state)]
        return {
            number: of_state[k] if k < len(of_state) else self.replicated
            for k, number in reversed(list(enumerate(program.outputs)))
        }


def array_checksums(array: jax.Array, replicated: NamedSharding) -> jax.Array:
    """The checksums of an array, see `shardlib.lowering.runtime`."""
    return _checksum_function(array.sharding, replicated)(array)


@functools.cache
def _checksum_function(
    sharding: NamedSharding, replicated: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        lambda array: checksums({"": array}, {"": sharding})[0], out_shardings=replicated
    )


def step_programs(
    target: CompileTarget, step: Callable[[TrainState, Tree], Tree], batch: Tree
) -> PiecePrograms:
    """Compiles (state, batch) -> (state, metrics): first everything that needs nothing from disk,
    then the pieces of the update.
    """
    program, treedef = target.traced(
        _jax_compat.in_mesh(target.mesh), step, target.state, batch, with_checksums=True
    )
    leaves = jax.tree.leaves((target.state, batch))
    stored = [program.inputs[k] for k in target.stored]
    divided = divide_step(program, stored)
    avals: dict[int, Any] = dict(zip(program.inputs, leaves, strict=True))
    readers = Counter(number for piece in divided.updates for number in piece.inputs)
    state = set(program.inputs[: len(jax.tree.leaves(target.state))])

    def compiled(piece: StepPiece, name: str, last_reads: set[int]) -> PieceProgram:
        reads = (*piece.stored, *piece.inputs)
        traced = TracedFunction.of_program(
            replace(program, inputs=reads, outputs=piece.results, equations=piece.equations),
            [avals[number] for number in reads],
        )
        shardings = target.shardings(program)
        executable = traced.compiled(
            f"shardlib_{name}_{target.digest}",
            target.mesh,
            shardings=[shardings.get(number) for number in piece.results],
            donated=_donatable(program, reads, last_reads & state, piece.results),
        )
        return PieceProgram(
            program=executable,
            reads=reads,
            results=piece.results,
            stored=piece.stored,
            last_reads=tuple(sorted(last_reads.intersection(reads))),
        )

    def last_reads(piece: StepPiece) -> set[int]:
        """Values that no piece reads after this one."""
        return {
            *piece.stored,
            *(number for number in piece.inputs if readers[number] == 1),
        }.difference(program.outputs)

    first = compiled(divided.first, "step", state.difference(program.outputs, readers, stored))
    avals.update(zip(first.results, first.program.results, strict=True))
    # Updated parameters reuse the buffers of the old ones.
    piece_programs, resident = [first], state.union(readers).difference(stored)
    for k, update in enumerate(divided.updates):
        piece = compiled(update, f"update_{k}", last_reads(update))
        others = resident.difference(piece.reads)
        piece_programs.append(
            replace(piece, other_bytes=sum(_bytes(avals[number]) for number in others))
        )
        resident = resident.difference(set(piece.last_reads).difference(state))
    return PiecePrograms(
        inputs=program.inputs,
        outputs=program.outputs,
        treedef=treedef,
        programs=tuple(piece_programs),
        checksums=dict(
            zip(
                (program.outputs[k] for k in target.stored),
                program.outputs[treedef.num_leaves :],
                strict=True,
            )
        ),
    )


def _donatable(
    program: Program, reads: Sequence[int], last_reads: Collection[int], results: Sequence[int]
) -> list[int]:
    """Positions of inputs whose buffers can be donated to results: those without later readers, as
    far as there are results of their shape.
    """

    def shape_and_dtype(number: int) -> tuple[Any, ...]:
        return program.avals[number].shape, program.avals[number].dtype

    free_results, positions = Counter(map(shape_and_dtype, results)), list[int]()
    for k, number in enumerate(reads):
        if number in last_reads and free_results[shape_and_dtype(number)] > 0:
            free_results[shape_and_dtype(number)] -= 1
            positions.append(k)
    return positions


def init_programs(
    target: CompileTarget, init: Callable[[jax.Array], TrainState], seed: jax.ShapeDtypeStruct
) -> PiecePrograms:
    """Compiles seed -> state: first what is not on disk, then what is, one array at a time.

    Checksums are separate: XLA would constant-fold the sums of zeros, which optimizers' initial
    states consist of, at compile time.

    Args:
        init: seed -> state.
    """
    program, treedef = target.traced(no_mesh(), init, seed, with_checksums=False)
    stored, shardings = [program.outputs[k] for k in target.stored], target.shardings(program)

    def compiled(numbers: Sequence[int], name: str) -> PieceProgram:
        traced = TracedFunction.of_program(replace(program, outputs=tuple(numbers)), [seed])
        executable = traced.compiled(
            f"shardlib_{name}_{target.digest}",
            target.mesh,
            shardings=[shardings[number] for number in numbers],
        )
        return PieceProgram(program=executable, reads=program.inputs, results=tuple(numbers))

    resident = tuple(dict.fromkeys(number for number in program.outputs if number not in stored))
    piece_programs = [
        compiled(resident, "init"),
        *(compiled((number,), f"init_{k}") for k, number in enumerate(stored)),
    ]
    return PiecePrograms(
        inputs=program.inputs,
        outputs=program.outputs,
        treedef=treedef,
        programs=tuple(piece_programs),
        checksums=dict.fromkeys(stored),
    )


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an abstract array on each device."""
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    return int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize


# --------------------------------------------------------------------------------------------------
# A step whose optimizer state is on disk: one program for everything before the update, and one
# per piece of the update.
#
#     gradients        | piece 1 | piece 2 | piece 3 | ...
#     read 1, read 2   |         | read 3  | read 4  |
#                                | write 1 | write 2 | write 3
#
# Reads are some pieces ahead, and writes some arrays behind: only that much of the state is in host
# memory at a time, and one piece of it in device memory.

#: Number of pieces that are read ahead.
READ_AHEAD = 2


def disk_writer(parent: str | os.PathLike[str] | None) -> tuple[DiskWriter, tuple[Finding, ...]]:
    """A writer of arrays to a new folder inside another one, and findings about that folder."""
    created = folder(parent)
    kind = in_memory(created.path)
    finding = Finding(
        code="disk-in-memory",
        severity="warning",
        where=str(created.path.parent),
        message=(f"the folder for state on disk is in host memory ({kind}): it saves no memory"),
        hint=f"a folder on a disk: {DISK_VARIABLE}=/path or compile(..., disk='/path')",
    )
    return DiskWriter(folder=created), (finding,) if kind else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class DiskStep:
    """All programs of a training step, and those of its initial state.

    Attributes:
        target: the target of the compiled programs.
        batch: abstract, with shardings.
        function: (state, batch) -> (state, metrics), undivided.
        init_state: seed -> state, undivided.
        writer: writes arrays to disk.
    """

    target: CompileTarget
    batch: Tree
    function: Callable[[TrainState, Tree], Tree]
    init_state: Callable[[jax.Array], TrainState]
    writer: DiskWriter
    _inits: dict[tuple[int, ...], PiecePrograms] = field(
        default_factory=dict[tuple[int, ...], PiecePrograms]
    )
    _reader: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="state-from-disk")
    )

    @cached_property
    def _step(self) -> PiecePrograms:
        return step_programs(self.target, self.function, self.batch)

    def prepare(self) -> None:
        """Compiles the step."""
        _ = self._step

    def init(self, seed: np.ndarray | np.int32) -> TrainState:
        """The state before the first step, from a seed or the data of a key."""
        shape = np.shape(seed)
        if shape not in self._inits:
            abstract = jax.ShapeDtypeStruct(shape, seed.dtype)
            self._inits[shape] = init_programs(self.target, self.init_state, abstract)
        programs = self._inits[shape]
        values: dict[int, Any] = {programs.inputs[0]: seed}
        for piece in programs.programs:
            values.update(self._to_disk(programs, piece(values)))
        return programs.tree(values)

    def init_optimizer(self, init: Callable[[Tree], Tree], params: Tree) -> Tree:
        """The optimizer's state before the first step for existing parameters; arrays that go to
        disk are computed one at a time.

        Args:
            init: parameters -> optimizer state.
        """
        abstract, structure = jax.tree.flatten(self.target.state.opt_state)
        first = len(
            jax.tree.leaves(
                (self.target.state.step, self.target.state.params, self.target.state.model_state)
            )
        )
        stored = {position - first for position in disk_leaves(self.target.state)}
        leaves: list[Any] = []
        for k, leaf in enumerate(abstract):
            array = jax.jit(
                lambda params, k=k: jax.tree.leaves(init(params))[k], out_shardings=leaf.sharding
            )(params)
            leaves.append(self._put(array) if k in stored else array)
        return structure.unflatten(leaves)

    def step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """Runs one step; deletes the given state."""
        piece_programs = self._step.programs
        values: dict[int, Any] = dict(
            zip(self._step.inputs, jax.tree.leaves((state, batch)), strict=True)
        )
        waiting = deque(piece_programs[1:])
        reading = deque(
            self._read(waiting.popleft(), values) for _ in range(min(READ_AHEAD, len(waiting)))
        )
        values.update(self._to_disk(self._step, piece_programs[0](values)))
        for piece in piece_programs[1:]:
            read = reading.popleft().result()
            if waiting:
                reading.append(self._read(waiting.popleft(), values))
            results = piece(
                {
                    **values,
                    **{
                        number: values[number].on_devices(shards) for number, shards in read.items()
                    },
                }
            )
            for number in read:
                values[number].delete()
            for number in piece.last_reads:
                del values[number]
            values.update(self._to_disk(self._step, results))
        return self._step.tree(values)

    def memory(self) -> dict[str, int]:
        """Bytes per device of the program that needs the most, including live parameters and
        gradients that it does not read.
        """
        return max(map(PieceProgram.memory, self._step.programs), key=lambda sizes: sizes["peak"])

    def _read(self, piece: PieceProgram, values: Mapping[int, Any]) -> Future[dict[int, Any]]:
        """Starts to read the arrays of a piece that are on disk; a state from elsewhere may have
        them in memory.
        """
        on_disk = {
            number: values[number]
            for number in piece.stored
            if isinstance(values[number], DiskArray)
        }
        return self._reader.submit(
            lambda: {number: leaf.read() for number, leaf in on_disk.items()}
        )

    def _to_disk(self, programs: PiecePrograms, results: Mapping[int, Any]) -> dict[int, Any]:
        """Results, with those that are stored on disk put there."""

        def put(number: int, leaf: Any) -> Any:
            if number not in programs.checksums:
                return leaf
            sums = programs.checksums[number]
            return self._put(leaf) if sums is None else self.writer.put(leaf, results[sums])

        return {number: put(number, leaf) for number, leaf in results.items()}

    def _put(self, array: jax.Array) -> DiskArray:
        """Computes the checksums of an array and puts it on disk."""
        return self.writer.put(array, array_checksums(array, self.target.replicated))
