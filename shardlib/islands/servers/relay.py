"""A slow link of our own: a relay on the loopback address with a rate and a latency.

    with Relay(host="127.0.0.1", port=server.port, link=read_link("50mbit-20ms")) as relay:
        place = dataclasses.replace(server.place(island=0), port=relay.port)

In either direction bytes leave one after the other at the rate of the link, and arrive later by its
latency; all connections share both directions. `stall` holds everything for some time. It is for
tests, benchmarks and trials: a real link loses packets, and its rate is not constant.

The time of a meeting over a link: an island sends its outer gradient, and gets the mean.

    seconds = (bytes sent + bytes received) / bytes_per_s + 2 latency_s

The latency is that of one message. Nothing is said of the wait for islands that are slower.

>>> link = read_link("50mbit-20ms")
>>> link.bytes_per_s, link.latency_s
(6250000.0, 0.02)
>>> round(link.seconds(625_000, 625_000), 3)
0.24
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import socket
import threading
import time
from dataclasses import dataclass, field

from shardlib.errors import ArgumentError
from shardlib.islands.exchanges import DiLoCo, spaces, wire_bytes
from shardlib.islands.servers.rounds import Outline
from shardlib.processes.console import LOOPBACK
from shardlib.untrusted.data import shown

#: Bytes of a message beside its numbers: lengths, header, names of arrays.
AROUND = 512


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between an island and the outer server, as fast in both directions.

    Attributes:
        bytes_per_s: its rate.
        latency_s: of one message.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        numbers = (self.bytes_per_s, self.latency_s)
        if not all(map(math.isfinite, numbers)) or self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ArgumentError(
                f"Link has bytes_per_s={self.bytes_per_s} and latency_s={self.latency_s}; a link"
                " has a rate of more than 0"
            )

    def seconds(self, sent: float, received: float) -> float:
        """Seconds of a question and its answer, of so many bytes."""
        return (sent + received) / self.bytes_per_s + 2 * self.latency_s


def read_link(text: str) -> Link:
    """A link as topologies spell it: "10gbit-50ms", "200mbit"."""
    number = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
    match = re.fullmatch(rf"{number}([gm])bit(?:-{number}ms)?", text)
    if match is None or not float(match[1]):
        raise ArgumentError(f"link is {shown(text)}\nTry: '10gbit-50ms' or '200mbit-20ms'")
    scale = 1e9 if match[2] == "g" else 1e6
    return Link(bytes_per_s=float(match[1]) * scale / 8, latency_s=float(match[3] or 0) / 1e3)


def meeting_bytes(exchange: DiLoCo, outline: Outline) -> int:
    """Bytes that an island sends at the largest of its meetings; it receives as many."""
    each = [
        [part.stop - part.start for part in outline.parts(fragment, exchange.fragments)]
        for fragment in range(exchange.fragments)
    ]
    return AROUND + max(wire_bytes(exchange.wire, sum(spaces(exchange.wire, s))) for s in each)


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
        """Returns the arrival time of bytes that come now."""
        with self._lock:
            self.free = max(self.free, time.monotonic()) + count / self.link.bytes_per_s
            return self.free + self.link.latency_s

    def stall(self, seconds: float) -> None:
        """Holds what comes for some time."""
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
        """Holds everything that comes, in both directions."""
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
