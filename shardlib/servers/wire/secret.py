"""Who is there? Both ends of a new connection show that they know the secret of the run.

The server says a number, the worker seals who it is with that number and says one of its own, with
which the server seals its answer (`shardlib.launching.meeting.wire`). The secret itself is never
sent. What follows is neither sealed nor encrypted: it is for one machine, or a network that is
trusted.
"""

from __future__ import annotations

import socket

from shardlib.launching.meeting.wire import StrangerError, number, opened, sealed
from shardlib.servers.wire.frames import FrameError, receive, send
from shardlib.untrusted.json_types import JsonMapping

#: Seconds that either end has.
GREETING_SECONDS = 20.0


def greet(stream: socket.socket, secret: str, server: int) -> int:
    """The server's side.

    Args:
        stream: a new connection.
        secret: of the run.
        server: number of the server.

    Returns:
        Number of the worker.

    Raises:
        StrangerError: it does not know the secret.
        FrameError: what it says is no frame.
        OSError: it is gone, or too slow.
    """
    own = number()
    send(stream, {"number": own}, {})
    said = opened(secret, own, "worker", _line(receive(stream, most=0).header))
    worker, theirs = said.get("worker"), said.get("number")
    if not isinstance(worker, int) or not isinstance(theirs, str):
        raise StrangerError("it does not say who it is")
    send(stream, {"line": sealed(secret, theirs, "server", {"server": server}).decode()}, {})
    return worker


def introduce(stream: socket.socket, secret: str, server: int, worker: int) -> None:
    """The worker's side; arguments and errors as those of `greet`."""
    theirs, own = receive(stream, most=0).header.get("number"), number()
    if not isinstance(theirs, str):
        raise StrangerError("it is no server of parameters that listens there")
    line = sealed(secret, theirs, "worker", {"worker": worker, "number": own})
    send(stream, {"line": line.decode()}, {})
    said = opened(secret, own, "server", _line(receive(stream, most=0).header))
    if said.get("server") != server:
        raise StrangerError(f"it is another server than number {server}")


def _line(header: JsonMapping) -> bytes:
    line = header.get("line")
    if not isinstance(line, str):
        raise FrameError("it has no line")
    return line.encode()
