"""A frame: a mark, two lengths, a header in JSON, and a body of safetensors.

    b"SLF1" | header bytes, 4 | body bytes, 8 | header | body          (integers little-endian)

Lengths are held against limits before anything is read for them, the header is read within the
limits of `shardlib.untrusted`, and safetensors has arrays and nothing that could be run.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from shardlib.errors import ShardlibError
from shardlib.servers.wire.bodies import BodyError, Outgoing, arrays_of, body_of, made
from shardlib.untrusted import Limits, parse_json
from shardlib.untrusted.json_types import JsonMapping, JsonObject

MARK = b"SLF1"
_LENGTHS = struct.Struct("<4sIQ")
#: Bytes of a header, at most.
HEADER_BYTES = 1 << 20
#: Bytes of what stands around arrays in a body: their names, shapes and dtypes.
AROUND_BYTES = 1 << 24
#: Bytes that are read at once of a socket with a timeout.
CHUNK = 1 << 20


class FrameError(ShardlibError, ValueError):
    """Bytes that are no frame, or one that is larger than it may be."""


class ClosedError(ShardlibError, ConnectionError):
    """The other end has closed the connection, between two frames or within one."""


class Taken(Protocol):
    """What takes a frame while it comes."""

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
    """What frames are read from and sent to; as `socket.socket`."""

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
    fields, body = _header(stream, limit, header)
    return Frame(header=fields, arrays=unpack(_exactly(stream, body)))


def receive_in_order(stream: Stream, *, limit: int, taken: Taken) -> Frame:
    """Reads one frame, and gives each of its arrays away as soon as it is there.

    Args:
        limit: bytes that its arrays may have; 0 for none.
    """
    header, body = _header(stream, limit)
    taken.begin(header)
    try:
        for name, array in arrays_of(body, lambda count: _exactly(stream, count)):
            taken.take(name, array)
    except BodyError as error:
        raise FrameError(str(error)) from error
    return Frame(header=header, arrays={})


def _header(stream: Stream, limit: int, longest: int = HEADER_BYTES) -> tuple[JsonObject, int]:
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
