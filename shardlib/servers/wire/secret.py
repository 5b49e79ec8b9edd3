"""Who is there? Both ends of a new connection show that they know the secret of the run.

The server says a number, the worker seals who it is with that number and says one of its own, with
which the server seals its answer (`shardlib.launching.meeting.wire`). The secret itself is never
sent. What follows is neither sealed nor encrypted: it is for one machine, or a network that is
trusted.
"""

from __future__ import annotations

import socket
import time

from shardlib.launching.meeting.wire import StrangerError, number, opened, sealed
from shardlib.servers.wire.frames import FrameError, receive, send
from shardlib.untrusted.json_types import JsonMapping

#: Seconds that either end has, for all of it.
GREETING_SECONDS = 20.0
#: Bytes of a header before the secret is known.
GREETING_BYTES = 1 << 12


class _Hurried:
    """A socket of which everything that is read and sent together has one deadline."""

    def __init__(self, stream: socket.socket, seconds: float) -> None:
        self._stream, self._until = stream, time.monotonic() + seconds

    def gettimeout(self) -> float:
        """Seconds that are left."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the greeting has taken too long")
        self._stream.settimeout(left)
        return left

    def recv(self, count: int, flags: int = 0) -> bytes:
        """See `socket.socket`."""
        self.gettimeout()
        return self._stream.recv(count, flags)

    def sendall(self, data: bytes | memoryview) -> None:
        """See `socket.socket`."""
        self.gettimeout()
        self._stream.sendall(data)


def greet(
    stream: socket.socket, secret: str, server: int, seconds: float = GREETING_SECONDS
) -> int:
    """The server's side.

    Args:
        seconds: that it may take.
    """
    hurried, challenge = _Hurried(stream, seconds), number()
    send(hurried, {"number": challenge}, {})
    reply = opened(secret, challenge, "worker", _line(_header(hurried)))
    worker, theirs = reply.get("worker"), reply.get("number")
    if not isinstance(worker, int) or not isinstance(theirs, str):
        raise StrangerError("it does not say who it is")
    send(hurried, {"line": sealed(secret, theirs, "server", {"server": server}).decode()}, {})
    return worker


def introduce(
    stream: socket.socket,
    secret: str,
    server: int,
    worker: int,
    seconds: float = GREETING_SECONDS,
) -> None:
    """The worker's side; arguments and errors as those of `greet`."""
    hurried = _Hurried(stream, seconds)
    theirs, challenge = _header(hurried).get("number"), number()
    if not isinstance(theirs, str):
        raise StrangerError("it is no server of parameters that listens there")
    line = sealed(secret, theirs, "worker", {"worker": worker, "number": challenge})
    send(hurried, {"line": line.decode()}, {})
    reply = opened(secret, challenge, "server", _line(_header(hurried)))
    if reply.get("server") != server:
        raise StrangerError(f"it is another server than number {server}")


def _header(stream: _Hurried) -> JsonMapping:
    return receive(stream, limit=0, header=GREETING_BYTES).header


def _line(header: JsonMapping) -> bytes:
    line = header.get("line")
    if not isinstance(line, str):
        raise FrameError("it has no line")
    return line.encode()
