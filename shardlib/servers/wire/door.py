"""Strangers at a listening socket: greeted beside each other, before anything else is done.

A stranger has one deadline for the whole greeting, however slowly it speaks, and no place among
those who know the secret. Where too many have not said who they are, the first of the address that
has the most of them goes. Refused ones are noted ever more rarely.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from shardlib.launching.meeting.wire import StrangerError
from shardlib.servers.wire.connection import keep_alive
from shardlib.servers.wire.frames import ClosedError, FrameError
from shardlib.servers.wire.secret import GREETING_SECONDS, greet

#: Callers that have not said who they are, at a time.
STRANGERS = 256
#: Refusals that are noted one by one, and seconds until others are noted together; twice as many
#: each time.
NOTED, NOTE_SECONDS = 8, 10.0


class Door:
    """Greets who comes.

    Args:
        listener: a listening socket.
        secret: of the run.
        server: number of who listens.
        enter: is given each connection that has shown the secret and the number of who it is, in a
            thread of its own; owns the connection.
        refused: is called for each that has not.
        note: is told of them in words, at a bounded rate.
        seconds: of a greeting.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        server: int,
        *,
        enter: Callable[[socket.socket, int], None],
        refused: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda text: None,
        seconds: float = GREETING_SECONDS,
    ) -> None:
        self._listener, self._secret, self._server = listener, secret, server
        self._enter, self._refused, self._note = enter, refused, note
        self._seconds = seconds
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, str] = {}  # address by connection, the first in front
        self._noted, self._unsaid = 0, 0
        self._next, self._pause = 0.0, NOTE_SECONDS

    def serve(self) -> None:
        """Greets until the listener is closed."""
        self._listener.settimeout(None)
        while True:
            try:
                stream, address = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._strangers[stream] = str(address[0])
                gone = self._crowded() if len(self._strangers) > STRANGERS else None
            if gone is not None:
                _shut(gone)
            threading.Thread(target=self._greeted, args=(stream,), daemon=True).start()

    def close(self) -> None:
        """Greets nobody any more."""
        _shut(self._listener)
        self._listener.close()

    def _crowded(self) -> socket.socket:
        """The first stranger of the address that has the most, who is forgotten."""
        crowded = Counter(self._strangers.values()).most_common(1)[0][0]
        first = next(stream for stream, address in self._strangers.items() if address == crowded)
        del self._strangers[first]
        return first

    def _greeted(self, stream: socket.socket) -> None:
        who, why = None, ""
        try:
            keep_alive(stream)
            who = greet(stream, self._secret, self._server, self._seconds)
        except (StrangerError, FrameError) as error:
            why = str(error)
        except TimeoutError:
            why = f"it has not said who it is within {self._seconds:g} s"
        except (ClosedError, OSError):
            pass
        with self._lock:
            self._strangers.pop(stream, None)
        if who is not None:
            stream.settimeout(None)
            self._enter(stream, who)
            return
        stream.close()
        if why:
            self._turned_away(why)

    def _turned_away(self, why: str) -> None:
        with self._lock:
            self._refused()
            self._unsaid += 1
            now = time.monotonic()
            if self._noted >= NOTED and now < self._next:
                return
            if self._noted >= NOTED:
                self._next, self._pause = now + self._pause, 2 * self._pause
            others = f"; {self._unsaid - 1} others before it" if self._unsaid > 1 else ""
            self._noted, self._unsaid = self._noted + 1, 0
        self._note(f"refused a stranger: {why}{others}")


def _shut(stream: socket.socket) -> None:
    """Wakes whoever waits for a socket."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
