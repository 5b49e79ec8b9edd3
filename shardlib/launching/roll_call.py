"""Is everybody there, before JAX starts?

JAX's own start waits for all processes and, where one does not come, ends the others with a signal and without a word about who was missing; two processes of the same number,
a listener of somebody else at the port, or another version of JAX on one host end as badly. So the processes first meet without JAX: process 0 listens at the address that the coordinator will have, the
others say who they are and what they run, and all of them get the same answer. Then process 0 leaves the port to JAX's coordinator.

The words on the wire are lines: a greeting of process 0, one JSON object of the other, one JSON object as the answer. There is no encryption and no password, as there is none in JAX's coordination
service; the address that the user names is the only one that is listened on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.place import Place, split_address
from shardlib.lowering.agreement import differences, processes_text

GREETING = b"shardlib roll call 1\n"
#: Bytes of a line, at most.
LINE_BYTES = 1 << 16
#: Seconds that somebody who has connected may take to say a line.
SPEAK_SECONDS = 10.0
#: Seconds between two tries to reach process 0.
TRY_EVERY = 0.1
#: Seconds after which process 0 says whom it waits for, and again after twice as many, ...
SAY_AFTER = 10.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What process 0 told everybody.

    Attributes:
        failures: why the processes cannot work together; empty where they can.
        again: whether another start may go well.
    """

    failures: tuple[str, ...] = ()
    again: bool = False


def call(place: Place, about: Mapping[str, str], *, say: Callable[[str], None] | None = None) -> float:
    """Waits until all processes have said that they are there, and gives the seconds that took.

    Args:
        place: of this process.
        about: what all of them must have in common, by name.
        say: what process 0 does with a line about whom it waits for; by default it goes to standard error.

    Raises:
        LaunchError: in all processes alike: some did not come in time, two have the same number, or they do not run the same. Or here alone: the port is taken, or process 0 does not answer.
    """
    begin = time.monotonic()
    host, port = split_address(place.coordinator)
    me = {"process": place.process, "processes": place.processes, "host": socket.gethostname(), "pid": os.getpid(), "start": place.start, "about": dict(about)}
    answer = asyncio.run(_listen(place, host, port, me, say or _to_stderr) if place.process == 0 else _report(place, host, port, me))
    if answer.failures:
        hint = "look at what the missing ones wrote last; SHARDLIB_JOIN_SECONDS is how long the others wait" if answer.again else "start every process once, all with the same words, code and packages"
        try:
            raise_all(LaunchError, f"the {place.processes} processes cannot work together", answer.failures, hint=hint)
        except LaunchError as error:
            error.again = answer.again
            raise
    return time.monotonic() - begin


def address_here(place: Place) -> str:
    """The numeric address of the coordinator, which is to be on this host.

    Raises:
        LaunchError: the name is not known, or only processes of one host can reach it.
    """
    host, _ = split_address(place.coordinator)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise LaunchError(f"the host of the coordinator {place.coordinator} is not known here: {error.strerror or error}\nTry: the numeric address of the host of process 0") from error
    if place.hosts_differ and ipaddress.ip_address(str(found).partition("%")[0]).is_loopback:
        raise LaunchError(f"the coordinator is to listen at {place.coordinator}, which is {found}: only processes of its own host reach it, and {place.processes - place.host_processes} of {place.processes} are on others\n"
                          "Try: SHARDLIB_COORDINATOR=HOST:PORT with an address of the network that the hosts share")
    return str(found)


