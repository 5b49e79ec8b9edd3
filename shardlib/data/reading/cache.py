"""Files that are slow to read, or far away, as files of this machine: copied at their first use,
within a bound of bytes, and checked.

What a process does not find on its disk it fetches once, and others of the machine wait for it; the
idea is Hoard's, a cache that a training job shares over its epochs (arXiv:1812.00669). Files that
were not used for the longest time make room for others; those in use never do.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import time
import weakref
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardlib.data.reading.copies import Entry, Held, OpenCopy, Reads, digest_of, make_room
from shardlib.data.reading.files import FileInfo, Files, PathFiles, changed
from shardlib.data.reading.locks import Lock, locked, unwritable
from shardlib.errors import DataError, ShardlibError
from shardlib.report import Finding
from shardlib.untrusted import Limits, read_json

_COPIED = 1 << 22
#: What is said of a copy is short.
SIDECAR = Limits(bytes=1 << 16, depth=4)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cached(source: Files | str | Path, folder: str | Path, *, limit_bytes: int) -> CachedFiles:
    """Files of a source, through a folder of this machine.

    Args:
        limit_bytes: of all copies together.
    """
    if limit_bytes < 1:
        raise DataError(f"limit_bytes is {limit_bytes}; it must be at least 1")
    files = (
        source
        if not isinstance(source, (str, Path))
        else PathFiles(root=str(source) if "://" in str(source) else str(Path(source).absolute()))
    )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Lock(Path(folder) / "cache.lock").release()
    except OSError as error:
        raise unwritable(Path(folder), error, "the cache") from error
    return CachedFiles(source=files, folder=Path(folder), limit_bytes=limit_bytes)


class CachedFiles:
    """Files with copies on this machine; see `Files` and `cached`.

    A copy that is damaged is fetched again. Where a file has no room, because it is larger than the
    bound, all others are in use, or the disk is full, it is read from its source, without a copy.
    `findings` says both.
    """

    def __init__(self, *, source: Files, folder: Path, limit_bytes: int) -> None:
        self._source, self._folder, self._limit = source, folder, limit_bytes
        self._infos: dict[str, FileInfo] = {}
        self._kept: dict[str, Held] = {}
        self._found: dict[tuple[str, str], Finding] = {}
        self._verified: set[tuple[str, int, int]] = set()

    @property
    def root(self) -> str:
        """See `Files`; that of the source."""
        return self._source.root

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was noticed until now."""
        return tuple(self._found.values())

    def listing(self) -> tuple[FileInfo, ...]:
        """See `Files`."""
        listed = self._source.listing()
        self._infos = {info.name: info for info in listed}
        return listed

    def open(self, name: str) -> BinaryIO:
        """See `Files`; the copy stays as long as the file is open."""
        copy = self._held(name)
        if copy is None:
            return self._source.open(name)
        return cast(BinaryIO, io.BufferedReader(OpenCopy(copy)))

    def path(self, name: str) -> Path:
        """See `Files`; the copy stays as long as this object does."""
        if name not in self._kept:
            copy = self._held(name)
            if copy is None:
                return self._source_path(name)
            if self._kept.setdefault(name, copy) is copy:
                weakref.finalize(self, copy.lock.release)
            else:
                copy.lock.release()
        return self._kept[name].path

    def _source_path(self, name: str) -> Path:
        try:
            return self._source.path(name)
        except DataError as error:
            total = sum(info.size for info in self._infos.values())
            raise DataError(
                f"{name} has to be a file of this machine while it is read, and {self._folder} has"
                f" no room for it beside the others in use\nTry: limit_bytes of at least {total:,},"
                f" the size of all files of {self.root}, on a disk that has them"
            ) from error

    def _held(self, name: str) -> Held | None:
        """A copy that nobody removes until its lock is released; None where there is no room for
        one.
        """
        info, entry = self._info(name), Entry.of(self._folder, self._source.root, name)
        try:
            return self._locked(entry, info)
        except ShardlibError:
            raise
        except OSError as error:
            if error.errno not in _FULL:
                raise unwritable(self._folder, error, f"the copy of {name}", info.size) from error
            self._say(
                "cache-full-disk",
                name,
                f"the disk of the cache is full: {name} is read from {self._source.root} every"
                " time",
                "free some space, or a cache on another disk",
            )
            return None

    def _info(self, name: str) -> FileInfo:
        if name not in self._infos:
            self.listing()
        if name not in self._infos:
            raise DataError(f"there is no file {name} in {self._source.root}")
        return self._infos[name]

    def _locked(self, entry: Entry, info: FileInfo) -> Held | None:
        lock = Lock(entry.lock)
        try:
            while True:
                lock.take(shared=True)
                if self._whole(entry, info):
                    now = time.time_ns()
                    os.utime(entry.sidecar, ns=(now, now))  # the clock of file systems is coarser
                    return Held(path=entry.data, lock=lock)
                lock.take()  # alone; another process may have come between
                if not self._whole(entry, info) and not self._fetch(entry, info):
                    lock.release()
                    return None
        except BaseException:
            lock.release()
            raise

    def _whole(self, entry: Entry, info: FileInfo) -> bool:
        """Whether there is a copy of what the source has now; its bytes are hashed at its first use
        by this object.
        """
        try:
            recorded, status = (
                read_json(entry.sidecar, "description of a copy", DataError, limits=SIDECAR),
                entry.data.stat(),
            )
        except (FileNotFoundError, DataError):
            return False
        if not isinstance(recorded, dict):
            return False
        recorded = cast("dict[str, Any]", recorded)
        version = (entry.key, status.st_ino, status.st_mtime_ns)
        if [recorded.get("size"), recorded.get("modified")] != [info.size, info.modified]:
            self._say(
                "source-changed",
                info.name,
                f"{info.name} changed in {self._source.root} since it was copied, and is fetched"
                " again",
                "runs that began with the old one cannot go on with the new one",
            )
            return False
        if status.st_size == info.size and version in self._verified:
            return True
        if status.st_size != info.size or digest_of(entry.data) != recorded.get("sha256"):
            self._say(
                "copy-damaged",
                info.name,
                f"the copy of {info.name} in {self._folder} was damaged, and is fetched again",
                "look after the disk",
            )
            return False
        self._verified.add(version)
        return True

    def _fetch(self, entry: Entry, info: FileInfo) -> bool:
        """Copies a file, with the entry locked; whether there was room."""
        with locked(self._folder / "cache.lock"):
            entry.remove()
            if not make_room(self._folder, self._limit - info.size):
                self._say(
                    "cache-full",
                    info.name,
                    f"{info.name} has {info.size:,} bytes, for which the cache has no room within"
                    f" {self._limit:,}: it is read from {self._source.root} every time",
                    "a larger limit_bytes",
                )
                return False
            with open(entry.part, "xb") as stream:
                stream.truncate(
                    info.size
                )  # counts from now on, so that others do not take the same room
        try:
            digest = self._copy(entry, info)
            entry.write_sidecar(info, digest)
        except BaseException:
            with locked(self._folder / "cache.lock"):
                entry.remove()
            raise
        with locked(self._folder / "cache.lock"):  # whoever makes room sees one of the two names
            os.replace(entry.part, entry.data)
        status = entry.data.stat()
        self._verified.add((entry.key, status.st_ino, status.st_mtime_ns))
        return True

    def _copy(self, entry: Entry, info: FileInfo) -> str:
        digest, size = hashlib.sha256(), 0
        with Reads(self._source, info) as source, open(entry.part, "r+b") as stream:
            while data := source.read(_COPIED):
                size += len(data)
                if size > info.size:
                    break
                digest.update(data)
                stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if size != info.size:
            raise changed(self._source, info, size)
        return digest.hexdigest()

    def _say(self, code: str, location: str, message: str, hint: str) -> None:
        self._found.setdefault(
            (code, location),
            Finding(code=code, severity="warning", message=message, where=location, hint=hint),
        )
