"""The folder of checkpoints, complete, partial and damaged ones; and its owner.

A complete checkpoint is a folder named by its step; nothing else is. Orbax writes into a folder of
another name and renames it when all is written; a checkpoint is renamed before it is deleted. So a
process that is killed at any moment leaves complete checkpoints and remnants. Other entries of the
folder are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from etils import epath

from shardlib.errors import CheckpointError, OwnedError
from shardlib.processes.kin import Who, clock, lives, this_process
from shardlib.untrusted.data import read_regular

# --------------------------------------------------------------------------------------------------
# The files of `owner/`: numbers, claims, and releases.

#: Number of claim files kept below the highest: a process with an old listing must not find one of
#: their numbers free.
KEPT = 8
#: Content of an owner's heartbeat file after it has released the folder.
RELEASED = "released"
_FILE = re.compile(r"(\d{6,18})\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An owner's record of itself.

    Attributes:
        token: a random number, unique to this claim.
        since: time of the claim, for messages: UTC, ISO 8601.
        who: the process.
    """

    token: str
    since: str
    who: Who


def taken(draft: Path, target: Path) -> bool:
    """True if a draft has become the file of a number; only one process succeeds."""
    try:
        os.link(draft, target)
    except FileExistsError:
        return _linked(draft)
    except FileNotFoundError:
        return False  # an owner has deleted old files; try again
    except OSError:
        if _linked(draft):
            return True  # a network file system lost the reply
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
    """Creates a file and syncs it to the disk; an existing draft of this process is overwritten."""
    if path.suffix == ".part":
        path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(handle, text.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def tidy(place: Path, number: int) -> None:
    """Deletes files of former owners, and abandoned drafts."""
    with contextlib.suppress(OSError):
        for path in place.iterdir():
            stem = path.name.partition(".")[0]
            if path.suffix == ".part" or (
                stem.isascii() and stem.isdigit() and int(stem) < number - KEPT
            ):
                with contextlib.suppress(OSError):
                    path.unlink()


def file_name(number: int, kind: str = "json") -> str:
    """Name of a file of an owner, by its number."""
    return f"{number:06d}.{kind}"


def numbers(place: Path) -> list[int]:
    return [int(match[1]) for name in os.listdir(place) if (match := _FILE.fullmatch(name))]


def read_claim(path: Path) -> Claim | None:
    """The claim in a file; None if it cannot be read."""
    try:
        data: dict[str, Any] = json.loads(text_of(path))
        who = Who(**data.pop("who"))
        claim = Claim(who=who, **data)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return (
        claim
        if isinstance(who.pid, int)
        and all(
            isinstance(text, str)
            for text in (claim.token, claim.since, who.host, who.started, who.boot, who.namespace)
        )
        else None
    )


def text_of(path: Path) -> str:
    try:
        return read_regular(path).decode(errors="replace")
    except OSError:
        return ""


def described(place: Path) -> Claim | None:
    """The claim of the last owner of a folder that has not released it; None if there is none. Does
    not check whether the owner is alive.
    """
    with contextlib.suppress(OSError):
        newest = max(numbers(place / "owner"), default=0)
        if newest and not text_of(place / "owner" / file_name(newest, "beat")).startswith(RELEASED):
            return read_claim(place / "owner" / file_name(newest))
    return None


# --------------------------------------------------------------------------------------------------
# The owner of a folder, the only process that may write to it, on any machine; dead owners are
# detected.
#
#     owner = claim(folder)
#     owner.require()        # before anything is written: still the owner?
#     owner.release()
#
# In `owner/` of the folder every owner has a number, one higher than that of the previous one, and
# a file `NUMBER.json` with its claim. The file is created complete and atomically (by a hard link,
# which network file systems create for only one of several processes), so of several processes that
# want a number one gets it. The highest number is the owner. Current claims are never deleted, so
# nobody can delete a claim that another process has just made.
#
# An owner writes a heartbeat to `NUMBER.beat` every `EVERY` seconds. A later process decides:
#
# - a process of this boot of this machine is alive or not (`shardlib.processes.kin`), which is
#   known at once;
# - any other (another machine, another container, a rebooted machine) is watched: its heartbeat
#   must change within `SILENT` seconds by the clock of the watching process.
#
# An owner that was suspended until another process took its place sees the higher number before it
# writes again, and writes nothing. File locks are not used: many network file systems do not
# enforce them.

#: Seconds between two heartbeats.
EVERY = 2.0
#: Seconds without a heartbeat, after which an owner on another machine counts as dead.
SILENT = 30.0
#: Polling interval of a watched owner, seconds.
LOOK_EVERY = 0.25
#: Seconds after which an owner checks again that it still owns the folder.
SURE = 5.0

#: Maximum number of attempts to get a number; other processes are first a few times at most.
TRIES = 1000

#: Tokens of the owners in this process.
_held: set[str] = set()


class Owner:
    """The right of this process to write to a folder; released by `release`, when the object is
    collected, and at the end of the process.
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
        """True until it is released."""
        return self._give_back.alive

    def require(self) -> None:
        """Raises an error if another process has taken over the folder, as happens when this one
        appears dead.
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
        """Releases the folder; idempotent."""
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
        what: its name in messages; by default its path.
        silent_seconds: how long to watch an owner on another machine.
    """
    what, place = what or str(folder), folder / "owner"
    place.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        raise OSError(errno.ELOOP, f"{place} is a link to somewhere else")
    own_claim = Claim(
        token=secrets.token_hex(8),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        who=this_process(),
    )
    draft = place / f"{own_claim.token}.part"
    try:
        for _ in range(TRIES):
            write_new(
                draft, json.dumps(asdict(own_claim), indent=1) + "\n"
            )  # also refreshes the directory listing of a network file system
            newest = max(numbers(place), default=0)
            if newest and not _is_free(place, newest, what, silent_seconds, say):
                continue  # another process was first; the next iteration looks at it
            if taken(draft, place / file_name(newest + 1)) and max(numbers(place)) == newest + 1:
                break
        else:
            raise OSError(errno.EBUSY, f"no number is to be had in {place}")
    finally:
        draft.unlink(missing_ok=True)
    tidy(place, newest + 1)
    return Owner(place, what, newest + 1, own_claim)


@dataclass(kw_only=True, eq=False)
class _State:
    """The state of an owner, shared with its thread and its finaliser."""

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
        """Writes a heartbeat; a full disk must not end the owner."""
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
        """Checks for another owner; an unreadable claim does not count."""
        with contextlib.suppress(OSError):
            newest = max(numbers(self.folder), default=0)
            newest_claim = read_claim(self.folder / file_name(newest))
            if newest_claim is not None and newest_claim.token != self.token:
                self.lost = newest_claim
            elif newest_claim is not None:
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
    """Releases the folder; a fork of the process does not."""
    if os.getpid() != state.pid:
        return
    state.ended.set()
    if state.lost is None:
        state.write(f"{RELEASED}\n")
    _held.discard(state.token)


def _is_free(
    place: Path, number: int, what: str, seconds: float, say: Callable[[str], None] | None
) -> bool:
    """True if the owner with the highest number has released or is dead; False if there is a higher
    number by now.
    """
    file, signs = place / file_name(number), place / file_name(number, "beat")
    if text_of(signs).startswith(RELEASED):
        return True
    owner = read_claim(file)
    if owner is not None and owner.token in _held and owner.who == this_process():
        _refuse(what, owner, "which is this very process", here=True)
    alive = lives(owner.who) if owner is not None else None
    alive = (
        alive and owner is not None and owner.who != this_process()
    )  # a folder that this process has released is free
    if alive is not None:
        if alive:
            _refuse(what, owner, "which lives")
        return True
    if say is not None:
        by = (
            f"process {owner.who.pid} on {owner.who.host}"
            if owner is not None
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


def _refuse(what: str, owner: Claim | None, how: str, *, here: bool = False) -> NoReturn:
    who = owner.who if owner is not None else Who(host="an unknown host", pid=0)
    since = owner.since if owner is not None else "an unknown time"
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
    """Raises an error for a folder with a live local owner, before slow work; changes nothing, and
    does not watch remote owners.
    """
    owner = described(folder)
    if owner is not None and owner.who != this_process() and lives(owner.who):
        _refuse(what, owner, "which lives")


#: Names left by an interrupted save (of Orbax, which appends this) or deletion.
_REMNANT = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|discarded)", re.ASCII)
#: Names of checkpoints: integers in Python's notation, ASCII digits.
_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
#: The largest step: states count them in 32 bits.
LARGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of checkpoints.

    Attributes:
        path: local, or any kind that `etils.epath` supports.
    """

    path: epath.Path

    def claimed(self, what: str = "") -> Owner | None:
        """Makes this process the owner. Object stores ("gs://...") cannot create a file
        exclusively, and have no owner.
        """
        if "://" in str(self.path):
            return None
        try:
            return claim(Path(self.path), what=what)
        except OSError as error:
            raise self._unwritable(error) from error

    def prepare(self) -> None:
        """Creates the folder, checks that it is writable, and deletes remnants of interrupted
        saves; only for its owner.
        """
        probe = self.path / f"writable-{secrets.token_hex(8)}.probe"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_text("probe")
            probe.unlink()
            for entry in self._remnants():
                _delete(entry)
        except OSError as error:
            raise self._unwritable(error) from error

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, the oldest first; known damaged ones are excluded."""
        try:
            entries = (
                [entry for entry in self.path.iterdir() if _step(entry.name) is not None]
                if self.path.is_dir()
                else []
            )
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self.path} cannot be listed ({error})\nTry: other"
                " permissions; nothing was changed"
            ) from error
        if not entries:
            return ()
        return tuple(sorted(int(entry.name) for entry in entries if _whole(entry)))

    def taken(self, step: int) -> str:
        """The reason why a checkpoint of a step cannot be written, with a remedy; "" if it can."""
        place = self.checkpoint(step)
        if not (place.exists() or _is_link(place)):
            return ""
        if _whole(place):
            return (
                f"there is a checkpoint of step {step} in {self.path}; it is not overwritten\nTry:"
                " restore it, or another folder"
            )
        kind = (
            "a link"
            if _is_link(place)
            else "a folder that is not a whole checkpoint"
            if place.is_dir()
            else "a file"
        )
        return (
            f"{place}, where the checkpoint of step {step} belongs, is {kind}; it is not"
            " overwritten\nTry: move it away"
        )

    def refuse_run(self) -> None:
        """Raises an error for the folder of a run in place of that of its checkpoints, which has
        its own owner.
        """
        with contextlib.suppress(OSError):
            if (self.path / "run.json").exists() and (self.path / "checkpoints").is_dir():
                raise CheckpointError(
                    f"{self.path} is the folder of a run; its checkpoints are in"
                    f" {self.path / 'checkpoints'}\nTry: that folder"
                )

    def checkpoint(self, step: int) -> epath.Path:
        """The path of the checkpoint of a step."""
        return self.path / str(step)

    def set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint and returns its new name; nothing is deleted."""
        names = {entry.name for entry in self.path.iterdir()}
        name = next(
            name
            for i in range(len(names) + 1)
            if (name := f"{step}.damaged{f'-{i + 1}' if i else ''}") not in names
        )
        self.checkpoint(step).rename(self.path / name)
        return name

    def discard(self, step: int) -> None:
        """Deletes a checkpoint atomically: renamed first, so that after a kill it is complete or
        gone.
        """
        gone = self.path / f"{step}.discarded"
        self.checkpoint(step).rename(gone)
        _delete(gone)

    def clear(self, step: int) -> None:
        """Deletes the remnants of a failed save; Orbax's other threads may still write to it for a
        moment.
        """
        for _ in range(10):
            for entry in self._remnants(f"{step}."):
                with contextlib.suppress(OSError):
                    _delete(entry)
            time.sleep(0.1)
            if not self._remnants(f"{step}."):
                return

    def _remnants(self, start: str = "") -> list[epath.Path]:
        return [
            entry
            for entry in self.path.iterdir()
            if _REMNANT.fullmatch(entry.name) and entry.name.startswith(start)
        ]

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"checkpoints cannot be written to {self.path} ({error})\nTry: another folder, or"
            " Checkpoints(folder, read_only=True) to restore alone"
        )


