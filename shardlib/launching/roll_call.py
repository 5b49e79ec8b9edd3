"""Is everybody there, before JAX starts?

JAX's own start waits for all processes and, where one does not come, ends the others with a signal
and without a word about who was missing; two processes of the same number, a listener of somebody
else at the port, or another version of JAX on one host end as badly. So the processes first meet
without JAX: process 0 listens at the address that the coordinator will have, the others say who
they are and what they run, and all of them get the same answer. Then process 0 leaves the port to
JAX's coordinator.

The words on the wire are lines (`shardlib.launching.wire`): a greeting of process 0, one JSON
object of the other, one JSON object as the answer, both sealed with the secret that the launcher
has given to all processes of the job. Whoever does not know it is ignored and counted, and delays
nobody. Without a secret (SHARDLIB_SECRET), as under a bare `srun` or `mpirun`, any process of the
network that reaches the port can say that it is one of the job. JAX's coordination service, which
listens there afterwards, has neither secret nor encryption: the address that the user names is the
only one that is listened on, and it belongs to a network of the job's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.callers import Answer, Book, Caller
from shardlib.launching.wire import (
    LINE_BYTES,
    StrangerError,
    greeted,
    greeting,
    number,
    opened,
    sealed,
)
from shardlib.processes.agreement import differences, processes_text
from shardlib.processes.place import Place, split_address
from shardlib.untrusted import construct, printable
from shardlib.untrusted.shown import bounded
from shardlib.untrusted.typed import WRONG

#: Seconds that somebody who has connected may take to say a line.
SPEAK_SECONDS = 10.0
#: Seconds between two tries to reach process 0.
TRY_EVERY = 0.1
#: Seconds after which process 0 says whom it waits for, and again after twice as many, ...
SAY_AFTER = 10.0


def call(
    place: Place, about: Mapping[str, str], *, say: Callable[[str], None] | None = None
) -> float:
    """Waits until all processes have said that they are there, and gives the seconds that took.

    Args:
        place: of this process.
        about: what all of them must have in common, by name.
        say: what process 0 does with a line about whom it waits for; by default it goes to standard
            error.

    Raises:
        LaunchError: in all processes alike: some did not come in time, two have the same number, or
            they do not run the same. Or here alone: the port is taken, or process 0 does not
            answer.
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
        _listen(place, host, port, me, say or _to_stderr)
        if place.process == 0
        else _report(place, host, port, me)
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
                bounded([printable(one) for one in answer.failures]),
                hint=hint,
            )
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
        raise LaunchError(
            f"the host of the coordinator {place.coordinator} is not known here:"
            f" {error.strerror or error}\nTry: the numeric address of the host of process 0"
        ) from error
    if place.hosts_differ and ipaddress.ip_address(str(found).partition("%")[0]).is_loopback:
        raise LaunchError(
            f"the coordinator is to listen at {place.coordinator}, which is {found}: only processes"
            f" of its own host reach it, and {place.processes - place.host_processes} of"
            f" {place.processes} are on others\nTry: SHARDLIB_COORDINATOR=HOST:PORT with an address"
            " of the network that the hosts share"
        )
    return str(found)


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


async def _listen(
    place: Place, host: str, port: int, me: Caller, say: Callable[[str], None]
) -> Answer:
    """Process 0: writes down who comes, and answers all of them at once."""
    book = Book(processes=place.processes, start=place.start, secret=place.secret)
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


async def _complete(book: Book, place: Place, say: Callable[[str], None]) -> Answer:
    """Waits until the book is complete, something is wrong with it, or the time is over."""
    begin, told = time.monotonic(), SAY_AFTER
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
        if waited >= told:
            say(
                f"waiting for {processes_text(book.absent)} of {place.processes} ({waited:.0f} of"
                f" {place.seconds} s)"
            )
            told *= 2
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(book.changed.wait(), min(place.seconds - waited, told - waited))
        book.changed.clear()
    return Answer(
        failures=tuple(
            book.wrong or differences({number: one.about for number, one in book.said.items()})
        )
    )


async def _served(book: Book, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One of the others, from its greeting to its answer."""
    talk = asyncio.current_task()
    assert talk is not None
    book.let_in(writer)
    try:
        one, asked = await _introduced(book, reader, writer)
        if one is not None:
            book.talks.add(talk)
            await _answered(book, one, asked, reader, writer)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            book.count_stranger()
    except (
        OSError,
        EOFError,
        *WRONG,
        asyncio.LimitOverrunError,
    ):  # whatever a stranger says, it is nothing to us
        book.count_stranger()
    finally:
        book.silent.pop(writer, None)
        book.talks.discard(talk)
        writer.close()


async def _introduced(
    book: Book, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[Caller | None, str]:
    """Who somebody is, and the number that he has said; None for one of another start, who is told
    so.

    Raises:
        StrangerError, LaunchError, TimeoutError, IncompleteReadError, LimitOverrunError: it is
            nobody of the job.
    """
    own = number()
    writer.write(greeting(own))
    said = opened(
        book.secret, own, "member", await asyncio.wait_for(reader.readuntil(), SPEAK_SECONDS)
    )
    book.silent.pop(writer, None)
    one, asked = (
        construct(Caller, said.get("me"), "the caller", LaunchError, least=0),
        str(said.get("asked", "")),
    )
    if one.start != book.start:
        writer.write(sealed(book.secret, asked, "first", {"other": True}))
        await asyncio.wait_for(writer.drain(), SPEAK_SECONDS)
        return None, asked
    return one, asked


async def _answered(
    book: Book, one: Caller, asked: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Writes one of the others down, and tells him the answer once there is one."""
    book.enter(one)
    gone = asyncio.ensure_future(reader.read(1))
    answered = asyncio.ensure_future(book.answered.wait())
    await asyncio.wait((gone, answered), return_when=asyncio.FIRST_COMPLETED)
    if not answered.done() and book.said.get(one.process) is one:
        del book.said[one.process]  # it ended while it waited; who comes in its place is welcome
    answered.cancel()
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(
            sealed(
                book.secret,
                asked,
                "first",
                {"failures": list(book.answer.failures), "again": book.answer.again},
            )
        )
        await asyncio.wait_for(writer.drain(), SPEAK_SECONDS)
        await asyncio.wait_for(
            gone, SPEAK_SECONDS
        )  # it closes first, so that the port waits for nothing


async def _report(place: Place, host: str, port: int, me: Caller) -> Answer:
    """Any other process: tries until process 0 has answered, or the time is over."""
    end, last = time.monotonic() + place.seconds + SPEAK_SECONDS, "nobody answers"
    while time.monotonic() < end:
        try:
            answer = await _asked(place.secret, host, port, me, end)
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


async def _asked(secret: str, host: str, port: int, me: Caller, end: float) -> dict[str, Any]:
    """The answer of process 0.

    Raises:
        OSError, StrangerError, TimeoutError, IncompleteReadError, LimitOverrunError: there is none.
    """
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection(host, port, limit=LINE_BYTES * 16), SPEAK_SECONDS
    )
    try:
        asked, own = greeted(await asyncio.wait_for(reader.readuntil(), SPEAK_SECONDS)), number()
        writer.write(sealed(secret, asked, "member", {"me": asdict(me), "asked": own}))
        return opened(
            secret,
            own,
            "first",
            await asyncio.wait_for(reader.readuntil(), max(end - time.monotonic(), 0.1)),
        )
    finally:
        writer.close()


def _to_stderr(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
