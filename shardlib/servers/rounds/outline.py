"""Parameters as one vector, and the fragments of it that meet together.

Parameters stand one after the other, by path, each flattened. A fragment is an equal run of all
elements, wherever it begins and ends: each is as large as the others to an element, so that the
peak of a link is as low as it can be, and it is the same whatever the plans of the islands are,
which may differ. What the server does is done element by element.

>>> outline = Outline(paths=("a", "b"), shapes=((2, 3), (4,)))
>>> [str(part) for part in outline.parts(0, 2)], outline.span(1, 2)
(['a[0:5]'], (5, 10))
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardlib.exchanges.parts import Part
from shardlib.servers.ownership import Flat, owned


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Paths and shapes of trained parameters.

    Attributes:
        paths: in their order.
        shapes: of each.
    """

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]]) -> Outline:
        """The outline of parameters."""
        paths = tuple(sorted(shapes))
        return Outline(paths=paths, shapes=tuple(shapes[path] for path in paths))

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each parameter, by path."""
        return {p: math.prod(shape) for p, shape in zip(self.paths, self.shapes, strict=True)}

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes.values())

    @property
    def digest(self) -> str:
        """A word that parameters of other paths or shapes do not have."""
        text = json.dumps([[p, list(s)] for p, s in zip(self.paths, self.shapes, strict=True)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def parts(self, fragment: int, fragments: int) -> tuple[Part, ...]:
        """What a fragment has of each parameter."""
        return owned(self.sizes, fragments)[fragment]

    def span(self, fragment: int, fragments: int) -> tuple[int, int]:
        """Where a fragment begins and ends in the vector."""
        total = self.total
        return total * fragment // fragments, total * (fragment + 1) // fragments

    def vector(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Arrays as one vector of float32."""
        flat = [np.asarray(arrays[path], np.float32).reshape(-1) for path in self.paths]
        return np.concatenate([np.zeros(0, np.float32), *flat])

    def arrays(self, vector: np.ndarray) -> Flat:
        """The arrays of a vector, with their shapes; views of it."""
        arrays, start = Flat(), 0
        for path, shape in zip(self.paths, self.shapes, strict=True):
            size = math.prod(shape)
            arrays[path] = vector[start : start + size].reshape(shape)
            start += size
        return arrays
