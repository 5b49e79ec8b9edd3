"""The place of a process in its job: its rank, the number of processes, the coordinator; its signs
of life and signals.

Whoever starts processes says so in their environment. `shardlib launch` sets the variables below;
where they are missing, those of the scheduler that started the process are read, so that `srun` and
`mpirun` work by themselves:

    SHARDLIB_COORDINATOR       HOST:PORT at which process 0 listens; HOST is an address that all
                               others reach, and the only one that it listens on
    SHARDLIB_PROCESSES         number of processes, or "auto" where JAX finds it out (Cloud TPU)
    SHARDLIB_PROCESS           number of this one
    SHARDLIB_HOST_PROCESSES    number of processes on this host, which share its devices; 1 if left
                               out
    SHARDLIB_HOST_PROCESS      number of this one among them
    SHARDLIB_HOST_DEVICES      CPU devices that this process simulates, where it is to use no
                               accelerator
    SHARDLIB_JOIN_SECONDS      how long to wait for the others
    SHARDLIB_START             a word that all processes of one start have in common, and those of
                               an earlier one that still run have not
    SHARDLIB_SECRET            a word that all processes of the job know and nobody else, by which
                               they know each other at the roll call
    SHARDLIB_HEARTBEATS        folder in which this process says every second that it lives

>>> place = {"SHARDLIB_COORDINATOR": "10.0.0.1:7000", "SHARDLIB_PROCESSES": "4"}
>>> read_place({**place, "SHARDLIB_PROCESS": "3"}).process
3
>>> read_place({}) is None
True
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from shardlib.errors import LaunchError, ShardlibError, StoppedError, raise_all
from shardlib.processes import kin
from shardlib.untrusted.data import construct, read_json

#: Seconds that a process waits for the others; a pod that is pulled anew takes minutes.
JOIN_SECONDS = 300
AUTO = "auto"
#: Ports of coordinators: above those that systems give out by themselves (32768 to 60999).
FIRST_PORT = 61000
PORTS = 4000


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one process among all.

    Attributes:
        coordinator: HOST:PORT of process 0; empty where JAX finds it out.
        processes: how many there are; 0 where JAX finds it out.
        process: number of this one.
        host_processes: processes that share the devices of this host.
        host_process: number of this one among them.
        simulated: CPU devices of this process; None for the devices that JAX finds.
        seconds: how long to wait for the others.
        start: a word for this start; empty where nobody gave one.
        secret: a word that only processes of the job know; empty where nobody gave one.
        source: who said so, for messages: "shardlib launch", "Slurm", "Open MPI", ...
    """

    coordinator: str
    processes: int
    process: int
    host_processes: int = 1
    host_process: int = 0
    simulated: int | None = None
    seconds: int = JOIN_SECONDS
    start: str = ""
    secret: str = field(default="", repr=False)
    source: str = "shardlib launch"

    @property
    def hosts_differ(self) -> bool:
        """True if some of the processes are on other hosts."""
        return self.processes > self.host_processes

    @property
    def automatic(self) -> bool:
        """True if JAX finds out the rest."""
        return not self.processes

    def __str__(self) -> str:
        return (
            f"a process of this host, found by JAX ({self.source})"
            if self.automatic
            else (
                f"process {self.process} of {self.processes}, coordinator {self.coordinator}"
                f" ({self.source})"
            )
        )


def read_place(environ: Mapping[str, str]) -> Place | None:
    """The place of this process; None where it is alone."""
    common = _common(environ)
    if "SHARDLIB_PROCESSES" in environ:
        return replace(_ours(environ), **common)
    for reader in (_slurm, _open_mpi):
        place = reader(environ)
        if place is not None and place.processes > 1:
            return replace(place, **common)
    return None


