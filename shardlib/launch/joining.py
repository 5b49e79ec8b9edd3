"""`join`: the first thing that every process of a job does, to find the others.

    import shardlib
    shardlib.join()        # before anything else of JAX

`shardlib train` does so by itself, and a process that is alone goes on as it is. Whoever started
the processes has said in their environment which of them is which (`shardlib.processes.place`).
First all of them meet without JAX (the roll call, below), then JAX's own coordination service is
started, with everything that it would otherwise guess: address, numbers, devices.

A process that fails after that must not wait for the others in JAX's orderly end, which waits for
processes that may wait for this one: it says what is wrong and ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ipaddress
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from shardlib import _jax_compat
from shardlib.errors import LaunchError, ShardlibError, raise_all
from shardlib.processes.code import versions
from shardlib.processes.machine import set_cpu_devices
from shardlib.processes.place import Place, Watchdog, read_place, split_address
from shardlib.processes.values import differences, processes_text
from shardlib.processes.wire import LINE_BYTES, StrangerError, number, opened, sealed
from shardlib.untrusted.data import WRONG, bounded, construct, fit, printable

#: Callers that have not said who they are yet; of more, those that have been silent the longest are
#: sent away.
SILENT_CALLERS = 512


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of process 0 to all.

    Attributes:
        failures: why the processes cannot work together; empty where they can.
        again: whether another start may go well.
    """

    failures: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A process as it introduces itself: its number, of how many, where it is, the word of its
    start, and what all must have in common.
    """

    process: int
    processes: int
    host: str
    pid: int
    start: str
    about: Mapping[str, str]

    def __str__(self) -> str:
        return f"process {self.pid} on {fit(self.host, 255)}"


@dataclass(kw_only=True)
class RollCall:
    """The processes that have come so far."""

    processes: int
    start: str
    secret: str
    said: dict[int, Caller] = field(default_factory=dict[int, Caller])
    #: Callers that were none of the job.
    strangers: int = 0
    #: Callers that have not said who they are, the first to come first.
    silent: dict[asyncio.StreamWriter, None] = field(
        default_factory=dict["asyncio.StreamWriter", None]
    )
    wrong: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer = field(default_factory=Answer)
    talks: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def enter(self, caller: Caller) -> None:
        """Writes somebody down; what is wrong with him ends the call for all."""
        number = caller.process
        if caller.processes != self.processes or not 0 <= number < self.processes:
            self.wrong.append(
                f"{caller} says that it is process {number} of {caller.processes}, process 0 waits"
                f" for {self.processes}"
            )
        elif number in self.said and str(self.said[number]) != str(caller):
            self.wrong.append(f"process {number} is there twice: {self.said[number]} and {caller}")
        else:
            self.said[number] = caller
        self.changed.set()

    @property
    def absent(self) -> list[int]:
        """The processes that have not come."""
        return [number for number in range(self.processes) if number not in self.said]

    def let_in(self, writer: asyncio.StreamWriter) -> None:
        """A new caller; where too many say nothing, the first of them goes."""
        self.silent[writer] = None
        if len(self.silent) > SILENT_CALLERS:
            first = next(iter(self.silent))
            del self.silent[first]
            self.strangers += 1
            first.transport.abort()


#: Seconds that somebody who has connected may take to say a line.
SPEAK_SECONDS = 10.0


def address_here(place: Place) -> str:
    """The numeric address of the coordinator, which is to be on this host."""
    host, _ = split_address(place.coordinator)
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise LaunchError(
            f"the host of the coordinator {place.coordinator} is not known here:"
            f" {error.strerror or error}\nTry: the numeric address of the host of process 0"
        ) from error
    if place.hosts_differ and ipaddress.ip_address(str(resolved).partition("%")[0]).is_loopback:
        raise LaunchError(
            f"the coordinator is to listen at {place.coordinator}, which is {resolved}: only"
            f" processes of its own host reach it, and {place.processes - place.host_processes} of"
            f" {place.processes} are on others\nTry: SHARDLIB_COORDINATOR=HOST:PORT with an address"
            " of the network that the hosts share"
        )
    return str(resolved)


def wait_for_listener(place: Place, seconds: float = SPEAK_SECONDS) -> None:
    """Waits until somebody listens at the address of the coordinator, or the time is over. Who
    comes to JAX's service before it listens waits for a whole second before it tries again.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(place.coordinator), timeout=seconds),
        ):
            return
        time.sleep(0.01)