def _step(name: str) -> int | None:
    r"""The step of a name; None for names with other digits, leading zeros or too large numbers.

    >>> [_step(name) for name in ("10", "0", "\N{SUPERSCRIPT TWO}", "007", "99999999999")]
    [10, 0, None, None, None]
    """
    return int(name) if _STEP.fullmatch(name) and int(name) <= LARGEST else None


def _whole(entry: epath.Path) -> bool:
    """True if an entry is a folder that Orbax has finished; False if it cannot be read, or is a
    link, which would give one checkpoint two steps.
    """
    # imports JAX, which processes that only watch need not load
    import orbax.checkpoint as ocp

    try:
        return (
            entry.is_dir()
            and not _is_link(entry)
            and bool(ocp.utils.is_checkpoint_finalized(entry))
        )
    except (OSError, ValueError):
        return False


def _is_link(entry: epath.Path) -> bool:
    """True if an entry is a link; object stores have none."""
    return "://" not in str(entry) and Path(entry).is_symlink()


def _delete(entry: epath.Path) -> None:
    """Deletes a folder; of a link only the link, since its target may belong to others."""
    local = Path(entry) if "://" not in str(entry) else None
    if local is not None and (local.is_symlink() or not local.is_dir()):
        local.unlink(missing_ok=True)
    else:
        entry.rmtree(missing_ok=True)
