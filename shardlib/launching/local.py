"""Many processes on this machine, as one command: started, shown, watched, started again.

    words = ("python", "-m", "shardlib", "train", "--run", "runs/a", "--topology", "cpu:8")
    launch(Local(command=words, processes=4, devices=2, run="runs/a"))

Any program can be launched; one that calls `shardlib.join()`, as `shardlib train` does, finds the
others by the variables of `shardlib.processes.place`, and says every second that it lives. The
first process that fails, or that is silent for too long, is named, and the others end: they would
wait for it for ever. Then all of them start again, as often as the budget allows, and a run goes on
at its newest checkpoint. With `elastic`, a place at which processes end again and again is left
out, and fewer processes go on.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.addresses import LOOPBACK, free_port
from shardlib.launching.console import Lines
from shardlib.launching.processes import Processes
from shardlib.launching.watching import Watch, Watched
from shardlib.processes.place import JOIN_SECONDS
from shardlib.processes.signals import StopRequest, stop_requests
from shardlib.training.run.folder import RunFolder
from shardlib.training.supervisor import (
    LAST_LINES,
    Budget,
    Ended,
    newest,
    repeated,
)

#: Failures in a row at one place, with no new checkpoint, after which an elastic run goes on
#: without it.
ELASTIC_AFTER = 2
#: Variables that say how many CPU devices a process simulates; those of the launcher are not those
#: of its processes.
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True, kw_only=True)
class Local:
    """A program in several processes of this machine.

    Attributes:
        command: words of the program.
        processes: how many.
        devices: CPU devices that each simulates; None where they share the accelerators of the
            machine.
        address: at which process 0 listens; no other is listened on.
        port: of it; None for a free one.
        run: folder of the run, where the command has one.
        elastic: whether to go on with fewer processes where one place fails again and again.
        join_seconds: how long processes wait for each other at the start.
        budget: how often to start all of them again, how long one may be silent, and how long they
            have to end.

    Raises:
        LaunchError: what cannot be launched, all of it listed.
    """

    command: tuple[str, ...]
    processes: int
    devices: int | None = None
    address: str = LOOPBACK
    port: int | None = None
    run: str | None = None
    elastic: bool = False
    join_seconds: int = JOIN_SECONDS
    budget: Budget = field(default_factory=lambda: Budget(restarts=0))

    def __post_init__(self) -> None:
        failures = (
            []
            if self.command
            else [
                "there is no command; after -- stands what to run, e.g. -- train --run runs/first"
            ]
        )
        failures += [
            f"{name} is {value}; it must be at least 1"
            for name, value in (
                ("processes", self.processes),
                ("devices", self.devices),
                ("join_seconds", self.join_seconds),
            )
            if value is not None and value < 1
        ]
        if self.port is not None and not 0 < self.port < 1 << 16:
            failures.append(f"port is {self.port}; ports go from 1 to 65535")
        if failures:
            raise_all(LaunchError, "this cannot be launched", failures)


def launch(
    local: Local, *, lines: Lines | None = None, environ: Mapping[str, str] | None = None
) -> int:
    """Runs all processes until they are done, and gives one exit code.

    Args:
        environ: their variables, beside those of the place; by default this process's own.
    """
    with stop_requests() as stop:
        starts = _Starts(
            local,
            lines or Lines(local.processes, keep=LAST_LINES),
            dict(os.environ if environ is None else environ),
            stop,
        )
        return repeated(
            starts.once, starts.newest, budget=local.budget, stop=stop, say=starts.lines.say
        )


class _Starts:
    """All starts of a program; in between they remember which places have failed."""

    def __init__(
        self, local: Local, lines: Lines, environ: dict[str, str], stop: StopRequest
    ) -> None:
        self.local, self.lines, self.environ, self.stop = local, lines, environ, stop
        self.folder = RunFolder(Path(local.run)) if local.run is not None else None
        #: Numbers of the places of this machine that are used: of its devices each has one part.
        self.places = list(range(local.processes))
        self.failed: list[tuple[int, int | None]] = []

    def newest(self) -> int | None:
        """The newest checkpoint of the run; None where there is no folder."""
        return newest(self.folder) if self.folder is not None else None

    def once(self) -> Ended:
        """One start of all processes, until the last has ended."""
        with tempfile.TemporaryDirectory(prefix="shardlib-launch-") as beats:
            processes = Processes(self.local.command, self._environments(beats), self.lines)
            try:
                watched = Watched(
                    processes=processes,
                    count=len(self.places),
                    beats=Path(beats),
                    lines=self.lines,
                    folder=self.folder,
                )
                ended, first = Watch(watched, self.local.budget, self.stop).run()
            finally:
                processes.close()
        if first is None or not self.local.elastic or self.stop:
            return ended
        return self._shrunk(ended, self.places[first])

    def _shrunk(self, ended: Ended, place: int) -> Ended:
        """The same end; the place is left out from now on where it has failed often enough without
        a new checkpoint.
        """
        self.failed.append((place, self.newest()))
        last = self.failed[-ELASTIC_AFTER:]
        healthy = [other_place for other_place in self.places if other_place != place]
        if len(last) < ELASTIC_AFTER or len(set(last)) > 1 or not healthy:
            return ended
        count = max(
            number for number in range(1, len(healthy) + 1) if self.local.processes % number == 0
        )
        self.places = healthy[:count]
        self.failed.clear()
        self.lines.say(
            f"place {place} of this machine failed {ELASTIC_AFTER} times in a row: going on with"
            f" {count} of {self.local.processes} processes"
        )
        return Ended(code=ended.code, why=ended.why, lines=ended.lines, who=ended.who, changed=True)

    def _environments(self, beats: str) -> list[dict[str, str]]:
        """Variables of each process."""
        local = self.local
        host = f"[{local.address}]" if ":" in local.address else local.address
        common = {
            **_without_devices(self.environ, local.devices),
            "PYTHONUNBUFFERED": "1",
            "SHARDLIB_COORDINATOR": f"{host}:{local.port or free_port(local.address)}",
            "SHARDLIB_PROCESSES": str(len(self.places)),
            "SHARDLIB_HOST_PROCESSES": str(local.processes),
            "SHARDLIB_JOIN_SECONDS": str(local.join_seconds),
            "SHARDLIB_START": secrets.token_hex(8),
            "SHARDLIB_SECRET": secrets.token_hex(16),
            "SHARDLIB_HEARTBEATS": beats,
        }
        return [
            {**common, "SHARDLIB_PROCESS": str(number), "SHARDLIB_HOST_PROCESS": str(place)}
            for number, place in enumerate(self.places)
        ]


def _without_devices(environ: Mapping[str, str], devices: int | None) -> dict[str, str]:
    """Variables of processes that simulate so many devices each; None: as they are."""
    if devices is None:
        return dict(environ)
    flags = " ".join(
        word for word in environ.get("XLA_FLAGS", "").split() if not word.startswith(_DEVICE_FLAG)
    )
    return {
        **environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "SHARDLIB_HOST_DEVICES": str(devices),
    }