def wait_for_listener(place: Place, seconds: float = SPEAK_SECONDS) -> None:
    """Waits until somebody listens at the address of the coordinator, or the time is over. Who comes to JAX's service before it listens waits for a whole second before it tries again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(split_address(place.coordinator), timeout=seconds):
            return
        time.sleep(0.01)


@dataclass(kw_only=True)
class _Book:
    """Who has come so far."""

    processes: int
    start: str
    said: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    wrong: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer = field(default_factory=Answer)
    talks: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def enter(self, one: dict[str, Any]) -> None:
        """Writes somebody down; what is wrong with him ends the call for all."""
        number = one["process"]
        if one["processes"] != self.processes or not 0 <= number < self.processes:
            self.wrong.append(f"{_who(one)} says that it is process {number} of {one['processes']}, process 0 waits for {self.processes}")
        elif number in self.said and _who(self.said[number]) != _who(one):
            self.wrong.append(f"process {number} is there twice: {_who(self.said[number])} and {_who(one)}")
        else:
            self.said[number] = one
        self.changed.set()

    @property
    def absent(self) -> list[int]:
        """Who has not come."""
        return [number for number in range(self.processes) if number not in self.said]


async def _listen(place: Place, host: str, port: int, me: dict[str, Any], say: Callable[[str], None]) -> Answer:
    """Process 0: writes down who comes, and answers all of them at once."""
    book = _Book(processes=place.processes, start=place.start)
    book.enter(me)
    address = address_here(place)
    try:
        server = await asyncio.start_server(lambda reader, writer: _served(book, reader, writer), address, port, limit=LINE_BYTES, backlog=max(place.processes, 100))
    except OSError as error:
        raise LaunchError(f"process 0 cannot listen at {place.coordinator}: {os.strerror(error.errno) if error.errno else error}\n"
                          "Try: another port; or an earlier start still runs there", again=True) from error
    try:
        book.answer = await _complete(book, place, say)
    finally:
        server.close()  # the port is free before anybody hears that it is
        book.answered.set()
    if book.talks:
        await asyncio.wait(book.talks, timeout=2 * SPEAK_SECONDS)
    return book.answer


async def _complete(book: _Book, place: Place, say: Callable[[str], None]) -> Answer:
    """Waits until the book is complete, something is wrong with it, or the time is over."""
    begin, told = time.monotonic(), SAY_AFTER
    while book.absent and not book.wrong:
        waited = time.monotonic() - begin
        if waited >= place.seconds:
            return Answer(failures=(f"{processes_text(book.absent)} of {place.processes} did not come within {place.seconds} s",), again=True)
        if waited >= told:
            say(f"waiting for {processes_text(book.absent)} of {place.processes} ({waited:.0f} of {place.seconds} s)")
            told *= 2
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(book.changed.wait(), min(place.seconds - waited, told - waited))
        book.changed.clear()
    return Answer(failures=tuple(book.wrong or differences({number: one["about"] for number, one in book.said.items()})))


async def _served(book: _Book, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One of the others, from its greeting to its answer."""
    talk = asyncio.current_task()
    assert talk is not None
    book.talks.add(talk)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, TimeoutError, asyncio.IncompleteReadError):
        writer.write(GREETING)
        one = _read(await asyncio.wait_for(reader.readuntil(), SPEAK_SECONDS))
        if one["start"] != book.start:
            writer.write(json.dumps({"other": True}).encode() + b"\n")
        else:
            book.enter(one)
            gone = asyncio.ensure_future(reader.read(1))
            answered = asyncio.ensure_future(book.answered.wait())
            await asyncio.wait((gone, answered), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done() and book.said.get(one["process"]) is one:
                del book.said[one["process"]]  # it ended while it waited; who comes in its place is welcome
            answered.cancel()
            writer.write(json.dumps({"failures": book.answer.failures, "again": book.answer.again}).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), SPEAK_SECONDS)
            await asyncio.wait_for(gone, SPEAK_SECONDS)  # it closes first, so that the port waits for nothing
    writer.close()


def _read(line: bytes) -> dict[str, Any]:
    """What somebody says of himself.

    Raises:
        ValueError, KeyError, TypeError: it is nothing of this kind.
    """
    data = json.loads(line)
    return {"process": int(data["process"]), "processes": int(data["processes"]), "host": str(data["host"]), "pid": int(data["pid"]), "start": str(data["start"]),
            "about": {str(key): str(value) for key, value in data["about"].items()}}


async def _report(place: Place, host: str, port: int, me: dict[str, Any]) -> Answer:
    """Any other process: tries until process 0 has answered, or the time is over."""
    end, last = time.monotonic() + place.seconds + SPEAK_SECONDS, "nobody answers"
    while time.monotonic() < end:
        try:
            answer = await _asked(host, port, me, end)
            if "failures" in answer:
                return Answer(failures=tuple(answer["failures"]), again=bool(answer["again"]))
            last = "an earlier start of the job still listens there"
        except (ValueError, TimeoutError, asyncio.IncompleteReadError):
            last = "something else listens there, or process 0 ended while it waited"
        except OSError as error:
            last = error.strerror or str(error)
        await asyncio.sleep(TRY_EVERY)
    raise LaunchError(f"process {place.process} of {place.processes} cannot reach process 0 at {place.coordinator} within {place.seconds} s: {last}\n"
                      "Try: look at what process 0 wrote last, and whether its address and port can be reached from here", again=True)


async def _asked(host: str, port: int, me: dict[str, Any], end: float) -> dict[str, Any]:
    """The answer of process 0.

    Raises:
        OSError, ValueError, TimeoutError, IncompleteReadError: there is none.
    """
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=LINE_BYTES * 16), SPEAK_SECONDS)
    try:
        if await asyncio.wait_for(reader.readexactly(len(GREETING)), SPEAK_SECONDS) != GREETING:
            raise ValueError("it is not process 0 that listens there")
        writer.write(json.dumps(me).encode() + b"\n")
        return json.loads(await asyncio.wait_for(reader.readuntil(), max(end - time.monotonic(), 0.1)))
    finally:
        writer.close()


def _who(one: Mapping[str, Any]) -> str:
    return f"process {one['pid']} on {one['host']}"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
