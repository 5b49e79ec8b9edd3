"""The files of `owner/`: numbers, who has them, and whether they were given back."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.processes.lifetime.who import Who
from shardlib.untrusted import read_regular

#: Numbers that stay behind the highest: who looks with an old listing must not find one of them
#: free again.
KEPT = 8
#: What the file of signs has when its owner has given the folder back.
RELEASED = "released"
_FILE = re.compile(r"(\d{6,18})\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What an owner says of itself.

    Attributes:
        token: a random number, of this claim alone.
        since: when it was made, for people: UTC, ISO 8601.
        who: the process.
    """

    token: str
    since: str
    who: Who


def taken(draft: Path, target: Path) -> bool:
    """Whether a draft has become the file of a number; it does so for one process alone."""
    try:
        os.link(draft, target)
    except FileExistsError:
        return _linked(draft)
    except FileNotFoundError:
        return False  # an owner has tidied up; once more
    except OSError:
        if _linked(draft):
            return True  # a network file system whose answer was lost
        try:
            write_new(target, draft.read_text())  # a file system without links
        except FileExistsError:
            return False
    return True


def _linked(draft: Path) -> bool:
    try:
        return draft.stat().st_nlink == 2
    except OSError:
        return False


def write_new(path: Path, text: str) -> None:
    """Writes a file that is not there, and has it on the disk; a draft of this process is written
    again.
    """
    if path.suffix == ".part":
        path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(handle, text.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def tidy(place: Path, number: int) -> None:
    """Deletes what owners long ago have left, and drafts of those that came to nothing."""
    with contextlib.suppress(OSError):
        for path in place.iterdir():
            stem = path.name.partition(".")[0]
            if path.suffix == ".part" or (
                stem.isascii() and stem.isdigit() and int(stem) < number - KEPT
            ):
                with contextlib.suppress(OSError):
                    path.unlink()


def file_name(number: int, kind: str = "json") -> str:
    """Name of the file of an owner."""
    return f"{number:06d}.{kind}"


def numbers(place: Path) -> list[int]:
    return [int(found[1]) for name in os.listdir(place) if (found := _FILE.fullmatch(name))]


def read_claim(path: Path) -> Claim | None:
    """Who an owner is; None where that cannot be read."""
    try:
        data: dict[str, Any] = json.loads(text_of(path))
        who = Who(**data.pop("who"))
        found = Claim(who=who, **data)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return (
        found
        if isinstance(who.pid, int)
        and all(
            isinstance(text, str)
            for text in (found.token, found.since, who.host, who.started, who.boot, who.namespace)
        )
        else None
    )


def text_of(path: Path) -> str:
    try:
        return read_regular(path).decode(errors="replace")
    except OSError:
        return ""


def described(place: Path) -> Claim | None:
    """Who owned a folder last, and has not given it back; None where nobody has. Nothing is
    judged.
    """
    with contextlib.suppress(OSError):
        newest = max(numbers(place / "owner"), default=0)
        if newest and not text_of(place / "owner" / file_name(newest, "beat")).startswith(RELEASED):
            return read_claim(place / "owner" / file_name(newest))
    return None
