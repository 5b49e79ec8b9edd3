"""Process 0 at the roll call: writes down who comes, and answers all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from shardlib.errors import LaunchError
from shardlib.launching.meeting.callers import Answer, Book, Caller
from shardlib.launching.meeting.coordinator import SPEAK_SECONDS, address_here
from shardlib.launching.meeting.wire import (
    LINE_BYTES,
    greeting,
    number,
    opened,
    sealed,
)
from shardlib.processes.agreement import differences, processes_text
from shardlib.processes.place import Place
from shardlib.untrusted import construct
from shardlib.untrusted.typed import WRONG

#: Seconds after which process 0 says whom it waits for, and again after twice as many, ...
SAY_AFTER = 10.0


async def listen(
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


async def _served(book: Book, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
    book: Book,
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
