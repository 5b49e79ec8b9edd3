"""What a server does with a gradient: plain SGD or Adagrad, in float32, element by element.

Adagrad is that of `optax.adagrad` (Duchi et al., 2011), with the same epsilon:

>>> import numpy as np
>>> one = np.float32([1.0])
>>> value, square = applied("adagrad", 0.5, np.float32([2.0]), np.float32([3.0]), one)
>>> float(square[0]), float(value[0])  # 3 + 1, 2 - 0.5 / sqrt(4)
(4.0, 1.75)
"""

from __future__ import annotations

import numpy as np

from shardlib.exchanges.asynchronous import Asynchronous, Rule

#: Beside the sum of squares, as in `optax.adagrad`.
EPSILON = np.float32(1e-7)


def rate_of(exchange: Asynchronous, staleness: int) -> float:
    """The rate of a gradient that is so stale."""
    return exchange.rate / (1 + staleness) if exchange.by_staleness else exchange.rate


def applied(
    rule: Rule, rate: float, value: np.ndarray, squares: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters and sums of squares after a gradient; new arrays."""
    if rule == "sgd":
        return value - np.float32(rate) * gradient, squares
    squares = squares + gradient * gradient
    inverse = np.where(squares > 0, 1 / np.sqrt(squares + EPSILON), np.float32(0))
    return value - np.float32(rate) * (inverse * gradient), squares
