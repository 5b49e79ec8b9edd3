"""Islands as processes of this machine, with their outer server: one command.

Each island is a job of its own, started again by itself; the others go on. Islands elsewhere come
by hand, with the variables of `shardlib.servers.islands.place`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.console import Lines
from shardlib.launching.processes import Processes
from shardlib.processes.signals import StopRequest, stop_requests
from shardlib.servers.crew import ended, environment
from shardlib.servers.islands.place import ISLAND
from shardlib.servers.islands.serving import OuterServer
from shardlib.servers.link import Link
from shardlib.servers.relay import Relay

#: Exit code of who was asked to stop (EX_TEMPFAIL).
STOPPED = 75
#: Seconds between two looks, and seconds that islands have to end.
LOOK_SECONDS, STOP_SECONDS = 0.05, 120.0


@dataclass(frozen=True, kw_only=True)
class LocalIslands:
    """Islands of this machine.

    Attributes:
        command: words of the program of each.
        here: how many of the islands are on this machine: those with the first numbers.
        devices: CPU devices that each simulates; None for the devices that there are.
        restarts: how often each may be started again.
        variables: of each process, beside those of this one.
        link: that is emulated between each island and the server; None for none.

    Raises:
        LaunchError: what cannot be launched, all of it listed.
    """

    command: tuple[str, ...]
    here: int
    devices: int | None = None
    restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    link: Link | None = None

    def __post_init__(self) -> None:
        failures: list[str] = []
        if not self.command:
            failures.append("there is no command; after -- stands what to run: -- python train.py")
        if self.here < 1:
            failures.append(f"islands here are {self.here}; they are at least 1")
        if self.here > 1 and self.devices is None:
            failures.append(
                f"{self.here} islands of this machine would share its devices; let each simulate"
                " some (--devices-per-process 2), or one be here (--islands-here 1) and the others"
                " elsewhere"
            )
        if failures:
            raise_all(LaunchError, "these islands cannot be launched", failures)


def launch_islands(local: LocalIslands, server: OuterServer, lines: Lines | None = None) -> int:
    """Runs islands until they are done, and gives one exit code."""
    if local.here > server.islands:
        raise LaunchError(f"{local.here} islands are to be here, and there are {server.islands}")
    shown = lines or Lines(local.here)
    server.say = shown.say
    with contextlib.ExitStack() as stack, stop_requests() as stop, server:
        if server.islands > local.here or server.token_file is not None:
            shown.say(_by_hand(local, server))
        ports: list[int] = []
        for _ in range(local.here):
            assert server.port is not None
            relay = None if local.link is None else Relay(port=server.port, link=local.link)
            ports.append(server.port if relay is None else stack.enter_context(relay).at)
        return _Running(local, server, shown, ports).run(stop)


class _Running:
    """Processes of islands, until the last has ended."""

    def __init__(
        self, local: LocalIslands, server: OuterServer, lines: Lines, ports: Sequence[int]
    ) -> None:
        self.local, self.server, self.lines, self.ports = local, server, lines, ports
        self.left = [local.restarts] * local.here
        self.code = 0

    def run(self, stop: StopRequest) -> int:
        """Starts all, and waits."""
        self.running = {number: self._started(number) for number in range(self.local.here)}
        until: float | None = None
        try:
            while self.running:
                for number in list(self.running):
                    self._look(number, bool(stop))
                if stop and until is None:
                    self.lines.say(f"{stop.reason}: islands are asked to stop")
                    until = time.monotonic() + STOP_SECONDS
                    for island in self.running.values():
                        island.send(signal.SIGTERM)
                if until is not None and time.monotonic() > until:
                    break
        finally:
            for island in self.running.values():
                island.close()
        return STOPPED if stop else self.code

    def _look(self, number: int, stopping: bool) -> None:
        end = self.running[number].next_end(LOOK_SECONDS / self.local.here)
        if end is None:
            return
        self.running.pop(number).close()
        if end.code == 0 or stopping:
            return
        message = f"island {number} {ended(end.code)}"
        if self.left[number]:
            self.left[number] -= 1
            self.lines.say(f"{message}; it is started again")
            self.running[number] = self._started(number)
            return
        self.lines.say(f"{message}; the others go on")
        self.code = self.code or (end.code if end.code > 0 else 128 - end.code)

    def _started(self, number: int) -> Processes:
        place = replace(self.server.place(number), port=self.ports[number]).environment()
        variables = environment(self.local.devices, {**self.local.variables, **place})
        return Processes(self.local.command, [variables], self.lines, first=number)


def _by_hand(local: LocalIslands, server: OuterServer) -> str:
    """What islands elsewhere are to be told; the token is in a file."""
    place = server.place(local.here).environment()
    words = [f"{name}={place[name]}" for name in place if name != "SHARDLIB_MEETING_TOKEN"]
    words = [word if not word.startswith(ISLAND) else f"{ISLAND}=N" for word in words]
    file = server.token_file or "FILE"
    return f"islands elsewhere: {' '.join(words)} SHARDLIB_MEETING_TOKEN_FILE={file}"
