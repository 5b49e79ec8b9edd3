"""Elements of parameters in the order in which a forward pass needs them, in buckets.

A bucket is a run of all elements in that order, of so many, wherever it begins and ends; a
large parameter is in several buckets, small ones are together in one.

>>> parts = [Part(path="w", start=0, stop=6), Part(path="b", start=0, stop=3)]
>>> for bucket in in_buckets(parts, elements=4):
...     print([str(part) for part in bucket])
['w[0:4]']
['w[4:6]', 'b[0:2]']
['b[2:3]']
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from shardlib.exchanges.parts import Part
from shardlib.planning.transfers.first_use import FirstUse, Place

#: Elements that cross together.
Bucket = tuple[Part, ...]


def in_order(uses: Iterable[FirstUse], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Part, ...]:
    """All elements of parameters, those that are used first in front; what a loop takes row by row
    stands row by row.
    """
    placed: list[tuple[Place, Part]] = []
    for use in uses:
        if use.path not in shapes:
            continue
        size, rows = math.prod(shapes[use.path]), use.rows or 1
        placed += [
            (
                use.of_row(row) if use.rows else use.place,
                Part(path=use.path, start=size // rows * row, stop=size // rows * (row + 1)),
            )
            for row in range(rows)
        ]
    return tuple(part for _, part in sorted(placed, key=lambda pair: pair[0]))


def in_buckets(parts: Iterable[Part], *, elements: int) -> tuple[Bucket, ...]:
    """Parts as buckets, in their order; the last may have less."""
    assert elements > 0, elements
    full, filling, left = list[Bucket](), list[Part](), elements
    for part in parts:
        start = part.start
        while start < part.stop:
            stop = min(part.stop, start + left)
            filling.append(Part(path=part.path, start=start, stop=stop))
            left, start = left - (stop - start), stop
            if not left:
                full.append(tuple(filling))
                filling, left = [], elements
    return tuple([*full, tuple(filling)] if filling else full)
