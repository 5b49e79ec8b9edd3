"""Ends process groups, and deletes folders, when whoever started or made them is gone. Run by its
path, `python -I -S guard.py`; it imports nothing of shardlib.

The kernel ends the processes of a launcher that was killed (`child.py`), but not what those have
started in their turn. This process reads from a pipe which groups there are, "+123" and "-123"; the
pipe closes with the launcher, whatever ended it, and then all groups that are left are killed. A
line "/path" is a temporary folder, which is deleted after that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

#: How often a folder is deleted.
TRIES = 20


def main() -> None:
    """Reads until the launcher is gone."""
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

    for _ in range(TRIES):
        if not os.path.lexists(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