#: Seconds after which process 0 says whom it waits for, and again after twice as many, ...
SAY_AFTER = 10.0


async def listen(
    place: Place, host: str, port: int, me: Caller, say: Callable[[str], None]
) -> Answer:
    """Process 0: writes down who comes, and answers all of them at once."""
    book = RollCall(processes=place.processes, start=place.start, secret=place.secret)
    book.enter(me)
    address = address_here(place)
    try:
        server = await asyncio.start_server(
            lambda reader, writer: _served(book, reader, writer),
            address,
            port,
            limit=LINE_BYTES,
            backlog=max(place.processes, 100),
        )
    except OSError as error:
        raise LaunchError(
            f"process 0 cannot listen at {place.coordinator}:"
            f" {os.strerror(error.errno) if error.errno else error}\nTry: another port; or an"
            " earlier start still runs there",
            again=True,
        ) from error
    try:
        book.answer = await _complete(book, place, say)
    finally:
        server.close()  # the port is free before anybody hears that it is
        for writer in book.silent:  # who has said nothing until now is waited for by nobody
            writer.transport.abort()
        book.answered.set()
    if book.strangers:
        say(f"the roll call ignored {book.strangers} callers that were no processes of this job")
    if book.talks:
        await asyncio.wait(book.talks, timeout=2 * SPEAK_SECONDS)
    return book.answer


async def _complete(book: RollCall, place: Place, say: Callable[[str], None]) -> Answer:
    """Waits until the book is complete, something is wrong with it, or the time is over."""
    begin, next_message = time.monotonic(), SAY_AFTER
    while book.absent and not book.wrong:
        waited = time.monotonic() - begin
        if waited >= place.seconds:
            others = f"; {book.strangers} callers were none of this job" if book.strangers else ""
            return Answer(
                failures=(
                    (
                        f"{processes_text(book.absent)} of {place.processes} did not come within"
                        f" {place.seconds} s{others}"
                    ),
                ),
                again=True,
            )
        if waited >= next_message:
            say(
                f"waiting for {processes_text(book.absent)} of {place.processes} ({waited:.0f} of"
                f" {place.seconds} s)"
            )
            next_message *= 2
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                book.changed.wait(), min(place.seconds - waited, next_message - waited)
            )
        book.changed.clear()
    return Answer(
        failures=tuple(
            book.wrong
            or differences({number: caller.about for number, caller in book.said.items()})
        )
    )


