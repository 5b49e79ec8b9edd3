"""A slow link of our own: a relay on the loopback address with a rate and a latency.

    with Relay(host="127.0.0.1", port=server.port, link=read_link("50mbit-20ms")) as relay:
        place = dataclasses.replace(server.place(island=0), port=relay.port)

In either direction bytes leave one after the other at the rate of the link, and arrive later by its
latency; all connections share both directions. `stall` holds everything for some time. It is for
tests, benchmarks and trials: a real link loses packets, and its rate is not constant.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from dataclasses import dataclass, field

from shardlib.launching.addresses import LOOPBACK
from shardlib.servers.link import Link

#: Bytes that leave together.
CHUNK = 1 << 14
#: Chunks on the way, at most; what is sent beyond waits at the sender.
MOST_CHUNKS = 4096


@dataclass(kw_only=True)
class Direction:
    """One direction of a link: when its bytes leave.

    Attributes:
        link: rate and latency.
        free: when the bytes before have left, seconds of a clock.
    """

    link: Link
    free: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrival(self, count: int) -> float:
        """When bytes that come now arrive."""
        with self._lock:
            self.free = max(self.free, time.monotonic()) + count / self.link.bytes_per_s
            return self.free + self.link.latency_s

    def stall(self, seconds: float) -> None:
        """Holds what comes for some time.

        Args:
            seconds: from now on.
        """
        with self._lock:
            self.free = max(self.free, time.monotonic()) + seconds


@dataclass(kw_only=True)
class Relay:
    """A link between whoever connects to it and an address.

    Attributes:
        port: of who is to be reached.
        link: rate and latency.
        host: of who is to be reached.
    """

    port: int
    link: Link
    host: str = LOOPBACK

    def __post_init__(self) -> None:
        self.up, self.down = Direction(link=self.link), Direction(link=self.link)
        self._listener = socket.create_server((LOOPBACK, 0), backlog=64)
        self._streams: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def at(self) -> int:
        """The port at which the relay listens."""
        return self._listener.getsockname()[1]

    def stall(self, seconds: float) -> None:
        """Holds everything that comes, in both directions.

        Args:
            seconds: from now on.
        """
        self.up.stall(seconds)
        self.down.stall(seconds)

    def cut(self) -> None:
        """Breaks all connections; new ones may be made."""
        streams, self._streams = self._streams, []
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)  # which wakes who reads
            stream.close()

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self.host, self.port), 10.0)
            except OSError:
                near.close()  # nobody is there
                continue
            far.settimeout(None)
            self._streams += [near, far]
            for stream in (near, far):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._copied(near, far, self.up)
            self._copied(far, near, self.down)

    def _copied(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        """Copies from one end to the other, in two threads."""
        chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(MOST_CHUNKS)
        for function in (_read, _written):
            stream = source if function is _read else target
            threading.Thread(target=function, args=(stream, chunks, direction), daemon=True).start()


def _read(
    source: socket.socket, chunks: queue.Queue[tuple[float, bytes]], direction: Direction
) -> None:
    data = b"-"
    while data:
        try:
            data = source.recv(CHUNK)
        except OSError:
            data = b""
        chunks.put((direction.arrival(len(data)), data))


def _written(
    target: socket.socket, chunks: queue.Queue[tuple[float, bytes]], direction: Direction
) -> None:
    while True:
        when, data = chunks.get()
        wait = max(when, 0.0) - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        try:
            if data:
                target.sendall(data)
                continue
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        if not data:
            return
