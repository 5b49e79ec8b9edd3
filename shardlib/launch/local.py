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

import contextlib
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

from shardlib.errors import LaunchError, raise_all
from shardlib.processes.kin import Guard, end_group, start
from shardlib.processes.place import (
    ENDED,
    HUNG,
    JOIN_SECONDS,
    Observer,
    Place,
    StopRequest,
    read_heartbeat,
    stop_requests,
)
from shardlib.training.run import RunFolder
from shardlib.training.supervisor import (
    LAST_LINES,
    STOPPED,
    USAGE,
    Budget,
    Ended,
    newest,
    repeated,
    why,
)
from shardlib.untrusted.data import printable

# --------------------------------------------------------------------------------------------------
# One console for many processes: whole lines, each with the number of its process in front.
#
#     [0] going on after step 20 of 100
#     [2] error: there is no data in /data/part-2
#
# Lines of standard output go to standard output, those of standard error to standard error. On a
# terminal every process has its colour.

#: Bytes of a line that is shown as one; of longer ones the rest is a line of its own.
LINE_BYTES = 1 << 16
#: What the collectives of CPU devices print at each connection, from several threads at once and
#: without asking.
NOISE = re.compile(
    r"\[Gloo\] Rank|is connected to \d+ peer ranks|Expected number of connected peer ranks is"
)
#: Sequences that change colour and weight of letters, and nothing else.
COLOURED = re.compile(r"(\x1b\[[0-9;]{0,32}m)")
#: Colours of terminals (ECMA-48), readable on black and on white.
COLOURS = (36, 33, 35, 32, 34, 31)


def tamed(text: str) -> str:
    r"""A line with its colours, and with everything else escaped that a terminal would obey:
    processes show what strangers have called their files and models.

    >>> tamed("a \x1b[31mred\x1b[0m word and a \x1b]0;title\x07")
    'a \x1b[31mred\x1b[0m word and a \\x1b]0;title\\x07'
    """
    return "".join(
        part if i % 2 else printable(part) for i, part in enumerate(COLOURED.split(text))
    )


class Lines:
    """Shows what processes write.

    Attributes:
        last: the last lines that each wrote to standard error, by number.
    """

    def __init__(
        self,
        processes: int,
        *,
        keep: int = 20,
        out: TextIO | None = None,
        err: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        processes: how many there are.
        keep: lines in `last`.
        out, err: where to; by default this process's own.
        environ: whose NO_COLOR counts; by default that of this process.
        """
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._plain = "NO_COLOR" in (os.environ if environ is None else environ)
        self._width = len(str(processes - 1))
        self._lock = threading.Lock()
        self.last: dict[int, deque[str]] = {
            number: deque(maxlen=keep) for number in range(processes)
        }

    def follow(self, number: int, stream: IO[bytes], *, error: bool) -> threading.Thread:
        """Shows what comes out of a pipe, in a thread, until it is closed."""
        thread = threading.Thread(
            target=self._copy,
            args=(number, stream, error),
            name=f"shardlib-console-{number}",
            daemon=True,
        )
        thread.start()
        return thread

    def show(self, number: int, text: str, *, error: bool) -> None:
        """Shows one line of a process."""
        if NOISE.search(text):
            return
        if error:
            self.last[number].append(text)
        stream = self._err if error else self._out
        with (
            self._lock,
            contextlib.suppress(BrokenPipeError),
        ):  # who reads has had enough; the processes go on
            stream.write(f"{self._prefix(number, stream)} {tamed(text)}\n")
            stream.flush()

    def say(self, text: str) -> None:
        """A message of the launcher itself."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._err.write(f"{tamed(text)}\n")
            self._err.flush()

    def _copy(self, number: int, stream: IO[bytes], error: bool) -> None:
        with stream:
            for line in iter(lambda: stream.readline(LINE_BYTES), b""):
                # A bar of progress draws itself over and over in one line; what counts is how it
                # looks in the end.
                self.show(
                    number,
                    line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2],
                    error=error,
                )

    def _prefix(self, number: int, stream: TextIO) -> str:
        text = f"[{number:>{self._width}}]"
        return (
            text
            if self._plain or not stream.isatty()
            else f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"
        )


# --------------------------------------------------------------------------------------------------
# Processes of this machine that start and end together.
#
# Each is the first of a session and a process group of its own, so that Ctrl-C reaches the
# launcher alone, and that what a process has started can be ended with it. None outlives the
# launcher, even one that is killed: see `shardlib.processes.kin`.

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
        """True if one of them has not ended."""
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


# --------------------------------------------------------------------------------------------------
# The devices of its host that belong to this process.
#
# JAX sees all GPUs of a host. Where several processes share them, each is told which are its own,
# evenly and in order. JAX's own guess is one GPU for each task of Slurm or Open MPI, whoever asked
# for what; it is not used.

