"""The wire between processes that share a secret: sealed lines, frames of arrays, and a listener
that strangers do not hold up.

A line is JSON with an HMAC-SHA256 (RFC 2104) by the secret, which itself is never sent. The seal
covers a number that only this connection has had, the side that speaks, and the content: so a
stranger can neither speak for a process nor for process 0, and a line that was overheard is of no
use a second time. The content is not encrypted.

>>> line = sealed("the secret", "7f", "member", {"process": 1})
>>> opened("the secret", "7f", "member", line)
{'process': 1}
>>> opened("another", "7f", "member", line)
Traceback (most recent call last):
    ...
shardlib.processes.wire.StrangerError: it does not know the secret of the job
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import ml_dtypes
import numpy as np

from shardlib.errors import ShardlibError
from shardlib.untrusted.data import JsonMapping, JsonObject, Limits, parse_json

#: Bytes of a line, at most.
LINE_BYTES = 1 << 16


class StrangerError(ShardlibError, ValueError):
    """A line that no process of the job has said."""


def number() -> str:
    """A number that nobody has said before."""
    return secrets.token_hex(16)


def sealed(secret: str, challenge: str, who: str, content: JsonMapping) -> bytes:
    """A line."""
    text = json.dumps(dict(content), sort_keys=True)
    return json.dumps({"said": text, "seal": _seal(secret, challenge, who, text)}).encode() + b"\n"


def opened(secret: str, challenge: str, who: str, line: bytes) -> JsonObject:
    """Returns the content of a line."""
    outer = _object(line, "the line", StrangerError, Limits(bytes=32 * LINE_BYTES, depth=4))
    content, seal = outer.get("said"), outer.get("seal")
    if (
        not isinstance(content, str)
        or not isinstance(seal, str)
        or not hmac.compare_digest(seal.encode(), _seal(secret, challenge, who, content).encode())
    ):
        raise StrangerError(
            "it does not know the secret of the job"
            if secret
            else "its line is not one of a roll call"
        )
    return _object(content, "the line", StrangerError, Limits(bytes=16 * LINE_BYTES, depth=8))


def _object(text: str | bytes, what: str, error: type[ShardlibError], limits: Limits) -> JsonObject:
    data = parse_json(text, what, error, limits=limits)
    if not isinstance(data, dict):
        raise error(f"{what} is not a JSON object")
    return cast("JsonObject", data)


def _seal(secret: str, challenge: str, who: str, text: str) -> str:
    return hmac.new(
        secret.encode(), f"{challenge} {who} {text}".encode(), hashlib.sha256
    ).hexdigest()


# --------------------------------------------------------------------------------------------------
# The body of a frame, array by array, in the order in which they were given.
#
#     8 bytes: length of the layout | layout: JSON of names, dtypes, shapes, offsets | the arrays
#
# That is safetensors, whose own writer sorts arrays by dtype and name; here what stands in front
# can be used while the rest is on its way, and what is not made yet is asked for when its turn
# comes.

_LENGTH = struct.Struct("<Q")
#: Bytes of a layout, at most.
LAYOUT_BYTES = 1 << 24
#: Names of dtypes in a layout.
_NAMES = {
    "BOOL": np.dtype("?"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
}


FLOAT32 = np.dtype("<f4")
_WORDS = {dtype: name for name, dtype in _NAMES.items()}


class FrameError(ShardlibError, ValueError):
    """Bytes that are not a frame, or one that is larger than it may be."""


@dataclass(frozen=True, kw_only=True)
class Later:
    """An array of one dim that is made when it is sent.

    Attributes:
        size: number of elements.
        make: gives it; may wait, and may be called again.
        dtype: of the elements.
    """

    size: int
    make: Callable[[], np.ndarray]
    dtype: np.dtype[np.generic] = FLOAT32

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return (self.size,)

    def made(self) -> np.ndarray:
        """The array."""
        array = self.make()
        assert array.shape == self.shape and array.dtype == self.dtype, (array.shape, array.dtype)
        return array


#: Arrays as they are sent, by name, those that go first in front.
Outgoing = Mapping[str, "np.ndarray | Later"]


def made(arrays: Outgoing) -> dict[str, np.ndarray]:
    """All arrays."""
    return {name: _made(array) for name, array in arrays.items()}


def _made(array: np.ndarray | Later) -> np.ndarray:
    return array.made() if isinstance(array, Later) else array


def body_of(arrays: Outgoing) -> tuple[int, Iterator[memoryview]]:
    """Bytes of a body, and what it consists of."""
    if not arrays:
        return 0, iter(())
    layout, offset = dict[str, object](), 0
    for name, array in arrays.items():
        stop = offset + math.prod(array.shape) * array.dtype.itemsize
        layout[name] = {
            "dtype": _WORDS[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(layout).encode()
    text += b" " * (-len(text) % 8)
    head = _LENGTH.pack(len(text)) + text
    return len(head) + offset, _chunks(head, arrays)


def _chunks(head: bytes, arrays: Outgoing) -> Iterator[memoryview]:
    yield memoryview(head)
    for array in arrays.values():
        flat = np.ascontiguousarray(_made(array)).reshape(-1)
        if flat.size:
            yield flat.view(np.uint8).data


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An array of a layout."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def arrays_of(body: int, read: Callable[[int], bytes]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a body, each as soon as it is there."""
    if not body:
        return
    if body < _LENGTH.size:
        raise FrameError(f"it has {body} bytes")
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > min(LAYOUT_BYTES, body - _LENGTH.size):
        raise FrameError(f"its layout has {length:,} bytes, of {body:,}")
    for entry in _entries(read(length), body - _LENGTH.size - length):
        data = read(entry.nbytes) if entry.nbytes else b""
        yield entry.name, np.frombuffer(data, entry.dtype).reshape(entry.shape)


