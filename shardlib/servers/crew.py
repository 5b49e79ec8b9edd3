"""The processes of a run: started together, watched, and gone with who has started them.

A server that ends is started again at its checkpoint, as often as it may; a worker that ends is
named, and the others go on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.errors import LaunchError
from shardlib.processes.lifetime.kin import Guard, finish, start
from shardlib.servers.server.stored import write
from shardlib.untrusted import printable

#: Seconds between two looks.
LOOK_SECONDS = 0.05
#: Seconds that servers have to save and end.
END_SECONDS = 30.0
#: Lines of what a process wrote last that an error shows.
LINES = 12


@dataclass(kw_only=True)
class Crew:
    """Running processes.

    Attributes:
        folder: of the run; what processes write is in its files.
        servers: variables of the environment of each server.
        workers: the same of each worker.
        restarts: how often each server may be started again.
        say: is told what happens.
    """

    folder: Path
    servers: list[Mapping[str, str]]
    workers: list[Mapping[str, str]]
    restarts: int
    say: Callable[[str], None]
    events: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._guard = Guard()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._left = [self.restarts] * len(self.servers)

    def run(self) -> None:
        """Starts all, and waits until the last worker has ended."""
        for number in range(len(self.servers)):
            self._server(number)
        waiting = {number: self._worker(number) for number in range(len(self.workers))}
        well = 0
        while waiting:
            time.sleep(LOOK_SECONDS)
            self.look_after_servers()
            for number, process in list(waiting.items()):
                if (code := process.poll()) is not None:
                    del waiting[number]
                    well += code == 0
                    if code:
                        self._worker_failed(number, code)
        if not well:
            raise LaunchError(f"no worker has ended well\n{self._last_lines('worker-0')}")

    def look_after_servers(self) -> None:
        """Starts servers again that have ended."""
        for number in range(len(self.servers)):
            code = self._running[f"server-{number}"].poll()
            if code is None:
                continue
            why = ended(code)
            if code == 2 or not self._left[number]:
                raise LaunchError(f"server {number} {why}\n{self._last_lines(f'server-{number}')}")
            self._left[number] -= 1
            self._note(f"server {number} {why}; it is started again from its checkpoint")
            self._server(number)

    def _worker_failed(self, number: int, code: int) -> None:
        self._note(f"worker {number} {ended(code)}; the others go on")
        if code > 0:
            self.say(self._last_lines(f"worker-{number}"))

    def end_servers(self) -> None:
        """Has servers save and end."""
        running = [self._running[f"server-{number}"] for number in range(len(self.servers))]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            with suppress(subprocess.TimeoutExpired):  # then it is killed, and says nothing more
                process.wait(END_SECONDS)

    def close(self) -> None:
        """Ends whatever has not ended."""
        for process in self._running.values():
            finish(process, self._guard)
        self._guard.close()

    def _server(self, number: int) -> None:
        module = "shardlib.servers.server.process"
        self._start(f"server-{number}", module, self.servers[number])

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        module = "shardlib.servers.worker.process"
        return self._start(f"worker-{number}", module, self.workers[number])

    def _start(
        self, name: str, module: str, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", module, str(self.folder)]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = start(
                words,
                self._guard,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running[name] = process
        pids = {name: process.pid for name, process in self._running.items()}
        write(self.folder / "pids.json", json.dumps(pids).encode())
        return process

    def _note(self, text: str) -> None:
        self.events.append(text)
        self.say(text)

    def _last_lines(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(printable(line) for line in text.splitlines()[-LINES:])


def ended(code: int) -> str:
    """How a process ended, in words.

    >>> ended(-9), ended(2)
    ('was killed by SIGKILL', 'ended with code 2')

    Args:
        code: its exit code; negative for a signal.
    """
    if code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def environment(devices: int | None, more: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process that finds the same modules as this one.

    Args:
        devices: CPU devices that it simulates; None for the devices that there are.
    """
    paths = [path or os.getcwd() for path in sys.path]
    simulated = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)} if devices else {}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        **simulated,
        **more,
    }
