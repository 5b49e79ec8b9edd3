"""How well does the last byte alone predict the next one? The baseline that a trained model must beat.

>>> text = np.frombuffer(b"abababab", np.uint8)
>>> round(cross_entropy(fit(text, smoothing=0.01), text), 2)
0.54
"""

from __future__ import annotations

import numpy as np


def fit(training: np.ndarray, *, smoothing: float = 1.0) -> np.ndarray:
    """Log probabilities [previous byte, next byte], float64, of a byte bigram model with additive smoothing.

    Args:
        training: uint8 [bytes].
        smoothing: added to every count.
    """
    pairs = training[:-1].astype(np.int64) * 256 + training[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + smoothing
    return np.log(counts / counts.sum(1, keepdims=True))


def cross_entropy(log_probabilities: np.ndarray, text: np.ndarray) -> float:
    """Mean cross entropy in nats a byte of `text` [bytes] after its first byte."""
    return float(-log_probabilities[text[:-1], text[1:]].mean())


def batches_cross_entropy(log_probabilities: np.ndarray, batches: list[dict[str, np.ndarray]]) -> float:
    """The same over the inputs and targets of batches: exactly the predictions that a model is measured on."""
    return float(np.mean([-log_probabilities[batch["inputs"], batch["targets"]].mean() for batch in batches]))
