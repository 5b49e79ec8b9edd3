"""Which server owns which elements of the parameters?

Parameters stand one after the other, by path, each flattened; every server owns an equal run of all
elements. What servers do is done element by element, so that a run may begin and end anywhere.

>>> for parts in owned({"a": 6, "b": 4}, 2):
...     print([str(part) for part in parts])
['a[0:5]']
['a[5:6]', 'b[0:4]']
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardlib.exchanges.parts import Part

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
