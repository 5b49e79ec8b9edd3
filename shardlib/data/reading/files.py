"""Files that are there, and how they are read: folders of this machine, and whatever `etils.epath`
opens.

>>> PathFiles(root="gs://bucket/books").local
False
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from shardlib.errors import DataError, MissingFileError

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
        """Whether they are files of this machine."""
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