def _entries(text: bytes, left: int) -> list[Entry]:
    """The arrays of a layout in their order; together they have all bytes that are left."""
    limits = Limits(bytes=LAYOUT_BYTES, depth=8)
    entries, offset = list[Entry](), 0
    data = _object(text.rstrip(b" "), "the layout", FrameError, limits)
    placed = sorted(
        (_entry(name, description) for name, description in data.items()), key=lambda span: span[:2]
    )
    for start, stop, entry in placed:
        if start != offset or stop != start + entry.nbytes:
            raise FrameError(f"its layout has {entry.nbytes} bytes from {start} to {stop}")
        entries.append(entry)
        offset = stop
    if offset != left:
        raise FrameError(f"its layout has {offset:,} bytes, and there are {left:,}")
    return entries


def _entry(name: str, description: object) -> tuple[int, int, Entry]:
    match description:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            sizes = [n for n in shape if type(n) is int and n >= 0]
            if dtype in _NAMES and len(sizes) == len(shape) <= 32 and 0 <= start <= stop:
                return start, stop, Entry(name=name, dtype=_NAMES[dtype], shape=tuple(sizes))
    raise FrameError("its layout has an entry that does not describe an array")


# --------------------------------------------------------------------------------------------------
# A frame: a mark, two lengths, a header in JSON, and a body of safetensors.
#
#     b"SLF1" | header bytes, 4 | body bytes, 8 | header | body (integers little-endian)
#
# Lengths are held against limits before anything is read for them, the header is read within the
# limits of `shardlib.untrusted`, and safetensors has arrays and nothing that could be run.

MARK = b"SLF1"
_LENGTHS = struct.Struct("<4sIQ")
#: Bytes of a header, at most.
HEADER_BYTES = 1 << 20
#: Bytes of what stands around arrays in a body: their names, shapes and dtypes.
AROUND_BYTES = 1 << 24
#: Bytes that are read at once of a socket with a timeout.
CHUNK = 1 << 20


class ClosedError(ShardlibError, ConnectionError):
    """The other end has closed the connection, between two frames or within one."""


