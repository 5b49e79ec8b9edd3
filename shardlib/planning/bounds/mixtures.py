"""The least time of mixtures of policies that fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def mixed(points: Sequence[tuple[Array, Array]], capacity: float) -> Array:
    """The least seconds of all mixtures of some points that are no larger than a capacity, by
    candidate; infinite where there is none.

    Args:
        points: (seconds, bytes) by candidate; a mixture of two lies on the straight line between
            them, or above.
        capacity: bytes.
    """
    fastest = np.minimum.reduce([np.where(size <= capacity, time, np.inf) for time, size in points])
    for (quick, large), (slow, small) in itertools.permutations(points, 2):
        improved = np.flatnonzero((large > capacity) & (small <= capacity) & (quick < fastest))
        share = (large[improved] - capacity) / (large[improved] - small[improved])
        fastest[improved] = np.minimum(
            fastest[improved], quick[improved] + (slow[improved] - quick[improved]) * share
        )
    return fastest
