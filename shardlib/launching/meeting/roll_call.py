"""The roll call: whether everybody is there, before JAX starts.

JAX's own start waits for all processes and, where one does not come, ends the others with a signal
and without a word about who was missing; two processes of the same number, a listener of somebody
else at the port, or another version of JAX on one host end as badly. So the processes first meet
without JAX: process 0 listens at the address that the coordinator will have, the others say who
they are and what they run, and all of them get the same answer. Then process 0 leaves the port to
JAX's coordinator.

They speak in lines (`shardlib.launching.meeting.wire`): a greeting of process 0, one JSON object of
the other, one JSON object as the answer, both sealed with the secret that the launcher
has given to all processes of the job. Whoever does not know it is ignored and counted, and delays
nobody. Without a secret (SHARDLIB_SECRET), as under a bare `srun` or `mpirun`, any process of the
network that reaches the port can say that it is one of the job. JAX's coordination service, which
listens there afterwards, has neither secret nor encryption: the address that the user names is the
only one that is listened on, and it belongs to a network of the job's own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.meeting.callers import Caller
from shardlib.launching.meeting.first import listen
from shardlib.launching.meeting.members import report
from shardlib.processes.place import Place, split_address
from shardlib.untrusted import printable
from shardlib.untrusted.shown import bounded


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
