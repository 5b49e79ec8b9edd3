"""The supervisor, which restarts a run when its process dies.

A process that trains can be killed, run out of memory, or hang. A supervisor is a second, small
process (it never imports JAX) that starts the first one, watches its heartbeat, and restarts it:

- a process that ends with an error, or is killed, is noticed at once;
- one that hangs ends itself (`shardlib.processes.place`), with exit code `HUNG`;
- one without a heartbeat (stopped, swapped out) is killed after `silent_seconds`, unless its loop
  has ended.

Every start resumes from the newest good checkpoint. Starts that save nothing new count against a
budget, so that a run that cannot proceed ends, with the last lines of its process's output; waits
between them double. SIGTERM, SIGHUP and Ctrl-C are forwarded, and the run ends in order. A
supervisor that is killed takes its process with it (`shardlib.processes.kin`): an unsupervised one
would own the folder of the run.

Processes that train together on several machines may each have a supervisor: if one fails the
others cannot proceed, and all restart. Those on one machine are better started together
(`shardlib.launch.local`, with the same budget and waits).
"""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import IO

from shardlib.processes.kin import Guard, finish, start
from shardlib.processes.place import (
    ENDED,
    HUNG,
    STOPPED,
    USAGE,
    Heartbeat,
    Observer,
    StopRequest,
    read_heartbeat,
    stop_requests,
)
from shardlib.training.run import RunFolder

#: Number of output lines of a failed process that are repeated at the end.
LAST_LINES = 20
#: Polling interval, seconds.
LOOK_EVERY = 0.2
#: Interval of searches through the heartbeats of all processes, until the watched one is found,
#: seconds.
SEARCH_EVERY = 1.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on the restarts of a run.

    Attributes:
        restarts: maximum number of consecutive restarts that save nothing new.
        wait_seconds: before the first restart; doubles with each.
        silent_seconds: without a heartbeat, after which a process is killed. Before its first
            heartbeat it may take ten times as long.
        stop_seconds: time for a process to save and end after a stop request.
    """

    restarts: int = 3
    wait_seconds: float = 1.0
    silent_seconds: float = 60.0
    stop_seconds: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One start, after its end.

    Attributes:
        code: exit code; negative: the signal that killed it.
        why: in words.
        lines: the last lines of its standard error.
        who: the process that ended.
        changed: whether the next start differs, so that the count of restarts begins anew.
    """

    code: int
    why: str
    lines: tuple[str, ...]
    who: str = "the training process"
    changed: bool = False


