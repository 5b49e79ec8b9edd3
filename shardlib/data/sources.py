"""Files of text, records and tokens, near or far, read through a bounded cache.

Files and how they are read: folders of this machine, and whatever `etils.epath` opens.

>>> PathFiles(root="gs://bucket/books").local
False
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import io
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar, cast

from shardlib.errors import DataError, MissingFileError, ShardlibError
from shardlib.findings import Finding
from shardlib.untrusted.data import Limits, parse_json, read_json, shown

#: Folders whose files are left out, beside hidden ones.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A file as a listing shows it.

    Attributes:
        name: path below the root, with slashes.
        size: bytes.
        modified: nanoseconds since 1970, 0 where nobody knows.
    """

    name: str
    size: int
    modified: int


class Files(Protocol):
    """Some files that can be read, wherever they are. Anything with these methods can be a source,
    and can be `cached`.

    Attributes:
        root: where they are, for people; the same files have the same root in the next run.
    """

    @property
    def root(self) -> str: ...

    def listing(self) -> tuple[FileInfo, ...]:
        """All of them in the order of their names."""
        ...

    def open(self, name: str) -> BinaryIO:
        """One of them, for reading."""
        ...

    def path(self, name: str) -> Path:
        """One of them as a file of this machine, which stays there while the process runs."""
        ...


@dataclass(frozen=True, kw_only=True)
class PathFiles:
    """A file, or the files below a folder.

    Attributes:
        root: path or address, such as "gs://bucket/folder".
        pattern: names of files that are taken, such as "*.txt".
    """

    root: str
    pattern: str = "*"

    @property
    def local(self) -> bool:
        """True if they are files of this machine."""
        return "://" not in self.root

    def listing(self) -> tuple[FileInfo, ...]:
        """See `Files`; folders of installed packages and hidden ones are left out."""
        root = self._root()
        if not root.exists():
            raise MissingFileError(
                f"there is no training data at {self.root}\nTry: the path of a file or of a folder"
            )
        if root.is_file():
            return (_info(root, root.name),)
        infos = (
            _below(root, self.pattern)
            if isinstance(root, Path)
            else _at_address(root, self.pattern, "")
        )
        return tuple(sorted(infos, key=lambda info: info.name))

    def open(self, name: str) -> BinaryIO:
        """See `Files`."""
        return cast(BinaryIO, self._at(name).open("rb"))

    def path(self, name: str) -> Path:
        """See `Files`."""
        if not self.local:
            raise DataError(
                f"{self.root} is not on this machine, and {name} has to be\nTry:"
                f" cached({self.root!r}, folder, limit_bytes=...)"
            )
        return Path(self._at(name))

    def _root(self) -> Any:
        if self.local:
            return Path(self.root)
        from etils import epath  # its import takes longer than reading a small file

        return epath.Path(self.root)

    def _at(self, name: str) -> Any:
        root = self._root()
        return root if root.name == name and root.is_file() else root / name


def _below(root: Path, pattern: str) -> Iterator[FileInfo]:
    """Files below a folder; folders that are left out are not looked into."""
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if _taken(name)]
        for name in names:
            path = Path(folder, name)
            if _taken(name) and fnmatch.fnmatch(name, pattern) and path.is_file():
                yield _info(path, path.relative_to(root).as_posix())


def _at_address(folder: Any, pattern: str, below: str) -> Iterator[FileInfo]:
    """The same through `etils.epath`, which does not search recursively; one question for every
    file.
    """
    for path in folder.iterdir():
        if not _taken(path.name):
            continue
        if (status := path.stat()).is_directory:
            yield from _at_address(path, pattern, f"{below}{path.name}/")
        elif fnmatch.fnmatch(path.name, pattern):
            yield FileInfo(
                name=f"{below}{path.name}",
                size=status.length,
                modified=int(status.mtime or 0) * 10**9,
            )


def _unreadable(error: OSError) -> None:
    raise DataError(
        f"{error.filename} cannot be listed: {error.strerror}\nTry: a folder that can be read"
    )


def _taken(name: str) -> bool:
    return name not in SKIPPED_FOLDERS and not name.startswith(".")


def _info(path: Any, name: str) -> FileInfo:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be looked at: {error}") from error
    if isinstance(path, Path):
        return FileInfo(name=name, size=status.st_size, modified=status.st_mtime_ns)
    return FileInfo(name=name, size=status.length, modified=int(status.mtime or 0) * 10**9)


