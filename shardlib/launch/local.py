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
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.errors import LaunchError, raise_all
from shardlib.launch.job import too_small
from shardlib.processes.console import LOOPBACK, Lines, Processes, free_port
from shardlib.processes.place import (
    ENDED,
    HUNG,
    JOIN_SECONDS,
    STOPPED,
    USAGE,
    Observer,
    StopRequest,
    read_heartbeat,
    stop_requests,
)
from shardlib.training.run import RunFolder
from shardlib.training.supervisor import (
    LAST_LINES,
    Budget,
    Ended,
    newest,
    repeated,
    why,
)

#: Seconds between two looks.
LOOK_EVERY = 0.1
#: Seconds that the others have to end by themselves once one has failed: those that fail too say
#: why.
GRACE_SECONDS = 5.0


@dataclass(kw_only=True)
class Watch:
    """One start of a program, watched until its end: the first process that fails or is silent is
    named, and the others end.

    Attributes:
        processes: as they run.
        count: how many there are.
        beats: folder of their signs of life.
        lines: where they are shown.
        folder: of the run; None where the command has none.
        budget: how long a process may be silent, and how long all have to end.
        stop: whether somebody wants an end.
        first: number of the process that failed first.
        silent: why processes were killed, by number.
    """

    processes: Processes
    count: int
    beats: Path
    lines: Lines
    folder: RunFolder | None
    budget: Budget
    stop: StopRequest
    observer: Observer = field(default_factory=Observer)
    first: int | None = None
    silent: dict[int, str] = field(default_factory=dict[int, str])

    def run(self) -> tuple[Ended, int | None]:
        """Waits for the end of all; how it was, and the number of the process that failed first, if
        one did."""
        deadline, reason = float("inf"), ""
        while self.processes.alive:
            end = self.processes.next_end(LOOK_EVERY)
            if self.stop and not reason:
                reason = self.stop.reason
                self.processes.send(
                    signal.Signals[reason]
                    if reason in signal.Signals.__members__
                    else signal.SIGTERM
                )
                deadline = min(deadline, time.monotonic() + self.budget.stop_seconds)
            failed = end is not None and end.code not in (0, STOPPED)
            number = None if reason else end.number if end and failed else self._silent()
            if number is not None and self.first is None:
                self.first = number
                seconds = self._named(number, end.code if end is not None else 0)
                deadline = min(deadline, time.monotonic() + seconds)
            if time.monotonic() > deadline:
                self.processes.kill()
        return self._end(reason)

    def _named(self, number: int, code: int) -> float:
        """Says which process has failed, at once, and gives the seconds that the others have: where
        it was killed or silent they can only wait for it.
        """
        seconds = GRACE_SECONDS if code > 0 and number not in self.silent else 0.0
        others = self.count - 1 - len(self.processes.codes.keys() - {number})
        if others:
            self.lines.say(
                f"process {number} of {self.count}"
                f" {self.silent.get(number) or why(code, tuple(self.lines.last[number]))};"
                f" ending the {others} that {'is' if others == 1 else 'are'} left"
            )
        return seconds

    def _silent(self) -> int | None:
        """A process that does not say any more that it lives; it is ended."""
        beats = {
            number: read_heartbeat(self.beats / f"rank-{number}.json")
            for number in range(self.count)
            if number not in self.processes.codes
        }
        seconds = self.budget.silent_seconds
        spoken = any(beat is not None for beat in beats.values())
        for number, beat in beats.items():
            silent = self.observer.silent(number, beat)
            late = (
                silent > seconds and beat.phase != ENDED
                if beat is not None
                else spoken and silent > 10 * seconds
            )
            if late and number not in self.silent:
                self.silent[number] = (
                    f"gave no sign of life for {silent:.0f} s and was killed{self._doing(number)}"
                )
                self.processes.kill(number)
                return number
        return None

    def _doing(self, number: int) -> str:
        """Describes the work of the process when it was heard of last, as the folder of the run has
        it.
        """
        folder = self.folder
        beat = read_heartbeat(folder.heartbeat(number)) if folder is not None else None
        return (
            f"; it was in the phase {beat.phase!r} after step {beat.step}"
            if beat is not None and beat.pid == self.processes.pid(number)
            else ""
        )

    def _end(self, reason: str) -> tuple[Ended, int | None]:
        codes = self.processes.codes
        if self.first is None:
            ended = set(codes.values())
            if ended <= {0, STOPPED}:
                code = STOPPED if STOPPED in ended else 0
            else:
                known = reason in signal.Signals.__members__
                code = 128 + signal.Signals[reason].value if known else 1
            return Ended(code=code, why="", lines=()), None
        lines = tuple(self.lines.last[self.first])
        code = HUNG if self.first in self.silent else codes[self.first]
        ended = Ended(
            code=code,
            why=self.silent.get(self.first) or why(code, lines),
            lines=lines,
            who=f"process {self.first} of {self.count}",
        )
        if code == USAGE:
            self.lines.say(f"{ended.who} {ended.why}: a mistake that another start would not mend")
        return ended, self.first


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
        failures += too_small(self, processes=1, devices=1, join_seconds=1)
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
                watch = Watch(
                    processes=processes,
                    count=len(self.places),
                    beats=Path(beats),
                    lines=self.lines,
                    folder=self.folder,
                    budget=self.local.budget,
                    stop=self.stop,
                )
                ended, first = watch.run()
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
