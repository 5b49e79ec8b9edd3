"""Processes of this machine that belong together: started together, and gone together.

Each is the first of a session and a process group of its own, so that Ctrl-C reaches the launcher
alone, and that what a process has started can be ended with it. None outlives the launcher, even
one that is killed: see `shardlib.processes.lifetime.kin`.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.launching.console import Lines
from shardlib.processes.lifetime.kin import Guard, end_group, start

#: Seconds that threads have to show the last lines of processes that have ended.
READ_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class End:
    """A process that has ended.

    Attributes:
        number: of the process.
        code: exit code; negative: the signal that killed it.
    """

    number: int
    code: int


class Processes:
    """Running processes. To be made in a thread that lives as long as they do: the kernel ends them
    with it.
    """

    def __init__(
        self,
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        lines: Lines,
        *,
        first: int = 0,
    ) -> None:
        """Args:
        words: the command of all.
        environments: of each, whole.
        lines: where to show what they write.
        first: number of the first, where it is shown.
        """
        self._first = first
        self.codes: dict[int, int] = {}
        self._ends: queue.SimpleQueue[End] = queue.SimpleQueue()
        self._guard = Guard()
        self._running: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for number, environment in enumerate(environments):
                self._start(number, words, environment, lines)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether one of them has not ended."""
        return len(self.codes) < len(self._running)

    def next_end(self, seconds: float) -> End | None:
        """The next process that ends, in the order in which they do; None where none does for so
        long.
        """
        with contextlib.suppress(queue.Empty):
            end = self._ends.get(timeout=seconds)
            self.codes[end.number] = end.code
            end_group(self._running[end.number].pid)  # what it has left behind
            self._guard.forget(self._running[end.number].pid)
            return end
        return None

    def pid(self, number: int) -> int:
        """Of a process."""
        return self._running[number].pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all that have not ended."""
        for index, process in enumerate(self._running):
            if index not in self.codes:
                process.send_signal(number)

    def kill(self, number: int | None = None) -> None:
        """Ends one of them, or all, with everything that they have started, at once. Numbers of
        those that have ended may belong to others by now.
        """
        for index, process in enumerate(self._running):
            if index not in self.codes and (number is None or index == number):
                end_group(process.pid)

    def close(self) -> None:
        """Ends all of them, and shows what they wrote last."""
        self.kill()
        for number, process in enumerate(self._running):
            self.codes.setdefault(number, process.wait())
        for reader in self._readers:
            reader.join(READ_SECONDS)
        for process in self._running:
            self._guard.forget(process.pid)
        self._guard.close()

    def _start(
        self, number: int, words: Sequence[str], environment: Mapping[str, str], lines: Lines
    ) -> None:
        process = start(
            words,
            self._guard,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._running.append(process)
        assert process.stdout is not None and process.stderr is not None
        self._readers += [
            lines.follow(self._first + number, process.stdout, error=False),
            lines.follow(self._first + number, process.stderr, error=True),
        ]
        threading.Thread(target=self._wait, args=(number, process), daemon=True).start()

    def _wait(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self._ends.put(End(number=number, code=process.wait()))
