"""A connection to one server, made again where it breaks, so that a server may be started again."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardlib.errors import LaunchError
from shardlib.launching.meeting.wire import StrangerError
from shardlib.servers.ownership import Flat
from shardlib.servers.wire.bodies import Outgoing
from shardlib.servers.wire.frames import Frame, FrameError, receive, receive_in_order, send
from shardlib.servers.wire.messages import Answer, Arrivals, Ask, read_answer
from shardlib.servers.wire.secret import GREETING_SECONDS, introduce
from shardlib.untrusted.json_types import JsonMapping

#: Seconds between two tries.
AGAIN_SECONDS = 0.1
#: Bytes of parameters that a server may send.
MOST_BYTES = 1 << 40


def address_file(folder: Path, server: int) -> Path:
    """Where a server says at which address it listens."""
    return folder / f"server-{server}.address"


def listed(folder: Path, server: int) -> Callable[[], tuple[str, int]]:
    """Where a server of a folder listens, read each time."""

    def where() -> tuple[str, int]:
        address = json.loads(address_file(folder, server).read_text())
        return address["host"], address["port"]

    return where


def keep_alive(stream: socket.socket) -> None:
    """Has an end of a connection send at once, and notice where the other is gone without a word,
    or where something in between forgets a connection that is silent.
    """
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(kw_only=True)
class Connection:
    """A connection to a server; questions are asked one after the other.

    Attributes:
        where: gives address and port of the server, which may be others once it was started again.
        server: number of the server.
        worker: number of who asks.
        secret: of the run.
        patience_s: how long a server may be gone.
        meanwhile: is called before each other try.
    """

    where: Callable[[], tuple[str, int]]
    server: int
    worker: int
    secret: str
    patience_s: float = 60.0
    meanwhile: Callable[[], None] = lambda: None
    _stream: socket.socket | None = None
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self, ask: Ask, arrays: Outgoing | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        """See `Link`. A question whose answer was lost is asked again: servers know the serials of
        pushes.
        """
        with self._lock:
            return self._answered(ask, arrays or {}, arrivals)

    def _answered(
        self, ask: Ask, arrays: Outgoing, arrivals: Arrivals | None
    ) -> tuple[Answer, Flat]:
        until = time.monotonic() + self.patience_s
        while True:
            if self._closed:
                raise LaunchError(f"the connection to server {self.server} was closed here")
            try:
                stream = self._connected()
                send(stream, ask.to_json(), arrays)
                frame = _received(stream, arrivals)
                return read_answer(frame.header), dict(frame.arrays)
            except StrangerError as error:
                raise LaunchError(f"server {self.server} is a stranger: {error}") from error
            except (OSError, FrameError, json.JSONDecodeError) as error:
                self._drop()
                if time.monotonic() > until:
                    raise LaunchError(
                        f"server {self.server} has not answered for {self.patience_s:g} s: {error}"
                    ) from error
                time.sleep(AGAIN_SECONDS)
                self.meanwhile()

    def _connected(self) -> socket.socket:
        if self._stream is None:
            stream = socket.create_connection(self.where(), GREETING_SECONDS)
            try:
                keep_alive(stream)
                introduce(stream, self.secret, self.server, self.worker)
            except BaseException:
                stream.close()
                raise
            stream.settimeout(self.patience_s)
            self._stream = stream
        return self._stream

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Ends it, also for a thread that waits for an answer."""
        self._closed, stream = True, self._stream
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._drop()


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """Arrivals of frames whose headers are answers."""

    arrivals: Arrivals

    def begin(self, header: JsonMapping) -> None:
        self.arrivals.begin(read_answer(header))

    def take(self, name: str, array: np.ndarray) -> None:
        self.arrivals.take(name, array)


def _received(stream: socket.socket, arrivals: Arrivals | None) -> Frame:
    if arrivals is None:
        return receive(stream, limit=MOST_BYTES)
    return receive_in_order(stream, limit=MOST_BYTES, taken=_Answers(arrivals=arrivals))
