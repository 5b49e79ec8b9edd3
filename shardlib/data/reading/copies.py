"""Copies of files in the folder of a cache: their names, their locks, and room for more of them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.data.reading.files import FileInfo, Files
from shardlib.data.reading.locks import Lock
from shardlib.errors import DataError


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
class Held:
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

    def __init__(self, copy: Held) -> None:
        self._lock: Any = copy.lock
        super().__init__(copy.path, "rb")

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._lock.release()
