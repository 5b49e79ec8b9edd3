"""A connection to one server, made again where it breaks, so that a server may be started again."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.errors import LaunchError
from shardlib.launching.meeting.wire import StrangerError
from shardlib.servers.ownership import Flat
from shardlib.servers.wire.frames import FrameError, receive, send
from shardlib.servers.wire.messages import Answer, Ask, read_answer
from shardlib.servers.wire.secret import GREETING_SECONDS, introduce

#: Seconds between two tries.
AGAIN_SECONDS = 0.1
#: Bytes of parameters that a server may send.
MOST_BYTES = 1 << 40


def address_file(folder: Path, server: int) -> Path:
    """Where a server says at which address it listens.

    Args:
        folder: of the run.
        server: its number.
    """
    return folder / f"server-{server}.address"


@dataclass(kw_only=True)
class Connection:
    """A connection to a server; questions are asked one after the other.

    Attributes:
        folder: with the addresses of servers.
        server: number of the server.
        worker: number of who asks.
        secret: of the run.
        patience_s: how long a server may be gone.
        meanwhile: is called before each other try.
    """

    folder: Path
    server: int
    worker: int
    secret: str
    patience_s: float = 60.0
    meanwhile: Callable[[], None] = lambda: None
    _stream: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, ask: Ask, arrays: Flat | None = None) -> tuple[Answer, Flat]:
        """See `Link`. A question whose answer was lost is asked again: servers know the serials of
        pushes.
        """
        with self._lock:
            return self._answered(ask, arrays or {})

    def _answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Flat]:
        until = time.monotonic() + self.patience_s
        while True:
            try:
                stream = self._connected()
                send(stream, ask.to_json(), arrays)
                frame = receive(stream, most=MOST_BYTES)
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
            where = json.loads(address_file(self.folder, self.server).read_text())
            stream = socket.create_connection((where["host"], where["port"]), GREETING_SECONDS)
            try:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                introduce(stream, self.secret, self.server, self.worker)
            except BaseException:
                stream.close()
                raise
            stream.settimeout(self.patience_s)
            self._stream = stream
        return self._stream

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        """Ends it."""
        self._drop()
