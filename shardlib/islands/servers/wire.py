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

A worker knows it (`shardlib.islands.transfers`), and says it with what it asks for; a server needs
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
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from shardlib.errors import LaunchError, ShardlibError
from shardlib.islands.exchanges import Part
from shardlib.islands.transfers import Bucket
from shardlib.processes.wire import (
    FLOAT32,
    GREETING_SECONDS,
    FrameError,
    Later,
    Outgoing,
    StrangerError,
    introduce,
    keep_alive,
    receive,
    send,
)
from shardlib.untrusted.data import Json, JsonMapping, JsonObject, Limits, construct, parse_json

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


class RefusedError(ShardlibError, ValueError):
    """A message that cannot be used; nothing has changed."""


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
                taken = None if arrivals is None else _Answers(arrivals=arrivals)
                frame = receive(stream, limit=MOST_BYTES, taken=taken)
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


#: Buckets, those that cross first in front.
Order = tuple[Bucket, ...]
#: Array at the end of a push that says whether all of it is finite: whoever sends it does not know
#: before.
WHOLE = "whole"
#: Bytes of an order, at most.
ORDER_BYTES = 1 << 20


class OrderError(RefusedError):
    """An order that is not one of the elements that there are, or arrays that do not follow it."""


def order_text(order: Order) -> str:
    """An order as it is sent."""
    return json.dumps([[[part.path, part.start, part.stop] for part in bucket] for bucket in order])


def read_order(text: str) -> Order:
    """The order of a text."""
    limits = Limits(bytes=ORDER_BYTES, depth=4)
    data = parse_json(text, "the order", OrderError, limits=limits)
    if not isinstance(data, list):
        raise OrderError("the order is not a list")
    return tuple(_bucket(bucket) for bucket in data)


def _bucket(data: object) -> Bucket:
    match data:
        case [*parts] if parts:
            return tuple(map(_part, parts))
    raise OrderError("the order has a bucket that is not a list of parts")


def _part(data: object) -> Part:
    match data:
        case [str(path), int(start), int(stop)] if 0 <= start < stop and not _flags(start, stop):
            return Part(path=path, start=start, stop=stop)
    raise OrderError("the order has a part that is not a path with two numbers")


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


def in_order(
    order: Order, run: Callable[[Part], np.ndarray], dtype: np.dtype[np.generic] = FLOAT32
) -> dict[str, Later]:
    """The buckets of an order, made when they are sent."""

    def bucket(parts: Bucket) -> np.ndarray:
        runs = [run(part) for part in parts]
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    return {
        str(number): Later(
            size=elements(parts), make=lambda parts=parts: bucket(parts), dtype=dtype
        )
        for number, parts in enumerate(order)
    }


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
