"""The load of the busiest device of an expert-parallel group, over the mean.

Without a capacity, every expert takes all tokens that are routed to it, and everybody waits for the
device whose experts got the most. Its load over the mean load is

    1 + v z(n),   v^2 = (1 - 1/n) / m + s^2 / e

with n devices, m assignments (tokens x experts per token) for each of them on average, e experts on
each. The first part of v^2 is chance: m of n m throws hit a device (multinomial). The second is
skew: in a batch some experts are more popular than others, with a coefficient of variation s, and e
of them share a device. z(n) is the expected largest of n standard normal variables, Blom's
approximation (Statistical Estimates and Transformed Beta-Variables, 1958): the normal quantile of
(n - 3/8) / (n + 1/4). The normal law holds where m is not small; a device never does more than
everything.

>>> many = load_factor(np.array([1e5]), np.array([8]), 1, skew=0.0)
>>> round(float(many[0]), 4), float(load_factor(np.array([100.0]), np.array([1]), 8)[0])
(1.0042, 1.0)
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Coefficient of variation of the load of experts in training with a balancing loss: assumed, after
#: arXiv:2408.15664 (Wang et al., 2024), where the busiest of 64 experts takes 0.5 to 0.7 more than
#: the mean with an auxiliary loss, which is 2.4 standard deviations, and 0.04 with their biases.
BALANCED = 0.25
#: The same where routing is forced to be uniform, as benchmarks do.
FORCED = 0.0


def load_factor(
    assignments: Array, devices: NDArray[np.int64], experts: float, skew: float = BALANCED
) -> Array:
    """Load of the busiest device over the mean, by candidate."""
    n = np.asarray(devices, dtype=np.float64)
    chance = (1 - 1 / n) / np.maximum(assignments, 1.0)
    popularity = np.where(n > 1, skew**2 * n / experts * (1 - 1 / n), 0.0)
    largest = np.array([_largest(int(count)) for count in np.ravel(devices)]).reshape(
        np.shape(devices)
    )
    return np.minimum(1 + np.sqrt(chance + popularity) * largest, n)


def dropped_share(assignments: float, experts: int, factor: float, skew: float = BALANCED) -> float:
    """Part of the assignments that experts with a capacity are expected to drop.

    The load of an expert over the mean is taken as normal around 1, with v^2 = (1 - 1/e) (1/m +
    s^2) for m assignments to each of e experts on average: the formula of `load_factor` with an
    expert on every device. What is beyond the factor c is dropped: v phi(z) - (c - 1) (1 - Phi(z))
    with z = (c - 1) / v, the loss function of the normal law (Zipkin, Foundations of Inventory
    Management, 2000).

    Args:
        assignments: tokens that are routed together times experts per token.
        experts: number of experts.
        factor: load that an expert takes at most, over the mean.
        skew: coefficient of variation of the popularity of experts.

    >>> round(dropped_share(1e6, 64, 1.25), 4), round(dropped_share(1e6, 64, 1.25, skew=0.0), 4)
    (0.0204, 0.0)
    """
    spread = math.sqrt((1 - 1 / experts) * (experts / max(assignments, 1.0) + skew**2))
    if spread == 0:
        return max(0.0, 1 - factor)
    z, law = (factor - 1) / spread, NormalDist()
    return max(0.0, spread * law.pdf(z) - (factor - 1) * (1 - law.cdf(z)))


@lru_cache(maxsize=1024)
def _largest(count: int) -> float:
    """Expected largest of so many standard normal variables."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