class Taken(Protocol):
    """A receiver of one frame while it comes."""

    def begin(self, header: JsonMapping) -> None:
        """Its header is there."""
        ...

    def take(self, name: str, array: np.ndarray) -> None:
        """One of its arrays is there."""
        ...


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A message."""

    header: JsonMapping
    arrays: Mapping[str, np.ndarray]


class Stream(Protocol):
    """A connection that frames are read from and sent to; as `socket.socket`."""

    def recv(self, count: int, flags: int = 0, /) -> bytes: ...

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def gettimeout(self) -> float | None: ...


def send(stream: Stream, header: JsonMapping, arrays: Outgoing) -> None:
    """Sends a frame, its arrays in the order in which they are given."""
    text = json.dumps(dict(header)).encode()
    size, chunks = body_of(arrays)
    stream.sendall(_LENGTHS.pack(MARK, len(text), size) + text)
    for chunk in chunks:
        stream.sendall(chunk)


def receive(
    stream: Stream, *, limit: int, header: int = HEADER_BYTES, taken: Taken | None = None
) -> Frame:
    """Reads one frame.

    Args:
        limit: bytes that its arrays may have; 0 for none.
        header: bytes that its header may have.
        taken: takes each array as soon as it is there; the frame has none then.
    """
    fields, body = _frames_header(stream, limit, header)
    arrays = arrays_of(body, lambda count: _exactly(stream, count))
    if taken is None:
        return Frame(header=fields, arrays=dict(arrays))
    taken.begin(fields)
    for name, array in arrays:
        taken.take(name, array)
    return Frame(header=fields, arrays={})


def _frames_header(stream: Stream, limit: int, longest: int) -> tuple[JsonObject, int]:
    """The header of a frame, and the bytes of its body, which come next."""
    mark, header, body = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    if mark != MARK:
        raise FrameError("it does not begin as a frame does")
    if header > longest or body > (limit + AROUND_BYTES if limit else 0):
        raise FrameError(
            f"its header has {header:,} bytes and its body {body:,}; the most are"
            f" {longest:,} and {limit:,}"
        )
    limits = Limits(bytes=HEADER_BYTES, depth=8)
    return _object(_exactly(stream, header), "the header", FrameError, limits), body


def pack(arrays: Outgoing) -> bytes:
    """Arrays as bytes that `unpack` reads."""
    return b"".join(body_of(arrays)[1])


def unpack(body: bytes) -> dict[str, np.ndarray]:
    """The arrays of a body."""
    return dict(arrays_of(len(body), io.BytesIO(body).read))


def _exactly(stream: Stream, count: int) -> bytes:
    """Exactly this many bytes; of a socket without a timeout in one piece, with no copy."""
    blocking, chunks, left = stream.gettimeout() is None, list[bytes](), count
    while left:
        chunk = stream.recv(left, socket.MSG_WAITALL) if blocking else stream.recv(min(left, CHUNK))
        if not chunk:
            raise ClosedError("the other end has closed the connection")
        chunks.append(chunk)
        left -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


# --------------------------------------------------------------------------------------------------
# The greeting: both ends of a new connection show that they know the secret of the run.
#
# The server says a number, the worker seals who it is with that number and says one of its own,
# with which the server seals its answer. The secret itself is never sent. What follows is neither
# sealed nor encrypted: it is for one machine, or a network that is trusted.

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
    """The server's side."""
    hurried, challenge = _Hurried(stream, seconds), number()
    send(hurried, {"number": challenge}, {})
    reply = opened(secret, challenge, "worker", _line(_secret_header(hurried)))
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
    theirs, challenge = _secret_header(hurried).get("number"), number()
    if not isinstance(theirs, str):
        raise StrangerError("it is not a server of parameters that listens there")
    line = sealed(secret, theirs, "worker", {"worker": worker, "number": challenge})
    send(hurried, {"line": line.decode()}, {})
    reply = opened(secret, challenge, "server", _line(_secret_header(hurried)))
    if reply.get("server") != server:
        raise StrangerError(f"it is another server than number {server}")


def _secret_header(stream: _Hurried) -> JsonMapping:
    return receive(stream, limit=0, header=GREETING_BYTES).header


def _line(header: JsonMapping) -> bytes:
    line = header.get("line")
    if not isinstance(line, str):
        raise FrameError("it has no line")
    return line.encode()


def keep_alive(stream: socket.socket) -> None:
    """Makes an end of a connection send at once, and notice where the other is gone without a word,
    or where something in between forgets a connection that is silent.
    """
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --------------------------------------------------------------------------------------------------
# Strangers at a listening socket: greeted beside each other, before anything else is done.
#
# A stranger has one deadline for the whole greeting, however slowly it speaks, and no place among
# those who know the secret. Where too many have not said who they are, the first of the address
# that has the most of them goes. Refused ones are noted ever more rarely.

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
