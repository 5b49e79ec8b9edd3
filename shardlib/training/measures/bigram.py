"""How well the last byte alone predicts the next one: the baseline that a trained model must beat.

>>> text = np.frombuffer(b"abababab", np.uint8)
>>> batch = {"inputs": text[None, :-1], "targets": text[None, 1:]}
>>> round(cross_entropy(fit([batch], smoothing=0.01), [batch]), 2)
0.54
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

#: Of a batch: "inputs" and "targets" [batch, seq], bytes.
Batch = Mapping[str, np.ndarray]


def fit(batches: Iterable[Batch], *, smoothing: float = 1.0) -> np.ndarray:
    """Log probabilities [previous byte, next byte], float64, of a byte bigram model with additive
    smoothing.

    Args:
        batches: what it learns from.
        smoothing: added to every count.
    """
    counts = np.full(256 * 256, smoothing)
    for batch in batches:
        pairs = batch["inputs"].astype(np.int64) * 256 + batch["targets"]
        counts += np.bincount(pairs.ravel(), minlength=256 * 256)
    table = counts.reshape(256, 256)
    return np.log(table / table.sum(1, keepdims=True))


def cross_entropy(log_probabilities: np.ndarray, batches: Iterable[Batch]) -> float:
    """Mean cross entropy in nats a byte over the predictions of batches of equal size.

    Args:
        log_probabilities: of the next byte, [256, 256].
        batches: with "inputs" and "targets", bytes [batch, seq] each.
    """
    return float(
        np.mean([-log_probabilities[batch["inputs"], batch["targets"]].mean() for batch in batches])
    )
