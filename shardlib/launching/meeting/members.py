"""Any other process at the roll call: says who it is to process 0, and waits for its answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from shardlib.errors import LaunchError
from shardlib.launching.meeting.callers import Answer, Caller
from shardlib.launching.meeting.coordinator import SPEAK_SECONDS
from shardlib.launching.meeting.wire import (
    LINE_BYTES,
    StrangerError,
    greeted,
    number,
    opened,
    sealed,
)
from shardlib.processes.place import Place
from shardlib.untrusted import construct
from shardlib.untrusted.typed import WRONG

#: Seconds between two tries to reach process 0.
TRY_EVERY = 0.1


async def report(place: Place, host: str, port: int, me: Caller) -> Answer:
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
