"""Copies of slow files: within a bound, whole, and shared by processes."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from shardlib.data import sources
from shardlib.data.open import read
from shardlib.data.sources import CachedFiles, FileInfo, PathFiles, cached, locked
from shardlib.errors import DataError


class Remote:
    """Files in memory, as if they were far away; every opening is counted."""

    root = "remote://files"

    def __init__(self, **contents: bytes) -> None:
        self.contents, self.opened = contents, list[str]()

    def listing(self) -> tuple[FileInfo, ...]:
        return tuple(
            FileInfo(name=name, size=len(data), modified=len(data))
            for name, data in sorted(self.contents.items())
        )

    def open(self, name: str) -> BinaryIO:
        self.opened.append(name)
        return io.BytesIO(self.contents[name])

    def path(self, name: str) -> Path:
        raise DataError(f"{name} is far away")


def content(files: CachedFiles, name: str) -> bytes:
    with files.open(name) as stream:
        return stream.read()


def copies(folder: Path) -> int:
    """Bytes of all copies."""
    with locked(folder / "cache.lock"):
        return sum(
            path.stat().st_size for path in folder.iterdir() if path.suffix in (".data", ".part")
        )


def test_files_are_fetched_once(tmp_path: Path):
    remote = Remote(a=b"a" * 100, b=b"b" * 50)
    files = cached(remote, tmp_path / "cache", limit_bytes=1000)
    assert [content(files, name) for name in "aba"] == [b"a" * 100, b"b" * 50, b"a" * 100]
    assert (
        content(cached(remote, tmp_path / "cache", limit_bytes=1000), "b") == b"b" * 50
    )  # another process finds them
    assert remote.opened == ["a", "b"]
    assert files.findings == ()
    assert copies(tmp_path / "cache") == 150


def test_the_bound_holds_and_the_least_recently_used_go_first(tmp_path: Path):
    remote = Remote(a=b"a" * 40, b=b"b" * 40, c=b"c" * 40, d=b"d" * 70)
    files = cached(remote, tmp_path, limit_bytes=100)
    for name in "abac":  # b is the one that was not used for the longest time
        content(files, name)
        assert copies(tmp_path) <= 100
    content(files, "a")
    assert remote.opened == ["a", "b", "c"]
    content(files, "d")  # nothing else has room beside it
    assert copies(tmp_path) == 70
    content(files, "a")
    assert remote.opened == ["a", "b", "c", "d", "a"] and copies(tmp_path) == 40


def test_a_file_in_use_is_not_removed(tmp_path: Path):
    remote = Remote(a=b"a" * 60, b=b"b" * 60, c=b"c" * 200)
    files, other = (cached(remote, tmp_path, limit_bytes=100) for _ in range(2))
    with files.open("a") as stream:
        assert stream.read(1) == b"a"
        assert content(other, "b") == b"b" * 60 and copies(tmp_path) == 60  # read from its source
        assert stream.read() == b"a" * 59
    assert [finding.code for finding in other.findings] == ["cache-full"]
    assert content(other, "b") == b"b" * 60
    assert copies(tmp_path) == 60
    assert remote.opened == ["a", "b", "b"]
    assert content(files, "c") == b"c" * 200 and copies(tmp_path) <= 100
    path = files.path("a")
    content(other, "b")
    assert path.read_bytes() == b"a" * 60
    with pytest.raises(
        DataError,
        match=(
            r"c has to be a file of this machine while it is read, and .* has no room for it beside"
            r" the others in use\nTry: limit_bytes of at least 320"
        ),
    ):
        files.path("c")


def copy_of(folder: Path) -> Path:
    (found,) = folder.glob("*.data")
    return found


@pytest.mark.parametrize("damage", [b"x" + b"a" * 99, b"a" * 99, b"a" * 101])
def test_damaged_copies_are_fetched_again_and_it_is_said(tmp_path: Path, damage: bytes):
    remote = Remote(a=b"a" * 100)
    content(cached(remote, tmp_path, limit_bytes=1000), "a")
    copy_of(tmp_path).write_bytes(damage)
    files = cached(remote, tmp_path, limit_bytes=1000)
    assert content(files, "a") == b"a" * 100 and remote.opened == ["a", "a"]
    assert [finding.code for finding in files.findings] == ["copy-damaged"] and copy_of(
        tmp_path
    ).read_bytes() == b"a" * 100


def test_files_that_change_are_fetched_again_and_those_that_shrink_meanwhile_are_an_error(
    tmp_path: Path,
):
    remote = Remote(a=b"a" * 100)
    content(cached(remote, tmp_path, limit_bytes=1000), "a")
    remote.contents["a"] = b"b" * 90
    files = cached(remote, tmp_path, limit_bytes=1000)
    assert content(files, "a") == b"b" * 90 and [finding.code for finding in files.findings] == [
        "source-changed"
    ]
    late = cached(remote, tmp_path / "late", limit_bytes=1000)
    late.listing()
    remote.contents["a"] = b"b" * 30
    with pytest.raises(
        DataError, match="a of remote://files shrank from 90 to 30 bytes while it was in use"
    ):
        content(late, "a")
    assert copies(tmp_path / "late") == 0


def test_a_full_disk_means_reading_from_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    files = cached(Remote(a=b"a" * 100), tmp_path, limit_bytes=1000)
    assert content(files, "a") == b"a" * 100 and copies(tmp_path) == 0
    (finding,) = files.findings
    assert finding.code == "cache-full-disk"
    assert (
        finding.message == "the disk of the cache is full: a is read from remote://files every time"
    )


def test_folders_that_cannot_be_written_and_sources_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(DataError, match="cannot be written to"):
        cached(Remote(), tmp_path / "file", limit_bytes=10)
    with pytest.raises(DataError, match="limit_bytes is 0; it must be at least 1"):
        cached(Remote(), tmp_path / "folder", limit_bytes=0)
    remote = Remote(a=b"a")
    monkeypatch.setattr(
        remote, "open", lambda name: (_ for _ in ()).throw(OSError("no route to host"))
    )
    with pytest.raises(DataError, match="a of remote://files cannot be read: no route to host"):
        content(cached(remote, tmp_path / "folder", limit_bytes=10), "a")
    with pytest.raises(DataError, match="there is no file b in remote://files"):
        content(cached(remote, tmp_path / "folder", limit_bytes=10), "b")


def test_threads_fetch_a_file_once_and_keep_the_bound(tmp_path: Path):
    remote = Remote(**{f"f{number}": bytes([number]) * 100 for number in range(8)})
    files, wrong = cached(remote, tmp_path, limit_bytes=350), list[str]()

    def work(offset: int) -> None:
        for step in range(24):
            number = (offset + step * step) % 8
            if content(files, f"f{number}") != bytes([number]) * 100 or copies(tmp_path) > 350:
                wrong.append(f"f{number}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and not list(tmp_path.glob("*.part"))


_PROCESS = """
import sys, time
from pathlib import Path
from shardlib.data.sources import cached
from shardlib.data.sources import PathFiles
class Slow(PathFiles):
    def open(self, name):
        with open(sys.argv[3], "a") as stream: stream.write(name + " ")
        time.sleep(0.2)
        return super().open(name)
