"""Starts a program that ends when whoever started it does. Run by its path, `python -I -S child.py
PARENT WORD...`, so that it costs a few milliseconds; it imports nothing of shardlib.

A launcher that is killed with SIGKILL cannot end its processes. On Linux the kernel does: this asks
it to (prctl(2), PR_SET_PDEATHSIG), looks whether the launcher is still there, and becomes the
program.
"""

from __future__ import annotations

import os
import signal
import sys

#: Number of the request in <linux/prctl.h>.
PR_SET_PDEATHSIG = 1
#: Exit code of shells for a command that is not found.
NOT_FOUND = 127


def ask_kernel() -> None:
    """Has the kernel kill this process when the thread that started it ends; where there is no such
    request, nothing.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(parent: int, words: list[str]) -> None:
    """Becomes the program."""
    ask_kernel()
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGKILL)  # it was gone before the kernel was asked
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"error: {words[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
