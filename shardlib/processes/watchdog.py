"""The watchdog, which ends a process that hangs, and says where.

A thread looks at the loop every second. It writes a heartbeat (`shardlib.processes.heartbeat`): who
the process is, at which step it is, in which phase, and for how long; whoever watches from outside
(the supervisor, `shardlib status`) reads that file, and a process that was stopped or swapped out
writes none. All of it goes by a clock that nobody sets. When a phase lasts longer than it may, the
thread prints which rank is stuck where, with the stacks of all threads, and ends the process: a
collective that waits for a peer that is gone never returns by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from shardlib.processes.heartbeat import ENDED, EVERY, Heartbeat, write_whole
from shardlib.processes.lifetime import who

#: Exit code of a process whose watchdog ended it.
HUNG = 86


class Watchdog:
    """Watches a loop from a thread of its own until it is closed."""

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int = 0,
        seconds: float | None = None,
        on_hang: Callable[[str], None] | None = None,
    ) -> None:
        """Args: path: file of the heartbeat; None for none. rank: number of this process. seconds:
        how long a phase may last; None for any time. Compiling and restoring may take ten times as
        long. on_hang: what to do with the message about a hang; by default it is printed with all
        stacks, and the process ends with exit code `HUNG`.
        """
        self._path, self._rank, self._seconds, self._on_hang = path, rank, seconds, on_hang or _end
        self._step, self._phase, self._since, self._patience = 0, "start", time.monotonic(), 10.0
        self._closed, self._told = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="shardlib-watchdog", daemon=True)
        self._number, self._boot = 0, who.boot()
        self._beat()
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None, *, patience: float = 1.0) -> Iterator[None]:
        """Says what the loop does in this block, at which step; `patience` times the allowed time
        may pass.

        Args:
            step: steps done; None where it makes no difference.
            patience: times the allowed seconds that it may take.
        """
        before = (self._phase, self._patience)
        self._enter(name, patience, step)
        try:
            yield
        finally:
            self._enter(*before, None)

    def close(self) -> None:
        """Ends the thread, and says so."""
        self._closed.set()
        self._thread.join()
        self._enter(ENDED, 1.0, None)
        self._beat()

    def _enter(self, phase: str, patience: float, step: int | None) -> None:
        self._phase, self._patience, self._since = phase, patience, time.monotonic()
        self._step = self._step if step is None else step

    def _watch(self) -> None:
        while not self._closed.wait(EVERY):
            self._beat()
            lasts = time.monotonic() - self._since
            if (
                self._seconds is not None
                and not self._told
                and lasts > self._seconds * self._patience
            ):
                self._told = True
                self._on_hang(
                    f"rank {self._rank} (process {os.getpid()}) has been in the phase"
                    f" {self._phase!r} of step {self._step + 1} for {lasts:.0f} s, longer than the"
                    f" {self._seconds * self._patience:.0f} s that it may take"
                )

    def _beat(self) -> None:
        if self._path is None:
            return
        self._number += 1
        beat = Heartbeat(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            phase=self._phase,
            lasts=time.monotonic() - self._since,
            number=self._number,
            boot=self._boot,
            clock=who.clock(),
        )
        with contextlib.suppress(OSError):  # a full disk must not end the run
            write_whole(self._path, json.dumps(asdict(beat)))


def _end(message: str) -> None:
    print(f"error: {message}; stacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(HUNG)
