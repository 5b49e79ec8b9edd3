"""Where do arrays on disk lie? In files of a folder that is this process's own, and goes when the
process does.

The files hold the state of a run as memory would: after a crash they are worth nothing, and
checkpoints are what a run goes on from. Room is taken before anything is written, and files are
used again: a step writes as many bytes as it frees.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardlib.errors import DiskError

#: Variable of the environment that names the folder for state on disk.
VARIABLE = "SHARDLIB_DISK_DIR"
PREFIX = "shardlib-state-"
#: Kinds of file systems that are memory (Linux, /proc/mounts).
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(kw_only=True, eq=False)
class File:
    """A file of a certain size, and what is known of its content.

    Attributes:
        path: of the file.
        size: in bytes.
        sum: CRC-32 of what was written last.
        holders: how many read it still.
    """

    path: Path
    size: int
    sum: int = 0
    holders: int = 1

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
        self.sum = zlib.crc32(raw)

    def read(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Reads all of the file.

        Args:
            dtype: of the array.
        """
        try:
            raw = np.fromfile(self.path, np.uint8)
        except OSError as error:
            raise DiskError(
                f"state on disk could not be read from {self.path} ({error})\nTry: another disk;"
                " the newest checkpoint is as before"
            ) from error
        if raw.nbytes != self.size or zlib.crc32(raw.data) != self.sum:
            raise DiskError(
                f"state on disk is not what was written: {self.path} has changed\nTry: another"
                " disk; the newest checkpoint is as before"
            )
        return raw.view(dtype).reshape(shape)


def _raw(data: np.ndarray) -> memoryview:
    """The bytes of an array, in the order of its elements."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


@dataclass(kw_only=True, eq=False)
class Folder:
    """Files for arrays.

    Attributes:
        path: the folder.
    """

    path: Path
    _free: dict[int, list[File]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: int = 0

    def file(self, size: int) -> File:
        """A file of some size that nothing reads: one that was let go of, or a new one."""
        with self._lock:
            if self._free.get(size):
                free = self._free[size].pop()
                free.holders = 1
                return free
            self._count += 1
            path = self.path / f"{self._count}.bin"
        try:
            with path.open("xb") as file:
                if size:
                    _take(file.fileno(), size)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise DiskError(
                f"there is no room for {size / 2**20:.1f} MiB of state in {self.path}"
                f" ({error})\nTry: make room, or another disk: {VARIABLE}=/path or compile(...,"
                " disk='/path'); the newest checkpoint is as before"
            ) from error
        return File(path=path, size=size)

    def hold(self, file: File) -> None:
        """Says that one more reads a file."""
        with self._lock:
            file.holders += 1

    def release(self, file: File) -> None:
        """Says that one fewer reads a file; the last one lets go of it."""
        with self._lock:
            file.holders -= 1
            if not file.holders:
                self._free.setdefault(file.size, []).append(file)


def folder(parent: str | os.PathLike[str] | None = None) -> Folder:
    """A new folder of this process below some other one; folders that killed processes left there
    are deleted.

    Args:
        parent: a folder on a disk of this host; by default what `VARIABLE` says, or else the
            system's folder for temporary files.
    """
    root = Path(parent or os.environ.get(VARIABLE) or tempfile.gettempdir())
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
        lock = os.open(draft / "lock", os.O_CREAT | os.O_RDWR)  # held as long as the process lives
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = draft.rename(
            root / draft.name[1:]
        )  # others delete folders of this name that nobody holds
    except OSError as error:
        raise DiskError(
            f"the folder for state on disk cannot be used: {root} ({error})\nTry: another one:"
            f" {VARIABLE}=/path or compile(..., disk='/path')"
        ) from error
    created = Folder(path=path)
    weakref.finalize(created, _gone, path, lock)
    return created


def _take(file: int, size: int) -> None:
    """Takes room for a file, where the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def in_memory(path: Path) -> str:
    """The kind of the file system that holds a path where that is memory, not a disk; "" otherwise,
    and where the system does not say.
    """
    with contextlib.suppress(OSError):
        mounts = [
            line.split()[1:3]
            for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        ]
        holding = [(place, kind) for place, kind in mounts if path.resolve().is_relative_to(place)]
        kind = max(holding, key=lambda mount: len(mount[0]), default=("", ""))[1]
        return kind if kind in IN_MEMORY else ""
    return ""


def _gone(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _sweep(root: Path) -> None:
    """Deletes folders whose process is gone: nobody holds their lock."""
    for left in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (left / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
