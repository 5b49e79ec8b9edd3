"""Processes that end with whoever started them, whatever ended that: an error, SIGTERM, SIGKILL.

    with Guard() as guard:
        process = start(["python", "-m", "a.compiler"], guard, stdout=log)
        process.wait()

Each is the first of a session and a process group of its own, so that Ctrl-C reaches its parent
alone, and that what it has started can be ended with it. On Linux the kernel ends the process
(`child.py`); everywhere a guard, which reads from a pipe that closes with the parent, ends its
group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

#: The program of a child and of a guard.
CHILD = Path(__file__).with_name("child.py")


class Guard:
    """A small process that ends groups of processes, and deletes temporary folders, when this one
    is gone.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def watch(self, group: int) -> None:
        """From now on the group ends with this process."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The group is gone; its number may belong to others."""
        self._tell(f"-{group}")

    def clear(self, folder: Path) -> None:
        """A temporary folder that is to be gone with this process; whoever made it deletes it
        before `close`.
        """
        self._tell(str(folder.absolute()))

    def close(self) -> None:
        """Ends the guard; groups and folders that it still knows are ended and deleted with it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{text}\n")
            self._process.stdin.flush()


def start(
    words: Sequence[str],
    guard: Guard,
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this one.

    To be called in a thread that lives as long as the process does: the kernel ends it with that
    thread. Whoever has waited for its end calls `finish`.

    Args:
        env: all variables; None for those of this process.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), *words],
        env=env,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    guard.watch(process.pid)
    return process


def finish(process: subprocess.Popen[bytes], guard: Guard) -> None:
    """Ends a process, if it has not ended, and whatever it has started, also what has outlived
    it.
    """
    end_group(process.pid)
    process.wait()
    guard.forget(process.pid)


def end_group(group: int) -> None:
    """Kills all processes of a group that are left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# The identity of a process, and whether it lives.
#
# The number of a process alone says little: it comes again, on every machine, and after every
# reboot. A process is known by its number, when it was started (counted from the boot of its
# machine, by the machine's own clock), which boot that was, and the namespace of numbers that it
# is in. Where all of that can be read, whether it lives is a fact. Of a process of another
# machine, of a machine that has been started again, or of another container, nobody here can know
# it: that takes a sign of life.

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Who:
    """A process.

    Attributes:
        host: name of its machine.
        pid: number there.
        started: when it was started, in ticks since the boot; empty where the system does not say.
        boot: which boot of which machine, a random number of the kernel; empty where the system
            does not say.
        namespace: in which its number counts (of a container); empty where the system does not say.
    """

    host: str
    pid: int
    started: str = ""
    boot: str = ""
    namespace: str = ""


def this_process() -> Who:
    """The process that asks."""
    return Who(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_started(os.getpid()) or "",
        boot=boot(),
        namespace=_namespace(),
    )


def boot() -> str:
    """Returns which boot of this machine this is; empty where the system does not say."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def lives(who: Who) -> bool | None:
    """Returns whether a process lives; None where that cannot be known here."""
    here = this_process()
    if (
        not who.boot
        or (who.host, who.boot, who.namespace) != (here.host, here.boot, here.namespace)
        or not who.started
    ):
        return None
    started = _started(who.pid)
    if started is not None:
        return started == who.started
    try:
        os.kill(who.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None  # there is such a process, and nothing of it is shown
    return _started(who.pid) == who.started


def clock() -> float:
    """Seconds that only rise, the same for all processes of a boot, with the time that the machine
    was asleep where the system counts that.
    """
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(number) if number is not None else time.monotonic()


def _namespace() -> str:
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Returns when a process was started; "" where it has ended and nobody has asked how; None
    where there is none to be seen [proc(5), fields 3 and 22 of stat].
    """
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None
