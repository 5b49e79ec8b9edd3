"""The owner of a folder, who alone may write to it: one process at a time, on whatever machine, and
one that is dead is found out.

    owner = claim(folder)
    owner.require()        # before anything is written: still the owner?
    owner.release()

In `owner/` of the folder every owner has a number, one higher than that of the one before, and a
file `NUMBER.json` that says who it is. The file comes into being whole and only once (a link, which
network file systems make for one of many), so that of several processes that want a number one gets
it. The highest number is the owner. Nothing is ever taken away from a number, so nobody can delete
what another has just got.

An owner says every `EVERY` seconds that it lives, in `NUMBER.beat`. Who comes later decides:

- a process of this boot of this machine lives or does not (`shardlib.processes.lifetime.who`), and
  is known at once;
- any other (another machine, another container, a machine that was started again) is watched: what
  it writes must change within `SILENT` seconds of the clock of the one that looks.

An owner that was stopped for so long that another has taken its place sees the higher number before
it writes again, and writes nothing. No lock of a file is used: many network file systems have none
that is held.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from shardlib.checkpointing.owner_files import (
    RELEASED,
    Claim,
    described,
    file_name,
    numbers,
    read_claim,
    taken,
    text_of,
    tidy,
    write_new,
)
from shardlib.errors import OwnedError
from shardlib.processes.lifetime.who import Who, clock, lives, this_process

#: Seconds between two signs of life.
EVERY = 2.0
#: Seconds without one, after which an owner that cannot be looked at counts as dead.
SILENT = 30.0
#: Seconds between two looks at one that is watched.
LOOK_EVERY = 0.25
#: Seconds after which an owner looks again whether it still is.
SURE = 5.0

#: How often a process tries to get a number; others come first a few times at most.
TRIES = 1000

#: Tokens of the owners in this process.
_held: set[str] = set()


class Owner:
    """The right of this process to write to a folder; given back by `release`, when nobody has it
    any more, and at the end of the process.
    """

    def __init__(self, folder: Path, what: str, number: int, claim: Claim) -> None:
        self.claim = claim
        self._state = _State(
            folder=folder, what=what, number=number, token=claim.token, pid=os.getpid()
        )
        self._give_back = weakref.finalize(self, _release, self._state)
        _held.add(claim.token)
        self._state.beat(1)
        threading.Thread(
            target=_beat, args=(self._state,), name="shardlib-owner", daemon=True
        ).start()

    @property
    def held(self) -> bool:
        """Whether it has not been given back."""
        return self._give_back.alive

    def require(self) -> None:
        """Makes sure that no other process has taken the folder, as one does that takes this one
        for dead.
        """
        if self._state.lost is None and clock() - self._state.sure < SURE:
            return
        self._state.look()
        if self._state.lost is not None:
            _refuse(
                self._state.what,
                self._state.lost,
                "which took it over when this one gave no sign of life",
            )

    def release(self) -> None:
        """Gives the folder back; twice is once."""
        self._give_back()


def claim(
    folder: Path,
    *,
    what: str = "",
    silent_seconds: float = SILENT,
    say: Callable[[str], None] | None = None,
) -> Owner:
    """Makes this process the owner of a folder.

    Args:
        what: how to call it in messages; by default its path.
        silent_seconds: how long to watch an owner that cannot be looked at.
    """
    what, place = what or str(folder), folder / "owner"
    place.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        raise OSError(errno.ELOOP, f"{place} is a link to somewhere else")
    mine = Claim(
        token=secrets.token_hex(8),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        who=this_process(),
    )
    draft = place / f"{mine.token}.part"
    try:
        for _ in range(TRIES):
            write_new(
                draft, json.dumps(asdict(mine), indent=1) + "\n"
            )  # also has a network file system list the folder anew
            newest = max(numbers(place), default=0)
            if newest and not _is_free(place, newest, what, silent_seconds, say):
                continue  # another came first; who that is, is the next question
            if taken(draft, place / file_name(newest + 1)) and max(numbers(place)) == newest + 1:
                break
        else:
            raise OSError(errno.EBUSY, f"no number is to be had in {place}")
    finally:
        draft.unlink(missing_ok=True)
    tidy(place, newest + 1)
    return Owner(place, what, newest + 1, mine)


@dataclass(kw_only=True, eq=False)
class _State:
    """An owner, for its thread and its end."""

    folder: Path
    what: str
    number: int
    token: str
    pid: int
    sure: float = 0.0
    lost: Claim | None = None

    def __post_init__(self) -> None:
        self.ended = threading.Event()
        self.sure = clock()

    def beat(self, count: int) -> None:
        """Says that the owner lives; a full disk must not end it."""
        self.write(f"{count:020d}\n")

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            handle = os.open(
                self.folder / file_name(self.number, "beat"),
                os.O_WRONLY | os.O_CREAT | getattr(os, "O_NONBLOCK", 0),
                0o666,
            )
            try:
                os.write(handle, text.encode())
                os.ftruncate(handle, len(text))
            finally:
                os.close(handle)

    def look(self) -> None:
        """Looks whether another has taken the folder; one that cannot be read now is nobody's."""
        with contextlib.suppress(OSError):
            newest = max(numbers(self.folder), default=0)
            found = read_claim(self.folder / file_name(newest))
            if found is not None and found.token != self.token:
                self.lost = found
            elif found is not None:
                self.sure = clock()