#: Folder with one entry for each NVIDIA GPU of the host.
GPUS = Path("/proc/driver/nvidia/gpus")


def device_ids(place: Place, environ: Mapping[str, str], gpus: Path = GPUS) -> list[int] | None:
    """Numbers of the GPUs of this process, counted among those that it could see; None for all of
    them.
    """
    if place.host_processes == 1 or place.simulated is not None:
        return None
    count = visible_gpus(environ, gpus)
    if count <= 1:
        return None  # none at all, or the one that the scheduler has picked for this process
    if count % place.host_processes:
        raise LaunchError(
            f"{place.host_processes} processes of this host cannot share {count} GPUs evenly\nTry:"
            f" a number of processes that divides {count}, or CUDA_VISIBLE_DEVICES"
        )
    each = count // place.host_processes
    return list(range(place.host_process * each, (place.host_process + 1) * each))


def visible_gpus(environ: Mapping[str, str], gpus: Path = GPUS) -> int:
    """Number of NVIDIA GPUs that a process can see."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len([word for word in environ["CUDA_VISIBLE_DEVICES"].split(",") if word.strip()])
    return len([*gpus.iterdir()]) if gpus.is_dir() else 0


# --------------------------------------------------------------------------------------------------
# Addresses and free ports of this machine.

LOOPBACK = "127.0.0.1"


def free_port(address: str) -> int:
    """A port of an address of this machine at which nobody listens."""
    try:
        info = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as listener:
            listener.bind(info[4])
            return listener.getsockname()[1]
    except OSError as error:
        raise LaunchError(
            f"{address} is no address of this machine: {error.strerror or error}\nTry: 127.0.0.1,"
            f" or the name of an interface: {', '.join(name for _, name in socket.if_nameindex())}"
        ) from error


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this machine; an address or a host's name is passed
    on.
    """
    if interface not in [name for _, name in socket.if_nameindex()]:
        return interface
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), 0x8915, struct.pack("256s", interface.encode())
            )  # SIOCGIFADDR, netdevice(7)
        except OSError as error:
            raise LaunchError(
                f"the interface {interface} has no IPv4 address: {error.strerror}\nTry: --interface"
                " ADDRESS"
            ) from error
    return socket.inet_ntoa(answer[20:24])


# --------------------------------------------------------------------------------------------------
# One start of several processes of this machine, watched until all have ended: the first that
# fails or is silent is named, and the others end.

#: Seconds between two looks.
LOOK_EVERY = 0.1
#: Seconds that the others have to end by themselves once one has failed: those that fail too say
#: why.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One start of a program.

    Attributes:
        processes: as they run.
        count: how many there are.
        beats: folder of their signs of life.
        lines: where they are shown.
        folder: of the run; None where the command has none.
    """

    processes: Processes
    count: int
    beats: Path
    lines: Lines
    folder: RunFolder | None


class Watch:
    """One start, watched until its end.

    Args:
        start: what is watched.
        budget: how long a process may be silent, and how long all have to end.
        stop: whether somebody wants an end.
    """

    def __init__(self, start: Watched, budget: Budget, stop: StopRequest) -> None:
        self.start, self.budget, self.stop = start, budget, stop
        self.processes, self.count, self.observer = start.processes, start.count, Observer()
        self.first: int | None = None
        self.silent: dict[int, str] = {}

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
            number = (
                None
                if reason
                else (
                    end.number
                    if end is not None and end.code not in (0, STOPPED)
                    else self._silent()
                )
            )
            if number is not None and self.first is None:
                self.first, deadline = (
                    number,
                    min(
                        deadline,
                        time.monotonic() + self._named(number, end.code if end is not None else 0),
                    ),
                )
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
            self.start.lines.say(
                f"process {number} of {self.count}"
                f" {self.silent.get(number) or why(code, tuple(self.start.lines.last[number]))};"
                f" ending the {others} that {'is' if others == 1 else 'are'} left"
            )
        return seconds

    def _silent(self) -> int | None:
        """A process that does not say any more that it lives; it is ended."""
        beats = {
            number: read_heartbeat(self.start.beats / f"rank-{number}.json")
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
        folder = self.start.folder
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
            code = (
                STOPPED
                if ended <= {0, STOPPED} and STOPPED in ended
                else (
                    0
                    if ended == {0}
                    else (
                        128 + signal.Signals[reason].value
                        if reason in signal.Signals.__members__
                        else 1
                    )
                )
            )
            return Ended(code=code, why="", lines=()), None
        lines = tuple(self.start.lines.last[self.first])
        code = HUNG if self.first in self.silent else codes[self.first]
        ended = Ended(
            code=code,
            why=self.silent.get(self.first) or why(code, lines),
            lines=lines,
            who=f"process {self.first} of {self.count}",
        )
        if code == USAGE:
            self.start.lines.say(
                f"{ended.who} {ended.why}: a mistake that another start would not mend"
            )
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