def supervise(
    command: Sequence[str],
    folder: RunFolder,
    *,
    budget: Budget | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Runs a command that trains in `folder` until it is done; returns its exit code."""
    budget = budget or Budget()
    with stop_requests() as stop:
        return repeated(
            lambda: _watched(command, folder, budget, lambda: stop.reason),
            lambda: newest(folder),
            budget=budget,
            stop=stop,
            say=say,
        )


def repeated(
    once: Callable[[], Ended],
    progress: Callable[[], int | None],
    *,
    budget: Budget,
    stop: StopRequest,
    say: Callable[[str], None],
) -> int:
    """Restarts `once` until it is done, is stopped, or cannot proceed; returns its exit code.

    Args:
        progress: the newest step from which a start can resume; None if nothing is stored.
    """
    failures, reached = 0, progress() or 0
    while True:
        ended = once()
        if ended.code in (0, USAGE, STOPPED) or (stop and ended.code >= 0):
            return ended.code
        if stop:
            return STOPPED
        before, now = reached, progress()
        reached = now or 0
        failures = 1 if reached > before or ended.changed else failures + 1
        say(
            f"{ended.who} {ended.why}"
            + (f"; the newest checkpoint is of step {now}" if now is not None else "")
        )
        if failures > budget.restarts:
            if budget.restarts:
                say(
                    "\n".join(
                        [
                            (
                                f"it failed {failures} times without a new checkpoint, so the run"
                                " ends; the last lines of the process:"
                            ),
                            *ended.lines,
                        ]
                    )
                )
            return ended.code if ended.code > 0 else 128 - ended.code
        _pause(budget.wait_seconds * 2 ** (failures - 1), lambda: stop.reason)
        if stop:
            return STOPPED
        say(f"starting it again ({failures} of {budget.restarts} without a new checkpoint)")


def _watched(
    command: Sequence[str], folder: RunFolder, budget: Budget, stopping: Callable[[], str]
) -> Ended:
    """Runs one process until its end."""
    with Guard() as guard:
        process = start(command, guard, stderr=subprocess.PIPE)
        lines: deque[str] = deque(maxlen=LAST_LINES)
        assert process.stderr is not None
        text = io.TextIOWrapper(process.stderr, encoding="utf-8", errors="replace")
        reader = Thread(target=_copy, args=(text, lines), daemon=True)
        reader.start()
        try:
            silent = _until_the_end(process, _Sign(folder, process.pid), budget, stopping)
        finally:
            finish(process, guard)
        reader.join(timeout=5)
        text.close()
    code = process.returncode
    return Ended(
        code=code,
        why=(
            f"gave no sign of life for {budget.silent_seconds:g} s and was killed"
            if silent
            else why(code, lines)
        ),
        lines=tuple(lines),
    )


def _until_the_end(
    process: subprocess.Popen[bytes], sign: _Sign, budget: Budget, stopping: Callable[[], str]
) -> bool:
    """Waits until a process ends or has to be killed; returns whether its heartbeat was missing."""
    deadline, asked = float("inf"), False
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY)
        if stopping() and not asked:
            asked, deadline = True, time.monotonic() + budget.stop_seconds
            process.send_signal(_passed_on(stopping()))
        if sign.missing(budget.silent_seconds):
            return True
    return False


def _passed_on(reason: str) -> signal.Signals:
    """The signal with which a process is asked to end: the one received, so that it reports it;
    SIGTERM in place of Ctrl-C, which would interrupt it anywhere before it trains.
    """
    return (
        signal.Signals[reason]
        if reason in signal.Signals.__members__ and reason != "SIGINT"
        else signal.SIGTERM
    )


class _Sign:
    """The heartbeat of one process of this machine, whose rank is looked up by its process id."""

    def __init__(self, folder: RunFolder, pid: int) -> None:
        self._folder, self._pid, self._rank, self._next, self._observer = (
            folder,
            pid,
            -1,
            0.0,
            Observer(),
        )

    def missing(self, seconds: float) -> bool:
        """True if there was no heartbeat for so long; ten times as long before the first one."""
        beat = self._read()
        silent = self._observer.silent(self._pid, beat)
        if beat is None:
            return silent > 10 * seconds
        return beat.phase != ENDED and silent > seconds

    def _read(self) -> Heartbeat | None:
        if self._rank < 0:
            if time.monotonic() < self._next:
                return None
            self._next = time.monotonic() + SEARCH_EVERY
            self._rank = next(
                (
                    beat.rank
                    for beat in self._folder.heartbeats()
                    if beat.pid == self._pid and beat.host == socket.gethostname()
                ),
                -1,
            )
        beat = read_heartbeat(self._folder.heartbeat(self._rank)) if self._rank >= 0 else None
        return beat if beat is not None and beat.pid == self._pid else None


def _copy(source: IO[str], lines: deque[str]) -> None:
    for line in source:
        lines.append(line.rstrip("\n"))
        sys.stderr.write(line)
        sys.stderr.flush()


def why(code: int, lines: Sequence[str]) -> str:
    """The reason why a process ended, in words."""
    if code == HUNG:
        return "hung, and ended itself"
    if any("RESOURCE_EXHAUSTED" in line for line in lines):
        return f"ran out of device memory (exit code {code})"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL: by somebody, or by the system for lack of memory)"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def _pause(seconds: float, stopping: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stopping():
        time.sleep(LOOK_EVERY)


def newest(folder: RunFolder) -> int:
    """The newest checkpoint; 0 if there is none."""
    return max(folder.saved(), default=0)