async def _served(
    book: RollCall, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One of the others, from its greeting to its answer."""
    talk = asyncio.current_task()
    assert talk is not None
    book.let_in(writer)
    try:
        caller, challenge = await _introduced(book, reader, writer)
        if caller is not None:
            book.talks.add(talk)
            await _answered(book, caller, challenge, reader, writer)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            book.strangers += 1
    except (
        OSError,
        EOFError,
        *WRONG,
        asyncio.LimitOverrunError,
    ):  # whatever a stranger says, it is nothing to us
        book.strangers += 1
    finally:
        book.silent.pop(writer, None)
        book.talks.discard(talk)
        writer.close()


async def _introduced(
    book: RollCall, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[Caller | None, str]:
    """Returns the caller of a connection, and the number that it has said; None for one of another
    start, which is told so.
    """
    own_challenge = number()
    writer.write(greeting(own_challenge))
    introduction = opened(
        book.secret,
        own_challenge,
        "member",
        await asyncio.wait_for(reader.readuntil(), SPEAK_SECONDS),
    )
    book.silent.pop(writer, None)
    caller, challenge = (
        construct(Caller, introduction.get("me"), "the caller", LaunchError, least=0),
        str(introduction.get("asked", "")),
    )
    if caller.start != book.start:
        writer.write(sealed(book.secret, challenge, "first", {"other": True}))
        await asyncio.wait_for(writer.drain(), SPEAK_SECONDS)
        return None, challenge
    return caller, challenge


async def _answered(
    book: RollCall,
    caller: Caller,
    challenge: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Writes one of the others down, and tells him the answer once there is one."""
    book.enter(caller)
    gone = asyncio.ensure_future(reader.read(1))
    answered = asyncio.ensure_future(book.answered.wait())
    await asyncio.wait((gone, answered), return_when=asyncio.FIRST_COMPLETED)
    if not answered.done() and book.said.get(caller.process) is caller:
        del book.said[caller.process]  # it ended while it waited; who comes in its place is welcome
    answered.cancel()
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(
            sealed(
                book.secret,
                challenge,
                "first",
                {"failures": list(book.answer.failures), "again": book.answer.again},
            )
        )
        await asyncio.wait_for(writer.drain(), SPEAK_SECONDS)
        await asyncio.wait_for(
            gone, SPEAK_SECONDS
        )  # it closes first, so that the port waits for nothing


#: Seconds between two tries to reach process 0.
TRY_EVERY = 0.1


async def report(place: Place, host: str, port: int, me: Caller) -> Answer:
    """Any other process: tries until process 0 has answered, or the time is over."""
    end, last = time.monotonic() + place.seconds + SPEAK_SECONDS, "nobody answers"
    while time.monotonic() < end:
        try:
            answer = await _ask(place.secret, host, port, me, end)
            if "other" not in answer:
                return construct(Answer, answer, "the answer of process 0", LaunchError)
            last = "an earlier start of the job still listens there"
        except (*WRONG, TimeoutError, EOFError, LaunchError, asyncio.LimitOverrunError) as error:
            last = "something else listens there, or process 0 ended while it waited" + (
                f" ({error})" if isinstance(error, StrangerError) else ""
            )
        except OSError as error:
            last = error.strerror or str(error)
        await asyncio.sleep(TRY_EVERY)
    raise LaunchError(
        f"process {place.process} of {place.processes} cannot reach process 0 at"
        f" {place.coordinator} within {place.seconds} s: {last}\nTry: look at what process 0 wrote"
        " last, and whether its address and port can be reached from here",
        again=True,
    )


async def _ask(secret: str, host: str, port: int, me: Caller, end: float) -> dict[str, Any]:
    """The answer of process 0."""
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection(host, port, limit=LINE_BYTES * 16), SPEAK_SECONDS
    )
    try:
        challenge, own_challenge = (
            greeted(await asyncio.wait_for(reader.readuntil(), SPEAK_SECONDS)),
            number(),
        )
        writer.write(
            sealed(secret, challenge, "member", {"me": asdict(me), "asked": own_challenge})
        )
        return opened(
            secret,
            own_challenge,
            "first",
            await asyncio.wait_for(reader.readuntil(), max(end - time.monotonic(), 0.1)),
        )
    finally:
        writer.close()


# --------------------------------------------------------------------------------------------------
# The roll call.
#
# JAX's own start waits for all processes and, where one does not come, ends the others with a
# signal and without a word about who was missing; two processes of the same number, a listener of
# somebody else at the port, or another version of JAX on one host end as badly. So the processes
# first meet without JAX: process 0 listens at the address that the coordinator will have, the
# others say who they are and what they run, and all of them get the same answer. Then process 0
# leaves the port to JAX's coordinator.
#
# They speak in lines (`shardlib.launch.joining`): a greeting of process 0, one JSON object of the
# other, one JSON object as the answer, both sealed with the secret that the launcher has given to
# all processes of the job. Whoever does not know it is ignored and counted, and delays nobody.
# Without a secret (SHARDLIB_SECRET), as under a bare `srun` or `mpirun`, any process of the
# network that reaches the port can say that it is one of the job. JAX's coordination service,
# which listens there afterwards, has neither secret nor encryption: the address that the user
# names is the only one that is listened on, and it belongs to a network of the job's own.


def call(
    place: Place, about: Mapping[str, str], *, say: Callable[[str], None] | None = None
) -> float:
    """Waits until all processes have said that they are there, and gives the seconds that took.

    Args:
        say: what process 0 does with a line about whom it waits for; by default it goes to standard
            error.
    """
    begin = time.monotonic()
    host, port = split_address(place.coordinator)
    me = Caller(
        process=place.process,
        processes=place.processes,
        host=socket.gethostname(),
        pid=os.getpid(),
        start=place.start,
        about=dict(about),
    )
    answer = asyncio.run(
        listen(place, host, port, me, say or _to_stderr)
        if place.process == 0
        else report(place, host, port, me)
    )
    if answer.failures:
        hint = (
            "look at what the missing ones wrote last; SHARDLIB_JOIN_SECONDS is how long the others"
            " wait"
            if answer.again
            else "start every process once, all with the same words, code and packages"
        )
        try:
            raise_all(
                LaunchError,
                f"the {place.processes} processes cannot work together",
                bounded([printable(failure) for failure in answer.failures]),
                hint=hint,
            )
        except LaunchError as error:
            error.again = answer.again
            raise
    return time.monotonic() - begin


