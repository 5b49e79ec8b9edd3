"""Which process that is, and whether it lives.

The number of a process alone says little: it comes again, on every machine, and after every reboot.
A process is known by its number, when it was started (counted from the boot of its machine, by the
machine's own clock), which boot that was, and the namespace of numbers that it is in. Where all of
that can be read, whether it lives is a fact. Of a process of another machine, of a machine that has
been started again, or of another container, nobody here can know it: that takes a sign of life.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

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
    """Which boot of this machine this is; empty where the system does not say."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def lives(who: Who) -> bool | None:
    """Whether a process lives; None where that cannot be known here."""
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
    """When a process was started; "" where it has ended and nobody has asked how; None where there
    is none to be seen [proc(5), fields 3 and 22 of stat].
    """
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None
