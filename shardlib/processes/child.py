"""Starts a program that ends when whoever started it does, or ends what a launcher has left behind.
Run by its path, so that it costs a few milliseconds; it imports nothing of shardlib.

    python -I -S child.py PARENT WORD...    becomes the program WORD...
    python -I -S child.py                   is the guard of the process that holds its input

A launcher that is killed with SIGKILL cannot end its processes. On Linux the kernel does: the child
asks it to (prctl(2), PR_SET_PDEATHSIG), looks whether the launcher is still there, and becomes the
program. That does not reach what those processes have started in their turn. The guard reads from a
pipe which groups there are, "+123" and "-123"; the pipe closes with the launcher, whatever ended
it, and then all groups that are left are killed. A line "/path" is a temporary folder, which is
deleted after that.
"""

from __future__ import annotations

import os
import signal
import sys

#: Number of the request in <linux/prctl.h>.
PR_SET_PDEATHSIG = 1
#: Exit code of shells for a command that is not found.
NOT_FOUND = 127
#: How often a folder is deleted.
TRIES = 20


def ask_kernel() -> None:
    """Makes the kernel kill this process when the thread that started it ends; where there is no
    such request, nothing.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become(parent: int, words: list[str]) -> None:
    """Becomes a program."""
    ask_kernel()
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGKILL)  # it was gone before the kernel was asked
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"error: {words[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(NOT_FOUND)


def guard() -> None:
    """Reads until the launcher is gone."""
    import contextlib

    groups: set[int] = set()
    folders: list[str] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        if line[0] == "/":
            folders.append(line.rstrip("\n"))
            continue
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        _delete(folder)


def _delete(folder: str) -> None:
    """Deletes a folder that its owner has left; somebody who is being killed may still write to
    it.
    """
    import shutil  # takes longer to import than all else here
    import time

    for _ in range(TRIES):
        if not os.path.lexists(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        become(int(sys.argv[1]), sys.argv[2:])
    else:
        guard()
