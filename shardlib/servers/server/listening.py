"""The connections of a server: a thread each, and none can stop another.

Those that have shown the secret have places of their own; see `shardlib.servers.wire.door` for the
others.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from typing import Protocol

from shardlib.servers.ownership import Flat
from shardlib.servers.wire.bodies import Outgoing
from shardlib.servers.wire.door import Door
from shardlib.servers.wire.frames import ClosedError, FrameError, receive, send
from shardlib.servers.wire.messages import Answer, Ask, MessageError, read_ask

#: Bytes of parameters that a server takes before it knows how many there are.
MOST_FIRST_BYTES = 1 << 36
#: Connections that have shown the secret, beyond two for each worker: some break unseen.
SPARE = 32


class Answers(Protocol):
    """What answers messages, whatever carries them."""

    server: int
    refused: int
    events: list[str]

    @property
    def askers(self) -> int:
        """How many may ask."""
        ...

    @property
    def most_bytes(self) -> int | None:
        """Bytes of arrays that a message may have; None before they are known."""
        ...

    def name(self, who: int) -> str:
        """How the number of an asker is said."""
        ...

    def answer(self, ask: Ask, arrays: Flat, who: int) -> tuple[Answer, Outgoing]:
        """Answers a message of whom the connection knows."""
        ...

    def gone(self, who: int) -> None:
        """The connection of an asker has closed."""
        ...

    def note(self, text: str) -> None:
        """Keeps what has happened."""
        ...


@dataclass(kw_only=True)
class Listening:
    """A server's socket.

    Attributes:
        service: what answers.
        secret: of the run.
        host: address to listen at.
        wanted: port to listen at; 0 for a free one.
    """

    service: Answers
    secret: str
    host: str = "127.0.0.1"
    wanted: int = 0
    _newest: dict[int, object] = field(default_factory=dict[int, object])

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._socket = socket.create_server((self.host, self.wanted), family=family, backlog=256)
        self._room = threading.Semaphore(2 * self.service.askers + SPARE)
        self._door = Door(
            self._socket,
            self.secret,
            self.service.server,
            enter=self._entered,
            refused=self._refused,
            note=self.service.note,
        )

    @property
    def port(self) -> int:
        """At which it listens."""
        return self._socket.getsockname()[1]

    def serve(self) -> None:
        """Takes connections, until the socket is closed."""
        self._door.serve()

    def close(self) -> None:
        """Takes no more connections."""
        self._door.close()

    def _refused(self) -> None:
        self.service.refused += 1

    def _entered(self, stream: socket.socket, who: int) -> None:
        with stream:
            if not self._room.acquire(blocking=False):
                self.service.note(f"refused a connection of {self.service.name(who)}: too many")
                return
            try:
                self._talk(stream, who)
            finally:
                self._room.release()

    def _talk(self, stream: socket.socket, who: int) -> None:
        service, this = self.service, object()
        self._newest[who] = this
        try:
            while True:
                self._one(stream, who)
        except (FrameError, MessageError) as error:
            service.refused += 1
            service.note(f"closed the connection of {service.name(who)}: {error}")
        except (ClosedError, OSError):
            pass
        finally:
            if self._newest.get(who) is this:
                service.gone(who)

    def _one(self, stream: socket.socket, who: int) -> None:
        limit = self.service.most_bytes
        frame = receive(stream, limit=MOST_FIRST_BYTES if limit is None else limit)
        answer, arrays = self.service.answer(read_ask(frame.header), dict(frame.arrays), who)
        send(stream, answer.to_json(), arrays)