def read_whole(files: Files, info: FileInfo) -> bytes:
    """All bytes of a file."""
    try:
        with files.open(info.name) as stream:
            data = stream.read()
    except OSError as error:
        raise DataError(f"{info.name} of {files.root} cannot be read: {error}") from error
    if len(data) != info.size:
        raise changed(files, info, len(data))
    return data


def changed(files: Files, info: FileInfo, size: int) -> DataError:
    """The error for a file whose size is no longer the one that was listed.

    Args:
        size: bytes that it has now.
    """
    verb = "shrank" if size < info.size else "grew"
    return DataError(
        f"{info.name} of {files.root} {verb} from {info.size:,} to {size:,} bytes while it was in"
        " use\nTry: put the file back as it was, or start again with the new one"
    )


# --------------------------------------------------------------------------------------------------
# Locks on files, by which processes of a machine keep out of each other's way; they end with the
# process that holds them.

try:
    import fcntl
except ImportError:  # not a Unix: whoever renames a folder first wins
    fcntl = None

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is made where it is not there; waits for others."""
    lock = Lock(path)
    try:
        lock.take()
        yield
    finally:
        lock.release()


class Lock:
    """The lock of a file, held alone or with others, by one thread of one process at a time. File
    systems without locks give none.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666
        )

    def take(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Returns whether the lock is now held; changes a lock that is held already, which others
        may come before.
        """
        if fcntl is None:
            return True
        try:
            fcntl.flock(
                self._descriptor,
                (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB),
            )
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def release(self) -> None:
        """Lets go; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def unwritable(folder: Path, error: OSError, what: str, needed: int | None = None) -> DataError:
    """The error for a folder that cannot be written, in words.

    Args:
        needed: bytes of it, if known.
    """
    size = "" if needed is None else f" of about {needed / 2**20:,.1f} MiB"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DataError(
            f"the disk of {folder} is full: there is no room for {what}{size}; nothing was left"
            " there\nTry: free some space, or cache=... on another disk"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DataError(
            f"{folder} cannot be written, which {what}{size} needs: {error.strerror}\nTry:"
            " cache=... with a folder that can be written"
        )
    return DataError(
        f"{what}{size} cannot be written to {folder}: {error}\nTry: cache=... with another folder"
    )


# --------------------------------------------------------------------------------------------------
# Copies of files in the folder of a cache: their names, their locks, and room for more of them.


class Reads:
    """A file of a source, whose errors say that it is the source that cannot be read."""

    def __init__(self, source: Files, info: FileInfo) -> None:
        self._where = f"{info.name} of {source.root}"
        self._stream = self._done(lambda: source.open(info.name))

    def read(self, count: int) -> bytes:
        return self._done(lambda: self._stream.read(count))

    def __enter__(self) -> Reads:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _done(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            raise DataError(
                f"{self._where} cannot be read: {error}\nTry: again, when it can be reached"
            ) from error


@dataclass(frozen=True, kw_only=True)
class CachedCopy:
    """A copy and the lock that keeps it."""

    path: Path
    lock: Lock


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The files of one copy: the bytes, what is said about them (its time is that of the last use),
    the copy being made, and a lock, which stays.
    """

    folder: Path
    key: str

    @staticmethod
    def of(folder: Path, root: str, name: str) -> Entry:
        """The place of the copy of a file."""
        return Entry(
            folder=folder, key=hashlib.sha256(json.dumps([root, name]).encode()).hexdigest()[:32]
        )

    @property
    def data(self) -> Path:
        return self.folder / f"{self.key}.data"

    @property
    def sidecar(self) -> Path:
        return self.folder / f"{self.key}.json"

    @property
    def part(self) -> Path:
        return self.folder / f"{self.key}.part"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.key}.lock"

    def write_sidecar(self, info: FileInfo, digest: str) -> None:
        """Writes down what the copy is a copy of.

        Args:
            digest: SHA-256 of its bytes.
        """
        self.sidecar.write_text(
            json.dumps(
                {"name": info.name, "size": info.size, "modified": info.modified, "sha256": digest}
            )
        )

    def remove(self) -> None:
        for path in (self.sidecar, self.data, self.part):
            path.unlink(missing_ok=True)


def make_room(folder: Path, limit: int) -> bool:
    """Removes copies, those first that were not used for the longest time, until all have at most
    `limit` bytes; whether that was possible without those in use.

    Args:
        limit: bytes that they may have together.
    """
    sizes = {
        Entry(folder=folder, key=path.stem): path.stat().st_size
        for path in sorted(folder.glob("*.data")) + sorted(folder.glob("*.part"))
    }
    total = sum(sizes.values())
    if limit < 0:
        return False
    for entry in sorted(sizes, key=_last_used):
        if total <= limit:
            break
        lock = Lock(entry.lock)
        try:
            if lock.take(wait=False):
                entry.remove()
                total -= sizes[entry]
        finally:
            lock.release()
    return total <= limit


def _last_used(entry: Entry) -> float:
    try:
        return entry.sidecar.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # a copy that was never finished


def digest_of(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class OpenCopy(io.FileIO):
    """A copy as a file, whose lock is released when it is closed."""

    def __init__(self, copy: CachedCopy) -> None:
        self._lock: Any = copy.lock
        super().__init__(copy.path, "rb")

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._lock.release()


# --------------------------------------------------------------------------------------------------
# Files that are slow to read, or far away, as files of this machine: copied at their first use,
# within a bound of bytes, and checked.
#
# What a process does not find on its disk it fetches once, and others of the machine wait for it;
# the idea is Hoard's, a cache that a training job shares over its epochs (arXiv:1812.00669). Files
# that were not used for the longest time make room for others; those in use never do.

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
        self._kept: dict[str, CachedCopy] = {}
        self._found: dict[tuple[str, str], Finding] = {}
        self._verified: set[tuple[str, int, int]] = set()

    @property
    def root(self) -> str:
        """See `Files`; that of the source."""
        return self._source.root

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Returns what was noticed until now."""
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

    def _held(self, name: str) -> CachedCopy | None:
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

    def _locked(self, entry: Entry, info: FileInfo) -> CachedCopy | None:
        lock = Lock(entry.lock)
        try:
            while True:
                lock.take(shared=True)
                if self._whole(entry, info):
                    now = time.time_ns()
                    os.utime(entry.sidecar, ns=(now, now))  # the clock of file systems is coarser
                    return CachedCopy(path=entry.data, lock=lock)
                lock.take()  # alone; another process may have come between
                if not self._whole(entry, info) and not self._fetch(entry, info):
                    lock.release()
                    return None
        except BaseException:
            lock.release()
            raise

    def _whole(self, entry: Entry, info: FileInfo) -> bool:
        """Returns whether there is a copy of what the source has now; its bytes are hashed at its
        first use by this object.
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


# --------------------------------------------------------------------------------------------------
# Documents in files of text, of lines of JSON, or of records.
#
# A source is cut into parts, which can be read in any order and by several threads: a file of
# text, a megabyte of lines, some hundred records.

#: Bytes of the lines that are a part.
CHUNK = 1 << 20
#: Records that are a part.
RECORDS = 256


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text.

    Attributes:
        name: where it is, for people.
        text: the whole of it.
        key: what decides whether it is held out: the path of a file, or what a record says.
    """

    name: str
    text: str
    key: bytes


class Source(Protocol):
    """Documents in parts, with random access.

    Attributes:
        files: where they are.
        listed: their files.
        reading: how documents are found in them, as text.
    """

    @property
    def files(self) -> Files: ...

    @property
    def listed(self) -> tuple[FileInfo, ...]: ...

    @property
    def reading(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[Document]: ...


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Every file is a document; those that are not UTF-8 text are none."""

    files: Files
    listed: tuple[FileInfo, ...]
    reading: str = "text"

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, index: int) -> Sequence[Document]:
        info = self.listed[index]
        text = text_of(read_whole(self.files, info))
        return [] if text is None else [Document(name=info.name, text=text, key=info.name.encode())]


def text_of(data: bytes) -> str | None:
    """The text of a file; None where it is not UTF-8 text."""
    try:
        return None if b"\0" in data else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Every line is an object, one field of which is a document. Parts begin with the first line
    that begins in a stretch of `CHUNK` bytes.

    Attributes:
        field: name of the field.
    """

    files: Files
    listed: tuple[FileInfo, ...]
    field: str

    @property
    def reading(self) -> str:
        """See `Source`."""
        return f"lines, field {self.field!r}"

    @cached_property
    def _parts(self) -> list[tuple[FileInfo, int]]:
        return [(info, begin) for info in self.listed for begin in range(0, info.size, CHUNK)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Sequence[Document]:
        info, begin = self._parts[index]
        return [
            self._document(info, offset, line)
            for offset, line in self._lines(info, begin)
            if line.strip()
        ]

    def _lines(self, info: FileInfo, begin: int) -> Iterator[tuple[int, bytes]]:
        with self.files.open(info.name) as stream:
            size = stream.seek(0, 2)
            if size != info.size:
                raise changed(self.files, info, size)
            offset = stream.seek(max(begin - 1, 0))
            if begin:
                offset += len(stream.readline())
            while offset < min(begin + CHUNK, info.size):
                line = stream.readline()
                if not line:
                    raise changed(self.files, info, offset)
                yield offset, line
                offset += len(line)

    def _document(self, info: FileInfo, offset: int, line: bytes) -> Document:
        name = f"{info.name}, byte {offset:,}"
        try:
            value = parse_json(line, "the line", DataError)
        except DataError as error:
            raise DataError(
                f"{self._place(info, offset)}{str(error).removeprefix('the line')}"
            ) from error
        return Document(
            name=name, text=_field(value, self.field, lambda: self._place(info, offset)), key=line
        )

    def _place(self, info: FileInfo, offset: int) -> str:
        with self.files.open(info.name) as stream:
            number = stream.read(offset).count(b"\n") + 1
        return f"line {number:,} of {info.name} in {self.files.root}"


def _field(value: Any, field: str, place: Any) -> str:
    if not isinstance(value, dict) or field not in value:
        has = (
            f"the fields {', '.join(map(shown, sorted(value)[:20]))}"
            if isinstance(value, dict)
            else "no fields"
        )
        raise DataError(
            f"{place()} has no field {field!r}; it has {has}\nTry: field=... with the name of the"
            " one that holds the text"
        )
    text = value[field]
    if not isinstance(text, str):
        raise DataError(
            f"the field {field!r} of {place()} is {type(text).__name__}, not text\nTry: field=..."
            " with the name of the one that holds the text"
        )
    return text


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records of ArrayRecord files: UTF-8 text, or with a field objects in JSON.

    Attributes:
        field: name of the field; None where a record is the text itself.
    """

    files: Files
    listed: tuple[FileInfo, ...]
    field: str | None

    @property
    def reading(self) -> str:
        """See `Source`."""
        return f"records, field {self.field!r}"

    @cached_property
    def _reader(self) -> Any:
        from grain.sources import ArrayRecordDataSource  # Grain is slow to import

        try:
            return ArrayRecordDataSource([str(self.files.path(info.name)) for info in self.listed])
        except (RuntimeError, ValueError, OSError) as error:
            raise DataError(
                f"the ArrayRecord files of {self.files.root} cannot be read: {error}\nTry: check"
                " that they are whole"
            ) from error

    def __len__(self) -> int:
        return math.ceil(len(self._reader) / RECORDS)

    def __getitem__(self, index: int) -> Sequence[Document]:
        numbers = range(index * RECORDS, min((index + 1) * RECORDS, len(self._reader)))
        try:
            records = self._reader.__getitems__(list(numbers))
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise DataError(
                f"records {numbers.start} to {numbers.stop - 1} of {self.files.root} cannot be"
                f" read: {error}\nTry: check that the files are whole"
            ) from error
        return [self._document(number, data) for number, data in zip(numbers, records, strict=True)]

    def _document(self, number: int, data: bytes) -> Document:
        name = f"record {number:,} of {self.files.root}"
        try:
            if self.field is None:
                return Document(name=name, text=data.decode("utf-8"), key=data)
            return Document(
                name=name,
                text=_field(parse_json(data, name, DataError), self.field, lambda: name),
                key=data,
            )
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{name} is not UTF-8 text: {error}\nTry: records of UTF-8 text, or of JSON with"
                " field=..."
            ) from error


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Failed:
    """The exception of a thread; Grain would write a remark of its own into the message."""

    error: Exception


class Ahead(Generic[T]):
    """An iterator over a function's results for every item, some of which are computed before they
    are asked for.
    """

    def __init__(
        self, function: Callable[[Any], T], items: Sequence[Any], *, threads: int, ahead: int
    ) -> None:
        """Begins to work."""
        import grain  # slow to import

        def attempt(item: Any) -> T | _Failed:
            try:
                return function(item)
            except Exception as error:
                return _Failed(error=error)

        self._results: Any = iter(
            grain.MapDataset.source(items)
            .map(attempt)
            .to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))
        )
        self._results.start_prefetch()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next result."""
        result = next(self._results)
        if isinstance(result, _Failed):
            self.close()
            raise result.error
        return result

    def close(self) -> None:
        """Begins nothing more; a second time does nothing."""
        self._results.close()
