"""What is outer: parameters that all islands start a round from, and the momentum of their update.

Islands and the server each have a copy, and do the same sums in the same order.

>>> import numpy as np
>>> from shardlib.exchanges.diloco import DiLoCo
>>> outer = Outer.first(np.float32([1.0, 1.0]))
>>> outer.update(0, 2, np.float32([0.5, 0.5]), DiLoCo(rate=1.0, momentum=0.5, every=1))
>>> outer.theta.tolist(), outer.momentum.tolist()
([0.25, 0.25], [0.5, 0.5])
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardlib.exchanges.diloco import DiLoCo


@dataclass(kw_only=True)
class Outer:
    """Outer parameters.

    Attributes:
        theta: the parameters, one vector.
        momentum: of their update.
    """

    theta: np.ndarray
    momentum: np.ndarray

    @staticmethod
    def first(theta: np.ndarray) -> Outer:
        """Parameters before the first round."""
        return Outer(theta=np.array(theta), momentum=np.zeros_like(theta))

    def after(
        self, start: int, stop: int, gradient: np.ndarray, exchange: DiLoCo
    ) -> tuple[np.ndarray, np.ndarray]:
        """A run of parameters and momentum after an outer gradient; new arrays."""
        decay, rate = np.float32(exchange.momentum), np.float32(exchange.rate)
        with np.errstate(over="ignore", invalid="ignore"):
            momentum = gradient + decay * self.momentum[start:stop]
            return self.theta[start:stop] - rate * (gradient + decay * momentum), momentum

    def update(self, start: int, stop: int, gradient: np.ndarray, exchange: DiLoCo) -> None:
        """Does the outer update of a run; arguments as those of `after`."""
        theta, momentum = self.after(start, stop, gradient, exchange)
        self.theta[start:stop], self.momentum[start:stop] = theta, momentum


def checksum(theta: np.ndarray, start: int, stop: int) -> int:
    """A number that a run of other parameters does not have: both ends compare theirs, so that no
    mean is taken of gradients that belong to others.
    """
    return zlib.crc32(theta[start:stop].view(np.uint8).data)


def mean(vectors: Mapping[int, tuple[float, np.ndarray]]) -> np.ndarray:
    """The weighted mean of outer gradients, whoever came first."""
    total = sum(weight for weight, _ in vectors.values())
    total_vector: np.ndarray | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for island in sorted(vectors):
            weight, vector = vectors[island]
            part = np.float32(weight / total) * vector
            total_vector = part if total_vector is None else total_vector + part
    assert total_vector is not None
    return total_vector