files = cached(Slow(root=sys.argv[1]), sys.argv[2], limit_bytes=10**6)
for name in ("a", "b"):
    with files.open(name) as stream: assert stream.read() == name.encode() * 1000
"""


def test_processes_fetch_a_file_once(tmp_path: Path):
    (tmp_path / "source").mkdir()
    for name in "ab":
        (tmp_path / "source" / name).write_text(name * 1000)
    command = [
        sys.executable,
        "-c",
        _PROCESS,
        str(tmp_path / "source"),
        str(tmp_path / "cache"),
        str(tmp_path / "log"),
    ]
    running = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0] and sorted(
        (tmp_path / "log").read_text().split()
    ) == ["a", "b"]


def test_what_a_stopped_process_left_is_removed(tmp_path: Path):
    remote = Remote(a=b"a" * 80)
    (tmp_path / "0123.part").write_bytes(b"?" * 90)
    files = cached(remote, tmp_path, limit_bytes=100)
    assert content(files, "a") == b"a" * 80 and copies(tmp_path) == 80


def test_data_are_read_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "source").mkdir()
    np.save(tmp_path / "source" / "tokens.npy", np.arange(500, dtype=np.int32))
    lines = "".join(
        json.dumps({"text": f"text number {number}"}) + "\n" for number in range(50)
    ).encode()
    remote = Remote(**{"tokens.npy": (tmp_path / "source" / "tokens.npy").read_bytes()})
    far = read(cached(remote, tmp_path / "cache", limit_bytes=10**6), seq=8).batch(0, 20)
    near = read(tmp_path / "source", seq=8).batch(0, 20)
    assert (far["inputs"] == near["inputs"]).all() and remote.opened == ["tokens.npy"]
    monkeypatch.setattr(sources, "_COPIED", 7)
    text = Remote(**{"lines.jsonl": lines})
    found = read(
        cached(text, tmp_path / "cache", limit_bytes=10**6), seq=8, cache=tmp_path / "stores"
    )
    assert found.examples_per_epoch > 50 and text.opened == ["lines.jsonl"]


class Elsewhere(PathFiles):
    """Files of this machine, opened as those of an address are."""

    local = False  # type: ignore[assignment]


def test_files_at_an_address(tmp_path: Path):
    root = tmp_path / "source"
    for name in (
        "a/one.txt",
        "a/b/two.txt",
        ".hidden/three.txt",
        "a/__pycache__/four.txt",
        "five.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name} " * 30)
    far, near = Elsewhere(root=str(root)), PathFiles(root=str(root))
    assert (
        [(info.name, info.size) for info in far.listing()]
        == [(info.name, info.size) for info in near.listing()]
        == [("a/b/two.txt", 360), ("a/one.txt", 300), ("five.txt", 270)]
    )
    with pytest.raises(
        DataError, match=r"is not on this machine, and five.txt has to be\nTry: cached"
    ):
        far.path("five.txt")
    files = cached(far, tmp_path / "cache", limit_bytes=10**6)
    assert (
        content(files, "a/one.txt")
        == (root / "a/one.txt").read_bytes()
        == files.path("a/one.txt").read_bytes()
    )
    assert (
        read(files, seq=8, cache=tmp_path / "stores").digest
        == read(root, seq=8, cache=tmp_path / "stores").digest
    )
