"""Ends process groups when whoever started them is gone. Run by its path, `python -I -S guard.py`; it imports nothing of shardlib.

The kernel ends the processes of a launcher that was killed (`child.py`), but not what those have started in their turn. This process reads from a pipe which groups there are, "+123" and "-123"; the pipe
closes with the launcher, whatever ended it, and then all groups that are left are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads until the launcher is gone."""
    groups: set[int] = set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
