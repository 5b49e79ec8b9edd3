"""The wire between workers and servers: frames of a JSON header and arrays, over TCP, and the
messages in them.

`owned` says which server owns which elements of the parameters.

Parameters stand one after the other, by path, each flattened; every server owns an equal run of all
elements. What servers do is done element by element, so that a run may begin and end anywhere.

>>> for parts in owned({"a": 6, "b": 4}, 2):
...     print([str(part) for part in parts])
['a[0:5]']
['a[5:6]', 'b[0:4]']

An order says in which buckets elements cross between a worker and a server.

A worker knows it (`shardlib.planner.transfers`), and says it with what it asks for; a server needs
no model. Each bucket is one array, named by its number; what a bucket has of a parameter is said by
elements of what the server owns of it.

>>> order = ((Part(path="b", start=0, stop=2), Part(path="w", start=0, stop=1)),)
>>> order_text(order), read_order(order_text(order)) == order
('[[["b", 0, 2], ["w", 0, 1]]]', True)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from shardlib.errors import LaunchError, ShardlibError
from shardlib.exchanges import Part
from shardlib.launch.wire import StrangerError, number, opened, sealed
from shardlib.planner.transfers import Bucket
from shardlib.untrusted.data import Json, JsonMapping, JsonObject, Limits, construct, parse_json

# --------------------------------------------------------------------------------------------------
# The body of a frame, array by array, in the order in which they were given.
#
#     8 bytes: length of the layout | layout: JSON of names, dtypes, shapes, offsets | the arrays
#
# That is safetensors (whose own writer sorts arrays by dtype and name), so that either end may
# read it as a whole; but what stands in front can be used while the rest is on its way, and what
# is not made yet is asked for when its turn comes.

_LENGTH = struct.Struct("<Q")
#: Bytes of a layout, at most.
LAYOUT_BYTES = 1 << 24
#: Names of dtypes in a layout.
_NAMES = {
    "BOOL": np.dtype("?"),
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
}
FLOAT32 = np.dtype("<f4")
_WORDS = {dtype: name for name, dtype in _NAMES.items()}


class BodyError(ShardlibError, ValueError):
    """Bytes that are not a body."""


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
    """Bytes of a body, and what it consists of.

    Args:
        arrays: of the dtypes that a layout has names for.
    """
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
    """An array of a layout.

    Attributes:
        name: of the array.
        dtype: of its elements.
        shape: elements per dim.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def arrays_of(body: int, read: Callable[[int], bytes]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a body, each as soon as it is there.

    Args:
        body: its bytes.
    """
    if not body:
        return
    if body < _LENGTH.size:
        raise BodyError(f"it has {body} bytes")
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > min(LAYOUT_BYTES, body - _LENGTH.size):
        raise BodyError(f"its layout has {length:,} bytes, of {body:,}")
    for entry in _entries(read(length), body - _LENGTH.size - length):
        data = read(entry.nbytes) if entry.nbytes else b""
        yield entry.name, np.frombuffer(data, entry.dtype).reshape(entry.shape)


def _entries(text: bytes, left: int) -> list[Entry]:
    """The arrays of a layout in their order; together they have all bytes that are left."""
    limits = Limits(bytes=LAYOUT_BYTES, depth=8)
    entries, offset = list[Entry](), 0
    data = parse_json(text.rstrip(b" "), "the layout", BodyError, limits=limits)
    if not isinstance(data, dict):
        raise BodyError("its layout is no object")
    placed = sorted(
        (_entry(name, description) for name, description in data.items()), key=lambda span: span[:2]
    )
    for start, stop, entry in placed:
        if start != offset or stop != start + entry.nbytes:
            raise BodyError(f"its layout has {entry.nbytes} bytes from {start} to {stop}")
        entries.append(entry)
        offset = stop
    if offset != left:
        raise BodyError(f"its layout has {offset:,} bytes, and there are {left:,}")
    return entries


def _entry(name: str, description: object) -> tuple[int, int, Entry]:
    match description:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            sizes = [n for n in shape if type(n) is int and n >= 0]
            if dtype in _NAMES and len(sizes) == len(shape) <= 32 and 0 <= start <= stop:
                return start, stop, Entry(name=name, dtype=_NAMES[dtype], shape=tuple(sizes))
    raise BodyError("its layout has an entry that is none")


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


class FrameError(ShardlibError, ValueError):
    """Bytes that are not a frame, or one that is larger than it may be."""


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
    """A message.

    Attributes:
        header: plain data.
        arrays: by name.
    """

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


def receive(stream: Stream, *, limit: int, header: int = HEADER_BYTES) -> Frame:
    """Reads one frame.

    Args:
        limit: bytes that its arrays may have; 0 for none.
        header: bytes that its header may have.
    """
    fields, body = _frames_header(stream, limit, header)
    return Frame(header=fields, arrays=unpack(_exactly(stream, body)))


def receive_in_order(stream: Stream, *, limit: int, taken: Taken) -> Frame:
    """Reads one frame, and gives each of its arrays away as soon as it is there.

    Args:
        limit: bytes that its arrays may have; 0 for none.
    """
    header, body = _frames_header(stream, limit)
    taken.begin(header)
    try:
        for name, array in arrays_of(body, lambda count: _exactly(stream, count)):
            taken.take(name, array)
    except BodyError as error:
        raise FrameError(str(error)) from error
    return Frame(header=header, arrays={})


def _frames_header(
    stream: Stream, limit: int, longest: int = HEADER_BYTES
) -> tuple[JsonObject, int]:
    """The header of a frame, and the bytes of its body, which come next."""
    mark, header, body = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    if mark != MARK:
        raise FrameError("it does not begin as a frame does")
    if header > longest or body > (limit + AROUND_BYTES if limit else 0):
        raise FrameError(
            f"its header has {header:,} bytes and its body {body:,}; the most are"
            f" {longest:,} and {limit:,}"
        )
    return _object(_exactly(stream, header)), body


def pack(arrays: Outgoing) -> bytes:
    """Arrays as bytes that `unpack` reads."""
    if not arrays:
        return b""
    return save({name: np.asarray(array, order="C") for name, array in made(arrays).items()})


def unpack(body: bytes) -> dict[str, np.ndarray]:
    """The arrays of a body."""
    try:
        return load(body) if body else {}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise FrameError(f"its body is no safetensors: {error}") from error


def _object(text: bytes) -> JsonObject:
    header = parse_json(text, "the header", FrameError, limits=Limits(bytes=HEADER_BYTES, depth=8))
    if not isinstance(header, dict):
        raise FrameError("its header is no object")
    return header


def _exactly(stream: Stream, count: int) -> bytes:
    """So many bytes; of a socket without a timeout in one piece, with no copy."""
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
# with which the server seals its answer (`shardlib.launch.meeting`). The secret itself is never
# sent. What follows is neither sealed nor encrypted: it is for one machine, or a network that is
# trusted.

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
        raise StrangerError("it is no server of parameters that listens there")
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


#: Elements of parameters, flat, by path: those that a server owns.
Flat = dict[str, np.ndarray]


def owned(sizes: Mapping[str, int], servers: int) -> tuple[tuple[Part, ...], ...]:
    """The parts that each server owns."""
    total = sum(sizes.values())
    limits = [total * server // servers for server in range(servers + 1)]
    return tuple(tuple(_between(sizes, first, last)) for first, last in itertools.pairwise(limits))


def _between(sizes: Mapping[str, int], first: int, last: int) -> Iterator[Part]:
    """Parts of the elements from `first` to before `last`."""
    before = 0
    for path in sorted(sizes):
        start, stop = max(first - before, 0), min(last - before, sizes[path])
        if start < stop:
            yield Part(path=path, start=start, stop=stop)
        before += sizes[path]


def divided(arrays: Mapping[str, np.ndarray], servers: int) -> list[Flat]:
    """The elements of arrays, for each server those that it owns, as float32."""
    flat = {path: np.asarray(array, np.float32).reshape(-1) for path, array in arrays.items()}
    return [
        {part.path: flat[part.path][part.start : part.stop] for part in parts}
        for parts in owned({path: array.size for path, array in flat.items()}, servers)
    ]


def joined(
    parts: Sequence[Mapping[str, np.ndarray]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Whole arrays, of the elements of all servers."""
    return {
        path: np.concatenate(
            [np.zeros(0, np.float32), *(arrays[path] for arrays in parts if path in arrays)]
        ).reshape(shape)
        for path, shape in shapes.items()
    }


# --------------------------------------------------------------------------------------------------
# Messages: every question of a worker to a server has one answer.
#
# | asked    | of the worker                          | answered                                   |
# |----------|----------------------------------------|--------------------------------------------|
# | `offer`  | parameters that it begins with         | whether parameters are there               |
# | `enter`  | that it is about to do a step          | `ok`, or `wait` and why                    |
# | `fetch`  |                                        | parameters and clock                       |
# | `push`   | a gradient, its serial, the clock seen | clock and staleness                        |
# | `skip`   | that a gradient was not finite         |                                            |
# | `leave`  | that it is done                        |                                            |
# | `report` |                                        | clock, histogram of staleness, events      |
# | `save`   |                                        | once the checkpoint is on disk             |
#
# The last two are asked by who has started the servers. An answer `refused` has changed nothing.
# What islands and the outer server say to each other has the same form; its table is in
# `shardlib.islands.servers.rounds`.

#: Number of who is not a worker, but has started all of them.
STARTER = -1


class MessageError(ShardlibError, ValueError):
    """A header that is not a message."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question.

    Attributes:
        kind: which, see above.
        worker: who asks.
        start: a word that each start of a worker has of its own.
        serial: of a push, from 1 on.
        seen: the clock at the fetch that a gradient belongs to.
        step: of the worker's own count.
        round: that an outer gradient belongs to.
        weight: of an outer gradient in the mean.
        about: what an island says of itself; of a fetch or a push, the order of elements
            (`shardlib.islands.servers.wire`).
        base: checksum of the outer parameters that an outer gradient belongs to.
    """

    kind: str
    worker: int
    start: str = ""
    serial: int = 0
    seen: int = 0
    step: int = 0
    round: int = 0
    weight: float = 0.0
    about: str = ""
    base: int = 0

    def to_json(self) -> JsonObject:
        """The question as plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer.

    Attributes:
        kind: "ok", "wait" or "refused".
        why: it waits, or is refused.
        clock: updates of the server.
        staleness: of the gradient that was pushed.
        report: what the server has to tell.
        round: that is open.
        islands: in the mean.
        start: a word that islands name with what they send.
    """

    kind: str = "ok"
    why: str = ""
    clock: int = 0
    staleness: int = 0
    report: Json = None
    round: int = 0
    islands: tuple[int, ...] = ()
    start: str = ""

    def to_json(self) -> JsonObject:
        """The answer as plain data."""
        return asdict(self)


def read_ask(header: JsonMapping) -> Ask:
    """The question of a header."""
    return construct(Ask, header, "the message", MessageError, least=STARTER)


def read_answer(header: JsonMapping) -> Answer:
    """The answer of a header."""
    return construct(Answer, header, "the answer", MessageError)


class Arrivals(Protocol):
    """A receiver of an answer while it comes; where a connection breaks, it begins again."""

    def begin(self, answer: Answer) -> None:
        """The answer is there, its arrays are not."""
        ...

    def take(self, name: str, array: np.ndarray) -> None:
        """The next of its arrays is there."""
        ...


class Link(Protocol):
    """A way to one server, whatever carries it."""

    def ask(
        self, ask: Ask, arrays: Outgoing | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        """Asks, and waits for the answer."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


def handed(answer: Answer, arrays: Outgoing, arrivals: Arrivals | None) -> tuple[Answer, Flat]:
    """Returns the value of `Link.ask` for an answer that has come as a whole."""
    arrays_made = made(arrays)
    if arrivals is None:
        return answer, arrays_made
    arrivals.begin(answer)
    for name, array in arrays_made.items():
        arrivals.take(name, array)
    return answer, Flat()


# --------------------------------------------------------------------------------------------------
# A connection to one server, made again where it breaks, so that a server may be started again.

#: Seconds between two tries.
AGAIN_SECONDS = 0.1
#: Bytes of parameters that a server may send.
MOST_BYTES = 1 << 40


def address_file(folder: Path, server: int) -> Path:
    """Returns the file in which a server writes the address where it listens."""
    return folder / f"server-{server}.address"


def listed(folder: Path, server: int) -> Callable[[], tuple[str, int]]:
    """Returns a function that reads the address of a server from a folder."""

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


#: Buckets, those that cross first in front.
Order = tuple[Bucket, ...]
#: Array at the end of a push that says whether all of it is finite: whoever sends it does not know
#: before.
WHOLE = "whole"
#: Bytes of an order, at most.
ORDER_BYTES = 1 << 20


class OrderError(ShardlibError, ValueError):
    """An order that is not one of the elements that there are, or arrays that do not follow it."""


def order_text(order: Order) -> str:
    """An order as it is sent."""
    return json.dumps([[[part.path, part.start, part.stop] for part in bucket] for bucket in order])


def read_order(text: str) -> Order:
    """The order of a text."""
    limits = Limits(bytes=ORDER_BYTES, depth=4)
    data = parse_json(text, "the order", OrderError, limits=limits)
    if not isinstance(data, list):
        raise OrderError("the order is no list")
    return tuple(_bucket(bucket) for bucket in data)


def _bucket(data: object) -> Bucket:
    match data:
        case [*parts] if parts:
            return tuple(map(_part, parts))
    raise OrderError("the order has a bucket that is none")


def _part(data: object) -> Part:
    match data:
        case [str(path), int(start), int(stop)] if 0 <= start < stop and not _flags(start, stop):
            return Part(path=path, start=start, stop=stop)
    raise OrderError("the order has a part that is none")


def _flags(*values: object) -> bool:
    """Returns whether one of them is a truth value, which Python counts among integers."""
    return any(isinstance(value, bool) for value in values)


def gathered(values: Mapping[str, np.ndarray], order: Order) -> dict[str, Later]:
    """The buckets of an order, made when they are sent.

    Args:
        values: flat elements by path, of one dtype, which nobody writes to.
    """
    require_each_once(order, {path: value.size for path, value in values.items()})

    def run(part: Part) -> np.ndarray:
        return values[part.path][part.start : part.stop]

    dtype = next((value.dtype for value in values.values()), FLOAT32)
    return in_order(order, run, dtype)


def asked_for(values: Flat, text: str) -> Outgoing:
    """Values in the order of a text; as they are where there is none, of either."""
    return gathered(values, read_order(text)) if values and text else values


def in_order(
    order: Order, run: Callable[[Part], np.ndarray], dtype: np.dtype[np.generic] = FLOAT32
) -> dict[str, Later]:
    """The buckets of an order, made when they are sent.

    Args:
        dtype: of all elements.
    """

    def bucket(parts: Bucket) -> np.ndarray:
        runs = [run(part) for part in parts]
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    return {
        str(number): Later(
            size=elements(parts), make=lambda parts=parts: bucket(parts), dtype=dtype
        )
        for number, parts in enumerate(order)
    }


def scattered(arrays: Mapping[str, np.ndarray], order: Order) -> Flat:
    """Returns the contents of buckets, by path."""
    if arrays.keys() != {str(position) for position in range(len(order))}:
        raise OrderError(f"there are {len(arrays)} buckets of {len(order)}")
    sizes = dict[str, int]()
    for part in (part for bucket in order for part in bucket):
        sizes[part.path] = max(sizes.get(part.path, 0), part.stop)
    require_each_once(order, sizes, limit=sum(array.size for array in arrays.values()))
    vectors = {path: np.empty(size, np.float32) for path, size in sizes.items()}
    for position, bucket in enumerate(order):
        array, offset = arrays[str(position)], 0
        if array.dtype != np.float32 or array.shape != (elements(bucket),):
            raise OrderError(f"bucket {position} is {array.dtype}{list(array.shape)}")
        for part in bucket:
            vectors[part.path][part.start : part.stop] = array[
                offset : offset + part.stop - part.start
            ]
            offset += part.stop - part.start
    return vectors


def elements(bucket: Bucket) -> int:
    """Elements of a bucket."""
    return sum(part.stop - part.start for part in bucket)


def require_each_once(order: Order, sizes: Mapping[str, int], *, limit: int | None = None) -> None:
    """Refuses an order that does not have each element once.

    Args:
        limit: elements that there may be; None for those of `sizes`.
    """
    reached, parts = dict.fromkeys(sizes, 0), [part for bucket in order for part in bucket]
    if limit is not None and sum(sizes.values()) > limit:
        raise OrderError("the order has more elements than have come")
    for part in sorted(parts, key=lambda part_: (part_.path, part_.start)):
        if reached.get(part.path) != part.start:
            raise OrderError("the order does not have each element once")
        reached[part.path] = part.stop
    if reached != dict(sizes):
        raise OrderError("the order does not have each element of this server")