def _beat(state: _State) -> None:
    count = 1
    while not state.ended.wait(EVERY):
        count += 1
        state.look()
        if state.lost is not None:
            return
        state.beat(count)


def _release(state: _State) -> None:
    """Gives back; a fork of the process gives nothing back that is not its own."""
    if os.getpid() != state.pid:
        return
    state.ended.set()
    if state.lost is None:
        state.write(f"{RELEASED}\n")
    _held.discard(state.token)


def _is_free(
    place: Path, number: int, what: str, seconds: float, say: Callable[[str], None] | None
) -> bool:
    """Whether the owner with the highest number has given back or is dead; False where there is a
    higher one by now.
    """
    file, signs = place / file_name(number), place / file_name(number, "beat")
    if text_of(signs).startswith(RELEASED):
        return True
    found = read_claim(file)
    if found is not None and found.token in _held and found.who == this_process():
        _refuse(what, found, "which is this very process", here=True)
    known = lives(found.who) if found is not None else None
    known = (
        known and found is not None and found.who != this_process()
    )  # what this process has given back, it has not got any more
    if known is not None:
        if known:
            _refuse(what, found, "which lives")
        return True
    if say is not None:
        by = (
            f"process {found.who.pid} on {found.who.host}"
            if found is not None
            else "a process that has not said who it is"
        )
        say(
            f"{what} was last written by {by}, which cannot be looked at from here: waiting up to"
            f" {seconds:g} s for a sign of life"
        )
    before, end = (text_of(file), text_of(signs)), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(LOOK_EVERY)
        now = (text_of(file), text_of(signs))
        if max(numbers(place), default=0) != number:
            return False
        if now[1].startswith(RELEASED):
            return True
        if now != before:
            _refuse(what, read_claim(file), "which gives signs of life")
    return True


def _refuse(what: str, found: Claim | None, how: str, *, here: bool = False) -> NoReturn:
    who = found.who if found is not None else Who(host="an unknown host", pid=0)
    since = found.since if found is not None else "an unknown time"
    hint = (
        "close what has it open: `checkpoints.close()`, or the end of the other `fit`"
        if here
        else f"another folder, or the end of that process (kill {who.pid}, on {who.host})"
    )
    raise OwnedError(
        f"{what} is another process's to write: process {who.pid} on {who.host}, since {since},"
        f" {how}\nTry: {hint}; `shardlib status` and Checkpoints(folder, read_only=True) look on"
        " meanwhile. Nothing was changed",
        host=who.host,
        pid=who.pid,
        since=since,
    )


def refuse_where_owned(folder: Path, what: str) -> None:
    """A first look, before anything takes time: touches nothing, and watches nobody."""
    found = described(folder)
    if found is not None and found.who != this_process() and lives(found.who):
        _refuse(what, found, "which lives")
