"""The body of a frame, array by array, in the order in which they were given.

    8 bytes: length of the layout | layout: JSON of names, dtypes, shapes, offsets | the arrays

That is safetensors (whose own writer sorts arrays by dtype and name), so that either end may read
it as a whole; but what stands in front can be used while the rest is on its way, and what is not
made yet is asked for when its turn comes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shardlib.errors import ShardlibError
from shardlib.untrusted import Limits, parse_json

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
    """Bytes that are no body."""


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