def _to_stderr(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


#: What process 0 says first: the version of these words, and its number.
GREETING = re.compile(rb"shardlib roll call 2 ([0-9a-f]{32})\n")


def greeting(challenge: str) -> bytes:
    """The first line of process 0."""
    return f"shardlib roll call 2 {challenge}\n".encode()


def greeted(line: bytes) -> str:
    """The number in the first line of process 0."""
    match = GREETING.fullmatch(line)
    if match is None:
        raise StrangerError("it is not process 0 that listens there")
    return match[1].decode()


#: Seconds without a sign of life of a process after which JAX's service ends all others.
HEARTBEAT_SECONDS = 100
#: Seconds that a process waits at its orderly end for the others to come to theirs.
SHUTDOWN_SECONDS = 300
#: Seconds that a process which fails waits for others that fail too, so that each can say why.
LEAVE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Joined:
    """This process among all.

    Attributes:
        process: number of this one.
        processes: how many there are.
        seconds: that joining took, of which most is waiting for the last to come.
        place: what the environment said.
    """

    process: int
    processes: int
    seconds: float
    place: Place


_joined: Joined | None = None


def join(environ: Mapping[str, str] | None = None) -> Joined | None:
    """Finds the other processes of the job, once; to be called before anything else of JAX.

    Args:
        environ: variables that say which process this is (`shardlib.processes.place`); by default
            those of this process.

    Returns:
        This process among all; None where it is alone. Later calls give the first answer again.

    Raises:
        LaunchError: the variables contradict each other, processes are missing or there twice, they
            do not run the same, the port is taken, or JAX has been used already.
    """
    global _joined
    if _joined is not None:
        return _joined
    place = read_place(os.environ if environ is None else environ)
    if place is None:
        return None
    if jax.distributed.is_initialized():
        raise LaunchError(
            "jax.distributed.initialize has been called already\nTry: call shardlib.join() in its"
            " place"
        )
    seconds = _meet(place)
    coordination = _jax_compat.coordination()
    assert coordination is not None
    _, process, processes = coordination
    _joined = Joined(process=process, processes=processes, seconds=seconds, place=place)
    _beat(os.environ if environ is None else environ, process)
    sys.excepthook = _failed
    return _joined


def leave(code: int) -> None:
    """Ends this process with an exit code because something failed. Where all fail alike they end
    in order; where the others go on it does not wait for them.

    Returns only where this process is alone.
    """
    coordination = _jax_compat.coordination()
    if coordination is None or coordination[2] == 1:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        coordination[0].wait_at_barrier("shardlib/leave", int(LEAVE_SECONDS * 1000))
        jax.distributed.shutdown()
    os._exit(code)


def _meet(place: Place) -> float:
    """The roll call, and JAX's service; gives the seconds of the first."""
    if place.simulated is not None:
        set_cpu_devices(place.simulated)
    try:
        if place.automatic:
            jax.distributed.initialize(
                initialization_timeout=place.seconds,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
            return 0.0
        seconds = call(place, versions())
        if place.process:
            wait_for_listener(place)
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            local_device_ids=device_ids(place, os.environ),
            cluster_detection_method="deactivate",
            initialization_timeout=place.seconds,
            coordinator_bind_address=_bind_address(place) if place.process == 0 else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
        return seconds
    except (RuntimeError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"{place} cannot join the others: {error}\nTry: call shardlib.join() before anything"
            " else of JAX"
        ) from error


def _bind_address(place: Place) -> str:
    """Returns the address on which JAX's service is to listen; without it, it would listen on all
    interfaces.
    """
    address = address_here(place)
    return f"{f'[{address}]' if ':' in address else address}:{split_address(place.coordinator)[1]}"


def _beat(environ: Mapping[str, str], process: int) -> None:
    """Says every second that this process lives, where somebody asks for that."""
    folder = environ.get("SHARDLIB_HEARTBEATS")
    if folder:
        atexit.register(Watchdog(Path(folder) / f"rank-{process}.json", rank=process).close)


def _failed(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> Any:
    """Handles an error that nobody caught: its words, and the end, with 2 for a mistake that
    another start would not mend.
    """
    sys.__excepthook__(kind, error, traceback)
    leave(
        130
        if issubclass(kind, KeyboardInterrupt)
        else 2
        if isinstance(error, ShardlibError) and not getattr(error, "again", False)
        else 1
    )


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
