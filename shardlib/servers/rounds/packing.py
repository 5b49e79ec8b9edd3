"""A vector as it crosses: float32, bfloat16, or int8 and int4 in blocks that have a scale each.

Rounding is that of meetings in one process (`shardlib.lowering.islands.meeting.wires`), by arrays
of NumPy: blocks are those of one parameter, half of the smallest step rounds to even.

>>> import numpy as np
>>> sent = pack(np.float32([1.0, -0.5, 0.26]), [2, 1], "int8")
>>> {name: array.size for name, array in sent.items()}  # blocks of 256
{'numbers': 512, 'scales': 2}
>>> [round(float(one), 4) for one in unpack(sent, [2, 1], "int8")]
[1.0, -0.5039, 0.26]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from shardlib.errors import ShardlibError
from shardlib.exchanges.wires import BLOCK, blocks, spaces, wire_bytes
from shardlib.servers.ownership import Flat

#: The largest number of so many bits, the same with either sign.
LARGEST = {"int8": 127, "int4": 7}


class PackingError(ShardlibError, ValueError):
    """Arrays that are no vector of this form."""


def packed_bytes(sizes: Sequence[int], wire: str) -> int:
    """Bytes of a vector as it crosses.

    Args:
        wire: dtype that crosses.
    """
    return wire_bytes(wire, sum(spaces(wire, sizes)))


def pack(vector: np.ndarray, sizes: Sequence[int], wire: str) -> Flat:
    """A vector as arrays that cross.

    Args:
        wire: dtype that crosses.
    """
    if wire == "float32":
        return {"numbers": vector}
    if wire == "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return {"numbers": vector.astype(ml_dtypes.bfloat16).view(np.uint16)}
    grouped = _padded(vector, sizes).reshape(-1, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.max(np.abs(grouped), axis=1, keepdims=True) / np.float32(LARGEST[wire])
        rounded = np.round(grouped / np.where(scale > 0, scale, np.float32(1)))
        bits = rounded.astype(np.int8).view(np.uint8).reshape(-1)
    if wire == "int4":
        bits = (bits[::2] & np.uint8(15)) | (bits[1::2] << np.uint8(4))
    return {"numbers": bits, "scales": scale.reshape(-1)}


def unpack(arrays: Mapping[str, np.ndarray], sizes: Sequence[int], wire: str) -> np.ndarray:
    """The vector of what `pack` gave; float32.

    Args:
        wire: dtype that crosses.
    """
    _require_form(arrays, sizes, wire)
    numbers = arrays["numbers"]
    if wire == "float32":
        return numbers
    if wire == "bfloat16":
        return numbers.view(ml_dtypes.bfloat16).astype(np.float32)
    if wire == "int4":
        pairs = np.stack([numbers & np.uint8(15), numbers >> np.uint8(4)], axis=1).reshape(-1)
        integers = (pairs.astype(np.int8) ^ np.int8(8)) - np.int8(8)  # four bits with a sign
    else:
        integers = numbers.view(np.int8)
    with np.errstate(over="ignore", invalid="ignore"):
        grouped = integers.reshape(-1, BLOCK).astype(np.float32) * arrays["scales"][:, None]
    return _without_padding(grouped.reshape(-1), sizes)


def _require_form(arrays: Mapping[str, np.ndarray], sizes: Sequence[int], wire: str) -> None:
    count = sum(spaces(wire, sizes))
    expected = {"numbers": (_DTYPES[wire], count // 2 if wire == "int4" else count)}
    if blocks(wire):
        expected["scales"] = (np.dtype(np.float32), count // BLOCK)
    received = {
        name: (array.dtype, array.size) for name, array in arrays.items() if array.ndim == 1
    }
    if received != expected or len(arrays) != len(expected):
        described = ", ".join(
            f"{name} of {size} {dtype}" for name, (dtype, size) in expected.items()
        )
        raise PackingError(f"what came is no {wire} of this fragment, which has {described}")


_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.uint8),
    "int4": np.dtype(np.uint8),
}


def _padded(vector: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The parameters of a vector, each with zeros to whole blocks."""
    padded_sizes = spaces("int8", sizes)
    padded, start, place = np.zeros(sum(padded_sizes), np.float32), 0, 0
    for size, space in zip(sizes, padded_sizes, strict=True):
        padded[place : place + size] = vector[start : start + size]
        start, place = start + size, place + space
    return padded


def _without_padding(padded: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    vector, place = np.empty(sum(sizes), np.float32), 0
    start = 0
    for size, space in zip(sizes, spaces("int8", sizes), strict=True):
        vector[start : start + size] = padded[place : place + size]
        start, place = start + size, place + space
    return vector
