"""The order in which elements cross between a worker and a server, in buckets.

A worker knows it (`shardlib.planning.transfers`), and says it with what it asks for; a server needs
no model. Each bucket is one array, named by its number; what a bucket has of a parameter is said by
elements of what the server owns of it.

>>> order = ((Part(path="b", start=0, stop=2), Part(path="w", start=0, stop=1)),)
>>> order_text(order), read_order(order_text(order)) == order
('[[["b", 0, 2], ["w", 0, 1]]]', True)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np

from shardlib.errors import ShardlibError
from shardlib.exchanges.parts import Part
from shardlib.planning.transfers.buckets import Bucket
from shardlib.servers.ownership import Flat
from shardlib.servers.wire.bodies import FLOAT32, Later, Outgoing
from shardlib.untrusted import Limits, parse_json

#: Buckets, those that cross first in front.
Order = tuple[Bucket, ...]
#: Array at the end of a push that says whether all of it is finite: whoever sends it does not know
#: before.
WHOLE = "whole"
#: Bytes of an order, at most.
ORDER_BYTES = 1 << 20


class OrderError(ShardlibError, ValueError):
    """What is no order of the elements that there are, or arrays that do not follow it."""


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
    """Whether one of them is a truth value, which Python counts among integers."""
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
    """What has come in buckets, by path."""
    if arrays.keys() != {str(number) for number in range(len(order))}:
        raise OrderError(f"there are {len(arrays)} buckets of {len(order)}")
    sizes = dict[str, int]()
    for part in (part for bucket in order for part in bucket):
        sizes[part.path] = max(sizes.get(part.path, 0), part.stop)
    require_each_once(order, sizes, limit=sum(array.size for array in arrays.values()))
    vectors = {path: np.empty(size, np.float32) for path, size in sizes.items()}
    for number, bucket in enumerate(order):
        array, offset = arrays[str(number)], 0
        if array.dtype != np.float32 or array.shape != (elements(bucket),):
            raise OrderError(f"bucket {number} is {array.dtype}{list(array.shape)}")
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