def _common(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns what may be said whoever starts the processes."""
    texts = {
        field: (name, environ[name])
        for field, name in (
            ("seconds", "SHARDLIB_JOIN_SECONDS"),
            ("simulated", "SHARDLIB_HOST_DEVICES"),
        )
        if name in environ
    }
    failures = [
        f"{name} is {text!r}; it needs a number from 1 on"
        for name, text in texts.values()
        if not (_number(text) and int(text))
    ]
    if failures:
        raise_all(LaunchError, "the environment of this process cannot be used", failures)
    return {
        **{field: int(text) for field, (_, text) in texts.items()},
        "start": environ.get("SHARDLIB_START", ""),
        "secret": environ.get("SHARDLIB_SECRET", ""),
    }


def _ours(environ: Mapping[str, str]) -> Place:
    if environ["SHARDLIB_PROCESSES"] == AUTO:
        return Place(coordinator="", processes=0, process=0)
    names = (
        "SHARDLIB_PROCESSES",
        "SHARDLIB_PROCESS",
        "SHARDLIB_HOST_PROCESSES",
        "SHARDLIB_HOST_PROCESS",
    )
    variables = {
        name: environ.get(name, default)
        for name, default in zip(names, ("", "", "1", "0"), strict=True)
    }
    failures = [
        f"{name} is {value!r}, which is not a number"
        for name, value in variables.items()
        if not _number(value)
    ]
    coordinator = environ.get("SHARDLIB_COORDINATOR", "")
    if (
        not coordinator.rpartition(":")[0]
        or not _number(port := coordinator.rpartition(":")[2])
        or not 0 < int(port) < 1 << 16
    ):
        failures.append(f"SHARDLIB_COORDINATOR is {coordinator!r}; it needs HOST:PORT of process 0")
    if not failures:
        processes, process, host_processes, host_process = (int(variables[name]) for name in names)
        if process >= processes:
            failures.append(f"SHARDLIB_PROCESS is {process} of {processes}; numbers run from 0")
        if host_process >= host_processes:
            failures.append(
                f"SHARDLIB_HOST_PROCESS is {host_process} of {host_processes}; numbers run from 0"
            )
        if not failures:
            return Place(
                coordinator=coordinator,
                processes=processes,
                process=process,
                host_processes=host_processes,
                host_process=host_process,
            )
    raise_all(
        LaunchError,
        "the environment does not say which process this is",
        failures,
        hint="start it with shardlib launch, srun or mpirun, or unset SHARDLIB_PROCESSES",
    )


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _slurm(environ: Mapping[str, str]) -> Place | None:
    """Of a task that srun started; the coordinator is on the first node of the step."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environ for name in names):
        return None
    nodes, job, tasks, task, local = (environ[name] for name in names)
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
    return Place(
        coordinator=f"{first_host(nodes)}:{port_of_job(int(job))}",
        processes=int(tasks),
        process=int(task),
        host_processes=_evenly(per_node),
        host_process=int(local),
        source="Slurm",
    )


def _open_mpi(environ: Mapping[str, str]) -> Place | None:
    """Of a process that mpirun of Open MPI started on one host, or on several where the user names
    the coordinator.
    """
    names = (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    )
    if any(name not in environ for name in names):
        return None
    size, rank, local_size, local_rank = (int(environ[name]) for name in names)
    coordinator = environ.get("SHARDLIB_COORDINATOR", "")
    if not coordinator and local_size == size:
        digits = "".join(filter(str.isdigit, environ.get("PMIX_NAMESPACE", "0")))
        coordinator = f"127.0.0.1:{port_of_job(int(digits or 0))}"
    if not coordinator and size > 1:
        raise LaunchError(
            "mpirun does not say on which host process 0 is\nTry: mpirun -x"
            " SHARDLIB_COORDINATOR=HOST:PORT ..., with an address of that host which all others"
            " reach"
        )
    return Place(
        coordinator=coordinator,
        processes=size,
        process=rank,
        host_processes=local_size,
        host_process=local_rank,
        source="Open MPI",
    )


def first_host(nodes: str) -> str:
    """The first of a Slurm list of nodes.

    >>> first_host("node[007-015,20],other"), first_host("a1,b2"), first_host("gpu-[3,5]-ib")
    ('node007', 'a1', 'gpu-3-ib')
    """
    before, bracket, after_bracket = nodes.partition("[")
    if not bracket or "," in before:
        return before.partition(",")[0]
    inside, _, after = after_bracket.partition("]")
    return before + inside.partition(",")[0].partition("-")[0] + after.partition(",")[0]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, where the host of IPv6 may stand in brackets.

    >>> split_address("10.0.0.1:7000"), split_address("[fd00::1]:7000")
    (('10.0.0.1', 7000), ('fd00::1', 7000))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def port_of_job(number: int) -> int:
    """A port for the coordinator of a job: the same on all hosts, another one for the next job."""
    return FIRST_PORT + number % PORTS


def _evenly(text: str) -> int:
    """Tasks of a node, of Slurm's "2(x3)" or "2"; of uneven ones the first."""
    return int(text.partition("(")[0].partition(",")[0])


# --------------------------------------------------------------------------------------------------
# Heartbeats of a process that trains, and their observation from outside.
#
# A heartbeat has a number that rises. Whoever watches looks when the number changes, by a clock of
# its own that nobody sets (`Observer`): clocks of other hosts may be wrong, and that of this one
# may be set while it looks. Processes of one boot of one machine share a clock that nobody sets
# either, and need not wait to see how old a heartbeat is.

#: Seconds between two heartbeats.
EVERY = 1.0
#: Phase of a loop that has ended; its process may go on with something else, and writes no more
#: heartbeats.
ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last sign of life of a process.

    Attributes:
        rank: number of the process.
        host: name of its machine.
        pid: of the operating system there.
        step: steps done.
        phase: what the loop is doing: "compile", "data", "step", "save", ...
        lasts: seconds that the phase had taken when this was written.
        number: of heartbeats that the process has written, this one included.
        boot: which boot of which machine; empty where the system does not say.
        clock: seconds since that boot when this was written.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    lasts: float
    number: int
    boot: str
    clock: float

    def age(self) -> float | None:
        """Seconds since it was written; None where it is of another machine, or of this one before
        it was started again.
        """
        return max(kin.clock() - self.clock, 0.0) if self.boot and self.boot == kin.boot() else None


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The heartbeat in a file; None where there is none, or none that can be read."""
    try:
        data = read_json(path, "heartbeat", LaunchError)
        return construct(Heartbeat, data, "the heartbeat", LaunchError)
    except ShardlibError:
        return None


class Observer:
    """Sees which processes have stopped to give signs of life, by the clock of the one that
    looks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}

    def silent(self, key: Hashable, beat: Heartbeat | None) -> float:
        """Seconds since the heartbeat of something was seen to change; or since it was asked for
        first.
        """
        now, mark = self._clock(), (beat.host, beat.pid, beat.number) if beat is not None else None
        if key not in self._seen or self._seen[key][0] != mark:
            self._seen[key] = (mark, now)
        return now - self._seen[key][1]


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all, also after a loss of power; what
    stands in the place of the draft, a link to somewhere perhaps, is not written to.
    """
    draft = path.with_name(f"{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with draft.open("x", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


# --------------------------------------------------------------------------------------------------
# The watchdog, which ends a process that hangs, and reports where.
#
# A thread looks at the loop every second. It writes a heartbeat (`shardlib.processes.place`): who
# the process is, at which step it is, in which phase, and for how long; whoever watches from
# outside (the supervisor, `shardlib status`) reads that file, and a process that was stopped or
# swapped out writes none. All of it goes by a clock that nobody sets. When a phase lasts longer
# than it may, the thread prints which rank is stuck where, with the stacks of all threads, and
# ends the process: a collective that waits for a peer that is gone never returns by itself.

#: Exit code of a process whose watchdog ended it.
HUNG = 86
#: Exit code of a run that somebody stopped after it had saved: whoever started it may start it
#: again (EX_TEMPFAIL of sysexits.h).
STOPPED = 75
#: Exit code for mistakes of the user, which no start repairs.
USAGE = 2


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
        self._number, self._boot = 0, kin.boot()
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
            clock=kin.clock(),
        )
        with contextlib.suppress(OSError):  # a full disk must not end the run
            write_whole(self._path, json.dumps(asdict(beat)))


def _end(message: str) -> None:
    print(f"error: {message}; stacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(HUNG)


# --------------------------------------------------------------------------------------------------
# Signals that request a stop of the run.
#
# A scheduler that preempts a job sends SIGTERM (Slurm also SIGUSR1, where the job asks for it)
# some seconds before it kills; a person presses Ctrl-C; a terminal that closes, or a connection
# that breaks, sends SIGHUP, unless the command was started with `nohup`. The first of them lets
# the step that runs end, so that the loop can save; a second Ctrl-C interrupts at once.

#: Signals that ask for an orderly end; those that a platform lacks are left out.
STOPPING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)


class StopRequest:
    """A request that the run stops, and its origin.

    Attributes:
        reason: name of the signal, "SIGTERM"; empty as long as nobody does.
    """

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str) -> None:
        """Asks for a stop; the first reason stays."""
        self.reason = self.reason or reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.reason == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)


def _unheard(number: signal.Signals) -> bool:
    """Returns whether somebody wants a signal not to end this process: `nohup` has SIGHUP
    ignored.
    """
    return number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Listens for signals until the end of the block, where this is the main thread; elsewhere
    nobody can ask but by `ask`. What came inside of `ends_at_once` and was not obeyed is asked
    again.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with _heard_by(request._on_signal, STOPPING) as before:
        for handler in before:
            if isinstance(handler, _AtOnce) and handler.reason:
                request.ask(handler.reason)
        yield request


@dataclass
class _AtOnce:
    """Ends the process where a signal finds it. An exception that is raised in a callback of a
    library is printed and forgotten there; hence the note.

    Attributes:
        reason: name of the first signal that came; empty before.
    """

    reason: str = ""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise StoppedError(
            f"{signal.Signals(number).name} came outside of the training loop; the run is as its"
            " newest checkpoint has it\nTry: the same command again"
        )


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Ends the run in order on a request to stop while it plans and compiles, with nothing to save
    yet; inside, `stop_requests` takes over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _heard_by(_AtOnce(), STOPPING):
        yield


@contextlib.contextmanager
def _heard_by(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Iterator[list[Any]]:
    """Installs a handler until the end of the block, and gives those that it takes the place of."""
    before = {number: signal.signal(number, handler) for number in numbers if not _unheard(number)}
    try:
        yield list(before.values())
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
