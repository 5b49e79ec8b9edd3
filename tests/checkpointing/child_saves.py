"""Processes that save until they are killed, one after another. Arguments: the folder, then for
each the seconds after its second save is done.

Imports are done once: a process is a fork from before JAX has started anything.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from shardlib.checkpointing.store import Checkpoints, Keep
from tests.checkpointing.states import state


def save_until_killed(folder: str, seconds: float) -> None:
    checkpoints = Checkpoints(folder, Keep(newest=2))
    first = max(checkpoints.steps(), default=0) + 1
    for step in range(first, first + 100):
        checkpoints.save(step, state(step), plan=None, wait=True)
        if step == first + 1:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    for moment in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            save_until_killed(sys.argv[1], float(moment))
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        print(sorted(os.listdir(sys.argv[1])), flush=True)
